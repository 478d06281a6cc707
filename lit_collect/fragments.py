"""Rows that wait to be taken: blocks of them as they came, and fragments of trajectories in the blocks.

Nothing is copied until it is taken. But one long trajectory would keep every batch alive that it has a row in, so
blocks that are mostly of no use any more are merged into one from time to time: at most half of what is kept, and a few
batches, are unused.

Legend: R = rows of a block, F = fragments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_collect.frames import Key
from lit_collect.pieces import ranges

Columns = Mapping[Key, Any]
"""[R, ...] by key: arrays, or tensors where NumPy cannot have them."""

_SPARE = 4  # batches of rows that may lie around unused
_LARGE = 1024  # bytes of a row from which on it pays to copy fragment by fragment


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """Rows of one batch, or of several that were merged."""

    columns: Columns
    """[R, ...] by key."""
    size: int
    """R."""
    needed: int
    """How many of the rows may still be taken."""


@dataclass(slots=True, eq=False, kw_only=True)
class Fragment:
    """Consecutive rows of a block."""

    block: Block
    start: int
    """Its first row."""
    length: int
    """Rows."""


class Moves(NamedTuple):
    """Fragments of the same columns, and where they go."""

    columns: Columns
    """[R, ...] by key."""
    starts: np.ndarray
    """[F] int64, the first row of each."""
    lengths: np.ndarray
    """[F] int64."""
    targets: np.ndarray
    """[F] int64, where its first row goes."""


class Store:
    """The blocks that are needed.

    Example:
        >>> store = Store()
        >>> block = store.keep(as_arrays({("step",): torch.arange(4)}), needed=3)
        >>> fragments = [Fragment(block=block, start=3, length=1), Fragment(block=block, start=0, length=2)]
        >>> gather(moves_of(fragments, [0, 1]), size=3)
        {('step',): array([3, 0, 1])}
        >>> store.release(block, 3)
        >>> store.rows
        0
    """

    def __init__(self) -> None:
        self._blocks: dict[Block, None] = {}
        self._largest = 0
        self.rows = 0
        """Rows that are kept, needed or not."""
        self.rows_needed = 0
        """Rows that may still be taken."""

    def keep(self, columns: Columns, needed: int) -> Block:
        """Keep the rows of a batch.

        Args:
            columns: [R, ...] by key; not copied.
            needed: how many of the rows will be released one day.
        """
        block = self._put(columns, needed)
        self._largest = max(self._largest, block.size)
        return block

    def release(self, block: Block, count: int) -> None:
        """So many rows of a block will not be taken any more; a block without any is given up."""
        block.needed -= count
        self.rows_needed -= count
        if not block.needed:
            del self._blocks[block]
            self.rows -= block.size

    def tidy(self, fragments: Callable[[], Iterable[Fragment]]) -> None:
        """Merge blocks of which less than half is needed, if much is kept in vain.

        Args:
            fragments: gives all that may still be taken; some move to another block.
        """
        if self.rows <= 2 * self.rows_needed + _SPARE * self._largest:
            return
        moved = [fragment for fragment in fragments() if 2 * fragment.block.needed < fragment.block.size]
        lengths = np.array([fragment.length for fragment in moved])
        count, starts = int(lengths.sum()), (np.cumsum(lengths) - lengths).tolist()
        merged = self._put(gather(moves_of(moved, starts), count), count)
        for fragment, start in zip(moved, starts, strict=True):
            self.release(fragment.block, fragment.length)
            fragment.block, fragment.start = merged, start

    def _put(self, columns: Columns, needed: int) -> Block:
        block = Block(columns=columns, size=len(next(iter(columns.values()))), needed=needed)
        self._blocks[block] = None
        self.rows += block.size
        self.rows_needed += needed
        return block


def moves_of(fragments: Sequence[Fragment], targets: Sequence[int]) -> list[Moves]:
    """What is to be copied, block by block.

    Args:
        fragments: F of them.
        targets: [F], where the first row of each goes.
    """
    by_block: dict[Block, list[tuple[int, int, int]]] = {}
    for fragment, target in zip(fragments, targets, strict=True):
        by_block.setdefault(fragment.block, []).append((fragment.start, fragment.length, target))
    return [Moves(block.columns, *np.array(moved).T) for block, moved in by_block.items()]


def gather(moves: Sequence[Moves], size: int) -> dict[Key, Any]:
    """Copy the rows of fragments.

    Args:
        moves: at least one; together they fill all rows of the result.
        size: rows of the result.

    Returns:
        [size, ...] by key, on the device of the first ones.
    """
    first, *others = moves
    chosen = np.zeros(size, np.int64)  # of the first columns; rows that are of others are overwritten
    chosen[ranges(first.targets, first.lengths)] = ranges(first.starts, first.lengths)
    rows = [ranges(move.starts, move.lengths) for move in others]
    places = [ranges(move.targets, move.lengths) for move in others]
    gathered = {}
    with torch.inference_mode(False):
        for key, column in first.columns.items():
            if column.nbytes >= _LARGE * len(column):
                gathered[key] = _copied_spans(key, moves, size)
                continue
            gathered[key] = picked(column, chosen)
            for move, taken, place in zip(others, rows, places, strict=True):
                gathered[key][place] = picked(move.columns[key], taken)
    return gathered


def as_arrays(columns: Mapping[Key, Tensor], dims: int = 1) -> dict[Key, Any]:
    """The rows of a batch as arrays, where they can be: on a few rows NumPy's calls outrun those of torch.

    Args:
        columns: [..., ...] by key.
        dims: batch dimensions, which become one.

    Returns:
        [R, ...] by key, the same memory where it can be.
    """
    arrays = {}
    for key, column in columns.items():
        array = _as_array(column)
        arrays[key] = array if dims == 1 else array.reshape(-1, *column.shape[dims:])
    return arrays


def picked(column: Any, rows: np.ndarray) -> Any:
    """Copies of rows of an array or tensor."""
    return column.take(rows, 0) if isinstance(column, np.ndarray) else column[rows]


def filled(like: Any, size: int, value: int) -> Any:
    """As many rows of the same kind, all of one value."""
    shape = (size, *like.shape[1:])
    if not isinstance(like, np.ndarray):
        return like.new_full(shape, value)
    return np.full(shape, value, like.dtype) if value else np.zeros(shape, like.dtype)


def _as_array(column: Tensor) -> Any:
    if not column.is_cpu:
        return column
    try:
        return column.detach().numpy()
    except TypeError:  # there is no such dtype, as for bfloat16
        return column


def _copied_spans(key: Key, moves: Sequence[Moves], size: int) -> Any:
    """In one pass, with one call for each fragment."""
    result = filled(moves[0].columns[key], size, 0)
    for move in moves:
        column = move.columns[key]
        for start, length, target in zip(*(of.tolist() for of in move[1:]), strict=True):
            result[target : target + length] = column[start : start + length]
    return result
