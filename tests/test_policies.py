"""Every kind of policy acts as its author meant it, and is left as it was found."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, distributions, nn
from torch.nn.modules.module import register_module_forward_hook as every_module

from lit_collect.config import RolloutConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.frames import check_batch
from lit_collect.policies import PolicyFactory, RandomPolicy
from lit_collect.seeding import Placement, RandomStream, acting_seed
from lit_collect.testing import ConstantPolicy, CountingEnv, ScriptedEnv
from lit_collect.worker import WorkerSpec, build_runner

N, T, SEED = 2, 8, 5
CHOICE, MOVE = spaces.Discrete(3), spaces.Box(-50, 50, (2,), np.float32)
EXPLORATIONS = ("random", "mode", "mean", "deterministic")


def runner(policy: Any, action_space: spaces.Space = CHOICE, envs: Any = None, **options: Any):
    envs = envs or [partial(CountingEnv, index, (3,), action_space=action_space) for index in range(N)]
    source, place = resolve_env(envs), Placement(entropy=SEED)
    rollout = RolloutConfig(**options)
    return build_runner(WorkerSpec(source=source, policy=policy, rollout=rollout, num_envs=None, place=place))


def collect(policy: Any, action_space: spaces.Space = CHOICE, envs: Any = None, **options: Any) -> TensorDict:
    """One checked batch."""
    with closing(runner(policy, action_space, envs, **options)) as one:
        batch = one.collect(T, version=0)
    check_batch(batch)
    return batch


def draws(make: Callable[[Tensor], distributions.Distribution], seen: Tensor) -> Tensor:
    """What torch draws for these observations [N, T, ...], from the stream that acts in `runner`."""
    with RandomStream(acting_seed(SEED, "train", 0)).active():
        return torch.stack([make(seen[:, t]).sample() for t in range(T)], 1)


def extras(batch: TensorDict) -> set:
    """Keys that only the policy can have given."""
    own = {"observation", "action", "done", "terminated", "truncated", "is_init", "next", "collector"}
    return {key for key in batch.keys(True, True) if (key if isinstance(key, str) else key[0]) not in own}


def logits(observation: Tensor) -> Tensor:
    return torch.stack([observation[..., 2] - 1, observation[..., 0], torch.zeros_like(observation[..., 0])], -1)


def loc_scale(observation: Tensor) -> tuple[Tensor, Tensor]:
    loc = observation[..., 1:] / 2
    return loc, 0.1 + loc.abs()


class Net(nn.Module):
    """Answers with whatever is made of its output; the output is that of a linear layer."""

    def __init__(self, outputs: int = 3, answer: Callable[[Tensor], Any] = lambda out: out.argmax(-1)) -> None:
        super().__init__()
        self.layer = nn.Linear(3, outputs)
        self.answer = answer

    def forward(self, observation: Tensor) -> Any:
        return self.answer(self.layer(observation))


class Moody(nn.Module):
    """Has parts that act otherwise while training, one of them already in eval mode, and can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(3, 3).eval()
        self.modes: list[tuple[bool, ...]] = []
        self.fails_at: int | None = None

    def forward(self, observation: Tensor) -> Tensor:
        if len(self.modes) == self.fails_at:
            raise KeyError("broken policy")
        self.modes.append((self.training, self.norm.training, self.drop.training, torch.is_grad_enabled()))
        return self.head(self.drop(self.norm(observation))).argmax(-1)

    act = forward


# --- kinds of answers


def test_module_with_a_tensor_gives_the_action():
    policy = Net()
    batch = collect(policy)
    assert torch.equal(batch["action"], policy(batch["observation"]))
    assert batch["action"].dtype == torch.int64
    assert extras(batch) == set()


