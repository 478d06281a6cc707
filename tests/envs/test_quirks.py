"""What particular vector envs do otherwise than Gymnasium says, and that it does no harm.

Where a test says "upstream", it holds the defect itself: when it fails, the defect is mended and the guard may go.
"""

import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from lit_collect import Collector, RolloutConfig
from lit_collect.envs.base import BatchedEnv
from lit_collect.envs.factories import resolve_env
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.envs.vector_quirks import describe_env
from lit_collect.errors import FrameContractError, WorkerFailedError
from lit_collect.testing import CountingEnv, FailingEnv

# Python warns of forking a process that has threads, and torch's are always there.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def zeros(env: BatchedEnv) -> tuple[np.ndarray, ...]:
    return (np.zeros(env.num_envs, np.int64),)


class Telling(CountingEnv):
    """Tells in its info which step it is: at a reset 0.5 more, and only copies that tell do."""

    def __init__(self, index: int, lengths: tuple[int, ...] = (2,), value: Any = None, mask: bool = False) -> None:
        super().__init__(index, lengths)
        self.value, self.mask = value, mask

    def _info(self) -> dict:
        told: dict[str, Any] = {"at": self.elapsed + 100.0 * self.episode}
        if self.value is not None:
            told["value"] = self.value
        if self.mask:
            told["action_mask"] = np.array([1, self.elapsed % 2], np.int8)
        return told

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        return super().reset(**kwargs)[0], self._info()

    def step(self, action: Any) -> tuple:
        return (*super().step(action)[:4], self._info())


# Infos belong to the observation they came with.


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
@pytest.mark.parametrize("kind", ["sync", "sync-view", "async", "async-pipe"])
def test_infos_and_masks_follow_their_observation_in_every_mode(kind, mode, vectorise):
    makers = [partial(Telling, 0, (1,), mask=True), partial(Telling, 1, (2, 3), mask=True)]
    rollout = RolloutConfig(info_keys=("at",))
    env = vectorise(kind, mode, makers)
    with Collector(env, frames_per_batch=24, total_frames=48, rollout=rollout, seed=0) as collector:
        for batch in collector:
            mask = batch["collector"].get("mask", batch["is_init"][..., 0] | True)
            for part in (batch, batch["next"]):
                expected = 100 * part["observation"][..., 1] + part["observation"][..., 2]
                assert part["at"][mask].tolist() == expected[mask].tolist()
                assert part["reported", "at"][mask].all()
                odd = part["observation"][..., 2] % 2 == 1
                assert part["action_mask"][..., 1][mask].tolist() == odd[mask].tolist()
                assert part["action_mask"][..., 0].all()


def test_a_partial_reset_of_the_user_keeps_the_infos_of_the_others(adapt):
    env = adapt("sync", "Disabled", [partial(Telling, i, (9,)) for i in range(2)], info_keys=["at"])
    env.reset()
    env.step(zeros(env))
    _, at, reported = env.reset(None, np.array([False, True]))
    assert at.tolist() == [1, 100]
    assert reported.tolist() == [True, True]


def test_an_info_that_only_some_copies_report_is_filled_for_the_others(adapt):
    env = adapt("sync", "SameStep", [partial(Telling, 0), partial(Telling, 1, value=7)], info_keys=["value:int64"])
    _, value, reported = env.reset()
    assert (value.tolist(), reported.tolist()) == ([0, 7], [False, True])
    out = env.step(zeros(env))
    assert out.next_obs[1].tolist() == [0, 7]


def test_final_infos_by_copy_are_read_too(monkeypatch):
    env = VectorEnvAdapter(SyncVectorEnv([partial(Telling, 0, (1,))], autoreset_mode="SameStep"), info_keys=["at"])
    env.reset()
    step = env.env.step

    def older(action: Any) -> tuple:  # Gymnasium 0.29
        *rest, infos = step(action)
        return (*rest, {**infos, "final_info": np.array([{"at": 42.0}], object)})

    monkeypatch.setattr(env.env, "step", older)
    assert env.step(zeros(env)).next_obs[1].tolist() == [42]
    monkeypatch.setattr(
        env.env, "step", lambda action: (*older(action)[:4], {**older(action)[4], "final_info": [None]})
    )
    out = env.step(zeros(env))
    assert np.isnan(out.next_obs[1]).all()
    assert out.next_obs[2].tolist() == [False]
    env.close()


