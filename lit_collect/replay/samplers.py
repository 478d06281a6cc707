"""Samplers choose rows of a replay buffer: `Sampler`, those that take rows one by one, and their names."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lit_collect.replay.boundaries import Positions
from lit_collect.replay.rows import StoredRows, as_tensor


@dataclass(frozen=True)
class Drawn:
    """What a sampler chose."""

    positions: Positions
    """[M] rows, or [S, L] slices in the order of time, int64; -1 is padding at the end of a slice."""
    weights: NDArray[np.float32] | None = None
    """Importance weights of the same shape, the largest is 1, padding has 0; None without priorities."""
    padded: bool = False
    """Whether slices may be shorter than L, so that a sample says with a mask which rows are there."""

    @property
    def slices(self) -> bool:
        """Whether these are slices."""
        return self.positions.ndim == 2


class Sampler(ABC):
    """Chooses which rows of a buffer make a sample.

    Each buffer has one of its own (it copies the one it is given). The buffer calls `begin` at first and whenever all
    rows are new, `appended` for rows that were written, then `draw`; a state is loaded after these.
    """

    draws_slices: ClassVar[bool] = False
    """Whether samples are slices [S, L] of consecutive rows."""
    needs_order: ClassVar[bool] = False
    """Whether rows must take the places of the oldest ones, in order."""
    has_priorities: ClassVar[bool] = False
    """Whether `update_priority` does something."""

    def check_batch_size(self, batch_size: int) -> None:
        """Raise if samples of that many rows cannot be.

        Args:
            batch_size: rows of a sample, at least 1.

        Raises:
            ValueError: saying what would do.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")

    def begin(self, rows: StoredRows) -> None:  # noqa: B027 - most have nothing to do
        """Know nothing of any row; those that are there come through `appended`.

        Args:
            rows: of the buffer.
        """

    def appended(self, rows: StoredRows, positions: Positions) -> None:  # noqa: B027 - most have nothing to do
        """Take note of rows that were written.

        Args:
            rows: of the buffer, caught up.
            positions: [K], where they lie, as `StoredRows.catch_up` gave them.
        """

    @abstractmethod
    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """Choose rows.

        Args:
            rows: of the buffer, caught up.
            batch_size: how many, padding included.
            rng: the only source of random numbers.

        Raises:
            ValueError: if the buffer is empty, or rows cannot be chosen as they should be.
        """

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether `draw` would find the rows it needs.

        Args:
            rows: of the buffer, caught up.
            batch_size: rows of a sample.
        """
        return rows.size > 0

    def update_priority(self, rows: StoredRows, positions: Positions, priorities: NDArray) -> None:  # noqa: B027 - most have nothing to do
        """Change how likely rows are; nothing happens where `has_priorities` is False.

        Args:
            rows: of the buffer, caught up.
            positions: any shape, as they were drawn.
            priorities: as many.
        """

    def state_dict(self) -> dict[str, Any]:
        """What is not derived from the rows: plain values and tensors. The random numbers are the buffer's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most have nothing to do
        """Continue from a state, with the rows of that time.

        Args:
            state: what `state_dict` gave.
        """


class UniformSampler(Sampler):
    """Each row with the same chance, with replacement."""

    def draw(self, rows: StoredRows, batch_size: int, rng: np.random.Generator) -> Drawn:
        """[batch_size] rows."""
        return Drawn(rows.draw_rows(rng, batch_size))


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
            self._pass = Pass(starts, np.empty(0, np.int64), rows.write_count)
            taken = self._pass.take(rows, batch_size, least)
            assert taken is not None
        return Drawn(taken[0])

    def can_draw(self, rows: StoredRows, batch_size: int) -> bool:
        """Whether there are as many rows as a sample needs."""
        return rows.size >= (batch_size if self.drop_last else 1)

    def state_dict(self) -> dict[str, Any]:
        """What is left of the pass."""
        return self._pass.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the pass."""
        self._pass = Pass.from_state(state)


class Pass:
    """What is left of a pass over the buffer: rows, or first rows of slices, in the order of their turns.

    Args:
        starts: [K].
        lengths: [K], rows of each slice; empty where it is about rows.
        serial: rows from this serial number on came too late for the pass.
    """

    def __init__(
        self,
        starts: Positions | None = None,
        lengths: NDArray[np.int64] | None = None,
        serial: int = 0,
    ) -> None:
        self._starts = np.empty(0, np.int64) if starts is None else starts
        self._lengths = np.empty(0, np.int64) if lengths is None else lengths
        self._serial = serial
        self._at = 0
        self.ran_out = False

    def take(self, rows: StoredRows, most: int, least: int) -> tuple[Positions, NDArray[np.int64]] | None:
        """The next of the pass, without those that were overwritten.

        Args:
            rows: of the buffer.
            most: how many.
            least: below this, what is left is dropped and None is returned.
        """
        found: list[NDArray[np.int64]] = []
        have = 0
        at = self._at
        while have < most and at < len(self._starts):
            index = np.arange(at, min(at + most - have, len(self._starts)))
            serials = rows.serials(self._starts[index])
            at = int(index[-1]) + 1
            index = index[(serials >= 0) & (serials < self._serial)]
            found.append(index)
            have += len(index)
        if have < least:
            self._at = len(self._starts)
            return None
        self._at = at
        self.ran_out = at == len(self._starts)
        chosen = np.concatenate(found)
        return self._starts[chosen], self._lengths[chosen] if len(self._lengths) else self._lengths

    def state_dict(self) -> dict[str, Any]:
        """What is left, as tensors."""
        return {
            "starts": as_tensor(self._starts[self._at :]),
            "lengths": as_tensor(self._lengths[self._at :]),
            "serial": self._serial,
            "ran_out": self.ran_out,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Pass":
        """What `state_dict` told."""
        rest = cls(state["starts"].numpy().copy(), state["lengths"].numpy().copy(), int(state["serial"]))
        rest.ran_out = bool(state["ran_out"])
        return rest


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
    from lit_collect.replay import prioritized, slices, staleness  # they build upon this module

    plain: dict[str, type[Sampler]] = {
        "uniform": UniformSampler,
        "without_replacement": WithoutReplacementSampler,
        "prioritized": prioritized.PrioritizedSampler,
        "consuming": staleness.ConsumingSampler,
        "staleness": staleness.StalenessSampler,
    }
    of_slices: dict[str, Any] = {
        "slice": slices.SliceSampler,
        "slice_without_replacement": slices.SliceWithoutReplacementSampler,
        "prioritized_slice": prioritized.PrioritizedSliceSampler,
    }
    sliced_kinds = {
        "uniform": "slice",
        "without_replacement": "slice_without_replacement",
        "prioritized": "prioritized_slice",
    }
    if sampler not in plain and sampler not in of_slices:
        raise ValueError(f"sampler must be one of {', '.join([*plain, *of_slices])}, got {sampler!r}")
    name = sliced_kinds.get(sampler, sampler) if sliced else sampler
    if name in of_slices:
        return of_slices[name](slice_len, num_slices)
    if sliced:
        raise ValueError(
            f"sampler={sampler!r} draws single rows : expected neither slice_len nor num_slices, got "
            f"slice_len={slice_len} and num_slices={num_slices}"
        )
    return plain[name]()
