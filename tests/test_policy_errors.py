"""Policies that cannot act, or answer with what cannot be stored, are told so in their author's words."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, distributions, nn

from lit_collect.collector import Collector
from lit_collect.errors import FrameContractError
from lit_collect.policies import PolicyFactory, RandomPolicy
from lit_collect.testing import CountingEnv, ScriptedEnv

N, T = 2, 8
CHOICE, MOVE = spaces.Discrete(3), spaces.Box(-50, 50, (2,), np.float32)
NAN = torch.full((N, 3), torch.nan)


def collect(policy: Any, action_space: spaces.Space = CHOICE) -> None:
    envs = [partial(CountingEnv, index, action_space=action_space) for index in range(N)]
    with Collector(envs, policy, frames_per_batch=N * T) as collector:
        collector.collect()


def logits(observation: Tensor) -> Tensor:
    return torch.stack([observation[..., 2] - 1, observation[..., 0], torch.zeros_like(observation[..., 0])], -1)


def tensordict_actor(module: Callable[[Tensor], Tensor], key: Any = "extra", **options: Any) -> nn.Module:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(module, ["observation"], ["logits"]),
        TensorDictModule(lambda x: x, ["observation"], [key]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=distributions.Categorical, **options),
    )


WRONG: dict[str, tuple[Any, spaces.Space, str]] = {
    "no rows": (lambda x: torch.tensor(1), CHOICE, r"wrong shape : expected \(2,\) \(env copies first\), got \(\)"),
    "too many rows": (lambda x: torch.zeros(3, dtype=torch.int64), CHOICE, r"expected \(2,\) .*, got \(3,\)"),
    "a last dimension": (
        lambda x: torch.zeros(N, 1, dtype=torch.int64),
        CHOICE,
        r"expected \(2,\) .*, got \(2, 1\); squeeze the last dimension",
    ),
    "another size": (lambda x: torch.zeros(N, 3), MOVE, r"expected \(2, 2\) .*, got \(2, 3\)"),
    "logits as an action": (logits, CHOICE, r"expected \(2,\) .*, got \(2, 3\)"),
    "real numbers": (lambda x: torch.zeros(N), CHOICE, "wrong dtype : expected integers, got torch.float32"),
    "integers": (
        lambda x: torch.zeros(N, 2, dtype=torch.int64),
        MOVE,
        "wrong dtype : expected floating point, got torch.int64",
    ),
    "extras without rows": (
        lambda x: {"action": x[:, 0].long() * 0, "value": torch.zeros(())},
        CHOICE,
        "the policy's value must have one row for each of 2 env copies",
    ),
    "an index that is out of range": (lambda x: x[:, 0].long() + 3, CHOICE, "action of env copy 0 is out of range"),
    "an action that is NaN": (lambda x: NAN[:, :2], MOVE, "action of env copy 0 is not finite"),
    "logits that are NaN": (lambda x: {"logits": NAN}, CHOICE, "gave NaN for env copy 0 at step 0"),
    "loc that is NaN": (lambda x: {"loc": NAN[:, :2], "scale": torch.ones(N, 2)}, MOVE, "not finite"),
    "a scale without a row for each copy": (
        lambda x: {"loc": x[:, :2], "scale": torch.ones(2)},  # as many numbers as copies
        MOVE,
        "scale must have one row for each env copy, as loc does : expected 2 dimensions for one step, got 1",
    ),
    "NaN in a TensorDict actor": (
        tensordict_actor(lambda x: logits(x) / (x[:, :1] < 1), return_log_prob=True),
        CHOICE,
        "gave NaN for env copy 1",
    ),
    "NaN in a TensorDict actor without log-probabilities": (
        tensordict_actor(lambda x: logits(x) / (x[:, :1] < 1)),
        CHOICE,
        "gave NaN for env copy 1",
    ),
    "no action": (lambda x: {"value": x}, CHOICE, r"without an action : expected 'action', .* got \['value'\]"),
    "a missing part": (
        lambda x: {"action": {"a": x[:, 0].long() * 0}},
        spaces.Dict(a=CHOICE, b=MOVE),
        r"the policy gave no action.b : expected the leaves of the action space, got \['action.a'\]",
    ),
    "nothing": (lambda x: None, CHOICE, "the policy returned no action : expected a tensor, .* got NoneType"),
    "an action that is a text": (
        lambda x: {"action": "left"},
        CHOICE,
        "the policy's action cannot be stored : expected a tensor or an array of numbers, got str",
    ),
    "an extra that is nothing": (
        lambda x: {"action": x[:, 0].long(), "deep": {"x": None}},
        CHOICE,
        "the policy's deep.x cannot be stored : .* got NoneType",
    ),
    "a number as a name": (lambda x: {"action": x[:, 0].long(), 3: x}, CHOICE, "returned a value under 3 : expected a"),
    "a taken name": (lambda x: {"action": x, "done": x}, CHOICE, r"returned \['done'\], names that the batch itself"),
    "a taken name with parameters": (lambda x: {"logits": x, "next": x}, CHOICE, r"returned \['next'\], names"),
    "the observation's name": (
        lambda x: {"action": x[:, 0].long(), "observation": x},
        CHOICE,
        r"returned \['observation'\], names",
    ),
    "a taken name of a TensorDict module": (tensordict_actor(logits, "done"), CHOICE, r"\['done'\], names"),
    "a taken place of a TensorDict module": (tensordict_actor(logits, ("next", "x")), CHOICE, r"\['next'\], names"),
}


@pytest.mark.parametrize(("policy", "action_space", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_answer_raises_and_says_what_was_expected(policy, action_space, message):
    with pytest.raises(FrameContractError, match=message):
        collect(policy, action_space)


@pytest.mark.parametrize(
    "policy",
    [
        lambda x: {"logits": torch.zeros(1, 2)},
        lambda x: distributions.Categorical(logits=torch.zeros(1, 2)),
        lambda x: distributions.Bernoulli(logits=torch.zeros(1)),
    ],
    ids=["parameters", "a known distribution", "any distribution"],
)
def test_log_prob_does_not_take_the_place_of_an_observation(policy):
    def make() -> gymnasium.Env:
        box = spaces.Box(-1, 1, (2,))
        observation_space = spaces.Dict(log_prob=box, other=box)
        nothing = {"log_prob": np.zeros(2, np.float32), "other": np.zeros(2, np.float32)}
        return ScriptedEnv([nothing] * 2, [0.0], observation_space=observation_space)

    message = r"returned \['log_prob'\], names that the batch itself takes"
    with Collector(make, policy, frames_per_batch=4) as collector, pytest.raises(FrameContractError, match=message):
        collector.collect()


def test_one_scale_for_one_copy_and_one_dimension_raises():
    def policy(observation: Tensor) -> dict[str, Tensor]:
        return {"loc": observation[:, :1], "scale": torch.ones(1)}

    one = partial(CountingEnv, action_space=spaces.Box(-1, 1, (1,)))
    message = "scale must have one row for each env copy"  # its steps fit, its log-probability would not
    with Collector(one, policy, frames_per_batch=4) as collector, pytest.raises(FrameContractError, match=message):
        collector.collect()


@pytest.mark.parametrize("extra", [torch.zeros(N), np.zeros(N)], ids=["tensor", "array"])
def test_answer_that_lacks_what_it_had_at_first_raises(extra):
    calls = []

    def policy(observation: Tensor) -> dict[str, Any]:
        calls.append(observation)
        return {"action": observation[:, 0].long(), **({"value": extra} if len(calls) < 3 else {})}

    with pytest.raises(
        FrameContractError, match=r"the policy's answer lacks 'value' : expected \['action', 'value'\] each"
    ):
        collect(policy)


def test_answer_whose_shape_changes_raises():
    with pytest.raises(FrameContractError, match=r"value changed its shape : expected \(2, 1\), got \(2, 2\)"):
        collect(lambda x: {"action": x[:, 0].long() * 0, "value": torch.zeros(N, 1 + int(x[0, 2] > 0))})


class Builds(PolicyFactory):
    """Builds whatever it was given."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __call__(self) -> Any:
        return self.policy


