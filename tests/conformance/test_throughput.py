"""Collecting costs little beside stepping: ratios to a plain loop of the same work, in turns with it."""

from collections.abc import Callable
from time import perf_counter

import gymnasium
import numpy as np
import pytest

from lit_collect import Collector

COPIES, STEPS, ROUNDS = 8, 400, 5


def plain_loop() -> Callable[[], None]:
    """The least that must be done: step each copy, store its row, reset it when it ends."""
    envs = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(COPIES)]
    seen = [env.reset(seed=index)[0] for index, env in enumerate(envs)]
    rng = np.random.default_rng(0)

    def play() -> None:
        obs, after = np.empty((2, STEPS, COPIES, 4), np.float32)
        reward, done = np.empty((STEPS, COPIES), np.float32), np.zeros((STEPS, COPIES), bool)
        for t in range(STEPS):
            for i, action in enumerate(rng.integers(0, 2, COPIES)):
                obs[t, i] = seen[i]
                seen[i], reward[t, i], terminated, truncated, _ = envs[i].step(action)
                after[t, i] = seen[i]
                if terminated or truncated:
                    done[t, i] = True
                    seen[i] = envs[i].reset()[0]

    return play


def vector_loop(env: gymnasium.vector.VectorEnv) -> Callable[[], None]:
    """The same for a vector env, in its own words."""
    state = {"obs": env.reset(seed=0)[0]}
    rng = np.random.default_rng(0)

    def play() -> None:
        obs = np.empty((STEPS + 1, env.num_envs, 4), np.float32)
        rows = np.empty((3, STEPS, env.num_envs), np.float32)
        obs[0] = state["obs"]
        for t in range(STEPS):
            obs[t + 1], rows[0, t], rows[1, t], rows[2, t], _ = env.step(rng.integers(0, 2, env.num_envs))
        state["obs"] = obs[-1]

    return play


def best(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def make_vector() -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec("CartPole-v1", num_envs=64, vectorization_mode="vector_entry_point")


@pytest.mark.parametrize(
    ("make", "loop", "copies", "floor"),
    [("CartPole-v1", plain_loop, COPIES, 0.4), (make_vector, lambda: vector_loop(make_vector()), 64, 0.3)],
    ids=["single envs", "vector env"],
)
def test_c44_collecting_keeps_up_with_a_plain_loop(make, loop, copies, floor) -> None:
    hand = loop()
    with Collector(make, num_envs=copies, frames_per_batch=copies * STEPS, seed=0) as collector:
        hand()
        collector.collect()
        rounds = [(best(hand), best(lambda: collector.collect())) for _ in range(ROUNDS)]
    fastest = [min(times) for times in zip(*rounds, strict=True)]
    assert fastest[0] / fastest[1] > floor  # measured on an idle machine: see the README
