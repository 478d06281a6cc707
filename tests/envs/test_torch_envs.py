"""Envs that step with torch, as simulators on a GPU do: SAME_STEP, tensors that they write into again and again."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from lit_collect import Collector, RolloutConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.envs.torch_arrays import device_of, to_numpy, to_tensors, tree_to_numpy
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.envs.vector_quirks import BatchedView, as_vector_env
from lit_collect.errors import FrameContractError
from lit_collect.testing import CountingEnv

MAKERS = [
    partial(CountingEnv, 0, (1,)),
    partial(CountingEnv, 1, (2, 3), ends="truncated"),
    partial(CountingEnv, 2, (50,)),
]
OPTIONS = {"final": ["final_obs", "final_observation"], "masks": [True, False], "nested": [False, True]}


class Counts:
    """`CountingEnv` copies behind tensors: one buffer for each of observations, rewards and flags, overwritten always.

    Args:
        makers: of the copies.
        final: key of the infos with the observations that ended episodes, dense; None: it has none.
        masks: whether the infos hold masks beside the values.
        nested: whether observations are a mapping.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], CountingEnv]] = MAKERS,
        *,
        final: str | None = "final_obs",
        masks: bool = True,
        nested: bool = False,
    ) -> None:
        self.copies = [make() for make in makers]
        self.num_envs = len(self.copies)
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_observation_space = spaces.Dict({"policy": box}) if nested else box
        self.single_action_space = spaces.Discrete(2)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.device = "cpu"
        self.given: list[Tensor] = []
        self.seeds: list[Any] = []
        self._final, self._masks, self._nested = final, masks, nested
        self._obs, self._last = torch.zeros(self.num_envs, 3), torch.zeros(self.num_envs, 3)
        self._reward = torch.zeros(self.num_envs)
        self._flags = torch.zeros(2, self.num_envs, dtype=torch.bool)
        self._speed = torch.zeros(self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        self.seeds.append(seed)
        for copy, row in zip(self.copies, self._obs, strict=True):
            row[:] = torch.from_numpy(copy.reset()[0])
        self._speed.fill_(0.5)
        return self._observations(self._obs), {"speed": self._speed}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict]:
        assert isinstance(action, Tensor)
        self.given.append(action)
        self._last.fill_(-7.0)  # rows of copies whose episodes go on hold anything
        for i, copy in enumerate(self.copies):
            obs, reward, terminated, truncated, _ = copy.step(int(action[i]))
            self._obs[i], self._reward[i] = torch.from_numpy(obs), reward
            self._flags[0, i], self._flags[1, i] = terminated, truncated
            self._speed[i] = reward
            if terminated or truncated:
                self._last[i] = torch.from_numpy(obs)
                self._obs[i] = torch.from_numpy(copy.reset()[0])
                self._speed[i] = 0.5
        return self._observations(self._obs), self._reward, self._flags[0], self._flags[1], self._infos()

    def close(self) -> None:
        for copy in self.copies:
            copy.close()

    def _observations(self, values: Tensor) -> Any:
        return {"policy": values} if self._nested else values

    def _infos(self) -> dict:
        done = self._flags[0] | self._flags[1]
        infos: dict[str, Any] = {"speed": self._speed}
        if self._final is None or not done.any():
            return infos
        infos[self._final] = self._observations(self._last)
        infos["final_info"] = {"speed": 10 * self._last[:, 2]}
        if self._masks:
            infos["_" + self._final], infos["_final_info"] = done, done
        return infos


class VectorCounts(Counts, VectorEnv):
    """The same as a subclass of Gymnasium's."""


class GymCounts(Counts, gymnasium.Env):
    """The same as an env of Gymnasium that happens to step many copies, as Isaac Lab's are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space, self.action_space = self.single_observation_space, self.single_action_space


class ManualCounts(VectorCounts):
    """Resets nothing by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        if options is None:
            return super().reset(seed=seed)
        for i in np.flatnonzero(options["reset_mask"]):
            self._obs[i] = torch.from_numpy(self.copies[i].reset()[0])
        return self._obs, {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict]:
        for i, copy in enumerate(self.copies):
            obs, self._reward[i], self._flags[0, i], self._flags[1, i], _ = copy.step(int(action[i]))
            self._obs[i] = torch.from_numpy(obs)
        return self._obs, self._reward, self._flags[0], self._flags[1], {}


def test_rows_of_reused_tensors_that_are_reset_when_told_equal_a_plain_loop(collect, oracle):
    env = VectorEnvAdapter(ManualCounts())
    for maker, got in zip(MAKERS, collect(env, 20), strict=True):
        assert got == oracle(maker(), 20)


@pytest.mark.parametrize("nested", OPTIONS["nested"])
@pytest.mark.parametrize("masks", OPTIONS["masks"])
@pytest.mark.parametrize("final", OPTIONS["final"])
def test_rows_of_reused_tensors_equal_a_plain_loop(final, masks, nested, collect, oracle):
    env = VectorEnvAdapter(VectorCounts(final=final, masks=masks, nested=nested))
    for maker, got in zip(MAKERS, collect(env, 20), strict=True):
        assert got == oracle(maker(), 20)


def test_what_was_handed_out_does_not_change_when_the_env_writes_into_its_tensors():
    env = VectorEnvAdapter(VectorCounts())
    first = env.reset()
    out = env.step((np.zeros(3, np.int64),))
    arrays = (*first, *out.obs, *out.next_obs, out.reward, out.terminated, out.truncated)
    kept = [array.copy() for array in arrays]
    for _ in range(3):
        env.step((np.zeros(3, np.int64),))
    assert all(np.array_equal(old, now) for old, now in zip(kept, arrays, strict=True))


