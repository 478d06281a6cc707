"""Where a worker's time goes: a few rollouts recorded by `torch.profiler`, written as a Chrome trace."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_PLACEHOLDERS = ("{worker}", "{worker_idx}")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which workers record which rollouts, and where the traces go.

    Example:
        >>> ProfileConfig(num_rollouts=1)
        Traceback (most recent call last):
        ...
        ValueError: profile.num_rollouts must be more than profile.warmup_rollouts=1, got 1
    """

    workers: tuple[int, ...] = (0,)
    """Indices of the workers that record."""
    num_rollouts: int = 3
    """Rollouts until the trace is written, those that are not recorded included."""
    warmup_rollouts: int = 1
    """First rollouts, which are not recorded."""
    save_path: str = "./collector_profile_{worker}.json"
    """File of the trace, with the worker's index for ``{worker}`` (or ``{worker_idx}``)."""
    record_shapes: bool = False
    """Record the shapes of what operators take."""
    profile_memory: bool = False
    """Record what is allocated and freed."""
    with_stack: bool = False
    """Record the lines of code that called."""

    def __post_init__(self) -> None:
        """Check what can be checked without a worker.

        Raises:
            TypeError: if a number is no integer.
            ValueError: naming the setting and the value.
        """
        object.__setattr__(self, "workers", tuple(self.workers))
        if not self.workers or min(self.workers) < 0:
            raise ValueError(f"profile.workers must be indices of workers, at least one, got {self.workers}")
        for name, least in (("num_rollouts", 1), ("warmup_rollouts", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"profile.{name} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"profile.{name} must be at least {least}, got {value}")
        if self.num_rollouts <= self.warmup_rollouts:
            raise ValueError(
                f"profile.num_rollouts must be more than profile.warmup_rollouts={self.warmup_rollouts}, "
                f"got {self.num_rollouts}"
            )
        if len(set(self.workers)) > 1 and not any(name in self.save_path for name in _PLACEHOLDERS):
            raise ValueError(
                f"profile.save_path must contain {_PLACEHOLDERS[0]} where several workers record, "
                f"got {self.save_path!r}"
            )

    def path(self, worker: int) -> Path:
        """File of a worker's trace."""
        path = self.save_path
        for placeholder in _PLACEHOLDERS:
            path = path.replace(placeholder, str(worker))
        return Path(path)


class RolloutProfiler:
    """Records rollouts of one worker, each as an event named ``rollout``, and writes them to its file.

    What the same thread does between two recorded rollouts is in the trace too, outside these events.

    Args:
        config: how many rollouts, and where to.
        worker: index of the worker.

    Example:
        >>> profiler = RolloutProfiler(ProfileConfig(num_rollouts=2), worker=0)
        >>> for _ in range(3):
        ...     with profiler.rollout():
        ...         _ = torch.ones(2) + 1
        >>> profiler.finished, Path("collector_profile_0.json").exists()
        (True, True)
    """

    def __init__(self, config: ProfileConfig, worker: int) -> None:
        self._config = config
        self._path = config.path(worker)
        self._rollouts = 0
        self._profile: profile | None = None
        self._closed = False

    @property
    def finished(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._closed

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Wrap one rollout. An exception from inside ends the recording, and no trace is written.

        Raises:
            OSError: if the last recorded rollout is over and the trace cannot be written.
            RuntimeError: if another profiler of torch records this thread already.
        """
        if self._closed:
            yield
            return
        try:
            if self._rollouts == self._config.warmup_rollouts:
                self._profile = _start(self._config)
            with record_function("rollout") if self._profile else contextlib.nullcontext():
                yield
        except BaseException:
            self._stop()
            raise
        self._rollouts += 1
        if self._rollouts >= self._config.num_rollouts:
            self.close()

    def close(self) -> None:
        """Stop recording, and write what was recorded; may be called again.

        Raises:
            OSError: if the trace cannot be written.
        """
        recorded = self._stop()
        if recorded is not None and self._rollouts > self._config.warmup_rollouts:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as folder:  # torch says nothing where it cannot write
                written = Path(folder, self._path.name)
                recorded.export_chrome_trace(str(written))
                shutil.copyfile(written, self._path)

    def _stop(self) -> profile | None:
        """What was recorded, if anything was begun."""
        self._closed = True
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        return recorded


def _start(config: ProfileConfig) -> profile:
    if torch.autograd._profiler_enabled():  # two of them in one thread crash the process
        raise RuntimeError("a profiler of torch is recording already : expected none; leave one of the two out")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    started = profile(
        activities=activities,
        record_shapes=config.record_shapes,
        profile_memory=config.profile_memory,
        with_stack=config.with_stack,
    )
    started.start()
    return started
