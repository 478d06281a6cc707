"""A network of ordinary size for any spaces, to measure with: it is never trained."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lit_collect.envs.spaces import LeafSpec, TreeSpec, nest, sample_leaf


class SmallPolicy(nn.Module):
    """Two hidden layers of 64 on the flat observation, and a distribution for the action.

    Discrete and continuous actions are drawn from what the network says; for other spaces it is computed all the
    same, but the actions are drawn uniformly.

    Args:
        observation_spec: of one env copy.
        action_spec: of one env copy.

    Example:
        >>> spec = TreeSpec.of(spaces.Box(-1, 1, (3,)), "observation")
        >>> policy = SmallPolicy(spec, TreeSpec.of(spaces.Discrete(2), "action"))
        >>> {name: tuple(value.shape) for name, value in policy(torch.zeros(5, 3)).items()}
        {'logits': (5, 2)}
    """

    def __init__(self, observation_spec: TreeSpec, action_spec: TreeSpec) -> None:
        super().__init__()
        self._action = action_spec
        self._paths = [leaf.path for leaf in action_spec.leaves]
        space = action_spec.space
        self._choices = int(space.n) if isinstance(space, spaces.Discrete) else None
        self._continuous = isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f"
        sizes = [int(np.prod(leaf.shape)) for leaf in (*observation_spec.leaves, *action_spec.leaves)]
        inputs = sum(sizes[: len(observation_spec.leaves)])
        outputs = self._choices or sum(sizes[len(observation_spec.leaves) :])
        self._shape = action_spec.leaves[0].shape
        self._rng = np.random.default_rng(0)
        self.net = nn.Sequential(
            nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, max(outputs, 1))
        )

    def forward(self, observation: Any, action_mask: Tensor | None = None) -> dict[str, Any]:
        """Act.

        Args:
            observation: [N, ...], or a (nested) mapping of such tensors.
            action_mask: [N, A] bool, False where an action is not allowed.

        Returns:
            ``logits`` [N, A], ``loc`` and ``scale`` [N, ...], or an ``action``.
        """
        parts = [part.flatten(1).float() if part.ndim > 1 else part[:, None].float() for part in _tensors(observation)]
        out = self.net(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        if self._choices is not None:
            return {"logits": out if action_mask is None else out.masked_fill(~action_mask, -torch.inf)}
        if self._continuous:
            loc = out.reshape(len(out), *self._shape)
            return {"loc": loc, "scale": torch.ones_like(loc)}
        return {"action": self._drawn(len(out), action_mask)}

    def _drawn(self, count: int, mask: Tensor | None) -> Any:
        values = [self._draw(leaf, count, mask) for leaf in self._action.leaves]
        return values[0] if self._action.is_plain else nest(self._paths, values)

    def _draw(self, leaf: LeafSpec, count: int, mask: Tensor | None) -> Tensor:
        if mask is None or not isinstance(leaf.space, spaces.MultiDiscrete) or not self._action.is_plain:
            return torch.from_numpy(sample_leaf(leaf, count, self._rng))
        parts = mask.float().split(leaf.space.nvec.ravel().tolist(), dim=1)
        columns = [torch.multinomial(part, 1) for part in parts]
        return torch.cat(columns, 1).reshape(count, *leaf.shape)


def _tensors(observation: Any) -> list[Tensor]:
    """The tensors of a nested mapping, in its order."""
    if not isinstance(observation, Mapping):
        return [observation]
    return [tensor for value in observation.values() for tensor in _tensors(value)]
