"""Random scripts of episodes, workers, writes and capacities: what is handed out is one piece of one episode."""

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lit_collect.replay.layout import RowLayout
from lit_collect.replay.prioritized import PrioritizedSliceSampler
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.samplers import WithoutReplacementSampler
from lit_collect.replay.slices import SliceSampler, SliceWithoutReplacementSampler
from lit_collect.replay.storage import MemoryStorage

QUICK = settings(max_examples=150, deadline=None)


@dataclass
class Copies:
    """Env copies of one worker: each row says its trajectory and its step in it."""

    first: int
    count: int
    total: int
    lengths: list[int]
    with_init: bool
    steps: list[int] = field(default_factory=list)
    episodes: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.steps, self.episodes = [0] * self.count, [0] * self.count

    def collect(self, steps: int, *, step_by_step: bool) -> TensorDict:
        rows = [[self._row(copy) for copy in range(self.count)] for _ in range(steps)]
        if not step_by_step:
            rows = list(zip(*rows, strict=True))
        ids, at, done = zip(*[row for part in rows for row in part], strict=True)
        data = {
            "step": torch.tensor(at),
            "collector": {"traj_ids": torch.tensor(ids)},
            "next": {"done": torch.tensor(done)[:, None]},
        }
        if self.with_init:
            data["is_init"] = (torch.tensor(at) == 0)[:, None]
        return TensorDict(data, batch_size=[len(at)])

    def _row(self, copy: int) -> tuple[int, int, bool]:
        episode, step = self.episodes[copy], self.steps[copy]
        done = step + 1 >= self.lengths[(episode * 7 + copy + self.first) % len(self.lengths)]
        self.steps[copy], self.episodes[copy] = (0, episode + 1) if done else (step + 1, episode)
        return episode * self.total + self.first + copy, step, done


