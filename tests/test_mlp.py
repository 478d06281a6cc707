"""Small nets as NumPy functions: the numbers of torch, the parameters of the moment, and what is left to torch."""

import pytest
import torch
from torch import nn

from lit_collect.mlp import NumpyMLP, small_nets_in_numpy


def net(*, bias: bool = True) -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(16, 16, bias=bias), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 16, bias=bias), nn.Tanh(), inner, nn.Linear(16, 3, bias=bias))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("copies", [1, 8, 64])
def test_numpy_mlp_gives_what_torch_gives(bias, copies):
    module, observation = net(bias=bias), torch.randn(copies, 4)
    with torch.no_grad():
        torch.testing.assert_close(NumpyMLP.bind(module)(observation), module(observation))


@torch.no_grad()
def test_numpy_mlp_leaves_its_input_and_earlier_outputs_alone():
    function, observation = NumpyMLP.bind(net()), torch.randn(2, 4)
    kept, first = observation.clone(), function(observation)
    copy = first.clone()
    function(torch.randn(2, 4))
    assert torch.equal(observation, kept)
    assert torch.equal(first, copy)


def test_numpy_mlp_sees_a_step_of_an_optimizer_at_once():
    module, observation = net(), torch.randn(2, 4)
    function, before = NumpyMLP.bind(module), module(observation)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(observation).sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(before, module(observation))
        torch.testing.assert_close(function(observation), module(observation))


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (1025, 4)])
def test_numpy_mlp_hands_other_inputs_to_the_module(shape):
    module, observation, seen = net(), torch.randn(*shape), []
    module.forward = lambda value: seen.append(value) or value  # what a NumPy function would not call
    function = NumpyMLP(module, [part for part in net().modules() if not isinstance(part, nn.Sequential)])
    with torch.no_grad():
        assert function(observation) is observation
    assert seen == [observation]


class Doubling(nn.Tanh):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * input


def hooked() -> nn.Module:
    module = net()
    module[0].register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 4), Doubling()),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 4)),
        nn.Sequential(),
        nn.Tanh(),
        net().double(),
        net().to("meta"),
        hooked(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_bind_when_the_module_is_anything_else_gives_none(module):
    assert NumpyMLP.bind(module) is None


class Policy(nn.Module):
    """A module whose small nets are here and there."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.head = nn.Linear(3, 2)

    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(torch.relu(self.body(observation)))}


class Halving(nn.Module):
    @staticmethod
    def numpy_forward(array):
        return array / 2

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input / 2


def test_small_nets_in_numpy_exchanges_the_largest_nets_and_puts_them_back():
    policy, observation = Policy(), torch.randn(5, 4)
    with torch.no_grad():
        expected = policy(observation)["logits"]
        with small_nets_in_numpy(policy):
            assert [name for name, part in policy.named_modules() if "forward" in part.__dict__] == ["body", "head"]
            torch.testing.assert_close(policy(observation)["logits"], expected)
    assert not any("forward" in part.__dict__ for part in policy.modules())


def test_small_nets_in_numpy_puts_them_back_after_an_exception():
    policy = Policy()
    with pytest.raises(KeyError, match="env"), small_nets_in_numpy(policy):
        raise KeyError("env")
    assert not any("forward" in part.__dict__ for part in policy.modules())


def test_small_nets_in_numpy_leaves_calls_with_gradients_to_torch():
    policy = Policy()
    with small_nets_in_numpy(policy):
        policy(torch.randn(5, 4))["logits"].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_a_layer_that_names_its_twin_takes_part():
    module, observation = nn.Sequential(nn.Linear(4, 2), Halving()), torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(NumpyMLP.bind(module)(observation), module(observation))


def compiled_outside() -> nn.Module:
    return torch.compile(Policy(), backend="eager")


def compiled_in_place() -> nn.Module:
    policy = Policy()
    policy.compile(backend="eager")
    return policy


class PartlyCompiled(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(super().forward, backend="eager")

    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.compiled(observation)


@pytest.mark.slow
@pytest.mark.parametrize("make", [compiled_outside, compiled_in_place, PartlyCompiled])
def test_what_is_compiled_gives_what_torch_gives(make):
    policy, observation = make(), torch.randn(5, 4)
    for again in (False, True):
        with torch.inference_mode(), small_nets_in_numpy(policy):
            given = policy(observation)["logits"]
        torch.testing.assert_close(given, Policy.forward(policy, observation)["logits"], msg=f"{again=}")
