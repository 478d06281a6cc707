import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_collect.callbacks import CollectionMonitor, LearningCurve
from lit_collect.callbacks import learning_curve as module
from lit_collect.callbacks.learning_curve import draw_curve


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)[..., :3]


def coloured(path: Path, red: float, green: float, blue: float) -> int:
    """How many pixels are close to a colour."""
    return int((np.abs(pixels(path) - (red, green, blue)).max(-1) < 0.06).sum())


BLUE, ORANGE = (0.12, 0.47, 0.71), (1.0, 0.5, 0.05)


def test_picture_is_in_the_loggers_folder_and_shows_data(evaluated_data, evaluated_learner, trainer_with) -> None:
    curve = LearningCurve()
    trainer = trainer_with(CollectionMonitor(), curve)
    trainer.fit(evaluated_learner, datamodule=evaluated_data(batches=5))
    assert curve.path == Path(trainer.logger.log_dir, "learning_curve.png")
    assert curve.path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert 5_000 < curve.path.stat().st_size < 200_000
    assert pixels(curve.path).shape == (504, 840, 3)
    assert pixels(curve.path).std() > 0.05
    assert coloured(curve.path, *BLUE) > 300
    assert coloured(curve.path, *ORANGE) > 30


def test_points_are_those_of_finished_episodes_and_of_evaluations(
    evaluated_data, evaluated_learner, trainer_with
) -> None:
    curve = LearningCurve()
    trainer_with(CollectionMonitor(), curve).fit(evaluated_learner, datamodule=evaluated_data(batches=3))
    state = curve.state_dict()
    assert state["training"] == [[16, 9, 6, 12], [24, 9, 6, 12]]  # no episode has ended in the first batch
    assert state["evaluated"] == [[24, 3.75]]


def test_points_are_the_same_before_the_monitor_in_the_list(known_data, learner, trainer_with) -> None:
    curve = LearningCurve()
    trainer_with(curve, CollectionMonitor()).fit(learner, datamodule=known_data(batches=3, minibatches=1))
    assert curve.state_dict()["training"] == [[16, 9, 6, 12], [24, 9, 6, 12]]


def test_without_logger_the_picture_is_in_the_root_folder(known_data, learner, trainer_with, tmp_path) -> None:
    curve = LearningCurve("curves/run.png")
    trainer = trainer_with(CollectionMonitor(), curve, logger=False, default_root_dir=tmp_path / "root")
    trainer.fit(learner, datamodule=known_data(batches=2))
    assert curve.path == tmp_path / "root" / "curves" / "run.png"
    assert curve.path.exists()


def test_run_without_a_finished_episode_has_no_picture(known_data, learner, trainer_with) -> None:
    curve = LearningCurve()
    trainer_with(CollectionMonitor(), curve).fit(learner, datamodule=known_data(batches=1))
    assert curve.path is None


def test_failed_run_has_a_picture_of_what_there_was(known_data, learner, trainer_with) -> None:
    data, curve = known_data(batches=4), LearningCurve()
    data.fail_at = 3
    with pytest.raises(RuntimeError, match="the env broke"):
        trainer_with(CollectionMonitor(), curve).fit(learner, datamodule=data)
    assert curve.path.exists()
    assert len(curve.state_dict()["training"]) == 2


def test_picture_is_also_written_on_the_way(known_data, learner, trainer_with, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(module, "draw_curve", lambda path, training, evaluated: drawn.append(len(training)))
    trainer_with(CollectionMonitor(), LearningCurve(every_n_batches=2)).fit(learner, datamodule=known_data(batches=5))
    assert drawn == [2, 4, 4]  # the first batch ends no episode; the last picture is the one at the end


def test_state_is_plain_and_a_resumed_run_draws_the_whole_curve(known_data, learner, trainer_with, tmp_path) -> None:
    first, second = LearningCurve(), LearningCurve()
    trainer_with(CollectionMonitor(), first).fit(learner, datamodule=known_data(batches=3))
    torch.save(first.state_dict(), tmp_path / "state")
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    data = known_data(batches=2)
    data.frames_total = 24
    trainer_with(CollectionMonitor(), second).fit(learner, datamodule=data)
    assert [point[0] for point in second.state_dict()["training"]] == [16, 24, 40]


def test_long_run_is_thinned_evenly(known_data, learner, trainer_with, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_POINTS", 8)
    curve = LearningCurve()
    trainer_with(CollectionMonitor(), curve).fit(learner, datamodule=known_data(batches=50, minibatches=1))
    batches = [point[0] // 8 for point in curve.state_dict()["training"]]
    assert batches == [9, 17, 25, 33, 41, 49]


def test_picture_that_cannot_be_written_warns(known_data, learner, trainer_with, tmp_path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    curve = LearningCurve(str(tmp_path / "taken" / "curve.png"))
    with pytest.warns(UserWarning, match="the learning curve could not be written"):
        trainer_with(CollectionMonitor(), curve).fit(learner, datamodule=known_data(batches=2))
    assert curve.path is None


def test_without_monitor_it_says_what_to_add(known_data, learner, trainer_with) -> None:
    with pytest.raises(ValueError, match="add CollectionMonitor"):
        trainer_with(LearningCurve()).fit(learner, datamodule=known_data())


def test_without_matplotlib_it_says_what_to_install(known_data, learner, trainer_with, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit_collect\[plots\]'"):
        trainer_with(CollectionMonitor(), LearningCurve()).fit(learner, datamodule=known_data())


def test_drawing_leaves_pyplot_alone(tmp_path) -> None:
    before = sys.modules.get("matplotlib.pyplot")
    draw_curve(tmp_path / "one.png", [[1000.0, 2.0, 1.0, 3.0]], [])
    assert coloured(tmp_path / "one.png", *BLUE) > 20  # a single point is to be seen, too
    assert sys.modules.get("matplotlib.pyplot") is before


def test_zero_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learning_curve\.every_n_batches must be at least 1 or None, got 0"):
        LearningCurve(every_n_batches=0)
