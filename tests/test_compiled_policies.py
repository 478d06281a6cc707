"""Compiled policies act as they do otherwise, and the policy itself is left as it was.

Only one test compiles for real; the others trace, and run what was traced as it is.
"""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, distributions, nn

from lit_collect import Collector, ProcessBackend
from lit_collect.envs.spaces import TreeSpec
from lit_collect.errors import LitCollectError
from lit_collect.policies import PolicyFactory, make_actor
from lit_collect.sampling import masked_logits
from lit_collect.testing import CountingEnv
from lit_collect.weights import ModelShapes, copy_weights, module_of, named_tensors

N, STEPS = 4, 6
BOX = TreeSpec.of(spaces.Box(-1, 1, (3,), np.float32), "observation")
MASKED = TreeSpec.of(
    spaces.Dict(action_mask=spaces.Box(0, 1, (2,), np.bool_), x=spaces.Box(-1, 1, (3,))), "observation"
)
CHOICE = TreeSpec.of(spaces.Discrete(2), "action")


@pytest.fixture
def traced(monkeypatch) -> Iterator[list[int]]:
    """Let `torch.compile` run what it traced without generating code; counts the graphs."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield graphs
    torch._dynamo.reset()


class Net(nn.Module):
    """A small net, so small that it would act in NumPy, and a layer that acts otherwise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.drop = nn.Dropout(0.5)

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        return {"logits": self.drop(self.body(observation))}

    def act(self, observation: Tensor) -> Tensor:
        return self.body(observation).argmax(-1)


class Recurrent(Net):
    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        return {"h": torch.zeros(num_envs, 2)}

    def forward(self, observation: Tensor, state: dict[str, Tensor]) -> Any:  # type: ignore[override]
        logits = self.body(observation) + state["h"]
        return {"logits": logits}, {"h": logits.tanh()}


class Masked(Net):
    def forward(self, observation: Any, action_mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": masked_logits(self.body(observation["x"]), action_mask)}


class Distribution(Net):
    def forward(self, observation: Tensor) -> distributions.Distribution:  # type: ignore[override]
        return distributions.Categorical(logits=self.body(observation), validate_args=False)


def tensordict_actor(*, hooked: bool = False) -> nn.Module:
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(Net().body, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=distributions.Categorical, return_log_prob=True
        ),
    )
    if hooked:
        policy.module[0].register_forward_hook(lambda module, args, out: out)
    return policy


class Builds(PolicyFactory):
    def __call__(self) -> Any:
        return Net()


POLICIES: dict[str, Callable[[], Any]] = {
    "module": Net,
    "method": lambda: Net().act,
    "partial": lambda: partial(Net()),
    "function": lambda: lambda x: (x.sum(-1) > 0).long(),
    "recurrent": Recurrent,
    "masked": Masked,
    "distribution": Distribution,
    "lowered TensorDict module": tensordict_actor,
    "TensorDict module as it is": partial(tensordict_actor, hooked=True),
    "factory": Builds,
}


def act(policy: Any, *, compile_policy: bool, batches: int = 3) -> list[dict[Any, Tensor]]:
    """What an actor gives in some batches; observations and random numbers are always the same."""
    observation = MASKED if isinstance(policy, Masked) else BOX
    actor = make_actor(policy, observation, CHOICE, exploration="random", seed=0, compile_policy=compile_policy)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    made = []
    for _ in range(batches):
        with actor.acting():
            for _ in range(STEPS):
                seen = torch.randn(N, 3, generator=generator)
                mask = torch.tensor([[True, False], [False, True], [True, True], [True, True]])
                values = actor((mask, seen) if observation is MASKED else (seen,))
                made.append({key: value.clone() for key, value in zip(actor.keys, values, strict=True)})
    return made


@pytest.mark.parametrize("name", POLICIES)
def test_compiled_policy_gives_what_it_gives_otherwise(traced, name):
    torch.manual_seed(0)
    policy = POLICIES[name]()
    if isinstance(policy, Builds):
        torch.manual_seed(7)
        plain = act(policy, compile_policy=False)
        torch.manual_seed(7)
    else:
        plain = act(policy, compile_policy=False)
    assert not traced
    compiled = act(policy, compile_policy=True)
    assert traced
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5)


def test_later_batches_are_not_compiled_anew(traced):
    act(Net(), compile_policy=True, batches=1)
    graphs = len(traced)
    torch._dynamo.reset()
    act(Net(), compile_policy=True, batches=4)
    assert len(traced) == 2 * graphs


