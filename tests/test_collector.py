"""`Collector` as a plain loop uses it: sizes, iteration, hooks, weights, resets, state."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict
from torch import nn

from lit_collect import (
    BudgetSpentError,
    Collector,
    DirectBackend,
    GymEnvFactory,
    Hooks,
    PolicyFactory,
    RandomPolicy,
    RolloutConfig,
    check_batch,
)
from lit_collect.testing import ConstantPolicy, CountingEnv

MAKERS = [partial(CountingEnv, i) for i in range(2)]


def versions(batch: TensorDict) -> list[int]:
    return batch["collector", "policy_version"].unique().tolist()


class Biased(nn.Module):
    """Its weight stands next to each action."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, observation):
        rows = len(observation)
        told = (self.weight + self.shift).expand(rows, 1)
        return {"action": torch.zeros(rows, dtype=torch.int64), "told": told}


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "num_envs", "shape"),
    [
        ("CartPole-v1", None, (8,)),
        ("CartPole-v1", 1, (1, 8)),
        ("CartPole-v1", 4, (4, 2)),
        (CountingEnv, None, (8,)),
        (GymEnvFactory("CartPole-v1"), 2, (2, 4)),
        ("lit_collect.testing.CountingEnv", 2, (2, 4)),
        (MAKERS, None, (2, 4)),
        (MAKERS, 2, (2, 4)),
        (MAKERS[:1], None, (1, 8)),
        (lambda: SyncVectorEnv(MAKERS), None, (2, 4)),
        (lambda: SyncVectorEnv(MAKERS[:1]), None, (1, 8)),
        (partial(CountingEnv, 3), 2, (2, 4)),
    ],
)
def test_batches_have_the_copies_that_the_env_or_the_user_says(env, num_envs, shape):
    with Collector(env, num_envs=num_envs, frames_per_batch=8) as collector:
        batch = collector.collect()
        assert collector.num_envs == (shape[0] if len(shape) == 2 else 1)
    assert batch.batch_size == shape
    assert batch.names[-1] == "time"
    check_batch(batch)


def test_batch_of_a_vector_env_that_does_not_fit_its_copies_raises():
    with pytest.raises(ValueError, match="multiple of num_envs=2, got 7; use 6 or 8"):
        Collector(lambda: SyncVectorEnv(MAKERS), frames_per_batch=7)
    with pytest.raises(ValueError, match="multiple of the 2 env copies, got 7; use 6 or 8"):
        Collector(lambda: SyncVectorEnv(MAKERS), frames_per_batch=8, total_frames=7)


def test_spaces_are_those_of_one_copy():
    with Collector("CartPole-v1", num_envs=3, frames_per_batch=3) as collector:
        assert collector.observation_space.shape == (4,)
        assert collector.action_space.n == 2


# --- iterating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total_frames", "sizes"), [(8, [8]), (24, [8, 8, 8]), (20, [8, 8, 4]), (2, [2])])
def test_iterating_meets_the_budget_to_the_frame(total_frames, sizes):
    with Collector(MAKERS, frames_per_batch=8, total_frames=total_frames) as collector:
        assert len(collector) == len(sizes)
        assert [batch.numel() for batch in collector] == sizes
        assert collector.frames_left == len(collector) == 0
        assert collector.statistics()["batches"] == len(sizes)


