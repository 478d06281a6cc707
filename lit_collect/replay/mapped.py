"""`SharedStorage` and `MappedStorage`: rows that several processes write and read, in memory or on disk."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_collect.errors import LitCollectError
from lit_collect.replay.files import FileStorage

MAPPED_BYTES = 512 << 20
"""So many bytes of rows are mapped into each process that has them open, and no more."""


class SharedStorage(FileStorage):
    """Rows in memory that several processes write and read: workers write, the learner samples.

    Send it, or the buffer around it, to another process by pickling; it must be open by then, and the process that
    sent it must live until the other one has it. The memory is taken as a whole at the first write, and is gone with
    the last process that has it, however that one ends.

    Example:
        >>> import pickle
        >>> storage = SharedStorage()
        >>> storage.open(capacity=100)
        >>> same = pickle.loads(pickle.dumps(storage))
        >>> same.capacity
        100
        >>> same.close(), storage.close()
        (None, None)
    """

    def __init__(self) -> None:
        super().__init__()
        self._name = ""  # of the file, where memory cannot be had without one
        self._owner = 0  # the process that takes the name away
        self._sent: tuple[str, int] | None = None  # where to find the file of another process, and how to know it

    def close(self) -> None:
        """See `Storage.close`. Where the memory has a name, it is taken away by the process that made it."""
        super().close()
        if self._owner == os.getpid():
            Path(self._name).unlink(missing_ok=True)
        self._name, self._owner = "", 0

    def _open_file(self) -> int:
        if self._descriptor >= 0:
            return os.open(self._address(), os.O_RDWR | os.O_CLOEXEC)
        if self._sent is not None:
            return _open_sent(*self._sent)
        if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
            return os.memfd_create("lit_collect_replay", os.MFD_CLOEXEC)
        descriptor, self._name = tempfile.mkstemp(prefix="lit_collect_replay_")
        self._owner = os.getpid()
        return descriptor

    def _address(self) -> str:
        """A path by which other processes open the same memory, with a lock of their own."""
        return self._name or f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def _free_bytes(self) -> int:
        with suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @property
    def _place(self) -> str:
        return "shared memory"

    def __getstate__(self) -> dict[str, Any]:
        if self._descriptor < 0:
            raise TypeError(
                "a shared replay buffer has no memory yet that another process could open : expected an open one; make "
                "the buffer before it is sent"
            )
        number = os.fstat(self._descriptor).st_ino
        return {"name": self._name, "sent": (self._address(), number), "capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SharedStorage.__init__(self)
        self._name, self._sent = state["name"], state["sent"]
        self.open(state["capacity"])


def _open_sent(path: str, number: int) -> int:
    """Open another process's file.

    Args:
        path: of the file.
        number: its inode, since the path may lead to another file by now.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_ino == number:
            return descriptor
        os.close(descriptor)
        found = "another file in its place"
    except OSError as error:
        found = str(error)
    raise LitCollectError(
        "the shared memory of a replay buffer is gone : expected the process that sent it to be alive and the buffer "
        f"to be open there, got {found}"
    )


class MappedStorage(FileStorage):
    """Rows in a file on disk, which may be larger than memory and which is there again after the process.

    Whatever was committed is found when the folder is opened again, after a crash as well; a loss of power costs what
    came after the last `flush`. Several processes may open one folder and take turns.

    Args:
        path: the folder, made if it is missing.
        mapped_bytes: up to so many bytes of rows the whole file may come to lie in the memory of each process. A
            larger one is read and written piece by piece, which needs none and takes half a millisecond for a sample
            of 256 rows. (Either way the system keeps what was used last, as long as nobody needs the memory.)

    Raises:
        ValueError: if `mapped_bytes` is negative; on opening, if there is a file at the path.

    Example:
        >>> storage = MappedStorage("rows")
        >>> storage.open(capacity=100)
        >>> storage.close()
    """

    def __init__(self, path: str | Path, mapped_bytes: int = MAPPED_BYTES) -> None:
        if mapped_bytes < 0:
            raise ValueError(f"mapped_bytes is too small : expected at least 0, got {mapped_bytes}")
        super().__init__(mapped_bytes)
        self.path = Path(path).absolute()
        """The folder."""

    def make_folder(self) -> None:
        """Make the folder, if it is missing.

        Raises:
            ValueError: if there is a file at the path.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"the path of a mapped storage is no folder : expected a folder, or a path that is free, got a file at "
                f"{error.filename}; choose another path"
            ) from error

    def _open_file(self) -> int:
        self.make_folder()
        return os.open(self.path / "rows.bin", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    @property
    def _place(self) -> str:
        return f"the folder {self.path}"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": str(self.path), "mapped_bytes": self._mapped_bytes, "capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MappedStorage.__init__(self, state["path"], state["mapped_bytes"])
        if state["capacity"]:
            self.open(state["capacity"])
