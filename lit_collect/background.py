"""`Pump`: a thread that collects into a sink while the learner does something else."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensordict import TensorDictBase

_SLICE_S = 0.1  # how long a batch is waited for before others may have their turn


class Turn:
    """Who may use the collector: the thread in the background lets everybody else go first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._others = 0
        self._changed = threading.Condition(threading.Lock())

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Use the collector now; what is being collected is finished first."""
        with self._changed:
            self._others += 1
        try:
            with self._lock:
                yield
        finally:
            with self._changed:
                self._others -= 1
                self._changed.notify_all()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Use the collector when nobody else wants to."""
        with self._changed:
            self._changed.wait_for(lambda: self._others == 0, timeout=60.0)
        with self._lock:
            yield


class Pump:
    """Collects in a thread of its own until the budget is spent, an error comes up, or it is stopped.

    Args:
        collect: the next batch, None if there was none within a number of seconds; StopIteration at the end.
        sink: takes each batch.
        turn: to use the collector.
    """

    def __init__(
        self,
        collect: Callable[[float], TensorDictBase | None],
        sink: Callable[[TensorDictBase], object],
        *,
        turn: Turn,
    ) -> None:
        self._collect, self._sink, self._turn = collect, sink, turn
        self._stop = threading.Event()
        self._go_on = threading.Event()
        self._go_on.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lit_collect background collection", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it collects, or would if it were not paused."""
        return self._thread.is_alive() and not self._stop.is_set()

    def check(self) -> None:
        """Raise what went wrong in the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing inside of the block; a batch in progress is finished first."""
        self._go_on.clear()
        try:
            with self._turn.taken():  # nothing is in progress any more
                pass
            yield
        finally:
            self._go_on.set()

    def stop(self) -> None:
        """End the thread; a batch in progress is finished first, which the backend's time-outs bound."""
        self._stop.set()
        self._go_on.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._go_on.wait()
                with self._turn.left():
                    if self._stop.is_set() or not self._go_on.is_set():
                        continue
                    batch = self._collect(_SLICE_S)
                    if batch is not None:
                        self._sink(batch)
        except StopIteration:  # the budget is spent
            return
        except BaseException as error:
            self._error = error
