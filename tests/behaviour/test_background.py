"""Collecting in the background: into a sink, exactly, beside a learner that goes on using the collector."""

import os
import threading
from functools import partial

import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from lit_collect import BudgetSpentError, Collector, CollectorClosedError, Pipe, ProcessBackend
from lit_collect.testing import CountingEnv
from tests.behaviour.telling import (
    DEADLINE_S,
    MAKERS,
    OpponentEnv,
    Sink,
    SlowEnv,
    Told,
    backend_of,
    invariant,
    opponents,
    wait_for,
)

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]

EVERYWHERE = pytest.mark.parametrize("backend", ["direct", "sync", "async"])


# --- what arrives -----------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_rows_arrive_flat_until_the_budget_is_met_exactly(backend):
    sink = Sink()
    with Collector(
        MAKERS, frames_per_batch=8, total_frames=60, replay_buffer=sink, backend=backend_of(backend)
    ) as collector:
        assert not collector.is_running
        collector.start()
        wait_for(lambda: not collector.is_running)
        assert sink.rows == 60
        assert all(rows.batch_dims == 1 for rows in sink.batches)
        now = collector.statistics()
        assert (now["frames_yielded"], now["batches"]) == (60, len(sink.batches))
        assert invariant(now)
        assert collector.frames_left == 0
        with collector.pause():  # somebody may have asked for it just before the end
            pass
        for use in (collector.start, collector.collect):
            with pytest.raises(BudgetSpentError):
                use()
    rows = torch.cat(sink.batches)
    for copy in range(4):
        own = rows[rows["observation"][:, 0] == copy]["observation"][:, 1:].tolist()
        assert own == [[frame // 3, frame % 3] for frame in range(len(own))]


@pytest.mark.parametrize("backend", ["direct", "sync"])
def test_rows_that_are_no_transitions_do_not_arrive(backend):
    chosen, sink = "direct" if backend == "direct" else ProcessBackend(1), Sink()
    make = partial(CartPoleVectorEnv, 2)  # spends steps on resetting
    with Collector(make, frames_per_batch=100, total_frames=990, replay_buffer=sink, backend=chosen) as collector:
        collector.start()
        wait_for(lambda: not collector.is_running)
        assert collector.statistics()["batches"] > 10  # of fewer rows than there were steps
    rows = torch.cat(sink.batches)
    assert len(rows) == 990
    assert rows["collector", "mask"].all()
    assert (rows["collector", "traj_ids"] >= 0).all()


def test_one_copy_without_a_dimension_of_its_own_is_collected_flat():
    sink = Sink()
    with Collector(CountingEnv, frames_per_batch=5, total_frames=12, replay_buffer=sink) as collector:
        collector.start()
        wait_for(lambda: not collector.is_running)
    assert [len(rows) for rows in sink.batches] == [5, 5, 2]


@EVERYWHERE
def test_hooks_run_once_for_each_batch(backend):
    calls: list[object] = []
    hooks = {
        "pre_collect": lambda: calls.append((os.getpid(), "pre")),
        "postproc": lambda batch: batch[:, :1] if batch.shape[1] > 1 else batch,
        "post_collect": calls.append,
    }
    sink = Sink()
    makers = [partial(SlowEnv, i) for i in range(2)]
    with Collector(
        makers, frames_per_batch=4, total_frames=12, replay_buffer=sink, backend=backend_of(backend), hooks=hooks
    ) as collector:
        collector.start()
        wait_for(lambda: not collector.is_running)
    assert calls[::2] == [(os.getpid(), "pre")] * 3
    assert [batch.numel() for batch in calls[1::2]] == [len(rows) for rows in sink.batches]
    assert all(batch.shape[1] == 1 for batch in calls[1::2])


# --- what the learner does meanwhile ----------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("scheme", [None, Pipe])
def test_weights_published_meanwhile_take_effect(backend, scheme):
    sink, policy = Sink(), Told()
    chosen = backend_of(backend, **({} if scheme is None or backend == "direct" else {"weight_sync": scheme()}))
    with Collector(MAKERS, policy, frames_per_batch=8, replay_buffer=sink, backend=chosen) as collector:
        policy.fill(7.0)  # before the start, so that it begins with it
        collector.start()
        if backend != "direct":
            policy.fill(-1.0)  # not published
        for version in (1, 2, 3):
            wait_for(lambda: bool(sink.batches))
            collector.update_policy_weights_(Told(float(version)))
            wait_for(lambda version=version: set(sink.newest_versions().values()) == {version})
        collector.shutdown()
    rows = torch.cat(sink.batches)
    expected = rows["collector", "policy_version"].float()
    assert torch.equal(rows["told"], torch.where(expected == 0, 7.0, expected)[:, None].expand(-1, 4))


def test_weights_trained_in_place_act_under_their_own_version_in_this_process():
    sink, policy = Sink(), Told()
    with Collector(MAKERS, policy, frames_per_batch=8, replay_buffer=sink) as collector:
        collector.start()
        for version in range(1, 20):
            with collector.pause():  # nothing acts while it is trained
                policy.fill(float(version))
                collector.update_policy_weights_()
            sink.wait_for_more()
    rows = torch.cat(sink.batches)
    assert torch.equal(rows["told"], rows["collector", "policy_version"].float()[:, None].expand(-1, 4))


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_models_that_workers_are_asked_about_can_be_published_meanwhile(backend):
    sink = Sink()
    makers = [partial(OpponentEnv, i) for i in range(4)]
    with Collector(makers, Told(), frames_per_batch=8, replay_buffer=sink, backend=backend_of(backend)) as collector:
        collector.start()
        for version in range(1, 30):
            collector.update_policy_weights_(weights_dict=opponents(float(version), 2))
        collector.cascade_execute("env.num_envs")
        sink.wait_for_more(5)
        with pytest.raises(KeyError, match="there is no model 'nobody'"):
            collector.update_policy_weights_(Told(), model_id="nobody")
    rows = torch.cat(sink.batches)
    assert torch.equal(rows["next", "observation"][:, 2], rows["collector", "policy_version"].float())
    assert rows["collector", "policy_version"].max() == 29


@EVERYWHERE
def test_counters_and_state_hold_at_any_time(backend):
    sink = Sink()
    with Collector(
        MAKERS, frames_per_batch=4, total_frames=1200, replay_buffer=sink, backend=backend_of(backend), seed=3
    ) as collector:
        collector.start()
        last = 0
        while collector.is_running:  # as often as it can: the thread has its turn all the same
            now, state = collector.statistics(), collector.state_dict()
            assert invariant(now)
            assert now["frames_dropped"] == 0
            assert state["frames_yielded"] >= now["frames_yielded"] >= last
            assert state["frames_stepped"] >= state["frames_yielded"]
            assert len(state["trajectories"]) == 4
            last = now["frames_yielded"]
        assert invariant(collector.statistics())
    assert sink.rows == 1200


@EVERYWHERE
def test_control_works_meanwhile(backend):
    sink = Sink()
    with Collector(MAKERS, frames_per_batch=8, replay_buffer=sink, backend=backend_of(backend), seed=3) as collector:
        collector.start()
        for _ in range(5):
            sink.wait_for_more()
            assert collector.cascade_execute("env.envs[0].unwrapped.index") == ([0] if backend == "direct" else [0, 2])
            collector.reset(1)
            collector.reset()
            collector.set_seed(5)
            assert invariant(collector.statistics())
        sink.wait_for_more(4)
        with pytest.raises(RuntimeError, match="profiling begins with the first batch"):
            collector.enable_profile()
    rows = torch.cat(sink.batches)
    assert torch.equal(rows["is_init"][:, 0], rows["observation"][:, 2] == 0)


@EVERYWHERE
def test_using_it_in_the_foreground_meanwhile_is_refused(backend):
    sink = Sink()
    with Collector(MAKERS, frames_per_batch=8, replay_buffer=sink, backend=backend_of(backend)) as collector:
        state = collector.state_dict()
        collector.start()
        for use in (
            collector.collect,
            collector.rollout,
            collector.start,
            lambda: next(iter(collector)),
            lambda: collector.load_state_dict(state),
        ):
            with pytest.raises(RuntimeError, match=r"collected in the background; call async_shutdown\(\) first"):
                use()
        assert collector.is_running


def test_start_needs_somewhere_to_put_the_rows():
    with Collector(MAKERS, frames_per_batch=8) as collector:
        with pytest.raises(RuntimeError, match=r"nothing to collect into : expected Collector\(replay_buffer"):
            collector.start()
        with pytest.raises(RuntimeError, match="nothing is collected in the background; call start"):
            collector.pause()
        assert collector.collect().numel() == 8
    with pytest.raises(
        TypeError, match="replay_buffer cannot be written to : expected an object with extend, or a ReplayConfig, got 3"
    ):
        Collector(MAKERS, frames_per_batch=8, replay_buffer=3)
    with pytest.raises(CollectorClosedError):
        collector.start()


@pytest.mark.parametrize("backend", ["direct", "sync", "async"])
def test_foreground_goes_on_as_before_once_the_background_has_ended(backend):
    """After an error here: a budget that is spent leaves nothing to do."""
    failing = Sink(lambda: len(failing.batches) == 3 and _raise(OSError("the disk is full")))
    with Collector(
        MAKERS, frames_per_batch=8, total_frames=80, replay_buffer=failing, backend=backend_of(backend)
    ) as collector:
        first = collector.collect()  # before
        collector.start()
        wait_for(lambda: not collector.is_running)
        with pytest.raises(OSError, match="the disk is full"):
            collector.collect()
        again = collector.collect()
        assert again.shape == first.shape
        assert invariant(collector.statistics())
        collector.start()  # and once more
        wait_for(lambda: not collector.is_running)
        assert failing.rows == 80
        assert invariant(collector.statistics())


def _raise(error: BaseException) -> None:
    raise error


# --- pauses -----------------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_pause_keeps_the_sink_as_it_is_inside_of_the_block(backend):
    sink = Sink()
    with Collector(MAKERS, frames_per_batch=4, replay_buffer=sink, backend=backend_of(backend)) as collector:
        collector.start()
        for _ in range(20):
            sink.wait_for_more()
            with collector.pause():
                count, stepped = len(sink.batches), collector.statistics()["frames_stepped"]
                for _ in range(3):
                    assert collector.is_running
                    collector.cascade_execute("env.num_envs")  # time for something to go wrong
                assert len(sink.batches) == count
                if backend == "direct":
                    assert collector.statistics()["frames_stepped"] == stepped
        with pytest.raises(KeyError), collector.pause():
            raise KeyError("of the user")
        sink.wait_for_more()


def test_pauses_may_be_nested_and_overlap():
    sink = Sink()
    with Collector(MAKERS, frames_per_batch=4, replay_buffer=sink) as collector:
        collector.start()
        with collector.pause():
            with collector.pause():
                count = len(sink.batches)
            collector.statistics()
            other = threading.Thread(target=lambda: collector.pause().__enter__())
            other.start()
            other.join()
            assert len(sink.batches) == count
        collector.statistics()
        assert len(sink.batches) == count  # the other thread has not gone on


def test_pause_waits_for_what_is_on_its_way_into_the_sink():
    entered, leave = threading.Event(), threading.Event()

    def linger() -> None:
        entered.set()
        assert leave.wait(DEADLINE_S)

    sink, order = Sink(linger), []
    with Collector(MAKERS, frames_per_batch=4, replay_buffer=sink) as collector:
        collector.start()
        assert entered.wait(DEADLINE_S)

        def pause() -> None:
            with collector.pause():
                order.append(leave.is_set())

        thread = threading.Thread(target=pause)
        thread.start()
        assert collector.statistics()["batches"] == 1  # which a sink that lingers does not keep from anybody
        leave.set()
        thread.join()
    assert order == [True]


def test_shutdown_inside_of_a_pause_ends_it():
    sink = Sink()
    with Collector(MAKERS, frames_per_batch=4, replay_buffer=sink) as collector:
        collector.start()
        with collector.pause():
            collector.shutdown()
            assert not collector.is_running
