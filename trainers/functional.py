"""The mathematics of the trainers: pure functions on tensors, each with its equation and its source.

Nothing here knows Lightning, environments or batches. Shapes: T is time and always the last dimension of ``[..., T]``,
A the number of discrete actions, D the size of a continuous one; M is a minibatch. Every function works on any device,
keeps the floating dtype it is given, and can be differentiated where that has a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "approx_kl",
    "categorical_entropy",
    "categorical_log_prob",
    "clip_fraction",
    "diagonal_normal_entropy",
    "diagonal_normal_log_prob",
    "discounted_returns",
    "explained_variance",
    "generalized_advantage",
    "multi_categorical_entropy",
    "multi_categorical_log_prob",
    "normalize",
    "ppo_policy_loss",
    "value_loss",
    "vtrace",
]


def generalized_advantage(
    reward: Tensor, value: Tensor, next_value: Tensor, discount: Tensor, done: Tensor, lambda_: float
) -> Tensor:
    r"""Generalized advantage estimation, Schulman et al. 2016, `arXiv:1506.02438 <https://arxiv.org/abs/1506.02438>`_.

    .. math::
        \delta_t = r_t + \gamma_t V(s_{t+1}) - V(s_t), \qquad
        A_t = \delta_t + \gamma_t \lambda (1 - \mathrm{done}_t) A_{t+1}, \qquad A_T = 0

    Two flags, two jobs: a *terminated* step has no future, so its discount is 0; any *done* step is the last one of its
    trajectory, so the recursion is cut behind it. A truncated step keeps its discount and so bootstraps from
    ``next_value``, which must therefore be the value of the true successor (the terminal observation), never of the
    first observation after a reset.

    Args:
        reward: ``[..., T]`` float, reward of each step.
        value: ``[..., T]`` float, V(s_t).
        next_value: ``[..., T]`` float, V of the true successor of each step.
        discount: ``[..., T]`` float, gamma * (1 - terminated).
        done: ``[..., T]`` bool, terminated | truncated.
        lambda_: Trade between bias (0, the TD error) and variance (1, return minus value), in [0, 1].

    Returns:
        ``[..., T]`` advantages; ``advantage + value`` is the target of the critic.

    Raises:
        ValueError: If the shapes differ or ``lambda_`` is outside [0, 1].
        TypeError: If ``done`` is not boolean.

    Example:
        >>> one = torch.ones(3)
        >>> generalized_advantage(one, 0 * one, 0 * one, 0.5 * one, torch.tensor([False, True, False]), lambda_=1.0)
        tensor([1.5000, 1.0000, 1.0000])
    """
    _check_unit_interval("lambda_", lambda_)
    _check_time_series(done, reward=reward, value=value, next_value=next_value, discount=discount)
    delta = reward + discount * next_value - value
    return _discounted_sum(delta, (discount * lambda_).masked_fill(done, 0.0))


def discounted_returns(reward: Tensor, next_value: Tensor, discount: Tensor, done: Tensor) -> Tensor:
    r"""Discounted return up to the cut, completed with the value of the last successor.

    .. math::
        G_t = r_t + \gamma_t \left\{ \begin{array}{ll} V(s_{t+1}) & \text{if } \mathrm{done}_t \text{ or } t = T-1 \\
        G_{t+1} & \text{otherwise} \end{array} \right.

    The Monte-Carlo target (Sutton and Barto 2018, section 3.3) and the limit lambda = 1 of generalized advantage
    estimation: ``discounted_returns(...) - value`` equals ``generalized_advantage(..., lambda_=1)``.

    Args:
        reward: ``[..., T]`` float, reward of each step.
        next_value: ``[..., T]`` float, V of the true successor; read only where a trajectory is cut.
        discount: ``[..., T]`` float, gamma * (1 - terminated).
        done: ``[..., T]`` bool, terminated | truncated.

    Returns:
        ``[..., T]`` returns.

    Raises:
        ValueError: If the shapes differ.
        TypeError: If ``done`` is not boolean.
    """
    _check_time_series(done, reward=reward, next_value=next_value, discount=discount)
    cut = done.clone()
    cut[..., -1:] = True
    bootstrap = (discount * next_value).masked_fill(~cut, 0.0)
    return _discounted_sum(reward + bootstrap, discount.masked_fill(cut, 0.0))


def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    discount: Tensor,
    done: Tensor,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""V-trace targets and advantages, Espeholt et al. 2018, `arXiv:1802.01561 <https://arxiv.org/abs/1802.01561>`_.

    .. math::
        \rho_t = \min(\bar\rho, e^{\ell_t}), \qquad c_t = \lambda \min(\bar c, e^{\ell_t}), \qquad
        \delta_t = \rho_t \left(r_t + \gamma_t V(s_{t+1}) - V(s_t)\right)

        v_t = V(s_t) + \delta_t + \gamma_t c_t (1 - \mathrm{done}_t) \left(v_{t+1} - V(s_{t+1})\right), \qquad
        v_T = V(s_T)

        A_t = \rho_t \left(r_t + \gamma_t q_{t+1} - V(s_t)\right), \qquad
        q_{t+1} = V(s_{t+1}) + \lambda (1 - \mathrm{done}_t) \left(v_{t+1} - V(s_{t+1})\right)

    Rows of an older policy are weighted by what the policy of today thinks of their actions; the two bounds keep the
    variance finite. With lambda = 1 this is the paper. Below 1, advantages look ahead as far as the targets do, so
    that on policy (every ratio 1, bounds at least 1) both are generalized advantage estimation: ``target - value`` and
    ``advantage`` equal ``generalized_advantage(...)``. The two flags mean what they mean there.

    Args:
        log_ratio: ``[..., T]`` float, log-probability of the action under the policy being trained minus that under
            the policy that acted.
        reward: ``[..., T]`` float, reward of each step.
        value: ``[..., T]`` float, V(s_t).
        next_value: ``[..., T]`` float, V of the true successor of each step.
        discount: ``[..., T]`` float, gamma * (1 - terminated).
        done: ``[..., T]`` bool, terminated | truncated: nothing is carried over such a step.
        lambda_: Trade between bias (0) and variance (1), in [0, 1].
        rho_bar: Bound on the weight of each TD error, >= 0; decides which policy the values are of.
        c_bar: Bound on what is carried from one step to the one before, >= 0; decides how fast values get there. The
            paper assumes ``c_bar <= rho_bar``.

    Returns:
        ``[..., T]`` targets of the critic and ``[..., T]`` advantages of the policy gradient, weighted by rho.

    Raises:
        ValueError: If the shapes differ, ``lambda_`` is outside [0, 1] or a bound is negative.
        TypeError: If ``done`` is not boolean.

    Example:
        >>> one, done = torch.ones(3), torch.zeros(3, dtype=torch.bool)
        >>> vtrace((0.5 * one).log(), one, 0 * one, 0 * one, one, done)
        (tensor([0.8750, 0.7500, 0.5000]), tensor([0.8750, 0.7500, 0.5000]))
    """
    _check_unit_interval("lambda_", lambda_)
    _check_non_negative("rho_bar", rho_bar)
    _check_non_negative("c_bar", c_bar)
    _check_time_series(done, log_ratio=log_ratio, reward=reward, value=value, next_value=next_value, discount=discount)
    ratio = log_ratio.exp()
    rho = ratio.clamp(max=rho_bar)
    carried = (discount * lambda_).masked_fill(done, 0.0)
    delta = rho * (reward + discount * next_value - value)
    correction = _discounted_sum(delta, carried * ratio.clamp(max=c_bar))  # v_t - V(s_t)
    ahead = torch.nn.functional.pad(correction[..., 1:], (0, 1))
    return value + correction, torch.addcmul(delta, rho * carried, ahead)


def _discounted_sum(term: Tensor, decay: Tensor) -> Tensor:
    """Solve ``y_t = term_t + decay_t * y_{t+1}``, ``y_T = 0``, over the last dimension.

    The recursion is associative, so it is solved by doubling (Blelloch 1990, parallel prefix): after the pass with
    ``span`` every y_t holds its first ``2 * span`` terms. That is log2(T) passes of whole-tensor operations, not T.
    """
    total, weight = term, decay
    span, length = 1, term.shape[-1]
    while span < length:
        # y_t += weight_t * y_{t+span}; rows closer than `span` to the end are complete already
        head, tail = total.split((length - span, span), dim=-1)
        total = torch.cat((torch.addcmul(head, weight[..., :-span], total[..., span:]), tail), dim=-1)
        weight = torch.cat((weight[..., :-span] * weight[..., span:], weight[..., -span:]), dim=-1)
        span *= 2
    return total


def normalize(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to zero mean and unit (biased) standard deviation over all elements.

    Args:
        x: Any non-empty shape, float.
        eps: Added to the standard deviation, so that a constant or a single element gives 0 and not NaN.

    Returns:
        Same shape.
    """
    std, mean = torch.std_mean(x, correction=0)
    return (x - mean) / (std + eps)


def ppo_policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip: float) -> Tensor:
    r"""Clipped surrogate objective of PPO, Schulman et al. 2017, `arXiv:1707.06347 <https://arxiv.org/abs/1707.06347>`_.

    .. math::
        L = -\frac1M \sum_i \min\left(\rho_i A_i, \mathrm{clip}(\rho_i, 1-\epsilon, 1+\epsilon) A_i\right), \qquad
        \rho_i = \frac{\pi(a_i|s_i)}{\pi_\mathrm{old}(a_i|s_i)}

    The minimum is taken in the equal form :math:`\min(\rho_i A_i, A_i + \epsilon |A_i|)`: the clip only ever binds from
    above for a positive and from below for a negative advantage. The bound needs no gradient, which halves the work.

    Args:
        log_prob: ``[M]`` log-probability of the actions under the policy being trained.
        old_log_prob: ``[M]`` the same under the policy that acted.
        advantage: ``[M]``.
        clip: epsilon >= 0.

    Returns:
        Scalar loss.

    Raises:
        ValueError: If the shapes differ or ``clip`` is negative.
    """
    _check_non_negative("clip", clip)
    _check_same_shape(log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    ratio = (log_prob - old_log_prob).exp()
    bound = torch.add(advantage, advantage.abs(), alpha=clip)
    return -torch.minimum(ratio * advantage, bound).mean()


def value_loss(value: Tensor, target: Tensor, old_value: Tensor | None = None, clip: float | None = None) -> Tensor:
    r"""Mean squared error of the critic, optionally with the clipping of Schulman et al.'s PPO code.

    .. math::
        L = \frac1M \sum_i (V_i - G_i)^2 \quad\text{or}\quad \frac1M \sum_i \max\left((V_i - G_i)^2,
        (V^\mathrm{old}_i + \mathrm{clip}(V_i - V^\mathrm{old}_i, -\epsilon, \epsilon) - G_i)^2\right)

    The clipped form is studied in Andrychowicz et al. 2020, `arXiv:2006.05990 <https://arxiv.org/abs/2006.05990>`_.

    Args:
        value: ``[M]`` V(s) of the critic being trained.
        target: ``[M]`` without gradient.
        old_value: ``[M]`` V(s) when the data were collected; with ``clip`` only.
        clip: epsilon >= 0 in units of the return; with ``old_value`` only.

    Returns:
        Scalar loss.

    Raises:
        ValueError: If the shapes differ, ``clip`` is negative or only one of ``old_value`` and ``clip`` is given.
    """
    _check_same_shape(value=value, target=target)
    if old_value is None and clip is None:
        return torch.nn.functional.mse_loss(value, target)
    if old_value is None or clip is None:
        missing = "old_value" if old_value is None else "clip"
        raise ValueError(
            f"value clipping is incomplete : expected both old_value and clip, got no {missing}; pass it too"
        )
    _check_non_negative("clip", clip)
    _check_same_shape(value=value, old_value=old_value)
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum((value - target).square(), (clipped - target).square()).mean()


def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """Share of the target's variance that the critic explains, ``1 - Var(target - value) / Var(target)``.

    Args:
        value: Any shape.
        target: Same shape.

    Returns:
        Scalar: 1 is perfect, 0 as good as a constant, negative worse than a constant. 0 where the target is constant.

    Raises:
        ValueError: If the shapes differ.
    """
    _check_same_shape(value=value, target=target)
    total = target.var(correction=0)
    residual = (target - value).var(correction=0)
    return torch.where(total > 0, 1 - residual / total, torch.zeros_like(total))


def approx_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    r"""Low-variance, unbiased, never negative estimate of KL(old || new) from samples of the old policy.

    .. math::
        \frac1M \sum_i \left(\rho_i - 1 - \log \rho_i\right)

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.

    Args:
        log_prob: ``[M]`` under the policy being trained.
        old_log_prob: ``[M]`` under the policy that acted.

    Returns:
        Scalar in nats.

    Raises:
        ValueError: If the shapes differ.
    """
    _check_same_shape(log_prob=log_prob, old_log_prob=old_log_prob)
    log_ratio = log_prob - old_log_prob
    return (log_ratio.expm1() - log_ratio).mean()


def clip_fraction(log_prob: Tensor, old_log_prob: Tensor, clip: float) -> Tensor:
    """Share of rows whose probability ratio lies outside ``[1 - clip, 1 + clip]``.

    Args:
        log_prob: ``[M]`` under the policy being trained.
        old_log_prob: ``[M]`` under the policy that acted.
        clip: epsilon >= 0.

    Returns:
        Scalar in [0, 1].

    Raises:
        ValueError: If the shapes differ or ``clip`` is negative.
    """
    _check_non_negative("clip", clip)
    _check_same_shape(log_prob=log_prob, old_log_prob=old_log_prob)
    return ((log_prob - old_log_prob).expm1().abs() > clip).float().mean()


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Log-probability of discrete actions, ``log softmax(logits)[action]``.

    Args:
        logits: ``[..., A]`` float, not necessarily normalised.
        action: ``[...]`` int64 in [0, A).

    Returns:
        ``[...]`` in nats.

    Raises:
        ValueError: If ``action`` does not have the leading shape of ``logits``.
    """
    if action.shape != logits.shape[:-1]:
        raise ValueError(
            f"action does not fit the logits : expected shape {tuple(logits.shape[:-1])}, got {tuple(action.shape)}; "
            "pass one action index for each row of logits"
        )
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Entropy of a categorical distribution, ``-sum_a p_a log p_a``.

    Args:
        logits: ``[..., A]`` float, finite, not necessarily normalised.

    Returns:
        ``[...]`` in nats, between 0 and log(A).
    """
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def multi_categorical_log_prob(logits: Tensor, nvec: Sequence[int], action: Tensor) -> Tensor:
    """Log-probability of several independent choices at once: the sum over those of each.

    Args:
        logits: ``[..., sum(nvec)]`` float, those of all choices side by side.
        nvec: Options of each of the D choices.
        action: ``[..., D]`` int64, each from 0.

    Returns:
        ``[...]`` in nats.
    """
    parts = zip(logits.split(list(nvec), -1), action.unbind(-1), strict=True)
    return torch.stack([categorical_log_prob(part, index) for part, index in parts]).sum(0)


def multi_categorical_entropy(logits: Tensor, nvec: Sequence[int]) -> Tensor:
    """Entropy of several independent choices: the sum over those of each.

    Args:
        logits: ``[..., sum(nvec)]`` float, finite.
        nvec: Options of each choice.

    Returns:
        ``[...]`` in nats.
    """
    return torch.stack([categorical_entropy(part) for part in logits.split(list(nvec), -1)]).sum(0)


def diagonal_normal_log_prob(loc: Tensor, scale: Tensor, action: Tensor) -> Tensor:
    r"""Log-density of a normal distribution with independent components.

    .. math::
        \log p(a) = -\sum_d \left( \tfrac12 \left(\tfrac{a_d - \mu_d}{\sigma_d}\right)^2 + \log \sigma_d
        + \tfrac12 \log 2\pi \right)

    Args:
        loc: ``[..., D]`` means.
        scale: ``[..., D]`` standard deviations > 0.
        action: ``[..., D]``.

    Returns:
        ``[...]`` in nats.

    Raises:
        ValueError: If the shapes differ.
    """
    _check_same_shape(loc=loc, scale=scale, action=action)
    standardised = (action - loc) / scale
    constant = 0.5 * math.log(2 * math.pi) * loc.shape[-1]
    return -(0.5 * standardised.square() + scale.log()).sum(-1) - constant


def diagonal_normal_entropy(scale: Tensor) -> Tensor:
    r"""Entropy of a normal distribution with independent components.

    .. math::
        H = \sum_d \left( \log \sigma_d + \tfrac12 \log 2 \pi e \right)

    Args:
        scale: ``[..., D]`` standard deviations > 0.

    Returns:
        ``[...]`` in nats.
    """
    return scale.log().sum(-1) + 0.5 * math.log(2 * math.pi * math.e) * scale.shape[-1]


def _check_same_shape(**tensors: Tensor) -> None:
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != reference.shape:
            raise ValueError(
                f"{name} does not fit {first} : expected shape {tuple(reference.shape)}, got {tuple(tensor.shape)}; "
                "pass tensors of one shape, nothing is broadcast"
            )


def _check_time_series(done: Tensor, **tensors: Tensor) -> None:
    if done.dtype != torch.bool:
        raise TypeError(f"done is no flag : expected dtype torch.bool, got {done.dtype}; pass terminated | truncated")
    _check_same_shape(**tensors, done=done)


def _check_unit_interval(name: str, number: float) -> None:
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} is out of range : expected a number in [0, 1], got {number!r}; lower or raise it")


def _check_non_negative(name: str, number: float) -> None:
    if not number >= 0.0:
        raise ValueError(f"{name} is out of range : expected a number >= 0, got {number!r}; raise it")