def test_iter_goes_on_where_the_stream_was_left():
    with Collector(MAKERS, frames_per_batch=4, total_frames=24) as collector:
        first = [batch["observation"][0, :, 1:].tolist() for _, batch in zip(range(2), collector, strict=False)]
        assert len(collector) == 4
        assert iter(collector) is iter(collector)
        rest = [batch["observation"][0, :, 1:].tolist() for batch in collector]
    stream = [row for batch in first + rest for row in batch]
    assert stream == [[frame // 3, frame % 3] for frame in range(12)]


def test_endless_collector_has_no_length():
    with Collector(MAKERS, frames_per_batch=4) as collector:
        with pytest.raises(TypeError, match="a collector without total_frames has no length"):
            len(collector)
        assert collector.frames_left is None
        assert [batch.numel() for _, batch in zip(range(3), collector, strict=False)] == [4, 4, 4]


def test_spent_iterator_stops_and_a_new_one_raises():
    with Collector(MAKERS, frames_per_batch=4, total_frames=4) as collector:
        iterator = iter(collector)
        next(iterator)
        assert next(iterator, "end") == "end"
        with pytest.raises(BudgetSpentError):
            iter(collector)


def test_shutdown_closes_owned_envs_once_and_leaves_live_ones():
    made = [CountingEnv(i) for i in range(2)]
    with Collector([lambda: made[0], lambda: made[1]], frames_per_batch=4) as collector:
        collector.collect()
    collector.shutdown()
    assert [env.closes for env in made] == [1, 1]
    live = CountingEnv()
    with Collector(live, frames_per_batch=4) as collector:
        collector.collect()
    assert live.closes == 0


def test_envs_are_closed_when_the_constructor_fails_after_they_were_made():
    made = []

    def make():
        made.append(CountingEnv())
        return made[-1]

    with pytest.raises(TypeError, match="policy cannot act"):
        Collector(make, 7, num_envs=2, frames_per_batch=4)
    assert [env.closes for env in made] == [1, 1]


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_a_hook_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"among pre_collect, postproc and post_collect, got \['after'\]"):
        Collector(MAKERS, frames_per_batch=4, hooks={"after": print})


@pytest.mark.parametrize("as_mapping", [True, False])
def test_hooks_see_exactly_what_is_yielded(as_mapping):
    calls: list[object] = []

    def halve(batch):
        calls.append("post")
        return batch[:1]

    hooks = {"pre_collect": lambda: calls.append("pre"), "postproc": halve, "post_collect": calls.append}
    hooks = hooks if as_mapping else Hooks(**hooks)
    with Collector(MAKERS, frames_per_batch=4, total_frames=8, hooks=hooks) as collector:
        yielded = list(collector)
    assert [batch.shape for batch in yielded] == [(1, 2), (1, 2)]
    assert calls[:2] == ["pre", "post"]
    assert calls[2] is yielded[0]
    assert calls[3:5] == ["pre", "post"]
    assert calls[5] is yielded[1]


def test_rollout_counts_its_frames_and_calls_no_hook():
    with Collector(MAKERS, frames_per_batch=4, total_frames=8, hooks={"pre_collect": lambda: 1 / 0}) as collector:
        assert collector.rollout().numel() == 4
        assert collector.frames_left == 4


def test_weights_published_by_a_hook_act_in_the_batch_that_follows():
    policy = Biased()

    def learn():
        with torch.no_grad():
            policy.weight += 1.0
        collector.update_policy_weights_()

    with Collector(MAKERS, policy, frames_per_batch=4, hooks={"pre_collect": learn}) as collector:
        batches = [collector.collect() for _ in range(3)]
    assert [versions(batch) for batch in batches] == [[1], [2], [3]]
    assert [batch["told"].unique().tolist() for batch in batches] == [[1.0], [2.0], [3.0]]


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "update",
    [
        lambda collector, source: collector.update_policy_weights_(source),
        lambda collector, source: collector.update_policy_weights_(policy=source),
        lambda collector, source: collector.update_policy_weights_(source.state_dict()),
        lambda collector, source: collector.update_policy_weights_(weights=dict(source.state_dict())),
        lambda collector, source: collector.update_policy_weights_(TensorDict.from_module(source)),
        lambda collector, source: collector.update_policy_weights_(weights_dict={"policy": source}),
        lambda collector, source: collector.update_policy_weights_(source, model_id="policy"),
    ],
)
def test_weights_may_come_in_every_form(update):
    policy, source = Biased(), Biased(5.0)
    source.shift += 2.0
    with Collector(MAKERS, policy, frames_per_batch=4) as collector:
        assert collector.policy_version == 0
        assert versions(collector.collect()) == [0]
        update(collector, source)
        batch = collector.collect()
        assert collector.policy_version == 1
    assert versions(batch) == [1]
    assert batch["told"].unique().tolist() == [7.0]
    assert policy.weight.item() == 5.0
    assert source.weight.item() == 5.0


