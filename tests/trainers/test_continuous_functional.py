"""The mathematics of SAC and TD3 against numbers worked by hand and against torch's own distributions."""

import math

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from lit_collect import masked_logits
from trainers import continuous_functional as functional

Q = torch.tensor([[10.0, 1.0], [8.0, 4.0]])  # two critics, two rows; the minima are 8 and 1


def test_tanh_log_derivative_matches_the_numbers_worked_by_hand():
    # tanh'(0) = 1;  tanh'(1) = 1 - 0.76159**2 = 0.41997, its logarithm -0.86756
    result = functional.tanh_log_derivative(torch.tensor([0.0, 1.0, -1.0]))
    torch.testing.assert_close(result, torch.tensor([0.0, -0.86756, -0.86756]), rtol=1e-4, atol=1e-6)


def test_tanh_log_derivative_far_out_is_finite_and_linear():
    # 4 exp(-2 |x|) for large |x|, where 1 - tanh(x)**2 is 0 in any precision
    x = torch.tensor([-50.0, 50.0], requires_grad=True)
    result = functional.tanh_log_derivative(x)
    torch.testing.assert_close(result, torch.full((2,), math.log(4) - 100.0))
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([2.0, -2.0]))


def test_squashed_normal_log_prob_at_the_center_is_the_normals():
    # tanh'(0) = 1, so two components of a standard normal at 0: -2 * 0.5 * log(2 pi) = -1.83788
    zero = torch.zeros(1, 2)
    result = functional.squashed_normal_log_prob(zero, zero, zero)
    torch.testing.assert_close(result, torch.tensor([-1.8378770]))


def test_squashed_normal_log_prob_agrees_with_torchs_own_transform():
    generator = torch.Generator().manual_seed(0)
    loc, log_std, noise = torch.randn(3, 50, 3, generator=generator, dtype=torch.float64)
    unsquashed = loc + log_std.exp() * noise
    reference = TransformedDistribution(Normal(loc, log_std.exp()), [TanhTransform(cache_size=1)])
    expected = reference.log_prob(unsquashed.clamp(-6, 6).tanh()).sum(-1)
    noise = (unsquashed.clamp(-6, 6) - loc) / log_std.exp()
    result = functional.squashed_normal_log_prob(noise, log_std, unsquashed.clamp(-6, 6))
    torch.testing.assert_close(result, expected, rtol=1e-7, atol=1e-7)


def test_squashed_normal_log_prob_is_a_density():
    # over (-1, 1) in steps of 1/1000, mu 0.3, sigma 0.5
    action = torch.linspace(-0.9995, 0.9995, 2000, dtype=torch.float64)
    loc, log_std = torch.tensor(0.3), torch.tensor(0.5).log()
    unsquashed = action.atanh().unsqueeze(-1)
    noise = (unsquashed - loc) / log_std.exp()
    density = functional.squashed_normal_log_prob(noise, log_std.expand(2000, 1), unsquashed).exp()
    assert float(density.sum() / 1000) == pytest.approx(1.0, abs=1e-4)


def test_soft_target_matches_the_numbers_worked_by_hand():
    # 1 + 0.5 * (8 - 0.1 * -2) = 5.1;  discount 0: the reward 3 alone, whatever comes next
    result = functional.soft_target(
        torch.tensor([1.0, 3.0]), Q, torch.tensor([-2.0, 7.0]), torch.tensor([0.5, 0.0]), torch.tensor(0.1)
    )
    torch.testing.assert_close(result, torch.tensor([5.1, 3.0]))


def test_clipped_double_target_matches_the_numbers_worked_by_hand():
    # 1 + 0.5 * 8 = 5;  3 + 0.25 * 1 = 3.25
    result = functional.clipped_double_target(torch.tensor([1.0, 3.0]), Q, torch.tensor([0.5, 0.25]))
    torch.testing.assert_close(result, torch.tensor([5.0, 3.25]))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (None, 7.5),  # (1 + 9) / 2 = 5 and (4 + 16) / 2 = 10, their mean 7.5
        ([1.0, 0.5], 5.0),  # 5 and 0.5 * 10
    ],
)
def test_twin_q_loss_matches_the_numbers_worked_by_hand(weight, expected):
    q = torch.tensor([[2.0, 3.0], [4.0, 5.0]])
    weight = None if weight is None else torch.tensor(weight)
    assert float(functional.twin_q_loss(q, torch.tensor([1.0, 1.0]), weight)) == expected


