"""Soft actor-critic as LightningModules under automatic optimization: for continuous and for discrete actions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from typing_extensions import override

from trainers import continuous_functional as functional
from trainers.continuous import SquashedActor, TwinCritic
from trainers.distributions import MultiCategorical
from trainers.functional import categorical_entropy
from trainers.networks import ActorNetwork
from trainers.off_policy import target_of
from trainers.off_policy_actor import OffPolicyActorCritic

__all__ = ["SAC", "DiscreteSAC"]


class SAC(OffPolicyActorCritic):
    """Soft actor-critic with a learned temperature, Haarnoja et al. 2018, arXiv:1812.05905, for continuous actions.

    For actions of one dimension within finite bounds, and for observations of vectors, choices, images and dicts of
    them. Meant for a data module with a replay buffer, which trains on samples ``[M]`` (or slices) of it. The policy is
    a squashed normal distribution, whose mode evaluation acts by. Truncated episodes are bootstrapped from, terminated
    ones are not.

    The attached loggers receive, as means over the updates since the last time: ``train/critic_loss``,
    ``train/policy_loss``, ``train/temperature_loss``, ``train/q_mean`` and ``train/entropy`` (an estimate, in nats),
    and ``train/temperature``.

    Args:
        learning_rate: Step size of Adam, > 0.
        gamma: Discount factor, in [0, 1].
        tau: How far the target critics move after each update, in (0, 1].
        temperature: Weight of the entropy against the reward, at the start, > 0.
        learn_temperature: Whether it is adapted so that the entropy is near its target.
        target_entropy: In nats, of actions in [-1, 1]; None takes minus the size of an action.
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
        >>> module = SAC(observation_spec=box, action_spec={**box, "shape": [2], "low": [-2.0] * 2, "high": [2.0] * 2})
        >>> module(torch.zeros(8, 4)).sample().shape
        torch.Size([8, 2])
    """

    algorithm: ClassVar[str] = "SAC"
    """See the base class."""
    log_temperature: nn.Parameter
    """Scalar, the logarithm of the temperature; exists once the spaces are known."""
    target_entropy: float
    """In nats; exists once the spaces are known."""

    def __init__(
        self,
        *,
        learning_rate: float = 3e-4,
        gamma: float = 0.99,
        tau: float = 0.005,
        temperature: float = 1.0,
        learn_temperature: bool = True,
        target_entropy: float | None = None,
        max_grad_norm: float | None = None,
        hidden: tuple[int, ...] = (256, 256),
        observation_spec: dict[str, Any] | None = None,
        action_spec: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._check_range("temperature", temperature, temperature > 0, "a number > 0")
        hidden = tuple(hidden)  # YAML gives a list
        self.save_hyperparameters()
        self._take_settings()

    @override
    def build_networks(self, observation_spec: dict[str, Any], action_spec: dict[str, Any]) -> None:
        """Set the policy, the critics and the temperature.

        Args:
            observation_spec: Plain description of the observation space.
            action_spec: The same for the action space.

        Raises:
            ValueError: If a space is not supported.
        """
        self._take_observation_keys(observation_spec)
        hidden = self.hparams["hidden"]
        self.policy = SquashedActor(observation_spec, action_spec, hidden=hidden)
        num_inputs = int(action_spec["shape"][0])
        self.critic = TwinCritic(observation_spec, num_inputs=num_inputs, hidden=hidden)
        self._finish_building(-float(num_inputs))

    def _finish_building(self, target_entropy: float) -> None:
        """Set what both kinds have in common.

        Args:
            target_entropy: In nats, if none was given.
        """
        given = self.hparams
        self.target_critic = target_of(self.critic)  # type: ignore[assignment]  # a copy is of the same kind
        log_temperature = torch.tensor(math.log(given["temperature"]))
        self.log_temperature = nn.Parameter(log_temperature, requires_grad=given["learn_temperature"])
        self.target_entropy = target_entropy if given["target_entropy"] is None else given["target_entropy"]

    @property
    def temperature(self) -> Tensor:
        """Scalar without gradient, the weight of the entropy of this moment."""
        return self.log_temperature.detach().exp()

    @override
    def targets(self) -> Iterable[tuple[nn.Module, nn.Module]]:
        """The target critics follow the critics."""
        return [(self.target_critic, self.critic)]

    @override
    def action_values(self, rows: TensorDict, observation: Any) -> tuple[Tensor, Tensor]:
        """See the base class; of the successors, the policy of today draws the actions."""
        assert isinstance(self.policy, SquashedActor)
        with torch.no_grad():
            successors = self.successors(rows)
            action, log_prob = self.policy.propose(successors)
            next_q = self.target_critic(successors, action)
            reward = self.reward(rows)
            target = functional.soft_target(reward, next_q, log_prob, self.discount(rows), self.temperature)
        return self.critic(observation, self.policy.to_unit(rows["action"])), target

    @override
    def policy_loss(self, rows: TensorDict, observation: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
        """See the base class; what the temperature learns from is part of it."""
        assert isinstance(self.policy, SquashedActor)
        action, log_prob = self.policy.propose(observation)
        q = self.critic.frozen(observation, action)
        return self._with_temperature(functional.soft_policy_loss(log_prob, q, self.temperature), -log_prob.detach())

    def _with_temperature(self, loss: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the loss of the temperature to that of the policy, if it learns.

        Args:
            loss: Scalar.
            entropy: ``[M]`` of each row, exact or estimated, without gradient.
        """
        noted = {"train/policy_loss": loss, "train/entropy": entropy.mean()}
        if self.log_temperature.requires_grad:
            own = functional.temperature_loss(self.log_temperature, entropy, self.target_entropy)
            noted["train/temperature_loss"] = own
            loss = loss + own
        return loss, noted

    @override
    def _settings_in_force(self) -> dict[str, float]:
        return {"train/temperature": float(self.temperature)}


