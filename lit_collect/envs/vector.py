"""`VectorEnvAdapter`: `gymnasium.vector` envs as a `BatchedEnv`, exact in all three autoreset modes.

How a step ends an episode depends on the mode:

* DISABLED, and NEXT_STEP where single copies can be reset: the copies that ended are reset at once, by a masked
  ``reset``; no step is wasted.
* NEXT_STEP elsewhere: the env spends the following step of that copy on resetting. That row is no transition, it is
  marked ``valid=False``.
* SAME_STEP: the env has reset already and gives the true successor in ``infos["final_obs"]``.

Whether a masked reset can be relied on is known for `SyncVectorEnv` and `AsyncVectorEnv` alone: `CartPoleVectorEnv`
takes the mask and resets all copies, and wrappers such as `RecordEpisodeStatistics` forget the running episodes.
"""

import contextlib
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from lit_collect.envs.base import BatchedEnv, Final, Leaves, StepViews, brief, env_failed
from lit_collect.envs.spaces import TreeSpec
from lit_collect.errors import FrameContractError

_CLOSE_TIMEOUT_S = 10.0
_TERMINATE_TIMEOUT_S = 1.0
_ASYNC_METHODS = ("reset", "reset_async", "reset_wait", "step", "step_async", "step_wait")
_FINAL_OBS = ("final_obs", "final_observation")  # the second name is Gymnasium 0.29's and still in use


