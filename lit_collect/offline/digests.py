"""A short text that tells the files of a data set from those of others, wherever they are copied or moved to."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

_BLOCK_BYTES = 8192
_MOST = 32  # blocks that are read of a file, and files of which any are read

_Item = TypeVar("_Item")


def digest_of(folder: Path, pattern: str, *words: str) -> str:
    """Names, sizes and contents of files in one number; of large files and of many, parts evenly spread are read.

    JSON files do not count: they say what the others are, and may be amended.

    Args:
        folder: which may lie anywhere.
        pattern: the names of files that count, in any folder below.
        words: what else is to make a difference.

    Example:
        >>> Path("rows.bin").write_bytes(bytes(1000))
        1000
        >>> before, other = digest_of(Path(), "*.bin"), digest_of(Path(), "*.bin", "infos")
        >>> Path("rows.bin").write_bytes(bytes(999) + b"1")
        1000
        >>> len({before, other, digest_of(Path(), "*.bin")})
        3
    """
    digest = blake2b(repr(words).encode(), digest_size=16)
    sizes = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob(pattern))
        if file.is_file() and file.suffix != ".json"
    }
    digest.update(repr(sizes).encode())
    for name in _spread(list(sizes)):
        with (folder / name).open("rb") as file:
            for block in _spread(range(-(-sizes[name] // _BLOCK_BYTES))):
                file.seek(block * _BLOCK_BYTES)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _spread(items: Sequence[_Item]) -> Sequence[_Item]:
    """The first, the last, and some evenly between them."""
    if len(items) <= _MOST:
        return items
    return [items[number * (len(items) - 1) // (_MOST - 1)] for number in range(_MOST)]
