"""`Finished`: whole trajectories, one after the other in the order in which they ended.

Legend: B = trajectories, M = rows of them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lit_collect.fragments import Columns, picked
from lit_collect.pieces import ranges


@dataclass(slots=True, eq=False, kw_only=True)
class _Bundle:
    """Trajectories that ended in one batch, and how far they were taken."""

    columns: Columns
    lengths: np.ndarray
    versions: np.ndarray
    taken: int = 0  # trajectories
    row: int = 0  # where the next one begins


class Finished:
    """A queue of trajectories.

    Example:
        >>> finished = Finished()
        >>> finished.put({("step",): np.array([0, 1, 0])}, lengths=np.array([2, 1]), versions=np.array([5, 6]))
        >>> finished.count, finished.rows
        (2, 3)
        >>> finished.take(1)
        ({('step',): array([0, 1])}, array([2]))
        >>> finished.drop_older_than(7), finished.count
        (1, 0)
    """

    def __init__(self) -> None:
        self._bundles: deque[_Bundle] = deque()
        self.count = 0
        """Trajectories that wait."""
        self.rows = 0
        """Their rows."""

    def put(self, columns: Columns, lengths: np.ndarray, versions: np.ndarray) -> None:
        """More of them.

        Args:
            columns: [M, ...] by key; the queue's from here on.
            lengths: [B] int64, at least one.
            versions: [B] int64, the oldest weights that acted in each.
        """
        self._bundles.append(_Bundle(columns=columns, lengths=lengths, versions=versions))
        self.count += len(lengths)
        self.rows += int(lengths.sum())

    def take(self, count: int) -> tuple[Columns, np.ndarray]:
        """The oldest ones. No row is given twice, but what two calls give may be parts of the same memory.

        Args:
            count: how many, at least one and at most as many as wait.

        Returns:
            Their columns, [M, ...] by key, and their lengths, [B].
        """
        parts: list[Columns] = []
        taken: list[np.ndarray] = []
        while count:
            bundle = self._bundles[0]
            lengths = bundle.lengths[bundle.taken : bundle.taken + count]
            rows = slice(bundle.row, bundle.row + int(lengths.sum()))
            parts.append({key: column[rows] for key, column in bundle.columns.items()})
            taken.append(lengths)
            self.rows -= rows.stop - rows.start
            self.count -= len(lengths)
            count -= len(lengths)
            bundle.taken, bundle.row = bundle.taken + len(lengths), rows.stop
            if bundle.taken == len(bundle.lengths):
                self._bundles.popleft()
        if len(parts) == 1:
            return parts[0], taken[0]
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}, np.concatenate(taken)

    def waiting(self) -> Columns:
        """All rows that wait, [M, ...] by key; to be read only. There must be some."""
        parts = [{key: column[bundle.row :] for key, column in bundle.columns.items()} for bundle in self._bundles]
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}

    def drop_older_than(self, version: int) -> int:
        """Drop those in which weights acted that are older than allowed.

        Args:
            version: the oldest that is allowed.

        Returns:
            Rows that were dropped.
        """
        before, bundles = self.rows, self._bundles
        if not any((bundle.versions[bundle.taken :] < version).any() for bundle in bundles):
            return 0
        self.clear()
        for bundle in bundles:
            lengths, versions = bundle.lengths[bundle.taken :], bundle.versions[bundle.taken :]
            kept = versions >= version
            if kept.any():
                starts = bundle.row + np.cumsum(lengths) - lengths
                rows = ranges(starts[kept], lengths[kept])
                columns = {key: picked(column, rows) for key, column in bundle.columns.items()}
                self.put(columns, lengths[kept], versions[kept])
        return before - self.rows

    def clear(self) -> None:
        """Drop all of them."""
        self._bundles = deque()
        self.count = self.rows = 0


def _joined(parts: Sequence[Any]) -> Any:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(list(parts))
