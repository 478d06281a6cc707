"""Rows on disk as a memory-mapped TensorDict: written batch by batch, read by `TensorDict.load_memmap`."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from lit_collect.errors import FrameContractError, LitCollectError, second_to
from lit_collect.frames import ACTION, NEXT_DONE, NEXT_REWARD, Key, columns_of

ABOUT = "lit_collect.json"
"""The file beside the rows that says what they are."""

_META = "meta.json"  # tensordict's own, one in each folder of nested keys
_NEEDED = (ACTION, NEXT_REWARD, NEXT_DONE)


class RowWriter:
    """Appends rows to a folder that `TensorDict.load_memmap` reads as one TensorDict [M].

    No more than one batch is in memory. What was written counts once `write` has returned, whatever becomes of the
    process afterwards; rows that were half written are not seen.

    Args:
        path: the folder, empty or not there yet.
        about: what the rows are, as plain data; it stands in ``lit_collect.json``.

    Raises:
        FileExistsError: if there is something in the folder.

    Example:
        >>> import tempfile
        >>> rows = TensorDict({"action": torch.arange(3)}, batch_size=[3])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RowWriter(folder, {}) as writer:
        ...         writer.write(rows)
        ...         writer.write(rows)
        ...     TensorDict.load_memmap(folder)["action"].tolist()
        [0, 1, 2, 0, 1, 2]
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.num_rows = 0
        """Rows written so far."""
        self._about = dict(about)
        self._files: dict[Key, int] = {}  # descriptors
        self._layout: dict[Key, tuple[torch.dtype, torch.Size]] = {}
        if self.path.is_dir() and any(self.path.iterdir()):
            raise FileExistsError(f"{self.path} is not empty : expected an empty folder, or none; choose another name")
        self.path.mkdir(parents=True, exist_ok=True)
        self._note(complete=False)

    def __enter__(self) -> "RowWriter":
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        with second_to(error):
            self.close()

    def write(self, rows: TensorDictBase) -> None:
        """Append rows.

        Args:
            rows: [M] of tensors, with the same keys, shapes and dtypes each time.

        Raises:
            FrameContractError: if they do not fit the rows before them, or hold what is no tensor.
            OSError: if the disk is full, or cannot be written to; what was written before stays as it is.
        """
        columns = columns_of(rows)
        if len(rows) == 0:
            return
        try:
            if not self._files:
                self._begin(rows, columns)
            self._check(columns)
            for key, file in self._files.items():
                column = columns[key].detach().cpu().contiguous()
                _put(file, column, self.num_rows * column[0].numel() * column.element_size())
            _set_rows(self.path, self.num_rows + len(rows))
        except OSError as error:
            raise OSError(
                error.errno,
                f"{len(rows)} rows could not be written to {self.path}: {error.strerror} : expected room for them, got "
                f"{shutil.disk_usage(self.path).free:,} bytes on the disk; the {self.num_rows} rows before them can be "
                f"read",
            ) from error
        self.num_rows += len(rows)

    def close(self) -> None:
        """Note that all rows are there, and close the files; may be called again."""
        files, self._files = self._files, {}
        for file in files.values():
            os.close(file)
        if files:
            self._note(complete=True)

    def _begin(self, rows: TensorDictBase, columns: Mapping[Key, Tensor]) -> None:
        """Let tensordict lay out its files for one row, and go on with these."""
        leaves = rows.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
        if len(list(leaves)) != len(columns):
            raise FrameContractError("rows hold what is no tensor : expected tensors alone; leave the other keys out")
        laid_out = rows[:1].detach().cpu().clone().memmap(str(self.path))
        for key, column in columns_of(laid_out).items():
            self._layout[key] = (column.dtype, column.shape[1:])
            if column.numel():  # what has no bytes has no file
                self._files[key] = os.open(column.filename, os.O_RDWR)  # type: ignore[attr-defined]  # a mapped tensor

    def _check(self, columns: Mapping[Key, Tensor]) -> None:
        for key in columns.keys() ^ self._layout.keys():
            there = "are new" if key in columns else "are missing"
            raise FrameContractError(
                f"rows do not fit those before them : expected the keys {sorted(self._layout)}, but {key} {there}"
            )
        for key, column in columns.items():
            dtype, shape = self._layout[key]
            if (column.dtype, column.shape[1:]) != (dtype, shape):
                raise FrameContractError(
                    f"rows do not fit those before them : expected {dtype} with shape {tuple(shape)} for {key}, got "
                    f"{column.dtype} with shape {tuple(column.shape[1:])}"
                )

    def _note(self, *, complete: bool) -> None:
        _replace(self.path / ABOUT, {**self._about, "rows": self.num_rows, "complete": complete})


