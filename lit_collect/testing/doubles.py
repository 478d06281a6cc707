"""Envs and policies for tests, which need no Lightning: worker processes import them."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

Ends = Literal["terminated", "truncated", "both"]
_ENDS = ("terminated", "truncated", "both")


class CountingEnv(gymnasium.Env[np.ndarray, Any]):
    """Observes ``(index, episode, step)``, so that a row in the wrong place shows as a wrong number.

    The reward of a step is ``100 * episode + step``. Episodes are counted from 0 over all resets, steps from 0 at a
    reset. Stepping a finished episode raises, as does stepping before the first reset.

    Args:
        index: which env copy this is.
        lengths: of the episodes, used in turn.
        ends: how episodes end.
        action_space: what it takes; it does not matter what it is given.
        reuse_buffers: return the same observation array, changed in place, each time.

    Example:
        >>> env = CountingEnv(index=7, lengths=(1,))
        >>> env.reset()[0].tolist()
        [7.0, 0.0, 0.0]
        >>> observation, reward, terminated, truncated, info = env.step(0)
        >>> observation.tolist(), reward, terminated, truncated
        ([7.0, 0.0, 1.0], 1.0, True, False)
    """

    def __init__(
        self,
        index: int = 0,
        lengths: Sequence[int] = (3,),
        *,
        ends: Ends = "terminated",
        action_space: spaces.Space[Any] | None = None,
        reuse_buffers: bool = False,
    ) -> None:
        if ends not in _ENDS:
            raise ValueError(f"ends must be one of {', '.join(_ENDS)}, got {ends!r}")
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths must be one or more counts of at least 1, got {lengths!r}")
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(2)
        self.index = index
        self.lengths = tuple(lengths)
        self.terminates, self.truncates = ends != "truncated", ends != "terminated"
        self.episode = -1
        self.elapsed = 0
        self.finished = True
        self.actions: list[Any] = []
        """Every action it was given."""
        self.seeds: list[int | None] = []
        """The seed of every reset."""
        self.closes = 0
        """How often it was closed."""
        self._buffer = np.zeros(3, np.float32) if reuse_buffers else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin the next episode."""
        super().reset(seed=seed, options=options)
        self.seeds.append(seed)
        self.episode += 1
        self.elapsed = 0
        self.finished = False
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Count one step.

        Raises:
            RuntimeError: if there is no running episode.
        """
        if self.finished:
            raise RuntimeError("step() without a running episode")
        self.actions.append(action)
        self.elapsed += 1
        self.finished = self.elapsed >= self.lengths[self.episode % len(self.lengths)]
        reward = 100.0 * self.episode + self.elapsed
        terminated, truncated = self.finished and self.terminates, self.finished and self.truncates
        return self._observe(), reward, terminated, truncated, {}

    def close(self) -> None:
        """Count the call."""
        self.closes += 1

    def _observe(self) -> np.ndarray:
        values = (self.index, self.episode, self.elapsed)
        if self._buffer is None:
            return np.array(values, np.float32)
        self._buffer[:] = values
        return self._buffer


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Plays the same episode, given as lists, again and again.

    Args:
        observations: T + 1 of them: of the reset and of each step.
        rewards: T of them.
        ends: how the episode ends.
        observation_space: by default an unbounded Box of the first observation's shape and dtype.
        action_space: by default ``Discrete(2)``.

    Raises:
        ValueError: if the lists do not fit each other.

    Example:
        >>> env = ScriptedEnv([[0.0], [0.5], [1.0]], [1, 2], ends="truncated")
        >>> env.reset()[0].tolist(), env.step(0)[1], env.step(0)[0].tolist()
        ([0.0], 1, [1.0])
    """

    def __init__(
        self,
        observations: Sequence[Any],
        rewards: Sequence[Any],
        *,
        ends: Ends = "terminated",
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
    ) -> None:
        if len(observations) != len(rewards) + 1:
            raise ValueError(f"expected one observation more than rewards, got {len(observations)} and {len(rewards)}")
        if ends not in _ENDS:
            raise ValueError(f"ends must be one of {', '.join(_ENDS)}, got {ends!r}")
        if observation_space is None:
            first = np.asarray(observations[0], getattr(observations[0], "dtype", np.float32))
            observation_space = spaces.Box(-np.inf, np.inf, first.shape, first.dtype.type)
            observations = [np.asarray(one, first.dtype) for one in observations]
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(2)
        self._observations, self._rewards = list(observations), list(rewards)
        self._terminates, self._truncates = ends != "truncated", ends != "terminated"
        self._elapsed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the episode anew."""
        super().reset(seed=seed, options=options)
        self._elapsed = 0
        return self._observations[0], {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Play the next step."""
        reward = self._rewards[self._elapsed]
        self._elapsed += 1
        done = self._elapsed == len(self._rewards)
        return self._observations[self._elapsed], reward, done and self._terminates, done and self._truncates, {}


