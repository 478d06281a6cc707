"""Stable-Baselines3 on the same work: PPO's rollout collection, and PPO's whole training on CartPole.

Its collection runs a critic too and keeps no next observations; both are part of how it works.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure


def collector(num_envs: int, frames_per_batch: int = 2048) -> Callable[[], int]:
    """A function that runs PPO's `collect_rollouts` once and returns how many frames it collected."""
    env = make_vec_env("CartPole-v1", n_envs=num_envs, seed=0)
    model = PPO("MlpPolicy", env, n_steps=frames_per_batch // num_envs, policy_kwargs={"net_arch": [64, 64]}, seed=0)
    _, callback = model._setup_learn(total_timesteps=10**9)

    def collect() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=model.n_steps)
        return model.n_steps * num_envs

    return collect


def learn(total_frames: int, folder: Path) -> Callable[[], object]:
    """Prepare PPO at the RL Zoo's CartPole settings, with progress bar and CSV logger on; the result trains it."""

    def linear(start: float) -> Callable[[float], float]:
        return lambda remaining: start * remaining

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, seed=0),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=linear(0.001),
        clip_range=linear(0.2),
        ent_coef=0.0,
        seed=0,
        device="cpu",
    )
    model.set_logger(configure(str(folder), ["csv"]))
    return lambda: model.learn(total_frames, progress_bar=True)
