"""Running statistics of what an algorithm reads: normalised observations and scaled rewards.

The learner updates them, once for each collected batch, never who acts. They are buffers: those of observations belong
to the policy, and so travel to every worker with its weights; all of them are in checkpoints. Evaluation leaves them
alone. Under several ranks each update is made of all ranks' rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainers import functional

__all__ = [
    "MappingNormalizer",
    "RewardScaler",
    "RunningMoments",
    "RunningNormalizer",
    "merge_moments",
    "normalizer_for",
    "returns_so_far",
]

CLIP = 10.0
"""Normalised values lie in [-CLIP, CLIP]."""
EPSILON = 1e-8
"""Added to variances, so that a constant becomes 0 and not NaN."""

Moments = tuple[Tensor, Tensor, Tensor]
"""Count, mean and (biased) variance."""


def merge_moments(first: Moments, second: Moments) -> Moments:
    r"""Moments of two sets of rows together, Chan, Golub and LeVeque 1983, "Computing the sample variance".

    .. math::
        n = n_a + n_b, \qquad \delta = \mu_b - \mu_a, \qquad \mu = \mu_a + \delta \frac{n_b}{n}, \qquad
        n \sigma^2 = n_a \sigma_a^2 + n_b \sigma_b^2 + \delta^2 \frac{n_a n_b}{n}

    Unlike sums of squares it loses no digits where the mean is large against the deviation.

    Args:
        first: Count (scalar, any dtype), mean and biased variance ``[...]`` of one set; a count of 0 is no rows.
        second: The same of the other.

    Returns:
        The same of both.

    Example:
        >>> one_and_three = (torch.tensor(2), torch.tensor(2.0), torch.tensor(1.0))
        >>> merge_moments(one_and_three, (torch.tensor(1), torch.tensor(8.0), torch.tensor(0.0)))
        (tensor(3), tensor(4.), tensor(8.6667))
    """
    (count_a, mean_a, variance_a), (count_b, mean_b, variance_b) = first, second
    count = count_a + count_b
    share = count_b.to(mean_a.dtype) / count.clamp(min=1)
    delta = mean_b - mean_a
    variance = variance_a * (1 - share) + variance_b * share + delta.square() * share * (1 - share)
    return count, mean_a + delta * share, variance


def returns_so_far(reward: Tensor, ends: Tensor, gamma: float, before: Tensor) -> Tensor:
    r"""Discounted rewards from the beginning of each trajectory up to each step.

    .. math::
        R_t = r_t + \gamma (1 - \mathrm{ends}_{t-1}) R_{t-1}

    Args:
        reward: ``[..., T]`` float, reward of each step.
        ends: ``[..., T]`` bool, steps that the next one does not continue.
        gamma: Discount factor, in [0, 1].
        before: ``[...]`` float, R of the step before the first one; 0 where a trajectory begins.

    Returns:
        ``[..., T]``.

    Example:
        >>> one, ends = torch.ones(4), torch.tensor([False, False, True, False])
        >>> returns_so_far(one, ends, gamma=0.5, before=torch.tensor(4.0))
        tensor([3.0000, 2.5000, 2.2500, 1.0000])
    """
    begins = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)
    earlier = torch.zeros_like(reward)
    earlier[..., 0] = before
    # It is the discounted return of time run backwards, and what was before is the value that completes it.
    backwards = functional.discounted_returns(
        reward.flip(-1), earlier.flip(-1), gamma * (~begins).flip(-1).to(reward.dtype), begins.flip(-1)
    )
    return backwards.flip(-1)


class RunningMoments(nn.Module):
    """Count, mean and variance of all rows that were ever shown, as buffers.

    They keep their precision whatever the module is cast to.

    Args:
        shape: Of one row.

    Example:
        >>> moments = RunningMoments([2])
        >>> moments.update(torch.tensor([[0.0, 5.0], [2.0, 5.0]]))
        >>> moments.mean.tolist(), moments.variance.tolist()
        ([1.0, 5.0], [1.0, 0.0])
    """

    count: Tensor
    """Scalar int64, rows."""
    mean: Tensor
    """``[*shape]`` float64."""
    variance: Tensor
    """``[*shape]`` float64, biased; 1 before the first row."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("variance", torch.ones(tuple(shape), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Take rows into account, those of all ranks.

        Args:
            rows: ``[..., *shape]`` of any dtype.
            mask: ``[...]`` bool, rows that count; None is all.
        """
        rows = rows.reshape(-1, *self.mean.shape) if mask is None else rows[mask]
        if rows.shape[0]:
            variance, mean = torch.var_mean(rows.to(self.mean.dtype), dim=0, correction=0)
        else:
            variance, mean = torch.zeros_like(self.variance), torch.zeros_like(self.mean)
        moments = (self.count, self.mean, self.variance)
        for of_rank in _of_all_ranks((self.count.new_tensor(rows.shape[0]), mean, variance)):
            moments = merge_moments(moments, of_rank)
        for buffer, value in zip((self.count, self.mean, self.variance), moments, strict=True):
            buffer.copy_(value)

    def scale(self) -> Tensor:
        """Standard deviation ``[*shape]``, a little more than 0 also for what never changes."""
        return (self.variance + EPSILON).sqrt()

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningMoments:
        precise = {"mean": self.mean, "variance": self.variance}
        super()._apply(fn, recurse)
        for name, tensor in precise.items():
            moved = getattr(self, name)
            if moved.dtype != tensor.dtype and not moved.is_meta:
                setattr(self, name, tensor.to(moved.device))
        return self


class RunningNormalizer(RunningMoments):
    """Shifts and scales observations to mean 0 and standard deviation 1 over all rows that it was shown, and clips.

    Args:
        shape: Of one observation.

    Example:
        >>> normalizer = RunningNormalizer([1])
        >>> normalizer.update(torch.tensor([[1.0], [3.0]]))
        >>> normalizer(torch.tensor([[3.0], [1000.0]]))
        tensor([[ 1.],
                [10.]])
    """

    @override
    def forward(self, observation: Tensor) -> Tensor:
        """Normalise.

        Args:
            observation: ``[..., *shape]`` of any dtype.

        Returns:
            Same shape, float32, or float64 where the observation is.
        """
        dtype = torch.float64 if observation.dtype is torch.float64 else torch.float32
        return ((observation - self.mean) / self.scale()).clamp_(-CLIP, CLIP).to(dtype)


class MappingNormalizer(nn.Module):
    """A normaliser for each part of a dict observation that has one; the other parts pass.

    Args:
        normalizers: By name in the observation.
    """

    def __init__(self, normalizers: Mapping[str, Normalizer]) -> None:
        super().__init__()
        self._names = list(normalizers)
        self.parts = nn.ModuleList(normalizers.values())  # names may hold dots, which those of modules must not

    @torch.no_grad()
    def update(self, observation: Mapping[str, Any], mask: Tensor | None = None) -> None:
        """Take rows into account, those of all ranks.

        Args:
            observation: Holds at least the normalised parts, each ``[..., *shape]``.
            mask: ``[...]`` bool, rows that count; None is all.
        """
        for name, part in zip(self._names, self.parts, strict=True):
            part.update(observation[name], mask)  # type: ignore[operator]

    @override
    def forward(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Normalise the parts that are.

        Args:
            observation: By name.

        Returns:
            A new mapping of all parts.
        """
        normalized = {name: observation[name] for name in observation.keys()}  # noqa: SIM118  # iterating a TensorDict gives rows
        for name, part in zip(self._names, self.parts, strict=True):
            normalized[name] = part(observation[name])
        return normalized


