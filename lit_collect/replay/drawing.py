"""What all samplers of a replay buffer have in common: `Sampler`, what it gives, and passes over the buffer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lit_collect.replay.boundaries import Positions
from lit_collect.replay.rows import StoredRows, as_tensor


@dataclass(frozen=True, kw_only=True)
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

    @property
    def runs_out(self) -> bool:
        """Whether there may be no sample any more although there was one since rows were written."""
        return False

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
        *,
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
        rest = cls(state["starts"].numpy().copy(), state["lengths"].numpy().copy(), serial=int(state["serial"]))
        rest.ran_out = bool(state["ran_out"])
        return rest
