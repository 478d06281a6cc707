"""lit_collect: reinforcement-learning data collection for PyTorch Lightning.

The public names are imported when they are first used: a worker process, which steps envs and nothing else, need not
wait for Lightning.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_collect.assembler import TrajectoryAssembler
    from lit_collect.backends import Backend, DirectBackend, ProcessBackend
    from lit_collect.callbacks import (
        CollectionMonitor,
        EpisodeLog,
        EpisodeVideo,
        FrameProgress,
        LearningCurve,
        WeightSync,
    )
    from lit_collect.cli import CollectorCLI
    from lit_collect.collector import Collector
    from lit_collect.config import (
        DeviceConfig,
        EvaluationConfig,
        RolloutConfig,
        TrajectoryConfig,
        UpdateConfig,
    )
    from lit_collect.datamodule import CollectorDataModule
    from lit_collect.dataset import CollectorDataset, make_dataloader
    from lit_collect.envs.base import EnvFactory
    from lit_collect.envs.factories import GymEnvFactory
    from lit_collect.envs.texts import decode_texts
    from lit_collect.envs.vector_factory import VectorEnvFactory
    from lit_collect.errors import (
        BackendUnavailableError,
        BudgetSpentError,
        CollectorClosedError,
        CollectTimeoutError,
        FrameContractError,
        LitCollectError,
        StaleDataError,
        WorkerDiedError,
        WorkerFailedError,
    )
    from lit_collect.frames import check_batch
    from lit_collect.hooks import Hooks
    from lit_collect.offline import OfflineDataModule, offline_buffer
    from lit_collect.pacing import PacedBuffer
    from lit_collect.policies import PolicyFactory, RandomPolicy
    from lit_collect.replay.buffer import ReplayBuffer
    from lit_collect.replay.config import ReplayConfig
    from lit_collect.replay.mixing import MixedBuffer
    from lit_collect.replay.transforms import Hindsight, NStep
    from lit_collect.sampling import masked_logits
    from lit_collect.schemes import NoSync, Pipe, SharedMemory, WeightReceiver, WeightSyncScheme
    from lit_collect.seeding import Placement
    from lit_collect.successors import restore_successors
    from lit_collect.trajectories import split_trajectories
    from lit_collect.weights import WeightSnapshot

__version__ = "0.1.0"

_HOMES = {
    "lit_collect.backends": ("Backend", "DirectBackend", "ProcessBackend"),
    "lit_collect.callbacks": (
        "CollectionMonitor",
        "EpisodeLog",
        "EpisodeVideo",
        "FrameProgress",
        "LearningCurve",
        "WeightSync",
    ),
    "lit_collect.cli": ("CollectorCLI",),
    "lit_collect.collector": ("Collector",),
    "lit_collect.hooks": ("Hooks",),
    "lit_collect.config": (
        "DeviceConfig",
        "EvaluationConfig",
        "RolloutConfig",
        "TrajectoryConfig",
        "UpdateConfig",
    ),
    "lit_collect.datamodule": ("CollectorDataModule",),
    "lit_collect.dataset": ("CollectorDataset", "make_dataloader"),
    "lit_collect.envs.base": ("EnvFactory",),
    "lit_collect.envs.factories": ("GymEnvFactory",),
    "lit_collect.envs.texts": ("decode_texts",),
    "lit_collect.envs.vector_factory": ("VectorEnvFactory",),
    "lit_collect.errors": (
        "BackendUnavailableError",
        "BudgetSpentError",
        "CollectTimeoutError",
        "CollectorClosedError",
        "FrameContractError",
        "LitCollectError",
        "StaleDataError",
        "WorkerDiedError",
        "WorkerFailedError",
    ),
    "lit_collect.frames": ("check_batch",),
    "lit_collect.offline": ("OfflineDataModule", "offline_buffer"),
    "lit_collect.pacing": ("PacedBuffer",),
    "lit_collect.policies": ("PolicyFactory", "RandomPolicy"),
    "lit_collect.replay.buffer": ("ReplayBuffer",),
    "lit_collect.replay.config": ("ReplayConfig",),
    "lit_collect.replay.mixing": ("MixedBuffer",),
    "lit_collect.replay.transforms": ("Hindsight", "NStep"),
    "lit_collect.sampling": ("masked_logits",),
    "lit_collect.schemes": ("NoSync", "Pipe", "SharedMemory", "WeightReceiver", "WeightSyncScheme"),
    "lit_collect.seeding": ("Placement",),
    "lit_collect.successors": ("restore_successors",),
    "lit_collect.assembler": ("TrajectoryAssembler",),
    "lit_collect.trajectories": ("split_trajectories",),
    "lit_collect.weights": ("WeightSnapshot",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "BudgetSpentError",
    "CollectTimeoutError",
    "CollectionMonitor",
    "Collector",
    "CollectorCLI",
    "CollectorClosedError",
    "CollectorDataModule",
    "CollectorDataset",
    "DeviceConfig",
    "DirectBackend",
    "EnvFactory",
    "EpisodeLog",
    "EpisodeVideo",
    "EvaluationConfig",
    "FrameContractError",
    "FrameProgress",
    "GymEnvFactory",
    "Hindsight",
    "Hooks",
    "LearningCurve",
    "LitCollectError",
    "MixedBuffer",
    "NStep",
    "NoSync",
    "OfflineDataModule",
    "PacedBuffer",
    "Pipe",
    "Placement",
    "PolicyFactory",
    "ProcessBackend",
    "RandomPolicy",
    "ReplayBuffer",
    "ReplayConfig",
    "RolloutConfig",
    "SharedMemory",
    "StaleDataError",
    "TrajectoryAssembler",
    "TrajectoryConfig",
    "UpdateConfig",
    "VectorEnvFactory",
    "WeightReceiver",
    "WeightSnapshot",
    "WeightSync",
    "WeightSyncScheme",
    "WorkerDiedError",
    "WorkerFailedError",
    "check_batch",
    "decode_texts",
    "make_dataloader",
    "masked_logits",
    "offline_buffer",
    "restore_successors",
    "split_trajectories",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
