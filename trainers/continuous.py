"""Networks of off-policy actor-critics: policies within the bounds of their actions, and twin critics.

Descriptions of spaces are those of :mod:`trainers.networks`. Shapes: M rows of a minibatch, F features, D the size of a
continuous action, A the number of discrete ones, K members of an ensemble. Critics and training see actions in the
units of the policy, [-1, 1] over the bounds; environments and batches have them in their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainers.continuous_functional import squashed_normal_log_prob
from trainers.encoders import HIDDEN_GAIN, encoder_for
from trainers.networks import POLICY_GAIN, Observation, mlp
from trainers.squashed import ClippedNormal, TanhNormal

__all__ = ["BoundedActor", "DeterministicActor", "EnsembleMLP", "SquashedActor", "TwinCritic", "action_bounds"]

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds on the logarithm of the standard deviation, those of Haarnoja et al.'s code."""


def action_bounds(action_spec: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Middle and half range of a bounded action space.

    Args:
        action_spec: Description of a ``box`` of one dimension, of floats.

    Returns:
        ``[D]`` and ``[D]`` float32: ``center - half_range >= low`` and ``center + half_range <= high`` hold after
        rounding too.

    Raises:
        ValueError: If the space is of another kind, or not bounded in each of its dimensions.

    Example:
        >>> action_bounds({"kind": "box", "shape": [2], "dtype": "float32", "low": [-2.0, 0.0], "high": [2.0, 1.0]})
        (tensor([0.0000, 0.5000]), tensor([2.0000, 0.5000]))
    """
    kind, shape, dtype = (action_spec.get(name) for name in ("kind", "shape", "dtype"))
    if kind != "box" or shape is None or len(shape) != 1 or not str(dtype).startswith("float"):
        described = "" if shape is None else f" of shape {list(shape)} and dtype {dtype}"
        raise ValueError(
            f"action space is not supported : expected kind 'box' of one dimension and of floats, got {kind!r}"
            f"{described}; take an algorithm for such actions, or change them with an environment wrapper"
        )
    low, high = (np.broadcast_to(np.asarray(action_spec[name], np.float32), shape) for name in ("low", "high"))
    bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
    if not bounded.all():
        worst = int(bounded.argmin())
        raise ValueError(
            f"action space has no bounds in dimension {worst} : expected finite low < high, got {low[worst]} and "
            f"{high[worst]}; give the environment bounds with a wrapper"
        )
    center = (0.5 * low.astype(np.float64) + 0.5 * high).astype(np.float32)
    half_range = np.minimum(high - center, center - low)
    while (over := (center + half_range > high) | (center - half_range < low)).any():
        half_range = np.where(over, np.nextafter(half_range, np.float32(0)), half_range)
    return torch.from_numpy(center), torch.from_numpy(half_range)


class BoundedActor(nn.Module):
    """What policies of bounded actions share: layers on an observation, and the bounds as buffers.

    Args:
        observation_spec: Description of the observation space.
        action_spec: Description of a ``box`` of one dimension with finite bounds.
        hidden: Sizes of the hidden layers.
        num_outputs: Outputs for each component of an action.

    Raises:
        ValueError: If a space is not supported.
    """

    center: Tensor
    """``[D]`` middle of the bounds."""
    half_range: Tensor
    """``[D]`` from the middle to either bound."""

    def __init__(
        self, observation_spec: dict[str, Any], action_spec: dict[str, Any], *, hidden: Sequence[int], num_outputs: int
    ) -> None:
        super().__init__()
        center, half_range = action_bounds(action_spec)
        self.register_buffer("center", center)
        self.register_buffer("half_range", half_range)
        self.encoder = encoder_for(observation_spec)
        sizes = [self.encoder.size, *hidden, num_outputs * len(center)]
        self.layers = mlp(sizes, nn.ReLU, output_gain=POLICY_GAIN)

    def to_unit(self, action: Tensor) -> Tensor:
        """Bring actions from their own units to [-1, 1].

        Args:
            action: ``[..., D]`` within the bounds.

        Returns:
            ``[..., D]``.
        """
        return (action - self.center) / self.half_range

    def _outputs(self, observation: Observation) -> Tensor:
        features = self.encoder(observation)
        return self.layers(features.to(cast(nn.Linear, self.layers[0]).weight.dtype))


class SquashedActor(BoundedActor):
    """Stochastic policy: a normal distribution that depends on the observation, squashed into the bounds.

    Args:
        observation_spec: Description of the observation space.
        action_spec: Description of a ``box`` of one dimension with finite bounds.
        hidden: Sizes of the hidden layers.

    Raises:
        ValueError: If a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [3], "dtype": "float32", "low": [-2.0] * 3, "high": [2.0] * 3}
        >>> policy = SquashedActor(box, box, hidden=(16,))
        >>> policy(torch.zeros(8, 3)).mode.shape
        torch.Size([8, 3])
    """

    def __init__(
        self, observation_spec: dict[str, Any], action_spec: dict[str, Any], *, hidden: Sequence[int] = (256, 256)
    ) -> None:
        super().__init__(observation_spec, action_spec, hidden=hidden, num_outputs=2)

    @override
    def forward(self, observation: Observation) -> TanhNormal:
        """Give the distribution of actions in the environment's units.

        Args:
            observation: ``[N, ...]``, or a mapping of such for dict spaces.

        Returns:
            A distribution ``[N]`` of actions ``[N, D]``.
        """
        loc, log_std = self._normal(observation)
        return TanhNormal(loc, log_std, center=self.center, half_range=self.half_range)

    def propose(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Draw actions to learn from, with gradient.

        Args:
            observation: ``[M, ...]``.

        Returns:
            Actions ``[M, D]`` in [-1, 1] and their log-probabilities ``[M]`` in these units, in nats.
        """
        loc, log_std = self._normal(observation)
        noise = torch.randn_like(loc)
        unsquashed = torch.addcmul(loc, log_std.exp(), noise)
        return unsquashed.tanh(), squashed_normal_log_prob(noise, log_std, unsquashed)

    def _normal(self, observation: Observation) -> tuple[Tensor, Tensor]:
        loc, log_std = self._outputs(observation).chunk(2, -1)
        return loc, log_std.clamp(*LOG_STD_RANGE)


