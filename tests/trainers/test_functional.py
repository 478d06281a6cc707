"""The mathematics of the trainers against numbers worked by hand and against plain loops."""

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from trainers import functional

GAMMA = 0.9
REWARD = torch.tensor([1.0, 2.0, 3.0])
VALUE = torch.tensor([0.5, 1.0, 1.5])
NEXT_VALUE = torch.tensor([1.0, 1.5, 2.0])
NOWHERE = torch.tensor([False, False, False])
AT_ONE = torch.tensor([False, True, False])


def advantage(*, terminated, truncated, lambda_=0.5):
    return functional.generalized_advantage(
        REWARD, VALUE, NEXT_VALUE, GAMMA * (~terminated).float(), terminated | truncated, lambda_
    )


def random_rows(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    terminated = torch.rand(shape, generator=generator) < 0.1
    truncated = torch.rand(shape, generator=generator) < 0.1
    return reward, value, next_value, 0.97 * (~terminated).double(), terminated | truncated


def quadratic_advantage(reward, value, next_value, discount, done, lambda_):
    """Sum the discounted TD errors of every step's own future, one by one."""
    result = torch.zeros_like(reward)
    for index in range(reward.shape[0]):
        for start in range(reward.shape[1]):
            weight = 1.0
            for t in range(start, reward.shape[1]):
                delta = reward[index, t] + discount[index, t] * next_value[index, t] - value[index, t]
                result[index, start] += weight * delta
                weight *= discount[index, t] * lambda_
                if done[index, t]:
                    break
    return result


def test_generalized_advantage_without_an_end_matches_the_numbers_worked_by_hand():
    # TD errors: 1 + 0.9 * 1 - 0.5 = 1.4,  2 + 0.9 * 1.5 - 1 = 2.35,  3 + 0.9 * 2 - 1.5 = 3.3;  gamma lambda = 0.45
    # A_2 = 3.3,  A_1 = 2.35 + 0.45 * 3.3 = 3.835,  A_0 = 1.4 + 0.45 * 3.835 = 3.12575
    result = advantage(terminated=NOWHERE, truncated=NOWHERE)
    torch.testing.assert_close(result, torch.tensor([3.12575, 3.835, 3.3]))


def test_generalized_advantage_when_terminated_has_no_future():
    # A_1 = 2 - 1 = 1,  A_0 = 1.4 + 0.45 * 1 = 1.85
    result = advantage(terminated=AT_ONE, truncated=NOWHERE)
    torch.testing.assert_close(result, torch.tensor([1.85, 1.0, 3.3]))


def test_generalized_advantage_when_truncated_bootstraps_but_does_not_leak_over_the_cut():
    # A_1 = its TD error 2.35,  A_0 = 1.4 + 0.45 * 2.35 = 2.4575
    result = advantage(terminated=NOWHERE, truncated=AT_ONE)
    torch.testing.assert_close(result, torch.tensor([2.4575, 2.35, 3.3]))


def test_generalized_advantage_when_terminated_and_truncated_at_once_is_terminated():
    both = advantage(terminated=AT_ONE, truncated=AT_ONE)
    torch.testing.assert_close(both, advantage(terminated=AT_ONE, truncated=NOWHERE))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_generalized_advantage_for_any_length_matches_the_plain_loops(length, lambda_):
    rows = random_rows(4, length)
    torch.testing.assert_close(functional.generalized_advantage(*rows, lambda_), quadratic_advantage(*rows, lambda_))


def test_generalized_advantage_in_single_precision_is_exact_to_rounding():
    rows = random_rows(2, 500)
    single = [x.float() if x.is_floating_point() else x for x in rows]
    result = functional.generalized_advantage(*single, 1.0)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), quadratic_advantage(*rows, 1.0), rtol=1e-5, atol=1e-5)


def test_generalized_advantage_with_lambda_zero_is_the_td_error():
    reward, value, next_value, discount, done = random_rows(3, 16)
    result = functional.generalized_advantage(reward, value, next_value, discount, done, 0.0)
    torch.testing.assert_close(result, reward + discount * next_value - value)


def test_generalized_advantage_with_lambda_one_is_return_minus_value():
    # A batch whose successors are really the next rows: only then do the values inside a trajectory cancel.
    reward, value, next_value, discount, done = random_rows(3, 16)
    inside = ~done[:, :-1]
    next_value[:, :-1] = torch.where(inside, value[:, 1:], next_value[:, :-1])
    result = functional.generalized_advantage(reward, value, next_value, discount, done, 1.0)
    torch.testing.assert_close(result, functional.discounted_returns(reward, next_value, discount, done) - value)


