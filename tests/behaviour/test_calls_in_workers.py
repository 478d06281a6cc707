"""Functions that are called where envs are stepped: what they get and give, and what becomes of those that fail."""

import os
import pickle
import threading
from functools import partial

import pytest

from lit_collect import Collector, CollectorClosedError, WorkerDiedError, WorkerFailedError
from lit_collect.testing import ConstantPolicy
from tests.behaviour.telling import MAKERS, ControlledEnv, backend_of, invariant

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]

EVERYWHERE = pytest.mark.parametrize("backend", ["direct", "sync", "async"])
CONTROLLED = [partial(ControlledEnv, index) for index in range(4)]


def make(backend: str, env=MAKERS, policy=None, **options) -> Collector:
    """Two workers of two copies each, or one of four."""
    return Collector(env, policy, **{"frames_per_batch": 8, "seed": 5, **options}, backend=backend_of(backend))


class OddError(Exception):
    """Takes two arguments, and is of no kind that Python has."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")


@EVERYWHERE
def test_function_is_called_in_every_worker_with_what_it_holds(backend):
    factor = 10
    firsts = [0] if backend == "direct" else [0, 2]
    with make(backend, CONTROLLED, ConstantPolicy(1.0, num_actions=2)) as collector:

        def look(env, policy, shift, *, unit):
            return os.getpid(), env.envs[0].unwrapped.index * factor + shift, policy.action.item(), unit

        for _ in range(2):
            answers = collector.map_fn(look, 3, unit="m")
            assert [answer[1:] for answer in answers] == [(first * 10 + 3, 1.0, "m") for first in firsts]
            assert len({answer[0] for answer in answers} | {os.getpid()}) == (1 if backend == "direct" else 3)
            assert collector.collect().numel() == 8
        assert collector.map_fn("env.envs[0].unwrapped.index") == firsts
        assert [values for _, values, _ in collector.map_fn("env.envs[0].unwrapped.tell", 1, x=2)] == [(1,)] * len(
            firsts
        )
        assert collector.map_fn(lambda env, policy: None) == [None] * len(firsts)
        assert collector.map_fn(partial(look, unit="s"), 0)[0][-1] == "s"


@EVERYWHERE
def test_function_may_change_what_the_workers_hold(backend):
    with make(backend, CONTROLLED) as collector:

        def strengthen(env, policy, by):
            for copy in env.envs:
                copy.unwrapped.level["gravity"][0] += by

        collector.map_fn(strengthen, 2.5)
        assert set(collector.cascade_execute("env.envs[-1].unwrapped.level['gravity'][0]")) == {11.5}


@EVERYWHERE
def test_function_that_raises_is_told_of_and_the_collector_goes_on(backend):
    def fail(env, policy, error, *args):
        raise error(*args)

    with make(backend, CONTROLLED) as collector:
        collector.collect()
        for error, args, kind in [
            (ValueError, ("no such gear",), ValueError),
            (KeyError, ("no such gear",), KeyError),
            (StopIteration, ("no such gear",), StopIteration if backend == "direct" else WorkerFailedError),
            (OddError, (3, "no such gear"), OddError if backend == "direct" else WorkerFailedError),
        ]:
            with pytest.raises(kind, match="no such gear") as caught:
                collector.map_fn(fail, error, *args)
            if backend != "direct":
                assert "calling " in str(caught.value)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            collector.map_fn(lambda env, policy, more: more)
        assert collector.map_fn(lambda env, policy: env.num_envs)[0] in (2, 4)
        assert collector.collect().numel() == 8
        assert invariant(collector.statistics())


@EVERYWHERE
@pytest.mark.parametrize("fn", [None, 3, ["env"]])
def test_what_cannot_be_called_is_refused(backend, fn):
    with make(backend) as collector, pytest.raises(TypeError, match="fn must be a path or something that can be call"):
        collector.map_fn(fn)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_function_that_cannot_travel_is_refused_and_the_collector_goes_on(backend):
    lock = threading.Lock()
    with make(backend) as collector:
        for fn, args in [(lambda env, policy: lock, ()), (lambda env, policy, what: 1, (lock,))]:
            with pytest.raises((TypeError, pickle.PicklingError), match="cannot pickle"):
                collector.map_fn(fn, *args)
            assert collector.map_fn(lambda env, policy: 1) == [1, 1]
        assert collector.collect().numel() == 8


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_function_that_ends_its_worker_is_named(backend):
    with make(backend) as collector:
        collector.collect()
        with pytest.raises(WorkerDiedError, match=r"worker 0.* died while calling .*<lambda>.*exit code 3"):
            collector.map_fn(lambda env, policy: os._exit(3))
        with pytest.raises(WorkerDiedError, match="this collector cannot go on"):
            collector.map_fn(lambda env, policy: 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda collector: collector.collect(),
        lambda collector: collector.map_fn(lambda env, policy: 1),
        lambda collector: collector.getattr_env("num_envs"),
        lambda collector: collector.fake_tensordict(),
        lambda collector: collector.update_policy_weights_(ConstantPolicy(2.0)),
        lambda collector: collector.reset(),
        lambda collector: collector.set_seed(3),
    ],
)
def test_function_that_uses_the_collector_it_is_called_by_is_told_so(use):
    with make("direct", CONTROLLED, ConstantPolicy(1.0, num_actions=2)) as collector:
        collector.collect()
        with pytest.raises(RuntimeError, match=r"used by what it has called itself, .* : expected use between batches"):
            collector.map_fn(lambda env, policy: use(collector))
        assert collector.map_fn(lambda env, policy: policy.action.item()) == [1.0]
        assert collector.collect().numel() == 8
        assert collector.statistics()["frames_dropped"] == 0


def test_function_may_shut_the_collector_down_that_it_is_called_by():
    with make("direct", CONTROLLED) as collector:
        collector.map_fn(lambda env, policy: collector.shutdown())
        with pytest.raises(CollectorClosedError):
            collector.collect()


@EVERYWHERE
def test_function_that_exits_is_no_end_of_its_worker(backend):
    with make(backend) as collector:
        with pytest.raises(SystemExit if backend == "direct" else WorkerFailedError):
            collector.map_fn(lambda env, policy: exit(3))
        assert collector.map_fn(lambda env, policy: 1)[0] == 1
