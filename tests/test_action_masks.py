"""Who is given an action mask, what becomes of it, and what is said where there is none."""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import Tensor, distributions, nn

import lit_collect
from lit_collect.actors import RandomActor
from lit_collect.calls import taken_argument
from lit_collect.envs.spaces import LeafSpec, TreeSpec
from lit_collect.errors import FrameContractError
from lit_collect.policies import PolicyFactory, make_actor
from lit_collect.sampling import log_prob_categorical, masked_logits, sample_allowed, sample_categorical

N = 4
BOX = TreeSpec.of(spaces.Box(-1, 1, (3,), np.float32), "observation")
CHOICE = TreeSpec.of(spaces.Discrete(5, start=3), "action")
CHOICES = TreeSpec.of(spaces.MultiDiscrete([[2, 3], [4, 1]]), "action")
SEEN = torch.arange(3.0 * N).view(N, 3)


def mask_leaf(actions: int = 5) -> LeafSpec:
    space = spaces.Box(0, 1, (actions,), np.bool_)
    kind = np.dtype(bool)
    return LeafSpec(path=("action_mask",), key=("action_mask",), space=space, shape=(actions,), dtype=kind, stored=kind)


def speed_leaf() -> LeafSpec:
    space, kind = spaces.Box(-1, 1, ()), np.dtype(np.float32)
    return LeafSpec(path=("speed",), key=("speed",), space=space, shape=(), dtype=kind, stored=kind)


def actor_of(policy: Any, *leaves: LeafSpec, observation: TreeSpec = BOX, action: TreeSpec = CHOICE) -> Any:
    """An actor that has been told what comes with a step."""
    actor = make_actor(policy, observation, action, exploration="random", seed=0)
    actor.see([*observation.leaves, *leaves])
    return actor


def act(actor: Any, *leaves: Tensor) -> dict[str, Tensor]:
    with actor.acting():
        values = actor((SEEN, *leaves))
    return {".".join(key): value for key, value in zip(actor.keys, values, strict=True)}


# --- whose call takes it


