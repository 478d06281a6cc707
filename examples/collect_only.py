# Collecting without a Trainer: a plain loop over exact batches, with an own update in between.
# Expected: one line for each batch, the last one shorter, with the version of the weights that acted in it.
# Runs in a few seconds.
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


def main() -> None:
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    frames = int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 20_000))
    with Collector("CartPole-v1", policy, num_envs=8, frames_per_batch=1024, total_frames=frames, seed=0) as collector:
        for batch in collector:
            # REINFORCE with rewards counted to the end of the batch: what a row did matters to the rows after it.
            still_to_come = batch["next", "reward"].flip(1).cumsum(1).flip(1).squeeze(-1)
            advantage = (still_to_come - still_to_come.mean(0)) / (still_to_come.std() + 1e-6)
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
