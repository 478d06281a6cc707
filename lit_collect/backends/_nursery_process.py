"""What runs in the small process of a `Nursery`: it forks workers, tells how they ended, and kills them in the end."""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, NoReturn

import numpy as np

from lit_collect.backends._wire import Wire

_REPORT_S = 5.0  # what the trainer may take to make room for a report
_GLANCE_S = 0.5  # where the system cannot tell of the trainer's death, the nursery looks that often
_END_S = 5.0  # what the system may take to end killed workers
_STRAYS_S = 2.0  # and what their envs have left
_PAUSE_S = 0.002
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# What a terminal or a cluster sends to every process of a job is for the trainer; the nursery ends when that ends.
_FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SPAWNED = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from lit_collect.backends._nursery_process import run_spawned; run_spawned(int(sys.argv[1]), sys.argv[2])"
)
_CAN_PEEK = hasattr(os, "waitid")  # at how a process ended, before its number becomes free
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start a worker. Answered by `Started` or `Refused`, or not at all past the deadline."""

    number: int
    """Of the request."""
    target: str
    """"module:function", called with the socket."""
    sock: socket.socket
    method: Literal["forkserver", "spawn"]
    deadline: float
    """In `time.monotonic()`, which all processes of a machine share."""
    folder: str | None
    """Current folder of the worker; None: that of the nursery."""
    variables: dict[str, str]
    """Its environment."""
    path: list[str]
    """Its `sys.path`."""


@dataclass(frozen=True)
class Kill:
    """Send a signal to a worker and its family, unless it has ended."""

    pid: int
    signal_number: int


@dataclass(frozen=True)
class Close:
    """Kill all workers and end."""


@dataclass(frozen=True)
class Started:
    """A worker runs."""

    number: int
    """Of the request."""
    pid: int


@dataclass(frozen=True)
class Refused:
    """The system gave no process."""

    number: int
    """Of the request."""
    reason: str


@dataclass(frozen=True)
class Ended:
    """A worker has ended, and what was left of its process group was killed."""

    pid: int
    status: int
    """Exit code, or the negative number of a signal."""


def interpreter_flags() -> list[str]:
    """Options that this interpreter was started with, for others like it."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def serve(descriptor: int, trainer: int, shared: Sequence[str]) -> NoReturn:
    """Import, then do what the trainer asks until it is gone.

    Args:
        descriptor: of the socket to the trainer.
        trainer: its process id.
        shared: modules that workers may need besides; one that cannot be imported is left to who needs it.
    """
    for number in _FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(descriptor, False)
    control = Wire(socket.socket(fileno=descriptor))
    importlib.import_module("lit_collect.worker")
    for name in shared:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the workers share these pages as long as nobody writes to them
    _flush()  # what importing has printed must not be printed by every worker
    _Nursery(control, trainer).run()
    os._exit(0)


