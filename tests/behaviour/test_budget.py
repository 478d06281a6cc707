"""A run has exactly the frames it was given, ends by itself, and says so when more is asked for."""

from functools import partial

import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from lit_collect import (
    BudgetSpentError,
    Collector,
    CollectorDataModule,
    EvaluationConfig,
    RolloutConfig,
    UpdateConfig,
    WorkerFailedError,
)
from lit_collect.testing import CountingEnv, FailingEnv

COPIES, FRAMES = 2, 8


class ForgetfulSync(SyncVectorEnv):
    """Spends a step on each reset."""

    def step(self, actions):
        return super().step(actions)


def make_data(census, total_frames: int, **options) -> CollectorDataModule:
    options = {"num_envs": COPIES, "frames_per_batch": FRAMES, "evaluation": None, "seed": 1, **options}
    return CollectorDataModule(census(), total_frames=total_frames, **options)


def rows_of(model) -> int:
    return sum(batch.numel() for batch in model.batches)


def invariant_holds(statistics) -> bool:
    parts = ("frames_yielded", "frames_pending", "frames_dropped")
    return statistics["frames_stepped"] == sum(statistics[part] for part in parts)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("batches_per_epoch", [None, 1, 2, 5])
@pytest.mark.parametrize("total_frames", [2, 8, 24, 30])
def test_endless_run_ends_with_exactly_its_frames(total_frames, batches_per_epoch, census, learner, trainer_with):
    data = make_data(census, total_frames, batches_per_epoch=batches_per_epoch)
    model, trainer = learner(), trainer_with(max_epochs=-1)
    trainer.fit(model, datamodule=data)
    assert rows_of(model) == data.frames_total == total_frames
    assert data.frames_left == 0
    assert data.progress == 1.0
    batches = -(-total_frames // FRAMES)
    assert len(model.batches) == trainer.global_step == batches
    assert trainer.current_epoch == -(-batches // (batches_per_epoch or batches))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("minibatch_size", [3, 4, 8])
def test_every_minibatch_of_the_last_shorter_batch_is_trained_on(minibatch_size, census, learner, trainer_with):
    data = make_data(census, 22, updates=UpdateConfig(epochs=3, minibatch_size=minibatch_size))
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    sizes = [batch.numel() for batch in model.batches]
    expected = [full + (rest > 0) for full, rest in (divmod(n, minibatch_size) for n in (8, 8, 6))]
    assert len(sizes) == 3 * sum(expected) == len(data.train_dataloader())
    assert sum(sizes) == 3 * 22
    assert max(sizes) <= minibatch_size


@pytest.mark.timeout(20)
def test_masked_source_trains_on_exactly_its_frames(learner, trainer_with):
    def make():
        return ForgetfulSync([partial(CountingEnv, i, (1, 2)) for i in range(COPIES)], autoreset_mode="NextStep")

    data = CollectorDataModule(
        make, frames_per_batch=FRAMES, total_frames=30, updates=UpdateConfig(minibatch_size=4), evaluation=None
    )
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert data.frames_total == rows_of(model) == 30
    seen = torch.cat([batch["observation"] for batch in model.batches])
    assert len(seen.unique(dim=0)) == 30  # each frame once


@pytest.mark.timeout(20)
def test_budget_ends_a_run_of_several_epochs_with_a_validation_after_each(census, evaluated_learner, trainer_with):
    data = make_data(census, 40, batches_per_epoch=2, evaluation=EvaluationConfig(num_episodes=2))
    model, trainer = evaluated_learner(), trainer_with(max_epochs=-1)
    trainer.fit(model, datamodule=data)
    assert rows_of(model) == 40
    assert trainer.current_epoch == 3  # the last one shorter
    assert len(model.rounds) == 3


def test_epoch_borders_reset_nothing(census, learner, trainer_with):
    data = make_data(census, 48, batches_per_epoch=1)
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    ids = torch.cat([batch["collector", "traj_ids"] for batch in model.batches], 1)
    steps = torch.arange(24)
    assert torch.equal(ids, torch.stack([steps // 3 * COPIES, steps // 3 * COPIES + 1]))  # episodes of 3 frames


@pytest.mark.timeout(20)
@pytest.mark.parametrize("more", [{"min_epochs": 4}, {"min_steps": 100}])
def test_minimum_beyond_the_budget_raises_instead_of_spinning(more, census, learner, trainer_with):
    data = make_data(census, 16)
    model = learner()
    with pytest.raises(BudgetSpentError, match=r"total_frames have been collected.*min_epochs"):
        trainer_with(max_epochs=-1, **more).fit(model, datamodule=data)
    assert rows_of(model) == 16


@pytest.mark.timeout(20)
def test_second_fit_after_the_budget_raises(census, learner, trainer_with):
    data = make_data(census, 16)
    trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
    with pytest.raises(BudgetSpentError, match="raise the budget"):
        trainer_with(max_epochs=-1).fit(learner(), datamodule=data)


@pytest.mark.timeout(20)
def test_run_without_a_budget_ends_by_its_epochs(census, learner, trainer_with):
    data = make_data(census, -1, batches_per_epoch=3)
    model = learner()
    trainer_with(max_epochs=2).fit(model, datamodule=data)
    assert data.frames_total == rows_of(model) == 48
    assert data.frames_left is None
    assert data.progress == 0.0


def test_progress_grows_with_the_frames(census, learner, trainer_with):
    seen = []

    class Watching(learner):
        def prepare_rollout(self, batch):
            seen.append(self.trainer.datamodule.progress)
            return batch

    data = make_data(census, 32)
    assert data.progress == 0.0
    trainer_with(max_epochs=-1).fit(Watching(), datamodule=data)
    assert seen == [0.25, 0.5, 0.75, 1.0]


def test_counters_add_up_at_every_moment(census):
    with Collector(census(), num_envs=2, frames_per_batch=6, total_frames=20) as collector:
        assert invariant_holds(collector.statistics())
        for number, _ in enumerate(collector, 1):
            statistics = collector.statistics()
            assert invariant_holds(statistics)
            assert statistics["frames_yielded"] == min(6 * number, 20)
            assert statistics["frames_dropped"] == 0


def test_frames_of_a_batch_that_failed_are_dropped_and_counted():
    envs = [CountingEnv(0), FailingEnv("step", at=6, index=1)]
    with Collector([lambda: envs[0], lambda: envs[1]], frames_per_batch=8, total_frames=24) as collector:
        collector.collect()
        with pytest.raises(WorkerFailedError, match="env copy 1 failed in step"):
            collector.collect()
        statistics = collector.statistics()
        assert invariant_holds(statistics)
        assert (statistics["frames_yielded"], statistics["frames_dropped"]) == (8, 2)
        assert sum(batch.numel() for batch in collector) == 16  # the budget is of what was handed out
        assert invariant_holds(collector.statistics())
        assert collector.statistics()["frames_dropped"] == 2


def test_rows_beyond_the_budget_of_a_masked_source_are_dropped_and_counted():
    env = ForgetfulSync([partial(CountingEnv, 0, (1,)), partial(CountingEnv, 1, (50,))], autoreset_mode="NextStep")
    with Collector(env, frames_per_batch=4, total_frames=4) as collector:
        first, second = collector
        statistics = collector.statistics()
    env.close()
    assert int(first["collector", "mask"].sum()) == 3
    assert int(second["collector", "mask"].sum()) == 1
    assert (statistics["frames_yielded"], statistics["frames_dropped"]) == (4, 1)
    assert invariant_holds(statistics)


@pytest.mark.parametrize(("asked", "taken"), [(1, 2), (5, 6), (8, 8), (11, 12)])
def test_random_frames_round_up_to_whole_steps_and_belong_to_the_budget(asked, taken, census):
    rollout = RolloutConfig(init_random_frames=asked)
    with Collector(census(), num_envs=2, frames_per_batch=8, total_frames=24, rollout=rollout) as collector:
        versions = torch.cat([batch["collector", "policy_version"] for batch in collector], 1)
    assert versions.numel() == 24
    assert int((versions == -1).sum()) == taken
    assert (versions[:, : taken // 2] == -1).all()
