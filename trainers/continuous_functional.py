"""The mathematics of soft and of deterministic actor-critics: pure functions, each with its equation and its source.

Nothing here knows Lightning, environments or batches. Shapes: M is a minibatch, D the size of a continuous action, A
the number of discrete ones, and 2 stands for twin critics. Actions are in the units of the policy, [-1, 1]. What is
called a discount is ``gamma ** n * (1 - terminated)``: a terminated row has no future, a truncated one has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = [
    "clipped_double_target",
    "deterministic_policy_loss",
    "discrete_soft_policy_loss",
    "discrete_soft_value",
    "smoothed_action",
    "soft_policy_loss",
    "soft_target",
    "squashed_normal_log_prob",
    "tanh_log_derivative",
    "temperature_loss",
    "twin_q_loss",
]

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_TWO_LOG_TWO = 2 * math.log(2.0)


def tanh_log_derivative(x: Tensor) -> Tensor:
    r"""Logarithm of the derivative of tanh, without cancellation at either end.

    .. math::
        \log\left(1 - \tanh^2 x\right) = 2 \left(\log 2 - x - \mathrm{softplus}(-2x)\right)

    The density of a squashed variable is corrected by it: Haarnoja et al. 2018, `arXiv:1812.05905
    <https://arxiv.org/abs/1812.05905>`_, appendix C.

    Args:
        x: Any shape, before tanh.

    Returns:
        Same shape, <= 0; finite for every finite ``x``.

    Example:
        >>> tanh_log_derivative(torch.tensor([1.0, 50.0]))
        tensor([ -0.8676, -98.6137])
    """
    return _TWO_LOG_TWO - 2.0 * (x + softplus(-2.0 * x))


def squashed_normal_log_prob(noise: Tensor, log_std: Tensor, unsquashed: Tensor) -> Tensor:
    r"""Log-density of ``a = tanh(u)``, ``u = mu + sigma * eps``, with independent components.

    .. math::
        \log \pi(a) = -\sum_d \left( \tfrac12 \epsilon_d^2 + \log \sigma_d + \tfrac12 \log 2\pi
        + \log\left(1 - \tanh^2 u_d\right) \right)

    Haarnoja et al. 2018, `arXiv:1812.05905 <https://arxiv.org/abs/1812.05905>`_, equation 26.

    Args:
        noise: ``[..., D]`` standard normal, ``(u - mu) / sigma``.
        log_std: ``[..., D]`` log sigma.
        unsquashed: ``[..., D]`` u.

    Returns:
        ``[...]`` in nats, of actions in (-1, 1).
    """
    # 2 log 2 of the correction and the normal's constant are the same for every component
    constant = (_HALF_LOG_TWO_PI + _TWO_LOG_TWO) * noise.shape[-1]
    terms = 2.0 * (unsquashed + softplus(-2.0 * unsquashed)) - log_std - 0.5 * noise.square()
    return terms.sum(-1) - constant


def soft_target(
    reward: Tensor, next_q: Tensor, next_log_prob: Tensor, discount: Tensor, temperature: Tensor | float
) -> Tensor:
    r"""Target of soft critics: the smaller of two estimates, and the entropy of what comes next.

    .. math::
        y = r + \gamma \left( \min_{i=1,2} \bar Q_i(s', a') - \alpha \log \pi(a'|s') \right), \qquad a' \sim \pi(s')

    Haarnoja et al. 2018, `arXiv:1812.05905 <https://arxiv.org/abs/1812.05905>`_, equations 5 to 7, with the minimum of
    section 6.

    Args:
        reward: ``[M]``.
        next_q: ``[2, M]`` of the target critics.
        next_log_prob: ``[M]`` of the actions that ``next_q`` is about.
        discount: ``[M]`` gamma ** n * (1 - terminated).
        temperature: alpha >= 0.

    Returns:
        ``[M]``.
    """
    return reward + discount * (torch.minimum(next_q[0], next_q[1]) - temperature * next_log_prob)


def clipped_double_target(reward: Tensor, next_q: Tensor, discount: Tensor) -> Tensor:
    r"""Target of twin critics, Fujimoto et al. 2018, `arXiv:1802.09477 <https://arxiv.org/abs/1802.09477>`_, eq. 10.

    .. math::
        y = r + \gamma \min_{i=1,2} \bar Q_i(s', a')

    Args:
        reward: ``[M]``.
        next_q: ``[2, M]`` of the target critics.
        discount: ``[M]`` gamma ** n * (1 - terminated).

    Returns:
        ``[M]``.
    """
    return reward + discount * torch.minimum(next_q[0], next_q[1])


def twin_q_loss(q: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    r"""Half the squared error of both critics, the sum of theirs.

    .. math::
        L = \frac1M \sum_i \frac{w_i}2 \left( (Q_1 - y_i)^2 + (Q_2 - y_i)^2 \right)

    Haarnoja et al. 2018, `arXiv:1812.05905 <https://arxiv.org/abs/1812.05905>`_, equation 5.

    Args:
        q: ``[2, M]``.
        target: ``[M]`` without gradient.
        weight: ``[M]`` importance of each row; None is 1.

    Returns:
        Scalar loss.
    """
    errors = (q - target).square().sum(0)
    return 0.5 * (errors if weight is None else weight * errors).mean()


def soft_policy_loss(log_prob: Tensor, q: Tensor, temperature: Tensor | float) -> Tensor:
    r"""What the soft policy minimises, by the reparametrised action in both terms.

    .. math::
        L = \frac1M \sum_i \left( \alpha \log \pi(a_i|s_i) - \min_{j=1,2} Q_j(s_i, a_i) \right)

    Haarnoja et al. 2018, `arXiv:1812.05905 <https://arxiv.org/abs/1812.05905>`_, equation 9.

    Args:
        log_prob: ``[M]`` of actions that were drawn with gradient.
        q: ``[2, M]`` of critics that learn nothing from this.
        temperature: alpha >= 0.

    Returns:
        Scalar loss.
    """
    return (temperature * log_prob - torch.minimum(q[0], q[1])).mean()


def deterministic_policy_loss(q: Tensor) -> Tensor:
    r"""What a deterministic policy minimises, Fujimoto et al. 2018, `arXiv:1802.09477
    <https://arxiv.org/abs/1802.09477>`_, algorithm 1: the negative value by the first critic.

    .. math::
        L = -\frac1M \sum_i Q_1(s_i, \pi(s_i))

    Args:
        q: ``[2, M]`` of critics that learn nothing from this.

    Returns:
        Scalar loss.
    """  # noqa: D205
    return -q[0].mean()


def temperature_loss(log_temperature: Tensor, entropy: Tensor, target_entropy: float) -> Tensor:
    r"""What makes the temperature rise where the policy's entropy is below its target, and fall above.

    .. math::
        L = \log\alpha \cdot \frac1M \sum_i \left( \mathcal H(\pi(\cdot|s_i)) - \bar{\mathcal H} \right)

    Haarnoja et al. 2018, `arXiv:1812.05905 <https://arxiv.org/abs/1812.05905>`_, equation 18, which has alpha in the
    place of its logarithm. With the logarithm the step does not shrink along with alpha, and alpha stays positive.

    Args:
        log_temperature: Scalar log alpha, the one thing here that is learned.
        entropy: ``[M]`` without gradient, in nats; minus the log-probability of an action will do, as an estimate.
        target_entropy: In nats; negative ones are in order for continuous actions.

    Returns:
        Scalar loss.
    """
    return log_temperature * (entropy.mean() - target_entropy)


def discrete_soft_value(logits: Tensor, q: Tensor, temperature: Tensor | float) -> Tensor:
    r"""Soft value of a state with discrete actions: the expectation over all of them, none is drawn.

    .. math::
        V(s) = \sum_a \pi(a|s) \left( \min_{i=1,2} Q_i(s, a) - \alpha \log \pi(a|s) \right)

    Christodoulou 2019, `arXiv:1910.07207 <https://arxiv.org/abs/1910.07207>`_, equation 10.

    Args:
        logits: ``[M, A]``, finite, not necessarily normalised.
        q: ``[2, M, A]``.
        temperature: alpha >= 0.

    Returns:
        ``[M]``.
    """
    log_probs = logits.log_softmax(-1)
    return (log_probs.exp() * (torch.minimum(q[0], q[1]) - temperature * log_probs)).sum(-1)


def discrete_soft_policy_loss(logits: Tensor, q: Tensor, temperature: Tensor | float) -> Tensor:
    r"""What a discrete soft policy minimises, Christodoulou 2019, `arXiv:1910.07207
    <https://arxiv.org/abs/1910.07207>`_, equation 12: minus the mean of :func:`discrete_soft_value`.

    Args:
        logits: ``[M, A]`` with gradient.
        q: ``[2, M, A]`` without.
        temperature: alpha >= 0.

    Returns:
        Scalar loss.
    """  # noqa: D205
    return -discrete_soft_value(logits, q, temperature).mean()


def smoothed_action(action: Tensor, noise: Tensor, noise_clip: float) -> Tensor:
    r"""Action of the target policy with bounded noise, within [-1, 1].

    .. math::
        \tilde a = \mathrm{clip}\left(\bar\pi(s') + \mathrm{clip}(\epsilon, -c, c), -1, 1\right)

    Similar actions should have similar values: Fujimoto et al. 2018, `arXiv:1802.09477
    <https://arxiv.org/abs/1802.09477>`_, section 5.3.

    Args:
        action: ``[..., D]`` in [-1, 1].
        noise: ``[..., D]``.
        noise_clip: c >= 0.

    Returns:
        ``[..., D]``.

    Raises:
        ValueError: If ``noise_clip`` is negative.

    Example:
        >>> smoothed_action(torch.tensor([0.0, 0.9]), torch.tensor([-3.0, 0.2]), 0.5)
        tensor([-0.5000,  1.0000])
    """
    if noise_clip < 0:
        raise ValueError(f"noise_clip is out of range : expected a number >= 0, got {noise_clip!r}; raise it")
    return (action + noise.clamp(-noise_clip, noise_clip)).clamp(-1.0, 1.0)
