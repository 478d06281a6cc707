# An env of your own, made by a factory that a YAML file can name too, and trained on with PPO.
# Expected: a mean return of 0.9, after some seconds: 1 for arriving, less 0.02 for each of about five steps.
# Look at it first: lit-collect doctor --env examples.custom_env.make_env
# In a config: env: {class_path: examples.custom_env.CorridorFactory, init_args: {length: 11}}
import os
from typing import Any

import gymnasium
import lightning as L
import numpy as np
from gymnasium import spaces

from lit_collect import CollectionMonitor, CollectorDataModule, EnvFactory, RolloutConfig, UpdateConfig
from trainers import PPO


class Corridor(gymnasium.Env):
    """Walk to the right end; the left end is a fall. Each step costs a little."""

    def __init__(self, length: int = 11) -> None:
        self.length = length
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.place = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)  # makes self.np_random; draw from nothing else, and runs can be repeated
        self.place = int(self.np_random.integers(self.length // 3, self.length - self.length // 3))
        return self._observe(), {}

    def step(self, action: Any):
        self.place += 1 if action == 1 else -1
        arrived, fell = self.place >= self.length - 1, self.place <= 0
        reward = float(arrived) - float(fell) - 0.02
        return self._observe(), reward, arrived or fell, False, {"success": arrived}

    def _observe(self) -> np.ndarray:
        return np.array([self.place / (self.length - 1)], np.float32)  # a new array each time


class CorridorFactory(EnvFactory):
    """Called once for each env copy, in the process that steps it."""

    def __init__(self, length: int = 11, max_steps: int = 100) -> None:
        self.length, self.max_steps = length, max_steps

    def __call__(self) -> gymnasium.Env:
        return gymnasium.wrappers.TimeLimit(Corridor(self.length), self.max_steps)


def make_env() -> gymnasium.Env:
    """Any callable without arguments will do as well."""
    return CorridorFactory()()


def main() -> None:
    L.seed_everything(0)
    data = CollectorDataModule(
        CorridorFactory(length=11),
        num_envs=8,
        frames_per_batch=512,
        total_frames=int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 10_240)),
        updates=UpdateConfig(epochs=5, minibatch_size=128),
        rollout=RolloutConfig(info_keys=("success:bool",)),
        evaluation=None,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[CollectionMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(PPO(learning_rate=1e-3), datamodule=data)
    print(f"mean return of the last episodes: {float(trainer.callback_metrics['episode/return_mean']):.2f}")


if __name__ == "__main__":
    main()
