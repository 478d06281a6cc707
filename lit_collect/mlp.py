"""Small fully connected nets as NumPy functions on the same parameters.

Calling a net of two hidden layers costs 16 to 28 us in torch, of which the arithmetic is a fraction, and 4 to 15 us
this way. The numbers agree to rounding; the parameters are shared, so a step of an optimizer is seen at once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MAX_PRODUCTS = 64 * 64 * 64  # of one layer: beyond that torch's own kernels win, and BLAS may start threads

Step = Callable[[np.ndarray], np.ndarray]


class NumpyMLP:
    """A sequence of `nn.Linear`, `nn.Tanh` and `nn.ReLU` on the CPU in float32, for inputs of [N, F].

    Bind it anew (`bind`) whenever the module may have been moved or its parameters replaced.

    Args:
        module: the net.
        layers: its modules in order.
    """

    def __init__(self, module: nn.Module, layers: list[nn.Module]) -> None:
        self._module = module
        self._steps = [_step(layer) for layer in layers]
        self._widest = max(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear))

    @classmethod
    def bind(cls, module: Any) -> "NumpyMLP | None":
        """The function of a module that is such a net, else None.

        Args:
            module: anything.

        Example:
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            >>> observation = torch.randn(3, 4)
            >>> torch.allclose(NumpyMLP.bind(net)(observation), net(observation), atol=1e-6)
            True
        """
        layers = _layers(module)
        if not layers or not any(isinstance(layer, nn.Linear) for layer in layers):
            return None
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        plain = all(p.device.type == "cpu" and p.dtype is torch.float32 for p in parameters)
        return cls(module, layers) if plain else None

    def __call__(self, value: Tensor) -> Tensor:
        """Apply the net: [N, F] float32 -> [N, A] float32; other inputs go to the module itself."""
        if value.ndim != 2 or value.dtype is not torch.float32 or value.shape[0] * self._widest > _MAX_PRODUCTS:
            return self._module(value)
        array = value.numpy()
        for step in self._steps:
            array = step(array)
        return torch.from_numpy(array)


def _layers(module: Any) -> list[nn.Module] | None:
    """The plain layers of a (nested) sequence, or None if it holds anything else."""
    if not isinstance(module, nn.Module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) in (nn.Linear, nn.Tanh, nn.ReLU):
        return [module]
    if type(module) is not nn.Sequential:
        return None
    layers: list[nn.Module] = []
    for inner in module:
        inside = _layers(inner)
        if inside is None:
            return None
        layers += inside
    return layers


def _step(layer: nn.Module) -> Step:
    """One layer, as a function that leaves its input alone."""
    if isinstance(layer, nn.Linear):
        weight = layer.weight.detach().numpy().T
        bias = 0 if layer.bias is None else layer.bias.detach().numpy()
        return lambda x: x @ weight + bias
    if isinstance(layer, nn.Tanh):
        return np.tanh
    return lambda x: np.maximum(x, 0)
