"""Our side of the comparison: the collector with a plain module and a TensorDict actor, and a whole `Trainer.fit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from policies import SamplingPolicy, make_actor
from torch import nn

from lit_collect import (
    CollectionMonitor,
    Collector,
    CollectorDataModule,
    FrameProgress,
    UpdateConfig,
    WeightSync,
)
from trainers import PPO


def _collector(policy: nn.Module, num_envs: int, frames_per_batch: int) -> Callable[[], int]:
    batches = iter(Collector("CartPole-v1", policy, num_envs=num_envs, frames_per_batch=frames_per_batch, seed=0))
    return lambda: next(batches).numel()


def module_collector(num_envs: int, frames_per_batch: int = 2048) -> Callable[[], int]:
    """A function that collects one batch, acting with a plain module, and returns how many frames it holds."""
    return _collector(SamplingPolicy(), num_envs, frames_per_batch)


def actor_collector(num_envs: int, frames_per_batch: int = 2048) -> Callable[[], int]:
    """The same, acting with a standard TensorDict actor."""
    return _collector(make_actor(), num_envs, frames_per_batch)


def fit(total_frames: int, folder: Path) -> Callable[[], None]:
    """Prepare a `Trainer.fit` of PPO on CartPole, with progress bar, monitor and CSV logger; the result runs it."""
    torch.manual_seed(0)
    data = CollectorDataModule(
        "CartPole-v1",
        num_envs=8,
        frames_per_batch=256,
        total_frames=total_frames,
        updates=UpdateConfig(epochs=20, minibatch_size=256),
        evaluation=None,
        seed=0,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=CSVLogger(folder),
        callbacks=[WeightSync(), CollectionMonitor(), FrameProgress()],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = PPO(learning_rate=1e-3, gamma=0.98, lambda_=0.8, clip=0.2, anneal=True)
    return lambda: trainer.fit(module, datamodule=data)
