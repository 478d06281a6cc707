"""A run that is resumed from a checkpoint goes on counting, and never plays the same episodes again."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lit_collect import (
    BudgetSpentError,
    Collector,
    CollectorDataModule,
    EvaluationConfig,
    RolloutConfig,
    UpdateConfig,
    WeightSync,
)
from lit_collect.testing import CountingEnv

COPIES, FRAMES = 2, 8


class InterruptedRunError(Exception):
    """Ends the first run."""


@pytest.fixture
def interrupted(evaluated_learner):
    """Make a learner whose run breaks in its so-many-th training step."""

    class Breaking(evaluated_learner):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at

        def training_step(self, batch, batch_idx):
            if len(self.batches) == self.at:
                raise InterruptedRunError
            return super().training_step(batch, batch_idx)

    return Breaking


def make_data(census=None, **options) -> CollectorDataModule:
    envs = (lambda: CountingEnv()) if census is None else census  # a lambda cannot be pickled
    options = {"num_envs": COPIES, "frames_per_batch": FRAMES, "seed": 7, **options}
    return CollectorDataModule(envs, evaluation=EvaluationConfig(num_episodes=1), **options)


class Saving(Callback):
    """Saves a checkpoint after every so-many-th step; unlike Lightning's own it need not be there again to resume."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step % self._every == 0:
            trainer.save_checkpoint(self._folder / f"step={trainer.global_step}.ckpt")


def run_until(at: int, every: int, tmp_path, trainer_with, interrupted, **options):
    """A run with a checkpoint after each `every` steps that breaks in step `at`; its data module and model."""
    data, model = make_data(**options), interrupted(at)
    trainer = trainer_with(max_epochs=-1, callbacks=[Saving(tmp_path, every)])
    with pytest.raises(InterruptedRunError):
        trainer.fit(model, datamodule=data)
    return data, model


def test_checkpoint_of_a_lambda_env_holds_plain_data(tmp_path, trainer_with, evaluated_learner):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    data = make_data(total_frames=16)
    trainer_with(max_epochs=-1, enable_checkpointing=True, callbacks=[checkpoint]).fit(
        evaluated_learner(), datamodule=data
    )
    loaded = torch.load(checkpoint.best_model_path, weights_only=True)
    state = loaded["CollectorDataModule"]["collector"]
    assert (state["frames_yielded"], state["batches"], state["policy_version"]) == (16, 2, 1)
    assert state["entropy"] == 7
    assert "make_data.<locals>.<lambda>" in loaded["datamodule_hyper_parameters"]["env"]


@pytest.mark.parametrize("batches_per_epoch", [None, 4, 1], ids=["mid-epoch", "mid-epoch-of-4", "epoch-border"])
def test_resumed_run_goes_on_counting(batches_per_epoch, tmp_path, trainer_with, interrupted, evaluated_learner):
    options = {"total_frames": 44, "batches_per_epoch": batches_per_epoch}
    _, before = run_until(4, 3, tmp_path, trainer_with, interrupted, **options)
    data, after = make_data(**options), evaluated_learner()
    trainer = trainer_with(max_epochs=-1)
    trainer.fit(after, datamodule=data, ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)

    assert data.frames_total == 44
    assert sum(batch.numel() for batch in after.batches) == 44 - 3 * FRAMES
    assert trainer.global_step == 6
    saved, resumed = before.batches[:3], after.batches
    old_ids = {int(i) for batch in saved for i in batch["collector", "traj_ids"].flatten()}
    new_ids = {int(i) for batch in resumed for i in batch["collector", "traj_ids"].flatten()}
    assert max(old_ids) < min(new_ids)
    assert {i % COPIES for i in new_ids} == {0, 1}
    assert [batch["weight"].unique().item() for batch in resumed] == [-3.0, -4.0, -5.0]
    versions = [batch["collector", "policy_version"].unique().item() for batch in resumed]
    assert versions == [3, 4, 5]  # 0, 1 and 2 acted before; the weights of the checkpoint are the fourth
    assert all(batch["is_init"][:, 0].all() for batch in resumed[:1])  # the inside of episodes is not restored
    state = data.state_dict()["collector"]
    assert (state["frames_yielded"], state["frames_stepped"], state["batches"]) == (44, 44, 6)


