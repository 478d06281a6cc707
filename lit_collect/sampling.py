"""Drawing actions from distribution parameters, without `torch.distributions` objects in the hot loop.

A `Family` knows its parameters by the names that policies give them. Sampling draws the same numbers from torch's
global generator as the `torch.distributions` class of the same name does, in a third of its time; log-probabilities
are left to the end of the batch, where all rows are computed at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, distributions

from lit_collect.config import Exploration
from lit_collect.errors import FrameContractError


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of distribution over actions, as functions of its parameters."""

    parameters: tuple[str, ...]
    """Names of the parameters, in the order in which the functions take them."""
    sample: Callable[..., Tensor]
    """(parameters) -> action."""
    mode: Callable[..., Tensor]
    """(parameters) -> the most likely action (of a normal, also its mean)."""
    log_prob: Callable[..., Tensor]
    """(action, parameters) -> log-probability."""
    sampler: Callable[[], Callable[..., Tensor]] | None = None
    """Makes a faster `sample` for one actor; None if there is none."""

    def chooser(self, exploration: Exploration) -> Callable[..., Tensor]:
        """How an action is taken from the parameters."""
        if exploration != "random":
            return self.mode
        return self.sample if self.sampler is None else self.sampler()


def sample_categorical(logits: Tensor) -> Tensor:
    """Draw indices: ``argmax(p / q)`` with q exponential, which is what `torch.multinomial` does inside.

    Args:
        logits: [N, A] float, unnormalised log-probabilities.

    Returns:
        [N] int64.
    """
    p = torch.softmax(logits, -1)
    return p.div_(torch.empty_like(p).exponential_()).argmax(-1)


class CategoricalSampler:
    """The same as `sample_categorical`, on the CPU as ``argmax(logits - log q)`` in NumPy: in half the time.

    It keeps the memory of q, so that one object serves one actor.
    """

    def __init__(self) -> None:
        self._shape: tuple[int, ...] | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Draw indices: [N, A] float -> [N] int64."""
        if logits.dtype is not torch.float32 or not logits.is_cpu:
            return sample_categorical(logits)
        if logits.shape != self._shape:
            with torch.inference_mode(False):
                self._noise = torch.empty(logits.shape)
            self._shape, self._array = logits.shape, self._noise.numpy()
        array = self._array
        self._noise.exponential_()
        np.log(array, array)
        np.subtract((logits.detach() if logits.requires_grad else logits).numpy(), array, array)
        return torch.from_numpy(array.argmax(-1))


def mode_categorical(logits: Tensor) -> Tensor:
    """The most likely index: [N, A] -> [N] int64."""
    return logits.argmax(-1)


def log_prob_categorical(action: Tensor, logits: Tensor) -> Tensor:
    """Log-probability of indices: [..., ] int64 and [..., A] float -> [...] float."""
    return torch.log_softmax(logits, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def masked_logits(logits: Tensor, action_mask: Tensor) -> Tensor:
    """Logits under which forbidden actions are never drawn: half the lowest number of the dtype in their places.

    Unlike minus infinity it leaves entropies and gradients finite, and rows that forbid everything (after an
    episode's end) free of NaN.

    Args:
        logits: [..., A] float, unnormalised log-probabilities.
        action_mask: [..., A] bool, or numbers that are 0 where an action is forbidden.

    Returns:
        [..., A] float; `logits` are left as they are.

    Example:
        >>> mask = torch.tensor([[True, False, True]])
        >>> masked_logits(torch.zeros(1, 3), mask).softmax(-1).tolist()
        [[0.5, 0.0, 0.5]]
    """
    # half of it, so that subtracting a normaliser does not reach minus infinity in half precision
    return logits.masked_fill(~action_mask.bool(), torch.finfo(logits.dtype).min / 2)


def sample_allowed(allowed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw indices uniformly among those that are allowed.

    Args:
        allowed: [N, A] bool, at least one in each row.
        rng: where the numbers come from.

    Returns:
        [N] int64.
    """
    chosen = rng.integers(0, allowed.sum(1))  # how many allowed ones come before
    return (allowed.cumsum(1) > chosen[:, None]).argmax(1)


def sample_normal(loc: Tensor, scale: Tensor) -> Tensor:
    """Draw from independent normals: [N, D] float and [N, D] float -> [N, D] float."""
    return torch.normal(loc, scale.expand_as(loc))


def mode_normal(loc: Tensor, scale: Tensor) -> Tensor:
    """The mean: [N, D] float -> [N, D] float."""
    return loc


def log_prob_normal(action: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    r"""Log-density of each value: float [...] -> float [...], not summed.

    .. math:: -((a - \mu)/\sigma)^2/2 - \ln \sigma - \ln(2\pi)/2

    Raises:
        FrameContractError: if loc and scale differ in their dimensions, because what is [D] for one step would be
            spread over the wrong dimensions of a batch.
    """
    if loc.ndim != scale.ndim:
        raise FrameContractError(
            f"the policy's scale must have one row for each env copy, as loc does : expected {loc.ndim - 1} dimensions "
            f"for one step, got {scale.ndim - 1}; use scale.expand_as(loc)"
        )
    return -0.5 * ((action - loc) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)


CATEGORICAL = Family(
    parameters=("logits",),
    sample=sample_categorical,
    mode=mode_categorical,
    log_prob=log_prob_categorical,
    sampler=CategoricalSampler,
)
NORMAL = Family(parameters=("loc", "scale"), sample=sample_normal, mode=mode_normal, log_prob=log_prob_normal)
FAMILIES = (CATEGORICAL, NORMAL)


def family_of(distribution: distributions.Distribution) -> tuple[Family, tuple[Tensor, ...]] | None:
    """Family and parameters of a distribution object whose sampling can be done here, else None.

    Args:
        distribution: with batch shape [N]; exactly a Categorical, or a Normal (perhaps within Independent).
    """
    if type(distribution) is distributions.Independent:
        distribution = distribution.base_dist
    if type(distribution) is distributions.Categorical:
        return CATEGORICAL, (distribution.logits,)
    if type(distribution) is distributions.Normal:
        return NORMAL, (distribution.loc, distribution.scale)
    return None


def choose_from(distribution: distributions.Distribution, exploration: Exploration) -> Tensor:
    """An action from any distribution object.

    Args:
        distribution: whatever the policy returned.
        exploration: "random" samples; "mode" and "mean" take those; "deterministic" takes the distribution's own
            deterministic sample, its mode, or its mean, whichever exists first.

    Raises:
        NotImplementedError: if the distribution lacks what was asked for.
    """
    if exploration == "random":
        return distribution.sample()
    if exploration != "deterministic":
        try:
            return getattr(distribution, exploration)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{type(distribution).__name__} has no {exploration} to act with; use another rollout.exploration"
            ) from error
    for name in ("deterministic_sample", "mode", "mean"):
        try:
            value = getattr(distribution, name)
        except (AttributeError, NotImplementedError):
            continue
        return value() if callable(value) else value
    raise NotImplementedError(f"{type(distribution).__name__} has neither mode nor mean to act deterministically with")


def joint(log_prob: Tensor, event_dims: int) -> Tensor:
    """Sum a log-probability over the trailing dimensions of one action."""
    return log_prob.sum(tuple(range(-event_dims, 0))) if event_dims else log_prob
