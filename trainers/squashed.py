"""Distributions over actions within bounds: a squashed normal and a clipped one.

Both are what :class:`torch.distributions.Distribution` promises, as far as a collector needs it: ``sample``,
``log_prob`` and ``mode``. Shapes: ``[N, D]`` for the parameters, bounds ``[D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from typing_extensions import override

from trainers.continuous_functional import squashed_normal_log_prob
from trainers.functional import diagonal_normal_log_prob

__all__ = ["ClippedNormal", "TanhNormal"]

_Arguments = dict[str, constraints.Constraint]
_EDGE = 1.0 - 1e-6
"""Where actions that lie on a bound are taken to lie: 0 and 1 have no finite inverse."""


class TanhNormal(Distribution):
    """A normal variable squashed by tanh into bounds, with independent components.

    The density is exact for the distribution's own last sample (from :meth:`sample` or :meth:`rsample`), whose value
    before squashing it remembers. That of other actions goes through the inverse, where float32 leaves few digits
    close to a bound.

    Args:
        loc: ``[N, D]`` means before squashing.
        log_std: ``[N, D]`` logarithms of the standard deviations before squashing.
        center: ``[D]`` or a number, the middle of the bounds.
        half_range: ``[D]`` or a number, from the middle to either bound, > 0.

    Example:
        >>> forces = TanhNormal(torch.zeros(8, 1), torch.zeros(8, 1), center=0.0, half_range=2.0)
        >>> action = forces.sample()
        >>> bool((action.abs() <= 2.0).all()), forces.log_prob(action).shape
        (True, torch.Size([8]))
    """

    arg_constraints: ClassVar[_Arguments] = {}
    support = constraints.independent(constraints.real, 1)
    has_rsample = True

    def __init__(
        self, loc: Tensor, log_std: Tensor, *, center: Tensor | float = 0.0, half_range: Tensor | float = 1.0
    ) -> None:
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)
        self.loc = loc
        self.log_std = log_std
        self.center = center
        self.half_range = half_range
        self._last: tuple[Tensor, Tensor, Tensor] | None = None  # action, noise, unsquashed

    @property
    @override
    def mode(self) -> Tensor:
        """``[N, D]``: the normal's mean, squashed, by which the policy is evaluated (it is the median, strictly)."""
        return self._within(self.loc)

    @property
    @override
    def mean(self) -> Tensor:
        """The same as :attr:`mode`: the true mean has no closed form."""
        return self.mode

    @override
    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw actions without gradient.

        Args:
            sample_shape: Leading dimensions of independent draws.

        Returns:
            ``[*sample_shape, N, D]`` within the bounds.
        """
        return self.rsample(sample_shape)

    @override
    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw actions with gradient.

        Args:
            sample_shape: Leading dimensions of independent draws.

        Returns:
            ``[*sample_shape, N, D]`` within the bounds.
        """
        noise = torch.randn(*sample_shape, *self.loc.shape, dtype=self.loc.dtype, device=self.loc.device)
        unsquashed = torch.addcmul(self.loc, self.log_std.exp(), noise)
        action = self._within(unsquashed)
        self._last = action, noise, unsquashed
        return action

    @override
    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of actions in their own units.

        Args:
            value: ``[..., N, D]`` within the bounds.

        Returns:
            ``[..., N]`` in nats.
        """
        if self._last is not None and value is self._last[0]:
            _, noise, unsquashed = self._last
        else:
            squashed = (value - self.center) / self.half_range
            unsquashed = squashed.clamp(-_EDGE, _EDGE).atanh()
            noise = (unsquashed - self.loc) * (-self.log_std).exp()
        log_scale = torch.as_tensor(self.half_range, dtype=self.loc.dtype, device=self.loc.device).log()
        return squashed_normal_log_prob(noise, self.log_std + log_scale, unsquashed)

    def _within(self, unsquashed: Tensor) -> Tensor:
        return self.center + self.half_range * unsquashed.tanh()


class ClippedNormal(Distribution):
    """A normal variable clipped to bounds, with independent components: an action and its exploration noise.

    Args:
        loc: ``[N, D]`` the actions without noise, within the bounds.
        scale: ``[D]`` or a number, standard deviation of the noise, >= 0.
        low: ``[D]`` lower bounds.
        high: ``[D]`` upper bounds.

    Example:
        >>> noisy = ClippedNormal(torch.ones(8, 1), 0.1, low=-torch.ones(1), high=torch.ones(1))
        >>> bool((noisy.sample() <= 1).all()), noisy.mode[0]
        (True, tensor([1.]))
    """

    arg_constraints: ClassVar[_Arguments] = {}
    support = constraints.independent(constraints.real, 1)

    def __init__(self, loc: Tensor, scale: Tensor | float, *, low: Tensor, high: Tensor) -> None:
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)
        self.loc = loc
        self.scale = scale
        self.low = low
        self.high = high

    @property
    @override
    def mode(self) -> Tensor:
        """``[N, D]``, the action without noise."""
        return self.loc

    @property
    @override
    def mean(self) -> Tensor:
        """The same as :attr:`mode`."""
        return self.loc

    @override
    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw actions.

        Args:
            sample_shape: Leading dimensions of independent draws.

        Returns:
            ``[*sample_shape, N, D]`` within the bounds.
        """
        noise = torch.randn(*sample_shape, *self.loc.shape, dtype=self.loc.dtype, device=self.loc.device)
        return (self.loc + self.scale * noise).clamp(self.low, self.high)

    @override
    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the normal before clipping: a record of how unusual an action is, finite on a bound too.

        Args:
            value: ``[..., N, D]``.

        Returns:
            ``[..., N]`` in nats; 0 where there is no noise, so that nothing infinite is stored.
        """
        scale = torch.as_tensor(self.scale, dtype=self.loc.dtype, device=self.loc.device).expand_as(value)
        if not bool(scale.any()):
            return value.new_zeros(value.shape[:-1])
        return diagonal_normal_log_prob(self.loc.expand_as(value), scale, value)
