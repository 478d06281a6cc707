"""Small fully connected nets as NumPy functions on the same parameters, while they act.

Calling a net of two hidden layers costs 16 to 28 us in torch, of which the arithmetic is a fraction, and 6 to 12 us
this way. The numbers agree to rounding; the parameters are shared, so a step of an optimizer is seen at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MAX_PRODUCTS = 64 * 64 * 64  # of one layer: beyond that torch's own kernels win, and BLAS may start threads

Step = Callable[[np.ndarray], np.ndarray]


class NumpyMLP:
    """A sequence of `nn.Linear`, `nn.Tanh` and `nn.ReLU` on the CPU in float32, for inputs of [N, F] without gradients.

    A layer of another class takes part if the class names its twin, ``numpy_forward(array) -> array``. Bind it anew
    (`bind`) whenever the module may have been moved or its parameters replaced.

    Args:
        module: the net.
        layers: its modules in order.
    """

    def __init__(self, module: nn.Module, layers: list[nn.Module]) -> None:
        self._forward = module.forward
        self._steps = _steps(layers)
        self._widest = max(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear))

    @classmethod
    def bind(cls, module: nn.Module) -> "NumpyMLP | None":
        """The function of a module that is such a net, else None.

        Args:
            module: any module.

        Example:
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            >>> observation = torch.randn(3, 4)
            >>> with torch.no_grad():
            ...     torch.allclose(NumpyMLP.bind(net)(observation), net(observation), atol=1e-6)
            True
        """
        layers = _layers(module)
        if not layers or not any(isinstance(layer, nn.Linear) for layer in layers):
            return None
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        plain = all(p.device.type == "cpu" and p.dtype is torch.float32 for p in parameters)
        return cls(module, layers) if plain else None

    def __call__(self, input: Tensor) -> Tensor:
        """Apply the net: [N, F] float32 -> [N, A] float32; anything else is left to the module's own `forward`.

        Args:
            input: under the name that the modules themselves give it.
        """
        if (
            input.dtype is not torch.float32
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not input.is_cpu
        ):
            return self._forward(input)
        array = input.numpy()
        shape = array.shape
        if len(shape) != 2 or shape[0] * self._widest > _MAX_PRODUCTS:
            return self._forward(input)
        for step in self._steps:
            array = step(array)
        return torch.from_numpy(array)


@contextmanager
def small_nets_in_numpy(module: nn.Module | None) -> Iterator[None]:
    """Let all small nets within a module compute by `NumpyMLP`, and by torch again on the way out.

    Only their `forward` is exchanged, on the instances; calls with gradients go to torch all the same.

    Args:
        module: what acts; None does nothing.
    """
    nets = [] if module is None else _nets(module)
    try:
        for net, function in nets:
            net.__dict__["forward"] = function
        yield
    finally:
        for net, _ in nets:
            net.__dict__.pop("forward", None)


def _nets(module: nn.Module) -> list[tuple[nn.Module, NumpyMLP]]:
    """The largest parts of a module that are such nets; none within a compiled one, which relies on its parts."""
    if "forward" in module.__dict__ or module._compiled_call_impl is not None:
        return []
    function = NumpyMLP.bind(module)
    if function is not None:
        return [(module, function)]
    return [net for child in module.children() for net in _nets(child)]


def _layers(module: nn.Module) -> list[nn.Module] | None:
    """The plain layers of a (nested) sequence, or None if it holds anything else."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return None
    if type(module) in (nn.Linear, nn.Tanh, nn.ReLU) or hasattr(type(module), "numpy_forward"):
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


def _steps(layers: list[nn.Module]) -> list[Step]:
    """The layers as functions that leave their input alone; an activation after a linear layer works in its place."""
    steps: list[Step] = []
    rest = list(layers)
    while rest:
        layer = rest.pop(0)
        if isinstance(layer, nn.Linear):
            activation = _ACTIVATIONS.get(type(rest[0])) if rest else None
            if activation is not None:
                del rest[0]
            steps.append(_linear(layer, activation))
        else:
            steps.append(_step(layer))
    return steps


def _relu(array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return np.maximum(array, 0, out=out)


_ACTIVATIONS: dict[Any, Callable[..., np.ndarray]] = {nn.Tanh: np.tanh, nn.ReLU: _relu}


def _linear(layer: nn.Linear, activation: Callable[..., np.ndarray] | None) -> Step:
    weight = layer.weight.detach().numpy().T
    bias = 0 if layer.bias is None else layer.bias.detach().numpy()
    dot = np.dot  # which is faster than the operator

    def alone(array: np.ndarray) -> np.ndarray:
        out = dot(array, weight)
        out += bias
        return out

    def activated(array: np.ndarray) -> np.ndarray:
        out = dot(array, weight)
        out += bias
        return activation(out, out)  # type: ignore[misc]  # only where there is one

    return alone if activation is None else activated


def _step(layer: nn.Module) -> Step:
    twin: Step | None = getattr(type(layer), "numpy_forward", None)
    return twin if twin is not None else _ACTIVATIONS[type(layer)]
