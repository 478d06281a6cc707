"""The rows of a `Collector` are those of a plain loop over the same single envs, whatever the source and its mode."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import gymnasium
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from tensordict import TensorDictBase

from lit_collect import Collector, RolloutConfig, check_batch
from lit_collect.testing import CountingEnv

# Python warns of forking a process that has threads, and torch's are always there.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

LENGTHS = [(1,), (2, 1), (3,), (50, 2)]
COPIES = len(LENGTHS)
ENDS = ["terminated", "truncated", "both"]
MODES = ["NextStep", "SameStep", "Disabled"]
FORKED = partial(AsyncVectorEnv, context="fork")


class ForgetfulSync(SyncVectorEnv):
    """A vector env that nobody knows to reset single copies: it spends a step on each reset in NEXT_STEP mode."""

    def step(self, actions):
        return super().step(actions)


def makers(ends: str = "both", **options) -> list[Callable[[], CountingEnv]]:
    return [partial(CountingEnv, i, lengths, ends=ends, **options) for i, lengths in enumerate(LENGTHS)]


def act(observation: torch.Tensor) -> torch.Tensor:
    """An action that names the observation it was chosen for."""
    return observation.sum(-1).long() % 2


def hand_loop(env: CountingEnv, steps: int, copies: int = COPIES) -> Iterator[tuple]:
    """What Gymnasium's manual would store."""
    trajectory = env.index
    observation, _ = env.reset()
    observation, first = observation.copy(), True
    for _ in range(steps):
        action = int(observation.sum()) % 2
        successor, reward, terminated, truncated, _ = env.step(action)
        successor, done = successor.copy(), terminated or truncated
        yield observation.tolist(), action, reward, successor.tolist(), terminated, truncated, done, first, trajectory
        first = done
        trajectory += copies * done
        observation = env.reset()[0].copy() if done else successor


def rows(batch: TensorDictBase) -> list[tuple]:
    """The same of one copy's line [T] of a batch, rows that are no transition left out."""
    mask = batch.get(("collector", "mask"), None)
    kept = batch if mask is None else batch[mask]
    columns = [kept["observation"], kept["action"], kept["next", "reward"][..., 0], kept["next", "observation"]]
    columns += [kept["next", name][..., 0] for name in ("terminated", "truncated", "done")]
    columns += [kept["is_init"][..., 0], kept["collector", "traj_ids"]]
    return list(zip(*[column.tolist() for column in columns], strict=True))


def collect(env, frames: int, frames_per_batch: int, **options) -> list[list[tuple]]:
    """The rows of each copy over all batches, after checks that every batch must pass."""
    options = {"policy": act, "seed": 3, **options}
    lines: list[list[tuple]] = []
    with Collector(env, frames_per_batch=frames_per_batch, total_frames=frames, **options) as collector:
        for batch in collector:
            check_batch(batch)
            batch = batch if batch.ndim == 2 else batch.unsqueeze(0)
            assert not batch["done"].any()
            assert not batch["terminated"].any()
            assert not batch["truncated"].any()
            lines = lines or [[] for _ in batch]
            for line, copy in zip(lines, batch, strict=True):
                line += rows(copy)
        assert collector.statistics()["frames_yielded"] == frames
    assert sum(map(len, lines)) == frames
    return lines


def assert_exact(lines: Sequence[Sequence[tuple]], envs: Sequence[CountingEnv]) -> None:
    for line, env in zip(lines, envs, strict=True):
        assert list(line) == list(hand_loop(env, len(line), len(envs)))
        for observation, _, _, successor, *_ in line:
            assert observation[:2] == successor[:2]  # of the same copy and episode
            assert successor[2] == observation[2] + 1


@pytest.mark.parametrize("reuse", [False, True], ids=["new-arrays", "reused-arrays"])
@pytest.mark.parametrize("ends", ENDS)
def test_single_envs(ends, reuse):
    lines = collect(makers(ends, reuse_buffers=reuse), 448, 56)
    assert [len(line) for line in lines] == [112] * COPIES
    assert_exact(lines, [make() for make in makers(ends)])


@pytest.mark.parametrize("lengths", [(1,), (2,), (3,), (50,), (1, 2, 3, 50)])
def test_live_single_env(lengths):
    env = CountingEnv(0, lengths, ends="both", reuse_buffers=True)
    (line,) = collect(env, 130, 13)
    assert_exact([line], [CountingEnv(0, lengths, ends="both")])
    assert env.closes == 0  # who made it closes it


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "view"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ends", ENDS)
def test_sync_vector_env(ends, mode, copy):
    lines = collect(lambda: SyncVectorEnv(makers(ends), autoreset_mode=mode, copy=copy), 448, 56)
    assert [len(line) for line in lines] == [112] * COPIES
    assert_exact(lines, [make() for make in makers(ends)])


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_sync_vector_env_whose_copies_reuse_their_arrays(mode):
    reusing = makers(reuse_buffers=True)
    lines = collect(lambda: SyncVectorEnv(reusing, autoreset_mode=mode, copy=False), 448, 56)
    assert_exact(lines, [make() for make in makers()])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("NextStep", {"copy": False}),
        ("SameStep", {}),
        ("SameStep", {"shared_memory": False, "copy": False}),
        ("Disabled", {"copy": False}),
        ("Disabled", {"shared_memory": False}),
    ],
)
def test_async_vector_env(mode, options):
    lines = collect(lambda: FORKED(makers(), autoreset_mode=mode, **options), 224, 56)
    assert [len(line) for line in lines] == [56] * COPIES
    assert_exact(lines, [make() for make in makers()])


