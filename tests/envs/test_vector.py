"""`VectorEnvAdapter` against a plain loop over the same single envs."""

import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from lit_collect.envs.base import BatchedEnv
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.testing import CountingEnv

# Python warns of forking a process that has threads, and torch's are always there.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

MODES = [mode.value for mode in AutoresetMode]
KINDS = ["sync", "sync-view", "async", "async-view", "async-pipe", "async-pipe-view"]
MAKERS = [
    partial(CountingEnv, 0, (1,)),
    partial(CountingEnv, 1, (2, 1), ends="truncated"),
    partial(CountingEnv, 2, (3,), ends="both"),
    partial(CountingEnv, 3, (50, 2)),
]
STEPS = 60


def is_masked(kind: str, mode: str) -> bool:
    return mode == "NextStep" and kind.startswith("async-pipe")


def zeros(env: BatchedEnv) -> tuple[np.ndarray, ...]:
    return (np.zeros(env.num_envs, np.int64),)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_and_mode_equal_a_plain_loop(kind, mode, adapt, collect, oracle):
    env = adapt(kind, mode, MAKERS)
    rows = collect(env, STEPS)
    assert env.may_mask == is_masked(kind, mode)
    for maker, got in zip(MAKERS, rows, strict=True):
        assert got == oracle(maker(), STEPS)[: len(got)]
        assert len(got) == STEPS or env.may_mask
    wasted = [STEPS - len(got) for got in rows]
    assert wasted == ([30, 24, 15, 2] if env.may_mask else [0, 0, 0, 0])


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_envs_that_reuse_their_buffer_equal_a_plain_loop(kind, mode, adapt, collect, oracle):
    makers = [partial(CountingEnv, i, (2, 3), reuse_buffers=True) for i in range(2)]
    for maker, got in zip(makers, collect(adapt(kind, mode, makers), 20), strict=True):
        assert got == oracle(maker(), 20)[: len(got)]


@pytest.mark.parametrize("kind", ["sync", "async", "async-pipe"])
def test_same_step_warns_once_when_an_env_reuses_its_buffer(kind, adapt, collect):
    env = adapt(kind, "SameStep", [partial(CountingEnv, 0, (2,), reuse_buffers=True)])
    with pytest.warns(UserWarning, match="reuse its observation array.*NEXT_STEP or DISABLED") as caught:
        collect(env, 10)
    assert len(caught) == 1


@pytest.mark.parametrize("mode", MODES)
def test_what_was_handed_out_does_not_change_later(mode, adapt):
    env = adapt("sync-view", mode, [partial(CountingEnv, 0, (2,))])
    first = env.reset()
    out = env.step(zeros(env))
    kept = [leaf.copy() for leaf in (*first, *out.obs, *out.next_obs)]
    for _ in range(3):
        env.step(zeros(env))
    assert all(np.array_equal(old, now) for old, now in zip(kept, (*first, *out.obs, *out.next_obs), strict=True))


def test_a_next_step_reset_row_keeps_the_terminal_observation_before_it(adapt):
    env = adapt("async-pipe", "NextStep", [partial(CountingEnv, 0, (1,)), partial(CountingEnv, 1, (9,))])
    env.reset()
    ended, spent, after = (env.step(zeros(env)) for _ in range(3))
    assert ended.valid.tolist() == [True, True]
    assert ended.obs[0][0].tolist() == [0, 0, 1]
    assert spent.valid.tolist() == [False, True]
    assert spent.obs[0][0].tolist() == [0, 1, 0]
    assert spent.is_init.tolist() == [True, False]
    assert after.next_obs[0][0].tolist() == [0, 1, 1]


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_max_frames_per_traj_truncates_and_resets_at_the_limit(kind, mode, adapt, collect):
    makers = [partial(CountingEnv, 0, (50,)), partial(CountingEnv, 1, (1, 50))]
    long, mixed = collect(adapt(kind, mode, makers, max_frames_per_traj=3), 7)
    assert [row.truncated for row in long] == [False, False, True, False, False, True, False]
    assert not any(row.terminated for row in long)
    assert [row.next_obs[0][1:] for row in long[2:4]] == [[0, 3], [1, 1]]
    assert [(row.terminated, row.truncated) for row in mixed[:4]] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


