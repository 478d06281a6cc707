"""Vector envs through the collector against loops around the same envs: `python tests/benchmarks/vector_sources.py`.

* CartPoleVectorEnv at 32 copies with the 2x64 net of `policies`: a hand-written loop that acts with the same module and
  stores everything a batch holds with NumPy, one array for each key.
* ALE's Pong with 8 copies and a random policy: stepping alone, with actions that were drawn before.

All run on one torch thread, in turns. Only the ratios mean something: the median over repetitions of a ratio taken
within one repetition. Rows that the env spent on resetting count for nobody.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from policies import OBSERVATION_DIM, SamplingPolicy, make_actor
from run import cells, frames_per_second
from torch import nn

from lit_collect import Collector

CARTPOLES, PONGS = 32, 8


class VectorLoop:
    """CartPoleVectorEnv stepped by hand: what is seen, done and got goes into NumPy arrays [T, N] made beforehand."""

    def __init__(self, num_envs: int, *, frames_per_batch: int = 4096) -> None:
        self._env = gymnasium.make_vec("CartPole-v1", num_envs=num_envs)
        self._policy = SamplingPolicy()
        steps = frames_per_batch // num_envs
        self._shape = steps, num_envs
        self._observation = np.zeros((steps + 1, num_envs, OBSERVATION_DIM), np.float32)
        self._observation[-1] = self._env.reset(seed=0)[0]
        self._seen = torch.from_numpy(self._observation)
        self._spent = np.zeros(num_envs, bool)

    def collect(self) -> int:
        """One batch; returns how many frames it holds."""
        observation, env, policy = self._observation, self._env, self._policy
        observation[0] = observation[-1]
        action, log_prob = np.zeros(self._shape, np.int64), np.zeros(self._shape, np.float32)
        reward = np.zeros(self._shape, np.float32)
        terminated, truncated, valid = np.zeros((3, *self._shape), bool)
        spent = self._spent
        with torch.inference_mode():
            for t in range(self._shape[0]):
                output = policy(self._seen[t])
                action[t], log_prob[t] = output["action"].numpy(), output["log_prob"].numpy()
                observation[t + 1], reward[t], terminated[t], truncated[t], _ = env.step(action[t])
                valid[t] = ~spent
                spent = terminated[t] | truncated[t]
        self._spent = spent
        self.batch = {
            "observation": observation[:-1].copy(),
            "next_observation": observation[1:].copy(),
            "action": action,
            "log_prob": log_prob,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "valid": valid,
        }
        return int(valid.sum())


def vector_loop() -> Callable[[], int]:
    """A function that collects one batch by hand."""
    return VectorLoop(CARTPOLES).collect


def _collector(policy: nn.Module) -> Callable[[], int]:
    env = gymnasium.make_vec("CartPole-v1", num_envs=CARTPOLES)
    batches = iter(Collector(env, policy, frames_per_batch=4096, seed=0))
    return lambda: int(next(batches)["collector", "mask"].sum())


def module_collector() -> Callable[[], int]:
    """The same through the collector, acting with the same module."""
    return _collector(SamplingPolicy())


def actor_collector() -> Callable[[], int]:
    """The same, acting with a standard TensorDict actor."""
    return _collector(make_actor())


def pongs() -> gymnasium.vector.VectorEnv:
    """ALE's own vector env."""
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make_vec("ALE/Pong-v5", num_envs=PONGS)


def pong_alone() -> Callable[[], int]:
    """A function that steps Pong and keeps nothing."""
    env = pongs()
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, env.single_action_space.n, (64, PONGS))

    def step() -> int:
        for action in actions:
            env.step(action)
        return actions.size

    return step


def pong_collector() -> Callable[[], int]:
    """Pong through the collector, acted at random."""
    batches = iter(Collector(pongs(), frames_per_batch=64 * PONGS, seed=0))
    return lambda: next(batches).numel()


TABLES = {
    "CartPoleVectorEnv, 32 copies, 2x64 net (at least 0.8)": {
        "hand loop, module": vector_loop,
        "lit_collect, module": module_collector,
        "lit_collect, TensorDict actor": actor_collector,
    },
    "ALE Pong, 8 copies, random policy (at least 0.9)": {
        "stepping alone": pong_alone,
        "lit_collect": pong_collector,
    },
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    for title, makers in TABLES.items():
        contestants = {name: make() for name, make in makers.items()}
        for collect in contestants.values():
            collect()
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(repetitions):
            for name, collect in contestants.items():
                samples[name].append(frames_per_second(collect))
        print(title)
        for name, text in cells(samples).items():
            print(f"  {name:32} {text}")


if __name__ == "__main__":
    main()
