"""However collecting in the background ends, it ends cleanly, in time, and says why."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from lit_collect import (
    Collector,
    CollectorClosedError,
    CollectTimeoutError,
    DirectBackend,
    ProcessBackend,
    WorkerDiedError,
    WorkerFailedError,
)
from lit_collect.background import Turn
from lit_collect.testing import ConstantPolicy, CountingEnv, FailingEnv
from tests.behaviour.telling import (
    DEADLINE_S,
    MAKERS,
    Sink,
    Told,
    backend_of,
    invariant,
    wait_for,
)

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]

EVERYWHERE = pytest.mark.parametrize("backend", ["direct", "sync", "async"])


def _raise(error: BaseException) -> None:
    raise error


# --- errors -----------------------------------------------------------------------------------------------------------

NEXT_CALLS = {
    "collect": lambda collector: collector.collect(),
    "iter": lambda collector: iter(collector),
    "next": lambda collector: next(collector),
    "rollout": lambda collector: collector.rollout(),
    "start": lambda collector: collector.start(),
    "pause": lambda collector: collector.pause(),
    "statistics": lambda collector: collector.statistics(),
    "state_dict": lambda collector: collector.state_dict(),
    "load_state_dict": lambda collector: collector.load_state_dict({}),
    "update": lambda collector: collector.update_policy_weights_(),
    "receive": lambda collector: collector.receive_weights(),
    "register": lambda collector: collector.register_scheme_receiver({}),
    "reset": lambda collector: collector.reset(),
    "set_seed": lambda collector: collector.set_seed(1),
    "execute": lambda collector: collector.cascade_execute("env.num_envs"),
    "profile": lambda collector: collector.enable_profile(),
    "shutdown": lambda collector: collector.shutdown(),
    "async_shutdown": lambda collector: collector.async_shutdown(),
    "with": lambda collector: collector.__exit__(None, None, None),
}


@pytest.mark.parametrize("call", NEXT_CALLS)
def test_error_of_the_background_is_raised_by_the_next_call_whichever_and_once(call):
    sink = Sink(lambda: _raise(OSError("the disk is full")))
    collector = Collector(MAKERS, ConstantPolicy(num_actions=2), frames_per_batch=4, replay_buffer=sink)
    collector.start()
    wait_for(lambda: not collector.is_running)
    assert (collector.policy_version, collector.frames_left) == (0, None)
    with pytest.raises(OSError, match="the disk is full"):
        NEXT_CALLS[call](collector)
    assert invariant(collector.statistics())
    collector.shutdown()
    collector.shutdown()


@EVERYWHERE
def test_error_of_an_env_is_raised_and_the_collector_can_go_on(backend):
    makers, sink = [partial(FailingEnv, "step", 9), partial(CountingEnv, 1)], Sink()
    with Collector(makers, frames_per_batch=4, replay_buffer=sink, backend=backend_of(backend)) as collector:
        collector.start()
        wait_for(lambda: not collector.is_running)
        with pytest.raises(WorkerFailedError, match="failed in step: RuntimeError: broken on purpose"):
            collector.statistics()
        count = len(sink.batches)
        collector.start()
        wait_for(lambda: len(sink.batches) > count + 6)
        assert invariant(collector.statistics())
        assert collector.is_running


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_death_of_a_worker_is_raised(backend):
    sink = Sink()
    with Collector(MAKERS, frames_per_batch=4, replay_buffer=sink, backend=backend_of(backend)) as collector:
        collector.start()
        wait_for(lambda: bool(sink.batches))
        os.kill(int(collector.workers.members[1].channel.name.split()[1]), signal.SIGKILL)
        wait_for(lambda: not collector.is_running)
        with pytest.raises(WorkerDiedError, match=r"worker 1, .*killed by SIGKILL"):
            collector.update_policy_weights_()
        assert collector.statistics()["workers_alive"] == 1
        with pytest.raises(WorkerDiedError):
            collector.collect()


def test_dead_worker_is_replaced_in_the_background():
    sink = Sink()
    backend = ProcessBackend(2, sync=False, max_restarts=1)
    with Collector(MAKERS, frames_per_batch=4, replay_buffer=sink, backend=backend) as collector:
        collector.start()
        wait_for(lambda: bool(sink.batches))
        with pytest.warns(UserWarning, match=r"worker 1, .* died while .*; it is replaced"):
            _kill_and_wait(collector)
        sink.wait_for_more(6)
        assert collector.statistics()["workers_alive"] == 2
        assert invariant(collector.statistics())


def _kill_and_wait(collector: Collector) -> None:
    os.kill(int(collector.workers.members[1].channel.name.split()[1]), signal.SIGKILL)
    wait_for(lambda: collector.statistics()["restarts"] == 1)


@EVERYWHERE
@pytest.mark.parametrize("end", ["shutdown", "async_shutdown"])
def test_error_that_nobody_has_seen_is_raised_at_the_end_once_all_is_closed(backend, end):
    sink = Sink(lambda: _raise(StopIteration("of the sink")))  # which is no end of the budget
    collector = Collector(MAKERS, frames_per_batch=4, replay_buffer=sink, backend=backend_of(backend))
    collector.start()
    wait_for(lambda: not collector.is_running)
    with pytest.raises(StopIteration, match="of the sink"):
        getattr(collector, end)()
    collector.shutdown()
    assert collector.statistics()["workers_alive"] == 0
    with pytest.raises(CollectorClosedError):
        collector.collect()


# --- ends -------------------------------------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("end", ["shutdown", "async_shutdown", "with"])
def test_end_is_bounded_and_leaves_no_thread(backend, end):
    sink, before = Sink(), set(threading.enumerate())
    with Collector(MAKERS, frames_per_batch=4, replay_buffer=sink, backend=backend_of(backend)) as collector:
        collector.start()
        wait_for(lambda: bool(sink.batches))
        began = time.monotonic()
        if end != "with":
            getattr(collector, end)()
            assert not collector.is_running
            assert set(threading.enumerate()) == before
    assert time.monotonic() - began < 15
    assert set(threading.enumerate()) == before
    count = len(sink.batches)
    collector.shutdown()
    assert len(sink.batches) == count
    assert invariant(collector.statistics())
    for use in (collector.collect, collector.start, collector.pause, collector.update_policy_weights_):
        with pytest.raises(CollectorClosedError):
            use()


@EVERYWHERE
def test_exception_in_the_block_is_the_one_that_is_seen(backend):
    sink = Sink()
    collector = Collector(MAKERS, frames_per_batch=4, replay_buffer=sink, backend=backend_of(backend))

    def use() -> None:
        with collector:
            collector.start()
            sink.wait_for_more()
            raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        use()
    assert not collector.is_running


def test_hooks_may_use_the_collector_until_it_has_ended():
    sink, versions = Sink(), []
    inside, go_on = threading.Event(), threading.Event()

    def learn(batch) -> None:
        inside.set()
        assert go_on.wait(DEADLINE_S)
        collector.update_policy_weights_()
        with collector.pause():
            versions.append(collector.statistics()["policy_version"])

    hooks = {"post_collect": learn}
    with Collector(MAKERS, Told(), frames_per_batch=4, replay_buffer=sink, hooks=hooks) as collector:
        collector.start()
        assert inside.wait(DEADLINE_S)
        ending = threading.Thread(target=collector.shutdown)
        ending.start()
        wait_for(lambda: not collector.is_running)  # it was told to end
        go_on.set()
        ending.join()
    assert versions == [1]


def test_hook_may_shut_the_collector_down():
    sink = Sink()
    hooks = {"post_collect": lambda batch: collector.shutdown()}
    collector = Collector(MAKERS, frames_per_batch=4, replay_buffer=sink, hooks=hooks, backend=ProcessBackend(2))
    collector.start()
    wait_for(lambda: collector.workers.alive == 0 and not collector.is_running)
    assert len(sink.batches) == 1
    with pytest.raises(CollectorClosedError):
        collector.collect()


@pytest.mark.parametrize("backend", ["direct", "async"])
def test_sink_that_never_returns_cannot_hold_up_the_end(backend):
    full: queue.Queue = queue.Queue(maxsize=1)

    class Queued:
        def extend(self, rows) -> None:
            full.put(rows)  # nobody takes the second one

    options = {} if backend == "direct" else {"shutdown_timeout_s": 0.5}
    chosen = ProcessBackend(2, sync=False, **options) if backend == "async" else _impatient()
    collector = Collector(MAKERS, frames_per_batch=4, replay_buffer=Queued(), backend=chosen)
    collector.start()
    wait_for(lambda: collector.statistics()["batches"] == 2)
    with pytest.raises(CollectTimeoutError, match=r"did not end within 0\.5 s : expected the batch .*extend to come"):
        collector.shutdown()
    assert collector.workers.alive == 0
    while not full.empty():  # let the thread go
        full.get(timeout=DEADLINE_S)
        collector.shutdown()
    wait_for(lambda: not any("background" in thread.name for thread in threading.enumerate()))


def _impatient():

    backend = DirectBackend()
    backend.batch_timeout_s = 0.5
    return backend


SCRIPT = """
import threading
from lit_collect import Collector, ProcessBackend

