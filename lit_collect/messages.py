"""What a group and its workers say to each other: typed, frozen, one reply for each request.

Nothing here knows how a message travels.
"""

import builtins
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gymnasium import spaces
from torch import Tensor

from lit_collect import errors
from lit_collect.errors import LitCollectError, WorkerFailedError, text_of
from lit_collect.profiling import ProfileConfig
from lit_collect.schemes import WeightReceiver
from lit_collect.seeding import Placement
from lit_collect.weights import ModelShapes

# --- requests ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collect:
    """Take the newest weights, then make one batch. Answered by `Collected`."""

    steps: int
    """T."""
    ticket: Any = None
    """For the worker's `WeightReceiver`."""


@dataclass(frozen=True)
class Reset:
    """Begin new episodes, in one env copy of the worker or in all (None)."""

    index: int | None


@dataclass(frozen=True)
class Reseed:
    """Begin new episodes under other seeds."""

    place: Placement
    restart: int


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on counting where another worker was left."""

    trajectories: list[int]
    """See `RolloutRunner.running_trajectories`."""
    warm_up_steps: int
    version: int
    """Of the weights that the worker has."""
    receiver: WeightReceiver
    """Where newer ones come from."""


@dataclass(frozen=True)
class Load:
    """Take these weights now; for a worker that acts with the learner's own modules."""

    models: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Describe:
    """Say which weights a model has. Answered by `Done` with a `ModelShapes`."""

    model_id: str


@dataclass(frozen=True, kw_only=True)
class Execute:
    """Read an attribute, or call a function, of what the worker holds. Answered by `Done` with the value."""

    path: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call a function with the env and the policy. Answered by `Done` with what it returns."""

    what: str
    """What that is, in words, such as "calling count"."""
    fn: Callable[..., Any]
    """Takes the `BatchedEnv`, the policy and the arguments."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fake:
    """Show how a batch would look, without stepping an env. Answered by `Done` with a batch of zeros [n, T]."""

    steps: int
    """T."""


@dataclass(frozen=True)
class Profile:
    """Profile the next rollouts."""

    config: ProfileConfig


@dataclass(frozen=True)
class Close:
    """Close the envs and end."""


Request = Collect | Reset | Reseed | Resume | Load | Describe | Execute | Call | Fake | Profile | Close


def doing(request: Request) -> str:
    """What a worker does that has this request, in words."""
    if isinstance(request, Collect):
        return f"collecting {request.steps} steps"
    if isinstance(request, Execute):
        return f"executing {request.path}"
    if isinstance(request, Call):
        return request.what
    others = {Reset: "resetting", Close: "closing", Describe: "looking for a model", Fake: "making a batch of zeros"}
    return others.get(type(request), "being told")


# --- replies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a worker stands."""

    frames_stepped: int = 0
    """Since it started."""
    trajectories: list[int] = field(default_factory=list)
    """See `RolloutRunner.running_trajectories`."""
    warm_up_steps: int = 0
    """Steps that are still to be acted at random."""
    version: int = 0
    """Of the weights that act."""
    env_s: float = 0.0
    """Seconds in envs since it started."""
    policy_s: float = 0.0
    """Seconds in the policy since it started."""
    busy_s: float = 0.0
    """Seconds in rollouts since it started."""

    def after(self, earlier: "Progress") -> "Progress":
        """The same, with the frames and seconds of the workers before it added."""
        added = ("frames_stepped", "env_s", "policy_s", "busy_s")
        return replace(self, **{name: getattr(self, name) + getattr(earlier, name) for name in added})


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The envs and the policy are built."""

    num_envs: int
    """Env copies of this worker."""
    observation_space: spaces.Space[Any]
    """Of one env copy."""
    action_space: spaces.Space[Any]
    """Of one env copy."""
    single: bool
    """Whether the copies are single envs, not a vector env."""
    policy: ModelShapes | None
    """None: the policy is no module."""
    progress: Progress

    def check_like(self, first: "Ready", worker: int) -> None:
        """Check that a worker has as many env copies as the first one, and the same spaces.

        Raises:
            ValueError: naming what differs.
        """
        if self.num_envs != first.num_envs:
            raise ValueError(
                f"the vector env of worker {worker} differs : expected {first.num_envs} copies as in worker 0, "
                f"got {self.num_envs}"
            )
        for name in ("observation_space", "action_space"):
            expected, got = getattr(first, name), getattr(self, name)
            if expected != got:
                raise ValueError(
                    f"{name} of env copy {worker * self.num_envs} differs : expected {expected} as in copy 0, got {got}"
                )


@dataclass(frozen=True, kw_only=True)
class Collected:
    """One batch."""

    batch: Any
    """[n, T]: a TensorDict that belongs to the receiver, or columns ``Mapping[Key, Tensor]`` in memory that the worker
    will write again; on the way, whatever the channel makes of it."""
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Done:
    """A request was carried out."""

    value: Any = None
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A request was not carried out; the error as text, so that it can cross any border."""

    doing: str
    """What the worker was at."""
    kind: str
    """Name of the exception's class."""
    text: str
    """Its message."""
    trace: str
    """The worker's traceback."""
    progress: Progress
    cause: BaseException | None = None
    """The exception itself, inside one process."""

    @classmethod
    def of(cls, error: BaseException, doing: str, progress: Progress) -> "Failed":
        """Describe an exception, however ill-behaved it is."""
        origin = error.__cause__ if isinstance(error, WorkerFailedError) and error.__cause__ else error
        try:
            trace = "".join(traceback.format_exception(origin))
        except Exception as broken:  # its own __str__ raises, for instance
            trace = f"(the traceback cannot be shown: {type(broken).__name__})\n"
        kind, text = type(error).__name__, text_of(error)
        if type(error) is KeyError and len(error.args) == 1 and isinstance(error.args[0], str):
            text = error.args[0]  # its own text is quoted, and will be once more
        return cls(doing=doing, kind=kind, text=text, trace=trace, progress=progress, cause=error)

    def as_exception(self, who: str) -> BaseException:
        """What the group raises.

        Args:
            who: the worker, in words.
        """
        if self.cause is not None:
            return self.cause
        kind = getattr(errors, self.kind, None)
        if kind is None and self.text:
            kind = getattr(builtins, self.kind, None)
        where = f"{who}, {self.doing}"
        if kind is not None and issubclass(kind, LitCollectError) and kind is not WorkerFailedError:
            return _with_trace(kind(f"{where}: {self.text}"), self.trace)
        if kind in (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, NotImplementedError):
            return _with_trace(kind(f"{self.text} (in {where})"), self.trace)
        text = self.text if kind is WorkerFailedError else f"{self.kind}: {self.text}"
        return WorkerFailedError(f"{where}: {text}\n\nTraceback of the worker:\n{self.trace.rstrip()}")


Reply = Ready | Collected | Done | Failed


class WorkerTracebackError(Exception):
    """Shows, as the cause of an error, where in a worker it was raised."""

    def __str__(self) -> str:
        """The worker's traceback."""
        return f"\n{self.args[0]}"


def _with_trace(error: Exception, trace: str) -> Exception:
    error.__cause__ = WorkerTracebackError(trace)
    return error