def test_mapping_with_an_action_stores_its_extras_as_they_are():
    policy = Net(
        answer=lambda out: {"action": out.argmax(-1), "value": out.sum(-1, keepdim=True), "memory": {"h": out}}
    )
    batch = collect(policy)
    out = policy.layer(batch["observation"])
    assert torch.equal(batch["action"], out.argmax(-1))
    torch.testing.assert_close(batch["value"], out.sum(-1, keepdim=True))
    torch.testing.assert_close(batch["memory", "h"], out)
    assert extras(batch) == {"value", ("memory", "h")}


def test_tensordict_as_an_answer_is_a_mapping():
    batch = collect(lambda x: TensorDict({"action": logits(x).argmax(-1), "value": x[:, :1]}, [N]))
    assert torch.equal(batch["action"], logits(batch["observation"]).argmax(-1))
    assert torch.equal(batch["value"], batch["observation"][..., :1])


@pytest.mark.parametrize("exploration", EXPLORATIONS)
def test_mapping_with_logits_draws_and_scores_the_action(exploration):
    batch = collect(lambda x: {"logits": logits(x), "memory": {"h": x}}, exploration=exploration)
    made = distributions.Categorical(logits=logits(batch["observation"]))
    random = draws(lambda x: distributions.Categorical(logits=logits(x)), batch["observation"])
    assert torch.equal(batch["action"], random if exploration == "random" else made.mode)
    torch.testing.assert_close(batch["log_prob"], made.log_prob(batch["action"]))
    assert torch.equal(batch["logits"], logits(batch["observation"]))
    assert torch.equal(batch["memory", "h"], batch["observation"])
    assert extras(batch) == {"logits", "log_prob", ("memory", "h")}


@pytest.mark.parametrize("exploration", EXPLORATIONS)
def test_mapping_with_loc_and_scale_draws_and_scores_the_action(exploration):
    batch = collect(lambda x: dict(zip(("loc", "scale"), loc_scale(x), strict=True)), MOVE, exploration=exploration)
    made = distributions.Normal(*loc_scale(batch["observation"]))
    random = draws(lambda x: distributions.Normal(*loc_scale(x)), batch["observation"])
    assert torch.equal(batch["action"], random if exploration == "random" else made.mean)
    torch.testing.assert_close(batch["log_prob"], made.log_prob(batch["action"]).sum(-1))
    assert extras(batch) == {"loc", "scale", "log_prob"}


DISTRIBUTIONS = {
    "Categorical": (lambda x: distributions.Categorical(logits=logits(x)), CHOICE),
    "Categorical of probs": (lambda x: distributions.Categorical(logits(x).softmax(-1)), CHOICE),
    "Normal": (lambda x: distributions.Normal(*loc_scale(x)), MOVE),
    "Independent": (lambda x: distributions.Independent(distributions.Normal(*loc_scale(x)), 1), MOVE),
    "Laplace": (lambda x: distributions.Laplace(*loc_scale(x)), MOVE),
    "Independent of another": (
        lambda x: distributions.Independent(distributions.Laplace(*loc_scale(x)), 1),
        MOVE,
    ),
    "Bernoulli": (lambda x: distributions.Bernoulli(logits=logits(x) + 0.5), spaces.MultiBinary(3)),
}


