"""`FileStorage`: rows in a file that several processes map, and how they take turns with it.

The file begins with numbers of 64 bits, then comes the description of the rows as JSON, then one byte for each row
that says whether it is void, then the records. A write says first which rows it is about to replace; the count of rows
comes last. Whoever finds such an intent while it holds the lock knows that the writer is dead: the lock is one that
the system drops when a process ends, however it ends.
"""

import errno
import fcntl
import json
import mmap
import os
import time
import weakref
from abc import abstractmethod
from contextlib import AbstractContextManager, suppress

import numpy as np

from lit_collect.errors import CollectTimeoutError, LitCollectError
from lit_collect.replay import storage as common
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.paged import PagedRows
from lit_collect.replay.storage import InUse, Storage

HEAD_BYTES = 1 << 16
"""Where the marks begin: a multiple of every system's page."""

_TEXT_AT = 1 << 12
_FORMAT = int.from_bytes(b"lit-rb\x00\x01", "big")  # the last byte is the version
# places of the numbers
_IS, _CAPACITY, _ITEM_BYTES, _TEXT_BYTES, _COUNT, _EPOCH, _INTENT, _INTENDED, _VOID, _HOLDER, _WAITING = range(11)

_SHORTEST_WAIT_S = 2e-5
_LONGEST_WAIT_S = 1e-3

_open_storages: "weakref.WeakSet[FileStorage]" = weakref.WeakSet()


class FileLock(AbstractContextManager[None]):
    """Keeps other threads and processes out; within one thread it may be entered again.

    Args:
        storage: whose file it is; brought up to date at every first entry.
    """

    def __init__(self, storage: "FileStorage") -> None:
        self._storage = storage
        self._threads = InUse()
        self._depth = 0

    def __enter__(self) -> None:
        self._threads.__enter__()
        try:
            if self._depth == 0:
                self._storage.lock()
            self._depth += 1
        except BaseException:
            self._threads.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._storage.unlock()
        self._threads.__exit__()


