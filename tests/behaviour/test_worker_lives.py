"""Workers come and go again and again, with children of their own, and leave the trainer as it was."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lit_collect import Collector, DirectBackend, ProcessBackend, WorkerDiedError, WorkerFailedError
from lit_collect.messages import Execute
from lit_collect.testing import ConstantPolicy, CountingEnv
from tests.behaviour.troubles import (
    COPIES,
    TROUBLED,
    TroubledEnv,
    build,
    check_counters,
    check_trajectories,
    eventually,
    kill,
    kill_itself,
    makers,
    open_files,
    pids,
    runs,
)

pytestmark = pytest.mark.processes
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file, and pytest with it
with_nursery = pytest.mark.usefixtures("nursery")

SOON_S = 5.0


def surroundings() -> dict[str, Any]:
    return {
        "files": open_files(),
        "threads": threading.active_count(),
        "memory": sorted(os.listdir("/dev/shm")),
        "torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup": signal.set_wakeup_fd(-1),
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "main": sys.modules["__main__"],
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class WideEnv(CountingEnv):
    """Its rows are large, so that a batch that is kept shows."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (1 << 12,), np.float32)

    def _observe(self) -> np.ndarray:
        return np.zeros(1 << 12, np.float32)


@with_nursery
def test_collectors_come_and_go_without_a_trace():
    policy = ConstantPolicy(0.0, num_actions=2)
    torch.set_num_threads(2)
    try:
        for cycle in range(30):
            backend = ProcessBackend(2, sync=cycle % 2 == 0)
            with Collector(WideEnv, policy, num_envs=2, frames_per_batch=64, backend=backend) as collector:
                collector.collect()
                collector.update_policy_weights_(policy)
                collector.collect()
                assert torch.get_num_threads() == 2
            del collector
            if cycle == 3:
                gc.collect()
                before, bytes_before = surroundings(), resident_bytes()
        gc.collect()
        assert surroundings() == before
        assert resident_bytes() - bytes_before < 50e6  # a batch has 4 MB
    finally:
        torch.set_num_threads(1)


# --- children of envs -------------------------------------------------------------------------------------------


class ParentEnv(CountingEnv):
    """Has a child, and may forget to end it."""

    def __init__(self, start: Callable[[], Any], tidy: bool) -> None:
        super().__init__()
        self.child, self._tidy = start(), tidy

    def close(self) -> None:
        if self._tidy:
            self.child.kill()
            self.child.join() if hasattr(self.child, "join") else self.child.wait()


@with_nursery
def test_closed_collector_keeps_no_memory_of_its_workers():
    before = open_files()
    envs = makers("step", partial(time.sleep, 1.0))  # worker 1 is at its first batch to the end
    with build(envs, ConstantPolicy(0.0, num_actions=2), sync=False) as collector:
        for _ in range(2):
            collector.collect()
            quick = collector.workers.members[0]
            collector.workers.ask(quick, Execute(path="env.num_envs"))  # its two next batches come before the answer
        assert collector.statistics()["frames_pending"] == 32
    assert open_files() == before
    assert collector.statistics()["frames_pending"] == 0
    check_counters(collector)


def start_a_program() -> subprocess.Popen:
    return subprocess.Popen(["sleep", "600"])


def start_a_process(method: str) -> multiprocessing.Process:
    process = multiprocessing.get_context(method).Process(target=signal.pause)
    process.start()
    return process


STARTS = {
    "program": start_a_program,
    "fork": partial(start_a_process, "fork"),
    "spawn": partial(start_a_process, "spawn"),
}


