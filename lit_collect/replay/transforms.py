"""Sample transforms: what is done to rows on their way out of a buffer, with a look at the rows stored around them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lit_collect.errors import FrameContractError
from lit_collect.frames import (
    INDEX,
    N_STEPS,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Key,
)

Recompute = Callable[[np.ndarray, np.ndarray, Mapping[str, Any]], Any]
"""``(achieved_goal, desired_goal, info)``, as goal environments of Gymnasium define it; vectorised over rows."""


class RowReader(Protocol):
    """What a transform may look at: the rows of the buffer, while nobody writes."""

    rng: np.random.Generator
    """The buffer's own random numbers."""

    def walk(self, positions: np.ndarray, steps: int) -> np.ndarray:
        """[M, steps] int64: a row and those that followed it in its episode, -1 beyond what is known of that."""
        ...

    def ahead(self, positions: np.ndarray) -> np.ndarray:
        """[M] int64: rows of the episode that are known from each row on, itself included."""
        ...

    def take(self, positions: np.ndarray) -> TensorDictBase:
        """Rows, [M] or of more dimensions, that are the caller's own; -1 gives any row."""
        ...

    def column(self, key: Key, positions: np.ndarray) -> Tensor:
        """One leaf of rows; -1 gives any row's."""
        ...


class SampleTransform(ABC):
    """Changes each sample of a buffer before it is handed out."""

    needs_order: bool = True
    """Whether it looks at the rows that followed, so that a buffer must keep them in order."""
    takes_slices: bool = False
    """Whether samples may be slices [S, L]; else they are rows [M]."""
    final: bool = False
    """Whether it overwrites what transforms before it made of rewards and successors: then it must be alone in that."""

    @abstractmethod
    def __call__(self, sample: TensorDictBase, rows: RowReader) -> TensorDictBase:
        """Transform a sample.

        Args:
            sample: [M] or, if it takes them, slices [S, L]; its own, may be changed in place. `INDEX` says where the
                rows lie.
            rows: the rows of the buffer.
        """


def sum_discounted(rewards: Tensor, gamma: float, known: Tensor) -> Tensor:
    """Discounted sums of rewards: ``R = sum over k of gamma**k r_k`` (Sutton 1988; as used by Mnih et al. 2016).

    Args:
        rewards: [M, n, ...] float, those of one row after another.
        gamma: discount of one step, 0-1.
        known: [M, n] bool, which of them there are; the others count for nothing.

    Returns:
        [M, ...] in the rewards' dtype.
    """
    discounts = gamma ** torch.arange(rewards.shape[1], dtype=torch.float64)
    shape = (*known.shape, *[1] * (rewards.ndim - 2))
    weights = (discounts * known).reshape(shape)
    return torch.where(known.reshape(shape), rewards, 0).mul(weights).sum(1).to(rewards.dtype)


class NStep(SampleTransform):
    """n-step returns: rewards are summed over n rows, and the successor is the one that the last of them led to.

    The rows that followed are looked up in the buffer, up to the end of the episode or as far as it is known. The
    target is ``next.reward + gamma ** n_steps * V(next.observation)`` without a bootstrap where
    ``next.terminated``; ``("collector", "n_steps")`` holds how many rewards were summed.

    Args:
        n: rewards that are summed, at least 1.
        gamma: discount of one step, 0-1.

    Example:
        >>> from tensordict import TensorDict
        >>> from lit_collect.replay import ReplayBuffer
        >>> rows = TensorDict({"next": {"reward": torch.tensor([[1.0], [2.0], [4.0]]), "done": torch.tensor([[False],
        ...     [False], [True]])}}, batch_size=[3])
        >>> buffer = ReplayBuffer(8, batch_size=3, sampler="without_replacement", transforms=[NStep(2, gamma=0.5)])
        >>> sample = buffer.extend(rows) is not None and buffer.sample()
        >>> sorted(zip(sample["next", "reward"].flatten().tolist(), sample["collector", "n_steps"].tolist()))
        [(2.0, 2), (4.0, 1), (4.0, 2)]
    """

    final = True

    def __init__(self, n: int, gamma: float) -> None:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n must be an integer, got {n!r}")
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be between 0 and 1, got {gamma!r}")
        self.n = n
        self.gamma = gamma

    def __call__(self, sample: TensorDictBase, rows: RowReader) -> TensorDictBase:
        """Replace rewards, flags and successors of [M] rows.

        Raises:
            FrameContractError: if rows have no rewards.
        """
        if sample.get(NEXT_REWARD, None) is None:
            raise FrameContractError(
                f"n-step returns need the rewards of rows, but rows lack {NEXT_REWARD} : expected that key, got "
                f"{sorted(map(str, sample.keys(True, True)))}; write it, or leave NStep out"
            )
        walked = rows.walk(sample.get(INDEX).numpy(), self.n)
        known = walked >= 0
        count = known.sum(1)
        last = rows.take(walked[np.arange(len(walked)), count - 1])
        reward = sum_discounted(rows.column(NEXT_REWARD, walked), self.gamma, torch.from_numpy(known))
        sample.set("next", last.get("next"))
        sample.set(NEXT_REWARD, reward)
        sample.set(N_STEPS, torch.from_numpy(count))
        return sample


