"""What is lowered gives what tensordict gives, to the bit; what is not of the standard kind is left alone."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_composite_lp_aggregate,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import distributions, nn

from lit_collect.actors import TensorDictActor
from lit_collect.envs.spaces import TreeSpec
from lit_collect.lowering import lower
from lit_collect.policies import make_actor

N, STEPS = 5, 4
EXPLORATIONS = ("random", "mode", "mean", "deterministic")
BOX = TreeSpec.of(spaces.Box(-1, 1, (4,), np.float32), "observation")
SPLIT = TreeSpec.of(
    spaces.Dict({"agent": spaces.Dict({"near": spaces.Box(-1, 1, (4,)), "far": spaces.Box(-1, 1, (4,))})}),
    "observation",
)
DISCRETE = TreeSpec.of(spaces.Discrete(3), "action")
VECTOR = TreeSpec.of(spaces.Box(-1, 1, (2,), np.float32), "action")


class LocScale(nn.Module):
    """Two outputs of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.log_std = nn.Parameter(torch.tensor([-0.5, 0.3]))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loc = self.net(observation)
        return loc, self.log_std.exp().expand_as(loc)


class Twice(nn.Module):
    """A module with a second method, and with answers by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(observation)
        return {"value": logits.sum(-1, keepdim=True), "logits": logits}

    def other(self, observation: torch.Tensor) -> torch.Tensor:
        return -self.net(observation)


class OwnModule(TensorDictModule):
    """May do anything in its forward."""


def logits() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"])


def draw(**options) -> ProbabilisticTensorDictModule:
    """The last module of a categorical actor."""
    return ProbabilisticTensorDictModule(
        **{"in_keys": ["logits"], "out_keys": ["action"], "distribution_class": distributions.Categorical, **options}
    )


def normal(**options) -> ProbabilisticTensorDictModule:
    options = {"in_keys": ["loc", "scale"], "out_keys": ["action"], **options}
    return ProbabilisticTensorDictModule(distribution_class=distributions.Normal, **options)


def nested() -> TensorDictModuleBase:
    body = TensorDictModule(nn.Linear(4, 6), ["observation"], ["hidden"])
    head = TensorDictModule(nn.Linear(6, 3), ["hidden"], ["logits"])
    value = TensorDictModule(nn.Linear(6, 1), ["hidden"], ["state_value"])
    return ProbabilisticTensorDictSequential(
        TensorDictSequential(TensorDictSequential(body, head), value), draw(return_log_prob=True)
    )


def nested_keys() -> TensorDictModuleBase:
    class Sum(nn.Module):
        def forward(self, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
            return (near + 2 * far)[..., :3]

    module = TensorDictModule(Sum(), [("agent", "far"), ("agent", "near")], [("agent", "logits")])
    return TensorDictSequential(module, draw(in_keys={"logits": ("agent", "logits")}))


LOWERED: dict[str, tuple[Callable[[], TensorDictModuleBase], TreeSpec, TreeSpec]] = {
    "deterministic": (
        lambda: TensorDictModule(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), ["observation"], ["action"]),
        BOX,
        VECTOR,
    ),
    "categorical": (lambda: TensorDictSequential(logits(), draw()), BOX, DISCRETE),
    "categorical with its log-probability": (
        lambda: ProbabilisticTensorDictSequential(logits(), draw(return_log_prob=True)),
        BOX,
        DISCRETE,
    ),
    "a key of one's own for the log-probability": (
        lambda: ProbabilisticTensorDictSequential(logits(), draw(return_log_prob=True, log_prob_key="lp")),
        BOX,
        DISCRETE,
    ),
    "nested sequences with several outputs": (nested, BOX, DISCRETE),
    "nested keys": (nested_keys, SPLIT, DISCRETE),
    "normal of two outputs of one module": (
        lambda: ProbabilisticTensorDictSequential(
            TensorDictModule(LocScale(), ["observation"], ["loc", "scale"]), normal(return_log_prob=True)
        ),
        BOX,
        VECTOR,
    ),
    "parameters under other names": (
        lambda: ProbabilisticTensorDictSequential(
            TensorDictModule(LocScale(), ["observation"], ["mu", "sigma"]),
            normal(in_keys={"scale": "sigma", "loc": "mu"}),
        ),
        BOX,
        VECTOR,
    ),
    "a module that answers by name": (
        lambda: TensorDictSequential(TensorDictModule(Twice(), ["observation"], ["logits", "value"]), draw()),
        BOX,
        DISCRETE,
    ),
    "a function as a module": (
        lambda: TensorDictSequential(TensorDictModule(lambda x: x[:, :3] * 2, ["observation"], ["logits"]), draw()),
        BOX,
        DISCRETE,
    ),
}


def with_hook(module: TensorDictModuleBase, part: str = "") -> TensorDictModuleBase:
    module.get_submodule(part).register_forward_hook(lambda module, args, out: out)
    return module


def with_a_sample_given_before() -> TensorDictModuleBase:
    given = TensorDictModule(lambda x: torch.zeros(len(x), dtype=torch.int64), ["observation"], ["action"])
    return ProbabilisticTensorDictSequential(logits(), given, draw())


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "no TensorDict module": lambda: nn.Linear(4, 3),
    "a subclass": lambda: TensorDictSequential(OwnModule(nn.Linear(4, 3), ["observation"], ["logits"]), draw()),
    "a hook on the whole": lambda: with_hook(TensorDictSequential(logits(), draw())),
    "a hook on a wrapper": lambda: with_hook(TensorDictSequential(logits(), draw()), "module.0"),
    "a hook on the draw": lambda: with_hook(TensorDictSequential(logits(), draw()), "module.1"),
    "inputs by keyword": lambda: TensorDictSequential(
        TensorDictModule(nn.Linear(4, 3), {"input": "observation"}, ["logits"]), draw()
    ),
    "another method": lambda: TensorDictSequential(
        TensorDictModule(Twice(), ["observation"], ["logits"], method="other"), draw()
    ),
    "selected outputs": lambda: TensorDictSequential(
        logits(), TensorDictModule(nn.Linear(4, 1), ["observation"], ["value"]), draw(), selected_out_keys=["action"]
    ),
    "options of the distribution": lambda: TensorDictSequential(
        logits(), draw(distribution_kwargs={"validate_args": False})
    ),
    "several samples": lambda: TensorDictSequential(logits(), draw(num_samples=2)),
    "a generator of its own": lambda: TensorDictSequential(logits(), draw(generator=torch.Generator())),
    "a generator in the data": lambda: TensorDictSequential(logits(), draw(generator="generator")),
    "another distribution": lambda: TensorDictSequential(logits(), draw(distribution_class=distributions.Bernoulli)),
    "another parameter": lambda: TensorDictSequential(
        TensorDictModule(nn.Softmax(-1), ["observation"], ["probs"]), draw(in_keys=["probs"])
    ),
    "partial tolerance": lambda: TensorDictSequential(logits(), draw(), partial_tolerant=True),
    "an action given before the draw": with_a_sample_given_before,
    "outputs selected later": lambda: TensorDictSequential(logits(), draw()).select_out_keys("action"),
    "a draw in the middle": lambda: TensorDictSequential(
        logits(), draw(out_keys=["latent"]), TensorDictModule(nn.Identity(), ["latent"], ["action"])
    ),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Build and draw from a state of our own and put the old one back."""
    before = torch.get_rng_state()
    torch.manual_seed(11)
    yield
    torch.set_rng_state(before)


