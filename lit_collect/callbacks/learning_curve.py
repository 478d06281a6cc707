"""`LearningCurve`: return against frames as a picture."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lit_collect.callbacks._source import Collection, find_callback, find_collection
from lit_collect.callbacks.monitor import CollectionMonitor

_MAX_POINTS = 4000


class LearningCurve(Callback):
    """Draws the return of the last episodes, their range, and the evaluations against frames as a PNG.

    It draws what a `CollectionMonitor` among the callbacks measures, and writes the picture at the end of a fit, also
    of one that failed. A resumed run draws the whole curve. Long runs are thinned to some thousand points.

    Args:
        filename: of the picture, in the logger's folder, or in the trainer's ``default_root_dir`` if there is none;
            its folders are made.
        every_n_batches: also write it after so many collected batches with a return, at least 1.

    Raises:
        ValueError: if `every_n_batches` is below 1.

    Example:
        >>> LearningCurve("curves/return.png").path is None
        True
    """

    def __init__(self, filename: str = "learning_curve.png", *, every_n_batches: int | None = None) -> None:
        if every_n_batches is not None and every_n_batches < 1:
            raise ValueError(f"learning_curve.every_n_batches must be at least 1 or None, got {every_n_batches}")
        self.path: Path | None = None
        """The file that was written last; None so far, and on all ranks but the first."""
        self._filename = filename
        self._every_n_batches = every_n_batches
        self._folder: str | os.PathLike[str] = "."
        self._monitor: CollectionMonitor | None = None
        self._source: Collection | None = None
        self._seen: dict[str, float] = {}  # the monitor's values that were looked at last
        self._evaluations = 0
        self._batches = 0  # those that could be a point
        self._stride = 1  # only each so-many-th batch is a point
        self._training: list[list[float]] = []  # frames, mean, lowest, highest return
        self._evaluated: list[list[float]] = []  # frames, mean return

    # --- Lightning's hooks --------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find what is drawn and where it goes.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
            ValueError: if there is no `CollectionMonitor`.
        """
        if stage != "fit":
            return
        if find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                "LearningCurve needs the package matplotlib : expected it to be installed; "
                "run `pip install 'lit_collect[plots]'` or leave the callback out"
            )
        self._monitor = find_callback(trainer, CollectionMonitor)
        if self._monitor is None:
            raise ValueError(
                "LearningCurve draws what CollectionMonitor measures : expected one among the trainer's callbacks, "
                "got none; add CollectionMonitor()"
            )
        self._source = find_collection(trainer)
        self._seen, self._evaluations = self._monitor.latest, self._monitor.evaluations
        self._folder = trainer.log_dir or trainer.default_root_dir

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take up what the monitor has logged since the last call."""
        if self._monitor is not None and self._monitor.latest is not self._seen:
            taken = self._take(self._monitor.latest)
            if taken and self._every_n_batches is not None and self._batches % self._every_n_batches == 0:
                self._write(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take up an evaluation."""
        if self._monitor is None or self._source is None:
            return
        if self._monitor.evaluations != self._evaluations:
            self._evaluations = self._monitor.evaluations
            self._evaluated.append([self._source.frames_total, self._monitor.latest["eval/return_mean"]])

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the picture."""
        self._finish(trainer)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write the picture of what there is."""
        self._finish(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The points as plain lists."""
        return {
            "training": [list(point) for point in self._training],
            "evaluated": [list(point) for point in self._evaluated],
            "batches": self._batches,
            "stride": self._stride,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the curve of another run."""
        self._training = [list(point) for point in state_dict["training"]]
        self._evaluated = [list(point) for point in state_dict["evaluated"]]
        self._batches, self._stride = state_dict["batches"], state_dict["stride"]

    # --- inside -------------------------------------------------------------------------------------------------

    def _take(self, latest: dict[str, float]) -> bool:
        """Whether these values are of another batch, and one after the first end of an episode."""
        before, self._seen = self._seen, latest
        if latest.get("collect/frames_total") == before.get("collect/frames_total"):  # an evaluation was added
            return False
        if "episode/return_min" not in latest:  # the mean is that of beginnings of episodes
            return False
        self._batches += 1
        if self._batches % self._stride == 0:
            self._training.append(
                [latest["collect/frames_total"], *(latest[f"episode/return_{name}"] for name in ("mean", "min", "max"))]
            )
        if len(self._training) >= _MAX_POINTS:
            self._training = self._training[1::2]
            self._stride *= 2
        return True

    def _finish(self, trainer: L.Trainer) -> None:
        if self._monitor is None:
            return
        if self._monitor.latest is not self._seen:
            self._take(self._monitor.latest)
        self._monitor = self._source = None
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero or not (self._training or self._evaluated):
            return
        path = Path(self._folder, self._filename)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draw_curve(path, self._training, self._evaluated)
        except Exception as error:  # a picture must neither end a run nor keep others from closing
            rank_zero_warn(f"the learning curve could not be written to {path}: {error}")
        else:
            self.path = path


def draw_curve(path: Path, training: list[list[float]], evaluated: list[list[float]]) -> None:
    """Write the picture, without pyplot and its global state.

    Args:
        path: of the PNG.
        training: points of frames, mean, lowest and highest return.
        evaluated: points of frames and mean return.

    Raises:
        OSError: if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.0, 4.2), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        frames, mean, lowest, highest = zip(*training, strict=True)
        alone = "o" if len(training) == 1 else ""
        axes.fill_between(frames, lowest, highest, color="tab:blue", alpha=0.15, linewidth=0, label="lowest to highest")
        axes.plot(frames, mean, color="tab:blue", linewidth=1.8, marker=alone, label="training, last episodes")
    if evaluated:
        frames, mean = zip(*evaluated, strict=True)
        axes.plot(frames, mean, color="tab:orange", linewidth=1.2, marker="o", markersize=4, label="evaluation")
    axes.set(title="Learning curve", xlabel="frames", ylabel="episode return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="best")
    canvas.print_png(path)
