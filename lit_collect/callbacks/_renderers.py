"""How `FrameProgress` looks: rich, tqdm or plain lines. None of them starts a thread."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]

_LINE_EVERY = 0.05  # of the budget
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class View:
    """What is to be shown of a run."""

    done: int
    """Frames over all ranks."""
    total: int | None
    """The budget, None if there is none."""
    fps: float | None = None
    """Frames per second, training included."""
    episode_return: float | None = None
    hint: str = ""
    """What happens now, if not training."""

    @property
    def text(self) -> str:
        """One line without the bar."""
        budget = "" if self.total is None else f"/{self.total:,}"
        parts = [f"{self.done:,}{budget} frames"]
        if self.fps:
            parts.append(f"{self.fps:,.0f} fps")
            if self.total is not None and self.done < self.total:
                parts.append(f"{_duration((self.total - self.done) / self.fps)} left")
        if self.episode_return is not None:
            parts.append(f"return {self.episode_return:,.2f}")
        if self.hint:
            parts.append(self.hint)
        return ", ".join(parts)


class Renderer(Protocol):
    """One way of showing a run, from its creation to `close`."""

    def show(self, view: View) -> None:
        """Show this from now on."""

    def write(self, text: str) -> None:
        """Print text, its end included, without breaking what is shown."""

    def close(self, view: View) -> None:
        """Show the last view and let go of the terminal."""


class PlainRenderer:
    """Lines for a pipe or a log: one every 5 % of the budget or 10 seconds, and a last one. Leaves out hints.

    Args:
        stream: where to.
        clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._shown_at = clock()
        self._shown: int | None = None  # frames

    def show(self, view: View) -> None:
        """Print a line if one is due."""
        if self._shown is None:
            self._shown = view.done  # where the run began is no news
        step = view.done - self._shown
        if view.hint or step <= 0:
            return
        now = self._clock()
        if now - self._shown_at >= _LINE_EVERY_S or (view.total is not None and step >= _LINE_EVERY * view.total):
            self._line(view, now)

    def write(self, text: str) -> None:
        """Print text."""
        self._stream.write(text)

    def close(self, view: View) -> None:
        """Print the last line unless it has been printed."""
        if self._shown is not None and view.done > self._shown:
            self._line(view, self._clock())

    def _line(self, view: View, now: float) -> None:
        percent = "" if view.total is None else f"{100 * view.done // view.total:3d} %  "
        self._stream.write(f"{percent}{view.text}\n")
        self._stream.flush()
        self._shown_at, self._shown = now, view.done


class _Bar(tqdm):
    """tqdm without its watching thread and without its lock between processes, for this class alone."""

    monitor_interval = 0
    _lock = threading.RLock()


class TqdmRenderer:
    """A bar of tqdm.

    Args:
        stream: where to.
        total: the budget in frames, None for no bar but only text.
        leave: whether the bar stays when the run has ended.
    """

    def __init__(self, stream: TextIO, *, total: int | None, leave: bool = True) -> None:
        self._stream = stream
        layout = "{desc}" if total is None else "{percentage:3.0f}%|{bar}| {desc}"
        # The delay keeps it from drawing itself before there is anything to show.
        self._bar = _Bar(total=total, file=stream, leave=leave, dynamic_ncols=True, bar_format=layout, delay=1e-9)

    def show(self, view: View) -> None:
        """Draw the bar anew."""
        self._bar.n = view.done
        self._bar.set_description_str(view.text)

    def write(self, text: str) -> None:
        """Print text above the bar."""
        _Bar.write(text, file=self._stream, end="")

    def close(self, view: View) -> None:
        """Draw the bar a last time."""
        self._bar.n = view.done
        self._bar.set_description_str(view.text, refresh=False)
        self._bar.close()


class RichRenderer:
    """A bar of rich.

    Args:
        total: the budget in frames, None for no bar but only text.
        leave: whether the bar stays when the run has ended.
        console: a rich console; None takes the global one.
    """

    def __init__(self, *, total: int | None, leave: bool = True, console: Any = None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        percent = TextColumn("{task.percentage:>3.0f}%")
        columns = [text] if total is None else [percent, BarColumn(bar_width=None), text]
        # Drawn when there is news and not by a thread
        self._progress = Progress(*columns, console=console, auto_refresh=False, transient=not leave, expand=True)
        self._task = self._progress.add_task("", total=total)
        self._progress.start()

    def show(self, view: View) -> None:
        """Draw the bar anew."""
        self._progress.update(self._task, completed=view.done, description=view.text, refresh=True)

    def write(self, text: str) -> None:
        """Print text above the bar."""
        self._progress.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def close(self, view: View) -> None:
        """Draw the bar a last time."""
        try:
            self.show(view)
        finally:
            self._progress.stop()


def _duration(seconds: float) -> str:
    """As 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
