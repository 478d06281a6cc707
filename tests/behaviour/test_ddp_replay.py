"""Two ranks that learn from replay buffers of their own, or from whole trajectories: they keep step to the end."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.behaviour.test_ddp import ROOT, frames, start
from tests.behaviour.two_ranks import RANKS
from tests.behaviour.two_ranks_replay import CAPACITY, KEPT_AT, LATE, LEAST, SLICE

pytestmark = [pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(300)]

REPLAYED = ("rows", "late", "masked", "whole-replay", "resumed-memory", "resumed-mapped")
WHOLE = ("whole", "whole-replay", "resumed-whole")
BROKEN = ("broken-memory", "broken-mapped", "broken-whole")
RUNS = tuple(dict.fromkeys((*REPLAYED, *WHOLE, *BROKEN)))
Run = list[dict[str, Any]]

in_every_run = pytest.mark.parametrize("name", RUNS)
in_every_replay = pytest.mark.parametrize("name", REPLAYED)
in_both_storages = pytest.mark.parametrize("storage", ["memory", "mapped"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks wrote down what they saw in each run."""
    path = tmp_path_factory.mktemp("ranks")
    ended = start(ROOT / "tests" / "behaviour" / "two_ranks_replay.py", path)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    return {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(RANKS)] for name in RUNS}


def ids(pieces: list[dict[str, Any]]) -> set[int]:
    return {number for piece in pieces for number in piece["ids"].unique().tolist()} - {-1}


def seen(pieces: list[dict[str, Any]]) -> torch.Tensor:
    return torch.cat([piece["observation"].flatten() for piece in pieces])


# --- what holds in every run --------------------------------------------------------------------------------------


@in_every_run
def test_ranks_take_equally_many_batches_and_samples(name, runs):
    first, second = runs[name]
    assert len(first["batches"]) == len(second["batches"]) > 0
    assert [sample["at"] for sample in first["samples"]] == [sample["at"] for sample in second["samples"]]
    assert first["global_step"] == second["global_step"] > 0
    for notes in (first, second):
        assert notes["samples"]
        assert notes["finite"]


@in_every_run
def test_parameters_and_metrics_are_equal_on_both_ranks(name, runs):
    first, second = runs[name]
    assert torch.equal(first["parameters"], second["parameters"])
    keys = [key for key in first["latest"] if not key.startswith(("time/", "collect/fps"))]
    assert {key: first["latest"][key] for key in keys} == {key: second["latest"][key] for key in keys}


@in_every_run
def test_no_trajectory_id_is_used_on_both_ranks(name, runs):
    first, second = runs[name]
    assert ids(first["batches"]).isdisjoint(ids(second["batches"]))


# --- replay buffers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "total"), [("rows", 188), ("late", 192), ("masked", 192)])
def test_budget_is_one_for_all_ranks_and_met_to_the_frame(name, total, runs):
    assert [notes["frames_total"] for notes in runs[name]] == [total] * RANKS
    assert sum(frames(notes) for notes in runs[name]) == total
    assert [notes["progress"] for notes in runs[name]] == [1.0] * RANKS


@pytest.mark.parametrize("name", ["rows", "late", "masked", "whole-replay"])
def test_each_rank_writes_and_samples_what_it_collected_itself(name, runs):
    for notes in runs[name]:
        assert notes["write_count"] == frames(notes)
        assert torch.isin(seen(notes["samples"]), seen(notes["batches"])).all()
        assert ids(notes["samples"]) <= ids(notes["batches"])


@in_every_replay
def test_each_batch_gives_its_two_samples_once_there_are_any(name, runs):
    for notes in runs[name]:
        at = [sample["at"] for sample in notes["samples"]]
        begun = 1 if name.startswith("resumed") and at[0] != at[1] else 0  # one was left of the batch before
        assert at[begun::2] == at[begun + 1 :: 2]
        assert at[-1] == notes["frames_total"]


@pytest.mark.parametrize("name", ["rows", "masked", "whole-replay"])
def test_ranks_wait_for_the_one_that_has_too_few_rows(name, runs):
    rows = [[sample["rows"] for sample in notes["samples"]] for notes in runs[name]]
    assert min(rows[0] + rows[1]) >= LEAST
    if name == "masked":
        assert rows[0][0] > 1.5 * rows[1][0]
    assert max(rows[0] + rows[1]) <= CAPACITY


