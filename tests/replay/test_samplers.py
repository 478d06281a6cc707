"""Samplers of single rows: chances, passes, and their names."""

import io

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.replay.layout import RowLayout
from lit_collect.replay.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.samplers import Sampler, UniformSampler, WithoutReplacementSampler, resolve_sampler
from lit_collect.replay.slices import SliceSampler, SliceWithoutReplacementSampler
from lit_collect.replay.staleness import ConsumingSampler, StalenessSampler
from lit_collect.replay.storage import MemoryStorage

NAMES = ["uniform", "without_replacement", "slice", "slice_without_replacement", "prioritized", "prioritized_slice"]
NAMES += ["consuming", "staleness"]


class Rows:
    """A buffer's rows and a sampler of them, told of each write; row k says that it is the k-th."""

    def __init__(self, capacity: int, sampler: Sampler):
        self.storage, self.sampler, self.rng = MemoryStorage(), sampler, np.random.default_rng(0)
        self.storage.open(capacity)
        self.rows = StoredRows(self.storage)
        sampler.begin(self.rows)

    def write(self, count: int) -> None:
        steps = torch.arange(self.storage.write_count, self.storage.write_count + count)
        version = {"policy_version": steps // 4}
        done = {"done": (steps % 10 == 9)[:, None]}
        data = TensorDict({"step": steps, "collector": version, "next": done}, batch_size=[count])
        self.storage.begin(RowLayout.of(data))
        self.storage.write(self.storage.layout.pack(data))
        self.sampler.appended(self.rows, self.rows.catch_up())

    def draw(self, count: int) -> list:
        positions = self.sampler.draw(self.rows, count, self.rng).positions
        return self.rows.column(("step",))[positions].tolist()


def test_uniform_sampler_then_each_row_has_the_same_chance():
    rows = Rows(10, UniformSampler())
    rows.write(7)
    rows.write(6)
    steps, counts = np.unique(rows.draw(20_000), return_counts=True)
    assert steps.tolist() == list(range(3, 13))
    assert np.allclose(counts / 20_000, 0.1, atol=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_draw_from_an_empty_buffer_then_it_says_so(name):
    rows = Rows(10, resolve_sampler(name, slice_len=2) if "slice" in name else resolve_sampler(name))
    assert not rows.sampler.can_draw(rows.rows, 4)
    with pytest.raises(ValueError, match="the buffer is empty"):
        rows.draw(4)


@pytest.mark.parametrize("name", NAMES)
def test_load_state_dict_then_draws_are_those_without_the_break(name):
    def build():
        return Rows(40, resolve_sampler(name, slice_len=2) if "slice" in name else resolve_sampler(name))

    def use(rows, times):
        drawn = []
        for _ in range(times):
            positions = rows.sampler.draw(rows.rows, 4, rows.rng)
            drawn.append(
                (positions.positions.tolist(), None if positions.weights is None else positions.weights.tolist())
            )
            rows.sampler.update_priority(rows.rows, positions.positions, rows.rng.random(positions.positions.shape))
        return drawn

    rows = build()
    rows.write(30)
    use(rows, 3)
    rows.write(20)
    use(rows, 2)
    again = build()
    again.storage.begin(rows.storage.layout)
    again.storage.load(rows.storage.records, rows.storage.write_count)
    new = again.rows.catch_up()
    again.sampler.begin(again.rows)
    again.sampler.appended(again.rows, new)
    again.sampler.load_state_dict(torch_round_trip(rows.sampler.state_dict()))
    again.rng.bit_generator.state = rows.rng.bit_generator.state
    assert use(again, 3) == use(rows, 3)
    again.write(5)
    rows.write(5)
    assert use(again, 1) == use(rows, 1)


def torch_round_trip(state: dict) -> dict:
    """Through a file that holds plain values and tensors only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_replacement_then_a_pass_has_every_row_once_and_the_next_one_begins(shuffle):
    rows = Rows(10, WithoutReplacementSampler(shuffle=shuffle))
    rows.write(7)
    rows.write(6)
    for _ in range(2):
        parts = [rows.draw(4) for _ in range(3)]
        assert [len(part) for part in parts] == [4, 4, 2]
        assert rows.sampler.ran_out
        seen = [step for part in parts for step in part]
        assert sorted(seen) == list(range(3, 13))
        assert (seen == list(range(3, 13))) is not shuffle


def test_without_replacement_with_drop_last_then_samples_are_whole():
    rows = Rows(10, WithoutReplacementSampler(drop_last=True))
    rows.write(10)
    parts = [rows.draw(4) for _ in range(6)]
    assert [len(part) for part in parts] == [4] * 6
    for first in (0, 2, 4):
        assert len(set(parts[first] + parts[first + 1])) == 8
    with pytest.raises(ValueError, match="too few rows for a sample without replacement : expected 11, got 10"):
        rows.draw(11)
    assert not rows.sampler.can_draw(rows.rows, 11)


def test_without_replacement_when_rows_are_written_within_a_pass_then_they_wait_for_the_next_one():
    rows = Rows(10, WithoutReplacementSampler())
    rows.write(6)
    seen = rows.draw(4)
    rows.write(4)
    seen += rows.draw(4)
    assert sorted(seen) == list(range(6))
    assert sorted(rows.draw(100)) == list(range(10))


def test_without_replacement_when_rows_are_overwritten_within_a_pass_then_those_left_come_once():
    rows = Rows(10, WithoutReplacementSampler())
    rows.write(10)
    seen = rows.draw(4)
    rows.write(5)
    seen += rows.draw(100)
    assert len(seen) == len(set(seen))
    assert set(range(5, 10)) <= set(seen) <= set(range(10))
    rows.write(10)
    assert sorted(rows.draw(100)) == list(range(15, 25))


def test_without_replacement_when_all_of_a_pass_is_overwritten_then_a_new_one_begins():
    rows = Rows(4, WithoutReplacementSampler())
    rows.write(4)
    rows.draw(1)
    rows.write(4)
    assert sorted(rows.draw(4)) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("name", "slice_len", "kind"),
    [
        ("uniform", None, UniformSampler),
        ("uniform", 4, SliceSampler),
        ("without_replacement", None, WithoutReplacementSampler),
        ("without_replacement", 4, SliceWithoutReplacementSampler),
        ("prioritized", None, PrioritizedSampler),
        ("prioritized", 4, PrioritizedSliceSampler),
        ("slice", 4, SliceSampler),
        ("slice_without_replacement", 4, SliceWithoutReplacementSampler),
        ("prioritized_slice", 4, PrioritizedSliceSampler),
        ("consuming", None, ConsumingSampler),
        ("staleness", None, StalenessSampler),
    ],
)
def test_resolve_sampler_then_the_name_and_the_slices_say_the_kind(name, slice_len, kind):
    assert type(resolve_sampler(name, slice_len)) is kind


def test_resolve_sampler_of_a_sampler_then_it_is_that_one():
    sampler = UniformSampler()
    assert resolve_sampler(sampler) is sampler


@pytest.mark.parametrize(
    ("sampler", "slice_len", "error", "text"),
    [
        ("best", None, ValueError, "sampler must be one of uniform, .*, got 'best'"),
        ("slice", None, ValueError, "expected slice_len or num_slices"),
        ("consuming", 4, ValueError, "'consuming' draws single rows"),
        ("staleness", 4, ValueError, "'staleness' draws single rows"),
        (UniformSampler(), 4, ValueError, "slice_len and num_slices are settings of the sampler"),
        (3, None, TypeError, "sampler must be a Sampler or a name, got 3"),
    ],
)
def test_resolve_sampler_of_what_is_none_then_an_error_says_why(sampler, slice_len, error, text):
    with pytest.raises(error, match=text):
        resolve_sampler(sampler, slice_len)


def test_check_batch_size_below_one_then_it_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        UniformSampler().check_batch_size(0)