def test_generalized_advantage_leaves_its_arguments_alone():
    rows = random_rows(2, 9)
    copies = [x.clone() for x in rows]
    functional.generalized_advantage(*rows, 0.9)
    assert all(torch.equal(x, y) for x, y in zip(rows, copies, strict=True))


def test_generalized_advantage_when_shapes_differ_names_both():
    with pytest.raises(ValueError, match=r"value does not fit reward : expected shape \(3,\), got \(3, 1\)"):
        functional.generalized_advantage(REWARD, VALUE[:, None], NEXT_VALUE, VALUE, NOWHERE, 0.5)


def test_generalized_advantage_when_done_is_a_number_asks_for_a_flag():
    with pytest.raises(TypeError, match=r"expected dtype torch.bool, got torch.float32"):
        functional.generalized_advantage(REWARD, VALUE, NEXT_VALUE, VALUE, torch.zeros(3), 0.5)


def test_generalized_advantage_when_lambda_is_out_of_range_raises():
    with pytest.raises(ValueError, match=r"lambda_ is out of range : expected a number in \[0, 1\], got 1.5"):
        advantage(terminated=NOWHERE, truncated=NOWHERE, lambda_=1.5)


def test_discounted_returns_match_the_numbers_worked_by_hand():
    # not done:   G_2 = 3 + 0.9 * 2 = 4.8,   G_1 = 2 + 0.9 * 4.8 = 6.32,  G_0 = 1 + 0.9 * 6.32 = 6.688
    # truncated:  G_1 = 2 + 0.9 * 1.5 = 3.35,                             G_0 = 1 + 0.9 * 3.35 = 4.015
    # terminated: G_1 = 2,                                                G_0 = 1 + 0.9 * 2 = 2.8
    full = torch.full((3,), GAMMA)
    ended = torch.tensor([GAMMA, 0.0, GAMMA])
    returns = [
        functional.discounted_returns(REWARD, NEXT_VALUE, discount, done)
        for discount, done in ((full, NOWHERE), (full, AT_ONE), (ended, AT_ONE))
    ]
    torch.testing.assert_close(returns[0], torch.tensor([6.688, 6.32, 4.8]))
    torch.testing.assert_close(returns[1], torch.tensor([4.015, 3.35, 4.8]))
    torch.testing.assert_close(returns[2], torch.tensor([2.8, 2.0, 4.8]))


def test_discounted_returns_of_one_step_bootstrap_from_the_successor():
    result = functional.discounted_returns(REWARD[:1], NEXT_VALUE[:1], torch.tensor([GAMMA]), NOWHERE[:1])
    torch.testing.assert_close(result, torch.tensor([1.9]))  # 1 + 0.9 * 1


RATIO = torch.tensor([2.0, 0.5, 1.0])


def traced(*, terminated=NOWHERE, truncated=NOWHERE, **options):
    discount = GAMMA * (~terminated).float()
    return functional.vtrace(RATIO.log(), REWARD, VALUE, NEXT_VALUE, discount, terminated | truncated, **options)


def quadratic_trace(log_ratio, reward, value, next_value, discount, done, lambda_, rho_bar, c_bar):
    """Sum every step's own future, one by one, as the paper defines its target; then look one step ahead."""
    target, advantage = torch.zeros_like(reward), torch.zeros_like(reward)
    length = reward.shape[1]
    for index in range(reward.shape[0]):
        for start in reversed(range(length)):
            weight, total = 1.0, 0.0
            for t in range(start, length):
                ratio = math.exp(log_ratio[index, t])
                delta = reward[index, t] + discount[index, t] * next_value[index, t] - value[index, t]
                total += weight * min(rho_bar, ratio) * delta
                weight *= discount[index, t] * lambda_ * min(c_bar, ratio)
                if done[index, t]:
                    break
            target[index, start] = value[index, start] + total
            q = next_value[index, start]
            if start < length - 1 and not done[index, start]:
                q = (1 - lambda_) * q + lambda_ * target[index, start + 1]
            td = reward[index, start] + discount[index, start] * q - value[index, start]
            advantage[index, start] = min(rho_bar, math.exp(log_ratio[index, start])) * td
    return target, advantage


