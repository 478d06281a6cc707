"""`Halves`: one set of tensors in shared memory twice, of which one is read while the other is written."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lit_collect.shared import SharedBlock

Models = Mapping[str, Mapping[str, Tensor]]
"""Tensors by model id and dotted name."""


class Place(NamedTuple):
    """Where a tensor lies in each half."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


Table = Mapping[str, Mapping[str, Place]]
"""Places by model id and name."""

_ALIGNMENT = 64  # bytes: the widest vector registers, and a cache line
HEADER_BYTES = _ALIGNMENT
"""Bytes in front of the halves."""
_ACTIVE = 0  # which half is the newest; the integers after it are pairs, one per half:
_SEQUENCE = (1, 3)  # odd while the half is being written
_VERSION = (2, 4)


class Halves:
    """Two sets of the same tensors in shared memory, of which one is the newest and the other may be written.

    One process writes. Each half is guarded by a seqlock: its sequence is odd while it is written and never the same
    again, so a reader whose half was written in the meantime (it was slow and the writer has flipped twice) finds
    another number than before its copy. All this relies on stores becoming visible in the order in which they are
    made, and on loads being made in order, as on x86, across calls that no compiler can reorder, and on aligned
    64-bit integers being read and written whole.

    Args:
        block: the memory, zeroed before the first use.
        table: places by model id and name.
    """

    def __init__(self, block: SharedBlock, table: Table) -> None:
        size = half_bytes(table)
        self.block = block
        self.table = table
        self._header = block.integers(0, 5)
        self._bytes = [block.tensor(HEADER_BYTES + half * size, (size,), torch.uint8) for half in (0, 1)]
        self._models = [views_of(half, table) for half in self._bytes]

    def __reduce__(self) -> tuple[type["Halves"], tuple[SharedBlock, Table]]:
        return type(self), (self.block, self.table)

    def fit(self, models: Models) -> bool:
        """Whether models can be written: they are known, and all their tensors have their places."""
        for model_id, tensors in models.items():
            places = self.table.get(model_id)
            if places is None or places.keys() != tensors.keys():
                return False
            for name, tensor in tensors.items():
                place = places[name]
                if tensor.shape != place.shape or tensor.dtype != place.dtype:
                    return False
        return True

    def newest(self) -> Models:
        """Views of the newest set, for the process that writes."""
        return self._models[self._header[_ACTIVE]]

    def write(self, models: Models, version: int) -> None:
        """Write the idle half and make it the newest; models left out are taken from the other half."""
        header, newest = self._header, self.newest()
        half = 1 - header[_ACTIVE]
        sequence = header[_SEQUENCE[half]] | 1  # odd already if an exception ended the last attempt
        header[_SEQUENCE[half]] = sequence
        header[_VERSION[half]] = version
        with torch.no_grad():
            for model_id, targets in self._models[half].items():
                sources = models.get(model_id, newest[model_id])
                for name, target in targets.items():
                    target.copy_(sources[name])
        header[_SEQUENCE[half]] = sequence + 1
        header[_ACTIVE] = half

    def copy_newest(self, newer_than: int, target: Tensor) -> int | None:
        """Copy the newest half if it is newer than a version.

        Args:
            newer_than: the version.
            target: bytes, as many as a half has.

        Returns:
            The version of what was copied, `newer_than` if there is nothing newer, None if the copy is worthless.
        """
        header = self._header
        half = header[_ACTIVE]
        sequence = header[_SEQUENCE[half]]
        if sequence % 2:
            return None
        version = header[_VERSION[half]]
        if version <= newer_than:
            return newer_than
        target.copy_(self._bytes[half])
        return version if header[_SEQUENCE[half]] == sequence else None


def table_of(models: Models) -> Table:
    """Give every tensor of these models its place."""
    table: dict[str, dict[str, Place]] = {}
    offset = 0
    for model_id, tensors in models.items():
        places = table[model_id] = {}
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            places[name] = Place(tensor.dtype, tuple(tensor.shape), offset, size)
            offset += size + -size % _ALIGNMENT
    return table


def half_bytes(table: Table) -> int:
    """Bytes of one half."""
    end = max((place.offset + place.size for places in table.values() for place in places.values()), default=0)
    return end + -end % _ALIGNMENT


@torch.inference_mode(False)
def views_of(half: Tensor, table: Table) -> Models:
    """The tensors that lie in the bytes of a half."""
    return {
        model_id: {
            name: half[place.offset : place.offset + place.size].view(place.dtype).reshape(place.shape)
            for name, place in places.items()
        }
        for model_id, places in table.items()
    }
