"""`Plan`: what a data module collects, as it was told."""

from dataclasses import asdict, dataclass
from typing import Any

from lit_collect.backends import Backend
from lit_collect.config import DeviceConfig, RolloutConfig, TrajectoryConfig
from lit_collect.envs.factories import EnvSource


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is collected, as the data module was told."""

    source: EnvSource
    """Makes the envs."""
    policy: Any
    """Who acts, None for the policy of the module that learns."""
    backend: Backend
    """Where."""
    num_envs: int | None
    """Env copies of one rank, None for as many as the env says."""
    frames_per_batch: int
    """Frames of one batch of one rank."""
    total_frames: int
    """The budget over all ranks, -1 for none."""
    rollout: RolloutConfig
    """How a batch is collected."""
    trajectories: TrajectoryConfig | None
    """Whether and how batches are made of trajectories."""
    devices: DeviceConfig
    """Where things live."""

    def describe(self) -> dict[str, Any]:
        """What belongs into the hyperparameters, as plain data."""
        return {
            "env": self.source.description,
            "frames_per_batch": self.frames_per_batch,
            "total_frames": self.total_frames,
            "rollout": {**asdict(self.rollout), "info_keys": list(self.rollout.info_keys)},
            "trajectories": None if self.trajectories is None else asdict(self.trajectories),
        }
