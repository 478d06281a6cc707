"""`VectorEnvAdapter` against a plain loop over the same single envs, and the upstream defects that it guards against."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from lit_collect.envs.base import BatchedEnv
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.errors import FrameContractError, WorkerFailedError
from lit_collect.testing import CountingEnv, FailingEnv

# Python warns of forking a process that has threads, and torch's are always there.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

MODES = [mode.value for mode in AutoresetMode]
KINDS = {
    "sync": partial(SyncVectorEnv, copy=True),
    "sync-view": partial(SyncVectorEnv, copy=False),
    "async": partial(AsyncVectorEnv, context="fork"),
    "async-view": partial(AsyncVectorEnv, context="fork", copy=False),
    "async-pipe": partial(AsyncVectorEnv, context="fork", shared_memory=False),
    "async-pipe-view": partial(AsyncVectorEnv, context="fork", shared_memory=False, copy=False),
}
MAKERS = [
    partial(CountingEnv, 0, (1,)),
    partial(CountingEnv, 1, (2, 1), ends="truncated"),
    partial(CountingEnv, 2, (3,), ends="both"),
    partial(CountingEnv, 3, (50, 2)),
]
STEPS = 60
Adapt = Callable[..., VectorEnvAdapter]


@pytest.fixture
def adapt() -> Iterator[Adapt]:
    """Builds adapters and closes them."""
    made = []

    def make(kind: str, mode: str, makers: Sequence[Callable[[], Any]] = MAKERS, **options: Any) -> VectorEnvAdapter:
        made.append(VectorEnvAdapter(KINDS[kind](list(makers), autoreset_mode=mode), **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def is_masked(kind: str, mode: str) -> bool:
    return mode == "NextStep" and kind.startswith("async-pipe")


def zeros(env: BatchedEnv) -> tuple[np.ndarray, ...]:
    return (np.zeros(env.num_envs, np.int64),)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_and_mode_equal_a_plain_loop(kind, mode, adapt, collect, oracle):
    env = adapt(kind, mode)
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
def test_max_frames_per_traj_is_refused_where_single_copies_cannot_be_reset(kind, mode):
    env = KINDS[kind]([CountingEnv], autoreset_mode=mode)
    with pytest.raises(ValueError, match=rf"rollout.max_frames_per_traj cannot be had .* in {env.autoreset_mode.name}"):
        VectorEnvAdapter(env, max_frames_per_traj=5)
    env.close()


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


class Maker:
    """A vector env of one's own, scripted: what step() returns, and what it says about itself."""

    def __new__(cls, answer: Any = None, metadata: dict | None = None, copies: int = 2) -> VectorEnv:
        env = type("Own", (VectorEnv,), {"metadata": metadata} if metadata is not None else {})()
        env.num_envs = copies
        env.single_observation_space, env.single_action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)
        env.reset = lambda *, seed=None, options=None: (np.zeros((copies, 1), np.float32), {})
        env.step = lambda action: answer
        return env


def answer(**changes: Any) -> tuple:
    values = {
        "obs": np.array([[1], [2]], np.float32),
        "reward": np.zeros(2),
        "terminated": np.array([True, False]),
        "truncated": np.zeros(2, bool),
        "infos": {},
    }
    return tuple((values | changes).values())


def same_step(**changes: Any) -> VectorEnvAdapter:
    return VectorEnvAdapter(Maker(answer(**changes)), autoreset="SameStep")


def test_same_step_without_final_obs_is_an_error():
    env = same_step()
    with pytest.raises(FrameContractError, match="infos have no final_obs although an episode ended"):
        env.step(zeros(env))


@pytest.mark.parametrize(
    "infos",
    [
        {"final_obs": np.array([None, None], object)},
        {"final_obs": np.zeros((2, 1), np.float32), "_final_obs": np.array([False, True])},
    ],
    ids=["none", "mask"],
)
def test_same_step_with_a_final_obs_missing_on_an_ended_row_is_an_error(infos):
    env = same_step(infos=infos)
    with pytest.raises(FrameContractError, match="env copy 0 ended an episode, but infos.'final_obs'. lacks"):
        env.step(zeros(env))


@pytest.mark.parametrize("name", ["final_obs", "final_observation"])
def test_same_step_takes_a_dense_final_obs_of_ended_rows_only(name):
    env = same_step(infos={name: np.array([[7], [8]], np.float32)})
    out = env.step(zeros(env))
    assert out.next_obs[0].tolist() == [[7], [2]]
    assert out.obs[0].tolist() == [[1], [2]]


def test_same_step_with_a_final_obs_of_a_wrong_shape_is_an_error():
    final = np.empty(2, object)
    final[0] = np.zeros(3, np.float32)
    env = same_step(infos={"final_obs": final})
    with pytest.raises(FrameContractError, match=r"env copy 0, final_obs: observation has a wrong shape"):
        env.step(zeros(env))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs": np.zeros((2, 2), np.float32)}, r"observation is wrong : expected float32 with shape \(2, 1\)"),
        ({"obs": np.zeros((2, 1))}, "expected float32 .*got float64"),
        ({"obs": None}, "observation is wrong"),
        ({"reward": np.zeros((2, 1))}, r"reward is wrong : .*got float64 with shape \(2, 1\)"),
        ({"reward": [None, 1]}, "reward is wrong : .*got object"),
        ({"terminated": [0.5, 0.5]}, "terminated is wrong : expected flags"),
        ({"truncated": np.zeros(3, bool)}, "truncated is wrong"),
    ],
)
def test_a_malformed_answer_is_named(changes, message):
    env = same_step(**changes)
    with pytest.raises(FrameContractError, match=message):
        env.step(zeros(env))


