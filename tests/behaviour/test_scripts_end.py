"""However a script ends, its workers end with it: killed, told to end, or without a thought of them."""

import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.behaviour.troubles import eventually, runs

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SOON_S = 8.0

BEGIN = """
    import json, os, signal, sys, threading, time
    from functools import partial
    from lit_collect import Collector, CollectorClosedError, CollectorDataModule, ProcessBackend
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
def run_script(start_script: Callable[[str], subprocess.Popen]) -> Callable[[str], subprocess.Popen]:
    """Runs a script, which has no guard, in a session of its own."""
    return lambda text: start_script(textwrap.dedent(BEGIN) + textwrap.dedent(text))


def said(script: subprocess.Popen, lines: int) -> list[dict[str, Any]]:
    return [json.loads(script.stdout.readline()) for _ in range(lines)]


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
        def misuse():
            try:
                first.collect()
            except CollectorClosedError as error:
                say(refused=str(error).partition(" : ")[0])

        for leave in (misuse, first.shutdown, sys.exit):
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
    refused, *copies, last = [json.loads(line) for line in out.splitlines()]
    assert refused == {"refused": f"the workers of this collector belong to process {script.pid}"}
    assert copies == [{"copy": 0, "frames": 8}] * 3
    workers = [int(name.split()[-1]) for name in last["workers"]]
    assert len(workers) == 4
    assert not any(map(runs, workers))
