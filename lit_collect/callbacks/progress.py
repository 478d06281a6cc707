"""`FrameProgress`: a progress bar that counts frames instead of minibatches."""

import sys
from contextlib import suppress
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Literal, TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tensordict import TensorDictBase
from typing_extensions import override

from lit_collect.callbacks._renderers import PlainRenderer, Renderer, RichRenderer, TqdmRenderer, View
from lit_collect.callbacks._source import Collection, find_callback, find_collection
from lit_collect.callbacks.monitor import CollectionMonitor

_STYLES = ("auto", "tqdm", "rich", "plain")


class FrameProgress(ProgressBar):
    """Shows a fit in frames: done, budget, frames per second with training, time left, and the episode return.

    Takes the place of Lightning's own bar. The return is the one of a `CollectionMonitor` among the callbacks; without
    a `CollectorDataModule` nothing is shown. Starts no thread, and is drawn at most once for each collected batch.

    Args:
        style: ``"auto"`` is rich in a terminal if it is installed, else tqdm; where standard output is no terminal,
            plain lines, one every 5 % of the budget or 10 seconds.
        leave: whether the bar stays when the run has ended.
        min_interval_s: seconds between two drawings at least, not below 0.

    Raises:
        ValueError: if there is no such style, or `min_interval_s` is negative.
        ModuleNotFoundError: if ``"rich"`` is asked for and not installed.

    Example:
        >>> FrameProgress("plain").is_enabled
        True
    """

    def __init__(
        self,
        style: Literal["auto", "tqdm", "rich", "plain"] = "auto",
        *,
        leave: bool = True,
        min_interval_s: float = 0.1,
    ) -> None:
        super().__init__()
        if style not in _STYLES:
            raise ValueError(f"progress.style must be one of {_STYLES}, got {style!r}")
        if min_interval_s < 0:
            raise ValueError(f"progress.min_interval_s must be at least 0, got {min_interval_s:g}")
        if style == "rich" and find_spec("rich") is None:
            raise ModuleNotFoundError(
                "progress.style='rich' needs the package rich : expected it to be installed; "
                "run `pip install 'lit_collect[rich]'` or choose another style"
            )
        self._style = style
        self._leave = leave
        self._min_interval_s = min_interval_s
        self._enabled = True
        self._source: Collection | None = None
        self._monitor: CollectionMonitor | None = None
        self._renderer: Renderer | None = None
        self._news = False  # frames came that are not shown yet
        self._due = 0.0  # not drawn before that moment
        self._began_at = 0.0
        self._began_with = 0  # frames of earlier runs
        self._hint = ""

    @property
    def is_enabled(self) -> bool:
        """Whether it shows anything; off on all ranks but the first."""
        return self._enabled

    @override
    def disable(self) -> None:
        """Show nothing until `enable`."""
        self._enabled = False
        self._close()

    @override
    def enable(self) -> None:
        """Show the next fit."""
        self._enabled = True

    @override
    def print(
        self, *args: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False
    ) -> None:
        """Like the built-in one, without breaking the bar."""
        if self._renderer is None or file is not None:
            print(*args, sep=sep, end=end, file=file, flush=flush)
        else:
            self._renderer.write(sep.join(map(str, args)) + end)

    # --- the fit ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen to the data module; may be called again."""
        super().setup(trainer, pl_module, stage)
        self._detach()
        self._source = find_collection(trainer)
        self._monitor = find_callback(trainer, CollectionMonitor)
        if self._source is not None:
            self._source.rollout_listeners.append(self._see_batch)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        if self._source is None or not self._enabled:
            return
        self._began_at, self._began_with = perf_counter(), self._source.frames_total
        total = None if self._source.total_frames == -1 else self._source.total_frames
        self._renderer = _make_renderer(self._style, total, self._leave)
        self._show()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw if there is news and it is time."""
        if self._news and self._renderer is not None and perf_counter() >= self._due:
            self._show()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw a last time."""
        self._close()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let go of the terminal and of the data module."""
        self._detach()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let go of the terminal and of the data module: Lightning calls no teardown after an exception."""
        with suppress(OSError, ValueError):  # the terminal has gone, and what comes after this must run all the same
            self._close()
        self._detach()

    # --- evaluation ---------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say so."""
        self._show_hint("validating")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Back to training."""
        self._show_hint("")

    # --- inside -------------------------------------------------------------------------------------------------

    def _see_batch(self, batch: TensorDictBase) -> None:
        self._news = True

    def _show_hint(self, hint: str) -> None:
        self._hint = hint
        if self._renderer is not None:
            self._show()

    def _show(self) -> None:
        assert self._renderer is not None
        self._renderer.show(self._view())
        self._news = False
        self._due = perf_counter() + self._min_interval_s

    def _view(self) -> View:
        assert self._source is not None
        done, seconds = self._source.frames_total, perf_counter() - self._began_at
        return View(
            done=done,
            total=None if self._source.total_frames == -1 else self._source.total_frames,
            fps=(done - self._began_with) / seconds if seconds > 0 else None,
            episode_return=None if self._monitor is None else self._monitor.latest.get("episode/return_mean"),
            hint=self._hint,
        )

    def _close(self) -> None:
        renderer, self._renderer, self._hint = self._renderer, None, ""
        if renderer is not None:
            renderer.close(self._view())

    def _detach(self) -> None:
        self._close()
        if self._source is not None and self._see_batch in self._source.rollout_listeners:
            self._source.rollout_listeners.remove(self._see_batch)
        self._source = self._monitor = None


def _make_renderer(style: str, total: int | None, leave: bool) -> Renderer:
    stream = sys.stdout
    if style == "auto":
        terminal = stream.isatty()
        style = "plain" if not terminal else "tqdm" if find_spec("rich") is None else "rich"
    if style == "plain":
        return PlainRenderer(stream)
    if style == "tqdm":
        return TqdmRenderer(stream, total=total, leave=leave)
    return RichRenderer(total=total, leave=leave)
