"""Successors that are stored once come back to the bit."""

from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect import Collector, FrameContractError
from lit_collect.frames import NEXT_DONE
from lit_collect.replay import ReplayBuffer
from lit_collect.testing import CountingEnv


def game(num_envs, steps, *, length=50, shape=(3,), dtype=torch.float32, done_first=0):
    """A stream of batches [N, 1] of env copies whose observations are drawn at random."""
    random = torch.Generator().manual_seed(0)

    def draw():
        values = torch.rand(num_envs, *shape, generator=random) * 255
        return values.to(dtype)

    seen, episode = draw(), 0
    for step in range(steps):
        led_to, done = draw(), step % length == length - 1
        flags = torch.full((num_envs, 1, 1), done)
        ids = (episode * num_envs + torch.arange(num_envs))[:, None]
        yield TensorDict(
            {
                "observation": seen[:, None],
                "collector": {"traj_ids": ids},
                "next": {"observation": led_to[:, None], "done": flags, "reward": torch.zeros(num_envs, 1, 1)},
            },
            batch_size=[num_envs, 1],
        )
        seen = draw() if done else led_to
        episode += done


def pair(capacity, **settings):
    """A compact buffer and a plain one with the same seed."""
    return ReplayBuffer(capacity, seed=0, compact_obs=True, **settings), ReplayBuffer(capacity, seed=0, **settings)


def equal(first, second):
    """Whether two TensorDicts are equal to the bit."""
    keys = sorted(first.keys(True, True), key=str)
    assert keys == sorted(second.keys(True, True), key=str)
    assert ("collector", "traj_ids") in keys
    return all(first[key].numpy().tobytes() == second[key].numpy().tobytes() for key in keys)


def kept(buffer):
    return buffer._successors.kept


@pytest.mark.parametrize("steps_at_once", [1, 2, 7])
@pytest.mark.parametrize("capacity", [64, 200])
def test_stream_then_equals_a_plain_buffer_and_keeps_few(steps_at_once, capacity):
    compact, plain = pair(capacity)
    batches = list(game(8, 63, length=10))
    for first in range(0, 63, steps_at_once):
        batch = torch.cat(batches[first : first + steps_at_once], 1)
        for buffer in (compact, plain):
            buffer.extend(batch)
        assert equal(compact[:], plain[:])
        assert equal(compact.sample(), plain.sample())
        ended = int(plain[:][NEXT_DONE].sum())
        assert kept(compact) <= ended + 8  # last rows of episodes, and those whose followers are to come


@pytest.mark.parametrize("end", [None, np.nan, -0.0])
def test_row_that_differs_from_the_successor_by_bits_then_keeps_it(end):
    seen, led_to = torch.tensor([[1.0], [2.0], [0.0]]), torch.tensor([[2.0], [0.0 if end is None else end], [9.0]])
    ids = {"traj_ids": torch.zeros(3, dtype=torch.int64)}
    rows = TensorDict({"observation": seen, "collector": ids, "next": {"observation": led_to}}, batch_size=[3])
    compact, plain = pair(4)
    for buffer in (compact, plain):
        buffer.extend(rows)
    assert equal(compact[:], plain[:])
    assert kept(compact) == (1 if end is None else 2)


def test_nan_that_is_repeated_then_is_linked():
    seen = torch.tensor([[0.0], [np.nan], [1.0]])
    ids, led_to = {"traj_ids": torch.zeros(3, dtype=torch.int64)}, {"observation": torch.roll(seen, -1, 0)}
    rows = TensorDict({"observation": seen, "collector": ids, "next": led_to}, batch_size=[3])
    compact, plain = pair(4)
    for buffer in (compact, plain):
        buffer.extend(rows)
    assert equal(compact[:], plain[:])
    assert kept(compact) == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (0,)])
def test_any_observation_then_comes_back(dtype, shape):
    compact, plain = pair(20)
    for batch in game(4, 9, length=4, shape=shape, dtype=dtype):
        for buffer in (compact, plain):
            buffer.extend(batch)
    first, second = (buffer[:]["next", "observation"] for buffer in (compact, plain))
    assert (first.dtype, first.shape) == (dtype, (20, *shape))
    assert torch.equal(first, second)


