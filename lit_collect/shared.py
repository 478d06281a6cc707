"""`SharedBlock`: memory that several processes see, without a name and so without anything to clean up."""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class SharedBlock:
    """Zeroed memory behind a file descriptor: it is gone with the last process that has it, however that one ends.

    Args:
        descriptor: of the memory; owned by the block from here on.
        size: bytes.

    Example:
        >>> block = SharedBlock.create(64)
        >>> same = SharedBlock(os.dup(block.descriptor), block.size)
        >>> block.tensor(0, (2,), torch.float32).fill_(3.0).sum().item(), same.tensor(0, (2,), torch.float32).tolist()
        (6.0, [3.0, 3.0])
        >>> block.close(), same.close()
        (None, None)
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._memory = mmap.mmap(descriptor, size)

    @classmethod
    def create(cls, size: int) -> "SharedBlock":
        """Take zeroed memory from the system.

        Args:
            size: bytes, at least 1.
        """
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("lit_collect", os.MFD_CLOEXEC)
        else:  # a file that has lost its name at once
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(descriptor, size)
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A view as a contiguous tensor.

        Args:
            offset: bytes from the start, a multiple of the item size.
            shape: of the tensor.
            dtype: of the tensor.
        """
        count = int(np.prod(shape))
        with torch.inference_mode(False):
            if count == 0:
                return torch.empty(tuple(shape), dtype=dtype)
            return torch.frombuffer(memoryview(self._memory), dtype=dtype, count=count, offset=offset).reshape(
                tuple(shape)
            )

    def integers(self, offset: int, count: int) -> memoryview:
        """A view as signed 64-bit integers, which are read and written whole.

        Args:
            offset: bytes from the start, a multiple of 8.
            count: how many.
        """
        return memoryview(self._memory)[offset : offset + 8 * count].cast("q")

    def close(self) -> None:
        """Give the memory back as soon as no view of it is left; may be called again."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        with contextlib.suppress(BufferError):  # views are still held; the last of them takes the memory along
            self._memory.close()
