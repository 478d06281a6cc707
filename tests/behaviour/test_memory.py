"""Collecting images for long takes no more memory than collecting them for a while."""

import os
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from lit_collect import Collector, CollectorDataModule, ProcessBackend, RolloutConfig, UpdateConfig
from lit_collect.frames import SUCCESSORS, columns_of
from lit_collect.successors import restore_successors, table_of

COPIES, STEPS = 2, 16
FRAMES = COPIES * STEPS
BATCHES, SETTLED = 500, 20
SHAPE = (4, 84, 84)
PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.slow


class Pictures(gymnasium.Env):
    """A new picture in each step; episodes of 50 frames."""

    observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed = 0
        return self._picture(), {}

    def step(self, action):
        self.elapsed += 1
        return self._picture(), 1.0, self.elapsed == 50, False, {}

    def _picture(self):
        return np.full(SHAPE, self.elapsed, np.uint8)


def resident(pids: list[int]) -> int:
    """Bytes that processes hold in memory."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE for pid in pids)


def size(batch: TensorDictBase) -> int:
    table = table_of(batch)
    tensors = [*columns_of(batch).values(), *([] if table is None else table.values.values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
@pytest.mark.parametrize("backend", ["direct", pytest.param("process", marks=pytest.mark.processes)])
@pytest.mark.usefixtures("nursery")
def test_memory_does_not_grow_with_the_batches(backend, compact):
    collector = Collector(
        Pictures,
        num_envs=COPIES,
        frames_per_batch=FRAMES,
        rollout=RolloutConfig(compact_obs=compact),
        backend=ProcessBackend(2) if backend == "process" else backend,
        seed=0,
    )
    with collector:
        pids = [os.getpid()]
        if backend == "process":
            pids += [int(member.channel.name.split()[-1]) for member in collector.workers.members]
        before = total = 0
        for number in range(BATCHES):
            batch = collector.collect()
            total += size(batch)
            if number == SETTLED:
                before = resident(pids)
        grown = resident(pids) - before
    assert grown < 0.02 * total  # were one batch in fifty kept, it would be more


def test_memory_does_not_grow_in_the_loader():
    data = CollectorDataModule(
        Pictures,
        lambda observation: torch.zeros(len(observation), dtype=torch.int64),
        num_envs=COPIES,
        frames_per_batch=FRAMES,
        total_frames=200 * FRAMES,
        updates=UpdateConfig(epochs=2, minibatch_size=8),
        evaluation=None,
        seed=0,
    )
    before = total = 0
    for number, minibatch in enumerate(data.train_dataloader()):
        total += size(minibatch)
        if number == SETTLED * 8:
            before = resident([os.getpid()])
    grown = resident([os.getpid()]) - before
    data.close()
    assert total > 200 * FRAMES * np.prod(SHAPE)
    assert grown < 0.02 * total


def test_compact_batches_take_half_the_memory():
    sizes, batches = {}, {}
    for compact in (False, True):
        rollout = RolloutConfig(compact_obs=compact)
        with Collector(Pictures, num_envs=COPIES, frames_per_batch=8 * FRAMES, rollout=rollout, seed=0) as collector:
            batches[compact] = collector.collect()
            sizes[compact] = size(batches[compact])
    assert sizes[True] < 0.52 * sizes[False]
    assert SUCCESSORS in batches[True].keys(include_nested=True)
    restored = restore_successors(batches[True])
    assert torch.equal(restored["next", "observation"], batches[False]["next", "observation"])
