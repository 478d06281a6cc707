"""`Intake`: what is made of a batch before it is stored: one dimension of rows, each of a trajectory that has an id."""

import secrets

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lit_collect.errors import FrameContractError
from lit_collect.frames import (
    INDEX,
    LENGTHS,
    MASK,
    N_STEPS,
    NEXT_DONE,
    OFFLINE,
    SUCCESSORS,
    TRAJ_IDS,
    WEIGHT,
    WRITTEN,
    flatten_rows,
)
from lit_collect.successors import restore_successors

_DERIVED = (MASK, LENGTHS, WRITTEN, OFFLINE, WEIGHT, N_STEPS)  # they speak of a row's place in a batch or a sample


class Intake:
    """Turns batches into rows. Rows that come without trajectory ids get some, as follows from their ends.

    Batches of one dimension are one stream, which goes on from one to the next; each env copy of a batch [N, T] begins
    a trajectory of its own, for nobody knows how the copies of two batches belong together.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"next": {"done": torch.tensor([[[False], [True], [False]]] * 2)}}, batch_size=[2, 3])
        >>> ids = Intake().rows(batch)["collector", "traj_ids"]
        >>> (ids - ids[0]).tolist()
        [0, 0, 1, 2, 2, 3]
    """

    def __init__(self) -> None:
        # Those who write into one storage number apart from each other, after a restart, too.
        self._next_id = secrets.randbits(38) << 24
        self._goes_on = False

    def rows(self, batch: TensorDictBase) -> TensorDictBase:
        """The transitions of a batch, with nothing in it that a sample or a batch adds to them.

        Args:
            batch: [M], [N, T], or of more dimensions, the last of which is time. Compact ones are restored.

        Returns:
            [M], a mapping of its own whose values may be those of the batch.

        Raises:
            TypeError: if it is no TensorDict.
            FrameContractError: if it has no dimension, or keys that a buffer gives to its samples.
        """
        if not isinstance(batch, TensorDictBase):
            raise TypeError(f"what is written into a replay buffer must be a TensorDict, got {type(batch).__name__}")
        if batch.batch_dims == 0:
            raise FrameContractError("a batch must have a dimension of rows, got batch_size []; use add for one row")
        if batch.get(SUCCESSORS, None) is not None:
            batch = restore_successors(batch)
        rows = flatten_rows(batch)
        if rows is batch or batch.batch_dims == 1:
            rows = rows.copy()
        _leave_out_added(rows)
        if rows.get(TRAJ_IDS, None) is None:
            rows.set(TRAJ_IDS, self._numbered(batch, rows))
        return rows

    def _numbered(self, batch: TensorDictBase, rows: TensorDictBase) -> Tensor:
        """[M] int64: ids for rows without any."""
        done = rows.get(NEXT_DONE, None)
        ends = torch.zeros(len(rows), dtype=torch.bool)
        if done is not None and len(rows):
            ends = done.detach().cpu().reshape(len(rows), -1).any(1)
        cuts = ends.clone()
        alone = batch.batch_dims > 1
        if alone and len(rows):
            cuts |= _last_of_copies(batch)
        begins = self._next_id + (alone and self._goes_on)
        ids = begins + torch.cat([torch.zeros(1, dtype=torch.int64), cuts.long().cumsum(0)])
        if len(rows):
            self._next_id = int(ids[-1])
            self._goes_on = not alone and not bool(cuts[-1])
        return ids[:-1]


def _leave_out_added(rows: TensorDictBase) -> None:
    sampled = rows.get(WRITTEN, None) is not None
    if rows.get(INDEX, None) is not None:
        if not sampled:
            raise FrameContractError(
                "rows have a key 'index' of their own, under which a replay buffer tells where a sampled row lies; "
                "rename it, for an env's observation with a wrapper"
            )
        rows.pop(INDEX[0])
    collector = rows.get("collector", None)
    if collector is not None:
        names = {key[1] for key in _DERIVED} & set(collector.keys())
        if names:
            rows.set("collector", collector.exclude(*names))


def _last_of_copies(batch: TensorDictBase) -> Tensor:
    """[M] bool: the last transition of each env copy of a batch."""
    mask = batch.get(MASK, None)
    valid = torch.ones(batch.batch_size, dtype=torch.bool) if mask is None else mask.cpu()
    places = torch.arange(valid.shape[-1]).expand(valid.shape)
    last = (places * valid).amax(-1, keepdim=True)
    return (places == last)[valid]
