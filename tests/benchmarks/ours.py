"""Our side of the comparison: the collector with a plain module and a TensorDict actor, and a whole `Trainer.fit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from policies import SamplingPolicy, make_actor
from torch import nn

from lit_collect import Collector, CollectorCLI

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "ppo_cartpole.yaml"


def _collector(policy: nn.Module, num_envs: int, frames_per_batch: int) -> Callable[[], int]:
    batches = iter(Collector("CartPole-v1", policy, num_envs=num_envs, frames_per_batch=frames_per_batch, seed=0))
    return lambda: next(batches).numel()


def module_collector(num_envs: int, frames_per_batch: int = 2048) -> Callable[[], int]:
    """A function that collects one batch, acting with a plain module, and returns how many frames it holds."""
    return _collector(SamplingPolicy(), num_envs, frames_per_batch)


def actor_collector(num_envs: int, frames_per_batch: int = 2048) -> Callable[[], int]:
    """The same, acting with a standard TensorDict actor."""
    return _collector(make_actor(), num_envs, frames_per_batch)


def fit(total_frames: int, folder: Path) -> None:
    """Train PPO on CartPole as `lit-collect fit` does, progress bar and logger included."""
    options = [f"--config={CONFIG}", f"--data.total_frames={total_frames}", f"--trainer.default_root_dir={folder}"]
    cli = CollectorCLI(args=options, run=False)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
