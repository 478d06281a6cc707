"""Pieces of trajectories are known without looking at rows again, and drawn from without looking at all of them."""

import pickle
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.replay import rows as rows_module
from lit_collect.replay.boundaries import Boundaries
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.storage import MemoryStorage


def pieces_of(boundaries: Boundaries) -> list[list[int]]:
    ordered, lengths = boundaries.in_order()
    return sorted(piece.tolist() for piece in np.split(ordered, np.cumsum(lengths)[:-1]))


def append(boundaries: Boundaries, positions, ids, ends=(), begins=None) -> None:
    """Rows at some positions; those at `ends` end their trajectories."""
    positions = np.array(positions)
    first = None if begins is None else np.isin(positions, begins)
    boundaries.append(positions, None if ids is None else np.array(ids), np.isin(positions, ends), first)


def rows_of(capacity: int, parts: list[TensorDict]) -> StoredRows:
    return stored(capacity, parts)[1]


def stored(capacity: int, parts: list[TensorDict]) -> tuple[MemoryStorage, StoredRows]:
    storage = MemoryStorage()
    storage.open(capacity)
    storage.begin(RowLayout.of(parts[0]))
    for part in parts:
        storage.write(storage.layout.pack(part))
    rows = StoredRows(storage)
    rows.catch_up()
    return storage, rows


def test_boundaries_of_a_full_ring_without_ids_then_its_seam_ends_a_piece_and_its_edge_does_not():
    done = torch.zeros(15, 1, dtype=torch.bool)
    done[[7, 12]] = True  # positions 7 and 2; the last row lies at 4
    rows = rows_of(10, [TensorDict({"next": {"done": part}}, batch_size=[len(part)]) for part in done.split(5)])
    assert pieces_of(rows.boundaries) == [[3, 4], [5, 6, 7], [8, 9, 0, 1, 2]]


def test_boundaries_without_done_then_terminated_or_truncated_ends_a_piece():
    flags = {
        "terminated": torch.tensor([0, 1, 0, 0])[:, None] > 0,
        "truncated": torch.tensor([0, 0, 1, 0])[:, None] > 0,
    }
    assert pieces_of(rows_of(8, [TensorDict({"next": flags}, batch_size=[4])]).boundaries) == [[0, 1], [2], [3]]


def test_boundaries_without_ids_or_ends_then_all_rows_are_one_piece():
    rows = rows_of(4, [TensorDict({"reward": torch.zeros(3)}, batch_size=[3]) for _ in range(2)])
    assert pieces_of(rows.boundaries) == [[2, 3, 0, 1]]


def test_append_step_by_step_of_eight_copies_then_following_rows_are_eight_places_away():
    boundaries = Boundaries(32)
    for step in range(3):
        append(boundaries, range(8 * step, 8 * step + 8), range(8))
    assert boundaries.walk(np.array([0, 7]), 4).tolist() == [[0, 8, 16, -1], [7, 15, 23, -1]]
    assert boundaries.following[:24].tolist() == [*range(8, 24), *[-1] * 8]


def test_append_after_an_end_then_the_same_id_begins_anew():
    boundaries = Boundaries(8)
    append(boundaries, [0, 1], [5, 5], ends=[1])
    append(boundaries, [2, 3], [5, 5])
    assert pieces_of(boundaries) == [[0, 1], [2, 3]]


def test_append_of_a_first_row_then_the_same_id_begins_anew():
    boundaries = Boundaries(8)
    append(boundaries, [0, 1, 2], [5, 5, 5], begins=[2])
    append(boundaries, [3, 4], [5, 5], begins=[3])
    append(boundaries, [5], [5])
    assert pieces_of(boundaries) == [[0, 1], [2], [3, 4, 5]]


def test_append_of_negative_ids_then_each_row_is_on_its_own():
    boundaries = Boundaries(8)
    append(boundaries, [0, 1, 2, 3], [-1, 4, -1, 4])
    assert pieces_of(boundaries) == [[0], [1, 3], [2]]


def test_append_over_the_whole_of_an_open_piece_then_it_is_not_continued():
    boundaries = Boundaries(4)
    append(boundaries, [0, 1], [5, 5])
    append(boundaries, [2, 3, 0, 1], [6, 6, 6, 6])
    append(boundaries, [2], [5])
    assert pieces_of(boundaries) == [[2], [3, 0, 1]]


def test_append_over_the_middle_of_a_piece_then_it_is_refused_and_nothing_is_changed():
    boundaries = Boundaries(4)
    append(boundaries, [0, 1, 2], [5, 5, 5])
    with pytest.raises(ValueError, match="in the middle of a piece"):
        append(boundaries, [1], [6])
    assert pieces_of(boundaries) == [[0, 1, 2]]


