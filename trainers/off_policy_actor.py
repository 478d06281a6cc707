"""What SAC and TD3 share: one loss for twin critics and policy, their optimizer, and the noise of their updates."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Adam
from typing_extensions import override

from trainers.continuous import TwinCritic
from trainers.continuous_functional import twin_q_loss
from trainers.networks import Observation
from trainers.off_policy import OffPolicy

__all__ = ["OffPolicyActorCritic"]

NOISE_STATE = "noise_state"
"""Where a checkpoint keeps the random state that the updates draw from."""


class OffPolicyActorCritic(OffPolicy):
    """A policy and twin critics that are trained on the same sample, by one loss and one optimizer.

    All gradients are taken before any weight moves: the policy learns from critics that are one step older than where
    the papers take them in turn, which does not show. In return there is one backward pass and one step of one
    optimizer, which every precision, gradient clipping and distributed strategy of the Trainer is made for.

    Subclasses build ``policy``, ``critic`` and ``target_critic``, and give :meth:`action_values` and
    :meth:`policy_loss`.
    """

    critic: TwinCritic  # type: ignore[assignment]  # of actions, not of states
    """Maps observations (and actions) to two action values; exists once the spaces are known."""
    target_critic: TwinCritic
    """Follows :attr:`critic` slowly."""
    _noise_state: dict[str, Tensor] | None = None

    @override
    def forward(self, observation: Observation, action_mask: Tensor | None = None) -> Any:
        """Give the action distribution, as the policy does.

        Args:
            observation: ``[N, ...]``, or a mapping of such for dict spaces.
            action_mask: ``[N, A]`` bool, True where a discrete action is allowed; None allows all.

        Returns:
            What the policy answers.
        """
        return self.policy(observation) if action_mask is None else self.policy(observation, action_mask)

    @override
    def training_step(self, sample: TensorDict, batch_idx: int = 0) -> Tensor:
        """Compute the loss of one sample: that of the critics, and that of the policy.

        Args:
            sample: ``[M]`` or ``[S, L]`` rows with observation, ``action`` and ``("next", ...)`` observation,
                ``reward``, ``terminated``; what else a sample may say is in :class:`~trainers.off_policy.OffPolicy`.
            batch_idx: Given by Lightning, not used.

        Returns:
            Scalar loss.
        """
        rows = self.rows(sample)
        observation = self.observed(rows)
        q, target = self.action_values(rows, observation)
        critic_loss = twin_q_loss(q, target, self.weights(rows))
        loss, noted = self.policy_loss(rows, observation)
        q = q.detach()
        self.report_errors(rows, (q - target).abs().mean(0))
        self.note({"train/critic_loss": critic_loss, "train/q_mean": q.mean(), **noted})
        return critic_loss if loss is None else critic_loss + loss

    def action_values(self, rows: TensorDict, observation: Any) -> tuple[Tensor, Tensor]:
        """Value the actions that were taken.

        Args:
            rows: ``[M]``.
            observation: What :meth:`observed` gave of them.

        Returns:
            ``[2, M]`` values by both critics, with gradient, and their target ``[M]``, without.
        """
        raise NotImplementedError(f"{type(self).__name__} has to value actions")

    def policy_loss(self, rows: TensorDict, observation: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Compute what the policy learns from, without a gradient for the critics.

        Args:
            rows: ``[M]``.
            observation: What :meth:`observed` gave of them.

        Returns:
            Scalar loss, or None if the policy does not learn this time, and scalars for the loggers by name.
        """
        raise NotImplementedError(f"{type(self).__name__} has to train its policy")

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create Adam over everything that is learned.

        Returns:
            One optimizer.
        """
        learned = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return Adam(learned, lr=self.learning_rate, fused=self._fused())

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random state too: updates draw actions, and are to draw the same ones after a break.

        Args:
            checkpoint: What is saved.
        """
        super().on_save_checkpoint(checkpoint)
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        checkpoint[NOISE_STATE] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the random state until training goes on; merely loading a module changes no global state.

        Args:
            checkpoint: What was saved.
        """
        super().on_load_checkpoint(checkpoint)
        self._noise_state = checkpoint.get(NOISE_STATE)

    @override
    def on_train_start(self) -> None:
        """Go on with the noise where a checkpoint left it."""
        state, self._noise_state = self._noise_state, None
        if state is None:
            return
        torch.set_rng_state(state["cpu"].cpu())
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)
