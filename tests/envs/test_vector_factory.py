"""`VectorEnvFactory`: what it makes, what it says of itself, and who collects from it."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jsonargparse import ArgumentParser

from lit_collect import Collector, CollectorDataModule, RolloutConfig
from lit_collect.envs.factories import EnvLike, resolve_env
from lit_collect.envs.vector_factory import VectorEnvFactory
from lit_collect.testing import CountingEnv

ROLLOUT = RolloutConfig()


def make_counts(num_envs: int, length: int = 3) -> SyncVectorEnv:
    """A user's own way to make a vector env."""
    return SyncVectorEnv([lambda i=i: CountingEnv(i, (length,)) for i in range(num_envs)])


class Silent:
    """A user's own vector env that does not say how it resets."""

    def __init__(self, num_envs: int) -> None:
        self.inner = make_counts(num_envs)
        self.num_envs = num_envs
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space

    def reset(self, **kwargs: Any) -> Any:
        return self.inner.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.inner.step(action)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's module with a factory of its own."""
    (tmp_path / "users_vectors.py").write_text(
        "from lit_collect.envs.vector_factory import VectorEnvFactory\n"
        "class Eight(VectorEnvFactory):\n"
        "    def __init__(self):\n        super().__init__('CartPole-v1', 8)\n"
        "not_callable = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_vectors"
    sys.modules.pop("users_vectors", None)


@pytest.mark.parametrize(
    ("options", "kind", "mode"),
    [
        ({}, CartPoleVectorEnv, AutoresetMode.NEXT_STEP),
        ({"vectorization_mode": "sync"}, SyncVectorEnv, AutoresetMode.NEXT_STEP),
        (
            {
                "vectorization_mode": "sync",
                "make_kwargs": {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}},
            },
            SyncVectorEnv,
            AutoresetMode.SAME_STEP,
        ),
    ],
    ids=["own", "sync", "same-step"],
)
def test_an_id_is_made_by_gymnasium(options, kind, mode):
    source = resolve_env(VectorEnvFactory("CartPole-v1", 3, **options))
    assert (source.num_envs, source.live, source.per_worker) == (3, False, True)
    env = source.build(None, rollout=ROLLOUT)
    assert isinstance(env.env, kind)
    assert (env.num_envs, env.mode) == (3, mode)
    env.close()


def test_keyword_arguments_reach_the_env():
    env = VectorEnvFactory("CartPole-v1", 2, make_kwargs={"max_episode_steps": 5})()
    assert env.max_episode_steps == 5
    env.close()


def test_a_dotted_callable_is_given_the_number_of_copies_and_keywords():
    factory = VectorEnvFactory(f"{__name__}.make_counts", 2, make_kwargs={"length": 7})
    env = resolve_env(factory).build(2, rollout=ROLLOUT)
    assert env.reset()[0][:, 0].tolist() == [0, 1]
    assert env.env.envs[0].lengths == (7,)
    env.close()


def test_autoreset_speaks_for_an_env_that_does_not_say_its_mode():
    path = f"{__name__}.Silent"
    with pytest.raises(ValueError, match=r"Silent\(num_envs=2\) does not say how it resets .* pass it as autoreset="):
        resolve_env(VectorEnvFactory(path, 2)).build(None, rollout=ROLLOUT)
    env = resolve_env(VectorEnvFactory(path, 2, autoreset="next_step")).build(None, rollout=ROLLOUT)
    assert (env.mode, env.may_mask) == (AutoresetMode.NEXT_STEP, True)
    env.close()


def test_autoreset_does_not_change_what_an_env_says():
    factory = VectorEnvFactory("CartPole-v1", 2, vectorization_mode="sync", autoreset="SameStep")
    with pytest.raises(ValueError, match=r"autoreset does not fit .* expected 'NextStep' or None, got 'SameStep'"):
        resolve_env(factory).build(None, rollout=ROLLOUT)


def test_num_envs_is_of_each_worker():
    source = resolve_env(VectorEnvFactory("CartPole-v1", 4))
    assert [source.copies(workers) for workers in (1, 3)] == [4, 12]
    assert [resolve_env(env).copies(2) for env in ("CartPole-v1", ["CartPole-v1"] * 4)] == [None, 4]
    second = source.build(8, rollout=ROLLOUT, indices=range(4, 8))
    assert (second.num_envs, second.first) == (4, 4)
    second.close()
    with pytest.raises(ValueError, match=r"a vector env of 4 copies in each of 2 workers : expected 8 or None, got 6"):
        source.build(6, rollout=ROLLOUT, indices=range(3))
    with pytest.raises(ValueError, match=r"a vector env of 4 copies : expected 4 or None, got 3"):
        source.build(3, rollout=ROLLOUT)


def test_a_collector_takes_the_copies_from_the_factory():
    with Collector(VectorEnvFactory("CartPole-v1", 1), frames_per_batch=8, total_frames=8, seed=0) as collector:
        assert next(collector).shape == (1, 8)
    with pytest.raises(ValueError, match=r"frames_per_batch must be a multiple of num_envs=3, got 8"):
        Collector(VectorEnvFactory("CartPole-v1", 3), frames_per_batch=8, total_frames=8)