class Hindsight(SampleTransform):
    """Hindsight experience replay, strategy "future" (Andrychowicz et al. 2017, arXiv:1707.01495).

    In a part of the rows the goal is exchanged for one that was achieved later in the same episode, and the reward is
    computed anew. Needs the observations of a goal environment: ``"achieved_goal"`` and ``"desired_goal"``.

    Args:
        compute_reward: of the environment: ``(achieved_goal, desired_goal, info)`` with arrays of [K, ...] goals and
            an empty info, gives [K] rewards.
        ratio: part of the rows that get another goal, 0-1; 0.8 is the paper's four goals for each real one.
        compute_terminated: of the environment, with the same arguments, gives [K] bools; None leaves the flags as they
            are, as is right where episodes end by time alone.

    Example:
        >>> from tensordict import TensorDict
        >>> from lit_collect.replay import ReplayBuffer
        >>> def reward(achieved, desired, info):
        ...     return -1.0 * np.any(achieved != desired, -1)
        >>> goals = {"achieved_goal": torch.zeros(1, 2), "desired_goal": torch.ones(1, 2)}
        >>> led_to = {**goals, "reward": -2 * torch.ones(1, 1), "done": torch.ones(1, 1) > 0}
        >>> rows = TensorDict({**goals, "next": led_to}, batch_size=[1])
        >>> buffer = ReplayBuffer(8, batch_size=1, transforms=[Hindsight(reward, ratio=1.0)])
        >>> sample = buffer.extend(rows) is not None and buffer.sample()
        >>> sample["desired_goal"].tolist(), sample["next", "reward"].item() == 0
        ([[0.0, 0.0]], True)
    """

    final = True

    def __init__(
        self, compute_reward: Recompute, ratio: float = 0.8, *, compute_terminated: Recompute | None = None
    ) -> None:
        for name, value in (("compute_reward", compute_reward), ("compute_terminated", compute_terminated)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function (achieved_goal, desired_goal, info), got {value!r}")
        if compute_reward is None:
            raise TypeError("compute_reward must be a function (achieved_goal, desired_goal, info), got None")
        if not 0 <= ratio <= 1:
            raise ValueError(f"ratio must be between 0 and 1, got {ratio!r}")
        self.compute_reward = compute_reward
        self.ratio = ratio
        self.compute_terminated = compute_terminated

    def __call__(self, sample: TensorDictBase, rows: RowReader) -> TensorDictBase:
        """Relabel a part of [M] rows.

        Raises:
            FrameContractError: if rows have no goals, or a function gives no number for each row, or no finite reward.
        """
        for key in _GOALS:
            if sample.get(key, None) is None:
                raise FrameContractError(
                    f"hindsight needs the observations of a goal environment, but rows lack {'.'.join(key)!r} : "
                    f"expected 'achieved_goal' and 'desired_goal' in its Dict space"
                )
        chosen = np.flatnonzero(rows.rng.random(len(sample)) < self.ratio)
        if not len(chosen):
            return sample
        here = sample.get(INDEX).numpy()[chosen]
        later = (rows.rng.random(len(chosen)) * rows.ahead(here)).astype(np.int64)  # steps, so that all are as likely
        goals = rows.column(_ACHIEVED, _at(rows, here, later))
        index = torch.from_numpy(chosen)
        for key in (_DESIRED, _NEXT_DESIRED):
            sample.get(key)[index] = goals
        achieved, desired = sample.get(_ACHIEVED)[index].numpy(), goals.numpy()
        reward = _checked("compute_reward", self.compute_reward(achieved, desired, {}), len(chosen))
        _check_finite(reward, achieved, desired)
        _put(sample, NEXT_REWARD, index, reward)
        if self.compute_terminated is not None:
            terminated = _checked("compute_terminated", self.compute_terminated(achieved, desired, {}), len(chosen))
            _put(sample, NEXT_TERMINATED, index, terminated)
            truncated = sample.get(NEXT_TRUNCATED)[index].reshape(len(chosen))
            _put(sample, NEXT_DONE, index, terminated.bool() | truncated)
        return sample


_ACHIEVED: Key = ("next", "achieved_goal")
_DESIRED: Key = ("desired_goal",)
_NEXT_DESIRED: Key = ("next", "desired_goal")
_GOALS: tuple[Key, ...] = (_ACHIEVED, _DESIRED, _NEXT_DESIRED)
_STRIDE = 64


def _at(rows: RowReader, positions: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """[K] positions of the rows so many steps on, in strides: episodes may have many rows."""
    found, left = positions.copy(), steps.copy()
    while (left > 0).any():
        going = np.flatnonzero(left > 0)
        stride = np.minimum(left[going], _STRIDE)
        walked = rows.walk(found[going], int(stride.max()) + 1)
        found[going] = walked[np.arange(len(going)), stride]
        left[going] -= stride
    return found


def _checked(name: str, values: Any, count: int) -> Tensor:
    given = torch.as_tensor(np.asarray(values))
    if given.numel() != count:
        raise FrameContractError(
            f"{name} must give one number for each of {count} rows, got shape {tuple(given.shape)}; compute it over "
            f"the last dimension of the goals, for instance np.linalg.norm(achieved_goal - desired_goal, axis=-1)"
        )
    return given.reshape(count)


def _check_finite(reward: Tensor, achieved: np.ndarray, desired: np.ndarray) -> None:
    wrong = np.flatnonzero(~reward.isfinite().numpy())
    if len(wrong):
        first = wrong[0]
        raise FrameContractError(
            f"compute_reward must give finite rewards, got {reward[first].item()} (in {len(wrong)} of {len(reward)} "
            f"rows), first for achieved_goal={achieved[first].tolist()} and desired_goal={desired[first].tolist()}; "
            f"compute them from the two goals alone, the info is empty"
        )


def _put(sample: TensorDictBase, key: Key, index: Tensor, values: Tensor) -> None:
    column = sample.get(key)
    column[index] = values.to(column.dtype).reshape(len(index), *column.shape[1:])
