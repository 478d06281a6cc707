"""What a user may pass as `env`, and the env copies that come of it."""

import pickle
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from jsonargparse import ArgumentParser

from lit_collect.config import RolloutConfig
from lit_collect.envs.base import EnvFactory
from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.factories import EnvLike, EnvSource, GymEnvFactory, resolve_env
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.errors import WorkerFailedError
from lit_collect.testing import CountingEnv, FailingEnv

ROLLOUT = RolloutConfig()
STACK = "gymnasium.wrappers.FrameStackObservation"


class Numbered(EnvFactory):
    """Makes `CountingEnv` copies 0, 1, 2 and keeps them."""

    def __init__(self) -> None:
        self.made: list[CountingEnv] = []

    def __call__(self) -> CountingEnv:
        self.made.append(CountingEnv(len(self.made)))
        return self.made[-1]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's module with the usual ways to give an env."""
    name = "users_envs"
    (tmp_path / f"{name}.py").write_text(
        "import gymnasium\n"
        "from lit_collect import EnvFactory\n"
        "from lit_collect.testing import CountingEnv\n"
        "gymnasium.register('mine/Count-v0', 'lit_collect.testing:CountingEnv')\n"
        "def make_env():\n    return CountingEnv(5)\n"
        "class Factory(EnvFactory):\n"
        "    def __init__(self, index: int = 6):\n        self.index = index\n"
        "    def __call__(self):\n        return CountingEnv(self.index)\n"
        "class Box:\n    make = staticmethod(make_env)\n"
        "not_callable = 3\n"
    )
    (tmp_path / "broken_envs.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    gymnasium.registry.pop("mine/Count-v0", None)
    sys.modules.pop(name, None)


def observed_index(source: EnvSource) -> float:
    env = source.build(None, rollout=ROLLOUT)
    return float(env.reset()[0][0, 0])


def test_a_gymnasium_id_becomes_one_copy_or_as_many_as_asked():
    source = resolve_env("CartPole-v1")
    assert (source.num_envs, source.live, source.description) == (None, False, "CartPole-v1")
    for given, copies in ((None, 1), (3, 3)):
        env = source.build(given, rollout=ROLLOUT)
        assert isinstance(env, DirectEnv)
        assert env.num_envs == copies
        env.close()


def test_an_id_that_names_its_module_imports_it(module):
    source = resolve_env(f"{module}:mine/Count-v0")
    assert observed_index(source) == 0
    assert resolve_env("mine/Count-v0").description == "mine/Count-v0"


@pytest.mark.filterwarnings("ignore:.*Using the latest versioned environment")
def test_an_id_without_a_version_means_the_newest():
    assert GymEnvFactory("CartPole")().spec.id == "CartPole-v1"


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPol-v1", r"env 'CartPol-v1' is unknown: .*Did you mean: `CartPole`.* : expected a Gymnasium id"),
        ("CartPole-v9", r"provides versioned environments: \[ `v0`, `v1` \]"),
        ("Taxi-v3", "deprecated. Please use `Taxi-v4` instead"),
        ("nowhere/Name-v0", "Namespace nowhere not found"),
        ("no_such_module:Name-v0", "No module named 'no_such_module'"),
        ("cartpole", "env 'cartpole' is unknown"),
        ("an env", "Malformed environment ID"),
        ("", "env '' is unknown"),
    ],
)
def test_an_unknown_id_is_refused_at_once(env_id, message):
    with pytest.raises(ValueError, match=message):
        resolve_env(env_id)
    with pytest.raises(ValueError, match=message):
        GymEnvFactory(env_id)