class VectorEnvAdapter(BatchedEnv):
    """A vector env in NEXT_STEP, SAME_STEP or DISABLED mode.

    Args:
        env: the vector env; `AsyncVectorEnv` and ``copy=False`` are fine.
        autoreset: its mode (None: what the env itself says), as the enum, its value or its name.
        keep_float64: store float64 observations as they are instead of as float32.
        max_frames_per_traj: cut episodes after that many frames (truncated, not terminated).
        owned: whether `close` closes the env.
        first: index of its first copy among those of its rank, for messages.

    Raises:
        ValueError: if the mode is unknown, if episodes cannot be cut in this mode, or if the env is known to lose
            transitions.
        TypeError: if a space cannot be stored.

    Example:
        >>> import gymnasium
        >>> env = VectorEnvAdapter(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))
        >>> [leaf.shape for leaf in env.reset([1, 2])]
        [(2, 4)]
        >>> env.close()
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        autoreset: AutoresetMode | str | None = None,
        keep_float64: bool = False,
        max_frames_per_traj: int | None = None,
        owned: bool = True,
        first: int = 0,
    ) -> None:
        self.env = env
        self.first = first
        self.mode = _detect_mode(env, autoreset)
        self.num_envs = env.num_envs
        self.observation_spec = TreeSpec.of(env.single_observation_space, "observation", keep_float64=keep_float64)
        self.action_spec = TreeSpec.of(env.single_action_space, "action")
        base = env.unwrapped
        _refuse_lossy(base)
        self._async = base if isinstance(base, AsyncVectorEnv) else None
        self._takes_seed_list = isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        self._honours_mask = _honours_mask(env)
        # A worker without shared memory forgets only by stepping that its copy is to be reset (Gymnasium 1.4).
        forgetful = self._async is None or self._async.shared_memory
        self._resets_at_once = self.mode is AutoresetMode.DISABLED or (
            self.mode is AutoresetMode.NEXT_STEP and self._honours_mask and forgetful
        )
        self._pending_survives_reset = not forgetful
        self.may_mask = self.mode is AutoresetMode.NEXT_STEP and not self._resets_at_once
        if max_frames_per_traj is not None and not self._resets_at_once:
            raise ValueError(
                f"rollout.max_frames_per_traj cannot be had from {env} in {self.mode.name} mode : expected a vector "
                f"env that can reset single copies; give single envs, or limit the episodes inside the env"
            )
        self._limit = max_frames_per_traj
        self._ages = np.zeros(self.num_envs, np.int64)  # frames of the running episodes; counted only under a limit
        self._pending = np.zeros(self.num_envs, bool)  # copies that spend their next step on resetting
        self._any_pending = False
        self._expected = tuple(((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self.observation_spec.leaves)
        self._owned = owned
        self._failed = False
        self._closed = False
        self._warned = False

    def reset(self, seeds: Sequence[int | None] | None = None, mask: np.ndarray | None = None) -> Leaves:
        """Reset all copies, or those of the mask (see `BatchedEnv.reset`).

        Only `SyncVectorEnv` and `AsyncVectorEnv` take one seed for each copy; any other vector env gets the first.

        Raises:
            ValueError: if a mask leaves copies out and the env is not known to honour it.
        """
        if mask is None or mask.all():
            leaves = self._reset_env(seeds, None)
            chosen = np.ones(self.num_envs, bool)
        elif not self._honours_mask and self.mode is not AutoresetMode.DISABLED:
            raise ValueError(f"{self.env} cannot reset single copies; reset all of them")
        else:
            leaves = self._reset_env(seeds, mask)
            chosen = mask
        self._ages[chosen] = 0
        if not self._pending_survives_reset:
            self._pending[chosen] = False
            self._any_pending = bool(self._pending.any())
        return leaves

    def step_into(self, action: Leaves, views: StepViews) -> Sequence[Final]:
        """Step all copies (see `BatchedEnv.step_into`)."""
        # copies, in the space's dtype: a vector env may keep or change what it is given
        own = [leaf.astype(spec.dtype) for leaf, spec in zip(action, self.action_spec.leaves, strict=True)]
        value = own[0] if self.action_spec.is_plain else self.action_spec.unflatten(own)
        obs, reward, terminated, truncated, infos = self._step_env(value)
        for target, leaf in zip(views.obs, self._check_obs(obs, "step"), strict=True):
            target[...] = leaf
        views.reward[:] = self._check_row(reward, "reward", "biuf")
        terminated, truncated = self._check_row(terminated, "terminated"), self._check_row(truncated, "truncated")
        if self._limit is not None:
            self._ages += 1
            truncated = truncated | (self._ages >= self._limit)
        done = np.logical_or(terminated, truncated)
        if not self._any_pending and not done.any():
            return ()
        views.terminated[:], views.truncated[:] = terminated, truncated
        if self._resets_at_once:
            return self._reset_ended(done, views)
        if self.mode is AutoresetMode.SAME_STEP:
            return self._take_finals(done, views, infos)
        self._spend_step(done, views)
        return ()

    def close(self) -> None:
        """Close the vector env; returns within a bounded time even if a worker of an `AsyncVectorEnv` is gone."""
        if self._closed or not self._owned:
            return
        self._closed = True
        if self._async is not None:
            _close_async(self.env, self._async, graceful=not self._failed)
            return
        try:
            self.env.close()
        except Exception as error:
            raise env_failed("vector env", "close", error) from error

    def _reset_ended(self, done: np.ndarray, views: StepViews) -> list[Final]:
        """Keep the true successors, then begin the next episode of the copies that ended."""
        finals = [
            Final(index, tuple([leaf[index, ...].copy() for leaf in views.obs]))
            for index in np.flatnonzero(done).tolist()
        ]
        begun = self._reset_env(None, done)
        for target, leaf in zip(views.obs, begun, strict=True):
            if not self._honours_mask and not _equal(target[~done], leaf[~done]):
                raise FrameContractError(
                    f"{self.env} changed copies that it was not to reset : expected it to honour options['reset_mask']"
                )
            target[done] = leaf[done]
        self._ages[done] = 0
        return finals

    def _spend_step(self, done: np.ndarray, views: StepViews) -> None:
        """Mark the rows that were spent on resetting, and remember whose turn is next."""
        spent = self._pending
        if (spent & done).any():
            raise FrameContractError(
                f"{self._name(int(np.argmax(spent & done)))} ended an episode in the step that resets it : expected "
                f"{self.env} to be in NEXT_STEP mode; pass its true mode as autoreset="
            )
        views.valid[spent] = False
        views.reward[spent] = 0.0
        self._pending = done
        self._any_pending = bool(done.any())

    def _take_finals(self, done: np.ndarray, views: StepViews, infos: Any) -> list[Final]:
        """The true successors that the env put into its infos, because `views.obs` holds the next reset."""
        name = next((name for name in _FINAL_OBS if infos.get(name) is not None), None)
        if name is None:
            raise FrameContractError(
                f"infos have no final_obs although an episode ended : expected {self.env} to be in SAME_STEP mode; "
                f"pass its true mode as autoreset="
            )
        final, present = infos[name], infos.get("_" + name)
        by_copy = isinstance(final, np.ndarray) and final.dtype == object
        leaves = None if by_copy else self._check_obs(final, name)
        finals = []
        for index in np.flatnonzero(done).tolist():
            if (present is not None and not present[index]) or (by_copy and final[index] is None):
                raise FrameContractError(
                    f"{self._name(index)} ended an episode, but infos['{name}'] lacks its observation"
                )
            values = self._admit(final[index], index) if leaves is None else [leaf[index] for leaf in leaves]
            specs = self.observation_spec.leaves
            finals.append(Final(index, tuple([np.array(v, s.stored) for v, s in zip(values, specs, strict=True)])))
            self._warn_if_aliased(finals[-1], views)
        return finals

    def _warn_if_aliased(self, final: Final, views: StepViews) -> None:
        """Notice envs that reuse one buffer: their reset overwrites the observation that ended the episode."""
        arrays = [(leaf, obs[final.row]) for leaf, obs in zip(final.obs, views.obs, strict=True) if leaf.ndim]
        if self._warned or not arrays or not all(_equal(leaf, obs) for leaf, obs in arrays):
            return
        self._warned = True
        warnings.warn(
            f"{self._name(final.row)} ended an episode with the very observation that the next one begins with : "
            f"the env seems to reuse its observation array, and then SAME_STEP mode loses the terminal observation; "
            f"use NEXT_STEP or DISABLED mode, or return a new array from each step",
            stacklevel=5,
        )

    def _reset_env(self, seeds: Sequence[int | None] | None, mask: np.ndarray | None) -> Leaves:
        """Reset, and copy the observations; the mask is a copy too, because vector envs keep or change theirs."""
        seed: Any = None
        if seeds is not None:
            seed = list(seeds) if self._takes_seed_list else next((s for s in seeds if s is not None), None)
        options = None if mask is None else {"reset_mask": np.array(mask, bool)}
        try:
            answer = self.env.reset(seed=seed, options=options)
        except BaseException as error:
            self._fail("reset", error)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise FrameContractError(f"vector env, reset: expected (observations, infos), got {brief(answer)}")
        leaves = self._check_obs(answer[0], "reset")
        specs = self.observation_spec.leaves
        return tuple([np.array(leaf, spec.stored) for leaf, spec in zip(leaves, specs, strict=True)])

    def _step_env(self, value: Any) -> tuple[Any, Any, Any, Any, Any]:
        try:
            answer: Any = self.env.step(value)
        except BaseException as error:
            self._fail("step", error)
        if not (isinstance(answer, tuple) and len(answer) == 5):
            raise FrameContractError(
                f"vector env, step: expected (observations, rewards, terminated, truncated, infos), got {brief(answer)}"
            )
        return answer

    def _check_obs(self, obs: Any, doing: str) -> list[np.ndarray]:
        """The leaves of batched observations, each checked as one array."""
        leaves = []
        for index, value in enumerate(self.observation_spec.flatten(obs)):
            shape, dtype = self._expected[index]
            if type(value) is not np.ndarray:
                value = np.asarray(value)
            if value.shape != shape or (value.dtype is not dtype and not np.can_cast(value.dtype, dtype, "safe")):
                name = ".".join(self.observation_spec.leaves[index].key)
                raise FrameContractError(
                    f"vector env, {doing}: {name} is wrong : expected {dtype} with shape {shape}, "
                    f"got {value.dtype} with shape {value.shape}"
                )
            leaves.append(value)
        return leaves

    def _check_row(self, value: Any, name: str, kinds: str = "bu") -> np.ndarray:
        """One value for each copy, of these kinds of numbers (some envs give their flags as bytes of 0 and 1)."""
        row = value if type(value) is np.ndarray else np.asarray(value)
        if row.shape != (self.num_envs,) or row.dtype.kind not in kinds:
            raise FrameContractError(
                f"vector env, step: {name} is wrong : expected {'numbers' if 'f' in kinds else 'flags'} with shape "
                f"{(self.num_envs,)}, got {row.dtype} with shape {row.shape}"
            )
        return row

    def _admit(self, obs: Any, index: int) -> list[np.ndarray]:
        spec = self.observation_spec
        try:
            return [leaf.admit(value) for leaf, value in zip(spec.leaves, spec.flatten(obs), strict=True)]
        except FrameContractError as error:
            raise FrameContractError(f"{self._name(index)}, final_obs: {error}") from error

    def _name(self, index: int) -> str:
        return f"env copy {self.first + index}"

    def _fail(self, doing: str, error: BaseException) -> NoReturn:
        """Give up an `AsyncVectorEnv`, whose answers cannot be told apart any more, and name the culprit."""
        self._failed = True
        if self._async is not None:
            self.close()
        if not isinstance(error, Exception):
            raise error
        raise env_failed("vector env", doing, error) from error


def _detect_mode(env: VectorEnv[Any, Any, Any], given: AutoresetMode | str | None) -> AutoresetMode:
    """The mode as given, else as the env's own attribute says, else as its metadata says."""
    own = [getattr(one, "autoreset_mode", None) for one in (env, env.unwrapped)]
    # ale_py writes its mode into the dict of the base class, which would then speak for every other vector env.
    stated = env.metadata.get("autoreset_mode") if env.metadata is not VectorEnv.metadata else None
    mode = next((one for one in (given, *own, stated) if one is not None), None)
    choices = ", ".join(repr(one.value) for one in AutoresetMode)
    if mode is None:
        raise ValueError(
            f"{env} does not say how it resets : expected one of {choices}; pass it as autoreset=, or set it as the "
            f"env's attribute autoreset_mode"
        )
    for one in AutoresetMode:
        if mode is one or (isinstance(mode, str) and mode.lower() in (one.value.lower(), one.name.lower())):
            return one
    raise ValueError(f"autoreset is unknown : expected one of {choices}, got {mode!r}")


