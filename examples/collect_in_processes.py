# Collecting in two worker processes that go on while the learner learns; env and policy are of this very script.
# Expected: a line for each batch of either worker with frames per second and the age of its rows (how many versions
# newer the learner's weights were, never more than 2), and episodes that grow from 20 frames to over 100. Runs in some
# ten seconds, of which the first worker takes three to start. A guard of the main module is not needed.
import os
from time import perf_counter

import gymnasium
import torch
from torch import nn

from lit_collect import Collector, ProcessBackend


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


torch.manual_seed(0)
torch.set_num_threads(1)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
collector = Collector(
    lambda: gymnasium.make("CartPole-v1"),
    policy,
    num_envs=8,  # over both workers
    frames_per_batch=1024,
    total_frames=int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 100_000)),
    backend=ProcessBackend(num_collectors=2, sync=False, max_staleness=2),
    seed=0,
)
with collector:
    began = perf_counter()
    for batch in collector:  # [4, 256], of one worker
        age = collector.policy_version - int(batch["collector", "policy_version"].min())
        returns = returns_to_go(batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1))
        advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
        log_prob = torch.distributions.Categorical(**policy(batch["observation"])).log_prob(batch["action"])
        ratio = (log_prob - batch["log_prob"].reshape_as(log_prob)).exp()  # 1 for rows of age 0
        optimizer.zero_grad()
        (-ratio * advantage).mean().backward()
        optimizer.step()
        collector.update_policy_weights_()  # nobody waits: workers take it between two of their batches
        frames, episodes = collector.statistics()["frames_yielded"], max(int(batch["next", "done"].sum()), 1)
        fps = frames / (perf_counter() - began)
        print(f"{frames:7,} frames, {fps:7,.0f} a second, age {age}, {batch.numel() / episodes:6.1f} frames an episode")