class Takes(nn.Module):
    def forward(self, observation: Tensor, action_mask: Tensor) -> dict[str, Tensor]:
        return {"logits": masked_logits(torch.zeros(len(observation), 5), action_mask), "given": action_mask}

    def act(self, observation: Tensor, *, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        return self(observation, action_mask)


class Called:
    def __call__(self, observation: Tensor, action_mask: Tensor) -> Tensor:
        return observation


class Own(nn.Module):
    def __call__(self, observation: Tensor, action_mask: Tensor) -> Tensor:  # type: ignore[override]
        return observation


def optional(observation: Tensor, action_mask: Tensor | None = None) -> Tensor:
    return observation


TAKEN: dict[str, tuple[Any, str]] = {
    "a module": (Takes(), "required"),
    "a method": (Takes().act, "optional"),
    "a callable object": (Called(), "required"),
    "a module that is called otherwise": (Own(), "required"),
    "a function": (optional, "optional"),
    "a partial module": (partial(Takes()), "required"),
    "a partial that gives it": (partial(Takes(), action_mask=None), "no"),
    "a compiled module": (torch.compile(Takes(), backend="eager"), "required"),
    "a compiled function": (torch.compile(optional, backend="eager"), "optional"),
    "a partial compiled module": (partial(torch.compile(Takes(), backend="eager")), "required"),
    "another name": (lambda observation, mask: observation, "no"),
    "any name": (lambda observation, **others: observation, "no"),
    "a position": (lambda observation, action_mask, /: observation, "no"),
    "many": (lambda *action_mask: action_mask, "no"),
    "what does not tell": (print, "no"),
    "a built-in without a signature": (getattr, "no"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_parameter_of_a_call_is_found(name):
    policy, taken = TAKEN[name]
    assert taken_argument(policy, "action_mask") == taken


def test_parameter_that_a_partial_filled_by_position_is_taken():
    assert taken_argument(partial(partial(optional, 1), 2), "action_mask") == "no"
    assert taken_argument(partial(partial(optional), 1), "action_mask") == "optional"


class Builds(PolicyFactory):
    def __call__(self) -> Any:
        return Takes()


@pytest.mark.parametrize(
    "policy",
    [Takes(), Takes().act, partial(Takes()), torch.compile(Takes(), backend="eager"), Builds()],
    ids=["module", "method", "partial", "compiled", "factory"],
)
def test_policy_is_given_the_mask_by_keyword_as_bools(policy):
    mask = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.int8)
    out = act(actor_of(policy, speed_leaf(), mask_leaf()), torch.zeros(N), mask)
    assert out["given"].dtype is torch.bool
    assert torch.equal(out["given"], mask.bool())
    assert out["action"].tolist() == [0, 1, 3, 4]


def test_policy_that_takes_no_mask_is_called_with_the_observation_alone():
    seen: list[Any] = []
    out = act(actor_of(lambda x: seen.append(x) or x[:, 0].long(), mask_leaf()), torch.ones(N, 5, dtype=torch.bool))
    assert torch.equal(seen[0], SEEN)
    assert out.keys() == {"action"}


def test_mapping_of_an_observation_does_not_hold_what_comes_with_the_info():
    observation = TreeSpec.of(spaces.Dict(a=spaces.Box(-1, 1, (3,)), b=spaces.Box(-1, 1, (3,))), "observation")
    seen: list[Any] = []
    actor = actor_of(lambda x: seen.append(x) or x["a"][:, 0].long(), mask_leaf(), observation=observation)
    act(actor, SEEN + 1, torch.ones(N, 5, dtype=torch.bool))
    assert list(seen[0]) == ["a", "b"]


def test_optional_mask_is_left_out_where_there_is_none():
    seen: list[Any] = []

    def policy(observation: Tensor, action_mask: Any = "none") -> Tensor:
        seen.append(action_mask)
        return observation[:, 0].long()

    act(actor_of(policy))
    assert seen == ["none"]


MISSING = "policy takes an action_mask, but the env's reset info has none : expected an array 'action_mask'"


def test_mask_that_is_needed_and_not_there_is_asked_for():
    actor = actor_of(Takes())
    with pytest.raises(FrameContractError, match=MISSING):
        act(actor)


def test_tensordict_module_finds_the_mask_under_its_key():
    policy = TensorDictModule(lambda x, mask: mask.int().argmax(-1), ["observation", "action_mask"], ["action"])
    actor = actor_of(policy, mask_leaf())
    assert actor.lowered
    assert act(actor, torch.eye(5, dtype=torch.bool)[:N])["action"].tolist() == [0, 1, 2, 3]
    with pytest.raises(FrameContractError, match=MISSING):
        actor_of(policy)


def test_answer_may_not_have_the_name_of_an_info_value():
    actor = actor_of(lambda x: {"action": x[:, 0].long(), "speed": x}, speed_leaf())
    with pytest.raises(FrameContractError, match=r"returned \['speed'\], names that the batch itself takes"):
        act(actor, torch.zeros(N))


# --- random actions


def test_random_actions_are_uniform_among_the_allowed_ones():
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 1], [1, 0, 1, 1, 0]]).bool()
    actor, counts = actor_of(None, mask_leaf()), [Counter() for _ in range(N)]
    for _ in range(3000):
        for count, action in zip(counts, actor((SEEN, mask))[0].tolist(), strict=True):
            count[action] += 1
    for count, allowed in zip(counts, mask, strict=True):
        choices = allowed.nonzero().flatten().tolist()
        assert sorted(count) == choices
        assert all(abs(times - 3000 / len(choices)) < 150 for times in count.values())  # about 6 deviations


def test_random_choices_are_each_allowed_and_have_the_shape_of_their_space():
    mask = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 1, 0, 1], [1, 0, 0, 1, 1, 1, 0, 0, 1, 1]]).bool().repeat(2, 1)
    actor, drawn = actor_of(None, mask_leaf(10), action=CHOICES), []
    for _ in range(200):
        (action,) = actor((SEEN, mask))
        assert action.shape == (N, 2, 2)
        assert action.dtype is torch.int64
        drawn.append(action)
    first = torch.stack(drawn)[:, 0]
    assert {tuple(sorted(first[:, i, j].unique().tolist())) for i in (0, 1) for j in (0, 1)} == {(1,), (0,), (1, 2)}


