"""A script that trains on two ranks from replay buffers and on whole trajectories, and writes down what each rank saw.

``python two_ranks_replay.py FOLDER`` leaves ``<name of the run>-<rank>.pt`` there.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_collect import CollectionMonitor, CollectorDataModule, ReplayConfig, TrajectoryConfig, UpdateConfig
from tests.behaviour.two_ranks import COPIES, RANKS, Model, Notes, Walk, rank, unequal

KEPT_AT = 7  # steps after which a run that is resumed was saved: with a sample of the last batch to come
LATE = 12  # episodes of one step each that the copies of the second rank begin with
LEAST = 30  # rows before the first sample
SLICE = 4
CAPACITY = 64


class Late(Walk):
    """On the second rank it takes a while until an episode is long enough for a slice."""

    def __init__(self) -> None:
        super().__init__(1)
        self.short = LATE if rank() == 1 else 0

    def reset(self, *, seed=None, options=None):
        observation = super().reset(seed=seed)
        self.short -= 1
        if self.short < 0:
            self.left = 20
        return observation


def lengths_by_rank() -> Walk:
    """Episodes of the second rank are four times as long: it gets on more slowly."""
    return Walk(4 * (1 + 3 * rank()))


class Learner(Model):
    """Notes which rows it was given when."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[dict[str, Any]] = []
        self.begins_with: list[int] = []
        self.kept: list[int] = []

    def on_train_start(self):
        self.begins_with = written(self.trainer.datamodule.replay_buffer)

    def training_step(self, batch, batch_idx):
        data = self.trainer.datamodule
        buffer = data.replay_buffer
        self.samples.append({
            "ids": batch["collector", "traj_ids"].clone(),
            "observation": batch["observation"].clone(),
            "next": batch["next", "observation"].clone(),
            "at": data.frames_total,
            "rows": 0 if buffer is None else len(buffer),
        })  # fmt: skip
        data.update_priority(batch, torch.full(batch.batch_size, 1.0 + rank()))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args):
        if self.trainer.global_step == KEPT_AT:
            self.kept = written(self.trainer.datamodule.replay_buffer)


def written(buffer: Any) -> list[int]:
    """Ids of all rows of a buffer."""
    return buffer[torch.arange(len(buffer))]["collector", "traj_ids"].tolist() if buffer else []


def run(folder: Path, name: str, env: Any, *, resumed: str | None = None, max_steps: int = -1, **options: Any) -> None:
    """Fit, and write down what came of it."""
    L.seed_everything(5, workers=True, verbose=False)
    model = Learner()
    data = CollectorDataModule(env, **{"num_envs": COPIES, "frames_per_batch": 8, "evaluation": None, **options})
    notes, monitor = Notes(data), CollectionMonitor(window=100_000)
    saving = [ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=KEPT_AT, save_top_k=-1)]
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=-1, max_steps=max_steps, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
        enable_checkpointing=max_steps > 0, callbacks=[monitor, *(saving if max_steps > 0 else [])],
    )  # fmt: skip
    kept = None if resumed is None else folder / resumed / f"step={KEPT_AT}.ckpt"
    trainer.fit(model, datamodule=data, ckpt_path=kept, weights_only=True)
    buffer = data.replay_buffer
    torch.save(
        {
            "batches": notes.batches,
            "samples": model.samples,
            "begins_with": model.begins_with,
            "kept": model.kept,
            "finite": model.losses_finite,
            "parameters": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
            "latest": monitor.latest,
            "frames_total": data.frames_total,
            "frames_left": data.frames_left,
            "progress": data.progress,
            "statistics": {key: value for key, value in data.statistics().items() if isinstance(value, int)},
            "global_step": trainer.global_step,
            "write_count": None if buffer is None else buffer.write_count,
        },
        folder / f"{name}-{trainer.global_rank}.pt",
    )
    data.close()


def main(folder: Path) -> None:
    two = UpdateConfig(updates_per_batch=2)
    rows = ReplayConfig(capacity=CAPACITY, batch_size=8, min_frames=LEAST)
    slices = ReplayConfig(capacity=200, batch_size=2 * SLICE, slice_len=SLICE)
    total = RANKS * 8 * 12
    run(folder, "rows", Walk, replay=rows, updates=two, total_frames=total - 4)
    run(folder, "late", Late, replay=slices, updates=two, total_frames=total)
    run(folder, "masked", unequal, replay=rows, updates=two, num_envs=None, total_frames=total)
    whole = {"trajectories": TrajectoryConfig(trajs_per_batch=3), "total_frames": RANKS * 8 * 20}
    run(folder, "whole", lengths_by_rank, updates=UpdateConfig(epochs=2, minibatch_size=4), **whole)
    run(folder, "whole-replay", lengths_by_rank, replay=rows, updates=two, **whole)
    for storage in ("memory", "mapped"):
        path = str(folder / "storage") if storage == "mapped" else None
        kept = ReplayConfig(capacity=CAPACITY, batch_size=8, sampler="prioritized", storage=storage, path=path)
        fit = {"replay": kept, "updates": two, "num_envs": None, "total_frames": total}
        run(folder, f"broken-{storage}", unequal, max_steps=KEPT_AT + 3, **fit)
        run(folder, f"resumed-{storage}", unequal, resumed=f"broken-{storage}", **fit)
    fit = {**whole, "updates": UpdateConfig(epochs=2)}
    run(folder, "broken-whole", lengths_by_rank, max_steps=KEPT_AT, **fit)
    run(folder, "resumed-whole", lengths_by_rank, resumed="broken-whole", **fit)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