def random_trace(*shape, seed=0):
    """Rows whose successors are the next rows, as long as a trajectory goes on."""
    reward, value, next_value, discount, done = random_rows(*shape, seed=seed)
    next_value[:, :-1] = torch.where(done[:, :-1], next_value[:, :-1], value[:, 1:])
    log_ratio = 0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return log_ratio, reward, value, next_value, discount, done


def test_vtrace_matches_the_numbers_worked_by_hand():
    # TD errors 1.4, 2.35, 3.3 as above;  rho = c = min(1, ratio) = 1, 0.5, 1
    # v - V:  3.3,  0.5 * 2.35 + 0.9 * 0.5 * 3.3 = 2.66,  1.4 + 0.9 * 2.66 = 3.794
    # A:      3.3,  0.5 * (2 + 0.9 * 4.8 - 1) = 2.66,     1 + 0.9 * 3.66 - 0.5 = 3.794
    target, advantage = traced()
    torch.testing.assert_close(target, torch.tensor([4.294, 3.66, 4.8]))
    torch.testing.assert_close(advantage, torch.tensor([3.794, 2.66, 3.3]))


def test_vtrace_bounds_the_weight_and_what_is_carried_apart():
    # rho = min(4, ratio) = 2, 0.5, 1;  c = min(0.25, ratio) = 0.25, 0.25, 0.25
    # v - V:  3.3,  0.5 * 2.35 + 0.9 * 0.25 * 3.3 = 1.9175,  2 * 1.4 + 0.9 * 0.25 * 1.9175 = 3.2314375
    # A:      3.3,  0.5 * (2 + 0.9 * 4.8 - 1) = 2.66,        2 * (1 + 0.9 * 2.9175 - 0.5) = 6.2515
    target, advantage = traced(rho_bar=4.0, c_bar=0.25)
    torch.testing.assert_close(target, torch.tensor([3.7314375, 2.9175, 4.8]))
    torch.testing.assert_close(advantage, torch.tensor([6.2515, 2.66, 3.3]))


def test_vtrace_when_terminated_has_no_future():
    # v_1 - V = A_1 = 0.5 * (2 - 1) = 0.5,  v_0 - V = A_0 = 1.4 + 0.9 * 0.5 = 1.85
    for truncated in (NOWHERE, AT_ONE):
        target, advantage = traced(terminated=AT_ONE, truncated=truncated)
        torch.testing.assert_close(target, torch.tensor([2.35, 1.5, 4.8]))
        torch.testing.assert_close(advantage, torch.tensor([1.85, 0.5, 3.3]))


def test_vtrace_when_truncated_bootstraps_but_does_not_leak_over_the_cut():
    # v_1 - V = A_1 = 0.5 * 2.35 = 1.175,  v_0 - V = A_0 = 1.4 + 0.9 * 1.175 = 2.4575
    target, advantage = traced(truncated=AT_ONE)
    torch.testing.assert_close(target, torch.tensor([2.9575, 2.175, 4.8]))
    torch.testing.assert_close(advantage, torch.tensor([2.4575, 1.175, 3.3]))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 33])
@pytest.mark.parametrize(("lambda_", "rho_bar", "c_bar"), [(1.0, 1.0, 1.0), (0.8, 2.0, 1.1), (0.0, 1.0, 0.5)])
def test_vtrace_for_any_length_matches_the_plain_loops(length, lambda_, rho_bar, c_bar):
    rows = random_trace(4, length)
    ours = functional.vtrace(*rows, lambda_, rho_bar, c_bar)
    torch.testing.assert_close(ours, quadratic_trace(*rows, lambda_, rho_bar, c_bar))


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_vtrace_on_policy_is_generalized_advantage_estimation(lambda_):
    log_ratio, *rows = random_trace(3, 16)
    target, advantage = functional.vtrace(torch.zeros_like(log_ratio), *rows, lambda_)
    expected = functional.generalized_advantage(*rows, lambda_)
    torch.testing.assert_close(advantage, expected)
    torch.testing.assert_close(target - rows[1], expected)


def test_vtrace_on_policy_with_lambda_one_is_the_return():
    log_ratio, reward, value, next_value, discount, done = random_trace(3, 16)
    target, _ = functional.vtrace(torch.zeros_like(log_ratio), reward, value, next_value, discount, done)
    torch.testing.assert_close(target, functional.discounted_returns(reward, next_value, discount, done))


