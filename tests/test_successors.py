"""Compact batches: the same as full ones to the bit, in half the memory."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lit_collect import Collector, FrameContractError, ProcessBackend, RolloutConfig
from lit_collect.frames import SUCCESSORS, check_batch, flatten_rows
from lit_collect.successors import SuccessorTable, restore_successors, table_of
from lit_collect.testing import CountingEnv


class Pictures(gymnasium.Env):
    """A dict observation whose picture is filled with (episode, step); episodes of 1 to 5 steps."""

    observation_space = spaces.Dict(
        {"picture": spaces.Box(0, 255, (4, 8, 8), np.uint8), "deep": spaces.Dict({"step": spaces.Discrete(9)})}
    )
    action_space = spaces.Discrete(2)

    def __init__(self):
        self._episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._episode, self._t = self._episode + 1, 0
        return self._seen(), {"age": 0}

    def step(self, action):
        self._t += 1
        return self._seen(), 1.0, self._t > self._episode % 5, False, {"age": self._t}

    def _seen(self):
        return {
            "picture": np.full((4, 8, 8), self._episode * 10 % 250 + self._t, np.uint8),
            "deep": {"step": self._t},
        }


def batches(env, compact, *, backend="direct", frames=56, count=4, **rollout):
    config = RolloutConfig(compact_obs=compact, **rollout)
    with Collector(env, num_envs=4, frames_per_batch=frames, rollout=config, seed=3, backend=backend) as collector:
        return [collector.collect() for _ in range(count)]


def modes():
    for mode in AutoresetMode:
        yield lambda mode=mode: SyncVectorEnv([CountingEnv] * 4, autoreset_mode=mode)
    yield lambda: gymnasium.make_vec("CartPole-v1", num_envs=4)


@pytest.mark.parametrize("env", [Pictures, CountingEnv, *modes()])
@pytest.mark.parametrize("frames", [4, 56])
def test_restored_batch_equals_the_full_one(env, frames):
    for full, compact in zip(
        batches(env, compact=False, frames=frames), batches(env, compact=True, frames=frames), strict=True
    ):
        check_batch(compact)
        restored = restore_successors(compact)
        check_batch(restored)
        assert set(restored.keys(True, True)) == set(full.keys(True, True))
        assert (restored == full).all()


@pytest.mark.parametrize("backend", [ProcessBackend(num_collectors=2), ProcessBackend(num_collectors=1)], ids=str)
def test_batches_of_workers_equal_those_of_this_process(backend):
    here = batches(Pictures, compact=True)
    for full, compact in zip(here, batches(Pictures, compact=True, backend=backend), strict=True):
        # two workers draw other random actions, which the env ignores
        assert (restore_successors(compact).exclude("action") == restore_successors(full).exclude("action")).all()


def test_batches_of_asynchronous_workers_are_whole():
    for compact in batches(Pictures, compact=True, backend=ProcessBackend(num_collectors=2, sync=False), count=6):
        check_batch(restore_successors(compact))


def test_settings_that_cut_episodes_and_name_values_go_along():
    options = {"max_frames_per_traj": 3, "info_keys": ("age:int64",), "set_truncated": True}
    full, compact = (batches(Pictures, compact=flag, **options) for flag in (False, True))
    assert (torch.cat([restore_successors(one) for one in compact], 1) == torch.cat(full, 1)).all()
    assert ("next", "age") in compact[0].keys(include_nested=True)


def test_compact_batch_takes_half_the_memory():
    def size(batch):
        table = table_of(batch)
        extra = sum(value.nbytes for value in table.values.values()) if table else 0
        return sum(leaf.nbytes for leaf in batch.values(True, True) if isinstance(leaf, torch.Tensor)) + extra

    env = lambda: CountingEnv(lengths=(50,))  # noqa: E731  # few ends
    full, compact = (batches(env, flag, frames=400, count=1)[0] for flag in (False, True))
    observed = 2 * full["observation"].nbytes
    assert size(full) - size(compact) > 0.45 * observed


def test_unbatched_batch_is_restored():
    with Collector(CountingEnv, frames_per_batch=20, rollout=RolloutConfig(compact_obs=True), seed=0) as collector:
        batch = restore_successors(collector.collect())
    assert batch["next", "observation"].shape[:1] == (20,)
    check_batch(batch)


def test_compact_batch_stays_compact_when_it_is_restored():
    (batch,) = batches(Pictures, compact=True, count=1)
    before = set(batch.keys(True, True))
    assert ("next", "picture") in restore_successors(batch).keys(True, True)
    assert set(batch.keys(True, True)) == before


def test_replay_buffer_is_given_whole_rows():
    rows = []
    config = RolloutConfig(compact_obs=True)
    with Collector(CountingEnv, frames_per_batch=12, rollout=config, seed=0, replay_buffer=rows) as collector:
        batch = collector.collect()
    assert torch.equal(torch.stack(rows)["next", "observation"], restore_successors(batch)["next", "observation"])


def test_full_batch_is_returned_as_it_is():
    (batch,) = batches(CountingEnv, compact=False, count=1)
    assert restore_successors(batch) is batch


def test_rows_that_were_picked_cannot_be_restored():
    (batch,) = batches(CountingEnv, compact=True, count=1)
    with pytest.raises(FrameContractError, match="call restore_successors before rows are picked or rearranged"):
        restore_successors(batch[:, 3:])
    assert SUCCESSORS not in flatten_rows(batch).keys(include_nested=True)


def test_check_finite_looks_at_the_table():
    class Broken(CountingEnv):
        def step(self, action):
            obs, *rest = super().step(action)
            return (np.full_like(obs, np.nan) if rest[1] or rest[2] else obs), *rest

    with pytest.raises(FrameContractError, match="next observation of env copy 0 is not finite at step"):
        batches(lambda: Broken(lengths=(3,)), compact=True, check_finite=True)


def test_tables_join_with_their_copies_counted_on():
    def table(value):
        return SuccessorTable(
            shape=(2, 3),
            copies=torch.tensor([0, 1]),
            steps=torch.tensor([2, 2]),
            values={("observation",): torch.full((2, 1), float(value))},
        )

    joined = SuccessorTable.joined([table(1), table(2)])
    assert joined.shape == (4, 3)
    assert joined.copies.tolist() == [0, 1, 2, 3]
    assert joined.values["observation",].flatten().tolist() == [1, 1, 2, 2]
