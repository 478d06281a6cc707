"""`DirectEnv` against a plain loop over the same envs."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.spaces import ActionEncoder
from lit_collect.errors import FrameContractError, WorkerFailedError
from lit_collect.testing import CountingEnv, FailingEnv, ScriptedEnv


def zeros(env: DirectEnv) -> tuple[np.ndarray, ...]:
    return (np.zeros(env.num_envs, np.int64),)


@pytest.mark.parametrize("reuse_buffers", [False, True])
@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_rows_equal_a_plain_loop(length, ends, reuse_buffers, collect, oracle):
    makers = [partial(CountingEnv, i, (length, 2), ends=ends, reuse_buffers=reuse_buffers) for i in range(3)]
    rows = collect(DirectEnv([make() for make in makers]), 110)
    assert rows == [oracle(make(), 110) for make in makers]
    assert rows[0][length - 1][2:4] == (ends != "truncated", ends != "terminated")


def test_what_was_handed_out_does_not_change_later():
    env = DirectEnv([CountingEnv(0, (2,), reuse_buffers=True)])
    first = env.reset()
    out = env.step(zeros(env))
    kept = [leaf.copy() for leaf in (*first, *out.obs, *out.next_obs)]
    for _ in range(3):
        env.step(zeros(env))
    assert all(np.array_equal(old, now) for old, now in zip(kept, (*first, *out.obs, *out.next_obs), strict=True))


@pytest.mark.parametrize("observe", ["plain", "scalar"])
def test_max_frames_per_traj_truncates_and_resets_at_the_limit(observe, collect):
    envs = [CountingEnv(0, (50,)), CountingEnv(1, (1, 50))]
    if observe == "scalar":
        envs = [gymnasium.wrappers.TransformObservation(env, lambda o: o[2], spaces.Box(0, 99, ())) for env in envs]
    long, mixed = collect(DirectEnv(envs, max_frames_per_traj=3), 7)
    assert [row.truncated for row in long] == [False, False, True, False, False, True, False]
    assert [row.terminated for row in long] == [False] * 7
    assert [(row.terminated, row.truncated) for row in mixed[:4]] == [(True, False)] + [(False, False)] * 2 + [
        (False, True)
    ]


def test_reset_begins_the_count_of_max_frames_anew():
    env = DirectEnv([CountingEnv(0, (50,))], max_frames_per_traj=2)
    env.reset()
    env.step(zeros(env))
    env.reset()
    assert [bool(env.step(zeros(env)).truncated[0]) for _ in range(2)] == [False, True]


def test_reset_in_mid_episode_and_twice_begins_anew():
    env = DirectEnv([CountingEnv(0, (9,))])
    env.reset()
    env.step(zeros(env))
    env.reset()
    assert env.reset()[0].tolist() == [[0, 2, 0]]
    assert env.step(zeros(env)).next_obs[0].tolist() == [[0, 2, 1]]


def test_seeds_reach_the_copies_of_the_mask_and_are_not_given_again():
    envs = [CountingEnv(i, (1,)) for i in range(3)]
    env = DirectEnv(envs)
    env.reset([7, None, 9])
    env.reset([1, 2, 3], np.array([False, True, False]))
    env.step(zeros(env))
    assert [copy.seeds for copy in envs] == [[7, None], [None, 2, None], [9, None]]


def test_a_masked_reset_right_after_a_reset_returns_what_the_policy_saw():
    env = DirectEnv([CountingEnv(i, (9,)) for i in range(2)])
    env.reset()
    assert env.reset(None, np.array([True, False]))[0].tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_masked_reset_in_mid_episode_returns_what_the_policy_saw():
    env = DirectEnv([CountingEnv(i, (9,)) for i in range(2)])
    env.reset()
    env.step(zeros(env))
    assert env.reset(None, np.array([True, False]))[0].tolist() == [[0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    "reward", [1, True, 2.5, np.float32(2.5), np.float64(2.5), np.array(2.5), np.int8(-3)], ids=repr
)
def test_every_kind_of_reward_is_stored_unaltered(reward):
    env = DirectEnv([ScriptedEnv([[0.0], [1.0]], [reward])])
    env.reset()
    out = env.step(zeros(env))
    assert out.reward.dtype == np.float32
    assert out.reward.tolist() == [float(reward)]


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (spaces.Discrete(9, start=2), [2, 5, 9]),
        (spaces.Box(0, 1, (), np.float32), [0.0, 0.5, np.float64(1.0)]),
        (spaces.Box(0, 255, (2,), np.uint8), [np.full(2, k, np.uint8) for k in (0, 7, 255)]),
        (spaces.Box(-9, 9, (2,), np.float64), [np.full(2, k / 4) for k in range(3)]),
        (spaces.MultiBinary(2), [np.array([k, 1], np.int8) for k in (0, 1, 0)]),
        (spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (1,)))), [(k, np.ones(1, np.float32)) for k in range(3)]),
        (
            spaces.Dict({"a.b": spaces.Dict({"c": spaces.Discrete(3)}), "d": spaces.Box(0, 9, (1,))}),
            [{"a.b": {"c": np.int64(k)}, "d": np.array([k], np.float32)} for k in range(3)],
        ),
    ],
    ids=["discrete", "scalar", "uint8", "float64", "binary", "tuple", "nested"],
)
def test_every_kind_of_observation_arrives_as_it_was(space, values, collect):
    env = DirectEnv([ScriptedEnv(values, [1, 2], observation_space=space)])
    flat = [tuple(np.asarray(leaf).tolist() for leaf in env.observation_spec.flatten(value)) for value in values]
    (rows,) = collect(env, 4)
    assert [row.obs for row in rows] == [flat[0], flat[1], flat[0], flat[1]]
    assert [row.next_obs for row in rows] == [flat[1], flat[2], flat[1], flat[2]]


def test_float64_observations_are_kept_on_request():
    env = DirectEnv([ScriptedEnv([np.array([0.1]), np.array([0.2])], [0])], keep_float64=True)
    assert env.reset()[0].dtype == np.float64
    assert env.reset()[0][0, 0] == 0.1


def test_every_copy_receives_its_own_nested_action_in_the_dtype_of_its_space():
    space = spaces.Dict({"go": spaces.Discrete(3, start=1), "push": spaces.Box(-1, 1, (2,))})
    envs = [CountingEnv(i, action_space=space) for i in range(2)]
    env = DirectEnv(envs)
    env.reset()
    raw = np.array([[0.5, -7], [1, 0]], np.float32)
    env.step(ActionEncoder(env.action_spec)([np.array([0, 2]), raw]))
    assert [copy.actions[0]["go"] for copy in envs] == [1, 3]
    assert [copy.actions[0]["push"].tolist() for copy in envs] == [[0.5, -1], [1, 0]]
    assert all(copy.actions[0]["push"].dtype == np.float32 for copy in envs)
    assert raw.tolist() == [[0.5, -7], [1, 0]]


def test_an_env_that_changes_its_action_cannot_reach_the_raw_sample():
    class Eraser(CountingEnv):
        def step(self, action: Any) -> Any:
            action[:] = 9
            return super().step(action)

    env = DirectEnv([Eraser(action_space=spaces.Box(-1, 1, (2,)))])
    env.reset()
    raw = np.zeros((1, 2), np.float32)
    env.step(ActionEncoder(env.action_spec)([raw]))
    assert raw.tolist() == [[0, 0]]


def test_spaces_that_differ_are_named():
    with pytest.raises(ValueError, match=r"action_space of env copy 1 differs : expected Discrete.2. as in copy 0"):
        DirectEnv([CountingEnv(0), CountingEnv(1, action_space=spaces.Discrete(3))])


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_error_of_an_env_names_copy_call_and_error(where):
    env = DirectEnv([CountingEnv(0), FailingEnv(where, at=2, error=ValueError("lost"))])
    env.reset()
    env.step(zeros(env))
    with pytest.raises(WorkerFailedError, match=f"^env copy 1 failed in {where}: ValueError: lost$") as caught:
        env.reset() if where == "reset" else env.step(zeros(env))
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__traceback__ is not None


def test_an_error_in_the_reset_after_an_episode_is_named():
    env = DirectEnv([FailingEnv("reset", at=2, error=KeyError("door"), lengths=(1,))])
    env.reset()
    with pytest.raises(WorkerFailedError, match="env copy 0 failed in reset: KeyError: 'door'"):
        env.step(zeros(env))


@pytest.mark.parametrize(
    ("where", "answer", "message"),
    [
        ("step", "shape", r"env copy 1, step: observation has a wrong shape : expected float32 with shape \(3,\)"),
        ("step", "dtype", "env copy 1, step: observation has a wrong dtype : .* got float64"),
        ("step", "none", "env copy 1, step: observation is None"),
        ("step", "reward", "env copy 1, step: reward is None"),
        ("step", "tuple", r"env copy 1, step: expected .observation, reward, terminated, truncated, info"),
        ("reset", "shape", "env copy 1, reset: observation has a wrong shape"),
        ("reset", "none", "env copy 1, reset: observation is None"),
        ("reset", "tuple", r"env copy 1, reset: expected .observation, info., got tuple of 1"),
    ],
)
def test_a_malformed_answer_names_copy_and_call(where, answer, message):
    env = DirectEnv([CountingEnv(0), FailingEnv(where, at=2, answer=answer)])
    env.reset()
    env.step(zeros(env))
    with pytest.raises(FrameContractError, match=message):
        env.reset() if where == "reset" else env.step(zeros(env))


def test_a_reset_that_takes_no_seed_is_told_so():
    class Seedless(CountingEnv):
        def reset(self):
            return super().reset()

    with pytest.raises(FrameContractError, match=r"^env copy 0, reset: expected a reset that takes a seed .* 'seed'"):
        DirectEnv([Seedless()]).reset()


def test_a_reward_that_is_no_number_names_the_copy():
    env = DirectEnv([ScriptedEnv([[0.0], [1.0]], [[1, 2]])])
    env.reset()
    with pytest.raises(FrameContractError, match=r"env copy 0, step: .* number as the reward"):
        env.step(zeros(env))


def test_a_type_error_inside_an_env_is_the_envs_own():
    env = DirectEnv([FailingEnv("step", error=TypeError("no len"))])
    env.reset()
    with pytest.raises(WorkerFailedError, match="env copy 0 failed in step: TypeError: no len"):
        env.step(zeros(env))


def test_close_closes_every_copy_once_and_names_the_first_failure():
    envs = [CountingEnv(0), FailingEnv("close", error=OSError("stuck")), CountingEnv(2)]
    env = DirectEnv(envs)
    with pytest.raises(WorkerFailedError, match="env copy 1 failed in close: OSError: stuck"):
        env.close()
    env.close()
    assert [copy.closes for copy in envs] == [1, 1, 1]


def test_envs_that_are_not_owned_are_never_closed():
    copy = CountingEnv(0)
    DirectEnv([copy], owned=False).close()
    assert copy.closes == 0


def test_messages_count_copies_from_the_first_one():
    with pytest.raises(ValueError, match=r"action_space of env copy 5 differs : expected Discrete.2. as in copy 4"):
        DirectEnv([CountingEnv(), CountingEnv(action_space=spaces.Discrete(9))], first=4)
    for where in ("reset", "step"):
        env = DirectEnv([CountingEnv(), FailingEnv(where)], first=4)
        with pytest.raises(WorkerFailedError, match=f"^env copy 5 failed in {where}"):
            env.reset() and env.step(zeros(env))
    for answer, message in (((np.zeros(9), {}), "^env copy 5, reset: observation"), (None, "^env copy 5, reset: exp")):
        odd = CountingEnv()
        odd.reset = lambda *, seed=None, answer=answer: answer
        with pytest.raises(FrameContractError, match=message):
            DirectEnv([CountingEnv(), odd], first=4).reset()
    with pytest.raises(WorkerFailedError, match=r"^env copy 5 failed in close"):
        DirectEnv([CountingEnv(), FailingEnv("close")], first=4).close()