def test_vtrace_of_a_ratio_beyond_all_bounds_stays_finite():
    target, advantage = functional.vtrace(torch.full((3,), 1000.0), REWARD, VALUE, NEXT_VALUE, 0 * VALUE, NOWHERE)
    torch.testing.assert_close(target, REWARD)
    torch.testing.assert_close(advantage, REWARD - VALUE)


def test_vtrace_leaves_its_arguments_alone():
    rows = random_trace(2, 9)
    copies = [x.clone() for x in rows]
    functional.vtrace(*rows)
    assert all(torch.equal(x, y) for x, y in zip(rows, copies, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_": 1.5}, r"lambda_ is out of range : expected a number in \[0, 1\], got 1.5"),
        ({"rho_bar": -1.0}, "rho_bar is out of range : expected a number >= 0, got -1.0"),
        ({"c_bar": -1.0}, "c_bar is out of range"),
    ],
)
def test_vtrace_when_a_number_is_out_of_range_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        traced(**options)


def test_vtrace_when_shapes_differ_names_both():
    with pytest.raises(ValueError, match=r"reward does not fit log_ratio : expected shape \(3,\), got \(3, 1\)"):
        functional.vtrace(RATIO, REWARD[:, None], VALUE, NEXT_VALUE, VALUE, NOWHERE)


def test_vtrace_when_done_is_a_number_asks_for_a_flag():
    with pytest.raises(TypeError, match=r"expected dtype torch.bool, got torch.float32"):
        functional.vtrace(RATIO, REWARD, VALUE, NEXT_VALUE, VALUE, torch.zeros(3))


def test_normalize_gives_zero_mean_and_unit_deviation():
    # mean 3, biased deviation 2
    torch.testing.assert_close(
        functional.normalize(torch.tensor([1.0, 5.0, 1.0, 5.0])), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    )


def test_normalize_of_one_or_equal_elements_is_zero_and_not_nan():
    assert functional.normalize(torch.tensor([7.0])).tolist() == [0.0]
    assert functional.normalize(torch.tensor([7.0, 7.0])).tolist() == [0.0, 0.0]


def test_ppo_policy_loss_matches_the_numbers_worked_by_hand():
    # clip 0.2; ratio, advantage -> min(ratio * A, clip(ratio) * A)
    # 1.5,  2 -> min( 3.0,  2.4) =  2.4     1.5, -2 -> min(-3.0, -2.4) = -3.0
    # 0.5,  2 -> min( 1.0,  1.6) =  1.0     0.5, -2 -> min(-1.0, -1.6) = -1.6
    # 1.1,  2 -> both 2.2                   mean of the five = (2.4 - 3 + 1 - 1.6 + 2.2) / 5 = 0.2
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    loss = functional.ppo_policy_loss(ratio.log(), torch.zeros(5), torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0]), 0.2)
    torch.testing.assert_close(loss, torch.tensor(-0.2))


def test_ppo_policy_loss_and_gradient_equal_the_form_of_the_paper():
    generator = torch.Generator().manual_seed(1)
    log_prob, old_log_prob, weight = 0.4 * torch.randn(3, 256, generator=generator, dtype=torch.float64)
    log_prob.requires_grad_()
    ratio = (log_prob - old_log_prob).exp()
    paper = -torch.min(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()
    loss = functional.ppo_policy_loss(log_prob, old_log_prob, weight, 0.2)
    torch.testing.assert_close(loss, paper)
    torch.testing.assert_close(torch.autograd.grad(loss, log_prob), torch.autograd.grad(paper, log_prob))


def test_ppo_policy_loss_gradient_vanishes_only_where_the_clip_binds():
    log_prob = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    functional.ppo_policy_loss(log_prob, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2).backward()
    # d(-ratio * A / 4) / d log_prob = -ratio * A / 4
    torch.testing.assert_close(log_prob.grad, torch.tensor([0.0, 0.375, -0.125, 0.0]))


def test_ppo_policy_loss_when_clip_is_negative_raises():
    with pytest.raises(ValueError, match=r"clip is out of range : expected a number >= 0, got -0.1"):
        functional.ppo_policy_loss(REWARD, REWARD, REWARD, -0.1)


def test_value_loss_is_the_mean_squared_error():
    # ((1 - 3)^2 + (2 - 1)^2) / 2 = 2.5
    torch.testing.assert_close(
        functional.value_loss(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])), torch.tensor(2.5)
    )


