"""Settings, grouped by who cares about them: frozen, keyword-only dataclasses that check themselves.

They have no ``slots``: LightningCLI cannot parse a dataclass with slots.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

C = TypeVar("C")
Exploration = Literal["random", "mode", "mean", "deterministic"]
_EXPLORATIONS = ("random", "mode", "mean", "deterministic")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How one batch is collected.

    Example:
        >>> RolloutConfig(max_frames_per_traj=0)
        Traceback (most recent call last):
        ...
        ValueError: rollout.max_frames_per_traj must be at least 1 or None, got 0
    """

    max_frames_per_traj: int | None = None
    """Cut an episode after that many frames: truncated, not terminated (None: the env decides)."""
    init_random_frames: int = 0
    """Act at random for the first frames of the run, rounded up to whole steps of all env copies (steps that an env
    spends on resetting count here, though they are no frames)."""
    reset_at_each_iter: bool = False
    """Start every batch with fresh episodes."""
    exploration: Exploration = "random"
    """How an action is taken from a distribution; independent of train and eval mode."""
    set_truncated: bool = False
    """Mark the last step of every batch truncated, and go on under a new trajectory id."""
    compact_obs: bool = False
    """Leave out the successor observations that the following row repeats (see `restore_successors`)."""
    clip_actions: bool = True
    """Clip Box actions to their bounds on the way to the env; the batch keeps the raw sample."""
    keep_float64: bool = False
    """Store float64 observations as they are instead of as float32."""
    info_keys: tuple[str, ...] = ()
    """Values of the env's info that are stored with every observation: ``"name"`` (a float32 number),
    ``"name:dtype"`` or ``"name:dtype[3]"``, dots leading into nested mappings; ``"name:str[32]"`` for a text of up to
    32 characters, as code points (see `decode_texts`). ``("reported", name)`` says where the env gave none and NaN or
    0 stands instead. ``"name:str"`` is a text in the observation, which is otherwise left out."""
    check_finite: bool = False
    """Raise when an observation or a reward is NaN or infinite."""
    compile_policy: bool = False
    """Act with a `torch.compile`d copy of the policy's call; pays off for large networks, hardly ever on the CPU."""
    verify_envs: bool = False
    """Check during the first episodes of every env copy that it keeps the contract (see `lit_collect.envs.verify`)."""

    def __post_init__(self) -> None:
        """Check what can be checked without an env.

        Raises:
            ValueError: naming the setting and the value.
        """
        if self.max_frames_per_traj is not None:
            at_least("rollout.max_frames_per_traj", self.max_frames_per_traj, 1, or_none=True)
        at_least("rollout.init_random_frames", self.init_random_frames, 0)
        one_of("rollout.exploration", self.exploration, _EXPLORATIONS)
        given: object = self.info_keys  # YAML and saved hyperparameters give lists
        if not isinstance(given, (tuple, list)):
            raise TypeError(f"rollout.info_keys must be a sequence of names, got {given!r}; use a tuple")
        object.__setattr__(self, "info_keys", tuple(given))


