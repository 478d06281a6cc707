"""The batch contract: keys, shapes and dtypes of what is collected. Every other module speaks this language.

Legend: N = env copies (over all workers of one rank), T = steps of each copy, B = episodes, M = rows of a minibatch.
An unbatched env leaves N out. The last batch dimension is named "time". The layout is TorchRL's TED.
"""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from lit_collect.errors import FrameContractError

Key = tuple[str, ...]
"""The path of a leaf in a TensorDict."""

OBSERVATION: Key = ("observation",)  # [N, T, ...] what the policy saw (a Dict space gives its own keys instead)
ACTION: Key = ("action",)  # [N, T, ...] the policy's raw sample
DONE: Key = ("done",)  # [N, T, 1] bool, state before the step
TERMINATED: Key = ("terminated",)  # [N, T, 1] bool, state before the step
TRUNCATED: Key = ("truncated",)  # [N, T, 1] bool, state before the step
IS_INIT: Key = ("is_init",)  # [N, T, 1] bool, first row of an episode
NEXT_REWARD: Key = ("next", "reward")  # [N, T, 1] float32, for the action of the same row, unaltered
NEXT_DONE: Key = ("next", "done")  # [N, T, 1] bool, terminated or truncated: where to cut, never whether to bootstrap
NEXT_TERMINATED: Key = ("next", "terminated")  # [N, T, 1] bool, the value of the successor is 0
NEXT_TRUNCATED: Key = ("next", "truncated")  # [N, T, 1] bool, cut from outside: bootstrap from the successor
TRAJ_IDS: Key = ("collector", "traj_ids")  # [N, T] int64, k-th trajectory of global env g: k * G + g; -1: no transition
POLICY_VERSION: Key = ("collector", "policy_version")  # [N, T] int64, version of the weights that acted; -1: at random
ACTION_MASK: Key = ("action_mask",)  # [N, T, A] bool, actions that are allowed, where the env says so in its info
MASK: Key = ("collector", "mask")  # [N, T] bool, only where rows may be padding or no transition

SUCCESSORS: Key = ("collector", "successors")  # only in compact batches, see `lit_collect.successors`

# what is added to samples of a replay buffer, [M] rows or slices [S, L], and to trajectories [B, T]
INDEX: Key = ("index",)  # int64, where the row lies in the buffer; -1: padding
WRITTEN: Key = ("collector", "written")  # int64, the row was the k-th that was ever written; -1: padding
OFFLINE: Key = ("collector", "offline")  # bool [M] or [S, L], the row is of the offline part of a `MixedBuffer`
WEIGHT: Key = ("collector", "weight")  # float32, importance weight of a prioritized sample, the largest is 1
N_STEPS: Key = ("collector", "n_steps")  # int64, rewards in ("next", "reward"): bootstrap with gamma ** n_steps
LENGTHS: Key = ("collector", "lengths")  # int64, rows of the trajectory that the row belongs to

REPORTED = "reported"
"""Under this name, and under ``("next", ...)``, stands which `RolloutConfig.info_keys` the env reported: bool."""

NO_TRAJECTORY = -1
"""The id of rows that are padding or no transition."""

RESERVED = frozenset({"action", "done", "terminated", "truncated", "is_init", "next", "collector"})
"""Names at the root of a batch that neither an env's own keys nor the policy's outputs may take."""

RESERVED_OBSERVED = RESERVED | {"reward"}
"""Names that an env's own keys may not take, because they have a second place under ``"next"``."""

_ROWS: dict[Key, torch.dtype] = {
    DONE: torch.bool,
    TERMINATED: torch.bool,
    TRUNCATED: torch.bool,
    IS_INIT: torch.bool,
    NEXT_REWARD: torch.float32,
    NEXT_DONE: torch.bool,
    NEXT_TERMINATED: torch.bool,
    NEXT_TRUNCATED: torch.bool,
}
_COLUMNS: dict[Key, torch.dtype] = {TRAJ_IDS: torch.int64, POLICY_VERSION: torch.int64}


def as_key(key: str | tuple[str, ...]) -> Key:
    """A key as TensorDicts have it, always as a path."""
    return (key,) if isinstance(key, str) else tuple(key)


def is_private(key: Key) -> bool:
    """Whether a key stays inside the collector: any part of it begins with an underscore."""
    return any(part.startswith("_") for part in key)


def valid_rows(batch: TensorDictBase) -> torch.Tensor | None:
    """The mask of rows that are transitions, bool with the batch's shape, or None if all of them are."""
    return batch.get(MASK, None)


def columns_of(batch: TensorDictBase) -> dict[Key, torch.Tensor]:
    """All tensors of a batch by key, not copied."""
    return {as_key(key): column for key, column in batch.items(True, True) if isinstance(column, torch.Tensor)}


def put_at(tree: dict[str, Any], key: Key, value: Any) -> None:
    """Put a value into nested dicts, which are made where they are missing."""
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
    tree[key[-1]] = value


def count_frames(batch: TensorDictBase) -> int:
    """How many transitions a batch holds (masked rows are none)."""
    mask = valid_rows(batch)
    return batch.numel() if mask is None else int(mask.sum())


