"""What goes wrong with a replay buffer is said once, in the user's words, and nothing that was stored is lost."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from lit_collect import FrameContractError, StaleDataError
from lit_collect.replay import (
    MappedStorage,
    MemoryStorage,
    ReplayBuffer,
    SliceSampler,
    StalenessSampler,
    UniformSampler,
    WithoutReplacementSampler,
)

pytestmark = pytest.mark.timeout(60)


def rows(count, first=0, **more):
    number = torch.arange(first, first + count)
    step = {"observation": number[:, None].float(), "collector": {"policy_version": torch.zeros_like(number)}}
    led_to = {"observation": number[:, None].float() + 1, "done": (number % 5 == 4)[:, None]}
    return TensorDict({**step, "action": number, "next": led_to, **more}, batch_size=[count])


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"capacity": 1e6}, TypeError, "capacity must be an integer, got 1000000.0"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 250, "slice_len": 16}, ValueError, "multiple of slice_len=16, got 250; use 240 or 256"),
        ({"batch_size": 250, "num_slices": 16}, ValueError, "multiple of num_slices=16, got 250; use 240 or 256"),
        ({"slice_len": 4, "num_slices": 4}, ValueError, "expected slice_len or num_slices, got"),
        ({"slice_len": 0}, ValueError, "slice_len must be an integer of at least 1, got 0"),
        ({"sampler": "random"}, ValueError, "sampler must be one of uniform, .*, got 'random'"),
        ({"sampler": 3}, TypeError, "sampler must be a Sampler or a name, got 3"),
        ({"sampler": UniformSampler}, TypeError, "sampler must be a Sampler or a name, got <class"),
        ({"sampler": "slice"}, ValueError, "slices need either their length or their number"),
        ({"sampler": "consuming", "slice_len": 4}, ValueError, "'consuming' draws single rows"),
        ({"sampler": UniformSampler(), "slice_len": 4}, ValueError, "settings of the sampler : expected neither"),
        ({"storage": "disk"}, ValueError, "expected 'memory', 'shared' or 'mapped', got 'disk'"),
        ({"storage": 3}, TypeError, "expected a name or a Storage, got int"),
        ({"storage": "mapped"}, ValueError, "storage='mapped' lacks its path"),
        ({"path": "rows"}, ValueError, "path is not used : expected storage='mapped'"),
        ({"writer": "best"}, ValueError, "writer must be 'ring'"),
        ({"transforms": "nstep"}, TypeError, "transforms must be of SampleTransform, got 'n'"),
    ],
)
def test_wrong_setting(options, error, words):
    with pytest.raises(error, match=words):
        ReplayBuffer(**{"capacity": 64, **options})


def test_storage_of_another_buffer():
    storage = MemoryStorage()
    ReplayBuffer(8, storage=storage)
    with pytest.raises(ValueError, match="the storage has another capacity : expected 8, got 16"):
        ReplayBuffer(16, storage=storage)


def test_settings_that_are_not_kept_apart_by_the_capacity_alone(tmp_path):
    ReplayBuffer(8, storage="mapped", path=tmp_path).close()
    with pytest.raises(ValueError, match="expected 8, got 16; give the capacity it was made with"):
        ReplayBuffer(16, storage="mapped", path=tmp_path)


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (rows(9), ValueError, "must fit into the buffer : expected at most capacity=8 rows, got 9"),
        (rows(8).reshape(2, 4).expand(2, 2, 4), ValueError, "expected at most capacity=8 rows, got 16"),
        (rows(2, value=torch.zeros(2)), FrameContractError, r"\('value',\) is new"),
        (rows(2).exclude("action"), FrameContractError, r"\('action',\) is missing"),
        (rows(2).exclude(("next", "done")), FrameContractError, r"\('next', 'done'\) is missing"),
        (rows(2).double(), FrameContractError, r"\('observation',\) : expected .*float32.*, got .*float64"),
        (
            rows(2).set("observation", torch.zeros(2, 3)),
            FrameContractError,
            r"\('observation',\) : expected .*\[1\], got .*\[3\]",
        ),
        (rows(2, index=torch.zeros(2)), FrameContractError, "rows have a key 'index' of their own"),
        (rows(2, text=NonTensorData("a", batch_size=[2])), FrameContractError, "text"),
        (rows(1)[0], FrameContractError, r"must have a dimension of rows, got batch_size \[\]; use add"),
        (rows(2).to_dict(), TypeError, "must be a TensorDict, got dict"),
        (None, TypeError, "must be a TensorDict, got NoneType"),
        (torch.zeros(2), TypeError, "must be a TensorDict, got Tensor"),
    ],
)
@pytest.mark.parametrize("storage", ["memory", "mapped"])
def test_wrong_batch_then_nothing_is_lost(batch, error, words, storage, tmp_path):
    with ReplayBuffer(8, 4, storage=storage, path=tmp_path if storage == "mapped" else None, seed=0) as buffer:
        buffer.extend(rows(6))
        with pytest.raises(error, match=words):
            buffer.extend(batch)
        assert buffer[:]["action"].tolist() == list(range(6))
        buffer.extend(rows(2, first=6))
        assert sorted(buffer[:]["action"].tolist()) == list(range(8))


@pytest.mark.parametrize("batch", [rows(9), rows(2, index=torch.zeros(2)), rows(2, text=NonTensorData("a"))])
def test_wrong_first_batch_then_the_next_may_be_of_any_kind(batch):
    buffer = ReplayBuffer(8, 4, seed=0)
    with pytest.raises((ValueError, FrameContractError)):
        buffer.extend(batch)
    buffer.extend(TensorDict({"score": torch.ones(2)}, batch_size=[2]))
    assert len(buffer) == 2


def test_wrong_row():
    buffer = ReplayBuffer(8)
    with pytest.raises(FrameContractError, match=r"a row must have no batch dimension, got \(2,\); use extend"):
        buffer.add(rows(2))
    with pytest.raises(TypeError, match="must be a TensorDict, got dict"):
        buffer.add({})


def test_no_rows():
    buffer = ReplayBuffer(8)
    assert buffer.extend(rows(0)).shape == (0,)
    assert len(buffer) == 0
    buffer.extend(rows(3))
    assert buffer.extend(rows(0)).shape == (0,)
    assert len(buffer) == 3


def test_rows_of_nan_then_are_rows():
    buffer = ReplayBuffer(8, 4, seed=0)
    buffer.extend(rows(3).set("observation", torch.full((3, 1), np.nan)))
    assert buffer.sample()["observation"].isnan().all()


def test_full_disk_then_nothing_is_written_and_the_buffer_can_be_made_smaller(tmp_path):
    huge = 2**50
    with (
        ReplayBuffer(huge, 4, storage="mapped", path=tmp_path / "huge") as buffer,
        pytest.raises(OSError, match=rf"no room for a replay buffer of {huge} rows in .*huge : .* lower the capacity"),
    ):
        buffer.extend(rows(4))
    with ReplayBuffer(8, 4, storage="mapped", path=tmp_path / "small", seed=0) as buffer:
        buffer.extend(rows(4))
        assert len(buffer.sample()) == 4


def test_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is no folder : .* got a file at .*file; choose another path"):
        ReplayBuffer(8, storage=MappedStorage(tmp_path / "file"))


# --- sampling ---------------------------------------------------------------------------------------------------------

SAMPLERS = ("uniform", "without_replacement", "prioritized", "consuming", "staleness", SliceSampler(4))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("emptied", [False, True])
def test_empty_buffer(sampler, emptied):
    buffer = ReplayBuffer(8, 4, sampler=sampler, seed=0)
    if emptied:
        buffer.extend(rows(4))
        buffer.empty()
    assert not buffer.can_sample()
    with pytest.raises(ValueError, match="the buffer is empty"):
        buffer.sample()
    buffer.extend(rows(5))
    assert buffer.sample().numel() == 4


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_wrong_size_of_a_sample(size, error):
    buffer = ReplayBuffer(8, 4, seed=0)
    buffer.extend(rows(4))
    with pytest.raises(error, match="batch_size must be"):
        buffer.sample(size)


def test_size_that_slices_do_not_share():
    buffer = ReplayBuffer(8, 4, slice_len=4, seed=0)
    buffer.extend(rows(5))
    with pytest.raises(ValueError, match="batch_size must be a multiple of slice_len=4, got 6; use 4 or 8"):
        buffer.sample(6)


def test_no_trajectory_that_is_long_enough():
    buffer = ReplayBuffer(64, 8, slice_len=8, seed=0)
    buffer.extend(rows(20))
    with pytest.raises(
        ValueError, match="no trajectory is long enough : expected slices of 8 rows, got at most 5 rows"
    ):
        buffer.sample()


def test_too_few_rows_without_replacement():
    buffer = ReplayBuffer(64, 8, sampler=WithoutReplacementSampler(drop_last=True), seed=0)
    buffer.extend(rows(5))
    assert not buffer.can_sample()
    with pytest.raises(ValueError, match=r"expected .*8.*, got 5"):
        buffer.sample()


def test_rows_that_are_all_too_old():
    buffer = ReplayBuffer(64, 8, sampler=StalenessSampler(max_staleness=2), seed=0)
    buffer.extend(rows(5))
    buffer.learner_version = 3
    with pytest.raises(StaleDataError):
        buffer.sample()


# --- priorities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
def test_wrong_priority_then_names_the_row_and_changes_nothing(value):
    buffer = ReplayBuffer(8, 64, sampler="prioritized", seed=0)
    buffer.extend(rows(8))
    priority = torch.ones(8)
    priority[3] = value
    for index in (
        torch.arange(8),
        buffer[:].set("index", torch.arange(8)).set(("collector", "written"), torch.arange(8)),
    ):
        with pytest.raises(ValueError, match="3"):
            buffer.update_priority(index, priority)
    assert set(buffer.sample(512)["action"].tolist()) == set(range(8))


@pytest.mark.parametrize(
    ("index", "priority", "words"),
    [
        (torch.arange(3), torch.ones(2), "one for each row : expected 3, got 2"),
        (torch.tensor([0, 8]), torch.ones(2), "no row at position 8 : expected 0 to 5"),
        (torch.tensor([-1]), torch.ones(1), "no row at position -1"),
        (rows(2), torch.ones(2), "a sample must have 'index' and 'collector.written'"),
    ],
)
def test_priorities_that_fit_no_rows(index, priority, words):
    buffer = ReplayBuffer(16, 4, sampler="prioritized", seed=0)
    buffer.extend(rows(6))
    with pytest.raises(ValueError, match=words):
        buffer.update_priority(index, priority)
