"""Rows are used as often and as late as is allowed, and no more."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lit_collect.errors import StaleDataError
from lit_collect.replay.drawing import Sampler
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.staleness import ConsumingSampler, StalenessSampler
from lit_collect.replay.storage import MemoryStorage

VERSION = ("collector", "policy_version")


class Rows:
    """Rows that say their serial number and the version that acted."""

    def __init__(self, capacity: int, sampler: Sampler):
        self.storage, self.sampler, self.rng = MemoryStorage(), sampler, np.random.default_rng(0)
        self.storage.open(capacity)
        self.rows = StoredRows(self.storage)
        sampler.begin(self.rows)

    def write(self, versions: list[int]) -> None:
        first = self.storage.write_count
        number = torch.arange(first, first + len(versions))
        data = TensorDict({"number": number, "collector": {"policy_version": torch.tensor(versions)}}, [len(versions)])
        self.storage.begin(RowLayout.of(data))
        self.storage.write(self.storage.layout.pack(data))
        self.sampler.appended(self.rows, self.rows.catch_up())

    def draw(self, count: int) -> np.ndarray:
        """The numbers of drawn rows."""
        return self.rows.column(("number",))[self.sampler.draw(self.rows, count, self.rng).positions]

    def versions(self, count: int) -> np.ndarray:
        return self.rows.column(VERSION)[self.sampler.draw(self.rows, count, self.rng).positions]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(4, 30),
    st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=30),
)
def test_consuming_sampler_of_any_script_then_no_row_is_used_more_often_and_all_can_be(max_uses, capacity, script):
    sampler = ConsumingSampler(max_uses)
    rows = Rows(capacity, sampler)
    uses = {}
    for write, count in script:
        if write:
            count = min(count, capacity)
            first = rows.storage.write_count
            rows.write([0] * count)
            uses = {number: n for number, n in uses.items() if number >= first + count - capacity}
            uses |= dict.fromkeys(range(first, first + count), 0)
        left = sum(n < max_uses for n in uses.values())
        assert sampler.num_left == left
        if not write and sampler.can_draw(rows.rows, count):
            drawn = rows.draw(count).tolist()
            assert len(set(drawn)) == count
            for number in drawn:
                uses[number] += 1
            assert max(uses.values()) <= max_uses
    while sampler.num_left:
        for number in rows.draw(1).tolist():
            uses[number] += 1
    assert set(uses.values()) <= {max_uses}


def test_consuming_sampler_when_too_few_are_left_then_it_says_how_many():
    rows = Rows(10, ConsumingSampler(2))
    rows.write([0] * 5)
    for _ in range(2):
        rows.draw(4)
    assert not rows.sampler.can_draw(rows.rows, 3)
    with pytest.raises(ValueError, match="too few rows are left : expected 3 that were used fewer than 2 times, got 2"):
        rows.draw(3)
    assert len(rows.draw(2)) == 2, "what was asked for in vain is not used up"


def test_consuming_sampler_of_lost_rows_then_they_are_never_drawn():
    rows = Rows(10, ConsumingSampler())
    rows.write([0] * 6)
    rows.storage.load(rows.storage.records[:6].copy(), 6, np.arange(6) % 2 == 0)
    new = rows.rows.catch_up()
    rows.sampler.begin(rows.rows)
    rows.sampler.appended(rows.rows, new)
    assert sorted(rows.draw(3).tolist()) == [1, 3, 5]
    assert rows.sampler.num_left == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_consuming_sampler_with_a_number_of_uses_that_cannot_be_then_it_is_refused(value):
    with pytest.raises(ValueError, match=f"max_uses must be an integer of at least 1, got {value!r}"):
        ConsumingSampler(value)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 30),
    st.lists(st.lists(st.integers(-1, 6), min_size=1, max_size=12), min_size=1, max_size=12),
    st.integers(0, 8),
    st.integers(0, 4),
)
def test_staleness_sampler_of_any_script_then_no_row_is_too_old_and_all_others_can_be_drawn(
    capacity, writes, learner, bound
):
    rows = Rows(capacity, StalenessSampler(bound, weight="uniform"))
    for versions in writes:
        rows.write(versions[:capacity])
    rows.rows.learner_version = learner
    stored = rows.rows.column(VERSION)[: rows.rows.size]
    young = {int(place) for place in np.flatnonzero((stored >= 0) & (learner - stored <= bound))}
    assert rows.sampler.can_draw(rows.rows, 4) == bool(young)
    if young:
        assert set(rows.sampler.draw(rows.rows, 40 * capacity, rows.rng).positions.tolist()) == young
    else:
        with pytest.raises(StaleDataError, match=f"all rows are too old : expected an age of at most {bound}"):
            rows.draw(4)


def test_staleness_sampler_then_chances_fall_with_age():
    rows = Rows(100, StalenessSampler())
    rows.write([0] * 30 + [1] * 20)
    rows.write([1] * 10 + [2] * 40)
    rows.rows.learner_version = 2
    found, counts = np.unique(rows.versions(30_000), return_counts=True)
    expected = np.array([30 / 3, 30 / 2, 40 / 1])
    assert found.tolist() == [0, 1, 2]
    assert np.allclose(counts / 30_000, expected / expected.sum(), atol=0.01)


def test_staleness_sampler_when_the_learner_goes_on_then_ages_follow():
    rows = Rows(100, StalenessSampler(1))
    rows.write([0] * 10 + [1] * 10 + [2] * 10)
    rows.rows.learner_version = 1
    assert set(rows.versions(500).tolist()) == {0, 1, 2}
    rows.rows.learner_version = 2
    assert set(rows.versions(500).tolist()) == {1, 2}
    rows.rows.learner_version = 3
    assert set(rows.versions(500).tolist()) == {2}
    rows.rows.learner_version = 4
    assert not rows.sampler.can_draw(rows.rows, 1)
    with pytest.raises(StaleDataError, match="got 2 as the smallest age"):
        rows.draw(1)


def test_staleness_sampler_of_rows_acted_at_random_then_they_are_the_oldest():
    bounded, free = Rows(100, StalenessSampler(50)), Rows(100, StalenessSampler())
    for rows in (bounded, free):
        rows.write([-1] * 10 + [0] * 10)
    assert set(bounded.versions(500).tolist()) == {0}
    _, counts = np.unique(free.versions(9000), return_counts=True)
    assert np.allclose(counts / 9000, [1 / 3, 2 / 3], atol=0.02)


def test_staleness_sampler_with_a_function_then_it_weighs_ages():
    rows = Rows(100, StalenessSampler(weight=lambda ages: (ages == 1).astype(float)))
    rows.write([0] * 10 + [1] * 10 + [2] * 10)
    rows.rows.learner_version = 2
    assert set(rows.versions(300).tolist()) == {1}


@pytest.mark.parametrize(
    "weight", [lambda ages: -1.0 - ages, lambda ages: np.full(len(ages), np.nan), lambda ages: 1.0]
)
def test_staleness_sampler_with_a_function_that_gives_no_weights_then_it_is_refused(weight):
    rows = Rows(100, StalenessSampler(weight=weight))
    rows.write([0, 1, 2])
    with pytest.raises(ValueError, match="weight must give finite numbers that are not negative"):
        rows.draw(1)


def test_staleness_sampler_of_lost_rows_then_they_are_never_drawn():
    rows = Rows(10, StalenessSampler())
    rows.write([0] * 8)
    rows.storage.load(rows.storage.records[:8].copy(), 8, np.arange(8) % 3 == 1)
    new = rows.rows.catch_up()
    rows.sampler.begin(rows.rows)
    rows.sampler.appended(rows.rows, new)
    assert set(rows.draw(300).tolist()) == {0, 2, 3, 5, 6}


def test_staleness_sampler_of_rows_without_a_version_then_it_says_so():
    storage, sampler = MemoryStorage(), StalenessSampler()
    storage.open(4)
    data = TensorDict({"number": torch.arange(3)}, [3])
    storage.begin(RowLayout.of(data))
    storage.write(storage.layout.pack(data))
    rows = StoredRows(storage)
    with pytest.raises(ValueError, match="rows hold no version of the policy"):
        sampler.appended(rows, rows.catch_up())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_staleness": -1}, "max_staleness must be None or an integer of at least 0, got -1"),
        ({"max_staleness": 1.5}, "max_staleness must be None or an integer of at least 0, got 1.5"),
        ({"weight": "fast"}, "weight must be one of inverse, uniform or a function, got 'fast'"),
    ],
)
def test_staleness_sampler_with_a_setting_that_cannot_be_then_it_is_refused(given, text):
    with pytest.raises(ValueError, match=text):
        StalenessSampler(**given)


def seconds_per_draw(capacity: int) -> float:
    """Rows are written, the learner goes on, a sample is drawn, over and over; always a hundred versions."""
    rows = Rows(capacity, StalenessSampler())
    rows.write(np.repeat(np.arange(100), capacity // 100).tolist())
    best, version = np.inf, 100
    for _ in range(8):
        begun = time.perf_counter()
        for _ in range(20):
            version += 1
            rows.write([version] * 8)
            rows.rows.learner_version = version
            rows.sampler.draw(rows.rows, 256, rows.rng)
        best = min(best, time.perf_counter() - begun)
    return best


def test_staleness_sampler_of_a_hundred_times_as_many_rows_then_a_draw_takes_about_as_long():
    few, many = (seconds_per_draw(capacity) for capacity in (10_000, 1_000_000))
    assert many < 15 * few, "a look at all rows would take a hundred times as long"