class DeterministicActor(BoundedActor):
    """Deterministic policy, which adds noise while it explores: tanh of its layers, over the bounds.

    Args:
        observation_spec: Description of the observation space.
        action_spec: Description of a ``box`` of one dimension with finite bounds.
        hidden: Sizes of the hidden layers.
        noise: Standard deviation of the noise, in units of half the range of an action, >= 0.

    Raises:
        ValueError: If a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [3], "dtype": "float32", "low": [-2.0] * 3, "high": [2.0] * 3}
        >>> policy = DeterministicActor(box, box, hidden=(16,), noise=0.1)
        >>> noisy = policy(torch.zeros(8, 3))
        >>> bool((noisy.mode == 2 * policy.act(torch.zeros(8, 3))).all()), bool((noisy.sample() == noisy.mode).any())
        (True, False)
    """

    def __init__(
        self,
        observation_spec: dict[str, Any],
        action_spec: dict[str, Any],
        *,
        hidden: Sequence[int] = (256, 256),
        noise: float = 0.1,
    ) -> None:
        super().__init__(observation_spec, action_spec, hidden=hidden, num_outputs=1)
        self.noise = noise

    @override
    def forward(self, observation: Observation) -> ClippedNormal:
        """Give the distribution of actions in the environment's units, whose mode is the action without noise.

        Args:
            observation: ``[N, ...]``, or a mapping of such for dict spaces.

        Returns:
            A distribution ``[N]`` of actions ``[N, D]``.
        """
        center, half_range = self.center, self.half_range
        return ClippedNormal(
            center + half_range * self.act(observation),
            self.noise * half_range,
            low=center - half_range,
            high=center + half_range,
        )

    def act(self, observation: Observation) -> Tensor:
        """The actions themselves.

        Args:
            observation: ``[M, ...]``.

        Returns:
            ``[M, D]`` in [-1, 1].
        """
        return self._outputs(observation).tanh()


