"""A batch of zeros in the shape of real ones, for who wants to know keys and shapes before anything is stepped."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lit_collect.assembly import Assembly, Episodes
from lit_collect.columns import Columns, store
from lit_collect.envs.base import BatchedEnv
from lit_collect.frames import SUCCESSORS, columns_of, put_at
from lit_collect.policies import Actor
from lit_collect.successors import table_of


def blank_batch(env: BatchedEnv, actor: Actor, steps: int, *, assembly: Callable[[int], Assembly]) -> TensorDict:
    """Ask the policy once, about an observation of zeros, and make a batch of what it is like.

    Args:
        env: is neither reset nor stepped; an action mask is in the batch only if an earlier reset has shown it.
        actor: acts within `Actor.acting`, without a change of its state.
        steps: T.
        assembly: makes the assembly of a batch of so many steps.

    Returns:
        [N, T], all zero.
    """
    columns = Columns(1, env.num_envs, leaves=env.leaves, action_spec=env.action_spec)
    for column in columns.observations:
        column.zero_()
    if (mask := next((i for i, leaf in enumerate(env.leaves) if leaf.key == ("action_mask",)), None)) is not None:
        columns.observations[mask].fill_(1)  # something must be allowed
    values = actor.preview(columns.inputs[0])
    targets = columns.targets(actor.keys, values)[0]
    store(values, targets, [target.numel() for target in targets], actor.keys)
    one = assembly(1)
    one.take(columns, 0, 1, keys=actor.keys, finals=[])
    completed = actor.complete(one.outputs)
    mask_rows = one.valid.copy() if env.may_mask else None
    episodes = Episodes(range(env.num_envs), env.num_envs)
    return _stretched(one.finish(episodes, versions=np.zeros(1, np.int64), completed=completed, mask=mask_rows), steps)


def _stretched(batch: TensorDict, steps: int) -> TensorDict:
    """Zeros like a batch of one step, for so many steps."""
    copies = batch.shape[0]
    root: dict[str, Any] = {}
    with torch.inference_mode(False):  # whoever gets them may change them
        for key, column in columns_of(batch).items():
            put_at(root, key, column.new_zeros(copies, steps, *column.shape[2:]))
    table = table_of(batch)
    if table is not None:
        values = {key: torch.zeros_like(value) for key, value in table.values.items()}
        shape, last = (copies, steps), torch.full_like(table.steps, steps - 1)
        put_at(root, SUCCESSORS, replace(table, shape=shape, steps=last, values=values).entry())
    return TensorDict(root, batch_size=(copies, steps), names=[None, "time"])  # type: ignore[list-item]
