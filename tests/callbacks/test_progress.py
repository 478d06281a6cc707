import io
import sys
import threading
from contextlib import redirect_stdout

import pytest
import tqdm
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from lit_collect.callbacks import CollectionMonitor, FrameProgress
from lit_collect.callbacks._renderers import PlainRenderer, RichRenderer, TqdmRenderer, View


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class ThreadCounter(Callback):
    """Counts threads while the bar is up."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.most = max(self.most, threading.active_count())


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    """What `fit` can have for standard output: a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


# --- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (View(done=0, total=100), "0/100 frames"),
        (
            View(done=12_288, total=100_000, fps=1000.0, episode_return=1234.5),
            "12,288/100,000 frames, 1,000 fps, 1:28 left, return 1,234.50",
        ),
        (View(done=0, total=7_384_000, fps=1000.0), "0/7,384,000 frames, 1,000 fps, 2:03:04 left"),
        (View(done=100, total=100, fps=50.0, hint="validating"), "100/100 frames, 50 fps, validating"),
        (View(done=4096, total=None, fps=50.0), "4,096 frames, 50 fps"),
    ],
)
def test_view_says_what_is_known(view, text) -> None:
    assert view.text == text


# --- plain lines ----------------------------------------------------------------------------------------------------


def test_plain_lines_come_every_twentieth_of_the_budget_and_at_the_end() -> None:
    stream = io.StringIO()
    renderer = PlainRenderer(stream, clock=lambda: 0.0)
    for done in range(0, 991, 10):
        renderer.show(View(done=done, total=1000))
    renderer.close(View(done=1000, total=1000))
    lines = stream.getvalue().splitlines()
    assert [line.split("%")[0].strip() for line in lines] == [str(percent) for percent in range(5, 101, 5)]
    assert lines[-1] == "100 %  1,000/1,000 frames"


def test_plain_lines_come_every_ten_seconds_without_a_budget() -> None:
    stream, seconds = io.StringIO(), iter([0.0, *(4.0 * n for n in range(1, 10))])
    renderer = PlainRenderer(stream, clock=lambda: next(seconds))
    for done in range(0, 80, 10):
        renderer.show(View(done=done, total=None))
    assert stream.getvalue().splitlines() == ["30 frames", "60 frames"]


def test_plain_lines_leave_out_hints_and_what_was_said() -> None:
    stream = io.StringIO()
    renderer = PlainRenderer(stream, clock=lambda: 0.0)
    renderer.show(View(done=0, total=10))
    renderer.show(View(done=10, total=10))
    renderer.show(View(done=10, total=10, hint="validating"))
    renderer.close(View(done=10, total=10))
    assert stream.getvalue().splitlines() == ["100 %  10/10 frames"]


# --- bars -----------------------------------------------------------------------------------------------------------


def test_tqdm_bar_shows_text_and_keeps_prints_apart() -> None:
    stream = io.StringIO()
    renderer = TqdmRenderer(stream, total=200)
    renderer.show(View(done=50, total=200, episode_return=3.0))
    renderer.write("a note\n")
    renderer.close(View(done=200, total=200))
    drawn = stream.getvalue()
    assert " 25%|" in drawn
    assert "50/200 frames, return 3.00" in drawn
    assert "\ra note\n" in drawn.replace(" ", "").replace("anote", "a note")
    assert "100%|" in drawn.splitlines()[-1]


def test_tqdm_without_budget_has_no_bar() -> None:
    stream = io.StringIO()
    renderer = TqdmRenderer(stream, total=None)
    renderer.show(View(done=50, total=None, fps=2.0))
    renderer.close(View(done=60, total=None))
    assert "50 frames, 2 fps" in stream.getvalue()
    assert "|" not in stream.getvalue()