def test_soft_policy_loss_matches_the_numbers_worked_by_hand():
    # 0.5 * -1 - 8 = -8.5 and 0.5 * -2 - 1 = -2, their mean -5.25
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = functional.soft_policy_loss(log_prob, Q, 0.5)
    assert loss.item() == -5.25
    (gradient,) = torch.autograd.grad(loss, log_prob)
    torch.testing.assert_close(gradient, torch.tensor([0.25, 0.25]))


def test_deterministic_policy_loss_is_minus_the_mean_of_the_first_critic():
    assert float(functional.deterministic_policy_loss(Q)) == -5.5


@pytest.mark.parametrize(("entropy", "gradient"), [([1.0, 3.0], 0.5), ([1.0, 0.0], -1.0)])
def test_temperature_loss_lowers_the_temperature_where_there_is_entropy_enough(entropy, gradient):
    # target 1.5: a mean of 2 is 0.5 too much, one of 0.5 is 1 too little; the loss is that times log alpha = 2
    log_temperature = torch.tensor(2.0, requires_grad=True)
    loss = functional.temperature_loss(log_temperature, torch.tensor(entropy), 1.5)
    assert loss.item() == 2 * gradient
    (slope,) = torch.autograd.grad(loss, log_temperature)
    assert float(slope) == gradient


def test_discrete_soft_value_matches_the_numbers_worked_by_hand():
    # probabilities 1/4 and 3/4, minima 8 and 1, alpha 2:
    # 1/4 (8 + 2 log 4) + 3/4 (1 + 2 log 4/3) = 2.75 + 0.69315 + 0.43152 = 3.87467
    logits = torch.tensor([[0.0, math.log(3.0)]])
    result = functional.discrete_soft_value(logits, Q.unsqueeze(1), 2.0)
    torch.testing.assert_close(result, torch.tensor([3.8746701]))
    loss = functional.discrete_soft_policy_loss(logits, Q.unsqueeze(1), 2.0)
    torch.testing.assert_close(loss, torch.tensor(-3.8746701))


def test_discrete_soft_value_of_a_forbidden_action_counts_for_nothing():
    logits = masked_logits(torch.zeros(1, 2), torch.tensor([[False, True]])).requires_grad_()
    value = functional.discrete_soft_value(logits, Q.unsqueeze(1), 2.0)
    assert value.tolist() == [1.0]
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient.isfinite().all()


def test_discrete_soft_policy_loss_has_its_minimum_at_the_boltzmann_policy():
    q = torch.tensor([[[1.0, 2.0, 0.0]]]).expand(2, 1, 3)
    logits = (q[0] / 0.7).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.discrete_soft_policy_loss(logits, q, 0.7), logits)
    torch.testing.assert_close(gradient, torch.zeros(1, 3), rtol=0, atol=1e-6)


def test_smoothed_action_clips_the_noise_first_and_then_the_action():
    # 0.2 + clip(-3) = 0.2 - 0.5;  0.9 + 0.2 -> 1;  -0.9 - clip(2) -> -1
    action, noise = torch.tensor([0.2, 0.9, -0.9, 0.1]), torch.tensor([-3.0, 0.2, -2.0, 0.3])
    torch.testing.assert_close(functional.smoothed_action(action, noise, 0.5), torch.tensor([-0.3, 1.0, -1.0, 0.4]))


def test_smoothed_action_with_a_negative_clip_says_what_is_expected():
    with pytest.raises(ValueError, match="noise_clip is out of range : expected a number >= 0, got -1"):
        functional.smoothed_action(torch.zeros(1), torch.zeros(1), -1)