@pytest.mark.parametrize(
    "make",
    [
        partial(ForgetfulSync, autoreset_mode="NextStep"),
        partial(ForgetfulSync, autoreset_mode="NextStep", copy=False),
        pytest.param(partial(FORKED, autoreset_mode="NextStep", shared_memory=False), marks=pytest.mark.processes),
    ],
    ids=["sync", "sync-view", "async-pipe"],
)
@pytest.mark.parametrize("frames", [4, 56, 60, 220])
def test_masked_source_meets_its_budget_exactly(make, frames):
    # Copy 0 spends every second step on a reset: the rows that are none do not count.
    lines = collect(lambda: make(makers()), frames, 56)
    assert_exact(lines, [make_one() for make_one in makers()])
    assert frames < 100 or len(lines[0]) < len(lines[3])


def test_masked_source_marks_rows_that_are_no_transition():
    env = ForgetfulSync([partial(CountingEnv, 0, (2,))], autoreset_mode="NextStep")
    with Collector(env, act, frames_per_batch=6, total_frames=7) as collector:
        first, second, third = collector
    env.close()
    assert first["collector", "mask"].tolist() == [[True, True, False, True, True, False]]
    assert first["collector", "traj_ids"].tolist() == [[0, 0, -1, 1, 1, -1]]
    assert not first["next", "reward"][0, 2].any()
    assert second["collector", "mask"].tolist() == [[True, True, False]]  # 3 frames were left, and one step gave none
    assert third["collector", "mask"].tolist() == [[True]]


def test_masked_source_gives_no_batch_without_a_transition():
    env = ForgetfulSync([partial(CountingEnv, 0, (2,))], autoreset_mode="NextStep")
    with Collector(env, act, frames_per_batch=1, total_frames=5) as collector:
        batches = list(collector)
    env.close()
    assert [batch["observation"][0, 0].tolist() for batch in batches] == [[0, n // 2, n % 2] for n in range(5)]


def test_cartpoles_own_vector_env_is_masked_and_exact():
    env = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")
    with Collector(env, frames_per_batch=96, total_frames=300, seed=0) as collector:
        batches = list(collector)
    env.close()
    stream = torch.cat(batches, 1)
    mask = stream["collector", "mask"]
    assert int(mask.sum()) == 300
    after_end = stream["next", "done"][:, :-1, 0]
    reset_rows = after_end & mask[:, :-1]
    assert reset_rows.any()
    assert not mask[:, 1:][reset_rows].any()
    # CartPole begins within 0.05 of the origin, and ends far from it
    begun = stream["observation"][stream["is_init"][..., 0] & mask]
    assert begun.abs().max() <= 0.05
    ended = stream["next", "observation"][stream["next", "terminated"][..., 0] & mask]
    assert ((ended[:, 0].abs() > 2.4) | (ended[:, 2].abs() > 0.2094)).all()


@pytest.mark.parametrize("frames_per_batch", [4, 56, 512])
def test_batch_size_does_not_change_the_stream_of_counting_envs(frames_per_batch):
    assert_exact(collect(makers(), 512, frames_per_batch), [make() for make in makers()])


def test_batch_size_does_not_change_what_a_sampling_policy_meets():
    def stream(frames_per_batch: int) -> TensorDictBase:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

        def policy(observation):
            return {"logits": net(observation)}

        options = {"num_envs": 8, "total_frames": 1024, "seed": 5}
        with Collector("CartPole-v1", policy, frames_per_batch=frames_per_batch, **options) as collector:
            return torch.cat(list(collector), 1)

    small, large = stream(56), stream(512)
    assert small["next", "done"].sum() > 8
    assert set(small.keys(True, True)) == set(large.keys(True, True))
    for key in small.keys(True, True):
        if key == "log_prob":  # summed over rows in another order
            torch.testing.assert_close(small[key], large[key])
        else:
            assert torch.equal(small[key], large[key]), key


def test_the_policy_sees_the_reset_observation_first():
    seen: list[torch.Tensor] = []

    def watch(observation):
        seen.append(observation.clone())
        return act(observation)

    lines = collect(makers(), 112, 56, policy=watch)
    inputs = torch.stack(seen, 1)
    assert [[row[0] for row in line] for line in lines] == inputs.tolist()
    for line in lines:
        assert all(row[0][2] == 0 for row in line if row[7])  # first rows are of step 0
        assert all(row[7] for row in line if row[0][2] == 0)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_cut_episodes_are_truncated_with_their_true_successor(limit):
    lines = collect(makers("terminated"), 448, 56, rollout=RolloutConfig(max_frames_per_traj=limit))
    for line, lengths in zip(lines, LENGTHS, strict=True):
        for observation, _, _, successor, terminated, truncated, done, _, _ in line:
            length = lengths[int(observation[1]) % len(lengths)]
            assert successor == [observation[0], observation[1], observation[2] + 1]
            assert terminated == (successor[2] == length)
            assert truncated == (successor[2] == limit)
            assert done == (terminated or truncated)


def test_marked_batch_edges_begin_a_trajectory_but_no_episode():
    rollout = RolloutConfig(set_truncated=True)
    with Collector([partial(CountingEnv, 0, (5,))], act, frames_per_batch=4, rollout=rollout) as collector:
        first, second = collector.collect(), collector.collect()
    assert first["next", "truncated"][0, :, 0].tolist() == [False, False, False, True]
    assert not first["next", "terminated"].any()
    assert first["next", "done"][0, -1].item()
    assert second["collector", "traj_ids"].tolist() == [[1, 2, 2, 2]]
    assert second["is_init"][0, :, 0].tolist() == [False, True, False, False]
    assert second["observation"][0, 0].tolist() == first["next", "observation"][0, -1].tolist() == [0, 0, 4]
    assert second["next", "terminated"][0, 0].item()  # the episode went on to its own end
