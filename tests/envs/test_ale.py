"""ALE's own vector env: its two modes, seeds, masks, and what would hang or be lost."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from lit_collect import Collector, RolloutConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.envs.vector_factory import VectorEnvFactory
from lit_collect.errors import FrameContractError
from lit_collect.testing import CountingEnv

ale_py = pytest.importorskip("ale_py")
gymnasium.register_envs(ale_py)

COPIES = 3
# Episodes of 20 steps of 4 frames, less the frames that pass before the policy acts.
SHORT = {"max_num_frames_per_episode": 80, "noop_max": 6, "num_threads": 2, "use_fire_reset": False}


@pytest.fixture
def make() -> Iterator[Callable[..., VectorEnvAdapter]]:
    """Makes adapters of short Pongs, and closes them."""
    made: list[VectorEnvAdapter] = []

    def make(mode: str = "NextStep", *, adapter: dict | None = None, **options: Any) -> VectorEnvAdapter:
        given = {**SHORT, "repeat_action_probability": 0.0, **options}
        env = gymnasium.make_vec("ALE/Pong-v5", num_envs=COPIES, autoreset_mode=AutoresetMode(mode), **given)
        made.append(VectorEnvAdapter(env, **(adapter or {})))
        return made[-1]

    yield make
    for env in made:
        env.close()


def stream(env: VectorEnvAdapter, steps: int = 60) -> list[list[tuple]]:
    """Valid rows of every copy: what was seen, got and came next, as bytes."""
    rows: list[list[tuple]] = [[] for _ in range(COPIES)]
    (seen,) = env.reset([5, 9, 13])
    for _ in range(steps):
        out = env.step((np.full(COPIES, 2),))
        for i in np.flatnonzero(out.valid):
            flags = float(out.reward[i]), bool(out.terminated[i]), bool(out.truncated[i])
            rows[i].append((seen[i].tobytes(), *flags, out.next_obs[0][i].tobytes()))
        seen = out.obs[0]
    return rows


def test_rows_are_equal_whether_ale_resets_in_the_step_after_or_in_the_same_or_when_told(make, monkeypatch):
    told = make("NextStep")
    assert not told.may_mask
    monkeypatch.setattr("lit_collect.envs.vector_quirks._ALE_RESETS_COPIES", (99,))
    waiting = make("NextStep")
    assert waiting.may_mask
    same = make("SameStep")
    expected = stream(told)
    assert [sum(row[3] for row in rows) for rows in expected] == [3, 3, 3]
    assert not any(row[2] for rows in expected for row in rows)
    assert stream(same) == expected
    for rows, all_rows in zip(stream(waiting), expected, strict=True):
        assert len(rows) in (57, 58)  # of 60; the last episode may have ended too late to show
        assert rows == all_rows[: len(rows)]


def test_episodes_that_end_with_a_life_go_on_with_the_same_game(make):
    lives = {
        "episodic_life": True,
        "use_fire_reset": True,
        "max_num_frames_per_episode": 108_000,
        "repeat_action_probability": 0.0,
    }
    env = VectorEnvAdapter(
        gymnasium.make_vec("ALE/Breakout-v5", num_envs=COPIES, **{**SHORT, **lives}), info_keys=["lives"]
    )
    _, before, _ = env.reset([5, 9, 13])
    ended = np.zeros(COPIES, bool)
    for _ in range(300):
        out = env.step((np.full(COPIES, 2),))
        ended |= out.terminated
        assert (out.next_obs[1][out.terminated] < before[out.terminated]).all()
        before = out.obs[1]
    assert ended.all()
    env.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_infos_follow_their_observation(mode, make):
    env = make(mode, adapter={"info_keys": ["episode_frame_number:int64"]})
    _, before, _ = env.reset([5, 9, 13])
    ends = 0
    for _ in range(40):
        out = env.step((np.zeros(COPIES, np.int64),))
        done = out.truncated
        after, reported = out.next_obs[1], out.next_obs[2]
        assert (after[~done] == before[~done] + 4).all()
        if mode == "NextStep":
            assert (after[done] >= 80).all()
        else:  # ALE does not say what belongs to the terminal observation
            assert not reported[done].any()
        assert (out.obs[1][done] <= 6).all()
        ends += int(done.sum())
        before = out.obs[1]
    assert ends == 6


def test_every_copy_has_a_seed_of_its_own(make):
    env = make()
    (first,) = env.reset([5, 9, 13])
    others = [env.reset([5, 9, seed])[0] for seed in range(14, 19)]  # some of which begin alike
    assert np.array_equal(first, env.reset([5, 9, 13])[0])
    assert all(np.array_equal(first[:2], other[:2]) for other in others)
    assert not all(np.array_equal(first[2], other[2]) for other in others)


def test_single_copies_can_be_reset(make):
    env = make()
    (first,) = env.reset([5, 9, 13])
    (moved,) = env.step((np.full(COPIES, 2),)).obs
    (partly,) = env.reset([None, 9, None], np.array([False, True, False]))
    assert np.array_equal(partly[1], first[1])
    assert np.array_equal(partly[[0, 2]], moved[[0, 2]])


def test_max_frames_per_traj_cuts_episodes(make):
    env = make(adapter={"max_frames_per_traj": 5})
    env.reset([1, 2, 3])
    outs = [env.step((np.zeros(COPIES, np.int64),)) for _ in range(10)]
    assert [out.truncated.tolist() for out in outs] == [[t in (4, 9)] * COPIES for t in range(10)]


@pytest.mark.parametrize("wrong", [6, -1, 99])
def test_an_action_out_of_range_is_refused_before_the_env_moves(wrong):
    """In ALE itself, `step` would never return."""

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0, wrong, 0])

    env = gymnasium.make_vec("ALE/Pong-v5", num_envs=COPIES, **SHORT)
    with Collector(env, policy, frames_per_batch=6, total_frames=6, seed=0) as collector:
        with pytest.raises(
            FrameContractError, match=f"action of env copy 1 is out of range : expected 0 to 5, got {wrong}"
        ):
            next(collector)
        assert collector.statistics()["frames_stepped"] == 0
    env.close()


def test_a_batch_holds_images_as_they_are_and_rewards_as_floats():
    factory = VectorEnvFactory("ALE/Pong-v5", COPIES, make_kwargs=SHORT)
    with Collector(factory, frames_per_batch=90, total_frames=180, seed=0) as collector:
        assert collector.num_envs == COPIES
        first, second = list(collector)
    assert first.shape == (COPIES, 30)
    assert first["observation"].shape == (COPIES, 30, 4, 84, 84)
    assert first["observation"].dtype == torch.uint8
    assert first["next", "reward"].dtype == torch.float32
    assert "mask" not in first["collector"]
    ends = first["next", "done"][:, :-1, 0]
    assert ends.any()
    follows = (first["next", "observation"][:, :-1] == first["observation"][:, 1:]).flatten(2).all(-1)
    assert (follows | ends).all()
    assert torch.equal(
        first["next", "observation"][:, -1][~first["next", "done"][:, -1, 0]],
        second["observation"][:, 0][~first["next", "done"][:, -1, 0]],
    )


def test_a_pool_that_hands_out_some_copies_at_a_time_is_refused():
    env = gymnasium.make_vec("ALE/Pong-v5", num_envs=COPIES, batch_size=2, **SHORT)
    with pytest.raises(ValueError, match=r"hands out 2 of its 3 copies at a time : expected all .* got batch_size=2"):
        VectorEnvAdapter(env)
    env.close()


def test_a_mode_that_ale_is_not_in_is_refused():
    env = gymnasium.make_vec("ALE/Pong-v5", num_envs=COPIES, **SHORT)
    with pytest.raises(ValueError, match=r"autoreset does not fit .* expected 'NextStep' or None, got 'SameStep'"):
        VectorEnvAdapter(env, autoreset="SameStep")
    env.close()


def test_the_mode_that_ale_writes_into_the_base_class_does_no_harm(make):
    make("SameStep")
    assert VectorEnv.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP  # upstream: for all vector envs
    assert make("NextStep").mode is AutoresetMode.NEXT_STEP
    assert VectorEnvAdapter(SyncVectorEnv([CountingEnv])).mode is AutoresetMode.NEXT_STEP

    class Silent(VectorEnv):
        num_envs = 1

    with pytest.raises(ValueError, match="does not say how it resets"):
        VectorEnvAdapter(Silent())


def test_statistics_around_ale_are_kept_right_by_masked_rows():
    env = gymnasium.wrappers.vector.RecordEpisodeStatistics(gymnasium.make_vec("ALE/Pong-v5", num_envs=COPIES, **SHORT))
    adapter = VectorEnvAdapter(env)
    assert adapter.may_mask
    adapter.reset([5, 9, 13])
    lengths = np.zeros(COPIES)
    counted = []
    for _ in range(45):
        out = adapter.step((np.zeros(COPIES, np.int64),))
        lengths += out.valid
        counted += lengths[out.truncated].tolist()
        lengths[out.truncated] = 0
    assert len(counted) == 6
    assert sorted(env.length_queue) == sorted(counted)
    adapter.close()


def test_closing_twice_is_fine_and_a_live_pool_stays_open(make):
    env = make()
    env.close()
    env.close()
    live = gymnasium.make_vec("ALE/Pong-v5", num_envs=COPIES, **SHORT)
    built = resolve_env(live).build(None, rollout=RolloutConfig())
    built.reset([1, 2, 3])
    built.close()
    assert live.step(np.zeros(COPIES, np.int64))[0].shape == (COPIES, 4, 84, 84)
    live.close()


def test_continuous_actions_travel(make):
    env = make(continuous=True)
    env.reset([1, 2, 3])
    assert env.step((np.zeros((COPIES, 3), np.float32),)).valid.all()
