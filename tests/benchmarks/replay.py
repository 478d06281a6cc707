"""Replay buffers against TorchRL's and Stable-Baselines3's: `python tests/benchmarks/replay.py`.

CartPole-like transitions with 14 leaves; a million rows of them, which 8 env copies wrote. All sides do the same work
in turns on one thread, writing from the same batches [8, T]; a ratio is the median over repetitions of the ratio of
seconds within one repetition.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchrl
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer as StableBuffer
from tensordict import TensorDict, TensorDictBase
from torch.utils import cpp_extension
from torchrl.data import LazyTensorStorage, PrioritizedSampler, SliceSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import prioritized

from lit_collect.frames import TRAJ_IDS
from lit_collect.replay import ReplayBuffer

NUM_ENVS = 8
ROWS = 1_000_000
BATCH = 256
SLICE = 16


def batch_of(steps: int, first: int) -> TensorDict:
    """A batch [8, steps] whose first row of each env copy is its `first` row; episodes have about 50."""
    shape = (NUM_ENVS, steps)
    random = torch.Generator().manual_seed(first)
    observation = torch.rand(NUM_ENVS, steps + 1, 4, generator=random)
    done = torch.rand(*shape, 1, generator=random) < 0.02
    done[:, -1] = True
    before = torch.cat([torch.zeros(NUM_ENVS, 1, dtype=torch.int64), done[:, :-1, 0].cumsum(1)], 1)
    copies = torch.arange(NUM_ENVS)[:, None]
    no = torch.zeros(*shape, 1, dtype=torch.bool)
    return TensorDict(
        {
            "observation": observation[:, :-1],
            "action": torch.randint(0, 2, shape, generator=random),
            "log_prob": torch.rand(shape, generator=random),
            "done": no,
            "terminated": no.clone(),
            "truncated": no.clone(),
            "is_init": torch.cat([torch.ones(NUM_ENVS, 1, 1, dtype=torch.bool), done[:, :-1]], 1),
            "collector": {
                "traj_ids": (first + before) * NUM_ENVS + copies,
                "policy_version": torch.zeros(shape, dtype=torch.int64),
            },
            "next": {
                "observation": observation[:, 1:].clone(),
                "reward": torch.ones(*shape, 1),
                "done": done,
                "terminated": done.clone(),
                "truncated": no.clone(),
            },
        },
        batch_size=shape,
        names=[None, "time"],
    )


def ours(**settings: object) -> ReplayBuffer:
    return ReplayBuffer(ROWS, BATCH, seed=0, **settings)  # type: ignore[arg-type]


def torchrl_buffer(sampler: object = None) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, batch_size=BATCH)


def stable_buffer() -> StableBuffer:
    """SB3's, full: it takes rows one step at a time, which is not what is compared."""
    buffer = StableBuffer(ROWS, spaces.Box(-1, 1, (4,)), spaces.Discrete(2), device="cpu", n_envs=NUM_ENVS)
    random = np.random.default_rng(0)
    for array in (buffer.observations, buffer.next_observations):
        array[:] = random.random(array.shape, np.float32)
    buffer.full = True
    return buffer


