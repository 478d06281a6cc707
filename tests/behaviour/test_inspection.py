"""What can be asked between batches: attributes of the envs, the policy and the buffer, models, calls, fake batches."""

import random
import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import SyncVectorEnv
from torch import nn

from lit_collect import (
    Collector,
    CollectorClosedError,
    PolicyFactory,
    ProcessBackend,
    RandomPolicy,
)
from lit_collect.testing import ConstantPolicy
from tests.behaviour.telling import (
    MAKERS,
    ControlledEnv,
    OpponentEnv,
    Sink,
    Told,
    backend_of,
    invariant,
    linear,
    told,
)

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]

BOTH = pytest.mark.parametrize("backend", ["direct", "sync"])
EVERYWHERE = pytest.mark.parametrize("backend", ["direct", "sync", "async"])
CONTROLLED = [partial(ControlledEnv, index) for index in range(4)]


def make(backend: str, env=MAKERS, policy=None, **options) -> Collector:
    """Two workers of two copies each, or one of four."""
    return Collector(env, policy, **{"frames_per_batch": 8, "seed": 5, **options}, backend=backend_of(backend))


class Layered(nn.Sequential):
    """A policy with layers to look at, and something that cannot be pickled once it is asked for."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.level = {"depth": [3, 5]}

    @property
    def lock(self):
        return threading.Lock()

    def forward(self, observation):
        return {"logits": super().forward(observation)}

    def act(self, observation):
        return self(observation)


class Upright(nn.Module):
    """Logits for CartPole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation):
        return {"logits": self.net(observation)}


class Builder(PolicyFactory):
    def __call__(self):
        return Told(3.0)


# --- attributes -------------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_attributes_of_the_policy_are_read_and_never_called(backend):
    policy = Layered()
    with make(backend, policy=policy) as collector:
        assert collector.getattr_policy("level") == {"depth": [3, 5]}
        assert collector.getattr_policy("level['depth'][-1]") == 5
        assert collector.getattr_policy("training") is True
        weight = collector.getattr_policy("[0].weight")
        assert isinstance(weight, nn.Parameter)
        assert torch.equal(weight, policy[0].weight)
        assert (weight is policy[0].weight) == (backend == "direct")
        assert type(collector.getattr_policy("[2]")) is nn.Linear
        assert callable(collector.getattr_policy("forward"))


@BOTH
def test_attribute_of_the_policy_is_the_one_that_acts(backend):
    with make(backend, policy=ConstantPolicy(1.0, num_actions=2)) as collector:
        collector.update_policy_weights_(ConstantPolicy(2.0))
        collector.collect()
        assert collector.getattr_policy("action").item() == 2.0


@EVERYWHERE
def test_attributes_of_the_env_are_those_of_the_batch_then_of_the_first_copy(backend):
    copies = 4 if backend == "direct" else 2
    with make(backend, CONTROLLED) as collector:
        assert collector.getattr_env("num_envs") == copies
        assert collector.getattr_env("envs[1].unwrapped.index") == 1
        assert collector.getattr_env("index") == 0
        assert collector.getattr_env("level['gravity'][1]") == 10.0
        assert collector.getattr_env("action_space") == collector.action_space
        assert collector.getattr_env("observation_space") == collector.observation_space
        assert collector.getattr_env("episode") == -1
        collector.collect()
        assert collector.getattr_env("episode") >= 0


@BOTH
def test_wrappers_are_asked_before_what_they_wrap(backend):
    with make(backend, "CartPole-v1", num_envs=4) as collector:
        spec = collector.getattr_env("spec")
        assert isinstance(spec, gymnasium.envs.registration.EnvSpec)
        assert spec.id == collector.getattr_env("spec.id") == "CartPole-v1"
        assert collector.getattr_env("_max_episode_steps") == 500  # of TimeLimit
        assert collector.getattr_env("gravity") == 9.8


@BOTH
@pytest.mark.parametrize(
    ("env", "reads"),
    [
        (partial(CartPoleVectorEnv, 2), {"num_envs": 2, "gravity": 9.8, "mode.name": "NEXT_STEP"}),
        (lambda: SyncVectorEnv(MAKERS[:2]), {"num_envs": 2, "index": 0, "envs[1].index": 1}),
    ],
    ids=["one array", "copies"],
)
def test_attributes_of_vector_envs_are_found(backend, env, reads):
    chosen = "direct" if backend == "direct" else ProcessBackend(1)
    with Collector(env, frames_per_batch=8, backend=chosen) as collector:
        assert {name: collector.getattr_env(name) for name in reads} == reads