@dataclass(frozen=True, kw_only=True)
class TrajectoryConfig:
    """Batches of whole trajectories instead of a fixed number of frames.

    Example:
        >>> TrajectoryConfig(trajs_per_batch=0)
        Traceback (most recent call last):
        ...
        ValueError: trajectories.trajs_per_batch must be at least 1 or None, got 0
    """

    trajs_per_batch: int | None = None
    """Complete trajectories in one batch, in the order in which they end; `frames_per_batch` frames are stepped at once
    until there are so many. Those left when the budget is spent make a last, smaller batch."""
    traj_format: Literal["cat", "padded"] = "cat"
    """Rows of all trajectories one after the other, [M], or one row of time per trajectory, padded, [B, Tmax]."""
    split_trajs: bool = False
    """Split each fixed batch by trajectory, complete or not: [B, Tmax], padded (see `split_trajectories`)."""
    drop_stale: bool = False
    """Drop trajectories that were begun under weights older than `max_staleness` versions (0 where none is set). With 0
    none is left that began before the last update, so that batches must be longer than episodes."""

    @property
    def batches_vary(self) -> bool:
        """Whether batches have any number of rows."""
        return self.split_trajs or self.trajs_per_batch is not None

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ValueError: naming the setting and the value.
        """
        one_of("trajectories.traj_format", self.traj_format, ("cat", "padded"))
        if self.trajs_per_batch is not None:
            at_least("trajectories.trajs_per_batch", self.trajs_per_batch, 1, or_none=True)
            if self.split_trajs:
                raise ValueError(
                    "trajectories.split_trajs splits batches of a fixed number of frames : expected False with "
                    "trajs_per_batch, got True; use traj_format='padded'"
                )
        elif self.traj_format != "cat" or self.drop_stale:
            name = "drop_stale" if self.drop_stale else "traj_format"
            raise ValueError(
                f"trajectories.{name} is about whole trajectories : expected trajs_per_batch with it, got None"
            )


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """What the loader makes of each collected batch.

    Example:
        >>> UpdateConfig(epochs=10, minibatch_size=64).epochs
        10
    """

    epochs: int = 1
    """Passes over each collected batch."""
    minibatch_size: int | None = None
    """Rows of one minibatch (None: the whole batch, with its time dimension)."""
    shuffle: bool = True
    """Draw the rows of the minibatches anew in each pass."""
    updates_per_batch: int = 1
    """Samples from the replay buffer for each collected batch; the other settings are for batches without one."""

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ValueError: naming the setting and the value.
        """
        at_least("updates.epochs", self.epochs, 1)
        at_least("updates.updates_per_batch", self.updates_per_batch, 1)
        if self.minibatch_size is not None:
            at_least("updates.minibatch_size", self.minibatch_size, 1, or_none=True)


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where things live, as names of torch devices (``"cpu"``, ``"cuda:1"``).

    Example:
        >>> DeviceConfig(policy="gpu")
        Traceback (most recent call last):
        ...
        ValueError: devices.policy must name a torch device or be None, got 'gpu'; use 'cpu' or 'cuda:0'
    """

    policy: str | None = None
    """Where the policy acts. On the direct backend None means the policy itself, where it is, and another device a
    copy there, to which weights are published; in other processes None means the CPU."""
    env: str | None = None
    """Where a batched env of torch tensors takes its actions (None: where the env says it is)."""
    storage: str | None = None
    """Where batches are handed out (None: the CPU)."""

    def __post_init__(self) -> None:
        """Check the names; whether there is such a device is seen where it is used.

        Raises:
            ValueError: naming the setting and the value.
        """
        for name in ("policy", "env", "storage"):
            value = getattr(self, name)
            try:
                torch.device("cpu" if value is None else value)
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"devices.{name} must name a torch device or be None, got {value!r}; use 'cpu' or 'cuda:0'"
                ) from error


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Whole episodes on envs of their own, behind `val_dataloader` and `test_dataloader`.

    Example:
        >>> EvaluationConfig(num_episodes=20, num_envs=8)
        Traceback (most recent call last):
        ...
        ValueError: evaluation.num_envs must divide num_episodes=20, got 8; use 5 or 10
    """

    num_episodes: int = 10
    """Episodes of one evaluation."""
    num_envs: int | None = None
    """Env copies (None: all episodes at once, at most 10 copies); each plays the same number of episodes."""
    exploration: Exploration = "deterministic"
    """How actions are taken from a distribution."""
    seed: int | None = None
    """Entropy of the evaluation's seeds (None: the run's; the streams differ all the same)."""
    max_frames: int | None = None
    """Cut evaluation episodes after that many frames (None: the env decides)."""

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ValueError: naming the setting and the value.
        """
        at_least("evaluation.num_episodes", self.num_episodes, 1)
        one_of("evaluation.exploration", self.exploration, _EXPLORATIONS)
        if self.max_frames is not None:
            at_least("evaluation.max_frames", self.max_frames, 1, or_none=True)
        if self.num_envs is not None:
            at_least("evaluation.num_envs", self.num_envs, 1, or_none=True)
            if self.num_episodes % self.num_envs:
                near = _nearest_divisors(self.num_episodes, self.num_envs)
                raise ValueError(
                    f"evaluation.num_envs must divide num_episodes={self.num_episodes}, got {self.num_envs}; use {near}"
                )

    @property
    def copies(self) -> int:
        """Env copies of one evaluation: `num_envs`, else the largest divisor of `num_episodes` up to 10."""
        if self.num_envs is not None:
            return self.num_envs
        return max(n for n in range(1, 11) if self.num_episodes % n == 0)


def settings(kind: type[C], value: Any, name: str) -> C:
    """A group of settings; what was saved of one is a mapping.

    Args:
        kind: the class of the group.
        value: of that class, or a mapping from the names of its settings.
        name: of the argument, for messages.

    Raises:
        TypeError: if it is neither, or a name is unknown or missing.

    Example:
        >>> settings(UpdateConfig, {"epochs": 4}, "updates").epochs
        4
    """
    if isinstance(value, Mapping):
        known = inspect.signature(kind).parameters
        unknown = [given for given in value if given not in known]
        if unknown:
            raise TypeError(f"{name} has no setting {unknown[0]!r} : expected some of {', '.join(known)}")
        missing = [
            needed for needed in known if known[needed].default is inspect.Parameter.empty if needed not in value
        ]
        if missing:
            raise TypeError(f"{name} lacks the setting {missing[0]!r}, which has no default")
        return kind(**value)
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be given as {kind.__name__}(...), got {value!r}")
    return value


def nearest_multiples(value: int, unit: int) -> str:
    """The two multiples of `unit` around `value`, in words (one if the lower is zero).

    Example:
        >>> nearest_multiples(100, 8)
        '96 or 104'
    """
    lower = value // unit * unit
    return f"{lower} or {lower + unit}" if lower else str(unit)


def check_shares(copies: int, num_workers: int) -> None:
    """Check that workers can share env copies evenly.

    Args:
        copies: of one rank.
        num_workers: of the same rank.

    Raises:
        ValueError: naming the two nearest values that would do.
    """
    if copies % num_workers:
        raise ValueError(
            f"num_envs must be a multiple of num_collectors={num_workers}, got {copies}; "
            f"use {nearest_multiples(copies, num_workers)}"
        )


def check_frames(frames_per_batch: int, total_frames: int, num_envs: int, copies_of_all_ranks: int) -> None:
    """Check the two frame counts against the number of env copies.

    Args:
        frames_per_batch: frames of one batch of one rank.
        total_frames: the whole budget over all ranks, -1 for none.
        num_envs: env copies of one rank.
        copies_of_all_ranks: env copies over all ranks.

    Raises:
        TypeError: if a count is no integer.
        ValueError: naming the two nearest values that would do.
    """
    at_least("num_envs", num_envs, 1, or_none=True)
    at_least("rollout.frames_per_batch", frames_per_batch, 1)
    if frames_per_batch % num_envs:
        raise ValueError(
            f"rollout.frames_per_batch must be a multiple of num_envs={num_envs}, got {frames_per_batch}; "
            f"use {nearest_multiples(frames_per_batch, num_envs)}"
        )
    _check_integer("total_frames", total_frames)
    if total_frames == -1:
        return
    if total_frames < 1:
        raise ValueError(f"total_frames must be at least 1, or -1 for no limit, got {total_frames}")
    if total_frames % copies_of_all_ranks:
        raise ValueError(
            f"total_frames must be a multiple of the {copies_of_all_ranks} env copies, got {total_frames}; "
            f"use {nearest_multiples(total_frames, copies_of_all_ranks)}"
        )


def at_least(name: str, value: int, least: int, *, or_none: bool = False) -> None:
    """Check a count.

    Args:
        name: of the setting, for messages.
        value: to be checked.
        least: the smallest that will do.
        or_none: whether the setting may be None instead, for messages.

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is too small.
    """
    _check_integer(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}{' or None' if or_none else ''}, got {value}")


def _check_integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check a word.

    Args:
        name: of the setting, for messages.
        value: to be checked.
        choices: those that will do.

    Raises:
        ValueError: if it is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _nearest_divisors(number: int, around: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < around][-1:]
    above = [d for d in divisors if d > around][:1]
    return " or ".join(map(str, below + above))