@pytest.mark.parametrize(("kind", "mode"), [("sync", "SameStep"), ("async-pipe", "NextStep")])
def test_max_frames_per_traj_is_refused_where_single_copies_cannot_be_reset(kind, mode, vectorise):
    env = vectorise(kind, mode, [CountingEnv])
    with pytest.raises(ValueError, match=rf"rollout.max_frames_per_traj cannot be had .* in {env.autoreset_mode.name}"):
        VectorEnvAdapter(env, max_frames_per_traj=5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_reset_in_mid_episode_after_an_end_and_twice_begins_anew(kind, mode, adapt):
    env = adapt(kind, mode, [partial(CountingEnv, 0, (2,)), partial(CountingEnv, 1, (9,))])
    env.reset()
    env.step(zeros(env))
    env.reset()
    assert env.reset()[0][1].tolist() == [1, 2, 0]
    env.step(zeros(env))
    env.step(zeros(env))  # copy 0 has ended
    before = int(env.reset()[0][0][1])
    out = env.step(zeros(env))
    assert out.next_obs[0][1].tolist() == [1, 3, 1]
    if out.valid[0]:
        assert out.next_obs[0][0].tolist() == [0, before, 1]
    else:  # the worker resets a second time, and that is no transition
        assert out.next_obs[0][0].tolist() == [0, before + 1, 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sync", "async", "async-pipe"])
def test_a_masked_reset_leaves_the_other_copies_alone(kind, mode, adapt):
    env = adapt(kind, mode, [partial(CountingEnv, i, (9,)) for i in range(2)])
    env.reset()
    env.step(zeros(env))
    mask = np.array([False, True])
    (obs,) = env.reset([7, 8], mask)
    assert obs.tolist() == [[0, 0, 1], [1, 1, 0]]
    assert mask.tolist() == [False, True]
    assert env.step(zeros(env)).next_obs[0].tolist() == [[0, 0, 2], [1, 1, 1]]


def test_seeds_reach_each_copy_and_are_not_given_again(adapt):
    env = adapt("sync", "Disabled", [partial(CountingEnv, 0, (1,)), partial(CountingEnv, 1, (1,))])
    env.reset([11, None])
    env.step(zeros(env))
    assert [copy.seeds for copy in env.env.envs] == [[11, None], [None, None]]


def test_every_copy_receives_its_own_action(adapt):
    env = adapt("sync", "NextStep", [partial(CountingEnv, i, (9,), action_space=spaces.Discrete(9)) for i in range(3)])
    env.reset()
    env.step((np.array([4, 0, 8]),))
    assert [copy.actions for copy in env.env.envs] == [[4], [0], [8]]


def test_cartpole_vector_env_is_masked_and_never_given_a_reset_mask(monkeypatch):
    env = VectorEnvAdapter(gymnasium.make_vec("CartPole-v1", num_envs=4))
    given, reset = [], env.env.reset

    def spy(*, seed: Any = None, options: Any = None) -> Any:
        given.append(options)
        return reset(seed=seed, options=options)

    monkeypatch.setattr(env.env, "reset", spy)
    (obs,) = env.reset([5, 6, 7, 8])
    assert env.may_mask
    spent = 0
    for _ in range(60):
        out = env.step((np.ones(4, np.int64),))
        for i in range(4):
            if out.valid[i]:  # the successor follows by the env's own physics: position moves by 0.02 times velocity
                assert out.next_obs[0][i, 0] == pytest.approx(obs[i, 0] + 0.02 * obs[i, 1], abs=1e-6)
        assert (np.abs(out.obs[0][~out.valid]) <= 0.05).all()
        spent += int((~out.valid).sum())
        obs = out.obs[0]
    assert spent > 8
    assert given == [None]
    with pytest.raises(ValueError, match="cannot reset single copies"):
        env.reset(None, np.array([True, False, False, False]))
    env.close()


def test_cartpole_vector_env_takes_the_first_seed():
    env = VectorEnvAdapter(gymnasium.make_vec("CartPole-v1", num_envs=2))
    first, other, again = env.reset([5, 6])[0], env.reset([6, 6])[0], env.reset([5, 9])[0]
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    env.close()


def test_a_wrapped_vector_env_is_masked_so_that_its_statistics_stay_right(collect, oracle):
    env = VectorEnvAdapter(RecordEpisodeStatistics(SyncVectorEnv([MAKERS[2], MAKERS[3]])))
    assert env.may_mask
    for maker, got in zip(MAKERS[2:], collect(env, 20), strict=True):
        assert got == oracle(maker(), 20)[: len(got)]
    assert list(env.env.length_queue) == [3] * 5
    env.close()


def test_a_vector_env_with_a_reset_of_its_own_is_not_trusted():
    class Own(SyncVectorEnv):
        def reset(self, **kwargs):
            return super().reset(**kwargs)

    assert VectorEnvAdapter(Own([CountingEnv])).may_mask


class Both(CountingEnv):
    """Observes and takes nested values."""

    def __init__(self, index: int) -> None:
        super().__init__(index, (2,))
        self.observation_space = spaces.Dict(
            {
                "a.b": spaces.Box(-99, 99, (2,), np.float64),
                "pair": spaces.Tuple((spaces.Discrete(9), spaces.Box(-9, 9, ()))),
            }
        )
        self.action_space = spaces.Dict({"go": spaces.Discrete(3, start=1), "push": spaces.Box(-1, 1, (2,))})

    def _observe(self) -> Any:
        index, episode, step = super()._observe().tolist()
        return {"a.b": np.array([index, episode]), "pair": (int(step), np.float32(index))}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_nested_observations_and_actions_travel_whole(kind, mode, adapt, collect):
    env = adapt(kind, mode, [partial(Both, 0), partial(Both, 1)])
    action = [np.array([1, 3]), np.array([[0.5, -0.5], [1, 0]], np.float32)]
    for index, rows in enumerate(collect(env, 9, action)):
        for k, row in enumerate(rows):
            assert row.obs == ([index, k // 2], k % 2, index)
            assert row.next_obs == ([index, k // 2], k % 2 + 1, index)
    if kind.startswith("sync"):
        given = env.env.envs[1].actions[0]
        assert given["go"] == 3
        assert given["push"].tolist() == [1, 0]


def test_upstream_async_without_shared_memory_still_forgets_resets(vectorise):
    """When this fails, Gymnasium has mended defect A.6-1 and `_pending_survives_reset` must go for that version."""
    env = vectorise("async-pipe", "NextStep", [partial(CountingEnv, 0, (1,))])
    env.reset()
    env.step(np.zeros(1, np.int64))
    env.reset()
    obs = env.step(np.zeros(1, np.int64))[0]
    assert obs.tolist() == [[0, 2, 0]]  # reset once more instead of stepped


def test_nothing_warns_in_ordinary_use(adapt, collect):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(adapt("sync", "SameStep", MAKERS), 10)
