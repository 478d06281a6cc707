"""Batches in shared memory: a worker puts them together in one of two slots, its group copies them out.

A worker may be writing the batch after the one that is being read, so there are two slots. The group asks for a batch
only when the slot of the last but one is free again; nothing needs to be locked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lit_collect.assembly import PRIVATE
from lit_collect.frames import SUCCESSORS, Key, columns_of
from lit_collect.shared import SharedBlock
from lit_collect.successors import SuccessorTable, table_of

SLOTS = 2
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one column lies in a slot."""

    offset: int
    """Bytes from the start of the slot."""
    shape: tuple[int, ...]
    """[n, T, ...] of the longest batch."""
    dtype: torch.dtype

    def holds(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a column is like this one, and not longer."""
        copies, steps, *rest = shape
        own_copies, own_steps, *own_rest = self.shape
        return self.dtype == dtype and own_copies == copies and steps <= own_steps and own_rest == rest


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How slots are divided."""

    places: Mapping[Key, Place]
    steps: int
    """T of the longest batch."""
    slot_size: int
    """Bytes."""

    @classmethod
    def of(cls, columns: Mapping[Key, Tensor], steps: int) -> "Layout":
        """Room for batches like this one, of up to so many steps."""
        places, end = {}, 0
        for key, column in columns.items():
            places[key] = Place(offset=end, shape=(column.shape[0], steps, *column.shape[2:]), dtype=column.dtype)
            size = column.element_size() * column[:, :1].numel() * steps
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(places=places, steps=steps, slot_size=max(end, _ALIGNMENT))

    def holds(self, columns: Mapping[Key, Tensor]) -> bool:
        """Whether a batch has these columns and is not too long."""
        return columns.keys() == self.places.keys() and all(
            place.holds(columns[key].shape, columns[key].dtype) for key, place in self.places.items()
        )

    def views(self, block: SharedBlock, slot: int) -> dict[Key, Tensor]:
        """The whole columns of a slot."""
        start = slot * self.slot_size
        return {key: block.tensor(start + place.offset, place.shape, place.dtype) for key, place in self.places.items()}


@dataclass(frozen=True, kw_only=True)
class InSlot:
    """Stands for a batch in a message."""

    slot: int
    steps: int
    memory: tuple[SharedBlock, Layout] | None = field(default=None)
    """The first time, and whenever a batch needed another layout."""
    successors: SuccessorTable | None = field(default=None)
    """Of a compact batch: so few that they travel in the message."""


class SlotWriter:
    """The worker's side; the storage that batches are put together in."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._block: SharedBlock | None = None
        self._views: list[dict[Key, Tensor]] = []
        self._slot = 0

    def empty(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A column of the next batch: in its slot, if it is known where (see `lit_collect.assembly.Storage`)."""
        place = None if self._layout is None else self._layout.places.get(key)
        if place is None or not place.holds(shape, dtype):
            return PRIVATE.empty(key, shape, dtype)
        return self._views[self._slot][key][:, : shape[1]]

    def put(self, batch: TensorDict) -> InSlot:
        """Complete a slot: copy what does not lie there already.

        Args:
            batch: [n, T].
        """
        columns = columns_of(batch)
        steps, memory = batch.shape[1], None
        if self._layout is None or not self._layout.holds(columns):
            before = 0 if self._layout is None else self._layout.steps
            memory = self._make_room(columns, max(steps, before))
        slot = self._slot
        for key, view in self._views[slot].items():
            target, column = view[:, :steps], columns[key]
            if column.data_ptr() != target.data_ptr():
                target.copy_(column)
        self._slot = (slot + 1) % SLOTS
        return InSlot(slot=slot, steps=steps, memory=memory, successors=table_of(batch))

    def _make_room(self, columns: Mapping[Key, Tensor], steps: int) -> tuple[SharedBlock, Layout]:
        if self._block is not None:
            self._block.close()  # the group has a descriptor of its own
        self._layout = Layout.of(columns, steps)
        self._block = SharedBlock.create(SLOTS * self._layout.slot_size)
        self._views = [self._layout.views(self._block, slot) for slot in range(SLOTS)]
        return self._block, self._layout


class SlotReader:
    """The group's side."""

    def __init__(self) -> None:
        self._block: SharedBlock | None = None
        self._views: list[dict[Key, Tensor]] = []
        self._steps = 0  # of the longest batch

    def take(self, batch: InSlot) -> dict[Key, Any]:
        """The columns of a batch, [n, T, ...] in shared memory; valid until two more are asked for.

        Args:
            batch: what stands for it; the table of a compact one is put beside the columns.
        """
        if batch.memory is not None:
            self.close()
            self._block, layout = batch.memory
            self._views = [layout.views(self._block, slot) for slot in range(SLOTS)]
            self._steps = layout.steps
        views = self._views[batch.slot]
        if batch.steps < self._steps:
            views = {key: view[:, : batch.steps] for key, view in views.items()}
        return views if batch.successors is None else {**views, SUCCESSORS: batch.successors}

    def close(self) -> None:
        """Let the memory go; views that were given out keep it."""
        self._views = []
        if self._block is not None:
            self._block.close()
            self._block = None
