"""Twin delayed deep deterministic policy gradient as a LightningModule under automatic optimization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from trainers import continuous_functional as functional
from trainers.continuous import DeterministicActor, TwinCritic
from trainers.off_policy import target_of
from trainers.off_policy_actor import OffPolicyActorCritic

__all__ = ["TD3"]


class TD3(OffPolicyActorCritic):
    """Twin delayed DDPG, Fujimoto et al. 2018, arXiv:1802.09477, for continuous actions.

    For actions of one dimension within finite bounds, and for observations of vectors, choices, images and dicts of
    them. Meant for a data module with a replay buffer, which trains on samples ``[M]`` (or slices) of it. The policy
    answers with a normal distribution around its action, clipped to the bounds; evaluation acts by the mode, which is
    the action without noise. Truncated episodes are bootstrapped from, terminated ones are not.

    The attached loggers receive, as means over the updates since the last time: ``train/critic_loss``,
    ``train/policy_loss`` (over those that trained the policy) and ``train/q_mean``.

    Args:
        learning_rate: Step size of Adam, > 0.
        gamma: Discount factor, in [0, 1].
        tau: How far the target networks move each time, in (0, 1].
        policy_delay: The policy learns, and all target networks move, after so many updates of the critics, >= 1.
        exploration_noise: Standard deviation of the noise on actions that are collected, in units of half their range,
            >= 0.
        target_noise: The same for the target policy's actions, >= 0.
        noise_clip: Bound on the noise of the target policy's actions, in the same units, >= 0.
        max_grad_norm: Limit on the global norm of the gradient; None leaves it alone. A ``gradient_clip_val`` of the
            Trainer takes its place.
        hidden: Sizes of the hidden layers of each network.
        observation_spec: Plain description of the observation space (see :mod:`trainers.networks`); None takes the
            data module's ``observation_spec`` when the Trainer sets up.
        action_spec: The same for the action space.

    Raises:
        ValueError: If a number is out of range or a space is not supported: an action without bounds among them.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
        >>> module = TD3(observation_spec=box, action_spec={**box, "shape": [2], "low": [-2.0] * 2, "high": [2.0] * 2})
        >>> module(torch.zeros(8, 4)).mode.shape
        torch.Size([8, 2])
    """

    algorithm: ClassVar[str] = "TD3"
    """See the base class."""
    target_policy: DeterministicActor
    """Follows :attr:`policy` slowly; exists once the spaces are known."""

    def __init__(
        self,
        *,
        learning_rate: float = 3e-4,
        gamma: float = 0.99,
        tau: float = 0.005,
        policy_delay: int = 2,
        exploration_noise: float = 0.1,
        target_noise: float = 0.2,
        noise_clip: float = 0.5,
        max_grad_norm: float | None = None,
        hidden: tuple[int, ...] = (256, 256),
        observation_spec: dict[str, Any] | None = None,
        action_spec: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._check_range("policy_delay", policy_delay, policy_delay >= 1, "a number >= 1")
        self._check_range("exploration_noise", exploration_noise, exploration_noise >= 0, "a number >= 0")
        self._check_range("target_noise", target_noise, target_noise >= 0, "a number >= 0")
        self._check_range("noise_clip", noise_clip, noise_clip >= 0, "a number >= 0")
        hidden = tuple(hidden)  # YAML gives a list
        self.save_hyperparameters()
        self._take_settings()
        self.policy_delay = self.target_update_every = policy_delay
        self.target_noise = target_noise
        self.noise_clip = noise_clip

    @override
    def build_networks(self, observation_spec: dict[str, Any], action_spec: dict[str, Any]) -> None:
        """Set the policy, the critics and what follows them.

        Args:
            observation_spec: Plain description of the observation space.
            action_spec: The same for the action space.

        Raises:
            ValueError: If a space is not supported.
        """
        self._take_observation_keys(observation_spec)
        hidden, noise = self.hparams["hidden"], self.hparams["exploration_noise"]
        self.policy = DeterministicActor(observation_spec, action_spec, hidden=hidden, noise=noise)
        self.critic = TwinCritic(observation_spec, num_inputs=int(action_spec["shape"][0]), hidden=hidden)
        self.target_policy = target_of(self.policy)  # type: ignore[assignment]  # a copy is of the same kind
        self.target_critic = target_of(self.critic)  # type: ignore[assignment]

    @override
    def targets(self) -> Iterable[tuple[nn.Module, nn.Module]]:
        """Policy and critics have one each."""
        return [(self.target_critic, self.critic), (self.target_policy, self.policy)]

    @override
    def action_values(self, rows: TensorDict, observation: Any) -> tuple[Tensor, Tensor]:
        """See the base class; of the successors, the target policy's actions count, with a little noise."""
        assert isinstance(self.policy, DeterministicActor)
        with torch.no_grad():
            successors = self.successors(rows)
            action = self.target_policy.act(successors)
            action = functional.smoothed_action(action, self.target_noise * torch.randn_like(action), self.noise_clip)
            next_q = self.target_critic(successors, action)
            target = functional.clipped_double_target(self.reward(rows), next_q, self.discount(rows))
        return self.critic(observation, self.policy.to_unit(rows["action"])), target

    @override
    def policy_loss(self, rows: TensorDict, observation: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
        """See the base class; None in the updates that leave the policy alone."""
        assert isinstance(self.policy, DeterministicActor)
        if self._trains_policy:
            q = self.critic.frozen(observation, self.policy.act(observation), members=1)
            loss = functional.deterministic_policy_loss(q)
            return loss, {"train/policy_loss": loss}
        if self._trainer is None or self.trainer.world_size == 1:
            return None, {}
        # ranks that average gradients wait for those of all parameters
        return 0.0 * torch.stack([parameter.sum() for parameter in self.policy.parameters()]).sum(), {}

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Take the policy out of updates that leave it alone: with a gradient of 0, momentum would go on moving it.

        Args:
            optimizer: Given by Lightning, not used.
        """
        if not self._trains_policy:
            for parameter in self.policy.parameters():
                parameter.grad = None

    @property
    def _trains_policy(self) -> bool:
        return (self.num_updates + 1) % self.policy_delay == 0