def test_ahead_of_places_without_a_row_then_it_is_zero():
    boundaries = Boundaries(4)
    append(boundaries, [0, 1], [5, 5])
    assert boundaries.ahead(np.array([[0, 1], [3, -1]])).tolist() == [[2, 1], [0, 0]]


def test_has_piece_of_when_the_longest_is_overwritten_then_the_next_one_counts():
    boundaries = Boundaries(8)
    append(boundaries, [0, 1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 2, 2, 2])
    assert boundaries.has_piece_of(4)
    assert not boundaries.has_piece_of(5)
    append(boundaries, [7, 0, 1], [3, 4, 5])
    assert boundaries.has_piece_of(3)
    assert not boundaries.has_piece_of(4)
    assert boundaries.longest == 3


@pytest.mark.parametrize(("short", "chances"), [(False, {0: 1, 1: 1, 4: 1}), (True, {0: 1, 1: 1, 4: 1, 7: 1})])
def test_draw_starts_then_each_row_where_a_slice_may_begin_has_the_same_chance(short, chances):
    boundaries = Boundaries(16)
    append(boundaries, range(9), [1, 1, 1, 1, 2, 2, 2, 3, 3])
    drawn = boundaries.draw_starts(np.random.default_rng(0), 4000, 3, or_short=short)
    places, counts = np.unique(drawn, return_counts=True)
    assert set(places.tolist()) == set(chances)
    assert np.allclose(counts / 4000, 1 / len(chances), atol=0.03)


