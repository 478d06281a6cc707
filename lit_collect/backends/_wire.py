"""`Wire`: pickled messages between two processes over a socket, with deadlines and shared memory."""

import errno
import functools
import io
import os
import pickle
import select
import socket
import struct
import sys
import time
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from tensordict import TensorDictBase

from lit_collect.shared import SharedBlock

MAX_DESCRIPTORS = 32
"""How many blocks and sockets one message may carry."""

_HEADER = struct.Struct("=QI")  # bytes of the pickle, descriptors that come with it
_INTEGER = struct.Struct("=i")
_SPACE = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INTEGER.size)
_QUIET = getattr(socket, "MSG_NOSIGNAL", 0)  # where there is no such flag, Python itself ignores SIGPIPE
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_LONGEST_POLL_S = 3600.0
_GONE = "the other process has closed its end"


class _Pickler(cloudpickle.Pickler):
    """Also takes what stands in a script by value, puts tensors on the CPU and counts what has a descriptor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.handed_over: list[SharedBlock | socket.socket] = []
        self._positions: dict[int, int] = {}
        self._by_value: list[ModuleType] = []

    def dump(self, obj: Any) -> None:
        """Write an object."""
        try:
            super().dump(obj)
        finally:  # of cloudpickle's list, which is there for all
            for module in self._by_value:
                cloudpickle.unregister_pickle_by_value(module)

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        """Position among the descriptors of a message, and the size in bytes of a block (-1: it is a socket)."""
        if not isinstance(obj, (SharedBlock, socket.socket)):
            return None
        position = self._positions.setdefault(id(obj), len(self.handed_over))
        if position == len(self.handed_over):
            self.handed_over.append(obj)
        return position, obj.size if isinstance(obj, SharedBlock) else -1

    def reducer_override(self, obj: Any) -> Any:
        """How to make an object again: one on an accelerator is made on the CPU, where workers act."""
        if isinstance(obj, CodeType):  # cloudpickle leaves out the file, without which a traceback says little
            return _make_code, (self.dispatch_table[CodeType](obj)[1], obj.co_filename)
        if isinstance(obj, (type, FunctionType, ModuleType)):
            self._see_module(obj.__name__ if isinstance(obj, ModuleType) else obj.__module__)
        # of a parameter or a module of tensors only the data are moved, which come here in their turn
        if isinstance(obj, (torch.Tensor, TensorDictBase)) and not isinstance(
            obj, (torch.nn.Parameter, torch.nn.Module)
        ):
            if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
                return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(5)
            if obj.device is not None and obj.device.type != "cpu":
                return obj.to("cpu").__reduce_ex__(5)
        return super().reducer_override(obj)

    def _see_module(self, name: str | None) -> None:
        """Take what stands in a module by value if another process would not find the module."""
        module = None if name in (None, "__main__") else sys.modules.get(str(name))
        if module is None or module.__name__ not in sys.modules:
            return
        top = module.__name__.partition(".")[0]
        origin = getattr(getattr(sys.modules.get(top), "__spec__", None), "origin", None)
        if not _is_found(top, origin) and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._by_value.append(module)


@functools.cache
def _is_found(name: str, origin: str | None) -> bool:
    """Whether another process finds a module by its name, and not another one: runpy and plug-ins make such modules.

    Args:
        name: without dots.
        origin: where the module of this process is from, if that is known.
    """
    for finder in sys.meta_path:
        found = finder.find_spec(name, None)
        if found is not None:
            return origin is None or found.origin is None or found.origin == origin
    return False


def _make_code(parts: tuple[Any, ...], filename: str) -> CodeType:
    return CodeType(*parts).replace(co_filename=filename)


class _Unpickler(pickle.Unpickler):
    """Makes blocks and sockets of the descriptors that came with a message."""

    def __init__(self, file: io.BytesIO, descriptors: list[int]) -> None:
        super().__init__(file)
        self._descriptors = descriptors
        self.made: dict[int, SharedBlock | socket.socket] = {}

    def persistent_load(self, pid: Any) -> SharedBlock | socket.socket:
        """What `_Pickler.persistent_id` has counted."""
        position, size = pid
        if position not in self.made:
            descriptor = self._descriptors[position]
            self.made[position] = SharedBlock(descriptor, size) if size >= 0 else socket.socket(fileno=descriptor)
        return self.made[position]

    def discard(self) -> None:
        """Close everything that has come."""
        for position, descriptor in enumerate(self._descriptors):
            if position in self.made:
                self.made[position].close()
            else:
                os.close(descriptor)


def dumps(obj: object) -> bytes:
    """Pickle something that holds neither blocks nor sockets, in the way that `Wire` does.

    Args:
        obj: what may come from a script or notebook, and hold tensors of any device: they are made again on the CPU.

    Raises:
        TypeError: if it holds a block or a socket, which go through a `Wire` alone.

    Example:
        >>> loads(dumps(lambda x: x + 1))(2)
        3
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    if pickler.handed_over:
        raise TypeError(f"shared memory and sockets must be sent through a Wire, got {pickler.handed_over[0]!r}")
    return file.getvalue()


def loads(data: bytes | bytearray) -> Any:
    """What `dumps` was given.

    Args:
        data: what it returned.
    """
    return pickle.loads(data)


