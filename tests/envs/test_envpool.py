"""envpool: rows that are spent on resetting, seeds that are taken when it is made, and kinds that are refused."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lit_collect import Collector, RolloutConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.envs.vector_factory import VectorEnvFactory
from lit_collect.errors import FrameContractError

envpool = pytest.importorskip("envpool")

MAKE = {"env_type": "gymnasium", "seed": 7, "num_threads": 1}


@pytest.fixture
def make() -> Iterator[Callable[..., VectorEnvAdapter]]:
    """Makes adapters of pools, and closes them."""
    made: list[VectorEnvAdapter] = []

    def make(task: str = "CartPole-v1", *, adapter: dict | None = None, **options: Any) -> VectorEnvAdapter:
        made.append(VectorEnvAdapter(envpool.make(task, **{**MAKE, "num_envs": 4, **options}), **(adapter or {})))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_rows_spent_on_resetting_are_masked_and_the_others_follow_the_physics(make):
    env = make()
    assert env.may_mask
    (obs,) = env.reset([1, 2, 3, 4])
    spent = 0
    for _ in range(60):
        out = env.step((np.ones(4, np.int64),))
        for i in np.flatnonzero(out.valid):  # position moves by 0.02 times velocity
            assert out.next_obs[0][i, 0] == pytest.approx(obs[i, 0] + 0.02 * obs[i, 1], abs=1e-6)
        assert (np.abs(out.obs[0][~out.valid]) <= 0.05).all()
        assert out.reward.tolist() == out.valid.astype(float).tolist()
        assert out.is_init.tolist() == (~out.valid).tolist()
        spent += int((~out.valid).sum())
        obs = out.obs[0]
    assert spent > 8


def test_infos_follow_their_observation(make):
    env = make(adapter={"info_keys": ["elapsed_step:int64", "players.env_id:int64"]})
    _, before, reported, copies, _ = env.reset()
    assert (before.tolist(), reported.all(), copies.tolist()) == ([0] * 4, True, [0, 1, 2, 3])
    for _ in range(30):
        out = env.step((np.ones(4, np.int64),))
        expected = np.where(out.valid, before + 1, 0)
        assert out.obs[1].tolist() == expected.tolist()
        before = out.obs[1]


def test_a_time_limit_truncates(make):
    env = make("Pendulum-v1", max_episode_steps=3)
    env.reset()
    outs = [env.step((np.zeros((4, 1), np.float32),)) for _ in range(4)]
    assert [out.truncated.tolist() for out in outs] == [[t == 2] * 4 for t in range(4)]
    assert not any(out.terminated.any() for out in outs)
    assert not outs[3].valid.any()


def test_an_end_at_the_time_limit_is_reported_as_truncated_alone(make):
    """Upstream: Gymnasium sets both flags, and the value of the successor is then known to be 0."""
    env = make(max_episode_steps=9)
    env.reset()
    ends = set()
    for _ in range(60):
        out = env.step((np.ones(4, np.int64),))
        fallen = np.abs(out.next_obs[0][:, 2]) > 12 * 2 * np.pi / 360
        ends |= {(bool(a), bool(b)) for a, b in zip(out.terminated[fallen], out.truncated[fallen], strict=True)}
    assert ends == {(True, False), (False, True)}


def test_seeds_are_those_of_making_it_and_nothing_warns(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, other = (make().reset(seeds)[0] for seeds in ([1, 2, 3, 4], [9, 9, 9, 9]))
    assert np.array_equal(first, other)
    assert not np.array_equal(first, make(seed=8).reset([1, 2, 3, 4])[0])


def test_equal_seeds_in_every_worker_are_told(make):
    with pytest.warns(
        UserWarning, match=r"CartPole.*\(num_envs=4\) in every worker get the same seeds .* another seed="
    ):
        make(seed=42, adapter={"first": 4})
    make(adapter={"first": 4})
    make(env_seed=[1, 2, 3, 4], seed=42, adapter={"first": 4})


def test_a_batch_is_whole_and_frames_are_counted_exactly():
    factory = VectorEnvFactory("envpool.make", 4, make_kwargs={"task_id": "CartPole-v1", **MAKE})
    with Collector(factory, frames_per_batch=200, total_frames=400, seed=0) as collector:
        batches = list(collector)
        assert collector.num_envs == 4
        assert collector.statistics()["frames_yielded"] == 400
    masks = [batch["collector", "mask"] for batch in batches]
    assert sum(int(mask.sum()) for mask in masks) == 400
    assert not all(mask.all() for mask in masks)
    for batch, mask in zip(batches, masks, strict=True):
        assert (batch["next", "reward"][..., 0] == mask).all()


def test_single_spaces_are_those_of_a_copy(make):
    env = make("Pendulum-v1")
    assert env.observation_spec.leaves[0].shape == (3,)
    assert env.action_spec.leaves[0].shape == (1,)


def test_a_wrong_number_of_actions_does_not_reach_the_pool(make):
    """It would end the process."""
    env = make()
    env.reset()
    with pytest.raises(ValueError, match="expected one action for each of 4 env copies, got 3"):
        env.step((np.zeros(3, np.int64),))
    assert env.step((np.zeros(4, np.int64),)).valid.all()


def test_an_action_out_of_range_does_not_reach_the_pool():
    def policy(observation: torch.Tensor) -> torch.Tensor:
        return torch.full((len(observation),), 2)

    make = partial(envpool.make, "CartPole-v1", num_envs=2, **MAKE)
    with (
        Collector(make, policy, frames_per_batch=4, total_frames=4, seed=0) as collector,
        pytest.raises(FrameContractError, match="action of env copy 0 is out of range : expected 0 to 1, got 2"),
    ):
        next(collector)


def test_a_pool_that_hands_out_some_copies_at_a_time_is_refused():
    make = partial(envpool.make, "CartPole-v1", num_envs=4, batch_size=3, **MAKE)
    with pytest.raises(ValueError, match=r"EnvPool\(num_envs=4\) hands out 3 of its 4 copies .* got batch_size=3"):
        resolve_env(make).build(None, rollout=RolloutConfig())


@pytest.mark.parametrize("live", [False, True], ids=["made", "live"])
def test_env_type_dm_is_refused_with_the_reason(live):
    make = partial(envpool.make, "CartPole-v1", num_envs=2, **{**MAKE, "env_type": "dm"})
    with pytest.raises(
        TypeError, match=r"env_type='dm' of envpool .* as if it had terminated : expected env_type='gymn"
    ):
        resolve_env(make() if live else make).build(None, rollout=RolloutConfig())
    factory = VectorEnvFactory("envpool.make", 2, make_kwargs={"task_id": "CartPole-v1", "env_type": "dm"})
    with pytest.raises(TypeError, match="env_type='dm' of envpool"):
        factory()


def test_a_live_pool_says_its_copies_in_a_few_words():
    live = envpool.make("CartPole-v1", num_envs=3, **MAKE)
    source = resolve_env(live)
    assert (source.num_envs, source.live) == (3, True)
    assert source.description == "CartPoleGymnasiumEnvPool(num_envs=3)"
    with pytest.raises(
        ValueError, match=r"max_frames_per_traj cannot be had from CartPoleGymnasiumEnvPool\(num_envs=3\)"
    ):
        source.build(None, rollout=RolloutConfig(max_frames_per_traj=3))
    live.close()