@EVERYWHERE
def test_attributes_that_are_not_there_are_explained_and_the_collector_goes_on(backend):
    with make(backend, CONTROLLED, Layered()) as collector:
        for read, name, error, words in [
            (
                collector.getattr_env,
                "levl",
                AttributeError,
                r"the env has no attribute 'levl' .*such as level.* it is a ",
            ),
            (collector.getattr_env, "_steps", AttributeError, "the env has no attribute '_steps'"),
            (collector.getattr_env, "broken", AttributeError, "the gauge is broken"),
            (collector.getattr_env, "level['mass']", KeyError, "has no item 'mass' : expected one of gravity"),
            (collector.getattr_env, "envs[9]", IndexError, "expected an index below"),
            (collector.getattr_env, "__class__", ValueError, "two underscores"),
            (collector.getattr_env, "", ValueError, "is malformed at position 0"),
            (collector.getattr_env, "level..x", ValueError, "is malformed"),
            (collector.getattr_policy, "levl", AttributeError, "'policy' has no attribute 'levl' .*such as level"),
            (collector.getattr_policy, "[7]", IndexError, "'policy' has no item 7|index 7 is out of range"),
            (collector.getattr_policy, "", ValueError, "is malformed"),
            (collector.getattr_policy, "0.weight", ValueError, "is malformed"),
        ]:
            with pytest.raises(error, match=words):
                read(name)
        with pytest.raises(AttributeError, match="it is a DirectEnv of a ControlledEnv"):
            collector.getattr_env("levl")
        assert collector.getattr_env("index") == 0
        assert collector.collect().numel() == 8


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_values_that_cannot_travel_are_named_with_their_type_and_the_worker_goes_on(backend):
    with make(backend, CONTROLLED, Layered()) as collector:
        collector.collect()
        for ask, words in [
            (lambda: collector.getattr_env("lock"), "sending the answer, a lock, after reading env.lock"),
            (lambda: collector.getattr_policy("lock"), "sending the answer, a lock, after reading policy.lock"),
            (lambda: collector.cascade_execute("policy.lock"), "a lock, after executing policy.lock"),
            (lambda: collector.map_fn(lambda env, policy: [policy.lock]), "a list, after calling .*lambda"),
        ]:
            for _ in range(2):
                with pytest.raises(TypeError, match=f"cannot pickle '_thread.lock' object .in worker 0.*{words}"):
                    ask()
            assert collector.cascade_execute("env.envs[0].unwrapped.index") == [0, 2]
        assert collector.collect().numel() == 8


def test_values_of_this_process_need_not_travel():
    with make("direct", CONTROLLED, policy := Layered()) as collector:
        lock = type(threading.Lock())
        assert isinstance(collector.getattr_env("lock"), lock)
        assert isinstance(collector.getattr_policy("lock"), lock)
        assert collector.map_fn(lambda env, acting: acting)[0] is policy


@EVERYWHERE
@pytest.mark.parametrize("policy", [None, RandomPolicy()], ids=["None", "RandomPolicy"])
def test_attributes_of_no_policy_are_not_there(backend, policy):
    with make(backend, policy=policy) as collector, pytest.raises(AttributeError, match="'policy' has no attribute"):
        collector.getattr_policy("net")


@BOTH
def test_attributes_of_the_replay_buffer_are_those_of_the_one_that_was_given(backend):
    sink = Sink()
    with make(backend, replay_buffer=sink) as collector:
        collector.collect()
        assert collector.getattr_rb("rows") == 8
        assert collector.getattr_rb("batches") is sink.batches
        assert collector.getattr_rb("batches[0]") is sink.batches[0]
        with pytest.raises(AttributeError, match="'replay_buffer' has no attribute 'capacity'"):
            collector.getattr_rb("capacity")
    with make(backend) as collector, pytest.raises(RuntimeError, match=r"no replay buffer .*replay_buffer=\.\.\."):
        collector.getattr_rb("rows")


# --- models -----------------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_model_is_the_one_that_the_learner_trains(backend):
    policy = Layered()
    with make(backend, policy=policy) as collector:
        assert collector.get_model() is policy
        assert collector.get_model("policy") is policy
        assert collector.get_model("policy[0]") is policy[0]
        with torch.no_grad():
            collector.get_model("policy[2]").weight.fill_(2.0)
        collector.update_policy_weights_()
        collector.collect()
        assert collector.getattr_policy("[2].weight").unique().tolist() == [2.0]
        for model_id in ("critic", "policy.critic", "policy[9]", "policy..x", ""):
            with pytest.raises(KeyError, match=r"there is no model .* in this process : expected one of .*policy\[0\]"):
                collector.get_model(model_id)
        with pytest.raises(TypeError, match=r"is no model of this process : expected an nn\.Module, got \{'depth'"):
            collector.get_model("policy.level")


@BOTH
def test_model_of_a_method_is_the_module_that_it_belongs_to(backend):
    policy = Layered()
    for method in (policy.act, partial(policy.act)):
        with make(backend, policy=method) as collector:
            assert collector.get_model() is policy
            assert collector.getattr_policy("level['depth']") == [3, 5]


@BOTH
@pytest.mark.parametrize("policy", [None, RandomPolicy(), lambda x: torch.zeros(len(x), dtype=torch.int64)], ids=str)
def test_policy_that_is_no_module_is_no_model(backend, policy):
    with make(backend, policy=policy) as collector:
        with pytest.raises(TypeError, match=r"policy is no model of this process : expected an nn\.Module, got "):
            collector.get_model()
        with pytest.raises(KeyError, match=r"there is no model 'policy\.net' in this process : expected one of policy"):
            collector.get_model("policy.net")


