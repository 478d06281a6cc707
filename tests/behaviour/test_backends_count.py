"""Budgets, ids, versions and counters hold on every backend, whoever is slow; a batch that was given out is yours."""

import os
import signal
from functools import partial

import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict

from lit_collect import Collector, DirectBackend, ProcessBackend, RolloutConfig, WorkerFailedError, check_batch
from lit_collect.frames import MASK, columns_of, count_frames, flatten_rows, valid_rows
from lit_collect.testing import CountingEnv, FailingEnv
from tests.behaviour.streams import COPIES, ENVS, LENGTHS, Telling, check_counters, check_stream, learn, streams_of

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nursery")]


class ForgetfulSync(SyncVectorEnv):
    """Spends a step on each reset."""

    def step(self, actions):
        return super().step(actions)


def forgetful(copies: int) -> ForgetfulSync:
    return ForgetfulSync([partial(CountingEnv, i, LENGTHS[i]) for i in range(copies)], autoreset_mode="NextStep")


def kept_copies(batches: list[TensorDict]) -> list[TensorDict]:
    return [batch.clone() for batch in batches]


def unchanged(batches: list[TensorDict], copies: list[TensorDict]) -> bool:
    pairs = [(columns_of(one), columns_of(other)) for one, other in zip(batches, copies, strict=True)]
    return all(torch.equal(one[key], other[key]) for one, other in pairs for key in one)


