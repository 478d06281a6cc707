"""`EpisodeVideo`: evaluation episodes as videos, on disk and in the loggers."""

import os
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lit_collect.callbacks._source import find_collection
from lit_collect.callbacks._video_files import PACKAGES, check_format, writing
from lit_collect.evaluation import EvaluationLoader, Evaluator
from lit_collect.recording import Frame, Recorder

_KEY = "eval/video"


class EpisodeVideo(Callback):
    """Records whole evaluation episodes, with the policy and the settings of the evaluation.

    The episodes are played on an env of their own while an evaluation runs, so with the averaged weights where those
    are evaluated; they are the ones that the evaluation's first env copy plays (as far as env and policy are
    deterministic). Neither training nor evaluation notice. Only the first rank records.

    An id is made once more with ``render_mode="rgb_array"``. What a callable makes must have that render mode already:
    ``lambda: Maze(render_mode="rgb_array")``. An env without pictures, or one that fails, costs a warning and no run.

    The files are ``<folder>/videos/step=<frames>-episode=<k>.mp4`` (``test-step=...`` for a test run). Loggers that
    take videos get them as ``eval/video``: those with a ``log_video`` (Weights & Biases), and TensorBoard's if moviepy
    is installed.

    Args:
        every_n_evaluations: record the first evaluation and then each so-many-th, at least 1.
        num_episodes: of each of them, at least 1.
        fps: pictures per second; None takes the env's own, else 30.
        format: ``"mp4"`` needs imageio-ffmpeg (or OpenCV), ``"gif"`` Pillow.
        dirpath: folder of ``videos``; None takes the logger's, or the trainer's ``default_root_dir`` if there is none.
        max_frames: pictures of one episode at most; the rest of it is left out. At least 1.

    Raises:
        ValueError: if a setting is out of range.

    Example:
        >>> EpisodeVideo(every_n_evaluations=5, format="gif").paths
        []
    """

    def __init__(
        self,
        every_n_evaluations: int = 1,
        num_episodes: int = 1,
        *,
        fps: float | None = None,
        format: Literal["mp4", "gif"] = "mp4",
        dirpath: str | os.PathLike[str] | None = None,
        max_frames: int = 1000,
    ) -> None:
        counts = {"every_n_evaluations": every_n_evaluations, "num_episodes": num_episodes, "max_frames": max_frames}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"video.{name} must be at least 1, got {count}")
        if fps is not None and fps <= 0:
            raise ValueError(f"video.fps must be above 0 or None, got {fps:g}")
        if format not in PACKAGES:
            raise ValueError(f"video.format must be one of {tuple(PACKAGES)}, got {format!r}")
        self.paths: list[Path] = []
        """The files that were written by this callback."""
        self._every_n_evaluations, self._num_episodes = every_n_evaluations, num_episodes
        self._fps, self._format, self._max_frames = fps, format, max_frames
        self._dirpath = dirpath
        self._folder: str | os.PathLike[str] = "."
        self._evaluations = 0
        self._failed = False

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find out where the videos go.

        Raises:
            ModuleNotFoundError: if no package is installed that writes this format.
        """
        check_format(self._format)
        self._folder = self._dirpath or trainer.log_dir or trainer.default_root_dir
        self._failed = False

    @override
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Record after the first round, while the weights are those that are evaluated."""
        if batch_idx == dataloader_idx == 0 and not trainer.sanity_checking:
            self._see_evaluation(trainer, trainer.val_dataloaders, "")

    @override
    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """The same."""
        if batch_idx == dataloader_idx == 0:
            self._see_evaluation(trainer, trainer.test_dataloaders, "test-")

    @override
    def state_dict(self) -> dict[str, Any]:
        """How many evaluations there were."""
        return {"evaluations": self._evaluations}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._evaluations = state_dict["evaluations"]

    def _see_evaluation(self, trainer: L.Trainer, loader: Any, prefix: str) -> None:
        """Every rank counts, the first one records; it talks to nobody meanwhile."""
        source = find_collection(trainer)
        loaders = loader if isinstance(loader, (list, tuple)) else [loader]
        due = self._evaluations % self._every_n_evaluations == 0
        self._evaluations += 1
        if source is None or not due or self._failed or not trainer.is_global_zero:
            return
        evaluator = next((one.evaluator for one in loaders if isinstance(one, EvaluationLoader)), None)
        if evaluator is None:  # the user's own evaluation
            return
        folder = Path(self._folder, "videos")
        names = [f"{prefix}step={source.frames_total}-episode={k}.{self._format}" for k in range(self._num_episodes)]
        try:
            self._record(evaluator, [folder / name for name in names], trainer)
        except Exception as error:  # a video must not end a run
            self._failed = True
            rank_zero_warn(f"no more videos are recorded: {error}")

    def _record(self, evaluator: Evaluator, paths: list[Path], trainer: L.Trainer) -> None:
        wanted = [logger for logger in trainer.loggers if _takes_frames(logger)]
        with closing(Recorder(evaluator, max_frames=self._max_frames)) as recorder:
            fps = self._fps or recorder.fps
            for episode, path in enumerate(paths):
                frames: list[Frame] = []
                with writing(path, fps) as add:
                    recorder.record(episode, _both(add, frames) if wanted else add)
                self.paths.append(path)
                for logger in wanted:
                    pictures = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).unsqueeze(0)
                    tag = f"{_KEY}/{episode}" if len(paths) > 1 else _KEY
                    logger.experiment.add_video(tag, pictures, trainer.global_step, fps=fps)  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            if hasattr(logger, "log_video"):
                logger.log_video(_KEY, [str(path) for path in paths], step=trainer.global_step)


def _takes_frames(logger: Logger) -> bool:
    """Whether this is TensorBoard's, and moviepy is there, without which it could only print."""
    return hasattr(getattr(logger, "experiment", None), "add_video") and find_spec("moviepy") is not None


def _both(add: Any, frames: list[Frame]) -> Any:
    def show(frame: Frame) -> None:
        add(frame)
        frames.append(frame.copy())

    return show
