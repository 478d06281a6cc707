"""Settings measured side by side: what is tried, in which order, and how long."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

from lit_collect.backends import Backend, DirectBackend, ProcessBackend
from lit_collect.collector import Collector
from lit_collect.config import DeviceConfig, RolloutConfig
from lit_collect.envs.factories import EnvSource
from lit_collect.errors import LitCollectError, text_of
from lit_collect.frames import count_frames
from lit_collect.seeding import Placement
from lit_collect.tools.examination import DEFAULT_COPIES

MAX_COPIES = 64
"""Env copies that are tried at most, unless eight times the configured number is more."""

_ROUNDS = 3  # measurements of each candidate
GOOD_ENOUGH = 0.95  # of the best rate: then fewer processes and fewer copies are better
_DIRECT_SHARE = 0.4  # of the time goes to candidates without processes
_LEAST_STEPS = 4  # of each copy in one measurement
_LONG_ENOUGH_S = 0.5  # of one measurement
_LEAST_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings to measure."""

    num_envs: int
    """Env copies over all workers."""
    num_collectors: int = 0
    """Worker processes; 0 for the direct backend."""
    sync: bool = True
    """Whether all workers make each batch together."""

    @property
    def backend(self) -> str:
        """For people."""
        if not self.num_collectors:
            return "direct"
        return "process" if self.sync else "process, async"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every candidate collects with: the config's own."""

    source: EnvSource
    policy: Any
    frames_per_batch: int
    total_frames: int
    num_envs: int | None
    rollout: RolloutConfig
    devices: DeviceConfig
    backend: Backend


@dataclass(kw_only=True)
class Trial:
    """A candidate and how it did."""

    candidate: Candidate
    steps: int
    """T of its batches, as near as can be to the configured number of frames."""
    rates: list[float] = field(default_factory=list)
    """Frames per second, of each measurement."""
    failure: str = ""
    """Why there are none."""

    @property
    def rate(self) -> float:
        """Frames per second, 0 if it could not be measured."""
        return median(self.rates) if self.rates else 0.0

    @property
    def frames_per_batch(self) -> int:
        """Frames of a batch with these settings."""
        return self.steps * self.candidate.num_envs


