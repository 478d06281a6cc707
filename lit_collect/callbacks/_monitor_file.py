"""A CSV file of episodes as Stable-Baselines3's monitor writes it: a line of JSON, a header, one line an episode."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, time

COLUMNS = ("r", "l", "t", "frames", "env", "version")
_SAVE_EVERY_S = 1.0
_FRAMES = COLUMNS.index("frames")


class MonitorFile:
    """Opens such a file to go on writing it, or begins one.

    Args:
        path: of the file; its folders are made.
        env_id: what the first line says about the env.
        frames: lines of episodes that ended after so many frames are taken out; None keeps all.

    Raises:
        OSError: if it cannot be written.
        ValueError: if there is a file that is none of ours.
    """

    def __init__(self, path: Path, *, env_id: str, frames: int | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._began_at = _cut(path, frames)
            self._file = path.open("a", newline="")
        else:
            self._began_at = time()
            self._file = path.open("w", newline="")
            self._file.write(f"#{json.dumps({'t_start': self._began_at, 'env_id': env_id})}\n{','.join(COLUMNS)}\n")
        self._dirty = True
        self._due = 0.0  # not flushed before that moment

    @property
    def seconds(self) -> float:
        """Since the file was begun."""
        return time() - self._began_at

    def write(self, lines: Iterable[tuple[float, int, float, int, int, int]]) -> None:
        """Add episodes, with the columns of `COLUMNS`."""
        self._file.write("".join([f"{r!r},{n},{t:.6f},{frames},{env},{v}\n" for r, n, t, frames, env, v in lines]))
        self._dirty = True
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Give what was written to the system if that was not done for a second."""
        if self._dirty and monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Give what was written to the system."""
        self._file.flush()
        self._dirty = False
        self._due = monotonic() + _SAVE_EVERY_S

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()


def set_aside(path: Path) -> Path | None:
    """Rename a file to the first name that is free, ``<name>.1`` and so on; None if there is no such file."""
    if not path.exists():
        return None
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(other)


def _cut(path: Path, frames: int | None) -> float:
    """Take out lines after a number of frames, and an unfinished one; returns the file's beginning in seconds."""
    with path.open(newline="") as file:
        first, header, *lines = file.read().split("\n")
    if not first.startswith("#") or header.split(",") != list(COLUMNS):
        raise ValueError(
            f"{path} cannot be continued : expected a file that EpisodeLog has written, got one that begins with "
            f"{first[:40]!r}; move it away or give EpisodeLog another dirpath"
        )
    whole, last = lines[:-1], lines[-1:]  # what follows the last line break was never finished
    kept = [line for line in whole if frames is None or int(line.split(",")[_FRAMES]) <= frames]
    if len(kept) < len(whole) or last != [""]:
        draft = path.with_name(f"{path.name}.tmp")
        draft.write_text("\n".join([first, header, *kept, ""]), newline="")
        os.replace(draft, path)  # a crash leaves one or the other
    return float(json.loads(first[1:])["t_start"])