def test_random_actions_without_a_mask_are_those_of_their_seed_as_before():
    rng = np.random.default_rng(0)
    actor = actor_of(None, speed_leaf())
    for _ in range(3):
        assert actor((SEEN, torch.zeros(N)))[0].tolist() == rng.integers(0, 5, N).tolist()


def test_mask_that_forbids_everything_is_an_error_that_names_the_copy():
    mask = torch.ones(N, 5, dtype=torch.bool)
    mask[2] = False
    actor = RandomActor(CHOICE, 0, first=8)
    actor.see([*BOX.leaves, mask_leaf()])
    with pytest.raises(FrameContractError, match="action_mask of env copy 10 forbids every action"):
        actor((SEEN, mask))


def test_mask_that_forbids_everything_does_not_matter_in_rows_that_may_be_no_transitions():
    actor = make_actor(None, BOX, CHOICE, exploration="random", seed=0, may_mask=True)
    actor.see([*BOX.leaves, mask_leaf()])
    drawn = torch.stack([actor((SEEN, torch.zeros(N, 5)))[0] for _ in range(100)])
    assert drawn.unique().tolist() == [0, 1, 2, 3, 4]


def test_mask_of_another_shape_is_an_error():
    actor = actor_of(None, mask_leaf(4))
    with pytest.raises(FrameContractError, match=r"action_mask has a wrong shape : expected \(5,\) .*, got \(4,\)"):
        actor((SEEN, torch.ones(N, 4)))


def test_mask_says_nothing_of_continuous_actions():
    action = TreeSpec.of(spaces.Box(-1, 1, (2,)), "action")
    assert actor_of(None, mask_leaf(), action=action)((SEEN, torch.zeros(N, 5)))[0].shape == (N, 2)


def test_allowed_indices_are_drawn_by_row():
    allowed = np.eye(6, dtype=bool)
    assert sample_allowed(allowed, np.random.default_rng(0)).tolist() == list(range(6))


# --- masked logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_masked_logits_are_never_drawn_and_stay_finite(dtype):
    logits, mask = torch.randn(2000, 6).to(dtype), torch.rand(2000, 6) < 0.5
    mask[:, 0] |= ~mask.any(-1)
    kept = logits.clone()
    masked = masked_logits(logits, mask)
    assert torch.equal(logits, kept)
    assert masked.dtype is dtype
    assert torch.equal(masked[mask], logits[mask])
    action = sample_categorical(masked)
    assert mask.gather(1, action[:, None]).all()
    assert log_prob_categorical(action, masked).isfinite().all()
    assert distributions.Categorical(logits=masked.float()).entropy().isfinite().all()


def test_masked_logits_are_public_and_take_numbers_for_masks():
    masked = lit_collect.masked_logits(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [2, 0, 0]]))
    assert masked.argmax(-1).tolist() == [1, 0]
    assert masked.softmax(-1)[1].tolist() == [1, 0, 0]


def test_logits_of_minus_infinity_are_never_drawn_and_the_drawn_ones_have_finite_log_probabilities():
    logits, mask = torch.randn(5000, 4), torch.rand(5000, 4) < 0.5
    mask[:, 1] |= ~mask.any(-1)
    policies = {
        "mapping": lambda x: {"logits": logits.masked_fill(~mask, -torch.inf)},
        "distribution": lambda x: distributions.Categorical(logits=logits.masked_fill(~mask, -torch.inf)),
    }
    for policy in policies.values():
        actor = make_actor(policy, BOX, TreeSpec.of(spaces.Discrete(4), "action"), exploration="random", seed=0)
        values = actor((torch.zeros(5000, 3),))
        out = dict(zip(actor.keys, values, strict=True))
        assert mask.gather(1, out["action",][:, None]).all()
        columns = {key: value[:, None] for key, value in out.items()}
        assert actor.complete(columns)["log_prob",].isfinite().all()
