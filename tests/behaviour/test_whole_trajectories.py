"""Batches of whole trajectories: complete, in order, each frame once, on every backend and over every interruption."""

from functools import partial

import pytest
import torch

from lit_collect import (
    BudgetSpentError,
    Collector,
    CollectorDataModule,
    ProcessBackend,
    RolloutConfig,
    TrajectoryConfig,
    UpdateConfig,
    split_trajectories,
)
from lit_collect.testing import ConstantPolicy, CountingEnv

pytestmark = pytest.mark.timeout(120)

LENGTHS = (3, 7, 1, 5)  # of the episodes of every copy, in turn
MAKERS = [partial(CountingEnv, i, LENGTHS) for i in range(4)]
BACKENDS = [
    "direct",
    pytest.param(ProcessBackend(2), marks=pytest.mark.processes),
    pytest.param(ProcessBackend(2, sync=False), marks=pytest.mark.processes),
]


def collector_of(trajs: int = 3, **options) -> Collector:
    settings = {"frames_per_batch": 8, "total_frames": 200, "trajectories": TrajectoryConfig(trajs_per_batch=trajs)}
    return Collector(MAKERS, ConstantPolicy(0, num_actions=2), **{**settings, **options})


def trajectories_of(batch) -> list[list[tuple[int, ...]]]:
    """Of each trajectory what was seen in its rows: (env, episode, step)."""
    padded = batch if batch.batch_dims == 2 else split_trajectories(batch)
    mask = padded["collector", "mask"]
    rows = padded["observation"].long()
    return [[tuple(row) for row in rows[i][mask[i]].tolist()] for i in range(len(rows))]


def check_whole(trajectory: list[tuple[int, ...]]) -> tuple[int, int]:
    """The env and the episode of a trajectory that is whole."""
    env, episode, _ = trajectory[0]
    assert trajectory == [(env, episode, step) for step in range(LENGTHS[episode % len(LENGTHS)])]
    return env, episode