def test_an_answer_of_four_items_is_named():
    env = VectorEnvAdapter(Maker(answer()[:4]), autoreset="Disabled")
    with pytest.raises(FrameContractError, match="expected .observations, rewards, .* got tuple of 4"):
        env.step(zeros(env))


def test_disabled_notices_an_env_that_resets_more_than_it_was_told_to():
    env = VectorEnvAdapter(Maker(answer()), autoreset="Disabled")
    with pytest.raises(FrameContractError, match="changed copies that it was not to reset"):
        env.step(zeros(env))


def test_next_step_notices_an_episode_that_ends_on_its_reset_row():
    env = VectorEnvAdapter(Maker(answer()), autoreset="NextStep")
    env.step(zeros(env))
    with pytest.raises(FrameContractError, match="env copy 0 ended an episode in the step that resets it"):
        env.step(zeros(env))


def test_an_unknown_mode_asks_for_it():
    with pytest.raises(ValueError, match="does not say how it resets .* pass it as autoreset="):
        VectorEnvAdapter(Maker(metadata={}))
    with pytest.raises(ValueError, match="autoreset is unknown .* got 'Sometimes'"):
        VectorEnvAdapter(Maker(), autoreset="Sometimes")


def test_a_mode_that_somebody_wrote_into_the_base_class_is_not_believed(monkeypatch):
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match="does not say how it resets"):
        VectorEnvAdapter(Maker())


@pytest.mark.parametrize("name", ["SameStep", "same_step", AutoresetMode.SAME_STEP])
def test_the_mode_is_the_argument_then_the_attribute_then_the_metadata(name):
    env = Maker(metadata={"autoreset_mode": AutoresetMode.NEXT_STEP})
    assert VectorEnvAdapter(env).mode is AutoresetMode.NEXT_STEP
    env.autoreset_mode = "Disabled"
    assert VectorEnvAdapter(env).mode is AutoresetMode.DISABLED
    assert VectorEnvAdapter(env, autoreset=name).mode is AutoresetMode.SAME_STEP


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


def test_a_vector_env_that_loses_transitions_is_refused():
    lossy = type("FunctionalJaxVectorEnv", (type(Maker()),), {})()
    lossy.num_envs, lossy.autoreset_mode = 1, "NextStep"
    lossy.single_observation_space, lossy.single_action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)
    with pytest.raises(ValueError, match="loses the transitions of all copies"):
        VectorEnvAdapter(lossy)


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


@pytest.mark.filterwarnings("ignore:.*from Worker-1", "ignore:.*Raising the last exception")
@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("kind", ["sync", "async", "async-pipe"])
def test_an_error_inside_is_named_and_the_adapter_closes(kind, where, adapt):
    env = adapt(kind, "NextStep", [CountingEnv, partial(FailingEnv, where, at=2, error=ValueError("lost"))])
    env.reset()
    env.step(zeros(env))
    with pytest.raises(WorkerFailedError, match=f"^vector env failed in {where}: ValueError: lost$") as caught:
        env.reset() if where == "reset" else env.step(zeros(env))
    assert isinstance(caught.value.__cause__, ValueError)
    if kind != "sync":
        assert not any(process.is_alive() for process in env.env.processes)
    env.close()
    env.close()


class Quitter(CountingEnv):
    """Ends its process in the second step."""

    def step(self, action: Any) -> Any:
        if self.elapsed == 1:
            os._exit(3)
        return super().step(action)


@pytest.mark.processes
def test_close_returns_after_a_worker_died(adapt):
    env = adapt("async", "NextStep", [CountingEnv, Quitter])
    env.reset()
    env.step(zeros(env))
    with pytest.raises(WorkerFailedError, match="vector env failed in step: "):
        env.step(zeros(env))
    env.close()
    assert not any(process.is_alive() for process in env.env.processes)


@pytest.mark.processes
def test_close_returns_when_an_idle_worker_was_killed(adapt):
    env = adapt("async", "NextStep", [CountingEnv, CountingEnv])
    env.reset()
    env.env.processes[0].kill()
    env.env.processes[0].join()
    env.close()
    assert not any(process.is_alive() for process in env.env.processes)


@pytest.mark.processes
def test_close_returns_when_a_worker_never_answers(adapt, monkeypatch):
    monkeypatch.setattr("lit_collect.envs.vector._CLOSE_TIMEOUT_S", 0.2)
    env = adapt("async", "NextStep", [CountingEnv, Deaf])
    env.reset()
    env.close()
    assert not any(process.is_alive() for process in env.env.processes)


class Deaf(CountingEnv):
    """Blocks for ever when it is closed, and ignores a polite request to end."""

    def close(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
        signal.pause()


def test_an_error_in_close_is_named():
    env = VectorEnvAdapter(SyncVectorEnv([partial(FailingEnv, "close", error=OSError("stuck"))]))
    with pytest.raises(WorkerFailedError, match="vector env failed in close: OSError: stuck"):
        env.close()
    env.close()


def test_an_env_that_is_not_owned_is_never_closed():
    env = VectorEnvAdapter(SyncVectorEnv([CountingEnv]), owned=False)
    env.close()
    assert env.env.envs[0].closes == 0
    assert env.reset()[0].tolist() == [[0, 0, 0]]


def test_upstream_async_without_shared_memory_still_forgets_resets():
    """When this fails, Gymnasium has mended defect A.6-1 and `_pending_survives_reset` must go for that version."""
    env = KINDS["async-pipe"]([partial(CountingEnv, 0, (1,))])
    env.reset()
    env.step(np.zeros(1, np.int64))
    env.reset()
    obs = env.step(np.zeros(1, np.int64))[0]
    env.close()
    assert obs.tolist() == [[0, 2, 0]]  # reset once more instead of stepped


def test_nothing_warns_in_ordinary_use(adapt, collect):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(adapt("sync", "SameStep"), 10)
