"""Both ends of a worker process: the channel that its group holds, and the port that it serves."""

import faulthandler
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

import torch

from lit_collect.backends._nursery import Nursery, lease, release
from lit_collect.backends._slots import SLOTS, InSlot, SlotReader, SlotWriter
from lit_collect.backends._wire import Wire, dumps, loads
from lit_collect.backends.base import Channel, Launcher
from lit_collect.envs.factories import register_missing, registrations
from lit_collect.messages import Collected, Done, Failed, Progress, Reply, Request, doing
from lit_collect.shared import SharedBlock
from lit_collect.worker import WorkerSpec, run_worker

_TRACE_SIGNAL = signal.SIGUSR2
_TRACE_SIZE = 1 << 16
_PATIENCE_S = 86_400.0  # a worker waits as long as its trainer lives; it is ended with it


@dataclass(frozen=True)
class _Hello:
    """The first thing a worker process is told."""

    registered: bytes
    """Gymnasium ids that a new process does not know."""
    spec: bytes
    """Pickled, and of use only where those ids are known."""
    board: SharedBlock
    """One integer: whether the batch in progress is wanted as it is."""
    trace: SharedBlock
    """Where the process writes its stack when it is asked to."""
    num_threads: int


# --- in the trainer ---------------------------------------------------------------------------------------------


