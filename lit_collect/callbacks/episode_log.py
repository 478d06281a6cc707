"""`EpisodeLog`: every finished episode as a line of a CSV file."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tensordict import TensorDictBase
from typing_extensions import override

from lit_collect.callbacks._monitor_file import MonitorFile, set_aside
from lit_collect.callbacks._source import Collection, find_callback, find_collection
from lit_collect.callbacks.monitor import CollectionMonitor
from lit_collect.episodes import Finished, per_row, per_row_or_none
from lit_collect.frames import MASK, POLICY_VERSION
from lit_collect.metrics import EpisodeStatistics


class EpisodeLog(Callback):
    """Writes every finished episode of the training to a CSV file, as Stable-Baselines3's monitor does.

    After a line of JSON and a header come the columns ``r`` (undiscounted return, exact), ``l`` (frames), ``t``
    (seconds since the file was begun), ``frames`` (frames of the whole run, over all ranks, when the episode ended),
    ``env`` (global index of the env copy) and ``version`` (of the weights that acted last; -1: at random). So
    ``pandas.read_csv(path, skiprows=1)`` and Stable-Baselines3's ``load_results(folder)`` read it.

    Each rank writes its own file: ``monitor.csv``, ``rank1.monitor.csv`` and so on. Episodes come in the order in which
    they arrived; those that lost rows (stale data) are left out. The file is up to date within a second and
    at every checkpoint. A run that resumes from a checkpoint goes on in the file if it is in the same folder, without
    the episodes after the checkpoint; another run does not touch it, but sets it aside as ``monitor.csv.1``.

    Without a `CollectorDataModule` the callback does nothing.

    Args:
        dirpath: folder of the files; None takes the logger's, or the trainer's ``default_root_dir`` if there is none.

    Example:
        >>> EpisodeLog("runs/first").path is None
        True
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None) -> None:
        self.path: Path | None = None
        """This rank's file, once a fit has begun."""
        self._dirpath = dirpath
        self._source: Collection | None = None
        self._monitor: CollectionMonitor | None = None
        self._episodes: EpisodeStatistics | None = None  # where there is no monitor to count them
        self._file: MonitorFile | None = None
        self._written: Path | None = None  # the file that this callback has begun or gone on with
        self._frames = 0
        self._restored: int | None = None
        self._waited_s = 0.0
        self._ranks = 1

    # --- Lightning's hooks --------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen to the monitor, or to the data module if there is none; may be called again."""
        self._detach()
        self._source = find_collection(trainer) if stage == "fit" else None
        if self._source is None:
            return
        self._ranks = trainer.world_size
        folder = Path(self._dirpath or trainer.log_dir or trainer.default_root_dir)
        self.path = folder / ("monitor.csv" if trainer.global_rank == 0 else f"rank{trainer.global_rank}.monitor.csv")
        self._monitor = find_callback(trainer, CollectionMonitor)
        if self._monitor is not None:
            self._monitor.episode_listeners.append(self._see)
        else:
            self._episodes = self._episodes or EpisodeStatistics(window=1)
            self._source.rollout_listeners.append(self._count)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the file."""
        if self._source is not None:
            self._opened()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let others see what was written a second ago."""
        if self._file is not None:
            self._file.flush_if_due()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let others see everything."""
        if self._file is not None:
            self._file.flush()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the file and stop listening."""
        self._detach()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the file and stop listening: Lightning calls no teardown after an exception."""
        self._detach()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Frames of the run so far, over all ranks."""
        if self._file is not None:
            self._file.flush()
        return {"frames": self._frames}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the file of that run, after the episodes that had ended by then."""
        self._frames = self._restored = state_dict["frames"]
        self._close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _count(self, batch: TensorDictBase) -> None:
        assert self._source is not None
        assert self._episodes is not None
        self._episodes.update(batch, self._source.copies_total)
        self._see(batch, self._episodes.finished)

    def _see(self, batch: TensorDictBase, finished: Finished) -> None:
        assert self._source is not None
        file = self._opened()
        self._frames, waited_s = self._source.frames_total, self._source.seconds["collect_s"]
        batch_s, self._waited_s = max(waited_s - self._waited_s, 0.0), waited_s
        if not finished.rows:
            return
        steps = batch.shape[-1]
        rows = np.array(finished.rows)
        ends = rows % steps
        mask = per_row_or_none(batch, MASK)
        each = np.full(steps, batch.numel() // steps) if mask is None else mask.sum(0)  # frames of each step
        made = each.cumsum()
        frames = self._frames - self._ranks * (made[-1] - made[ends])
        seconds = np.maximum(file.seconds - batch_s * (1 - (ends + 1) / steps), 0.0)  # as if all steps took as long
        versions = per_row(batch, POLICY_VERSION).ravel()[rows]
        columns = (frames.tolist(), finished.copies, versions.tolist())
        file.write(zip(finished.returns, finished.lengths, seconds.tolist(), *columns, strict=True))

    def _opened(self) -> MonitorFile:
        if self._file is None:
            assert self._source is not None
            assert self.path is not None
            goes_on = self.path == self._written and self._source.frames_total >= self._frames
            if self._restored is None and not goes_on and (other := set_aside(self.path)) is not None:
                rank_zero_info(f"the episodes of an earlier run are kept in {other}")
            self._file = MonitorFile(self.path, env_id=self._source.hparams.get("env", ""), frames=self._restored)
            self._written, self._restored = self.path, None
            self._waited_s = self._source.seconds["collect_s"]
        return self._file

    def _detach(self) -> None:
        if self._monitor is not None and self._see in self._monitor.episode_listeners:
            self._monitor.episode_listeners.remove(self._see)
        if self._source is not None and self._count in self._source.rollout_listeners:
            self._source.rollout_listeners.remove(self._count)
        self._source = self._monitor = None
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