@pytest.mark.parametrize("length", [40, 200], ids=["short pieces", "long pieces"])
def test_draw_starts_where_few_rows_will_do_then_each_of_them_has_the_same_chance(length):
    boundaries = Boundaries(30_000)
    append(boundaries, range(20_000), np.arange(20_000) // 20)
    append(boundaries, range(20_000, 20_000 + length + 2), np.full(length + 2, 5000))
    drawn = boundaries.draw_starts(np.random.default_rng(0), 3000, length)
    places, counts = np.unique(drawn, return_counts=True)
    assert places.tolist() == [20_000, 20_001, 20_002]
    assert np.allclose(counts / 3000, 1 / 3, atol=0.04)
    append(boundaries, [20_002 + length], [5000])
    assert len(boundaries.starts(length)) == 4


def test_starts_where_one_piece_is_much_longer_then_all_of_its_rows_are_listed():
    boundaries = Boundaries(4000)
    append(boundaries, range(3000), np.minimum(np.arange(3000), 1000))
    assert boundaries.starts(5).tolist() == list(range(1000, 2996))


def test_draw_starts_when_no_piece_is_long_enough_then_the_longest_is_named():
    boundaries = Boundaries(16)
    append(boundaries, range(9), [1, 1, 1, 1, 2, 2, 2, 3, 3])
    with pytest.raises(
        ValueError, match=r"no trajectory is long enough : expected slices of 6 rows, got at most 4 rows"
    ):
        boundaries.draw_starts(np.random.default_rng(0), 4, 6)


def test_append_of_a_very_long_trajectory_then_it_is_cut_before_its_steps_run_over():
    boundaries = Boundaries(8)
    append(boundaries, [0, 1, 2], [5, 5, 5])
    boundaries._step[:3] += np.iinfo(np.int32).max - 3
    boundaries._pieces.first[0] += np.iinfo(np.int32).max - 3
    boundaries._pieces.last[0] += np.iinfo(np.int32).max - 3
    append(boundaries, [3, 4, 5], [5, 5, 5])
    assert pieces_of(boundaries) == [[0, 1, 2], [3, 4, 5]]


def test_many_short_trajectories_over_a_small_ring_then_nothing_grows():
    boundaries = Boundaries(16)
    sizes = []
    for lap in range(1000):
        append(boundaries, np.arange(4 * lap, 4 * lap + 4) % 16, np.arange(4) + 4 * lap)  # none of them ever ends
        sizes.append(len(pickle.dumps(boundaries)))
    assert max(sizes[100:]) <= 1.2 * max(sizes[:50])


def test_catch_up_where_the_writer_chose_places_then_rows_are_on_their_own_and_serials_are_kept():
    storage, rows = stored(6, [TensorDict({"step": torch.arange(2)}, batch_size=[2])])
    storage.write(storage.layout.pack(TensorDict({"step": torch.arange(3)}, batch_size=[3])), np.array([4, 0, 2]))
    assert rows.catch_up(np.array([4, 0, 2])).tolist() == [4, 0, 2]
    assert (rows.size, rows.extent, rows.in_order) == (4, 5, False)
    assert rows.serials(np.arange(-1, 6)).tolist() == [-1, 3, 1, 4, -1, 2, -1]
    assert rows.in_writing_order().tolist() == [1, 4, 0, 2]
    assert pieces_of(rows.boundaries) == [[0], [1], [2], [4]]
    assert set(rows.draw_rows(np.random.default_rng(0), 200).tolist()) == {0, 1, 2, 4}
    storage.write(storage.layout.pack(TensorDict({"step": torch.arange(1)}, batch_size=[1])))
    with pytest.raises(ValueError, match="expected positions"):
        rows.catch_up()


def test_catch_up_with_wrong_positions_then_their_number_is_named():
    storage, rows = stored(6, [TensorDict({"step": torch.arange(2)}, batch_size=[2])])
    storage.write(storage.layout.pack(TensorDict({"step": torch.arange(3)}, batch_size=[3])))
    with pytest.raises(ValueError, match="expected 3, got 1"):
        rows.catch_up(np.array([0]))


def test_catch_up_after_more_rows_than_there_is_room_for_then_all_places_are_new_once():
    storage, rows = stored(4, [TensorDict({"step": torch.arange(2)}, batch_size=[2])])
    for _ in range(3):
        storage.write(storage.layout.pack(TensorDict({"step": torch.arange(3)}, batch_size=[3])))
    assert rows.catch_up().tolist() == [3, 0, 1, 2]
    assert rows.serials(np.array([3, 0, 1, 2, -1])).tolist() == [7, 8, 9, 10, -1]
    assert rows.catch_up().tolist() == []


@pytest.mark.parametrize("look_after", [13, 20, 33])
def test_boundaries_when_many_rows_were_written_meanwhile_then_they_are_those_of_the_rows_left(look_after, monkeypatch):
    monkeypatch.setattr(rows_module, "_LOOK_ROWS", 3)  # of these few at once
    ids = torch.arange(48) // 7
    parts = [
        TensorDict({"collector": {"traj_ids": part}}, batch_size=[len(part)])
        for part in ids.split([look_after, 48 - look_after])
    ]
    storage = MemoryStorage()
    storage.open(20)
    storage.begin(RowLayout.of(parts[0]))
    rows = StoredRows(storage)
    for part in parts:
        for row in part.split(1):
            storage.write(storage.layout.pack(row))
        rows.catch_up()
        first = max(storage.write_count - 20, 0)
        expected = [
            [number % 20 for number in range(first, storage.write_count) if number // 7 == name] for name in range(7)
        ]
        assert pieces_of(rows.boundaries) == sorted(piece for piece in expected if piece)


def test_values_of_small_and_large_records_then_they_are_those_of_the_rows():
    for width in (1, 2000):  # beyond 4 kB only the leaf is read
        part = TensorDict({"step": torch.arange(6), "image": torch.zeros(6, width)}, batch_size=[6])
        rows = rows_of(8, [part])
        assert rows.values(("step",), np.array([5, 0, 3])).tolist() == [5, 0, 3]
        assert rows.column(("step",))[:6].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(KeyError):
        rows.values(("reward",), np.array([0]))


def seconds_per_draw(capacity: int) -> float:
    """Eight rows are written, a slice is drawn, over and over in a full buffer."""
    boundaries = Boundaries(capacity)
    ids = np.arange(capacity) // 160 * 8 + np.arange(capacity) % 8  # eight copies step by step, 20 steps in an episode
    boundaries.append(np.arange(capacity), ids, np.arange(capacity) % 160 >= 152)
    rng = np.random.default_rng(0)
    best, none = np.inf, np.zeros(8, bool)
    for turn in range(8):
        begun = time.perf_counter()
        for step in range(20):
            at = 8 * (20 * turn + step)
            boundaries.append(np.arange(at, at + 8), np.arange(8) + 8 * (capacity + turn), none)
            boundaries.walk(boundaries.draw_starts(rng, 16, 16), 16)
            assert boundaries.has_piece_of(16)
        best = min(best, time.perf_counter() - begun)
    return best


def test_draw_starts_of_a_hundred_times_as_many_rows_then_it_takes_about_as_long():
    few, many = (min(seconds_per_draw(capacity) for _ in range(2)) for capacity in (16_000, 1_600_000))
    assert many < 15 * few, "a look at all rows would take a hundred times as long"
