"""What it costs to put whole trajectories together, of the cost of collecting: `python tests/benchmarks/assembling.py`.

CartPole-v1, 8 env copies in this process, batches of 1,024 frames, actions at random (episodes of about 22 frames, the
worst case: more of them are to be put together than later in training) or of an untrained network. Collecting and
assembling take turns in one run; a share is the median over repetitions, of processor seconds on one thread.
"""

import argparse
import statistics
import time

import torch
from tensordict.nn import TensorDictModule

from lit_collect import Collector, TrajectoryAssembler
from lit_collect.assembler import TrajectoryFormat


class Greedy(torch.nn.Module):
    """The best action of a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def measure(collector: Collector, trajs_per_batch: int, traj_format: TrajectoryFormat, rounds: int) -> float:
    """The share of assembling in both."""
    assembler = TrajectoryAssembler(trajs_per_batch, traj_format, total_copies=8)
    collecting = assembling = 0.0
    for _ in range(rounds):
        begin = time.process_time()
        batch = collector.collect()
        between = time.process_time()
        assembler.add(batch)
        while assembler.take() is not None:
            pass
        collecting += between - begin
        assembling += time.process_time() - between
    return assembling / (collecting + assembling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policies = {"at random": None, "a network": TensorDictModule(Greedy(), ["observation"], ["action"])}
    for acting, policy in policies.items():
        with Collector("CartPole-v1", policy, num_envs=8, frames_per_batch=1024, seed=0) as collector:
            measure(collector, 8, "cat", 20)
            for traj_format in ("cat", "padded"):
                for count in (8, 16, 32, 64):
                    shares = [
                        measure(collector, count, traj_format, options.rounds) for _ in range(options.repetitions)
                    ]
                    print(
                        f"acting {acting}, {count} trajectories per batch, {traj_format}: "
                        f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%}); wanted under 10%",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
