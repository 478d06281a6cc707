"""Collecting in the process that trains."""

from collections import deque
from collections.abc import Sequence

from lit_collect.backends.base import Backend, Channel, Launcher
from lit_collect.messages import Close, Failed, Progress, Reply, Request
from lit_collect.schemes import NoSync, WeightSyncScheme
from lit_collect.worker import Worker, WorkerSpec


class DirectBackend(Backend):
    """Steps the envs in the calling process, with the policy object itself: its weights are always the current ones.

    Args:
        copy_policy: act with a copy of the policy, which takes the weights that are published, between batches: for
            collecting in the background while the policy itself learns.

    Example:
        >>> DirectBackend()
        DirectBackend()
    """

    in_process = True

    def __init__(self, copy_policy: bool = False) -> None:
        self.copies_policy = copy_policy

    def launcher(self) -> Launcher:
        """See `Backend.launcher`."""
        return _DirectLauncher()

    def scheme(self) -> WeightSyncScheme:
        """Nothing travels."""
        return NoSync()

    def __repr__(self) -> str:
        """As it was written."""
        return "DirectBackend(copy_policy=True)" if self.copies_policy else "DirectBackend()"


class _DirectLauncher(Launcher):
    def start(self, spec: WorkerSpec) -> Channel:
        return _DirectChannel(spec)

    def wait(self, channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
        return list(channels)

    def close(self, timeout_s: float) -> None:
        pass


class _DirectChannel(Channel):
    """The worker itself: a request is carried out when its reply is asked for."""

    name = "in this process"

    def __init__(self, spec: WorkerSpec) -> None:
        self._requests: deque[Request] = deque()
        self._worker: Worker | None = None
        self._answering = False
        try:
            self._worker = Worker(spec)
            self._first: Reply | None = self._worker.ready()
        except BaseException as error:
            self._first = Failed.of(error, "starting", Progress())

    def send(self, request: Request, timeout_s: float) -> None:
        if self._worker is None or self._worker.closed:
            raise EOFError
        self._check_use(request)
        self._requests.append(request)

    def receive(self, timeout_s: float) -> Reply:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._check_use(self._requests[0] if self._requests else None)
        if self._worker is None or not self._requests:
            raise EOFError
        before, self._answering = self._answering, True
        try:
            return self._worker.answer(self._requests.popleft())
        finally:
            self._answering = before

    def _check_use(self, request: Request | None) -> None:
        """Nobody but a signal handler may use the worker while it is at something, and only to close it."""
        if self._answering and not isinstance(request, Close):
            raise RuntimeError(
                "the collector was used by what it has called itself, an env, a policy or a function : expected use "
                "between batches"
            )

    def interrupt(self, wanted: bool) -> None:
        if wanted:  # nothing is in progress while somebody can ask: what has not begun need not begin
            self._requests.clear()

    def how_it_ended(self, timeout_s: float) -> str:
        return "it is closed"

    def where_it_hangs(self, timeout_s: float) -> str:
        return "it is in this process"

    def wait_until_ended(self, timeout_s: float) -> bool:
        return self._worker is None or self._worker.closed

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def release(self) -> None:
        self._requests.clear()
