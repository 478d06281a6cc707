"""Writers: where rows go."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lit_collect import FrameContractError
from lit_collect.replay import BestWriter, NStep, ReplayBuffer, SliceSampler, WithoutReplacementSampler


def scored(*scores):
    values = torch.tensor(scores, dtype=torch.float32)
    return TensorDict({"next": {"reward": values[:, None]}, "name": values.int()}, batch_size=[len(scores)])


def best(capacity, **settings_):
    return ReplayBuffer(capacity, writer=BestWriter(("next", "reward")), seed=0, **settings_)


def test_best_writer_when_full_then_replaces_the_worst():
    buffer = best(4)
    assert buffer.extend(scored(5, 1, 4)).tolist() == [0, 1, 2]
    assert buffer.extend(scored(3, 2, 0)).tolist() == [3, 1, -1]
    assert buffer[:]["name"].tolist() == [5, 2, 4, 3]
    assert buffer.extend(scored(0, 1)).tolist() == [-1, -1]
    assert len(buffer) == 4


def test_best_writer_with_equal_values_then_keeps_the_first():
    buffer = best(2)
    buffer.extend(scored(1, 1))
    assert buffer.extend(scored(1)).tolist() == [-1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-20, 20), min_size=1, max_size=6), max_size=8), st.integers(6, 9))
def test_best_writer_then_holds_the_best_of_all_that_came(batches, capacity):
    buffer = best(capacity, sampler="prioritized")
    came: list[int] = []
    for batch in batches:
        positions = buffer.extend(scored(*batch)).numpy()
        came += batch
        kept = positions[positions >= 0]
        assert len(np.unique(kept)) == len(kept)
        assert torch.equal(buffer[kept]["name"], scored(*batch)["name"][torch.from_numpy(positions >= 0)])
        assert sorted(buffer[:]["name"].tolist()) == sorted(sorted(came)[-capacity:])
        assert set(buffer.sample(32)["name"].tolist()) <= set(came)


def test_best_writer_after_loading_then_rows_are_as_old_as_they_were():
    sampler = WithoutReplacementSampler(shuffle=False)  # the oldest first
    buffer, other = best(3, batch_size=3, sampler=sampler), best(3, batch_size=3, sampler=sampler)
    for score in (5, 1, 4, 2, 3):
        buffer.extend(scored(score))
    other.load_state_dict(buffer.state_dict())
    for each in (buffer, other):
        sample = each.sample()
        assert sample["name"].tolist() == [5, 4, 3]
        assert sample["collector", "written"].tolist() == [0, 2, 4]


def test_best_writer_after_loading_then_goes_on():
    buffer, other = best(3), best(3)
    buffer.extend(scored(5, 1, 4))
    buffer.extend(scored(2))
    other.load_state_dict(buffer.state_dict())
    for each in (buffer, other):
        assert each.extend(scored(3, 2)).tolist() == [1, -1]
    other.empty()
    assert other.extend(scored(0)).tolist() == [0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (TensorDict({"name": torch.zeros(2)}, batch_size=[2]), r"lack it : expected one of .*'name'"),
        (TensorDict({"next": {"reward": torch.zeros(2, 3)}}, batch_size=[2]), r"one number .* got shape \(3,\)"),
        (TensorDict({"next": {"reward": torch.tensor([0.0, np.nan])}}, batch_size=[2]), "is NaN in row 1"),
    ],
)  # fmt: skip
def test_best_writer_without_a_value_then_says_so_and_stays_as_it_was(rows, words):
    buffer = best(4)
    with pytest.raises(FrameContractError, match=words):
        buffer.extend(rows)
    assert len(buffer) == 0
    assert buffer.extend(scored(1, 2)).tolist() == [0, 1]  # nothing of the wrong rows was taken for what all are like


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": SliceSampler(4)}, "expected writer='ring' for SliceSampler"),
        ({"transforms": [NStep(2, 0.9)]}, "expected writer='ring' for NStep"),
        ({"compact_obs": True}, "expected writer='ring' for compact_obs"),
        ({"storage": "shared"}, "expected storage='memory', got SharedStorage"),
    ],
)
def test_best_writer_with_what_needs_neighbours_then_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        best(8, batch_size=8, **options)


def test_unknown_writer_then_is_refused():
    with pytest.raises(ValueError, match=r"writer must be 'ring', or a Writer .*, got 'max'"):
        ReplayBuffer(8, writer="max")
    with pytest.raises(TypeError, match="writer must be 'ring' or a Writer, got 3"):
        ReplayBuffer(8, writer=3)
    with pytest.raises(ValueError, match="key must name a column"):
        BestWriter("")
