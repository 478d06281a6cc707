"""Proximal policy optimization as a LightningModule under automatic optimization."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from lit_collect.frames import flatten_rows
from trainers import functional
from trainers.actor_critic import MASK
from trainers.distributions import action_entropy, action_log_prob
from trainers.on_policy import OnPolicy

__all__ = ["PPO"]


class PPO(OnPolicy):
    """Proximal policy optimization, Schulman et al. 2017, arXiv:1707.06347.

    For discrete actions (one, several or binary ones, with masks where the env gives them) and continuous ones, and for
    observations of vectors, choices, images and dicts of them.

    Meant for a data module that collects batches ``[N, T]`` (N env copies, T steps), passes each once through
    :meth:`prepare_rollout` and then trains on minibatches ``[M]`` of its rows for some epochs. Policy and critic are
    separate networks of tanh layers, trained by one Adam optimizer.

    Once for each collected batch the attached loggers receive ``train/policy_loss``, ``train/value_loss`` (means over
    the updates on the batch before), ``train/entropy`` and ``train/approx_kl`` (nats), ``train/clip_fraction`` (all
    three for the last update on it), ``train/explained_variance`` and ``train/learning_rate``; from rank zero, whose
    rows they describe.

    Args:
        learning_rate: Step size of Adam, > 0.
        gamma: Discount factor, in [0, 1].
        lambda_: Lambda of generalized advantage estimation, in [0, 1].
        clip: The probability ratio is clipped to ``[1 - clip, 1 + clip]``, > 0.
        entropy_coefficient: Weight of the entropy bonus.
        value_coefficient: Weight of the critic's mean squared error.
        max_grad_norm: Limit on the global norm of the gradient; None leaves it alone. A ``gradient_clip_val`` of the
            Trainer takes its place.
        normalize_advantage: Whether advantages are shifted and scaled to mean 0 and standard deviation 1 in each
            minibatch.
        anneal: Whether learning rate and clip fall linearly to 0 with the data module's ``progress``.
        normalize_observation: Whether policy and critic see observations shifted and scaled by running statistics
            that each collected batch goes into (see :class:`~trainers.normalization.RunningNormalizer`); those of
            bytes are divided by 255 with or without it.
        scale_reward: Whether rewards are divided by the running standard deviation of the discounted return (see
            :class:`~trainers.normalization.RewardScaler`). What is collected and logged stays as it is.
        hidden: Sizes of the hidden layers of each network.
        observation_spec: Plain description of the observation space (see :mod:`trainers.networks`); None takes the
            data module's ``observation_spec`` when the Trainer sets up.
        action_spec: The same for the action space.

    Raises:
        ValueError: If a number is out of range or a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
        >>> module = PPO(observation_spec=box, action_spec={"kind": "discrete", "n": 2, "start": 0})
        >>> sorted(module(torch.zeros(8, 4)))
        ['logits']
    """

    algorithm: ClassVar[str] = "PPO"
    """See the base class."""

    def __init__(
        self,
        *,
        learning_rate: float = 3e-4,
        gamma: float = 0.99,
        lambda_: float = 0.95,
        clip: float = 0.2,
        entropy_coefficient: float = 0.0,
        value_coefficient: float = 0.5,
        max_grad_norm: float | None = 0.5,
        normalize_advantage: bool = True,
        anneal: bool = False,
        normalize_observation: bool = False,
        scale_reward: bool = False,
        hidden: tuple[int, ...] = (64, 64),
        observation_spec: dict[str, Any] | None = None,
        action_spec: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._check_range("clip", clip, clip > 0, "a number > 0")
        hidden = tuple(hidden)  # YAML gives a list
        self.save_hyperparameters()
        self.clip = clip
        self._clip = clip  # the one in force: `clip`, annealed
        self._take_settings()

    @override
    def training_step(self, minibatch: TensorDict, batch_idx: int = 0) -> Tensor:
        """Compute the loss of one minibatch: policy loss + weighted value loss - weighted entropy.

        Args:
            minibatch: ``[M]`` rows of a prepared batch, or the whole of it.
            batch_idx: Given by Lightning, not used.

        Returns:
            Scalar loss.
        """
        if minibatch.batch_dims > 1 and minibatch.get(MASK, None) is not None:
            minibatch = flatten_rows(minibatch)  # a whole batch: leave out the rows that do not count
        advantage = minibatch["advantage"]
        if self.normalize_advantage:
            advantage = functional.normalize(advantage)
        answer, value = self.evaluate(minibatch)
        log_prob = action_log_prob(answer, minibatch["action"])
        old_log_prob = minibatch["log_prob"]
        policy_loss = functional.ppo_policy_loss(log_prob, old_log_prob, advantage, self._clip)
        value_loss = functional.value_loss(value, minibatch["value_target"])
        loss = torch.add(policy_loss, value_loss, alpha=self.value_coefficient)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * action_entropy(answer).mean()
        self._statistics.add(policy_loss, value_loss, answer)
        self._statistics.compare(log_prob, old_log_prob, self._clip)
        return loss

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create Adam over policy and critic.

        Returns:
            One optimizer.
        """
        return self._adam(betas=(0.9, 0.999))

    @override
    def _anneal(self, num_frames: int) -> float:
        remaining = super()._anneal(num_frames)
        self._clip = self.clip * remaining
        return remaining
