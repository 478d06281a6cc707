"""What actor-critic algorithms share: networks made from spaces, annealing by frames, evaluation episodes."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Adam, Optimizer
from typing_extensions import override

from trainers.distributions import Answer
from trainers.networks import ActorNetwork, CriticNetwork, Observation

__all__ = ["ACTION_MASK", "MASK", "TRAJ_IDS", "ActorCritic", "trajectory_ends"]

ACTION_MASK = "action_mask"
MASK = ("collector", "mask")
TRAJ_IDS = ("collector", "traj_ids")
_TRAINING_KEYS = {"log_prob", "value", "advantage", "value_target"}


class ActorCritic(L.LightningModule):
    """A policy and a critic of tanh layers, which are built once the spaces are known.

    Subclasses save ``hidden``, ``observation_spec`` and ``action_spec`` as hyperparameters, and
    ``normalize_observation`` if they know it.
    """

    algorithm: ClassVar[str]
    """Its name in messages."""

    wants_replay: ClassVar[bool | None] = None
    """Whether it is meant for samples of a replay buffer; None if it does not mind."""

    max_grad_norm: float | None = None
    """Limit on the global norm of the gradient; None leaves it to the Trainer."""

    learning_rate: float
    """Step size of Adam; a tuner may set it."""

    observation_key: ClassVar[str] = "observation"
    """Key of the batch that policy and critic read, unless the observation is a dict with keys of its own."""

    policy: ActorNetwork
    """Maps observations to the parameters of the action distribution; exists once the spaces are known."""

    critic: CriticNetwork
    """Maps observations to values; exists once the spaces are known."""

    _observation_keys: tuple[str, ...] | None = None

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the hook that runs under this name, some forty times a step; the way of `nn.Module`, which
        # looks for parameters and submodules first, would make that the dearest part of its bookkeeping.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @override
    def setup(self, stage: str) -> None:
        """Build the networks from the data module's spaces, unless they exist.

        Args:
            stage: Given by Lightning; before a fit it is looked at whether the data are of the kind that is wanted.

        Raises:
            ValueError: If a space is neither given nor known to the data module, or not supported.
        """
        if stage == "fit":
            self._check_data()
        if hasattr(self, "policy"):
            return
        specs = {}
        for name in ("observation_spec", "action_spec"):
            spec = self.hparams[name] or getattr(getattr(self.trainer, "datamodule", None), name, None)
            if spec is None:
                raise ValueError(
                    f"{name} is unknown : expected it from {self.algorithm} or from the data module, got None from "
                    f"both; pass {self.algorithm}({name}=...) or fit with a data module that has {name}"
                )
            specs[name] = spec
        self.configure_spaces(**specs)

    def configure_spaces(self, observation_spec: dict[str, Any], action_spec: dict[str, Any]) -> None:
        """Build the networks for these spaces, unless they exist.

        The data module calls this before any callback sets up: one that copies the module, as weight averaging does,
        needs to find them.

        Args:
            observation_spec: Plain description of the observation space; one that was given to the module goes first.
            action_spec: The same for the action space.

        Raises:
            ValueError: If a space is not supported.
        """
        if hasattr(self, "policy"):
            return
        specs = {
            "observation_spec": self.hparams["observation_spec"] or observation_spec,
            "action_spec": self.hparams["action_spec"] or action_spec,
        }
        self.hparams.update(specs)  # a checkpoint then rebuilds the same networks
        self.build_networks(**specs)

    def build_networks(self, observation_spec: dict[str, Any], action_spec: dict[str, Any]) -> None:
        """Set :attr:`policy` and :attr:`critic`; a subclass may bring its own.

        Args:
            observation_spec: Plain description of the observation space (see :mod:`trainers.networks`).
            action_spec: The same for the action space.

        Raises:
            ValueError: If a space is not supported.
        """
        hidden, normalize = self.hparams["hidden"], self.hparams.get("normalize_observation", False)
        if observation_spec.get("kind") == "dict":
            self._observation_keys = tuple(observation_spec["spaces"])
            if taken := sorted(_TRAINING_KEYS.intersection(self._observation_keys)):
                raise ValueError(
                    f"the observation has parts under names that training needs : expected others than "
                    f"{sorted(_TRAINING_KEYS)}, got {taken}; rename them with an environment wrapper"
                )
        self.policy = ActorNetwork(observation_spec, action_spec, hidden=hidden, normalize=normalize)
        self.critic = CriticNetwork(observation_spec, hidden=hidden, normalizer=self.policy.normalizer)

    @override
    def forward(self, observation: Observation, action_mask: Tensor | None = None) -> Answer:
        """Give the action distribution: see :class:`trainers.networks.ActorNetwork`.

        Args:
            observation: ``[N, ...]``, or a mapping of such for dict spaces.
            action_mask: ``[N, A]`` bool, True where an action is allowed; None allows all.

        Returns:
            ``{"logits": [N, A]}``, ``{"loc": [N, D], "scale": [N, D]}`` or a distribution ``[N]``.
        """
        return self.policy(observation, action_mask)

    def observed(self, batch: TensorDict) -> Any:
        """What policy and critic read of a batch.

        Args:
            batch: Rows, or what is under their ``"next"``.

        Returns:
            A tensor, or a TensorDict of the parts of a dict observation.
        """
        if self._observation_keys is None:
            return batch[self.observation_key]
        return batch.select(*self._observation_keys)

    def answer(self, batch: TensorDict, observation: Any = None) -> Answer:
        """Ask the policy about the rows of a batch, with the masks that it had while acting.

        Args:
            batch: Rows with their observation and, where there are such, ``action_mask``.
            observation: What :meth:`observed` gave of these rows, if that is known already.
        """
        if observation is None:
            observation = self.observed(batch)
        mask = batch.get(ACTION_MASK, None)
        return self.policy(observation) if mask is None else self.policy(observation, mask)

    @override
    def validation_step(self, batch: TensorDict, batch_idx: int = 0) -> None:
        """Do nothing: evaluation episodes are acted and measured by the data module.

        Args:
            batch: Evaluation episodes.
            batch_idx: Given by Lightning, not used.
        """

    @override
    def test_step(self, batch: TensorDict, batch_idx: int = 0) -> None:
        """Do nothing, see :meth:`validation_step`.

        Args:
            batch: Evaluation episodes.
            batch_idx: Given by Lightning, not used.
        """

    @override
    def predict_step(self, batch: TensorDict, batch_idx: int = 0) -> dict[str, Tensor]:
        """Measure the episodes of a padded batch.

        Args:
            batch: ``[B, T]`` episodes with ``("next", "reward")`` and, where padded, ``("collector", "mask")``.
            batch_idx: Given by Lightning, not used.

        Returns:
            ``return``: ``[B]`` float64, undiscounted; ``length``: ``[B]`` int64, in frames. Both on the CPU.
        """
        reward = batch["next", "reward"].squeeze(-1).to("cpu", torch.float64)
        mask = batch.get(MASK, None)
        valid = torch.ones_like(reward, dtype=torch.bool) if mask is None else mask.cpu()
        return {"return": reward.masked_fill(~valid, 0.0).sum(-1), "length": valid.sum(-1)}

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
        # not the trainer's: under mixed precision it refuses to clip for a fused optimizer
        _clip_global_norm(optimizer, self.max_grad_norm)

    def _check_data(self) -> None:
        """Say so if the data module does not give what the algorithm is meant for."""
        has_replay = getattr(getattr(self._trainer, "datamodule", None), "learns_from_replay", None)
        if self.wants_replay is None or has_replay in (None, self.wants_replay):
            return
        if self.wants_replay:
            advice = "each batch is used once and forgotten; give the data module replay=ReplayConfig(capacity=...)"
        else:
            advice = (
                "its gradients are wrong for rows that older weights have acted; take the data module's replay away"
            )
        rank_zero_warn(
            f"{self.algorithm} is meant {'for' if self.wants_replay else 'without'} a replay buffer: {advice}"
        )

    def _adam(self, betas: tuple[float, float]) -> Adam:
        """Adam over policy and critic."""
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        return Adam(parameters, lr=self.learning_rate, betas=betas, eps=1e-5, fused=self._fused())

    def _fused(self) -> bool | None:
        """Whether Adam steps fused, which is three times faster on the CPU; elsewhere torch chooses.

        With scaled gradients a fused step would unscale them only after they were clipped, which Lightning refuses.
        """
        mixed = self._trainer is not None and isinstance(self._trainer.precision_plugin, MixedPrecision)
        return True if self.device.type == "cpu" and not mixed else None

    def _optimizer(self) -> Optimizer:
        return cast(Optimizer, self.optimizers(use_pl_optimizer=False))

    def _anneal_learning_rate(self, num_frames: int) -> float:
        """Lower the learning rate with the data module's progress; returns the share of the first one that is left."""
        # Progress counts the batch at hand. Without it, the last batch too is trained on with a rate above zero.
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        share = num_frames * self.trainer.world_size / data.total_frames if data.total_frames > 0 else 0.0
        remaining: float = min(1.0, 1.0 - data.progress + share)
        for group in self._optimizer().param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * remaining
        return remaining

    def _check_range(self, name: str, number: object, is_valid: bool, rule: str) -> None:
        if not is_valid:
            raise ValueError(
                f"{name} is out of range : expected {rule}, got {number!r}; change {self.algorithm}({name}=...)"
            )


def trajectory_ends(batch: TensorDict) -> Tensor:
    """Mark the rows ``[N, T]`` that the next row does not continue."""
    ends = batch["next", "done"].squeeze(-1)
    traj_ids, mask = batch.get(TRAJ_IDS, None), batch.get(MASK, None)
    if traj_ids is None and mask is None:
        return ends
    ends = ends.clone()
    if traj_ids is not None:
        ends[..., :-1] |= traj_ids[..., 1:] != traj_ids[..., :-1]
    if mask is not None:
        ends[..., :-1] |= ~mask[..., 1:]
    return ends


def _clip_global_norm(optimizer: Optimizer, max_norm: float) -> None:
    """Scale all gradients by ``1 / max(1, norm / max_norm)``: the effect of torch's function at half its cost."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not gradients:  # a training step that gave no loss, before any that did
        return
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_div_(gradients, (norm / max_norm).clamp_(min=1.0))
