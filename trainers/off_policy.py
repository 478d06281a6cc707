"""What off-policy algorithms share: reading samples of a replay buffer, target networks, priorities, statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_collect.frames import MASK, N_STEPS, WEIGHT, flatten_rows
from lit_collect.replay.mixing import summed_with
from trainers.actor_critic import ActorCritic
from trainers.off_policy_functional import bootstrap_discount

__all__ = ["Means", "OffPolicy", "follow", "target_of"]


class OffPolicy(ActorCritic):
    """An algorithm that trains on samples of a replay buffer, and keeps target networks.

    What a sample says beyond the rows themselves is used where it is there: rewards summed over several steps, the
    importance weights of a prioritized sampler, slices ``[S, L]`` and the mask of their padding.

    Subclasses save ``learning_rate``, ``gamma``, ``tau``, ``max_grad_norm``, ``hidden`` and both specs as
    hyperparameters, and ``target_update_every`` if they know it. They call :meth:`_take_settings`, build their networks
    in ``build_networks``, and say in :meth:`targets` which networks follow which.
    Under manual optimization they call :meth:`count_update` after each update; under automatic optimization it is
    called for them.
    """

    wants_replay = True
    policy: nn.Module  # type: ignore[assignment]  # each algorithm has a kind of its own
    """Who acts; exists once the spaces are known."""
    gamma: float
    """Discount factor."""
    tau: float
    """How far the target networks move each time, 1 all the way."""
    target_update_every: int
    """Updates after which they move."""
    num_updates: int
    """Updates so far; part of checkpoints."""

    def _take_settings(self) -> None:
        """Check and keep the hyperparameters that all have in common, and build the networks if spaces are given."""
        given = self.hparams
        rate, gamma, tau = given["learning_rate"], given["gamma"], given["tau"]
        every, norm = given.get("target_update_every", 1), given["max_grad_norm"]
        self._check_range("learning_rate", rate, rate > 0, "a number > 0")
        self._check_range("gamma", gamma, 0.0 <= gamma <= 1.0, "a number in [0, 1]")
        self._check_range("tau", tau, 0.0 < tau <= 1.0, "a number in (0, 1]")
        self._check_range("target_update_every", every, every >= 1, "a number >= 1")
        self._check_range("max_grad_norm", norm, norm is None or norm > 0, "None or a number > 0")
        self.learning_rate, self.gamma, self.tau = rate, gamma, tau
        self.target_update_every, self.max_grad_norm = every, norm
        self.num_updates = 0
        self._means = Means()
        self._frames_seen: int | None = None
        if given["observation_spec"] is not None and given["action_spec"] is not None:
            self.build_networks(given["observation_spec"], given["action_spec"])

    def _take_observation_keys(self, observation_spec: Mapping[str, Any]) -> None:
        """Note under which names the parts of a dict observation stand; part of building the networks."""
        if observation_spec.get("kind") == "dict":
            self._observation_keys = tuple(observation_spec["spaces"])

    # --- what a sample says -------------------------------------------------------------------------------------

    def rows(self, sample: TensorDict) -> TensorDict:
        """The rows of a sample that count, as one dimension: slices one after the other, padding left out.

        Args:
            sample: ``[M]`` or ``[S, L]``.

        Returns:
            ``[M]``, the sample itself if there is nothing to do.
        """
        if sample.batch_dims == 1 and sample.get(MASK, None) is None:
            return sample
        return flatten_rows(sample)

    def successors(self, rows: TensorDict) -> Any:
        """What policy and values read of the true successors (see :meth:`observed`)."""
        return self.observed(rows["next"])

    def reward(self, rows: TensorDict) -> Tensor:
        """``[M]`` float, summed and discounted over several steps where the sample says so."""
        return rows["next", "reward"].squeeze(-1)

    def discount(self, rows: TensorDict) -> Tensor:
        """``[M]`` weight of the successor's value: 0 after a terminal step, else gamma to the power of the steps."""
        return bootstrap_discount(rows["next", "terminated"].squeeze(-1), self.gamma, rows.get(N_STEPS, None))

    def weights(self, rows: TensorDict) -> Tensor | None:
        """``[M]`` importance weights; None where all rows count the same."""
        return rows.get(WEIGHT, None)

    def report_errors(self, rows: TensorDict, error: Tensor) -> None:
        """Give a prioritized sampler its priorities: how wrong each row's value was. Others are not told.

        Args:
            rows: What :meth:`rows` gave.
            error: ``[M]``, of either sign.
        """
        if self.weights(rows) is None:
            return
        tell = getattr(self._data_module(), "update_priority", None)
        if tell is not None:
            tell(rows, error.detach().abs().float())

    # --- target networks ----------------------------------------------------------------------------------------

    def targets(self) -> Iterable[tuple[nn.Module, nn.Module]]:
        """Pairs of a target network and the one that it follows."""
        raise NotImplementedError(f"{type(self).__name__} has to say which networks follow which")

    def count_update(self) -> None:
        """Note that an update was made, and move the target networks if it is time."""
        self.num_updates += 1
        if self.num_updates % self.target_update_every == 0:
            for target, source in self.targets():
                follow(target, source, self.tau)

    @override
    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step, then count the update: a checkpoint of this moment holds the target networks of this moment.

        Args:
            epoch: Given by Lightning.
            batch_idx: Given by Lightning.
            optimizer: Given by Lightning.
            optimizer_closure: Computes the loss and its gradient.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.count_update()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the number of updates, which decides when the target networks move.

        Args:
            checkpoint: What is saved.
        """
        checkpoint["num_updates"] = self.num_updates

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting.

        Args:
            checkpoint: What was saved.
        """
        self.num_updates = checkpoint.get("num_updates", 0)

    # --- progress and statistics --------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        """Follow the data module: once for each collected batch, schedules move and the loggers are told.

        They are told of at least as many updates at a time as the Trainer's ``log_every_n_steps``.

        Args:
            batch: Given by Lightning, not used.
            batch_idx: Given by Lightning, not used.

        Raises:
            ValueError: If the replay buffer sums rewards with another discount than this algorithm's.
        """
        data = self._data_module()
        frames = getattr(data, "frames_total", None)
        if frames is not None and frames == self._frames_seen:
            return
        self._frames_seen = frames
        self._check_discount(getattr(data, "replay_buffer", None))
        self.follow_progress(getattr(data, "progress", 0.0))
        if self._means.num_updates >= max(1, self.trainer.log_every_n_steps):  # type: ignore[attr-defined]
            self._report()

    def follow_progress(self, progress: float) -> None:
        """Move what follows the run's progress; nothing by default.

        Args:
            progress: Share of the frame budget that was collected, from 0 to 1.
        """

    @override
    def on_train_end(self) -> None:
        """Hand the statistics of the last updates to the loggers."""
        if self._means.num_updates:
            self._report()

    def note(self, values: Mapping[str, Tensor]) -> None:
        """Take statistics of one update, of which the loggers get the mean.

        Args:
            values: Scalars by the name under which they are logged; the same names in each update, or fewer.
        """
        self._means.add(values)

    def _report(self) -> None:
        # straight to the loggers: each `self.log` would cost as much as half an update
        if self.loggers:
            metrics = {**self._means.compute(), **self._settings_in_force()}
            for logger in self.loggers:
                logger.log_metrics(metrics, step=self.global_step)
        self._means = Means()

    def _settings_in_force(self) -> dict[str, float]:
        """Further numbers for the loggers, by name."""
        return {}

    def _check_discount(self, buffer: Any) -> None:
        """Raise if rewards are summed with one discount and successors valued with another."""
        for gamma in summed_with(buffer):
            if not math.isclose(gamma, self.gamma):
                raise ValueError(
                    f"the discounts of algorithm and replay buffer differ : expected the same gamma in both, got "
                    f"{self.algorithm}(gamma={self.gamma}) and NStep(gamma={gamma}) in the buffer's transforms; change "
                    f"one of them"
                )

    def _data_module(self) -> Any:
        """The data module of the Trainer that this is attached to; None without one."""
        return getattr(self._trainer, "datamodule", None)


class Means:
    """Means of named numbers over some updates. Keeps their sums as tensors, so that no update waits for a device.

    Example:
        >>> means = Means()
        >>> means.add({"loss": torch.tensor(1.0)})
        >>> means.add({"loss": torch.tensor(3.0)})
        >>> means.num_updates, means.compute()
        (2, {'loss': 2.0})
    """

    def __init__(self) -> None:
        self.num_updates = 0
        """Updates so far."""
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Take the numbers of one update.

        Args:
            values: Scalars by name.
        """
        self.num_updates += 1
        for name, value in values.items():
            if name in self._sums:
                self._sums[name] += value.detach()
                self._counts[name] += 1
            else:
                self._sums[name], self._counts[name] = value.detach().float().clone(), 1

    def compute(self) -> dict[str, float]:
        """The means, by name."""
        if not self._sums:
            return {}
        sums = torch.stack(list(self._sums.values())).tolist()
        return {name: total / self._counts[name] for name, total in zip(self._sums, sums, strict=True)}


