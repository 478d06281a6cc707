"""Proximal policy optimization as a LightningModule under automatic optimization."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from trainers import functional
from trainers.actor_critic import MASK, ActorCritic, trajectory_ends
from trainers.networks import action_entropy, action_log_prob

__all__ = ["PPO"]


class PPO(ActorCritic):
    """Proximal policy optimization, Schulman et al. 2017, arXiv:1707.06347, for discrete and continuous actions.

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
        hidden: tuple[int, ...] = (64, 64),
        observation_spec: dict[str, Any] | None = None,
        action_spec: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._check_range("gamma", gamma, 0.0 <= gamma <= 1.0, "a number in [0, 1]")
        self._check_range("lambda_", lambda_, 0.0 <= lambda_ <= 1.0, "a number in [0, 1]")
        self._check_range("learning_rate", learning_rate, learning_rate > 0, "a number > 0")
        self._check_range("clip", clip, clip > 0, "a number > 0")
        self._check_range(
            "max_grad_norm", max_grad_norm, max_grad_norm is None or max_grad_norm > 0, "None or a number > 0"
        )
        hidden = tuple(hidden)  # YAML gives a list
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.gamma = gamma
        self.lambda_ = lambda_
        self.clip = clip
        self.entropy_coefficient = entropy_coefficient
        self.value_coefficient = value_coefficient
        self.max_grad_norm = max_grad_norm
        self.normalize_advantage = normalize_advantage
        self.anneal = anneal
        self._clip = clip  # the one in force: `clip`, annealed
        self._statistics = _UpdateStatistics()
        if observation_spec is not None and action_spec is not None:
            self._build_networks(observation_spec, action_spec)

    @torch.no_grad()
    def prepare_rollout(self, batch: TensorDict) -> TensorDict:
        """Turn a collected batch into training rows: advantages and value targets, once for each batch.

        Advantages are bootstrapped from the true successor's value where an episode was truncated or the batch ends,
        and from nothing where it terminated. Learning rate and clip are annealed here, and the statistics of the
        updates since the last call go to the loggers.

        Args:
            batch: ``[N, T]`` rows of env copies over time, with ``observation``, ``action``, ``log_prob`` and
                ``("next", ...)`` ``observation``, ``reward``, ``terminated``, ``done``; with trajectory ids or a mask,
                rows of several trajectories and padding may share a line.

        Returns:
            A new ``[N, T]`` TensorDict of ``observation``, ``action``, ``log_prob``, ``value``, ``advantage``,
            ``value_target`` (float, ``[N, T]``) and, if the batch has it, ``("collector", "mask")``.
        """
        self._log_statistics()
        if self.anneal:
            self._clip = self.clip * self._anneal_learning_rate(batch.numel())
        # Every successor is evaluated, though most are the next row's observation: for small networks a second call
        # costs less than finding out which ones are not, and it is right for every way of cutting trajectories.
        value = self.critic(batch[self.observation_key])
        next_value = self.critic(batch["next", self.observation_key])
        advantage = functional.generalized_advantage(
            reward=batch["next", "reward"].squeeze(-1).to(value.dtype),
            value=value,
            next_value=next_value,
            discount=self.gamma * (~batch["next", "terminated"].squeeze(-1)).to(value.dtype),
            done=trajectory_ends(batch),
            lambda_=self.lambda_,
        )
        value_target = advantage + value
        prepared = TensorDict(
            {
                self.observation_key: batch[self.observation_key],
                "action": batch["action"],
                "log_prob": batch["log_prob"],
                "value": value,
                "advantage": advantage,
                "value_target": value_target,
            },
            batch_size=batch.batch_size,
            device=batch.device,
        )
        mask = batch.get(MASK, None)
        if mask is not None:
            prepared[MASK] = mask
        self._statistics.start(value, value_target, mask)
        return prepared

    @override
    def training_step(self, minibatch: TensorDict, batch_idx: int = 0) -> Tensor:
        """Compute the loss of one minibatch: policy loss + weighted value loss - weighted entropy.

        Args:
            minibatch: ``[M]`` rows of a prepared batch.
            batch_idx: Given by Lightning, not used.

        Returns:
            Scalar loss.
        """
        observation = minibatch[self.observation_key]
        advantage = minibatch["advantage"]
        if self.normalize_advantage:
            advantage = functional.normalize(advantage)
        parameters = self.policy(observation)
        log_prob = action_log_prob(parameters, minibatch["action"])
        old_log_prob = minibatch["log_prob"]
        policy_loss = functional.ppo_policy_loss(log_prob, old_log_prob, advantage, self._clip)
        value_loss = functional.value_loss(self.critic(observation), minibatch["value_target"])
        loss = torch.add(policy_loss, value_loss, alpha=self.value_coefficient)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * action_entropy(parameters).mean()
        self._statistics.add(policy_loss, value_loss, log_prob, old_log_prob, parameters)
        return loss

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create Adam over policy and critic.

        Returns:
            One optimizer.
        """
        return self._adam(betas=(0.9, 0.999))

    @override
    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Limit the global norm of the gradient to ``max_grad_norm``.

        Args:
            optimizer: Holds the parameters.
            gradient_clip_val: The Trainer's own setting, which takes precedence.
            gradient_clip_algorithm: The Trainer's own setting.
        """
        if gradient_clip_val is not None or self.max_grad_norm is None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        _clip_global_norm(optimizer, self.max_grad_norm)

    @override
    def on_train_end(self) -> None:
        """Hand the statistics of the last batch to the loggers."""
        self._log_statistics()

    def _log_statistics(self) -> None:
        # straight to the loggers: each `self.log` would cost as much as half an update
        if self.loggers and self._statistics.num_updates:
            metrics = self._statistics.compute(self._clip)
            metrics["train/learning_rate"] = self._optimizer().param_groups[0]["lr"]
            for logger in self.loggers:
                logger.log_metrics(metrics, step=self.global_step)
        self._statistics = _UpdateStatistics()


