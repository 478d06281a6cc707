"""`PagedRows`: records in a file that is larger than the memory one wants to give it."""

import os
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class PagedRows:
    """Reads and writes records as far as they are asked for, so that none of the file stays in this process.

    It takes the place of an array of opaque records. A map of the file would do the same through the processor's
    page tables, but systems map two megabytes and more around each row that is read, which nothing can be done about.

    Args:
        descriptor: of the file; not owned.
        offset: bytes before the first record.
        dtype: of the records.
        count: of the records.
    """

    descriptor: int
    offset: int
    dtype: np.dtype
    count: int

    def __len__(self) -> int:
        return self.count

    def __setitem__(self, places: slice, rows: np.ndarray) -> None:
        first, _, _ = places.indices(self.count)
        data = _bytes_of(np.ascontiguousarray(rows))
        position = self.offset + first * self.dtype.itemsize
        while data:
            written = os.pwrite(self.descriptor, data, position)
            position, data = position + written, data[written:]

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Copy rows; neighbours are read at once.

        Args:
            positions: [...] int64, negative ones count from the end.

        Returns:
            [...] of `dtype`.
        """
        places = positions.reshape(-1)
        if places.size and not -self.count <= places.min() <= places.max() < self.count:
            raise IndexError(
                f"a position lies outside of the buffer : expected less than {self.count}, got {places.max()}"
            )
        size = self.dtype.itemsize
        rows = np.empty(places.size, self.dtype)
        data = _bytes_of(rows)
        places = places % self.count
        begins = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        sources = (places[begins] * size + self.offset).tolist()
        bounds = [*(begins * size).tolist(), places.size * size]
        for number, source in enumerate(sources):
            part = data[bounds[number] : bounds[number + 1]]
            while got := os.preadv(self.descriptor, (part,), source):
                if got == len(part):
                    break
                part, source = part[got:], source + got
            else:
                raise EOFError(f"the file of a replay buffer is cut off : expected a row at byte {source}, got its end")
        return rows.reshape(positions.shape)


def _bytes_of(rows: np.ndarray) -> memoryview:
    """Contiguous records as bytes, not copied."""
    return rows.view(np.uint8).data if len(rows) else memoryview(b"")
