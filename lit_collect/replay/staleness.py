"""Samplers that know how often and how late a row is used: `ConsumingSampler` and `StalenessSampler`."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lit_collect.errors import StaleDataError
from lit_collect.frames import POLICY_VERSION
from lit_collect.replay.boundaries import Positions
from lit_collect.replay.drawing import Drawn, Sampler
from lit_collect.replay.rows import StoredRows, as_tensor

_AT_ONCE = 2**16  # rows of which versions are looked at at once, when there are very many
_LOST = np.iinfo(np.int64).min  # in place of the version of a row that was lost


class ConsumingSampler(Sampler):
    """Each row at most so many times, and never twice in one sample; a row that is used up is drawn no more.

    Args:
        max_uses: how often a row may be drawn.

    Example:
        >>> from lit_collect.replay import ReplayBuffer
        >>> from tensordict import TensorDict
        >>> import torch
        >>> buffer = ReplayBuffer(8, batch_size=2, sampler=ConsumingSampler())
        >>> _ = buffer.extend(TensorDict({"reward": torch.arange(5.0)}, batch_size=[5]))
        >>> used = torch.cat([buffer.sample()["reward"], buffer.sample()["reward"]])
        >>> len(used.unique()), buffer.can_sample()
        (4, False)
    """

    def __init__(self, max_uses: int = 1) -> None:
        if isinstance(max_uses, bool) or not isinstance(max_uses, int) or max_uses < 1:
            raise ValueError(f"max_uses must be an integer of at least 1, got {max_uses!r}")
        self.max_uses = max_uses
        self.num_left = 0
        """Rows that may be drawn."""
        self._left: NDArray[np.integer] = np.empty(0, np.int64)  # their positions, the first `num_left` entries
        self._place: NDArray[np.integer] = np.empty(
            0, np.int64
        )  # of each position: where it stands among them; -1 if it does not
        self._uses = np.empty(0, np.int32)

    @property
    def runs_out(self) -> bool:
        """Rows are used up."""
        return True

    def begin(self, rows: StoredRows) -> None:
        """No row may be drawn."""
        self.num_left = 0
        index: type[np.signedinteger] = np.int32 if rows.capacity < 2**31 else np.int64
        self._left = np.empty(rows.capacity, index)
        self._place = np.full(rows.capacity, -1, index)
        self._uses = np.zeros(rows.capacity, np.int32)

    def appended(self, rows: StoredRows, positions: Positions) -> None:
        """New rows have not been used."""
        self._uses[positions] = 0
        good = rows.is_valid(positions)
        self._remove(positions[~good])
        fresh = positions[good & (self._place[positions] < 0)]
        self._left[self.num_left : self.num_left + len(fresh)] = fresh
        self._place[fresh] = np.arange(self.num_left, self.num_left + len(fresh))
        self.num_left += len(fresh)

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[batch_size] different rows."""
        rows.check_not_empty()
        if self.num_left < batch_size:
            raise ValueError(
                f"too few rows are left : expected {batch_size} that were used fewer than {self.max_uses} times, got "
                f"{self.num_left}; collect more, or raise max_uses"
            )
        drawn = self._left[rng.choice(self.num_left, batch_size, replace=False)].astype(np.int64)
        self._uses[drawn] += 1
        self._remove(drawn[self._uses[drawn] >= self.max_uses])
        return Drawn(positions=drawn)

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether enough rows are left."""
        return self.num_left >= batch_size

    def state_dict(self) -> dict[str, Any]:
        """Which rows are left, and how often they were used."""
        left = self._left[: self.num_left]
        return {"left": as_tensor(left), "uses": as_tensor(self._uses[left])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the rows that were left."""
        left = state["left"].numpy()
        left = left[self._place[left] >= 0]  # rows that were written after the state are not there
        self.num_left = len(left)
        self._place[:] = -1
        self._left[: len(left)], self._place[left] = left, np.arange(len(left))
        self._uses[state["left"].numpy()] = state["uses"].numpy()

    def _remove(self, positions: Positions) -> None:
        """Take rows out; the last ones take their places."""
        places = self._place[positions]
        places, positions = places[places >= 0], positions[places >= 0]
        self._place[positions] = -1
        self.num_left -= len(places)
        tail = self._left[self.num_left : self.num_left + len(places)]
        staying = tail[self._place[tail] >= 0]
        free = places[places < self.num_left]
        self._left[free], self._place[staying] = staying, free


Weighting = Callable[[NDArray[np.int64]], NDArray]
"""From ages [V] int64 to weights [V], not negative and finite."""


def inverse(ages: NDArray[np.int64]) -> NDArray:
    """Weights that fall with age: 1, 1/2, 1/3 and so on."""
    return 1.0 / (ages + 1.0)


def uniform(ages: NDArray[np.int64]) -> NDArray:
    """The same weight for all ages."""
    return np.ones(len(ages))


_WEIGHTINGS: Mapping[str, Weighting] = {"inverse": inverse, "uniform": uniform}


