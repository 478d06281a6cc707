"""What the callbacks of this package read from a data module, and how they find it and each other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDictBase

from lit_collect.metrics import ReplayUse

C = TypeVar("C", bound=Callback)


class Collection(Protocol):
    """The part of `CollectorDataModule` that callbacks use."""

    rollout_listeners: list[Callable[[TensorDictBase], None]]
    """Called with each whole batch [N, T] before it is trained on."""
    round_listeners: list[Callable[[TensorDictBase], None]]
    """Called with each round of evaluation episodes [B, Tmax]."""
    total_frames: int
    """The budget over all ranks, -1 for none."""

    @property
    def hparams(self) -> Mapping[str, Any]:
        """The settings as plain data."""

    def publish_in_between(self) -> None:
        """Publish changed weights while collectors go on; does nothing where they wait for the next batch anyway."""

    @property
    def frames_total(self) -> int:
        """Frames handed out so far, over all ranks."""

    @property
    def copies_total(self) -> int | None:
        """Env copies over all ranks, once they are known."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that act."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far (see `CollectorDataModule.seconds`)."""

    def statistics(self) -> Mapping[str, Any]:
        """Counters of the collector (see `Collector.statistics`)."""

    def take_replay_use(self) -> ReplayUse | None:
        """What was done with the replay buffer since the last call, None if there is none."""

    def close(self) -> None:
        """Close all envs; may be called again."""


def find_collection(trainer: L.Trainer) -> Collection | None:
    """The trainer's data module if it collects, else None."""
    module = getattr(trainer, "datamodule", None)
    return cast(Collection, module) if hasattr(module, "rollout_listeners") else None


def find_callback(trainer: L.Trainer, kind: type[C]) -> C | None:
    """The trainer's first callback of a kind, or None."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)  # type: ignore[attr-defined]


def gather_numbers(trainer: L.Trainer, numbers: Sequence[float]) -> list[list[float]]:
    """The same numbers of every rank, rank by rank; all ranks must ask. A single process talks to nobody."""
    if trainer.world_size == 1:
        return [list(numbers)]
    table = torch.zeros(trainer.world_size, len(numbers), dtype=torch.float64, device=trainer.strategy.root_device)
    table[trainer.global_rank] = torch.tensor(numbers, dtype=torch.float64)
    gathered: list[list[float]] = trainer.strategy.reduce(table, reduce_op="sum").tolist()
    return gathered