@pytest.mark.parametrize("exploration", ["random", "mode", "deterministic"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution_draws_and_scores_the_action(name, exploration):
    make, action_space = DISTRIBUTIONS[name]
    batch = collect(make, action_space, exploration=exploration)
    made = make(batch["observation"])
    expected = draws(make, batch["observation"]) if exploration == "random" else made.mode
    log_prob = made.log_prob(expected)
    assert torch.equal(batch["action"], expected.to(batch["action"].dtype))
    torch.testing.assert_close(batch["log_prob"], log_prob.sum(-1) if log_prob.ndim > 2 else log_prob)
    assert extras(batch) == {"log_prob"}


@pytest.mark.parametrize(
    "policy",
    [
        lambda x: logits(x).argmax(-1).numpy(),
        lambda x: {"action": logits(x).argmax(-1).numpy(), "value": x.numpy()[:, 0]},
        lambda x: logits(x).argmax(-1).int(),
    ],
    ids=["array", "mapping of arrays", "another integer"],
)
def test_callable_with_arrays_gives_the_action(policy):
    batch = collect(policy)
    assert torch.equal(batch["action"], logits(batch["observation"]).argmax(-1))


def test_callable_with_arrays_of_parameters_draws_what_tensors_draw():
    ours, theirs = collect(lambda x: {"logits": logits(x).numpy()}), collect(lambda x: {"logits": logits(x)})
    assert (ours == theirs).all()


def test_policies_that_hand_out_one_buffer_are_copied():
    buffer = torch.zeros(N, dtype=torch.int64)
    batch = collect(lambda x: buffer.copy_(logits(x).argmax(-1)))
    assert torch.equal(batch["action"], logits(batch["observation"]).argmax(-1))


def test_tensordict_module_that_cannot_be_lowered_gives_what_the_lowered_one_gives():
    def actor() -> ProbabilisticTensorDictSequential:
        return ProbabilisticTensorDictSequential(
            TensorDictModule(logits, ["observation"], ["logits"]),
            ProbabilisticTensorDictModule(
                ["logits"], ["action"], distribution_class=distributions.Categorical, return_log_prob=True
            ),
        )

    plain, hooked = actor(), actor()
    hooked.register_forward_hook(lambda module, args, out: out)
    ours, theirs = collect(plain), collect(hooked)
    assert torch.equal(
        ours["action"], draws(lambda x: distributions.Categorical(logits=logits(x)), ours["observation"])
    )
    assert extras(ours) == extras(theirs)
    torch.testing.assert_close(ours.to_dict(), theirs.to_dict())


@pytest.mark.parametrize("hooked", [False, True])
def test_tensordict_module_that_rewrites_its_observation_leaves_the_stored_one_alone(hooked):
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(lambda x: x / 100, ["observation"], ["observation"]),
        TensorDictModule(logits, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=distributions.Categorical),
    )
    if hooked:
        policy.register_forward_hook(lambda module, args, out: out)
    batch = collect(policy)
    assert batch["observation"][0, :, 2].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert torch.equal(batch["logits"], logits(batch["observation"] / 100))


@pytest.mark.parametrize("register", [nn.Module.register_forward_hook, lambda _, hook: every_module(hook)])
def test_hooks_of_a_module_are_called_also_those_that_come_later(register):
    policy, calls = Net(), []
    with closing(runner(policy)) as one:
        one.collect(T, version=0)
        handle = register(policy, lambda module, args, out: calls.append(module))
        try:
            one.collect(T, version=0)
        finally:
            handle.remove()
        one.collect(T, version=0)
    assert calls.count(policy) == T


# --- random actions and factories


@pytest.mark.parametrize("action_space", [CHOICE, MOVE, spaces.Dict(a=CHOICE, b=MOVE)], ids=["one", "box", "dict"])
def test_no_policy_acts_at_random_and_as_random_policy_does(action_space):
    ours, theirs = collect(None, action_space), collect(RandomPolicy(), action_space)
    assert (ours == theirs).all()
    choices = ours["action"]["a"] if isinstance(action_space, spaces.Dict) else ours["action"]
    assert len(choices.unique()) > 2


def test_policy_factory_is_called_once_and_its_policy_acts():
    class Factory(PolicyFactory):
        calls = 0

        def __call__(self) -> nn.Module:
            self.calls += 1
            return ConstantPolicy(2.0, num_actions=3)

    factory = Factory()
    assert collect(factory)["action"].unique().tolist() == [2]
    assert factory.calls == 1


# --- how it acts


@pytest.mark.parametrize("method", [False, True])
@pytest.mark.parametrize("exploration", ["random", "deterministic"])
def test_module_acts_in_eval_mode_without_gradients_whatever_the_exploration(method, exploration):
    policy = Moody()
    statistics = {name: tensor.clone() for name, tensor in policy.norm.named_buffers()}
    with closing(runner(policy.act if method else policy, exploration=exploration)) as one:
        batches = [one.collect(T, version=0) for _ in range(2)]
    assert policy.modes == [(False, False, False, False)] * 2 * T
    assert (policy.training, policy.norm.training, policy.drop.training) == (True, True, True)
    assert not policy.head.training  # as it was before
    assert torch.is_grad_enabled()
    assert all(torch.equal(statistics[name], tensor) for name, tensor in policy.norm.named_buffers())
    for batch in batches:
        assert torch.equal(batch["action"], policy.eval()(batch["observation"].flatten(0, 1)).view(N, T))


@pytest.mark.parametrize("fails_at", [0, T + 1])  # in the first batch and in a later one
def test_module_gets_its_modes_back_after_an_exception(fails_at):
    policy = Moody()
    with closing(runner(policy)) as one:
        policy.fails_at = fails_at
        with pytest.raises(Exception, match="broken policy"):  # noqa: PT012  # which batch raises is the parameter
            one.collect(T, version=0)
            one.collect(T, version=0)
        assert (policy.training, policy.norm.training, policy.drop.training) == (True, True, True)
        assert not policy.head.training
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        policy.fails_at = None
        check_batch(one.collect(T, version=0))


def test_batches_can_be_trained_on_after_acting_without_gradients():
    policy = Net()
    with closing(runner(policy)) as one:
        for _ in range(2):
            batch = one.collect(T, version=0)
            policy.layer(batch["observation"]).gather(-1, batch["action"][..., None]).sum().backward()
    assert not any(value.is_inference() or value.requires_grad for value in batch.values(True, True))
    assert policy.layer.weight.grad is not None


def test_acting_has_random_numbers_of_its_own():
    def policy(observation: Tensor) -> Tensor:  # draws from every global generator
        torch.rand(1), np.random.rand()
        return (3 * torch.rand(N) + np.random.rand()).long() % 3

    def collect_after(seed: int) -> tuple[TensorDict, Tensor, float]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        return collect(policy), torch.rand(1), np.random.rand()

    states = torch.get_rng_state(), np.random.get_state()
    (first, *outside), (second, *_) = collect_after(1), collect_after(2)
    torch.manual_seed(1)
    np.random.seed(1)
    assert [torch.rand(1), np.random.rand()] == outside
    assert (first == second).all()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])