@st.composite
def scripts(draw):
    """A capacity and what workers write, in turns."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    with_init = draw(st.booleans())
    firsts = np.cumsum([0, *counts])
    workers = [
        Copies(int(firsts[number]), count, int(firsts[-1]), lengths, with_init) for number, count in enumerate(counts)
    ]
    turns = draw(
        st.lists(st.tuples(st.integers(0, len(counts) - 1), st.integers(1, 9), st.booleans()), min_size=1, max_size=25)
    )
    batches = [workers[who].collect(steps, step_by_step=by_step) for who, steps, by_step in turns]
    capacity = draw(st.integers(1, 60))
    return capacity, [batch[-capacity:] for batch in batches], draw(st.integers(0, 3))


def stored(capacity: int, batches: list[TensorDict], look_every: int) -> StoredRows:
    """All of it written, boundaries derived after some of the writes."""
    return stored_in(capacity, batches, look_every)[1]


def stored_in(capacity: int, batches: list[TensorDict], look_every: int) -> tuple[MemoryStorage, StoredRows]:
    storage = MemoryStorage()
    storage.open(capacity)
    storage.begin(RowLayout.of(batches[0]))
    rows = StoredRows(storage)
    for number, batch in enumerate(batches):
        storage.write(storage.layout.pack(batch))
        if look_every and number % look_every == 0:
            rows.catch_up()
            assert rows.boundaries is not None
    rows.catch_up()
    return storage, rows


def content(rows: StoredRows) -> tuple[np.ndarray, np.ndarray]:
    return rows.column(("collector", "traj_ids")), rows.column(("step",))


def expected_pieces(rows: StoredRows) -> set[tuple[int, ...]]:
    """The longest runs of consecutive steps of one trajectory among the rows that there are, by looking at all."""
    ids, steps = content(rows)
    at = {(int(ids[place]), int(steps[place])): place for place in rows.in_writing_order().tolist()}
    pieces = []
    for key in sorted(at):
        if (key[0], key[1] - 1) not in at:
            pieces.append([])
        pieces[-1].append(at[key])
    return {tuple(piece) for piece in pieces}


def check_slices(rows: StoredRows, positions: np.ndarray) -> None:
    ids, steps = content(rows)
    there = positions >= 0
    assert there[:, 0].all()
    assert (there[:, :-1] | ~there[:, 1:]).all(), "padding is at the end"
    both = there[:, 1:]
    assert (ids[positions[:, 1:]] == ids[positions[:, :-1]])[both].all()
    assert (steps[positions[:, 1:]] == steps[positions[:, :-1]] + 1)[both].all()
    assert rows.is_valid(positions[there]).all()


@QUICK
@given(scripts())
def test_boundaries_of_any_script_then_pieces_are_those_found_by_looking_at_all_rows(script):
    rows = stored(*script)
    ordered, lengths = rows.boundaries.in_order()
    got = {tuple(piece.tolist()) for piece in np.split(ordered, np.cumsum(lengths)[:-1])}
    assert got == expected_pieces(rows)
    heads, counts = rows.boundaries.pieces()
    assert set(zip(heads.tolist(), counts.tolist(), strict=True)) == {(piece[0], len(piece)) for piece in got}
    for piece in got:
        assert rows.walk(np.array(piece[:1]), len(piece) + 1).tolist() == [[*piece, -1]]
        assert rows.ahead(np.array(piece)).tolist() == list(range(len(piece), 0, -1))


@QUICK
@given(scripts(), st.integers(1, 6), st.integers(0, 2**16))
def test_slices_of_any_script_then_each_lies_in_one_piece_and_every_row_is_reachable(script, length, seed):
    rows, rng = stored(*script), np.random.default_rng(seed)
    pieces = expected_pieces(rows)
    reachable = {place for piece in pieces if len(piece) >= length for place in piece}
    sampler = SliceSampler(length)
    assert sampler.can_draw(rows, 4 * length) == bool(reachable)
    if reachable:
        drawn = sampler.draw(rows, 4 * length, rng).positions
        assert drawn.shape == (4, length)
        assert (drawn >= 0).all()
        check_slices(rows, drawn)
        assert set(rows.walk(rows.boundaries.starts(length), length).ravel().tolist()) == reachable
    padded = SliceSampler(length, strict_length=False).draw(rows, 4 * length, rng).positions
    check_slices(rows, padded)
    everything = rows.walk(rows.boundaries.starts(length, or_short=True), length).ravel()
    assert set(everything[everything >= 0].tolist()) == {place for piece in pieces for place in piece}


@QUICK
@given(scripts(), st.integers(1, 6), st.integers(0, 2**16))
def test_prioritized_slices_of_any_script_then_each_lies_in_one_piece(script, length, seed):
    rows, rng = stored(*script), np.random.default_rng(seed)
    sampler = PrioritizedSliceSampler(length, strict_length=False)
    sampler.begin(rows)
    sampler.appended(rows, rows.in_writing_order())
    sampler.update_priority(rows, rows.in_writing_order(), rng.random(rows.size))
    check_slices(rows, sampler.draw(rows, 5 * length, rng).positions)


@QUICK
@given(scripts(), st.integers(1, 6), st.integers(0, 2**16))
def test_a_pass_over_any_script_then_every_row_comes_exactly_once(script, length, seed):
    rows, rng = stored(*script), np.random.default_rng(seed)
    everything = rows.in_writing_order().tolist()
    single = WithoutReplacementSampler()
    padded = SliceWithoutReplacementSampler(length, strict_length=False)
    for sampler in (single, padded):
        seen = []
        while True:
            positions = sampler.draw(rows, 3 * length, rng).positions
            if sampler.draws_slices:
                check_slices(rows, positions)
            seen += positions[positions >= 0].tolist()
            if sampler.ran_out:
                break
        assert sorted(seen) == sorted(everything)


@QUICK
@given(scripts(), st.integers(1, 6), st.integers(0, 2**16))
def test_a_pass_of_whole_slices_of_any_script_then_as_many_as_fit_and_no_row_twice(script, length, seed):
    rows, rng = stored(*script), np.random.default_rng(seed)
    fit = sum(len(piece) // length for piece in expected_pieces(rows))
    sampler = SliceWithoutReplacementSampler(length)
    if not fit:
        assert not sampler.can_draw(rows, length)
        return
    seen = []
    while not sampler.ran_out:
        positions = sampler.draw(rows, 2 * length, rng).positions
        assert (positions >= 0).all()
        check_slices(rows, positions)
        seen += positions.ravel().tolist()
    assert len(seen) == len(set(seen)) == fit * length


@QUICK
@given(scripts(), st.integers(0, 2**16))
def test_lost_rows_among_any_script_then_they_are_never_handed_out_and_no_slice_crosses_them(script, seed):
    rows, rng = stored(*script), np.random.default_rng(seed)
    storage = MemoryStorage()
    storage.open(rows.capacity)
    storage.begin(RowLayout.of(script[1][0]))
    lost = rng.random(rows.extent) < 0.3
    storage.load(rows.read(np.arange(rows.extent)), rows.write_count, lost)
    rows = StoredRows(storage)
    rows.catch_up()
    assert rows.size == int((~lost).sum())
    valid = rows.in_writing_order()
    assert not lost[valid].any()
    assert ((rows.serials(np.arange(rows.extent)) < 0) == lost).all()
    ordered, lengths = rows.boundaries.in_order()
    assert sorted(ordered.tolist()) == sorted(valid.tolist())
    if not rows.size:
        return
    check_slices(rows, rows.walk(ordered, int(lengths.max())))
    written = set(rows.serials(valid).tolist())
    for piece in np.split(ordered, np.cumsum(lengths)[:-1]):
        serials = rows.serials(piece)
        between = np.arange(serials.min(), serials.max() + 1)
        assert written.issuperset(between.tolist()), "nobody knows what was lost between these rows"


@QUICK
@given(scripts(), st.data())
def test_rows_taken_back_in_any_script_then_boundaries_are_those_of_what_is_left(script, data):
    storage, rows = stored_in(*script)
    storage.void_after(data.draw(st.integers(0, rows.write_count)))
    rows.catch_up()
    ordered, lengths = rows.boundaries.in_order()
    assert sorted(ordered.tolist()) == sorted(rows.in_writing_order().tolist())
    if rows.size:
        check_slices(rows, rows.walk(ordered, int(lengths.max())))