class FailingEnv(CountingEnv):
    """Goes wrong at a chosen call: raises, or returns what it must not.

    Args:
        where: which call goes wrong.
        at: the how-manieth of these calls, from 1; every other one is a `CountingEnv`'s.
        error: what to raise there (None: ``RuntimeError("broken on purpose")``).
        answer: return this instead of raising: an observation of a wrong ``shape`` or ``dtype``, or ``None``; a
            ``reward`` that is None (step only); a ``tuple`` that is one item short.
        index: which env copy this is.
        lengths: of the episodes, used in turn.

    Example:
        >>> env = FailingEnv("step", at=2, error=KeyError("door"))
        >>> _ = env.reset(), env.step(0)
        >>> env.step(0)
        Traceback (most recent call last):
        ...
        KeyError: 'door'
    """

    def __init__(
        self,
        where: Literal["init", "reset", "step", "close"] = "step",
        at: int = 1,
        *,
        error: BaseException | None = None,
        answer: Literal["shape", "dtype", "none", "reward", "tuple"] | None = None,
        index: int = 0,
        lengths: Sequence[int] = (3,),
    ) -> None:
        super().__init__(index, lengths)
        self._where, self._at, self._answer = where, at, answer
        self._error = error or RuntimeError("broken on purpose")
        self._calls = {name: count(1) for name in ("init", "reset", "step", "close")}
        self._fails("init")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Reset, or fail."""
        fails = self._fails("reset")
        obs, info = super().reset(seed=seed, options=options)
        if not fails:
            return obs, info
        return (self._broken(obs),) if self._answer == "tuple" else (self._broken(obs), info)  # type: ignore[return-value]

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step, or fail."""
        fails = self._fails("step")
        obs, reward, terminated, truncated, info = super().step(action)
        if not fails:
            return obs, reward, terminated, truncated, info
        if self._answer == "tuple":
            return obs, reward, terminated, info  # type: ignore[return-value]
        return self._broken(obs), None if self._answer == "reward" else reward, terminated, truncated, info

    def close(self) -> None:
        """Close, or fail."""
        super().close()
        self._fails("close")

    def _fails(self, where: str) -> bool:
        """Whether this call returns something wrong; raises if it is to raise."""
        fails = next(self._calls[where]) == self._at and where == self._where
        if fails and self._answer is None:
            raise self._error
        return fails

    def _broken(self, obs: np.ndarray) -> Any:
        broken = {"shape": np.zeros(4, np.float32), "dtype": obs.astype(np.float64), "none": None}
        return broken.get(self._answer, obs)  # type: ignore[arg-type]


class ConstantPolicy(nn.Module):
    """Its action is its parameter, so that the data show which weights acted.

    Args:
        action: a number, or a list of them, for a Box space.
        num_actions: for a Discrete space: the action is the parameter rounded, modulo this number.

    Example:
        >>> import torch
        >>> ConstantPolicy([0.5, 2.0])(torch.zeros(2, 3)).tolist()
        [[0.5, 2.0], [0.5, 2.0]]
        >>> ConstantPolicy(3.0, num_actions=2)(torch.zeros(1, 3)).tolist()
        [1]
    """

    def __init__(self, action: float | Sequence[float] = 0.0, *, num_actions: int | None = None) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.as_tensor(action, dtype=torch.float32))
        self._num_actions = num_actions

    def forward(self, observation: Tensor | Mapping[str, Any]) -> Tensor:
        """The action, once for each row.

        Args:
            observation: [N, ...], or a mapping of such tensors.

        Returns:
            [N, ...] float32 with the action's shape, or [N] int64 for a Discrete space.
        """
        while not isinstance(observation, Tensor):
            observation = next(iter(observation.values()))
        action = self.action if self._num_actions is None else self.action.round().long() % self._num_actions
        return action.expand(len(observation), *self.action.shape)
