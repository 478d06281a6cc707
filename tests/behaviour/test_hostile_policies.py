"""A policy that answers wrongly is told what is wrong, before any env has moved."""

from functools import partial

import pytest
import torch
from gymnasium import spaces
from torch import nn

from lit_collect import Collector, FrameContractError, RolloutConfig
from lit_collect.testing import ConstantPolicy, CountingEnv

pytestmark = pytest.mark.timeout(30)

MAKERS = [partial(CountingEnv, i) for i in range(2)]


def box(low: float, high: float) -> spaces.Box:
    return spaces.Box(low, high, (2,))


def act_with(value):
    """A policy that gives the same answer for each copy."""
    return lambda observation: torch.as_tensor(value).expand(len(observation), *torch.as_tensor(value).shape)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda obs: torch.zeros(2, 1).long(), r"wrong shape : expected \(2,\).*got \(2, 1\); squeeze"),
        (lambda obs: torch.zeros(3, dtype=torch.int64), r"wrong shape : expected \(2,\).*got \(3,\)"),
        (lambda obs: torch.tensor(0), r"wrong shape : expected \(2,\).*got \(\)"),
        (act_with(0.5), "wrong dtype : expected integers, got torch.float32"),
        (act_with(2), "action"),
        (act_with(-1), "action"),
        (lambda obs: None, "returned no action .*got NoneType"),
        (lambda obs: {"value": torch.zeros(2)}, r"mapping without an action .*got \['value'\]"),
        (lambda obs: {"action": torch.zeros(2).long(), "next": torch.zeros(2)}, "names that the batch itself takes"),
        (lambda obs: {"action": torch.zeros(2).long(), "value": torch.zeros(3)}, "must have one row for each of 2"),
        (lambda obs: {"logits": torch.full((2, 2), torch.nan)}, "policy gave NaN for env copy 0 at step 0"),
        (lambda obs: {"action": torch.zeros(2).long(), "kept": obs.add_(1.0)}, "changed its observation in place"),
    ],
)  # fmt: skip
def test_policy_whose_answer_is_wrong(policy, words):
    with Collector(MAKERS, policy, frames_per_batch=8) as collector:
        with pytest.raises(FrameContractError, match=words):
            collector.collect()
        assert collector.statistics()["frames_yielded"] == 0


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (act_with([torch.nan, 0.0]), "NaN|nan|finite"),
        (lambda obs: torch.distributions.Normal(torch.full((2, 2), torch.nan), 1.0, validate_args=False), "NaN|nan"),
        (lambda obs: {"loc": torch.full((2, 2), torch.nan), "scale": torch.ones(2, 2)}, "NaN|nan"),
        (lambda obs: torch.zeros(2), r"wrong shape : expected \(2, 2\)"),
        (lambda obs: torch.zeros(2, 2, dtype=torch.int64), "expected floating point, got torch.int64"),
    ],
)
def test_policy_of_continuous_actions_whose_answer_is_wrong(policy, words):
    makers = [partial(CountingEnv, i, action_space=box(-1.0, 1.0)) for i in range(2)]
    with Collector(makers, policy, frames_per_batch=8) as collector, pytest.raises(FrameContractError, match=words):
        collector.collect()


def test_action_out_of_range_moves_no_env():
    envs = [CountingEnv(i) for i in range(2)]
    calls = iter([0, 2])

    def policy(observation):
        return torch.full((2,), next(calls))

    expected = pytest.raises(FrameContractError, match="action")
    with Collector([lambda: envs[0], lambda: envs[1]], policy, frames_per_batch=8) as collector, expected:
        collector.collect()
    assert [len(env.actions) for env in envs] == [1, 1]


@pytest.mark.parametrize(("clip", "received"), [(True, 1.0), (False, 3.0)])
def test_continuous_action_out_of_range_is_clipped_for_the_env_alone(clip, received):
    env, policy = CountingEnv(action_space=box(-1.0, 1.0)), ConstantPolicy([0.0, 3.0])
    with Collector(env, policy, frames_per_batch=4, rollout=RolloutConfig(clip_actions=clip)) as collector:
        assert collector.collect()["action"].tolist() == [[0.0, 3.0]] * 4
    assert [action.tolist() for action in env.actions] == [[0.0, received]] * 4


@pytest.mark.parametrize("policy", [3, "policy", nn.Linear])
def test_policy_that_cannot_act(policy):
    with pytest.raises(TypeError, match="policy cannot act"):
        Collector("CartPole-v1", policy, frames_per_batch=8)


def test_policy_that_raises_keeps_its_own_error_and_the_collector():
    calls = iter([True])

    def policy(observation):
        if next(calls, False):
            raise ZeroDivisionError("of the user")
        return torch.zeros(len(observation), dtype=torch.int64)

    with Collector(MAKERS, policy, frames_per_batch=8, total_frames=8) as collector:
        with pytest.raises(ZeroDivisionError, match="of the user"):
            collector.collect()
        (batch,) = collector
    assert batch["is_init"][:, 0].all()