@pytest.mark.parametrize(("name", "index"), [("make_env", 5), ("Factory", 6), ("Box.make", 5)])
def test_a_dotted_path_is_imported(name, index, module):
    source = resolve_env(f"{module}.{name}")
    assert source.description == f"{module}.{name}"
    assert observed_index(source) == index


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.make", "'no_such_package.make' cannot be imported .* No module named 'no_such_package'"),
        ("{}.make_it", "'users_envs.make_it' cannot be imported .* has no attribute 'make_it'"),
        ("{}.Box.made", "'users_envs.Box.made' cannot be imported .* has no attribute 'made'"),
        ("broken_envs.make", "'broken_envs.make' cannot be imported .* No module named 'no_such_package'"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_names_what_is_missing(path, message, module):
    with pytest.raises(ValueError, match=message):
        resolve_env(path.format(module))


def test_a_dotted_path_to_something_else_is_refused(module):
    with pytest.raises(TypeError, match=r"env is of the wrong kind : expected a Gymnasium id .* got 3 \(int\)"):
        resolve_env(f"{module}.not_callable")


def _make_seven() -> CountingEnv:
    return CountingEnv(7)


@pytest.mark.parametrize(
    ("env", "description"),
    [
        (_make_seven, "test_factories._make_seven"),
        (lambda: CountingEnv(7), "<lambda>"),
        (partial(CountingEnv, 7), r"lit_collect.testing.CountingEnv\(\.\.\.\)"),
    ],
    ids=["function", "lambda", "partial"],
)
def test_any_callable_without_arguments_is_taken(env, description):
    source = resolve_env(env)
    assert observed_index(source) == 7
    assert re.search(description, source.description)


def test_an_env_class_and_a_factory_class_are_taken():
    assert resolve_env(CountingEnv).description == "lit_collect.testing.CountingEnv"
    assert observed_index(resolve_env(CountingEnv)) == 0
    assert observed_index(resolve_env(Numbered)) == 0


def test_a_factory_is_called_once_for_each_copy():
    factory = Numbered()
    env = resolve_env(factory).build(3, rollout=ROLLOUT)
    assert len(factory.made) == 3
    assert env.reset()[0][:, 0].tolist() == [0, 1, 2]
    env.close()
    assert [copy.closes for copy in factory.made] == [1, 1, 1]


def test_a_sequence_gives_one_maker_for_each_copy(module):
    source = resolve_env([partial(CountingEnv, 3), f"{module}.make_env", f"{module}.Factory"])
    assert source.num_envs == 3
    assert source.description == f"[lit_collect.testing.CountingEnv(...), {module}.make_env, {module}.Factory]"
    assert source.build(None, rollout=ROLLOUT).reset()[0][:, 0].tolist() == [3, 5, 6]
    assert source.build(3, rollout=ROLLOUT, indices=range(1, 3)).reset()[0][:, 0].tolist() == [5, 6]
    with pytest.raises(ValueError, match=r"num_envs does not fit .* : expected 3 or None, got 4"):
        source.build(4, rollout=ROLLOUT)


def test_indices_choose_how_many_copies_of_one_maker_are_made():
    assert resolve_env(CountingEnv).build(8, rollout=ROLLOUT, indices=range(4, 6)).num_envs == 2


@pytest.mark.parametrize("env", [[], ()])
def test_an_empty_sequence_is_refused(env):
    with pytest.raises(ValueError, match="env is an empty sequence : expected a Gymnasium id"):
        resolve_env(env)


@pytest.mark.parametrize("env", [None, 5, {"id": "CartPole-v1"}, b"CartPole-v1", ["CartPole-v1", None]], ids=repr)
def test_anything_else_is_refused_with_what_is_taken(env):
    with pytest.raises(TypeError, match=r"env is of the wrong kind : expected .* or a live gymnasium.Env, VectorEnv"):
        resolve_env(env)


def test_live_envs_in_a_sequence_are_refused():
    with pytest.raises(TypeError, match="env is of the wrong kind"):
        resolve_env([CountingEnv(0), CountingEnv(1)])


def test_a_live_env_is_one_copy_and_stays_open():
    live = CountingEnv(4)
    source = resolve_env(live)
    assert (source.num_envs, source.live) == (None, True)
    env = source.build(None, rollout=ROLLOUT)
    assert env.reset()[0].tolist() == [[4, 0, 0]]
    env.close()
    assert live.closes == 0


def test_a_live_env_cannot_be_more_copies_than_it_is():
    with pytest.raises(ValueError, match=r"num_envs does not fit .*CountingEnv.* expected 1 or None, got 2"):
        resolve_env(CountingEnv()).build(2, rollout=ROLLOUT)
    with pytest.raises(ValueError, match=r"num_envs does not fit .* expected 2 or None, got 3"):
        resolve_env(SyncVectorEnv([CountingEnv] * 2)).build(3, rollout=ROLLOUT)


def test_a_live_env_cannot_be_split_over_workers():
    with pytest.raises(ValueError, match="a live env cannot be split over workers"):
        resolve_env(SyncVectorEnv([CountingEnv] * 2)).build(2, rollout=ROLLOUT, indices=range(1))


def test_a_live_vector_env_says_its_copies_and_stays_open():
    live = SyncVectorEnv([CountingEnv] * 2)
    source = resolve_env(live)
    assert (source.num_envs, source.live) == (2, True)
    env = source.build(None, rollout=ROLLOUT)
    assert isinstance(env, VectorEnvAdapter)
    env.close()
    assert [copy.closes for copy in live.envs] == [0, 0]


def test_a_maker_of_a_vector_env_is_called_once_and_owned():
    made = []

    def make() -> SyncVectorEnv:
        made.append(SyncVectorEnv([CountingEnv] * 4))
        return made[-1]

    for num_envs in (None, 4):
        env = resolve_env(make).build(num_envs, rollout=ROLLOUT)
        assert env.num_envs == 4
        env.close()
    assert len(made) == 2
    assert made[0].closed
    with pytest.raises(ValueError, match=r"a vector env of 4 copies : expected 4 or None, got 3"):
        resolve_env(make).build(3, rollout=ROLLOUT)
    assert made[2].closed


def test_a_vector_env_in_a_sequence_is_refused_and_closed():
    vector = SyncVectorEnv([CountingEnv] * 2)
    first = CountingEnv()
    for makers in ([lambda: vector], [lambda: first, lambda: vector]):
        with pytest.raises(TypeError, match=r"expected gymnasium\.Env"):
            resolve_env(makers).build(None, rollout=ROLLOUT)
    assert vector.closed
    assert first.closes == 1


@pytest.mark.parametrize("answer", [None, 5, "CartPole-v1", CountingEnv], ids=repr)
def test_a_maker_of_no_env_is_told_what_it_returned(answer):
    made = []

    def make() -> Any:
        made.append(CountingEnv() if not made else answer)
        return made[-1]

    with pytest.raises(TypeError, match=r"made no env for copy 1 : expected gymnasium.Env, got"):
        resolve_env(make).build(2, rollout=ROLLOUT)
    assert made[0].closes == 1


def test_the_same_env_for_two_copies_is_refused():
    shared = CountingEnv()
    with pytest.raises(ValueError, match="gave the same env twice, at copy 1"):
        resolve_env(lambda: shared).build(2, rollout=ROLLOUT)


def test_a_constructor_that_raises_names_the_copy_and_closes_the_others():
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        made.append(FailingEnv("init", error=KeyError("door")) if len(made) == 3 else CountingEnv())
        return made[-1]

    with pytest.raises(WorkerFailedError, match=r"^env copy 3 failed in its constructor: KeyError: 'door'$") as caught:
        resolve_env(make).build(5, rollout=ROLLOUT)
    assert isinstance(caught.value.__cause__, KeyError)
    assert [env.closes for env in made] == [1, 1, 1]


def test_copies_are_closed_when_their_spaces_differ_or_building_is_interrupted():
    envs = [CountingEnv(0), CountingEnv(1, action_space=spaces.Discrete(9))]
    with pytest.raises(ValueError, match="action_space of env copy 1 differs"):
        resolve_env([lambda: envs[0], lambda: envs[1]]).build(None, rollout=ROLLOUT)
    assert [env.closes for env in envs] == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        resolve_env([lambda: envs[0], partial(FailingEnv, "init", error=KeyboardInterrupt())]).build(
            None, rollout=ROLLOUT
        )
    assert envs[0].closes == 2


def test_the_rollout_settings_reach_the_copies():
    rollout = RolloutConfig(max_frames_per_traj=1, keep_float64=True)
    for make in (CountingEnv, lambda: SyncVectorEnv([CountingEnv])):
        env = resolve_env(make).build(None, rollout=rollout)
        env.reset()
        assert env.step((np.zeros(1, np.int64),)).truncated.tolist() == [True]
    wide = resolve_env(lambda: gymnasium.wrappers.DtypeObservation(CountingEnv(), np.float64))
    assert wide.build(None, rollout=rollout).observation_spec.leaves[0].stored == np.float64


def test_gym_env_factory_gives_keywords_and_applies_wrappers_in_order():
    factory = GymEnvFactory(
        "CartPole-v1",
        {"max_episode_steps": 7},
        wrappers=[
            "gymnasium.wrappers.FlattenObservation",
            {"class_path": STACK, "init_args": {"stack_size": 4}},
            lambda env: gymnasium.wrappers.TransformReward(env, lambda reward: 10 * reward),
        ],
    )
    env = factory()
    assert env.observation_space.shape == (4, 4)
    assert env.spec.max_episode_steps == 7
    env.reset()
    assert env.step(0)[1] == 10
    env.close()


def test_gym_env_factory_is_described_by_its_call_and_travels():
    factory = GymEnvFactory("CartPole-v1", {"max_episode_steps": 7}, wrappers=[STACK])
    text = f"GymEnvFactory('CartPole-v1', make_kwargs={{'max_episode_steps': 7}}, wrappers=['{STACK}'])"
    assert resolve_env(factory).description == text == repr(pickle.loads(pickle.dumps(factory)))
    assert resolve_env(GymEnvFactory("CartPole-v1")).description == "CartPole-v1"


@pytest.mark.parametrize(
    ("wrapper", "error", "message"),
    [
        (3, TypeError, "a wrapper must be a callable, a dotted import path or a mapping, got 3"),
        ({"stack_size": 4}, ValueError, "a wrapper must be a mapping of class_path and init_args"),
        ("gymnasium.wrappers.Nope", ValueError, "has no attribute 'Nope'"),
        ("FlattenObservation", ValueError, "is no import path"),
    ],
)
def test_a_wrong_wrapper_is_refused_at_once(wrapper, error, message):
    with pytest.raises(error, match=message):
        GymEnvFactory("CartPole-v1", wrappers=[wrapper])


@pytest.mark.parametrize("kwargs", [[1], "ab", {3: 4}], ids=repr)
def test_keyword_arguments_are_a_mapping_of_names(kwargs):
    with pytest.raises(TypeError, match="make_kwargs must be a mapping of names to values, got"):
        GymEnvFactory("CartPole-v1", kwargs)


class Taker:
    """Stands for a class whose constructor a YAML file calls."""

    def __init__(self, env: EnvLike, num_envs: int = 1) -> None:
        self.env = env


GYM_FACTORY = {
    "class_path": "lit_collect.envs.factories.GymEnvFactory",
    "init_args": {
        "env_id": "CartPole-v1",
        "make_kwargs": {"max_episode_steps": 7},
        "wrappers": [STACK, {"class_path": STACK, "init_args": {"stack_size": 4}}],
    },
}


@pytest.fixture
def parser() -> ArgumentParser:
    made = ArgumentParser(exit_on_error=False)
    made.add_class_arguments(Taker, "data")
    return made


def described(env: Any) -> Any:
    return [described(one) for one in env] if isinstance(env, list) else env if isinstance(env, str) else repr(env)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, over the name of a method
@pytest.mark.parametrize(
    ("env", "check"),
    [
        ("CartPole-v1", str),
        ("mine/Count-v0", str),
        ("users_envs:mine/Count-v0", str),
        ("users_envs.make_env", str),
        (GYM_FACTORY, GymEnvFactory),
        (["CartPole-v1", "users_envs.make_env", GYM_FACTORY], list),
    ],
    ids=["id", "namespace", "module", "dotted", "class_path", "list"],
)
def test_yaml_gives_an_env_and_its_dump_gives_it_again(env, check: Callable, parser, module):
    config = parser.parse_object({"data": {"env": env}})
    taken = parser.instantiate_classes(config).data.env
    assert isinstance(taken, check)
    again = parser.instantiate_classes(parser.parse_string(parser.dump(config))).data.env
    assert described(again) == described(taken)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_command_line_gives_a_factory_by_class_path(parser):
    prefix = "--data.env.init_args.env_id=CartPole-v1"
    config = parser.parse_args(["--data.env.class_path=lit_collect.envs.factories.GymEnvFactory", prefix])
    assert repr(parser.instantiate_classes(config).data.env) == "GymEnvFactory('CartPole-v1')"


def test_messages_name_copies_as_the_rank_counts_them():
    source = resolve_env([partial(CountingEnv, i) for i in range(3)] + [partial(FailingEnv, "step")])
    env = source.build(4, rollout=ROLLOUT, indices=range(2, 4))
    env.reset()
    with pytest.raises(WorkerFailedError, match=r"^env copy 3 failed in step"):
        env.step((np.zeros(2, np.int64),))
    vector = resolve_env(lambda: SyncVectorEnv([CountingEnv] * 2)).build(4, rollout=ROLLOUT, indices=range(2, 4))
    assert (env.first, vector.first) == (2, 2)