def test_value_loss_with_clipping_takes_the_larger_error():
    # value 3 moved by +3 from 0, clipped to 0.5; target 3: max(0, 2.5^2) = 6.25
    # value 0.2 moved by 0.2, not clipped; target 1: 0.8^2 = 0.64;  mean 3.445
    loss = functional.value_loss(torch.tensor([3.0, 0.2]), torch.tensor([3.0, 1.0]), torch.zeros(2), clip=0.5)
    torch.testing.assert_close(loss, torch.tensor(3.445))


def test_value_loss_when_clipping_is_half_given_names_what_is_missing():
    with pytest.raises(ValueError, match="got no old_value"):
        functional.value_loss(VALUE, REWARD, clip=0.2)
    with pytest.raises(ValueError, match="got no clip"):
        functional.value_loss(VALUE, REWARD, old_value=VALUE)


def test_value_loss_never_broadcasts():
    with pytest.raises(ValueError, match=r"target does not fit value : expected shape \(3,\), got \(3, 1\)"):
        functional.value_loss(VALUE, REWARD[:, None])


def test_explained_variance_is_one_for_perfect_zero_for_constant_negative_for_opposite():
    target = torch.tensor([1.0, 2.0, 3.0])
    assert functional.explained_variance(target, target).item() == 1.0
    assert functional.explained_variance(torch.full((3,), 9.0), target).item() == 0.0
    # target - value = 2 * target: four times the variance, 1 - 4
    torch.testing.assert_close(functional.explained_variance(-target, target), torch.tensor(-3.0))


def test_explained_variance_of_a_constant_target_is_zero():
    assert functional.explained_variance(torch.tensor([1.0, 2.0]), torch.ones(2)).item() == 0.0


def test_approx_kl_matches_the_numbers_worked_by_hand():
    # ratio 2: 2 - 1 - log 2 = 0.306853;  ratio 0.5: 0.5 - 1 + log 2 = 0.193147;  mean 0.25
    torch.testing.assert_close(functional.approx_kl(torch.tensor([2.0, 0.5]).log(), torch.zeros(2)), torch.tensor(0.25))


def test_clip_fraction_counts_ratios_outside_the_interval():
    log_prob = torch.tensor([1.3, 1.1, 0.7, 1.0]).log()
    assert functional.clip_fraction(log_prob, torch.zeros(4), 0.2).item() == 0.5


def test_categorical_functions_match_the_numbers_worked_by_hand():
    # logits log 1, log 3 -> probabilities 1/4, 3/4
    logits = torch.tensor([[0.0, math.log(3.0)]]).expand(2, 2) + 5.0  # a shift changes nothing
    log_prob = functional.categorical_log_prob(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(log_prob, torch.tensor([0.25, 0.75]).log())
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(functional.categorical_entropy(logits), torch.full((2,), entropy))


def test_categorical_functions_match_torch_distributions():
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2))
    action = torch.arange(12).remainder(5).view(3, 4)
    reference = Categorical(logits=logits)
    torch.testing.assert_close(functional.categorical_log_prob(logits, action), reference.log_prob(action))
    torch.testing.assert_close(functional.categorical_entropy(logits), reference.entropy())


def test_categorical_log_prob_when_the_action_has_another_shape_raises():
    with pytest.raises(ValueError, match=r"action does not fit the logits : expected shape \(3,\), got \(3, 1\)"):
        functional.categorical_log_prob(torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64))


def test_diagonal_normal_functions_match_the_numbers_worked_by_hand():
    # one dimension at its mean with deviation 1: -0.5 log 2 pi; one 2 deviations off with deviation 3: - 2 - log 3
    loc, scale, action = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 7.0]])
    expected = -math.log(2 * math.pi) - 2 - math.log(3)
    torch.testing.assert_close(functional.diagonal_normal_log_prob(loc, scale, action), torch.tensor([expected]))
    entropy = math.log(2 * math.pi * math.e) + math.log(3)
    torch.testing.assert_close(functional.diagonal_normal_entropy(scale), torch.tensor([entropy]))


def test_diagonal_normal_functions_match_torch_distributions():
    generator = torch.Generator().manual_seed(3)
    loc, action = torch.randn(2, 4, 6, 3, generator=generator)
    scale = 0.5 + torch.rand(4, 6, 3, generator=generator)
    reference = Independent(Normal(loc, scale), 1)
    torch.testing.assert_close(functional.diagonal_normal_log_prob(loc, scale, action), reference.log_prob(action))
    torch.testing.assert_close(functional.diagonal_normal_entropy(scale), reference.entropy())
