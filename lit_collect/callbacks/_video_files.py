"""Videos as files: mp4 by FFmpeg or OpenCV, gif by Pillow, whichever is installed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from lit_collect.recording import Frame

PACKAGES = {"mp4": ("imageio_ffmpeg", "cv2"), "gif": ("PIL",)}
"""By format the packages of which one must be there, the better one first."""

_TIMEOUT_S = 60.0  # that FFmpeg may take to end after the last picture
_INSTALL = {"imageio_ffmpeg": "imageio-ffmpeg", "cv2": "opencv-python-headless", "PIL": "pillow"}


def check_format(name: str) -> None:
    """Raise if a format cannot be written.

    Raises:
        ModuleNotFoundError: saying what to install.
    """
    if not any(find_spec(package) for package in PACKAGES[name]):
        wanted = " or ".join(_INSTALL[package] for package in PACKAGES[name])
        raise ModuleNotFoundError(
            f"EpisodeVideo(format={name!r}) needs the package {wanted} : expected it to be installed; "
            f"run `pip install 'lit_collect[video]'` or choose another of the formats {', '.join(PACKAGES)}"
        )


@contextmanager
def writing(path: Path, fps: float) -> Iterator[Callable[[Frame], None]]:
    """Write a video; it is there when the block ends, and not at all if the block fails.

    Args:
        path: of the file, whose ending is one of `PACKAGES`; its folders are made.
        fps: pictures per second.

    Yields:
        What takes the pictures one by one, all of the same size.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    package = next(name for name in PACKAGES[path.suffix[1:]] if find_spec(name))
    writer = _WRITERS[package](draft, fps)
    try:
        try:
            yield writer.add
        finally:
            writer.close()
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


class _FFmpeg:
    """H.264, which browsers show."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps = path, fps
        self._pipe: Any = None
        self._shape: tuple[int, ...] = ()

    def add(self, frame: Frame) -> None:
        frame = _even(frame)
        if self._pipe is None:
            self._shape = frame.shape
            size = frame.shape[1], frame.shape[0]
            self._pipe = import_module("imageio_ffmpeg").write_frames(
                str(self._path), size, fps=self._fps, macro_block_size=2, ffmpeg_timeout=_TIMEOUT_S
            )
            self._pipe.send(None)
        _check_shape(frame, self._shape)
        self._pipe.send(frame)

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()


class _OpenCV:
    """MPEG-4, which most players show."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps = path, fps
        self._writer: Any = None
        self._shape: tuple[int, ...] = ()

    def add(self, frame: Frame) -> None:
        cv2: Any = import_module("cv2")
        frame = _even(frame)
        if self._writer is None:
            self._shape = frame.shape
            code = cv2.VideoWriter.fourcc(*"mp4v")
            self._writer = cv2.VideoWriter(str(self._path), code, self._fps, (frame.shape[1], frame.shape[0]))
            if not self._writer.isOpened():
                raise OSError(f"OpenCV cannot write {self._path}")
        _check_shape(frame, self._shape)
        self._writer.write(np.ascontiguousarray(frame[..., ::-1]))  # it wants blue first

    def close(self) -> None:
        if self._writer is not None:
            self._writer.release()


class _Gif:
    """256 colours of each picture's own."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path = path
        self._each_ms = max(round(1000 / fps), 20)  # players take less for a mistake, and wait longer
        self._images: list[Any] = []  # a byte for each point

    def add(self, frame: Frame) -> None:
        self._images.append(import_module("PIL.Image").fromarray(frame).quantize())

    def close(self) -> None:
        if self._images:
            first, *others = self._images
            first.save(self._path, format="GIF", save_all=True, append_images=others, duration=self._each_ms, loop=0)


_WRITERS: dict[str, type[_FFmpeg] | type[_OpenCV] | type[_Gif]] = {
    "imageio_ffmpeg": _FFmpeg,
    "cv2": _OpenCV,
    "PIL": _Gif,
}


def _even(frame: Frame) -> Frame:
    """With an even height and width, as codecs want it: the last line is repeated."""
    height, width = frame.shape[0] % 2, frame.shape[1] % 2
    padded = np.pad(frame, ((0, height), (0, width), (0, 0)), mode="edge") if height or width else frame
    return np.ascontiguousarray(padded)


def _check_shape(frame: Frame, shape: tuple[int, ...]) -> None:
    if frame.shape != shape:
        raise ValueError(f"all pictures of an episode must be of one size, got {shape} and then {frame.shape}")
