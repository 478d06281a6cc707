"""Workers that die are replaced: the frames stay exact, counted and fresh, and it comes to an end."""

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from lit_collect import Collector, WorkerDiedError
from tests.behaviour.troubles import (
    COPIES,
    build,
    check_counters,
    check_trajectories,
    kill,
    kill_itself,
    makers,
    once,
    open_files,
    pids,
    runs,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nursery")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this file, and pytest with it

REPLACED = r"worker 1, process \d+ \(env copies 4 to 7\) died while .*SIGKILL.*; it is replaced, and its episodes begin"
MANY = 300  # batches; workers that go on by themselves may make any number before the others are heard of
both_ways = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


class TellingPolicy(nn.Module):
    """Acts at random, and says which weight it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        rows = len(observation)
        return {"action": torch.randint(2, (rows,)), "weight": self.weight.expand(rows, 1)}


def collect_until(collector: Collector, condition: Callable[[list[Any]], bool]) -> list[Any]:
    """Batches up to one after which a condition on them holds."""
    batches: list[Any] = []
    while not batches or not condition(batches):
        assert len(batches) < MANY
        batches.append(collector.collect())
    return batches


@both_ways
@pytest.mark.parametrize(("where", "at"), [("step", 8), ("reset", 2)])
def test_worker_that_dies_is_replaced_and_the_budget_is_met(where, at, sync, tmp_path):
    envs = makers(where, partial(once, tmp_path / "died", kill_itself), at)
    with build(envs, total_frames=160, sync=sync, max_restarts=1) as collector:
        first = pids(collector)
        with pytest.warns(UserWarning, match=REPLACED):
            batches = list(collector)
        assert (tmp_path / "died").exists()
        assert sum(batch.numel() for batch in batches) == 160
        check_trajectories(batches)
        check_counters(collector)
        counters = collector.statistics()
        assert (counters["restarts"], counters["episodes_dropped"], counters["workers_alive"]) == (1, COPIES // 2, 2)
        assert counters["frames_yielded"] == 160
        second = pids(collector)
        assert second[0] == first[0]
        assert second[1] != first[1]
        assert not runs(first[1])
    assert not any(map(runs, second))


@both_ways
def test_replaced_worker_goes_on_under_seeds_of_its_own(sync):
    with build(makers(), sync=sync, max_restarts=2) as collector:
        collector.collect()
        collector.collect()
        seeds = [collector.cascade_execute("env.envs[1].seeds[0]")]
        for _ in range(2):
            kill(pids(collector)[1])
            with pytest.warns(UserWarning, match=REPLACED):
                collector.reset()
            for _ in range(4):
                collector.collect()
            seeds.append(collector.cascade_execute("env.envs[1].seeds[0]"))
        of_worker_0, of_worker_1 = (set(column) for column in zip(*seeds, strict=True))
        assert len(of_worker_0) == 1
        assert len(of_worker_1) == 3
        check_counters(collector)


@both_ways
def test_one_death_more_than_may_be_replaced_is_an_error(sync):
    with build(makers(), sync=sync, max_restarts=2) as collector:
        batches = [collector.collect()]
        for deaths, worker in enumerate((1, 0), 1):
            kill(pids(collector)[worker])
            with pytest.warns(UserWarning, match=f"worker {worker}, .*it is replaced"):
                batches += collect_until(collector, lambda _, deaths=deaths: collector.workers.restarts == deaths)
        check_trajectories(batches)
        check_counters(collector)
        kill(pids(collector)[1])
        for more in ("", ".*this collector cannot go on; build a new one"):
            with pytest.raises(
                WorkerDiedError, match=f"worker 1, .*SIGKILL.*, and 2 of max_restarts=2 were used before{more}"
            ):
                collect_until(collector, lambda _: False)
        counters = collector.statistics()
        assert (counters["restarts"], counters["episodes_dropped"], counters["workers_alive"]) == (2, COPIES, 1)


@both_ways
def test_worker_that_dies_again_at_once_is_an_error(sync, tmp_path):
    mark = tmp_path / "second"

    def die_from_the_second_time_on() -> None:
        if mark.exists():
            kill_itself()

    with build(makers("init", die_from_the_second_time_on), sync=sync, max_restarts=5) as collector:
        collector.collect()
        mark.touch()
        kill(pids(collector)[1])
        with (
            pytest.warns(UserWarning, match=REPLACED),
            pytest.raises(WorkerDiedError, match=r"worker 1, .*died while starting: it was killed by SIGKILL"),
        ):
            collect_until(collector, lambda _: False)
        with pytest.raises(WorkerDiedError, match="this collector cannot go on; build a new one"):
            collector.collect()
        assert collector.statistics()["workers_alive"] == 1
        assert collector.observation_space.shape == (3,)
        check_counters(collector)


def of_worker_1_under(version: int, batch: Any) -> bool:
    rows = batch["observation"][..., 0] >= COPIES // 2
    return bool(rows.any()) and bool((batch["collector", "policy_version"][rows] == version).all())


@both_ways
def test_replaced_worker_has_the_newest_weights(sync):
    policy = TellingPolicy()
    with build(makers(), policy, sync=sync, max_restarts=1) as collector:
        collector.collect()
        for version in (1, 2):
            policy.weight.data.fill_(version)
            collector.update_policy_weights_(policy)
        kill(pids(collector)[1])
        with pytest.warns(UserWarning, match=REPLACED):
            batches = collect_until(collector, lambda batches: of_worker_1_under(2, batches[-1]))
        for batch in batches:
            assert torch.equal(batch["weight"][..., 0], batch["collector", "policy_version"].float())
        if sync:
            assert all((batch["collector", "policy_version"] == 2).all() for batch in batches)
        assert collector.statistics()["acknowledged_versions"][1] == 2


def test_replacing_keeps_no_descriptor(tmp_path):
    with build(makers(), max_restarts=4) as collector:
        collector.collect()
        gc.collect()
        before = open_files()
        for _ in range(4):
            kill(pids(collector)[1])
            with pytest.warns(UserWarning, match=REPLACED):
                collector.collect()
        gc.collect()
        assert open_files() == before