class StalenessSampler(Sampler):
    """Rows with chances that fall with their age, and never rows that are too old; with replacement.

    The age of a row is the learner's version minus the version of the weights that acted, 0 if that is newer. Rows
    acted at random (version -1) count as the oldest: under a bound they are never drawn. A draw looks at the versions
    that there are, not at the rows.

    Args:
        max_staleness: the largest age of a drawn row; None for no bound.
        weight: ``"inverse"`` (1 / (age + 1)), ``"uniform"``, or a function of ages [V] that gives weights [V].
    """

    needs_order: ClassVar[bool] = True

    def __init__(self, max_staleness: int | None = None, weight: str | Weighting = "inverse") -> None:
        if max_staleness is not None and (
            isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0
        ):
            raise ValueError(f"max_staleness must be None or an integer of at least 0, got {max_staleness!r}")
        if weight not in _WEIGHTINGS and not callable(weight):
            raise ValueError(f"weight must be one of {', '.join(_WEIGHTINGS)} or a function, got {weight!r}")
        self.max_staleness = max_staleness
        self.weight = weight
        self._runs = _Runs()
        self._table: tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]] | None = None

    @property
    def runs_out(self) -> bool:
        """Rows become too old with new versions of the weights."""
        return self.max_staleness is not None

    def begin(self, rows: StoredRows) -> None:
        """No version is known."""
        self._runs = _Runs()
        self._table = None

    def appended(self, rows: StoredRows, positions: Positions) -> None:
        """Take note of the versions of new rows.

        Raises:
            ValueError: if rows have no version, or their order is not known.
        """
        if not rows.in_order:
            raise ValueError("rows have no order in time : expected a ring writer with a StalenessSampler")
        if not rows.has(POLICY_VERSION):
            raise ValueError(
                f"rows hold no version of the policy : expected the key {POLICY_VERSION}; take another sampler, or "
                "batches of a Collector"
            )
        serial = rows.write_count - len(positions)
        for first in range(0, len(positions), _AT_ONCE):
            part = positions[first : first + _AT_ONCE]
            versions = rows.values(POLICY_VERSION, part).reshape(-1).astype(np.int64)
            versions[~rows.is_valid(part)] = _LOST
            self._runs.append(serial + first, versions)
        self._runs.drop_before(rows.write_count - rows.extent)
        self._table = None

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[batch_size] rows, none of them too old.

        Raises:
            StaleDataError: if all are.
        """
        rows.check_not_empty()
        starts, counts, sums = self._weighted(rows)
        if not len(sums) or sums[-1] <= 0:
            raise StaleDataError(
                f"all rows are too old : expected an age of at most {self.max_staleness} and a weight above 0, got "
                f"{self._youngest(rows)} as the smallest age; collect with newer weights, or raise max_staleness"
            )
        wanted = rng.random(batch_size) * sums[-1]
        chosen = np.searchsorted(sums, wanted, side="right")
        np.minimum(chosen, int(np.searchsorted(sums, sums[-1])), out=chosen)  # rounding: the last one with a weight
        return Drawn(positions=(starts[chosen] + rng.integers(0, counts[chosen])) % rows.capacity)

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether a row is young enough."""
        if rows.size == 0:
            return False
        sums = self._weighted(rows)[2]
        return len(sums) > 0 and float(sums[-1]) > 0

    def _weighted(self, rows: StoredRows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Runs that may be drawn from: first serial numbers, rows, and running sums of weight times rows."""
        if self._table is None or self._table[0] != rows.learner_version:
            starts, counts, versions = self._runs.live()
            ages = np.maximum(rows.learner_version - versions, 0)
            keep = versions != _LOST
            if self.max_staleness is not None:
                keep &= (ages <= self.max_staleness) & (versions >= 0)
            starts, counts, ages = starts[keep], counts[keep], ages[keep]
            self._table = rows.learner_version, starts, counts, np.cumsum(self._weights(ages) * counts)
        return self._table[1:]

    def _weights(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        weighting = _WEIGHTINGS[self.weight] if isinstance(self.weight, str) else self.weight
        weights = np.asarray(weighting(ages), np.float64)
        if weights.shape != ages.shape or not ((weights >= 0) & (weights < np.inf)).all():
            raise ValueError(
                f"weight must give finite numbers that are not negative, as many as there are ages ({len(ages)}), got "
                f"{weights!r}"
            )
        return weights

    def _youngest(self, rows: StoredRows) -> int:
        versions = self._runs.live()[2]
        return max(rows.learner_version - int(versions.max(initial=_LOST + 2**62)), 0)


class _Runs:
    """Rows in the order of writing, as runs of one version each."""

    def __init__(self) -> None:
        self._starts = np.empty(0, np.int64)  # serial number of the first row of each
        self._versions = np.empty(0, np.int64)
        self._first = self._used = 0  # which entries are runs
        self._stop = 0  # serial number after the last row

    def append(self, serial: int, versions: NDArray[np.int64]) -> None:
        """Rows follow.

        Args:
            serial: number of the first.
            versions: [M].
        """
        if serial != self._stop:  # more rows than there is room for were written meanwhile: none of the old is left
            self._first = self._used
        self._stop = serial + len(versions)
        new = np.flatnonzero(np.diff(versions)) + 1
        if self._first == self._used or self._versions[self._used - 1] != versions[0]:
            new = np.concatenate([[0], new])
        if self._used + len(new) > len(self._starts):
            self._make_room(len(new))
        self._starts[self._used : self._used + len(new)] = serial + new
        self._versions[self._used : self._used + len(new)] = versions[new]
        self._used += len(new)

    def drop_before(self, serial: int) -> None:
        """Forget rows that were overwritten: those before a serial number."""
        runs = self._starts[self._first : self._used]
        self._first += max(int(np.searchsorted(runs, serial, side="right")) - 1, 0)
        if self._first < self._used:
            self._starts[self._first] = max(self._starts[self._first], serial)

    def live(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """First serial numbers, rows and versions of all runs, oldest first."""
        starts = self._starts[self._first : self._used]
        return starts, np.diff(starts, append=self._stop), self._versions[self._first : self._used]

    def _make_room(self, more: int) -> None:
        count = self._used - self._first
        for name in ("_starts", "_versions"):
            column = np.empty(2 * (count + more), np.int64)
            column[:count] = getattr(self, name)[self._first : self._used]
            setattr(self, name, column)
        self._first, self._used = 0, count
