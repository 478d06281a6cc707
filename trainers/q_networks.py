"""Networks of action values for discrete actions, and the epsilon-greedy policy that acts by them.

The spaces are described as in :mod:`trainers.networks`; N stands for any leading dimensions, A for the number of
actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainers.encoders import encoder_for
from trainers.networks import Observation, mlp
from trainers.off_policy_functional import dueling_values, epsilon_greedy_logits

__all__ = ["DuelingHead", "EpsilonGreedy", "QNetwork", "num_actions"]


def num_actions(action_spec: dict[str, Any]) -> int:
    """How many actions a space has.

    Args:
        action_spec: Description of the action space.

    Raises:
        ValueError: If its actions are not one choice.

    Example:
        >>> num_actions({"kind": "discrete", "n": 2, "start": 0})
        2
    """
    if action_spec.get("kind") != "discrete":
        raise ValueError(
            f"action space is not supported : expected kind 'discrete' to learn a value for each action, got "
            f"{action_spec.get('kind')!r}; flatten several choices into one with an environment wrapper, or use an "
            f"algorithm for continuous actions"
        )
    return int(action_spec["n"])


class QNetwork(nn.Module):
    """The value of each action: features of the observation, then layers of rectified linear units.

    Args:
        observation_spec: Description of the observation space; images go through convolutions.
        action_spec: Description of the action space, ``discrete``.
        hidden: Sizes of the hidden layers.
        dueling: Whether the last hidden layer is split into two streams (see :class:`DuelingHead`).

    Raises:
        ValueError: If a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32"}
        >>> QNetwork(box, {"kind": "discrete", "n": 2, "start": 0})(torch.zeros(8, 4)).shape
        torch.Size([8, 2])
    """

    def __init__(
        self,
        observation_spec: dict[str, Any],
        action_spec: dict[str, Any],
        *,
        hidden: Sequence[int] = (256, 256),
        dueling: bool = False,
    ) -> None:
        super().__init__()
        actions = num_actions(action_spec)
        self.encoder = encoder_for(observation_spec)
        size = self.encoder.size
        self.layers = DuelingHead(size, actions, hidden=hidden) if dueling else mlp([size, *hidden, actions], nn.ReLU)

    @override
    def forward(self, observation: Observation) -> Tensor:
        """Estimate the discounted return after each action.

        Args:
            observation: ``[N, ...]``, or a mapping of such for dict spaces.

        Returns:
            ``[N, A]``.
        """
        # observations may be integers or of another precision than the network
        return self.layers(self.encoder(observation).to(next(self.layers.parameters()).dtype))


class DuelingHead(nn.Module):
    """Hidden layers that end in two streams, one for the state's value and one for the actions' advantages.

    Wang et al. 2016, arXiv:1511.06581. Each stream has a last hidden layer of its own.

    Args:
        size: Number of features.
        actions: Number of actions.
        hidden: Sizes of the hidden layers, that of the streams last.

    Example:
        >>> DuelingHead(4, 2, hidden=(8, 8))(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(self, size: int, actions: int, *, hidden: Sequence[int]) -> None:
        super().__init__()
        shared, own = list(hidden[:-1]), list(hidden[-1:])
        self.shared = nn.Sequential(mlp([size, *shared], nn.ReLU), nn.ReLU()) if shared else nn.Sequential()
        size = shared[-1] if shared else size
        self.value = mlp([size, *own, 1], nn.ReLU)
        self.advantage = mlp([size, *own, actions], nn.ReLU)

    @override
    def forward(self, features: Tensor) -> Tensor:
        """Join both streams: ``[N, F] -> [N, A]``."""
        features = self.shared(features)
        return dueling_values(self.value(features), self.advantage(features))


class EpsilonGreedy(nn.Module):
    """Acts by a network of action values: the best action, or with probability epsilon a random one.

    It answers log-probabilities, so that whoever draws from them acts epsilon-greedily, and whoever takes the likeliest
    action acts greedily. Epsilon is a buffer: it is published with the weights, and part of checkpoints.

    Args:
        network: ``[N, ...] -> [N, A]``.
        epsilon: Probability at the start, in [0, 1].

    Example:
        >>> policy = EpsilonGreedy(nn.Linear(4, 2), epsilon=1.0)
        >>> policy(torch.zeros(3, 4))["logits"].exp()[0].detach()
        tensor([0.5000, 0.5000])
    """

    epsilon: Tensor
    """Scalar, probability of an action at random."""

    def __init__(self, network: nn.Module, epsilon: float = 1.0) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("epsilon", torch.tensor(float(epsilon)))

    @override
    def forward(self, observation: Observation, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Give the log-probability of each action.

        Args:
            observation: ``[N, ...]``, or a mapping of such for dict spaces.
            action_mask: ``[N, A]`` bool, True where an action is allowed; None allows all.

        Returns:
            ``{"logits": [N, A]}``.
        """
        return {"logits": epsilon_greedy_logits(self.network(observation), self.epsilon, action_mask)}
