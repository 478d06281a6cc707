# Collecting without a Trainer: a plain loop over exact batches, with an own update (REINFORCE) in between.
# Expected: one line for each batch, the last one shorter, with the version of the weights that acted in it; episodes
# grow from 20 frames to over 100. Runs in a few seconds.
import os

import torch
from torch import nn

from lit_collect import Collector


class Policy(nn.Module):
    """Names its distribution parameters; the collector draws the action and stores its log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.net(observation)}


def returns_to_go(reward: torch.Tensor, done: torch.Tensor, gamma: float = 0.99) -> torch.Tensor:
    """Discounted rewards from each row to the end of its episode, or of the batch: [N, T] -> [N, T]."""
    total, columns = torch.zeros_like(reward[:, 0]), []
    for t in reversed(range(reward.shape[1])):
        total = reward[:, t] + gamma * total * ~done[:, t]
        columns.append(total)
    return torch.stack(columns[::-1], 1)


def main() -> None:
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    frames = int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 20_000))
    with Collector("CartPole-v1", policy, num_envs=8, frames_per_batch=1024, total_frames=frames, seed=0) as collector:
        for batch in collector:
            returns = returns_to_go(batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1))
            advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
            log_prob = torch.distributions.Categorical(**policy(batch["observation"])).log_prob(batch["action"])
            optimizer.zero_grad()
            (-log_prob * advantage).mean().backward()
            optimizer.step()
            collector.update_policy_weights_(policy)
            episodes = max(int(batch["next", "done"].sum()), 1)
            version = int(batch["collector", "policy_version"].max())
            print(
                f"{batch.numel():5d} frames by version {version:3d}, {batch.numel() / episodes:6.1f} frames an episode"
            )


if __name__ == "__main__":
    main()