class Wire:
    """One end of a connection, for one thread at a time.

    A message is anything that can be pickled, and may hold `SharedBlock` and socket objects (32 at most): the
    other side gets its own descriptors of the same things, and the sender keeps its own. Tensors of accelerators
    arrive on the CPU. Nothing is read ahead, so `fileno` is readable exactly when there is something to receive.

    Args:
        sock: a connected stream socket of the AF_UNIX family; owned by the wire from here on.

    Example:
        >>> wire, other_end = Wire.pair()
        >>> other = Wire(other_end)
        >>> wire.send({"batch": 3}, timeout_s=1)
        >>> other.receive(timeout_s=1)
        {'batch': 3}
        >>> wire.close(), other.close()
        (None, None)
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._header = bytearray(_HEADER.size)
        self._payload: bytearray | None = None
        self._filled = 0  # bytes of the payload, or of the header while there is no payload
        self._descriptors: list[int] = []
        self._can_send = True
        self._can_receive = True

    @classmethod
    def pair(cls) -> tuple["Wire", socket.socket]:
        """A new wire, and its other end to hand to a process, which makes a `Wire` of it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        """Descriptor to wait for; -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end; may be called again."""
        self._sock.close()
        self._can_send = self._can_receive = False
        while self._descriptors:
            os.close(self._descriptors.pop())

    def send(self, message: object, timeout_s: float) -> None:
        """Send one message.

        Args:
            message: what the other side's `receive` returns.
            timeout_s: seconds that the other side may take to make room for it.

        Raises:
            TimeoutError: past the deadline. If a part had been sent, the wire can send no more.
            EOFError: if the other side is gone, or an earlier message was sent in part.
            ValueError: if the message holds too many blocks and sockets.
        """
        file = io.BytesIO(bytes(_HEADER.size))
        file.seek(_HEADER.size)
        pickler = _Pickler(file)
        pickler.dump(message)
        descriptors = [
            thing.descriptor if isinstance(thing, SharedBlock) else thing.fileno() for thing in pickler.handed_over
        ]
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(
                f"a message must hold at most {MAX_DESCRIPTORS} blocks and sockets, got {len(descriptors)}"
            )
        frame = file.getbuffer()
        _HEADER.pack_into(frame, 0, len(frame) - _HEADER.size, len(descriptors))
        if not self._can_send:
            raise EOFError("the connection is closed or was broken in the middle of a message")
        self._push(frame, descriptors, time.monotonic() + timeout_s)

    def receive(self, timeout_s: float) -> Any:
        """Wait for one message.

        Args:
            timeout_s: seconds to wait; 0 takes what is there already.

        Raises:
            TimeoutError: past the deadline; what has come of a message is kept for the next call.
            EOFError: if the other side is gone and all of its messages have been received.
            OSError: if this process may open no more descriptors; the wire can receive no more.
        """
        deadline = time.monotonic() + timeout_s
        if self._payload is None:
            self._fill(self._header, deadline)
            self._payload, self._filled = bytearray(_HEADER.unpack(self._header)[0]), 0
        self._fill(self._payload, deadline)
        payload, self._payload, self._filled = self._payload, None, 0
        count = _HEADER.unpack(self._header)[1]
        if count == 0:
            return pickle.loads(payload)
        descriptors, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        unpickler = _Unpickler(io.BytesIO(payload), descriptors)
        try:
            return unpickler.load()
        except BaseException:
            unpickler.discard()
            raise

    def _push(self, frame: memoryview, descriptors: list[int], deadline: float) -> None:
        """Send all of a frame, the descriptors with its first byte."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"={len(descriptors)}i", *descriptors))]
        sent = 0
        try:
            while sent < len(frame):
                try:
                    sent += self._sock.sendmsg([frame[sent:]], ancillary if descriptors and not sent else [], _QUIET)
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline)
        except (BrokenPipeError, ConnectionResetError):
            self._can_send = False
            raise EOFError(_GONE) from None
        except TimeoutError:
            self._can_send = sent == 0
            raise
        except BaseException:  # an interruption: nobody knows what has been sent
            self._can_send = False
            raise

    def _fill(self, target: bytearray, deadline: float) -> None:
        """Receive into a buffer until it is full."""
        view = memoryview(target)
        while self._filled < len(target):
            if not self._can_receive:
                raise EOFError("the connection is closed or was broken while receiving")
            try:
                count, ancillary, flags, _ = self._sock.recvmsg_into([view[self._filled :]], _SPACE, _CLOSE_ON_EXEC)
                self._filled += count
                for _, _, data in ancillary:
                    self._take_descriptors(data)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except ConnectionResetError:
                raise EOFError(_GONE) from None
            except BaseException:  # an interruption: what came may be lost
                self._can_receive = False
                raise
            if flags & socket.MSG_CTRUNC:
                self._can_receive = False
                raise OSError(errno.EMFILE, "too many open files: the descriptors of a message were lost")
            if count == 0:
                raise EOFError(_GONE)

    def _take_descriptors(self, data: bytes) -> None:
        for (descriptor,) in _INTEGER.iter_unpack(data[: len(data) - len(data) % _INTEGER.size]):
            self._descriptors.append(descriptor)
            if not _CLOSE_ON_EXEC:
                os.set_inheritable(descriptor, False)

    def _wait(self, event: int, deadline: float) -> None:
        """Block until the socket is ready; the caller tries again in any case.

        Raises:
            TimeoutError: past the deadline.
        """
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the other process did not answer in time")
        poll = select.poll()
        poll.register(self._sock, event)
        poll.poll(min(remaining, _LONGEST_POLL_S) * 1000)
