"""Whole runs of a Trainer whose frames come from worker processes."""

import csv
import os
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from lit_collect import (
    CollectionMonitor,
    CollectorDataModule,
    DirectBackend,
    EvaluationConfig,
    FrameProgress,
    ProcessBackend,
    UpdateConfig,
    WeightSync,
    WorkerDiedError,
    WorkerFailedError,
)
from lit_collect.testing import CountingEnv, FailingEnv
from trainers import PPO

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes]

COPIES, FRAMES = 4, 16  # of each batch


class RegisteredEnv(CountingEnv):
    """Writes down in which process it was made and closed."""

    def __init__(self, register: Path) -> None:
        super().__init__()
        self._register = register
        self._note("made")

    def close(self) -> None:
        super().close()
        self._note("closed")

    def _note(self, what: str) -> None:
        with self._register.open("a") as file:
            file.write(f"{what} {os.getpid()}\n")


class MortalEnv(CountingEnv):
    """Its process is killed in a step, once for each file that is there to be removed."""

    def __init__(self, lives: Path, at: int) -> None:
        super().__init__()
        self._lives, self._at = lives, at

    def step(self, action: Any):
        if len(self.actions) + 1 == self._at:
            with suppress(FileNotFoundError):  # another one was faster
                self._lives.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class VersionLog(Callback):
    """What the data module says after each minibatch, once all other callbacks have seen it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append((trainer.global_step, trainer.datamodule.policy_version))


class AgeLog(Callback):
    """How many versions the rows of each whole batch were behind when it was handed out."""

    def __init__(self) -> None:
        self.ages: list[int] = []

    def setup(self, trainer, pl_module, stage) -> None:
        data = trainer.datamodule
        data.rollout_listeners.append(
            lambda batch: self.ages.append(data.policy_version - int(batch["collector", "policy_version"].min()))
        )


def make_data(env=CountingEnv, backend="process", **options) -> CollectorDataModule:
    options = {"num_envs": COPIES, "frames_per_batch": FRAMES, "evaluation": None, "seed": 3, **options}
    return CollectorDataModule(env, backend=backend, **options)


def versions_of(model) -> list[list[int]]:
    return [batch["collector", "policy_version"].unique().tolist() for batch in model.batches]


def ids_of(model) -> set[int]:
    return {int(one) for batch in model.batches for one in batch["collector", "traj_ids"].flatten()}


def copies_of(batch) -> list[int]:
    """Which env copies made the rows of a batch."""
    return [int(one) for one in (batch["collector", "traj_ids"] % COPIES).unique(dim=1).flatten()]


def invariant_holds(statistics) -> bool:
    parts = ("frames_yielded", "frames_pending", "frames_dropped")
    return statistics["frames_stepped"] == sum(statistics[part] for part in parts)


def processes(register: Path, what: str) -> Counter[int]:
    """How many envs were made, or closed, in each process."""
    return Counter(int(line.split()[1]) for line in register.read_text().splitlines() if line.startswith(what))


# --- synchronous ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["process", ProcessBackend(1), ProcessBackend(4)], ids=str)
def test_fit_sees_the_batches_of_the_direct_backend(backend, learner, trainer_with):
    models = []
    for where in ("direct", backend):
        data, model = make_data("CartPole-v1", where, total_frames=5 * FRAMES), learner()
        trainer_with(max_epochs=-1).fit(model, datamodule=data)
        assert data.frames_total == 5 * FRAMES
        assert data.policy_version == 4
        models.append(model)
    expected, got = models
    assert versions_of(got) == [[0], [1], [2], [3], [4]]
    assert [batch["weight"].unique().tolist() for batch in got.batches] == [[0.0], [-1.0], [-2.0], [-3.0], [-4.0]]
    for one, other in zip(expected.batches, got.batches, strict=True):
        assert one.batch_size == other.batch_size == (COPIES, FRAMES // COPIES)
        assert (one == other).all()


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_every_row_is_of_the_last_publication_with_epochs_minibatches_and_validation(
    automatic, evaluated_learner, trainer_with
):
    updates = UpdateConfig(epochs=2, minibatch_size=8)  # 4 minibatches of each batch
    data = make_data(
        total_frames=3 * FRAMES + 8, updates=updates, evaluation=EvaluationConfig(num_episodes=2), batches_per_epoch=2
    )
    model, trainer = evaluated_learner(automatic_optimization=automatic), trainer_with(max_epochs=-1)
    trainer.fit(model, datamodule=data)
    assert data.frames_total == 3 * FRAMES + 8
    assert trainer.global_step == len(model.batches) == 3 * 4 + 2  # the last batch is shorter
    assert versions_of(model) == [[0]] * 4 + [[1]] * 4 + [[2]] * 4 + [[3]] * 2
    assert [batch["weight"].unique().tolist() for batch in model.batches] == [
        *[[0.0]] * 4,
        *[[-4.0]] * 4,
        *[[-8.0]] * 4,
        *[[-12.0]] * 2,
    ]
    assert len(model.rounds) == 2  # one after each epoch
    statistics = data.statistics()
    assert invariant_holds(statistics)
    assert statistics["frames_yielded"] == statistics["frames_stepped"] == 3 * FRAMES + 8
    assert statistics["acknowledged_versions"] == [3, 3]
    assert (statistics["workers"], statistics["workers_alive"], statistics["restarts"]) == (2, 2, 0)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_gradients_are_published_when_they_become_a_step(accumulate, learner, trainer_with):
    data, model = make_data(batches_per_epoch=6), learner()
    trainer_with(max_epochs=1, accumulate_grad_batches=accumulate).fit(model, datamodule=data)
    assert versions_of(model) == [[number // accumulate] for number in range(6)]


def test_ppo_trains_and_is_evaluated(trainer_with, tmp_path):
    data = make_data(
        "CartPole-v1",
        ProcessBackend(2),
        frames_per_batch=64,
        total_frames=224,
        updates=UpdateConfig(epochs=2, minibatch_size=32),
        evaluation=EvaluationConfig(num_episodes=2, max_frames=50),
    )
    monitor = CollectionMonitor()
    trainer = trainer_with(
        max_epochs=-1,
        num_sanity_val_steps=2,
        logger=CSVLogger(tmp_path),
        callbacks=[monitor, FrameProgress("plain")],
        enable_progress_bar=True,
    )
    trainer.fit(PPO(), datamodule=data)
    assert data.frames_total == 224
    assert trainer.global_step == 3 * 4 + 2
    assert monitor.evaluations == 1
    with Path(trainer.logger.log_dir, "metrics.csv").open(newline="") as file:
        lines = [{key: float(cell) for key, cell in line.items() if cell} for line in csv.DictReader(file)]
    lines = [line for line in lines if "collect/frames_total" in line]
    assert [line["collect/frames_total"] for line in lines] == [64, 128, 192, 224]
    assert [line["policy/version"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert (line["workers/alive"], line["workers/restarts_total"], line["workers/queue_fill"]) == (2, 0, 0)
        assert (line["policy/staleness_max"], line["policy/stale_dropped_total"]) == (0, 0)
        assert line["time/transfer_s"] > 0
        assert 0 < line["time/env_s"] < line["time/wait_data_s"]
        assert 0 < line["time/collector_idle"] < 1
        assert 0 < line["time/trainer_idle"] < 1


# --- envs and their processes -----------------------------------------------------------------------------------


def test_each_copy_is_made_and_closed_in_the_worker_that_steps_it(evaluated_learner, trainer_with, tmp_path):
    register = tmp_path / "register"
    data = make_data(partial(RegisteredEnv, register), batches_per_epoch=2, evaluation=EvaluationConfig(num_episodes=3))
    assert data.observation_spec["shape"] == [3]  # costs one env of this process, which cannot travel
    assert processes(register, "made") == {os.getpid(): 1}
    trainer_with(max_epochs=2, num_sanity_val_steps=1).fit(evaluated_learner(), datamodule=data)
    made = processes(register, "made")
    assert made.pop(os.getpid()) == 1 + 3  # and the evaluation's
    assert list(made.values()) == [COPIES // 2] * 2
    assert processes(register, "closed") == processes(register, "made")


def test_env_that_was_made_for_its_spaces_is_closed_before_a_worker_makes_another(learner, trainer_with, tmp_path):
    register = tmp_path / "register"
    data = make_data(partial(RegisteredEnv, register), batches_per_epoch=1)
    assert data.action_spec["n"] == 2
    trainer_with(max_epochs=1).fit(learner(), datamodule=data)
    assert register.read_text().splitlines()[:2] == [f"made {os.getpid()}", f"closed {os.getpid()}"]


def test_nothing_is_started_before_a_fit_needs_it(tmp_path):
    register = tmp_path / "register"
    data = make_data(partial(RegisteredEnv, register), ProcessBackend(3), num_envs=3, frames_per_batch=6)
    assert "num_envs=3, frames_per_batch=6" in str(data)
    assert len(data.train_dataloader()) == 1000
    assert (data.frames_total, data.policy_version, data.statistics()) == (0, 0, {})
    assert not register.exists()
    data.close()


@pytest.mark.parametrize("env", ["CartPole-v1", CountingEnv], ids=["id", "class"])
def test_copies_are_a_multiple_of_the_workers_if_nothing_is_said(env, learner, trainer_with):
    data, model = make_data(env, ProcessBackend(3), num_envs=None, frames_per_batch=18, total_frames=36), learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert [batch.batch_size for batch in model.batches] == [(9, 2)] * 2


def test_frames_that_do_not_fit_the_default_copies_are_refused_with_values_that_do():
    with pytest.raises(ValueError, match="multiple of num_envs=9, got 2048; use 2043 or 2052"):
        CollectorDataModule("CartPole-v1", backend=ProcessBackend(3))


def test_copies_that_cannot_be_divided_are_refused_at_once():
    with pytest.raises(ValueError, match="num_envs must be a multiple of num_collectors=3, got 4; use 3 or 6"):
        make_data(backend=ProcessBackend(3), frames_per_batch=12, total_frames=12)


# --- several runs -----------------------------------------------------------------------------------------------


def test_fitting_twice_and_validating_in_between_goes_on(evaluated_learner, trainer_with, tmp_path):
    register, model = tmp_path / "register", evaluated_learner()
    data = make_data(partial(RegisteredEnv, register), batches_per_epoch=2, evaluation=EvaluationConfig(num_episodes=1))
    for fits in (1, 2):
        trainer = trainer_with(max_epochs=1, check_val_every_n_epoch=2)
        trainer.fit(model, datamodule=data)
        workers = processes(register, "made")
        workers.pop(os.getpid(), None)
        assert list(workers.values()) == [COPIES // 2] * 2 * fits
        trainer.validate(model, datamodule=data, verbose=False)
        assert data.frames_total == fits * 2 * FRAMES
        assert invariant_holds(data.statistics())
    assert processes(register, "closed") == processes(register, "made")
    assert processes(register, "made")[os.getpid()] == 2
    assert versions_of(model) == [[0], [1], [2], [3]]
    assert [batch["weight"].unique().tolist() for batch in model.batches] == [[0.0], [-1.0], [-2.0], [-3.0]]
    ids = [batch["collector", "traj_ids"] for batch in model.batches]
    assert max(int(one.max()) for one in ids[:2]) < min(int(one.min()) for one in ids[2:])


@pytest.mark.parametrize(
    "backend", [DirectBackend(), ProcessBackend(1), ProcessBackend(4), ProcessBackend(2, sync=False)], ids=str
)
def test_run_is_resumed_with_other_workers(backend, learner, trainer_with, tmp_path):
    before, first = make_data(backend=ProcessBackend(2), total_frames=6 * FRAMES), learner()
    trainer = trainer_with(max_steps=3)
    trainer.fit(first, datamodule=before)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    data, model = make_data(backend=backend, total_frames=6 * FRAMES), learner()
    trainer = trainer_with(max_epochs=-1)
    trainer.fit(model, datamodule=data, ckpt_path=tmp_path / "three.ckpt", weights_only=True)
    assert data.frames_total == 6 * FRAMES
    assert trainer.global_step == 6
    statistics = data.statistics()
    assert statistics["frames_yielded"] == 6 * FRAMES
    assert invariant_holds(statistics)
    for batch in model.batches:  # the checkpoint's weights are the fourth; each row was acted by its version's
        assert (batch["weight"].squeeze(-1) == -batch["collector", "policy_version"]).all()
    assert max(ids_of(first)) < min(ids_of(model))
    if backend.sync:
        assert versions_of(model) == [[3], [4], [5]]
        assert all(copies_of(batch) == [0, 1, 2, 3] for batch in model.batches)
    else:
        assert all(3 <= version <= 5 for versions in versions_of(model) for version in versions)
        assert all(copies_of(batch) in ([0, 1], [2, 3]) for batch in model.batches)


# --- asynchronous -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("every_n_steps", "max_staleness"), [(4, 2), (2, 4), (3, None), (8, 0), (1, 1)])
def test_weights_go_out_every_n_steps_and_no_row_is_older_than_the_bound(
    every_n_steps, max_staleness, accumulate, learner, trainer_with
):
    batches = 8
    data = make_data(
        backend=ProcessBackend(2, sync=False),
        total_frames=batches * FRAMES,
        updates=UpdateConfig(epochs=2, minibatch_size=4),  # 8 minibatches of each batch
    )
    model, log, ages = learner(), VersionLog(), AgeLog()
    trainer = trainer_with(
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        callbacks=[WeightSync(every_n_steps, max_staleness), log, ages],
    )
    trainer.fit(model, datamodule=data)
    steps = batches * 8 // accumulate
    assert trainer.global_step == steps
    assert [version for _, version in log.seen] == [step // every_n_steps for step, _ in log.seen]
    assert len(ages.ages) == batches
    assert min(ages.ages) >= 0
    if max_staleness is not None:
        assert max(ages.ages) <= max_staleness
    for batch in model.batches:  # the weights of version v are those after v * n steps
        assert torch.equal(batch["weight"].squeeze(-1), -every_n_steps * batch["collector", "policy_version"].float())
    statistics = data.statistics()
    assert invariant_holds(statistics)
    assert data.frames_total == statistics["frames_yielded"] == batches * FRAMES
    assert statistics["policy_version"] == steps // every_n_steps


def test_batches_of_one_worker_each_are_logged_with_their_age(learner, trainer_with, tmp_path):
    monitor = CollectionMonitor()
    data, model = make_data(backend=ProcessBackend(2, sync=False), total_frames=6 * FRAMES), learner()
    trainer_with(max_epochs=-1, callbacks=[WeightSync(max_staleness=2), monitor]).fit(model, datamodule=data)
    assert {batch.batch_size for batch in model.batches} == {(COPIES // 2, 2 * FRAMES // COPIES)}
    assert all(copies_of(batch) in ([0, 1], [2, 3]) for batch in model.batches)
    latest = monitor.latest
    assert latest["collect/frames_total"] == 6 * FRAMES
    assert latest["workers/alive"] == 2
    assert 0 <= latest["workers/queue_fill"] <= 1
    assert 0 <= latest["policy/staleness_max"] <= 2
    assert 0 <= latest["time/collector_idle"] <= 1


# --- faults -----------------------------------------------------------------------------------------------------


def test_error_of_an_env_in_a_worker_ends_the_run_and_all_workers(learner, trainer_with, tmp_path):
    register = tmp_path / "register"
    makers = [partial(RegisteredEnv, register)] * 3 + [partial(FailingEnv, "step", at=6)]
    data = make_data(makers, num_envs=None, total_frames=4 * FRAMES)
    with pytest.raises(WorkerFailedError, match=r"worker 1, process \d+ .*copy 3 failed in step.*broken on purpose"):
        trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
    assert processes(register, "closed") == processes(register, "made")
    assert data.frames_total == FRAMES
    assert invariant_holds(data.statistics())


def test_error_of_a_training_step_ends_all_workers(learner, trainer_with, tmp_path):
    class Failing(learner):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("of the user")

    register = tmp_path / "register"
    data = make_data(partial(RegisteredEnv, register), ProcessBackend(2, sync=False), total_frames=4 * FRAMES)
    with pytest.raises(ZeroDivisionError, match="of the user"):
        trainer_with(max_epochs=-1).fit(Failing(), datamodule=data)
    assert processes(register, "closed") == processes(register, "made")


def test_worker_that_dies_ends_the_run(learner, trainer_with, tmp_path):
    lives = tmp_path / "lives"
    lives.touch()
    data = make_data(partial(MortalEnv, lives, at=6), total_frames=4 * FRAMES)
    with pytest.raises(WorkerDiedError, match=r"worker \d, process \d+ \(env copies .*killed by SIGKILL"):
        trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
    assert data.frames_total == FRAMES


@pytest.mark.parametrize("sync", [True, False])
def test_worker_that_dies_is_replaced_and_the_run_goes_on(sync, learner, trainer_with, tmp_path):
    lives, seconds = tmp_path / "lives", []
    lives.touch()
    data = make_data(partial(MortalEnv, lives, at=6), ProcessBackend(2, sync, max_restarts=1), total_frames=6 * FRAMES)
    data.rollout_listeners.append(lambda batch: seconds.append(dict(data.seconds)))
    model, monitor = learner(), CollectionMonitor()
    trainer = trainer_with(max_epochs=-1, callbacks=[monitor])
    with pytest.warns(UserWarning, match="it is replaced, and its episodes begin anew"):
        trainer.fit(model, datamodule=data)
    assert not lives.exists()
    assert data.frames_total == 6 * FRAMES
    assert monitor.latest["workers/restarts_total"] == 1
    assert monitor.latest["workers/alive"] == 2
    statistics = data.statistics()
    assert (statistics["restarts"], statistics["episodes_dropped"]) == (1, COPIES // 2)
    assert invariant_holds(statistics)
    for name in ("env_s", "policy_s", "busy_s"):  # what the dead worker has spent still counts
        assert [now[name] for now in seconds] == sorted(now[name] for now in seconds)
    for batch in model.batches:
        assert (batch["weight"].squeeze(-1) == -batch["collector", "policy_version"]).all()


# --- policies ---------------------------------------------------------------------------------------------------


class MethodPolicy(torch.nn.Module):
    """Acts by a method that is not its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def choose(self, observation: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        rows = len(observation)
        return {"action": torch.zeros(rows, dtype=torch.int64), "weight": scale * self.weight.expand(rows, 1)}


@pytest.mark.parametrize("kind", ["method", "method of the LightningModule", "partial of a method"])
def test_weights_of_a_method_reach_the_workers(kind, learner, trainer_with):
    class Choosing(learner):
        def __init__(self) -> None:
            super().__init__()
            self.policy = MethodPolicy()

        def choose(self, observation):
            return self.policy.choose(observation)

        def collector_policy(self):
            if kind == "method":
                return self.policy.choose
            return self.choose if kind == "method of the LightningModule" else partial(self.policy.choose, scale=1.0)

    data, model = make_data(total_frames=3 * FRAMES), Choosing()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert [batch["weight"].unique().tolist() for batch in model.batches] == [[0.0], [-1.0], [-2.0]]


def test_function_whose_weights_cannot_be_published_is_refused(learner, trainer_with):
    class Enclosing(learner):
        def collector_policy(self):
            return lambda observation: self.policy(observation)

    data = make_data(total_frames=3 * FRAMES)
    with pytest.raises(TypeError, match=r"policy has weights that cannot be published .*; pass the module"):
        trainer_with(max_epochs=-1).fit(Enclosing(), datamodule=data)


def test_function_without_weights_may_act_while_something_else_learns(learner, trainer_with):
    class Ruled(learner):
        def collector_policy(self):
            return lambda observation: {"action": torch.ones(len(observation), dtype=torch.int64)}

    data, model = make_data(total_frames=2 * FRAMES), Ruled()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert all((batch["action"] == 1).all() for batch in model.batches)


def test_env_of_a_test_function_may_act_in_a_worker(learner, trainer_with):
    bonus = 7.0

    class Paid(gymnasium.RewardWrapper):
        def reward(self, reward):
            return reward + bonus

    data, model = make_data(lambda: Paid(CountingEnv()), total_frames=FRAMES), learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert model.batches[0]["next", "reward"][:, 0].unique().tolist() == [8.0]
