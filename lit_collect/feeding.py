"""What a learner is given for each collected batch: minibatches of it, or samples of a replay buffer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from lit_collect.config import UpdateConfig
from lit_collect.frames import count_frames, flatten_rows

Agree = Callable[[int], int]
"""Gives the largest of a number over all ranks, each of which must call it."""


class Feed(ABC):
    """Turns collected batches into pieces, each of which is trained on once."""

    due: int = 0
    """Pieces of the last batch that are still to come."""
    samples: int = 0
    """Samples of a replay buffer that were given."""

    @abstractmethod
    def count(self, frames: int) -> int:
        """How many pieces a batch of so many frames is promised to give."""

    def most(self, frames: int, batches: int) -> int:
        """How many pieces so many frames give at most, in so many batches of any sizes."""
        return batches * self.count(frames)

    def warm_up(self, frames_per_batch: int) -> int:
        """How many batches give none at first."""
        return 0

    def state_dict(self) -> dict[str, int]:
        """What of the last batch is still to come, as far as it will be there."""
        return {}

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where an earlier run was left."""

    @abstractmethod
    def finish(self) -> None:
        """The budget is spent.

        Raises:
            ValueError: if there never was a piece.
        """

    def left_over(self) -> Iterator[TensorDictBase]:
        """Pieces that an earlier epoch, or run, has left of its last batch."""
        return iter(())

    def forget(self) -> None:  # noqa: B027 (samples are of all batches)
        """The fit is over: what it has left of its last batch is not for another one."""

    @abstractmethod
    def of(self, batch: TensorDictBase, begun: int) -> Iterator[TensorDictBase]:
        """The pieces of a batch; `due` says at once how many there are.

        Args:
            batch: [N, T], or whatever was collected.
            begun: how many of them an earlier run was given, where all batches give equally many.
        """


class Minibatches(Feed):
    """Passes of minibatches over each batch.

    Args:
        updates: how many.
        agree: ranks whose batches differ in size agree on numbers of minibatches by it.
        varying: whether batches have any number of rows, as those of trajectories do. An epoch then may end within a
            batch, and the next one begins with what is left of it. Others give as many minibatches as their places
            (masked rows count, nobody knows them beforehand), so that epochs are whole batches.
    """

    def __init__(self, updates: UpdateConfig, agree: Agree, *, varying: bool = False) -> None:
        self._updates, self._agree, self._varying = updates, agree, varying
        self._rest: Iterator[TensorDictBase] = iter(())
        self._had_any = False

    def count(self, frames: int) -> int:
        """See `Feed.count`."""
        return self._updates.epochs * self._cuts(frames)

    def most(self, frames: int, batches: int) -> int:
        """See `Feed.most`: the last minibatch of each batch may be a small one."""
        size = self._updates.minibatch_size
        return self._updates.epochs * (batches if size is None else min(self._cuts(frames) + batches, frames))

    def left_over(self) -> Iterator[TensorDictBase]:
        """See `Feed.left_over`."""
        return self._rest

    def forget(self) -> None:
        """See `Feed.forget`."""
        self._rest, self.due = iter(()), 0

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """See `Feed.load_state_dict`: the rest of a batch is not saved."""
        self.forget()
        self._had_any = True

    def finish(self) -> None:
        """See `Feed.finish`."""
        if not self._had_any:
            raise ValueError(
                "no whole trajectory was made within the budget : expected at least one, got only frames that were "
                "dropped; raise total_frames, or set rollout.max_frames_per_traj (with trajectories.drop_stale a "
                "trajectory must begin and end between two updates)"
            )

    def of(self, batch: TensorDictBase, begun: int) -> Iterator[TensorDictBase]:
        """See `Feed.of`."""
        cuts = self._cuts(count_frames(batch) if self._varying else batch.numel())
        if self._updates.minibatch_size is not None:
            cuts = self._agree(cuts)
        pieces = self._updates.epochs * cuts
        begun = 0 if self._varying else min(begun, pieces - 1)  # a shorter batch has fewer, and one must be used
        self.due, self._had_any = pieces - begun, True
        minibatches = self._cut(batch, cuts, begun)
        if self._varying:
            self._rest = minibatches
        return minibatches

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
                self.due -= 1
                yield (batch if rows is None else rows).copy()  # one minibatch holds all rows: order changes nothing
                continue
            for indices in _index_minibatches(len(rows), cuts, updates)[skip:]:
                self.due -= 1
                yield rows[indices.to(rows.device) if rows.device is not None else indices]