def limit_frames(batch: TensorDictBase, limit: int) -> TensorDictBase:
    """Mask the rows beyond a number of transitions, counted step by step over all env copies.

    Args:
        batch: [N, T]; owned by the caller, who gets it back.
        limit: transitions that stay.
    """
    mask = valid_rows(batch)
    mask = torch.ones(batch.batch_size, dtype=torch.bool) if mask is None else mask
    order = mask.T.reshape(-1).cumsum(0).reshape(mask.T.shape).T
    batch[MASK] = mask & (order <= limit)
    batch[TRAJ_IDS].masked_fill_(order > limit, NO_TRAJECTORY)
    return batch


def check_batch(batch: TensorDictBase) -> None:
    """Raise if a batch breaks the contract.

    Checks the keys, shapes and dtypes of this module, and what must hold between rows of one env copy: done is
    terminated or truncated, ids change and rows are marked as first exactly where an episode begins, and an
    observation is the successor of the row before it unless an episode ended there.

    Args:
        batch: [N, T] or [T], as a collector yields it; of a compact one `restore_successors` gives what is checked
            in full.

    Raises:
        FrameContractError: naming the key, what was expected and what was got.
        TypeError: if it is no TensorDict.
    """
    if not isinstance(batch, TensorDictBase):
        raise TypeError(f"a batch must be a TensorDict, got {type(batch).__name__}")
    shape = batch.batch_size
    mask = {} if valid_rows(batch) is None else {MASK: torch.bool}
    for rows, tail in ((_ROWS, (1,)), ({**_COLUMNS, **mask}, ())):
        for key, dtype in rows.items():
            value = _required(batch, key)
            if value.shape != shape + tail or value.dtype != dtype:
                raise FrameContractError(
                    f"{key} must be {dtype} with shape {tuple(shape + tail)}, "
                    f"got {value.dtype} with shape {tuple(value.shape)}"
                )
    _required(batch, ACTION)
    if not torch.equal(batch[NEXT_DONE], batch[NEXT_TERMINATED] | batch[NEXT_TRUNCATED]):
        raise FrameContractError(f"{NEXT_DONE} must be terminated or truncated in every row")
    _check_episodes(batch)
    if batch.get(SUCCESSORS, None) is None:
        _check_successors(batch)


def _required(batch: TensorDictBase, key: Key) -> torch.Tensor:
    value = batch.get(key, None)
    if value is None:
        raise FrameContractError(f"a batch lacks the key {key}")
    return value


def _check_episodes(batch: TensorDictBase) -> None:
    """An id and an episode begin after the last row of an episode, and nowhere else within a batch."""
    ids, pairs = batch[TRAJ_IDS], _pairs(batch)
    ended, changed = batch[NEXT_DONE][..., :-1, 0], ids[..., 1:] != ids[..., :-1]
    if (pairs & ended & ~changed).any():
        raise FrameContractError(f"{TRAJ_IDS} must change after the last row of an episode")
    if (pairs & ~ended & changed).any():
        raise FrameContractError(f"{TRAJ_IDS} must not change within an episode")
    if (pairs & (batch[IS_INIT][..., 1:, 0] != ended)).any():
        raise FrameContractError(f"{IS_INIT} must mark the row after the last one of an episode, and no other")


def _check_successors(batch: TensorDictBase) -> None:
    """Within a trajectory each row was acted on what the row before it led to."""
    ids, successors = batch[TRAJ_IDS], batch["next"]
    same = _pairs(batch) & (ids[..., 1:] == ids[..., :-1])
    paths = [as_key(key) for key in successors.keys(True, True)]
    observed = [path for path in paths if path[0] not in ("reward", "done", "terminated", "truncated")]
    if not observed:
        raise FrameContractError("a batch lacks the key ('next', 'observation')")
    for path in observed:
        _required(batch, path)
        led_to, seen = _rows(successors, path, same, 0), _rows(batch, path, same, 1)
        if not ((led_to == seen) | (led_to.isnan() & seen.isnan())).all():
            raise FrameContractError(f"{path} must be the successor of the row before it within a trajectory")


def _pairs(batch: TensorDictBase) -> torch.Tensor:
    """[N, T - 1] bool: where a row and the one after it are both transitions."""
    mask = valid_rows(batch)
    if mask is None:
        mask = torch.ones_like(batch[TRAJ_IDS], dtype=torch.bool)
    return mask[..., 1:] & mask[..., :-1]


def _rows(data: TensorDictBase, key: Key, chosen: torch.Tensor, offset: int) -> torch.Tensor:
    """Values of the chosen neighbouring rows: the earlier ones (offset 0) or the later ones (offset 1)."""
    dim = chosen.ndim - 1
    value = data[key]
    return value.narrow(dim, offset, value.shape[dim] - 1)[chosen]


def to_numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The NumPy dtype of a torch dtype."""
    return torch.empty(0, dtype=dtype).numpy().dtype


def flatten_rows(batch: TensorDictBase) -> TensorDictBase:
    """All transitions of a batch as one dimension of rows, masked rows left out.

    Args:
        batch: [N, T] or [T].

    Returns:
        [M], env copy by env copy in the order of time.

    Example:
        >>> from tensordict import TensorDict
        >>> flatten_rows(TensorDict({"reward": torch.zeros(2, 3, 1)}, batch_size=[2, 3])).batch_size
        torch.Size([6])
    """
    mask = valid_rows(batch)
    if batch.get(SUCCESSORS, None) is not None:
        batch = batch.exclude(SUCCESSORS)  # it speaks of rows in their places
    return batch.reshape(-1) if mask is None else batch[mask]
