# Actions that are not always allowed: the env names those that are in info["action_mask"], and PPO never takes another.
# The env here raises on a forbidden move, so that the run ends at once if a mask belonged to another observation.
# Expected: a mean return of about -9 (the shortest way home), from -70 at random; runs in a few seconds.
import os
from typing import Any

import gymnasium
import lightning as L
import numpy as np
import torch

from lit_collect import CollectionMonitor, CollectorDataModule, EvaluationConfig, FrameProgress, UpdateConfig
from trainers import PPO

SIZE = 7
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])


class WalkHome(gymnasium.Env):
    """From anywhere on a board to its corner (0, 0), one field a step, and never over the edge."""

    observation_space = gymnasium.spaces.MultiDiscrete([SIZE, SIZE])
    action_space = gymnasium.spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = np.array([SIZE - 1, self.np_random.integers(SIZE)])
        self._steps = 0
        return self._place.copy(), {"action_mask": self._allowed()}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not self._allowed()[action]:
            raise ValueError(f"move {action} leads over the edge at {self._place}")
        self._place = self._place + MOVES[action]
        self._steps += 1
        return (
            self._place.copy(),
            -1.0,
            not self._place.any(),
            self._steps == 100,
            {"action_mask": self._allowed()},
        )

    def _allowed(self) -> np.ndarray:
        after = self._place + MOVES
        return ((after >= 0) & (after < SIZE)).all(1)


def main() -> None:
    L.seed_everything(1)
    torch.set_num_threads(1)
    data = CollectorDataModule(
        WalkHome,
        num_envs=8,
        frames_per_batch=512,
        total_frames=int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 30_720)),
        updates=UpdateConfig(epochs=10, minibatch_size=128),
        evaluation=EvaluationConfig(num_episodes=20),
    )
    monitor = CollectionMonitor()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=-1, callbacks=[monitor, FrameProgress()], enable_model_summary=False
    )
    trainer.fit(PPO(learning_rate=1e-3, gamma=0.98, scale_reward=True), datamodule=data)
    print(f"mean return of 20 episodes: {monitor.latest['eval/return_mean']:.1f}")


if __name__ == "__main__":
    main()