def test_ranks_wait_for_the_one_that_has_no_slice_yet(runs):
    first, second = runs["late"]
    assert first["batches"][0]["ids"][0].unique().numel() == 1  # one slice for sure in the very first batch
    steps_until_a_slice = LATE + SLICE
    assert first["samples"][0]["at"] >= 2 * 2 * steps_until_a_slice
    assert len(first["samples"]) == 2 * (12 - 3)
    for sample in first["samples"] + second["samples"]:
        assert sample["ids"].shape == (2, SLICE)
        assert (sample["ids"] == sample["ids"][:, :1]).all()
        assert torch.equal(sample["observation"][:, 1:], sample["next"][:, :-1])


def test_mapped_storage_has_a_folder_for_each_rank(folder):
    assert sorted(path.name for path in (folder / "storage").iterdir()) == [f"rank_{rank}" for rank in range(RANKS)]


# --- whole trajectories -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_ranks_stop_together_once_one_of_them_has_no_whole_trajectory_left(name, runs):
    first, second = runs[name]
    assert [notes["frames_left"] for notes in runs[name]] == [0] * RANKS
    for notes in (first, second):
        sizes = [len(ids([batch])) for batch in notes["batches"]]
        assert set(sizes[:-1]) == {3}
        assert 1 <= sizes[-1] <= 3
    assert frames(first) < frames(second)


@pytest.mark.parametrize("name", ["whole", "whole-replay"])
def test_frames_of_whole_trajectories_add_up(name, runs):
    first, second = runs[name]
    assert first["frames_total"] == second["frames_total"] == frames(first) + frames(second) <= 320
    for notes in (first, second):
        counts = notes["statistics"]
        assert counts["frames_yielded"] == frames(notes)
        assert counts["frames_stepped"] == counts["frames_yielded"] + counts["frames_dropped"] <= 160
    lost = sum(notes["statistics"]["frames_dropped"] for notes in runs[name])
    assert [notes["progress"] for notes in runs[name]] == [(first["frames_total"] + lost) / 320] * RANKS


# --- resuming -----------------------------------------------------------------------------------------------------


@in_both_storages
def test_resumed_ranks_meet_the_same_budget(storage, runs):
    before, after = runs[f"broken-{storage}"], runs[f"resumed-{storage}"]
    assert [notes["frames_total"] for notes in after] == [192] * RANKS
    assert [notes["progress"] for notes in after] == [1.0] * RANKS
    already = before[0]["samples"][KEPT_AT - 1]["at"]
    assert sum(frames(notes) for notes in after) == 192 - already
    assert [notes["global_step"] for notes in after] == [KEPT_AT + len(notes["samples"]) for notes in after]


@in_both_storages
def test_first_rank_goes_on_with_the_rows_that_were_saved(storage, runs):
    before, after = runs[f"broken-{storage}"][0], runs[f"resumed-{storage}"][0]
    assert after["begins_with"] == before["kept"] != []
    assert len(before["kept"]) < before["write_count"]  # it had gone on writing
    assert after["write_count"] == len(before["kept"]) + frames(after)


def test_other_ranks_go_on_with_the_first_ranks_rows_but_draw_their_own(runs):
    first, second = runs["resumed-memory"]
    assert second["begins_with"] == first["begins_with"]
    assert second["write_count"] == len(first["begins_with"]) + frames(second)
    assert not torch.equal(first["samples"][0]["observation"], second["samples"][0]["observation"])


def test_other_ranks_go_on_with_their_own_files(runs):
    before, after = runs["broken-mapped"][1], runs["resumed-mapped"][1]
    assert after["begins_with"] == before["kept"] != []
    assert len(before["kept"]) < before["write_count"]
    assert after["write_count"] == len(before["kept"]) + frames(after)


def test_resumed_whole_trajectories_keep_to_the_budget_of_all(runs):
    before, after = runs["broken-whole"], runs["resumed-whole"]
    total = sum(frames(notes) for notes in before + after)
    assert [notes["frames_total"] for notes in after] == [total] * RANKS
    left = 320 - sum(frames(notes) for notes in before)
    for old, new in zip(before, after, strict=True):
        assert ids(old["batches"]).isdisjoint(ids(new["batches"]))
        assert 0 < frames(new) <= left // 2  # whatever either of them had done before
    assert total / 320 <= after[0]["progress"] == after[1]["progress"] <= 1.0
