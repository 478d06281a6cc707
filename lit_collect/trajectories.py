"""`split_trajectories`: any batch cut into its trajectories, whatever the order its rows come in.

Legend: see `lit_collect.frames`. R = rows of a batch in flattened order, M = those that are transitions, B =
trajectories, L = the longest one.
"""

import warnings
from typing import Any, Literal, get_args

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from lit_collect.errors import FrameContractError
from lit_collect.frames import LENGTHS, MASK, NO_TRAJECTORY, TRAJ_IDS, Key, as_key, columns_of, put_at
from lit_collect.pieces import Pieces, find_pieces, lengths_of_rows, per_row
from lit_collect.successors import restore_successors

Layout = Literal["padded", "nested", "jagged", "cat"]
_LAYOUTS: tuple[str, ...] = get_args(Layout)


def split_trajectories(
    batch: TensorDictBase,
    layout: Layout = "padded",
    *,
    trajectory_key: str | Key | None = None,
    done_key: str | Key | None = None,
    prefix: str | Key | None = None,
) -> TensorDictBase:
    """Cut a batch into its trajectories.

    Rows belong together if they have the same id, wherever in the batch they lie and whatever lies between them; a
    row that is done ends its trajectory, so that two slices of one episode are two trajectories. In a batch without
    ids, trajectories are what lies between rows that are done, and none goes on beyond the last step of a line of
    time. Trajectories come in the order of their first rows. Rows that are masked, or have the id -1, are left out. A
    compact batch is restored first (see `restore_successors`).

    Args:
        batch: [T], [N, T] or deeper; the last dimension is time. What was split before can be split again, unless it
            is nested.
        layout: ``"padded"``: [B, L], shorter ones padded with zeros and the id -1 (what is no tensor repeats its last
            value). ``"cat"``: [M], one after the other. ``"nested"``: [B, -1] of strided nested tensors ([B, L] where
            all lengths are equal, and [0, 0] of ordinary tensors where there is no trajectory). ``"jagged"``: [B] of
            nested tensors in torch's jagged layout.
        trajectory_key: where ids stand, int64 with the batch's shape; None looks for ``"traj_ids"`` under `prefix`,
            then under ``"collector"``.
        done_key: name of the flag under ``"next"``, one value a row (None: ``"done"``).
        prefix: under which ``"mask"`` and ``"lengths"`` are written, and a mask is looked for; ``()`` is the root.
            None takes ``"collector"`` if the batch has it, else the root.

    Returns:
        A new TensorDict with the values of the batch and, whatever the layout, the bool ``mask`` of rows that are
        transitions and int64 ``lengths``: at each row the length of its trajectory. The last dimension is named "time"
        if it is one of steps.

    Raises:
        FrameContractError: if a key that is named, or ``("next", "done")`` where there are no ids, is missing; if ids,
            flags or a mask do not have one value a row; if a nested layout is to hold what is no tensor; if the batch
            is nested; if a tensor stands at the prefix.
        ValueError: if there is no such layout.
        TypeError: if the batch is no TensorDict, or a key or the prefix is neither a string nor a tuple of them.

    Example:
        >>> from lit_collect import Collector
        >>> from lit_collect.testing import CountingEnv
        >>> with Collector(CountingEnv, num_envs=2, frames_per_batch=10, seed=0) as collector:  # episodes of 3 frames
        ...     batch = collector.collect()
        >>> episodes = split_trajectories(batch)
        >>> episodes.shape, episodes["collector", "traj_ids"].tolist()
        (torch.Size([4, 3]), [[0, 0, 0], [2, 2, -1], [1, 1, 1], [3, 3, -1]])
        >>> episodes["collector", "lengths"][:, 0].tolist()
        [3, 2, 3, 2]
        >>> split_trajectories(batch, "cat").shape
        torch.Size([10])
    """
    if layout not in _LAYOUTS:
        raise ValueError(f"there is no such layout : expected one of {', '.join(_LAYOUTS)}, got {layout!r}")
    if not isinstance(batch, TensorDictBase):
        raise TypeError(f"a batch must be a TensorDict, got {type(batch).__name__}")
    named = {"trajectory_key": trajectory_key, "done_key": done_key, "prefix": prefix}
    for name, given in named.items():
        if given is not None and not all(isinstance(part, str) for part in _parts(given)):
            raise TypeError(f"{name} must be a string or a tuple of strings, got {given!r}")
    if any(column.is_nested for column in columns_of(batch).values()):
        raise FrameContractError(
            "a batch is nested : expected one tensor of all rows for each key, got nested tensors; split it from the "
            "'padded' or 'cat' layout"
        )
    if not batch.batch_dims:
        raise FrameContractError("a batch must have at least the dimension of time, got the batch size []")
    batch = restore_successors(batch)
    root = _root(batch, prefix)
    ids_key = _ids_key(batch, root, trajectory_key)
    pieces = find_pieces(
        np.arange(batch.numel()) // batch.shape[-1] if ids_key is None else per_row(batch, ids_key),
        _ends(batch, done_key, needed=ids_key is None),
        _valid(batch, root, ids_key),
    )
    flat = batch.reshape(-1)
    if layout == "padded":
        return _padded(flat, pieces, root, ids_key)
    joined = _labelled(flat[torch.from_numpy(pieces.rows).to(_device(flat))], root, lengths_of_rows(pieces))
    if layout == "cat":
        joined.names = ["time"]
        return joined
    _check_tensors(joined, layout)
    if layout == "jagged":
        return _jagged(joined, pieces.lengths)
    # torch cannot say how many dimensions of an empty strided nested tensor follow the first two
    return _strided(joined, pieces.lengths) if len(pieces.lengths) else _padded(flat, pieces, root, ids_key)


