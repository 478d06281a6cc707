"""Our side where processes are compared: workers, the overlap of learning and collecting, and what hand-overs cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import gymnasium
import numpy as np
import torch
from policies import SamplingPolicy
from torch import Tensor, nn

from lit_collect import Backend, Collector, DirectBackend, ProcessBackend

FRAMES = 2048


def _collector(backend: Backend, num_envs: int) -> Callable[[], int]:
    batches = iter(
        Collector("CartPole-v1", SamplingPolicy(), num_envs=num_envs, frames_per_batch=FRAMES, seed=0, backend=backend)
    )
    return lambda: next(batches).numel()


def direct(num_envs: int) -> Callable[[], int]:
    """One process."""
    return _collector(DirectBackend(), num_envs)


def two_workers(num_envs: int) -> Callable[[], int]:
    """The env copies divided between two workers, who make each batch together."""
    return _collector(ProcessBackend(2), num_envs)


def two_workers_of_as_many(num_envs: int) -> Callable[[], int]:
    """Two workers with so many env copies each."""
    return _collector(ProcessBackend(2), 2 * num_envs)


def _batch_time_s(num_envs: int) -> float:
    collect = direct(num_envs)
    collect()
    times = []
    for _ in range(7):
        began = time.perf_counter()
        collect()
        times.append(time.perf_counter() - began)
    return median(times)


def _with_learner(backend: Backend, num_envs: int) -> Callable[[], int]:
    """A learner that works on each batch for as long as the direct backend needs to collect one."""
    work_s = _batch_time_s(num_envs)
    collect = _collector(backend, num_envs)

    def step() -> int:
        frames = collect()
        end = time.perf_counter() + work_s
        while time.perf_counter() < end:
            pass
        return frames

    return step


def learn_in_turn(num_envs: int) -> Callable[[], int]:
    """Collect, learn, collect, learn, in one process."""
    return _with_learner(DirectBackend(), num_envs)


def learn_meanwhile(num_envs: int) -> Callable[[], int]:
    """One asynchronous worker collects while the learner learns."""
    return _with_learner(ProcessBackend(1, sync=False), num_envs)


class Pictures(gymnasium.Env):
    """Atari-like stacks of frames that cost nothing to make."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._picture = np.zeros((4, 84, 84), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return self._picture, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self._picture, 0.0, False, False, {}


class Still(nn.Module):
    """Does the same thing always."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.zeros(observation.shape[0], dtype=torch.int64)


def costs() -> Iterator[tuple[str, float, float]]:
    """What the learner's process spends on each hand-over.

    Yields:
        What it is, microseconds (median), and the microseconds of copying as many bytes once (0 where nothing is).
    """
    for name, env, policy, steps in (
        ("batch of 128x8 CartPole rows", "CartPole-v1", SamplingPolicy(), 128),
        ("batch of 32x8 Atari-like stacks", Pictures, Still(), 32),
    ):
        with Collector(
            env, policy, num_envs=8, frames_per_batch=8 * steps, seed=0, backend=ProcessBackend(2)
        ) as collector:
            batch = collector.collect()
            handed, copied, updates = [], [], []
            for _ in range(50):
                before = collector.statistics()["transfer_s"]
                batch = collector.collect()
                handed.append(collector.statistics()["transfer_s"] - before)
                began = time.perf_counter()
                batch.clone()
                copied.append(time.perf_counter() - began)
                began = time.perf_counter()
                collector.update_policy_weights_()
                updates.append(time.perf_counter() - began)
            yield name, 1e6 * median(handed), 1e6 * median(copied)
            if steps == 128:
                yield "update of a 2x64 net, 2 workers", 1e6 * median(updates), 0.0