def test_a_data_module_takes_the_copies_from_the_factory():
    with pytest.raises(ValueError, match=r"frames_per_batch must be a multiple of num_envs=3, got 8"):
        CollectorDataModule(VectorEnvFactory("CartPole-v1", 3), frames_per_batch=8, total_frames=8)
    CollectorDataModule(VectorEnvFactory("CartPole-v1", 3), frames_per_batch=9, total_frames=9)


@pytest.mark.processes
@pytest.mark.usefixtures("nursery")
def test_two_workers_make_a_vector_env_each():
    factory = VectorEnvFactory(f"{__name__}.make_counts", 2)
    for num_envs in (None, 4):
        with Collector(
            factory, num_envs=num_envs, frames_per_batch=16, total_frames=16, backend="process", seed=0
        ) as collector:
            assert collector.num_envs == 4
            batch = next(collector)
        assert batch["observation"][:, 0, 0].tolist() == [0, 1, 0, 1]
        assert batch["collector", "traj_ids"][:, 0].tolist() == [0, 1, 2, 3]


def test_the_text_is_the_call_that_makes_it_again():
    factory = VectorEnvFactory("CartPole-v1", 4, make_kwargs={"max_episode_steps": 7}, vectorization_mode="sync")
    text = "VectorEnvFactory('CartPole-v1', 4, make_kwargs={'max_episode_steps': 7}, vectorization_mode='sync')"
    assert repr(factory) == text == repr(pickle.loads(pickle.dumps(factory))) == resolve_env(factory).description
    assert repr(VectorEnvFactory("CartPole-v1", 4, autoreset="NextStep")) == (
        "VectorEnvFactory('CartPole-v1', 4, autoreset='NextStep')"
    )


def test_a_subclass_named_by_its_path_says_its_copies(module):
    source = resolve_env(f"{module}.Eight")
    assert (source.num_envs, source.per_worker) == (8, True)
    env = source.build(None, rollout=ROLLOUT)
    assert env.num_envs == 8
    env.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("CartPol-v1", 2), ValueError, "env 'CartPol-v1' is unknown"),
        (("no_such.make", 2), ValueError, "'no_such.make' cannot be imported"),
        (("users_vectors.not_callable", 2), TypeError, "'users_vectors.not_callable' leads to no callable, got 3"),
        (("CartPole-v1", 0), ValueError, "num_envs must be at least 1, got 0"),
        ((3, 2), TypeError, "env_id must be a string, got 3"),
        (("CartPole-v1", True), ValueError, "num_envs must be at least 1, got True"),
    ],
    ids=repr,
)
def test_what_cannot_be_made_is_refused_at_once(arguments, error, message, module):
    with pytest.raises(error, match=message):
        VectorEnvFactory(*arguments)


@pytest.mark.parametrize("kwargs", [[1], "ab", {3: 4}], ids=repr)
def test_keyword_arguments_are_a_mapping_of_names(kwargs):
    with pytest.raises(TypeError, match="make_kwargs must be a mapping of names to values, got"):
        VectorEnvFactory("CartPole-v1", 2, make_kwargs=kwargs)


def test_a_vectorization_mode_is_for_ids_alone():
    with pytest.raises(ValueError, match=r"vectorization_mode is for Gymnasium ids : expected None with .* got 'sync'"):
        VectorEnvFactory(f"{__name__}.make_counts", 2, vectorization_mode="sync")


def make_single(num_envs: int) -> CountingEnv:
    single.append(CountingEnv())
    return single[-1]


single: list[CountingEnv] = []


def test_a_callable_that_makes_a_single_env_is_told_so():
    with pytest.raises(TypeError, match=r"make_single made no vector env : expected gymnasium.vector.VectorEnv, got"):
        VectorEnvFactory(f"{__name__}.make_single", 2)()
    assert single[-1].closes == 1


class Taker:
    """Stands for a class whose constructor a YAML file calls."""

    def __init__(self, env: EnvLike) -> None:
        self.env = env


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, over the name of a method
def test_yaml_gives_it_and_its_dump_gives_it_again():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Taker, "data")
    given = {
        "class_path": "lit_collect.envs.vector_factory.VectorEnvFactory",
        "init_args": {"env_id": "CartPole-v1", "num_envs": 4, "make_kwargs": {"max_episode_steps": 7}},
    }
    config = parser.parse_object({"data": {"env": given}})
    taken = parser.instantiate_classes(config).data.env
    assert repr(taken) == "VectorEnvFactory('CartPole-v1', 4, make_kwargs={'max_episode_steps': 7})"
    again = parser.instantiate_classes(parser.parse_string(parser.dump(config))).data.env
    assert repr(again) == repr(taken)


def test_the_newest_version_and_the_module_of_an_id_are_found():
    gymnasium.register("vectors/Count-v0", "lit_collect.testing:CountingEnv")
    try:
        env = VectorEnvFactory("lit_collect.testing:vectors/Count-v0", 2)()
        assert np.array_equal(env.reset()[0], [[0, 0, 0]] * 2)
        env.close()
    finally:
        gymnasium.registry.pop("vectors/Count-v0")
