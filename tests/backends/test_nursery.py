"""Worker processes start, end and vanish as they should: with real processes, and nothing left of them."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lit_collect.backends._nursery import Nursery, lease, release
from lit_collect.backends._wire import Wire
from lit_collect.errors import CollectTimeoutError, WorkerDiedError

pytestmark = pytest.mark.processes

PATIENCE_S = 60.0
SOON_S = 5.0
METHODS = ("forkserver", "spawn")

WORKERS = '''
"""What the workers of these tests do; they are given a socket."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from lit_collect.backends._wire import Wire


def leave(sock): pass
def exit_with_3(sock): raise SystemExit(3)
def exit_with_words(sock): sys.exit("enough of this")
def fail(sock): raise ArithmeticError("raised by a worker")
def kill_itself(sock): os.kill(os.getpid(), signal.SIGKILL)


def wait_for_end(sock):
    Wire(sock).send("here", 10)
    sock.setblocking(True)
    sock.recv(1)


def sleep(sock):
    Wire(sock).send(os.getpid(), 10)
    time.sleep(600)


def compute(sock):
    Wire(sock).send(os.getpid(), 10)
    sum(range(10**15))  # native code, which looks for no signal


def sleep_with_a_child(sock):
    Wire(sock).send(subprocess.Popen(["sleep", "600"]).pid, 10)
    time.sleep(600)


def leave_a_child(sock):
    child = subprocess.Popen(["sleep", "600"])
    Wire(sock).send(child.pid, 10)


def describe(sock):
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    descriptors = [one for one in listed if Path(f"/proc/self/fd/{one}").exists()]  # without the one of listing
    Wire(sock).send(
        {
            "folder": os.getcwd(),
            "variables": dict(os.environ),
            "path": list(sys.path),
            "arguments": sys.argv,
            "stdin": os.readlink("/proc/self/fd/0"),
            "descriptors": [one for one in descriptors if one > 2 and one != sock.fileno()],
            "inheritable": os.get_inheritable(sock.fileno()),
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "ignored": [int(s) for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN],
            "handled": [int(s) for s in signal.valid_signals() if callable(signal.getsignal(s))],
            "leads": os.getpid() == os.getsid(0) == os.getpgrp(),
            "parent": os.getppid(),
            "threads": len(os.listdir("/proc/self/task")),
            "main": getattr(sys.modules["__main__"], "__file__", None),
        },
        10,
    )