def target_of(network: nn.Module) -> nn.Module:
    """A target network: a copy that no optimizer trains and no gradient reaches.

    Args:
        network: What it will follow.

    Example:
        >>> any(parameter.requires_grad for parameter in target_of(nn.Linear(2, 1)).parameters())
        False
    """
    return deepcopy(network).requires_grad_(False)


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, tau: float) -> None:
    r"""Move a target network towards the one that it follows (Polyak averaging, or a copy).

    .. math::
        \theta' \leftarrow (1 - \tau) \, \theta' + \tau \, \theta

    Buffers are copied.

    Args:
        target: A copy of ``source`` with parameters of its own; changed in place.
        source: The network that is trained.
        tau: In (0, 1]; 1 makes the two equal.

    Example:
        >>> slow, fast = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(slow.weight), nn.init.ones_(fast.weight)
        >>> follow(slow, fast, 0.25)
        >>> slow.weight.item()
        0.25
    """
    old: list[Tensor] = list(target.parameters())
    new: list[Tensor] = list(source.parameters())
    if tau == 1.0:
        torch._foreach_copy_(old, new)
    else:
        torch._foreach_lerp_(old, new, tau)
    buffers = list(target.buffers())
    if buffers:
        torch._foreach_copy_(buffers, list(source.buffers()))
