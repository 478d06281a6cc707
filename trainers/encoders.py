"""From observations of every kind to a vector of features, chosen by the description of the space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["FlatObservation", "ImageEncoder", "MappingEncoder", "encoder_for", "is_image"]

HIDDEN_GAIN = math.sqrt(2)
"""Gain of the orthogonal weights of hidden layers."""
MIN_IMAGE_SIZE = 36
"""Pixels that the convolutions need in each direction."""
_KINDS = ("box", "discrete", "multi_discrete", "multi_binary")


class FlatObservation(nn.Module):
    """Turns an observation into a vector: boxes are flattened, choices become one-hot, bytes are divided by 255.

    Args:
        spec: Description of the observation space: ``box``, ``discrete``, ``multi_discrete`` or ``multi_binary``.

    Raises:
        ValueError: If the space is of another kind.

    Example:
        >>> FlatObservation({"kind": "discrete", "n": 3, "start": 1})(torch.tensor([1, 3]))
        tensor([[1., 0., 0.],
                [0., 0., 1.]])
    """

    size: int
    """Number of features."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        kind = spec.get("kind")
        if kind not in _KINDS:
            raise ValueError(
                f"observation space is not supported : expected kind {', '.join(map(repr, _KINDS))}, 'dict' or "
                f"'tuple', got {kind!r}; flatten it with an environment wrapper or pass networks of your own"
            )
        self._one_hot = kind in ("discrete", "multi_discrete")
        if self._one_hot:
            nvec = np.asarray(spec["n"] if kind == "discrete" else spec["nvec"])
            start = np.broadcast_to(spec.get("start", 0), nvec.shape)
            self.size = int(nvec.sum())
            self._dims = nvec.ndim
            self._choices = list(zip(start.reshape(-1).tolist(), nvec.reshape(-1).tolist(), strict=True))
        else:
            self.size = math.prod(spec["shape"])
            self._dims = len(spec["shape"])
        self._is_bytes = spec.get("dtype") == "uint8"

    @override
    def forward(self, observation: Tensor) -> Tensor:
        """Flatten one observation.

        Args:
            observation: ``[N, *shape]`` of any dtype for a box, ``[N]`` or ``[N, D]`` int64 for choices.

        Returns:
            ``[N, F]``; float where it was one-hot encoded or divided, else of the observation's dtype.
        """
        if self._one_hot:
            values = self._as_vector(observation).unbind(-1)
            pairs = zip(values, self._choices, strict=True)
            return torch.cat([nn.functional.one_hot(v - start, n) for v, (start, n) in pairs], -1).float()
        if self._is_bytes:
            observation = observation / 255
        return self._as_vector(observation)

    def _as_vector(self, observation: Tensor) -> Tensor:
        if self._dims == 1:
            return observation
        return observation.unsqueeze(-1) if self._dims == 0 else observation.flatten(-self._dims)


class ImageEncoder(nn.Module):
    """The convolutions of Mnih et al. 2015, "Human-level control", with orthogonal weights, on bytes divided by 255.

    Args:
        spec: Description of a ``box`` of uint8 that :func:`is_image`; the smaller of its first and last dimension is
            taken for the channels.

    Example:
        >>> encoder = ImageEncoder({"kind": "box", "shape": [84, 84, 3], "dtype": "uint8"})
        >>> encoder(torch.zeros(2, 84, 84, 3, dtype=torch.uint8)).shape
        torch.Size([2, 512])
    """

    size: int = 512
    """Number of features."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        shape = list(spec["shape"])
        self._channels_last = shape[-1] < shape[0]
        channels, *size = [shape[-1], *shape[:-1]] if self._channels_last else shape
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            size = [(length - kernel) // stride + 1 for length in size]
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * math.prod(size), self.size),
            nn.ReLU(),
        )
        for layer in self.layers:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.orthogonal_(layer.weight, HIDDEN_GAIN)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    @override
    def forward(self, observation: Tensor) -> Tensor:
        """Look at images.

        Args:
            observation: ``[N, C, H, W]`` or ``[N, H, W, C]`` uint8.

        Returns:
            ``[N, 512]``, not negative.
        """
        if self._channels_last:
            observation = observation.movedim(-1, -3)
        leading = observation.shape[:-3]
        weight = self.layers[0].weight
        assert isinstance(weight, Tensor)
        features = self.layers(observation.reshape(-1, *observation.shape[-3:]).to(weight.dtype) / 255)
        return features.view(*leading, self.size)


class MappingEncoder(nn.Module):
    """The features of all parts of a dict (or tuple) observation, one after the other.

    Args:
        encoders: By name in the observation, each with its ``size``.
    """

    size: int
    """Number of features."""

    def __init__(self, encoders: Mapping[str, Encoder]) -> None:
        super().__init__()
        self._names = list(encoders)
        self.parts = nn.ModuleList(encoders.values())  # names may hold dots, which those of modules must not
        self.size = sum(encoder.size for encoder in encoders.values())

    @override
    def forward(self, observation: Mapping[str, Any]) -> Tensor:
        """Encode and join.

        Args:
            observation: By name, each ``[N, ...]``.

        Returns:
            ``[N, F]`` float.
        """
        features = [part(observation[name]) for name, part in zip(self._names, self.parts, strict=True)]
        return torch.cat([part if part.is_floating_point() else part.float() for part in features], -1)


Encoder = FlatObservation | ImageEncoder | MappingEncoder


def is_image(spec: Mapping[str, Any]) -> bool:
    """Whether a space is one of images, large enough for convolutions: uint8 of ``[C, H, W]`` or ``[H, W, C]``.

    Args:
        spec: Description of the space.
    """
    if spec.get("kind") != "box" or spec.get("dtype") != "uint8" or len(spec["shape"]) != 3:
        return False
    return min(sorted(spec["shape"])[1:]) >= MIN_IMAGE_SIZE


def encoder_for(spec: Mapping[str, Any]) -> Encoder:
    """The encoder of an observation space: convolutions for images, one encoder per key for dicts, else flat.

    Args:
        spec: Description of the observation space.

    Raises:
        ValueError: If it is not supported.

    Example:
        >>> pair = {"kind": "dict", "spaces": {"a": {"kind": "discrete", "n": 3}, "b": {"kind": "box", "shape": [2]}}}
        >>> encoder_for(pair)({"a": torch.tensor([1]), "b": torch.tensor([[5.0, 6.0]])})
        tensor([[0., 1., 0., 5., 6.]])
    """
    kind = spec.get("kind")
    if kind in ("dict", "tuple"):
        inner = spec["spaces"] if kind == "dict" else {str(i): part for i, part in enumerate(spec["spaces"])}
        return MappingEncoder({name: encoder_for(part) for name, part in inner.items()})
    return ImageEncoder(spec) if is_image(spec) else FlatObservation(spec)
