"""Samplers that choose rows in proportion to priorities (Schaul et al. 2016, arXiv:1511.05952)."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lit_collect.replay.boundaries import Boundaries, Positions
from lit_collect.replay.drawing import Drawn, Sampler
from lit_collect.replay.rows import StoredRows, as_tensor
from lit_collect.replay.slices import SliceShape, can_slice
from lit_collect.replay.sumtree import SumTree

_TRIES = 64  # draws per slice that is wanted, before the rows to choose from are listed one by one
_MANY = 2048  # draws that cost less than listing them
_SHARES = (np.arange(_TRIES) + 0.5) / _TRIES  # of all priorities, where rows are looked for without random numbers


class PrioritizedSampler(Sampler):
    """Rows with chances in proportion to ``(priority + eps) ** alpha``, with replacement.

    New rows have the largest priority that was ever given (1 before any), so that each is seen soon; rows that are
    overwritten or lost have none. The importance weights of a sample are ``(N * chance) ** -beta``, divided by the
    largest of the sample.

    Args:
        alpha: how much priorities count; 0: not at all.
        beta: how far weights make up for the chances; 1: fully. May be set at any time, as `beta`: it is common to let
            it grow to 1.
        eps: added to each priority, so that none is 0 for ever.

    Example:
        >>> from lit_collect.replay import ReplayBuffer
        >>> from tensordict import TensorDict
        >>> import torch
        >>> buffer = ReplayBuffer(8, batch_size=4, sampler=PrioritizedSampler(alpha=1.0, eps=0.0))
        >>> positions = buffer.extend(TensorDict({"reward": torch.arange(3.0)}, batch_size=[3]))
        >>> buffer.update_priority(positions, torch.tensor([0.0, 2.0, 0.0]))
        >>> buffer.sample()["reward"]
        tensor([1., 1., 1., 1.])
    """

    has_priorities: ClassVar[bool] = True

    def __init__(self, *, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-6) -> None:
        self._priorities = Priorities(alpha, eps)
        self.beta = beta

    @property
    def alpha(self) -> float:
        """How much priorities count."""
        return self._priorities.alpha

    @property
    def beta(self) -> float:
        """How far weights make up for the chances."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = checked("beta", beta)

    @property
    def runs_out(self) -> bool:
        """Without `eps` all priorities may come to be 0."""
        return self._priorities.may_be_none

    @property
    def max_priority(self) -> float:
        """The largest priority that was ever given; new rows have it."""
        return self._priorities.largest

    def begin(self, rows: StoredRows) -> None:
        """No row has a priority."""
        self._priorities.begin(rows)

    def appended(self, rows: StoredRows, positions: Positions) -> None:
        """New rows have the largest priority."""
        self._priorities.appended(rows, positions)

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[batch_size] rows with weights; of each equal part of all priorities one."""
        rows.check_not_empty()
        positions = self._priorities.draw(rng, batch_size)
        return Drawn(positions=positions, weights=self._priorities.weights(positions, self.beta))

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether a row has a priority."""
        return rows.size > 0 and self._priorities.can_draw()

    def update_priority(self, rows: StoredRows, positions: Positions, priorities: NDArray) -> None:
        """Change the priorities of rows.

        Args:
            rows: of the buffer, caught up.
            positions: any shape; padding (-1) and places without a row are left alone. Of a row that comes several
                times the last priority counts.
            priorities: as many, not negative and finite.

        Raises:
            ValueError: if there are not as many, or one is negative, NaN or infinite, naming the position; none is
                changed then.
        """
        self._priorities.update(rows, positions, priorities)

    def state_dict(self) -> dict[str, Any]:
        """Priorities and `beta`."""
        return {**self._priorities.state_dict(), "beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the priorities of a state."""
        self._priorities.load_state_dict(state)
        self.beta = state["beta"]


class PrioritizedSliceSampler(PrioritizedSampler):
    """Slices whose first rows have chances in proportion to their priorities, among those where slices may begin.

    Which rows these are is said in `SliceSampler`. Priorities are given row by row. The weight of a slice is that of
    its first row.

    Args:
        slice_len: rows of a slice: a sample is batch_size / slice_len of them.
        num_slices: slices of a sample, instead of their length.
        strict_length: whether slices must be whole.
        alpha: as in `PrioritizedSampler`, like the following.
        beta: how far weights make up for the chances.
        eps: added to each priority.
    """

    draws_slices: ClassVar[bool] = True
    needs_order: ClassVar[bool] = True

    def __init__(
        self,
        slice_len: int | None = None,
        num_slices: int | None = None,
        *,
        strict_length: bool = True,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(alpha=alpha, beta=beta, eps=eps)
        self.shape = SliceShape(slice_len, num_slices)
        self.strict_length = strict_length

    def check_batch_size(self, batch_size: int) -> None:
        """Raise unless slices share the rows evenly."""
        self.shape.of(batch_size)

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[S, L] slices with weights."""
        count, length = self.shape.of(batch_size)
        rows.check_not_empty()
        starts = self._priorities.draw_starts(rows.boundaries, rng, count, length, or_short=not self.strict_length)
        walked = rows.walk(starts, length)
        weights = np.where(walked >= 0, self._priorities.weights(starts, self.beta)[:, None], np.float32(0))
        return Drawn(positions=walked, weights=weights, padded=not self.strict_length)

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether a trajectory is long enough, and a row where a slice may begin has a priority."""
        if not can_slice(rows, self.shape, batch_size, strict_length=self.strict_length):
            return False
        length = self.shape.of(batch_size)[1]
        return self._priorities.can_draw_starts(rows.boundaries, length, or_short=not self.strict_length)


class Priorities:
    """The priorities of all rows, as ``(priority + eps) ** alpha``.

    Args:
        alpha: how much they count.
        eps: added to each.
    """

    def __init__(self, alpha: float, eps: float) -> None:
        self.alpha = checked("alpha", alpha)
        self._eps = checked("eps", eps)
        self.largest = 1.0
        self._tree = SumTree(1)

    @property
    def may_be_none(self) -> bool:
        """Whether a row whose priority is 0 is never drawn."""
        return not self._scaled(np.array(0.0)) > 0

    def begin(self, rows: StoredRows) -> None:
        """All are 0; the largest that was given stays."""
        self._tree = SumTree(rows.capacity)

    def appended(self, rows: StoredRows, positions: Positions) -> None:
        """Rows were written: they have the largest one, those that were lost have none."""
        new = float(self._scaled(np.array(self.largest)))
        good = rows.is_valid(positions)
        self._tree.set(positions, new if good.all() else np.where(good, new, 0.0))

    def draw(self, rng: np.random.Generator, count: int) -> Positions:
        """[count] positions."""
        self._check_total()
        found = self._tree.find((np.arange(count) + rng.random(count)) / count)
        while (none := np.flatnonzero(self._tree.values.take(found) <= 0)).size:
            found[none] = self._tree.find(rng.random(none.size))
        rng.shuffle(found)
        return found

    def draw_starts(
        self, boundaries: Boundaries, rng: np.random.Generator, count: int, length: int, *, or_short: bool
    ) -> Positions:
        """[count] positions where slices may begin, see `Boundaries.draw_starts`."""
        self._check_total()
        if not boundaries.has_piece_of(1 if or_short else length):
            boundaries.starts(length, or_short=or_short)  # says what there is
        drawn = np.empty(count, np.int64)
        have, tries, size = 0, max(_MANY, _TRIES * count), 2 * count + 16
        while have < count and tries > 0:
            trial = self._tree.find(rng.random(size))
            good = boundaries.may_start(trial, length, or_short=or_short) & (self._tree.values.take(trial) > 0)
            trial = trial[good][: count - have]
            drawn[have : have + len(trial)] = trial
            have, tries, size = have + len(trial), tries - size, min(4 * size, _MANY)
        if have < count:
            drawn[have:] = self._draw_listed(boundaries.starts(length, or_short=or_short), rng, count - have)
        return drawn

    def can_draw(self) -> bool:
        """Whether `draw` finds a row."""
        return 0 < self._tree.total < math.inf

    def can_draw_starts(self, boundaries: Boundaries, length: int, *, or_short: bool) -> bool:
        """Whether `draw_starts` finds a row; there is one where slices may begin, whatever its priority."""
        if not self.can_draw():
            return False
        trial = self._tree.find(_SHARES)  # nearly always there is one among these
        if (boundaries.may_start(trial, length, or_short=or_short) & (self._tree.values.take(trial) > 0)).any():
            return True
        return bool((self._tree.values.take(boundaries.starts(length, or_short=or_short)) > 0).any())

    def weights(self, positions: Positions, beta: float) -> NDArray[np.float32]:
        """[M] importance weights of drawn rows."""
        values = self._tree.values.take(positions)
        return ((values.min(initial=np.inf) / values) ** beta).astype(np.float32)

    def update(self, rows: StoredRows, positions: Positions, priorities: NDArray) -> None:
        """Change some, see `PrioritizedSampler.update_priority`."""
        places = np.asarray(positions, np.int64).reshape(-1)
        given = np.asarray(priorities, np.float64).reshape(-1)
        if len(places) != len(given):
            raise ValueError(f"priorities do not fit the rows : expected {len(places)} of them, got {len(given)}")
        if not len(places):
            return
        low, high = given.min(), given.max()
        if not (low >= 0 and high < math.inf):
            wrong = int(np.flatnonzero(~((given >= 0) & (given < math.inf)))[0])
            raise ValueError(
                f"the priority of the row at position {places[wrong]} is {given[wrong]} : expected a finite number "
                f"that is not negative (entry {wrong} of those given); no priority was changed"
            )
        if places.min() < -1 or places.max() >= rows.capacity:
            raise ValueError(
                f"positions must be from 0 to {rows.capacity - 1}, or -1 for padding, got {places.min()} to "
                f"{places.max()}"
            )
        good = rows.is_valid(places)
        if not good.all():
            places, given = places[good], given[good]
        self.largest = max(self.largest, float(given.max(initial=0.0)))
        self._tree.set(places, self._scaled(given))

    def state_dict(self) -> dict[str, Any]:
        """All of them as a tensor."""
        return {"priorities": as_tensor(self._tree.values), "max_priority": self.largest, "alpha": self.alpha}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them from a state.

        Raises:
            ValueError: if it is of another alpha or capacity.
        """
        values, alpha = state["priorities"].numpy(), state["alpha"]
        if alpha != self.alpha or len(values) != len(self._tree.values):
            raise ValueError(
                f"the state is of another prioritized sampler : expected alpha={self.alpha} and "
                f"{len(self._tree.values)} rows, got alpha={alpha} and {len(values)} rows"
            )
        there = self._tree.values > 0  # rows that were written after the state are not
        self._tree.set(np.arange(len(values)), np.where(there, values, 0.0))
        self.largest = float(state["max_priority"])

    def _scaled(self, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        return (priorities + self._eps) ** self.alpha

    def _draw_listed(self, table: NDArray[np.integer], rng: np.random.Generator, count: int) -> Positions:
        """Draw from rows that are listed."""
        sums = np.cumsum(self._tree.values.take(table))
        if sums[-1] <= 0:
            raise ValueError(
                "no row where a slice may begin has a priority : expected one above 0, got only 0; take eps above 0"
            )
        places = np.searchsorted(sums, rng.random(count) * sums[-1], side="right")
        return table[np.minimum(places, int(np.searchsorted(sums, sums[-1])))]  # the last one that is not 0

    def _check_total(self) -> None:
        if not self.can_draw():
            raise ValueError(
                f"priorities add up to {self._tree.total} : expected a finite sum above 0; take eps above 0 and "
                "priorities that are not so large"
            )


def checked(name: str, value: float) -> float:
    """A setting that must be a finite number, not negative.

    Args:
        name: of the setting.
        value: of it.

    Raises:
        ValueError: if it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number that is not negative, got {value!r}")
    return float(value)
