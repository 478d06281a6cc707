"""What the tests of failing processes share: envs that do something at a chosen call, and looks at what is left.

Workers import this module, so it needs neither pytest nor Lightning.
"""

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_collect import Collector, LitCollectError, ProcessBackend
from lit_collect.testing import CountingEnv

COPIES, TROUBLED = 8, 5
"""Env copies over two workers; worker 1 has the one with the trouble."""


class TroubledEnv(CountingEnv):
    """Calls a function at the how-manieth call of one of its methods."""

    def __init__(self, index: int, where: str = "", trouble: Callable[[], Any] | None = None, at: int = 1) -> None:
        super().__init__(index, lengths=(5,))
        self._where, self._trouble, self._left = where, trouble, at
        self._comes("init")

    def reset(self, **options: Any) -> Any:
        self._comes("reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self._comes("step")
        return super().step(action)

    def close(self) -> None:
        self._comes("close")

    def _comes(self, where: str) -> None:
        if where == self._where:
            self._left -= 1
            if self._left == 0:
                self._trouble()


class TroubledPolicy(nn.Module):
    """Acts by its weight, and calls a function in its third call in worker 1."""

    def __init__(self, trouble: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._trouble, self._calls = trouble, 0

    def forward(self, observation: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == 3 and observation[0, 0] >= COPIES // 2:
            self._trouble()
        return torch.zeros(len(observation), dtype=torch.int64)


def makers(where: str = "", trouble: Callable[[], Any] | None = None, at: int = 1) -> list[Callable[[], TroubledEnv]]:
    """Of 8 copies, one of which has the trouble."""
    envs = [partial(TroubledEnv, index) for index in range(COPIES)]
    envs[TROUBLED] = partial(TroubledEnv, TROUBLED, where, trouble, at)
    return envs


def build(
    envs: Any, policy: Any = None, *, frames: int = 16, total_frames: int = -1, sink: Any = None, **options: Any
) -> Collector:
    """A collector of two worker processes, with the backend's options."""
    return Collector(
        envs,
        policy,
        frames_per_batch=frames,
        total_frames=total_frames,
        replay_buffer=sink,
        backend=ProcessBackend(2, **{"shutdown_timeout_s": 30.0, **options}),
        seed=1,
    )


# --- troubles ---------------------------------------------------------------------------------------------------


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def crash() -> None:
    ctypes.string_at(0)


def wait_for_nobody() -> None:
    while True:
        time.sleep(0.01)


def compute_for_ever() -> None:
    3 ** (1 << 40)  # native code that lets no other thread run


def ignore_everything() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    wait_for_nobody()


def note_and(path: Path, then: Callable[[], Any]) -> None:
    """Write down the time, which is the same in all processes, before something happens."""
    path.write_text(repr(time.monotonic()))
    then()


def once(path: Path, then: Callable[[], Any]) -> None:
    """Only the first time, over all processes."""
    if not path.exists():
        path.touch()
        then()


# --- looks ------------------------------------------------------------------------------------------------------


def pids(collector: Collector) -> list[int]:
    return [int(member.channel.name.split()[-1]) for member in collector.workers.members]


def runs(pid: int) -> bool:
    """Whether a process exists that is more than an entry in its parent's books."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return met


def kill(pid: int) -> None:
    """Kill a process from outside, and see it go."""
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not runs(pid), 10.0)


def open_files() -> list[str]:
    """What the descriptors of this process are, without the numbers of sockets and pipes."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return sorted(re.sub(r"\[\d+\]", "", link) for link in links)


def seconds_since(path: Path) -> float:
    return time.monotonic() - float(path.read_text())


def collect_all(collector: Collector) -> tuple[list[Any], list[LitCollectError]]:
    """All batches of the budget, and the errors that came in between."""
    batches, errors = [], []
    while collector.frames_left:
        try:
            batches.append(collector.collect())
        except LitCollectError as error:
            errors.append(error)
            assert len(errors) < 10
    return batches, errors


def check_trajectories(batches: list[Any]) -> None:
    """Ids are unique, begin where `is_init` says so, and have no row left out."""
    last: dict[int, tuple[int, float]] = {}
    seen: set[int] = set()
    for batch in batches:
        for row in batch.unbind(0):
            copy = int(row["observation"][0, 0])
            before, step = last.get(copy, (-1, -1.0))
            for frame in row.unbind(0):
                number = int(frame["collector", "traj_ids"])
                assert number % COPIES == copy
                assert frame["is_init"].item() == (number != before)
                if number == before:
                    assert frame["observation"][2] == step
                else:
                    assert number not in seen
                    assert frame["observation"][2] == 0
                    seen.add(number)
                before, step = number, float(frame["next", "observation"][2])
            last[copy] = before, step


def check_counters(collector: Collector) -> None:
    counters = collector.statistics()
    parts = [counters[f"frames_{part}"] for part in ("yielded", "pending", "dropped")]
    assert counters["frames_stepped"] == sum(parts)
    assert min(parts) >= 0
