"""Samplers of slices: consecutive rows of one episode, never across its end or a gap."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lit_collect.config import nearest_multiples
from lit_collect.replay.boundaries import Positions
from lit_collect.replay.drawing import Drawn, Pass, Sampler
from lit_collect.replay.rows import StoredRows


class SliceShape:
    """How the rows of a sample are shared among slices.

    Args:
        slice_len: rows of a slice, or
        num_slices: slices of a sample.

    Raises:
        ValueError: unless exactly one of them is given, and at least 1.
    """

    def __init__(self, slice_len: int | None, num_slices: int | None) -> None:
        if (slice_len is None) == (num_slices is None):
            raise ValueError(
                "slices need either their length or their number : expected slice_len or num_slices, got "
                f"slice_len={slice_len} and num_slices={num_slices}"
            )
        for name, value in (("slice_len", slice_len), ("num_slices", num_slices)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        self.slice_len = slice_len
        self.num_slices = num_slices

    def of(self, batch_size: int) -> tuple[int, int]:
        """Slices of a sample and rows of a slice.

        Args:
            batch_size: rows of the sample.

        Raises:
            ValueError: if they cannot be shared evenly, with the two nearest sizes that can.
        """
        name, unit = ("slice_len", self.slice_len) if self.slice_len else ("num_slices", self.num_slices)
        assert unit is not None
        if batch_size < 1 or batch_size % unit:
            raise ValueError(
                f"batch_size must be a multiple of {name}={unit}, got {batch_size}; use "
                f"{nearest_multiples(batch_size, unit)}"
            )
        return (batch_size // unit, unit) if self.slice_len else (unit, batch_size // unit)


class SliceSampler(Sampler):
    """Slices whose first rows have the same chance each, with replacement.

    With `strict_length` every slice is whole: its first row is one of those that are followed by enough rows. Without,
    what there is of a trajectory that is shorter than a slice is taken from its first row on, and padded.

    Args:
        slice_len: rows of a slice: a sample is batch_size / slice_len of them.
        num_slices: slices of a sample, instead of their length.
        strict_length: whether slices must be whole.

    Example:
        >>> from lit_collect.replay import ReplayBuffer
        >>> from tensordict import TensorDict
        >>> import torch
        >>> buffer = ReplayBuffer(100, batch_size=8, sampler=SliceSampler(slice_len=4))
        >>> done = torch.tensor([False] * 5 + [True])[:, None]
        >>> _ = buffer.extend(TensorDict({"step": torch.arange(6), "next": {"done": done}}, batch_size=[6]))
        >>> steps = buffer.sample()["step"]
        >>> steps.shape, (steps.diff(dim=1) == 1).all().item()
        (torch.Size([2, 4]), True)
    """

    draws_slices: ClassVar[bool] = True
    needs_order: ClassVar[bool] = True

    def __init__(
        self, slice_len: int | None = None, num_slices: int | None = None, *, strict_length: bool = True
    ) -> None:
        self.shape = SliceShape(slice_len, num_slices)
        self.strict_length = strict_length

    def check_batch_size(self, batch_size: int) -> None:
        """Raise unless slices share the rows evenly."""
        self.shape.of(batch_size)

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[S, L] slices."""
        count, length = self.shape.of(batch_size)
        rows.check_not_empty()
        starts = rows.boundaries.draw_starts(rng, count, length, or_short=not self.strict_length)
        return Drawn(positions=rows.walk(starts, length), padded=not self.strict_length)

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether a trajectory is long enough."""
        return can_slice(rows, self.shape, batch_size, strict_length=self.strict_length)


class SliceWithoutReplacementSampler(Sampler):
    """Each slice once per pass: trajectories are cut into slices that do not overlap.

    A pass is over the rows that are there when it begins; slices of which rows were overwritten before their turn are
    left out. Where a trajectory is no multiple of the length, whole slices leave a few rows out, others in each pass,
    so that all have their turn; without `strict_length` no row is left out, and the last slice of each is padded. The
    last sample of a pass may have fewer slices.

    Args:
        slice_len: rows of a slice: a sample is batch_size / slice_len of them.
        num_slices: slices of a sample, instead of their length.
        strict_length: whether slices must be whole.
        drop_last: begin a new pass where the slices left are too few for a whole sample.
        shuffle: in random order; else as they were written.
    """

    draws_slices: ClassVar[bool] = True
    needs_order: ClassVar[bool] = True

    def __init__(
        self,
        slice_len: int | None = None,
        num_slices: int | None = None,
        *,
        strict_length: bool = True,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        self.shape = SliceShape(slice_len, num_slices)
        self.strict_length = strict_length
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._pass = Pass()
        self._length = 0  # of the slices of the pass

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last of its pass."""
        return self._pass.ran_out

    def check_batch_size(self, batch_size: int) -> None:
        """Raise unless slices share the rows evenly."""
        self.shape.of(batch_size)

    def begin(self, rows: StoredRows) -> None:
        """No pass is under way."""
        self._pass = Pass()

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[S, L] slices, or fewer at the end of a pass."""
        count, length = self.shape.of(batch_size)
        rows.check_not_empty()
        least = count if self.drop_last else 1
        taken = self._pass.take(rows, count, least) if length == self._length else None
        if taken is None:
            starts, lengths = self._cut(rows, length, rng)
            if len(starts) < least:
                raise ValueError(
                    f"too few slices for a sample without replacement : expected {least}, got {len(starts)}; collect "
                    "more before, or take drop_last=False"
                )
            self._pass, self._length = Pass(starts, lengths, serial=rows.write_count), length
            taken = self._pass.take(rows, count, least)
            assert taken is not None
        starts, lengths = taken
        walked = rows.walk(starts, length)
        walked[np.arange(length) >= lengths[:, None]] = -1  # rows that a trajectory has got since the pass began
        return Drawn(positions=walked, padded=not self.strict_length)

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether there are as many slices as a sample needs."""
        if not self.drop_last:
            return can_slice(rows, self.shape, batch_size, strict_length=self.strict_length)
        count, length = self.shape.of(batch_size)
        lengths = rows.boundaries.pieces()[1]
        whole = lengths // length if self.strict_length else -(-lengths // length)
        return int(whole.sum()) >= count

    def state_dict(self) -> dict[str, Any]:
        """What is left of the pass."""
        return {**self._pass.state_dict(), "length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the pass."""
        self._pass, self._length = Pass.from_state(state), int(state["length"])

    def _cut(self, rows: StoredRows, length: int, rng: np.random.Generator) -> tuple[Positions, NDArray[np.int64]]:
        """Cut all trajectories: first rows of the slices, and how many rows each has, in the order of the pass."""
        ordered, lengths = rows.boundaries.in_order()
        heads = np.cumsum(lengths) - lengths
        oldest_first = np.argsort(rows.serials(ordered[heads]))
        heads, lengths = heads[oldest_first], lengths[oldest_first]
        if self.strict_length:
            if int(lengths.max()) < length:
                rows.boundaries.starts(length)  # says what there is
            counts = lengths // length
            heads = heads + rng.integers(0, lengths % length + 1)
        else:
            counts = -(-lengths // length)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = ordered[np.repeat(heads, counts) + within * length]
        left = length if self.strict_length else np.minimum(np.repeat(lengths, counts) - within * length, length)
        order = rng.permutation(len(starts)) if self.shuffle else np.argsort(rows.serials(starts))
        return starts[order], np.broadcast_to(left, starts.shape)[order].astype(np.int64)


def can_slice(rows: StoredRows, shape: SliceShape, batch_size: int, *, strict_length: bool) -> bool:
    """Whether there is a slice.

    Args:
        rows: of the buffer, caught up.
        shape: of the samples.
        batch_size: rows of a sample.
        strict_length: whether slices must be whole.
    """
    length = shape.of(batch_size)[1] if strict_length else 1
    return rows.size > 0 and rows.boundaries.has_piece_of(length)
