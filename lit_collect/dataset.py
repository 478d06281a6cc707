"""Collected batches as what a Trainer or a plain loop iterates over: sized, without look-ahead, never restarted."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lit_collect.collector import Collector
from lit_collect.config import UpdateConfig, at_least, settings
from lit_collect.errors import BudgetSpentError, LitCollectError
from lit_collect.feeding import Feed, Minibatches, Samples


class BatchSource(Protocol):
    """Where whole batches come from; a `Collector` is one.

    It may say more: `trajs_per_batch`, whole trajectories in a batch; `batches_vary`, whether batches have any number
    of rows; `num_ranks` that do the same; `replay_buffer`, to which it writes each batch, with `min_frames`, rows that
    must be there before the first sample.
    """

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
    short within a batch (`limit_train_batches`), or resumed there, leaves the rest of that batch out (but no samples of
    a replay buffer, which come first in the next one).

    Batches of trajectories have any number of rows. With a `minibatch_size`, an epoch then is as many minibatches as
    batches of `frames_per_batch` frames would give, and where it ends within a batch, the next one begins there.

    If the source writes to a replay buffer that can be sampled, it gives `UpdateConfig.updates_per_batch` samples for
    each collected batch instead, once there are rows enough.

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
        self._whole: int | None = getattr(source, "trajs_per_batch", None)
        self._varying = bool(getattr(source, "batches_vary", False))
        self._feed = self._feed_for(updates, agree)
        self.batch_dims = 1  # of what is handed out
        self._delivered = 0  # minibatches of the running epoch, the one in the user's hands included
        self._resumed_at = 0  # minibatches of the coming epoch that an earlier run delivered

    def __len__(self) -> int:
        """Minibatches, or samples, of a whole epoch; constant, also in the middle of one and after a resume.

        With whole trajectories it is the largest number that the budget could give.
        """
        frames, feed = self._source.frames_per_batch, self._feed
        budget, whole = self._source.frames_budget, self._whole
        if self._batches_per_epoch is not None:
            return self._batches_per_epoch * feed.count(frames)
        if budget == -1:
            return 1000 * feed.count(frames)
        if whole is not None:
            return feed.most(budget * getattr(self._source, "num_ranks", 1), -(-budget // whole))
        batches, rest = divmod(budget, frames)
        batches -= feed.warm_up(frames)
        return batches * feed.count(frames) + (feed.count(rest) if rest else 0)

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
        return self._feed.due == 0 and self.spent

    @property
    def spent(self) -> bool:
        """Whether the budget is spent: there cannot be another epoch."""
        return self._source.frames_left == 0

    @property
    def samples(self) -> int:
        """Samples of a replay buffer that were handed out."""
        return self._feed.samples

    @property
    def feed(self) -> Feed:
        """What becomes of a batch; in a checkpoint also where no loader is asked for its state."""
        return self._feed

    def state_dict(self) -> dict[str, Any]:
        """Where the running epoch stands."""
        return {"delivered": self._delivered % len(self), **self._feed.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch: the minibatches that were left of it are made of batches that are collected anew."""
        self._resumed_at = state["delivered"]
        self._feed.load_state_dict(state)

    def _epoch(self) -> Iterator[TensorDictBase]:
        length, feed = len(self), self._feed
        self._delivered, self._resumed_at = self._resumed_at, 0
        begins_at = self._delivered
        yield from self._counted(feed.left_over(), length)
        if self._delivered > begins_at and (self.spent or self._delivered >= length):
            return  # what was left over was all
        if self.spent:
            raise BudgetSpentError(
                "an epoch was asked for although all of total_frames have been collected; raise the budget to go on "
                "with a run that had ended, and let a run end with its frames (no min_epochs, no min_steps)"
            )
        begun = self._delivered % feed.count(self._source.frames_per_batch)  # not 0 only after a resume
        while True:
            try:
                batch = self._source.collect()
            except BudgetSpentError:  # what was left made no whole trajectory
                break
            yield from self._counted(feed.of(batch, begun), length)
            begun = 0
            if self._delivered >= length or self._source.frames_left == 0:
                break
        if self._source.frames_left == 0:
            feed.finish()

    def _counted(self, pieces: Iterator[TensorDictBase], length: int) -> Iterator[TensorDictBase]:
        """Pieces of one batch; where these are any number, only up to the end of the epoch."""
        for piece in pieces:
            self._delivered += 1
            self.batch_dims = piece.batch_dims
            yield piece
            if self._varying and self._delivered >= length:
                return  # the rest is for the next epoch

    def _feed_for(self, updates: UpdateConfig, agree: Callable[[int], int]) -> Feed:
        source: Any = self._source
        if getattr(source, "learns_from_replay", False):
            buffer = partial(getattr, source, "replay_buffer")  # of a copy, in a copy of this
            return Samples(buffer, updates, agree=agree, min_frames=source.min_frames)
        if updates.updates_per_batch != 1:
            raise ValueError(
                f"updates.updates_per_batch counts samples of a replay buffer : expected 1 without one, got "
                f"{updates.updates_per_batch}; use updates.epochs, or give a replay buffer"
            )
        return Minibatches(updates, agree, varying=self._varying)


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