def check_accounts(collector: Collector, yielded: int) -> None:
    counts = collector.statistics()
    assert counts["frames_yielded"] == yielded
    assert counts["frames_stepped"] == yielded + counts["frames_pending"] + counts["frames_dropped"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("traj_format", ["cat", "padded"])
def test_every_batch_holds_the_number_of_whole_episodes(backend, traj_format):
    whole, frames = [], 0
    settings = TrajectoryConfig(trajs_per_batch=3, traj_format=traj_format)
    with collector_of(trajectories=settings, backend=backend) as collector:
        sizes = []
        for batch in collector:
            assert batch.batch_dims == (2 if traj_format == "padded" else 1)
            found = [check_whole(trajectory) for trajectory in trajectories_of(batch)]
            whole += found
            sizes.append(len(found))
            frames += int(batch["collector", "mask"].sum())
            check_accounts(collector, frames)
        assert set(sizes[:-1]) == {3}
        assert 1 <= sizes[-1] <= 3
        assert len(set(whole)) == len(whole)
        for env in range(4):  # none is left out in between
            episodes = [episode for number, episode in whole if number == env]
            assert episodes == list(range(len(episodes)))
        counts = collector.statistics()
        assert counts["frames_stepped"] == 200
        assert counts["frames_pending"] == 0
        # only episodes that were open at the end are left out
        assert counts["frames_dropped"] < 4 * max(LENGTHS)
        with pytest.raises(BudgetSpentError):
            iter(collector)


def test_trajectories_come_in_the_order_in_which_they_end():
    makers = [partial(CountingEnv, i, (length,)) for i, length in enumerate((5, 2, 3))]
    with Collector(
        makers, frames_per_batch=12, total_frames=36, trajectories=TrajectoryConfig(trajs_per_batch=1)
    ) as collector:
        order = [(int(batch["observation"][0, 0]), int(batch["observation"][0, 1])) for batch in collector]
    ends = sorted(
        (length * (episode + 1), env, episode) for env, length in enumerate((5, 2, 3)) for episode in range(6)
    )
    assert order == [(env, episode) for end, env, episode in ends if end <= 12]


def test_iterating_again_pausing_and_new_weights_lose_nothing():
    policy = ConstantPolicy(0.0, num_actions=2)
    with Collector(
        MAKERS,
        policy,
        frames_per_batch=8,
        total_frames=200,
        trajectories=TrajectoryConfig(trajs_per_batch=2),
    ) as collector:
        whole = []
        while collector.frames_left:
            for batch in collector:  # which is left at once, and entered again
                whole += [check_whole(trajectory) for trajectory in trajectories_of(batch)]
                break
            collector.update_policy_weights_()
    assert len(set(whole)) == len(whole) > 30


def test_budget_that_makes_no_whole_trajectory_ends_the_iteration():
    with Collector(
        partial(CountingEnv, 0, (50,)),
        frames_per_batch=8,
        total_frames=24,
        trajectories=TrajectoryConfig(trajs_per_batch=1),
    ) as collector:
        assert list(collector) == []
        assert collector.statistics()["frames_dropped"] == 24
        with pytest.raises(BudgetSpentError):
            collector.collect()


def restart_from_a_state(collector: Collector) -> None:
    collector.load_state_dict(collector.state_dict())


@pytest.mark.parametrize("begin_anew", [restart_from_a_state, lambda collector: collector.set_seed(7)])
def test_trajectories_of_another_run_are_not_handed_out(begin_anew):
    makers = [partial(CountingEnv, i, (2,)) for i in range(4)]
    settings = TrajectoryConfig(trajs_per_batch=1)
    with Collector(makers, frames_per_batch=8, total_frames=40, trajectories=settings) as collector:
        collector.collect()  # one of the four that make 8 frames
        assert collector.statistics()["frames_pending"] == 6
        begin_anew(collector)
        assert collector.statistics()["frames_pending"] == 0
        check_accounts(collector, 2)
        episodes = [int(batch["observation"][0, 1]) for batch in collector]
        assert min(episodes) > 0  # those with the number 0 were left behind
        check_accounts(collector, 2 + 2 * len(episodes))
        assert collector.budget.yielded + collector.budget.lost == 40


def test_stale_episodes_are_dropped_and_counted():
    makers = [partial(CountingEnv, 0, (4,)), partial(CountingEnv, 1, (6,))]
    with Collector(
        makers,
        ConstantPolicy(0.0, num_actions=2),
        frames_per_batch=8,
        total_frames=96,
        trajectories=TrajectoryConfig(trajs_per_batch=1, drop_stale=True),
    ) as collector:
        yielded = []
        for batch in collector:
            versions = batch["collector", "policy_version"]
            assert versions.min() == collector.policy_version
            yielded.append(int(batch["observation"][0, 0]))
            collector.update_policy_weights_()
        assert 0 in yielded
        assert yielded.count(1) < yielded.count(0)  # theirs begin in one batch and end in another as a rule
        check_accounts(collector, int(4 * yielded.count(0) + 6 * yielded.count(1)))


def test_set_truncated_cuts_make_trajectories_of_their_own():
    rollout = RolloutConfig(set_truncated=True)
    with collector_of(trajs=4, rollout=rollout) as collector:
        steps = []
        for batch in collector:
            ends = batch["next", "done"].squeeze(-1)
            assert int(ends.sum()) == len(split_trajectories(batch)) <= 4
            assert ends[-1]
            steps.append(len(batch))
        assert sum(steps) == 200  # cut at the edges, so that nothing stays open


def test_reset_at_each_batch_keeps_nothing_open():
    with collector_of(rollout=RolloutConfig(reset_at_each_iter=True)) as collector:
        for batch in collector:
            for trajectory in trajectories_of(batch):
                assert [step for _, _, step in trajectory] == list(range(len(trajectory)))
            assert collector.statistics()["frames_pending"] <= 3 * max(LENGTHS)


def test_reset_leaves_the_running_episodes_out():
    with collector_of(trajs=2) as collector:
        first = [check_whole(trajectory) for trajectory in trajectories_of(collector.collect())]
        collector.reset()
        later = []
        for batch in collector:
            for trajectory in trajectories_of(batch):
                assert [step for _, _, step in trajectory] == list(range(len(trajectory)))
                later.append(trajectory[0][:2])
        assert not set(first) & set(later)


def test_state_counts_what_waits_as_dropped():
    with collector_of(trajs=2) as collector:
        seen = sum(len(batch) for _, batch in zip(range(3), collector, strict=False))
        state = collector.state_dict()
    with collector_of(trajs=2) as resumed:
        resumed.load_state_dict(state)
        assert resumed.frames_left == 200 - seen - state["frames_lost"]
        for batch in resumed:
            seen += len(batch)
        counts = resumed.statistics()
        assert counts["frames_yielded"] == seen
        assert counts["frames_stepped"] == seen + counts["frames_dropped"]


def test_split_batches_hold_all_rows():
    with collector_of(trajectories=TrajectoryConfig(split_trajs=True)) as collector:
        batches = list(collector)
    assert len(batches) == 25
    for batch in batches:
        assert batch.batch_dims == 2
        assert int(batch["collector", "mask"].sum()) == 8
        ids = batch["collector", "traj_ids"]
        assert (ids == torch.where(batch["collector", "mask"], ids[:, :1], -1)).all()


def test_collector_of_trajectories_has_no_length():
    with collector_of() as collector, pytest.raises(TypeError, match="nobody knows how many there will be"):
        len(collector)


@pytest.mark.parametrize("updates", [UpdateConfig(), UpdateConfig(epochs=2, minibatch_size=4)], ids=["whole", "cut"])
def test_fit_trains_on_whole_trajectories_until_the_budget_is_spent(updates, learner, trainer_with):
    data = CollectorDataModule(
        MAKERS,
        frames_per_batch=8,
        total_frames=200,
        trajectories=TrajectoryConfig(trajs_per_batch=3),
        updates=updates,
        evaluation=None,
    )
    whole = []
    data.rollout_listeners.append(lambda batch: whole.extend(map(check_whole, trajectories_of(batch))))
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert len(set(whole)) == len(whole) > 30
    assert data.progress == 1.0
    assert data.frames_left == 0
    assert sum(len(batch) for batch in model.batches) == updates.epochs * data.frames_total
    sizes = [len(batch) for batch in model.batches]
    if updates.minibatch_size is None:
        assert len(sizes) == updates.epochs * -(-len(whole) // 3)
    else:  # the last one of each pass may be smaller
        assert max(sizes) == 4
        assert sum(size < 4 for size in sizes) <= updates.epochs * -(-len(whole) // 3)
