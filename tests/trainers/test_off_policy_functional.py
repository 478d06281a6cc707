"""The mathematics of learning values off policy, against numbers worked by hand and against plain loops."""

import math

import pytest
import torch
from torch.distributions import Categorical

from lit_collect.sampling import CategoricalSampler, mode_categorical
from trainers import off_policy_functional as functional

NO, YES = False, True


def random_values(rows=64, actions=5, seed=0, dtype=torch.float32):
    return torch.randn(rows, actions, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_mask(values, seed=1):
    mask = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[:, 2] |= ~mask.any(-1)
    return mask


# --- bootstrap_discount ---------------------------------------------------------------------------------------------


def test_bootstrap_discount_without_steps_is_gamma_where_the_episode_goes_on():
    result = functional.bootstrap_discount(torch.tensor([NO, YES, NO]), 0.9)
    torch.testing.assert_close(result, torch.tensor([0.9, 0.0, 0.9]))


def test_bootstrap_discount_of_several_steps_is_gamma_to_their_power():
    terminated, steps = torch.tensor([NO, NO, NO, YES]), torch.tensor([1, 2, 3, 3])
    result = functional.bootstrap_discount(terminated, 0.9, steps)
    torch.testing.assert_close(result, torch.tensor([0.9, 0.81, 0.729, 0.0]))


def test_bootstrap_discount_with_gamma_zero_looks_nowhere_ahead():
    assert functional.bootstrap_discount(torch.tensor([NO]), 0.0, torch.tensor([2])).tolist() == [0.0]


def test_bootstrap_discount_when_terminated_is_no_flag_says_so():
    with pytest.raises(TypeError, match=r"terminated is no flag : expected dtype torch.bool, got torch.float32"):
        functional.bootstrap_discount(torch.zeros(1), 0.9)


# --- q_target -------------------------------------------------------------------------------------------------------

REWARD = torch.tensor([1.0, 2.0, 3.0])
DISCOUNT = torch.tensor([0.9, 0.5, 0.0])
NEXT = torch.tensor([[1.0, 4.0], [6.0, 2.0], [7.0, 8.0]])


def test_q_target_is_the_reward_and_the_discounted_best_value():
    # 1 + 0.9 * 4,  2 + 0.5 * 6,  3 + 0
    torch.testing.assert_close(functional.q_target(REWARD, DISCOUNT, NEXT), torch.tensor([4.6, 5.0, 3.0]))


def test_q_target_with_a_chooser_is_the_value_of_the_chosen_action():
    # another network likes the first action everywhere: 1 + 0.9 * 1,  2 + 0.5 * 6,  3 + 0
    chooser = torch.tensor([[1.0, 0.0]]).expand(3, 2)
    result = functional.q_target(REWARD, DISCOUNT, NEXT, chooser=chooser)
    torch.testing.assert_close(result, torch.tensor([1.9, 5.0, 3.0]))


def test_q_target_with_itself_as_chooser_is_the_plain_one():
    value, reward = random_values(), torch.zeros(64)
    twice = functional.q_target(reward, reward + 0.9, value, chooser=value)
    assert torch.equal(twice, functional.q_target(reward, reward + 0.9, value))


@pytest.mark.parametrize("double", [False, True])
def test_q_target_with_masks_matches_a_loop_over_allowed_actions(double):
    value, chooser = random_values(seed=0), random_values(seed=1) if double else None
    mask, reward, discount = random_mask(value), random_values(seed=3)[:, 0], torch.full((64,), 0.9)
    expected = []
    for row in range(64):
        allowed = mask[row].nonzero().squeeze(-1).tolist()
        judge = value if chooser is None else chooser
        best = max(allowed, key=lambda action: judge[row, action].item())
        expected.append(reward[row] + 0.9 * value[row, best])
    result = functional.q_target(reward, discount, value, chooser=chooser, action_mask=mask)
    torch.testing.assert_close(result, torch.stack(expected))


def test_q_target_where_a_terminal_successor_allows_nothing_is_the_reward():
    nothing = torch.zeros(3, 2, dtype=torch.bool)
    assert torch.equal(functional.q_target(REWARD, 0 * DISCOUNT, NEXT, action_mask=nothing), REWARD)


@pytest.mark.parametrize(("name", "shape"), [("reward", (3, 1)), ("discount", (3, 1)), ("chooser", (3, 3))])
def test_q_target_of_shapes_that_do_not_fit_says_which(name, shape):
    given = {"reward": REWARD, "discount": DISCOUNT, "chooser": NEXT} | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=rf"{name} does not fit the values : expected shape .*; pass tensors of one"):
        functional.q_target(given["reward"], given["discount"], NEXT, chooser=given["chooser"])


# --- huber_loss -----------------------------------------------------------------------------------------------------


def test_huber_loss_is_square_near_the_target_and_straight_far_from_it():
    # 0.5 * 0.5^2,  0.5 * 1^2,  3 - 0.5
    value = torch.tensor([0.5, -1.0, 3.0])
    torch.testing.assert_close(functional.huber_loss(value, torch.zeros(3)), torch.tensor((0.125 + 0.5 + 2.5) / 3))


def test_huber_loss_with_weights_counts_rows_by_them():
    value, weight = torch.tensor([0.5, -1.0, 3.0]), torch.tensor([1.0, 0.0, 0.2])
    result = functional.huber_loss(value, torch.zeros(3), weight)
    torch.testing.assert_close(result, torch.tensor((0.125 + 0.2 * 2.5) / 3))