@pytest.mark.parametrize("policy", [nn.Linear, RandomPolicy, Builds, 3, "policy", {"action": 1}], ids=repr)
def test_what_cannot_act_raises(policy):
    message = "policy cannot act : expected an nn.Module, a callable, a PolicyFactory or None, got "
    with pytest.raises(TypeError, match=message):
        collect(policy)
    with pytest.raises(TypeError, match=message):
        collect(Builds(policy))


@pytest.mark.parametrize("built", [None, Builds(None)], ids=["nothing", "another factory"])
def test_factory_that_builds_no_policy_raises(built):
    with pytest.raises(TypeError, match=r"policy cannot act : expected a PolicyFactory to build one, got .* from it"):
        collect(Builds(built))


NARROW = [(spaces.MultiBinary(2), 256), (spaces.MultiDiscrete([3, 3], np.int8), 257)]


@pytest.mark.parametrize(("space", "index"), NARROW)
def test_an_index_that_a_narrow_dtype_would_turn_into_a_right_one_is_out_of_range(space, index):
    with pytest.raises(FrameContractError, match="out of range"):
        collect(lambda x: torch.full((N, 2), index), space)


def test_an_integer_beyond_a_narrow_box_is_clipped_for_the_env_and_kept_in_the_batch():
    envs = [CountingEnv(index, action_space=spaces.Box(0, 9, (1,), np.int8)) for index in range(N)]
    with Collector(
        [partial(lambda env: env, env) for env in envs], lambda x: torch.full((N, 1), 300), frames_per_batch=N
    ) as collector:
        assert collector.collect()["action"].tolist() == [[[300]]] * N
    assert [env.actions[0].tolist() for env in envs] == [[9]] * N


class Remembers(nn.Module):
    """Wants a state, and does not say where to begin."""

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return observation[:, 0].long() * 0, state


@pytest.mark.parametrize(
    ("policy", "got"),
    [
        (lambda: nn.Linear(3, 3), r"too many positional arguments for parameters \(\); what builds a policy must be"),
        (Remembers(), "missing a required argument: 'state' .* one with a state has initial_state"),
        (partial(lambda scale, x: x, 2.0, torch.ones(N)), "too many positional arguments"),
        (lambda x, *, temperature: x, "missing a required argument: 'temperature'"),
    ],
    ids=["builds one", "no initial_state", "nothing left free", "needs a keyword"],
)
def test_what_takes_no_observation_raises_before_any_env_moves(policy, got):
    with pytest.raises(TypeError, match=rf"policy cannot be called : expected policy\(observation\) to do, got {got}"):
        Collector([CountingEnv], policy, frames_per_batch=4)


def test_recurrent_policy_that_takes_no_state_raises():
    policy = Remembers()
    policy.forward = lambda observation: observation  # type: ignore[method-assign]
    policy.initial_state = lambda count: torch.zeros(count, 1)  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"expected policy\(observation, state\) to do, got too many positional"):
        Collector([CountingEnv], policy, frames_per_batch=4)


def test_state_under_next_without_initial_state_raises_and_says_what_is_missing():
    policy = TensorDictModule(lambda x: (x[:, 0].long() * 0, x), ["observation"], ["action", ("next", "memory")])
    with pytest.raises(FrameContractError, match=r"returned \['next'\], .* give a recurrent policy its initial_state"):
        collect(policy)
