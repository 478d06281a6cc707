"""`WeightSync`: the collectors act with what the optimizer has made."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lit_collect.callbacks._source import find_collection


class WeightSync(Callback):
    """Publishes the policy's weights after optimizer steps that really happened.

    A step of any optimizer, under automatic or manual optimization, with accumulation or with AMP, marks the weights
    as changed. In synchronous collection one snapshot goes out right before the next batch is collected, however
    many steps there were: data are on-policy, and ``("collector", "policy_version")`` counts the snapshots.

    A `CollectorDataModule` adds this callback if it finds none.

    Args:
        every_n_steps: publish after so many steps; matters to asynchronous collection only.
        max_staleness: how many versions the acting weights may lag behind in asynchronous collection, which then waits
            or drops frames (None: what the backend says); synchronous collection never lags.

    Raises:
        ValueError: if `every_n_steps` is below 1 or `max_staleness` below 0.

    Example:
        >>> WeightSync(every_n_steps=0)
        Traceback (most recent call last):
        ...
        ValueError: weight_sync.every_n_steps must be at least 1, got 0
    """

    def __init__(self, every_n_steps: int = 1, max_staleness: int | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"weight_sync.every_n_steps must be at least 1, got {every_n_steps}")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"weight_sync.max_staleness must be at least 0 or None, got {max_staleness}")
        self.every_n_steps = every_n_steps
        self.max_staleness = max_staleness
        self._steps = 0  # optimizer steps since the last publication
        self._changed = False  # by something else
        self._handles: list[RemovableHandle] = []

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Watch the optimizers of this fit (Lightning makes new ones for each)."""
        self._release()
        self._changed, self._steps = False, 0  # what another fit has left
        self._handles = [optimizer.register_step_post_hook(self._see_step) for optimizer in trainer.optimizers]

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the optimizers go."""
        self._release()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let the optimizers go."""
        self._release()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Publish while the collectors go on, if they do."""
        source = find_collection(trainer)
        if source is not None:
            source.publish_in_between()

    def mark_changed(self) -> None:
        """The weights changed: publish them before the next batch."""
        self._changed = True

    def take_change(self, every_n_steps: int = 1) -> bool:
        """Whether the weights changed since the last time this said so.

        Args:
            every_n_steps: optimizer steps that are worth a publication.
        """
        due = self._changed or self._steps >= every_n_steps
        if due:
            self._changed, self._steps = False, 0
        return due

    def _see_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._steps += 1

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
