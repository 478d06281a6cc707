"""Buffers in checkpoints: the same rows, and the same samples from there on."""

import io

import pytest
import torch
from tensordict import TensorDict

from lit_collect.frames import INDEX, WRITTEN
from lit_collect.replay import (
    ConsumingSampler,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    SliceWithoutReplacementSampler,
    StalenessSampler,
    UniformSampler,
    WithoutReplacementSampler,
)

SAMPLERS = {
    "uniform": UniformSampler(),
    "without_replacement": WithoutReplacementSampler(),
    "slice": SliceSampler(4),
    "slice_without_replacement": SliceWithoutReplacementSampler(4),
    "prioritized": PrioritizedSampler(),
    "consuming": ConsumingSampler(max_uses=30),
    "staleness": StalenessSampler(),
}


def rows(first, count, length=9):
    """[M] rows of one env copy whose episodes have `length` rows."""
    step = torch.arange(first, first + count)
    done = (step % length == length - 1)[:, None]
    return TensorDict(
        {
            "observation": step[:, None].float(),
            "collector": {"traj_ids": step // length, "policy_version": step // 10},
            "next": {"observation": step[:, None].float() + 1, "done": done, "reward": step[:, None].float()},
        },
        batch_size=[count],
    )


def saved(state):
    """A state that has been in a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(first, second):
    assert (first == second).all()


def use(buffer, turn):
    """Write, sample and give priorities, as training does."""
    buffer.learner_version = turn
    buffer.extend(rows(10 * turn, 10))
    sample = buffer.sample()
    buffer.update_priority(sample, sample["observation"].double().flatten() % 5 + 0.1)
    return sample


@pytest.mark.parametrize("storage", ["memory", "shared", "mapped"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_state_then_continues_as_if_nothing_had_happened(sampler, storage, tmp_path):
    def make(name, seed):
        path = tmp_path / name if storage == "mapped" else None
        return ReplayBuffer(48, 8, sampler=SAMPLERS[sampler], storage=storage, path=path, seed=seed)

    with make("a", 1) as straight, make("b", 1) as broken:
        for turn in range(7):
            same(use(straight, turn), use(broken, turn))
        state = saved(broken.state_dict())
        broken.extend(rows(70, 5))  # lost with the crash
        broken.close()
        with make("b", 2) as resumed:
            resumed.load_state_dict(state)
            assert resumed.write_count == 70
            assert resumed.learner_version == 6
            assert len(resumed) == len(straight) - (5 if storage == "mapped" else 0)  # what the lost rows had replaced
            if storage == "mapped":
                resumed.extend(rows(70, 5))
                straight.extend(rows(70, 5))
            same(resumed[:], straight[:])
            if storage == "mapped":
                return  # what was drawn meanwhile could not be the same
            for turn in range(7, 12):
                same(use(resumed, turn), use(straight, turn))
            assert resumed.statistics()["sampled"] == straight.statistics()["sampled"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_state_of_mapped_rows_then_samples_are_the_same(sampler, tmp_path):
    buffer = ReplayBuffer(48, 8, sampler=SAMPLERS[sampler], storage="mapped", path=tmp_path, seed=1)
    for turn in range(7):
        use(buffer, turn)
    state = saved(buffer.state_dict())
    wanted = [buffer.sample() for _ in range(3)]
    buffer.close()
    with ReplayBuffer(48, 8, sampler=SAMPLERS[sampler], storage="mapped", path=tmp_path) as resumed:
        resumed.load_state_dict(state)
        for sample in wanted:
            same(resumed.sample(), sample)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_mapped_rows_of_after_the_state_then_are_never_sampled(sampler, tmp_path):
    buffer = ReplayBuffer(48, 8, sampler=SAMPLERS[sampler], storage="mapped", path=tmp_path, seed=1)
    buffer.extend(rows(0, 40))
    buffer.extend(rows(40, 30))
    buffer.sample()
    state = saved(buffer.state_dict())
    buffer.extend(rows(900, 18))  # over rows 22 to 39
    buffer.close()
    with ReplayBuffer(48, 8, sampler=SAMPLERS[sampler], storage="mapped", path=tmp_path) as resumed:
        resumed.load_state_dict(state)
        assert len(resumed) == 30
        seen = torch.cat([resumed.sample()["observation"].flatten() for _ in range(60)])
        assert set(seen.tolist()) <= set(range(40, 70))


def test_state_then_is_not_changed_by_what_the_buffer_does():
    buffer, other = ReplayBuffer(16, 8, seed=0), ReplayBuffer(16, 8, seed=3)
    buffer.extend(rows(0, 16))
    state = buffer.state_dict()
    buffer.extend(rows(16, 16))
    other.load_state_dict(state)
    assert other[:]["observation"].flatten().tolist() == list(range(16))


def test_state_of_an_empty_buffer_then_is_empty():
    buffer, other = ReplayBuffer(16, 8, seed=0), ReplayBuffer(16, 8, seed=3)
    state = saved(buffer.state_dict())
    other.extend(rows(0, 4))
    other.load_state_dict(state)
    assert len(other) == 0
    for each in (buffer, other):
        each.extend(rows(0, 16))
    same(buffer.sample(), other.sample())


def test_state_of_rows_then_episodes_go_on():
    buffer, other = (ReplayBuffer(32, 16, sampler=SliceSampler(8), seed=seed) for seed in (0, 1))
    buffer.extend(rows(0, 5))
    other.load_state_dict(saved(buffer.state_dict()))
    other.extend(rows(5, 3))
    sample = other.sample()
    assert sample["observation"][..., 0].tolist() == [list(range(8))] * 2
    assert torch.equal(sample[INDEX], sample[WRITTEN])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"capacity": 32}, "another capacity : expected capacity=32, got 16"),
        ({"sampler": "prioritized"}, "expected sampler_kind='PrioritizedSampler', got 'UniformSampler'"),
        ({"compact_obs": True}, "expected compact_obs=True, got False"),
        ({"storage": "mapped"}, "expected rows in files, got rows in memory"),
    ],
)
def test_state_of_another_buffer_then_is_refused(settings, words, tmp_path):
    buffer = ReplayBuffer(16, 8, seed=0)
    buffer.extend(rows(0, 4))
    settings = {"capacity": 16, **settings}
    if "storage" in settings:
        settings["path"] = tmp_path
    with ReplayBuffer(batch_size=8, **settings) as other:
        other.extend(rows(0, 2))
        with pytest.raises(ValueError, match=words):
            other.load_state_dict(buffer.state_dict())
        assert other[:]["observation"].flatten().tolist() == [0, 1]


def test_state_of_other_rows_then_is_refused():
    buffer, other = ReplayBuffer(16, 8, seed=0), ReplayBuffer(16, 8, seed=3)
    buffer.extend(rows(0, 4))
    other.extend(rows(0, 4).exclude("observation"))
    with pytest.raises(ValueError, match=r"the state is of other rows : .*'observation'"):
        other.load_state_dict(buffer.state_dict())


def test_state_without_its_files_then_is_refused(tmp_path):
    with ReplayBuffer(16, 8, storage="mapped", path=tmp_path / "here") as buffer:
        buffer.extend(rows(0, 4))
        state = saved(buffer.state_dict())
    with (
        ReplayBuffer(16, 8, storage="mapped", path=tmp_path / "there") as other,
        pytest.raises(ValueError, match=r"expected 4 rows written in .*here, got 0 in .*there; bring the folder"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("lost", ["random", "sampler", "records", "write_count"])
def test_state_that_lacks_something_then_is_refused_and_named(lost):
    buffer = ReplayBuffer(16, seed=0)
    buffer.extend(rows(0, 5))
    state = {name: value for name, value in buffer.state_dict().items() if name != lost}
    with pytest.raises(ValueError, match=f"not that of a replay buffer : expected .*, got none of {lost}; "):
        buffer.load_state_dict(state)
    assert buffer[:]["observation"].flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({"sampler": "prioritized"}, "beta"),
        ({"sampler": "without_replacement"}, "starts"),
        ({"sampler": "slice_without_replacement", "slice_len": 2}, "length"),
    ],
)
def test_state_whose_sampler_lacks_something_then_is_refused_and_named(settings, lost):
    buffer = ReplayBuffer(16, 4, seed=0, **settings)
    buffer.extend(rows(0, 5))
    buffer.sample()
    state = buffer.state_dict()
    del state["sampler"][lost]
    for load in (buffer.load_state_dict, buffer.load_draw_state):
        with pytest.raises(ValueError, match=rf"a buffer with a \w+Sampler : expected also sampler\.{lost}; give what"):
            load(state)
    assert buffer[:]["observation"].flatten().tolist() == [0, 1, 2, 3, 4]


def test_draw_state_then_another_buffer_of_the_same_rows_draws_the_same():
    one, other = (ReplayBuffer(16, 4, sampler="prioritized", seed=seed) for seed in (0, 1))
    for buffer in (one, other):
        buffer.extend(rows(0, 9))
    one.update_priority(torch.arange(9), torch.arange(9.0))
    other.load_draw_state(one.draw_state())
    for _ in range(5):
        assert torch.equal(one.sample()["observation"], other.sample()["observation"])


def test_state_that_is_none_then_is_refused():
    buffer = ReplayBuffer(16, seed=0)
    with pytest.raises(ValueError, match="got none of capacity, write_count, layout, sampler_kind"):
        buffer.load_state_dict({})
    with pytest.raises(TypeError, match="must be a mapping, got list"):
        buffer.load_state_dict([])
