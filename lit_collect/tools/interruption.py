"""Ctrl-C as a question that is asked between two steps of work, not as an exception in the middle of one."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_WORDS = b"\ninterrupted: the batch that has begun is kept; Ctrl-C again to stop at once\n"


class Interruption:
    """Notes the first Ctrl-C while it is entered; the next one does what it did before.

    An exception could come up within a callback of native code, which throws it away, or between writing rows and
    counting them. In a thread other than the main one, or where Ctrl-C is ignored, nothing changes.

    Example:
        >>> with Interruption() as interruption:
        ...     list(interruption.until_noted(range(3))), interruption.noted
        ([0, 1, 2], False)
    """

    def __init__(self) -> None:
        self.noted = False
        """Whether there was one."""
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> "Interruption":
        """Begin to listen."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listen no longer."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def until_noted(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Items as long as nobody interrupts; the one that is made meanwhile is the last.

        Args:
            items: each takes a while to be made.
        """
        for item in items:
            yield item
            if self.noted:
                return

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        signal.signal(signal.SIGINT, self._before)
        with suppress(OSError):  # nobody has to hear it
            os.write(2, _WORDS)  # a stream may be at something when the signal comes
