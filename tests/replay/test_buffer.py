"""`ReplayBuffer`: what goes in comes out, in the right places."""

import pickle
import threading
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect import Collector, FrameContractError, RolloutConfig
from lit_collect.frames import INDEX, IS_INIT, MASK, NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED, TRAJ_IDS, WRITTEN
from lit_collect.replay import NStep, ReplayBuffer, SliceSampler, UniformSampler
from lit_collect.testing import CountingEnv


def numbered(*shape, first=0, **more):
    """Rows that say which they are; env copy by env copy."""
    numbers = torch.arange(first, first + int(np.prod(shape))).reshape(shape)
    return TensorDict({"observation": numbers[..., None].float(), "action": numbers, **more}, batch_size=shape)


def episodes(*lengths, first=0):
    """[M] rows of whole episodes, one after the other; the observation is (episode, step)."""
    rows = []
    for number, length in enumerate(lengths, first):
        step = torch.arange(length)
        seen = torch.stack([torch.full((length,), number), step], 1).float()
        done = (step == length - 1)[:, None]
        rows.append(
            TensorDict(
                {
                    "observation": seen,
                    "is_init": (step == 0)[:, None],
                    "collector": {"traj_ids": torch.full((length,), number)},
                    "next": {
                        "observation": seen + torch.tensor([0.0, 1.0]),
                        "reward": step[:, None].float(),
                        "done": done,
                        "terminated": done.clone(),
                        "truncated": torch.zeros_like(done),
                    },
                },
                batch_size=[length],
            )
        )
    return torch.cat(rows)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_extend_when_full_then_replaces_the_oldest():
    buffer = ReplayBuffer(8, seed=0)
    assert buffer.extend(numbered(6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.extend(numbered(5, first=6)).tolist() == [6, 7, 0, 1, 2]
    assert buffer[:]["action"].tolist() == [8, 9, 10, 3, 4, 5, 6, 7]
    assert (len(buffer), buffer.write_count) == (8, 11)


def test_extend_by_env_copies_then_lies_copy_by_copy():
    buffer = ReplayBuffer(8, seed=0)
    buffer.extend(numbered(2, 3))
    assert buffer[:]["action"].tolist() == [0, 1, 2, 3, 4, 5]


def test_extend_with_masked_rows_then_leaves_them_out():
    buffer = ReplayBuffer(8, seed=0)
    mask = torch.tensor([[True, False, True], [False, True, True]])
    assert len(buffer.extend(numbered(2, 3, collector={"mask": mask}))) == 4
    assert buffer[:]["action"].tolist() == [0, 2, 4, 5]
    assert MASK not in buffer[:].keys(True)
    assert buffer.extend(numbered(2, 3, collector={"mask": torch.zeros_like(mask)})).shape == (0,)
    assert buffer.extend(numbered(2, first=8)).tolist() == [4, 5]  # without a mask they are of the same kind


def test_extend_then_has_copied_the_batch():
    buffer, rows = ReplayBuffer(8, seed=0), numbered(3)
    buffer.extend(rows)
    rows["action"].fill_(-1)
    sample = buffer.sample(64)
    sample["action"].fill_(-2)
    assert buffer[:]["action"].tolist() == [0, 1, 2]


def test_extend_changes_nothing_about_the_batch():
    batch = episodes(3)
    keys = set(batch.keys(True, True))
    buffer = ReplayBuffer(8, seed=0)
    buffer.extend(batch)
    buffer.extend(batch.exclude(("collector", "traj_ids")).reshape(1, 3)[:, :0])
    assert set(batch.keys(True, True)) == keys


def test_extend_with_gradients_and_inference_tensors_then_stores_numbers():
    buffer = ReplayBuffer(8, seed=0)
    rows = numbered(2)
    rows["observation"].requires_grad_()
    buffer.extend(rows)
    with torch.inference_mode():
        buffer.extend(numbered(2, first=2))
        sample = buffer.sample(4)
    assert not sample["observation"].requires_grad
    assert not any(value.is_inference() for value in sample.values(True, True))
    assert buffer[:]["action"].tolist() == [0, 1, 2, 3]


def test_extend_with_a_sample_then_takes_only_its_rows():
    buffer = ReplayBuffer(16, seed=0, batch_size=4, sampler="prioritized", transforms=[NStep(2, 0.9)])
    buffer.extend(episodes(6))
    keys = set(buffer[:].keys(True, True))
    sample = buffer.sample()
    other = ReplayBuffer(16, seed=0)
    other.extend(sample)
    assert set(other[:].keys(True, True)) == keys
    assert torch.equal(other[:]["observation"], sample["observation"])


def test_add_then_is_one_row_of_the_stream():
    buffer = ReplayBuffer(8, 3, seed=0, sampler=SliceSampler(3))
    assert [buffer.add(numbered(1, first=number)[0]) for number in range(3)] == [0, 1, 2]
    assert buffer.sample(3)["action"].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("compact", [False, True])
def test_extend_with_a_compact_batch_then_restores_it(compact):
    makers = [partial(CountingEnv, number, (5,)) for number in range(2)]
    rollout = RolloutConfig(compact_obs=compact)
    with Collector(makers, num_envs=2, frames_per_batch=16, rollout=rollout, seed=0) as collector:
        batch = collector.collect()
    buffer = ReplayBuffer(32, seed=0)
    buffer.extend(batch)
    rows = buffer[:]
    going = ~rows[NEXT_DONE][:-1, 0] & (rows[TRAJ_IDS][1:] == rows[TRAJ_IDS][:-1])
    assert going.sum() > 8
    assert torch.equal(rows["next", "observation"][:-1][going], rows["observation"][1:][going])
    ended = rows[NEXT_DONE][:, 0]
    assert (rows["next", "observation"][ended, 2] == 5).all()  # the last one of an episode, too


def test_rows_without_ids_then_have_ids_of_their_runs():
    done = torch.tensor([[[False], [True], [False]], [[False], [False], [False]]])
    buffer = ReplayBuffer(16, seed=0)
    buffer.extend(numbered(2, 3, next={"done": done}))
    ids = buffer[:][TRAJ_IDS]
    assert (ids - ids[0]).tolist() == [0, 0, 1, 2, 2, 2]
    buffer.extend(numbered(2, 3, next={"done": done}))
    assert len(buffer[:][TRAJ_IDS].unique()) == 6  # nobody knows how the copies go on


def test_rows_of_one_dimension_without_ids_then_go_on():
    buffer = ReplayBuffer(16, seed=0, sampler=SliceSampler(4))
    done = torch.tensor([[False], [False], [False]])
    buffer.extend(numbered(3, next={"done": done}))
    assert not buffer.can_sample(4)
    buffer.extend(numbered(3, first=3, next={"done": done}))
    assert (buffer.sample(8)["action"].diff(dim=1) == 1).all()


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_sample_then_says_where_its_rows_lie():
    buffer = ReplayBuffer(8, seed=0)
    buffer.extend(numbered(8))
    buffer.extend(numbered(3, first=8))
    sample = buffer.sample(64)
    assert torch.equal(sample[WRITTEN], sample["action"])
    assert torch.equal(sample[INDEX], sample["action"] % 8)
    assert torch.equal(buffer[sample[INDEX]]["action"], sample["action"])
    assert sorted(sample["action"].unique().tolist()) == list(range(3, 11))


def test_sample_of_slices_then_marks_their_edges_and_not_the_rows():
    buffer = ReplayBuffer(64, batch_size=256, slice_len=4, seed=0)
    buffer.extend(episodes(9, 6, 3))
    sample = buffer.sample()
    assert sample.batch_size == (64, 4)
    assert sample.names == [None, "time"]
    stored = buffer[sample[INDEX]]
    last = sample[:, -1]
    ended = stored[NEXT_DONE][:, -1]
    assert ended.any()
    assert (~ended).any()
    assert last[NEXT_DONE].all()
    assert torch.equal(last[NEXT_TRUNCATED], ~ended)
    assert torch.equal(last[NEXT_TERMINATED], ended)
    assert sample[IS_INIT][:, 0].all()
    assert not sample[IS_INIT][:, 1:].any()
    assert not sample[:, :-1][NEXT_DONE].any()
    assert buffer[:][NEXT_DONE].sum() == 3
    assert not buffer[:][NEXT_TRUNCATED].any()
    assert buffer[:][IS_INIT].sum() == 3


def test_sample_of_short_slices_then_pads_them():
    buffer = ReplayBuffer(64, batch_size=40, sampler=SliceSampler(4, strict_length=False), seed=0)
    buffer.extend(episodes(2, 3, first=7))
    sample = buffer.sample()
    mask = sample[MASK]
    assert set(mask.sum(1).tolist()) == {2, 3}
    for key in (INDEX, WRITTEN, TRAJ_IDS):
        assert (sample[key][~mask] == -1).all()
    assert not sample["observation"][~mask].any()
    assert not sample[NEXT_DONE][~mask].any()
    assert torch.equal(sample["observation"][..., 0][mask], sample[TRAJ_IDS][mask].float())
    assert sample[NEXT_TERMINATED][torch.arange(10), mask.sum(1) - 1].all()
    assert buffer.take_statistics()["sampled"] == mask.sum()


def test_sample_with_whole_slices_of_a_lenient_sampler_then_has_a_mask():
    buffer = ReplayBuffer(64, batch_size=4, sampler=SliceSampler(4, strict_length=False), seed=0)
    buffer.extend(episodes(4))
    assert buffer.sample()[MASK].all()


def test_sample_with_equal_seeds_then_is_equal():
    first, second, third = (ReplayBuffer(64, seed=seed) for seed in (1, 1, 2))
    for buffer in (first, second, third):
        buffer.extend(numbered(50))
    drawn = [buffer.sample()["action"] for buffer in (first, second, third)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_update_priority_by_a_sample_then_leaves_overwritten_rows_alone():
    buffer = ReplayBuffer(8, batch_size=64, sampler="prioritized", seed=0)
    buffer.extend(numbered(8))
    sample = buffer.sample()
    buffer.extend(numbered(4, first=8))
    buffer.update_priority(sample, torch.zeros(64))
    drawn = buffer.sample()["action"]
    assert (drawn >= 8).double().mean() > 0.9
    buffer.update_priority(torch.arange(4), torch.zeros(4))
    assert (buffer.sample()["action"] < 8).any()


def test_update_priority_without_priorities_then_does_nothing():
    buffer = ReplayBuffer(8, seed=0)
    buffer.extend(numbered(8))
    buffer.update_priority(buffer.sample(), torch.ones(256))
    assert not buffer.has_priorities


def test_buffer_then_has_a_copy_of_the_sampler():
    sampler = SliceSampler(2)
    assert ReplayBuffer(8, 4, sampler=sampler)._sampler is not sampler


# --- what it tells ----------------------------------------------------------------------------------------------------


def test_statistics_then_average_ages_since_they_were_taken():
    buffer = ReplayBuffer(8, batch_size=1, seed=0)
    buffer.extend(numbered(1))
    assert buffer.statistics() == {"size": 1, "capacity": 8, "write_count": 1, "sampled": 0}
    buffer.sample()
    assert buffer.statistics()["age_mean"] == 0
    buffer.extend(numbered(4, first=1))
    ages = [4 - buffer.sample()["action"].item() for _ in range(5)]
    assert buffer.take_statistics()["age_mean"] == pytest.approx(sum(ages) / 6)
    assert "age_mean" not in buffer.statistics()
    assert buffer.statistics()["sampled"] == 6


def test_can_sample_then_is_what_sample_does():
    buffer = ReplayBuffer(64, batch_size=8, slice_len=4, seed=0)
    assert not buffer.can_sample()
    buffer.extend(episodes(3))
    assert not buffer.can_sample()
    with pytest.raises(ValueError, match="no trajectory is long enough"):
        buffer.sample()
    buffer.extend(episodes(4, first=1))
    assert buffer.can_sample()
    assert buffer.sample().batch_size == (2, 4)


def test_learner_version_then_reaches_the_sampler():
    buffer = ReplayBuffer(8, sampler="staleness", seed=0)
    version = torch.zeros(4, dtype=torch.int64)
    buffer.extend(numbered(4, collector={"policy_version": version}))
    buffer.learner_version = 3
    assert (buffer.learner_version, buffer._rows.learner_version) == (3, 3)
    buffer.sample()


def test_getitem_then_has_the_shape_of_the_positions():
    buffer = ReplayBuffer(8, seed=0)
    buffer.extend(numbered(6))
    assert buffer[3]["action"].item() == 3
    assert buffer[3].batch_size == ()
    assert buffer[1:3]["action"].tolist() == [1, 2]
    assert buffer[[[0, 1], [2, 3]]].batch_size == (2, 2)
    for wrong in (6, -1, [0, 7]):
        with pytest.raises(IndexError, match=r"there is no row at position (6|-1|7) : expected 0 to 5"):
            buffer[wrong]


# --- life -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", [torch.tensor([True, False]), torch.tensor([1.7]), [0.5, 1.0], "action", None, ...], ids=repr
)
def test_positions_that_are_no_integers_then_are_refused_and_no_other_rows_meant(index):
    buffer = ReplayBuffer(4, batch_size=2, sampler="prioritized", seed=0)
    buffer.extend(numbered(3))
    with pytest.raises(TypeError, match="positions must be integers, got"):
        buffer[index]
    with pytest.raises(TypeError, match="positions must be integers, got"):
        buffer.update_priority(index, torch.zeros(2))
    assert buffer._sampler.state_dict()["priorities"][:3].tolist() == [pytest.approx(1, abs=1e-5)] * 3


def test_getitem_of_an_empty_buffer_then_says_that_it_is_empty():
    buffer = ReplayBuffer(4, batch_size=2)
    with pytest.raises(IndexError, match="expected none, since the buffer is empty"):
        buffer[0]
    with pytest.raises(IndexError, match="there are no rows yet"):
        buffer[:]
    buffer.extend(numbered(3))
    buffer.empty()
    assert buffer[:]["action"].shape == (0,)


def test_empty_then_forgets_rows_and_trajectories():
    buffer = ReplayBuffer(8, seed=0, sampler=SliceSampler(2))
    buffer.extend(numbered(8))
    buffer.empty()
    assert (len(buffer), buffer.write_count, buffer.can_sample(2)) == (0, 0, False)
    buffer.extend(numbered(1, first=8))
    assert not buffer.can_sample(2)
    assert buffer[:]["action"].tolist() == [8]


@pytest.mark.parametrize("storage", ["memory", "shared", "mapped"])
def test_close_then_nothing_works_any_more(storage, tmp_path):
    with ReplayBuffer(8, storage=storage, path=tmp_path / "rows" if storage == "mapped" else None) as buffer:
        buffer.extend(numbered(8))
    for use in (buffer.sample, partial(buffer.extend, numbered(1)), buffer.__len__, buffer.state_dict, buffer.flush):
        with pytest.raises(ValueError, match="the replay buffer is closed"):
            use()
    buffer.close()


def test_pickle_of_a_shared_buffer_then_writes_into_the_same_rows():
    with ReplayBuffer(8, seed=0, storage="shared") as buffer:
        with pickle.loads(pickle.dumps(buffer)) as other:
            other.extend(numbered(3))
        assert buffer[:]["action"].tolist() == [0, 1, 2]
        assert buffer.sample()["action"].max() == 2


def test_pickle_of_a_buffer_in_memory_then_is_refused():
    with pytest.raises(TypeError, match="cannot be sent to another one"):
        pickle.dumps(ReplayBuffer(8))


def test_threads_when_one_writes_then_samples_are_whole():
    buffer = ReplayBuffer(64, batch_size=32, seed=0, sampler=UniformSampler())
    buffer.extend(numbered(8))
    wrong: list[str] = []

    def write() -> None:
        for turn in range(200):
            buffer.extend(numbered(8, first=8 + 8 * turn))

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        sample = buffer.sample()
        if not torch.equal(sample["observation"][:, 0].long(), sample["action"]):
            wrong.append(str(sample["action"]))
        if not torch.equal(sample[WRITTEN], sample["action"]):
            wrong.append(str(sample[WRITTEN]))
    writer.join()
    assert wrong == []


def test_other_rows_then_are_told_by_name():
    buffer = ReplayBuffer(8)
    buffer.extend(numbered(2))
    with pytest.raises(FrameContractError, match="value"):
        buffer.extend(numbered(2, value=torch.zeros(2)))
    assert len(buffer) == 2


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [("x", TypeError, "got 'x'"), (True, TypeError, "got True"), (-1, ValueError, "seed must not be negative, got -1")],
)
def test_seed_that_is_none_then_is_refused(seed, error, words):
    with pytest.raises(error, match=words):
        ReplayBuffer(8, seed=seed)