Normalizer = RunningNormalizer | MappingNormalizer


def normalizer_for(spec: Mapping[str, Any]) -> Normalizer | None:
    """A normaliser for an observation space, None where nothing in it needs one.

    Boxes are normalised but for those of uint8, which the networks divide by 255.

    Args:
        spec: Description of the observation space (see :mod:`trainers.networks`).

    Example:
        >>> normalizer_for({"kind": "discrete", "n": 2, "start": 0}) is None
        True
    """
    kind = spec.get("kind")
    if kind == "box" and spec.get("dtype") != "uint8":
        return RunningNormalizer(spec["shape"])
    if kind not in ("dict", "tuple"):
        return None
    inner = spec["spaces"] if kind == "dict" else {str(i): part for i, part in enumerate(spec["spaces"])}
    normalizers = {name: normalizer_for(part) for name, part in inner.items()}
    found = {name: normalizer for name, normalizer in normalizers.items() if normalizer is not None}
    return MappingNormalizer(found) if found else None


class RewardScaler(nn.Module):
    """Divides rewards by the standard deviation of the discounted return so far, and clips them.

    As in Engstrom et al. 2020, `arXiv:2005.12729 <https://arxiv.org/abs/2005.12729>`_, algorithm 1: rewards are scaled,
    not shifted. The sums of running episodes go on from batch to batch, for each env copy; they are not saved, since a
    resumed run begins new episodes.

    Args:
        gamma: Discount factor, in [0, 1].
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.moments = RunningMoments([])
        self._gamma = gamma
        self._running: Tensor | None = None  # [N] sum so far of what the last batch left open
        self._traj_ids: Tensor | None = None  # [N] whose it is

    @override
    @torch.no_grad()
    def forward(
        self, reward: Tensor, ends: Tensor, traj_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Take the rewards of the next batch into account, then scale them.

        Args:
            reward: ``[N, T]``.
            ends: ``[N, T]`` bool, rows that the next row does not continue.
            traj_ids: ``[N, T]`` int64; None: a line goes on where the same line of the batch before was left.
            mask: ``[N, T]`` bool, rows that count; None is all.

        Returns:
            ``[N, T]`` of the dtype of ``reward``.
        """
        returns = returns_so_far(reward.double(), ends, self._gamma, self._left_open(reward, traj_ids))
        self._running = returns[..., -1].masked_fill(ends[..., -1], 0.0)
        self._traj_ids = None if traj_ids is None else traj_ids[..., -1].clone()
        self.moments.update(returns, mask)
        return (reward / self.moments.scale()).clamp(-CLIP, CLIP).to(reward.dtype)

    def _left_open(self, reward: Tensor, traj_ids: Tensor | None) -> Tensor:
        """``[N]`` sums of the trajectories that this batch continues."""
        nothing = reward.new_zeros(reward.shape[:-1], dtype=torch.float64)
        if self._running is None or self._running.shape != nothing.shape:
            return nothing
        if traj_ids is None or self._traj_ids is None:
            return self._running
        return torch.where(traj_ids[..., 0] == self._traj_ids, self._running, nothing)


def _of_all_ranks(moments: Moments) -> list[Moments]:
    """Those of each rank, in the same order everywhere."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [moments]
    own = torch.cat([part.to(torch.float64).reshape(-1) for part in moments])
    gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(gathered, own)
    shape, size = moments[1].shape, math.prod(moments[1].shape)
    return [
        (whole[0].to(torch.int64), whole[1 : 1 + size].view(shape), whole[1 + size :].view(shape)) for whole in gathered
    ]