def _parts(given: Any) -> tuple[Any, ...]:
    """What a key consists of, which may be anything."""
    return given if isinstance(given, tuple) else (given,)


def _root(batch: TensorDictBase, prefix: str | Key | None) -> Key:
    if prefix is not None:
        root = as_key(prefix)
        for key in (root[:depth] for depth in range(1, len(root) + 1)):
            if not isinstance(batch.get(key, None), (TensorDictBase, type(None))):
                raise FrameContractError(
                    f"the mask and the lengths cannot be put under the prefix {root} : expected a name that is free or "
                    f"holds further keys, got {key}, which is a value of the batch; name another prefix"
                )
        return root
    return MASK[:1] if isinstance(batch.get(MASK[0], None), TensorDictBase) else ()


def _ids_key(batch: TensorDictBase, root: Key, given: str | Key | None) -> Key | None:
    if given is not None:
        key = as_key(given)
        if batch.get(key, None) is None:
            raise FrameContractError(
                f"a batch lacks the key {key} : expected the ids of its rows there; name another trajectory_key, or "
                f"none to cut where episodes end"
            )
        return key
    return next((key for key in ((*root, TRAJ_IDS[-1]), TRAJ_IDS) if batch.get(key, None) is not None), None)


def _ends(batch: TensorDictBase, given: str | Key | None, *, needed: bool) -> np.ndarray | None:
    key = ("next", *as_key("done" if given is None else given))
    if given is None and not needed and batch.get(key, None) is None:
        return None
    if batch.get(key, None) is None:
        raise FrameContractError(
            f"a batch lacks the key {key} : expected ids or flags to cut at; name them by trajectory_key or done_key"
        )
    return per_row(batch, key).astype(bool)


def _valid(batch: TensorDictBase, root: Key, ids_key: Key | None) -> np.ndarray | None:
    """Rows that are transitions, None if nothing says that some are not."""
    told = [] if ids_key is None else [per_row(batch, ids_key) != NO_TRAJECTORY]
    for key in dict.fromkeys(((*root, MASK[-1]), MASK)):
        mask = batch.get(key, None)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                raise FrameContractError(f"{key} must be the bool mask of rows; name another prefix if it is none")
            told.append(per_row(batch, key))
    return np.logical_and.reduce(told) if told else None


def _padded(flat: TensorDictBase, pieces: Pieces, root: Key, ids_key: Key | None) -> TensorDictBase:
    """[B, L]."""
    steps, lengths = np.arange(pieces.lengths.max(initial=0)), pieces.lengths[:, None]
    chosen = pieces.starts[:, None] + np.minimum(steps, lengths - 1)  # what is no tensor repeats its last value
    padded = flat[torch.from_numpy(pieces.rows[chosen]).to(_device(flat))]
    padding = torch.from_numpy(steps >= lengths)
    for key, column in columns_of(padded).items():
        column[padding.to(column.device)] = NO_TRAJECTORY if key == ids_key else 0
    padded = _labelled(padded, root, np.broadcast_to(lengths, chosen.shape), ~padding)
    padded.names = [None, "time"]
    return padded


def _labelled(rows: TensorDictBase, root: Key, lengths: np.ndarray, mask: Tensor | None = None) -> TensorDictBase:
    """The same rows with a mask and lengths."""
    device = _device(rows)
    whole = torch.ones(rows.shape, dtype=torch.bool) if mask is None else mask
    rows[(*root, MASK[-1])] = whole.to(device)
    rows[(*root, LENGTHS[-1])] = torch.from_numpy(lengths.astype(np.int64)).to(device)
    return rows


def _strided(joined: TensorDictBase, lengths: np.ndarray) -> TensorDict:
    """[B, -1], or [B, L] if all lengths are equal."""
    sizes = lengths.tolist()
    root: dict[str, object] = {}
    with warnings.catch_warnings():  # whoever asks for this layout knows
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
        for key, column in columns_of(joined).items():
            put_at(root, key, torch.nested.as_nested_tensor(list(column.split(sizes)), layout=torch.strided))
    shape = [len(sizes), sizes[0] if len(set(sizes)) == 1 else -1]
    return TensorDict(root, batch_size=shape, names=[None, "time"])  # type: ignore[list-item]


def _jagged(joined: TensorDictBase, lengths: np.ndarray) -> TensorDict:
    """[B]; all leaves share their offsets."""
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(_device(joined))
    shortest, longest = int(lengths.min(initial=0)), int(lengths.max(initial=0))
    root: dict[str, object] = {}
    for key, column in columns_of(joined).items():
        nested = torch.nested.nested_tensor_from_jagged(column, offsets, min_seqlen=shortest, max_seqlen=longest)
        put_at(root, key, nested)
    return TensorDict(root, batch_size=[len(lengths)])


def _check_tensors(rows: TensorDictBase, layout: str) -> None:
    tensors = columns_of(rows)
    others = [key for key in map(as_key, rows.keys(True, True, is_leaf=is_leaf_nontensor)) if key not in tensors]
    if others:
        raise FrameContractError(
            f"a nested layout holds tensors only : expected no {', '.join(map(str, others))} with layout={layout!r}; "
            f"exclude it from the batch, or use 'padded' or 'cat'"
        )


def _device(rows: TensorDictBase) -> torch.device | None:
    """Where the rows are; None if nothing is in them."""
    if rows.device is not None:
        return rows.device
    return next((column.device for column in columns_of(rows).values()), None)
