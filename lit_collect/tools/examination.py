"""Everything that can be found out about an env by collecting from it for a moment."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from lit_collect.collector import Collector
from lit_collect.config import RolloutConfig
from lit_collect.envs.base import BatchedEnv
from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.factories import EnvSource
from lit_collect.envs.infos import InfoReader
from lit_collect.envs.spaces import LeafSpec, TreeSpec
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.envs.verify import Finding, verify
from lit_collect.errors import LitCollectError
from lit_collect.frames import ACTION_MASK, Key, columns_of
from lit_collect.tools.infos import InfoSurvey
from lit_collect.tools.small_policy import SmallPolicy

DEFAULT_COPIES = 8
"""Env copies where neither the user nor the env says a number."""

_SURVEY_FRAMES = 512
_SECONDS = 2.0  # of one measurement
_MAX_STEPS = 128  # of one batch
_SEED_COPIES = 2  # are enough to see whether seeds hold
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OWN_FILES = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of a space or of a batch."""

    key: str
    """Dots lead into nested keys."""
    space: str
    """The space's kind; empty for what a batch adds."""
    shape: list[int]
    """Of one env copy."""
    dtype: str
    """What the env gives or takes; in a batch what is stored."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """One value of the env's infos."""

    name: str
    """Dots lead into nested mappings."""
    dtype: str
    """The narrowest that holds all that was seen; empty if it is no array of one shape."""
    reported: str
    """When, in words."""
    info_key: str
    """What to write into ``rollout.info_keys``; empty if it cannot be stored."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Frames per second over all env copies, in one process with one thread."""

    env_fps: float
    """Of the env alone, with random actions."""
    policy_fps: float
    """With a network of two layers of 64 that acts."""
    env_share: float
    """Part of the time that goes into the env then."""
    policy_share: float
    """Part of the time that goes into the policy then."""


@dataclass(kw_only=True)
class Examination:
    """What was found out; parts that the env did not live to see are empty."""

    env: str
    """In plain text."""
    num_envs: int = field(init=False, default=0)
    single: bool = field(init=False, default=False)
    """Whether the copies are envs of their own, not one vector env."""
    source: str = field(init=False, default="")
    """What steps the copies."""
    autoreset: str = field(init=False, default="")
    """How an episode's end is handled."""
    masked_rows: bool = field(init=False, default=False)
    """Whether some rows of a batch are no transitions."""
    observation: list[Leaf] = field(init=False, default_factory=list)
    action: list[Leaf] = field(init=False, default_factory=list)
    stored: list[Leaf] = field(init=False, default_factory=list)
    """A batch's leaves, without the leading [N, T]."""
    dropped: list[str] = field(init=False, default_factory=list)
    """Keys of texts."""
    cast: list[str] = field(init=False, default_factory=list)
    """Keys that are float64 in the env and float32 in a batch."""
    action_mask: bool = field(init=False, default=False)
    infos: list[Info] = field(init=False, default_factory=list)
    speed: Speed | None = field(init=False, default=None)
    findings: list[Finding] = field(init=False, default_factory=list)
    notes: list[str] = field(init=False, default_factory=list)
    """Worth knowing, but no fault of the env."""

    @property
    def broken(self) -> list[Finding]:
        """The findings that mean wrong data, or none at all."""
        return [finding for finding in self.findings if finding.level == "error"]

    def add(self, finding: Finding) -> None:
        """Add a finding, unless it is there already."""
        if all(finding.text != other.text for other in self.findings):
            self.findings.append(finding)


def examine(source: EnvSource, num_envs: int | None = None, *, steps: int = 4096, seed: int = 0) -> Examination:
    """Look at an env.

    Args:
        source: makes it.
        num_envs: env copies (None: what the env says, else 8).
        steps: frames of one measurement at most; each ends after two seconds, too.
        seed: of everything that is collected.

    Raises:
        ValueError: if `num_envs` is not what the env says.

    Example:
        >>> from lit_collect.envs.factories import resolve_env
        >>> found = examine(resolve_env("CartPole-v1"), 2, steps=64)
        >>> found.broken, found.autoreset
        ([], 'at once: no step is spent on resetting, every row is a transition')
    """
    found = Examination(env=source.description)
    with _noted(found):
        specs = _describe(source, num_envs, found)
        if specs is not None:
            _collect(source, specs, found, steps=steps, seed=seed)
    return found


