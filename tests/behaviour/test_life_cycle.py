"""Envs are built once for each copy, and closed whatever happens."""

import signal
from functools import partial

import lightning as L
import pytest
from lightning.pytorch.tuner import Tuner

from lit_collect import CollectorDataModule, EvaluationConfig, UpdateConfig, WorkerFailedError
from lit_collect.testing import BoringRLModule, CountingEnv, FailingEnv

COPIES, FRAMES = 2, 8


def make_data(census, **options) -> CollectorDataModule:
    options = {
        "num_envs": COPIES,
        "frames_per_batch": FRAMES,
        "evaluation": EvaluationConfig(num_episodes=3),
        **options,
    }
    return CollectorDataModule(census, **options)


@pytest.fixture
def sigint():
    """Lightning ignores the signal for good after a keyboard interrupt."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("reload", [0, 1])
def test_envs_are_built_once_for_each_copy_over_a_whole_fit(reload, sanity, census, evaluated_learner, trainer_with):
    envs, model = census(), evaluated_learner()
    data = make_data(envs, batches_per_epoch=2)
    trainer = trainer_with(max_epochs=3, num_sanity_val_steps=sanity, reload_dataloaders_every_n_epochs=reload)
    trainer.fit(model, datamodule=data)
    assert len(envs.made) == COPIES + 3  # three episodes on three copies
    assert [env.closes for env in envs.made] == [1] * 5
    assert len(model.batches) == 6
    assert len(model.rounds) == 3 + (sanity > 0)
    collecting = [env for env in envs.made if len(env.actions) == 6 * FRAMES // COPIES]
    assert len(collecting) == COPIES  # and each of them played all batches


def test_nothing_is_built_before_a_fit_needs_it(census, evaluated_learner, trainer_with):
    envs = census()
    data = make_data(envs, total_frames=16)
    text = str(data)
    assert "CollectorDataModule" in text
    assert "total_frames=16" in text
    assert len(data.val_dataloader()) == len(data.test_dataloader()) == 1
    assert iter(data.train_dataloader()) is not iter(data.train_dataloader())
    assert (data.frames_total, data.frames_left, data.progress, data.policy_version) == (0, 16, 0.0, 0)
    assert data.statistics() == {}
    assert data.state_dict()["collector"] is None
    assert envs.made == []
    data.close()


def test_printing_and_counting_during_a_fit_builds_nothing(census, evaluated_learner, trainer_with):
    envs = census()

    class Curious(evaluated_learner):
        def training_step(self, batch, batch_idx):
            str(self.trainer.datamodule), len(self.trainer.datamodule.train_dataloader())
            return super().training_step(batch, batch_idx)

    trainer_with(max_epochs=1).fit(Curious(), datamodule=make_data(envs, batches_per_epoch=3))
    assert len(envs.made) == COPIES + 3


def test_spaces_cost_no_env(census, learner, trainer_with):
    envs = census()
    data = make_data(envs, batches_per_epoch=1, evaluation=None)
    assert data.action_spec["n"] == 2
    assert data.observation_spec["shape"] == [3]
    assert len(envs.made) == 1
    trainer_with(max_epochs=1).fit(learner(), datamodule=data)
    assert len(envs.made) == COPIES
    assert envs.still_open == 0


def test_env_that_was_made_for_its_spaces_is_closed_without_a_fit(census):
    envs = census()
    data = make_data(envs)
    assert data.observation_spec == data.observation_spec
    data.close()
    data.close()
    assert [env.closes for env in envs.made] == [1]


def test_fitting_twice_goes_on_with_new_envs_and_the_same_counters(census, learner, trainer_with):
    envs, model = census(), learner()
    data = make_data(envs, batches_per_epoch=2, evaluation=None)
    for fits in (1, 2):
        trainer_with(max_epochs=1).fit(model, datamodule=data)
        assert len(envs.made) == fits * COPIES
        assert envs.still_open == 0
        assert data.frames_total == fits * 2 * FRAMES
    ids = [batch["collector", "traj_ids"] for batch in model.batches]
    assert max(int(one.max()) for one in ids[:2]) < min(int(one.min()) for one in ids[2:])
    versions = [batch["collector", "policy_version"].unique().item() for batch in model.batches]
    assert versions == [0, 1, 2, 3]


def test_fitting_twice_with_one_trainer(census, evaluated_learner, trainer_with):
    envs, model = census(), evaluated_learner()
    data = make_data(envs, batches_per_epoch=2)
    trainer = trainer_with(max_epochs=1)
    trainer.fit(model, datamodule=data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, datamodule=data)
    assert data.frames_total == 4 * FRAMES
    assert envs.still_open == 0
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names.count("WeightSync") == names.count("FrameBudget") == 1


def test_validating_after_a_fit_builds_evaluation_envs_alone(census, evaluated_learner, trainer_with):
    envs, model = census(), evaluated_learner()
    data = make_data(envs, batches_per_epoch=2)
    trainer = trainer_with(max_epochs=1)
    trainer.fit(model, datamodule=data)
    before = len(envs.made)
    for number, run in enumerate((trainer.validate, trainer.test, trainer.predict), 1):
        run(model, datamodule=data)
        assert len(envs.made) == before + 3 * number
        assert envs.still_open == 0
    assert data.frames_total == 2 * FRAMES


FAILURES = ["training_step", "validation_step", "prepare_rollout", "on_train_epoch_end", "configure_optimizers"]


@pytest.mark.parametrize("error", [RuntimeError, KeyError])
@pytest.mark.parametrize("hook", FAILURES)
def test_error_of_the_module_closes_every_env(hook, error, census, evaluated_learner, trainer_with):
    def fail(self, *args):
        raise error("on purpose")

    envs = census()
    model = type("Failing", (evaluated_learner,), {hook: fail})()
    trainer = trainer_with(max_epochs=2, num_sanity_val_steps=0 if hook == "validation_step" else 1)
    with pytest.raises(error, match="on purpose"):
        trainer.fit(model, datamodule=make_data(envs, batches_per_epoch=2))
    assert envs.still_open == 0
    assert len(envs.made) == {"configure_optimizers": 0}.get(hook, COPIES + 3)


@pytest.mark.parametrize("where", ["init", "reset", "step"])
def test_error_of_one_env_closes_the_others(where, census, learner, trainer_with):
    envs = census()
    makers = [envs, partial(FailingEnv, where), envs]
    data = CollectorDataModule(makers, frames_per_batch=9, total_frames=18, evaluation=None)
    with pytest.raises(WorkerFailedError, match=r"env copy 1 failed in .*broken on purpose"):
        trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
    assert len(envs.made) == (1 if where == "init" else 2)
    assert envs.still_open == 0


def test_error_of_an_evaluation_env_closes_the_training_envs(census, evaluated_learner, trainer_with):
    envs = census()
    broken = iter([False, False, True])

    def make():
        return envs() if not next(broken) else FailingEnv("init")

    data = CollectorDataModule(
        make, num_envs=2, frames_per_batch=8, batches_per_epoch=1, evaluation=EvaluationConfig(num_episodes=1)
    )
    with pytest.raises(WorkerFailedError, match="env copy 0 failed in its constructor"):
        trainer_with(max_epochs=1).fit(evaluated_learner(), datamodule=data)
    assert len(envs.made) == 2
    assert envs.still_open == 0


def test_env_that_fails_to_close_keeps_no_other_open(census, evaluated_learner, trainer_with):
    envs = census()
    makers = [partial(FailingEnv, "close"), envs]
    data = CollectorDataModule(makers, frames_per_batch=8, total_frames=8, evaluation=EvaluationConfig(num_episodes=2))
    with pytest.raises(WorkerFailedError, match="env copy 0 failed in close"):
        trainer_with(max_epochs=-1).fit(evaluated_learner(), datamodule=data)
    assert len(envs.made) == 2  # one collects, one is evaluated
    assert envs.still_open == 0
    assert data.frames_total == 8


def test_error_of_a_training_step_is_seen_although_an_env_fails_to_close(learner, trainer_with):
    class Failing(learner):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("of the user")

    data = CollectorDataModule(partial(FailingEnv, "close"), num_envs=1, frames_per_batch=4, evaluation=None)
    trainer = trainer_with(max_epochs=1)
    with (
        pytest.warns(UserWarning, match="closing the envs failed too: env copy 0 failed in close"),
        pytest.raises(ZeroDivisionError, match="of the user"),
    ):
        trainer.fit(Failing(), datamodule=data)


def test_keyboard_interrupt_closes_every_env(sigint, census, evaluated_learner, trainer_with):
    class Interrupted(evaluated_learner):
        def training_step(self, batch, batch_idx):
            raise KeyboardInterrupt

    envs = census()
    with pytest.raises(SystemExit):
        trainer_with(max_epochs=1).fit(Interrupted(), datamodule=make_data(envs, batches_per_epoch=2))
    assert len(envs.made) == COPIES
    assert envs.still_open == 0


def test_keyboard_interrupt_within_an_env_closes_every_env(sigint, census, learner, trainer_with):
    envs = census()
    makers = [envs, partial(FailingEnv, "step", at=3, error=KeyboardInterrupt())]
    data = CollectorDataModule(makers, frames_per_batch=8, total_frames=8, evaluation=None)
    with pytest.raises(SystemExit):
        trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
    assert envs.still_open == 0


def test_teardown_and_exception_may_come_in_any_order(census):
    envs = census()
    data = make_data(envs)
    assert data.action_spec
    data.on_exception(RuntimeError("first"))
    data.teardown("fit")
    data.on_exception(RuntimeError("again"))
    assert [env.closes for env in envs.made] == [1]


def test_live_env_is_left_to_who_made_it(learner, trainer_with):
    env = CountingEnv()
    data = CollectorDataModule(env, frames_per_batch=4, total_frames=8)
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert env.closes == 0
    assert [tuple(batch.shape) for batch in model.batches] == [(1, 4), (1, 4)]


@pytest.mark.parametrize("total_frames", [-1, 64, 800])
def test_learning_rate_finder_costs_the_run_nothing(total_frames, census, trainer_with):
    class Tunable(BoringRLModule):
        def __init__(self) -> None:
            super().__init__(learning_rate=0.5)

    envs = census()
    data = make_data(envs, total_frames=total_frames, batches_per_epoch=4, evaluation=None)
    model, trainer = Tunable(), trainer_with(max_epochs=2)
    Tuner(trainer).lr_find(model, datamodule=data, num_training=6, update_attr=False)
    assert envs.still_open == 0
    assert data.frames_total == 0
    tried = len(model.batches)
    assert tried >= 6
    trainer.fit(model, datamodule=data)
    assert data.frames_total == 8 * FRAMES
    kept = model.batches[tried:]
    assert len(kept) == 8
    versions = [batch["collector", "policy_version"].unique().item() for batch in kept]
    assert versions == list(range(versions[0], versions[0] + 8))
    assert versions[0] <= 1  # the finder gives the weights back, which may count as a publication
    steps = data.statistics() or data.state_dict()["collector"]
    assert steps["frames_yielded"] == 8 * FRAMES
    assert envs.still_open == 0


def test_learning_rate_finder_in_between_gives_the_counters_back(census, trainer_with):
    envs = census()
    data = make_data(envs, batches_per_epoch=4, evaluation=None, updates=UpdateConfig(minibatch_size=4))
    model, trainer = BoringRLModule(), trainer_with(max_epochs=1)
    trainer.fit(model, datamodule=data)
    assert data.frames_total == 4 * FRAMES
    again = trainer_with(max_epochs=1)
    Tuner(again).lr_find(model, datamodule=data, num_training=5, update_attr=False)
    assert data.frames_total == 4 * FRAMES
    again.fit(model, datamodule=data)
    assert data.frames_total == 8 * FRAMES
    state = data.state_dict()["collector"]
    assert state["frames_stepped"] > state["frames_yielded"] == 8 * FRAMES  # what the finder used is dropped


def test_datamodule_is_attached_to_its_trainer_before_anything_else(census, evaluated_learner, trainer_with):
    order = []

    class Watching(L.Callback):
        def setup(self, trainer, pl_module, stage):
            order.extend(type(callback).__name__ for callback in trainer.callbacks)

    trainer_with(max_epochs=1, callbacks=[Watching()]).fit(
        evaluated_learner(), datamodule=make_data(census(), batches_per_epoch=1)
    )
    assert {"WeightSync", "FrameBudget"} < set(order)
