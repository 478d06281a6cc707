import pytest

from lit_collect import CollectorDataModule, UpdateConfig
from lit_collect.callbacks.budget import FrameBudget
from lit_collect.testing import BoringRLModule, CountingEnv


def make_data(total_frames: int, **options) -> CollectorDataModule:
    options = {"num_envs": 1, "frames_per_batch": 4, "evaluation": None, **options}
    return CollectorDataModule(CountingEnv, total_frames=total_frames, **options)


class Watching(BoringRLModule):
    """Notes after each minibatch whether the trainer was told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        self.told.append(self.trainer.should_stop)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("batches_per_epoch", [None, 2])
def test_run_is_stopped_after_the_last_minibatch_and_not_before(batches_per_epoch, trainer_with) -> None:
    model = Watching()
    data = make_data(14, updates=UpdateConfig(epochs=2, minibatch_size=2), batches_per_epoch=batches_per_epoch)
    trainer_with(logger=False, max_epochs=-1).fit(model, datamodule=data)
    assert model.told == [False] * 13 + [True]


class Leaving(Watching):
    """Leaves each epoch at one of its minibatches."""

    def on_train_batch_start(self, batch, batch_idx) -> int | None:
        return -1 if batch_idx == 3 else None


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("model", "options"), [(Watching, {"limit_train_batches": 3}), (Leaving, {})], ids=["limit_train_batches", "hook"]
)
def test_epochs_that_are_cut_short_end_with_the_budget_too(model, options, trainer_with) -> None:
    data = make_data(16, updates=UpdateConfig(minibatch_size=2))  # an epoch takes one and a half batches, or a bit more
    trainer = trainer_with(logger=False, max_epochs=-1, **options)
    trainer.fit(model(), datamodule=data)
    assert data.frames_left == 0
    assert (trainer.current_epoch, trainer.global_step) == (2, 6)


def test_run_without_a_budget_is_not_stopped(trainer_with) -> None:
    model = Watching()
    trainer_with(logger=False, max_epochs=2).fit(model, datamodule=make_data(-1, batches_per_epoch=2))
    assert model.told == [False] * 4


def test_run_that_ends_otherwise_first_is_not_stopped(trainer_with) -> None:
    model, data = Watching(), make_data(40)
    trainer = trainer_with(logger=False, max_epochs=-1, max_steps=3)
    trainer.fit(model, datamodule=data)
    assert model.told == [False] * 3
    assert data.frames_left == 28


def test_callback_without_a_stream_does_nothing(trainer_with, known_data, learner) -> None:
    trainer = trainer_with(FrameBudget())
    trainer.fit(learner, datamodule=known_data(batches=2))
    assert trainer.global_step == 4


def test_trainer_that_changes_its_data_module_ends_with_the_new_ones_budget(trainer_with) -> None:
    trainer = trainer_with(logger=False, max_epochs=-1)
    for total_frames in (4, 12):
        model = Watching()
        trainer.fit(model, datamodule=make_data(total_frames))
        assert model.told == [False] * (total_frames // 4 - 1) + [True]
        assert [type(callback) for callback in trainer.callbacks].count(FrameBudget) == 1
