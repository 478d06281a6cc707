"""Several choices at once, against torch's own distributions and numbers worked by hand."""

import math

import pytest
import torch
from torch.distributions import Categorical

from lit_collect import Collector, masked_logits
from trainers.distributions import MultiCategorical, action_entropy, action_log_prob, detached
from trainers.functional import multi_categorical_entropy, multi_categorical_log_prob

NVEC = [2, 3]
# softmax of the halves: (1/4, 3/4) and (1/2, 1/4, 1/4)
LOGITS = torch.tensor([[1 / 4, 3 / 4, 1 / 2, 1 / 4, 1 / 4]]).log()


def test_multi_categorical_log_prob_by_hand():
    log_prob = multi_categorical_log_prob(LOGITS, NVEC, torch.tensor([[1, 2]]))
    assert log_prob.item() == pytest.approx(math.log(3 / 4 * 1 / 4))


def test_multi_categorical_entropy_by_hand():
    by_hand = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) + 0.5 * math.log(2) + 0.5 * math.log(4)
    assert multi_categorical_entropy(LOGITS, NVEC).item() == pytest.approx(by_hand)


def test_multi_categorical_equals_torch_in_any_leading_shape():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 5, generator=generator)
    action = torch.stack([torch.randint(n, (4, 3), generator=generator) for n in NVEC], -1)
    parts = [Categorical(logits=part) for part in logits.split(NVEC, -1)]
    choices = MultiCategorical(logits, NVEC)
    expected = sum(part.log_prob(index) for part, index in zip(parts, action.unbind(-1), strict=True))
    torch.testing.assert_close(choices.log_prob(action), expected)
    torch.testing.assert_close(choices.entropy(), sum(part.entropy() for part in parts))
    torch.testing.assert_close(choices.mode, torch.stack([part.probs.argmax(-1) for part in parts], -1))
    assert choices.batch_shape == (4, 3)
    assert choices.event_shape == (2,)


def test_multi_categorical_samples_each_choice_with_its_probabilities():
    torch.manual_seed(0)
    drawn = MultiCategorical(LOGITS, NVEC).sample((20_000,)).squeeze(1)
    assert drawn.shape == (20_000, 2)
    for column, probabilities in ((0, [1 / 4, 3 / 4]), (1, [1 / 2, 1 / 4, 1 / 4])):
        shares = drawn[:, column].bincount(minlength=len(probabilities)) / len(drawn)
        torch.testing.assert_close(shares, torch.tensor(probabilities), rtol=0.0, atol=0.02)


def test_multi_categorical_never_samples_what_is_masked():
    torch.manual_seed(0)
    mask = torch.tensor([[False, True, True, False, True]])
    drawn = MultiCategorical(masked_logits(torch.zeros(1, 5), mask), NVEC).sample((1000,)).squeeze(1)
    assert set(drawn[:, 0].tolist()) == {1}
    assert set(drawn[:, 1].tolist()) == {0, 2}


def test_answers_give_masked_actions_no_probability_and_no_gradient():
    logits = torch.tensor([[5.0, 1.0, 1.0]], requires_grad=True)
    answer = {"logits": masked_logits(logits, torch.tensor([[False, True, True]]))}
    assert answer["logits"].softmax(-1).tolist() == [[0.0, 0.5, 0.5]]
    assert action_entropy(answer).item() == pytest.approx(math.log(2))
    (action_log_prob(answer, torch.tensor([1])) + action_entropy(answer)).sum().backward()
    assert logits.grad.tolist() == [[0.0, pytest.approx(0.5), pytest.approx(-0.5)]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_masked_answers_are_finite_also_with_nothing_left(dtype):
    logits = torch.tensor([[60.0, -60.0]], dtype=dtype)
    for mask in ([[True, False]], [[False, True]], [[False, False]]):
        answer = {"logits": masked_logits(logits, torch.tensor(mask))}
        assert action_entropy(answer).isfinite().all()
        assert not answer["logits"].softmax(-1).isnan().any()


def test_detached_answers_have_no_gradient():
    logits = LOGITS.clone().requires_grad_()
    assert not detached(MultiCategorical(2 * logits, NVEC)).logits.requires_grad
    assert not detached({"logits": 2 * logits})["logits"].requires_grad


@pytest.mark.parametrize("exploration", ["random", "mode", "mean", "deterministic"])
def test_collector_acts_with_several_choices(exploration):
    import gymnasium

    from lit_collect import RolloutConfig

    class Dials(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (1,))
        action_space = gymnasium.spaces.MultiDiscrete(NVEC, start=[10, 20])

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.low, {}

        def step(self, action):
            assert self.action_space.contains(action)
            return self.observation_space.low, float(action.sum()), False, False, {}

    def policy(observation):
        return MultiCategorical(LOGITS.expand(len(observation), -1), NVEC)

    config = RolloutConfig(exploration=exploration)
    with Collector(Dials, policy, num_envs=2, frames_per_batch=64, rollout=config, seed=0) as collector:
        batch = next(iter(collector))
    assert batch["action"].shape == (2, 32, 2)
    assert batch["action"].dtype == torch.int64
    expected = multi_categorical_log_prob(LOGITS.expand(2, 32, -1), NVEC, batch["action"])
    torch.testing.assert_close(batch["log_prob"], expected)
    torch.testing.assert_close(batch["next", "reward"].squeeze(-1), 30.0 + batch["action"].sum(-1).float())
    if exploration != "random":
        assert (batch["action"] == torch.tensor([1, 0])).all()
