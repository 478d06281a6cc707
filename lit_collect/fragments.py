"""Rows that wait to be taken: blocks of them as they came, and fragments of trajectories in the blocks.

Nothing is copied until it is taken. But one long trajectory would keep every batch alive that it has a row in, so
blocks that are mostly of no use any more are merged into one from time to time: at most half of what is kept, and a few
batches, are unused.

Legend: R = rows of a block, M = rows of fragments, one after the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_collect.frames import Key
from lit_collect.pieces import ranges

_SPARE = 4  # batches of rows that may lie around unused
_LARGE = 1024  # bytes of a row from which on it pays to copy fragment by fragment


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """Rows of one batch, or of several that were merged."""

    columns: Mapping[Key, Any]
    """[R, ...] by key: arrays, or tensors where NumPy cannot have them."""
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


class Store:
    """The blocks that are needed.

    Example:
        >>> store = Store()
        >>> block = store.keep({("step",): torch.arange(4)}, needed=3)
        >>> fragments = [Fragment(block=block, start=3, length=1), Fragment(block=block, start=0, length=2)]
        >>> gather(fragments, size=3)
        {('step',): tensor([3, 0, 1])}
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

    def keep(self, columns: Mapping[Key, Tensor], needed: int) -> Block:
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
        count = int(lengths.sum())
        merged = self._put(gather(moved, count), count)
        for fragment, start in zip(moved, (np.cumsum(lengths) - lengths).tolist(), strict=True):
            self.release(fragment.block, fragment.length)
            fragment.block, fragment.start = merged, start

    def _put(self, columns: Mapping[Key, Tensor], needed: int) -> Block:
        arrays = {key: _as_array(column) for key, column in columns.items()}
        block = Block(columns=arrays, size=len(next(iter(columns.values()))), needed=needed)
        self._blocks[block] = None
        self.rows += block.size
        self.rows_needed += needed
        return block


def gather(fragments: Sequence[Fragment], size: int, targets: Sequence[int] | None = None) -> dict[Key, Tensor]:
    """Copy the rows of fragments.

    Args:
        fragments: at least one.
        size: rows of the result.
        targets: where the first row of each fragment goes, ascending; rows between them are zero. None: one after the
            other.

    Returns:
        [size, ...] by key, on the device of the first block.
    """
    if targets is None:
        targets = list(accumulate((fragment.length for fragment in fragments[:-1]), initial=0))
    by_block: dict[Block, list[tuple[int, int, int]]] = {}
    for fragment, target in zip(fragments, targets, strict=True):
        by_block.setdefault(fragment.block, []).append((target, fragment.start, fragment.length))
    blocks, spans = list(by_block), list(by_block.values())
    moves = [np.array(moved).T for moved in spans]
    rows = [ranges(start, length) for _, start, length in moves]
    with torch.inference_mode(False):
        if len(blocks) == 1 and len(rows[0]) == size:  # they come in their order, without gaps
            return {key: _as_tensor(_picked(column, rows[0])) for key, column in blocks[0].columns.items()}
        places = [ranges(target, length) for target, _, length in moves]
        gathered = {}
        for key, first in blocks[0].columns.items():
            columns = [block.columns[key] for block in blocks]
            result = _zeros(size, first)
            if first.nbytes >= _LARGE * len(first):
                _copy_spans(result, columns, spans)
            else:
                _copy_rows(result, columns, rows, places)
            gathered[key] = _as_tensor(result)
    return gathered


def _as_array(column: Tensor) -> Any:
    """The same memory as an array, if it can be: on a few rows NumPy's calls take a fraction of the time of torch's."""
    if not column.is_cpu:
        return column
    try:
        return column.detach().numpy()
    except TypeError:  # there is no such dtype, as for bfloat16
        return column


def _as_tensor(column: Any) -> Tensor:
    return torch.from_numpy(column) if isinstance(column, np.ndarray) else column


def _picked(column: Any, rows: np.ndarray) -> Any:
    return column.take(rows, 0) if isinstance(column, np.ndarray) else column[rows]


def _zeros(size: int, like: Any) -> Any:
    shape = (size, *like.shape[1:])
    return np.zeros(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_zeros(shape)


def _copy_rows(result: Any, columns: Sequence[Any], rows: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> None:
    """In two passes, with one call for each block."""
    for column, chosen, place in zip(columns, rows, places, strict=True):
        result[place] = _picked(column, chosen)


def _copy_spans(result: Any, columns: Sequence[Any], spans: Sequence[Sequence[tuple[int, int, int]]]) -> None:
    """In one pass, with one call for each fragment."""
    for column, moves in zip(columns, spans, strict=True):
        for target, start, length in moves:
            result[target : target + length] = column[start : start + length]