def test_publishing_without_weights_counts_the_policys_own():
    policy = ConstantPolicy(num_actions=2)
    with Collector(MAKERS, policy, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
        collector.update_policy_weights_(policy)
        assert collector.policy_version == 2
        assert versions(collector.collect()) == [2]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weights": {"action": torch.zeros(())}, "policy": ConstantPolicy()}, ValueError, "must be given in one way"),
        ({"weights": {"act": torch.zeros(())}}, ValueError, r"missing \['action'\], unknown \['act'\]"),
        ({"weights": {"action": torch.zeros(2)}}, ValueError, r"'action' must have shape \(\), got \(2,\)"),
        ({"weights": {"action": 3.0}}, TypeError, "weights must be tensors, got float for 'action'"),
        ({"policy": ConstantPolicy(), "model_id": "critic"}, KeyError, "there is no model 'critic'"),
        ({"weights_dict": {"critic": ConstantPolicy()}}, KeyError, "there is no model 'critic'"),
        ({"worker_ids": 0}, ValueError, "worker_ids needs a backend with workers"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(arguments, error, words):
    policy = ConstantPolicy(1.0, num_actions=2)
    with Collector(MAKERS, policy, frames_per_batch=4) as collector:
        with pytest.raises(error, match=words):
            collector.update_policy_weights_(**arguments)
        assert collector.policy_version == 0
    assert policy.action.item() == 1.0


@pytest.mark.parametrize("policy", [None, RandomPolicy(), lambda observation: torch.zeros(2, dtype=torch.int64)])
def test_policy_without_weights_takes_none(policy):
    with Collector(MAKERS, policy, frames_per_batch=4) as collector:
        with pytest.raises(TypeError, match=r"the policy has no weights : only an nn\.Module can be updated"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})
        collector.update_policy_weights_()  # what acts may have changed all the same
        assert collector.policy_version == 1


def test_policy_of_a_factory_is_built_once_and_takes_weights():
    built = []

    class Factory(PolicyFactory):
        def __call__(self):
            built.append(Biased())
            return built[-1]

    with Collector(MAKERS, Factory(), frames_per_batch=4) as collector:
        collector.update_policy_weights_(Biased(3.0))
        assert collector.collect()["told"].unique().tolist() == [3.0]
    assert len(built) == 1


# --- resets -----------------------------------------------------------------------------------------------------------


def test_reset_begins_new_episodes_under_new_ids():
    with Collector(MAKERS, frames_per_batch=4) as collector:
        collector.collect()
        collector.reset()
        batch = collector.collect()
    assert batch["observation"][:, :, 1:].tolist() == [[[1, 0], [1, 1]]] * 2
    assert batch["collector", "traj_ids"].tolist() == [[2, 2], [3, 3]]
    assert batch["is_init"][:, :, 0].tolist() == [[True, False]] * 2


@pytest.mark.parametrize("index", [0, 1])
def test_reset_of_one_copy_leaves_the_other_alone(index):
    with Collector(MAKERS, frames_per_batch=4) as collector:
        collector.collect()
        collector.reset(index)
        batch = collector.collect()
    assert batch["observation"][index, :, 1:].tolist() == [[1, 0], [1, 1]]
    assert batch["observation"][1 - index, :, 1:].tolist() == [[0, 2], [1, 0]]
    assert batch["collector", "traj_ids"][index].tolist() == [2 + index] * 2
    assert batch["collector", "traj_ids"][1 - index].tolist() == [1 - index, 3 - index]


def test_reset_before_the_first_batch_and_twice_costs_no_id():
    with Collector(MAKERS, frames_per_batch=4) as collector:
        collector.reset()
        collector.reset(1)
        collector.reset()
        batch = collector.collect()
    assert batch["collector", "traj_ids"].tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("index", [2, -3])
def test_reset_of_a_copy_that_does_not_exist_raises(index):
    with Collector(MAKERS, frames_per_batch=4) as collector:
        collector.collect()
        with pytest.raises((IndexError, ValueError)):
            collector.reset(index)


@pytest.mark.parametrize("index", ["a", 1.0, True])
def test_reset_of_what_is_no_number_of_a_copy_raises(index):
    with Collector("CartPole-v1", num_envs=2, frames_per_batch=8) as collector:
        collector.collect()
        with pytest.raises(TypeError, match="index must be the number of an env copy or None, got"):
            collector.reset(index)
        collector.reset(np.int64(1))


@pytest.mark.parametrize("name", [3, None])
def test_attribute_whose_name_is_no_text_raises(name):
    with Collector("CartPole-v1", num_envs=2, frames_per_batch=8, replay_buffer=[]) as collector:
        for ask in (collector.getattr_env, collector.getattr_policy, collector.getattr_rb, collector.get_model):
            with pytest.raises(TypeError, match=r"(must be a|is no) text"):
                ask(name)


def test_resetting_at_each_batch_begins_new_episodes():
    with Collector(MAKERS, frames_per_batch=4, rollout=RolloutConfig(reset_at_each_iter=True)) as collector:
        batches = [collector.collect() for _ in range(3)]
    assert [batch["observation"][0, :, 1].tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2]]
    assert [batch["collector", "traj_ids"][1].tolist() for batch in batches] == [[1, 1], [3, 3], [5, 5]]
    assert all(batch["is_init"][:, 0].all() for batch in batches)


# --- state ------------------------------------------------------------------------------------------------------------


def test_state_is_plain_data(tmp_path):
    with Collector(MAKERS, Biased(), frames_per_batch=8, seed=2**70) as collector:
        collector.collect()
        state = collector.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert state["entropy"] == 2**70
    assert state["frames_yielded"] == state["frames_stepped"] == 8
    assert state["trajectories"] == [2, 2]  # two of 3 frames were begun, the second one in vain