class Chooses(nn.Module):
    """A net for scripts: what it returns has a type that they can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(observation)}


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda policy: torch.jit.freeze(torch.jit.script(policy.eval()))])
def test_a_script_acts_as_the_module_that_it_was_made_of(make):
    module = Chooses()
    batch = collect(make(module))
    with torch.no_grad():
        assert torch.allclose(batch["logits"], module(batch["observation"])["logits"])


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_observation_of_several_arrays_arrives_as_a_mapping(kind, hooked):
    eye, gear = spaces.Box(0, 9, (2,), np.float32), spaces.Discrete(4)
    if kind == "dict":
        space = spaces.Dict({"eye": eye, "body": spaces.Dict({"gear": gear})})
        values = [{"eye": np.full(2, t, np.float32), "body": {"gear": np.int64(t)}} for t in range(4)]
    else:
        space, values = spaces.Tuple((eye, gear)), [(np.full(2, t, np.float32), np.int64(t)) for t in range(4)]

    def policy(observation: Any) -> Tensor:
        assert observation.keys() == ({"eye", "body"} if kind == "dict" else {"0", "1"})
        one, other = (observation["eye"], observation["body"]["gear"]) if kind == "dict" else observation.values()
        assert one.shape == (N, 2)
        assert torch.equal(one[:, 0].long(), other)
        return other % 3

    batch = collect(
        policy, envs=[partial(ScriptedEnv, values, [1, 2, 3], observation_space=space, action_space=CHOICE)] * N
    )
    key = ("body", "gear") if kind == "dict" else ("observation", "1")
    assert batch[key].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]] * N
    assert torch.equal(batch["action"], batch[key] % 3)