def test_several_observations_then_are_linked_together():
    def rows(a, b, next_a, next_b):
        seen = {"a": torch.tensor(a), "nested": {"b": torch.tensor(b)}}
        led_to = {"a": torch.tensor(next_a), "nested": {"b": torch.tensor(next_b)}, "only": torch.tensor(a)}
        ids = {"traj_ids": torch.zeros(len(a), dtype=torch.int64)}
        return TensorDict({**seen, "collector": ids, "next": led_to}, batch_size=[len(a)])

    compact, plain = pair(8)
    for buffer in (compact, plain):
        buffer.extend(rows([1.0, 2.0, 3.0], [1, 2, 3], [2.0, 3.0, 4.0], [2, -3, 4]))
    assert equal(compact[:], plain[:])
    assert kept(compact) == 2  # of the second row one part differs


def test_interleaved_rows_of_one_dimension_then_are_linked():
    compact, plain = pair(40)
    batch = torch.cat(list(game(8, 5)), 1).transpose(0, 1).reshape(-1)
    for buffer in (compact, plain):
        buffer.extend(batch)
    assert equal(compact[:], plain[:])
    assert kept(compact) == 8


def test_collected_batches_then_come_back():
    makers = [partial(CountingEnv, number, (3, 5)) for number in range(3)]
    compact, plain = pair(50)
    with Collector(makers, num_envs=3, frames_per_batch=12, seed=0) as collector:
        for _ in range(9):
            batch = collector.collect()
            for buffer in (compact, plain):
                buffer.extend(batch)
            assert equal(compact[:], plain[:])


def test_slices_and_transforms_then_have_successors():
    compact, plain = pair(100, batch_size=32, slice_len=4)
    batch = torch.cat(list(game(4, 20, length=6)), 1)
    for buffer in (compact, plain):
        buffer.extend(batch)
    assert equal(compact.sample(), plain.sample())


def test_gradients_and_inference_tensors_then_stay_outside():
    batches = list(game(2, 4))
    compact = ReplayBuffer(16, 8, compact_obs=True, seed=0)
    batches[0]["next", "observation"].requires_grad_()
    compact.extend(batches[0])
    with torch.inference_mode():
        compact.extend(batches[1])
        sample = compact.sample()
    assert not any(value.is_inference() or value.requires_grad for value in sample.values(True, True))
    compact.extend(batches[2])
    assert not compact[:]["next", "observation"].requires_grad


def test_state_then_continues_links_and_table():
    compact, plain = pair(24)
    other = ReplayBuffer(24, seed=5, compact_obs=True)
    batches = list(game(4, 15, length=4))
    for batch in batches[:9]:
        for buffer in (compact, plain):
            buffer.extend(batch)
    other.load_state_dict(compact.state_dict())
    for batch in batches[9:]:
        assert equal(other[:], plain[:])
        assert equal(other.sample(), compact.sample())
        for buffer in (compact, plain, other):
            buffer.extend(batch)
    assert equal(other[:], plain[:])
    assert kept(other) == kept(compact)


def test_images_then_take_half_the_memory():
    compact = ReplayBuffer(400, compact_obs=True, seed=0)
    for batch in game(8, 100, shape=(84, 84, 4), dtype=torch.uint8, length=60):
        compact.extend(batch)
    image = 84 * 84 * 4
    assert compact.nbytes / 400 < 1.2 * image
    assert compact.nbytes / 400 > image


def test_empty_then_links_to_nothing():
    compact, plain = pair(16)
    batches = list(game(4, 6))
    for batch in batches[:3]:
        compact.extend(batch)
    compact.empty()
    for batch in batches[3:]:
        for buffer in (compact, plain):
            buffer.extend(batch)
    assert equal(compact[:], plain[:])


@pytest.mark.parametrize("storage", ["shared", "mapped"])
def test_rows_outside_of_this_process_then_are_refused(storage, tmp_path):
    with pytest.raises(
        ValueError, match=r"expected storage='memory', got (Shared|Mapped)Storage; .* compact_obs=False"
    ):
        ReplayBuffer(8, storage=storage, path=tmp_path if storage == "mapped" else None, compact_obs=True)


def test_rows_without_successors_then_are_refused():
    rows = TensorDict({"observation": torch.zeros(2)}, batch_size=[2])
    with pytest.raises(FrameContractError, match="compact_obs found no observation with a successor"):
        ReplayBuffer(8, compact_obs=True).extend(rows)
    compact = ReplayBuffer(8, compact_obs=True)
    batch = next(game(2, 1))
    compact.extend(batch)
    with pytest.raises(FrameContractError, match=r"rows lack the successor of 'observation' : .* got none"):
        compact.extend(batch.exclude(("next", "observation")))
    batch["next", "observation"] = batch["next", "observation"].double()
    with pytest.raises(FrameContractError, match=r"got torch.float64 \(3,\)"):
        compact.extend(batch)
    assert len(compact) == 2
