"""What the data module asks of the trainer and its LightningModule, and does to batches before they get there."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lit_collect.callbacks._source import find_callback, gather_numbers
from lit_collect.callbacks.budget import FrameBudget
from lit_collect.callbacks.weight_sync import WeightSync
from lit_collect.config import RolloutConfig
from lit_collect.dataset import CollectorDataset
from lit_collect.envs.factories import EnvSource
from lit_collect.seeding import Placement
from lit_collect.weights import module_of
from lit_collect.worker import WorkerSpec, build_runner

_BEFORE_ALL = (1 << 32) - 1  # instead of the number of a restart: random numbers that no episode is given


class Seat:
    """Who learns: the trainer, once there is one, and the rank it stands for."""

    trainer: L.Trainer | None = None
    """What is attached to at present."""

    @property
    def world_size(self) -> int:
        """Ranks that train together."""
        return 1 if self.trainer is None else self.trainer.world_size

    @property
    def rank(self) -> int:
        """Of this process among them."""
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def weight_sync(self) -> WeightSync | None:
        """Who knows whether weights have changed."""
        return None if self.trainer is None else find_callback(self.trainer, WeightSync)

    @property
    def prepares(self) -> bool:
        """Whether the module wants to see each whole batch."""
        return self.trainer is not None and hasattr(self.trainer.lightning_module, "prepare_rollout")

    def policy(self, given: Any) -> Any:
        """Who acts: the policy given, else the module's."""
        module = None if self.trainer is None else self.trainer.lightning_module
        return required_policy(module) if given is None else given

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The same numbers of every rank; all of them must ask."""
        return [list(numbers)] if self.trainer is None else gather_numbers(self.trainer, numbers)

    def most(self, count: int) -> int:
        """The largest count of all ranks."""
        return int(max(numbers[0] for numbers in self.gather([count])))

    def check_signals(self) -> None:
        """Stop waiting for frames when the process was told to end: Lightning would look only after the batch."""
        if self.trainer is not None and self.trainer.received_sigterm:
            raise SIGTERMException


def add_callbacks(trainer: L.Trainer, stream: CollectorDataset) -> None:
    """Give a trainer the callbacks without which nothing would work, unless it has them.

    Args:
        trainer: gets them before its checkpoint callbacks, which Lightning keeps last.
        stream: with whose end the run ends.

    Raises:
        TypeError: if the trainer is of the package ``pytorch_lightning``.
    """
    if not isinstance(trainer, L.Trainer):
        raise TypeError(
            f"CollectorDataModule needs a Trainer of the package lightning, got {type(trainer).__module__}."
            f"{type(trainer).__name__}; use `import lightning as L` and `L.Trainer`"
        )
    for kind in (WeightSync, FrameBudget):
        if find_callback(trainer, kind) is None:
            trainer.callbacks.insert(0, kind())  # type: ignore[attr-defined]
    budget = find_callback(trainer, FrameBudget)
    assert budget is not None
    budget.stream = stream


def policy_of(module: L.LightningModule | None) -> Any:
    """Who acts for a module: what its ``collector_policy()`` returns, else its ``policy``, else None."""
    make_policy = getattr(module, "collector_policy", None)
    return getattr(module, "policy", None) if make_policy is None else make_policy()


def required_policy(module: L.LightningModule | None) -> Any:
    """The same.

    Raises:
        TypeError: if there is nobody to act.
    """
    policy = policy_of(module)
    if policy is None:
        owner = "the LightningModule, fitted with datamodule=..." if module is None else type(module).__name__
        raise TypeError(
            f"there is no policy to act with : expected an attribute `policy` or a method `collector_policy` of "
            f"{owner}, or CollectorDataModule(policy=...)"
        )
    return policy


def initialise_lazy(
    policy: Any, module: L.LightningModule | None, *, source: EnvSource, rollout: RolloutConfig, place: Placement
) -> None:
    """Let a policy with lazy layers act once, so that they know their shapes before a strategy wraps them.

    It acts in an env copy that is made for this and closed again, without gradients, in eval mode, and with random
    numbers of its own, also for the new weights. Nothing happens if all layers know their shapes, nor with a live env.

    Args:
        policy: who acts.
        module: whose layers these may be, if the policy does not show them.
        source: makes the env.
        rollout: how observations are stored.
        place: whose random numbers these are; the first rank's are taken on all.
    """
    if source.live or not any(is_lazy(tensor) for tensor in _tensors(module_of(policy), module)):
        return
    runner = build_runner(
        WorkerSpec(
            source=replace(source, makers=source.makers[:1], num_envs=None),
            policy=policy,
            rollout=replace(rollout, init_random_frames=0),
            num_envs=None,
            place=replace(place, rank=0, default_envs=1),
            restart=_BEFORE_ALL,
        )
    )
    try:
        runner.collect(1, version=0)
    finally:
        runner.close()


def prepared(batch: TensorDictBase, trainer: L.Trainer | None) -> TensorDictBase:
    """A whole batch on the trainer's device, after the module's ``prepare_rollout`` if it has one.

    Args:
        batch: [N, T].
        trainer: whose module this is for; None leaves it as it is.

    Raises:
        TypeError: if ``prepare_rollout`` returns no TensorDict.
    """
    if trainer is None:
        return batch
    device = trainer.strategy.root_device
    batch = batch if batch.device == device else batch.to(device)
    prepare = getattr(trainer.lightning_module, "prepare_rollout", None)
    if prepare is None:
        return batch
    batch = restore_batch_size(trainer.precision_plugin.convert_input(batch), batch.batch_dims)
    with torch.no_grad():
        answer = prepare(batch)
    if not isinstance(answer, TensorDictBase):
        raise TypeError(f"prepare_rollout must return the batch as a TensorDict, got {type(answer).__name__}")
    return answer


def restore_batch_size(batch: Any, dims: int) -> Any:
    """Give batches back the size that some precision plugins take from them.

    Args:
        batch: a TensorDict, or a collection with some in it.
        dims: dimensions of each of them.
    """
    if isinstance(batch, TensorDictBase):
        return _restore(batch, dims)
    return apply_to_collection(batch, TensorDictBase, _restore, dims)  # of a CombinedLoader


def _restore(batch: TensorDictBase, dims: int) -> TensorDictBase:
    return batch if batch.batch_size else batch.auto_batch_size_(batch_dims=dims)


def _tensors(*modules: nn.Module | None) -> Iterator[Tensor]:
    given = [module for module in modules if module is not None]
    return chain.from_iterable(chain(module.parameters(), module.buffers()) for module in given)
