# A loss of TorchRL on batches of lit_collect: these are laid out as TorchRL's own, so its losses take them as they are.
# Expected: the mean length of episodes at the beginning and at the end, from under 100 to about 200 frames; runs in
# some ten seconds. Where TorchRL is not installed it says so and does nothing.
import importlib.util
import os
import sys

import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from lit_collect import Collector, CollectorDataset, UpdateConfig

FRAMES = int(os.environ.get("LIT_COLLECT_EXAMPLE_FRAMES", 40_000)) // 8 * 8


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def main() -> None:
    from torchrl.modules import ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(0)
    torch.set_num_threads(1)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            log_prob_key="sample_log_prob",
        ),
    )
    critic = ValueOperator(mlp(1), in_keys=["observation"])
    advantage = GAE(gamma=0.98, lmbda=0.8, value_network=critic)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, normalize_advantage=True)
    loss.set_keys(sample_log_prob="sample_log_prob")
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    lengths: list[float] = []

    def prepare(batch):
        lengths.append(batch.numel() / max(int(batch["next", "done"].sum()), 1))
        with torch.no_grad():
            return advantage(batch)

    collector = Collector(
        "CartPole-v1",
        actor,
        num_envs=8,
        frames_per_batch=256,
        total_frames=FRAMES,
        seed=0,
        hooks={"postproc": prepare},
    )
    with collector:
        for minibatch in CollectorDataset(collector, updates=UpdateConfig(epochs=10, minibatch_size=128)):
            losses = loss(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            optimizer.step()
    first, last = (sum(part) / len(part) for part in (lengths[:10], lengths[-10:]))
    print(f"frames of an episode: {first:.1f} in the first ten batches, {last:.1f} in the last ten")


if __name__ == "__main__":
    if importlib.util.find_spec("torchrl") is None:
        print("torchrl is not installed, skipped")
        sys.exit()
    main()
