"""lit_collect: reinforcement-learning data collection for PyTorch Lightning.

The public names are imported when they are first used: a worker process, which steps envs and nothing else, need not
wait for Lightning.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        ReplayConfig,
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
    from lit_collect.policies import PolicyFactory, RandomPolicy
    from lit_collect.sampling import masked_logits
    from lit_collect.schemes import NoSync, Pipe, SharedMemory, WeightReceiver, WeightSyncScheme
    from lit_collect.seeding import Placement
    from lit_collect.successors import restore_successors
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
        "ReplayConfig",
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
    "lit_collect.policies": ("PolicyFactory", "RandomPolicy"),
    "lit_collect.sampling": ("masked_logits",),
    "lit_collect.schemes": ("NoSync", "Pipe", "SharedMemory", "WeightReceiver", "WeightSyncScheme"),
    "lit_collect.seeding": ("Placement",),
    "lit_collect.successors": ("restore_successors",),
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
    "Hooks",
    "LearningCurve",
    "LitCollectError",
    "NoSync",
    "Pipe",
    "Placement",
    "PolicyFactory",
    "ProcessBackend",
    "RandomPolicy",
    "ReplayConfig",
    "RolloutConfig",
    "SharedMemory",
    "StaleDataError",
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
    "restore_successors",
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