@with_nursery
@pytest.mark.parametrize("end", ["tidy", "untidy", "kill"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_children_of_envs_are_gone_with_their_worker(start, end):
    with build(partial(ParentEnv, start, end == "tidy"), frames=4) as collector:
        assert collector.collect().shape == (2, 2)
        children = collector.cascade_execute("env.envs[0].child.pid")
        assert all(map(runs, children))
        if end == "kill":
            kill(pids(collector)[0])
            assert eventually(lambda: not runs(children[0]), SOON_S)
            assert runs(children[1])
    assert eventually(lambda: not any(map(runs, children)), SOON_S)


def start_a_server() -> subprocess.Popen:
    return subprocess.Popen(["sleep", "600"], start_new_session=True)


@with_nursery
@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="the system does not tell")
@pytest.mark.parametrize("end", ["untidy", "kill"])
def test_children_in_sessions_of_their_own_are_gone_with_the_last_worker(end):
    with build(partial(ParentEnv, start_a_server, False), frames=4) as collector:
        assert collector.collect().shape == (2, 2)
        children = collector.cascade_execute("env.envs[0].child.pid")
        if end == "kill":
            kill(pids(collector)[0])
        assert all(map(runs, children))
    assert eventually(lambda: not any(map(runs, children)), SOON_S)


# --- two exceptions ---------------------------------------------------------------------------------------------


def fail(words: str) -> None:
    raise LookupError(words)


def failing_to_close() -> list[Callable[[], TroubledEnv]]:
    return [partial(TroubledEnv, index, "close", partial(fail, "does not close")) for index in range(COPIES)]


@with_nursery
@pytest.mark.parametrize("backend", [DirectBackend(), ProcessBackend(2)], ids=["direct", "process"])
def test_error_in_a_with_block_is_seen_although_closing_fails_too(backend):
    with (
        pytest.warns(UserWarning, match="closing the envs failed too: .*env copy 0 failed in close: LookupError"),
        pytest.raises(ZeroDivisionError),
        Collector(failing_to_close(), frames_per_batch=8, backend=backend),
    ):
        1 / 0  # noqa: B018


@with_nursery
def test_error_of_a_constructor_is_seen_although_closing_fails_too():
    envs = failing_to_close()
    envs[TROUBLED] = partial(TroubledEnv, TROUBLED, "init", partial(fail, "does not open"))
    with (
        pytest.warns(UserWarning, match="closing the envs failed too: .*env copy 0 failed in close: LookupError"),
        pytest.raises(WorkerFailedError, match="env copy 5 failed in its constructor: LookupError: does not open"),
    ):
        build(envs)


@with_nursery
def test_death_of_a_worker_is_seen_although_closing_fails_too():
    envs = failing_to_close()
    envs[TROUBLED] = partial(TroubledEnv, TROUBLED, "step", kill_itself)
    with (
        pytest.warns(UserWarning, match="closing the envs failed too: .*env copy 0 failed in close: LookupError"),
        pytest.raises(WorkerDiedError, match=r"worker 1, .*SIGKILL"),
        build(envs) as collector,
    ):
        collector.collect()


@with_nursery
def test_closing_twice_says_it_once():
    collector = build(makers("close", partial(fail, "does not close")))
    with pytest.raises(WorkerFailedError, match=r"worker 1, .*env copy 5 failed in close: LookupError"):
        collector.shutdown()
    collector.shutdown()
    collector.async_shutdown()


# --- the process that starts workers ----------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_are_replaced_with_the_process_that_starts_them():
    options = {"num_threads": 3, "max_restarts": 2, "shutdown_timeout_s": 30.0}  # no other test has three threads
    collector = Collector(makers(), frames_per_batch=16, backend=ProcessBackend(2, **options), seed=1)
    with collector:
        batches = [collector.collect()]
        first = pids(collector)
        kill(parent(first[0]))
        assert eventually(lambda: not any(map(runs, first)), SOON_S)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            batches += [collector.collect() for _ in range(3)]
        assert {str(one.message).split(",")[0] for one in told} == {"worker 0", "worker 1"}
        check_trajectories(batches)
        check_counters(collector)
        assert collector.statistics()["restarts"] == 2
        kill(parent(pids(collector)[0]))
        with pytest.raises(WorkerDiedError, match=r"worker \d, .* died while .*: it was killed by SIGKILL"):
            collector.collect()
        workers = pids(collector)
    assert not any(map(runs, workers))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
