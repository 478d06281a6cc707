"""`Pump`: a thread that collects into a sink while the learner does something else."""

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensordict import TensorDictBase

from lit_collect.backends import Backend
from lit_collect.errors import BudgetSpentError, CollectTimeoutError

_SLICE_S = 0.1  # how long a batch is waited for before others may have their turn


class Turn:
    """Who may use the collector: one thread at a time, in the order in which they ask."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()  # threads; the first one has its turn
        self._depth = 0  # how often that one has taken it

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Use the collector; what another thread is doing with it is finished first. May be nested."""
        me = threading.get_ident()
        with self._changed:
            if self._depth == 0 or self._queue[0] != me:
                self._queue.append(me)
                try:
                    self._changed.wait_for(lambda: self._queue[0] == me)
                except BaseException:
                    self._queue.remove(me)
                    self._changed.notify_all()
                    raise
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if self._depth == 0:
                    self._queue.popleft()
                    self._changed.notify_all()


class Pump:
    """Collects in a thread of its own until the budget is spent, an error comes up, or it is stopped.

    Args:
        begin: called before each batch; False if there shall be none.
        collect: the batch, None if there was none within a number of seconds.
        room: waits for that many seconds for room in the sink; False if there is none.
        sink: takes it. Others may use the collector meanwhile.
        ended: called at the end of all, with what went wrong.
        turn: to use the collector.
        backend: says how long pausing and stopping wait for the thread.
    """

    def __init__(
        self,
        begin: Callable[[], bool],
        collect: Callable[[float], TensorDictBase | None],
        *,
        room: Callable[[float], bool],
        sink: Callable[[TensorDictBase], object],
        ended: Callable[[BaseException | None], None],
        turn: Turn,
        backend: Backend,
    ) -> None:
        self._begin, self._collect, self._sink, self._turn = begin, collect, sink, turn
        self._room, self._ended = room, ended
        # where envs are stepped in this thread, a batch takes its time; from others it is not waited for at the end
        self._patience_s = backend.batch_timeout_s if backend.in_process else backend.shutdown_timeout_s
        self._changed = threading.Condition()  # of the two that follow
        self._stopped = False
        self._pauses = 0
        self._busy = threading.RLock()  # held while a batch is waited for, or is on its way into the sink
        self._begun = False
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="lit_collect background collection", daemon=True)
        atexit.register(self._leave)  # a thread that is in torch when the interpreter ends aborts the process
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it collects, or would if it were not paused."""
        return self._thread.is_alive() and not self._stopped

    def check(self) -> None:
        """Raise what went wrong in the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing inside of the block; what is on its way into the sink arrives first. May be nested.

        Raises:
            CollectTimeoutError: if the thread does not come to rest in time.
        """
        self._pause(1)
        try:
            if not self._busy.acquire(timeout=self._patience_s):
                raise self._too_late("pause")
            self._busy.release()
            yield
        finally:
            self._pause(-1)

    def stop(self) -> None:
        """End the thread, once what it is doing is finished.

        Raises:
            CollectTimeoutError: if it has not ended in time.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is threading.current_thread():  # a hook: the thread ends after it
            return
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            raise self._too_late("end")

    def _leave(self) -> None:
        if os.getpid() == self._process:  # a fork has no such thread
            self.stop()

    def _pause(self, more: int) -> None:
        with self._changed:
            self._pauses += more
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._go_on():
                pass
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self._leave)
            self._ended(self._error)

    def _go_on(self) -> bool:
        """Wait for a while for a batch; False at the end of all."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._pauses == 0)
        with self._busy:
            if self._stopped:
                return False
            if self._pauses:
                return True
            if not self._begun and not self._begin():
                return False
            self._begun = True
            if not self._room(_SLICE_S):
                return True
            with self._turn.taken():
                try:
                    batch = self._collect(_SLICE_S)
                except BudgetSpentError:  # what was left made no whole batch
                    return False
            if batch is not None:
                self._begun = False
                self._sink(batch)
            return True

    def _too_late(self, what: str) -> CollectTimeoutError:
        return CollectTimeoutError(
            f"the background did not {what} within {self._patience_s:g} s : expected the batch in progress, hooks and "
            f"replay_buffer.extend to come to an end"
        )
