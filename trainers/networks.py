"""Small policy and value networks, built from plain-data descriptions of the spaces.

A space description is a dictionary of plain values, so that it can travel in a checkpoint:

- ``{"kind": "box", "shape": [4], "dtype": "float32", "low": [...], "high": [...]}``
- ``{"kind": "discrete", "n": 2, "start": 0}``
- ``{"kind": "multi_discrete", "nvec": [2, 3], "start": [0, 0]}``
- ``{"kind": "multi_binary", "shape": [4]}``
- ``{"kind": "dict", "spaces": {"name": ...}}``, ``{"kind": "tuple", "spaces": [...]}``

Observations may be of all of them (see :mod:`trainers.encoders`), nested too: images of bytes go through
convolutions, bytes are divided by 255, choices become one-hot, the rest is flattened. Actions may be ``discrete``, or
of one dimension ``box``, ``multi_discrete`` or ``multi_binary``. Shapes: ``[N, ...]`` stands for any leading
dimensions, A for the number of discrete actions, D for the size of a continuous action, F for flat features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from typing_extensions import override

from lit_collect import masked_logits
from trainers.distributions import Answer, MultiCategorical, action_entropy, action_log_prob
from trainers.encoders import HIDDEN_GAIN, FlatObservation, encoder_for
from trainers.normalization import Normalizer, normalizer_for

__all__ = ["ActorNetwork", "CriticNetwork", "FlatObservation", "Tanh", "action_entropy", "action_log_prob", "mlp"]

Observation = Tensor | Mapping[str, Any]
"""``[N, ...]``, or a (nested) mapping of such."""

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


class ActorNetwork(nn.Module):
    """Policy of separate tanh layers that gives its action distribution and never samples.

    Discrete actions are drawn from a categorical distribution, several of them from one each. Continuous ones come from
    a normal distribution with independent components, whose mean is the network's output and whose standard deviation
    is a learned parameter that does not depend on the observation, 1 at the start.

    Args:
        observation_spec: Description of the observation space, see the module.
        action_spec: Description of the action space, ``discrete``, or of one dimension ``box``, ``multi_discrete`` or
            ``multi_binary``.
        hidden: Sizes of the hidden layers.
        normalize: Whether observations are normalised by running statistics (see :mod:`trainers.normalization`).

    Raises:
        ValueError: If a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
        >>> policy = ActorNetwork(box, {"kind": "discrete", "n": 2, "start": 0})
        >>> policy(torch.zeros(8, 4))["logits"].shape
        torch.Size([8, 2])
    """

    normalizer: Normalizer | None
    """Running statistics of the observations; None without normalisation, or where nothing needs it."""
    log_std: nn.Parameter | None
    """``[D]`` logarithm of the standard deviation; None for discrete actions."""

    def __init__(
        self,
        observation_spec: dict[str, Any],
        action_spec: dict[str, Any],
        *,
        hidden: Sequence[int] = (64, 64),
        normalize: bool = False,
    ) -> None:
        super().__init__()
        num_outputs, self._nvec = _action_outputs(action_spec)
        self.normalizer = normalizer_for(observation_spec) if normalize else None
        self.encoder = encoder_for(observation_spec)
        self.layers = mlp([self.encoder.size, *hidden, num_outputs], output_gain=POLICY_GAIN)
        log_std = nn.Parameter(torch.zeros(num_outputs)) if action_spec["kind"] == "box" else None
        self.register_parameter("log_std", log_std)

    @override
    def forward(self, observation: Observation, action_mask: Tensor | None = None) -> Answer:
        """Give the distribution's parameters, or the distribution.

        Args:
            observation: ``[N, ...]``, or a mapping of such for dict spaces.
            action_mask: ``[N, A]`` bool, True where an action is allowed, for several choices side by side; None
                allows all.

        Returns:
            ``{"logits": [N, A]}`` for discrete, ``{"loc": [N, D], "scale": [N, D]}`` for continuous actions, a
            :class:`~trainers.distributions.MultiCategorical` ``[N]`` for several discrete ones.

        Raises:
            ValueError: If there is a mask for continuous actions.
        """
        if self.normalizer is not None:
            observation = self.normalizer(observation)
        output = _apply(self.layers, self.encoder(observation))
        if action_mask is not None:
            if self.log_std is not None:
                raise ValueError(
                    "continuous actions cannot be masked : expected no action_mask, got one of shape "
                    f"{tuple(action_mask.shape)}; leave it out of the environment's info"
                )
            output = masked_logits(output, action_mask)
        if self._nvec is not None:
            return MultiCategorical(output, self._nvec)
        if self.log_std is None:
            return {"logits": output}
        return {"loc": output, "scale": self.log_std.exp().expand_as(output)}


class CriticNetwork(nn.Module):
    """State-value function of tanh layers.

    Args:
        observation_spec: Description of the observation space, see the module.
        hidden: Sizes of the hidden layers.
        normalizer: That of the policy, if it has one: shared, not copied.

    Raises:
        ValueError: If the space is not supported.
    """

    def __init__(
        self,
        observation_spec: dict[str, Any],
        *,
        hidden: Sequence[int] = (64, 64),
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.encoder = encoder_for(observation_spec)
        self.layers = mlp([self.encoder.size, *hidden, 1])

    @override
    def forward(self, observation: Observation) -> Tensor:
        """Estimate the discounted return.

        Args:
            observation: ``[N, ...]``, or a mapping of such for dict spaces.

        Returns:
            ``[N]``.
        """
        if self.normalizer is not None:
            observation = self.normalizer(observation)
        return _apply(self.layers, self.encoder(observation)).squeeze(-1)


def _apply(layers: nn.Sequential, features: Tensor) -> Tensor:
    # observations may be integers or of another precision than the network
    return layers(features.to(cast(nn.Linear, layers[0]).weight.dtype))


def _action_outputs(spec: dict[str, Any]) -> tuple[int, list[int] | None]:
    """How many numbers describe the distribution, and the options of each choice where there are several."""
    kind = spec.get("kind")
    if kind == "discrete":
        return int(spec["n"]), None
    shape = [len(spec["nvec"])] if kind == "multi_discrete" else spec.get("shape", [])
    if kind == "box" and len(shape) == 1:
        return int(shape[0]), None
    if kind in ("multi_discrete", "multi_binary") and np.ndim(spec.get("nvec", [])) == len(shape) == 1:
        nvec = [int(n) for n in spec.get("nvec", 2 * np.ones(shape))]
        return sum(nvec), nvec
    described = f" of shape {list(spec['shape'])}" if "shape" in spec else ""
    raise ValueError(
        "action space is not supported : expected kind 'discrete', or 'box', 'multi_discrete' or 'multi_binary' of "
        f"one dimension, got {kind!r}{described}; flatten it with an environment wrapper or pass networks of your own"
    )
