"""What on-policy algorithms share: advantages, normalisation, statistics of updates, clipping of gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from lit_collect import restore_successors
from trainers import functional
from trainers.actor_critic import ACTION_MASK, MASK, TRAJ_IDS, ActorCritic, trajectory_ends
from trainers.distributions import Answer, action_entropy, detached
from trainers.normalization import RewardScaler

__all__ = ["OnPolicy", "UpdateStatistics"]


class OnPolicy(ActorCritic):
    """An actor-critic that turns each collected batch into training rows once, by generalized advantage estimation."""

    wants_replay = False
    training_keys: ClassVar[tuple[str, ...]] = ()
    """Further entries of a batch that :meth:`evaluate` reads; a subclass may name some."""
    gamma: float
    """Discount factor."""
    lambda_: float
    """Lambda of generalized advantage estimation."""
    normalize_advantage: bool
    """Whether advantages are shifted and scaled in each update."""
    anneal: bool
    """Whether the learning rate falls with the data module's ``progress``."""
    reward_scaler: RewardScaler | None
    """Running statistics of returns, if rewards are scaled."""

    def _take_settings(self) -> None:
        """Check and keep the hyperparameters that all have in common, and build the networks if spaces are given."""
        given = self.hparams
        for name in ("gamma", "lambda_"):
            self._check_range(name, given[name], 0.0 <= given[name] <= 1.0, "a number in [0, 1]")
        self._check_range("learning_rate", given["learning_rate"], given["learning_rate"] > 0, "a number > 0")
        norm = given["max_grad_norm"]
        self._check_range("max_grad_norm", norm, norm is None or norm > 0, "None or a number > 0")
        self.learning_rate = given["learning_rate"]
        self.gamma = given["gamma"]
        self.lambda_ = given["lambda_"]
        self.entropy_coefficient: float = given["entropy_coefficient"]
        self.value_coefficient: float = given["value_coefficient"]
        self.max_grad_norm = norm
        self.normalize_advantage = given["normalize_advantage"]
        self.anneal = given["anneal"]
        self.reward_scaler = RewardScaler(self.gamma) if given["scale_reward"] else None
        self._statistics = UpdateStatistics()
        if given["observation_spec"] is not None and given["action_spec"] is not None:
            self.build_networks(given["observation_spec"], given["action_spec"])

    @torch.no_grad()
    def prepare_rollout(self, batch: TensorDict) -> TensorDict:
        """Turn a collected batch into training rows: advantages and value targets, once for each batch.

        Advantages are bootstrapped from the true successor's value where an episode was truncated or the batch ends,
        and from nothing where it terminated. Running statistics take the batch in before it is used. Learning rate
        (and clip) are annealed here, and the statistics of the updates since the last call go to the loggers.

        Args:
            batch: ``[N, T]`` rows of env copies over time, with observation, ``action``, ``log_prob`` and
                ``("next", ...)`` observation, ``reward``, ``terminated``, ``done``; with trajectory ids or a mask,
                rows of several trajectories and padding may share a line.

        Returns:
            A new ``[N, T]`` TensorDict of the observation, ``action``, ``log_prob``, ``value``, ``advantage``,
            ``value_target`` (float, ``[N, T]``) and, if the batch has them, ``action_mask`` and
            ``("collector", "mask")``.
        """
        if self._statistics.num_updates >= self._updates_per_report():
            self._report()
        if self.anneal:
            self._anneal(batch.numel())
        mask = batch.get(MASK, None)
        normalizer = getattr(self.policy, "normalizer", None)
        if normalizer is not None:
            normalizer.update(self.observed(batch), mask)
        value, next_value = self.values(batch)
        ends = trajectory_ends(batch)
        reward = batch["next", "reward"].squeeze(-1)
        if self.reward_scaler is not None:
            reward = self.reward_scaler(reward, ends, batch.get(TRAJ_IDS, None), mask)
        advantage = functional.generalized_advantage(
            reward=reward.to(value.dtype),
            value=value,
            next_value=next_value,
            discount=self.gamma * (~batch["next", "terminated"].squeeze(-1)).to(value.dtype),
            done=ends,
            lambda_=self.lambda_,
        )
        value_target = advantage + value
        keys = (*(self._observation_keys or (self.observation_key,)), *self.training_keys)
        prepared = TensorDict(
            {
                **{key: batch[key] for key in keys},
                "action": batch["action"],
                "log_prob": batch["log_prob"],
                "value": value,
                "advantage": advantage,
                "value_target": value_target,
            },
            batch_size=batch.batch_size,
            device=batch.device,
        )
        for key, kept in ((MASK, mask), (ACTION_MASK, batch.get(ACTION_MASK, None))):
            if kept is not None:
                prepared[key] = kept
        self._statistics.start(value, value_target, mask)
        return prepared

    def values(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """What the critic thinks of a collected batch, without gradient.

        Args:
            batch: See :meth:`prepare_rollout`.

        Returns:
            Values of the observations and of their true successors, both ``[N, T]``.
        """
        # Every successor is evaluated, though most are the next row's observation: for small networks a second call
        # costs less than finding out which ones are not, and it is right for every way of cutting trajectories.
        return self.critic(self.observed(batch)), self.critic(self._successors(batch))

    def evaluate(self, rows: TensorDict) -> tuple[Answer, Tensor]:
        """What policy and critic of today make of prepared rows, with gradient.

        Args:
            rows: Of what :meth:`prepare_rollout` returned.

        Returns:
            The policy's answer and the values of the rows.
        """
        observation = self.observed(rows)
        return self.answer(rows, observation), self.critic(observation)

    def _anneal(self, num_frames: int) -> float:
        """Lower what falls with the progress of the data; returns the share that is left."""
        return self._anneal_learning_rate(num_frames)

    def _successors(self, batch: TensorDict) -> Any:
        """The true successors of all rows; a compact batch holds only those that no row repeats."""
        key = self.observation_key if self._observation_keys is None else self._observation_keys[0]
        following = batch["next"]
        return self.observed(restore_successors(batch)["next"] if following.get(key, None) is None else following)

    @override
    def on_train_end(self) -> None:
        """Hand the statistics of the last updates to the loggers."""
        if self._statistics.num_updates:
            self._report()

    def _updates_per_report(self) -> int:
        """How many updates the loggers are told about at once, at least."""
        return 1

    def _report(self) -> None:
        # straight to the loggers: each `self.log` would cost as much as half an update
        if self.loggers:
            metrics = self._statistics.compute()
            metrics["train/learning_rate"] = self._optimizer().param_groups[0]["lr"]
            for logger in self.loggers:
                logger.log_metrics(metrics, step=self.global_step)
        self._statistics = UpdateStatistics()


class UpdateStatistics:
    """What the loggers are told about some updates. Keeps tensors, so that no update waits for a device."""

    def __init__(self) -> None:
        self._losses: list[tuple[Tensor, Tensor]] = []
        self._ratios: tuple[Tensor, Tensor, float] | None = None
        self._answer: Answer
        self._fit: tuple[Tensor, Tensor] | None = None

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return len(self._losses)

    def start(self, value: Tensor, value_target: Tensor, mask: Tensor | None) -> None:
        """Take the critic's values of a new batch.

        Args:
            value: ``[N, T]``.
            value_target: ``[N, T]``.
            mask: ``[N, T]`` bool, rows that count; None is all.
        """
        self._fit = (value, value_target) if mask is None else (value[mask], value_target[mask])

    def add(self, policy_loss: Tensor, value_loss: Tensor, answer: Answer) -> None:
        """Take an update.

        Args:
            policy_loss: Scalar.
            value_loss: Scalar.
            answer: The policy's, of the rows trained on.
        """
        self._losses.append((policy_loss.detach(), value_loss.detach()))
        self._answer = detached(answer)

    def compare(self, log_prob: Tensor, old_log_prob: Tensor, clip: float) -> None:
        """Take the probabilities of the last update.

        Args:
            log_prob: ``[M]`` under the policy being trained.
            old_log_prob: ``[M]`` under the policy that acted.
            clip: Bound on their ratio.
        """
        self._ratios = (log_prob.detach(), old_log_prob, clip)

    def compute(self) -> dict[str, float]:
        """The numbers, by name."""
        policy_losses, value_losses = zip(*self._losses, strict=True)
        values = {
            "train/policy_loss": torch.stack(policy_losses).mean(),
            "train/value_loss": torch.stack(value_losses).mean(),
            "train/entropy": action_entropy(self._answer).mean(),
        }
        if self._ratios is not None:
            log_prob, old_log_prob, clip = self._ratios
            values["train/approx_kl"] = functional.approx_kl(log_prob, old_log_prob)
            values["train/clip_fraction"] = functional.clip_fraction(log_prob, old_log_prob, clip)
        if self._fit is not None:
            values["train/explained_variance"] = functional.explained_variance(*self._fit)
        return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
