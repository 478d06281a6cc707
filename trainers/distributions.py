"""What policies answer, in one place: log-probability and entropy of each kind of answer.

An answer is a mapping of distribution parameters, ``{"logits"}`` of one categorical or ``{"loc", "scale"}`` of
independent normals, or a :class:`MultiCategorical`. The mathematics is in :mod:`trainers.functional`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from typing_extensions import override

from trainers import functional

__all__ = ["Answer", "MultiCategorical", "action_entropy", "action_log_prob", "detached"]


class MultiCategorical(Distribution):
    """Several independent choices at once, each with a number of options of its own.

    Args:
        logits: ``[..., sum(nvec)]`` float, the unnormalised log-probabilities of all choices side by side.
        nvec: Options of each of the D choices.

    Example:
        >>> choices = MultiCategorical(torch.zeros(8, 5), nvec=[2, 3])
        >>> choices.sample().shape, choices.log_prob(torch.zeros(8, 2, dtype=torch.int64)).shape
        (torch.Size([8, 2]), torch.Size([8]))
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.independent(constraints.nonnegative_integer, 1)

    def __init__(self, logits: Tensor, nvec: Sequence[int]) -> None:
        super().__init__(logits.shape[:-1], torch.Size([len(nvec)]), validate_args=False)
        self.logits = logits
        self.nvec = list(nvec)

    @property
    @override
    def mode(self) -> Tensor:
        """``[..., D]`` int64, the most likely option of each choice."""
        return self._largest(self.logits)

    @property
    @override
    def mean(self) -> Tensor:
        """The mode: options have no mean."""
        return self.mode

    @override
    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw options by the Gumbel-max trick (Maddison et al. 2014, arXiv:1411.0030).

        Args:
            sample_shape: Leading dimensions of independent draws.

        Returns:
            ``[*sample_shape, ..., D]`` int64.
        """
        logits = self.logits.expand(*sample_shape, *self.logits.shape)
        return self._largest(logits - torch.empty_like(logits).exponential_().log())

    @override
    def log_prob(self, value: Tensor) -> Tensor:
        """Joint log-probability.

        Args:
            value: ``[..., D]`` options, from 0.

        Returns:
            ``[...]`` in nats.
        """
        return functional.multi_categorical_log_prob(self.logits, self.nvec, value)

    @override
    def entropy(self) -> Tensor:
        """``[...]`` in nats, summed over the choices."""
        return functional.multi_categorical_entropy(self.logits, self.nvec)

    def _largest(self, scores: Tensor) -> Tensor:
        return torch.stack([part.argmax(-1) for part in scores.split(self.nvec, -1)], -1)


Answer = Mapping[str, Tensor] | MultiCategorical
"""What an :class:`~trainers.networks.ActorNetwork` gives."""


def action_log_prob(answer: Answer, action: Tensor) -> Tensor:
    """Log-probability of actions under a policy's answer.

    Args:
        answer: ``{"logits": [N, A]}``, ``{"loc": [N, D], "scale": [N, D]}`` or a :class:`MultiCategorical` ``[N]``.
        action: ``[N]`` int64, ``[N, D]`` float or ``[N, D]`` int64.

    Returns:
        ``[N]`` in nats.
    """
    if isinstance(answer, MultiCategorical):
        return answer.log_prob(action)
    if "logits" in answer:
        return functional.categorical_log_prob(answer["logits"], action)
    return functional.diagonal_normal_log_prob(answer["loc"], answer["scale"], action)


def action_entropy(answer: Answer) -> Tensor:
    """Entropy of a policy's answer.

    Args:
        answer: See :func:`action_log_prob`.

    Returns:
        ``[N]`` in nats.
    """
    if isinstance(answer, MultiCategorical):
        return answer.entropy()
    if "logits" in answer:
        return functional.categorical_entropy(answer["logits"])
    return functional.diagonal_normal_entropy(answer["scale"])


def detached(answer: Answer) -> Answer:
    """The same answer without its gradient.

    Args:
        answer: See :func:`action_log_prob`.
    """
    if isinstance(answer, MultiCategorical):
        return MultiCategorical(answer.logits.detach(), answer.nvec)
    return {name: tensor.detach() for name, tensor in answer.items()}
