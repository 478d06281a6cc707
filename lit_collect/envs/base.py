"""`BatchedEnv`: the one protocol between environments and the rollout, and `EnvFactory`.

What every implementation guarantees:

* a stored transition is one that happened: ``next_obs`` is the true successor, at the end of an episode its terminal
  observation, while ``obs`` is what the policy sees next;
* rows with ``valid=False`` are no transitions (a source that spends a step on resetting) and are never counted;
* rewards and both flags are unaltered, both flags may be True at once;
* actions are checked before any env moves, and every env gets an array of its own;
* what is handed out is copied before the env is called again;
* an error names the env copy, and what it was doing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_collect.envs.spaces import LeafSpec, TreeSpec, empty_leaves
from lit_collect.errors import WorkerFailedError, text_of

Leaves = tuple[np.ndarray, ...]
"""Arrays of a step: of an action, one for each leaf of its space; of what is seen, one for each `BatchedEnv.leaves`."""


class StepViews(NamedTuple):
    """Where one step is written: views of preallocated storage, one row for each env copy.

    `terminated` and `truncated` come filled with False, `valid` with True: an env writes the exceptions only.
    """

    obs: Leaves
    """[N, ...] per leaf: what the policy sees next."""
    reward: np.ndarray
    """[N] float32."""
    terminated: np.ndarray
    """[N] bool."""
    truncated: np.ndarray
    """[N] bool."""
    valid: np.ndarray
    """[N] bool: False where the row is no transition."""


class Final(NamedTuple):
    """The true successor of a row whose episode ended, where `StepViews.obs` already holds the next reset."""

    row: int
    """Env copy."""
    obs: Leaves
    """[...] per leaf, owned by the receiver."""


class StepOut(NamedTuple):
    """One step of all env copies."""

    next_obs: Leaves
    """[N, ...] per leaf: the true successor."""
    reward: np.ndarray
    """[N] float32."""
    terminated: np.ndarray
    """[N] bool."""
    truncated: np.ndarray
    """[N] bool."""
    obs: Leaves
    """[N, ...] per leaf: what the policy sees next."""
    is_init: np.ndarray
    """[N] bool: rows of `obs` that begin an episode."""
    valid: np.ndarray
    """[N] bool: False where the row is no transition."""


class BatchedEnv(ABC):
    """N env copies that are stepped together."""

    num_envs: int
    """Env copies N."""
    observation_spec: TreeSpec
    """What one copy observes."""
    action_spec: TreeSpec
    """What one copy takes."""
    first: int = 0
    """Index of the first copy among those of its rank, for messages."""
    info_leaves: tuple[LeafSpec, ...] = ()
    """Values of its info that come with an observation; known after the first reset."""
    may_mask: bool = False
    """Whether a step can be spent on resetting, so that rows may be no transitions."""

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """What comes with every step: the leaves of the observation, then those of the info."""
        return self.observation_spec.leaves + self.info_leaves

    @abstractmethod
    def reset(self, seeds: Sequence[int | None] | None = None, mask: np.ndarray | None = None) -> Leaves:
        """Begin new episodes.

        Args:
            seeds: one for each env copy, or None to go on with the copies' own generators.
            mask: [N] bool, which copies to reset (None: all).

        Returns:
            [N, ...] per leaf, owned by the caller; rows that were not reset are what the policy saw last.
        """

    @abstractmethod
    def step_into(self, action: Leaves, views: StepViews) -> Sequence[Final]:
        """Step all copies and write what happened into `views`.

        Args:
            action: [N, ...] per leaf, checked and encoded by `ActionEncoder`.
            views: where to write.

        Returns:
            The true successors of rows that ended and were reset within this step.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all copies; may be called again."""

    def step(self, action: Leaves) -> StepOut:
        """Step all copies into fresh arrays: the readable form of `step_into`."""
        n = self.num_envs
        obs = empty_leaves(self.leaves, (n,))
        flags = np.zeros((2, n), bool)
        views = StepViews(obs, np.zeros(n, np.float32), flags[0], flags[1], np.ones(n, bool))
        next_obs = None
        is_init = np.zeros(n, bool)
        finals = self.step_into(action, views)
        if finals:
            next_obs = tuple(leaf.copy() for leaf in obs)
            for index, leaves in finals:
                is_init[index] = True
                for target, leaf in zip(next_obs, leaves, strict=True):
                    target[index] = leaf
        is_init |= ~views.valid
        return StepOut(next_obs or obs, views.reward, flags[0], flags[1], obs, is_init, views.valid)


def env_failed(who: str, doing: str, error: Exception) -> WorkerFailedError:
    """What is raised from an exception of an env: who it was, what it was doing, the error's type and text."""
    return WorkerFailedError(f"{who} failed in {doing}: {type(error).__name__}: {text_of(error)}")


def close_each(envs: Mapping[str, Any]) -> None:
    """Close every env, whatever the others do; the first error is raised at the end.

    Args:
        envs: by their names in messages.

    Raises:
        WorkerFailedError: if one raised.
    """
    failures = []
    for who, env in envs.items():
        try:
            env.close()
        except Exception as error:  # the others must be closed all the same
            failures.append((env_failed(who, "close", error), error))
    for failure, cause in failures:
        raise failure from cause


def brief(value: object) -> str:
    """The kind of a value that an env returned, and how many parts it has."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__


class EnvFactory(ABC):
    """Makes one env; called once for each env copy, in the process that steps it.

    Subclass it to name an env of your own in a YAML file by ``class_path`` and ``init_args``.

    Example:
        >>> import gymnasium
        >>> class Short(EnvFactory):
        ...     def __call__(self) -> gymnasium.Env:
        ...         return gymnasium.make("CartPole-v1", max_episode_steps=20)
    """

    @abstractmethod
    def __call__(self) -> Any:
        """Make the env: a `gymnasium.Env`, or a `gymnasium.vector.VectorEnv` holding several copies."""
