"""Layers of an env, and attributes that are looked for from the outside in."""

from functools import partial

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit, TransformReward
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.layers import env_attribute, layers
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.testing import CountingEnv


def names(env) -> list[str]:
    return [type(layer).__name__ for layer in layers(env)]


def wrapped(index: int = 0) -> gymnasium.Env:
    return TimeLimit(TransformReward(CountingEnv(index), float), max_episode_steps=7)


def test_layers_go_from_the_batch_to_the_first_copy():
    assert names(DirectEnv([wrapped(0), wrapped(1)])) == ["DirectEnv", "TimeLimit", "TransformReward", "CountingEnv"]
    vector = RecordEpisodeStatistics(SyncVectorEnv([partial(wrapped, index) for index in range(2)]))
    expected = ["RecordEpisodeStatistics", "SyncVectorEnv", "TimeLimit", "TransformReward", "CountingEnv"]
    assert names(vector) == expected
    assert names(VectorEnvAdapter(vector.env)) == ["VectorEnvAdapter", *expected[1:]]


def test_layers_that_go_in_a_circle_end():
    env = CountingEnv()
    env.env = env
    assert names(env) == ["CountingEnv"]


def test_what_is_no_env_is_no_layer():
    env = CountingEnv()
    env.env, env.envs = "a string", ["another"]
    assert names(env) == ["CountingEnv"]


def test_attribute_of_the_outermost_layer_that_has_it_is_the_one():
    env = DirectEnv([wrapped(3), wrapped(4)], first=3)
    env.envs[0].unwrapped.num_envs = 99
    assert env_attribute(env, "num_envs") == 2
    assert env_attribute(env, "_max_episode_steps") == 7
    assert env_attribute(env, "index") == 3
    assert env_attribute(env, "envs[1].unwrapped.index") == 4
    assert env_attribute(env, "observation_space.shape[0]") == 3


def test_private_parts_of_the_batch_are_left_out():
    env = DirectEnv([CountingEnv()])
    assert hasattr(env, "_ages")
    with pytest.raises(AttributeError, match="the env has no attribute '_ages'"):
        env_attribute(env, "_ages")
    env.envs[0]._ages = "its own"
    assert env_attribute(env, "_ages") == "its own"


def test_attribute_that_no_layer_has_is_explained():
    with pytest.raises(
        AttributeError, match=r"no attribute 'indx' .*such as index.*a DirectEnv of a TimeLimit of a Trans"
    ):
        env_attribute(DirectEnv([wrapped()]), "indx")


def test_property_that_fails_says_why_itself():
    class Broken(CountingEnv):
        @property
        def gauge(self):
            raise AttributeError("the gauge is broken")

    with pytest.raises(AttributeError, match=r"^the gauge is broken$"):
        env_attribute(DirectEnv([Broken()]), "gauge")