@pytest.mark.parametrize("total", [200, None])
def test_rich_bar_shows_text_and_lets_go_of_standard_output(total) -> None:
    stream, before = io.StringIO(), sys.stdout
    renderer = RichRenderer(total=total, console=Console(file=stream, force_terminal=True, width=100))
    renderer.show(View(done=50, total=total, episode_return=3.0))
    renderer.write("a [note]\n")
    renderer.close(View(done=200, total=total))
    drawn = stream.getvalue()
    assert ("25%" in drawn) == (total is not None)
    assert f"50{'/200' if total else ''} frames, return 3.00" in drawn
    assert "a [note]" in drawn
    assert sys.stdout is before


def test_no_renderer_starts_a_thread(monkeypatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 10)  # tqdm's own value: a thread watches all bars
    before = threading.active_count()
    bars = [TqdmRenderer(io.StringIO(), total=3), RichRenderer(total=3, console=Console(file=io.StringIO()))]
    for bar in bars:
        bar.show(View(done=1, total=3))
    assert threading.active_count() == before
    for bar in bars:
        bar.close(View(done=3, total=3))
    assert tqdm.tqdm.monitor_interval == 10


# --- the callback ---------------------------------------------------------------------------------------------------


def fit(trainer_with, learner, data, *callbacks, terminal: Terminal | None = None) -> None:
    """Train; whatever happens, standard output must be as it was."""
    trainer = trainer_with(*callbacks, enable_progress_bar=True)
    with redirect_stdout(terminal or sys.stdout):
        before = sys.stdout
        try:
            trainer.fit(learner, datamodule=data)
        finally:
            assert sys.stdout is before


def test_lines_are_printed_where_there_is_no_terminal(known_data, learner, trainer_with, capsys) -> None:
    fit(trainer_with, learner, known_data(batches=4), FrameProgress(min_interval_s=0.0), CollectionMonitor())
    lines = [line for line in capsys.readouterr().out.splitlines() if "frames" in line]
    assert [line.split(" frames")[0] for line in lines] == [
        " 25 %  8/32",
        " 50 %  16/32",
        " 75 %  24/32",
        "100 %  32/32",
    ]
    assert "fps" in lines[0]
    assert "left" in lines[0]
    assert lines[-1].endswith("return 9.00")


def test_without_monitor_there_is_no_return(known_data, learner, trainer_with, capsys) -> None:
    fit(trainer_with, learner, known_data(batches=2), FrameProgress("plain", min_interval_s=0.0))
    printed = capsys.readouterr().out
    assert "16/16 frames" in printed
    assert "return" not in printed


def test_endless_run_shows_frames_alone(known_data, learner, trainer_with, capsys) -> None:
    fit(trainer_with, learner, known_data(batches=2, budget=False), FrameProgress("plain", min_interval_s=0.0))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "frames" in line]
    assert line.startswith("16 frames, ")
    assert "%" not in line


@pytest.mark.parametrize("style", ["auto", "rich", "tqdm"])
def test_bar_is_drawn_in_a_terminal(known_data, learner, trainer_with, terminal, monkeypatch, style) -> None:
    monkeypatch.setattr("rich._console", Console(file=terminal, force_terminal=True, width=100))
    counter, before = ThreadCounter(), threading.active_count()
    progress = FrameProgress(style, min_interval_s=0.0)
    fit(trainer_with, learner, known_data(batches=2), progress, CollectionMonitor(), counter, terminal=terminal)
    assert "16/16 frames" in terminal.getvalue()
    assert "return 9.00" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
    assert counter.most == threading.active_count() == before


def test_batch_is_drawn_once_however_many_minibatches_it_has(known_data, learner, trainer_with, terminal) -> None:
    data, progress = known_data(batches=2, minibatches=5), FrameProgress("tqdm", min_interval_s=0.0)
    fit(trainer_with, learner, data, progress, terminal=terminal)
    draws = [part for part in terminal.getvalue().split("\r") if "frames" in part]
    assert [draw.rpartition("| ")[2].partition(" frames")[0] for draw in draws] == [
        "0/16",
        "8/16",
        "16/16",
        "16/16",
    ]  # and closed


