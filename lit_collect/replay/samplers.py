"""Samplers choose rows of a replay buffer: those that take rows one by one, and the names of all."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lit_collect.replay.drawing import Drawn, Pass, Sampler
from lit_collect.replay.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.slices import SliceSampler, SliceWithoutReplacementSampler
from lit_collect.replay.staleness import ConsumingSampler, StalenessSampler


class UniformSampler(Sampler):
    """Each row with the same chance, with replacement."""

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[batch_size] rows."""
        return Drawn(positions=rows.draw_rows(rng, batch_size))


class WithoutReplacementSampler(Sampler):
    """Each row once per pass over the buffer.

    A pass is over the rows that are there when it begins. Rows that are written meanwhile wait for the next one; rows
    that are overwritten before their turn are left out. The last sample of a pass may be shorter.

    Args:
        drop_last: begin a new pass where the rows left are too few for a whole sample.
        shuffle: in random order; else the oldest first.

    Example:
        >>> from lit_collect.replay import ReplayBuffer
        >>> from tensordict import TensorDict
        >>> import torch
        >>> buffer = ReplayBuffer(4, batch_size=3, sampler=WithoutReplacementSampler(shuffle=False))
        >>> _ = buffer.extend(TensorDict({"reward": torch.arange(4.0)}, batch_size=[4]))
        >>> [buffer.sample()["reward"].tolist() for _ in range(3)]
        [[0.0, 1.0, 2.0], [3.0], [0.0, 1.0, 2.0]]
    """

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._pass = Pass()

    @property
    def ran_out(self) -> bool:
        """Whether the last sample was the last of its pass."""
        return self._pass.ran_out

    def begin(self, rows: StoredRows) -> None:
        """No pass is under way."""
        self._pass = Pass()

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[batch_size] rows, or fewer at the end of a pass."""
        rows.check_not_empty()
        least = batch_size if self.drop_last else 1
        taken = self._pass.take(rows, batch_size, least)
        if taken is None:
            if rows.size < least:
                raise ValueError(
                    f"too few rows for a sample without replacement : expected {least}, got {rows.size}; collect more "
                    "before, or take drop_last=False"
                )
            starts = rows.in_writing_order()
            if self.shuffle:
                rng.shuffle(starts)
            self._pass = Pass(starts, serial=rows.write_count)
            taken = self._pass.take(rows, batch_size, least)
            assert taken is not None
        return Drawn(positions=taken[0])

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether there are as many rows as a sample needs."""
        return rows.size >= (batch_size if self.drop_last else 1)

    def state_dict(self) -> dict[str, Any]:
        """What is left of the pass."""
        return self._pass.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the pass."""
        self._pass = Pass.from_state(state)


_PLAIN: dict[str, type[Sampler]] = {
    "uniform": UniformSampler,
    "without_replacement": WithoutReplacementSampler,
    "prioritized": PrioritizedSampler,
    "consuming": ConsumingSampler,
    "staleness": StalenessSampler,
}
_OF_SLICES: dict[str, Any] = {
    "slice": SliceSampler,
    "slice_without_replacement": SliceWithoutReplacementSampler,
    "prioritized_slice": PrioritizedSliceSampler,
}
_SLICED = {
    "uniform": "slice",
    "without_replacement": "slice_without_replacement",
    "prioritized": "prioritized_slice",
}
"""What a name means beside a number or a length of slices."""


def resolve_sampler(sampler: Sampler | str, slice_len: int | None = None, num_slices: int | None = None) -> Sampler:
    """A sampler from its name.

    Args:
        sampler: a sampler, or ``"uniform"``, ``"without_replacement"``, ``"prioritized"`` (with `slice_len` or
            `num_slices` those that draw slices), ``"slice"``, ``"slice_without_replacement"``,
            ``"prioritized_slice"``, ``"consuming"``, ``"staleness"``.
        slice_len: rows of a slice.
        num_slices: slices of a sample.

    Raises:
        TypeError: if it is neither.
        ValueError: if there is no such name, or it does not go with slices.
    """
    sliced = slice_len is not None or num_slices is not None
    if isinstance(sampler, Sampler):
        if sliced:
            raise ValueError(
                f"slice_len and num_slices are settings of the sampler : expected neither beside one, got "
                f"slice_len={slice_len} and num_slices={num_slices} with {type(sampler).__name__}; give them to it"
            )
        return sampler
    if not isinstance(sampler, str):
        raise TypeError(f"sampler must be a Sampler or a name, got {sampler!r}")
    if sampler not in _PLAIN and sampler not in _OF_SLICES:
        raise ValueError(f"sampler must be one of {', '.join([*_PLAIN, *_OF_SLICES])}, got {sampler!r}")
    name = _SLICED.get(sampler, sampler) if sliced else sampler
    if name in _OF_SLICES:
        return _OF_SLICES[name](slice_len, num_slices)
    if sliced:
        raise ValueError(
            f"sampler={sampler!r} draws single rows : expected neither slice_len nor num_slices, got "
            f"slice_len={slice_len} and num_slices={num_slices}"
        )
    return _PLAIN[name]()
