"""`Ahead`: batches of a collector that goes on in the background, one batch ahead of whoever takes them."""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from tensordict import TensorDictBase

from lit_collect.collector import Collector
from lit_collect.errors import BudgetSpentError, CollectTimeoutError
from lit_collect.frames import count_frames

_SLICE_S = 0.1  # how long a batch is waited for before errors of the background are looked for


class Ahead:
    """Takes in what a collector makes in the background, as its ``replay_buffer``, and hands it out batch by batch.

    While a batch waits here the collector makes the next one, and no more: neither side runs away.
    """

    takes_batches = True

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[TensorDictBase, dict[str, Any]]] = deque()
        self._collector: Collector | None = None
        self._frames = self._batches = 0  # that were handed out, also before this

    def start(self, collector: Collector) -> None:
        """Let a collector go on from here.

        Args:
            collector: whose ``replay_buffer`` this is.
        """
        self._collector = collector
        self._frames, self._batches = collector.budget.yielded, collector.budget.batches
        collector.start()

    def extend(self, batch: TensorDictBase) -> None:
        """Take in a batch; called in the background."""
        assert self._collector is not None
        statistics = self._collector.statistics()  # asked for later it would wait for the batch in progress
        with self._changed:
            self._waiting.append((batch, statistics))
            self._changed.notify_all()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether the last batch was taken, within a number of seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def take(self, while_waiting: Callable[[], None]) -> tuple[TensorDictBase, dict[str, Any]]:
        """The next batch, and the collector's statistics of when it was made.

        Args:
            while_waiting: called again and again; may raise.

        Raises:
            BudgetSpentError: if there will be none.
            CollectTimeoutError: if there was none in time.
            LitCollectError: what went wrong in the background.
        """
        assert self._collector is not None
        limit_s = self._collector.workers.backend.batch_timeout_s
        began = monotonic()
        while True:
            ended = not self._collector.is_running  # before the queue is looked at: it fills first
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting, 0.0 if ended else _SLICE_S):
                    taken = self._waiting.popleft()
                    self._frames, self._batches = self._frames + count_frames(taken[0]), self._batches + 1
                    self._changed.notify_all()
                    return taken
            self._collector.check_background()
            if ended:
                raise BudgetSpentError("the collector has come to its end in the background")
            if monotonic() - began > limit_s:
                raise CollectTimeoutError(
                    f"no batch came from the background within {limit_s:g} s : expected envs, policy and hooks to "
                    f"come to an end"
                )
            while_waiting()

    def counted_out(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of the collector, in which nothing was handed out but what was taken from here.

        What the collector has made besides may wait here, or be on its way.

        Args:
            state: see `Collector.state_dict`.
        """
        return {**state, "frames_yielded": self._frames, "batches": self._batches}

    def dropped_out(self, statistics: dict[str, Any]) -> dict[str, Any]:
        """The collector's numbers at its end: what was made and not taken from here is dropped.

        Args:
            statistics: see `Collector.statistics`.
        """
        left = statistics["frames_yielded"] - self._frames
        dropped = statistics["frames_dropped"] + left
        return {**statistics, "frames_yielded": self._frames, "frames_dropped": dropped, "batches": self._batches}
