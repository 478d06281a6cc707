"""Our own vectoriser: N `gymnasium.Env` copies stepped in one loop, reset at once where an episode ends.

It is the default, faster than `gymnasium.vector.SyncVectorEnv`, and it never spends a step on resetting.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from lit_collect.envs.base import BatchedEnv, Final, Leaves, StepViews, brief, close_each, env_failed
from lit_collect.envs.infos import InfoReader, observed_texts
from lit_collect.envs.spaces import LeafSpec, TreeSpec, empty_leaves
from lit_collect.errors import FrameContractError, LitCollectError, WorkerFailedError


class DirectEnv(BatchedEnv):
    """N env copies in this process.

    Args:
        envs: the copies; they must share their spaces.
        keep_float64: store float64 observations as they are instead of as float32.
        max_frames_per_traj: cut episodes after that many frames (truncated, not terminated).
        info_keys: declared values of the copies' infos (see `InfoReader`).
        owned: whether `close` closes the copies.
        first: index of the first copy among those of its rank, for messages.

    Raises:
        ValueError: if the spaces of two copies differ.
        TypeError: if a space cannot be stored.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        *,
        keep_float64: bool = False,
        max_frames_per_traj: int | None = None,
        info_keys: Sequence[str] = (),
        owned: bool = True,
        first: int = 0,
    ) -> None:
        self.envs = tuple(envs)
        self.first = first
        self.num_envs = len(self.envs)
        space = self.envs[0].observation_space
        texts = observed_texts(info_keys)
        self.observation_spec = TreeSpec.of(space, "observation", keep_float64=keep_float64, text_keys=texts)
        self.action_spec = TreeSpec.of(self.envs[0].action_space, "action")
        self._infos = InfoReader(info_keys, observation_spec=self.observation_spec, action_spec=self.action_spec)
        self._check_spaces()
        self._plain_action = self.action_spec.is_plain
        self._plain_observation = self.observation_spec.is_plain and self.observation_spec.leaves[0].shape != ()
        self._steps = [env.step for env in self.envs]
        self._limit = max_frames_per_traj
        self._ages = [0] * self.num_envs  # frames of the running episodes; counted only under a limit
        self._seen: Leaves | None = None  # what the policy saw last, for partial resets
        self._owned = owned
        self._closed = False

    @property
    def info_leaves(self) -> tuple[LeafSpec, ...]:  # type: ignore[override]  # a constant where infos are not read
        """Values of the infos; an action mask among them is found by the first reset."""
        return self._infos.leaves

    def reset(self, seeds: Sequence[int | None] | None = None, mask: np.ndarray | None = None) -> Leaves:
        """Reset all copies, or those of the mask (see `BatchedEnv.reset`)."""
        seen = None if self._seen is None else tuple(leaf.copy() for leaf in self._seen)
        for index in range(self.num_envs):
            if mask is None or mask[index]:
                leaves = self._reset_one(index, None if seeds is None else seeds[index])
                if seen is None:
                    seen = empty_leaves(self.leaves, (self.num_envs,))
                for target, leaf in zip(seen, leaves, strict=True):
                    target[index] = leaf
        if seen is None:
            raise ValueError("a mask that chooses no copy cannot be the first reset; reset all of them first")
        self._seen = tuple(leaf.copy() for leaf in seen)
        return seen

    def step_into(self, action: Leaves, views: StepViews) -> Sequence[Final]:
        """Step all copies (see `BatchedEnv.step_into`)."""
        self._seen = views.obs
        actions = list(action[0]) if self._plain_action else self._split(action)
        plain = self._plain_observation and not self._infos.leaves
        return self._step_plain(actions, views) if plain else self._step_tree(actions, views)

    def close(self) -> None:
        """Close every copy, whatever the others do; the first error is raised at the end."""
        if self._closed or not self._owned:
            return
        self._closed = True
        close_each({self._name(index): env for index, env in enumerate(self.envs)})

    def _step_plain(self, actions: list[Any], views: StepViews) -> list[Final]:
        """The common case, one array observation: nothing but the work."""
        spec = self.observation_spec.leaves[0]
        shape, dtype, array, steps, limit = spec.shape, spec.dtype, np.ndarray, self._steps, self._limit
        obs_out, rewards, finals = views.obs[0], views.reward, []
        index = 0
        try:
            for index, action in enumerate(actions):
                obs, reward, terminated, truncated, _ = steps[index](action)
                if type(obs) is not array or obs.shape != shape or obs.dtype is not dtype:
                    obs = spec.admit(obs)
                if reward is None:
                    raise FrameContractError("reward is None : expected a number")
                rewards[index] = reward
                if limit is not None:
                    truncated = self._age(index, truncated)
                if terminated or truncated:
                    views.terminated[index] = terminated
                    views.truncated[index] = truncated
                    finals.append(Final(index, (np.array(obs, spec.stored),)))
                    (obs,) = self._reset_one(index, None)
                obs_out[index] = obs
        except Exception as error:
            raise self._explain(index, "step", error) from error
        return finals

    def _step_tree(self, actions: list[Any], views: StepViews) -> list[Final]:
        """Observations of several arrays, scalars, and values of infos."""
        finals = []
        index = 0
        try:
            for index, step in enumerate(self._steps):
                obs, reward, terminated, truncated, info = step(actions[index])
                leaves = self._admit(obs, info)
                if reward is None:
                    raise FrameContractError("reward is None : expected a number")
                views.reward[index] = reward
                if self._limit is not None:
                    truncated = self._age(index, truncated)
                if terminated or truncated:
                    views.terminated[index] = terminated
                    views.truncated[index] = truncated
                    copies = tuple(np.array(v, s.stored) for v, s in zip(leaves, self.leaves, strict=True))
                    finals.append(Final(index, copies))
                    leaves = self._reset_one(index, None)
                for target, leaf in zip(views.obs, leaves, strict=True):
                    target[index] = leaf
        except Exception as error:
            raise self._explain(index, "step", error) from error
        return finals

    def _reset_one(self, index: int, seed: int | None) -> Leaves:
        self._ages[index] = 0
        try:
            answer = self.envs[index].reset(seed=seed)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise FrameContractError(f"expected (observation, info), got {brief(answer)}")
            self._infos.discover(answer[1])
            return self._admit(*answer)
        except Exception as error:
            raise self._explain(index, "reset", error) from error

    def _admit(self, obs: Any, info: Any) -> Leaves:
        spec = self.observation_spec
        leaves = [leaf.admit(value) for leaf, value in zip(spec.leaves, spec.flatten(obs), strict=True)]
        return (*leaves, *self._infos.read(info)) if self._infos.leaves else tuple(leaves)

    def _age(self, index: int, truncated: Any) -> Any:
        self._ages[index] += 1
        return truncated or self._ages[index] >= self._limit  # type: ignore[operator]  # only called under a limit

    def _split(self, action: Leaves) -> list[Any]:
        return [self.action_spec.unflatten([leaf[index] for leaf in action]) for index in range(self.num_envs)]

    def _explain(self, index: int, doing: str, error: Exception) -> LitCollectError:
        """Say whose fault it was: the env's own exception, or what it returned."""
        if isinstance(error, WorkerFailedError):
            return error
        if isinstance(error, FrameContractError):
            return FrameContractError(f"{self._name(index)}, {doing}: {error}")
        if isinstance(error, (TypeError, ValueError)) and error.__traceback__ and error.__traceback__.tb_next is None:
            # Raised in this file, not below it: the tuple could not be unpacked or the reward is no number.
            wanted = "(observation, reward, terminated, truncated, info) with a number as the reward"
            wanted = wanted if doing == "step" else "a reset that takes a seed and gives (observation, info)"
            return FrameContractError(f"{self._name(index)}, {doing}: expected {wanted} ({error})")
        return env_failed(self._name(index), doing, error)

    def _name(self, index: int) -> str:
        return f"env copy {self.first + index}"

    def _check_spaces(self) -> None:
        for index, env in enumerate(self.envs[1:], start=1):
            for name in ("observation_space", "action_space"):
                expected, other = getattr(self.envs[0], name), getattr(env, name)
                if expected != other:
                    raise ValueError(
                        f"{name} of {self._name(index)} differs : "
                        f"expected {expected} as in copy {self.first}, got {other}"
                    )
