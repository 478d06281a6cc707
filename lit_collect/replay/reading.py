"""`RowAccess`: whole rows of a buffer by position; what is marked at the edges of slices; whose priorities they are."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lit_collect.frames import (
    INDEX,
    IS_INIT,
    MASK,
    NEXT_DONE,
    NEXT_TRUNCATED,
    NO_TRAJECTORY,
    POLICY_VERSION,
    TRAJ_IDS,
    WRITTEN,
    Key,
)
from lit_collect.replay.compact import LinkedSuccessors
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.storage import Storage

_PAGE = 4096  # bytes; of longer records single leaves are read where they lie


class RowAccess:
    """Reads rows as they were written, successors that are not stored included; used while the storage is.

    Args:
        storage: has rows.
        rows: of the storage, caught up.
        successors: where the successors are that the records lack, if there are any.
        rng: the random numbers of the buffer.
    """

    def __init__(
        self, storage: Storage, rows: StoredRows, *, successors: LinkedSuccessors | None, rng: np.random.Generator
    ) -> None:
        self.rng = rng
        self._storage = storage
        self._rows = rows
        self._successors = successors

    def take(self, positions: np.ndarray, extra: dict[Key, Tensor] | None = None) -> TensorDict:
        """Rows that are the caller's own.

        Args:
            positions: [M] or slices [S, L], int64; -1 in a slice gives a row of zeros.
            extra: further leaves of them.
        """
        assert self._storage.layout is not None
        records = self._storage.take(positions)
        leaves = extra or {}
        if self._successors is not None:
            leaves = {**self._successors.of(positions, self._stored), **leaves}
        if positions.ndim == 2 and (missing := positions < 0).any():
            records[missing] = np.zeros((), records.dtype)
            for key in self._successors.next_keys if self._successors is not None else ():
                leaves[key][torch.from_numpy(missing)] = 0
        names = [None, "time"] if positions.ndim == 2 else None
        return self._storage.layout.unpack(records, leaves, names=names)

    def column(self, key: Key, positions: np.ndarray) -> Tensor:
        """One leaf of rows.

        Args:
            key: of the leaf.
            positions: int64 of any shape; -1 gives any row's.

        Raises:
            KeyError: if rows have no such leaf.
        """
        layout = self._storage.layout
        assert layout is not None
        if self._successors is not None and key in self._successors.next_keys:
            return self._successors.of(positions, self._stored)[key]
        if layout.dtype.itemsize > _PAGE:
            records = self._storage.records
            assert records is not None
            return layout.column(records, key)[torch.from_numpy(positions)]
        return layout.column(self._storage.take(positions), key)

    def walk(self, positions: np.ndarray, steps: int) -> np.ndarray:
        """See `StoredRows.walk`."""
        return self._rows.walk(positions, steps)

    def ahead(self, positions: np.ndarray) -> np.ndarray:
        """See `StoredRows.ahead`."""
        return self._rows.ahead(positions)

    def _stored(self, positions: np.ndarray) -> TensorDict:
        assert self._storage.layout is not None
        return self._storage.layout.unpack(self._storage.take(positions))


def addressed(
    index: TensorDictBase | Tensor | np.ndarray, priority: Tensor | np.ndarray, rows: StoredRows
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows get which priorities.

    Args:
        index: a sample, of which padding and rows that were overwritten since are left out; or positions.
        priority: one number for each of its rows.
        rows: of the buffer, caught up.

    Returns:
        Positions and priorities, [K] int64 and float64.

    Raises:
        ValueError: if they are not as many as rows, or there is no row at a position.
    """
    priorities = torch.as_tensor(priority).detach().to("cpu", torch.float64).reshape(-1).numpy()
    written = None
    if isinstance(index, TensorDictBase):
        places, serials = index.get(INDEX, None), index.get(WRITTEN, None)
        if places is None or serials is None:
            raise ValueError(f"a sample must have 'index' and 'collector.written', got {list(index.keys())}")
        written = serials.cpu().reshape(-1).numpy()
        positions = places.cpu().reshape(-1).numpy()
    else:
        positions = as_positions(index).reshape(-1)
        bad = (positions < 0) | (positions >= rows.extent)
        if bad.any():
            raise ValueError(
                f"there is no row at position {positions[bad][0]} : expected {places_of(rows)}; give the 'index' of a "
                f"sample, or the sample"
            )
    if len(priorities) != len(positions):
        raise ValueError(f"priorities must be one for each row : expected {len(positions)}, got {len(priorities)}")
    if written is None:
        return positions, priorities
    there = np.flatnonzero((positions >= 0) & (rows.serials(positions) == written))
    return positions[there], priorities[there]


def as_positions(index: Any) -> np.ndarray:
    """Positions as an array, of the same shape.

    Args:
        index: integers in whatever holds them.

    Raises:
        TypeError: if they are none: what a mask or a fraction would be as a position is some other row.
    """
    values = index.detach().cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(
            f"positions must be integers, got {f'{values.dtype}' if values.dtype.kind in 'bfc' else repr(index)}; of a "
            f"mask give its nonzero entries"
        )
    return values.astype(np.int64)


def places_of(rows: StoredRows) -> str:
    """Where rows lie, for a message."""
    return f"0 to {rows.extent - 1}" if rows.extent else "none, since the buffer is empty"


def mark_slices(sample: TensorDictBase, positions: np.ndarray, *, padded: bool) -> None:
    """Mark where slices begin and end, in place: at their last rows they are cut, unless the episode is done there.

    Args:
        sample: [S, L].
        positions: [S, L], -1 at padding.
        padded: whether slices may be shorter than L; then a mask tells which rows there are.
    """
    done, truncated = _flag(sample, NEXT_DONE), _flag(sample, NEXT_TRUNCATED)
    _flag(sample, IS_INIT)[:, 0] = True
    valid = positions >= 0 if padded else None
    if valid is not None:
        sample.set(MASK, torch.from_numpy(valid))
    if valid is None or valid.all():
        truncated[:, -1] |= ~done[:, -1]
        done[:, -1] = True
        return
    for key in (TRAJ_IDS, POLICY_VERSION):
        if (ids := sample.get(key, None)) is not None:
            ids[torch.from_numpy(~valid)] = NO_TRAJECTORY
    last = np.arange(len(positions)), valid.sum(1) - 1
    truncated[last] |= ~done[last]
    done[last] = True


def _flag(sample: TensorDictBase, key: Key) -> np.ndarray:
    """The flag of a key, [S, L, ...] bool, the same memory; where rows have none, it is put there."""
    found = sample.get(key, None)
    if found is None:
        like = sample.get(NEXT_DONE, None)
        found = torch.zeros((*sample.batch_size, 1) if like is None else like.shape, dtype=torch.bool)
        sample.set(key, found)
    return found.numpy()
