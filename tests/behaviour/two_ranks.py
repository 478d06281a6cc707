"""A script that trains on two ranks, again and again, and writes down what each of them saw.

``python two_ranks.py FOLDER`` leaves ``<name of the run>-<rank>.pt`` there. With a rank as a second argument the env of
that rank fails in its second batch.
"""

import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn

from lit_collect import (
    CollectionMonitor,
    CollectorDataModule,
    EvaluationConfig,
    ProcessBackend,
    UpdateConfig,
    WeightSync,
    cli,
)
from lit_collect.backends._nursery import lease, release

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "ppo_ddp.yaml"
RANKS = 2
COPIES = 2  # of each rank
LISTENING = "0A"  # in /proc/net/tcp
LOCAL = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


class Walk(gymnasium.Env):
    """Episodes of random length from 1 to `longest`, rewards that are random, too."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, longest: int = 200) -> None:
        self.longest = longest

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, self.longest + 1))
        return self._observation(), {}

    def step(self, action):
        self.left -= 1
        return self._observation(), float(self.np_random.integers(-3, 4)), self.left == 0, False, {}

    def _observation(self):
        return self.np_random.random(3, dtype=np.float32)


class Failing(Walk):
    """Raises after ten steps on one rank."""

    def __init__(self, where: int) -> None:
        super().__init__()
        self.steps_left = 10 if rank() == where else -1

    def step(self, action):
        self.steps_left -= 1
        if self.steps_left == 0:
            raise RuntimeError("the floor gave way")
        return super().step(action)


class Forgetful(SyncVectorEnv):
    """Spends a step of its copies on resetting, as vector envs do that ignore the mask of a reset."""

    def step(self, actions):
        return super().step(actions)


def unequal() -> Forgetful:
    """The second rank spends half of its steps on resetting, the first one few."""
    longest = 1 if rank() else 30
    return Forgetful([partial(Walk, longest)] * COPIES, autoreset_mode="NextStep")


class Model(L.LightningModule):
    """Its gradients depend on the data, and so on the rank."""

    def __init__(self, policy: nn.Module | None = None) -> None:
        super().__init__()
        self.policy = policy or nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2), Logits())
        self.minibatches: list[tuple[int, ...]] = []
        self.losses_finite = True

    def training_step(self, batch, batch_idx):
        self.minibatches.append(tuple(batch.shape))
        logits = self.policy(batch["observation"])["logits"]
        loss = (logits.log_softmax(-1)[..., 0] * batch["next", "reward"].squeeze(-1)).mean()
        self.losses_finite &= bool(loss.isfinite())
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Logits(nn.Module):
    def forward(self, values):
        return {"logits": values}


class Notes:
    """What one rank collected."""

    def __init__(self, data: CollectorDataModule) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []
        self.rounds = 0
        data.rollout_listeners.append(self._see)
        data.round_listeners.append(self._count)

    def _see(self, batch) -> None:
        mask = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        self.batches.append({
            "observation": batch["observation"].clone(),
            "reward": batch["next", "reward"].squeeze(-1).clone(),
            "done": batch["next", "done"].squeeze(-1).clone(),
            "ids": batch["collector", "traj_ids"].clone(),
            "mask": mask.clone(),
        })  # fmt: skip

    def _count(self, batch) -> None:
        self.rounds += 1


def run(
    folder: Path,
    name: str,
    env: Any,
    *callbacks: Any,
    model: Model | None = None,
    ckpt_path: Any = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Fit, and write down what came of it."""
    L.seed_everything(5, workers=True, verbose=False)
    model = model() if isinstance(model, type) else model or Model()
    options = {"num_envs": COPIES, "frames_per_batch": 8, "evaluation": None, **options}
    data = CollectorDataModule(env, **options)
    notes, monitor = Notes(data), CollectionMonitor(window=100_000)
    trainer = L.Trainer(**{
        "accelerator": "cpu", "devices": RANKS, "strategy": "ddp", "max_epochs": -1, "logger": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "default_root_dir": folder, "callbacks": [monitor, *callbacks], **(trainer or {}),
    })  # fmt: skip
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    torch.save(
        {
            "batches": notes.batches,
            "rounds": notes.rounds,
            "minibatches": model.minibatches,
            "finite": model.losses_finite,
            "parameters": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
            "latest": monitor.latest,
            "frames_total": data.frames_total,
            "progress": data.progress,
            "statistics": {name: value for name, value in data.statistics().items() if isinstance(value, int)},
            "global_step": trainer.global_step,
            "callback_metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
            "best": [callback.best_model_path for callback in callbacks if isinstance(callback, ModelCheckpoint)],
            "public": public_ports(),
        },
        folder / f"{name}-{trainer.global_rank}.pt",
    )


def public_ports() -> list[str]:
    """Addresses other than loopback on which this process listens."""
    inodes = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in inodes and fields[1].split(":")[0] not in LOCAL:
                found.append(fields[1])
    return found


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2), Logits())


class Lazy(Model):
    def __init__(self) -> None:
        super().__init__(lazy())


def main(folder: Path) -> None:
    small = UpdateConfig(epochs=2, minibatch_size=3)
    for name in ("plain", "again"):
        run(folder, name, Walk, updates=small, total_frames=RANKS * (5 * 8 + 6))
    run(folder, "masked", unequal, updates=small, num_envs=None, total_frames=RANKS * 8 * 12)
    run(folder, "masked-whole", unequal, num_envs=None, total_frames=RANKS * 2 * 23)
    run(folder, "long", Walk, updates=UpdateConfig(minibatch_size=4), total_frames=RANKS * 8 * 200)
    checkpoint = ModelCheckpoint(
        folder / "kept", monitor="episode/return_mean", mode="max", every_n_train_steps=2, save_last=True
    )
    evaluated = {
        "batches_per_epoch": 3,
        "evaluation": EvaluationConfig(num_episodes=2),
        "trainer": {"accumulate_grad_batches": 2, "num_sanity_val_steps": 1},
    }
    run(folder, "evaluated", partial(Walk, 6), checkpoint, total_frames=RANKS * 8 * 6, **evaluated)
    resumed = folder / "kept" / "last.ckpt"
    run(folder, "resumed", partial(Walk, 6), ckpt_path=resumed, total_frames=RANKS * 8 * 9, **evaluated)
    kept = lease(1)  # starting the process that starts workers takes seconds
    processes = {"updates": UpdateConfig(minibatch_size=3), "total_frames": RANKS * (8 * 8 + 6)}
    run(folder, "processes", partial(Walk, 9), backend=ProcessBackend(2), **processes)
    eager = ProcessBackend(2, sync=False)
    run(folder, "async", partial(Walk, 9), WeightSync(), backend=eager, **processes)
    release(kept, 5.0)
    run(folder, "lazy", Walk, EMAWeightAveraging(), model=Lazy, total_frames=RANKS * 16)
    options = ["--data.total_frames=2048", "--data.evaluation=null", f"--trainer.default_root_dir={folder}"]
    cli.main(["fit", f"--config={CONFIG}", f"--trainer.devices={RANKS}", "--trainer.logger=false", *options])


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        run(Path(sys.argv[1]), "failing", partial(Failing, int(sys.argv[2])), total_frames=RANKS * 8 * 4)
    else:
        main(Path(sys.argv[1]))
