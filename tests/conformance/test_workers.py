"""What envs bring along arrives in other processes."""

import random
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lit_collect import Collector, ProcessBackend
from lit_collect.testing import CountingEnv

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nursery")]


class GlobalDice(gymnasium.Env):
    """Takes its numbers from the generators of the interpreter."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self._throw(), {}

    def step(self, action):
        return self._throw(), 0.0, False, False, {}

    def _throw(self):
        return np.array([np.random.random(), random.random()], np.float32)


class Maker:
    """An object that is called."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self) -> CountingEnv:
        return CountingEnv(self.index, (2,))


def test_c24_global_generators_differ_between_workers_and_repeat_with_the_seed() -> None:
    with Collector(GlobalDice, num_envs=4, frames_per_batch=32, seed=1, backend=ProcessBackend(2)) as collector:
        one = collector.collect()["observation"]
        other = collector.collect()["observation"]
        collector.set_seed(1)
        again = collector.collect()["observation"]
    assert torch.equal(one, again)
    numbers = torch.cat([one, other]).double()
    for column in range(2):
        assert len(numbers[..., column].unique()) == numbers[..., column].numel()


def test_c30_every_kind_of_callable_travels() -> None:
    index = 2

    def closure() -> CountingEnv:
        return CountingEnv(index, (2,))

    makers = [lambda: CountingEnv(0, (2,)), partial(CountingEnv, 1, (2,)), closure, Maker(3)]
    with Collector(makers, frames_per_batch=16, backend=ProcessBackend(2)) as collector:
        seen = collector.collect()["observation"]
    assert seen[:, :, 0].tolist() == [[copy] * 4 for copy in range(4)]
    assert seen[0, :, 1:].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
