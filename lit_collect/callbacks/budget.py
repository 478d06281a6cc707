"""`FrameBudget`: the run ends with its frames."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lit_collect.callbacks._source import find_collection
from lit_collect.dataset import CollectorDataset
from lit_collect.errors import second_to


class FrameBudget(Callback):
    """Stops the fit after the last minibatch of the last batch, or the last epoch, on all ranks together.

    The data module adds it; there is nothing to configure.
    """

    def __init__(self) -> None:
        self.stream: CollectorDataset | None = None

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask the stream; ranks collect equally many batches, so they all get here with the same answer."""
        if self.stream is not None and self.stream.exhausted:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(True)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the envs: Lightning does not tell the data module if another callback raises here, too."""
        collection = find_collection(trainer)
        if collection is not None:
            with second_to(exception):
                collection.close()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """An epoch that was cut short (`limit_train_batches`, a hook) may end within the last batch."""
        if self.stream is not None and self.stream.spent:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(True)
