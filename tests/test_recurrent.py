"""What a recurrent policy is given and may give, call by call; whole runs: `tests/behaviour/test_recurrence.py`."""

from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from lit_collect.envs.spaces import TreeSpec
from lit_collect.errors import FrameContractError
from lit_collect.policies import PolicyFactory, make_actor
from lit_collect.recurrent import RecurrentActor, RecurrentTensorDictActor, initial_state_of

N = 3
BOX = TreeSpec.of(spaces.Box(-1, 1, (2,), np.float32), "observation")
CHOICE = TreeSpec.of(spaces.Discrete(2), "action")
SEEN = torch.zeros(N, 2)
Pair = namedtuple("Pair", "hidden cell")


class Adds(nn.Module):
    """Adds one to every tensor of a state of any form, and keeps what it was given."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.first, self.given = first, []

    def initial_state(self, num_envs: int) -> Any:
        return self.first

    def forward(self, observation: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.given.append(state)
        return observation[:, 0].long(), self.plus_one(state)

    def plus_one(self, state: Any) -> Any:
        if isinstance(state, TensorDict):
            return state + 1
        if isinstance(state, dict):
            return {name: self.plus_one(state[name]) for name in reversed(state)}  # in another order
        if isinstance(state, Pair):
            return Pair(*map(self.plus_one, state))
        if isinstance(state, (tuple, list)):
            return type(state)(map(self.plus_one, state))
        return state + 1


def actor_of(policy: Any, **options: Any) -> Any:
    return make_actor(policy, BOX, CHOICE, exploration="random", seed=0, **options)


def stored(actor: Any, method: str = "__call__") -> dict[str, list[float]]:
    """The state that one step stores, by key."""
    with actor.acting():
        values = getattr(actor, method)((SEEN,))
    return {".".join(k): v.tolist() for k, v in zip(actor.keys, values, strict=True) if k[0] not in ("action", "out")}


ones = torch.ones(N)
FORMS: dict[str, tuple[Any, list[str]]] = {
    "a tensor": (ones, ["state"]),
    "a mapping": ({"h": ones, "deep": {"c": ones}}, ["state.h", "state.deep.c"]),
    "a tuple": ((ones, ones), ["state.0", "state.1"]),
    "a list of tuples": ([(ones, ones), ones], ["state.0.0", "state.0.1", "state.1"]),
    "a named tuple": (Pair(ones, ones), ["state.0", "state.1"]),
    "a TensorDict": (TensorDict({"h": ones, "c": ones}, [N]), ["state.h", "state.c"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_state_is_carried_in_its_own_form_and_stored_by_name(name):
    first, keys = FORMS[name]
    policy = Adds(first)
    actor = actor_of(policy)
    assert actor.recurrent
    for value in (1.0, 2.0, 3.0):
        assert stored(actor) == {key: [value] * N for key in keys}
    assert [type(given) for given in policy.given] == [type(first)] * 3


def test_restart_puts_rows_of_the_first_state_back():
    actor = actor_of(Adds(torch.tensor([10.0, 20.0, 30.0])))
    actor.restart(np.arange(N))  # before anything is known
    assert stored(actor) == {"state": [10, 20, 30]}
    actor.restart(np.array([1]))
    assert stored(actor) == {"state": [11, 20, 31]}
    actor.restart(np.array([], np.int64))
    assert stored(actor) == {"state": [12, 21, 32]}
    actor.restart(np.arange(N))
    assert stored(actor) == {"state": [10, 20, 30]}


def test_preview_leaves_the_state_and_follow_moves_it():
    policy = Adds(torch.zeros(N))
    actor = actor_of(policy)
    assert stored(actor, "preview") == {"state": [0] * N}
    assert actor.keys == (("state",), ("action",))
    assert stored(actor, "preview") == {"state": [0] * N}
    with actor.acting():
        assert {key: entered.tolist() for key, entered in actor.follow((SEEN,)).items()} == {("state",): [0] * N}
        actor.restart(np.array([0]))
        assert {key: entered.tolist() for key, entered in actor.follow((SEEN,)).items()} == {("state",): [0, 1, 1]}
    assert stored(actor, "preview") == {"state": [1, 2, 2]}
    assert stored(actor) == {"state": [1, 2, 2]}


def test_state_that_is_kept_and_changed_by_the_policy_is_copied():
    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.buffer = torch.zeros(N)

        def initial_state(self, num_envs: int) -> Tensor:
            return self.buffer

        def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            new = state + 1
            state.fill_(-5)
            return observation[:, 0].long(), self.buffer.copy_(new)

    actor = actor_of(Reuses())
    with actor.acting():
        for step in range(4):
            state, _ = actor((SEEN,))
            assert state.tolist() == [step] * N


def test_state_keeps_its_dtype_and_first_values_that_are_learned_are_asked_for_anew():
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begin = nn.Parameter(torch.ones(2))

        def initial_state(self, num_envs: int) -> tuple[Tensor, Tensor]:
            return self.begin.expand(num_envs, 2), torch.zeros(num_envs, dtype=torch.int32)

        def forward(self, observation: Tensor, state: Any) -> tuple[Tensor, Any]:
            return observation[:, 0].long(), (state[0].double() + 1, (state[1] + 1).short())

    policy = Learned()
    actor = actor_of(policy)
    for factor in (1.0, 3.0):
        policy.begin.data.fill_(factor)
        actor.restart(np.arange(N))
        with actor.acting():
            first = [value.clone() for value in actor((SEEN,))]
            second = actor((SEEN,))
        assert [value.dtype for value in second] == [torch.float32, torch.int32, torch.int64]
        assert first[0].tolist() == [[factor] * 2] * N
        assert second[0].tolist() == [[factor + 1] * 2] * N
        assert not first[0].requires_grad


def test_precision_of_the_module_is_that_of_its_state():
    class Mover(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begin = nn.Parameter(torch.zeros(1))

        def initial_state(self, num_envs: int) -> Tensor:
            return self.begin.expand(num_envs, 1)

        def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            assert observation.dtype is state.dtype
            return observation[:, 0].long(), state + 1

    policy = Mover()
    actor = actor_of(policy)
    assert stored(actor)["state"] == [[0.0]] * N
    policy.double()
    with actor.acting():
        state, _ = actor((SEEN,))
    assert state.dtype is torch.float64
    assert state.tolist() == [[1.0]] * N


class Builds(PolicyFactory):
    def __call__(self) -> Any:
        return Adds(torch.zeros(N))


class Callable:
    """No module, but recurrent all the same."""

    def initial_state(self, num_envs: int) -> Tensor:
        return torch.zeros(num_envs)

    def __call__(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return observation[:, 0].long(), state + 1


@pytest.mark.parametrize(
    "policy",
    [
        Adds(torch.zeros(N)),
        Adds(torch.zeros(N)).forward,
        partial(Adds(torch.zeros(N))),
        torch.compile(Adds(torch.zeros(N)), backend="eager"),
        Callable(),
        Builds(),
    ],
    ids=["module", "method", "partial", "compiled", "callable", "factory"],
)
def test_recurrent_policy_is_known_by_its_initial_state(policy):
    actor = actor_of(policy)
    assert isinstance(actor, RecurrentActor)
    assert [stored(actor)["state"][0] for _ in range(3)] == [0, 1, 2]


def test_policy_without_initial_state_is_not_recurrent():
    assert initial_state_of(nn.Linear(2, 1)) is None
    assert initial_state_of(print) is None
    assert not actor_of(nn.Linear(2, 1)).recurrent


def test_mask_and_state_go_together():
    class Both(Adds):
        def forward(self, observation: Tensor, state: Tensor, *, action_mask: Tensor) -> Any:  # type: ignore[override]
            return {"action": action_mask.int().argmax(-1), "seen": action_mask}, state + 1

    observation = TreeSpec.of(spaces.Dict(x=spaces.Box(-1, 1, (2,)), action_mask=spaces.MultiBinary(2)), "observation")
    actor = make_actor(Both(torch.zeros(N)), observation, CHOICE, exploration="random", seed=0)
    mask = torch.tensor([[1, 0], [0, 1], [0, 1]], dtype=torch.int8)
    leaves = [SEEN if leaf.key == ("x",) else mask for leaf in observation.leaves]
    out = actor(tuple(leaves))
    values = dict(zip(actor.keys, out, strict=True))
    assert values["action",].tolist() == [0, 1, 1]
    assert values["state",].tolist() == [0, 0, 0]


# --- errors


class Wrong(Adds):
    """Answers with whatever it was made with."""

    def __init__(self, first: Any, answer: Any) -> None:
        super().__init__(first)
        self.answer = answer

    def forward(self, observation: Tensor, state: Any) -> Any:
        return self.answer


ACTION = torch.zeros(N, dtype=torch.int64)
WRONG: dict[str, tuple[Any, Any, str]] = {
    "no state": (ones, ACTION, "must return its answer and its new state : expected a tuple of two, got Tensor"),
    "three things": (ones, (ACTION, ones, ones), "expected a tuple of two, got tuple"),
    "another shape": (
        {"h": torch.ones(N, 4)},
        (ACTION, {"h": torch.ones(N, 1, 4)}),
        r"new state.h differs from initial_state : expected torch.float32 with shape \(3, 4\), got .* \(3, 1, 4\)",
    ),
    "another kind": (ones.long(), (ACTION, ones), "new state differs .* expected torch.int64 .* got torch.float32"),
    "no tensor": (ones, (ACTION, 3), "new state differs from initial_state : expected .*, got int"),
    "a part is missing": (
        {"h": ones, "c": ones},
        (ACTION, {"h": ones}),
        r"other parts than initial_state : expected \['state.h', 'state.c'\], got \['state.h'\]",
    ),
    "a part too many": ((ones,), (ACTION, (ones, ones)), r"expected \['state.0'\], got \['state.0', 'state.1'\]"),
    "another form": (ones, (ACTION, (ones,)), r"expected \['state'\], got \['state.0'\]"),
    "first state without rows": (
        torch.zeros(()),
        None,
        r"initial_state\(3\) must give tensors with one row for each env copy : expected shape \(3, ...\) for state",
    ),
    "first state of other rows": ((torch.zeros(2),), None, r"expected shape \(3, ...\) for state.0, got .* \(2,\)"),
    "first state of numbers": ({"h": 0.0}, None, "for state.h, got float"),
    "no first state": ((), None, r"must give the same tensors each time : expected at least one, got \[\]"),
    "a part twice": (
        {("a", "b"): ones, "a": {"b": ones}},
        None,
        "under a name of its own, got .*'state.a.b', 'state.a.b'",
    ),
    "a number as a name": ({0: ones}, None, "a policy's state has the name 0 : expected a text"),
    "three answers": (ones, (ACTION, ones, ones), "expected a tuple of two, got tuple of 3"),
    "a name that is taken": (ones, ({"action": ACTION, "state": ones}, ones), r"returned \['state'\], names"),
}


@pytest.mark.parametrize(("first", "answer", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_named(first, answer, message):
    actor = actor_of(Wrong(first, answer))
    with pytest.raises(FrameContractError, match=message), actor.acting():
        actor((SEEN,))


@pytest.mark.parametrize(
    "later", [torch.ones(N, 1), torch.ones(N), torch.ones(1, N, 4)[0, :, :, None], torch.ones(N, 4, dtype=torch.cfloat)]
)
def test_first_state_that_changes_its_kind_is_named(later):
    policy = Adds(torch.ones(N, 4))
    actor = actor_of(policy)
    stored(actor)
    policy.first = later
    actor.restart(np.array([1]))
    with pytest.raises(
        FrameContractError, match=r"the same tensors each time : expected torch.float32 with shape \(3, 4\)"
    ):
        stored(actor)


def test_observation_of_the_same_name_is_refused():
    observation = TreeSpec.of(spaces.Dict(state=spaces.Box(-1, 1, (2,)), x=spaces.Box(-1, 1, (2,))), "observation")
    with pytest.raises(FrameContractError, match="the env has a 'state', under which the state"):
        make_actor(Adds(ones), observation, CHOICE, exploration="random", seed=0)


# --- TensorDict modules


class Core(TensorDictModule):
    """A recurrent TensorDict module; its first state can be chosen."""

    def __init__(self, first: Any = None, in_keys: Any = ("observation", "h", "is_init"), out: Any = ("next", "h")):
        super().__init__(self.core, list(in_keys), [out, "action", "out"])
        self.first = {"h": torch.zeros(N)} if first is None else first

    @staticmethod
    def core(observation: Tensor, h: Tensor, is_init: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return h + 1, observation[:, 0].long(), is_init.squeeze(-1)

    def initial_state(self, num_envs: int) -> Any:
        return self.first


@pytest.mark.parametrize(
    "first", [{"h": torch.tensor([5.0, 6.0, 7.0])}, TensorDict({"h": torch.tensor([5.0, 6.0, 7.0])}, [N])]
)
def test_tensordict_module_keeps_its_state_under_its_own_key_and_is_told_of_beginnings(first):
    actor = actor_of(Core(first))
    assert isinstance(actor, RecurrentTensorDictActor)

    def step() -> tuple[list[float], list[bool]]:
        with actor.acting():
            h, _, out = actor((SEEN,))
        return h.tolist(), out.tolist()

    assert step() == ([5, 6, 7], [True] * N)
    assert actor.keys == (("h",), ("action",), ("out",))
    assert step() == ([6, 7, 8], [False] * N)
    actor.restart(np.array([2]))
    assert stored(actor, "preview") == {"h": [7, 8, 7]}
    assert step() == ([7, 8, 7], [False, False, True])
    with actor.acting():
        actor.follow((SEEN,))
    assert step() == ([9, 10, 9], [False] * N)


WRONG_MODULES: dict[str, tuple[Any, str]] = {
    "no mapping": (Core(ones), "must give a mapping of its state's keys, got Tensor"),
    "not among the inputs": (Core({"g": ones}), r"initial_state gives \['g'\] : expected keys that are among the mod"),
    "not among the outputs": (Core(out="h"), r"initial_state gives \['h'\] : expected keys .* under 'next' among"),
    "the batch's": (
        Core({"done": ones}, in_keys=("observation", "done", "is_init"), out=("next", "done")),
        r"returned \['done'\], names that the batch itself takes",
    ),
    "the env's": (
        Core({"observation": ones}, in_keys=("observation", "h", "is_init"), out=("next", "observation")),
        r"initial_state gives \['observation'\], which the env gives too; rename them",
    ),
}


@pytest.mark.parametrize(("policy", "message"), WRONG_MODULES.values(), ids=WRONG_MODULES.keys())
def test_first_state_that_does_not_fit_the_module_is_named(policy, message):
    actor = actor_of(policy)
    with pytest.raises(FrameContractError, match=message), actor.acting():
        actor((SEEN,))
