"""Pure mathematics of learning values off policy: targets, losses and the epsilon-greedy policy, on plain tensors.

Shapes: M = rows of a minibatch, A = discrete actions, ``...`` = any leading dimensions. Nothing here broadcasts rows
against each other: what belongs to one row has the same leading shape everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_collect import masked_logits

__all__ = [
    "bootstrap_discount",
    "dueling_values",
    "epsilon_greedy_logits",
    "huber_loss",
    "linear_schedule",
    "q_target",
]

LEAST_GREEDY = 1e-5
"""Share of the greedy action beyond chance that is left at epsilon 1: too little to be noticed in what is drawn."""


def bootstrap_discount(terminated: Tensor, gamma: float, n_steps: Tensor | None = None) -> Tensor:
    r"""Weight of the successor's value in a target: nothing after a terminal step, whatever else ended there.

    .. math::
        \gamma_i = \gamma^{n_i} (1 - \mathrm{terminated}_i)

    Args:
        terminated: ``[...]`` bool, the episode ended in the last of the summed steps and the successor is worth 0; a
            step that was only truncated is not marked.
        gamma: Discount factor, in [0, 1].
        n_steps: ``[...]`` int64, rewards that were summed; None is 1 everywhere.

    Returns:
        ``[...]`` float32.

    Raises:
        TypeError: If ``terminated`` is not boolean.

    Example:
        >>> bootstrap_discount(torch.tensor([False, False, True]), 0.5, torch.tensor([1, 3, 2]))
        tensor([0.5000, 0.1250, 0.0000])
    """
    if terminated.dtype != torch.bool:
        raise TypeError(
            f"terminated is no flag : expected dtype torch.bool, got {terminated.dtype}; pass the flags as collected"
        )
    alive = (~terminated).float()
    if n_steps is None:
        return alive.mul_(gamma)
    return alive * torch.pow(gamma, n_steps.to(alive.dtype))


def q_target(
    reward: Tensor,
    discount: Tensor,
    next_value: Tensor,
    *,
    chooser: Tensor | None = None,
    action_mask: Tensor | None = None,
) -> Tensor:
    r"""Target of Q-learning, Watkins 1989, with a network of its own as in Mnih et al. 2015, "Human-level control".

    .. math::
        y = r + \gamma \, Q'(s', \arg\max_a Q(s', a))

    With ``Q' = Q`` this is the maximum. Where another network chooses the action, it is double Q-learning, van Hasselt
    et al. 2016, `arXiv:1509.06461 <https://arxiv.org/abs/1509.06461>`_: a value that is too large by chance is then not
    also the one that is chosen.

    Args:
        reward: ``[M]`` float, summed and discounted over several steps if ``discount`` says so.
        discount: ``[M]`` float, see :func:`bootstrap_discount`.
        next_value: ``[M, A]`` float, Q' of the true successors.
        chooser: ``[M, A]`` float, the values that choose the action; None takes ``next_value``.
        action_mask: ``[M, A]`` bool, the actions that are allowed in the successors; None allows all. A row may forbid
            everything where the discount is 0.

    Returns:
        ``[M]``.

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        >>> one, value = torch.ones(1), torch.tensor([[1.0, 5.0]])
        >>> q_target(one, 0.5 * one, value), q_target(one, 0.5 * one, value, chooser=torch.tensor([[2.0, 1.0]]))
        (tensor([3.5000]), tensor([1.5000]))
    """
    _check_rows(next_value.shape[:-1], reward=reward, discount=discount)
    chooser = next_value if chooser is None else chooser
    _check_rows(next_value.shape, chooser=chooser)
    if action_mask is not None:
        chooser = masked_logits(chooser, action_mask)
    best = next_value.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
    return torch.addcmul(reward.to(best.dtype), discount.to(best.dtype), best)


def huber_loss(value: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    r"""Mean Huber loss, weighted by row: squares near the target, and gradients that are never larger than 1.

    .. math::
        L = \frac1M \sum_i w_i h(V_i - G_i), \qquad h(x) = \min\left(\tfrac12 x^2, |x| - \tfrac12\right)

    Args:
        value: ``[M]`` what is trained.
        target: ``[M]`` without gradient.
        weight: ``[M]`` importance weights of a prioritized sample; None is 1 everywhere.

    Returns:
        Scalar loss.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> huber_loss(torch.tensor([1.0, 3.0]), torch.zeros(2))
        tensor(1.5000)
    """
    _check_rows(value.shape, target=target)
    if weight is None:
        return torch.nn.functional.smooth_l1_loss(value, target)
    _check_rows(value.shape, weight=weight)
    return (weight * torch.nn.functional.smooth_l1_loss(value, target, reduction="none")).mean()


def dueling_values(value: Tensor, advantage: Tensor) -> Tensor:
    r"""Join a dueling network's two streams, Wang et al. 2016, `arXiv:1511.06581 <https://arxiv.org/abs/1511.06581>`_.

    .. math::
        Q(s, a) = V(s) + A(s, a) - \frac{1}{|A|} \sum_{a'} A(s, a')

    Args:
        value: ``[..., 1]``.
        advantage: ``[..., A]``.

    Returns:
        ``[..., A]``.

    Example:
        >>> dueling_values(torch.tensor([10.0]), torch.tensor([1.0, 3.0]))
        tensor([ 9., 11.])
    """
    return value + advantage - advantage.mean(-1, keepdim=True)


def epsilon_greedy_logits(value: Tensor, epsilon: Tensor, action_mask: Tensor | None = None) -> Tensor:
    r"""Log-probabilities of the policy that takes the best action, or with probability epsilon any allowed one.

    .. math::
        \pi(a|s) = \frac{\epsilon}{n} + (1 - \epsilon) \, [a = \arg\max_{a'} Q(s, a')]

    over the n actions that are allowed. Of equal values the first one is the best. The best action stays the likeliest
    even at epsilon 1, so that whoever takes the likeliest one acts greedily whatever epsilon is. Where a probability
    is 0 stands half the lowest number of the dtype and not minus infinity (see `lit_collect.masked_logits`). A row
    with a value that is NaN or infinite becomes NaN: acting at random must not hide it.

    Args:
        value: ``[..., A]`` float, Q-values.
        epsilon: Scalar float, in [0, 1].
        action_mask: ``[..., A]`` bool, True where an action is allowed; None allows all. Where nothing is allowed,
            nothing is said either.

    Returns:
        ``[..., A]``.

    Example:
        >>> logits = epsilon_greedy_logits(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor(0.2))
        >>> logits.exp()
        tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    epsilon = epsilon.to(value.dtype)
    # NaN where the value is not finite, else 0
    rest = value - value
    if action_mask is None:
        chance = epsilon / value.shape[-1]
        best = value.argmax(-1, keepdim=True)
    else:
        chance = epsilon / action_mask.sum(-1, keepdim=True).clamp_(min=1)
        best = masked_logits(value, action_mask).argmax(-1, keepdim=True)
    lowest = torch.finfo(value.dtype).min / 2
    likeliest = torch.log(chance + (1 - epsilon).clamp(min=LEAST_GREEDY))
    logits = rest + torch.log(chance).clamp(min=lowest)
    logits.scatter_(-1, best, (rest + likeliest).gather(-1, best))
    return logits if action_mask is None else masked_logits(logits, action_mask)


def linear_schedule(start: float, end: float, fraction: float, progress: float) -> float:
    """A number that moves evenly from one value to another over the first part of a run, and stays there.

    Args:
        start: Its value at progress 0.
        end: Its value from progress ``fraction`` on.
        fraction: In [0, 1]; with 0 it is ``end`` from the first step on.
        progress: In [0, 1].

    Example:
        >>> [linear_schedule(1.0, 0.0, 0.5, progress) for progress in (0.0, 0.25, 0.5, 1.0)]
        [1.0, 0.5, 0.0, 0.0]
    """
    if progress >= fraction:
        return end
    return start + (end - start) * progress / fraction


def _check_rows(shape: torch.Size, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name} does not fit the values : expected shape {tuple(shape)}, got {tuple(tensor.shape)}; "
                "pass tensors of one shape, nothing is broadcast"
            )