class EnsembleMLP(nn.Module):
    """Several fully connected networks of one shape, computed at once: one batched product for each layer.

    Weights are orthogonal with zero biases and there is no activation behind the last layer, as in
    :func:`~trainers.networks.mlp`; hidden layers have ReLUs.

    Args:
        sizes: Number of features from input to output, at least two.
        members: K.

    Example:
        >>> EnsembleMLP([4, 16, 1], members=2)(torch.zeros(8, 4)).shape
        torch.Size([2, 8, 1])
    """

    def __init__(self, sizes: Sequence[int], *, members: int = 2) -> None:
        super().__init__()
        last = len(sizes) - 2
        weights, biases = [], []
        for index, (num_in, num_out) in enumerate(pairwise(sizes)):
            weight = torch.empty(members, num_out, num_in)
            for member in weight:
                nn.init.orthogonal_(member, 1.0 if index == last else HIDDEN_GAIN)
            weights.append(nn.Parameter(weight))
            biases.append(nn.Parameter(torch.zeros(members, 1, num_out)))
        self.weights = nn.ParameterList(weights)
        self.biases = nn.ParameterList(biases)

    @override
    def forward(self, features: Tensor) -> Tensor:
        """Apply all members to the same rows.

        Args:
            features: ``[M, F]``.

        Returns:
            ``[K, M, outputs]``.
        """
        return _ensemble(features, zip(self.weights, self.biases, strict=True))

    def frozen(self, features: Tensor, members: int | None = None) -> Tensor:
        """The same without a gradient for the weights: only the features learn from it.

        Args:
            features: ``[M, F]``.
            members: Only the first so many are applied; None is all.

        Returns:
            ``[K, M, outputs]``.
        """
        pairs = zip(self.weights, self.biases, strict=True)
        return _ensemble(features, ((weight.detach()[:members], bias.detach()[:members]) for weight, bias in pairs))


def _ensemble(features: Tensor, layers: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    x = features
    for index, (weight, bias) in enumerate(layers):
        if index:
            x = torch.baddbmm(bias, x.relu(), weight.mT)
        else:  # all members read the same rows: one product, and not K small ones
            joint = torch.addmm(bias.flatten(), x.to(weight.dtype), weight.flatten(0, 1).T)
            x = joint.view(len(x), *weight.shape[:2]).transpose(0, 1)
    return x


class TwinCritic(nn.Module):
    """Two action values of each row, by two networks that differ in their first weights only.

    Of continuous actions it takes the one that was taken; of discrete ones it values all. Both share the encoder of
    the observation.

    Args:
        observation_spec: Description of the observation space.
        num_inputs: D, the size of an action that is read along with the observation; 0 if none is.
        num_outputs: Values of a row: 1, or the number of discrete actions.
        hidden: Sizes of the hidden layers.

    Raises:
        ValueError: If the space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [3], "dtype": "float32", "low": [-1.0] * 3, "high": [1.0] * 3}
        >>> critic = TwinCritic(box, num_inputs=2)
        >>> critic(torch.zeros(8, 3), torch.zeros(8, 2)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        observation_spec: dict[str, Any],
        *,
        num_inputs: int = 0,
        num_outputs: int = 1,
        hidden: Sequence[int] = (256, 256),
    ) -> None:
        super().__init__()
        self.encoder = encoder_for(observation_spec)
        self.members = EnsembleMLP([self.encoder.size + num_inputs, *hidden, num_outputs])

    @override
    def forward(self, observation: Observation, action: Tensor | None = None) -> Tensor:
        """Value rows.

        Args:
            observation: ``[M, ...]``, or a mapping of such for dict spaces.
            action: ``[M, D]`` in [-1, 1]; None where all discrete actions are valued.

        Returns:
            ``[2, M]``, or ``[2, M, A]`` of all discrete actions.
        """
        values = self.members(self._join(self.encoder(observation), action))
        return values if action is None else values.squeeze(-1)

    def frozen(self, observation: Observation, action: Tensor | None = None, *, members: int | None = None) -> Tensor:
        """The same without a gradient for the critics: only the action learns from it.

        Args:
            observation: ``[M, ...]``.
            action: ``[M, D]`` in [-1, 1]; None where all discrete actions are valued.
            members: 1 leaves the second critic out; None is both.

        Returns:
            ``[2, M]``, or ``[2, M, A]``; of one critic, 1 in the place of 2.
        """
        with torch.no_grad():
            features = self.encoder(observation)
        values = self.members.frozen(self._join(features, action), members)
        return values if action is None else values.squeeze(-1)

    def _join(self, features: Tensor, action: Tensor | None) -> Tensor:
        return features if action is None else torch.cat((features.to(action.dtype), action), -1)
