"""`Stream`: the batches of one collector, made when they are asked for or in the background."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from tensordict import TensorDict, TensorDictBase

from lit_collect.background import Pump, Turn
from lit_collect.budget import Budget
from lit_collect.config import TrajectoryConfig
from lit_collect.devices import moved
from lit_collect.errors import CollectorClosedError
from lit_collect.frames import count_frames
from lit_collect.gathering import Gatherer, Together, make_gatherer
from lit_collect.hooks import Output
from lit_collect.packing import FixedFrames, Packing, WholeTrajectories
from lit_collect.supervisor import WorkerGroup


class Stream:
    """Makes batches, one after the other, for whoever has its turn.

    Args:
        group: the workers; closed by `close`.
        output: what happens to batches before they are handed out.
        budget: counts them.
        frames_per_batch: of a whole batch.
        unbatched: whether the one env copy has no dimension of its own.
        trajectories: whether and how batches are made of trajectories.
        storage: device of what is handed out; None: where it is.
        refresh: called before each batch: takes weights from where they come from.
    """

    def __init__(
        self,
        group: WorkerGroup,
        output: Output,
        *,
        budget: Budget,
        frames_per_batch: int,
        unbatched: bool,
        trajectories: TrajectoryConfig | None,
        storage: torch.device | None,
        refresh: Callable[[], None],
    ) -> None:
        self.turn = Turn()
        """For whoever uses the workers between batches."""
        self._unbatched, self._storage = unbatched, storage
        self._group, self._output, self._budget = group, output, budget
        self._frames_per_batch, self._refresh = frames_per_batch, refresh
        self.gatherer: Gatherer = make_gatherer(group, sync=group.backend.sync)
        """Who makes batches at present."""
        self.packing: Packing
        """What a batch is made of."""
        if trajectories is None or trajectories.trajs_per_batch is None:
            split = trajectories is not None and trajectories.split_trajs
            self.packing = FixedFrames(self._fixed, budget, split=split)
        else:
            self.packing = WholeTrajectories(self._fixed, budget, settings=trajectories, group=group)
        self._pump: Pump | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def running(self) -> bool:
        """Whether batches are made in the background."""
        return self._pump is not None and self._pump.running

    @property
    def begun(self) -> bool:
        """Whether a batch was made, or may be on its way."""
        return self._budget.batches > 0 or self._pump is not None

    @property
    def together(self) -> bool:
        """Whether all workers make each batch."""
        return isinstance(self.gatherer, Together)

    def collect(self) -> TensorDictBase:
        """One batch, with what the user wants to be done to it."""
        self.check_idle()
        self._output.begin()
        return self._finished(self.make())

    def make(self) -> TensorDictBase:
        """One batch as it comes."""
        self.check_idle()
        with self.turn.taken():
            self._budget.check()  # now that no other thread can spend it
            batch = self._next(None)
        assert batch is not None
        return batch

    def unbatched(self, batch: TensorDict) -> TensorDict:
        """A batch [N, T], or [T] of it if the one env copy has no dimension of its own."""
        return batch[0] if self._unbatched else batch

    def as_handed_out(self, batch: TensorDict) -> TensorDict:
        """A batch [N, T] in the shape and on the device that the user has asked for."""
        return moved(self.unbatched(batch), self._storage)

    def start(self) -> None:
        """Make batches in the background from here on.

        Raises:
            BudgetSpentError: if no frames are left.
            RuntimeError: if there is nothing to collect into, or it runs already.
        """
        self.check_idle()
        if self._output.sink is None:
            raise RuntimeError("there is nothing to collect into : expected Collector(replay_buffer=...)")
        self._budget.check()
        self._group.publisher.begin()  # with the weights as they are now: they may be trained from here on
        self.gatherer = make_gatherer(self._group, sync=False, earlier=self.gatherer)
        self._pump = Pump(
            self._begin,
            self._next,
            room=self._output.wait_for_room,
            sink=self._finished,
            ended=self._output.ended,
            turn=self.turn,
            backend=self._group.backend,
        )

    def paused(self) -> AbstractContextManager[None]:
        """Make nothing in the background inside of a ``with`` block.

        Raises:
            RuntimeError: if nothing is made in the background.
        """
        self.check_open()
        if self._pump is None:
            raise RuntimeError("nothing is collected in the background; call start() first")
        return self._pump.paused()

    def close(self) -> None:
        """End the background and the workers; may be called again.

        Raises:
            LitCollectError: what went wrong, once all is closed.
        """
        if self._closed:
            return
        try:
            if self._pump is not None:
                self._pump.stop()
        finally:  # hooks in the background may have used it until now
            self._closed = True
            try:
                self._group.close()
            finally:
                self.gatherer.forget()
                self.check_background()

    def check_background(self) -> None:
        """Raise what went wrong in the background, once."""
        if self._pump is not None:
            self._pump.check()

    def check_open(self) -> None:
        """Check that nothing went wrong in the background, and that `close` was not called.

        Raises:
            CollectorClosedError: if it was.
        """
        if self._closed:
            raise CollectorClosedError("the collector is closed; build a new one")
        self.check_background()

    def check_idle(self) -> None:
        """Check that it is open and that nothing is made in the background; the foreground goes on after that.

        Raises:
            RuntimeError: if something is.
        """
        running = self.running  # before its error is looked for, which might come in between
        self.check_open()
        if running:
            raise RuntimeError("frames are collected in the background; call async_shutdown() first")
        if self._pump is not None:
            self._pump = None
            self.gatherer = make_gatherer(self._group, sync=self._group.backend.sync, earlier=self.gatherer)

    def _begin(self) -> bool:
        if self._budget.to_come != 0:
            self._output.begin()
        return self._budget.to_come != 0

    def _finished(self, batch: TensorDictBase) -> TensorDictBase:
        batch = self._output.finish(batch)
        if self._budget.to_come == 0:
            self._output.budget_spent()
        return batch

    def _next(self, timeout_s: float | None) -> TensorDictBase | None:
        """One batch, None if there was none in time."""
        batch = self.packing.next(timeout_s)
        return None if batch is None else moved(batch, self._storage)

    def _fixed(self, timeout_s: float | None) -> TensorDictBase | None:
        """A batch of a fixed number of frames."""
        self._refresh()
        while True:  # a short batch can be spent on resetting alone, and nobody can learn from it
            batch = self.gatherer.collect(self._frames_per_batch, self._budget.left, timeout_s)
            if batch is None:
                return None
            if count_frames(batch):
                return self.unbatched(batch)
