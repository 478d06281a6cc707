"""However a run ends, its workers end with it: errors, signals, closing at odd moments, and not closing at all."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_collect import CollectorClosedError, CollectorDataModule, EvaluationConfig, ProcessBackend
from tests.behaviour.troubles import (
    build,
    check_counters,
    check_trajectories,
    makers,
    open_files,
    pids,
    runs,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nursery", "same_descriptors")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file, and pytest with it

SOON_S = 8.0
both_ways = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


@pytest.fixture
def same_descriptors() -> Iterator[None]:
    """Fail a test after which this process has other open files than before."""
    before = open_files()
    yield
    if open_files() != before:
        gc.collect()  # a caught exception holds the frames that it went through
    assert open_files() == before


@pytest.fixture
def handlers() -> Iterator[None]:
    """Lightning ignores SIGINT for good after a keyboard interrupt, and gives nothing back after two errors."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make_data(envs: Any = None, *, sync: bool = True, **options: Any) -> CollectorDataModule:
    return CollectorDataModule(
        envs or makers(),
        backend=ProcessBackend(2, sync=sync, shutdown_timeout_s=0.5),
        **{"frames_per_batch": 16, "batches_per_epoch": 4, "evaluation": None, **options},
    )


def signal_and_sleep(pid: int, number: int) -> None:
    time.sleep(0.3)  # until nothing else is on its way
    os.kill(pid, number)
    time.sleep(600)


class Witness(L.Callback):
    """Knows the workers, and what the run ended with."""

    def __init__(self) -> None:
        self.workers: list[int] = []
        self.error: BaseException | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.workers = pids(trainer.datamodule._supply.collector)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.error = exception


# --- errors and signals in a fit --------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("hook", ["training_step", "validation_step", "prepare_rollout", "on_train_epoch_end"])
def test_error_of_the_module_ends_the_workers(hook, sync, evaluated_learner, trainer_with):
    calls = iter(range(2))

    def fail_the_second_time(self, *args):
        if next(calls) == 1:
            raise ZeroDivisionError("of the user")
        return getattr(evaluated_learner, hook, lambda self, batch: batch)(self, *args)

    model = type("Failing", (evaluated_learner,), {hook: fail_the_second_time})()
    witness, data = Witness(), make_data(sync=sync, evaluation=EvaluationConfig(num_episodes=8))
    with pytest.raises(ZeroDivisionError, match="of the user"):
        trainer_with(max_epochs=3, callbacks=[witness]).fit(model, datamodule=data)
    assert len(witness.workers) == 2
    assert not any(map(runs, witness.workers))


def test_error_within_the_treatment_of_an_error_ends_the_workers(handlers, learner, trainer_with):
    class Failing(learner):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("of the user")

    class Worse(L.Callback):
        def on_exception(self, trainer, pl_module, exception):
            raise LookupError("while that was treated")

    witness = Witness()
    data = make_data()
    with pytest.raises(LookupError, match="while that was treated"):
        trainer_with(max_epochs=1, callbacks=[witness, Worse()]).fit(Failing(), datamodule=data)
    assert len(witness.workers) == 2
    assert not any(map(runs, witness.workers))


@both_ways
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_a_slow_batch_ends_the_run(number, sync, handlers, learner, trainer_with):
    envs = makers("step", partial(signal_and_sleep, os.getpid(), number), at=5)
    witness = Witness()
    expected = {signal.SIGINT: SystemExit, signal.SIGTERM: SIGTERMException}[number]
    data = make_data(envs, sync=sync)
    began = time.monotonic()
    with pytest.raises(expected):
        trainer_with(max_epochs=-1, callbacks=[witness]).fit(learner(), datamodule=data)
    assert time.monotonic() - began < SOON_S
    assert isinstance(witness.error, KeyboardInterrupt if number == signal.SIGINT else SIGTERMException)
    assert not any(map(runs, witness.workers))
    assert data.statistics()["workers_alive"] in (0, 2)  # as of the last look