def test_final_infos_that_are_missing_are_not_reported(monkeypatch):
    env = VectorEnvAdapter(SyncVectorEnv([partial(Telling, 0, (1,))], autoreset_mode="SameStep"), info_keys=["at"])
    env.reset()
    step = env.env.step

    def silent(action: Any) -> tuple:
        *rest, infos = step(action)
        return (*rest, {name: value for name, value in infos.items() if "final_info" not in name})

    monkeypatch.setattr(env.env, "step", silent)
    out = env.step(zeros(env))
    assert out.next_obs[2].tolist() == [False]
    assert out.obs[1].tolist() == [100]
    env.close()


def test_upstream_an_info_still_takes_the_dtype_of_the_first_reporter():
    env = SyncVectorEnv([partial(Telling, 0, value=2), partial(Telling, 1, value=2.7)])
    assert env.reset()[1]["value"].tolist() == [2, 2]
    env.close()


def test_an_info_that_may_have_lost_digits_is_told_once(adapt):
    env = adapt("sync", "NextStep", [partial(Telling, 0, value=2), partial(Telling, 1, value=2.7)], info_keys=["value"])
    with pytest.warns(UserWarning, match="info 'value' came as int64, .* declare 'value:int64'") as caught:
        assert [env.reset()[1].tolist(), env.step(zeros(env)).obs[1].tolist()] == [[2, 2], [2, 2]]
    assert len(caught) == 1
    declared = adapt("sync", "NextStep", [partial(Telling, 0, value=2)], info_keys=["value:int64", "at:float64"])
    assert declared.reset()[1].tolist() == [2]


# What reaches the env, and what it does with it.


def test_upstream_a_reset_still_takes_the_mask_out_of_the_callers_options():
    env = SyncVectorEnv([CountingEnv])
    env.reset()
    options = {"reset_mask": np.array([True])}
    env.reset(options=options)
    assert options == {}
    env.close()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_every_partial_reset_gets_a_mask_and_options_of_its_own(mode, monkeypatch):
    env = VectorEnvAdapter(SyncVectorEnv([partial(CountingEnv, i, (1,)) for i in range(2)], autoreset_mode=mode))
    given, reset = [], env.env.reset

    def greedy(*, seed: Any = None, options: Any = None) -> Any:
        answer = reset(seed=seed, options=None if options is None else dict(options))
        if options:
            given.append(options)
            options["reset_mask"][:] = False  # keeps it, and changes it
        return answer

    monkeypatch.setattr(env.env, "reset", greedy)
    env.reset()
    for _ in range(3):
        assert env.step(zeros(env)).is_init.tolist() == [True, True]
    assert len({id(options) for options in given}) == len({id(options["reset_mask"]) for options in given}) == 3
    env.close()


def test_a_wrong_number_of_actions_is_refused_before_any_env_moves(adapt):
    env = adapt("sync", "NextStep", [partial(CountingEnv, i) for i in range(3)])
    env.reset()
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"expected one action for each of 3 env copies, got {count}"):
            env.step((np.zeros(count, np.int64),))
    assert [copy.elapsed for copy in env.env.envs] == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "rollout", "error", "message"),
    [
        (
            lambda o, r, te, tr, i: (o, None, te, tr, i),
            {"check_finite": True},
            FrameContractError,
            "reward .* not finite",
        ),
        (lambda o, r, te, tr, i: (None, r, te, tr, i), {}, WorkerFailedError, "failed in step: ValueError"),
        (lambda o, r, te, tr, i: (o * 1e300, r, te, tr, i), {"check_finite": True}, FrameContractError, "not finite"),
        (lambda o, r, te, tr, i: (o, r, te, i), {}, WorkerFailedError, "vector env failed in step: ValueError"),
        (lambda o, r, te, tr, i: (o, np.array([r, r]), te, tr, i), {}, WorkerFailedError, "failed in step: ValueError"),
    ],
    ids=["reward-none", "obs-none", "obs-huge", "four", "reward-array"],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_what_a_sync_vector_env_lets_through_is_noticed(changes, rollout, error, message):
    class Broken(CountingEnv):
        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return changes(obs.astype(np.float64) + 1, *rest)

    collector = Collector(
        SyncVectorEnv([Broken]), frames_per_batch=4, total_frames=4, rollout=RolloutConfig(**rollout), seed=0
    )
    with collector, pytest.raises(error, match=message):
        next(collector)


# What goes wrong in a worker of an `AsyncVectorEnv`.


class TwoPartsError(Exception):
    """Takes two arguments, and is made of one again after its travels."""

    def __init__(self, part: str, other: str) -> None:
        super().__init__(f"{part} and {other}")


