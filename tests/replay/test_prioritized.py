"""Chances in proportion to priorities, weights that make up for them, and priorities that cannot be."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lit_collect.replay.layout import RowLayout
from lit_collect.replay.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.storage import MemoryStorage
from lit_collect.replay.sumtree import SumTree


def stored(
    capacity: int, count: int, sampler: PrioritizedSampler, lengths: int = 10
) -> tuple[MemoryStorage, StoredRows]:
    """Rows of episodes of one length, known to the sampler."""
    storage = MemoryStorage()
    storage.open(capacity)
    storage.begin(RowLayout.of(steps(0, 1, lengths)))
    rows = StoredRows(storage)
    sampler.begin(rows)
    write(storage, rows, sampler, count, lengths)
    return storage, rows


def steps(first: int, count: int, lengths: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict({"next": {"done": (number % lengths == lengths - 1)[:, None]}}, batch_size=[count])


def write(storage, rows, sampler, count: int, lengths: int = 10) -> None:
    storage.write(storage.layout.pack(steps(storage.write_count, count, lengths)))
    sampler.appended(rows, rows.catch_up())


def shares(positions: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(positions.ravel(), minlength=size) / positions.size


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_draw_then_chances_are_in_proportion_to_priorities_to_the_power_of_alpha(alpha):
    sampler = PrioritizedSampler(alpha=alpha, eps=0.5)
    _, rows = stored(8, 5, sampler)
    sampler.update_priority(rows, np.arange(5), np.array([0.0, 1.0, 2.0, 4.0, 8.0]))
    drawn = sampler.draw(rows, 20_000, np.random.default_rng(0)).positions
    expected = (np.array([0.0, 1.0, 2.0, 4.0, 8.0]) + 0.5) ** alpha
    assert np.allclose(shares(drawn, 5), expected / expected.sum(), atol=0.01)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_draw_then_weights_are_those_of_the_paper(beta):
    sampler = PrioritizedSampler(alpha=0.7, beta=beta, eps=0.0)
    _, rows = stored(8, 5, sampler)
    priorities = np.array([0.1, 1.0, 2.0, 4.0, 8.0])
    sampler.update_priority(rows, np.arange(5), priorities)
    drawn = sampler.draw(rows, 6, np.random.default_rng(0))
    chances = priorities**0.7 / (priorities**0.7).sum()
    weights = (5 * chances[drawn.positions]) ** -beta
    assert drawn.weights.dtype == np.float32
    assert np.allclose(drawn.weights, weights / weights.max())
    assert drawn.weights.max() == 1


def test_beta_when_it_is_set_then_the_next_weights_follow_it():
    sampler = PrioritizedSampler(beta=0.0)
    _, rows = stored(8, 5, sampler)
    sampler.update_priority(rows, np.arange(5), np.array([0.1, 1.0, 2.0, 4.0, 8.0]))
    assert sampler.draw(rows, 6, np.random.default_rng(0)).weights.tolist() == [1.0] * 6
    sampler.beta = 1.0
    assert sampler.draw(rows, 6, np.random.default_rng(0)).weights.min() < 1
    with pytest.raises(ValueError, match="beta must be a finite number that is not negative, got -1"):
        sampler.beta = -1


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "much", True])
def test_prioritized_sampler_with_a_setting_that_cannot_be_then_it_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number that is not negative, got {value!r}"):
        PrioritizedSampler(**{name: value})


def test_appended_then_new_rows_have_the_largest_priority_so_far():
    sampler = PrioritizedSampler(alpha=1.0, eps=0.0)
    storage, rows = stored(8, 4, sampler)
    sampler.update_priority(rows, np.arange(4), np.array([6.0, 1.0, 1.0, 1.0]))
    sampler.update_priority(rows, np.array([0]), np.array([1.0]))
    assert sampler.max_priority == 6
    write(storage, rows, sampler, 1)
    drawn = sampler.draw(rows, 10_000, np.random.default_rng(0)).positions
    assert np.allclose(shares(drawn, 5), np.array([1, 1, 1, 1, 6]) / 10, atol=0.01)


def test_appended_over_old_rows_then_their_priorities_are_gone():
    sampler = PrioritizedSampler(alpha=1.0, eps=0.0)
    storage, rows = stored(4, 4, sampler)
    sampler.update_priority(rows, np.arange(4), np.array([0.0, 0.0, 0.0, 1.0]))
    write(storage, rows, sampler, 2)
    assert set(sampler.draw(rows, 100, np.random.default_rng(0)).positions.tolist()) == {0, 1, 3}


def test_appended_of_lost_rows_then_they_are_never_drawn():
    sampler = PrioritizedSampler()
    storage, rows = stored(8, 6, sampler)
    storage.load(storage.records[:6].copy(), 6, np.array([True, False, True, False, False, False]))
    new = rows.catch_up()
    sampler.begin(rows)
    sampler.appended(rows, new)
    sampler.update_priority(rows, np.arange(6), np.full(6, 9.0))
    assert set(sampler.draw(rows, 200, np.random.default_rng(0)).positions.tolist()) == {1, 3, 4, 5}


def test_update_priority_of_rows_that_come_twice_then_the_last_one_counts():
    sampler = PrioritizedSampler(alpha=1.0, eps=0.0)
    _, rows = stored(8, 3, sampler)
    sampler.update_priority(rows, np.array([0, 1, 2, 1, 0]), np.array([9.0, 9.0, 1.0, 2.0, 1.0]))
    drawn = sampler.draw(rows, 8000, np.random.default_rng(0)).positions
    assert np.allclose(shares(drawn, 3), [0.25, 0.5, 0.25], atol=0.01)


def test_update_priority_of_padding_and_of_places_without_a_row_then_they_are_left_alone():
    sampler = PrioritizedSampler()
    _, rows = stored(8, 3, sampler)
    sampler.update_priority(rows, np.array([[-1, 5], [1, -1]]), np.array([[7.0, 7.0], [2.0, 7.0]]))
    assert sampler.max_priority == 2
    assert set(sampler.draw(rows, 100, np.random.default_rng(0)).positions.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.5])
def test_update_priority_with_a_number_that_cannot_be_then_the_position_is_named_and_nothing_changes(value):
    sampler = PrioritizedSampler()
    _, rows = stored(8, 6, sampler)
    before = sampler.state_dict()["priorities"].clone()
    with pytest.raises(ValueError, match=rf"the priority of the row at position 4 is {value} : .*entry 1 of"):
        sampler.update_priority(rows, np.array([2, 4, 5]), np.array([1.0, value, 3.0]))
    assert torch.equal(sampler.state_dict()["priorities"], before)
    assert sampler.max_priority == 1


@pytest.mark.parametrize(
    ("positions", "text"),
    [([0, 1], "expected 2 of them, got 3"), ([0, 1, 8], "from 0 to 7"), ([0, -2, 1], "from 0 to 7")],
)
def test_update_priority_of_rows_that_cannot_be_then_it_says_so(positions, text):
    sampler = PrioritizedSampler()
    _, rows = stored(8, 6, sampler)
    with pytest.raises(ValueError, match=text):
        sampler.update_priority(rows, np.array(positions), np.ones(3))


def test_draw_when_all_priorities_are_zero_then_it_says_so():
    sampler = PrioritizedSampler(eps=0.0)
    _, rows = stored(8, 6, sampler)
    sampler.update_priority(rows, np.arange(6), np.zeros(6))
    with pytest.raises(ValueError, match="priorities add up to 0"):
        sampler.draw(rows, 4, np.random.default_rng(0))


def test_load_state_dict_of_another_alpha_then_it_is_refused():
    sampler = PrioritizedSampler(alpha=0.5)
    stored(8, 6, sampler)
    other = PrioritizedSampler(alpha=0.6)
    stored(8, 6, other)
    with pytest.raises(ValueError, match=r"expected alpha=0.6 and 8 rows, got alpha=0.5"):
        other.load_state_dict(sampler.state_dict())


def test_slices_then_first_rows_are_drawn_in_proportion_among_those_where_a_slice_may_begin():
    sampler = PrioritizedSliceSampler(3, alpha=1.0, beta=1.0, eps=0.0)
    _, rows = stored(20, 12, sampler, lengths=4)
    priorities = np.arange(12.0)
    sampler.update_priority(rows, np.arange(12), priorities)
    drawn = sampler.draw(rows, 120_000, np.random.default_rng(0))
    possible = np.array([0, 1, 4, 5, 8, 9])
    expected = np.zeros(12)
    expected[possible] = priorities[possible] / priorities[possible].sum()
    assert np.allclose(shares(drawn.positions[:, 0], 12), expected, atol=0.01)
    assert np.allclose(drawn.weights, (1 / priorities[drawn.positions[:, 0]])[:, None].repeat(3, 1))


def test_slices_that_are_padded_then_padding_weighs_nothing():
    sampler = PrioritizedSliceSampler(6, strict_length=False)
    _, rows = stored(20, 12, sampler, lengths=4)
    drawn = sampler.draw(rows, 60, np.random.default_rng(0))
    assert (drawn.positions[:, 4:] == -1).all()
    assert (drawn.weights[:, :4] == 1).all()
    assert (drawn.weights[:, 4:] == 0).all()


def test_slices_where_few_rows_will_do_then_they_are_drawn_in_proportion():
    sampler = PrioritizedSliceSampler(40, alpha=1.0, eps=0.0)
    storage, rows = stored(40_000, 20_000, sampler, lengths=10)
    write(storage, rows, sampler, 42, lengths=42 * 20_042)
    sampler.update_priority(rows, np.arange(20_000), np.full(20_000, 50.0))
    sampler.update_priority(rows, np.arange(20_000, 20_003), np.array([1.0, 2.0, 1.0]))
    drawn = sampler.draw(rows, 3000 * 40, np.random.default_rng(0)).positions
    assert np.allclose(shares(drawn[:, 0] - 20_000, 3), [0.25, 0.5, 0.25], atol=0.03)


def test_slices_where_no_row_that_will_do_has_a_priority_then_it_says_so():
    sampler = PrioritizedSliceSampler(3, eps=0.0)
    _, rows = stored(20, 12, sampler, lengths=4)
    sampler.update_priority(rows, np.arange(12), np.arange(12) % 4 == 3)
    with pytest.raises(ValueError, match="no row where a slice may begin has a priority"):
        sampler.draw(rows, 12, np.random.default_rng(0))


class Largest:
    """Random numbers at their upper edge, where rounding leads beyond the last row with a priority."""

    def random(self, count: int) -> np.ndarray:
        return np.ones(count)


def test_slices_when_rounding_leads_to_a_row_without_priority_then_another_one_is_drawn():
    sampler = PrioritizedSliceSampler(3, eps=0.0)
    _, rows = stored(20, 12, sampler, lengths=4)
    sampler.update_priority(rows, np.arange(12), np.array([1.0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]))
    assert sampler.draw(rows, 6, Largest()).positions.tolist() == [[4, 5, 6]] * 2


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 9000),
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 300), st.booleans()), min_size=1, max_size=6),
)
def test_sum_tree_after_any_changes_then_shares_lie_where_a_running_sum_has_them(capacity, changes):
    tree, plain = SumTree(capacity), np.zeros(capacity)
    for seed, count, in_a_row in changes:
        rng = np.random.default_rng(seed)
        first = int(rng.integers(0, capacity))
        positions = np.arange(first, min(first + count, capacity)) if in_a_row else rng.integers(0, capacity, count)
        values = rng.integers(0, 9, len(positions)).astype(float)  # whole numbers: no rounding
        tree.set(positions, values)
        plain[positions] = values
    assert np.array_equal(tree.values, plain)
    assert tree.total == plain.sum()
    if plain.sum():
        wanted = (np.arange(int(plain.sum())) + 0.5) / plain.sum()
        expected = np.repeat(np.arange(capacity), plain.astype(int))
        assert np.array_equal(tree.find(wanted), expected)


def seconds_per_draw(capacity: int, sampler: PrioritizedSampler) -> float:
    """Eight rows are written, a sample is drawn and its priorities change, over and over."""
    storage, rows = stored(capacity, capacity, sampler, lengths=40)
    rng, best = np.random.default_rng(0), np.inf
    part = storage.layout.pack(steps(0, 8, 40))
    for _ in range(8):
        begun = time.perf_counter()
        for _ in range(15):
            storage.write(part)
            sampler.appended(rows, rows.catch_up())
            positions = sampler.draw(rows, 256, rng).positions
            sampler.update_priority(rows, positions, rng.random(positions.shape))
        best = min(best, time.perf_counter() - begun)
    return best


@pytest.mark.parametrize("kind", [PrioritizedSampler, PrioritizedSliceSampler])
def test_draw_of_a_hundred_times_as_many_rows_then_it_takes_about_as_long(kind):
    settings_of = {"slice_len": 16} if kind is PrioritizedSliceSampler else {}
    few, many = (seconds_per_draw(capacity, kind(**settings_of)) for capacity in (10_000, 1_000_000))
    assert many < 15 * few, "a look at all rows would take a hundred times as long"


@pytest.mark.parametrize("slices", [False, True])
def test_can_draw_when_no_row_has_a_priority_then_it_is_false_and_draw_says_why(slices):
    sampler = PrioritizedSliceSampler(2, eps=0.0) if slices else PrioritizedSampler(eps=0.0)
    storage, rows = stored(16, 8, sampler)
    assert sampler.can_draw(rows, 4)
    sampler.update_priority(rows, np.arange(8), np.zeros(8))
    assert not sampler.can_draw(rows, 4)
    assert sampler.runs_out
    with pytest.raises(ValueError, match=r"priorities add up to 0\.0"):
        sampler.draw(rows, 4, np.random.default_rng(0))
    write(storage, rows, sampler, 2)
    assert sampler.can_draw(rows, 4)


def test_can_draw_slices_when_only_last_rows_have_a_priority_then_it_is_false():
    sampler = PrioritizedSliceSampler(2, eps=0.0)
    _, rows = stored(2000, 1000, sampler)
    given = np.where(np.arange(1000) % 10 == 9, 1.0, 0.0)
    sampler.update_priority(rows, np.arange(1000), given)
    assert not sampler.can_draw(rows, 4)
    with pytest.raises(ValueError, match="no row where a slice may begin has a priority"):
        sampler.draw(rows, 4, np.random.default_rng(0))
    sampler.update_priority(rows, np.array([998]), np.array([1e-9]))  # seldom among those that are tried first
    assert sampler.can_draw(rows, 4)
    assert sampler.draw(rows, 4, np.random.default_rng(0)).positions.tolist() == [[998, 999]] * 2


def test_runs_out_with_eps_then_is_false():
    assert not PrioritizedSampler().runs_out
    assert not PrioritizedSampler(alpha=0.0, eps=0.0).runs_out
