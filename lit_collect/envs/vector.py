"""`VectorEnvAdapter`: `gymnasium.vector` envs as a `BatchedEnv`, exact in all three autoreset modes.

How a step ends an episode depends on the mode:

* DISABLED, and NEXT_STEP where single copies can be reset: the copies that ended are reset at once, by a masked
  ``reset``; no step is wasted.
* NEXT_STEP elsewhere: the env spends the following step of that copy on resetting. That row is no transition, it is
  marked ``valid=False``.
* SAME_STEP: the env has reset already and gives the true successor in ``infos["final_obs"]``.

Whether a masked reset can be relied on is known for `SyncVectorEnv`, `AsyncVectorEnv` and ALE's `AtariVectorEnv` alone:
`CartPoleVectorEnv` takes the mask and resets all copies, and wrappers such as `RecordEpisodeStatistics` forget the
running episodes. What else particular envs do otherwise is in `lit_collect.envs.vector_quirks`.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from lit_collect.envs.base import BatchedEnv, Final, Leaves, StepViews, brief, env_failed
from lit_collect.envs.infos import InfoReader, observed_texts
from lit_collect.envs.spaces import LeafSpec, TreeSpec
from lit_collect.envs.torch_arrays import device_of, to_numpy, to_tensors, tree_to_numpy
from lit_collect.envs.vector_quirks import (
    bound_errors,
    close_async,
    describe_env,
    detect_mode,
    honours_mask,
    narrowed_info,
    read_spaces,
    refuse_frozen_texts,
    refuse_lossy,
    seed_giver,
)
from lit_collect.errors import FrameContractError

_FINAL_OBS = ("final_obs", "final_observation")  # the second name is Gymnasium 0.29's and still in use


class VectorEnvAdapter(BatchedEnv):
    """A vector env in NEXT_STEP, SAME_STEP or DISABLED mode.

    Envs that give torch tensors get their actions as tensors, on their own device.

    Args:
        env: the vector env; `AsyncVectorEnv` and ``copy=False`` are fine.
        autoreset: its mode (None: what the env itself says), as the enum, its value or its name.
        keep_float64: store float64 observations as they are instead of as float32.
        max_frames_per_traj: cut episodes after that many frames (truncated, not terminated).
        info_keys: declared values of the infos (see `InfoReader`); at an end in SAME_STEP mode those of
            ``infos["final_info"]`` belong to the terminal observation, and are not reported where it is missing.
        owned: whether `close` closes the env.
        first: index of its first copy among those of its rank, for messages.

    Raises:
        ValueError: if the mode is unknown, if episodes cannot be cut in this mode, or if the env is known to lose
            transitions or texts, or to hand out some of its copies at a time.
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
        info_keys: Sequence[str] = (),
        owned: bool = True,
        first: int = 0,
    ) -> None:
        self.env = env
        self.first = first
        self.mode = detect_mode(env, autoreset)
        self.num_envs = env.num_envs
        read_spaces(env.unwrapped)
        self.observation_spec = TreeSpec.of(
            env.single_observation_space,
            "observation",
            keep_float64=keep_float64,
            text_keys=observed_texts(info_keys),
        )
        self.action_spec = TreeSpec.of(env.single_action_space, "action")
        self._infos = InfoReader(info_keys, observation_spec=self.observation_spec, action_spec=self.action_spec)
        base = env.unwrapped
        refuse_lossy(base)
        refuse_frozen_texts(base, self.observation_spec.leaves)
        self._async = base if isinstance(base, AsyncVectorEnv) else None
        if self._async is not None:
            bound_errors(self._async)
        self._seed = seed_giver(base, first)
        self._honours_mask = honours_mask(env)
        # A worker without shared memory forgets only by stepping that its copy is to be reset (Gymnasium 1.4).
        forgetful = self._async is None or self._async.shared_memory
        self._resets_at_once = self.mode is AutoresetMode.DISABLED or (
            self.mode is AutoresetMode.NEXT_STEP and self._honours_mask and forgetful
        )
        self._pending_survives_reset = not forgetful
        self.may_mask = self.mode is AutoresetMode.NEXT_STEP and not self._resets_at_once
        if max_frames_per_traj is not None and not self._resets_at_once:
            raise ValueError(
                f"rollout.max_frames_per_traj cannot be had from {describe_env(env)} in {self.mode.name} mode : "
                f"expected a vector env that can reset single copies; give single envs, or limit the episodes inside "
                f"the env"
            )
        self._limit = max_frames_per_traj
        self._ages = np.zeros(self.num_envs, np.int64)  # frames of the running episodes; counted only under a limit
        self._pending = np.zeros(self.num_envs, bool)  # copies that spend their next step on resetting
        self.spent_reward = 0.0
        """The largest reward of the last steps that were spent on resetting; it counts for nothing, and should be 0."""
        self._any_pending = False
        self._expected = tuple(((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self.observation_spec.leaves)
        self._begun = False
        self._seen_infos: Leaves = ()  # what the policy saw last of the infos, for partial resets
        self.device: torch.device | None = None
        """Where an env of torch tensors takes its actions; None leaves it to the env."""
        self._device: torch.device | None = None  # where they go; None: the env takes arrays
        self._owned = owned
        self._failed = False
        self._closed = False
        self._warned = self._warned_of_infos = False

    @property
    def info_leaves(self) -> tuple[LeafSpec, ...]:  # type: ignore[override]  # a constant where infos are not read
        """Values of the infos; an action mask among them is found by the first reset."""
        return self._infos.leaves

    def reset(self, seeds: Sequence[int | None] | None = None, mask: np.ndarray | None = None) -> Leaves:
        """Reset all copies, or those of the mask (see `BatchedEnv.reset`).

        `SyncVectorEnv`, `AsyncVectorEnv` and `AtariVectorEnv` take one seed for each copy, envpool takes none, and any
        other vector env gets the first.

        Raises:
            ValueError: if a mask leaves copies out and the env is not known to honour it.
        """
        if mask is None or mask.all():
            leaves = self._reset_env(seeds, None)
            chosen = np.ones(self.num_envs, bool)
        elif not self._honours_mask and self.mode is not AutoresetMode.DISABLED:
            raise ValueError(f"{describe_env(self.env)} cannot reset single copies; reset all of them")
        else:
            leaves = self._reset_env(seeds, mask)
            chosen = mask
            for leaf, seen in zip(leaves[len(self._expected) :], self._seen_infos, strict=True):
                leaf[~chosen] = seen[~chosen]  # infos of a partial reset are those of the copies that were reset
        self._seen_infos = tuple(leaf.copy() for leaf in leaves[len(self._expected) :])
        self._ages[chosen] = 0
        if not self._pending_survives_reset:
            self._pending[chosen] = False
            self._any_pending = bool(self._pending.any())
        return leaves

    def step_into(self, action: Leaves, views: StepViews) -> Sequence[Final]:
        """Step all copies (see `BatchedEnv.step_into`)."""
        # copies, in the space's dtype: a vector env may keep or change what it is given
        own: list[Any] = [leaf.astype(spec.dtype) for leaf, spec in zip(action, self.action_spec.leaves, strict=True)]
        if own[0].shape[0] != self.num_envs:  # envpool would end the process
            raise ValueError(f"expected one action for each of {self.num_envs} env copies, got {own[0].shape[0]}")
        if self._device is not None:
            own = to_tensors(own, self._device)
        value = own[0] if self.action_spec.is_plain else self.action_spec.unflatten(own)
        obs, reward, terminated, truncated, infos = self._step_env(value)
        if self._seen_infos:
            self._seen_infos = views.obs[len(self._expected) :]
        for target, leaf in zip(views.obs, self._check_leaves(obs, infos, "step"), strict=True):
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
            close_async(self.env, self._async, graceful=not self._failed)
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
        for position, (target, leaf) in enumerate(zip(views.obs, begun, strict=True)):
            observed = position < len(self._expected)
            if observed and not self._honours_mask and not _equal(target[~done], leaf[~done]):
                raise FrameContractError(
                    f"{describe_env(self.env)} changed copies that it was not to reset : expected it to honour "
                    f"options['reset_mask']"
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
                f"{describe_env(self.env)} to be in NEXT_STEP mode; pass its true mode as autoreset="
            )
        views.valid[spent] = False
        self.spent_reward = float(np.abs(views.reward[spent]).max(initial=0.0))
        views.reward[spent] = 0.0
        self._pending = done
        self._any_pending = bool(done.any())

    def _take_finals(self, done: np.ndarray, views: StepViews, infos: Any) -> list[Final]:
        """The true successors that the env put into its infos, because `views.obs` holds the next reset."""
        name = next((name for name in _FINAL_OBS if infos.get(name) is not None), None)
        if name is None:
            raise FrameContractError(
                f"infos have no final_obs although an episode ended : expected {describe_env(self.env)} to be in "
                f"SAME_STEP mode, and to report the observations that ended episodes; pass its true mode as autoreset="
            )
        final, present = infos[name], infos.get("_" + name)
        present = None if present is None else to_numpy(present)
        by_copy = isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object)
        leaves = None if by_copy else self._check_obs(final, name)
        told = self._final_infos(infos.get("final_info")) if self._infos.leaves else None
        finals = []
        for index in np.flatnonzero(done).tolist():
            if (present is not None and not present[index]) or (by_copy and final[index] is None):
                raise FrameContractError(
                    f"{self._name(index)} ended an episode, but infos['{name}'] lacks its observation"
                )
            values = self._admit(final[index], index) if leaves is None else [leaf[index] for leaf in leaves]
            values += [column[index] for column in told or ()]
            finals.append(
                Final(index, tuple([np.array(v, s.stored) for v, s in zip(values, self.leaves, strict=True)]))
            )
            self._warn_if_aliased(finals[-1], views)
        return finals

    def _warn_if_aliased(self, final: Final, views: StepViews) -> None:
        """Notice envs that reuse one buffer: their reset overwrites the observation that ended the episode."""
        observed = list(zip(final.obs, views.obs, strict=True))[: len(self._expected)]
        arrays = [(leaf, obs[final.row]) for leaf, obs in observed if leaf.ndim]
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
        seed = None if seeds is None else self._seed(seeds, mask)
        options = None if mask is None else {"reset_mask": np.array(mask, bool)}
        try:
            answer = self.env.reset(seed=seed, options=options)
        except BaseException as error:
            self._fail("reset", error)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise FrameContractError(f"vector env, reset: expected (observations, infos), got {brief(answer)}")
        obs, infos = answer
        if not self._begun:
            self._begun = True
            own = device_of(self.env, self.observation_spec.flatten(obs)[0])
            self._device = self.device if own is not None and self.device is not None else own
            told = infos if self._device is None else tree_to_numpy(infos)
            self._infos.discover_all(told, self.num_envs)
        leaves = self._check_leaves(obs, infos, "reset")
        return tuple([np.array(leaf, spec.stored) for leaf, spec in zip(leaves, self.leaves, strict=True)])

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

    def _check_leaves(self, obs: Any, infos: Any, doing: str) -> list[np.ndarray]:
        """The leaves of batched observations and infos."""
        leaves = self._check_obs(obs, doing)
        return leaves + self._read_infos(infos) if self._infos.leaves else leaves

    def _read_infos(self, infos: Any) -> list[np.ndarray]:
        infos = infos if self._device is None else tree_to_numpy(infos)
        narrowed = None if self._warned_of_infos else narrowed_info(self.env.unwrapped, infos, self._infos.leaves)
        if narrowed is not None:
            self._warned_of_infos = True
            warnings.warn(narrowed, stacklevel=6)
        return self._infos.read_all(infos, self.num_envs, first=self.first)

    def _final_infos(self, given: Any) -> list[np.ndarray]:
        """What the infos said of the terminal observations: nothing, one mapping of arrays, or mappings by copy."""
        if given is None or isinstance(given, Mapping):
            return self._read_infos(given or {})
        rows = [self._infos.read(tree_to_numpy(info) if isinstance(info, Mapping) else {}) for info in given]
        return [np.array(column) for column in zip(*rows, strict=True)]

    def _check_obs(self, obs: Any, doing: str) -> list[np.ndarray]:
        """The leaves of batched observations, each checked as one array."""
        leaves = []
        for index, value in enumerate(self.observation_spec.flatten(obs)):
            shape, dtype = self._expected[index]
            if type(value) is not np.ndarray:
                texts = self.observation_spec.leaves[index].is_text
                value = self._encode_texts(value, index) if texts else to_numpy(value)
            if value.shape != shape or (value.dtype is not dtype and not np.can_cast(value.dtype, dtype, "safe")):
                name = ".".join(self.observation_spec.leaves[index].key)
                raise FrameContractError(
                    f"vector env, {doing}: {name} is wrong : expected {dtype} with shape {shape}, "
                    f"got {value.dtype} with shape {value.shape}"
                )
            leaves.append(value)
        return leaves

    def _encode_texts(self, texts: Any, index: int) -> np.ndarray:
        return np.stack([self._encode_text(text, index, row) for row, text in enumerate(texts)])

    def _encode_text(self, text: Any, index: int, row: int) -> np.ndarray:
        try:
            return self.observation_spec.leaves[index].admit(text)
        except FrameContractError as error:
            raise FrameContractError(f"{self._name(row)}: {error}") from error

    def _check_row(self, value: Any, name: str, kinds: str = "bu") -> np.ndarray:
        """One value for each copy, of these kinds of numbers (some envs give their flags as bytes of 0 and 1)."""
        row = value if type(value) is np.ndarray else to_numpy(value)
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


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays hold the same bytes (NaN equals NaN)."""
    return (
        first.shape == second.shape and np.ascontiguousarray(first).tobytes() == np.ascontiguousarray(second).tobytes()
    )