def test_drawing_waits_for_the_interval(known_data, learner, trainer_with, terminal) -> None:
    fit(trainer_with, learner, known_data(batches=20), FrameProgress("tqdm", min_interval_s=1000.0), terminal=terminal)
    draws = [part for part in terminal.getvalue().split("\r") if "frames" in part]
    assert [draw.rpartition("| ")[2].partition(" frames")[0] for draw in draws] == ["0/160", "160/160"]


def test_evaluation_is_hinted_at(evaluated_data, evaluated_learner, trainer_with, terminal) -> None:
    fit(trainer_with, evaluated_learner, evaluated_data(batches=1), FrameProgress("tqdm"), terminal=terminal)
    hints = ["validating" in part for part in terminal.getvalue().split("\r") if "frames" in part]
    assert hints == [False, True, False, False]  # opened, hint, hint gone, closed


@pytest.mark.parametrize("style", ["plain", "tqdm", "rich"])
def test_exception_leaves_neither_thread_nor_listener_nor_redirection(
    known_data, learner, trainer_with, terminal, style
) -> None:
    data, before = known_data(batches=3), threading.active_count()
    data.fail_at = 2
    with pytest.raises(RuntimeError, match="the env broke"):
        fit(trainer_with, learner, data, FrameProgress(style), terminal=terminal)
    assert threading.active_count() == before
    assert data.rollout_listeners == []


def test_exception_of_a_fit_is_told_even_if_the_terminal_has_gone(known_data, learner, trainer_with, terminal) -> None:
    class Closes(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if data.collected == 2:
                terminal.close()

    data = known_data(batches=3)
    data.fail_at = 2
    with pytest.raises(RuntimeError, match="the env broke"):
        fit(trainer_with, learner, data, FrameProgress("plain", min_interval_s=1000.0), Closes(), terminal=terminal)
    assert data.rollout_listeners == []


def test_print_goes_above_the_bar_or_to_where_it_is_told(known_data, learner, trainer_with, terminal) -> None:
    class Prints(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            pl_module.print("note", batch_idx, sep="-")
            pl_module.print("aside", file=aside)

    aside = io.StringIO()
    fit(trainer_with, learner, known_data(batches=1, minibatches=1), FrameProgress("tqdm"), Prints(), terminal=terminal)
    assert "note-0\n" in terminal.getvalue()
    assert aside.getvalue() == "aside\n"


def test_print_without_a_bar_is_the_built_in(capsys) -> None:
    FrameProgress().print("a", "b", sep="+", end="!")
    assert capsys.readouterr().out == "a+b!"


def test_disabled_shows_nothing_until_enabled(known_data, learner, trainer_with, capsys) -> None:
    progress = FrameProgress("plain")
    progress.disable()
    fit(trainer_with, learner, known_data(batches=1), progress)
    assert "frames" not in capsys.readouterr().out
    progress.enable()
    fit(trainer_with, learner, known_data(batches=1), progress)
    assert "8/8 frames" in capsys.readouterr().out


def test_trainer_adds_no_bar_of_its_own(trainer_with) -> None:
    progress = FrameProgress()
    assert trainer_with(progress, enable_progress_bar=True).progress_bar_callback is progress


def test_without_a_collecting_data_module_nothing_is_shown(known_data, learner, trainer_with, capsys) -> None:
    trainer_with(FrameProgress("plain"), enable_progress_bar=True).fit(
        learner, known_data(batches=1).train_dataloader()
    )
    assert "frames" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"style": "neon"}, r"progress.style must be one of \('auto', 'tqdm', 'rich', 'plain'\), got 'neon'"),
        ({"min_interval_s": -1.0}, "progress.min_interval_s must be at least 0, got -1"),
    ],
)
def test_wrong_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FrameProgress(**settings)


def test_rich_style_without_rich_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit_collect\[rich\]'"):
        FrameProgress("rich")


def test_auto_style_without_rich_is_tqdm(known_data, learner, trainer_with, terminal, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    fit(trainer_with, learner, known_data(batches=1), FrameProgress(), terminal=terminal)
    assert "100%|" in terminal.getvalue()
