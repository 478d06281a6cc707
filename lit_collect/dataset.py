"""Collected batches as what a Trainer or a plain loop iterates over: sized, without look-ahead, never restarted."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lit_collect.collector import Collector
from lit_collect.config import UpdateConfig, at_least, settings
from lit_collect.errors import BudgetSpentError, LitCollectError
from lit_collect.frames import flatten_rows


class BatchSource(Protocol):
    """Where whole batches come from; a `Collector` is one."""

    frames_per_batch: int

    @property
    def frames_budget(self) -> int:
        """Frames of this rank in all, -1 without a limit."""

    @property
    def frames_left(self) -> int | None:
        """Frames until the budget is spent, None without one."""

    def collect(self) -> TensorDictBase:
        """The next whole batch."""


class CollectorDataset(IterableDataset[TensorDictBase]):
    """An endless or budgeted stream of collected batches, cut into epochs and minibatches.

    `iter` does nothing until the first batch is asked for, and goes on where the stream was left. A batch is
    collected after the last minibatch of the one before it was taken, so that data are on-policy. An epoch that is cut
    short within a batch (`limit_train_batches`), or resumed there, leaves the rest of that batch out.

    Args:
        source: a `Collector`, or what else hands out whole batches.
        batches_per_epoch: collected batches in one epoch; None: the whole budget (1000 if there is none).
        updates: passes and minibatches made of each collected batch.
        agree: gives the largest of a number over all ranks, each of which must call it; without it ranks whose batches
            differ in size may make different numbers of minibatches.

    Raises:
        ValueError: if `batches_per_epoch` is below 1.
        TypeError: if it is no integer, or nothing can be collected from `source`.

    Example:
        >>> collector = Collector("CartPole-v1", num_envs=2, frames_per_batch=8, total_frames=16, seed=0)
        >>> dataset = CollectorDataset(collector, updates=UpdateConfig(epochs=2, minibatch_size=4))
        >>> len(dataset), [minibatch.shape[0] for minibatch in dataset]
        (8, [4, 4, 4, 4, 4, 4, 4, 4])
        >>> collector.shutdown()
    """

    def __init__(
        self,
        source: Collector | BatchSource,
        *,
        batches_per_epoch: int | None = None,
        updates: UpdateConfig = UpdateConfig(),
        agree: Callable[[int], int] = int,
    ) -> None:
        updates = settings(UpdateConfig, updates, "updates")
        if batches_per_epoch is not None:
            at_least("batches_per_epoch", batches_per_epoch, 1, or_none=True)
        if not hasattr(source, "collect"):
            raise TypeError(f"source must be a Collector, or what else has its collect, got {source!r}")
        self._source = source
        self._batches_per_epoch = batches_per_epoch
        self._updates = updates
        self._agree = agree
        self.batch_dims = 1  # of what is handed out
        self._delivered = 0  # minibatches of the running epoch, the one in the user's hands included
        self._resumed_at = 0  # minibatches of the coming epoch that an earlier run delivered
        self._pending = 0  # minibatches of the running batch that are still to come

    def __len__(self) -> int:
        """Minibatches of a whole epoch; constant, also in the middle of one and after a resume."""
        frames = self._source.frames_per_batch
        if self._batches_per_epoch is not None:
            return self._batches_per_epoch * self._pieces(frames)
        if self._source.frames_budget == -1:
            return 1000 * self._pieces(frames)
        whole, rest = divmod(self._source.frames_budget, frames)
        return whole * self._pieces(frames) + (self._pieces(rest) if rest else 0)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Go on with the stream for one epoch.

        Raises:
            LitCollectError: inside a DataLoader worker, whose copy of the policy would never be updated.
        """
        if get_worker_info() is not None:
            raise LitCollectError(
                "a CollectorDataset cannot run in a DataLoader worker : its copy of the policy would never be "
                "updated; use num_workers=0 (make_dataloader does), and a backend to collect in other processes"
            )
        return self._epoch()

    @property
    def exhausted(self) -> bool:
        """Whether the budget is spent and every minibatch was handed out."""
        return self._pending == 0 and self.spent

    @property
    def spent(self) -> bool:
        """Whether the budget is spent: there cannot be another epoch."""
        return self._source.frames_left == 0

    def state_dict(self) -> dict[str, Any]:
        """Where the running epoch stands."""
        return {"delivered": self._delivered % len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch: the minibatches that were left of it are made of batches that are collected anew."""
        self._resumed_at = state["delivered"]

    def _epoch(self) -> Iterator[TensorDictBase]:
        length = len(self)
        self._delivered, self._resumed_at = self._resumed_at, 0
        if self._source.frames_left == 0:
            raise BudgetSpentError(
                "an epoch was asked for although all of total_frames have been collected; raise the budget to go on "
                "with a run that had ended, and let a run end with its frames (no min_epochs, no min_steps)"
            )
        begun = self._delivered % self._pieces(self._source.frames_per_batch)  # not 0 only after a resume
        while True:
            batch = self._source.collect()
            # what the length promised: masked rows count, nobody knows them beforehand
            cuts = self._cuts(batch.numel())
            if self._updates.minibatch_size is not None:
                cuts = self._agree(cuts)
            pieces = self._updates.epochs * cuts
            begun = min(begun, pieces - 1)  # a shorter batch has fewer, and one of them must be used
            self._pending = pieces - begun
            for piece in self._cut(batch, cuts, begun):
                self._delivered += 1
                self._pending -= 1
                self.batch_dims = piece.batch_dims
                yield piece
            begun = 0
            if self._delivered >= length or self._source.frames_left == 0:
                return

    def _pieces(self, frames: int) -> int:
        """Minibatches that a batch of so many frames is cut into, over all passes."""
        return self._updates.epochs * self._cuts(frames)

    def _cuts(self, frames: int) -> int:
        size = self._updates.minibatch_size
        return 1 if size is None else -(-frames // size)

    def _cut(self, batch: TensorDictBase, cuts: int, begun: int) -> Iterator[TensorDictBase]:
        """The minibatches of one batch, `cuts` of them in each pass, from the one numbered `begun` on."""
        updates = self._updates
        rows = None if updates.minibatch_size is None else flatten_rows(batch)
        for number in range(begun // cuts, updates.epochs):
            skip = begun % cuts if number == begun // cuts else 0
            if rows is None or (cuts == 1 and len(rows) == batch.numel()):
                yield (batch if rows is None else rows).copy()  # one minibatch holds all rows: order changes nothing
                continue
            for indices in _index_minibatches(len(rows), cuts, updates)[skip:]:
                yield rows[indices.to(rows.device) if rows.device is not None else indices]


class CollectorLoader:
    """What the data module gives to the Trainer: the dataset as a plain sized iterable.

    A `DataLoader` would warn about its workers, fail on TensorDicts and be made anew by Lightning.
    """

    def __init__(self, dataset: CollectorDataset) -> None:
        self.stream = dataset  # not named `dataset`: Lightning takes loaders with that attribute for DataLoaders

    def __len__(self) -> int:
        """Minibatches of an epoch."""
        return len(self.stream)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Go on with the stream for one epoch."""
        return iter(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Where the running epoch stands."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch."""
        self.stream.load_state_dict(state)


def make_dataloader(dataset: CollectorDataset) -> DataLoader[TensorDictBase]:
    """A `torch.utils.data.DataLoader` for Fabric and plain loops: no collating, no workers.

    Args:
        dataset: the stream.

    Example:
        >>> collector = Collector("CartPole-v1", num_envs=2, frames_per_batch=8, total_frames=16, seed=0)
        >>> [batch.shape for batch in make_dataloader(CollectorDataset(collector))]
        [torch.Size([2, 4]), torch.Size([2, 4])]
        >>> collector.shutdown()
    """
    return DataLoader(dataset, batch_size=None, num_workers=0, collate_fn=_identity)  # type: ignore[arg-type]  # one batch, no list


def _identity(batch: TensorDictBase) -> TensorDictBase:
    """TensorDicts pass unchanged; torch's default conversion fails on them."""
    return batch


def _index_minibatches(rows: int, cuts: int, updates: UpdateConfig) -> tuple[torch.Tensor, ...]:
    """Indices of one pass, in exactly `cuts` minibatches; fewer rows than promised are spread evenly."""
    order = torch.randperm(rows) if updates.shuffle else torch.arange(rows)
    assert updates.minibatch_size is not None
    if -(-rows // updates.minibatch_size) == cuts:
        return order.split(updates.minibatch_size)
    if rows < cuts:  # not even one row each: some are used twice rather than none at all
        order = order.repeat(-(-cuts // max(rows, 1)))[: max(cuts, rows)]
    return order.tensor_split(cuts)