def observations(spec: TreeSpec) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(torch.randn(N, *leaf.shape) for leaf in spec.leaves) for _ in range(STEPS)]


def by_tensordict(policy, spec, seen, exploration) -> TensorDict:
    """What tensordict itself makes of these observations, one after the other."""
    with torch.no_grad(), set_interaction_type(InteractionType.from_str(exploration)):
        steps = [
            policy(TensorDict(dict(zip([leaf.key for leaf in spec.leaves], leaves, strict=True)), [N]))
            for leaves in seen
        ]
    return torch.stack(steps).select(*policy.out_keys)


def by_actor(actor, seen) -> TensorDict:
    """What an actor makes of them, with what it completes at the end of a batch."""
    with actor.acting():
        steps = [actor(leaves) for leaves in seen]
        columns = {key: torch.stack(values) for key, values in zip(actor.keys, zip(*steps, strict=True), strict=True)}
        return TensorDict({**columns, **actor.complete(columns)}, [STEPS, N])


def assert_same(ours: TensorDict, theirs: TensorDict) -> None:
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        torch.testing.assert_close(ours[key], theirs[key])  # integers must be equal, floats to rounding


@pytest.mark.parametrize("exploration", EXPLORATIONS)
@pytest.mark.parametrize("name", LOWERED)
def test_lowered_actor_gives_what_tensordict_gives(name, exploration):
    build, observation_spec, action_spec = LOWERED[name]
    policy = build()
    if exploration == "mean" and lower(policy).parameters and action_spec is DISCRETE:
        exploration = "mode"  # a categorical has no mean: see below
    seen = observations(observation_spec)
    actor = make_actor(policy, observation_spec, action_spec, exploration=exploration, seed=0)
    assert isinstance(actor, TensorDictActor)
    assert actor.lowered
    state = torch.get_rng_state()
    theirs = by_tensordict(policy, observation_spec, seen, exploration)
    torch.set_rng_state(state)
    assert_same(by_actor(actor, seen), theirs)


