"""What envs and policies can do to their worker: each time it is told what happened, in time, and nothing is left."""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cloudpickle
import pytest

from lit_collect import CollectTimeoutError, WorkerDiedError, WorkerFailedError
from tests.behaviour.troubles import (
    COPIES,
    TROUBLED,
    TroubledEnv,
    TroubledPolicy,
    build,
    check_counters,
    check_trajectories,
    collect_all,
    compute_for_ever,
    crash,
    ignore_everything,
    kill,
    kill_itself,
    makers,
    note_and,
    open_files,
    pids,
    runs,
    seconds_since,
    stop_itself,
    wait_for_nobody,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nursery", "same_descriptors")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file, and pytest with it

SOON_S = 2.0  # from the death of a worker to the error
CLOSED_S = 8.0  # a worker that obeys nothing is given seconds to terminate, and is killed then


@pytest.fixture
def same_descriptors() -> Iterator[None]:
    """Fail a test after which this process has other open files than before."""
    before = open_files()
    yield
    if open_files() != before:
        gc.collect()  # a caught exception holds the frames that it went through
    assert open_files() == before


# --- exceptions -------------------------------------------------------------------------------------------------


class TwoArgumentsError(Exception):
    def __init__(self, door: str, key: str) -> None:
        super().__init__(f"{door} does not take {key}")


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("this must stay where it is")
        self.lock = threading.Lock()


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it cannot even be shown")


def take_the_wrong_key() -> None:
    raise TwoArgumentsError("this door", "that key")


def hold_a_lock() -> None:
    raise UnpicklableError


def say_nothing() -> None:
    raise SpeechlessError


ERRORS = [
    (take_the_wrong_key, "TwoArgumentsError: this door does not take that key", "raise TwoArgumentsError("),
    (hold_a_lock, "UnpicklableError: this must stay where it is", "raise UnpicklableError"),
    (say_nothing, "SpeechlessError", "raise SpeechlessError"),
]


@pytest.mark.parametrize(("trouble", "words", "line"), ERRORS, ids=["arguments", "unpicklable", "speechless"])
@pytest.mark.parametrize("where", ["init", "reset", "step"])
def test_env_that_raises_is_named_with_its_own_traceback(where, trouble, words, line):
    doing = {"init": "its constructor"}.get(where, where)
    with pytest.raises(WorkerFailedError) as caught, build(makers(where, trouble)) as collector:
        collector.collect()
    text = str(caught.value)
    assert text.startswith("worker 1, process ")
    for part in (f"env copy {TROUBLED} failed in {doing}: {words}", f"in {trouble.__name__}\n", line):
        assert part in text


def test_env_that_leaves_the_interpreter_is_named_with_its_own_traceback():
    with build(makers("step", partial(sys.exit, "enough"))) as collector:
        with pytest.raises(WorkerFailedError, match=r"worker 1, process \d+ \(env copies 4 to 7\).*SystemExit: enough"):
            collector.collect()
        assert collector.collect()["is_init"][:, 0].all()


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize(("where", "at"), [("step", 7), ("reset", 2)])
def test_collector_goes_on_with_new_episodes_after_an_env_has_raised(where, at, sync):
    with build(makers(where, take_the_wrong_key, at), total_frames=160, sync=sync) as collector:
        batches, errors = collect_all(collector)
        assert len(errors) == 1
        assert sum(batch.numel() for batch in batches) == 160
        check_trajectories(batches)
        check_counters(collector)
        assert collector.statistics()["frames_yielded"] == 160
        assert collector.statistics()["restarts"] == 0


def note_and_raise(path: Path) -> None:
    path.touch()
    take_the_wrong_key()


def test_env_that_raises_in_close_is_told_when_everything_is_closed(tmp_path):
    envs = [partial(TroubledEnv, index, "close", (tmp_path / str(index)).touch) for index in range(COPIES)]
    envs[TROUBLED] = partial(TroubledEnv, TROUBLED, "close", partial(note_and_raise, tmp_path / str(TROUBLED)))
    collector = build(envs)
    collector.collect()
    workers = pids(collector)
    with pytest.raises(WorkerFailedError) as caught:
        collector.shutdown()
    assert not any(map(runs, workers))
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(index) for index in range(COPIES)]
    text = str(caught.value)
    for part in ("worker 1, process ", "env copy 5 failed in close: TwoArgumentsError: this door", "in note_and_raise"):
        assert part in text
    collector.shutdown()
    assert collector.statistics()["workers_alive"] == 0


def misjudge() -> None:
    raise ValueError("the policy has no idea")


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        (
            misjudge,
            ValueError,
            r"the policy has no idea \(in worker 1, process \d+ \(env copies 4 to 7\), collecting 2",
        ),
        (
            take_the_wrong_key,
            WorkerFailedError,
            r"worker 1, process \d+ .*, collecting 2 .*TwoArgumentsError: this door",
        ),
        (say_nothing, WorkerFailedError, r"worker 1, process \d+ .*, collecting 2 steps: SpeechlessError"),
    ],
    ids=["builtin", "own", "speechless"],
)
def test_policy_that_raises_is_named_with_its_own_traceback(trouble, kind, words):
    envs = [partial(TroubledEnv, index) for index in range(COPIES)]
    with build(envs, TroubledPolicy(trouble), total_frames=64) as collector:
        batches = [collector.collect()]
        with pytest.raises(kind, match=words) as caught:
            collector.collect()
        shown = f"{caught.value}{caught.value.__cause__}"
        for part in (f"in {trouble.__name__}\n", "in forward\n", "raise "):
            assert part in shown
        batches += list(collector)
        check_trajectories(batches)
        check_counters(collector)


