"""Compact batches: successor observations that the following row repeats are left out, the others kept in a table.

A row's successor is the observation of the next row of the same env copy, except where an episode ended and at the
edge of the batch. Only those few are stored, so that a batch of images takes half the memory, and `restore_successors`
gives back the same batch to the bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor

from lit_collect.errors import FrameContractError
from lit_collect.frames import SUCCESSORS, Key


@dataclass(kw_only=True)  # not frozen: Lightning converts what is in a batch in place, under some precisions
class SuccessorTable:
    """The successors of a batch [N, T] that no row repeats: K of them."""

    shape: tuple[int, int]
    """N and T of the batch."""
    copies: Tensor
    """[K] int64, rows of the batch (env copies)."""
    steps: Tensor
    """[K] int64."""
    values: Mapping[Key, Tensor]
    """[K, ...] for each leaf of the observation."""

    @classmethod
    def joined(cls, tables: "Sequence[SuccessorTable]") -> "SuccessorTable":
        """The table of a batch whose rows are those of several batches one after the other.

        Args:
            tables: at least one, in the order of the batches.
        """
        if len(tables) == 1:
            return tables[0]
        offsets = [sum(table.shape[0] for table in tables[:number]) for number in range(len(tables))]
        return cls(
            shape=(sum(table.shape[0] for table in tables), max(table.shape[1] for table in tables)),
            copies=torch.cat([table.copies + offset for table, offset in zip(tables, offsets, strict=True)]),
            steps=torch.cat([table.steps for table in tables]),
            values={key: torch.cat([table.values[key] for table in tables]) for key in tables[0].values},
        )

    def entry(self) -> Any:
        """The table as an entry of the batch that it belongs to."""
        return NonTensorData(self, batch_size=self.shape)


def table_of(batch: TensorDictBase) -> SuccessorTable | None:
    """The table of a compact batch, None if its successors are all there."""
    found = batch.get(SUCCESSORS, None)
    return found if found is None or isinstance(found, SuccessorTable) else found.data


def restore_successors(batch: TensorDictBase) -> TensorDictBase:
    """Give a compact batch its ``("next", ...)`` observations back, equal to the bit to those of a full batch.

    Args:
        batch: [N, T] or [T], as it was collected with ``RolloutConfig(compact_obs=True)``; any other is returned as
            it is.

    Returns:
        A new batch that shares its other values with the given one.

    Raises:
        FrameContractError: if rows of the batch were picked or rearranged since it was collected.

    Example:
        >>> from lit_collect import Collector, RolloutConfig
        >>> rollout = RolloutConfig(compact_obs=True)
        >>> with Collector("CartPole-v1", num_envs=2, frames_per_batch=8, rollout=rollout, seed=0) as collector:
        ...     batch = collector.collect()
        >>> ("next", "observation") in batch.keys(include_nested=True)
        False
        >>> restore_successors(batch)["next", "observation"].shape
        torch.Size([2, 4, 4])
    """
    table = table_of(batch)
    if table is None:
        return batch
    whole = batch.exclude(SUCCESSORS).clone(recurse=False)  # what is nested in it, too, is a mapping of its own
    unbatched = batch.batch_dims == 1
    if tuple(batch.shape) != (table.shape[1:] if unbatched else table.shape):
        raise FrameContractError(
            f"the successors of a compact batch cannot be told apart any more : expected its shape {table.shape}, got "
            f"{tuple(batch.shape)}; call restore_successors before rows are picked or rearranged"
        )
    for key, values in table.values.items():
        seen = batch[key].unsqueeze(0) if unbatched else batch[key]
        following = torch.cat([seen[:, 1:], seen[:, -1:]], 1)
        following[table.copies.to(seen.device), table.steps.to(seen.device)] = values.to(seen.device)
        whole[("next", *key)] = following[0] if unbatched else following
    return whole