def test_lowered_categorical_has_its_mode_for_a_mean():
    # torch's own mean of a Categorical is NaN, which no env could take.
    policy, seen = TensorDictSequential(logits(), draw()), observations(BOX)
    mean = by_actor(make_actor(policy, BOX, DISCRETE, exploration="mean", seed=0), seen)
    assert torch.equal(mean["action"], by_tensordict(policy, BOX, seen, "mode")["action"])


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("build", [nested, LOWERED["categorical with its log-probability"][0]], ids=["nested", "flat"])
def test_lowered_log_probability_has_the_name_that_tensordict_gives_it(aggregate, build):
    with set_composite_lp_aggregate(aggregate):
        policy, seen = build(), observations(BOX)
        state = torch.get_rng_state()
        theirs = by_tensordict(policy, BOX, seen, "random")
        torch.set_rng_state(state)
        assert {"sample_log_prob" if aggregate else "action_log_prob"} <= set(theirs.keys())
        assert_same(by_actor(make_actor(policy, BOX, DISCRETE, exploration="random", seed=0), seen), theirs)


def test_lowered_actor_acts_with_the_weights_of_the_moment():
    policy = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action"])
    actor, seen = make_actor(policy, BOX, VECTOR, exploration="random", seed=0), observations(BOX)
    before = by_actor(actor, seen)
    with torch.no_grad():
        policy.module.weight.mul_(2)
    assert not torch.equal(by_actor(actor, seen)["action"], before["action"])
    assert_same(by_actor(actor, seen), by_tensordict(policy, BOX, seen, "random"))


def test_lowered_actor_calls_the_hooks_of_its_inner_modules():
    policy, calls = TensorDictSequential(logits(), draw()), []
    policy[0].module.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    by_actor(make_actor(policy, BOX, DISCRETE, exploration="random", seed=0), observations(BOX))
    assert calls == [N] * STEPS


def test_lowered_modules_that_ask_for_the_interaction_type_are_told():
    policy = TensorDictModule(
        lambda x: x[:, :2] * (interaction_type() is InteractionType.MODE), ["observation"], ["action"]
    )
    seen = observations(BOX)
    for exploration, factor in (("mode", 1), ("random", 0)):
        out = by_actor(make_actor(policy, BOX, VECTOR, exploration=exploration, seed=0), seen)["action"]
        assert torch.equal(out, factor * torch.stack([leaves[0][:, :2] for leaves in seen]))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_not_of_the_standard_kind_is_left_alone(name):
    assert lower(LEFT_ALONE[name]()) is None


@pytest.mark.parametrize("exploration", EXPLORATIONS)
@pytest.mark.parametrize(
    "name",
    [
        "a subclass",
        "a hook on the draw",
        "inputs by keyword",
        "another method",
        "selected outputs",
        "outputs selected later",
        "partial tolerance",
        "an action given before the draw",
        "a draw in the middle",
    ],
)
def test_what_is_left_alone_acts_as_tensordict_does(name, exploration):
    policy, seen = LEFT_ALONE[name](), observations(BOX)
    actor = make_actor(policy, BOX, DISCRETE, exploration=exploration, seed=0)
    assert isinstance(actor, TensorDictActor)
    assert not actor.lowered
    state = torch.get_rng_state()
    theirs = by_tensordict(policy, BOX, seen, exploration)
    torch.set_rng_state(state)
    ours = by_actor(actor, seen)
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        # to rounding: the small nets within act in NumPy here as well
        torch.testing.assert_close(ours[key], theirs[key], equal_nan=True)


def test_actor_that_needs_what_is_not_observed_is_left_to_tensordicts_error():
    policy = TensorDictModule(nn.Linear(4, 3), ["pixels"], ["action"])
    actor = make_actor(policy, BOX, VECTOR, exploration="random", seed=0)
    assert isinstance(actor, TensorDictActor)
    assert not actor.lowered
    with pytest.raises(KeyError, match="pixels"):
        by_actor(actor, observations(BOX))
