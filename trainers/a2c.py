"""Advantage actor-critic as a LightningModule under automatic optimization."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tensordict import TensorDict
from torch import Tensor
from torch.optim import RMSprop
from typing_extensions import override

from lit_collect.frames import flatten_rows
from trainers import functional
from trainers.actor_critic import MASK
from trainers.distributions import action_entropy, action_log_prob
from trainers.on_policy import OnPolicy

__all__ = ["A2C"]


class A2C(OnPolicy):
    """Advantage actor-critic, the synchronous form of Mnih et al. 2016, arXiv:1602.01783.

    For the same actions and observations as :class:`~trainers.PPO`. Meant for a data module that collects short batches
    ``[N, T]`` (N env copies, T steps) and trains on each whole batch once: one update for each batch. Policy and critic
    are separate networks of tanh layers, trained by one optimizer.

    Every ``log_every_n_steps`` updates of the Trainer the attached loggers receive ``train/policy_loss``,
    ``train/value_loss`` (means over these updates), ``train/entropy`` (nats), ``train/explained_variance`` (both of the
    last one) and ``train/learning_rate``; from rank zero, whose rows they describe.

    Args:
        learning_rate: Step size of the optimizer, > 0.
        gamma: Discount factor, in [0, 1].
        lambda_: Lambda of generalized advantage estimation, in [0, 1]; 1, the paper's, takes all rewards of the batch.
        entropy_coefficient: Weight of the entropy bonus.
        value_coefficient: Weight of the critic's mean squared error.
        max_grad_norm: Limit on the global norm of the gradient; None leaves it alone. A ``gradient_clip_val`` of the
            Trainer takes its place.
        normalize_advantage: Whether advantages are shifted and scaled to mean 0 and standard deviation 1 in each batch.
        optimizer: ``"rmsprop"``, the paper's, or ``"adam"``.
        anneal: Whether the learning rate falls linearly to 0 with the data module's ``progress``.
        normalize_observation: Whether policy and critic see observations shifted and scaled by running statistics
            (see :class:`~trainers.normalization.RunningNormalizer`).
        scale_reward: Whether rewards are divided by the running standard deviation of the discounted return (see
            :class:`~trainers.normalization.RewardScaler`).
        hidden: Sizes of the hidden layers of each network.
        observation_spec: Plain description of the observation space (see :mod:`trainers.networks`); None takes the
            data module's ``observation_spec`` when the Trainer sets up.
        action_spec: The same for the action space.

    Raises:
        ValueError: If a number is out of range or a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
        >>> module = A2C(observation_spec=box, action_spec={"kind": "multi_discrete", "nvec": [2, 3], "start": [0, 0]})
        >>> module(torch.zeros(8, 4)).sample().shape
        torch.Size([8, 2])
    """

    algorithm: ClassVar[str] = "A2C"
    """See the base class."""

    def __init__(
        self,
        *,
        learning_rate: float = 7e-4,
        gamma: float = 0.99,
        lambda_: float = 1.0,
        entropy_coefficient: float = 0.0,
        value_coefficient: float = 0.5,
        max_grad_norm: float | None = 0.5,
        normalize_advantage: bool = False,
        optimizer: Literal["rmsprop", "adam"] = "rmsprop",
        anneal: bool = False,
        normalize_observation: bool = False,
        scale_reward: bool = False,
        hidden: tuple[int, ...] = (64, 64),
        observation_spec: dict[str, Any] | None = None,
        action_spec: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._check_range("optimizer", optimizer, optimizer in ("rmsprop", "adam"), "'rmsprop' or 'adam'")
        hidden = tuple(hidden)  # YAML gives a list
        self.save_hyperparameters()
        self.optimizer = optimizer
        self._take_settings()

    @override
    def training_step(self, batch: TensorDict, batch_idx: int = 0) -> Tensor:
        """Compute the loss of one batch: policy gradient + weighted value loss - weighted entropy.

        Args:
            batch: ``[N, T]`` (or any) rows of a prepared batch; masked ones count for nothing.
            batch_idx: Given by Lightning, not used.

        Returns:
            Scalar loss.
        """
        if batch.get(MASK, None) is not None:
            batch = flatten_rows(batch)
        advantage = batch["advantage"]
        if self.normalize_advantage:
            advantage = functional.normalize(advantage)
        answer, value = self.evaluate(batch)
        policy_loss = -(action_log_prob(answer, batch["action"]) * advantage).mean()
        value_loss = functional.value_loss(value, batch["value_target"])
        loss = torch.add(policy_loss, value_loss, alpha=self.value_coefficient)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * action_entropy(answer).mean()
        self._statistics.add(policy_loss, value_loss, answer)
        return loss

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create the optimizer over policy and critic.

        Returns:
            RMSprop or Adam.
        """
        if self.optimizer == "adam":
            return self._adam(betas=(0.9, 0.999))
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        return RMSprop(parameters, lr=self.learning_rate, alpha=0.99, eps=1e-5, foreach=True)

    @override
    def _updates_per_report(self) -> int:
        # a batch is small: telling the loggers about each would cost more than the update
        trainer = self._trainer
        return 1 if trainer is None else max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