Specs = tuple[TreeSpec, TreeSpec]


def _collect(source: EnvSource, specs: Specs, found: Examination, *, steps: int, seed: int) -> None:
    """All that needs the copies to be stepped."""
    copies = found.num_envs
    step_s = 0.0
    with _reported(found):
        step_s = _survey(source, found, specs, seed)
    if not step_s:
        return
    frames = min(steps, max(int(_SECONDS / step_s), copies))
    length = max(1, min(_MAX_STEPS, frames // copies))

    def collector(policy: Any = None, num_envs: int = copies, seed: int = seed) -> Collector:
        return Collector(source, policy, num_envs=num_envs, frames_per_batch=num_envs * length, seed=seed)

    with _reported(found), closing(source.build(copies, rollout=RolloutConfig())) as env:
        for finding in verify(env, steps=max(frames // copies, 1), seed=seed):
            found.add(finding)
    with _reported(found):
        _measure(collector, specs, found, frames)
        few = min(copies, _SEED_COPIES) if found.single else copies
        batches = [_one_batch(collector(num_envs=few, seed=one)) for one in (seed, seed, seed + 1)]
        _compare(batches, [leaf.key for leaf in specs[0].leaves], found)


def _describe(source: EnvSource, num_envs: int | None, found: Examination) -> Specs | None:
    """Build the copies once, and tell what they are."""
    try:
        env = source.build(num_envs, rollout=RolloutConfig(), default_copies=DEFAULT_COPIES)
    except (LitCollectError, TypeError, ValueError) as error:
        if isinstance(error, ValueError) and str(error).startswith("num_envs"):
            raise
        found.add(Finding("error", str(error)))
        return None
    found.num_envs, found.single = env.num_envs, isinstance(env, DirectEnv)
    found.source, found.autoreset = _kind(env), _autoreset(env)
    found.masked_rows = env.may_mask
    found.observation, found.action = _leaves(env.observation_spec), _leaves(env.action_spec)
    found.dropped = _texts(env.observation_spec.space)
    found.cast = [".".join(leaf.key) for leaf in env.observation_spec.leaves if leaf.stored != leaf.dtype]
    with _reported(found):
        env.close()
    return env.observation_spec, env.action_spec


def _survey(source: EnvSource, found: Examination, specs: Specs, seed: int) -> float:
    """Collect a little at random, look at the infos, and say how many seconds one frame takes."""
    survey = InfoSurvey()
    copies = found.num_envs
    watched = survey.watch(source)
    with Collector(watched, num_envs=copies, frames_per_batch=copies, seed=seed) as collector:
        collector.collect()  # resets
        began = perf_counter()
        while collector.statistics()["frames_stepped"] < _SURVEY_FRAMES and perf_counter() - began < _SECONDS:
            collector.collect()
        step_s = (perf_counter() - began) / max(collector.statistics()["frames_stepped"] - copies, 1)
    for value in survey.values:
        key = value.declaration
        found.action_mask |= (value.name,) == ACTION_MASK
        if (value.name,) != ACTION_MASK:
            storable = bool(key) and _declarable(key, specs)
            found.infos.append(
                Info(
                    name=value.name,
                    dtype=value.dtype,
                    reported=survey.occasions(value),
                    info_key=key if storable else "",
                )
            )
    return step_s


def _declarable(key: str, specs: Specs) -> bool:
    try:
        InfoReader([key], observation_spec=specs[0], action_spec=specs[1])
    except ValueError:
        return False
    return True


def _measure(make: Callable[..., Collector], specs: Specs, found: Examination, frames: int) -> None:
    """Frames per second at random and with a policy, and what a batch holds."""
    with make() as collector:
        batch, at_random, _ = _timed(collector, frames)
    found.stored = _columns(batch)
    torch.manual_seed(0)
    with make(SmallPolicy(*specs)) as collector:
        batch, seconds, total_s = _timed(collector, frames)
    found.stored = _columns(batch)
    found.speed = Speed(
        env_fps=at_random["frames_stepped"] / at_random["env_s"],
        policy_fps=seconds["frames_stepped"] / total_s,
        env_share=seconds["env_s"] / total_s,
        policy_share=seconds["policy_s"] / total_s,
    )


def _timed(collector: Collector, frames: int) -> tuple[TensorDictBase, dict[str, float], float]:
    """Collect, after one batch to warm up; the last batch, what the counters grew by, and seconds."""
    collector.collect()
    before, began = collector.statistics(), perf_counter()
    while True:
        batch = collector.collect()
        total_s, after = perf_counter() - began, collector.statistics()
        grown = {name: after[name] - before[name] for name in ("frames_stepped", "env_s", "policy_s")}
        if total_s >= _SECONDS or grown["frames_stepped"] >= frames:
            return batch, grown, total_s


def _one_batch(collector: Collector) -> dict[Key, torch.Tensor]:
    with collector:
        return columns_of(collector.collect())


def _compare(batches: Sequence[dict[Key, torch.Tensor]], observed: Sequence[Key], found: Examination) -> None:
    """Whether the same seed gave the same frames, and another one others."""
    first, again, other = batches
    differing = [key for key, column in first.items() if not _equal(column, again[key])]
    if differing and not any("cannot be repeated" in finding.text for finding in found.findings):
        text = (
            f"the same seed gave other values of {'.'.join(differing[0])} : runs of this env cannot be repeated; "
            f"let it draw its random numbers from self.np_random alone"
        )
        found.add(Finding("warning", text))
    if not differing and all(_equal(first[key][:, 0], other[key][:, 0]) for key in observed):
        found.notes.append("episodes begin in the same state under every seed")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


@contextmanager
def _reported(found: Examination) -> Iterator[None]:
    """What an env does wrong becomes a finding."""
    try:
        yield
    except LitCollectError as error:
        found.add(Finding("error", str(error)))


@contextmanager
def _noted(found: Examination) -> Iterator[None]:
    """Warnings become findings, except those about texts, which have a line of their own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found.findings = [one for one in found.findings if not one.text.startswith("the text")]
    for warning in caught:
        if issubclass(warning.category, (DeprecationWarning, PendingDeprecationWarning)):
            continue
        text = _COLOURS.sub("", str(warning.message))  # Gymnasium's are yellow
        if not text.startswith("the text"):
            if warning.filename.startswith(_OWN_FILES):
                found.add(Finding("warning", text))
            elif text not in found.notes:
                found.notes.append(text)


def _kind(env: BatchedEnv) -> str:
    if isinstance(env, DirectEnv):
        return f"{env.num_envs} single envs in one loop: {env.envs[0]}"
    name = getattr(env, "env", None)
    if isinstance(env, VectorEnvAdapter):
        return f"a vector env of {env.num_envs} copies: {type(env.env).__name__} {name}"
    return f"{type(env).__name__} of {env.num_envs} copies" + (f": {name}" if name is not None else "")


def _autoreset(env: BatchedEnv) -> str:
    mode = getattr(env, "mode", None)
    stated = "" if mode is None else f"{getattr(mode, 'name', mode)}; "
    if env.may_mask:
        return stated + "each reset spends a step: such rows are masked, and no frames"
    return stated + "at once: no step is spent on resetting, every row is a transition"


def _leaves(spec: TreeSpec) -> list[Leaf]:
    return [
        Leaf(key=".".join(leaf.key), space=_space_text(leaf), shape=list(leaf.shape), dtype=str(leaf.dtype))
        for leaf in spec.leaves
    ]


def _space_text(leaf: LeafSpec) -> str:
    space = leaf.space
    if isinstance(space, spaces.Discrete):
        return f"Discrete({space.n}{f', start={space.start}' if space.start else ''})"
    if isinstance(space, spaces.Box) and space.shape is not None and space.low.size:
        low, high = space.low.min(), space.high.max()
        return f"Box({low:g} to {high:g})"
    return type(space).__name__


def _texts(space: spaces.Space[Any], path: tuple[str, ...] = ()) -> list[str]:
    """Where the texts of an observation space are."""
    if isinstance(space, spaces.Text):
        return [".".join(path)]
    inner: Sequence[tuple[str, spaces.Space[Any]]] = ()
    if isinstance(space, spaces.Dict):
        inner = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        prefix = path or ("observation",)
        return [key for i, one in enumerate(space.spaces) for key in _texts(one, (*prefix, str(i)))]
    return [key for name, one in inner for key in _texts(one, (*path, name))]


def _columns(batch: TensorDictBase) -> list[Leaf]:
    return [
        Leaf(key=".".join(key), space="", shape=list(column.shape[2:]), dtype=str(column.dtype).removeprefix("torch."))
        for key, column in columns_of(batch).items()
    ]