class _Nursery:
    """The process's only thread: it never computes, so that forking is safe."""

    def __init__(self, control: Wire, trainer: int) -> None:
        self._control = control
        self._trainer = trainer
        self._pid = os.getpid()
        self._listening = True  # the trainer
        self._workers: set[int] = set()  # not fetched yet
        if _libc is not None:  # what a worker's envs have started comes here when its parent ends
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._wakeup, writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(writer, False)
        self._descriptors = [self._wakeup, writer]
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a handler of Python's wakes us up
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)
        self._poll.register(control, select.POLLIN)
        self._trainer_handle: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # not on this system, or not allowed
            self._trainer_handle = os.pidfd_open(trainer)
            self._descriptors.append(self._trainer_handle)
            self._poll.register(self._trainer_handle, select.POLLIN)

    def run(self) -> None:
        """Serve until the trainer is gone or has had enough; then end all workers."""
        handlers: dict[type, Callable[[Any], None]] = {Start: self._start, Kill: self._kill}
        try:
            while self._listening and self._trainer_lives():
                self._reap()
                with contextlib.suppress(TimeoutError):
                    while not isinstance(message := self._control.receive(0.0), Close):
                        handlers[type(message)](message)
                    return
        except EOFError:
            return
        finally:
            self._end_workers()

    def _trainer_lives(self) -> bool:
        """Wait until something happens."""
        events = dict(self._poll.poll(None if self._trainer_handle is not None else _GLANCE_S * 1000))
        self._drain_wakeups()
        return self._trainer_handle not in events and os.getppid() == self._trainer

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)

    def _start(self, request: Start) -> None:
        with request.sock:
            if monotonic() >= request.deadline:
                return
            # A signal for the new process waits until that has its own handlers.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                pid = os.fork()
                if pid == 0:
                    self._become_worker(request)
                self._workers.add(pid)
                self._report(Started(request.number, pid))
            except OSError as error:
                self._report(Refused(request.number, str(error)))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _kill(self, request: Kill) -> None:
        if request.pid in self._workers:  # it was not fetched yet, so the number is still its own
            _signal_family(request.pid, request.signal_number)

    def _reap(self) -> None:
        """Fetch the workers that have ended, and kill what is left of their families."""
        for pid in tuple(self._workers):
            if _CAN_PEEK:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                _signal_family(pid, signal.SIGKILL)  # before the number can become another process's
            fetched, status = os.waitpid(pid, os.WNOHANG)
            if fetched:
                if not _CAN_PEEK:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
                self._workers.discard(pid)
                self._report(Ended(pid, os.waitstatus_to_exitcode(status)))
        self._reap_strays()

    def _reap_strays(self) -> None:
        """Fetch what envs have left, and end it once no worker is there that could need it: it may be a server."""
        deadline = monotonic() + _STRAYS_S
        while strays := self._strays():
            end = not self._workers and monotonic() < deadline
            for pid in strays:
                if end:
                    os.kill(pid, signal.SIGKILL)  # it was not fetched, so the number is still its own
                os.waitpid(pid, os.WNOHANG)
            if not end:
                return
            sleep(_PAUSE_S)  # until they have ended, and what they have started has come here

    def _strays(self) -> list[int]:
        """Children that are no workers."""
        try:
            children = Path(f"/proc/self/task/{self._pid}/children").read_text().split()
        except OSError:  # not on this system
            return []
        return [pid for pid in map(int, children) if pid not in self._workers]

    def _report(self, message: Started | Refused | Ended) -> None:
        if self._listening:
            try:
                self._control.send(message, _REPORT_S)
            except (EOFError, TimeoutError):
                self._listening = False

    def _end_workers(self) -> None:
        for pid in self._workers:
            _signal_family(pid, signal.SIGKILL)
        deadline = monotonic() + _END_S
        self._reap()
        while self._workers and (remaining := deadline - monotonic()) > 0:
            select.select([self._wakeup], [], [], remaining)
            self._drain_wakeups()
            self._reap()

    def _become_worker(self, request: Start) -> NoReturn:
        """What the forked process does."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            self._control.close()
            for descriptor in self._descriptors:
                os.close(descriptor)
            os.setsid()
            if _libc is not None:  # end with the nursery, even in the middle of native code
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
            if os.getppid() != self._pid:  # it had ended before that
                os._exit(code)
            for number in (*_FOR_THE_TRAINER, signal.SIGCHLD):
                signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
            if request.folder is not None:
                os.chdir(request.folder)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if request.method == "spawn":
                _execute_interpreter(request)
            os.environ.clear()
            os.environ.update(request.variables)
            sys.path[:] = request.path
            importlib.invalidate_caches()
            np.random.seed()  # a fresh interpreter would not have another worker's random numbers either
            code = _call(request.target, request.sock)
        except BaseException:
            traceback.print_exc()
            _flush()
        finally:
            os._exit(code)


def run_spawned(descriptor: int, target: str) -> NoReturn:
    """Run a worker in a fresh interpreter.

    Args:
        descriptor: of the worker's socket.
        target: as in `Start`.
    """
    os.set_inheritable(descriptor, False)
    os._exit(_call(target, socket.socket(fileno=descriptor)))


def _execute_interpreter(request: Start) -> NoReturn:
    """Become a fresh interpreter that calls `run_spawned`."""
    descriptor = request.sock.fileno()
    os.set_inheritable(descriptor, True)
    command = [sys.executable, *interpreter_flags(), "-c", _SPAWNED, str(descriptor), request.target, *request.path]
    os.execve(sys.executable, command, request.variables)


def _call(target: str, sock: socket.socket) -> int:
    """Call a worker's function; returns the exit code of the process."""
    sys.argv[1:] = []
    code = 0
    try:
        module, _, name = target.partition(":")
        getattr(importlib.import_module(module), name)(sock)
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code & 0xFF
        elif error.code is not None:
            sys.stderr.write(f"{error.code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    _flush()
    return code


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be nobody who could read it
            stream.flush()


def _signal_family(pid: int, number: int) -> None:
    """Send a signal to a child that was not fetched, and to all of its group."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it was forked a moment ago and has no group of its own yet
        os.kill(pid, number)
    except PermissionError:  # macOS: all of them have ended
        pass
