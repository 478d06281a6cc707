"""Which rows follow each other in time: kept up to date as rows are written, never searched for.

A *piece* is what is left of one trajectory: rows that follow each other without a gap. Its rows may lie anywhere, with
those of other env copies between them, and the oldest of them are overwritten first.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
"""Places in a buffer, 0 to capacity - 1; -1 is no row."""

_TRIES = 64  # draws per row that is wanted, before the rows to choose from are listed one by one
_MANY = 4096  # draws that cost less than listing them
_STEP_PER_ROW = 500  # a step along many pieces takes as long as looking at so many rows


class Boundaries:
    """The pieces of trajectories in a buffer.

    All of it is vectorised; only the ids of trajectories that go on from one write to the next are looked up one by
    one. Drawing starts of slices takes the same time however many rows there are.

    Args:
        capacity: rows that the buffer holds.

    Example:
        >>> boundaries = Boundaries(capacity=6)
        >>> ends = np.array([False, False, False, True])
        >>> boundaries.append(np.arange(4), np.array([7, 8, 7, 8]), ends)  # two env copies, step by step
        >>> boundaries.walk(np.array([0, 1]), 3).tolist()
        [[0, 2, -1], [1, 3, -1]]
    """

    def __init__(self, capacity: int) -> None:
        index: type[np.signedinteger] = np.int32 if capacity < 2**31 else np.int64  # millions of rows: half the memory
        # one entry more than there are rows: where -1 leads to
        self._following: NDArray[np.integer] = np.full(capacity + 1, -1, index)
        self._piece: NDArray[np.integer] = np.full(capacity + 1, -1, index)
        self._step: NDArray[np.integer] = np.zeros(capacity + 1, index)
        self._pieces = _PieceTable(index)
        self._open: dict[int, int] = {}  # trajectories that may go on: the piece of each by id
        self._extent = 0
        self._long = 0
        self._tables: dict[tuple[int, bool], NDArray[np.integer]] = {}

    @property
    def following(self) -> NDArray[np.integer]:
        """[capacity], integers: where the next row in time lies, -1 if there is none. To be read only."""
        return self._following[:-1]

    @property
    def longest(self) -> int:
        """Rows of the longest piece, 0 if there is none."""
        lengths = self._pieces.lengths()
        return int(lengths.max()) if len(lengths) else 0

    def has_piece_of(self, length: int) -> bool:
        """Whether a piece has at least so many rows.

        Args:
            length: rows.
        """
        pieces = self._pieces
        if pieces.last[self._long] - pieces.first[self._long] + 1 < length:  # the one that was found the last time
            lengths = pieces.last - pieces.first
            self._long = int(lengths.argmax())
            return int(lengths[self._long]) + 1 >= length
        return True

    def append(
        self,
        positions: NDArray[np.integer],
        ids: NDArray[np.integer] | None,
        ends: NDArray[np.bool_],
        begins: NDArray[np.bool_] | None = None,
    ) -> None:
        """Take in rows that were written, in the order of writing.

        A row continues the last one of the same trajectory if that one did not end, whatever was written in between.

        Args:
            positions: [M], where they lie, no place twice. Rows that lay there are gone; they must be the oldest of
                their pieces.
            ids: [M], the trajectory of each; negative: a row on its own. None: all are one stream, cut at its ends.
            ends: [M], the last row of a trajectory.
            begins: [M], the first row of a trajectory, whatever was there under the same id.

        Raises:
            ValueError: if a row in the middle of a piece would be replaced.
        """
        self.remove(positions)
        count = len(positions)
        if count == 0:
            return
        self._extent = max(self._extent, int(positions.max()) + 1)
        begins = np.zeros(count, np.bool_) if begins is None else begins
        if ids is None:
            ids = np.zeros(count, np.int64)
        else:
            alone = ids < 0
            if alone.any():
                begins, ends = begins | alone, ends | alone
            if (ids[1:] < ids[:-1]).any():
                order = np.argsort(ids, kind="stable")
                positions, ids, ends, begins = positions[order], ids[order], ends[order], begins[order]
        self._link(positions, ids, ends, begins)

    def remove(self, positions: NDArray[np.integer]) -> None:
        """Forget the rows at some places, if there are any.

        Args:
            positions: [M], no place twice, those of one piece in the order of time.

        Raises:
            ValueError: if they are not the oldest of their pieces.
        """
        self._tables.clear()
        slots = self._piece[positions]
        held = slots >= 0
        if not held.any():
            return
        positions, slots = positions[held], slots[held]
        order = np.argsort(slots, kind="stable")
        positions, slots = positions[order], slots[order]
        new, counts = _runs(slots[1:] != slots[:-1])
        owners, last = slots[new], positions[new + counts - 1]
        pieces = self._pieces
        if (self._step[last] - pieces.first[owners] + 1 != counts).any():
            raise ValueError("rows cannot be replaced in the middle of a piece : expected the oldest rows of it first")
        pieces.first[owners] += counts.astype(pieces.first.dtype)
        pieces.head[owners] = self._following[last]
        self._piece[positions] = -1
        self._following[positions] = -1
        dead = owners[pieces.first[owners] > pieces.last[owners]]
        for slot in dead[pieces.open[dead]].tolist():
            if self._open.get(int(pieces.id[slot])) == slot:
                del self._open[int(pieces.id[slot])]
        pieces.free(dead)

    def close_all(self) -> None:
        """Let no trajectory go on: rows are missing, and nobody knows whose they were."""
        self._pieces.open[list(self._open.values())] = False
        self._open.clear()

    def ahead(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows of the piece from some rows on, these included.

        Args:
            positions: any shape; -1 and places without a row have none.
        """
        slots = self._piece[positions]
        found = self._pieces.last[slots].astype(np.int64) - self._step[positions] + 1
        return np.where(slots >= 0, found, 0)

    def walk(self, positions: NDArray[np.integer], steps: int) -> Positions:
        """The rows from some rows on, in the order of time.

        Args:
            positions: [S], the first of each.
            steps: at least 1.

        Returns:
            [S, steps], the given ones first; -1 beyond the end of a piece.
        """
        found = np.empty((steps, len(positions)), self._following.dtype)
        found[0] = positions
        rows, lead = list(found), self._following.take
        for before, after in pairwise(rows):
            lead(before, 0, after, "wrap")  # -1 is the last entry, which leads nowhere
        return found.T.astype(np.int64, order="C")

    def draw_starts(
        self, rng: np.random.Generator, count: int, length: int, *, or_short: bool = False
    ) -> NDArray[np.int64]:
        """Draw rows where slices may begin, each with the same chance, with replacement.

        Args:
            rng: where the random numbers come from.
            count: how many.
            length: rows of a slice.
            or_short: let the first row of a piece that is shorter than a slice count, too.

        Returns:
            [count], positions.

        Raises:
            ValueError: if no piece is long enough.
        """
        drawn = np.empty(count, np.int64)
        have = 0
        # the same with or without a list at hand, so that draws depend on nothing but rows and random numbers
        tries, size = max(_MANY, _TRIES * count), 2 * count + 16
        while have < count and tries > 0 and self._extent:
            trial = rng.integers(0, self._extent, size)
            good = trial[self.may_start(trial, length, or_short=or_short)][: count - have]
            drawn[have : have + len(good)] = good
            have, tries, size = have + len(good), tries - size, min(4 * size, _MANY)
        if have < count:
            table = self.starts(length, or_short=or_short)
            drawn[have:] = table[rng.integers(0, len(table), count - have)]
        return drawn

    def may_start(self, positions: NDArray[np.integer], length: int, *, or_short: bool = False) -> NDArray[np.bool_]:
        """Whether slices may begin at some rows, as `draw_starts` has it.

        Args:
            positions: any shape.
            length: rows of a slice.
            or_short: whether the first row of a shorter piece counts.
        """
        slots = self._piece[positions]
        steps = self._step[positions]
        good = self._pieces.last[slots] - steps >= length - 1
        if or_short:
            good |= steps == self._pieces.first[slots]
        return good & (slots >= 0)

    def starts(self, length: int, *, or_short: bool = False) -> NDArray[np.integer]:
        """All rows where slices may begin: listed once, and kept until rows are written.

        Args:
            length: rows of a slice.
            or_short: whether the first row of a shorter piece counts.

        Raises:
            ValueError: if there is none.
        """
        key = (length, or_short)
        if key not in self._tables:
            heads, lengths = self.pieces()
            counts = np.maximum(lengths - length + 1, 1 if or_short else 0)
            heads, counts = heads[counts > 0], counts[counts > 0]
            if len(heads) == 0:
                raise ValueError(
                    f"no trajectory is long enough : expected slices of {length} rows, got at most {self.longest} rows "
                    "in one piece; ask for shorter slices, a sampler with strict_length=False, or collect more before"
                )
            if int(counts.max()) * _STEP_PER_ROW < self._extent:
                self._tables[key] = np.sort(np.concatenate(self._first_rows(heads, counts)))
            else:
                self._tables[key] = np.flatnonzero(self.may_start(np.arange(self._extent), length, or_short=or_short))
        return self._tables[key]

    def pieces(self) -> tuple[Positions, NDArray[np.int64]]:
        """All pieces: where the first row of each lies, and how many rows it has.

        Returns:
            Two arrays [P], in no particular order.
        """
        live = self._pieces.live()
        return self._pieces.head[live].astype(np.int64), self._pieces.lengths()

    def in_order(self) -> tuple[Positions, NDArray[np.int64]]:
        """All rows, piece by piece and in the order of time within each.

        Returns:
            [M], positions, and [P], the rows of each piece, as `pieces` gives them.
        """
        live = self._pieces.live()
        lengths = self._pieces.lengths()
        offsets = np.zeros(len(self._pieces.first), np.int64)
        offsets[live] = np.cumsum(lengths) - lengths - self._pieces.first[live]
        rows = np.flatnonzero(self._piece[: self._extent] >= 0)
        ordered = np.empty(len(rows), np.int64)
        ordered[offsets[self._piece[rows]] + self._step[rows]] = rows
        return ordered, lengths

    def _link(
        self,
        positions: NDArray[np.integer],
        ids: NDArray[np.integer],
        ends: NDArray[np.bool_],
        begins: NDArray[np.bool_],
    ) -> None:
        """Make pieces of rows that are grouped by id, or continue those that are open."""
        count, pieces = len(positions), self._pieces
        cut = begins[1:] | ends[:-1] | (ids[1:] != ids[:-1])
        self._following[positions[:-1]] = np.where(cut, -1, positions[1:])
        self._following[positions[-1]] = -1
        firsts, lengths = _runs(cut)
        lasts = firsts + lengths - 1
        names = ids[firsts]
        slots = np.full(len(firsts), -1, np.int64)
        lead = _runs(names[1:] != names[:-1])[0]  # the first fragment of each id
        slots[lead] = [self._open.get(name, -1) for name in names[lead].tolist()]
        slots[begins[firsts]] = -1
        # a trajectory of billions of rows is cut where the count of its steps would run over
        slots[(slots >= 0) & (pieces.last[slots] > np.iinfo(pieces.last.dtype).max - count)] = -1
        fresh = slots < 0
        old = slots[~fresh]
        self._following[pieces.tail[old]] = positions[firsts[~fresh]]
        slots[fresh] = pieces.take(int(fresh.sum()))
        made = slots[fresh]
        pieces.first[made], pieces.last[made] = 0, -1
        pieces.head[made] = positions[firsts[fresh]]
        pieces.id[made] = names[fresh]
        base = pieces.last[slots].astype(np.int64) + 1
        self._step[positions] = np.repeat(base - firsts, lengths) + np.arange(count)
        self._piece[positions] = np.repeat(slots, lengths)
        pieces.last[slots] = base + lengths - 1
        pieces.tail[slots] = positions[lasts]
        self._keep_open(names, slots, ~ends[lasts])

    def _keep_open(self, names: NDArray[np.integer], slots: NDArray[np.int64], goes_on: NDArray[np.bool_]) -> None:
        """Remember what may go on: of each id, its last fragment if that did not end."""
        final = np.ones(len(names), np.bool_)
        final[:-1] = names[1:] != names[:-1]
        self._pieces.open[slots] = goes_on & final
        for name, slot in zip(names[final & goes_on].tolist(), slots[final & goes_on].tolist(), strict=True):
            self._open[name] = slot
        for name in names[final & ~goes_on].tolist():
            self._open.pop(name, None)

    def _first_rows(self, heads: NDArray[np.integer], counts: NDArray[np.int64]) -> list[NDArray[np.integer]]:
        """The first rows of pieces, some of each: from all of them one step at a time."""
        found: list[NDArray[np.integer]] = []
        while len(heads):
            found.append(heads)
            counts = counts - 1
            heads, counts = self._following[heads[counts > 0]], counts[counts > 0]
        return found


