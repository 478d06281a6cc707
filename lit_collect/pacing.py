"""`PacedBuffer`: a replay buffer between a collector and a learner that go on at the same time, neither too fast."""

import math
import threading
from typing import Any

from tensordict import TensorDictBase

from lit_collect.config import at_least
from lit_collect.errors import BudgetSpentError, CollectTimeoutError, LitCollectError, text_of
from lit_collect.frames import count_frames


class PacedBuffer:
    """Keeps the ratio of updates to frames, whoever is faster.

    A sample waits until enough frames were written for it; the collector waits while it is `frames_ahead` frames ahead
    of the samples (it does so between batches, so that pausing and closing it need not wait).

    Args:
        buffer: anything with ``extend`` and ``sample``; everything else is asked of it, too.
        updates_per_frame: samples that may be taken for each frame.
        min_frames: frames that are written before the first sample.
        frames_ahead: frames that are written at most before samples of them are taken (more, if a sample needs them).
        timeout_s: how long a sample waits for frames.

    Raises:
        ValueError: if a number is out of range.
        TypeError: if the buffer cannot be written to and sampled from.

    Example:
        >>> from lit_collect import Collector, ReplayBuffer
        >>> buffer = PacedBuffer(ReplayBuffer(1000, batch_size=32), updates_per_frame=0.125, frames_ahead=64)
        >>> with Collector(
        ...     "CartPole-v1", num_envs=4, frames_per_batch=32, total_frames=256, replay_buffer=buffer
        ... ) as collector:
        ...     collector.start()
        ...     print(sum(buffer.sample().numel() for _ in range(32)), buffer.updates_due)
        1024 0
    """

    takes_batches = True

    def __init__(
        self,
        buffer: Any,
        *,
        updates_per_frame: float,
        min_frames: int = 0,
        frames_ahead: int,
        timeout_s: float = 300.0,
    ) -> None:
        at_least("min_frames", min_frames, 0)
        at_least("frames_ahead", frames_ahead, 1)
        if not (isinstance(updates_per_frame, (int, float)) and 0 < updates_per_frame < math.inf):
            raise ValueError(f"updates_per_frame must be a number above 0, got {updates_per_frame!r}")
        if isinstance(buffer, type) or not (hasattr(buffer, "extend") and hasattr(buffer, "sample")):
            raise TypeError(f"buffer must be an object with extend and sample, got {buffer!r}")
        self.buffer = buffer
        self._per_frame, self._min_frames, self._ahead = updates_per_frame, min_frames, frames_ahead
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # of all that follows
        self._written = 0
        self._sampled = 0
        self._ended = False
        self._error: BaseException | None = None  # why it ended

    @property
    def updates_due(self) -> int:
        """Samples that can be taken without waiting."""
        with self._changed:
            return self._due()

    def extend(self, batch: TensorDictBase) -> Any:
        """Write a batch [N, T] or [M]."""
        answer = self.buffer.extend(batch)
        with self._changed:
            self._written += count_frames(batch)
            self._ended, self._error = False, None
            self._changed.notify_all()
        return answer

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """A sample, once there are frames enough for it.

        Args:
            batch_size: rows; None for the buffer's own.

        Raises:
            CollectTimeoutError: if there are none in time.
            BudgetSpentError: if the collector has come to its end.
            LitCollectError: if something went wrong in the background, which is the ``__cause__``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._due() > 0 or self._ended, self._timeout_s)
            if self._due() <= 0:
                raise self._no_frames() from self._error
            self._sampled += 1
            self._changed.notify_all()
        sample: TensorDictBase = self.buffer.sample() if batch_size is None else self.buffer.sample(batch_size)
        return sample

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether the collector may go on, within a number of seconds."""
        with self._changed:
            return self._changed.wait_for(self._has_room, timeout_s)

    def collection_ended(self, error: BaseException | None = None) -> None:
        """No frames will come any more, until there is another batch.

        Args:
            error: what went wrong, if anything did.
        """
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def __len__(self) -> int:
        """Rows in the buffer."""
        return len(self.buffer)

    def __getattr__(self, name: str) -> Any:
        """What the buffer has besides."""
        if name == "buffer":  # not set yet
            raise AttributeError(name)
        return getattr(self.buffer, name)

    def _no_frames(self) -> LitCollectError:
        needed = f"expected more than {self._written} for sample number {self._sampled + 1}"
        if self._error is not None:
            return LitCollectError(f"no frames will come : {needed}; the collector has failed: {text_of(self._error)}")
        if self._ended:
            return BudgetSpentError(f"no frames will come : {needed}; the collector has ended, ask updates_due first")
        return CollectTimeoutError(
            f"no frames came within {self._timeout_s:g} s : {needed}; ask updates_due first, or raise timeout_s"
        )

    def _due(self) -> int:
        if self._written < self._min_frames:
            return 0
        return int((self._written - self._min_frames) * self._per_frame) - self._sampled

    def _has_room(self) -> bool:
        used = self._min_frames + self._sampled / self._per_frame  # no samples are taken for the warm-up
        return self._written - used < self._ahead or self._due() <= 0  # else each would wait for the other