def test_model_of_a_factory_is_the_one_that_acts_where_it_was_built():
    with make("direct", policy=Builder()) as collector:
        model = collector.get_model()
        assert isinstance(model, Told)
        model.fill(5.0)
        assert told(collector.collect()) == [5.0]
    with make("sync", policy=Builder()) as collector:
        with pytest.raises(TypeError, match=r"Builder object .*; it builds one in each worker, so build another"):
            collector.get_model()
        assert collector.getattr_policy("count").item() == 3.0


def test_models_of_envs_are_here_if_the_envs_are():
    makers = [partial(OpponentEnv, index) for index in range(2)]
    model_id = "env.envs[0].unwrapped.opponent"
    with make("direct", makers, Told()) as collector:
        opponent = collector.get_model(model_id)
        nn.init.constant_(opponent.weight, 7.0)
        assert collector.collect()["next", "observation"][0, 0, 2] == 7.0
    with make("sync", makers, Told()) as collector:
        with pytest.raises(KeyError, match="models of envs are in the workers"):
            collector.get_model(model_id)
        collector.update_policy_weights_(linear(7.0), model_id=model_id)
        assert collector.collect()["next", "observation"][0, 0, 2] == 7.0


# --- at any time ------------------------------------------------------------------------------------------------------

QUESTIONS = {
    "cascade_execute": lambda collector: collector.cascade_execute("env.num_envs"),
    "map_fn": lambda collector: collector.map_fn(lambda env, policy: env.num_envs),
    "getattr_env": lambda collector: collector.getattr_env("num_envs"),
    "getattr_policy": lambda collector: collector.getattr_policy("training"),
    "getattr_rb": lambda collector: collector.getattr_rb("rows"),
    "get_model": lambda collector: collector.get_model(),
    "fake_tensordict": lambda collector: collector.fake_tensordict(),
    "enable_profile": lambda collector: collector.enable_profile(),
    "reset": lambda collector: collector.reset(0),
    "set_seed": lambda collector: collector.set_seed(1),
    "pause": lambda collector: collector.pause(),
    "start": lambda collector: collector.start(),
    "update_policy_weights_": lambda collector: collector.update_policy_weights_(),
    "receive_weights": lambda collector: collector.receive_weights(Told(1.0)),
}


@EVERYWHERE
@pytest.mark.parametrize("policy", [Upright(), None], ids=["logits", "None"])
def test_questions_move_nothing(backend, policy):
    def stream(asked: bool) -> list[list[float]]:
        # one worker, so that the order of batches is known
        chosen = "direct" if backend == "direct" else ProcessBackend(1, sync=backend != "async")
        rows = []
        with Collector(
            "CartPole-v1", policy, num_envs=2, frames_per_batch=20, total_frames=100, seed=3, backend=chosen
        ) as collector:
            for batch in collector:
                rows += [batch["observation"].tolist(), batch["action"].tolist()]
                drawn = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
                if asked:
                    collector.getattr_env("spec")
                    if policy is not None:
                        collector.getattr_policy("net.weight")
                        collector.get_model()
                    collector.map_fn(lambda env, policy: env.num_envs)
                    collector.fake_tensordict()
                assert torch.equal(torch.get_rng_state(), drawn[0])
                assert (np.random.get_state()[1].tolist(), random.getstate()) == drawn[1:]
        return rows

    assert stream(asked=True) == stream(asked=False)


@EVERYWHERE
def test_nothing_can_be_asked_after_shutdown(backend):
    collector = make(backend, policy=Told(), replay_buffer=Sink())
    collector.shutdown()
    for name, ask in QUESTIONS.items():
        with pytest.raises(CollectorClosedError, match="the collector is closed; build a new one"):
            raise AssertionError(f"{name} gave {ask(collector)}")
    assert collector.is_running is False
    collector.async_shutdown()


@EVERYWHERE
def test_everything_can_be_asked_while_frames_are_collected_in_the_background(backend):
    sink = Sink()
    with make(backend, policy=Told(), replay_buffer=sink) as collector:
        collector.start()
        sink.wait_for_more()
        for name, ask in QUESTIONS.items():
            if name in ("enable_profile", "start", "pause"):
                continue
            ask(collector)
            sink.wait_for_more()
        with pytest.raises(RuntimeError, match="profiling begins with the first batch"):
            collector.enable_profile()
        with collector.pause():
            rows = sink.rows
            assert collector.getattr_rb("rows") == rows
            assert collector.map_fn(lambda env, policy: env.num_envs)[0] in (2, 4)
            assert sink.rows == rows
        assert collector.fake_tensordict().shape == ((4, 2) if backend == "direct" else (2, 4))
        assert collector.is_running
        assert invariant(collector.statistics())
    assert not collector.is_running