def _runs(cut: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where runs begin and how long they are, from whether there is a cut before each entry but the first."""
    firsts = np.flatnonzero(cut)
    firsts += 1
    firsts = np.concatenate([[0], firsts])
    lengths = np.empty_like(firsts)
    np.subtract(firsts[1:], firsts[:-1], out=lengths[:-1])
    lengths[-1] = len(cut) + 1 - firsts[-1]
    return firsts, lengths


class _PieceTable:
    """Columns that describe pieces; the places of pieces that are gone are taken again."""

    def __init__(self, index: type[np.signedinteger]) -> None:
        self.first: NDArray[np.integer] = np.zeros(1, index)  # step of the oldest row that is left
        self.last: NDArray[np.integer] = np.full(1, -1, index)  # of the newest row; before the first if it is no piece
        self.head: NDArray[np.integer] = np.zeros(1, index)  # where the oldest row lies
        self.tail: NDArray[np.integer] = np.zeros(1, index)  # where the newest row lies
        self.id = np.zeros(1, np.int64)
        self.open = np.zeros(1, np.bool_)
        self._used = 0  # places that were ever taken
        self._free = np.empty(0, np.int64)
        self._num_free = 0

    def take(self, count: int) -> NDArray[np.int64]:
        """Places for new pieces."""
        again = min(count, self._num_free)
        self._num_free -= again
        slots = np.empty(count, np.int64)
        slots[:again] = self._free[self._num_free : self._num_free + again]
        slots[again:] = np.arange(self._used, self._used + count - again)
        self._used += count - again
        if self._used > len(self.first):
            self._grow(max(self._used, 2 * len(self.first)))
        return slots

    def free(self, slots: NDArray[np.integer]) -> None:
        """Give places back; a piece that is gone has no rows."""
        needed = self._num_free + len(slots)
        if needed > len(self._free):
            self._free = np.resize(self._free, 2 * needed) if len(self._free) else np.empty(2 * needed, np.int64)
        self._free[self._num_free : needed] = slots
        self._num_free = needed
        self.first[slots], self.last[slots], self.open[slots] = 0, -1, False

    def live(self) -> NDArray[np.int64]:
        """Places of all pieces."""
        return np.flatnonzero(self.last[: self._used] >= self.first[: self._used])

    def lengths(self) -> NDArray[np.int64]:
        """Rows of all pieces, in the order of `live`."""
        lengths = self.last[: self._used].astype(np.int64) - self.first[: self._used] + 1
        return lengths[lengths > 0]

    def _grow(self, size: int) -> None:
        for name in ("first", "last", "head", "tail", "id", "open"):
            column = getattr(self, name)
            longer = np.zeros(size, column.dtype)
            longer[: len(column)] = column
            setattr(self, name, longer)
