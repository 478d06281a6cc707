"""A script that trains on two ranks from offline rows in one mapped storage, and writes down what each rank drew.

``python two_ranks_offline.py ROWS FOLDER`` fills ``FOLDER/store`` and leaves ``<rank>.pt`` in the folder.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_collect import OfflineDataModule
from tests.behaviour.two_ranks import RANKS, Model

BATCH_SIZE = 1000


class Learner(Model):
    """Keeps its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Any] = []

    def training_step(self, batch, batch_idx):
        self.samples.append(batch.clone())
        return super().training_step(batch, batch_idx)


def main(rows: str, folder: Path) -> None:
    L.seed_everything(5, workers=True, verbose=False)
    model = Learner()
    data = OfflineDataModule(
        rows, batch_size=BATCH_SIZE, updates_per_epoch=20, sampler="without_replacement", storage="mapped",
        storage_path=str(folder / "store"),
    )  # fmt: skip
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=1, default_root_dir=folder,
        **dict.fromkeys(quiet, False),
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    torch.save(torch.cat(model.samples).to_dict(), folder / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