def test_resumed_run_begins_under_new_seeds(tmp_path, trainer_with, interrupted, evaluated_learner, census):
    first, second, third = census(), census(), census()
    run_until(2, 1, tmp_path, trainer_with, interrupted, census=first, total_frames=32)
    for envs in (second, third):
        trainer_with(max_epochs=-1, limit_val_batches=0).fit(
            evaluated_learner(), datamodule=make_data(envs, total_frames=32), ckpt_path=tmp_path / "step=1.ckpt"
        )

    def seeds(envs):
        return {env.seeds[0] for env in envs.made}

    assert len(seeds(first)) == len(seeds(second)) == COPIES
    assert not seeds(first) & seeds(second)
    assert seeds(second) == seeds(third)  # and the resumed run can be reproduced itself


def test_run_that_is_resumed_twice_never_repeats_its_seeds(tmp_path, trainer_with, interrupted, census):
    seen: list[int] = []
    for number, path in enumerate([None, tmp_path / "step=1.ckpt", tmp_path / "step=2.ckpt"]):
        envs, model = census(), interrupted(1)
        data = make_data(envs, total_frames=80)
        trainer = trainer_with(max_epochs=-1, limit_val_batches=0, callbacks=[Saving(tmp_path, 1)])
        with pytest.raises(InterruptedRunError):
            trainer.fit(model, datamodule=data, ckpt_path=path)
        assert len(model.batches) == 1
        seen += [env.seeds[0] for env in envs.made]
        assert len(seen) == len(set(seen)) == COPIES * (number + 1)


def test_resume_in_the_middle_of_a_batch_leaves_its_delivered_minibatches_out(
    tmp_path, trainer_with, interrupted, evaluated_learner
):
    updates = UpdateConfig(epochs=2, minibatch_size=4)  # 4 minibatches of each batch
    options = {"total_frames": 5 * FRAMES, "updates": updates}
    run_until(7, 6, tmp_path, trainer_with, interrupted, **options)  # in the second batch, after 2 of its 4
    data, model = make_data(**options), evaluated_learner()
    trainer = trainer_with(max_epochs=-1)
    trainer.fit(model, datamodule=data, ckpt_path=tmp_path / "step=6.ckpt")
    assert data.frames_total == 40
    versions = [batch["collector", "policy_version"].unique().item() for batch in model.batches]
    assert versions == [2] * 2 + [3] * 4 + [4] * 4
    # 2 batches were collected before; of the third one 2 minibatches are used in the place of those that were left
    assert trainer.global_step == 6 + 2 + 2 * 4


@pytest.mark.parametrize("step", [2, 4, 6])
def test_epoch_of_a_fixed_number_of_batches_is_completed(step, tmp_path, trainer_with, interrupted, evaluated_learner):
    options = {"batches_per_epoch": 4}
    run_until(7, 2, tmp_path, trainer_with, interrupted, **options)
    data, model = make_data(**options), evaluated_learner()
    trainer = trainer_with(max_epochs=2)
    trainer.fit(model, datamodule=data, ckpt_path=tmp_path / f"step={step}.ckpt")
    assert trainer.global_step == 8
    assert len(model.batches) == 8 - step
    assert data.frames_total == 8 * FRAMES


def test_resume_with_another_number_of_copies_raises(tmp_path, trainer_with, interrupted, evaluated_learner):
    run_until(2, 1, tmp_path, trainer_with, interrupted, total_frames=32)
    data = make_data(num_envs=4, total_frames=32)
    with pytest.raises(ValueError, match="the state is of 2 env copies, this collector has 4"):
        trainer_with(max_epochs=-1).fit(evaluated_learner(), datamodule=data, ckpt_path=tmp_path / "step=1.ckpt")