@both_ways
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_a_training_step_ends_the_run(number, sync, handlers, learner, trainer_with):
    class Signalled(learner):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                os.kill(os.getpid(), number)
            return super().training_step(batch, batch_idx)

    witness = Witness()
    with pytest.raises(SystemExit if number == signal.SIGINT else SIGTERMException):
        trainer_with(max_epochs=-1, callbacks=[witness]).fit(Signalled(), datamodule=make_data(sync=sync))
    assert len(witness.workers) == 2
    assert not any(map(runs, witness.workers))


@both_ways
def test_fitting_twice_has_new_workers_and_goes_on(sync, learner, trainer_with):
    model, data, witnesses = learner(), make_data(sync=sync), (Witness(), Witness())
    for fits, witness in enumerate(witnesses, 1):
        trainer_with(max_epochs=1, callbacks=[witness]).fit(model, datamodule=data)
        assert data.frames_total == fits * 64
        assert not any(map(runs, witness.workers))
    assert not set(witnesses[0].workers) & set(witnesses[1].workers)
    ids = [set(batch["collector", "traj_ids"].flatten().tolist()) for batch in model.batches]
    assert not set.union(*ids[:4]) & set.union(*ids[4:])


# --- closing at odd moments -------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("max_restarts", [0, 2])
def test_collector_closed_by_a_signal_handler_in_the_middle_of_a_batch(max_restarts, sync, handlers):
    envs = makers("step", partial(signal_and_sleep, os.getpid(), signal.SIGUSR1), at=5)
    collector = build(envs, sync=sync, shutdown_timeout_s=0.2, max_restarts=max_restarts, total_frames=800)
    workers = pids(collector)
    signal.signal(signal.SIGUSR1, lambda *_: collector.shutdown())
    with pytest.raises(CollectorClosedError):
        list(collector)
    assert not any(map(runs, workers))
    assert collector.statistics()["workers_alive"] == 0
    with pytest.raises(CollectorClosedError):
        collector.collect()


@both_ways
def test_keyboard_interrupt_in_the_middle_of_a_batch_leaves_a_collector_that_goes_on(sync):
    def interrupt() -> None:
        time.sleep(0.3)  # until nothing else is on its way
        os.kill(trainer, signal.SIGINT)
        time.sleep(0.3)

    trainer = os.getpid()
    batches: list[Any] = []
    with build(makers("step", interrupt, at=7), sync=sync, total_frames=160) as collector:
        with pytest.raises(KeyboardInterrupt):
            batches.extend(collector)
        batches.extend(collector)
        assert sum(batch.numel() for batch in batches) == 160
        check_trajectories(batches)
        check_counters(collector)


@both_ways
def test_keyboard_interrupt_in_the_middle_of_a_batch_closes_a_with_block(sync, handlers):
    envs = makers("step", partial(signal_and_sleep, os.getpid(), signal.SIGINT), at=5)
    collector = build(envs, sync=sync, shutdown_timeout_s=0.2, total_frames=800)
    workers = pids(collector)
    with pytest.raises(KeyboardInterrupt), collector:
        list(collector)
    assert not any(map(runs, workers))


class Sink:
    """Takes frames, and says when it has got some."""

    def __init__(self) -> None:
        self.frames = 0
        self.filled = threading.Event()

    def extend(self, rows: Any) -> None:
        self.frames += len(rows)
        self.filled.set()


def in_a_thread(function: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()
    assert errors == []


@both_ways
def test_collector_closed_by_another_thread_while_it_collects_in_the_background(sync):
    sink = Sink()
    collector = build(makers(), sync=sync, sink=sink)
    workers = pids(collector)
    collector.start()
    assert sink.filled.wait(60.0)
    in_a_thread(collector.shutdown)
    assert not collector.is_running
    assert not any(map(runs, workers))
    frames = collector.statistics()["frames_yielded"]
    assert frames == sink.frames
    collector.async_shutdown()


@both_ways
def test_collector_that_nobody_closes_ends_with_its_last_reference(sync):
    collector = build(makers(), sync=sync)
    collector.collect()
    workers = pids(collector)
    del collector
    gc.collect()
    assert not any(map(runs, workers))
