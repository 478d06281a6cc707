"""The same seed gives the same data, any other seed, stage or part of a run others; nothing else has a say."""

import random
from functools import partial

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from lit_collect import Collector, CollectorDataModule, EvaluationConfig, RolloutConfig, UpdateConfig
from lit_collect.seeding import Placement
from lit_collect.testing import BoringRLModule, CountingEnv

COPIES, FRAMES = 2, 32


class NoisyEnv(gymnasium.Env):
    """Observes three random numbers: of its own generator, of NumPy's global one and of Python's."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        return self._observe(), float(action), bool(self.np_random.random() < 0.1), False, {}

    def _observe(self):
        return np.array([self.np_random.random(), np.random.random(), random.random()])


class Sampler(nn.Module):
    """Acts at random, with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, observation):
        return {"logits": self.bias.expand(len(observation), 2)}


class Model(BoringRLModule):
    """Keeps its training data and its evaluation data."""

    def __init__(self, draws: int = 0) -> None:
        super().__init__(Sampler(), learning_rate=0.1)
        self.rounds: list[TensorDictBase] = []
        self._draws = draws

    def training_step(self, batch, batch_idx):
        torch.rand(self._draws), np.random.rand(self._draws), [random.random() for _ in range(self._draws)]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.rounds.append(batch)

    test_step = validation_step


def same(first: list[TensorDictBase], second: list[TensorDictBase]) -> bool:
    """Whether two lists of batches are equal in every key but the version."""
    assert len(first) == len(second) > 0
    pairs = [(a.exclude(("collector", "policy_version")), b) for a, b in zip(first, second, strict=True)]
    return all(torch.equal(a[key], b[key]) for a, b in pairs for key in a.keys(True, True))


def differs_everywhere(first: list[TensorDictBase], second: list[TensorDictBase]) -> bool:
    """Whether no number of the env's own generators turns up in both."""
    one, other = (torch.cat([batch["observation"].flatten() for batch in batches]) for batches in (first, second))
    one, other = one[one != 0], other[other != 0]  # padding is zero
    return not torch.isin(one, other).any()


@pytest.fixture
def fit(trainer_with):
    """Run a fit and give its model."""

    def run(seed: int | None, *, draws: int = 0, validate_every: int | None = None, **options) -> Model:
        data = CollectorDataModule(
            NoisyEnv,
            num_envs=COPIES,
            frames_per_batch=FRAMES,
            total_frames=4 * FRAMES,
            evaluation=EvaluationConfig(num_episodes=2),
            seed=seed,
            **options,
        )
        model = Model(draws)
        trainer = trainer_with(max_epochs=-1, val_check_interval=validate_every, num_sanity_val_steps=1)
        trainer.fit(model, datamodule=data)
        return model

    return run


def test_same_seed_gives_the_same_data_through_a_fit(fit):
    first, second = fit(5), fit(5)
    assert same(first.batches, second.batches)
    assert same(first.rounds, second.rounds)


@pytest.mark.parametrize("other", [6, 4, 5 + 2**32, 5 + 2**64])
def test_another_seed_gives_other_data(other, fit):
    first, second = fit(5), fit(other)
    assert differs_everywhere(first.batches, second.batches)
    assert differs_everywhere(first.rounds, second.rounds)


def test_seed_everything_seeds_the_data(fit):
    L.seed_everything(5)
    first = fit(None)
    L.seed_everything(5)
    assert same(first.batches, fit(None).batches)
    assert same(first.batches, fit(5).batches)
    L.seed_everything(6)
    assert differs_everywhere(first.batches, fit(None).batches)


