# A LightningModule of your own that knows nothing of lit_collect but `policy` and `training_step`.
# Expected: the mean episode return, which grows from about 20; runs in a few seconds.
# Manual optimization, several optimizers or accumulation change nothing: data are always of the newest weights.
import os
from typing import Any

import lightning as L
import torch
from torch import nn

from lit_collect import CollectionMonitor, CollectorDataModule


class Reinforce(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def policy(self, observation: torch.Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.net(observation))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        still_to_come = batch["next", "reward"].flip(1).cumsum(1).flip(1).squeeze(-1)
        advantage = (still_to_come - still_to_come.mean(0)) / (still_to_come.std() + 1e-6)
        return -(self.policy(batch["observation"]).log_prob(batch["action"]) * advantage).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    L.seed_everything(0)
    frames = int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 50_000))
    data = CollectorDataModule("CartPole-v1", num_envs=8, frames_per_batch=512, total_frames=frames, evaluation=None)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[CollectionMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Reinforce(), datamodule=data)
    print(f"mean return of the last episodes: {float(trainer.callback_metrics['episode/return_mean']):.1f}")


if __name__ == "__main__":
    main()
