"""`SumTree`: rows in proportion to their priorities, and priorities that change, in the time of a few NumPy calls."""

import numpy as np
from numpy.typing import NDArray

_TOP = 2048  # sums at the top, which are added up anew for each draw: cheaper than going through them level by level


class SumTree:
    """Numbers that are never negative, and sums of pairs, of pairs of pairs, and so on.

    Sums are computed from what they are sums of, so that they do not drift, however often numbers change.

    Args:
        capacity: how many numbers; all are 0 at first.

    Example:
        >>> tree = SumTree(4)
        >>> tree.set(np.array([1, 3]), np.array([3.0, 1.0]))
        >>> tree.total, tree.find(np.array([0.0, 0.74, 0.76])).tolist()
        (4.0, [1, 1, 3])
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._levels = [np.zeros(capacity + capacity % 2)]
        while len(self._levels[-1]) > _TOP:
            half = len(self._levels[-1]) // 2
            self._levels.append(np.zeros(half + half % 2))
        self._sums: NDArray[np.float64] | None = None  # of the top, from its begin to each of it

    @property
    def total(self) -> float:
        """The sum of all numbers."""
        return float(self._top()[-1])

    @property
    def values(self) -> NDArray[np.float64]:
        """[capacity], the numbers; to be read only."""
        return self._levels[0][: self._capacity]

    def set(self, positions: NDArray[np.integer], values: NDArray[np.float64] | float) -> None:
        """Change numbers.

        Args:
            positions: [M]; of one that comes several times the last value stays.
            values: [M], or one for all.
        """
        if not len(positions):
            return
        self._levels[0][positions] = values
        self._sums = None
        first, last = int(positions.min()), int(positions.max())
        if last - first < 4 * len(positions):
            self._add_up_range(first, last)
        else:
            self._add_up(positions)

    def find(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """Where shares of the total lie, when the numbers are laid end to end.

        Args:
            shares: [M], 0 to 1.

        Returns:
            [M], positions. Rounding may lead to a number that is 0.
        """
        sums = self._top()
        wanted = shares * sums[-1]
        found = np.searchsorted(sums, wanted, side="right")
        np.minimum(found, len(sums) - 1, out=found)
        wanted -= np.where(found > 0, sums[found - 1], 0.0)
        for level in self._levels[-2::-1]:
            found *= 2
            left = level.take(found)
            beyond = wanted >= left
            found += beyond
            left *= beyond
            wanted -= left
        return np.minimum(found, self._capacity - 1, out=found)

    def _top(self) -> NDArray[np.float64]:
        if self._sums is None:
            self._sums = np.cumsum(self._levels[-1])
        return self._sums

    def _add_up(self, positions: NDArray[np.integer]) -> None:
        """Compute the sums that some numbers are in."""
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            positions = positions >> 1
            left = positions << 1
            level[positions] = below.take(left) + below.take(left + 1)

    def _add_up_range(self, first: int, last: int) -> None:
        """Compute the sums that the numbers of a range are in."""
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            first, last = first >> 1, last >> 1
            pairs = below[2 * first : 2 * last + 2]
            np.add(pairs[::2], pairs[1::2], out=level[first : last + 1])