def test_state_of_a_batch_border_that_ends_an_episode_skips_no_id():
    with Collector(MAKERS, frames_per_batch=6) as collector:
        collector.collect()
        assert collector.state_dict()["trajectories"] == [1, 1]


def test_loaded_state_goes_on_and_counts_what_this_collector_did_before():
    with Collector(MAKERS, Biased(), frames_per_batch=4, total_frames=16, seed=1) as first:
        first.collect()
        first.update_policy_weights_()
        state = first.state_dict()
    with Collector(MAKERS, Biased(), frames_per_batch=4, total_frames=16, seed=1) as second:
        for _ in range(3):
            second.collect()
        second.load_state_dict(state)
        assert second.policy_version == 1
        assert second.frames_left == 12
        statistics = second.statistics()
        assert (statistics["frames_stepped"], statistics["frames_dropped"]) == (12, 8)
        ids = second.collect()["collector", "traj_ids"]
    assert ids.tolist() == [[2, 2], [3, 3]]
    with Collector(MAKERS, frames_per_batch=4, total_frames=2) as smaller:
        smaller.load_state_dict(state)  # 4 frames, more than there are to be
        assert (smaller.frames_left, list(range(len(smaller)))) == (0, [])


def test_statistics_are_plain_numbers():
    with Collector(MAKERS, frames_per_batch=4, total_frames=8) as collector:
        collector.collect()
        statistics = collector.statistics()
    assert statistics.pop("acknowledged_versions") == [0]
    assert all(type(value) in (int, float) for value in statistics.values())
    assert statistics["frames_pending"] == statistics["frames_dropped"] == 0
    assert statistics["total_frames"] == 8
    assert statistics["env_s"] > 0
    assert statistics["policy_s"] > 0


@pytest.mark.parametrize("backend", ["direct", "auto", DirectBackend()])
def test_backend_changes_no_data(backend):
    with Collector("CartPole-v1", frames_per_batch=8, seed=3) as expected:
        first = expected.collect()
    with Collector("CartPole-v1", frames_per_batch=8, seed=3, backend=backend) as collector:
        assert torch.equal(collector.collect()["observation"], first["observation"])


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        (None, TypeError, "the state must be a mapping that Collector.state_dict gave, got None"),
        ({"entropy": 3}, ValueError, r"the state lacks \['batches', .*\] : expected .*, got \['entropy'\]"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state, kind, message):
    with Collector(MAKERS, frames_per_batch=4, seed=1) as collector:
        before = collector.state_dict()
        with pytest.raises(kind, match=message):
            collector.load_state_dict(state)
        assert collector.state_dict() == before


@pytest.mark.parametrize("carry", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_collector_cannot_be_copied_and_says_what_can(carry):
    with (
        Collector(MAKERS, frames_per_batch=4) as collector,
        pytest.raises(TypeError, match=r"a Collector cannot be pickled or copied : .* carry state_dict\(\) over"),
    ):
        carry(collector)


# --- settings and threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("rollout", "RolloutConfig"), ("devices", "DeviceConfig")])
def test_settings_of_another_kind_are_refused_and_named(name, kind):
    with pytest.raises(TypeError, match=rf"{name} must be given as {kind}\(\.\.\.\), got 'cpu'"):
        Collector(MAKERS, frames_per_batch=4, **{name: "cpu"})


def test_settings_may_be_a_mapping():
    with Collector(MAKERS, frames_per_batch=4, rollout={"max_frames_per_traj": 1}) as collector:
        assert collector.collect()["next", "truncated"].all()


def test_thread_that_waits_while_another_one_spends_the_budget_is_told_so():
    stepping, go_on = threading.Event(), threading.Event()
    asked = threading.Semaphore(0)

    def act(observation):
        stepping.set()
        assert go_on.wait(30)
        return torch.zeros(2, dtype=torch.int64)

    hooks = {"pre_collect": asked.release}
    with (
        Collector(MAKERS, act, frames_per_batch=4, total_frames=4, hooks=hooks) as collector,
        ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(collector.collect)
        assert stepping.wait(30)
        second = threads.submit(collector.collect)
        for _ in range(2):
            assert asked.acquire(timeout=30)
        go_on.set()
        assert first.result(30).numel() == 4
        with pytest.raises(BudgetSpentError, match="all 4 frames"):
            second.result(30)
        assert collector.statistics()["frames_stepped"] == 4


def test_one_worker_to_be_profiled_may_be_given_as_a_number(tmp_path):
    with Collector(MAKERS, frames_per_batch=4) as collector:
        collector.enable_profile(0, save_path=str(tmp_path / "trace.json"))
        assert collector.profile_config.workers == (0,)
