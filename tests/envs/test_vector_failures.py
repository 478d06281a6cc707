"""What `VectorEnvAdapter` does when a vector env is not what it says, raises, dies or hangs."""

import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from lit_collect.envs.base import BatchedEnv
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.errors import FrameContractError, WorkerFailedError
from lit_collect.testing import CountingEnv, FailingEnv

# Python warns of forking a process that has threads, and torch's are always there.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def zeros(env: BatchedEnv) -> tuple[np.ndarray, ...]:
    return (np.zeros(env.num_envs, np.int64),)


class Own:
    """A vector env of one's own, scripted: what step() returns, and what it says about itself."""

    def __new__(cls, answer: Any = None, metadata: dict | None = None, copies: int = 2) -> VectorEnv:
        env = type("OwnVectorEnv", (VectorEnv,), {"metadata": metadata} if metadata is not None else {})()
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
    return VectorEnvAdapter(Own(answer(**changes)), autoreset="SameStep")


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
    with pytest.raises(FrameContractError, match="env copy 0 ended an episode, but infos"):
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
    env = VectorEnvAdapter(Own(answer()[:4]), autoreset="Disabled")
    with pytest.raises(FrameContractError, match=r"expected .observations, rewards, .* got tuple of 4"):
        env.step(zeros(env))


def test_disabled_notices_an_env_that_resets_more_than_it_was_told_to():
    env = VectorEnvAdapter(Own(answer()), autoreset="Disabled")
    with pytest.raises(FrameContractError, match="changed copies that it was not to reset"):
        env.step(zeros(env))


def test_next_step_notices_an_episode_that_ends_on_its_reset_row():
    env = VectorEnvAdapter(Own(answer()), autoreset="NextStep")
    env.step(zeros(env))
    with pytest.raises(FrameContractError, match="env copy 0 ended an episode in the step that resets it"):
        env.step(zeros(env))


def test_an_unknown_mode_asks_for_it():
    with pytest.raises(ValueError, match=r"does not say how it resets .* pass it as autoreset="):
        VectorEnvAdapter(Own(metadata={}))
    with pytest.raises(ValueError, match=r"autoreset is unknown .* got 'Sometimes'"):
        VectorEnvAdapter(Own(), autoreset="Sometimes")


def test_a_mode_that_somebody_wrote_into_the_base_class_is_not_believed(monkeypatch):
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match="does not say how it resets"):
        VectorEnvAdapter(Own())


@pytest.mark.parametrize("name", ["SameStep", "same_step", AutoresetMode.SAME_STEP])
def test_the_mode_is_the_argument_then_the_attribute_then_the_metadata(name):
    env = Own(metadata={"autoreset_mode": AutoresetMode.NEXT_STEP})
    assert VectorEnvAdapter(env).mode is AutoresetMode.NEXT_STEP
    env.autoreset_mode = "Disabled"
    assert VectorEnvAdapter(env).mode is AutoresetMode.DISABLED
    assert VectorEnvAdapter(env, autoreset=name).mode is AutoresetMode.SAME_STEP


def test_a_vector_env_that_loses_transitions_is_refused():
    lossy = type("FunctionalJaxVectorEnv", (type(Own()),), {})()
    lossy.num_envs, lossy.autoreset_mode = 1, "NextStep"
    lossy.single_observation_space, lossy.single_action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)
    with pytest.raises(ValueError, match="loses the transitions of all copies"):
        VectorEnvAdapter(lossy)


@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")  # how Gymnasium logs
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
    monkeypatch.setattr("lit_collect.envs.vector_quirks._CLOSE_TIMEOUT_S", 0.2)
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


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ({"final_obs": np.array([None, None])}, "env copy 4 ended an episode, but infos"),
        ({"final_obs": np.array([np.zeros(3), None], object)}, "env copy 4, final_obs: observation has a wrong shape"),
    ],
)
def test_messages_count_copies_from_the_first_one(infos, message):
    env = VectorEnvAdapter(Own(answer(infos=infos)), autoreset="SameStep", first=4)
    with pytest.raises(FrameContractError, match=message):
        env.step(zeros(env))
    env = VectorEnvAdapter(Own(answer()), autoreset="NextStep", first=4)
    env.step(zeros(env))
    with pytest.raises(FrameContractError, match="env copy 4 ended an episode in the step that resets it"):
        env.step(zeros(env))
    env = VectorEnvAdapter(
        Own(answer(infos={"final_obs": np.array([[1], [2]], np.float32)})), autoreset="SameStep", first=4
    )
    with pytest.warns(UserWarning, match="env copy 4 ended an episode with the very observation"):
        env.step(zeros(env))
