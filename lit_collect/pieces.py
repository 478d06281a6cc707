"""Where the trajectories lie among rows: by id, whatever the order the rows come in.

Legend: see `lit_collect.frames`. R = rows of a batch in flattened order, M = those that are transitions, B =
trajectories.
"""

from typing import NamedTuple

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from lit_collect.errors import FrameContractError
from lit_collect.frames import Key


class Pieces(NamedTuple):
    """The trajectories of a batch, in the order of their first rows."""

    rows: np.ndarray
    """[M] int64, positions in the flattened batch, trajectory by trajectory, in the order of time."""
    starts: np.ndarray
    """[B] int64, where each trajectory begins in `rows`."""
    lengths: np.ndarray
    """[B] int64."""


def find_pieces(groups: np.ndarray, ends: np.ndarray | None, valid: np.ndarray | None) -> Pieces:
    """Find the trajectories among rows.

    Args:
        groups: [R] int64, rows of different values belong to different trajectories.
        ends: [R] bool, rows that end a trajectory; None if there are none.
        valid: [R] bool, rows that are transitions; None if all are.

    Example:
        >>> find_pieces(np.array([4, 7, 4, 7]), None, None).rows.tolist()
        [0, 2, 1, 3]
    """
    rows = np.arange(len(groups)) if valid is None else np.flatnonzero(valid)
    grouped = groups if len(rows) == len(groups) else groups[rows]
    changes = _changes(grouped)
    values = grouped[changes].tolist()
    together = len(set(values)) == len(values)  # as in a batch of env copies, which needs no sorting
    if not together:
        rows = rows[np.argsort(grouped, kind="stable")]
        changes = _changes(groups[rows])
    if ends is not None:
        changes[1:] |= ends[rows[:-1]]
    starts = np.flatnonzero(changes)
    lengths = np.append(starts[1:], len(rows))[: len(starts)] - starts
    if together:
        return Pieces(rows, starts, lengths)
    order = np.argsort(rows[starts], kind="stable")
    lengths = lengths[order]
    return Pieces(rows[ranges(starts[order], lengths)], np.cumsum(lengths) - lengths, lengths)


def _changes(values: np.ndarray) -> np.ndarray:
    """[M] bool: values that are another than the one before."""
    changes = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Numbers that count up from each start, one range after the other.

    Args:
        starts: [B] int64.
        lengths: [B] int64.

    Returns:
        [M] int64.

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def per_row(batch: TensorDictBase, key: Key) -> np.ndarray:
    """A column with one value a row, flattened.

    Args:
        batch: of any batch dimensions.
        key: of the column.

    Returns:
        [R].

    Raises:
        FrameContractError: if it is missing or has another shape.
    """
    value = batch.get(key, None)
    if not isinstance(value, Tensor):
        raise FrameContractError(f"a batch lacks the key {key}")
    if value.shape not in (batch.shape, (*batch.shape, 1)):
        raise FrameContractError(
            f"{key} must have one value a row : expected the shape {tuple(batch.shape)}, got {tuple(value.shape)}"
        )
    return value.detach().cpu().reshape(-1).numpy()


def lengths_of_rows(pieces: Pieces) -> np.ndarray:
    """[M] int64: the length of each row's trajectory."""
    return np.repeat(pieces.lengths, pieces.lengths)
