"""Deep Q-learning as a LightningModule under automatic optimization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Adam
from typing_extensions import override

from lit_collect.frames import ACTION_MASK
from trainers import off_policy_functional as functional
from trainers.off_policy import OffPolicy, target_of
from trainers.q_networks import EpsilonGreedy, QNetwork

__all__ = ["DQN"]


class DQN(OffPolicy):
    """Deep Q-learning, Mnih et al. 2015, "Human-level control", with double targets, van Hasselt et al. 2016.

    For discrete actions (with masks where the env gives them), and observations of vectors, choices, images and dicts
    of them. Meant for a data module with a replay buffer: it trains on samples ``[M]`` or slices ``[S, L]`` of it, by
    one Adam optimizer. Returns over several steps and priorities are the buffer's business: with a sample transform
    ``NStep(3, gamma)`` and ``sampler="prioritized"`` it is the better part of Rainbow, Hessel et al. 2018.

    Who collects acts at random with probability epsilon, which falls evenly over the first part of the data module's
    frame budget and travels with the weights; evaluation is greedy.

    The attached loggers receive ``train/value_loss``, ``train/q_mean`` (both means over the updates since the last
    time), ``train/epsilon`` and ``train/learning_rate``, once for each collected batch, but not more often than the
    Trainer's ``log_every_n_steps`` updates; from rank zero, whose rows they describe.

    Args:
        learning_rate: Step size of Adam, > 0.
        gamma: Discount factor, in [0, 1].
        tau: How far the target network moves towards the trained one each time, in (0, 1]; 1 is all the way.
        target_update_every: Updates after which it moves.
        epsilon_start: Probability of a random action at the start, in [0, 1].
        epsilon_end: The same at the end.
        epsilon_fraction: Share of the frame budget over which it falls, in [0, 1].
        double: Whether the trained network chooses the action whose value the target network gives.
        dueling: Whether the network has separate streams for the state's value and the actions' advantages.
        max_grad_norm: Limit on the global norm of the gradient; None leaves it alone. A ``gradient_clip_val`` of the
            Trainer takes its place.
        hidden: Sizes of the hidden layers.
        observation_spec: Plain description of the observation space (see :mod:`trainers.networks`); None takes the
            data module's ``observation_spec`` when the Trainer sets up.
        action_spec: The same for the action space.

    Raises:
        ValueError: If a number is out of range or a space is not supported.

    Example:
        >>> box = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
        >>> module = DQN(observation_spec=box, action_spec={"kind": "discrete", "n": 2, "start": 0})
        >>> module(torch.zeros(8, 4))["logits"].shape
        torch.Size([8, 2])
    """

    algorithm: ClassVar[str] = "DQN"
    """See the base class."""
    policy: EpsilonGreedy
    """Acts, and holds the network that is trained; exists once the spaces are known."""
    target: nn.Module
    """Gives the values of successors; exists once the spaces are known."""

    def __init__(
        self,
        *,
        learning_rate: float = 1e-3,
        gamma: float = 0.99,
        tau: float = 1.0,
        target_update_every: int = 100,
        epsilon_start: float = 1.0,
        epsilon_end: float = 0.05,
        epsilon_fraction: float = 0.2,
        double: bool = True,
        dueling: bool = False,
        max_grad_norm: float | None = 10.0,
        hidden: tuple[int, ...] = (256, 256),
        observation_spec: dict[str, Any] | None = None,
        action_spec: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        shares = {
            "epsilon_start": epsilon_start,
            "epsilon_end": epsilon_end,
            "epsilon_fraction": epsilon_fraction,
        }
        for name, share in shares.items():
            self._check_range(name, share, 0.0 <= share <= 1.0, "a number in [0, 1]")
        hidden = tuple(hidden)  # YAML gives a list
        self.save_hyperparameters()
        self.epsilon_start, self.epsilon_end, self.epsilon_fraction = epsilon_start, epsilon_end, epsilon_fraction
        self._double = double  # `double` alone is a method of every module
        self._take_settings()

    @override
    def build_networks(self, observation_spec: dict[str, Any], action_spec: dict[str, Any]) -> None:
        """Set :attr:`policy` and :attr:`target`.

        Args:
            observation_spec: Plain description of the observation space (see :mod:`trainers.networks`).
            action_spec: The same for the action space.

        Raises:
            ValueError: If a space is not supported.
        """
        given = self.hparams
        network = QNetwork(observation_spec, action_spec, hidden=given["hidden"], dueling=given["dueling"])
        self._take_observation_keys(observation_spec)
        self.policy = EpsilonGreedy(network, self.epsilon_start)
        self.target = target_of(network)

    @override
    def targets(self) -> Iterable[tuple[nn.Module, nn.Module]]:
        """See the base class."""
        return [(self.target, self.policy.network)]

    @override
    def on_fit_start(self) -> None:
        """See that epsilon can fall, if the data module collects; nobody acts with offline data.

        Raises:
            ValueError: If it should, but the data module has no frame budget that it could follow.
        """
        data = self._data_module()
        has_no_end = hasattr(data, "frames_per_batch") and getattr(data, "total_frames", 0) == -1
        if has_no_end and self.epsilon_start != self.epsilon_end:
            raise ValueError(
                f"epsilon cannot fall from {self.epsilon_start:g} to {self.epsilon_end:g} : expected a frame budget "
                f"to follow, got total_frames=-1; set total_frames, or give both the same value"
            )

    @override
    def follow_progress(self, progress: float) -> None:
        """Lower epsilon.

        Args:
            progress: Share of the frame budget that was collected, from 0 to 1.
        """
        self.policy.epsilon.fill_(
            functional.linear_schedule(self.epsilon_start, self.epsilon_end, self.epsilon_fraction, progress)
        )

    @override
    def training_step(self, sample: TensorDict, batch_idx: int = 0) -> Tensor:
        """Compute the Huber loss of one sample, and tell a prioritized sampler how wrong each row was.

        Args:
            sample: ``[M]`` or ``[S, L]`` rows.
            batch_idx: Given by Lightning, not used.

        Returns:
            Scalar loss.
        """
        rows = self.rows(sample)
        values = self.policy.network(self.observed(rows))
        value = values.gather(-1, rows["action"].unsqueeze(-1)).squeeze(-1)
        target = self.value_target(rows)
        loss = functional.huber_loss(value, target, self.weights(rows))
        self.report_errors(rows, value - target)
        self.note({"train/value_loss": loss, "train/q_mean": value.mean()})
        return loss

    @torch.no_grad()
    def value_target(self, rows: TensorDict) -> Tensor:
        """What the values of the actions taken should be.

        Args:
            rows: ``[M]`` of a sample.

        Returns:
            ``[M]``.
        """
        following = self.successors(rows)
        return functional.q_target(
            self.reward(rows),
            self.discount(rows),
            self.target(following),
            chooser=self.policy.network(following) if self._double else None,
            action_mask=rows.get(("next", *ACTION_MASK), None),
        )

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create Adam over the trained network.

        Returns:
            One optimizer.
        """
        return Adam(self.policy.parameters(), lr=self.learning_rate, fused=self._fused())

    @override
    def _settings_in_force(self) -> dict[str, float]:
        return {
            "train/epsilon": float(self.policy.epsilon),
            "train/learning_rate": self._optimizer().param_groups[0]["lr"],
        }
