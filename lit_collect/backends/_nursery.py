"""`Nursery`: a small process that has imported everything once and starts the worker processes.

Its workers are its children: it says how they ended, and they end with it. It ends with the trainer, however that ends.
What runs in the small process itself stands in `_nursery_process`.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

from lit_collect.backends._nursery_process import Close, Ended, Kill, Refused, Start, Started, interpreter_flags
from lit_collect.backends._wire import Wire
from lit_collect.errors import CollectTimeoutError, WorkerDiedError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# The trainer's search path comes first: a file of the current folder must not hide a module of this package.
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from lit_collect.backends._nursery_process import serve; "
    "serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split())"
)
_SHARED = ("lightning.pytorch",)  # what policies often need, and every worker would import by itself
_SLICE_S = 0.1  # another thread may have read what this one waits for
_SEND_S = 5.0  # what the nursery may take to make room for a message
_KILL_S = 5.0  # what the system may take to end a killed process
_LEFTOVERS_S = 0.5  # what it may take to end the workers of a nursery that is gone

_lock = threading.Lock()
_current: dict[tuple[int, int, tuple[str, ...]], "Nursery"] = {}
_users: dict["Nursery", int] = {}


class Nursery:
    """Starts worker processes; may be used by several threads.

    The process is launched at once, and imports in the background; the first `start` waits for that. The trainer's
    environment, signal handlers and main module are not touched, and scripts need no guard.

    Args:
        num_threads: for the numerical libraries of the workers.
    """

    def __init__(self, *, num_threads: int) -> None:
        self._owner = os.getpid()
        self._variables = dict.fromkeys(_THREAD_VARIABLES, str(num_threads))
        self._lock = threading.RLock()
        self._exchanging = False
        self._outbox: deque[Start | Kill | Close] = deque()
        self._gone = False
        self._statuses: dict[int, int | None] = {}  # of every worker; None while it runs
        self._requests = 0
        self._answers: dict[int, Started | Refused | None] = {}  # to the requests that somebody waits for
        self._wire, other_end = Wire.pair()
        try:
            with other_end:
                shared = " ".join(name for name in _SHARED if name in sys.modules)
                arguments = [str(other_end.fileno()), str(self._owner), shared, *_search_path()]
                self._process = subprocess.Popen(
                    [sys.executable, *interpreter_flags(), "-c", _COMMAND, *arguments],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **self._variables},
                    pass_fds=[other_end.fileno()],
                    start_new_session=True,  # Ctrl-C in a terminal is for the trainer
                )
        except BaseException:
            self._wire.close()
            raise

    @property
    def pid(self) -> int:
        """Of the small process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can start workers."""
        return os.getpid() == self._owner and not self._gone and self._process.poll() is None

    def fileno(self) -> int:
        """Readable when there is something to read for `collect_reports`; -1 once closed."""
        return self._wire.fileno()

    def start(
        self, target: str, sock: socket.socket, *, method: Literal["forkserver", "spawn"], timeout_s: float
    ) -> int:
        """Start a worker in the trainer's current folder, with its variables and search path of this moment.

        The worker leads a session of its own and ignores SIGINT. When the function returns, the process ends with exit
        code 0; with the code of a SystemExit; or with 1 and a traceback after another exception.

        Args:
            target: "module:function" to call there with the socket.
            sock: handed over, and closed here whatever happens.
            method: "forkserver" forks the small process, "spawn" starts a fresh interpreter.
            timeout_s: seconds until the process must exist.

        Returns:
            The process id.

        Raises:
            WorkerDiedError: if there is no process to start it, or the system refuses.
            CollectTimeoutError: if it takes too long.
        """
        deadline = monotonic() + timeout_s
        with self._lock:
            self._requests += 1
            number = self._requests
        try:
            with sock:
                self._check_alive()
                self._answers[number] = None
                self._exchange(
                    Start(
                        number=number,
                        target=target,
                        sock=sock,
                        method=method,
                        deadline=deadline,
                        folder=_folder(),
                        variables={**os.environ, **self._variables},
                        path=_search_path(),
                    )
                )
            while (answer := self._answers[number]) is None:
                self._check_alive()
                if monotonic() >= deadline:
                    raise CollectTimeoutError(
                        f"the worker process did not start within {timeout_s:g} s, imports included; "
                        "raise batch_timeout_s if this machine is busy or its disk is slow"
                    )
                self._wait_and_exchange(deadline)
            if isinstance(answer, Refused):
                raise WorkerDiedError(f"the system refused to start a worker process: {answer.reason}")
            return answer.pid
        except BaseException:
            self._abandon(number)
            raise
        finally:
            self._answers.pop(number, None)

    def exit_status(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """How a worker ended: its exit code, or the negative number of a signal; None while it runs.

        Args:
            pid: of a worker that was started here.
            timeout_s: seconds to wait for its end.
        """
        deadline = monotonic() + timeout_s
        self._exchange()
        while self._statuses[pid] is None and monotonic() < deadline:
            self._wait_and_exchange(deadline)
        return self._statuses[pid]

    def collect_reports(self) -> None:
        """Read what the small process has said, without waiting; worth a call whenever `fileno` is readable."""
        self._exchange()

    def kill(self, pid: int, signal_number: int) -> None:
        """Send a signal to a worker and all that it has started, without waiting.

        What is left of the family of a worker that has ended is killed anyway, and it is safe to call this then.

        Args:
            pid: of a worker that was started here.
            signal_number: for instance `signal.SIGKILL`.
        """
        if self._statuses.get(pid, 0) is None:
            self._exchange(Kill(pid, int(signal_number)))

    def close(self, timeout_s: float) -> None:
        """End all workers and the small process; may be called again, and does nothing in a forked copy of the trainer.

        Args:
            timeout_s: seconds until the small process is killed, and its workers with it.

        Raises:
            CollectTimeoutError: if the system does not end a process that was killed.
        """
        if os.getpid() != self._owner:
            return
        deadline = monotonic() + timeout_s
        try:
            if self._statuses and self.alive:  # else there is nothing that must be tidied up first
                self._exchange(Close())
                while not self._gone and monotonic() < deadline:
                    self._wait_and_exchange(deadline)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(deadline - monotonic(), 0.0))
        finally:  # also when somebody presses Ctrl-C a second time
            self._process.kill()
            try:
                self._process.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                raise CollectTimeoutError(
                    f"process {self.pid}, which starts the workers, was killed and did not end within {_KILL_S:g} s"
                ) from None
            finally:
                self._lose()
                self._wire.close()

    def _check_alive(self) -> None:
        """Raise if no worker can be started any more."""
        if os.getpid() != self._owner:
            raise WorkerDiedError(f"the process that starts workers belongs to process {self._owner}, not to its copy")
        if not self._gone:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        code = self._process.returncode
        words = "" if code is None or code >= 0 else f" ({signal.Signals(-code).name})"
        raise WorkerDiedError(
            f"the process that starts workers ended with exit code {code}{words} while starting; "
            "what it said of that stands in the standard error output"
        )

    def _wait_and_exchange(self, deadline: float) -> None:
        """Wait until something can be read, though not long, and read it."""
        if not self._gone:
            poll = select.poll()
            poll.register(self._wire, select.POLLIN)
            poll.poll(max(min(deadline - monotonic(), _SLICE_S), 0.0) * 1000)
        self._exchange()

    def _exchange(self, message: Start | Kill | Close | None = None) -> None:
        """Send what is to be sent and read what has come.

        A finalizer may call this in the middle of another call by the same thread, which then goes on with it.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if message is not None:
                self._outbox.append(message)
            if self._exchanging or self._gone:
                return
            self._exchanging = True
            try:
                self._flush()
                with contextlib.suppress(TimeoutError):
                    while True:
                        self._note(self._wire.receive(0.0))
                self._flush()
            except EOFError:
                self._lose()
            finally:
                self._exchanging = False

    def _flush(self) -> None:
        """Send what is to be sent. A process that cannot be told anything is of no use; its last words are read yet."""
        while self._outbox:
            try:
                self._wire.send(self._outbox.popleft(), _SEND_S)
            except (EOFError, TimeoutError):
                self._outbox.clear()
                self._process.kill()

    def _note(self, message: Started | Refused | Ended) -> None:
        """Keep what the small process has said."""
        if isinstance(message, Ended):
            self._statuses[message.pid] = message.status
            return
        if isinstance(message, Started):
            self._statuses[message.pid] = None
        if message.number in self._answers:
            self._answers[message.number] = message
        elif isinstance(message, Started):  # whoever asked has given up
            self._outbox.append(Kill(message.pid, signal.SIGKILL))

    def _abandon(self, number: int) -> None:
        """Forget a request; its worker is not wanted any more."""
        answer = self._answers.pop(number, None)
        if isinstance(answer, Started):
            self.kill(answer.pid, signal.SIGKILL)

    def _lose(self) -> None:
        """The small process is gone, or not to be understood, and so are its workers; what they started must go too."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEFTOVERS_S)  # it may be about to end by itself, and how it does is of interest
        self._process.kill()
        lost = [pid for pid, status in self._statuses.items() if status is None]
        self._statuses.update(dict.fromkeys(lost, -signal.SIGKILL))
        self._gone = True
        deadline = monotonic() + _LEFTOVERS_S
        for pid in lost:
            while not (ended := _has_ended(pid)) and monotonic() < deadline:
                sleep(0.005)
            # While a group has members, no process gets its number; a process that has the number is a stranger.
            if ended:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)


def lease(num_threads: int) -> Nursery:
    """A nursery of this process that all who ask for the same share; `release` it.

    Args:
        num_threads: for the numerical libraries of the workers.
    """
    key = (os.getpid(), num_threads, tuple(interpreter_flags()))
    with _lock:
        nursery = _current.get(key)
        if nursery is None or not nursery.alive:
            nursery = _current[key] = Nursery(num_threads=num_threads)
        _users[nursery] = _users.get(nursery, 0) + 1
        return nursery


def release(nursery: Nursery, timeout_s: float) -> None:
    """Give a nursery back; the last one who does closes it.

    Args:
        nursery: from `lease`.
        timeout_s: as in `Nursery.close`.
    """
    with _lock:
        _users[nursery] -= 1
        if _users[nursery]:
            return
        del _users[nursery]
        for key in [key for key, current in _current.items() if current is nursery]:
            del _current[key]
    nursery.close(timeout_s)


def _search_path() -> list[str]:
    """The trainer's, and where this package itself was found, should that be a relative entry."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    home = str(Path(__file__).resolve().parents[2])
    return path if home in path else [*path, home]


def _folder() -> str | None:
    """The current folder, unless it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _has_ended(pid: int) -> bool:
    """Whether there is no process of that number, or only what its parent has not fetched."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or a system without /proc
        return False
    return state == "Z"