'''


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module above, on the trainer's search path."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "nursery_workers.py").write_text(WORKERS)
    return folder


@pytest.fixture(scope="module")
def shared_nursery() -> Iterator[Nursery]:
    nursery = Nursery(num_threads=1)
    # warm, so that no test depends on being the first
    ours, theirs = socket.socketpair()
    with ours:
        pid = nursery.start("builtins:id", theirs, method="forkserver", timeout_s=PATIENCE_S)
        assert nursery.exit_status(pid, PATIENCE_S) == 0
    yield nursery
    nursery.close(timeout_s=SOON_S)


@pytest.fixture
def nursery(shared_nursery: Nursery, workers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    monkeypatch.syspath_prepend(workers)
    yield shared_nursery
    assert eventually(lambda: children(shared_nursery.pid) == [])


@pytest.fixture
def own_nursery(workers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    """One that may be killed."""
    monkeypatch.syspath_prepend(workers)
    nursery = Nursery(num_threads=1)
    yield nursery
    nursery.close(timeout_s=SOON_S)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def runs(pid: int) -> bool:
    """Whether a process exists that is more than an entry in its parent's books."""
    return state(pid) not in ("Z", "X", "gone")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def eventually(condition: Callable[[], bool], within_s: float = SOON_S) -> bool:
    deadline = time.monotonic() + within_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return met


def start(nursery: Nursery, function: str, method: str = "forkserver") -> tuple[int, Wire]:
    wire, theirs = Wire.pair()
    try:
        pid = nursery.start(f"nursery_workers:{function}", theirs, method=method, timeout_s=PATIENCE_S)
    except BaseException:
        wire.close()
        raise
    assert theirs.fileno() == -1
    return pid, wire


@contextmanager
def started(nursery: Nursery, function: str, method: str = "forkserver") -> Iterator[tuple[int, Any]]:
    """A worker and the first thing it says; it is killed afterwards."""
    pid, wire = start(nursery, function, method)
    try:
        yield pid, wire.receive(PATIENCE_S)
    finally:
        nursery.kill(pid, signal.SIGKILL)
        nursery.exit_status(pid, SOON_S)
        wire.close()


@pytest.mark.parametrize(
    ("function", "status"),
    [("leave", 0), ("exit_with_3", 3), ("exit_with_words", 1), ("fail", 1), ("kill_itself", -signal.SIGKILL)],
)
def test_exit_status_when_a_worker_has_ended_says_how(nursery: Nursery, function: str, status: int) -> None:
    pid, wire = start(nursery, function)
    assert nursery.exit_status(pid, PATIENCE_S) == status
    assert nursery.exit_status(pid) == status
    with pytest.raises(EOFError):
        wire.receive(PATIENCE_S)
    wire.close()


def test_exit_status_while_a_worker_runs_is_none(nursery: Nursery) -> None:
    pid, wire = start(nursery, "wait_for_end")
    assert wire.receive(PATIENCE_S) == "here"
    assert nursery.exit_status(pid, 0.02) is None
    wire.close()  # which the worker waits for
    assert nursery.exit_status(pid, PATIENCE_S) == 0


def test_reports_make_the_nursery_readable_and_are_collected_without_waiting(nursery: Nursery) -> None:
    pid, wire = start(nursery, "leave")
    poll = select.poll()
    poll.register(nursery.fileno(), select.POLLIN)
    assert poll.poll(PATIENCE_S * 1000) != []
    nursery.collect_reports()
    assert poll.poll(0) == []
    assert nursery.exit_status(pid) == 0
    wire.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_kill_sends_the_signal(nursery: Nursery, number: signal.Signals) -> None:
    with started(nursery, "sleep") as (pid, said):
        assert said == pid
        nursery.kill(pid, number)
        assert nursery.exit_status(pid, SOON_S) == -number
        nursery.kill(pid, number)  # nobody is left


def test_kill_right_after_the_start_is_not_lost(nursery: Nursery) -> None:
    for _ in range(5):
        pid, wire = start(nursery, "sleep")
        nursery.kill(pid, signal.SIGTERM)
        assert nursery.exit_status(pid, SOON_S) == -signal.SIGTERM
        wire.close()


def test_interrupting_signal_does_not_touch_a_worker(nursery: Nursery) -> None:
    with started(nursery, "sleep") as (pid, _):
        nursery.kill(pid, signal.SIGINT)
        assert nursery.exit_status(pid, 0.1) is None


def test_kill_ends_what_the_worker_has_started(nursery: Nursery) -> None:
    with started(nursery, "sleep_with_a_child") as (pid, child):
        assert runs(child)
        nursery.kill(pid, signal.SIGKILL)
        assert nursery.exit_status(pid, SOON_S) == -signal.SIGKILL
        assert eventually(lambda: not runs(child))


def test_worker_that_ends_leaves_no_child_behind(nursery: Nursery) -> None:
    with started(nursery, "leave_a_child") as (pid, child):
        assert nursery.exit_status(pid, SOON_S) == 0
        assert eventually(lambda: not runs(child))


@pytest.mark.parametrize("method", METHODS)
def test_worker_lives_in_the_surroundings_of_the_trainer(
    nursery: Nursery, method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SET_AFTER_THE_NURSERY", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("HOME", raising=False)
    before = dict(os.environ)
    with started(nursery, "describe", method) as (_, seen):
        pass
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
    assert dict(os.environ) == before
    assert seen.pop("variables").items() >= {**before, **threads}.items()
    assert [entry for entry in sys.path if entry not in seen["path"]] == []
    assert seen.pop("path")[: len(sys.path)] == sys.path
    assert seen == {
        "folder": str(tmp_path),
        "arguments": ["-c"],
        "stdin": "/dev/null",
        "descriptors": [],
        "inheritable": False,
        "blocked": 0,
        "ignored": sorted([signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ]),
        "handled": [],
        "leads": True,
        "parent": nursery.pid,
        "threads": 1,
        "main": None,
    }


def test_twenty_workers_one_after_the_other_leave_no_trace(nursery: Nursery) -> None:
    def traces() -> tuple[int, ...]:
        places = [f"/proc/{pid}/{kind}" for pid in (os.getpid(), nursery.pid) for kind in ("fd", "task")]
        return tuple(len(os.listdir(place)) for place in places)

    nursery.collect_reports()
    before = traces()
    for _ in range(20):
        pid, wire = start(nursery, "leave")
        assert nursery.exit_status(pid, PATIENCE_S) == 0
        wire.close()
    assert eventually(lambda: traces() == before), f"{traces()} was {before}"


def test_start_that_takes_too_long_says_so_and_starts_nothing_later(nursery: Nursery) -> None:
    wire, theirs = Wire.pair()
    os.kill(nursery.pid, signal.SIGSTOP)
    try:
        with pytest.raises(CollectTimeoutError, match=r"did not start within 0\.05 s.*raise batch_timeout_s"):
            nursery.start("nursery_workers:sleep", theirs, method="forkserver", timeout_s=0.05)
    finally:
        os.kill(nursery.pid, signal.SIGCONT)
    with pytest.raises(EOFError):
        wire.receive(SOON_S)  # nobody has the other end
    wire.close()
    with started(nursery, "sleep") as (pid, said):
        assert children(nursery.pid) == [pid] == [said]


def test_worker_that_starts_too_late_is_ended(nursery: Nursery) -> None:
    for timeout_s in (0.0005, 0.001, 0.002, 0.004):
        wire, theirs = Wire.pair()
        try:
            pid = nursery.start("nursery_workers:sleep", theirs, method="forkserver", timeout_s=timeout_s)
        except CollectTimeoutError:
            pass
        else:
            nursery.kill(pid, signal.SIGKILL)
        wire.close()

    def none_left() -> bool:
        nursery.collect_reports()
        return children(nursery.pid) == []

    assert eventually(none_left)


def test_interruption_while_waiting_leaves_the_nursery_usable(nursery: Nursery) -> None:
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
    with started(nursery, "sleep") as (pid, _):
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            nursery.exit_status(pid, PATIENCE_S)
        timer.join()
        nursery.kill(pid, signal.SIGKILL)
        assert nursery.exit_status(pid, SOON_S) == -signal.SIGKILL


def test_interruption_while_starting_leaves_no_worker(nursery: Nursery) -> None:
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
    os.kill(nursery.pid, signal.SIGSTOP)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            start(nursery, "sleep")
        timer.join()
    finally:
        os.kill(nursery.pid, signal.SIGCONT)
    with started(nursery, "sleep") as (pid, _):  # whose answer comes after that to the abandoned request
        assert eventually(lambda: nursery.exit_status(pid) is None and children(nursery.pid) == [pid])


def test_several_threads_may_start_workers(nursery: Nursery) -> None:
    statuses: list[int | None] = []

    def start_one() -> None:
        pid, wire = start(nursery, "exit_with_3")
        statuses.append(nursery.exit_status(pid, PATIENCE_S))
        wire.close()

    threads = [threading.Thread(target=start_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert statuses == [3, 3, 3, 3]


def test_close_ends_the_workers_and_what_they_started(own_nursery: Nursery) -> None:
    pid, wire = start(own_nursery, "sleep_with_a_child")
    busy, busy_wire = start(own_nursery, "compute")
    child = wire.receive(PATIENCE_S)
    busy_wire.receive(PATIENCE_S)
    own_nursery.close(timeout_s=SOON_S)
    assert [own_nursery.exit_status(one) for one in (pid, busy)] == [-signal.SIGKILL] * 2
    assert eventually(lambda: not any(map(runs, (pid, busy, child))))
    assert (own_nursery.alive, own_nursery.fileno()) == (False, -1)
    own_nursery.close(timeout_s=SOON_S)
    own_nursery.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="while starting"):
        start(own_nursery, "leave")
    wire.close()
    busy_wire.close()


def test_nursery_that_is_killed_takes_its_workers_along(own_nursery: Nursery) -> None:
    pid, wire = start(own_nursery, "sleep_with_a_child")
    busy, busy_wire = start(own_nursery, "compute")
    ended, ended_wire = start(own_nursery, "exit_with_3")
    child = wire.receive(PATIENCE_S)
    busy_wire.receive(PATIENCE_S)
    assert own_nursery.exit_status(ended, PATIENCE_S) == 3
    os.kill(own_nursery.pid, signal.SIGKILL)
    assert own_nursery.exit_status(pid, SOON_S) == -signal.SIGKILL
    assert [own_nursery.exit_status(one) for one in (busy, ended)] == [-signal.SIGKILL, 3]
    assert eventually(lambda: not any(map(runs, (pid, busy, child))))
    with pytest.raises(WorkerDiedError, match=r"exit code -9 \(SIGKILL\) while starting"):
        start(own_nursery, "leave")
    assert not own_nursery.alive
    for one in (wire, busy_wire, ended_wire):
        one.close()


def test_nursery_that_is_stopped_is_closed_in_time(own_nursery: Nursery) -> None:
    pid, wire = start(own_nursery, "sleep")
    wire.receive(PATIENCE_S)
    os.kill(own_nursery.pid, signal.SIGSTOP)
    own_nursery.close(timeout_s=0.1)
    assert own_nursery.exit_status(pid) == -signal.SIGKILL
    assert eventually(lambda: not runs(pid))
    wire.close()


def test_nursery_that_cannot_import_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a broken installation')")
    monkeypatch.syspath_prepend(tmp_path)
    nursery = Nursery(num_threads=1)
    with pytest.raises(WorkerDiedError, match="ended with exit code 1 while starting"):
        start(nursery, "leave")
    nursery.close(timeout_s=SOON_S)


def test_lease_is_shared_by_those_who_want_the_same_and_closed_by_the_last() -> None:
    first, second, other = lease(1), lease(1), lease(2)
    assert first is second
    assert first is not other
    release(first, SOON_S)
    assert second.alive
    release(second, SOON_S)
    assert not second.alive
    assert other.alive
    release(other, SOON_S)
    assert not runs(other.pid)


def test_lease_when_the_nursery_has_died_gives_a_new_one() -> None:
    old = lease(1)
    os.kill(old.pid, signal.SIGKILL)
    assert eventually(lambda: not old.alive)
    new = lease(1)
    assert new is not old
    assert new.alive
    release(old, SOON_S)
    assert new.alive
    assert lease(1) is new
    release(new, SOON_S)
    release(new, SOON_S)
    assert not new.alive


@pytest.fixture
def run_trainer(start_script: Callable[[str], subprocess.Popen], workers: Path) -> Callable[[str], subprocess.Popen]:
    """Runs a script, which begins with the imports and has no guard, in a session of its own."""
    begin = """
        import json, os, signal, sys, time
        sys.path.insert(0, WORKERS)
        from lit_collect.backends._nursery import Nursery
        from lit_collect.backends._wire import Wire
        def say(*words): os.write(1, json.dumps(words).encode() + b"\\n")
        say("the script runs")
        def start(function):
            wire, theirs = Wire.pair()
            return nursery.start(f"nursery_workers:{function}", theirs, method="forkserver", timeout_s=60), wire
        nursery = Nursery(num_threads=1)
    """.replace("WORKERS", repr(str(workers)))
    return lambda text: start_script(textwrap.dedent(begin) + textwrap.dedent(text))


@pytest.mark.slow
def test_script_without_a_guard_runs_once_and_is_told_how_workers_end(
    run_trainer: Callable[[str], subprocess.Popen],
) -> None:
    trainer = run_trainer("""
        pairs = [start("leave"), start("fail"), start("sleep")]
        say([nursery.exit_status(pid, 60) for pid, _ in pairs[:2]])
        pid, wire = pairs[2]
        wire.receive(60)
        copy = os.fork()
        if copy == 0:
            nursery.kill(pid, signal.SIGKILL)
            nursery.close(1)
            os._exit(nursery.alive)
        say(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), nursery.exit_status(pid, 0.1), nursery.alive)
        nursery.close(10)
        say(nursery.exit_status(pid))
    """)
    out, err = trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == 0, err
    assert [json.loads(line) for line in out.splitlines()] == [
        ["the script runs"],
        [[0, 1]],
        [0, None, True],
        [-signal.SIGKILL],
    ]
    assert "ArithmeticError: raised by a worker" in err
    assert err.count("Traceback") == 1


@pytest.mark.slow
def test_workers_survive_ctrl_c_and_vanish_when_the_trainer_is_killed(
    run_trainer: Callable[[str], subprocess.Popen],
) -> None:
    trainer = run_trainer("""
        pairs = [start(function) for function in ("sleep", "compute", "sleep_with_a_child")]
        said = [wire.receive(60) for _, wire in pairs]
        if os.fork() == 0:  # holds the trainer's end of every socket
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            say(os.getpid())
            time.sleep(600)
        try:
            say([pid for pid, _ in pairs], said[2], nursery.pid)
            time.sleep(600)
        except KeyboardInterrupt:
            say([nursery.exit_status(pid, 0.1) for pid, _ in pairs])
            time.sleep(600)
    """)
    lines = [json.loads(trainer.stdout.readline()) for _ in range(3)]
    copy, (pids, child, nursery) = sorted(lines[1:], key=len)
    family = [*pids, child, nursery]
    assert all(map(runs, family))
    os.killpg(trainer.pid, signal.SIGINT)
    assert json.loads(trainer.stdout.readline()) == [[None, None, None]]
    assert all(map(runs, family))
    trainer.kill()
    assert eventually(lambda: not any(map(runs, family)))
    os.kill(copy[0], signal.SIGKILL)
