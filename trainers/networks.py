"""Small policy and value networks, built from plain-data descriptions of the spaces.

A space description is a dictionary of plain values, so that it can travel in a checkpoint:

- ``{"kind": "box", "shape": [4], "dtype": "float32", "low": [...], "high": [...]}``
- ``{"kind": "discrete", "n": 2, "start": 0}``

As observation both are supported: ``box`` of any shape is flattened and cast to the network's dtype, ``discrete``
becomes one-hot. As action: ``discrete``, and ``box`` of one dimension. Shapes: ``[N, ...]`` stands for any leading
dimensions, A for the number of discrete actions, D for the size of a continuous action, F for flat features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from typing_extensions import override

from trainers import functional

__all__ = ["ActorNetwork", "CriticNetwork", "FlatObservation", "Tanh", "action_entropy", "action_log_prob", "mlp"]

HIDDEN_GAIN = math.sqrt(2)
POLICY_GAIN = 0.01
"""Gain of the policy's last layer: small, so that training starts from a nearly uniform policy."""


class Tanh(nn.Tanh):
    """``nn.Tanh``, several times faster for float32 on CPU, where torch's own kernel costs more than a layer.

    The numbers come from numpy's SIMD kernel and agree with torch to rounding; the derivative is torch's. Everywhere
    else (other devices and dtypes, compilation) it is ``torch.tanh``.

    Example:
        >>> Tanh()(torch.tensor([0.0, 100.0]))
        tensor([0., 1.])
    """

    numpy_forward = np.tanh
    """What a collector calls while acting."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return tanh of ``input``, elementwise: any shape, same shape back."""
        if input.dtype is torch.float32 and input.is_cpu and not torch.compiler.is_compiling():
            return _NumpyTanh.apply(input)
        return torch.tanh(input)


