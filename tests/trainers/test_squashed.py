"""Distributions within bounds: what a collector and a loss ask of them."""

import pytest
import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from lit_collect.sampling import choose_from
from trainers.squashed import ClippedNormal, TanhNormal

LOC = torch.tensor([[0.0, 0.5], [-1.0, 2.0], [0.1, -0.2]])
LOG_STD = torch.tensor([[0.0, -1.0], [0.3, -0.5], [-2.0, 0.0]])
CENTER, HALF_RANGE = torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.5])


def squashed(loc=LOC, log_std=LOG_STD):
    return TanhNormal(loc, log_std, center=CENTER, half_range=HALF_RANGE)


def reference():
    transforms = [TanhTransform(), AffineTransform(CENTER.double(), HALF_RANGE.double())]
    return TransformedDistribution(Normal(LOC.double(), LOG_STD.double().exp()), transforms)


def clipped(scale=0.1):
    return ClippedNormal(torch.tensor([[0.95, 0.0]]), scale, low=-torch.ones(2), high=torch.ones(2))


def test_tanh_normal_sample_stays_within_bounds_however_far_out_the_normal_is():
    action = squashed(loc=torch.tensor([[1e6, -1e6]]), log_std=torch.full((1, 2), 2.0)).sample()
    assert action.tolist() == [[4.0, -0.5]]


def test_tanh_normal_mode_is_the_squashed_mean():
    torch.testing.assert_close(squashed().mode, CENTER + HALF_RANGE * LOC.tanh())
    assert torch.equal(squashed().mean, squashed().mode)


def test_tanh_normal_log_prob_of_its_own_sample_agrees_with_torchs_own():
    torch.manual_seed(0)
    distribution = squashed()
    action = distribution.sample()
    log_prob = distribution.log_prob(action)
    assert log_prob.shape == (3,)
    torch.testing.assert_close(log_prob, reference().log_prob(action.double()).sum(-1).float(), rtol=1e-4, atol=1e-4)


def test_tanh_normal_log_prob_of_other_actions_agrees_with_torchs_own():
    action = torch.tensor([[1.5, 0.1], [-1.0, 0.45], [1.2, -0.1]])
    expected = reference().log_prob(action.double()).sum(-1).float()
    torch.testing.assert_close(squashed().log_prob(action), expected, rtol=1e-4, atol=1e-4)


def test_tanh_normal_log_prob_on_a_bound_is_finite():
    assert squashed().log_prob(torch.tensor([[4.0, -0.5]]).expand(3, 2)).isfinite().all()


def test_tanh_normal_log_prob_of_a_sample_that_saturated_is_exact():
    # float32 rounds the action to the bound; the sample remembers where it came from: u = 20,
    # log p = -0.919 - 2 (log 2 - 20 - exp(-40)) - log(half range 3) = 36.59
    torch.manual_seed(0)
    distribution = TanhNormal(torch.tensor([[20.0]]), torch.tensor([[-20.0]]), half_range=3.0)
    action = distribution.sample()
    noise = (torch.manual_seed(0), torch.randn(1, 1))[1]
    expected = -0.5 * noise.square() - 0.9189385 + 20.0 - 2 * (0.6931472 - 20.0) - 1.0986123
    assert action.item() == 3.0
    torch.testing.assert_close(distribution.log_prob(action), expected[0], rtol=1e-5, atol=1e-4)


def test_tanh_normal_rsample_lets_the_gradient_through_to_both_parameters():
    loc, log_std = LOC.clone().requires_grad_(), LOG_STD.clone().requires_grad_()
    distribution = squashed(loc, log_std)
    action = distribution.rsample()
    (action.sum() + distribution.log_prob(action).sum()).backward()
    assert bool((loc.grad != 0).all())
    assert bool((log_std.grad != 0).all())
    assert not squashed(loc, log_std).sample().requires_grad


def test_tanh_normal_sample_has_the_quantiles_of_its_density():
    torch.manual_seed(0)
    actions = squashed().sample((20_000,))
    assert actions.shape == (20_000, 3, 2)
    # tanh is monotonous: the median is the mode, and a share of 0.8413 lies below one standard deviation
    below = (actions < CENTER + HALF_RANGE * (LOC + LOG_STD.exp()).tanh()).float().mean(0)
    torch.testing.assert_close(below, torch.full((3, 2), 0.8413), rtol=0, atol=0.012)


@pytest.mark.parametrize("exploration", ["mode", "mean", "deterministic"])
@pytest.mark.parametrize("distribution", [squashed(), clipped()], ids=["squashed", "clipped"])
def test_choose_from_without_exploration_takes_the_mode(distribution, exploration):
    assert torch.equal(choose_from(distribution, exploration), distribution.mode)


def test_clipped_normal_sample_is_the_mode_and_clipped_noise():
    torch.manual_seed(0)
    actions = clipped(0.1).sample((20_000,))[:, 0]
    assert float(actions.max()) == 1.0
    assert float(actions[:, 1].std()) == pytest.approx(0.1, abs=0.002)
    # 0.95 + 0.1 x > 1 for x > 0.5, in a share of 0.3085
    assert float((actions[:, 0] == 1.0).float().mean()) == pytest.approx(0.3085, abs=0.012)


def test_clipped_normal_log_prob_is_that_of_the_noise():
    action = torch.tensor([[1.0, 0.05]])
    expected = Normal(torch.tensor([0.95, 0.0]), 0.1).log_prob(action[0]).sum()
    torch.testing.assert_close(clipped(0.1).log_prob(action), expected.unsqueeze(0))


def test_clipped_normal_without_noise_is_its_mode_with_a_finite_log_prob():
    distribution = clipped(0.0)
    assert torch.equal(distribution.sample(), distribution.mode)
    assert distribution.log_prob(distribution.mode).tolist() == [0.0]