def read_rows(path: str | Path) -> tuple[TensorDictBase, dict[str, Any]]:
    """The rows of a folder, mapped, and what is known of them.

    Args:
        path: where `RowWriter`, or ``memmap`` of a TensorDict of rows, has written.

    Returns:
        [M], and the contents of ``lit_collect.json`` (nothing if there is none).

    Raises:
        LitCollectError: if the files cannot be read.
        FrameContractError: if they hold no rows of transitions.
    """
    path = Path(path)
    try:
        _check_files(path, int(json.loads((path / _META).read_text())["shape"][0]))
        rows = _load(path)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise LitCollectError(
            f"the rows at {path} cannot be read: {error} : expected a memory-mapped TensorDict; a run that was cut off "
            f"before its first rows leaves none"
        ) from error
    if rows.batch_dims != 1:
        raise FrameContractError(
            f"the TensorDict at {path} holds no rows : expected shape [M], got {list(rows.batch_size)}; reshape(-1) "
            f"gives rows"
        )
    missing = [key for key in _NEEDED if rows.get(key, None) is None]
    if missing:
        raise FrameContractError(
            f"the rows at {path} are no transitions : expected the keys {_NEEDED}, got no {missing}"
        )
    return rows, _about(path / ABOUT)


def _about(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        about = json.loads(file.read_text())
    except ValueError as error:
        raise LitCollectError(
            f"{file} cannot be read: {error} : expected JSON that says what the rows beside it are; they can be read "
            f"without it, so mend it or remove it"
        ) from error
    if not isinstance(about, dict):
        raise LitCollectError(f"{file} does not say what the rows beside it are : expected a JSON object, got {about}")
    return about


def _load(path: Path) -> TensorDictBase:
    try:
        return TensorDict.load_memmap(str(path))
    except RuntimeError:  # cut off while the numbers of rows were counted up, those of nested keys first
        _set_rows(path, int(json.loads((path / _META).read_text())["shape"][0]))
        return TensorDict.load_memmap(str(path))


def _check_files(folder: Path, count: int) -> None:
    """Raise if a file is missing or cut off: tensordict leaves the first out, and fills the second up with zeros."""
    for name, entry in json.loads((folder / _META).read_text()).items():
        if not isinstance(entry, dict):
            continue
        if entry.get("type") == "TensorDict":
            _check_files(_file_of(folder, name), count)
        elif "dtype" in entry and not entry.get("is_nested"):
            dtype: torch.dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
            needed = count * math.prod(entry["shape"][1:]) * dtype.itemsize
            file = _file_of(folder, name, ".memmap")
            if needed and not file.is_file():
                raise ValueError(f"{file} is missing, expected {needed} bytes for {count} rows")
            there = file.stat().st_size if needed else 0
            if there < needed:
                raise ValueError(f"{file} is cut off, expected {needed} bytes for {count} rows, got {there}")


def _file_of(folder: Path, name: str, suffix: str = "") -> Path:
    """Where tensordict keeps what a key names: newer versions escape what is no letter, digit or one of ``-_.~``."""
    plain, escaped = folder / f"{name}{suffix}", folder / f"{quote(name, safe='')}{suffix}"
    return plain if plain.exists() else escaped


def _set_rows(path: Path, count: int) -> None:
    """Say in tensordict's own files how many rows there are; the last file that is written is the one that counts."""
    for file in sorted(path.rglob(_META), key=lambda file: -len(file.parts)):
        meta = json.loads(file.read_text())
        for entry in (meta, *meta.values()):
            if isinstance(entry, dict) and isinstance(entry.get("shape"), list):
                entry["shape"][0] = count
        _replace(file, meta)


def _replace(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file so that it is either the old one or the new one."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(content))
    new.replace(file)


def _put(file: int, column: Tensor, offset: int) -> None:
    data = memoryview(column.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # NumPy says it not
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count
