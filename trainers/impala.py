"""IMPALA, an actor-learner with V-trace, as a LightningModule under automatic optimization."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from trainers import functional
from trainers.actor_critic import MASK, ActorCritic, trajectory_ends
from trainers.distributions import action_entropy, action_log_prob

__all__ = ["IMPALA"]

ROUNDING = 1e-3
"""Ratios that close above a bound are not counted as clipped: on policy they are 1 up to rounding."""


class IMPALA(ActorCritic):
    """Importance-weighted actor-learner, Espeholt et al. 2018, arXiv:1802.01561, for discrete and continuous actions.

    Meant for a data module that collects batches ``[N, T]`` (N env copies, T steps) with weights that may be some
    versions old, and trains on each whole batch once. Every training step weights the rows by the probability ratio of
    the policy of today and the one that acted (the batch's ``log_prob``), so that nothing need be known about who
    collected them, or when. On policy it is an actor-critic with generalized advantage estimation. Policy and critic
    are separate networks of tanh layers, trained by one Adam optimizer without momentum. Gradients are clipped by the
    Trainer (``gradient_clip_val``).

    On the steps that the Trainer logs (``log_every_n_steps``): ``loss/policy``, ``loss/value``, ``loss/entropy`` (nats,
    before their coefficients), ``impala/rho_mean`` (mean probability ratio, not clipped: 1 on policy),
    ``impala/clip_fraction`` (share of rows whose ratio is above ``rho_bar``), ``impala/approx_kl`` (nats, from the
    policy that acted to that of today) and ``impala/explained_variance``.

    Args:
        learning_rate: Step size of Adam, > 0.
        gamma: Discount factor, in [0, 1].
        lambda_: How far targets and advantages look ahead, in [0, 1]; 1 is the paper.
        rho_bar: Bound on the weight of a row, > 0.
        c_bar: Bound on what is carried from one row to the one before, in [0, rho_bar].
        entropy_coefficient: Weight of the entropy bonus.
        value_coefficient: Weight of half the critic's mean squared error.
        reward_scale: Rewards are multiplied by this before anything else, > 0; best where returns come out between 1
            and 10. Far larger ones drive the critic's layers into saturation, where it sees no state any more.
        anneal: Whether the learning rate falls linearly to 0 with the data module's ``progress``.
        hidden: Sizes of the hidden layers of each network.
        observation_spec: Plain description of the observation space (see :mod:`trainers.networks`); None takes the
            data module's ``observation_spec`` when the Trainer sets up.
        action_spec: The same for the action space.

    Raises:
        ValueError: If a number is out of range or a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
        >>> module = IMPALA(observation_spec=box, action_spec={"kind": "discrete", "n": 2, "start": 0})
        >>> sorted(module(torch.zeros(8, 4)))
        ['logits']
    """

    algorithm: ClassVar[str] = "IMPALA"
    """See the base class."""

    def __init__(
        self,
        *,
        learning_rate: float = 1e-3,
        gamma: float = 0.99,
        lambda_: float = 1.0,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        entropy_coefficient: float = 0.01,
        value_coefficient: float = 0.5,
        reward_scale: float = 1.0,
        anneal: bool = False,
        hidden: tuple[int, ...] = (64, 64),
        observation_spec: dict[str, Any] | None = None,
        action_spec: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._check_range("gamma", gamma, 0.0 <= gamma <= 1.0, "a number in [0, 1]")
        self._check_range("lambda_", lambda_, 0.0 <= lambda_ <= 1.0, "a number in [0, 1]")
        self._check_range("rho_bar", rho_bar, rho_bar > 0, "a number > 0")
        self._check_range("c_bar", c_bar, 0.0 <= c_bar <= rho_bar, f"a number in [0, rho_bar={rho_bar}]")
        self._check_range("learning_rate", learning_rate, learning_rate > 0, "a number > 0")
        self._check_range("reward_scale", reward_scale, reward_scale > 0, "a number > 0")
        hidden = tuple(hidden)  # YAML gives a list
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.gamma = gamma
        self.lambda_ = lambda_
        self.rho_bar = rho_bar
        self.c_bar = c_bar
        self.entropy_coefficient = entropy_coefficient
        self.value_coefficient = value_coefficient
        self.reward_scale = reward_scale
        self.anneal = anneal
        if observation_spec is not None and action_spec is not None:
            self.build_networks(observation_spec, action_spec)

    @override
    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        """Anneal the learning rate.

        Args:
            batch: A whole collected batch.
            batch_idx: Given by Lightning, not used.
        """
        if self.anneal:
            self._anneal_learning_rate(batch.numel())

    @override
    def training_step(self, batch: TensorDict, batch_idx: int = 0) -> Tensor:
        """Compute the loss of one collected batch: policy gradient + weighted value loss - weighted entropy.

        Targets and advantages are computed here and not once for each batch, since the probability ratios are those of
        the policy of this moment.

        Args:
            batch: ``[N, T]`` rows of env copies over time, with ``observation``, ``action``, ``log_prob`` and
                ``("next", ...)`` ``observation``, ``reward``, ``terminated``, ``done``. With trajectory ids or a mask,
                rows of several trajectories and padding may share a line; masked rows count for nothing.
            batch_idx: Given by Lightning, not used.

        Returns:
            Scalar loss.

        Raises:
            ValueError: If the rows came without their time dimension.
        """
        if batch.batch_dims < 2:
            raise ValueError(
                f"rows have lost their order in time : expected a whole batch [N, T], got shape {tuple(batch.shape)}; "
                "leave updates.minibatch_size at None"
            )
        mask = batch.get(MASK, None)
        observation = self.observed(batch)
        answer = self.answer(batch, observation)
        log_prob = action_log_prob(answer, batch["action"])
        # as precise as the rewards, also where a plugin runs the networks in half precision
        value = self.critic(observation).to(batch["next", "reward"].dtype)
        log_ratio = log_prob.detach() - batch["log_prob"]
        target, advantage = self.estimate(batch, log_ratio, value)
        losses = {
            "loss/policy": -_mean(log_prob * advantage, mask),
            "loss/value": 0.5 * _mean((value - target).square(), mask),
            "loss/entropy": _mean(action_entropy(answer), mask),
        }
        self._log(losses, log_ratio, value, target, mask)
        loss = torch.add(losses["loss/policy"], losses["loss/value"], alpha=self.value_coefficient)
        return torch.sub(loss, losses["loss/entropy"], alpha=self.entropy_coefficient)

    @torch.no_grad()
    def estimate(self, batch: TensorDict, log_ratio: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Compute V-trace targets and advantages of a collected batch.

        Bootstrapped from the true successor's value where an episode was truncated, a trajectory stops or the batch
        ends, and from nothing where it terminated.

        Args:
            batch: ``[N, T]``, see :meth:`training_step`.
            log_ratio: ``[N, T]`` log-probability of the actions today minus that when they were taken.
            value: ``[N, T]`` the critic's value of each observation.

        Returns:
            Targets of the critic and advantages of the policy gradient, both ``[N, T]`` without gradient.
        """
        ends = trajectory_ends(batch)
        # The successor of any other row is the observation of the next one, and so has a value already.
        last = ends.clone()
        last[..., -1] = True
        next_value = value.roll(-1, dims=-1)
        next_value[last] = self.critic(self.observed(batch["next"])[last]).to(value.dtype)
        return functional.vtrace(
            log_ratio=log_ratio,
            reward=self.reward_scale * batch["next", "reward"].squeeze(-1),
            value=value,
            next_value=next_value,
            discount=self.gamma * (~batch["next", "terminated"].squeeze(-1)).to(value.dtype),
            done=ends,
            lambda_=self.lambda_,
            rho_bar=self.rho_bar,
            c_bar=self.c_bar,
        )

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create Adam over policy and critic, without momentum.

        Old rows are momentum already (Mitliagkas et al. 2016, arXiv:1605.09774). More of it lets the policy run away
        before the rows that would tell have arrived. What remains is the paper's RMSProp with corrected first steps.

        Returns:
            One optimizer.
        """
        return self._adam(betas=(0.0, 0.999))

    def _log(
        self, losses: dict[str, Tensor], log_ratio: Tensor, value: Tensor, target: Tensor, mask: Tensor | None
    ) -> None:
        trainer = self._trainer
        # Lightning's own rule of when to log: one call costs as much as an update, and of the others nothing is kept.
        every = 0 if trainer is None else trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or (self.global_step + 1) % every:
            return
        value = value.detach()
        if mask is not None:
            log_ratio, value, target = log_ratio[mask], value[mask], target[mask]
        ratio, still = log_ratio.exp(), torch.zeros_like(log_ratio)
        self.log_dict(
            {name: loss.detach() for name, loss in losses.items()}
            | {
                "impala/rho_mean": ratio.mean(),
                "impala/clip_fraction": (ratio > self.rho_bar * (1 + ROUNDING)).to(ratio.dtype).mean(),
                "impala/approx_kl": functional.approx_kl(log_ratio, still),
                "impala/explained_variance": functional.explained_variance(value, target),
            }
        )


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the rows that count; 0 where there are none."""
    if mask is None:
        return x.mean()
    return x.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
