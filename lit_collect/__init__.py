"""lit_collect: reinforcement-learning data collection for PyTorch Lightning."""

from lit_collect.backends import Backend, DirectBackend
from lit_collect.callbacks import CollectionMonitor, FrameProgress, LearningCurve, WeightSync
from lit_collect.cli import CollectorCLI
from lit_collect.collector import Collector, Hooks
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
from lit_collect.policies import PolicyFactory, RandomPolicy
from lit_collect.weights import WeightSnapshot

__version__ = "0.1.0"

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
    "EvaluationConfig",
    "FrameContractError",
    "FrameProgress",
    "GymEnvFactory",
    "Hooks",
    "LearningCurve",
    "LitCollectError",
    "PolicyFactory",
    "RandomPolicy",
    "ReplayConfig",
    "RolloutConfig",
    "StaleDataError",
    "TrajectoryConfig",
    "UpdateConfig",
    "WeightSnapshot",
    "WeightSync",
    "WorkerDiedError",
    "WorkerFailedError",
    "check_batch",
    "make_dataloader",
]
