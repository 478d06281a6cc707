"""Envs that the commands are to look at, by import path."""

import gymnasium
import numpy as np
from gymnasium import spaces

from lit_collect.testing import CountingEnv, FailingEnv


class Talking(gymnasium.Env):
    """Observes a text and a float64, and reports infos of all kinds."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            {"mission": spaces.Text(9), "place": spaces.Box(-9.0, 9.0, (2,), np.float64)}
        )
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {"level": 3}

    def step(self, action):
        self.steps += 1
        done = self.steps == 5
        infos = {"level": 3, "deep": {"pos": np.zeros(3)}, "words": "left or right", "ragged": [0] * self.steps}
        return self._observe(), 1.0, done, False, {**infos, **({"success": True} if done else {})}

    def _observe(self):
        return {"mission": "go", "place": self.np_random.uniform(-1, 1, 2)}


class Masked(gymnasium.Env):
    """Raises on actions that its mask does not allow."""

    observation_space = spaces.Discrete(10)
    action_space = spaces.Discrete(3)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return 0, {"action_mask": self._mask()}

    def step(self, action):
        if not self._mask()[action]:
            raise ValueError(f"action {action} is masked")
        self.steps += 1
        return self.steps, 0.0, self.steps == 9, False, {"action_mask": self._mask()}

    def _mask(self):
        return np.arange(3) == self.steps % 3


class Unrepeatable(Talking):
    """Draws from a generator that no seed reaches."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(np.random.default_rng().random()), *rest


class Listing(Talking):
    """Observes a sequence."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Sequence(spaces.Discrete(7))


def make_vector():
    return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")


def make_same_step():
    options = {"autoreset_mode": "SameStep"}
    return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync", vector_kwargs=options)


def failing(where, **options):
    return lambda: FailingEnv(where, lengths=(4,), **options)


fails_in_init = failing("init")
fails_in_reset = failing("reset")
fails_in_step = failing("step", at=3)
fails_in_close = failing("close")
gives_a_wrong_shape = failing("step", at=3, answer="shape")
gives_no_info = failing("reset", answer="tuple")


class Spaceless(gymnasium.Env):
    """Does not say what it takes and gives."""


def makes_nothing():
    return 3


def needs_an_argument(level):
    return CountingEnv(level)


def make_counting():
    return CountingEnv(lengths=(4,))