class Samples(Feed):
    """A number of samples from a replay buffer for each batch, which was written to it before.

    Batches give none until there are `min_frames` rows, and rows that the buffer can make a sample of. Where samples
    use rows up, or these become too old, a batch gives no more than there are.

    Args:
        buffer: gives the buffer, anything with ``sample``, once it is needed.
        updates: with `updates_per_batch`.
        min_frames: rows that must be there.
        agree: ranks begin together by it.

    Raises:
        TypeError: if nothing can be sampled from the buffer.
        ValueError: if `updates` speaks of minibatches.
    """

    def __init__(self, buffer: Callable[[], Any], updates: UpdateConfig, *, agree: Agree, min_frames: int = 0) -> None:
        if updates.epochs != 1 or updates.minibatch_size is not None:
            raise ValueError(
                f"updates.epochs and updates.minibatch_size cut collected batches : expected 1 and None with a replay "
                f"buffer, got {updates.epochs} and {updates.minibatch_size}; use updates_per_batch, and the buffer's "
                f"batch_size"
            )
        self._buffer, self._agree = buffer, agree
        self._per_batch, self._min_frames = updates.updates_per_batch, min_frames
        self._resumed = False

    def count(self, frames: int) -> int:
        """See `Feed.count`."""
        return self._per_batch

    def warm_up(self, frames_per_batch: int) -> int:
        """See `Feed.warm_up`."""
        return max(-(-self._min_frames // frames_per_batch) - 1, 0)

    def state_dict(self) -> dict[str, int]:
        """See `Feed.state_dict`."""
        return {"due": self.due}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """See `Feed.load_state_dict`."""
        self.due, self._resumed = state.get("due", 0), True

    def finish(self) -> None:
        """See `Feed.finish`."""
        if not self.samples and not self._resumed:
            sample = self._buffer().sample()  # it knows best why not
            raise ValueError(
                f"no sample was made within the budget : expected replay.min_frames={self._min_frames} rows, and a "
                f"sample of {tuple(sample.batch_size)} only at its end; lower min_frames or raise total_frames"
            )

    def left_over(self) -> Iterator[TensorDictBase]:
        """See `Feed.left_over`; there are none if the rows that they were to be made of are gone."""
        if self.due and self._waits():
            self.due = 0
        return self._draw()

    def of(self, batch: TensorDictBase, begun: int) -> Iterator[TensorDictBase]:
        """See `Feed.of`; what an earlier run has left is given by `left_over`."""
        self.due = 0 if self._waits() else self._per_batch
        return self._draw()

    def _waits(self) -> bool:
        """Whether a rank has no sample now; all of them must ask."""
        return bool(self._agree(0 if self._ready() else 1))

    def _ready(self) -> bool:
        buffer = self._buffer()
        can: Callable[[], bool] | None = getattr(buffer, "can_sample", None)
        # of a buffer of somebody else's we know its length at most
        enough = not self._min_frames or len(buffer) >= self._min_frames
        return enough and (can is None or can())

    def _draw(self) -> Iterator[TensorDictBase]:
        while self.due:
            buffer = self._buffer()
            if getattr(buffer, "runs_out", False) and self._waits():
                self.due = 0
                return
            self.due -= 1
            self.samples += 1
            sample = buffer.sample()
            if not isinstance(sample, TensorDictBase):
                raise TypeError(
                    f"a sample must be a TensorDict, got {type(sample).__name__} from {type(buffer).__name__}.sample()"
                )
            yield sample


def _index_minibatches(rows: int, cuts: int, updates: UpdateConfig) -> tuple[torch.Tensor, ...]:
    """Indices of one pass, in exactly `cuts` minibatches; fewer rows than promised are spread evenly."""
    order = torch.randperm(rows) if updates.shuffle else torch.arange(rows)
    assert updates.minibatch_size is not None
    if -(-rows // updates.minibatch_size) == cuts:
        return order.split(updates.minibatch_size)
    if rows < cuts:  # not even one row each: some are used twice rather than none at all
        order = order.repeat(-(-cuts // max(rows, 1)))[: max(cuts, rows)]
    return order.tensor_split(cuts)
