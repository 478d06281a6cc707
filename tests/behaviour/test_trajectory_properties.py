"""Whatever the episodes, the batches and their order: trajectories are whole, and no row is lost or doubled."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from lit_collect.assembler import TrajectoryAssembler
from lit_collect.frames import (
    IS_INIT,
    LENGTHS,
    MASK,
    NEXT_DONE,
    NO_TRAJECTORY,
    POLICY_VERSION,
    TRAJ_IDS,
    count_frames,
)
from lit_collect.gaps import Gaps
from lit_collect.trajectories import split_trajectories

CHECKED = settings(
    max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


class Row(NamedTuple):
    """A row that proves itself."""

    id: int
    step: int
    done: bool
    first: bool
    valid: bool = True


def as_batch(lines: list[list[Row]], *, masked: bool, version: int = 0) -> TensorDict:
    """[N, T]."""
    column = lambda name: torch.tensor([[getattr(row, name) for row in line] for line in lines])  # noqa: E731
    ids, steps = column("id"), column("step")
    batch = TensorDict({"observation": torch.stack([ids, steps], -1)}, batch_size=ids.shape)
    batch["next", "observation"] = torch.stack([ids, steps + 1], -1)
    batch["picture"] = ids[..., None].expand(*ids.shape, 200).clone()  # a large row
    batch[TRAJ_IDS], batch[NEXT_DONE], batch[IS_INIT] = ids, column("done")[..., None], column("first")[..., None]
    batch[POLICY_VERSION] = torch.full_like(ids, version)
    if masked:
        batch[MASK] = column("valid")
        batch[TRAJ_IDS] = ids.where(batch[MASK], NO_TRAJECTORY)
    return batch


def play(copy: int, copies: int, lengths: list[int], holes: list[bool], *, between: bool) -> Iterator[Row]:
    """The rows of an env copy, without an end. Some are no transitions, perhaps only those between episodes."""
    number = made = 0
    while True:
        length = lengths[number % len(lengths)]
        name = number * copies + copy
        for step in range(length):
            while holes[made % len(holes)] and not (between and step):
                yield Row(name, 77, True, False, valid=False)
                made += 1
            yield Row(name, step, step == length - 1, step == 0)
            made += 1
        number += 1


class Script(NamedTuple):
    """What happens."""

    lengths: list[list[int]]  # for each copy, used in turn
    holes: list[bool]  # which rows are no transitions, used in turn; the last one is one
    workers: int  # copies are theirs in turn
    sizes: list[int]  # steps of the batches, used in turn
    turns: list[int]  # which worker's batch comes next
    per_batch: int
    padded: bool
    flat: bool  # batches come as one line of time, in which the copies alternate
    between: bool = False  # rows that are no transitions lie between episodes only, as those of real envs do

    @property
    def copies(self) -> int:
        return len(self.lengths)

    def batches(self) -> Iterator[tuple[int, TensorDict]]:
        """Workers and their batches."""
        games = [
            play(copy, self.copies, lengths, self.holes, between=self.between)
            for copy, lengths in enumerate(self.lengths)
        ]
        masked = any(self.holes)
        for number, turn in enumerate(self.turns):
            worker = turn % self.workers
            mine = games[worker :: self.workers]
            if mine:
                size = self.sizes[number % len(self.sizes)]
                batch = as_batch([[next(game) for _ in range(size)] for game in mine], masked=masked, version=number)
                yield worker, batch.transpose(0, 1).reshape(-1) if self.flat else batch


scripts = st.builds(
    Script,
    lengths=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=5),
    holes=st.lists(st.booleans(), max_size=5).map(lambda holes: [*holes, False]),
    workers=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    turns=st.lists(st.integers(0, 2), min_size=1, max_size=25),
    per_batch=st.integers(1, 4),
    padded=st.booleans(),
    flat=st.booleans(),
)


def pieces_of(batch: TensorDictBase) -> list[TensorDictBase]:
    """The trajectories of what an assembler gave, as its lengths tell them."""
    if batch.batch_dims == 2:
        assert (batch[LENGTHS] == batch[MASK].sum(1, keepdim=True)).all()
        assert batch.shape[1] == batch[LENGTHS].max()
        assert (batch[TRAJ_IDS][~batch[MASK]] == NO_TRAJECTORY).all()
        assert not batch["picture"][~batch[MASK]].any()
        return [line[: int(line[LENGTHS][0])] for line in batch]
    assert batch[MASK].all()
    found, start = [], 0
    while start < len(batch):
        found.append(batch[start : start + int(batch[LENGTHS][start])])
        start += len(found[-1])
    return found


def check_whole(rows: TensorDictBase) -> int:
    """An episode from its first row to its last; gives its id."""
    count = len(rows)
    assert rows[LENGTHS].tolist() == [count] * count
    assert rows[NEXT_DONE][:, 0].tolist() == [False] * (count - 1) + [True]
    assert rows[IS_INIT][:, 0].tolist() == [True] + [False] * (count - 1)
    (name,) = rows["observation"][:, 0].unique().tolist()
    assert rows["observation"][:, 1].tolist() == list(range(count))
    assert torch.equal(rows["next", "observation"], rows["observation"] + torch.tensor([0, 1]))
    assert (rows["picture"] == name).all()
    return name


def take_all(assembler: TrajectoryAssembler, count: int) -> list[TensorDictBase]:
    found = []
    while (batch := assembler.take()) is not None:
        pieces = pieces_of(batch)
        assert len(pieces) == count
        found += pieces
    return found


def rest_of(assembler: TrajectoryAssembler) -> list[TensorDictBase]:
    batch = assembler.rest()
    assert assembler.rest() is None
    return [] if batch is None else pieces_of(batch)


@CHECKED
@given(scripts)
def test_assembled_trajectories_are_whole_and_no_row_is_lost_or_doubled(script: Script):
    assembler = TrajectoryAssembler(script.per_batch, "padded" if script.padded else "cat", total_copies=script.copies)
    taken, ends, rows_given = [], [], 0
    for _, batch in script.batches():
        rows_given += count_frames(batch)
        assert assembler.add(batch) == 0
        step = torch.arange(batch.shape[-1]).expand(batch.shape)
        ended = batch[NEXT_DONE][..., 0] & (batch[TRAJ_IDS] != NO_TRAJECTORY)
        order = step[ended].argsort(stable=True)
        ends += batch["observation"][..., 0][ended][order].tolist()
        taken += take_all(assembler, script.per_batch)
        assert sum(map(len, taken)) + assembler.frames_held == rows_given
        assert assembler.frames_held == assembler.frames_complete + assembler.frames_open
    last = rest_of(assembler)
    assert len(last) < script.per_batch
    assert [check_whole(rows) for rows in taken + last] == ends  # in the order of completion
    dropped = assembler.drop_open()
    assert sum(map(len, taken + last)) + dropped == rows_given
    assert assembler.frames_held == assembler.num_complete == 0


@CHECKED
@given(scripts, st.lists(st.booleans(), min_size=1, max_size=7))
def test_assembled_trajectories_have_no_holes_when_batches_are_lost_on_the_way(script: Script, losses: list[bool]):
    script = script._replace(flat=False, between=True)
    assembler = TrajectoryAssembler(1, total_copies=script.copies)
    gaps = Gaps(total_copies=script.copies)
    taken, touched, ended, rows_given, dropped = [], set(), set(), 0, 0
    for number, (worker, batch) in enumerate(script.batches()):
        names = set(batch[TRAJ_IDS].unique().tolist())
        if losses[number % len(losses)]:
            gaps.lose(worker, batch[TRAJ_IDS], done=batch[NEXT_DONE][..., 0])
            touched |= names
            continue
        ended |= set(batch[TRAJ_IDS][batch[NEXT_DONE][..., 0]].tolist())
        gaps.mend(worker, batch[TRAJ_IDS])
        rows_given += count_frames(batch)
        dropped += assembler.add(batch)
        taken += take_all(assembler, 1)
        assert sum(map(len, taken)) + assembler.frames_held + dropped == rows_given
    assert {check_whole(rows) for rows in taken} == ended - touched - {NO_TRAJECTORY}
    assert dropped + assembler.drop_open() + sum(map(len, taken)) == rows_given


@CHECKED
@given(scripts)
def test_pieces_that_a_cut_made_are_contiguous_and_none_is_lost(script: Script):
    script = script._replace(flat=False, holes=[False])
    assembler = TrajectoryAssembler(script.per_batch, pieces=True)
    taken, rows_given = [], 0
    for number, (_, batch) in enumerate(script.batches()):
        batch[NEXT_DONE][..., -1, :] = True  # as set_truncated does, which goes on under a new id
        batch[TRAJ_IDS] += 1000 * number
        rows_given += batch.numel()
        assert assembler.add(batch) == 0
        assert assembler.frames_open == 0
        taken += take_all(assembler, script.per_batch)
    taken += rest_of(assembler)
    assert sum(map(len, taken)) == rows_given
    names = [int(rows[TRAJ_IDS][0]) for rows in taken]
    assert len(set(names)) == len(names)
    for rows in taken:
        steps = rows["observation"][:, 1]
        assert torch.equal(steps, steps[0] + torch.arange(len(rows)))
        assert rows[NEXT_DONE][:, 0].tolist() == [False] * (len(rows) - 1) + [True]


def split_slowly(batch: TensorDictBase) -> list[list[int]]:
    """The trajectories of a batch as positions of rows, found row by row."""
    found: list[list[int]] = []
    running: dict[int, list[int]] = {}
    mask = batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool)).reshape(-1)
    done = batch[NEXT_DONE].reshape(-1)
    for position, name in enumerate(batch[TRAJ_IDS].reshape(-1).tolist()):
        if name != NO_TRAJECTORY and mask[position]:
            if name not in running:
                running[name] = []
                found.append(running[name])
            running[name].append(position)
            if done[position]:
                del running[name]
    return found


shapes = st.sampled_from([(12,), (3, 4), (2, 3, 2), (1, 1), (5, 1)])


@CHECKED
@given(shapes, st.data())
def test_split_gives_the_rows_of_a_loop_over_them_in_every_layout(shape: tuple[int, ...], data: st.DataObject):
    size = torch.Size(shape).numel()
    draw = lambda values: torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)  # noqa: E731
    batch = TensorDict({"position": torch.arange(size).reshape(shape)}, batch_size=shape)
    batch[TRAJ_IDS], batch[NEXT_DONE] = draw(st.integers(-1, 3)), draw(st.booleans())[..., None]
    if data.draw(st.booleans()):
        batch[MASK] = draw(st.booleans())
    expected = split_slowly(batch)
    padded = split_trajectories(batch)
    assert [line["position"][line[MASK]].tolist() for line in padded] == expected
    assert [line[LENGTHS].unique().tolist() for line in padded] == [[len(rows)] for rows in expected]
    assert padded.shape == (len(expected), max(map(len, expected), default=0))
    joined = split_trajectories(batch, "cat")
    assert joined["position"].tolist() == [position for rows in expected for position in rows]
    for layout in ("nested", "jagged"):
        split = split_trajectories(batch, layout)
        filled = split.to_padded_tensor() if expected else split
        for key in ("position", NEXT_DONE, MASK):
            column = filled[key].to_padded_tensor(0) if filled[key].is_nested else filled[key]
            assert torch.equal(column, padded[key])
    for again in (split_trajectories(padded), split_trajectories(joined)):
        assert (again == padded).all()


@CHECKED
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_split_without_ids_cuts_where_ids_would_have(done: list[list[bool]]):
    lines, name = [], 0
    for line in done:
        ids = []
        for flag in line:
            ids.append(name)
            name += flag
        name += not line[-1]
        lines.append(ids)
    batch = TensorDict({"position": torch.arange(6 * len(done)).reshape(-1, 6)}, batch_size=[len(done), 6])
    batch[NEXT_DONE], batch[TRAJ_IDS] = torch.tensor(done)[..., None], torch.tensor(lines)
    by_id, by_done = split_trajectories(batch), split_trajectories(batch.exclude("collector"))
    assert torch.equal(by_id["position"], by_done["position"])
    assert torch.equal(by_id[MASK], by_done["mask"])


@CHECKED
@given(st.integers(1, 6), st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_split_of_slices_gives_each_slice_a_row_also_of_one_episode(length: int, starts: list[int]):
    steps = torch.tensor(starts)[:, None] + torch.arange(length)
    slices = TensorDict({"step": steps}, batch_size=steps.shape, names=[None, "time"])
    slices[TRAJ_IDS] = torch.zeros_like(steps)  # all are of one episode
    slices[NEXT_DONE] = (torch.arange(length) == length - 1).expand_as(steps)[..., None]
    split = split_trajectories(slices)
    assert torch.equal(split["step"], steps)
    assert torch.equal(split_trajectories(split)["step"], steps)


@pytest.mark.slow
@settings(CHECKED, max_examples=15)
@given(scripts)
def test_what_is_kept_is_bounded_by_what_is_needed(script: Script):
    script = script._replace(flat=False, turns=script.turns * 8)
    assembler = TrajectoryAssembler(1, total_copies=script.copies)
    largest = 0
    for _, batch in script.batches():
        largest = max(largest, batch.numel())
        assembler.add(batch)
        if count_frames(batch):  # else there was nothing to do
            assert assembler._store.rows <= 2 * assembler.frames_open + 4 * largest
        assert assembler._store.rows_needed == assembler.frames_open
        take_all(assembler, 1)