class _NumpyTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        y = torch.from_numpy(np.tanh(x.numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: BackwardCFunction, *grad_outputs: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward.default(grad_outputs[0], y)  # grad * (1 - y**2)


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = Tanh, *, output_gain: float = 1.0) -> nn.Sequential:
    """Fully connected network with orthogonal weights and zero biases, and no activation behind the last layer.

    Orthogonal initialisation is from Saxe et al. 2013, arXiv:1312.6120; hidden layers have gain sqrt(2).

    Args:
        sizes: Number of features from input to output, at least two.
        activation: Called without arguments for each hidden layer.
        output_gain: Gain of the last layer's weights.

    Returns:
        ``[N, sizes[0]] -> [N, sizes[-1]]``, a plain sequence of ``nn.Linear`` and activations.

    Raises:
        ValueError: If there are fewer than two sizes or one is not positive.

    Example:
        >>> mlp([4, 64, 2])(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(
            f"sizes describe no network : expected at least two positive numbers of features, got {list(sizes)!r}; "
            "name the input, the hidden and the output size"
        )
    layers: list[nn.Module] = []
    last = len(sizes) - 2
    for index, (num_in, num_out) in enumerate(pairwise(sizes)):
        linear = nn.Linear(num_in, num_out)
        nn.init.orthogonal_(linear.weight, output_gain if index == last else HIDDEN_GAIN)
        nn.init.zeros_(linear.bias)
        layers += [linear] if index == last else [linear, activation()]
    return nn.Sequential(*layers)


class FlatObservation(nn.Module):
    """Turns an observation into a vector of floats: boxes are flattened, discrete ones become one-hot.

    Args:
        spec: Description of the observation space, ``box`` or ``discrete``.

    Raises:
        ValueError: If the space is of another kind.

    Example:
        >>> FlatObservation({"kind": "discrete", "n": 3, "start": 1})(torch.tensor([1, 3]))
        tensor([[1., 0., 0.],
                [0., 0., 1.]])
    """

    size: int
    """Number of features."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        kind = spec.get("kind")
        if kind == "box":
            self._dims = len(spec["shape"])
            self.size = math.prod(spec["shape"])
        elif kind == "discrete":
            self._dims = 0
            self.size = int(spec["n"])
        else:
            raise ValueError(
                f"observation space is not supported : expected kind 'box' or 'discrete', got {kind!r}; "
                "flatten it with an environment wrapper or pass networks of your own"
            )
        self._start = int(spec.get("start", 0))
        self._one_hot = kind == "discrete"

    @override
    def forward(self, observation: Tensor) -> Tensor:
        """Flatten one observation.

        Args:
            observation: ``[N, *shape]`` of any dtype for a box, ``[N]`` int64 for a discrete space.

        Returns:
            ``[N, F]``; float where it was one-hot encoded, else of the observation's dtype.
        """
        if self._one_hot:
            return nn.functional.one_hot(observation - self._start, self.size).float()
        if self._dims == 1:
            return observation
        return observation.unsqueeze(-1) if self._dims == 0 else observation.flatten(-self._dims)


class ActorNetwork(nn.Module):
    """Policy of separate tanh layers that gives the parameters of its action distribution and never samples.

    Discrete actions are drawn from a categorical distribution. Continuous ones from a normal distribution with
    independent components, whose mean is the network's output and whose standard deviation is a learned parameter that
    does not depend on the observation, 1 at the start.

    Args:
        observation_spec: Description of the observation space, ``box`` or ``discrete``.
        action_spec: Description of the action space, ``discrete`` or ``box`` of one dimension.
        hidden: Sizes of the hidden layers.

    Raises:
        ValueError: If a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
        >>> policy = ActorNetwork(box, {"kind": "discrete", "n": 2, "start": 0})
        >>> policy(torch.zeros(8, 4))["logits"].shape
        torch.Size([8, 2])
    """

    log_std: nn.Parameter | None
    """``[D]`` logarithm of the standard deviation; None for discrete actions."""

    def __init__(
        self, observation_spec: dict[str, Any], action_spec: dict[str, Any], *, hidden: Sequence[int] = (64, 64)
    ) -> None:
        super().__init__()
        num_outputs = _num_action_parameters(action_spec)
        self.encoder = FlatObservation(observation_spec)
        self.layers = mlp([self.encoder.size, *hidden, num_outputs], output_gain=POLICY_GAIN)
        log_std = nn.Parameter(torch.zeros(num_outputs)) if action_spec["kind"] == "box" else None
        self.register_parameter("log_std", log_std)

    @override
    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        """Give the distribution's parameters.

        Args:
            observation: ``[N, *shape]`` for a box, ``[N]`` int64 for a discrete space.

        Returns:
            ``{"logits": [N, A]}`` for discrete, ``{"loc": [N, D], "scale": [N, D]}`` for continuous actions.
        """
        output = _apply(self.layers, self.encoder(observation))
        if self.log_std is None:
            return {"logits": output}
        return {"loc": output, "scale": self.log_std.exp().expand_as(output)}


def action_log_prob(parameters: dict[str, Tensor], action: Tensor) -> Tensor:
    """Log-probability of actions under the distribution that an :class:`ActorNetwork` describes.

    Args:
        parameters: ``{"logits": [N, A]}`` or ``{"loc": [N, D], "scale": [N, D]}``.
        action: ``[N]`` int64 or ``[N, D]`` float.

    Returns:
        ``[N]`` in nats.
    """
    if "logits" in parameters:
        return functional.categorical_log_prob(parameters["logits"], action)
    return functional.diagonal_normal_log_prob(parameters["loc"], parameters["scale"], action)


def action_entropy(parameters: dict[str, Tensor]) -> Tensor:
    """Entropy of the distribution that an :class:`ActorNetwork` describes.

    Args:
        parameters: ``{"logits": [N, A]}`` or ``{"loc": [N, D], "scale": [N, D]}``.

    Returns:
        ``[N]`` in nats.
    """
    if "logits" in parameters:
        return functional.categorical_entropy(parameters["logits"])
    return functional.diagonal_normal_entropy(parameters["scale"])


class CriticNetwork(nn.Module):
    """State-value function of tanh layers.

    Args:
        observation_spec: Description of the observation space, ``box`` or ``discrete``.
        hidden: Sizes of the hidden layers.

    Raises:
        ValueError: If the space is not supported.
    """

    def __init__(self, observation_spec: dict[str, Any], *, hidden: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        self.encoder = FlatObservation(observation_spec)
        self.layers = mlp([self.encoder.size, *hidden, 1])

    @override
    def forward(self, observation: Tensor) -> Tensor:
        """Estimate the discounted return.

        Args:
            observation: ``[N, *shape]`` for a box, ``[N]`` int64 for a discrete space.

        Returns:
            ``[N]``.
        """
        return _apply(self.layers, self.encoder(observation)).squeeze(-1)


def _apply(layers: nn.Sequential, features: Tensor) -> Tensor:
    # observations may be integers or of another precision than the network
    return layers(features.to(cast(nn.Linear, layers[0]).weight.dtype))


def _num_action_parameters(spec: dict[str, Any]) -> int:
    kind = spec.get("kind")
    if kind == "discrete":
        return int(spec["n"])
    if kind == "box" and len(spec["shape"]) == 1:
        return int(spec["shape"][0])
    shape = f" of shape {list(spec['shape'])}" if kind == "box" else ""
    raise ValueError(
        f"action space is not supported : expected kind 'discrete' or 'box' of one dimension, got {kind!r}{shape}; "
        "flatten it with an environment wrapper or pass networks of your own"
    )