class Tuner:
    """Measures candidates side by side within a time budget.

    Args:
        setup: what to collect with.
        seconds: for everything; a measurement that is under way is finished, and closing comes on top.
        clock: monotonic seconds.
    """

    def __init__(self, setup: Setup, seconds: float, *, clock: Callable[[], float] = perf_counter) -> None:
        self.trials: list[Trial] = []
        self.setup = setup
        self._clock = clock
        self._began, self._seconds = clock(), seconds
        self._frames_per_s = 0.0  # of the last measurement, to know what the next one may cost

    def run(self, max_envs: int | None = None, max_collectors: int | None = None) -> list[Trial]:
        """Measure the direct backend with 1, 2, 4 ... env copies, then worker processes.

        Args:
            max_envs: env copies that are tried at most (None: 64, or eight times the configured number).
            max_collectors: processes that are tried at most, 0 for none (None: one for each CPU).

        Returns:
            What was tried, the configured settings among them.
        """
        self._probe()
        now, setup = self.now, self.setup
        most = min(max_envs or max(MAX_COPIES, 8 * now.num_envs), setup.frames_per_batch)
        counts = {*_powers(most), now.num_envs} if setup.source.num_envs is None else {now.num_envs}
        direct = [self._trial(Candidate(num_envs=copies)) for copies in sorted(counts)]
        self._measure(direct, until=_DIRECT_SHARE)
        best = max(direct, key=lambda trial: trial.rate)
        candidates = [now] if now.num_collectors else []
        workers_at_most = _cpus() if max_collectors is None else max_collectors
        for workers in sorted({*_powers(workers_at_most), workers_at_most} - {0}):
            few, many = _share_out(best.candidate.num_envs, workers, most)
            candidates += [Candidate(num_envs=copies, num_collectors=workers) for copies in sorted({few, many})]
            candidates.append(Candidate(num_envs=many, num_collectors=workers, sync=False))
        processes = [self._trial(candidate) for candidate in dict.fromkeys(candidates)]
        # the best of before once more, in turns with these: the machine may be busier now
        self._measure([*([best] if best.rates else []), *processes], until=1.0)
        return self.trials

    @property
    def now(self) -> Candidate:
        """The config's own settings."""
        setup, workers = self.setup, 0 if self.setup.backend.in_process else self.setup.backend.num_collectors
        default = -(-DEFAULT_COPIES // max(workers, 1)) * max(workers, 1)
        return Candidate(num_envs=setup.num_envs or default, num_collectors=workers, sync=setup.backend.sync)

    def _trial(self, candidate: Candidate) -> Trial:
        frames = self.setup.frames_per_batch
        self.trials.append(Trial(candidate=candidate, steps=max(round(frames / candidate.num_envs), 1)))
        return self.trials[-1]

    def _measure(self, trials: Sequence[Trial], until: float) -> None:
        """Measure these in turns, so that whatever else the machine does hits all alike.

        Args:
            trials: what to measure.
            until: the part of the time that may have passed afterwards.
        """
        each_s = self._left(until) / max(len(trials) * (_ROUNDS + 1), 1)
        with ExitStack() as stack:
            running: list[tuple[Trial, Collector]] = []
            for trial in trials:
                with _told(trial):
                    self._check_time(trial, until)
                    collector = self._collector(trial, each_s)
                    stack.enter_context(_closing_quietly(collector))
                    self._rate(trial, collector, 0.0)  # warms up
                    running.append((trial, collector))
            for _ in range(_ROUNDS):
                for trial, collector in running:
                    if not trial.failure and (not trial.rates or self._left(until) > 0):
                        with _told(trial):
                            trial.rates.append(self._rate(trial, collector, each_s))

    def _probe(self) -> None:
        """Learn roughly how fast the env is, and how many copies there are if it is a vector env that says so."""
        now, copies = self.now, self.setup.num_envs
        with suppress(Exception):  # what goes wrong here goes wrong again, where it is told
            collector = self._build(replace(now, num_collectors=0, sync=True), _LEAST_STEPS, num_envs=copies)
            with _closing_quietly(collector):
                self._slice(collector, 0.0)
                self._frames_per_s = self._slice(collector, 0.0)
                self.setup = replace(self.setup, num_envs=collector.num_envs)

    def _collector(self, trial: Trial, each_s: float) -> Collector:
        """One whose batches take about so many seconds, and are at most as long as the configured ones."""
        copies = trial.candidate.num_envs
        affordable = max(int(self._frames_per_s * each_s / copies), _LEAST_STEPS)
        return self._build(trial.candidate, min(trial.steps, affordable), num_envs=copies)

    def _build(self, candidate: Candidate, steps: int, *, num_envs: int | None) -> Collector:
        return Collector(
            self.setup.source,
            self.setup.policy,
            num_envs=num_envs,
            frames_per_batch=steps * candidate.num_envs,
            rollout=self.setup.rollout,
            devices=self.setup.devices,
            backend=self._backend(candidate),
            seed=Placement(entropy=0, default_envs=candidate.num_envs),
        )

    def _backend(self, candidate: Candidate) -> Backend:
        if not candidate.num_collectors:
            return DirectBackend()
        # a worker that hangs must not hold up everything: whoever measures has little time
        timeout_s = max(self._seconds, _LEAST_TIMEOUT_S)
        return ProcessBackend(candidate.num_collectors, candidate.sync, batch_timeout_s=timeout_s)

    def _rate(self, trial: Trial, collector: Collector, each_s: float) -> float:
        """Frames per second; what asynchronous workers may have ready from before is not counted."""
        for _ in range(0 if trial.candidate.sync else 2 * trial.candidate.num_collectors):
            collector.collect()
        self._frames_per_s = self._slice(collector, min(each_s, _LONG_ENOUGH_S))
        return self._frames_per_s

    def _slice(self, collector: Collector, seconds: float) -> float:
        """Frames per second of whole batches, one at least."""
        began, frames = self._clock(), 0
        while True:
            frames += count_frames(collector.collect())
            passed_s = self._clock() - began
            if passed_s >= seconds:
                return frames / max(passed_s, 1e-9)

    def _check_time(self, trial: Trial, until: float) -> None:
        """Raise if a measurement would end too late."""
        frames = min(trial.steps, _LEAST_STEPS) * trial.candidate.num_envs
        needed_s = 2 * frames / self._frames_per_s if self._frames_per_s else 0.0
        if self._left(until) <= needed_s:
            raise TimeoutError("no time left; give more with --seconds")

    def _left(self, until: float) -> float:
        return until * self._seconds - (self._clock() - self._began)


def choose(trials: Sequence[Trial], *, sync: bool) -> Trial | None:
    """The settings to use: nearly the most frames per second, with few processes and few env copies.

    Args:
        trials: what was measured.
        sync: whether rows must be of the newest weights, so that asynchronous workers are out of the question.

    Returns:
        One of them, None if none could be measured.

    Example:
        >>> slow = Trial(candidate=Candidate(num_envs=1), steps=256, rates=[100.0])
        >>> fast = Trial(candidate=Candidate(num_envs=8), steps=32, rates=[300.0])
        >>> faster = Trial(candidate=Candidate(num_envs=16), steps=16, rates=[301.0])
        >>> choose([slow, fast, faster], sync=True).candidate.num_envs
        8
    """
    allowed = [one for one in trials if one.rates and not one.failure and (one.candidate.sync or not sync)]
    enough = GOOD_ENOUGH * max((trial.rate for trial in allowed), default=0.0)
    good = [trial for trial in allowed if trial.rate >= enough]
    return min(good, key=lambda trial: (trial.candidate.num_collectors, trial.candidate.num_envs), default=None)


@contextmanager
def _told(trial: Trial) -> Iterator[None]:
    """What goes wrong with a candidate is its reason, and no matter for the others."""
    try:
        yield
    except Exception as error:  # of an env, a policy or a backend, of any kind
        if isinstance(error, TimeoutError) and trial.rates:  # there are figures from before
            return
        text = (text_of(error).strip() or type(error).__name__).splitlines()[0]
        trial.failure = text if isinstance(error, (TimeoutError, ValueError)) else f"{type(error).__name__}: {text}"


@contextmanager
def _closing_quietly(collector: Collector) -> Iterator[None]:
    """Close it in the end; if that fails its workers are gone all the same, and the figures are there."""
    try:
        yield
    finally:
        with suppress(LitCollectError):
            collector.shutdown()


def _share_out(copies: int, workers: int, most: int) -> tuple[int, int]:
    """Env copies over all workers: about as many as given, and as many as given in each."""
    few = max(round(copies / workers), 1) * workers
    return few, max(min(copies, most // workers), 1) * workers


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


def _cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