# --- a budget that nothing divides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_synchronous_workers_meet_the_budget_with_every_frame_in_its_place(workers):
    policy, batches = Telling(), []
    backend = ProcessBackend(workers)
    with Collector(ENVS, policy, frames_per_batch=24, total_frames=104, backend=backend, seed=0) as collector:
        assert len(collector) == 5
        for batch in collector:
            batches.append(batch)
            check_batch(batch)
            assert (batch["collector", "policy_version"] == collector.policy_version).all()
            assert (batch["weight"] == collector.policy_version).all()
            assert valid_rows(batch) is None
            assert (batch["collector", "traj_ids"] % COPIES == torch.arange(COPIES)[:, None]).all()
            check_counters(collector, sum(one.numel() for one in batches))
            learn(collector, policy)
        numbers = check_counters(collector, 104)
    assert [batch.batch_size for batch in batches] == [(8, 3)] * 4 + [(8, 1)]
    assert numbers["frames_stepped"] == 104
    for number, rows in enumerate(streams_of(batches)):
        assert len(rows) == 13
        check_stream(rows, number, COPIES, LENGTHS[number], number)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_asynchronous_workers_meet_the_budget_with_every_frame_in_its_place(workers):
    policy, batches = Telling(), []
    backend = ProcessBackend(workers, sync=False)
    with Collector(ENVS, policy, frames_per_batch=24, total_frames=104, backend=backend, seed=0) as collector:
        for batch in collector:
            batches.append(batch)
            check_batch(batch)
            versions = batch["collector", "policy_version"]
            assert versions.min() == versions.max() <= collector.policy_version  # one set of weights for one batch
            assert (batch["weight"] == versions[..., None]).all()
            check_counters(collector, sum(one.numel() for one in batches))
            learn(collector, policy)
        numbers = check_counters(collector, 104)
    copies = COPIES // workers
    for batch in batches:
        owners = batch["collector", "traj_ids"] % COPIES
        first = int(owners[0, 0])
        assert first % copies == 0
        assert (owners == first + torch.arange(copies)[:, None]).all()
    sizes = [(copies, 8 // copies)] + [(copies, 24 // copies)] * 4
    assert sorted(batch.batch_size for batch in batches) == sizes  # the last that was asked for may come earlier
    assert (numbers["frames_stepped"], numbers["frames_pending"]) == (104, 0)
    for number, rows in enumerate(streams_of(batches)):
        check_stream(rows, number, COPIES, LENGTHS[number], number)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("sync", [True, False])
def test_rows_that_are_no_frames_do_not_count_in_any_budget(sync, workers):
    share, batches = COPIES // workers, []
    options = {"frames_per_batch": 24, "total_frames": 104, "backend": ProcessBackend(workers, sync), "seed": 0}
    with Collector(partial(forgetful, share), **options) as collector:
        for batch in collector:
            batches.append(batch)
            check_batch(batch)
            check_counters(collector, sum(count_frames(one) for one in batches))
        numbers = check_counters(collector, 104)
    assert sum(int(batch[MASK].sum()) for batch in batches) == 104
    assert any(not batch[MASK].all() for batch in batches)
    assert numbers["frames_dropped"] < COPIES  # only what the last step gave too much
    for number, rows in enumerate(streams_of(batches)):
        check_stream(rows, number, COPIES, LENGTHS[number % share], number % share)


def test_questions_between_asynchronous_batches_lose_and_repeat_nothing():
    batches = []
    backend = ProcessBackend(2, sync=False)
    with Collector(ENVS, frames_per_batch=24, total_frames=168, backend=backend, seed=0) as collector:
        for batch in collector:
            batches.append(batch)
            for _ in range(3):  # whatever was under way arrives meanwhile
                assert collector.cascade_execute("env.num_envs") == [4, 4]
            numbers = check_counters(collector, 24 * len(batches))
            assert numbers["frames_dropped"] == 0
            assert numbers["frames_pending"] == min(4 * 24, collector.frames_left)
            assert numbers["queue_fill"] == numbers["frames_pending"] / (4 * 24)
    for number, rows in enumerate(streams_of(batches)):
        check_stream(rows, number, COPIES, LENGTHS[number], number)


@pytest.mark.parametrize("sync", [True, False])
def test_question_after_a_failed_batch_gets_its_own_answer(sync):
    envs = [partial(FailingEnv, "step", 2, index=index) for index in range(2)]
    with Collector(envs, frames_per_batch=8, total_frames=24, backend=ProcessBackend(2, sync), seed=0) as collector:
        with pytest.raises(WorkerFailedError, match="broken on purpose"):
            collector.collect()  # in both workers, one of which was not heard yet
        assert collector.cascade_execute("env.envs[0].unwrapped.index") == [0, 1]
        collector.reset()
        assert collector.cascade_execute("env.num_envs") == [1, 1]
        if not sync:  # each batch is one worker's, so that the other one's failure is another batch's
            with pytest.raises(WorkerFailedError, match="broken on purpose"):
                collector.collect()
        assert sum(batch.numel() for batch in collector) == 24
        check_counters(collector, 24)


# --- a batch belongs to whoever was given it --------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_batches_that_were_given_out_never_change(workers, sync):
    policy, batches, copies = Telling(), [], []
    backend = ProcessBackend(workers, sync)
    with Collector(ENVS, policy, frames_per_batch=24, total_frames=240, backend=backend, seed=0) as collector:
        for batch in collector:
            batches.append(batch)
            copies += kept_copies([batch])
            learn(collector, policy)
            assert unchanged(batches, copies)
    assert len(batches) == 10
    assert unchanged(batches, copies)
    for batch in batches:  # and may be changed
        batch.apply_(lambda column: column.zero_())


@pytest.mark.parametrize("backend", [ProcessBackend(2), ProcessBackend(2, sync=False)], ids=repr)
def test_what_is_done_to_a_batch_does_not_reach_those_that_follow(backend):
    batches = []
    with Collector(ENVS, frames_per_batch=24, total_frames=240, backend=backend, seed=0) as collector:
        for batch in collector:
            batches += kept_copies([batch])
            batch.apply_(lambda column: column.fill_(1))
    for number, rows in enumerate(streams_of(batches)):
        check_stream(rows, number, COPIES, LENGTHS[number], number)


# --- a state goes from one backend to another -------------------------------------------------------------------------


MOVES = {
    "direct to processes": (DirectBackend, partial(ProcessBackend, 4)),
    "processes to direct": (partial(ProcessBackend, 2), DirectBackend),
    "more processes": (partial(ProcessBackend, 1), partial(ProcessBackend, 4)),
    "asynchronous to synchronous": (partial(ProcessBackend, 4, False), partial(ProcessBackend, 2)),
    "synchronous to asynchronous": (partial(ProcessBackend, 2), partial(ProcessBackend, 4, False)),
}


@pytest.mark.parametrize(("before", "after"), MOVES.values(), ids=MOVES.keys())
def test_run_goes_on_with_another_backend(before, after):
    options = {"frames_per_batch": 24, "total_frames": 240, "seed": 0}
    policy, first, second = Telling(), [], []
    with Collector(ENVS, policy, backend=before(), **options) as collector:
        for _ in range(4):
            first.append(collector.collect())
            learn(collector, policy)
        state = collector.state_dict()
        stepped = collector.statistics()["frames_stepped"]
    with Collector(ENVS, policy, backend=after(), **options) as collector:
        collector.load_state_dict(state)
        assert (collector.policy_version, collector.frames_left, len(collector)) == (4, 144, 6)
        numbers = check_counters(collector, 96)
        assert (numbers["frames_stepped"], numbers["frames_pending"], numbers["batches"]) == (stepped, 0, 4)
        for batch in collector:
            second.append(batch)
            check_batch(batch)
            assert (batch["weight"] == batch["collector", "policy_version"][..., None]).all()
            check_counters(collector, 96 + sum(one.numel() for one in second))
            learn(collector, policy)
        assert check_counters(collector, 240)["batches"] == 10
    assert second[0]["collector", "policy_version"].unique().tolist() == [4]
    ids = [torch.cat([flatten_rows(one)["collector", "traj_ids"] for one in part]) for part in (first, second)]
    assert not set(ids[0].tolist()) & set(ids[1].tolist())
    for number, rows in enumerate(streams_of(second)):
        begun = torch.tensor(state["trajectories"][number]) + rows["observation"][:, 1].long()
        assert torch.equal(rows["collector", "traj_ids"], begun * COPIES + number)


@pytest.mark.parametrize("sync", [True, False])
def test_random_steps_that_are_left_are_made_by_other_workers(sync):
    options = {"frames_per_batch": 24, "seed": 0, "rollout": RolloutConfig(init_random_frames=40)}
    with Collector(ENVS, backend=ProcessBackend(2), **options) as collector:
        assert (collector.collect()["collector", "policy_version"] == -1).all()
        state = collector.state_dict()
    with Collector(ENVS, backend=ProcessBackend(4, sync), **options) as collector:
        collector.load_state_dict(state)
        versions = collector.collect()["collector", "policy_version"]
    assert ((versions == -1).sum(1) == 40 // COPIES - 3).all()


class Known(CountingEnv):
    """Knows which process it is in."""

    def __init__(self, index: int) -> None:
        super().__init__(index, LENGTHS[index])
        self.process = os.getpid()


@pytest.mark.parametrize("sync", [True, False])
def test_state_and_statistics_ask_no_worker(sync):
    envs = [partial(Known, index) for index in range(4)]
    options = {"frames_per_batch": 24, "total_frames": 96, "seed": 0}
    with Collector(envs, backend=ProcessBackend(2, sync), **options) as collector:
        collector.collect()
        processes = collector.cascade_execute("env.envs[0].unwrapped.process")
        state, numbers = collector.state_dict(), collector.statistics()
        for process in processes:
            os.kill(process, signal.SIGKILL)
        assert collector.state_dict() == state
        counters = [name for name in numbers if name.startswith("frames")]
        assert [collector.statistics()[name] for name in counters] == [numbers[name] for name in counters]
    with Collector(envs, **options) as collector:
        collector.load_state_dict(state)
        assert sum(count_frames(batch) for batch in collector) == 72
        assert check_counters(collector, 96)["frames_dropped"] == state["frames_stepped"] - 24
