"""Small nets and draws in NumPy against the same in torch: `python tests/benchmarks/lowering.py`.

The whole collector on CartPole-v1 with the 2x64 tanh net of `policies`, as a module that gives logits and as the usual
TensorDict actor. Both ways are taken in turns on one thread; the ratio is the median over repetitions of the ratio of
frames per second within one repetition.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from policies import make_actor, make_net
from run import frames_per_second
from torch import Tensor, nn

from lit_collect import Collector
from lit_collect.sampling import CATEGORICAL, CategoricalSampler

FRAMES_PER_BATCH = 2048
WANTED = {1: 1.5, 8: 1.2}  # at least, by env copies


class Logits(nn.Module):
    """The net, whose logits the collector draws from."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(observation)}


def in_torch(policy: nn.Module) -> nn.Module:
    """The policy, with its net left to torch: a `forward` of one's own is not exchanged."""
    net = next(part for part in policy.modules() if type(part) is nn.Sequential)
    net.forward = net.forward
    return policy


@contextmanager
def drawing_in_torch() -> Iterator[None]:
    """Collectors that take their first batch in here draw their actions in torch, too."""
    object.__setattr__(CATEGORICAL, "sampler", None)
    try:
        yield
    finally:
        object.__setattr__(CATEGORICAL, "sampler", CategoricalSampler)


def collector(policy: nn.Module, num_envs: int) -> Callable[[], int]:
    """A function that collects one batch and returns how many frames it holds."""
    batches = iter(Collector("CartPole-v1", policy, num_envs=num_envs, frames_per_batch=FRAMES_PER_BATCH, seed=0))
    return lambda: next(batches).numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    for num_envs in (1, 8, 32):
        for name, make in (("module", Logits), ("TensorDict actor", make_actor)):
            ours, theirs = collector(make(), num_envs), collector(in_torch(make()), num_envs)
            ours()
            with drawing_in_torch():
                theirs()
            pairs = [(frames_per_second(ours), frames_per_second(theirs)) for _ in range(repetitions)]
            ratio = statistics.median(one / other for one, other in pairs)
            numpy, in_turn = (statistics.median(values) for values in zip(*pairs, strict=True))
            wanted = f", wanted {WANTED[num_envs]}" if num_envs in WANTED else ""
            print(f"{num_envs:2} envs, {name}: {numpy:7.0f} against {in_turn:7.0f} frames/s: {ratio:.2f} times{wanted}")


if __name__ == "__main__":
    main()
