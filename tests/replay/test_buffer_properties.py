"""Whatever is written, by whom and in which order: slices are contiguous, every row is there, successors are right.

A script is a sequence of batches [N, T] of several workers, each with env copies of its own whose episodes have random
lengths. A row says of which env copy, episode and step it is. The model is a list of the rows that were written.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lit_collect.frames import INDEX, IS_INIT, MASK, NEXT_DONE, NEXT_TRUNCATED, TRAJ_IDS, WRITTEN
from lit_collect.replay import ReplayBuffer, SliceSampler, SliceWithoutReplacementSampler, WithoutReplacementSampler

SLICE = 3
AFTER_THE_END = 1000.0  # steps of an observation that no row repeats


@dataclass
class Worker:
    """Steps its env copies; ids are those of a collector: the k-th trajectory of env g is k * G + g."""

    first_env: int
    num_envs: int
    all_envs: int
    random: np.random.Generator
    state: list[list[int]] = field(init=False)  # of each copy: episode, step, length of the episode

    def __post_init__(self):
        self.state = [[0, 0, self._length()] for _ in range(self.num_envs)]

    def _length(self):
        return int(self.random.integers(1, 8))

    def batch(self, steps, *, masked):
        columns = [[self._step(copy) for _ in range(steps)] for copy in range(self.num_envs)]
        table = torch.tensor(columns)  # [N, T, 6]: env, episode, step, successor's step, done, first
        env, episode, step, behind, done, first = table.unbind(-1)
        mask = {MASK[1]: torch.from_numpy(self.random.random((self.num_envs, steps)) < 0.8)} if masked else {}
        return TensorDict(
            {
                "observation": torch.stack([env, episode, step], -1).float(),
                "is_init": (first > 0)[..., None],
                "collector": {"traj_ids": (episode * self.all_envs + env).long(), **mask},
                "next": {
                    "observation": torch.stack([env, episode, behind], -1).float(),
                    "done": (done > 0)[..., None],
                    "truncated": (done > 0)[..., None],
                },
            },
            batch_size=[self.num_envs, steps],
        )

    def _step(self, copy):
        episode, step, length = self.state[copy]
        done = step == length - 1
        self.state[copy] = [episode + 1, 0, self._length()] if done else [episode, step + 1, length]
        behind = step + 1 + (AFTER_THE_END if done and episode % 2 else 0.0)
        return [float(v) for v in (self.first_env + copy, episode, step, behind, done, step == 0)]


@st.composite
def scripts(draw, masked=False):
    """Batches in the order in which they are written, and a capacity that they fit into."""
    copies = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    firsts = np.cumsum([0, *copies])
    workers = [Worker(int(firsts[n]), count, int(firsts[-1]), random) for n, count in enumerate(copies)]
    turns = draw(st.lists(st.tuples(st.integers(0, len(copies) - 1), st.integers(1, 6)), min_size=1, max_size=12))
    batches = [workers[number].batch(steps, masked=masked) for number, steps in turns]
    largest = max(batch.numel() for batch in batches)
    return batches, draw(st.integers(largest, largest + 30))


def flat(batch):
    rows = batch.reshape(-1) if MASK not in batch.keys(True) else batch[batch[MASK]]
    return rows.exclude(MASK)


def contents(written, capacity):
    """What the buffer must hold, by position, and the serial numbers."""
    count = len(written)
    serials = np.arange(max(0, count - capacity), count)
    order = serials[np.argsort(serials % capacity)]
    return written[torch.from_numpy(order)], torch.from_numpy(order)


def equal(first, second):
    return all(first[key].numpy().tobytes() == second[key].numpy().tobytes() for key in second.keys(True, True))


@settings(max_examples=80, deadline=None)
@given(scripts(), st.booleans())
def test_rows_then_are_the_newest_and_their_successors_right(script, compact_obs):
    batches, capacity = script
    buffer = ReplayBuffer(capacity, 16, sampler=WithoutReplacementSampler(), compact_obs=compact_obs, seed=0)
    written = None
    for batch in batches:
        buffer.extend(batch)
        written = flat(batch) if written is None else torch.cat([written, flat(batch)])
        wanted, serials = contents(written, capacity)
        assert equal(buffer[:], wanted)
        sample = buffer.sample(capacity)  # one pass: every row is reached, and once
        if len(sample) == len(buffer):
            assert sorted(sample[WRITTEN].tolist()) == sorted(serials.tolist())
        assert equal(sample.exclude(INDEX, WRITTEN), written[sample[WRITTEN]])


@settings(max_examples=120, deadline=None)
@given(scripts(), st.booleans(), st.booleans())
def test_slices_then_lie_in_one_piece_of_one_episode(script, strict, compact_obs):
    batches, capacity = script
    sampler = SliceSampler(SLICE, strict_length=strict)
    buffer = ReplayBuffer(capacity, 4 * SLICE, sampler=sampler, compact_obs=compact_obs, seed=0)
    written = None
    for batch in batches:
        buffer.extend(batch)
        written = flat(batch) if written is None else torch.cat([written, flat(batch)])
        wanted, _ = contents(written, capacity)
        longest = max(wanted[TRAJ_IDS].unique(return_counts=True)[1].tolist())
        assert buffer.can_sample() == (longest >= SLICE or not strict)
        if buffer.can_sample():
            check_slices(buffer.sample(), written, strict=strict)
    assert equal(buffer[:], wanted)  # marks are in the samples alone


def check_slices(sample, written, *, strict):
    mask = torch.ones(sample.batch_size, dtype=torch.bool) if strict else sample[MASK]
    assert mask[:, 0].all()
    assert not (mask[:, 1:] & ~mask[:, :-1]).any()
    pairs = mask[:, 1:]
    seen = sample["observation"]
    assert torch.equal(seen[:, 1:, :2][pairs], seen[:, :-1, :2][pairs])
    assert torch.equal(seen[:, 1:, 2][pairs], seen[:, :-1, 2][pairs] + 1)
    rows = written[sample[WRITTEN][mask]]
    for key in ("observation", ("next", "observation"), TRAJ_IDS):
        assert torch.equal(sample[key][mask], rows[key])
    last = torch.arange(len(sample)), mask.sum(1) - 1
    assert sample[NEXT_DONE][last].all()
    assert sample[NEXT_TRUNCATED][last].all()
    inner = mask.clone()
    inner[last] = False
    assert not sample[NEXT_DONE][inner].any()
    assert sample[IS_INIT][:, 0].all()


@settings(max_examples=60, deadline=None)
@given(scripts())
def test_slices_without_replacement_then_reach_every_row_once(script):
    batches, capacity = script
    sampler = SliceWithoutReplacementSampler(SLICE, strict_length=False)
    buffer = ReplayBuffer(capacity, SLICE, sampler=sampler, seed=0)
    for batch in batches:
        buffer.extend(batch)
    reached = []
    while len(reached) < len(buffer):
        sample = buffer.sample()
        reached += sample[WRITTEN][sample[MASK]].tolist()
    count = buffer.write_count
    assert sorted(reached) == list(range(count - len(buffer), count))


@settings(max_examples=60, deadline=None)
@given(scripts(masked=True), st.booleans())
def test_masked_rows_then_are_not_there(script, compact_obs):
    batches, capacity = script
    buffer = ReplayBuffer(capacity, SLICE, sampler=SliceSampler(SLICE), compact_obs=compact_obs, seed=0)
    written = torch.cat([flat(batch) for batch in batches])
    for batch in batches:
        buffer.extend(batch)
    assert buffer.write_count == len(written)
    if len(written):
        assert equal(buffer[:], contents(written, capacity)[0])


@settings(max_examples=40, deadline=None)
@given(scripts(), st.integers(0, 11), st.booleans())
def test_state_in_the_middle_of_a_script_then_changes_nothing(script, cut, compact_obs):
    batches, capacity = script

    def make(seed):
        return ReplayBuffer(capacity, 4 * SLICE, slice_len=SLICE, compact_obs=compact_obs, seed=seed)

    straight, resumed = make(0), make(1)
    for number, batch in enumerate(batches):
        if number == min(cut, len(batches) - 1):
            resumed.load_state_dict(straight.state_dict())
        straight.extend(batch)
        if number >= min(cut, len(batches) - 1):
            resumed.extend(batch)
            assert resumed.can_sample() == straight.can_sample()
            assert not straight.can_sample() or equal(resumed.sample(), straight.sample())
    assert equal(resumed[:], straight[:])
