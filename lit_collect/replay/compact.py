"""`LinkedSuccessors`: successor observations are stored only where the following row does not repeat them.

A row whose successor equals the observation of a row written later, bit by bit, keeps a link to that row; every other
successor (of an episode's last row, of a row whose follower is not there yet, of one that an env altered) lies in a
table. A ring overwrites a row before it overwrites what was written later, so that a link always leads somewhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lit_collect.errors import FrameContractError
from lit_collect.frames import NEXT_DONE, TRAJ_IDS, Key, as_key

_NOT_OBSERVED = frozenset({"reward", "done", "terminated", "truncated"})
_NO_ID = 0  # the trajectory of all rows where the rows name none: only the row written last can be continued
_FIRST_SLOTS = 64

_Columns = Mapping[Key, Tensor]

Reader = Callable[[np.ndarray], TensorDictBase]
"""Gives the rows at positions, without the successors of the observations: copies, which may be written into."""


def linked_keys(rows: TensorDictBase) -> tuple[Key, ...]:
    """The observations of rows that are there twice: at the root and, of the same kind, under ``"next"``.

    Args:
        rows: [M].
    """
    found = []
    for name in rows.keys(True, True):
        key = as_key(name)
        if key[0] == "next" and key[1] not in _NOT_OBSERVED:
            seen, led_to = rows.get(key[1:], None), rows.get(key)
            if isinstance(seen, Tensor) and (seen.shape, seen.dtype) == (led_to.shape, led_to.dtype):
                found.append(key[1:])
    return tuple(found)


class LinkedSuccessors:
    """Where the successor of each stored row is.

    Args:
        capacity: rows of the buffer, which must be a ring.
        keys: of the observations at the root; their successors are under ``"next"``.

    Example:
        >>> from tensordict import TensorDict
        >>> led_to = {"observation": torch.tensor([2.0, 3.0]), "done": torch.tensor([[False], [True]])}
        >>> rows = TensorDict({"observation": torch.tensor([1.0, 2.0]), "next": led_to}, batch_size=[2])
        >>> successors = LinkedSuccessors(capacity=4, keys=linked_keys(rows))
        >>> successors.write(rows, np.array([0, 1]))
        >>> successors.kept, successors.of(np.array([0, 1]), lambda positions: rows[positions])
        (1, {('next', 'observation'): tensor([2., 3.])})
    """

    def __init__(self, capacity: int, keys: tuple[Key, ...]) -> None:
        self.keys = keys
        self.next_keys: tuple[Key, ...] = tuple(("next", *key) for key in keys)
        self.links = np.full(capacity, -1, np.int64)  # the position of the following row, or -1 - slot of the table
        self.table: dict[Key, Tensor] = {}
        self._free = np.empty(0, np.int64)  # slots of the table that are not taken, the last is taken first
        self._slots = 0
        self._stored = np.zeros(capacity, bool)
        self._tail_ids = np.empty(0, np.int64)  # of trajectories that may go on,
        self._tails = np.empty(0, np.int64)  # and where their last rows lie

    @property
    def kept(self) -> int:
        """Successors that lie in the table."""
        return self._slots - len(self._free)

    @property
    def nbytes(self) -> int:
        """Memory of the table and the links."""
        return self.links.nbytes + sum(column.nbytes for column in self.table.values())

    def check(self, rows: TensorDictBase) -> None:
        """Raise unless rows have the successors of their observations.

        Args:
            rows: [M].

        Raises:
            FrameContractError: naming the one that is missing or of another shape or dtype.
        """
        for key, behind in zip(self.keys, self.next_keys, strict=True):
            seen, led_to = rows.get(key, None), rows.get(behind, None)
            if seen is not None and (led_to is None or (led_to.shape, led_to.dtype) != (seen.shape, seen.dtype)):
                got = "none" if led_to is None else f"{led_to.dtype} {tuple(led_to.shape[1:])}"
                raise FrameContractError(
                    f"rows lack the successor of {'.'.join(key)!r} : expected {'.'.join(behind)!r} of {seen.dtype} "
                    f"{tuple(seen.shape[1:])}, got {got}"
                )

    def write(self, rows: TensorDictBase, positions: np.ndarray) -> None:
        """Note the successors of rows that were just written.

        Args:
            rows: [M] as they came, successors included, at least one.
            positions: [M] int64 where they lie.
        """
        with torch.inference_mode(False):
            self._write(_columns(rows, self.keys), _columns(rows.get("next"), self.keys), rows, positions)

    def of(self, positions: np.ndarray, stored: Reader) -> dict[Key, Tensor]:
        """The successors of rows, equal to the bit to those that were written.

        Args:
            positions: int64 of any shape; -1 gives whatever there is.
            stored: reads rows by position.
        """
        links = self.links[positions]
        own = links < 0
        with torch.inference_mode(False):
            found = stored(np.where(own, 0, links))
            values: dict[Key, Tensor] = {("next", *key): found.get(key) for key in self.keys}
            if own.any():
                chosen, slots = torch.from_numpy(own), torch.from_numpy(-1 - links[own])
                for key in self.keys:
                    values[("next", *key)][chosen] = self.table[key][slots]
        return values

    def clear(self) -> None:
        """Forget all rows; the memory stays."""
        self.links[:] = -1
        self._stored[:] = False
        self._free = np.arange(self._slots)
        self._tail_ids, self._tails = np.empty(0, np.int64), np.empty(0, np.int64)

    def state_dict(self, size: int) -> dict[str, Any]:
        """Plain numbers and tensors.

        Args:
            size: rows that there are, which lie from 0 on.
        """
        links, slots = self.links[:size].copy(), -1 - self.links[:size]
        own = self._stored[:size] & (links < 0)
        table = [self.table[key][torch.from_numpy(slots[own])] for key in self.keys if self.table]
        links[own] = -1 - np.arange(int(own.sum()))
        tails = {"ids": torch.from_numpy(self._tail_ids.copy()), "positions": torch.from_numpy(self._tails.copy())}
        return {"links": torch.from_numpy(links), "table": table, "tails": tails}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state: what `state_dict` gave, of a buffer of the same capacity and observations.
        """
        self.clear()
        links = state["links"].numpy()
        own = np.flatnonzero(links < 0)
        self.links[: len(links)], self._stored[: len(links)] = links, True
        if len(own):
            with torch.inference_mode(False):
                slots = self._keep(dict(zip(self.keys, state["table"], strict=True)), len(own))
            self.links[own] = -1 - slots[-1 - links[own]]
        self._tail_ids, self._tails = (state["tails"][name].numpy().copy() for name in ("ids", "positions"))

    def _write(self, seen: _Columns, led_to: _Columns, rows: TensorDictBase, positions: np.ndarray) -> None:
        ids, done = rows.get(TRAJ_IDS, None), rows.get(NEXT_DONE, None)
        traj = np.full(len(positions), _NO_ID) if ids is None else ids.cpu().numpy()
        order = np.argsort(traj, kind="stable")  # trajectory by trajectory, each in the order of time
        goes_on = traj[order[1:]] == traj[order[:-1]]
        self._forget(positions)
        self._continue(seen, positions, order[np.concatenate([[True], ~goes_on])], traj)
        earlier, later = order[:-1][goes_on], order[1:][goes_on]
        repeated = _equal(_chosen(led_to, earlier), _chosen(seen, later))
        self.links[positions[earlier]] = positions[later]
        own = np.ones(len(positions), bool)
        own[earlier[repeated]] = False
        own = np.flatnonzero(own)
        self.links[positions[own]] = -1 - self._keep(_chosen(led_to, own), len(own))
        self._stored[positions] = True
        last = order[np.concatenate([~goes_on, [True]])]
        if done is not None:
            last = last[~done.reshape(len(positions), -1).any(1).cpu().numpy()[last]]
        self._tail_ids = np.concatenate([self._tail_ids, traj[last]])
        self._tails = np.concatenate([self._tails, positions[last]])

    def _forget(self, positions: np.ndarray) -> None:
        """Give back what overwritten rows had in the table."""
        old = self.links[positions][self._stored[positions]]
        self._free = np.concatenate([self._free, -1 - old[old < 0]])
        alive = ~np.isin(self._tails, positions)
        self._tail_ids, self._tails = self._tail_ids[alive], self._tails[alive]

    def _continue(self, seen: _Columns, positions: np.ndarray, heads: np.ndarray, traj: np.ndarray) -> None:
        """Link last rows of earlier writes to the rows that go on from them, where these repeat their successors.

        Args:
            seen: observations of the new rows.
            positions: of the new rows.
            heads: those that come first of their trajectories, by the order of ids.
            traj: ids of the new rows.
        """
        if not len(self._tails):
            return
        place = np.searchsorted(traj[heads], self._tail_ids).clip(max=len(heads) - 1)
        goes_on = traj[heads][place] == self._tail_ids
        tails, heads = self._tails[goes_on], heads[place[goes_on]]
        self._tail_ids, self._tails = self._tail_ids[~goes_on], self._tails[~goes_on]
        slots = -1 - self.links[tails]
        repeated = _equal(_chosen(self.table, slots), _chosen(seen, heads))
        self.links[tails[repeated]] = positions[heads[repeated]]
        self._free = np.concatenate([self._free, slots[repeated]])

    def _keep(self, values: _Columns, count: int) -> np.ndarray:
        """Put successors into the table, and tell in which slots they are."""
        if count > len(self._free):
            self._grow(values, max(self._slots + count - len(self._free), self._slots * 3 // 2, _FIRST_SLOTS))
        slots, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        for key, value in values.items():
            self.table[key][torch.from_numpy(slots)] = value
        return slots

    def _grow(self, values: _Columns, slots: int) -> None:
        for key, value in values.items():
            larger = torch.zeros((slots, *value.shape[1:]), dtype=value.dtype)
            if key in self.table:
                larger[: self._slots] = self.table[key]
            self.table[key] = larger
        self._free = np.concatenate([np.arange(self._slots, slots)[::-1], self._free])
        self._slots = slots


def _columns(rows: TensorDictBase, keys: Sequence[Key]) -> dict[Key, Tensor]:
    return {key: rows.get(key).detach().cpu() for key in keys}


def _chosen(columns: _Columns, rows: np.ndarray) -> dict[Key, Tensor]:
    index = torch.from_numpy(rows)
    return {key: column[index] for key, column in columns.items()}


def _equal(first: _Columns, second: _Columns) -> np.ndarray:
    """[M] bool: which rows are equal bit by bit, so that NaN equals itself and 0.0 is not -0.0."""
    same: np.ndarray | None = None
    for key, one in first.items():
        pair = (_as_bits(one) == _as_bits(second[key])).all(1).numpy()
        same = pair if same is None else same & pair
    assert same is not None
    return same


def _as_bits(values: Tensor) -> Tensor:
    """[M, ...] as [M, n] integers, as wide as they can be."""
    size = math.prod(values.shape[1:])
    flat = values.reshape(len(values), size).contiguous()
    if not size:
        return flat.to(torch.uint8)
    flat = flat.view(torch.uint8)
    wide = flat.shape[1] % 8 == 0 and flat.storage_offset() % 8 == 0
    return flat.view(torch.int64) if wide else flat