class ProcessLauncher(Launcher):
    """Starts worker processes.

    Args:
        num_threads: for their numerical libraries.
        method: how they are started.
        timeout_s: how long that may take.
    """

    def __init__(self, num_threads: int, *, method: Literal["forkserver", "spawn"], timeout_s: float) -> None:
        self._num_threads, self._method, self._timeout_s = num_threads, method, timeout_s
        self._registered = _pack_registrations()
        self._nursery: Nursery | None = lease(num_threads)

    def start(self, spec: WorkerSpec) -> Channel:
        """See `Launcher.start`."""
        parcel = self._registered, _pack(spec)
        if self._nursery is None or not self._nursery.alive:  # its workers went with it; the new one takes their place
            if self._nursery is not None:
                release(self._nursery, 1.0)
            self._nursery = lease(self._num_threads)
        wire, theirs = Wire.pair()
        try:
            pid = self._nursery.start(f"{__name__}:serve", theirs, method=self._method, timeout_s=self._timeout_s)
            return _ProcessChannel(wire, self._nursery, pid, parcel, self._num_threads)
        except BaseException:
            wire.close()
            raise

    def wait(self, channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
        """See `Launcher.wait`."""
        poll = select.poll()
        mine = [channel for channel in channels if isinstance(channel, _ProcessChannel)]
        for channel in mine:
            if channel.wire.fileno() >= 0:
                poll.register(channel.wire, select.POLLIN)
        if self._nursery is not None and self._nursery.fileno() >= 0:
            poll.register(self._nursery, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}
        # a worker's connection may outlive it, in a process that its env has started
        return [channel for channel in mine if channel.wire.fileno() in readable or channel.has_ended()]

    def close(self, timeout_s: float) -> None:
        """See `Launcher.close`."""
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            release(nursery, timeout_s)


class _ProcessChannel(Channel):
    slots = SLOTS

    def __init__(self, wire: Wire, nursery: Nursery, pid: int, parcel: tuple[bytes, bytes], num_threads: int) -> None:
        self.wire = wire
        self._nursery, self._pid = nursery, pid
        self._board = SharedBlock.create(8)
        self._trace = SharedBlock.create(_TRACE_SIZE)
        self._flag = self._board.integers(0, 1)
        self._reader = SlotReader()
        self._released = False
        try:
            self.wire.send(_Hello(*parcel, self._board, self._trace, num_threads), 30.0)
        except (EOFError, TimeoutError):
            pass  # `receive` will say so
        except BaseException:
            self.kill()
            self.release()
            raise

    @property
    def name(self) -> str:
        return f"process {self._pid}"

    def send(self, request: Request, timeout_s: float) -> None:
        if self._released:
            raise EOFError("the worker is closed")
        self.wire.send(request, timeout_s)

    def receive(self, timeout_s: float) -> Reply:
        # of a worker that has ended, what it said before can still be read, and nothing else will come
        reply: Reply = self._last_words() if self.has_ended() else self.wire.receive(timeout_s)
        if isinstance(reply, Collected) and isinstance(reply.batch, InSlot):
            try:
                return replace(reply, batch=self._reader.take(reply.batch))
            finally:
                if self._released:  # by a signal handler, meanwhile
                    self._reader.close()
                    raise EOFError("the worker is closed")
        if isinstance(reply, Done) and reply.value is not None:
            try:
                return replace(reply, value=loads(reply.value))
            except Exception as error:
                return replace(Failed.of(error, "making its answer again here", reply.progress), cause=None)
        return reply

    def _last_words(self) -> Any:
        try:
            return self.wire.receive(0.0)
        except TimeoutError:
            raise EOFError("the worker has ended") from None

    def interrupt(self, wanted: bool) -> None:
        self._flag[0] = int(wanted)

    def has_ended(self) -> bool:
        return self._nursery.exit_status(self._pid) is not None

    def how_it_ended(self, timeout_s: float) -> str:
        status = self._nursery.exit_status(self._pid, timeout_s)
        if status is None:
            return "its connection is broken though it is still there"
        if status >= 0:
            return f"it left with exit code {status}"
        try:
            return f"it was killed by {signal.Signals(-status).name} (exit code {status})"
        except ValueError:  # a signal without a name
            return f"it was killed by signal {-status} (exit code {status})"

    def where_it_hangs(self, timeout_s: float) -> str:
        state = _state(self._pid)
        os.pwrite(self._trace.descriptor, bytes(_TRACE_SIZE), 0)
        os.lseek(self._trace.descriptor, 0, os.SEEK_SET)  # the worker writes on from here
        for number in (_TRACE_SIGNAL, signal.SIGCONT):  # a stopped process could not tell
            with suppress(ProcessLookupError):  # to the worker alone: what its envs have started would die of it
                os.kill(self._pid, number)
        stack = self._stack(monotonic() + timeout_s)
        return f"the process is {state}, in:\n{stack}" if stack else f"the process is {state} and shows no stack"

    def _stack(self, deadline: float) -> str:
        """What the worker writes, once it writes no more."""
        before = b""
        while monotonic() < deadline:
            sleep(0.05)
            text = os.pread(self._trace.descriptor, _TRACE_SIZE, 0).rstrip(b"\0")
            if text and text == before:
                break
            before = text
        return before.decode(errors="replace").rstrip()

    def wait_until_ended(self, timeout_s: float) -> bool:
        return self._nursery.exit_status(self._pid, timeout_s) is not None

    def terminate(self) -> None:
        self._nursery.kill(self._pid, signal.SIGTERM)
        self._nursery.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        self._nursery.kill(self._pid, signal.SIGKILL)

    def release(self) -> None:
        self._released = True
        self.wire.close()
        self._reader.close()
        self._flag.release()
        self._board.close()
        self._trace.close()


def _pack(spec: WorkerSpec) -> bytes:
    """The spec as bytes.

    Raises:
        TypeError: naming what cannot travel.
    """
    try:
        return dumps(spec)
    except Exception as error:
        for name, part in (("env", spec.source), ("policy", spec.policy)):
            try:
                dumps(part)
            except Exception as own:
                hint = "a PolicyFactory" if name == "policy" else "an EnvFactory or another callable"
                raise TypeError(
                    f"{name} cannot travel to a worker process : {type(own).__name__}: {own}; make what cannot be "
                    f"pickled inside of {hint}"
                ) from own
        raise TypeError(f"the worker's settings cannot travel to a process : {error}") from error


def _pack_registrations() -> bytes:
    """The ids that a new process does not know; without those that cannot travel, which may not be needed there."""
    specs = registrations()
    try:
        return dumps(specs)
    except Exception:
        return dumps({env_id: spec for env_id, spec in specs.items() if _can_travel(spec)})


def _can_travel(value: object) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _state(pid: int) -> str:
    words = {"R": "running", "S": "asleep", "D": "waiting for a device", "T": "stopped", "t": "being debugged"}
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "there"
    return words.get(letter, f"in state {letter}")


# --- in the worker ----------------------------------------------------------------------------------------------


def serve(sock: socket.socket) -> None:
    """The main function of a worker process.

    Args:
        sock: to the trainer.
    """
    wire = Wire(sock)
    try:
        hello: _Hello = wire.receive(_PATIENCE_S)
    except EOFError:  # the trainer has changed its mind
        return
    faulthandler.register(_TRACE_SIGNAL, file=hello.trace.descriptor, all_threads=True)
    torch.set_num_threads(hello.num_threads)
    if hasattr(os, "SCHED_BATCH"):  # else a worker may take the trainer's place before that has woken the next one
        with suppress(OSError):  # not allowed here: it is a matter of a millisecond
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    run_worker(_ProcessPort(wire, hello.board), partial(_unpack, hello))


def _unpack(hello: _Hello) -> WorkerSpec:
    register_missing(loads(hello.registered))
    spec: WorkerSpec = loads(hello.spec)
    return spec


class _ProcessPort:
    def __init__(self, wire: Wire, board: SharedBlock) -> None:
        self._wire = wire
        self._flag = board.integers(0, 1)
        self._progress = Progress()  # as of the last reply
        self._doing = "starting"  # what the next reply is of
        self.storage = SlotWriter()

    def receive(self) -> Request:
        while True:
            try:
                request: Request = self._wire.receive(_PATIENCE_S)
                self._doing = doing(request)
                return request
            except TimeoutError:
                continue
            except EOFError:
                raise
            except Exception as error:  # something in it cannot be made here
                self.reply(Failed.of(error, "reading a request", self._progress))

    def reply(self, reply: Reply) -> None:
        self._progress = reply.progress
        try:
            if isinstance(reply, Collected):
                reply = replace(reply, batch=self.storage.put(reply.batch))
            elif isinstance(reply, Failed):
                reply = replace(reply, cause=None)  # as text only: it may be of a kind that cannot travel
            elif isinstance(reply, Done) and reply.value is not None:
                reply = replace(reply, value=dumps(reply.value))  # the rest can be read if this cannot
            self._wire.send(reply, _PATIENCE_S)
        except (EOFError, TimeoutError):
            raise EOFError from None
        except Exception as error:  # something in it cannot travel
            kind = f", a {type(reply.value).__name__}" if isinstance(reply, Done) else ""
            failed = Failed.of(error, f"sending the answer{kind}, after {self._doing}", reply.progress)
            self._wire.send(replace(failed, cause=None), _PATIENCE_S)

    def interrupted(self) -> bool:
        return self._flag[0] != 0
