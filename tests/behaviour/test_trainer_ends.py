"""However a run ends, its workers end with it: errors, signals, closing at odd moments, and not closing at all."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
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
    eventually,
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
    os.kill(pid, number)
    time.sleep(600)


class Witness(L.Callback):
    """Knows the workers, and what the run ended with."""

    def __init__(self) -> None:
        self.workers: list[int] = []
        self.error: BaseException | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.workers = pids(trainer.datamodule._collector)

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
        os.kill(trainer, signal.SIGINT)
        time.sleep(0.5)

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


# --- scripts ----------------------------------------------------------------------------------------------------

BEGIN = """
    import json, os, signal, sys, threading, time
    from functools import partial
    from lit_collect import Collector, CollectorDataModule, ProcessBackend
    from lit_collect.testing import CountingEnv

    def say(**words):
        os.write(1, json.dumps(words).encode() + b"\\n")

    class Env(CountingEnv):
        def step(self, action):
            if self.episode == 1 and self.elapsed == 1:
                self.be_slow()
            return super().step(action)

        def be_slow(self):
            say(worker=os.getpid(), starter=os.getppid())
            time.sleep(600)
"""


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Runs a script, which has no guard, in a session of its own."""
    started: list[subprocess.Popen] = []

    def run(text: str) -> subprocess.Popen:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
        started.append(
            subprocess.Popen(
                [sys.executable, script],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        with process:
            process.kill()


def said(script: subprocess.Popen, lines: int) -> list[dict[str, Any]]:
    return [json.loads(script.stdout.readline()) for _ in range(lines)]


@pytest.mark.slow
def test_workers_in_the_middle_of_a_long_step_vanish_when_the_trainer_is_killed(run_script):
    script = run_script("""
        class Busy(Env):
            def be_slow(self):
                say(worker=os.getpid(), starter=os.getppid())
                3 ** (1 << 40)

        Collector([Env, Busy], frames_per_batch=200, backend=ProcessBackend(2)).collect()
    """)
    family = {pid for line in said(script, 2) for pid in line.values()}
    assert len(family) == 3
    assert all(map(runs, family))
    script.kill()
    assert eventually(lambda: not any(map(runs, family)), 5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "error", "code"),
    [(signal.SIGINT, "KeyboardInterrupt", 1), (signal.SIGTERM, "SIGTERMException", 0)],  # as Lightning has it
)
def test_fit_that_waits_for_a_slow_batch_ends_with_a_signal_to_all_of_its_processes(number, error, code, run_script):
    script = run_script("""
        import lightning as L
        from lit_collect.testing import BoringRLModule

        class Witness(L.Callback):
            def on_exception(self, trainer, pl_module, exception):
                say(error=type(exception).__name__)

        backend = ProcessBackend(2, shutdown_timeout_s=1)
        data = CollectorDataModule(Env, num_envs=2, frames_per_batch=4, backend=backend, evaluation=None)
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = L.Trainer(accelerator="cpu", callbacks=[Witness()], **dict.fromkeys(quiet, False))
        trainer.fit(BoringRLModule(), datamodule=data)
    """)
    family = {pid for line in said(script, 2) for pid in line.values()}
    began = time.monotonic()
    os.killpg(script.pid, number)
    out, err = script.communicate(timeout=60.0)
    assert time.monotonic() - began < SOON_S
    assert script.returncode == code
    assert json.loads(out) == {"error": error}
    assert "failed too" not in err
    assert not any(map(runs, family))


@pytest.mark.slow
def test_copy_of_the_trainer_harms_no_worker_and_a_script_that_closes_nothing_leaves_none(run_script):
    out, err = (
        script := run_script("""
        class Sink(threading.Event):
            def extend(self, rows):
                self.set()

        def build(**options):
            made = Collector(CountingEnv, num_envs=2, frames_per_batch=8, backend=ProcessBackend(2), **options)
            return made, [member.channel.name for member in made.workers.members]

        first, names = build()
        first.collect()
        for leave in (first.shutdown, sys.exit):
            copy = os.fork()
            if copy == 0:
                leave()
                sys.exit(0)
            say(copy=os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), frames=first.collect().numel())
        sink = Sink()
        second, others = build(replay_buffer=sink)
        second.start()
        sink.wait(60)
        say(workers=names + others)
    """)
    ).communicate(timeout=60.0)
    assert err == ""
    assert script.returncode == 0
    *copies, last = [json.loads(line) for line in out.splitlines()]
    assert copies == [{"copy": 0, "frames": 8}] * 2
    workers = [int(name.split()[-1]) for name in last["workers"]]
    assert len(workers) == 4
    assert not any(map(runs, workers))
