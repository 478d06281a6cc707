"""`StoredRows`: what a sampler sees of a storage, brought up to date by looking at what was written since.

Who wrote the rows, this process or another one, and when, in this run or before a crash, makes no difference: whatever
is known of rows besides their contents is derived from them, in the order in which they were written.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from lit_collect.frames import IS_INIT, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, TRAJ_IDS, Key
from lit_collect.replay.boundaries import Boundaries, Positions
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.storage import Storage

_LOOK_BYTES = 32 * 2**20  # rows that are read at once when boundaries are derived
_LOOK_ROWS = 2**18
_SMALL_BYTES = 4096  # up to this size whole rows are read, of larger ones only the leaves that are looked at
_NONE = np.empty(0, np.int64)


class StoredRows:
    """The rows of a storage; used while the storage is, see `Storage.use`.

    Args:
        storage: opened.
    """

    def __init__(self, storage: Storage) -> None:
        self.learner_version = 0
        """Version of the weights that learn, from which the age of rows is counted."""
        self._storage = storage
        self._epoch = storage.epoch
        self._seen = 0  # rows that had been written
        self._extent = 0  # positions that were ever used
        self._holes = np.zeros(0, np.bool_)  # of each position: no row that may be read; empty until there is one
        self._num_holes = 0
        self._serials: NDArray[np.int64] | None = None  # of each position, where the writer chooses places
        self._boundaries: Boundaries | None = None
        self._linked = 0  # rows that had been written when boundaries were derived

    @property
    def capacity(self) -> int:
        """Rows at most."""
        return self._storage.capacity

    @property
    def write_count(self) -> int:
        """Rows that had been written at the last look."""
        return self._seen

    @property
    def epoch(self) -> int:
        """The storage's at the last look: where it changed, all rows are new."""
        return self._epoch

    @property
    def extent(self) -> int:
        """Places that were ever used: rows lie below this position."""
        return self._extent

    @property
    def size(self) -> int:
        """Rows that may be read."""
        return self._extent - self._num_holes

    @property
    def in_order(self) -> bool:
        """Whether rows replaced the oldest ones, so that it is known which followed which."""
        return self._serials is None

    def know_serials(self, serials: NDArray[np.int64]) -> None:
        """Take from a state which row lies where, for a writer that chooses places of its own.

        Args:
            serials: [extent], as `serials` gave them.
        """
        self._serials = np.full(self.capacity, -1, np.int64)
        self._serials[: self._extent] = serials
        self._holes = self._serials < 0
        self._num_holes = int(self._holes[: self._extent].sum())
        self._boundaries, self._linked = None, 0

    @property
    def boundaries(self) -> Boundaries:
        """Which rows follow each other, as far as rows are known from the last look.

        Derived when it is asked for, from rows that were written since it was the last time.
        """
        none_left = self._seen - self._linked >= self.capacity  # of the rows that boundaries are known of
        boundaries = Boundaries(self.capacity) if self._boundaries is None or none_left else self._boundaries
        if self._linked < self._seen:
            if self.in_order:
                self._link_since(boundaries, max(self._linked, self._seen - self.capacity))
            else:  # all are rows on their own
                places = self.in_writing_order()
                boundaries.append(places, None, np.ones(len(places), np.bool_))
            self._linked = self._seen
        self._boundaries = boundaries
        return boundaries

    def catch_up(self, positions: Positions | None = None) -> Positions:
        """Look at what was written since the last look.

        Args:
            positions: [M], where the rows lie that were written since the last look, in the order of writing; for a
                writer that chooses places of its own. None: they lie over the oldest ones in turn.

        Returns:
            [K], positions whose rows are new, in the order of writing: at most the capacity, no place twice, those of
            lost rows included. If `epoch` changed, all that there are.

        Raises:
            ValueError: if the number of positions is not that of the rows written, or they are missing although they
                were given before.
        """
        count = self._storage.write_count
        if self._storage.epoch != self._epoch:
            self._forget()
        if count == self._seen:
            return _NONE
        if positions is not None:
            return self._note_places(positions, count)
        if self._serials is not None:
            raise ValueError("rows were written in turn : expected positions, as for all rows before; give them")
        new = np.arange(max(self._seen, count - self.capacity), count)
        new %= self.capacity
        self._seen, self._extent = count, min(count, self.capacity)
        self._note_holes(new)
        return new

    def is_valid(self, positions: Positions) -> NDArray[np.bool_]:
        """Whether there is a row, and not a lost one.

        Args:
            positions: any shape.
        """
        good = (positions >= 0) & (positions < self._extent)
        return good & ~self._holes[positions] if self._num_holes else good

    def serials(self, positions: Positions) -> NDArray[np.int64]:
        """Serial numbers of rows: the k-th that was written has k, -1 where there is none.

        Args:
            positions: any shape.
        """
        if self._serials is not None:
            return np.where(positions >= 0, self._serials[positions], -1)
        if self._seen < self.capacity:
            found = np.where(positions < self._seen, positions, -1)
        else:
            oldest = self._seen - self.capacity
            found = (positions - oldest) % self.capacity + oldest
        if found.size and positions.min() < 0:
            found[positions < 0] = -1
        if self._num_holes:
            found[self._holes[positions]] = -1
        return found

    def draw_rows(self, rng: np.random.Generator, count: int) -> Positions:
        """Draw rows, each with the same chance, with replacement.

        Args:
            rng: where the random numbers come from.
            count: how many.

        Returns:
            [count].

        Raises:
            ValueError: if there is none.
        """
        self.check_not_empty()
        drawn = rng.integers(0, self._extent, count)
        while self._num_holes and (lost := np.flatnonzero(self._holes[drawn])).size:
            drawn[lost] = rng.integers(0, self._extent, lost.size)
        return drawn

    def check_not_empty(self) -> None:
        """Raise if there are no rows.

        Raises:
            ValueError: saying so.
        """
        if self.size == 0:
            raise ValueError("the buffer is empty : expected rows to sample from, got none; extend it before")

    def has(self, key: Key) -> bool:
        """Whether rows have a leaf of that key."""
        return self._storage.layout is not None and key in self._storage.layout.keys

    def column(self, key: Key) -> NDArray:
        """One leaf of all rows, a view: [capacity, *shape of the leaf].

        Raises:
            KeyError: if rows have no such leaf, or none was ever written.
        """
        if not self.has(key):
            raise KeyError(key)
        return self._column(self._records, key)

    def read(self, positions: Positions) -> NDArray:
        """Rows, copied: records of the storage's layout.

        Args:
            positions: any shape; -1 gives some row.
        """
        return self._storage.take(positions)

    def values(self, key: Key, positions: Positions) -> NDArray:
        """One leaf of some rows, copied: [K, *shape of the leaf].

        Args:
            key: of the leaf.
            positions: [K].

        Raises:
            KeyError: if rows have no such leaf.
        """
        if not self.has(key):
            raise KeyError(key)
        if self._layout.dtype.itemsize > _SMALL_BYTES:
            return self.column(key)[positions]
        return self._column(self.read(positions), key).copy()

    def walk(self, positions: Positions, steps: int) -> Positions:
        """The rows that followed some rows: see `Boundaries.walk`."""
        return self.boundaries.walk(positions, steps)

    def ahead(self, positions: Positions) -> NDArray[np.int64]:
        """How many rows are known from some rows on: see `Boundaries.ahead`."""
        return self.boundaries.ahead(positions)

    def in_writing_order(self) -> Positions:
        """All rows, [size], the oldest first."""
        if self._serials is not None:
            places = np.flatnonzero(self._serials[: self._extent] >= 0)
            return places[np.argsort(self._serials[places], kind="stable")]
        places = np.arange(self._seen - self._extent, self._seen) % self.capacity
        return places[~self._holes[places]] if self._num_holes else places

    @property
    def _at_once(self) -> int:
        """Rows that are looked at at once."""
        return min(max(_LOOK_BYTES // self._layout.dtype.itemsize, 1), _LOOK_ROWS, self.capacity)

    @property
    def _layout(self) -> RowLayout:
        assert self._storage.layout is not None
        return self._storage.layout

    @property
    def _records(self) -> NDArray:
        assert self._storage.records is not None
        return self._storage.records

    def _column(self, records: NDArray, key: Key) -> NDArray:
        return records[self._layout.field(key)]

    def _forget(self) -> None:
        """Know nothing, as before the first look."""
        self._epoch = self._storage.epoch
        self._seen = self._extent = self._num_holes = 0
        self._holes = np.zeros(0, np.bool_)
        self._serials = self._boundaries = None
        self._linked = 0

    def _note_holes(self, new: Positions) -> None:
        """Note which of the new rows are lost; older ones that were are replaced."""
        lost = self._storage.is_void
        if lost is None and not self._num_holes:
            return
        if not len(self._holes):
            self._holes = np.zeros(self.capacity, np.bool_)
        now = np.zeros(len(new), np.bool_) if lost is None else lost[new]
        self._num_holes += int(now.sum()) - int(self._holes[new].sum())
        self._holes[new] = now

    def _note_places(self, positions: Positions, count: int) -> Positions:
        """Take in rows that lie where their writer wanted them."""
        if len(positions) != count - self._seen:
            raise ValueError(
                f"positions are not those of the rows written since the last look : expected {count - self._seen}, got "
                f"{len(positions)}"
            )
        if self._serials is None:
            serials = np.full(self.capacity, -1, np.int64)
            serials[: self._extent] = self.serials(np.arange(self._extent))
            self._serials = serials
            self._holes = np.ones(self.capacity, np.bool_) if not len(self._holes) else self._holes
            self._holes[: self._extent] = serials[: self._extent] < 0
            self._holes[self._extent :] = True
        self._serials[positions] = np.arange(self._seen, count)
        new = np.unique(positions)
        self._holes[new] = False
        self._extent = max(self._extent, int(new[-1]) + 1)
        self._num_holes = int(self._holes[: self._extent].sum())
        self._seen = count
        new = new[np.argsort(self._serials[new])]
        self._boundaries, self._linked = None, 0  # what followed what is not known any more
        return new

    def _link_since(self, boundaries: Boundaries, since: int) -> None:
        """Derive boundaries of the rows that were written from a serial number on, a part of them at a time."""
        step = self._at_once
        for first in range(since, self._seen, step):
            places = np.arange(first, min(first + step, self._seen)) % self.capacity
            for whole in self._between_holes(boundaries, places):
                look = self._look_at(whole)
                ids = look(TRAJ_IDS)
                ends = look(NEXT_DONE)
                if ends is None:
                    ends = np.zeros(len(whole), np.bool_)
                    for flag in (look(NEXT_TERMINATED), look(NEXT_TRUNCATED)):
                        ends |= _any(flag, whole)
                begins = look(IS_INIT)
                boundaries.append(
                    whole,
                    None if ids is None else ids.reshape(-1),
                    _any(ends, whole),
                    None if begins is None else _any(begins, whole),
                )

    def _between_holes(self, boundaries: Boundaries, places: Positions) -> Iterator[Positions]:
        """Runs of rows without a lost one between them; what was lost may have been of any trajectory."""
        lost = np.flatnonzero(self._holes[places]) if self._num_holes else _NONE
        if not lost.size:
            yield places
            return
        start = 0
        for hole in (*lost.tolist(), len(places)):
            if hole > start:
                yield places[start:hole]
            if hole < len(places):
                boundaries.remove(places[hole : hole + 1])
                boundaries.close_all()
            start = hole + 1

    def _look_at(self, positions: Positions) -> Callable[[Key], NDArray | None]:
        """Some rows, leaf by leaf, None for a leaf that rows have not."""
        if self._layout.dtype.itemsize <= _SMALL_BYTES:
            records = self.read(positions)
            return lambda key: self._column(records, key) if self.has(key) else None
        return lambda key: self.column(key)[positions] if self.has(key) else None


def _any(flags: NDArray | None, positions: Positions) -> NDArray[np.bool_]:
    """[M] bool: any of the truth values of a row."""
    if flags is None:
        return np.zeros(len(positions), np.bool_)
    return np.any(flags.reshape(len(positions), -1), axis=1)


def as_tensor(values: NDArray) -> torch.Tensor:
    """A copy as a tensor, for a state."""
    return torch.from_numpy(np.array(values))