# --- ends -------------------------------------------------------------------------------------------------------


ENDS = [
    (partial(os._exit, 3), "it left with exit code 3"),
    (kill_itself, r"it was killed by SIGKILL \(exit code -9\)"),
    (crash, r"it was killed by SIGSEGV \(exit code -11\)"),
]


@pytest.mark.parametrize(("trouble", "how"), ENDS, ids=["exit", "kill", "crash"])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_worker_that_dies_in_a_step_is_told_at_once(sync, trouble, how, tmp_path):
    note = tmp_path / "died"
    steps = 2 if sync else 4
    words = rf"worker 1, process \d+ \(env copies 4 to 7\) died while collecting {steps} steps: {how}"
    with build(makers("step", partial(note_and, note, trouble), at=10), total_frames=1600, sync=sync) as collector:
        with pytest.raises(WorkerDiedError, match=words):
            list(collector)
        assert seconds_since(note) < SOON_S
        for ask in (collector.collect, collector.reset, collector.rollout):
            with pytest.raises(WorkerDiedError, match=words + ".*this collector cannot go on; build a new one"):
                ask()
        check_counters(collector)
        assert collector.statistics()["workers_alive"] == 1
        workers = pids(collector)
    assert not any(map(runs, workers))


def test_worker_that_dies_in_its_constructor_is_told_at_once(tmp_path):
    note = tmp_path / "died"
    words = r"worker 1, process \d+ died while starting: it left with exit code 3"
    with pytest.raises(WorkerDiedError, match=words):
        build(makers("init", partial(note_and, note, partial(os._exit, 3))), max_restarts=3)
    assert seconds_since(note) < SOON_S


def test_worker_that_dies_in_close_keeps_nothing_open(tmp_path):
    collector = build(makers("close", kill_itself))
    workers = pids(collector)
    collector.shutdown()
    assert not any(map(runs, workers))


@pytest.mark.parametrize("ask", ["collect", "reset", "cascade_execute"])
def test_worker_that_is_killed_while_idle_is_told_by_the_next_call(ask):
    with build(makers("", int)) as collector:
        collector.collect()
        kill(pids(collector)[1])
        with pytest.raises(WorkerDiedError, match=r"worker 1, .* died while idle: it was killed by SIGKILL"):
            getattr(collector, ask)(*(["env.num_envs"] if ask == "cascade_execute" else []))


# --- hanging ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "state"),
    [(stop_itself, "stopped"), (wait_for_nobody, "asleep|running"), (compute_for_ever, "running")],
    ids=["stopped", "waiting", "computing"],
)
def test_worker_that_hangs_is_told_with_its_state_and_its_stack(trouble, state):
    words = (
        r"worker 1, process \d+ \(env copies 4 to 7\) did not answer within batch_timeout_s=0.5 s "
        rf"while collecting 2 steps; the process is ({state}), in:\n"
    )
    with build(makers("step", trouble, at=3), shutdown_timeout_s=0.2) as collector:
        collector.collect()
        collector.workers.backend.batch_timeout_s = 0.5
        with pytest.raises(CollectTimeoutError, match=words) as caught:
            collector.collect()
        assert f"in {trouble.__name__}\n" in str(caught.value)
        workers = pids(collector)
        began = time.monotonic()
    assert time.monotonic() - began < CLOSED_S
    assert not any(map(runs, workers))


def test_worker_that_was_only_stopped_goes_on_after_the_error():
    with build(makers("step", stop_itself, at=3), total_frames=160) as collector:
        batches = [collector.collect()]
        collector.workers.backend.batch_timeout_s = 0.5
        with pytest.raises(CollectTimeoutError):
            collector.collect()
        collector.workers.backend.batch_timeout_s = 60.0
        batches += list(collector)
        assert sum(batch.numel() for batch in batches) == 160
        check_trajectories(batches)
        check_counters(collector)


@pytest.mark.parametrize("where", ["init", "step", "close"])
def test_worker_that_obeys_nothing_is_killed(where):
    envs = makers(where, ignore_everything)
    began = time.monotonic()
    if where == "init":
        envs = [envs[TROUBLED]] * COPIES
        with pytest.raises(CollectTimeoutError, match=r"(?s)worker 0, .*was not ready within .*in ignore_everything\n"):
            build(envs, batch_timeout_s=2.0, shutdown_timeout_s=0.2)
    else:
        with build(envs, shutdown_timeout_s=0.2) as collector:
            workers = pids(collector)
            if where == "step":
                collector.workers.backend.batch_timeout_s = 0.5
                with pytest.raises(CollectTimeoutError, match="in ignore_everything\n"):
                    collector.collect()
        assert not any(map(runs, workers))
    assert time.monotonic() - began < CLOSED_S
