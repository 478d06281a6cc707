"""Small nets as NumPy functions: the numbers of torch, the parameters of the moment, and what is left to torch."""

import pytest
import torch
from torch import nn

from lit_collect.mlp import NumpyMLP


def net(*, bias: bool = True) -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(16, 16, bias=bias), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 16, bias=bias), nn.Tanh(), inner, nn.Linear(16, 3, bias=bias))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("copies", [1, 8, 64])
def test_numpy_mlp_gives_what_torch_gives(bias, copies):
    module, observation = net(bias=bias), torch.randn(copies, 4)
    with torch.no_grad():
        torch.testing.assert_close(NumpyMLP.bind(module)(observation), module(observation))


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
    module, observation, calls = net(), torch.randn(*shape), []
    function = NumpyMLP.bind(module)
    module.register_forward_hook(lambda *_: calls.append(shape))
    with torch.no_grad():
        assert torch.equal(function(observation), module(observation))
    assert calls == [shape, shape]


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
        len,
    ],
    ids=lambda module: type(module).__name__,
)
def test_bind_when_the_module_is_anything_else_gives_none(module):
    assert NumpyMLP.bind(module) is None