class Sink:
    def __init__(self):
        self.arrived = threading.Event()

    def extend(self, rows):
        self.arrived.set()

running = []
for backend in ("direct", ProcessBackend(1, sync=False)):
    sink = Sink()
    running.append(Collector("CartPole-v1", num_envs=2, frames_per_batch=8, replay_buffer=sink, backend=backend))
    running[-1].start()
    assert sink.arrived.wait(60)
print("leaving")
"""


def test_script_that_forgets_to_shut_down_ends_all_the_same():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


# --- turns ------------------------------------------------------------------------------------------------------------


def test_turns_come_in_the_order_in_which_they_are_asked_for():
    turn, order, waiting = Turn(), [], threading.Barrier(2)

    def use(name: int) -> None:
        waiting.wait(DEADLINE_S)
        with turn.taken():
            order.append(name)

    with turn.taken():
        threads = []
        for name in range(5):
            threads.append(threading.Thread(target=use, args=(name,)))
            threads[-1].start()
            waiting.wait(DEADLINE_S)
            wait_for(lambda count=name + 2: len(turn._queue) == count)
        with turn.taken():  # it may be nested, and lets nobody in
            pass
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_turn_is_passed_on_after_an_exception():
    turn = Turn()
    with pytest.raises(KeyError), turn.taken(), turn.taken():
        raise KeyError
    taken = threading.Event()

    def use() -> None:
        with turn.taken():
            taken.set()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert taken.is_set()
