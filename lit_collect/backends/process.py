"""Collecting in processes of this machine: `ProcessBackend`."""

import os
import sys
from typing import Literal

from lit_collect.backends.base import Backend, Launcher
from lit_collect.errors import BackendUnavailableError
from lit_collect.schemes import SharedMemory, WeightSyncScheme

_START_METHODS = ("forkserver", "spawn")


class ProcessBackend(Backend):
    """Steps the envs in processes of this machine, each with a copy of the policy.

    Whole batches come back through shared memory; weights travel through shared memory, too, and are applied between
    batches. Scripts need no ``if __name__ == "__main__"``, and lambdas, closures and classes of a notebook or script
    may be envs and policies. It runs on Linux and macOS.

    Args:
        num_collectors: worker processes; `num_envs` is divided among them.
        sync: whether all workers make each batch together, [N, T]. Otherwise each makes batches of its own, [n, T],
            and goes on while the learner learns: whichever is ready first comes first.
        start_method: "forkserver" (the default) imports everything once and forks; "spawn" starts fresh interpreters.
        batch_timeout_s: how long to wait for a worker: for what it builds, for a batch, for any other answer.
        shutdown_timeout_s: how long a worker may take to close its envs before it is terminated.
        num_threads: threads of torch and other numerical libraries in each worker.
        preempt_fraction: once this fraction of the workers has finished, the others hand in what they have; the rows
            they lack are masked (None: wait for all).
        max_restarts: how many dead workers are replaced by new ones, which begin new episodes.
        max_staleness: how many versions the weights of a row may be behind when it is handed out.
        weight_sync: what carries weights (None: `SharedMemory`).

    Raises:
        ValueError: if a setting is out of range or two of them do not fit.
        TypeError: if a count is no integer.

    Example:
        >>> ProcessBackend(num_collectors=4, sync=False)
        ProcessBackend(num_collectors=4, sync=False)
    """

    def __init__(
        self,
        num_collectors: int = 2,
        sync: bool = True,
        *,
        start_method: Literal["forkserver", "spawn"] | None = None,
        batch_timeout_s: float = 300.0,
        shutdown_timeout_s: float = 10.0,
        num_threads: int = 1,
        preempt_fraction: float | None = None,
        max_restarts: int = 0,
        max_staleness: int | None = None,
        weight_sync: WeightSyncScheme | None = None,
    ) -> None:
        _check_count("num_collectors", num_collectors, 1)
        _check_count("num_threads", num_threads, 1)
        _check_count("max_restarts", max_restarts, 0)
        if max_staleness is not None:
            _check_count("max_staleness", max_staleness, 0)
        if start_method is not None and start_method not in _START_METHODS:  # "fork": copies of the trainer's locks
            raise ValueError(f"backend.start_method must be one of {_START_METHODS} or None, got {start_method!r}")
        for name, value in (("batch_timeout_s", batch_timeout_s), ("shutdown_timeout_s", shutdown_timeout_s)):
            _check_number(name, value)
            if not value > 0:
                raise ValueError(f"backend.{name} must be above 0, got {value}")
        if preempt_fraction is not None:
            _check_number("preempt_fraction", preempt_fraction)
            if not 0 < preempt_fraction <= 1:
                raise ValueError(f"backend.preempt_fraction must be above 0 and at most 1, got {preempt_fraction}")
            if not sync:
                raise ValueError("backend.preempt_fraction needs sync=True : asynchronous workers wait for nobody")
        self.num_collectors = num_collectors
        self.sync = sync
        self.start_method = start_method
        self.batch_timeout_s = batch_timeout_s
        self.shutdown_timeout_s = shutdown_timeout_s
        self.num_threads = num_threads
        self.preempt_fraction = preempt_fraction
        self.max_restarts = max_restarts
        self.max_staleness = max_staleness
        self.weight_sync = weight_sync

    def launcher(self) -> Launcher:
        """See `Backend.launcher`.

        Raises:
            BackendUnavailableError: where processes cannot be started in this way.
        """
        if os.name != "posix" or not sys.executable:
            raise BackendUnavailableError("backend 'process' needs Linux or macOS; use 'direct'")
        from lit_collect.backends._processes import ProcessLauncher  # it cannot even be imported elsewhere

        return ProcessLauncher(
            self.num_threads, method=self.start_method or "forkserver", timeout_s=self.batch_timeout_s
        )

    def scheme(self) -> WeightSyncScheme:
        """See `Backend.scheme`."""
        return SharedMemory() if self.weight_sync is None else self.weight_sync

    def __repr__(self) -> str:
        """As it was written, as far as it differs from the defaults."""
        defaults = ProcessBackend.__init__.__kwdefaults__ or {}
        given = [f"num_collectors={self.num_collectors}", f"sync={self.sync}"]
        given += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return f"ProcessBackend({', '.join(given)})"


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"backend.{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"backend.{name} must be at least {least}, got {value}")


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"backend.{name} must be a number, got {value!r}")
