"""Drawing without distribution objects gives what the objects give, number for number."""

import pytest
import torch
from torch import distributions

from lit_collect.sampling import CATEGORICAL, NORMAL, CategoricalSampler, choose_from, family_of, joint

SHAPES = [(1, 2), (7, 5), (64, 18)]  # below and above the sizes where torch changes its kernels


@pytest.fixture(autouse=True)
def seeded():
    """Draw from a state of our own and put the old one back."""
    before = torch.get_rng_state()
    torch.manual_seed(11)
    yield
    torch.set_rng_state(before)


def same_draws(ours, theirs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A few draws of both, each from the same generator state."""
    state = torch.get_rng_state()
    first = [ours() for _ in range(3)]
    torch.set_rng_state(state)
    return first, [theirs() for _ in range(3)]


@pytest.mark.parametrize("draw", [CATEGORICAL.sample, CATEGORICAL.chooser("random")], ids=["torch", "numpy"])
@pytest.mark.parametrize("shape", SHAPES)
def test_categorical_draws_what_torch_draws(shape, draw):
    logits = 3 * torch.randn(shape)
    ours, theirs = same_draws(lambda: draw(logits), distributions.Categorical(logits=logits).sample)
    assert [x.tolist() for x in ours] == [x.tolist() for x in theirs]
    assert ours[0].dtype == torch.int64


@pytest.mark.parametrize("shape", SHAPES)
def test_normal_draws_what_torch_draws(shape):
    loc, scale = torch.randn(shape), torch.rand(shape) + 0.1
    ours, theirs = same_draws(lambda: NORMAL.sample(loc, scale), distributions.Normal(loc, scale).sample)
    assert torch.equal(torch.stack(ours), torch.stack(theirs))
    assert len({float(x[0, 0]) for x in ours}) == 3


def test_normal_with_one_scale_for_all_copies_draws_what_torch_draws():
    loc, scale = torch.randn(6, 3), torch.rand(3) + 0.1
    ours, theirs = same_draws(lambda: NORMAL.sample(loc, scale), distributions.Normal(loc, scale).sample)
    assert torch.equal(torch.stack(ours), torch.stack(theirs))


def test_drawing_leaves_its_parameters_alone():
    logits, loc, scale = torch.randn(4, 3), torch.randn(4, 3), torch.rand(4, 3)
    before = [x.clone() for x in (logits, loc, scale)]
    CATEGORICAL.sample(logits)
    NORMAL.sample(loc, scale)
    assert all(map(torch.equal, before, (logits, loc, scale)))


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probs_of_rows_computed_at_once_are_torchs(shape):
    logits, loc, scale = torch.randn(3, *shape), torch.randn(3, *shape), torch.rand(3, *shape) + 0.1
    categorical, normal = distributions.Categorical(logits=logits), distributions.Normal(loc, scale)
    index, value = categorical.sample(), normal.sample()
    torch.testing.assert_close(CATEGORICAL.log_prob(index, logits), categorical.log_prob(index))
    torch.testing.assert_close(NORMAL.log_prob(value, loc, scale), normal.log_prob(value))


def test_log_prob_of_logits_that_are_not_normalised_is_torchs():
    logits = torch.tensor([[100.0, 101.0], [-500.0, -500.0], [0.0, -torch.inf]])
    index = torch.tensor([1, 0, 0])
    expected = distributions.Categorical(logits=logits).log_prob(index)
    torch.testing.assert_close(CATEGORICAL.log_prob(index, logits), expected)


@pytest.mark.parametrize("exploration", ["mode", "mean", "deterministic"])
def test_exploration_other_than_random_takes_the_most_likely_action(exploration):
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert CATEGORICAL.chooser(exploration)(logits).tolist() == [1, 0]
    loc = torch.tensor([[0.5, -0.5]])
    assert torch.equal(NORMAL.chooser(exploration)(loc, torch.ones(1, 2)), loc)


def test_exploration_random_samples():
    assert type(CATEGORICAL.chooser("random")) is CategoricalSampler
    assert NORMAL.chooser("random") is NORMAL.sample


def test_sampler_leaves_logits_alone_and_keeps_what_it_gave():
    sampler, logits = CategoricalSampler(), torch.tensor([[0.0, 50.0], [50.0, 0.0]])
    before = logits.clone()
    first = sampler(logits)
    again = sampler(logits.flip(0).requires_grad_())
    assert torch.equal(logits, before)
    assert (first.tolist(), again.tolist()) == ([1, 0], [0, 1])
    assert sampler(torch.tensor([[0.0, 50.0, 0.0]])).tolist() == [1], "another shape"
    assert sampler(logits.double()).tolist() == [1, 0], "another precision"
    with torch.inference_mode():
        inside = CategoricalSampler()
        assert inside(logits).tolist() == [1, 0]
    assert inside(logits).tolist() == [1, 0], "its memory is of use outside, too"


def test_sampler_draws_as_often_as_the_probabilities_say():
    torch.manual_seed(0)
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    drawn = CategoricalSampler()(probabilities.log().expand(100_000, 3))
    assert torch.allclose(torch.bincount(drawn) / 100_000, probabilities, atol=0.006)  # four standard deviations


@pytest.mark.parametrize("name", ["logits", "probs"])
def test_family_of_a_categorical_gives_logits_that_draw_the_same(name):
    made = distributions.Categorical(**{name: torch.rand(4, 3)})
    family, (logits,) = family_of(made)
    assert family is CATEGORICAL
    ours, theirs = same_draws(lambda: CATEGORICAL.sample(logits), made.sample)
    assert [x.tolist() for x in ours] == [x.tolist() for x in theirs]


def test_family_of_a_normal_gives_its_parameters_also_within_independent():
    loc, scale = torch.randn(4, 3), torch.rand(4, 3)
    for made in (distributions.Normal(loc, scale), distributions.Independent(distributions.Normal(loc, scale), 1)):
        family, parameters = family_of(made)
        assert family is NORMAL
        assert torch.equal(parameters[0], loc)
        assert torch.equal(parameters[1], scale)


def test_family_of_other_distributions_is_none():
    class Own(distributions.Normal):
        """May have another sample."""

    loc, scale = torch.zeros(4, 3), torch.ones(4, 3)
    assert family_of(Own(loc, scale)) is None
    assert family_of(distributions.Bernoulli(torch.rand(4))) is None
    assert family_of(distributions.Independent(distributions.Laplace(loc, scale), 1)) is None


def test_choose_from_random_samples_from_the_distribution():
    made = distributions.Beta(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 4.0]))
    ours, theirs = same_draws(lambda: choose_from(made, "random"), made.sample)
    assert torch.equal(torch.stack(ours), torch.stack(theirs))


def test_choose_from_takes_mode_and_mean_as_asked():
    made = distributions.Beta(torch.tensor([2.0, 3.0]), torch.tensor([2.0, 2.0]))
    assert torch.equal(choose_from(made, "mode"), made.mode)
    assert torch.equal(choose_from(made, "mean"), made.mean)
    assert torch.equal(choose_from(made, "deterministic"), made.mode)
    assert not torch.equal(made.mode, made.mean)


def test_choose_from_deterministic_prefers_the_distributions_own_sample():
    class Property(distributions.Beta):
        deterministic_sample = torch.tensor([0.25])

    class Method(distributions.Beta):
        def deterministic_sample(self) -> torch.Tensor:
            return torch.tensor([0.75])

    parameters = torch.tensor([2.0]), torch.tensor([2.0])
    assert choose_from(Property(*parameters), "deterministic").tolist() == [0.25]
    assert choose_from(Method(*parameters), "deterministic").tolist() == [0.75]


def test_choose_from_falls_back_to_the_mean_and_says_when_there_is_nothing():
    class OnlyMean(distributions.Distribution):
        mean = torch.tensor([3.0])

    class Nothing(distributions.Distribution):
        pass

    assert choose_from(OnlyMean(validate_args=False), "deterministic").tolist() == [3.0]
    with pytest.raises(NotImplementedError, match="Nothing has neither mode nor mean"):
        choose_from(Nothing(validate_args=False), "deterministic")


@pytest.mark.parametrize(("dims", "shape"), [(0, (2, 3, 4)), (1, (2, 3)), (2, (2,))])
def test_joint_sums_over_the_dimensions_of_one_action(dims, shape):
    log_prob = torch.randn(2, 3, 4)
    summed = joint(log_prob, dims)
    assert summed.shape == shape
    if dims == 1:
        made = distributions.Independent(distributions.Normal(torch.zeros(2, 3, 4), torch.ones(2, 3, 4)), 1)
        action = made.sample()
        torch.testing.assert_close(joint(NORMAL.log_prob(action, made.mean, made.stddev), 1), made.log_prob(action))