def test_policy_itself_is_left_as_it_was_and_its_weights_act(traced):
    policy = Net()
    before = dict(policy.__dict__)
    actor = make_actor(policy, BOX, CHOICE, exploration="random", seed=0, compile_policy=True)
    for factor in (1.0, -3.0):
        with torch.no_grad():
            policy.body[2].weight.mul_(factor)
        with actor.acting():
            logits, _ = actor((torch.ones(N, 3),))
        torch.testing.assert_close(logits, policy.body(torch.ones(N, 3)).detach())
    # marks of torch and Lightning, which do not change what it does
    assert policy.__dict__.keys() - before.keys() <= {"_is_torch_compile", "_compile_kwargs"}
    assert {name: value for name, value in policy.__dict__.items() if name in before} == before
    assert policy.training
    assert actor.module is policy
    policy(torch.randn(N, 3))["logits"].sum().backward()
    assert policy.body[0].weight.grad is not None


def test_what_cannot_be_compiled_is_told(monkeypatch):
    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    message = r"the policy cannot be compiled : (.|\n)*no C\+\+ compiler; leave rollout.compile_policy at False"
    with pytest.raises(LitCollectError, match=message):
        act(Net(), compile_policy=True)
    torch._dynamo.reset()


def test_error_of_the_policy_is_its_own(traced):
    def policy(observation: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        raise KeyError("broken policy")

    with pytest.raises(KeyError, match="broken policy"):
        act(policy, compile_policy=True)


# --- policies that were compiled by their author


def compiled(policy: nn.Module) -> Any:
    return torch.compile(policy, backend="eager")


def compiled_in_place(policy: nn.Module) -> nn.Module:
    policy.compile(backend="eager")
    return policy


def inner_part_compiled(policy: nn.Module) -> nn.Module:
    policy.body = compiled(policy.body)
    return policy


BY_AUTHOR = [compiled, compiled_in_place, inner_part_compiled]


@pytest.mark.parametrize("backend", ["direct", pytest.param("process", marks=pytest.mark.processes)])
@pytest.mark.parametrize("how", BY_AUTHOR)
def test_policy_that_was_compiled_acts_and_gets_its_weights(how, backend, nursery):
    torch.manual_seed(0)
    net = Net()
    policy = how(net)
    where = "direct" if backend == "direct" else ProcessBackend(num_collectors=1)
    with Collector(partial(CountingEnv, 0), policy, frames_per_batch=6, backend=where) as collector:
        collector.collect()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(-0.5)
        collector.update_policy_weights_(policy)
        second = collector.collect()
        collector.update_policy_weights_({name: torch.zeros_like(t) for name, t in named_tensors(net).items()})
        third = collector.collect()
    if backend == "process":  # where the module itself acts, its weights are zero by now
        torch.testing.assert_close(second["logits"], net.body(second["observation"]).detach())
    else:
        assert not any(parameter.any() for parameter in net.parameters())
    assert not third["logits"].any()
    torch._dynamo.reset()


@pytest.mark.parametrize("how", BY_AUTHOR)
def test_names_of_weights_do_not_tell_what_is_compiled(how):
    plain = Net()
    policy = how(Net())
    assert named_tensors(policy).keys() == named_tensors(plain).keys()
    assert named_tensors(policy.state_dict()).keys() == named_tensors(plain).keys()
    assert ModelShapes.of(policy) == ModelShapes.of(plain)
    copy_weights(named_tensors(plain), policy)
    assert torch.equal(named_tensors(policy)["body.0.weight"], plain.body[0].weight)


def test_module_of_what_is_compiled_is_the_module():
    net = Net()
    assert module_of(compiled(net)) is net
    assert module_of(partial(compiled(net))) is net
    assert module_of(compiled(net.act)) is net


def test_compiled_tensordict_module_is_still_one():
    policy = tensordict_actor()
    ours, theirs = act(compiled(policy), compile_policy=False), act(policy, compile_policy=False)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() - other.keys() == {("action_log_prob",)}  # which a lowered one computes once a batch
        torch.testing.assert_close(one["logits",], other["logits",])
        assert torch.equal(one["action",], other["action",])
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_code_gives_what_the_module_gives(start_script):
    script = start_script(SCRIPT)
    out, error = script.communicate(timeout=240)
    assert script.returncode == 0, error
    assert out.split()[-1] == "equal"


SCRIPT = """
import os, warnings
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import numpy as np, torch
from gymnasium import spaces
from torch import nn
from lit_collect.envs.spaces import TreeSpec
from lit_collect.policies import make_actor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    def forward(self, observation):
        return {"logits": self.body(observation)}

box = TreeSpec.of(spaces.Box(-1, 1, (3,), np.float32), "observation")
choice = TreeSpec.of(spaces.Discrete(2), "action")
policy = Net()
actor = make_actor(policy, box, choice, exploration="random", seed=0, compile_policy=True)
for _ in range(3):
    seen = torch.randn(4, 3)
    with actor.acting():
        logits, action = actor((seen,))
    torch.testing.assert_close(logits.clone(), policy(seen)["logits"].detach())
    with torch.no_grad():
        policy.body[0].weight.mul_(0.5)
print("equal")
"""
