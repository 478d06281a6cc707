# A LightningModule of your own that knows nothing of lit_collect but `policy` and `training_step`.
# Expected: the mean return of the last 100 episodes, which grows from about 20 to over 100; runs in a few seconds.
# Manual optimization, several optimizers or accumulation change nothing: data are always of the newest weights.
import os
from typing import Any

import lightning as L
import torch
from torch import nn

from lit_collect import CollectionMonitor, CollectorDataModule


def returns_to_go(reward: torch.Tensor, done: torch.Tensor, gamma: float = 0.99) -> torch.Tensor:
    """Discounted rewards from each row to the end of its episode, or of the batch: [N, T] -> [N, T]."""
    total, columns = torch.zeros_like(reward[:, 0]), []
    for t in reversed(range(reward.shape[1])):
        total = reward[:, t] + gamma * total * ~done[:, t]
        columns.append(total)
    return torch.stack(columns[::-1], 1)


class Reinforce(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def policy(self, observation: torch.Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.net(observation))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        returns = returns_to_go(batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1))
        advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
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
        enable_model_summary=False,
    )
    trainer.fit(Reinforce(), datamodule=data)
    print(f"mean return of the last episodes: {float(trainer.callback_metrics['episode/return_mean']):.1f}")


if __name__ == "__main__":
    main()