def _unpicklable() -> Exception:
    error = ValueError("with a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")  # how Gymnasium logs
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (partial(TwoPartsError, "one", "two"), r"cannot be pickled \(TypeError: .*TwoPartsError.__init__"),
        (_unpicklable, "failed with an exception that cannot be pickled; see its output"),
    ],
    ids=["two-parts", "unpicklable"],
)
def test_an_exception_that_cannot_travel_ends_the_wait(error, message, adapt, monkeypatch, capfd):
    monkeypatch.setattr("lit_collect.envs.vector_quirks._ERROR_TIMEOUT_S", 1.0)
    env = adapt("async", "NextStep", [CountingEnv, partial(FailingEnv, "step", error=error())])
    env.reset()
    with pytest.raises(WorkerFailedError, match=f"vector env failed in step: RuntimeError: a worker .*{message}"):
        env.step(zeros(env))
    assert not any(process.is_alive() for process in env.env.processes)
    env.close()


class KeywordError(Exception):
    """Can be unpickled, but not be made of a message alone."""

    def __init__(self, *, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple:
        return partial(KeywordError, text=str(self)), ()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
def test_an_exception_of_another_constructor_keeps_its_words(adapt):
    env = adapt("async", "NextStep", [partial(FailingEnv, "step", error=KeywordError(text="lost"))])
    env.reset()
    with pytest.raises(WorkerFailedError, match="vector env failed in step: RuntimeError: KeywordError: lost"):
        env.step(zeros(env))


# Which mode an env is in, and which envs are taken at all.


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_a_mode_that_an_env_is_known_not_to_be_in_is_refused(kind):
    env = kind([CountingEnv], autoreset_mode="NextStep", **({"context": "fork"} if kind is AsyncVectorEnv else {}))
    with pytest.raises(
        ValueError, match=r"autoreset does not fit .* expected 'NextStep' or None, got 'SameStep'; .* make"
    ):
        VectorEnvAdapter(env, autoreset="SameStep")
    assert VectorEnvAdapter(env, autoreset="next_step", owned=False).mode is AutoresetMode.NEXT_STEP
    env.close()


def test_the_name_of_an_env_with_a_long_text_is_its_class():
    class Long(VectorEnv):
        num_envs = 2

        def __str__(self) -> str:
            return "x" * 200

    assert describe_env(Long()) == "Long(num_envs=2)"
    assert describe_env(SyncVectorEnv([CountingEnv])) == "SyncVectorEnv(num_envs=1)"


# Observations with goals: every key is stored, and what was achieved at the end is that of the end.


class Goal(gymnasium.Env):
    """Moves one to the right; reaches its goal after three steps."""

    def __init__(self) -> None:
        box = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.observation_space = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), box))
        self.action_space = spaces.Box(-1.0, 1.0, (1,))
        self.place, self.episode = 0.0, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.place, self.episode = 0.0, self.episode + 1
        return self._look(), {}

    def step(self, action: np.ndarray) -> tuple:
        self.place += 1
        ended = self.place == 3
        return self._look(), -1.0 + ended, bool(ended), False, {"is_success": ended}

    def _look(self) -> dict:
        here = self.place + 10.0 * self.episode
        values = {"observation": -here, "achieved_goal": here, "desired_goal": 3.0 + 10 * self.episode}
        return {name: np.array([value]) for name, value in values.items()}


@pytest.mark.parametrize("vector", [None, *(mode.value for mode in AutoresetMode)])
def test_goal_observations_keep_every_key_and_what_was_achieved_at_the_end(vector):
    env = [Goal, Goal] if vector is None else SyncVectorEnv([Goal, Goal], autoreset_mode=vector)
    rollout = RolloutConfig(info_keys=("is_success:bool",))
    with Collector(env, frames_per_batch=12, total_frames=12, rollout=rollout, seed=0) as collector:
        batch = next(collector)
    if vector is not None:
        env.close()
    for part, steps in ((batch, [0, 1, 2, 10, 11, 12]), (batch["next"], [1, 2, 3, 11, 12, 13])):
        assert part["achieved_goal"][1, :, 0].tolist() == steps
        assert part["observation"][1, :, 0].tolist() == [-step for step in steps]
        assert part["desired_goal"][1, :, 0].tolist() == [3, 3, 3, 13, 13, 13]
        assert str(part["achieved_goal"].dtype) == "torch.float32"
    assert batch["next", "is_success"][0].tolist() == [False, False, True] * 2
    assert batch["is_success"].any().item() is False
    assert batch["next", "terminated"][0, :, 0].tolist() == [False, False, True] * 2


def test_a_live_env_whose_text_is_long_is_described_by_its_class():
    class Long(VectorEnv):
        num_envs = 2

        def __str__(self) -> str:
            return "x" * 200

    assert resolve_env(Long()).description == "Long(num_envs=2)"
