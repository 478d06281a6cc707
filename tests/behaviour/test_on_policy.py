"""Data are of the newest weights: every row says how many snapshots were published before it, and every row is used."""

from itertools import pairwise

import pytest
import torch

from lit_collect import Collector, CollectorDataModule, EvaluationConfig, UpdateConfig

COPIES, FRAMES = 2, 8  # of each batch

ENDINGS = {
    "max_steps": ({"max_epochs": -1, "max_steps": 3}, -1),
    "max_epochs": ({"max_epochs": 2}, -1),
    "total_frames": ({"max_epochs": -1}, 7 * FRAMES),
}


class Witness:
    """Counts publications by itself, and notes what each batch was collected under."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.publications = 0
        self.collected: list[tuple[int, torch.Tensor]] = []  # publications before it, and its observations
        publish, collect = Collector.update_policy_weights_, Collector.collect

        def counted(collector, *args, **kwargs):
            self.publications += 1
            return publish(collector, *args, **kwargs)

        def noted(collector):
            before = self.publications
            batch = collect(collector)
            self.collected.append((before, batch["observation"].clone()))
            return batch

        monkeypatch.setattr(Collector, "update_policy_weights_", counted)
        monkeypatch.setattr(Collector, "collect", noted)


@pytest.fixture
def witness(monkeypatch) -> Witness:
    return Witness(monkeypatch)


def steps_before_each(batches: int, accumulate: int, epoch: int | None) -> list[int]:
    """Optimizer steps before each batch; the last batch of an epoch forces one under automatic optimization."""
    steps, taken, since = [], 0, 0
    for number in range(batches):
        steps.append(taken)
        since += 1
        if since == accumulate or (epoch is not None and (number + 1) % epoch == 0):
            taken, since = taken + 1, 0
    return steps


def accumulating(base, every: int):
    """Manual optimization that steps after every so-many-th batch."""

    class Accumulating(base):
        def __init__(self) -> None:
            super().__init__(automatic_optimization=False)

        def training_step(self, batch, batch_idx):
            self.batches.append(batch)
            optimizer = self.optimizers()
            self.manual_backward(self.policy.weight.sum() / every)  # all together a step of 1
            if len(self.batches) % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    return Accumulating()


@pytest.mark.parametrize("validation", [False, True], ids=["alone", "validated"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_every_row_is_of_the_last_snapshot_and_every_batch_is_trained_on(
    automatic, accumulate, ending, validation, learner, evaluated_learner, trainer_with, census, witness
):
    options, total_frames = ENDINGS[ending]
    per_epoch = None if ending == "total_frames" else 4
    data = CollectorDataModule(
        census(),
        num_envs=COPIES,
        frames_per_batch=FRAMES,
        total_frames=total_frames,
        batches_per_epoch=per_epoch,
        evaluation=EvaluationConfig(num_episodes=2) if validation else None,
        seed=1,
    )
    kind = evaluated_learner if validation else learner
    model = kind() if automatic else accumulating(kind, accumulate)
    options = {**options, "num_sanity_val_steps": 2, "val_check_interval": accumulate}  # it forgets gradients
    if automatic:
        options["accumulate_grad_batches"] = accumulate
    trainer_with(**options).fit(model, datamodule=data)

    expected = {"max_steps": 3 * accumulate, "max_epochs": 8, "total_frames": 7}[ending]
    assert len(witness.collected) == len(model.batches) == expected
    forced = (per_epoch or expected) if automatic else None
    taken = steps_before_each(expected, accumulate, forced)
    for batch, (published, observation), steps in zip(model.batches, witness.collected, taken, strict=True):
        assert torch.equal(batch["observation"], observation)
        assert (batch["collector", "policy_version"] == published).all()
        assert (batch["weight"] == -steps).all()
    published = [before for before, _ in witness.collected]
    assert published == taken  # one snapshot for each step, never one that nobody asked for
    assert not validation or model.rounds


def test_a_batch_is_collected_after_the_last_minibatch_of_the_one_before(learner, trainer_with, census, witness):
    updates = UpdateConfig(epochs=2, minibatch_size=4)
    data = CollectorDataModule(
        census(), num_envs=COPIES, frames_per_batch=FRAMES, total_frames=3 * FRAMES, updates=updates, evaluation=None
    )
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert [batch["weight"].unique().tolist() for batch in model.batches] == [[0.0]] * 4 + [[-4.0]] * 4 + [[-8.0]] * 4
    assert [before for before, _ in witness.collected] == [0, 1, 2]  # the steps of a batch make one snapshot
    versions = [batch["collector", "policy_version"].unique().tolist() for batch in model.batches]
    assert versions == [[0]] * 4 + [[1]] * 4 + [[2]] * 4


def test_rows_are_of_the_newest_weights_when_a_step_goes_past_lightning(learner, trainer_with, census, witness):
    class Raw(learner):
        def training_step(self, batch, batch_idx):
            self.batches.append(batch)
            self.policy.weight.sum().backward()
            self.optimizers().optimizer.step()  # Lightning does not see it, and counts no step

    model = Raw(automatic_optimization=False)
    data = CollectorDataModule(census(), num_envs=1, frames_per_batch=4, batches_per_epoch=3, evaluation=None)
    trainer_with(max_epochs=1).fit(model, datamodule=data)
    weights = [batch["weight"].unique().item() for batch in model.batches]
    assert all(later < earlier for earlier, later in pairwise(weights))
    assert [before for before, _ in witness.collected] == [0, 1, 2]


def test_no_snapshot_is_published_when_no_step_was_taken(learner, trainer_with, census, witness):
    class Idle(learner):
        def training_step(self, batch, batch_idx):
            self.batches.append(batch)

    model = Idle(automatic_optimization=False)
    data = CollectorDataModule(census(), num_envs=1, frames_per_batch=4, batches_per_epoch=3, evaluation=None)
    trainer_with(max_epochs=1).fit(model, datamodule=data)
    assert witness.publications == 0
    assert all((batch["collector", "policy_version"] == 0).all() for batch in model.batches)


def test_two_optimizers_make_one_snapshot_for_each_batch(learner, trainer_with, census, witness):
    class Two(learner):
        def training_step(self, batch, batch_idx):
            self.batches.append(batch)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.policy.weight.sum())
                optimizer.step()

        def configure_optimizers(self):
            return [super(Two, self).configure_optimizers() for _ in range(2)]

    model = Two(automatic_optimization=False)
    data = CollectorDataModule(census(), num_envs=1, frames_per_batch=4, batches_per_epoch=3, evaluation=None)
    trainer_with(max_epochs=1).fit(model, datamodule=data)
    assert [batch["weight"].unique().item() for batch in model.batches] == [0.0, -2.0, -4.0]
    assert [before for before, _ in witness.collected] == [0, 1, 2]