class DiscreteSAC(SAC):
    """Soft actor-critic for discrete actions, Christodoulou 2019, arXiv:1910.07207.

    Takes the settings of :class:`SAC`. Critics value every action at once and the policy is a categorical distribution,
    so that expectations over actions are exact and none is drawn while training. Where the env masks actions, the
    forbidden ones count for nothing (of the successor, if the sample has ``("next", "action_mask")``). A
    ``target_entropy`` of None takes half of the largest entropy possible; the paper's 0.98 of it leaves policies that
    hardly prefer an action.

    Raises:
        ValueError: If a number is out of range or a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
        >>> module = DiscreteSAC(observation_spec=box, action_spec={"kind": "discrete", "n": 2, "start": 0})
        >>> sorted(module(torch.zeros(8, 4)))
        ['logits']
    """

    algorithm: ClassVar[str] = "DiscreteSAC"
    """See the base class."""

    @override
    def build_networks(self, observation_spec: dict[str, Any], action_spec: dict[str, Any]) -> None:
        """Set the policy, the critics and the temperature.

        Args:
            observation_spec: Plain description of the observation space.
            action_spec: The same for the action space.

        Raises:
            ValueError: If a space is not supported.
        """
        if action_spec.get("kind") != "discrete":
            raise ValueError(
                f"action space is not supported : expected kind 'discrete', got {action_spec.get('kind')!r}; take "
                "SAC for continuous actions"
            )
        self._take_observation_keys(observation_spec)
        hidden, num_actions = self.hparams["hidden"], int(action_spec["n"])
        self.policy = ActorNetwork(observation_spec, action_spec, hidden=hidden)
        self.critic = TwinCritic(observation_spec, num_outputs=num_actions, hidden=hidden)
        self._finish_building(0.5 * math.log(num_actions))

    @override
    def action_values(self, rows: TensorDict, observation: Any) -> tuple[Tensor, Tensor]:
        """See the base class; of the successors, all actions count by their probability."""
        with torch.no_grad():
            successors = self.successors(rows)
            logits = self._logits(rows["next"], successors)
            next_q = self.target_critic(successors)
            value = functional.discrete_soft_value(logits, next_q, self.temperature)
            target = self.reward(rows) + self.discount(rows) * value
        index = rows["action"].expand(2, -1).unsqueeze(-1)
        return self.critic(observation).gather(-1, index).squeeze(-1), target

    @override
    def policy_loss(self, rows: TensorDict, observation: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
        """See the base class."""
        logits = self._logits(rows, observation)
        loss = functional.discrete_soft_policy_loss(logits, self.critic.frozen(observation), self.temperature)
        return self._with_temperature(loss, categorical_entropy(logits.detach()))

    def _logits(self, rows: TensorDict, observation: Any) -> Tensor:
        answer = self.answer(rows, observation)
        assert not isinstance(answer, MultiCategorical)  # there is one choice
        return answer["logits"]