def test_without_any_seed_no_two_runs_are_alike(fit, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    first = fit(None)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    assert differs_everywhere(first.batches, fit(None).batches)


def test_random_draws_of_the_trainer_change_no_data(fit):
    quiet, noisy = fit(5), fit(5, draws=17)
    assert same(quiet.batches, noisy.batches)


def test_collecting_changes_no_random_draw_of_the_trainer():
    def draws(collect: bool) -> tuple:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        if collect:
            with Collector(NoisyEnv, Sampler(), num_envs=2, frames_per_batch=16, seed=3) as collector:
                collector.collect()
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    assert draws(collect=True) == draws(collect=False)


def test_how_often_one_validates_changes_no_data(fit):
    rarely, often = fit(5), fit(5, validate_every=1)
    assert len(rarely.rounds) < len(often.rounds)
    assert same(rarely.batches, often.batches)


def test_minibatches_change_no_collected_frames_of_a_policy_that_does_not_learn(trainer_with):
    seen: list[torch.Tensor] = []

    def run(updates: UpdateConfig) -> torch.Tensor:
        seen.clear()
        data = CollectorDataModule(
            NoisyEnv, lambda obs: torch.zeros(len(obs), dtype=torch.int64), num_envs=COPIES, frames_per_batch=FRAMES,
            total_frames=2 * FRAMES, evaluation=None, seed=5, updates=updates,
        )  # fmt: skip
        data.rollout_listeners.append(lambda batch: seen.append(batch["observation"].clone()))
        trainer_with(max_epochs=-1).fit(BoringRLModule(Sampler()), datamodule=data)
        return torch.cat(seen, 1)

    whole = run(UpdateConfig())
    assert torch.equal(whole, run(UpdateConfig(epochs=3, minibatch_size=8)))
    assert torch.equal(whole, run(UpdateConfig(minibatch_size=5, shuffle=False)))


def test_every_evaluation_plays_the_same_episodes(fit):
    rounds = fit(5, validate_every=1).rounds
    starts = [batch["observation"][:, 0, 0] for batch in rounds]
    assert len(starts) == 5  # the sanity check and one after each batch
    assert all(torch.equal(starts[0], start) for start in starts[1:])


def test_stages_share_no_random_numbers(trainer_with, fit):
    model = fit(5)
    training, validation = model.batches, model.rounds
    data = CollectorDataModule(NoisyEnv, num_envs=COPIES, evaluation=EvaluationConfig(num_episodes=2), seed=5)
    tester = Model()
    trainer_with().test(tester, datamodule=data, verbose=False)
    assert differs_everywhere(training, validation)
    assert differs_everywhere(training, tester.rounds)
    assert differs_everywhere(validation, tester.rounds)


def test_evaluation_has_a_seed_of_its_own_where_one_is_given(trainer_with):
    def rounds(seed: int, evaluation_seed: int | None) -> list[TensorDictBase]:
        evaluation = EvaluationConfig(num_episodes=2, seed=evaluation_seed)
        data, model = CollectorDataModule(NoisyEnv, evaluation=evaluation, seed=seed), Model()
        trainer_with().validate(model, datamodule=data, verbose=False)
        return model.rounds

    assert same(rounds(1, 9), rounds(2, 9))
    assert differs_everywhere(rounds(1, None), rounds(2, None))


def test_ranks_and_copies_and_adjacent_seeds_share_no_random_numbers():
    def batch(entropy: int, rank: int = 0) -> TensorDictBase:
        place = Placement(entropy=entropy, rank=rank, world_size=2)
        with Collector(NoisyEnv, Sampler(), num_envs=2, frames_per_batch=16, seed=place) as collector:
            return collector.collect()

    batches = [batch(entropy, rank) for entropy in (7, 8, 9) for rank in (0, 1)]
    for number, one in enumerate(batches):
        assert differs_everywhere([one[0]], [one[1]])
        for other in batches[:number]:
            assert differs_everywhere([one], [other])
    ids = [one["collector", "traj_ids"][:, 0].tolist() for one in batches[:2]]
    assert ids == [[0, 1], [2, 3]]  # over all ranks


@pytest.mark.parametrize("policy", [Sampler, lambda: None], ids=["sampling", "random"])
@pytest.mark.parametrize("random_frames", [0, 8])
def test_set_seed_begins_the_stream_of_that_seed(random_frames, policy):
    options = {"num_envs": 2, "frames_per_batch": 16, "rollout": RolloutConfig(init_random_frames=random_frames)}
    with Collector(NoisyEnv, policy(), seed=4, **options) as expected:
        first = expected.collect()
    with Collector(NoisyEnv, policy(), seed=1, **options) as collector:
        collector.set_seed(4)
        again = collector.collect()
    assert torch.equal(first["observation"], again["observation"])
    assert torch.equal(first["action"], again["action"])


def test_loaded_state_repeats_no_random_action():
    options = {"num_envs": 2, "frames_per_batch": 64}
    with Collector(NoisyEnv, seed=4, **options) as first:
        actions, state = first.collect()["action"], first.state_dict()
    with Collector(NoisyEnv, seed=4, **options) as second:
        second.load_state_dict(state)
        assert not torch.equal(second.collect()["action"], actions)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_batch_that_was_given_out_never_changes(reuse):
    makers = [partial(CountingEnv, i, (2, 3), reuse_buffers=reuse) for i in range(2)]
    shared = torch.zeros(2, dtype=torch.int64)

    def policy(observation):  # gives the same tensor every time, changed in place
        return {"action": shared.add_(1).remainder_(2), "kept": shared}

    with Collector(makers, policy, frames_per_batch=10, total_frames=60, seed=0) as collector:
        given = [(batch, batch.clone()) for batch in collector]
        collector_closed_with = len(given)
    assert collector_closed_with == 6
    for batch, copy in given:
        assert (batch == copy).all()
    assert given[0][0]["action"][0].tolist() == [1, 0, 1, 0, 1]


def test_what_a_user_does_to_a_batch_does_not_reach_the_stream():
    makers = [partial(CountingEnv, i, (2, 3)) for i in range(2)]
    with Collector(makers, frames_per_batch=10, total_frames=60, seed=0) as expected:
        untouched = list(expected)
    with Collector(makers, frames_per_batch=10, total_frames=60, seed=0) as collector:
        copies = []
        for batch in collector:
            copies.append(batch.clone())
            batch.apply_(lambda leaf: leaf.zero_())
    assert same(untouched, copies)


def test_minibatches_do_not_share_memory_with_each_other(trainer_with):
    class Vandal(BoringRLModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch.clone(), batch_idx)
            batch.zero_()
            return loss

    data = CollectorDataModule(
        partial(CountingEnv, 0, (50,)),
        num_envs=1,
        frames_per_batch=8,
        total_frames=8,
        evaluation=None,
        updates=UpdateConfig(epochs=2, minibatch_size=4),
    )
    model = Vandal()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    steps = torch.cat([batch["observation"][:, 2] for batch in model.batches])
    assert sorted(steps.tolist()) == sorted(2 * list(range(8)))