def _honours_mask(env: VectorEnv[Any, Any, Any]) -> bool:
    """Whether single copies can be reset: where reset and step are Gymnasium's own, and so are the workers."""
    if isinstance(env, AsyncVectorEnv) and env.worker is not None:
        return False
    for kind, names in ((SyncVectorEnv, ("reset", "step")), (AsyncVectorEnv, _ASYNC_METHODS)):
        if isinstance(env, kind):
            return all(getattr(type(env), name) is getattr(kind, name) for name in names)
    return False


def _refuse_lossy(base: object) -> None:
    """Refuse the JAX envs of Gymnasium 1.4: when one copy is reset, the others' step is undone but paid."""
    if any(kind.__name__ == "FunctionalJaxVectorEnv" for kind in type(base).__mro__):
        raise ValueError(
            f"{base} loses the transitions of all copies whenever one is reset (an error of Gymnasium); "
            f"pass the env's id instead, which makes single envs"
        )


def _close_async(env: VectorEnv[Any, Any, Any], base: "AsyncVectorEnv[Any, Any]", *, graceful: bool) -> None:
    """Ask, wait, terminate, kill. Gymnasium's own `close` waits without a limit for workers that are gone."""
    asking = threading.Thread(target=_quietly_close, args=(env,), daemon=True)
    if graceful and all(process.is_alive() for process in base.processes):
        asking.start()
        asking.join(_CLOSE_TIMEOUT_S)
    for stop, patience_s in (("terminate", _TERMINATE_TIMEOUT_S), ("kill", _CLOSE_TIMEOUT_S)):
        alive = [process for process in base.processes if process.is_alive()]
        for process in alive:
            getattr(process, stop)()
        deadline = time.monotonic() + patience_s
        for process in alive:
            process.join(max(deadline - time.monotonic(), 0.0))
    if asking.is_alive():  # its worker is gone, so that it learns of it now
        asking.join(_CLOSE_TIMEOUT_S)
    for pipe in base.parent_pipes:
        if pipe is not None:
            pipe.close()
    base.closed = True


def _quietly_close(env: VectorEnv[Any, Any, Any]) -> None:
    with contextlib.suppress(Exception):  # whatever is left is terminated
        env.close()


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays hold the same bytes (NaN equals NaN)."""
    return (
        first.shape == second.shape and np.ascontiguousarray(first).tobytes() == np.ascontiguousarray(second).tobytes()
    )
