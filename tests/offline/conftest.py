"""Envs that are collected from, and what was collected of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tensordict import TensorDictBase

from lit_collect import Collector
from lit_collect.offline.episodes import EpisodeJoiner, as_rows
from lit_collect.offline.memory_maps import RowWriter
from lit_collect.testing import CountingEnv


class Everything(gymnasium.Env):
    """Observes and takes a value of every kind of space; each observed number says which step it is of.

    Actions are checked as the env's space has them. Episodes last 1, 2 and 3 steps in turn.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "choice": spaces.Discrete(100, start=-50),
                "image": spaces.Box(0, 255, (32, 32, 3), np.uint8),
                "pair": spaces.Tuple([spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.MultiBinary(3)]),
                "word": spaces.Text(5),
            }
        )
        self.action_space = spaces.Dict(
            {
                "gear": spaces.Discrete(3, start=5),
                "levers": spaces.MultiDiscrete([2, 3], start=[1, -1]),
                "push": spaces.Box(-0.5, 0.5, (2,), np.float64),
            }
        )
        self.episode, self.elapsed = -1, 0
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.elapsed = self.episode + 1, 0
        return self._observe(), {"level": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.taken.append(action)
        self.elapsed += 1
        done = self.elapsed > self.episode % 3
        return self._observe(), 1.5 * self.elapsed, done, done, {"deep": {"level": self.elapsed}}

    def _observe(self) -> dict[str, Any]:
        number = 10 * self.episode + self.elapsed
        image = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3) * np.uint8(7) + np.uint8(number)
        pair = (np.array([number, 0.25]), np.array([1, 0, number % 2], np.int8))
        return {"choice": number - 50, "image": image, "pair": pair, "word": "abcde"[: number % 6]}


Episodes = tuple[Collector, list[TensorDictBase]]


@pytest.fixture
def play() -> Callable[..., Episodes]:
    """Collects, and gives the (closed) collector with the whole episodes and, last, those that were cut off."""

    def play(env: Any, frames: int = 60, per_batch: int = 20, policy: Any = None, **settings: Any) -> Episodes:
        joiner = EpisodeJoiner()
        with Collector(env, policy, frames_per_batch=per_batch, total_frames=frames, seed=0, **settings) as collector:
            episodes = [episode for batch in collector for episode in joiner.add(batch)]
        return collector, episodes + joiner.unfinished()

    return play


@pytest.fixture
def counted_rows(tmp_path: Path) -> Path:
    """A folder with 48 rows of two env copies, in episodes of 3 and 5 steps."""
    folder = tmp_path / "counted"
    envs = [lambda index=index: CountingEnv(index, (3, 5)) for index in range(2)]
    about = {
        "observation_spec": {"kind": "box", "shape": [3], "dtype": "float32", "low": [-9.0] * 3, "high": [9.0] * 3},
        "action_spec": {"kind": "discrete", "n": 2, "start": 0},
    }
    with (
        Collector(envs, frames_per_batch=16, total_frames=48, seed=0) as collector,
        RowWriter(folder, about) as writer,
    ):
        for batch in collector:
            writer.write(as_rows(batch))
    return folder