def fill(buffers: list[ReplayBuffer], others: list[TensorDictReplayBuffer]) -> None:
    """Write a million rows into each; TorchRL's wants rows of one dimension to sample slices of."""
    steps = 2500
    for first in range(0, ROWS // NUM_ENVS, steps):
        batch = batch_of(steps, first)
        for buffer in buffers:
            buffer.extend(batch)
        for other in others:
            other.extend(batch.reshape(-1))


def make_trees() -> None:
    """Compile TorchRL's trees from the sources in its wheel, where the wheel's own are for another version of torch."""
    if prioritized.SumSegmentTreeFp32 is not None:
        return
    kinds = [(name, kind, bits) for name in ("Sum", "Min") for kind, bits in (("float", "Fp32"), ("double", "Fp64"))]
    bindings = "".join(f'torchrl::Define{name}SegmentTree<{kind}>("{bits}", m);' for name, kind, bits in kinds)
    trees = cpp_extension.load_inline(
        "torchrl_trees",
        f'#include "torchrl/csrc/segment_tree.h"\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{{bindings}}}',
        extra_include_paths=[str(Path(torchrl.__file__).parents[1])],
        extra_cflags=["-O3", "-DNDEBUG"],
    )
    for name, _, bits in kinds:
        setattr(prioritized, f"{name}SegmentTree{bits}", getattr(trees, f"{name}SegmentTree{bits}"))


def seconds(work: Callable[[], object], times: int) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times


def compare(name: str, works: dict[str, Callable[[], object]], times: int, repetitions: int, wanted: str) -> None:
    """Print what each side takes, and the ratio of the others to the first."""
    for work in works.values():
        seconds(work, times // 4 + 3)
    rounds = [[seconds(work, times) for work in works.values()] for _ in range(repetitions)]
    (first, one), *others = zip(works, zip(*rounds, strict=True), strict=True)
    line = f"{name}: {first} {statistics.median(one) * 1e6:.0f} us"
    for other, theirs in others:
        ratio = statistics.median(b / a for a, b in zip(one, theirs, strict=True))
        line += f", {other} {statistics.median(theirs) * 1e6:.0f} us ({ratio:.1f} times)"
    print(f"{line}; wanted {wanted}", flush=True)


def with_priorities(sample: Callable[[], TensorDictBase], update: Callable[..., object]) -> Callable[[], None]:
    """Sample, and give what was drawn new priorities."""
    priority = torch.rand(BATCH)

    def work() -> None:
        update(sample()["index"], priority)

    return work


def compare_rows(repetitions: int) -> None:
    """Single rows: sampling and writing."""
    one, other, stable = ours(), torchrl_buffer(), stable_buffer()
    fill([one], [other])
    works = {"ours": one.sample, "TorchRL": other.sample, "SB3": lambda: stable.sample(BATCH)}
    compare(f"uniform, {BATCH} of {ROWS:,} rows", works, 1000, repetitions, "3 times TorchRL, 1 times SB3")
    batch = batch_of(256, 10**6)
    works = {"ours": lambda: one.extend(batch), "TorchRL": lambda: other.extend(batch.reshape(-1))}
    compare(f"extend by {batch.numel()} rows", works, 200, repetitions, "2 times")


def compare_slices(repetitions: int) -> None:
    """Slices: sampling alone, and after each write. TorchRL's sampler may keep what it found until the next write."""
    one = ours(slice_len=SLICE)
    other = torchrl_buffer(SliceSampler(slice_len=SLICE, traj_key=TRAJ_IDS))
    caching = torchrl_buffer(SliceSampler(slice_len=SLICE, traj_key=TRAJ_IDS, cache_values=True))
    fill([one], [other, caching])
    works = {"ours": one.sample, "TorchRL": other.sample, "TorchRL, caching": caching.sample}
    compare(f"{BATCH // SLICE} slices of {SLICE}", works, 20, repetitions, "5 times")
    batch = batch_of(256, 10**6)
    works = {
        "ours": lambda: (one.extend(batch), one.sample()),
        "TorchRL": lambda: (other.extend(batch.reshape(-1)), other.sample()),
        "TorchRL, caching": lambda: (caching.extend(batch.reshape(-1)), caching.sample()),
    }
    compare(f"extend by {batch.numel()} rows and sample slices", works, 20, repetitions, "5 times")


def compare_priorities(repetitions: int) -> None:
    """Prioritized rows: a sample, and new priorities for it."""
    make_trees()
    one, other = ours(sampler="prioritized"), torchrl_buffer(PrioritizedSampler(ROWS, alpha=0.6, beta=0.4))
    fill([one], [other])
    works = {
        "ours": with_priorities(one.sample, one.update_priority),
        "TorchRL": with_priorities(other.sample, other.update_priority),
    }
    compare("prioritized sample and update", works, 300, repetitions, "1 / 1.5 times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    compare_rows(repetitions)
    compare_slices(repetitions)
    compare_priorities(repetitions)


if __name__ == "__main__":
    main()
