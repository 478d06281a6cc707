"""Weights that are published while batches are made are never torn, and rows never older than the bound allows."""

from functools import partial
from threading import Event, Thread

import pytest
import torch

from lit_collect import Collector, Pipe, ProcessBackend, StaleDataError
from tests.behaviour.telling import (
    MAKERS,
    OpponentEnv,
    Told,
    Wide,
    opponents,
    versions,
)

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]


# --- never torn -------------------------------------------------------------------------------------------------------


class Writer:
    """Publishes in a thread, as fast as it can, weights that are all equal to their version."""

    def __init__(self, collector: Collector) -> None:
        self._collector, self._over = collector, Event()
        self._thread = Thread(target=self._write)
        self.error: BaseException | None = None

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        self._thread.join()

    def _write(self) -> None:
        weight = torch.zeros(10_000)
        try:
            while not self._over.is_set():
                weight.fill_(self._collector.policy_version + 1)
                self._collector.update_policy_weights_({"weight": weight})
                weight.fill_(-1.0)
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("scheme", [None, Pipe])
def test_weights_published_at_full_speed_are_never_torn(scheme):
    batches = 2000 if scheme is None else 200
    backend = ProcessBackend(2, sync=False, weight_sync=scheme and scheme())
    makers, seen = MAKERS[:2], set()
    with Collector(makers, Wide(), frames_per_batch=2, total_frames=2 * batches, backend=backend) as collector:
        with Writer(collector) as writer:
            for batch in collector:
                rows = batch["collector", "policy_version"][..., None].expand(-1, -1, 4)
                assert torch.equal(batch["told"], rows.float())
                seen.update(versions(batch))
        assert writer.error is None
    assert len(seen) > batches / 10  # it was published all the while


@pytest.mark.parametrize("sync", [True, False])
def test_weights_published_between_all_batches_are_never_torn(sync):
    with Collector(MAKERS[:2], Wide(), frames_per_batch=2, backend=ProcessBackend(2, sync)) as collector:
        weight = torch.zeros(10_000)
        for version in range(1, 301):
            collector.update_policy_weights_({"weight": weight.fill_(version)})
            batch = collector.collect()
            assert torch.equal(batch["told"][..., 0], batch["collector", "policy_version"].float())
            assert torch.equal(batch["told"], batch["told"][..., :1].expand(-1, -1, 4))
            if sync:
                assert versions(batch) == [version]


def test_weights_published_by_a_thread_during_synchronous_collection_raise_nothing():
    with Collector(MAKERS[:2], Wide(), frames_per_batch=2, total_frames=400, backend=ProcessBackend(2)) as collector:
        with Writer(collector) as writer:
            for batch in collector:
                rows = batch["collector", "policy_version"][..., None].expand(-1, -1, 4)
                assert torch.equal(batch["told"], rows.float())
        assert writer.error is None


def test_models_asked_about_by_a_thread_while_batches_are_taken_confuse_nobody():
    makers, errors = [partial(OpponentEnv, index) for index in range(2)], []

    def publish() -> None:
        try:
            for value in range(1, 20):  # of the first the shapes are to be asked for
                collector.update_policy_weights_(weights_dict=opponents(float(value), 1))
        except BaseException as error:
            errors.append(error)

    with Collector(makers, Told(), frames_per_batch=2, backend=ProcessBackend(2, sync=False)) as collector:
        thread = Thread(target=publish)
        thread.start()
        for _ in range(100):
            batch = collector.collect()
            assert batch["next", "observation"][..., 2].unique().tolist() == [float(versions(batch)[0])]
        thread.join()
    assert errors == []


# --- a bound on age ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_rows_are_never_older_than_the_bound_when_they_are_handed_out(bound):
    backend = ProcessBackend(2, sync=False, max_staleness=bound)
    policy, batches, ages = Told(), 0, set()
    with Collector(MAKERS, policy, frames_per_batch=4, total_frames=600, backend=backend, seed=1) as collector:
        for batch in collector:
            batches += 1
            age = collector.policy_version - batch["collector", "policy_version"]
            assert age.min() >= 0
            assert age.max() <= bound
            ages.update(age.unique().tolist())
            for _ in range(1 + batches // 50):  # more often later, which is foreseen but not known
                collector.update_policy_weights_(policy.fill(collector.policy_version + 1.0))
            now = collector.statistics()
            assert now["frames_stepped"] == now["frames_yielded"] + now["frames_pending"] + now["frames_dropped"]
            assert now["frames_pending"] >= 0
            assert now["frames_dropped"] >= now["stale_dropped"]
    assert (batches, now["frames_yielded"]) == (150, 600)
    assert bound in ages  # use is made of it


@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_all_workers_have_their_turn_within_the_bound(bound):
    backend = ProcessBackend(4, sync=False, max_staleness=bound)
    policy, seen = Told(), set()
    with Collector(MAKERS, policy, frames_per_batch=4, total_frames=160, backend=backend) as collector:
        for batch in collector:
            seen.update(batch["observation"][..., 0].unique().tolist())
            collector.update_policy_weights_()
    assert seen == {0.0, 1.0, 2.0, 3.0}


def test_rows_that_a_burst_of_publications_makes_too_old_are_dropped_and_counted():
    backend = ProcessBackend(2, sync=False, max_staleness=3)
    with Collector(MAKERS, Told(), frames_per_batch=4, total_frames=40, backend=backend) as collector:
        collector.collect()
        collector.cascade_execute("policy.count")  # answered after the batches that are under way
        waiting = collector.statistics()
        assert waiting["frames_pending"] > 0
        assert waiting["frames_dropped"] == 0
        for _ in range(4):
            collector.update_policy_weights_()
        batches = list(collector)
        after = collector.statistics()
    assert sum(batch.numel() for batch in batches) == 36
    assert versions(torch.cat(batches, 1)) == [4]
    assert after["stale_dropped"] == after["frames_dropped"] == waiting["frames_pending"]
    assert after["frames_stepped"] == after["frames_yielded"] + after["frames_pending"] + after["frames_dropped"]


def test_without_a_bound_nothing_is_dropped():
    backend = ProcessBackend(2, sync=False)
    with Collector(MAKERS, Told(), frames_per_batch=4, total_frames=80, backend=backend) as collector:
        for _ in collector:
            for _ in range(3):
                collector.update_policy_weights_()
        after = collector.statistics()
    assert (after["frames_yielded"], after["stale_dropped"], after["frames_dropped"]) == (80, 0, 0)


def test_publications_that_leave_no_batch_fresh_enough_are_an_error_in_the_end():
    backend = ProcessBackend(2, sync=False, max_staleness=0, batch_timeout_s=1.0)
    with Collector(MAKERS[:2], Wide(), frames_per_batch=2000, backend=backend) as collector:
        collector.collect()
        with Writer(collector), pytest.raises(StaleDataError, match=r"no batch was fresh enough .*max_staleness=0"):
            for _ in collector:
                pass
        assert collector.collect().numel() == 2000
