"""Samplers of slices: their shape, which rows they have, and what they say where there are none."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.replay.layout import RowLayout
from lit_collect.replay.prioritized import PrioritizedSliceSampler
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.slices import SliceSampler, SliceWithoutReplacementSampler
from lit_collect.replay.storage import MemoryStorage

KINDS = [SliceSampler, SliceWithoutReplacementSampler, PrioritizedSliceSampler]


def episodes(lengths: list[int], first: int = 0) -> TensorDict:
    """Episodes one after the other; a row says its episode and its step."""
    ids = np.repeat(np.arange(first, first + len(lengths)), lengths)
    steps = np.concatenate([np.arange(length) for length in lengths])
    done = np.concatenate([np.arange(length) == length - 1 for length in lengths])[:, None]
    return TensorDict(
        {
            "step": torch.from_numpy(steps),
            "collector": {"traj_ids": torch.from_numpy(ids)},
            "next": {"done": torch.from_numpy(done)},
        },
        batch_size=[len(ids)],
    )


def write(storage: MemoryStorage, rows: StoredRows, data: TensorDict, sampler=None) -> None:
    storage.write(storage.layout.pack(data))
    new = rows.catch_up()
    if sampler is not None:
        sampler.appended(rows, new)


def stored(data: TensorDict, sampler=None, capacity: int = 100) -> tuple[MemoryStorage, StoredRows]:
    storage = MemoryStorage()
    storage.open(capacity)
    storage.begin(RowLayout.of(data))
    rows = StoredRows(storage)
    if sampler is not None:
        sampler.begin(rows)
    write(storage, rows, data, sampler)
    return storage, rows


def said(rows: StoredRows, positions: np.ndarray) -> list[list[tuple[int, int]]]:
    """(episode, step) of the rows of slices, without padding."""
    ids, steps = rows.column(("collector", "traj_ids")), rows.column(("step",))
    return [[(int(ids[place]), int(steps[place])) for place in piece if place >= 0] for piece in positions]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("slice_len", "num_slices", "shape"), [(4, None, (3, 4)), (None, 4, (4, 3)), (12, None, (1, 12))]
)
def test_draw_then_the_length_or_the_number_of_slices_gives_the_shape(kind, slice_len, num_slices, shape):
    sampler = kind(slice_len, num_slices)
    _, rows = stored(episodes([20, 30, 40]), sampler)
    drawn = sampler.draw(rows, 12, np.random.default_rng(0))
    assert (drawn.positions.shape, drawn.positions.dtype, drawn.slices, drawn.padded) == (shape, np.int64, True, False)
    for piece in said(rows, drawn.positions):
        assert piece == [(piece[0][0], piece[0][1] + step) for step in range(shape[1])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slice_len", "num_slices"), [(None, None), (4, 4)])
def test_a_slice_sampler_with_both_or_neither_then_it_is_refused(kind, slice_len, num_slices):
    with pytest.raises(ValueError, match="expected slice_len or num_slices, got slice_len="):
        kind(slice_len, num_slices)


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_a_slice_sampler_with_a_length_that_is_none_then_it_is_refused(value):
    with pytest.raises(ValueError, match=f"slice_len must be an integer of at least 1, got {value!r}"):
        SliceSampler(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sampler", "batch_size", "text"),
    [
        ({"slice_len": 16}, 100, "batch_size must be a multiple of slice_len=16, got 100; use 96 or 112"),
        ({"slice_len": 16}, 7, "batch_size must be a multiple of slice_len=16, got 7; use 16"),
        ({"num_slices": 7}, 20, "batch_size must be a multiple of num_slices=7, got 20; use 14 or 21"),
    ],
)
def test_check_batch_size_that_slices_cannot_share_then_the_nearest_are_named(kind, sampler, batch_size, text):
    with pytest.raises(ValueError, match=text):
        kind(**sampler).check_batch_size(batch_size)


@pytest.mark.parametrize("kind", KINDS)
def test_draw_when_no_trajectory_is_long_enough_then_the_longest_is_named(kind):
    sampler = kind(8)
    _, rows = stored(episodes([3, 5, 2]), sampler)
    assert not sampler.can_draw(rows, 16)
    with pytest.raises(ValueError, match="no trajectory is long enough : expected slices of 8 rows, got at most 5"):
        sampler.draw(rows, 16, np.random.default_rng(0))


@pytest.mark.parametrize("kind", KINDS)
def test_draw_of_trajectories_that_are_too_short_then_they_come_whole_and_padded(kind):
    sampler = kind(8, strict_length=False)
    _, rows = stored(episodes([3, 5, 2]), sampler)
    drawn = sampler.draw(rows, 24, np.random.default_rng(0))
    assert drawn.padded
    whole = [[(episode, step) for step in range(length)] for episode, length in enumerate([3, 5, 2])]
    assert all(piece in whole for piece in said(rows, drawn.positions))


def test_draw_without_strict_length_then_long_trajectories_give_whole_slices():
    sampler = SliceSampler(4, strict_length=False)
    _, rows = stored(episodes([10, 3]), sampler)
    pieces = said(rows, sampler.draw(rows, 400, np.random.default_rng(0)).positions)
    firsts = {piece[0] for piece in pieces}
    assert firsts == {*((0, step) for step in range(7)), (1, 0)}
    assert all(len(piece) == (4 if piece[0][0] == 0 else 3) for piece in pieces)


def test_draw_from_an_episode_that_wraps_around_then_its_rows_follow_each_other():
    storage, rows = stored(episodes([7, 9]), capacity=20)
    write(storage, rows, episodes([8], first=2))
    drawn = SliceSampler(8).draw(rows, 800, np.random.default_rng(0)).positions
    pieces = {tuple(piece) for piece in said(rows, drawn)}
    firsts = {piece[0] for piece in pieces}
    assert firsts == {(1, 0), (1, 1), (2, 0)}
    assert any((np.diff(piece) < 0).any() for piece in drawn), "one of them goes over the end of the buffer"


def test_a_second_fragment_of_an_episode_then_slices_go_over_the_seam():
    data = episodes([10])
    storage, rows = stored(data[:4])
    write(storage, rows, episodes([3], first=1))
    write(storage, rows, data[4:])
    assert said(rows, SliceSampler(10).draw(rows, 10, np.random.default_rng(0)).positions) == [
        [(0, step) for step in range(10)]
    ]


def test_whole_slices_without_replacement_then_other_rows_are_left_out_in_each_pass():
    sampler = SliceWithoutReplacementSampler(4)
    _, rows = stored(episodes([10, 3]), sampler)
    rng, seen = np.random.default_rng(0), set()
    for _ in range(12):
        pieces = said(rows, sampler.draw(rows, 8, rng).positions)
        assert sampler.ran_out
        assert len({row for piece in pieces for row in piece}) == 8
        seen |= {row for piece in pieces for row in piece}
    assert seen == {(0, step) for step in range(10)}


def test_slices_without_replacement_in_order_then_they_come_as_they_were_written():
    sampler = SliceWithoutReplacementSampler(3, strict_length=False, shuffle=False)
    _, rows = stored(episodes([5, 4]), sampler)
    rng = np.random.default_rng(0)
    pieces = [piece for _ in range(2) for piece in said(rows, sampler.draw(rows, 6, rng).positions)]
    assert pieces == [
        [(0, 0), (0, 1), (0, 2)],
        [(0, 3), (0, 4)],
        [(1, 0), (1, 1), (1, 2)],
        [(1, 3)],
    ]


def test_slices_without_replacement_when_an_episode_goes_on_then_its_new_rows_wait_for_the_next_pass():
    sampler = SliceWithoutReplacementSampler(4, strict_length=False, shuffle=False)
    data = episodes([9])
    storage, rows = stored(data[:6], sampler)
    rng = np.random.default_rng(0)
    first = said(rows, sampler.draw(rows, 4, rng).positions)
    write(storage, rows, data[6:], sampler)
    rest = said(rows, sampler.draw(rows, 4, rng).positions)
    assert first + rest == [[(0, 0), (0, 1), (0, 2), (0, 3)], [(0, 4), (0, 5)]]
    assert sum(len(piece) for piece in said(rows, sampler.draw(rows, 400, rng).positions)) == 9


def test_slices_without_replacement_when_rows_are_overwritten_then_their_slices_are_left_out():
    sampler = SliceWithoutReplacementSampler(4, shuffle=False)
    storage, rows = stored(episodes([8, 8]), sampler, capacity=16)
    rng = np.random.default_rng(0)
    assert said(rows, sampler.draw(rows, 4, rng).positions)[0][0] == (0, 0)
    write(storage, rows, episodes([5], first=2), sampler)  # over the first row of the second slice, too
    left = said(rows, sampler.draw(rows, 400, rng).positions)
    assert [piece[0] for piece in left] == [(1, 0), (1, 4)]


def test_slices_without_replacement_with_drop_last_then_samples_are_whole():
    sampler = SliceWithoutReplacementSampler(4, drop_last=True)
    _, rows = stored(episodes([20]), sampler)
    rng = np.random.default_rng(0)
    assert [len(sampler.draw(rows, 12, rng).positions) for _ in range(4)] == [3] * 4
    assert sampler.can_draw(rows, 20)
    assert not sampler.can_draw(rows, 24)
    with pytest.raises(ValueError, match="too few slices for a sample without replacement : expected 6, got 5"):
        sampler.draw(rows, 24, rng)


def test_slices_without_replacement_of_another_length_then_a_new_pass_begins():
    sampler = SliceWithoutReplacementSampler(num_slices=2)
    _, rows = stored(episodes([20]), sampler)
    rng = np.random.default_rng(0)
    assert sampler.draw(rows, 8, rng).positions.shape == (2, 4)
    assert sampler.draw(rows, 10, rng).positions.shape == (2, 5)