class FileStorage(Storage):
    """What storages in a file have in common.

    Args:
        mapped_bytes: a file with more rows than that is not mapped, but read and written piece by piece; None maps
            any file.
    """

    def __init__(self, mapped_bytes: int | None = None) -> None:
        self.capacity = 0
        self.layout = None
        self._mapped_bytes = mapped_bytes
        self._files: dict[str, int] = {}  # descriptors; "lock" is there while this is open
        # Memory without a name is there as long as a descriptor is: of a storage that nobody closed, for good.
        weakref.finalize(self, _close_all, self._files).atexit = False
        self._head: mmap.mmap | None = None
        self._numbers = memoryview(bytearray(HEAD_BYTES)).cast("q")
        self._body: mmap.mmap | None = None
        self._void = np.empty(0, bool)
        self._opaque: np.ndarray | PagedRows = np.empty(0, "V1")
        self._records: np.ndarray | None = None
        self._lock = FileLock(self)

    @abstractmethod
    def _open_file(self) -> int:
        """A new descriptor of the file, which is made if it is missing. Locks belong to such descriptors."""

    @abstractmethod
    def _free_bytes(self) -> int:
        """Room for the file to grow."""

    @property
    @abstractmethod
    def _place(self) -> str:
        """What to call the file in messages."""

    @property
    def records(self) -> np.ndarray | None:
        """See `Storage.records`. Of a file that is read piece by piece, each look gives back what the last one took."""
        if isinstance(self._opaque, PagedRows) and self._body is not None:
            self._body.madvise(mmap.MADV_DONTNEED)
        return self._records

    @property
    def write_count(self) -> int:
        """See `Storage.write_count`."""
        return self._numbers[_COUNT]

    @property
    def epoch(self) -> int:
        """See `Storage.epoch`."""
        return self._numbers[_EPOCH]

    @property
    def is_void(self) -> np.ndarray | None:
        """See `Storage.is_void`."""
        return self._void if self._numbers[_VOID] else None

    def open(self, capacity: int) -> None:
        """See `Storage.open`."""
        common.check_capacity(self.capacity, capacity)
        if self._descriptor < 0:
            self._files["lock"] = self._open_file()
            try:
                self._wait_for_lock()
                self._open_head(capacity)
                self.unlock()
            except BaseException:
                self.close()
                raise
            _open_storages.add(self)
            with self.use():  # finds what is there
                pass

    def use(self) -> AbstractContextManager[None]:
        """See `Storage.use`. Rows of another process, and its `layout`, are seen from here on."""
        if self._descriptor < 0:
            raise LitCollectError(f"{self._place} is not open : expected open(capacity) before any use of it")
        return self._lock

    def begin(self, layout: RowLayout) -> None:
        """See `Storage.begin`."""
        with self.use():
            if self.layout is None:  # no other process was first
                self._make_rows(layout)
            else:
                common.check_layout(self.layout, layout)

    def take(self, positions: np.ndarray) -> np.ndarray:
        """See `Storage.take`."""
        assert self.layout is not None
        return self._opaque.take(positions).view(self.layout.dtype)

    def write(self, records: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """See `Storage.write`."""
        assert self.layout is not None
        common.check_count(len(records), self.capacity)
        if positions is not None:
            raise ValueError(f"rows of {self._place} have their places : expected positions=None; use storage='memory'")
        with self.use():
            self._recover()
            numbers, count = self._numbers, self._numbers[_COUNT]
            numbers[_INTENT] = count
            numbers[_INTENDED] = len(records)
            positions = self._copy(records.view(self.layout.opaque), count)
            if numbers[_VOID]:
                self._void[positions] = False
                numbers[_VOID] = int(self._void.sum())
            numbers[_COUNT] = count + len(records)
            numbers[_INTENDED] = 0
        return positions

    def void_after(self, write_count: int) -> None:
        """See `Storage.void_after`."""
        with self.use():
            lost = common.replaced_since(write_count, self._numbers[_COUNT], self.capacity)
            if len(lost):
                self._void[lost] = True
                self._numbers[_VOID] = int(self._void.sum())
            self._numbers[_COUNT] = write_count
            self._numbers[_EPOCH] += 1

    def load(self, records: np.ndarray, write_count: int, is_void: np.ndarray | None = None) -> None:
        """See `Storage.load`."""
        assert self.layout is not None
        common.check_loaded(len(records), write_count, self.capacity)
        with self.use():
            self._numbers[_EPOCH] += 1
            self._numbers[_COUNT] = 0  # if this process dies in between, there are no rows rather than mixed ones
            self._opaque[: len(records)] = records.view(self.layout.opaque)
            self._void[:] = False
            if is_void is not None:
                self._void[: len(records)] = is_void
            self._numbers[_VOID] = int(self._void.sum())
            self._numbers[_COUNT] = write_count

    def flush(self) -> None:
        """See `Storage.flush`."""
        for memory in (self._body, self._head):
            if memory is not None:
                memory.flush()

    def close(self) -> None:
        """See `Storage.close`. Other processes go on with what they have open."""
        _open_storages.discard(self)
        self.layout = self._records = None
        self._void, self._opaque = np.empty(0, bool), np.empty(0, "V1")
        self._numbers = memoryview(bytearray(HEAD_BYTES)).cast("q")
        for memory in (self._body, self._head):
            if memory is not None:
                with suppress(BufferError):  # views are still held; the last of them takes the memory along
                    memory.close()
        self._body = self._head = None
        _close_all(self._files)

    def lock(self) -> None:
        """Keep other processes out, and see what they did. `use` does it.

        Raises:
            CollectTimeoutError: naming the process that has kept the file for too long.
        """
        self._wait_for_lock()
        try:
            self._numbers[_HOLDER] = os.getpid()
            if self.layout is None and self._numbers[_ITEM_BYTES]:
                self._map(self._described())
            self._recover()
        except BaseException:
            self.unlock()
            raise

    def unlock(self) -> None:
        """Let other processes in."""
        if self._descriptor >= 0:  # or it was closed in the meantime
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def renew(self) -> None:
        """Give this process, which was forked, a lock of its own; the other one's would let it in at any time."""
        inherited = self._descriptor
        self._files["lock"] = self._open_file()
        os.close(inherited)
        self._lock = FileLock(self)

    @property
    def _descriptor(self) -> int:
        """With the lock; -1 while this is not open."""
        return self._files.get("lock", -1)

    def _wait_for_lock(self) -> None:
        deadline = time.monotonic() + common.DEADLINE_S
        wait_s = _SHORTEST_WAIT_S
        if (
            self._numbers[_HOLDER] == os.getpid()
            and time.monotonic_ns() - self._numbers[_WAITING] < 2e9 * _LONGEST_WAIT_S
        ):
            time.sleep(wait_s)  # this process was the last to have it, and somebody waits
        while not self._try_lock():
            if time.monotonic() > deadline:
                holder = self._numbers[_HOLDER] or "of unknown number"
                raise CollectTimeoutError(
                    f"process {holder} has kept {self._place} for {common.DEADLINE_S:g} s : expected it to finish; "
                    "look for a process that was stopped while it used the replay buffer"
                )
            self._numbers[_WAITING] = time.monotonic_ns()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _recover(self) -> None:
        """Void the rows whose writer died over them. Each step may be repeated, should this process die too."""
        numbers = self._numbers
        if not numbers[_INTENDED]:
            return
        first, stop = numbers[_INTENT], numbers[_INTENT] + numbers[_INTENDED]
        if numbers[_COUNT] < stop:
            self._void[np.arange(first, stop) % self.capacity] = True
            numbers[_COUNT] = stop
        numbers[_VOID] = int(self._void.sum())
        numbers[_INTENDED] = 0

    def _copy(self, rows: np.ndarray, write_count: int) -> np.ndarray:
        return common.copy_in_turn(self._opaque, rows, write_count)

    def _open_head(self, capacity: int) -> None:
        size = os.fstat(self._descriptor).st_size
        if size == 0:
            self._reserve(HEAD_BYTES, capacity)
        elif size < HEAD_BYTES:
            raise self._not_ours(f"{size} bytes")
        memory_descriptor = self._open_file()  # a mapping keeps its descriptor, and a fork of it, with its locks
        try:
            self._head = mmap.mmap(memory_descriptor, HEAD_BYTES)
        finally:
            os.close(memory_descriptor)
        numbers = memoryview(self._head)[:_TEXT_AT].cast("q")
        if numbers[_IS] == 0 and not any(numbers):
            numbers[_CAPACITY] = capacity
            numbers[_IS] = _FORMAT
        self._numbers = numbers
        if numbers[_IS] != _FORMAT:
            raise self._not_ours(f"{numbers[_IS] & (1 << 64) - 1:#x}")
        if numbers[_CAPACITY] != capacity:
            raise ValueError(
                f"{self._place} has another capacity : expected {numbers[_CAPACITY]}, got {capacity}; give the "
                "capacity it was made with, or another path"
            )
        self.capacity = capacity

    def _not_ours(self, found: str) -> ValueError:
        return ValueError(
            f"{self._place} is no replay buffer of this version : expected a file of at least {HEAD_BYTES} bytes that "
            f"begins with {_FORMAT:#x}, got {found}; choose another path"
        )

    def _described(self) -> RowLayout:
        assert self._head is not None
        try:
            return RowLayout.from_description(json.loads(self._head[_TEXT_AT : _TEXT_AT + self._numbers[_TEXT_BYTES]]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self._place} is damaged : expected the keys of its rows in its head, got {error}; choose another "
                "path, or remove it"
            ) from error

    def _marks_bytes(self) -> int:
        """Room for one byte for each row, such that the records begin at a page."""
        return -(-self.capacity // HEAD_BYTES) * HEAD_BYTES

    def _map(self, layout: RowLayout) -> None:
        size = self._marks_bytes() + self.capacity * layout.dtype.itemsize
        there = os.fstat(self._descriptor).st_size
        if there < HEAD_BYTES + size:
            raise ValueError(
                f"{self._place} is cut off : expected {HEAD_BYTES + size} bytes, got {there}; bring the whole file, or "
                "remove it"
            )
        memory_descriptor = self._open_file()
        try:
            self._body = mmap.mmap(memory_descriptor, size, offset=HEAD_BYTES)
        finally:
            os.close(memory_descriptor)
        self._void = np.frombuffer(self._body, bool, self.capacity)
        opaque = np.frombuffer(self._body, layout.opaque, self.capacity, self._marks_bytes())
        if self._mapped_bytes is None or opaque.nbytes <= self._mapped_bytes:
            self._opaque = opaque
        else:
            self._files["rows"] = self._open_file()
            begin = HEAD_BYTES + self._marks_bytes()
            self._opaque = PagedRows(
                descriptor=self._files["rows"], offset=begin, dtype=layout.opaque, count=self.capacity
            )
        self._records = opaque.view(layout.dtype)
        self.layout = layout

    def _make_rows(self, layout: RowLayout) -> None:
        text = json.dumps(layout.describe()).encode()
        if len(text) > HEAD_BYTES - _TEXT_AT:
            raise ValueError(f"rows have too many leaves for a file : expected a few hundred, got {len(layout.keys)}")
        self._reserve(HEAD_BYTES + self._marks_bytes() + self.capacity * layout.dtype.itemsize, self.capacity)
        assert self._head is not None
        self._head[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._numbers[_TEXT_BYTES] = len(text)
        self._numbers[_ITEM_BYTES] = layout.dtype.itemsize  # last: from here on the file has rows
        self._map(layout)

    def _reserve(self, size: int, capacity: int) -> None:
        there, free = os.fstat(self._descriptor).st_size, self._free_bytes()
        try:
            if size > there + free:  # memory is taken without a question, and processes are killed for it later
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _reserve(self._descriptor, size)
        except OSError as error:
            os.ftruncate(self._descriptor, there)
            why = os.strerror(error.errno or errno.ENOSPC)
            raise OSError(
                error.errno,
                f"no room for a replay buffer of {capacity} rows in {self._place} : expected {size} bytes, got {free} "
                f"bytes free ({why}); nothing was written, so make room, lower the capacity or choose another place",
            ) from error


def _reserve(descriptor: int, size: int) -> None:
    """Make a file so large, with all the room it needs: writing into a mapped file that finds none is deadly."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    chunk = bytes(1 << 20)
    position = os.fstat(descriptor).st_size
    while position < size:
        position += os.pwrite(descriptor, chunk[: size - position], position)


def _close_all(files: dict[str, int]) -> None:
    """Close descriptors, each once."""
    while files:
        os.close(files.popitem()[1])


def _renew_all() -> None:
    for storage in list(_open_storages):
        storage.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
