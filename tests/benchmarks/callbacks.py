"""What the callbacks cost a fit of PPO on CartPole: `python tests/benchmarks/callbacks.py`.

Two fits with the settings of configs/ppo_cartpole.yaml run in one process by turns, some batches each: one with
CollectionMonitor, FrameProgress and EpisodeLog, one without them, so that whatever else the machine does meets both.
Both draw the same random numbers, so that they do the same work. Times are those that the CPU spends on a fit's thread,
which is all of it. The figure is the median, over blocks of batches and over who is first, of the ratio of the two.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import threading
from contextlib import redirect_stdout
from pathlib import Path
from time import thread_time

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from lit_collect import CollectorDataModule, UpdateConfig
from lit_collect.callbacks import CollectionMonitor, EpisodeLog, FrameProgress, WeightSync
from trainers import PPO

BLOCK = 4  # batches of one fit between two of the other
FRAMES_PER_BATCH = 256


class Turns(Callback):
    """Lets the other fit go on after every block of batches, and keeps what each block took."""

    def __init__(self, mine: threading.Semaphore, others: threading.Semaphore, minibatches: int) -> None:
        self.seconds: list[float] = []
        self._mine, self._others = mine, others
        self._each = BLOCK * minibatches
        self._began_at = 0.0

    def begin(self) -> None:
        """Wait for one's turn."""
        self._mine.acquire()
        torch.manual_seed(len(self.seconds))
        self._began_at = thread_time()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """A block goes from the first minibatch of a batch to the first one of a later batch."""
        if batch_idx and batch_idx % self._each == 0:
            self.seconds.append(thread_time() - self._began_at)
            self._others.release()
            self.begin()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the rest to the other."""
        self._others.release()


def fit(total_frames: int, folder: Path, callbacks: list[Callback], turns: Turns, epochs: int) -> None:
    """One whole fit, with a CSV logger as in the config."""
    torch.set_num_threads(1)
    turns.begin()
    data = CollectorDataModule(
        "CartPole-v1",
        num_envs=8,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=total_frames,
        updates=UpdateConfig(epochs=epochs, minibatch_size=FRAMES_PER_BATCH),
        evaluation=None,
        seed=0,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=CSVLogger(folder),
        callbacks=[WeightSync(), *callbacks, turns],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, FrameProgress) for callback in callbacks),
        num_sanity_val_steps=0,
    )
    trainer.fit(PPO(learning_rate=1e-3, gamma=0.98, lambda_=0.8, clip=0.2, anneal=True), datamodule=data)


def measure(total_frames: int, callbacks: list[Callback], epochs: int, folder: Path, first: bool) -> list[float]:
    """Ratios of the blocks' times, with the callbacks and without; `first`: whether the fit with them begins."""
    flags = threading.Semaphore(first), threading.Semaphore(not first)
    turns = Turns(flags[0], flags[1], epochs), Turns(flags[1], flags[0], epochs)
    fits = [  # neither in the main thread, which has an allocator of its own
        threading.Thread(target=fit, args=(total_frames, folder / name, chosen, turn, epochs))
        for name, chosen, turn in zip(("with", "without"), (callbacks, []), turns, strict=True)
    ]
    for thread in fits:
        thread.start()
    for thread in fits:
        thread.join()
    pairs = list(zip(turns[0].seconds, turns[1].seconds, strict=True))
    return [one / another for one, another in pairs[1:]]  # the first block has the set-up


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=100_096, help="of each fit")
    parser.add_argument("--epochs", type=int, default=20, help="of each batch; the config has 20")
    options = parser.parse_args()
    choices: dict[str, list[type[Callback]]] = {
        "nothing (how far the figures can be trusted)": [],
        "monitor": [CollectionMonitor],
        "monitor, progress, episode log": [CollectionMonitor, FrameProgress, EpisodeLog],
    }
    for name, kinds in choices.items():
        ratios: list[float] = []
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
            for first in (True, False):
                callbacks = [kind() for kind in kinds]
                ratios += measure(options.frames, callbacks, options.epochs, Path(folder, str(first)), first)
        low, middle, high = [100 * (ratio - 1) for ratio in statistics.quantiles(ratios, n=4)]
        print(
            f"{name}: {middle:+.2f} % of a fit without (quartiles {low:+.2f} and {high:+.2f} of {len(ratios)} blocks "
            f"of {BLOCK} batches)"
        )


if __name__ == "__main__":
    main()
