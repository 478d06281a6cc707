import lightning as L
import pytest
import torch

from lit_collect import CollectorDataModule, WeightSync
from lit_collect.callbacks.budget import FrameBudget
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv


def fit(trainer_with, model: BoringRLModule, *callbacks: L.Callback, batches: int = 3, **options) -> L.Trainer:
    data = CollectorDataModule(
        CountingEnv, num_envs=1, frames_per_batch=4, batches_per_epoch=batches, evaluation=None, seed=1
    )
    trainer = trainer_with(*callbacks, logger=False, **options)
    trainer.fit(model, datamodule=data)
    return trainer


def versions(model: BoringRLModule) -> list[int]:
    return [batch["collector", "policy_version"].unique().item() for batch in model.batches]


def kinds(trainer: L.Trainer) -> list[type]:
    return [type(callback) for callback in trainer.callbacks]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_n_steps": 0}, "weight_sync.every_n_steps must be at least 1, got 0"),
        ({"max_staleness": -1}, "weight_sync.max_staleness must be at least 0 or None, got -1"),
    ],
)
def test_setting_out_of_range_raises(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        WeightSync(**options)


def test_change_is_taken_once() -> None:
    sync = WeightSync()
    assert not sync.take_change()
    sync.mark_changed()
    sync.mark_changed()
    assert sync.take_change()
    assert not sync.take_change()


def test_fit_without_it_gets_one(trainer_with) -> None:
    model = BoringRLModule()
    trainer = fit(trainer_with, model)
    assert kinds(trainer).count(WeightSync) == kinds(trainer).count(FrameBudget) == 1
    assert versions(model) == [0, 1, 2]


def test_fit_that_has_one_keeps_it_alone(trainer_with) -> None:
    class Own(WeightSync):
        pass

    own, model = Own(), BoringRLModule()
    trainer = fit(trainer_with, model, own)
    assert [callback for callback in trainer.callbacks if isinstance(callback, WeightSync)] == [own]
    assert versions(model) == [0, 1, 2]


def test_added_callbacks_come_before_the_checkpoints(trainer_with, tmp_path) -> None:
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(tmp_path / "kept")
    trainer = fit(trainer_with, BoringRLModule(), checkpoint, enable_checkpointing=True)
    assert trainer.callbacks[-1] is checkpoint


@pytest.mark.parametrize("every_n_steps", [1, 5])
def test_synchronous_collection_publishes_before_each_batch_however_many_steps_there_were(
    every_n_steps, trainer_with
) -> None:
    model = BoringRLModule()
    fit(trainer_with, model, WeightSync(every_n_steps=every_n_steps))
    assert versions(model) == [0, 1, 2]


def test_step_that_was_skipped_is_no_change(trainer_with) -> None:
    class Skipping(BoringRLModule):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None) -> None:
            if batch_idx == 1:
                optimizer_closure()  # the gradients of this batch are thrown away
            else:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    model = Skipping()
    fit(trainer_with, model, batches=4)
    assert versions(model) == [0, 1, 1, 2]


def test_optimizers_are_let_go_after_a_fit_and_after_an_error(trainer_with) -> None:
    class Failing(BoringRLModule):
        def training_step(self, batch, batch_idx):
            if self.fails and batch_idx == 1:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            self.optimizer = super().configure_optimizers()
            return self.optimizer

    for fails in (False, True):
        sync, model = WeightSync(), Failing()
        model.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="on purpose"):
                fit(trainer_with, model, sync)
        else:
            fit(trainer_with, model, sync)
        assert sync.take_change() or fails
        model.policy.action.grad = torch.ones(())
        model.optimizer.step()
        assert not sync.take_change()


def test_one_callback_serves_several_fits(trainer_with) -> None:
    sync = WeightSync()
    for _ in range(2):
        model = BoringRLModule(ConstantPolicy(num_actions=2))
        fit(trainer_with, model, sync)
        assert versions(model) == [0, 1, 2]


def test_checkpoint_of_a_run_with_it_resumes_without_it(trainer_with, tmp_path) -> None:
    trainer = fit(trainer_with, BoringRLModule(), WeightSync(every_n_steps=3))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    model = BoringRLModule()
    data = CollectorDataModule(CountingEnv, num_envs=1, frames_per_batch=4, batches_per_epoch=3, evaluation=None)
    trainer_with(logger=False, max_epochs=2).fit(model, datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert versions(model) == [3, 4, 5]
