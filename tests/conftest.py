"""What every test is held to, docstring examples of the packages included: it leaves nothing behind.

A test fails if it leaves a thread, a process, a file in shared memory, an environment variable, a signal handler or a
file at the top of the repository. It runs in a folder of its own, with one torch thread, and without tqdm's monitor.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import tqdm

from lit_collect.backends._nursery import lease, release

ROOT = Path(__file__).resolve().parents[1]
PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
GRACE_S = 2.0  # a process or thread that was told to end may take this long

EXPECTED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "PL_GLOBAL_SEED",  # Lightning's seed_everything
    "PL_SEED_WORKERS",
    "CUDA_DEVICE_ORDER",  # Lightning's CUDA accelerator
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning, when it is imported
    "TORCHINDUCTOR_CACHE_DIR",  # torch, when its compiler is imported
}
# These two live as long as this process once multiprocessing has started them.
HELPER_PROCESSES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
SIGNALS = signal.valid_signals() - {signal.SIGALRM}  # pytest-timeout's own
CACHES = {".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__"}

collect_ignore = ["benchmarks"]  # scripts run by hand; their peers are not installed here

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a job in the background, and then of all it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _parents() -> dict[int, int]:
    """Parent of every process of this machine that can be seen."""
    parents = {}
    for entry in PROC.glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(entry.name)] = int(fields[1])
    return parents


def _descendants() -> dict[int, int]:
    """Parent of every process below this one."""
    parents, found = _parents(), {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: parents[pid] for pid in found - {os.getpid()}}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _processes() -> dict[int, str]:
    """Command lines of the processes below this one, without multiprocessing's own helpers."""
    multiprocessing.active_children()  # reaps those that have ended
    processes = {}
    for pid, parent in _descendants().items():
        command = _read(PROC / str(pid) / "cmdline")
        if not (parent == os.getpid() and any(helper in command for helper in HELPER_PROCESSES)):
            processes[pid] = command.replace(b"\0", b" ").decode(errors="replace")
    return processes


def _shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _used_by_others(names: set[str]) -> set[str]:
    """Those files in shared memory that a process outside this tree has mapped: another program's own."""
    family = {os.getpid(), *_descendants()}
    others = [_read(entry / "maps") for entry in PROC.glob("[0-9]*") if int(entry.name) not in family]
    return {name for name in names if any(f"{SHARED_MEMORY}/{name}".encode() in maps for maps in others)}


@dataclass
class Surroundings:
    """What a test could change outside itself."""

    threads: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    processes: dict[int, str] = field(default_factory=_processes)
    shared_memory: set[str] = field(default_factory=_shared_memory)
    variables: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    handlers: dict[int, object] = field(default_factory=lambda: {s: signal.getsignal(s) for s in SIGNALS})
    files: set[str] = field(default_factory=lambda: set(os.listdir(ROOT)) - CACHES)

    def running_since(self) -> list[str]:
        """What was started after this snapshot and has not ended."""
        memory = _shared_memory() - self.shared_memory
        return [
            *(f"thread {thread.name}" for thread in set(threading.enumerate()) - self.threads),
            *(f"process {pid}: {text}" for pid, text in _processes().items() if pid not in self.processes),
            *(f"shared memory {name}" for name in (memory - _used_by_others(memory) if memory else ())),
        ]

    def changed_since(self) -> list[str]:
        """What is set otherwise than in this snapshot."""
        now = Surroundings(processes={}, shared_memory=set())
        names = {name for name, _ in self.variables.items() ^ now.variables.items()} - EXPECTED_VARIABLES
        return [
            *(f"environment variable {name}" for name in sorted(names)),
            *(f"handler of signal {s}" for s, handler in self.handlers.items() if handler != now.handlers[s]),
            *(f"{ROOT / name}" for name in sorted(now.files - self.files)),
        ]

    def restore(self) -> None:
        """Give the next test the variables and handlers of this snapshot."""
        os.environ.clear()
        os.environ.update(self.variables)
        for number, handler in self.handlers.items():
            if handler is not None and handler != signal.getsignal(number):
                signal.signal(number, handler)


class Hygiene:
    """Fixtures for all tests; registered as a plugin, since fixtures of this file alone would not reach docstrings."""

    @pytest.fixture(autouse=True)
    def no_leaks(self) -> Iterator[None]:
        """Fail a test that leaves something behind."""
        before = Surroundings()
        yield
        deadline = time.monotonic() + GRACE_S
        while (left := before.running_since()) and time.monotonic() < deadline:
            time.sleep(0.02)
        left += before.changed_since()
        before.restore()
        if left:
            pytest.fail("the test left behind: " + ", ".join(left), pytrace=False)

    @pytest.fixture(scope="session")
    @classmethod
    def nursery(cls) -> Iterator[None]:
        """Keep the process that starts workers: starting it takes seconds, which each test would pay for anew.

        Tests that are about its own life must not use this.
        """
        kept = lease(1)
        yield
        release(kept, 5.0)

    @pytest.fixture
    def start_script(self, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen]]:
        """Starts scripts of a test, each in a session of its own; those that still run are killed afterwards."""
        started: list[subprocess.Popen] = []

        def start(text: str) -> subprocess.Popen:
            script = tmp_path / "train.py"
            script.write_text(text)
            started.append(
                subprocess.Popen(
                    [sys.executable, script],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    start_new_session=True,
                )
            )
            return started[-1]

        yield start
        for process in started:
            with process:
                process.kill()

    @pytest.fixture(autouse=True)
    def own_folder(self, no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run in a folder of one's own, so that logs and checkpoints land there."""
        monkeypatch.chdir(tmp_path)


def pytest_configure(config: pytest.Config) -> None:
    """Make the fixtures above apply everywhere; one torch thread, and no thread of tqdm that outlives its bar."""
    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0
    config.pluginmanager.register(Hygiene(), "hygiene")