class _UpdateStatistics:
    """What the loggers are told about the updates on one batch. Keeps tensors, so that no update waits for a device."""

    def __init__(self) -> None:
        self._losses: list[tuple[Tensor, Tensor]] = []
        self._log_probs: tuple[Tensor, Tensor]
        self._parameters: dict[str, Tensor]
        self._fit: tuple[Tensor, Tensor] | None = None

    @property
    def num_updates(self) -> int:
        return len(self._losses)

    def start(self, value: Tensor, value_target: Tensor, mask: Tensor | None) -> None:
        self._fit = (value, value_target) if mask is None else (value[mask], value_target[mask])

    def add(
        self,
        policy_loss: Tensor,
        value_loss: Tensor,
        log_prob: Tensor,
        old_log_prob: Tensor,
        parameters: dict[str, Tensor],
    ) -> None:
        self._losses.append((policy_loss.detach(), value_loss.detach()))
        self._log_probs = (log_prob.detach(), old_log_prob)
        self._parameters = {name: tensor.detach() for name, tensor in parameters.items()}

    def compute(self, clip: float) -> dict[str, float]:
        policy_losses, value_losses = zip(*self._losses, strict=True)
        log_probs = self._log_probs
        values = {
            "train/policy_loss": torch.stack(policy_losses).mean(),
            "train/value_loss": torch.stack(value_losses).mean(),
            "train/entropy": action_entropy(self._parameters).mean(),
            "train/approx_kl": functional.approx_kl(*log_probs),
            "train/clip_fraction": functional.clip_fraction(*log_probs, clip),
        }
        if self._fit is not None:
            values["train/explained_variance"] = functional.explained_variance(*self._fit)
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _clip_global_norm(optimizer: Optimizer, max_norm: float) -> None:
    """Scale all gradients by ``1 / max(1, norm / max_norm)``: the effect of torch's function at half its cost."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not gradients:  # a training step that gave no loss, before any that did
        return
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_div_(gradients, (norm / max_norm).clamp_(min=1.0))
