"""Whether an env keeps what it promises: `VerifiedEnv` watches its first episodes, `verify` examines it on its own.

What breaks the contract of `BatchedEnv` or makes training impossible is an error; what merely looks wrong, such as
copies that stand still while another is reset, is a warning.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces

from lit_collect.actors import RandomActor
from lit_collect.envs.base import BatchedEnv, Final, Leaves, StepViews
from lit_collect.envs.spaces import ActionEncoder, LeafSpec, empty_leaves
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.errors import FrameContractError, LitCollectError

_EPISODES = 2  # of each copy
_STEPS = 10_000  # where episodes do not end


@dataclass(frozen=True)
class Finding:
    """Something that an env does otherwise than it should."""

    level: Literal["error", "warning"]
    """Whether it breaks the contract, or merely looks wrong."""
    text: str
    """Which env copy, what was expected and what was got."""


class VerifiedEnv(BatchedEnv):
    """Checks what a batched env does during the first two episodes of each copy, and then steps out of the way.

    Errors are raised, each kind of warning is given once.

    Args:
        env: any batched env; closed with this one. Its own attributes are found here too.

    Example:
        >>> from lit_collect.envs.direct import DirectEnv
        >>> from lit_collect.testing import CountingEnv
        >>> env = VerifiedEnv(DirectEnv([CountingEnv()]))
        >>> env.reset([1])[0].tolist()
        [[0.0, 0.0, 0.0]]
    """

    def __init__(self, env: BatchedEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.observation_spec, self.action_spec = env.observation_spec, env.action_spec
        self.first, self.may_mask = env.first, env.may_mask
        self._inspector = Inspector(env)

    @property
    def info_leaves(self) -> tuple[LeafSpec, ...]:  # type: ignore[override]  # those of the env
        """Values of the infos (see `BatchedEnv.info_leaves`)."""
        return self.env.info_leaves

    def reset(self, seeds: Sequence[int | None] | None = None, mask: np.ndarray | None = None) -> Leaves:
        """Reset (see `BatchedEnv.reset`), and check what is seen.

        Raises:
            FrameContractError: if an error is found.
        """
        leaves = self.env.reset(seeds, mask)
        if not self._inspector.satisfied:  # else it has not seen what came before
            _tell(self._inspector.after_reset(leaves, mask))
        return leaves

    def step_into(self, action: Leaves, views: StepViews) -> Sequence[Final]:
        """Step (see `BatchedEnv.step_into`), and check what happened.

        Raises:
            FrameContractError: if an error is found.
        """
        finals = self.env.step_into(action, views)
        _tell(self._inspector.after_step(views, finals))
        if self._inspector.satisfied:
            self.step_into = self.env.step_into  # type: ignore[method-assign]  # from here on it costs nothing
        return finals

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # while unpickled or half made
            raise AttributeError(name)
        return getattr(self.env, name)


def verify(env: BatchedEnv, *, steps: int = 1000, seed: int = 0) -> list[Finding]:
    """Reset an env, step it with random actions, and say what it does wrong.

    Args:
        env: reset with seeds and left in the middle of its episodes; not closed.
        steps: of each copy.
        seed: of the episodes and actions.

    Returns:
        What was found, each kind once; empty if all is well.

    Example:
        >>> import gymnasium
        >>> from lit_collect.envs.direct import DirectEnv
        >>> verify(DirectEnv([gymnasium.make("CartPole-v1")]), steps=20)
        []
    """
    inspector = Inspector(env)
    found: list[Finding] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found += check_seeding(env, seed)
            for finding in _examine(env, inspector, steps, seed):
                found.append(finding)  # what was found before an exception counts
        except LitCollectError as error:
            found.append(Finding("error", str(error)))
    found += [Finding("warning", text) for text in dict.fromkeys(str(one.message) for one in caught)]
    return found


def check_seeding(env: BatchedEnv, seed: int = 0) -> list[Finding]:
    """Reset an env twice with the same seeds.

    Args:
        env: reset and left so.
        seed: where the seeds of the copies come from.

    Returns:
        A warning if a copy then begins otherwise, else nothing.
    """
    seeds = _seeds(env, seed)
    first = [leaf.copy() for leaf in env.reset(seeds)]
    second = env.reset(seeds)
    for leaf, before, after in zip(env.leaves, first, second, strict=True):
        differs = ~_same_rows(before, after)
        if differs.any():
            row = int(np.argmax(differs))
            text = (
                f"env copy {env.first + row}: {_named(leaf)} differs after two resets with the same seed : expected "
                f"{_shown(before[row])} again, got {_shown(after[row])}; runs of this env cannot be repeated"
            )
            return [Finding("warning", text)]
    return []


class Inspector:
    """Looks at what a batched env does and collects what is wrong, each kind once.

    Args:
        env: is only asked for what it says of itself.
    """

    def __init__(self, env: BatchedEnv) -> None:
        self._env = env
        self._bounds = [_bounds(leaf) for leaf in env.observation_spec.leaves]
        self._tells_itself = isinstance(env, VectorEnvAdapter)  # of terminal observations that were overwritten
        self._kinds: set[str] = set()
        self._seen: Leaves = ()  # of the step before
        self._moves = np.zeros(env.num_envs, bool)  # copies whose observation changed while none was reset
        self._ends, self._ends_as_begun = 0, 0  # terminal observations, and those that the next episode begins with
        self._rests = np.zeros(env.num_envs, bool)  # copies that stood still, or moved, when a broken env's would not
        self._frozen = np.zeros(env.num_envs, np.int64)  # steps in which it stood still while another was reset
        self._done = np.zeros(env.num_envs, bool)  # in the step before
        self._ended = np.zeros(env.num_envs, np.int64)
        self._steps = 0

    @property
    def satisfied(self) -> bool:
        """Whether every copy has been watched long enough."""
        return bool((self._ended >= _EPISODES).all()) or self._steps >= _STEPS

    def after_reset(self, leaves: Leaves, mask: np.ndarray | None = None) -> list[Finding]:
        """Check what a reset gave.

        Args:
            leaves: [N, ...] each.
            mask: [N] bool, which copies were to be reset; None: all of them.
        """
        found = list(self._check_kinds(leaves, "reset"))
        if not found:
            found += self._check_values(leaves, "reset")
            if mask is not None and self._seen:
                found += self._check_mask(leaves, mask)
            self._seen = tuple([leaf.copy() for leaf in leaves])
        return self._news(found)

    def after_step(self, views: StepViews, finals: Sequence[Final]) -> list[Finding]:
        """Check what a step gave.

        Args:
            views: as the env wrote them.
            finals: as the env returned them.
        """
        self._steps += 1
        done = views.terminated | views.truncated
        found = list(self._check_rows(views, finals, done))
        if not any(finding.level == "error" for _, finding in found):
            found += self._check_values(views.obs, "step")
            found += self._check_finals(views, finals)
            found += self._check_movement(views, finals, done)
        self._ended += done
        self._done = done.copy()
        self._seen = tuple([leaf.copy() for leaf in views.obs])
        return self._news(found)

    def _news(self, found: Sequence[tuple[str, Finding]]) -> list[Finding]:
        """The findings of kinds that were not told yet."""
        fresh = []
        for kind, finding in found:
            if kind not in self._kinds:
                self._kinds.add(kind)
                fresh.append(finding)
        return fresh

    def _check_kinds(self, leaves: Leaves, doing: str) -> Iterator[tuple[str, Finding]]:
        expected = [((self._env.num_envs, *leaf.shape), leaf.stored) for leaf in self._env.leaves]
        got = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if got != expected:
            yield _error("kinds", f"all env copies, {doing}: expected arrays {_listed(expected)}, got {_listed(got)}")

    def _check_rows(self, views: StepViews, finals: Sequence[Final], done: np.ndarray) -> Iterator[tuple[str, Finding]]:
        """Rows that are no transitions have nothing to say, and every end has its true successor."""
        for name, wrong in (("an end of an episode", done), ("a reward", views.reward != 0)):
            rows = np.flatnonzero(wrong & ~views.valid)
            if len(rows):
                text = f"{self._name(rows[0])}, step: {name} in a row that is no transition : expected none"
                yield _error("no transition", text)
        with_final = [final.row for final in finals]
        if paid := getattr(self._env, "spent_reward", 0.0):
            text = (
                f"a copy gave a reward of {paid:g} in the step that resets it : expected 0, as in NEXT_STEP mode; the "
                f"reward is not counted, and the mode may be another one: pass it as autoreset="
            )
            yield _warning("spent", text)
        for row in with_final:
            if not done[row]:
                yield _error("final", f"{self._name(row)}, step: a terminal observation, but no end of an episode")
        missing = sorted(set(np.flatnonzero(done).tolist()) - set(with_final))
        if missing and not self._env.may_mask:
            yield _error("no final", f"{self._name(missing[0])}, step: an episode ended without its true successor")
        for index in np.flatnonzero(~np.isfinite(views.reward)):
            text = f"{self._name(index)}, step: reward is not finite : expected a number, got {views.reward[index]}"
            yield _error("reward", text)

    def _check_values(self, leaves: Leaves, doing: str, row: int | None = None) -> Iterator[tuple[str, Finding]]:
        """Observations are finite and within their spaces; `row` is the copy of a terminal observation."""
        for spec, (low, high), values in zip(self._env.observation_spec.leaves, self._bounds, leaves, strict=False):
            where = "terminal " * (row is not None) + _named(spec)
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                at = int(np.argwhere(~np.isfinite(values))[0][0])
                name = self._name(at if row is None else row)
                yield _error("finite", f"{name}, {doing}: {where} is not finite : got {_shown(values[at])}")
            elif not ((values >= low) & (values <= high)).all():
                at = int(np.argwhere(~((values >= low) & (values <= high)))[0][0])
                name = self._name(at if row is None else row)
                text = f"{name}, {doing}: {where} leaves its space : expected {spec.space}, got {_shown(values[at])}"
                yield _warning(f"bounds of {_named(spec)}", text)

    def _check_mask(self, leaves: Leaves, mask: np.ndarray) -> Iterator[tuple[str, Finding]]:
        for spec, before, after in zip(self._env.leaves, self._seen, leaves, strict=True):
            changed = np.flatnonzero(~_same_rows(before, after) & ~mask)
            if len(changed):
                text = (
                    f"{self._name(changed[0])}, reset: {_named(spec)} changed although the mask leaves it out : "
                    f"expected {_shown(before[changed[0]])}, got {_shown(after[changed[0]])}"
                )
                yield _error("mask", text)

    def _check_movement(
        self, views: StepViews, finals: Sequence[Final], done: np.ndarray
    ) -> Iterator[tuple[str, Finding]]:
        """A copy that stands still in every step that resets another one, and in no other."""
        if not self._seen:
            return
        still = np.logical_and.reduce(
            [
                _same_rows(before, now)
                for before, now in zip(self._observed(self._seen), self._observed(views.obs), strict=True)
            ]
        )
        running = views.valid & ~done
        if not finals and not (self._done & ~views.valid).any():
            self._moves |= ~still & running
            self._rests |= still & running
            return
        self._frozen += still & running
        self._rests |= ~still & running
        suspects = np.flatnonzero((self._frozen >= 2) & self._moves & ~self._rests)
        if len(suspects):
            yield _warning(
                "frozen",
                f"{self._name(suspects[0])} stands still in every step that resets another copy, and in no other : "
                f"its transitions may be lost; pass what makes single envs instead",
            )

    def _check_finals(self, views: StepViews, finals: Sequence[Final]) -> Iterator[tuple[str, Finding]]:
        """Terminal observations are of the right kind, and not those that the next episodes begin with."""
        expected = [(leaf.shape, leaf.stored) for leaf in self._env.leaves]
        for final in finals:
            got = [(leaf.shape, leaf.dtype) for leaf in final.obs]
            if got != expected:
                text = f"terminal observation: expected arrays {_listed(expected)}, got {_listed(got)}"
                yield _error("final kinds", f"{self._name(final.row)}, step: {text}")
                return
            yield from self._check_values(tuple([leaf[None] for leaf in final.obs]), "step", final.row)
            begun = self._observed(views.obs)
            same = all(
                _same_rows(end[None], leaf[final.row][None]).all()
                for end, leaf in zip(self._observed(final.obs), begun, strict=True)
            )
            self._ends += 1
            self._ends_as_begun += same and bool(self._moves[final.row]) and any(leaf.ndim > 1 for leaf in begun)
            # one may be chance, where there are few states
            if self._ends_as_begun == self._ends >= 2 and not self._tells_itself:
                yield _warning(
                    "aliasing",
                    f"{self._name(final.row)}, like others before, ended an episode with the very observation that the "
                    f"next one begins with : the env seems to reuse its observation array, or to reset itself; "
                    f"return the terminal observation in an array of its own",
                )

    def _observed(self, leaves: Leaves) -> Leaves:
        """Without the leaves of infos."""
        return leaves[: len(self._env.observation_spec.leaves)]

    def _name(self, row: Any) -> str:
        return f"env copy {self._env.first + int(row)}"


def _examine(env: BatchedEnv, inspector: Inspector, steps: int, seed: int) -> Iterator[Finding]:
    """Step with random actions; in the middle, single copies are reset if the env can do that."""
    n = env.num_envs
    actor, encode = RandomActor(env.action_spec, seed), ActionEncoder(env.action_spec, first=env.first)
    seen = env.reset(_seeds(env, seed))
    actor.see(env.leaves)
    yield from inspector.after_reset(seen)
    for step in range(steps):
        if n > 1 and step == steps // 2:
            mask = np.arange(n) < n // 2
            try:
                seen = env.reset(mask=mask)
            except ValueError:  # it says so itself
                pass
            else:
                yield from inspector.after_reset(seen, mask)
        values = actor(tuple([torch.from_numpy(leaf) for leaf in seen]))
        action = encode([value.numpy() for value in values])
        flags = np.zeros((2, n), bool)
        views = StepViews(empty_leaves(env.leaves, (n,)), np.zeros(n, np.float32), flags[0], flags[1], np.ones(n, bool))
        finals = env.step_into(action, views)
        yield from inspector.after_step(views, finals)
        seen = views.obs


def _seeds(env: BatchedEnv, seed: int) -> list[int]:
    state = np.random.SeedSequence(seed).generate_state(env.num_envs)
    return (state.astype(np.int64) % 2**31).tolist()


def _tell(found: Sequence[Finding]) -> None:
    """Warn of what looks wrong, and raise what is."""
    for finding in found:
        if finding.level == "warning":
            warnings.warn(finding.text, stacklevel=4)
    for finding in found:
        if finding.level == "error":
            raise FrameContractError(finding.text)


def _bounds(leaf: LeafSpec) -> tuple[Any, Any]:
    """Least and greatest values of a leaf, in its stored dtype, so that rounding to float32 is no offence."""
    space = leaf.space
    if isinstance(space, spaces.Box):
        return space.low.astype(leaf.stored), space.high.astype(leaf.stored)
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.Text):  # code points
        return 0, sys.maxunicode
    return 0, 1


def _same_rows(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """[N] bool: whether rows hold the same values (NaN equals NaN)."""
    same = first == second
    if first.dtype.kind == "f":
        same |= np.isnan(first) & np.isnan(second)
    return same.reshape(len(same), -1).all(1)


def _error(kind: str, text: str) -> tuple[str, Finding]:
    return kind, Finding("error", text)


def _warning(kind: str, text: str) -> tuple[str, Finding]:
    return kind, Finding("warning", text)


def _named(leaf: LeafSpec) -> str:
    return ".".join(leaf.key)


def _shown(value: np.ndarray) -> str:
    """A value in few characters."""
    return np.array2string(value, threshold=8, precision=4, separator=", ").replace("\n", "")


def _listed(kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> str:
    return ", ".join(f"{dtype} {shape}" for shape, dtype in kinds)
