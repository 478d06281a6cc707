"""Two ranks: each has data of its own, all of them one budget, and none waits for another that has stopped."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.behaviour.two_ranks import COPIES, RANKS

pytestmark = [pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240  # torch itself waits for half an hour for a rank that does not answer
RUNS = ("plain", "again", "masked", "masked-whole", "long", "evaluated", "resumed", "processes", "async", "lazy")
Run = list[dict[str, Any]]

in_every_run = pytest.mark.parametrize("name", RUNS)


@contextmanager
def loopback() -> Iterator[dict[str, str]]:
    """Environment variables of ranks that meet at a port of the loopback interface: torch's own would be open to all.

    As with torchrun, the place where they meet is not one of the ranks.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
            use_libuv=False,
        )
    yield {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    del store


def start(*command: Any) -> subprocess.CompletedProcess[str]:
    with loopback() as environment:
        return subprocess.run(
            [sys.executable, *map(str, command)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with what both ranks wrote down of each run, and what they said."""
    folder = tmp_path_factory.mktemp("ranks")
    process = start(ROOT / "tests" / "behaviour" / "two_ranks.py", folder)
    assert process.returncode == 0, process.stderr[-5000:]
    return folder, process.stdout


@pytest.fixture(scope="module")
def runs(ended: tuple[Path, str]) -> dict[str, Run]:
    return {name: [torch.load(ended[0] / f"{name}-{rank}.pt") for rank in range(RANKS)] for name in RUNS}


@pytest.fixture(scope="module")
def told(ended: tuple[Path, str]) -> str:
    return ended[1]


def episodes(run: Run) -> list[tuple[float, int]]:
    """Return and length of every episode that both ranks finished, counted row by row."""
    finished = []
    for notes in run:
        open_ones: dict[int, list[float]] = {}
        for batch in notes["batches"]:
            rows = zip(*[batch[key].T.flatten().tolist() for key in ("ids", "reward", "done", "mask")], strict=True)
            for number, reward, done, valid in rows:
                if valid:
                    open_ones.setdefault(number, []).append(reward)
                    if done:
                        rewards = open_ones.pop(number)
                        finished.append((sum(rewards), len(rewards)))
    return finished


def frames(notes: dict[str, Any]) -> int:
    return sum(int(batch["mask"].sum()) for batch in notes["batches"])


def ids(notes: dict[str, Any]) -> set[int]:
    return {number for batch in notes["batches"] for number in batch["ids"].unique().tolist()} - {-1}


# --- what holds in every run --------------------------------------------------------------------------------------


@in_every_run
def test_budget_is_one_for_all_ranks_and_met_to_the_frame(name, runs):
    before = 96 if name == "resumed" else 0  # frames of the run that it goes on from
    totals = {"plain": 92, "again": 92, "masked": 192, "masked-whole": 92, "long": 3200, "evaluated": 96,
              "resumed": 144, "processes": 140, "async": 140, "lazy": 32}  # fmt: skip
    assert [notes["frames_total"] for notes in runs[name]] == [totals[name]] * RANKS
    assert sum(frames(notes) for notes in runs[name]) == totals[name] - before
    assert [notes["progress"] for notes in runs[name]] == [1.0] * RANKS


@in_every_run
def test_ranks_train_on_equally_many_batches_and_minibatches(name, runs):
    first, second = runs[name]
    assert len(first["batches"]) == len(second["batches"])
    assert len(first["minibatches"]) == len(second["minibatches"]) > 0
    assert first["global_step"] == second["global_step"] > 0
    for notes in (first, second):
        assert all(batch["mask"].any() for batch in notes["batches"])
        assert notes["finite"]  # no minibatch was empty


@in_every_run
def test_parameters_are_equal_on_both_ranks(name, runs):
    first, second = (notes["parameters"] for notes in runs[name])
    assert torch.equal(first, second)
    assert first.isfinite().all()


@in_every_run
def test_ranks_see_data_of_their_own_and_no_id_twice(name, runs):
    first, second = runs[name]
    starts = [notes["batches"][0]["observation"][:, 0] for notes in (first, second)]
    assert not torch.isin(*[start.flatten() for start in starts]).any()
    assert ids(first).isdisjoint(ids(second))
    copies = [{number % (RANKS * COPIES) for number in ids(notes)} for notes in (first, second)]
    assert copies == [{0, 1}, {2, 3}]


@in_every_run
def test_metrics_are_those_of_all_ranks_and_equal_on_both(name, runs):
    first, second = (notes["latest"] for notes in runs[name])
    keys = [key for key in first if not key.startswith(("time/", "collect/fps"))]
    assert {key: first[key] for key in keys} == {key: second[key] for key in keys}
    finished = episodes(runs[name])
    if name == "resumed" or not finished:  # its window begins with episodes of the run before
        return
    returns, lengths = torch.tensor(finished, dtype=torch.float64).T
    assert first["episode/count_total"] == len(finished)
    assert first["episode/return_mean"] == pytest.approx(returns.mean().item())
    assert first["episode/return_std"] == pytest.approx(returns.std(correction=0).item())
    assert first["episode/return_min"] == returns.min()
    assert first["episode/return_max"] == returns.max()
    assert first["episode/length_mean"] == pytest.approx(lengths.mean().item())


@in_every_run
def test_no_rank_listens_on_a_public_interface(name, runs):
    assert [notes["public"] for notes in runs[name]] == [[]] * RANKS


# --- what is special about some of them ---------------------------------------------------------------------------


def test_same_run_twice_gives_the_same_parameters(runs):
    assert torch.equal(runs["plain"][0]["parameters"], runs["again"][0]["parameters"])


def test_last_batch_is_shorter_on_both_ranks(runs):
    for notes in runs["plain"]:
        assert [batch["mask"].numel() for batch in notes["batches"]] == [8] * 5 + [6]
        assert notes["minibatches"] == ([(3,), (3,), (2,)] * 10) + [(3,)] * 4


@pytest.mark.parametrize("name", ["masked", "masked-whole"])
def test_rank_that_gets_on_slowly_leaves_its_frames_to_the_other(name, runs):
    first, second = runs[name]
    assert frames(first) > 1.5 * frames(second)
    assert any(not batch["mask"].all() for batch in second["batches"])


def test_two_hundred_batches_of_episodes_of_any_length_end(runs):
    for notes in runs["long"]:
        assert len(notes["batches"]) == 200
    lengths = [length for _, length in episodes(runs["long"])]
    assert len(lengths) > 10
    assert max(lengths) > 100


def test_checkpoint_and_evaluation_are_of_all_ranks(runs):
    first, second = runs["evaluated"]
    assert first["best"] == second["best"]
    assert Path(first["best"][0]).is_file()
    assert [notes["rounds"] for notes in runs["evaluated"]] == [1 + 2] * RANKS  # the sanity check and two epochs
    assert first["latest"]["eval/episodes"] == 2 * RANKS
    assert first["callback_metrics"]["eval/return_mean"] == second["callback_metrics"]["eval/return_mean"]
    assert first["global_step"] == 4  # three batches in each epoch, two of them to a step


def test_resumed_run_uses_no_id_again_on_any_rank(runs):
    for before, after in zip(runs["evaluated"], runs["resumed"], strict=True):
        assert len(after["batches"]) == 3
        assert ids(before).isdisjoint(ids(after))


def test_lazy_layers_know_their_shapes_before_the_strategy_wraps_them(runs):
    assert len(runs["lazy"][0]["parameters"]) == 3 * 8 + 8 + 8 * 2 + 2


def test_config_trains_on_two_ranks(told):
    assert told.count("2,048/2,048 frames") == 1  # the first rank speaks for both
    assert "frames          2,048" in told


# --- the end ------------------------------------------------------------------------------------------------------


def test_example_of_fabric_runs_in_two_processes(monkeypatch):
    monkeypatch.setenv("LIT_COLLECT_EXAMPLE_FRAMES", "1024")
    ended = start(ROOT / "examples" / "fabric_loop.py", RANKS)
    assert ended.returncode == 0, ended.stderr
    assert "1,024 frames in 2 process(es)" in ended.stdout


@pytest.mark.parametrize("failing", range(RANKS))
def test_rank_that_fails_ends_the_other(failing, tmp_path):
    ended = start(ROOT / "tests" / "behaviour" / "two_ranks.py", tmp_path, failing)
    assert ended.returncode != 0
    assert "the floor gave way" in ended.stderr
    assert list(tmp_path.iterdir()) == []
