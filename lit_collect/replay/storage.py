"""Where the rows of a replay buffer lie: `Storage`, and `MemoryStorage`, which keeps them in this process."""

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from lit_collect.errors import CollectTimeoutError
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.paged import PagedRows

DEADLINE_S = 60.0
"""Seconds to wait until nobody else uses a storage."""


class Storage(ABC):
    """`capacity` packed records and how many of them were written. Threads (and processes) take turns under `use`.

    The k-th row that is ever written (its serial number is k) lies at position k % capacity, unless it was written to
    a position of its own. Rows that were written since one last looked are therefore those from the `write_count` of
    that time on. Where `epoch` has changed meanwhile, rows were taken back, and all must be looked at anew.
    """

    capacity: int
    """Rows at most; 0 before `open`."""
    layout: RowLayout | None
    """Of the records; None before the first write."""

    @property
    @abstractmethod
    def records(self) -> np.ndarray | None:
        """[capacity] structured, the live memory; None before the first write. Read rows with `take`."""

    @property
    @abstractmethod
    def write_count(self) -> int:
        """Rows ever committed; those count that were lost with a process that died while it wrote them."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Changes whenever rows are taken back or replaced as a whole: by `load` and `void_after`."""

    @property
    @abstractmethod
    def is_void(self) -> np.ndarray | None:
        """[capacity] bool, live: rows that were lost and must not be read; None if there are none."""

    @property
    def size(self) -> int:
        """Positions that hold rows, void ones included: those from 0 on."""
        return min(self.write_count, self.capacity)

    @abstractmethod
    def open(self, capacity: int) -> None:
        """Say how many rows there can be, and find those that are there already.

        Args:
            capacity: rows, at least 1.

        Raises:
            ValueError: if rows of another capacity are there.
        """

    @abstractmethod
    def use(self) -> AbstractContextManager[None]:
        """Keep everybody else away: whoever reads or writes holds it. A thread may enter it again within itself.

        Raises:
            CollectTimeoutError: if another one has kept it for `DEADLINE_S` seconds.
        """

    @abstractmethod
    def begin(self, layout: RowLayout) -> None:
        """Take the memory for rows, all at once, so that a lack of it shows before anything is written.

        Args:
            layout: of the rows; once it is known, only an equal one.

        Raises:
            FrameContractError: if rows of another layout are there.
            OSError: if there is no room.
        """

    @abstractmethod
    def write(self, records: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """Commit rows, all or none. Call `begin` before.

        Args:
            records: [M] of the layout's dtype, M at most the capacity.
            positions: [M] int64 without repetition, of the rows to replace; None takes the oldest in turn.

        Returns:
            [M] int64, the positions.
        """

    @abstractmethod
    def void_after(self, write_count: int) -> None:
        """Take back the rows from the `write_count`-th on, which is the next to be written from here on.

        Older rows that these had replaced are void until they are written again.
        """

    @abstractmethod
    def load(self, records: np.ndarray, write_count: int, is_void: np.ndarray | None = None) -> None:
        """Replace everything by what another storage held. Call `begin` before.

        Args:
            records: [its size] of the layout's dtype, from position 0 on.
            write_count: its count.
            is_void: [its size] bool, rows that it had lost.
        """

    @abstractmethod
    def flush(self) -> None:
        """Return when everything that was committed would outlive a loss of power, where rows outlive anything."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; may be called again."""

    @abstractmethod
    def take(self, positions: np.ndarray) -> np.ndarray:
        """Copy rows. Of all ways to read them this is the fastest, and it leaves none of a large file in memory.

        Args:
            positions: [...] int64; negative ones count from the end of the capacity.

        Returns:
            [...] of the layout's dtype.
        """


class InUse(AbstractContextManager[None]):
    """The lock of threads, with a deadline."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=DEADLINE_S):
            raise CollectTimeoutError(
                f"another thread has kept the replay buffer for {DEADLINE_S:g} s : expected it to finish; look for a "
                "thread that waits while it samples or writes"
            )

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class MemoryStorage(Storage):
    """Rows in the memory of this process.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> rows = TensorDict({"reward": torch.arange(5.0)}, batch_size=[5])
        >>> storage = MemoryStorage()
        >>> storage.open(capacity=4)
        >>> storage.begin(RowLayout.of(rows))
        >>> storage.write(storage.layout.pack(rows[:3])), storage.write(storage.layout.pack(rows[3:]))
        (array([0, 1, 2]), array([3, 0]))
        >>> storage.layout.unpack(storage.take(np.arange(4)))["reward"]
        tensor([4., 1., 2., 3.])
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.layout = None
        self._records: np.ndarray | None = None
        self._opaque = np.empty(0, "V1")
        self._write_count = self._epoch = 0
        self._is_void: np.ndarray | None = None
        self._in_use = InUse()

    @property
    def records(self) -> np.ndarray | None:
        """See `Storage.records`."""
        return self._records

    @property
    def write_count(self) -> int:
        """See `Storage.write_count`."""
        return self._write_count

    @property
    def epoch(self) -> int:
        """See `Storage.epoch`."""
        return self._epoch

    @property
    def is_void(self) -> np.ndarray | None:
        """See `Storage.is_void`."""
        return self._is_void

    def open(self, capacity: int) -> None:
        """See `Storage.open`."""
        check_capacity(self.capacity, capacity)
        self.capacity = capacity

    def use(self) -> AbstractContextManager[None]:
        """See `Storage.use`."""
        return self._in_use

    def begin(self, layout: RowLayout) -> None:
        """See `Storage.begin`."""
        if self.layout is None:
            self._opaque = _zeros(self.capacity, layout)
            self._records = self._opaque.view(layout.dtype)
            self.layout = layout
        else:
            check_layout(self.layout, layout)

    def take(self, positions: np.ndarray) -> np.ndarray:
        """See `Storage.take`."""
        assert self.layout is not None
        return self._opaque.take(positions).view(self.layout.dtype)

    def write(self, records: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """See `Storage.write`."""
        assert self.layout is not None
        check_count(len(records), self.capacity)
        if positions is None:
            positions = copy_in_turn(self._opaque, records.view(self.layout.opaque), self._write_count)
        else:
            self._opaque[positions] = records.view(self.layout.opaque)
        if self._is_void is not None:
            self._is_void[positions] = False
            self._is_void = self._is_void if self._is_void.any() else None
        self._write_count += len(records)
        return positions

    def void_after(self, write_count: int) -> None:
        """See `Storage.void_after`."""
        lost = replaced_since(write_count, self._write_count, self.capacity)
        if len(lost):
            self._is_void = np.zeros(self.capacity, bool) if self._is_void is None else self._is_void
            self._is_void[lost] = True
        self._write_count = write_count
        self._epoch += 1

    def load(self, records: np.ndarray, write_count: int, is_void: np.ndarray | None = None) -> None:
        """See `Storage.load`."""
        assert self.layout is not None
        check_loaded(len(records), write_count, self.capacity)
        self._opaque[: len(records)] = records.view(self.layout.opaque)
        self._is_void = None
        if is_void is not None and is_void.any():
            self._is_void = np.zeros(self.capacity, bool)
            self._is_void[: len(records)] = is_void
        self._write_count = write_count
        self._epoch += 1

    def flush(self) -> None:
        """See `Storage.flush`: rows end with this process."""

    def close(self) -> None:
        """See `Storage.close`."""
        self.layout = self._records = self._is_void = None
        self._opaque = np.empty(0, "V1")
        self._write_count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a replay buffer in the memory of one process cannot be sent to another one, nor copied : expected storage="
            "'shared' or 'mapped', got 'memory'; a second buffer may load what state_dict() of the first gives"
        )


def check_capacity(there: int, capacity: int) -> None:
    """Raise unless a storage can have this capacity.

    Args:
        there: the capacity it has, 0 for none.
        capacity: rows.
    """
    if capacity < 1:
        raise ValueError(f"capacity is too small : expected at least 1, got {capacity}")
    if there not in (0, capacity):
        raise ValueError(f"the storage has another capacity : expected {there}, got {capacity}; use a new storage")


def check_layout(there: RowLayout, layout: RowLayout) -> None:
    """Raise unless two layouts are equal."""
    if there is not layout and there != layout:
        raise there.mismatch(layout)


def check_count(count: int, capacity: int) -> None:
    """Raise if there are more rows than places for them."""
    if count > capacity:
        raise ValueError(
            f"too many rows at once : expected at most the capacity, {capacity}, got {count}; raise the capacity or "
            "write smaller batches"
        )


def check_loaded(count: int, write_count: int, capacity: int) -> None:
    """Raise unless so many rows are what is left of all that were written."""
    if count != min(write_count, capacity):
        raise ValueError(
            f"the rows are not those of a buffer of {capacity} after {write_count} were written : expected "
            f"{min(write_count, capacity)} rows, got {count}; load them into a buffer of the same capacity"
        )


def copy_in_turn(there: np.ndarray | PagedRows, rows: np.ndarray, write_count: int) -> np.ndarray:
    """Copy rows to the positions after the last one, over the end to the beginning.

    Args:
        there: [capacity] of any dtype.
        rows: [M] of the same, M at most the capacity.
        write_count: rows that were written before.

    Returns:
        [M] int64, the positions.
    """
    first, count = write_count % len(there), len(rows)
    fit = min(count, len(there) - first)
    there[first : first + fit] = rows[:fit]
    there[: count - fit] = rows[fit:]
    positions = np.arange(first, first + count)
    positions[fit:] -= len(there)
    return positions


def replaced_since(write_count: int, now: int, capacity: int) -> np.ndarray:
    """[K] int64: positions below ``min(write_count, capacity)`` that were written again after `write_count` rows."""
    if not 0 <= write_count <= now:
        raise ValueError(f"rows cannot be taken back to there : expected 0 to {now} rows written, got {write_count}")
    positions = np.arange(write_count, min(now, write_count + capacity)) % capacity
    return positions[positions < min(write_count, capacity)]


def _zeros(capacity: int, layout: RowLayout) -> np.ndarray:
    """[capacity] opaque records; the system gives pages only as they are written."""
    size = capacity * layout.dtype.itemsize
    try:
        return np.zeros(size, np.uint8).view(layout.opaque)
    except MemoryError as error:
        raise MemoryError(
            f"no memory for a replay buffer of {capacity} rows : expected {size} bytes; lower the capacity or use "
            "storage='mapped'"
        ) from error
