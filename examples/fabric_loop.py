# An own loop with Lightning Fabric: PPO on CartPole-v1 in one process, or in several: python fabric_loop.py 2
# Each process has env copies, seeds and a share of the frames of its own; gradients are averaged over all of them.
# Expected: episodes of over 300 frames after 60,000 frames of all processes; runs in some ten seconds.
import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn

from lit_collect import Collector, CollectorDataset, Placement, UpdateConfig
from trainers import categorical_log_prob, generalized_advantage, mlp, normalize, ppo_policy_loss, value_loss

FRAMES = int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 60_000)) // 16 * 16  # 8 copies in each of 1 or 2 processes
GAMMA, LAMBDA, CLIP = 0.98, 0.8, 0.2


class Net(nn.Module):
    """Actor and critic in one module, so that one call of it gives all that the loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp([4, 64, 64, 2], output_gain=0.01), mlp([4, 64, 64, 1])

    def policy(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.actor(observation)}

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(observation), self.critic(observation).squeeze(-1)


@torch.no_grad()
def add_advantage(net: Net, batch):
    """Advantages and value targets of a whole batch [N, T]."""
    value, after = (net.critic(data["observation"]).squeeze(-1) for data in (batch, batch["next"]))
    terminated, done = (batch["next", key].squeeze(-1) for key in ("terminated", "done"))
    reward = batch["next", "reward"].squeeze(-1)
    batch["advantage"] = generalized_advantage(reward, value, after, GAMMA * ~terminated, done, LAMBDA)
    batch["target"] = batch["advantage"] + value
    return batch


def main(processes: int) -> None:
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=processes)
    fabric.launch()
    fabric.seed_everything(0)
    net = Net()
    module, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    ended: list[int] = []  # episodes in each batch

    def prepare(batch):
        ended.append(int(batch["next", "done"].sum()))
        return add_advantage(net, batch)

    collector = Collector(
        "CartPole-v1",
        net.policy,  # of the bare module: calling the wrapper would wait for the other processes in each step
        num_envs=8,
        frames_per_batch=256,
        total_frames=FRAMES // fabric.world_size,
        seed=Placement(entropy=0, rank=fabric.global_rank, world_size=fabric.world_size),
        hooks={"postproc": prepare},
    )
    with collector:
        for minibatch in CollectorDataset(collector, updates=UpdateConfig(epochs=10, minibatch_size=128)):
            logits, value = module(minibatch["observation"])
            log_prob = categorical_log_prob(logits, minibatch["action"])
            advantage = normalize(minibatch["advantage"])
            loss = ppo_policy_loss(log_prob, minibatch["log_prob"], advantage, CLIP)
            optimizer.zero_grad()
            fabric.backward(loss + 0.5 * value_loss(value, minibatch["target"]))
            optimizer.step()
    length = 256 / fabric.all_reduce(torch.tensor(ended[-20:]).float().mean(), reduce_op="mean").clamp(min=1 / 20)
    fabric.print(f"{FRAMES:,} frames in {fabric.world_size} process(es); at the end an episode took {length:.0f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