def test_huber_loss_never_pulls_harder_than_one():
    value = (10 * random_values(rows=1)).requires_grad_()
    functional.huber_loss(value, torch.zeros_like(value)).backward()
    assert value.grad.abs().max() * value.numel() <= 1.0 + 1e-6
    assert torch.equal(value.grad.sign(), value.detach().sign())


def test_huber_loss_of_different_shapes_is_refused():
    with pytest.raises(ValueError, match="target does not fit the values"):
        functional.huber_loss(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="weight does not fit the values"):
        functional.huber_loss(torch.zeros(3), torch.zeros(3), torch.ones(3, 1))


# --- dueling_values -------------------------------------------------------------------------------------------------


def test_dueling_values_have_the_state_value_as_their_mean_and_the_advantages_order():
    value, advantage = random_values(actions=1), random_values(seed=2)
    result = functional.dueling_values(value, advantage)
    torch.testing.assert_close(result.mean(-1, keepdim=True), value)
    assert torch.equal(result.argsort(-1), advantage.argsort(-1))


def test_dueling_values_do_not_change_with_a_constant_in_the_advantages():
    value, advantage = random_values(actions=1), random_values(seed=2)
    shifted = functional.dueling_values(value, advantage + 3.0)
    torch.testing.assert_close(functional.dueling_values(value, advantage), shifted)


# --- epsilon_greedy_logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.04, 0.5, 1.0])
def test_epsilon_greedy_logits_without_a_mask_are_those_worked_by_hand(epsilon):
    values = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    probabilities = functional.epsilon_greedy_logits(values, torch.tensor(epsilon)).softmax(-1)
    expected = torch.full((1, 4), epsilon / 4)
    expected[0, 1] = 1 - epsilon + epsilon / 4
    torch.testing.assert_close(probabilities, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_logits_with_masks_match_a_loop_over_allowed_actions(epsilon):
    values = random_values(dtype=torch.float64)
    mask = random_mask(values)
    probabilities = functional.epsilon_greedy_logits(values, torch.tensor(epsilon), mask).softmax(-1)
    for row in range(len(values)):
        allowed = mask[row].nonzero().squeeze(-1).tolist()
        best = max(allowed, key=lambda action: values[row, action].item())
        for action in range(values.shape[1]):
            chance = epsilon / len(allowed) if action in allowed else 0.0
            expected = chance + (1 - epsilon) * (action == best)
            assert probabilities[row, action].item() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_the_likeliest_of_epsilon_greedy_logits_is_the_best_allowed_action(epsilon, masked):
    values = random_values(rows=1000)
    mask = random_mask(values) if masked else None
    chosen = mode_categorical(functional.epsilon_greedy_logits(values, torch.tensor(epsilon), mask))
    best = values if mask is None else values.masked_fill(~mask, -math.inf)
    assert torch.equal(chosen, best.argmax(-1))


def test_epsilon_greedy_logits_of_equal_values_prefer_the_first():
    logits = functional.epsilon_greedy_logits(torch.ones(2, 3), torch.tensor(0.3))
    assert mode_categorical(logits).tolist() == [0, 0]
    torch.testing.assert_close(logits.exp()[0], torch.tensor([0.8, 0.1, 0.1]))


@pytest.mark.parametrize("epsilon", [0.0, 0.25])
def test_actions_drawn_from_epsilon_greedy_logits_come_as_often_as_epsilon_says(epsilon):
    torch.manual_seed(0)
    values = torch.tensor([[0.0, 1.0, 0.5, -1.0]]).expand(40_000, 4)
    mask = torch.tensor([[True, True, True, False]]).expand(40_000, 4)
    drawn = CategoricalSampler()(functional.epsilon_greedy_logits(values, torch.tensor(epsilon), mask))
    share = drawn.bincount(minlength=4) / 40_000
    expected = torch.tensor([epsilon / 3, 1 - epsilon * 2 / 3, epsilon / 3, 0.0])
    torch.testing.assert_close(share, expected, atol=0.01, rtol=0)
    assert share[3] == 0
    assert epsilon or share[1] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_epsilon_greedy_logits_are_finite_in_every_precision(dtype, epsilon):
    values = random_values(dtype=torch.float32).to(dtype)
    logits = functional.epsilon_greedy_logits(values, torch.tensor(epsilon), random_mask(values))
    assert logits.dtype is dtype
    assert logits.isfinite().all()
    assert Categorical(logits=logits.float()).log_prob(logits.argmax(-1)).isfinite().all()


def test_epsilon_greedy_logits_of_a_row_that_allows_nothing_are_no_nan():
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    assert functional.epsilon_greedy_logits(torch.ones(1, 3), torch.tensor(0.1), nothing).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_epsilon_greedy_logits_do_not_hide_a_value_that_is_no_number(bad):
    values = torch.tensor([[0.0, bad], [0.0, 1.0]])
    logits = functional.epsilon_greedy_logits(values, torch.tensor(1.0))
    assert logits[0].isnan().any()
    assert not logits[1].isnan().any()


# --- linear_schedule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "expected"), [(0.0, 1.0), (0.05, 0.76), (0.1, 0.52), (0.2, 0.04), (0.21, 0.04), (1.0, 0.04)]
)
def test_linear_schedule_falls_evenly_and_then_stays(progress, expected):
    assert functional.linear_schedule(1.0, 0.04, 0.2, progress) == pytest.approx(expected)


def test_linear_schedule_over_nothing_is_at_its_end():
    assert functional.linear_schedule(1.0, 0.1, 0.0, 0.0) == 0.1