def test_larger_budget_lets_a_finished_run_go_on(tmp_path, trainer_with, evaluated_learner):
    trainer_with(max_epochs=-1, callbacks=[Saving(tmp_path, 1)]).fit(
        evaluated_learner(), datamodule=make_data(total_frames=16, batches_per_epoch=1)
    )
    data, model = make_data(total_frames=40, batches_per_epoch=1), evaluated_learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data, ckpt_path=tmp_path / "step=2.ckpt")
    assert data.frames_total == 40
    assert len(model.batches) == 3


@pytest.mark.parametrize("batches_per_epoch", [None, 1])
def test_budget_that_the_checkpoint_has_passed_is_said_to_be_spent(
    batches_per_epoch, tmp_path, trainer_with, interrupted, evaluated_learner
):
    run_until(3, 1, tmp_path, trainer_with, interrupted, total_frames=32)
    data = make_data(total_frames=8, batches_per_epoch=batches_per_epoch)
    with pytest.raises(BudgetSpentError, match="raise the budget"):
        trainer_with(max_epochs=-1).fit(evaluated_learner(), datamodule=data, ckpt_path=tmp_path / "step=2.ckpt")
    assert (data.frames_left, data.frames_total) == (0, 16)


def test_checkpoint_before_the_first_batch_resumes_from_the_beginning(tmp_path, trainer_with, evaluated_learner):
    trainer, data = trainer_with(max_epochs=-1), make_data(total_frames=16)
    trainer.validate(evaluated_learner(), datamodule=data)
    trainer.save_checkpoint(tmp_path / "start.ckpt")
    model = evaluated_learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data, ckpt_path=tmp_path / "start.ckpt")
    assert data.frames_total == 16
    assert model.batches[0]["collector", "traj_ids"].min() == 0


def test_validating_a_checkpoint_does_not_collect(tmp_path, trainer_with, interrupted, evaluated_learner, census):
    run_until(2, 1, tmp_path, trainer_with, interrupted, total_frames=32)
    envs, model = census(), evaluated_learner()
    data = make_data(envs, total_frames=32)
    trainer_with().validate(model, datamodule=data, ckpt_path=tmp_path / "step=1.ckpt")
    assert len(envs.made) == len(model.rounds) == 1
    assert model.policy.weight.item() == -1.0
    assert data.frames_total == FRAMES


def test_weight_sync_given_by_the_user_publishes_what_the_checkpoint_brought(
    tmp_path, trainer_with, interrupted, evaluated_learner
):
    run_until(2, 1, tmp_path, trainer_with, interrupted, total_frames=32)
    model = evaluated_learner()
    trainer_with(max_epochs=-1, callbacks=[WeightSync()]).fit(
        model, datamodule=make_data(total_frames=32), ckpt_path=tmp_path / "step=1.ckpt"
    )
    assert [batch["collector", "policy_version"].unique().item() for batch in model.batches] == [1, 2, 3]


def test_collector_state_brings_counters_ids_and_the_warm_up_back():
    rollout = RolloutConfig(init_random_frames=12)
    options = {"num_envs": 2, "frames_per_batch": 8, "total_frames": 40, "rollout": rollout}
    with Collector(CountingEnv, seed=3, **options) as first:
        first.collect()
        state = first.state_dict()
    with Collector(CountingEnv, seed=99, **options) as second:
        second.load_state_dict(state)
        assert second.frames_left == 32
        assert len(second) == 4
        batch = second.collect()
        assert (batch["collector", "policy_version"] == torch.tensor([-1, -1, 0, 0])).all()  # 4 random frames were left
        assert batch["collector", "traj_ids"].min() == 4  # two episodes of 3 frames were begun by each copy
        assert second.state_dict()["entropy"] == 3
        statistics = second.statistics()
        assert statistics["frames_stepped"] == statistics["frames_yielded"] == 16