def test_actions_arrive_as_tensors_of_their_own_on_the_envs_device():
    vector = VectorCounts()
    env = VectorEnvAdapter(vector)
    env.reset([11, 12, 13])
    actions = np.array([1, 0, 1])
    env.step((actions,))
    actions[:] = 0
    assert vector.given[0].tolist() == [1, 0, 1]
    assert vector.given[0].dtype == torch.int64
    assert vector.given[0].device == torch.device("cpu")
    assert vector.seeds == [11]


@pytest.mark.parametrize("kind", [VectorCounts, GymCounts, Counts])
def test_an_env_of_many_copies_is_taken_live_and_from_a_callable(kind, collect, oracle):
    live = kind()
    source = resolve_env(live)
    assert (source.num_envs, source.live) == (3, True)
    env = source.build(None, rollout=RolloutConfig())
    env.close()
    del env, source  # nobody but the user closes it
    assert [copy.closes for copy in live.copies] == [0, 0, 0]
    made = resolve_env(kind).build(None, rollout=RolloutConfig())
    for maker, got in zip(MAKERS, collect(made, 9), strict=True):
        assert got == oracle(maker(), 9)
    made.close()


def test_wrappers_of_gymnasium_around_an_env_of_many_copies_are_kept():
    wrapped = gymnasium.Wrapper(GymCounts())
    view = as_vector_env(wrapped)
    assert isinstance(view, BatchedView)
    assert (view.env, view.num_envs, view.device) == (wrapped, 3, "cpu")
    assert repr(view) == "GymCounts(num_envs=3)"
    single = gymnasium.make("CartPole-v1")
    assert as_vector_env(single) is single


def test_a_batch_of_a_torch_env_is_whole_and_may_be_kept():
    with Collector(VectorCounts(), frames_per_batch=12, total_frames=24, seed=0) as collector:
        first, second = list(collector)
    for k, batch in enumerate((first, second)):
        assert batch.shape == (3, 4)
        assert batch["observation"][2, :, 2].tolist() == [4 * k + t for t in range(4)]
        assert batch["next", "observation"][0, :, 2].tolist() == [1] * 4
        assert batch["next", "terminated"][0].all()
        assert batch["next", "observation"][1, :, 1].max() == batch["observation"][1, :, 1].max()


def test_infos_of_tensors_follow_their_observation():
    rollout = RolloutConfig(info_keys=("speed",))
    with Collector(VectorCounts(), frames_per_batch=12, total_frames=12, rollout=rollout, seed=0) as collector:
        batch = next(collector)
    assert batch["speed"][0].tolist() == [0.5] * 4
    assert batch["next", "speed"][0].tolist() == [10.0] * 4  # of the terminal observation
    assert batch["speed"][2].tolist() == [0.5, 1, 2, 3]
    assert batch["next", "speed"][2].tolist() == [1, 2, 3, 4]


def test_a_missing_terminal_observation_is_an_error():
    env = VectorEnvAdapter(VectorCounts(final=None))
    env.reset()
    with pytest.raises(FrameContractError, match=r"infos have no final_obs although an episode ended .* report"):
        env.step((np.zeros(3, np.int64),))


def test_a_terminal_observation_that_its_mask_denies_is_an_error(monkeypatch):
    vector = VectorCounts()
    env = VectorEnvAdapter(vector)
    env.reset()
    step = vector.step

    def deny(action: Tensor) -> tuple:
        *rest, infos = step(action)
        return (*rest, {**infos, "_final_obs": torch.zeros(3, dtype=torch.bool)})

    monkeypatch.setattr(vector, "step", deny)
    with pytest.raises(FrameContractError, match=r"env copy 0 ended an episode, but infos\['final_obs'\] lacks"):
        env.step((np.zeros(3, np.int64),))


def test_terminal_observations_of_a_wrong_shape_are_an_error(monkeypatch):
    vector = VectorCounts()
    env = VectorEnvAdapter(vector)
    env.reset()
    monkeypatch.setattr(vector, "step", lambda action: _ended({"final_obs": torch.zeros(1, 3)}))
    with pytest.raises(FrameContractError, match=r"final_obs: observation is wrong : expected .* got .*\(1, 3\)"):
        env.step((np.zeros(3, np.int64),))


def _ended(infos: dict) -> tuple:
    flags = torch.ones(3, dtype=torch.bool)
    return torch.zeros(3, 3), torch.zeros(3), flags, ~flags, infos


def test_an_env_of_many_copies_that_does_not_say_its_mode_is_refused():
    silent = Counts()
    silent.metadata = {}
    with pytest.raises(ValueError, match=r"Counts\(num_envs=3\) does not say how it resets"):
        resolve_env(silent).build(None, rollout=RolloutConfig())


def test_tensors_become_arrays_whatever_they_are():
    shared = torch.arange(3)
    to_numpy(shared)[0] = 9
    assert shared.tolist() == [9, 1, 2]
    assert to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    assert to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
    assert to_numpy([1, 2]).tolist() == [1, 2]
    tree = tree_to_numpy({"a": {"b": torch.ones(1)}, "c": "text"})
    assert type(tree["a"]["b"]) is np.ndarray
    assert tree["c"] == "text"


def test_the_device_is_the_envs_own_else_that_of_its_observations():
    env = VectorCounts()
    env.device = "meta"
    assert device_of(env, torch.zeros(1)) == torch.device("meta")
    env.device = None
    assert device_of(env, torch.zeros(1, device="meta")) == torch.device("meta")
    assert device_of(env, np.zeros(1)) is None
    (sent,) = to_tensors([np.zeros(2)], torch.device("meta"))
    assert sent.device.type == "meta"
