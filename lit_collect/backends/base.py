"""`Backend`: where frames are collected, never what they are; `Channel`, one worker; and how workers are closed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic

from lit_collect.messages import Close, Failed, Reply, Request
from lit_collect.schemes import WeightSyncScheme
from lit_collect.worker import WorkerSpec

_TERM_S = 2.0  # what a worker that was told to terminate may take
_KILL_S = 5.0  # what the system may take to end a killed one


class Deadline:
    """A moment that waiting ends at.

    Args:
        seconds: from now.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, never below 0."""
        return max(self._end - self._clock(), 0.0)


class Channel(ABC):
    """One worker, as its group sees it: it owns the worker, and whatever carries messages to and from it."""

    slots: int = 1
    """Batches that a worker may have made, or be making, that nobody has taken."""

    @abstractmethod
    def send(self, request: Request, timeout_s: float) -> None:
        """Give the worker a request.

        Raises:
            EOFError: if the worker has ended.
            TimeoutError: if it does not take the request.
        """

    @abstractmethod
    def receive(self, timeout_s: float) -> Reply:
        """The reply to the oldest request that was not answered yet.

        Raises:
            EOFError: if the worker has ended.
            TimeoutError: if there is none in time.
        """

    @abstractmethod
    def interrupt(self, wanted: bool) -> None:
        """Ask for the batch in progress as it is, or no longer."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Where the worker is, for instance its process id."""

    @abstractmethod
    def how_it_ended(self, timeout_s: float) -> str:
        """In words, for a worker that has ended."""

    @abstractmethod
    def where_it_hangs(self, timeout_s: float) -> str:
        """The state of a worker that does not answer, and the code it is in, as far as that can be found out."""

    @abstractmethod
    def wait_until_ended(self, timeout_s: float) -> bool:
        """Whether the worker has ended within that time."""

    @abstractmethod
    def terminate(self) -> None:
        """Tell the worker to end at once."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker, and whatever it has started."""

    @abstractmethod
    def release(self) -> None:
        """Give back what the channel itself holds; may be called again."""


class Launcher(ABC):
    """Starts the workers of one group; owned by it."""

    @abstractmethod
    def start(self, spec: WorkerSpec) -> Channel:
        """Start a worker without waiting for what it builds; its first reply is `Ready` or `Failed`."""

    @abstractmethod
    def wait(self, channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
        """Those channels on which `receive` need not wait; empty if the time is over."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Give back what starting needed; may be called again."""


class Backend(ABC):
    """A place where collector workers run. Kinds are subclasses, so that a saved YAML keeps their class."""

    num_collectors: int = 1
    """Workers."""
    sync: bool = True
    """Whether all workers make one batch together, or each makes batches of its own, first come first served."""
    in_process: bool = False
    """Whether the policy object itself acts, in this process."""
    copies_policy: bool = False
    """Whether in this process a copy of the policy acts, which takes the weights that are published."""
    batch_timeout_s: float = 300.0
    """How long to wait for a worker: for what it builds, for a batch, for any other answer."""
    shutdown_timeout_s: float = 10.0
    """How long a worker may take to close its envs."""
    num_threads: int = 1
    """Threads of torch in each worker."""
    preempt_fraction: float | None = None
    """Once this fraction of the workers is done, the others hand in what they have."""
    max_restarts: int = 0
    """How many dead workers are replaced before the next one is an error."""
    max_staleness: int | None = None
    """How many versions the weights of a row may be behind when it is handed out (None: no bound if asynchronous,
    else 0)."""

    @abstractmethod
    def launcher(self) -> Launcher:
        """What starts the workers of one collector."""

    @abstractmethod
    def scheme(self) -> WeightSyncScheme:
        """What carries weights to the workers of one collector."""


def close_channels(channels: Sequence[Channel], timeout_s: float) -> list[tuple[Channel, Failed]]:
    """End all workers, whatever any of them does: ask, wait, terminate, kill.

    Args:
        channels: of the workers; released afterwards.
        timeout_s: for those that were asked; another few seconds for those that do not obey.

    Returns:
        What went wrong in closing envs, and where.
    """
    failures: list[tuple[Channel, Failed]] = []
    try:
        deadline = Deadline(timeout_s)
        asked = [channel for channel in channels if _ask(channel, deadline)]
        for channel in asked:
            failures += [(channel, failed) for failed in _last_words(channel, deadline)]
        _wait_for(asked, deadline.left_s)
    finally:  # also when somebody presses Ctrl-C a second time
        _end(channels)
    return failures


def _ask(channel: Channel, deadline: Deadline) -> bool:
    try:
        channel.interrupt(True)  # a batch in progress is of no use
        channel.send(Close(), min(deadline.left_s, 1.0))
    except (EOFError, TimeoutError):
        return False
    return True


def _last_words(channel: Channel, deadline: Deadline) -> list[Failed]:
    """The failures of a worker from here to its end; replies that nobody waits for any more come first."""
    failures = []
    try:
        while True:
            reply = channel.receive(deadline.left_s)
            if isinstance(reply, Failed) and reply.doing == "closing":
                failures.append(reply)
    except Exception:  # it has ended, or takes too long, or a signal handler closes it in the middle of a message
        return failures


def _wait_for(channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
    """Those that have not ended in time."""
    deadline = Deadline(timeout_s)
    return [channel for channel in channels if not channel.wait_until_ended(deadline.left_s)]


def _end(channels: Sequence[Channel]) -> None:
    try:
        running = _wait_for(channels, 0.0)
        for channel in running:
            channel.terminate()
        if running:
            _wait_for(running, _TERM_S)
    finally:
        for channel in channels:
            channel.kill()  # also of the ended ones: their envs may have left processes
        _wait_for(channels, _KILL_S)
        for channel in channels:
            channel.release()
