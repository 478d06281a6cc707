"""`fake_tensordict`: batches of zeros that look like the real ones, made without touching an env."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import nn

from lit_collect import Collector, DeviceConfig, ProcessBackend, RolloutConfig
from lit_collect.frames import columns_of
from lit_collect.testing import CountingEnv
from tests.behaviour.telling import MAKERS, Sink, Told, backend_of

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]

BOTH = pytest.mark.parametrize("backend", ["direct", "sync"])
EVERYWHERE = pytest.mark.parametrize("backend", ["direct", "sync", "async"])


def make(backend: str, env=MAKERS, policy=None, **options) -> Collector:
    """Two workers of two copies each, or one of four."""
    return Collector(env, policy, **{"frames_per_batch": 8, "seed": 5, **options}, backend=backend_of(backend))


class Upright(nn.Module):
    """Logits for CartPole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation):
        return {"logits": self.net(observation)}


def looks(batch) -> dict:
    """Everything but the values."""
    columns = {key: (tuple(column.shape), column.dtype, column.device) for key, column in columns_of(batch).items()}
    return {"batch": tuple(batch.batch_size), "names": batch.names, "columns": columns}


class DictEnv(gymnasium.Env):
    """Observes several arrays, tells of itself in its info, and allows some actions only."""

    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (2, 3), np.uint8),
            "inner": gymnasium.spaces.Dict(
                {"speed": gymnasium.spaces.Box(-1, 1, (), np.float64), "gear": gymnasium.spaces.Discrete(3)}
            ),
        }
    )
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, masks: bool = False) -> None:
        self._masks = masks

    def _tell(self):
        observation = {"image": np.ones((2, 3), np.uint8), "inner": {"speed": np.array(0.5), "gear": np.int64(1)}}
        info = {"success": True, "pos": np.ones(2, np.float32)}
        return observation, {**info, "action_mask": np.array([1, 0, 1], np.int8)} if self._masks else info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._tell()

    def step(self, action):
        observation, info = self._tell()
        return observation, 1.0, False, False, info


def mixed(observation):
    rows = len(observation["image"])
    return {"action": torch.ones(rows, dtype=torch.int64), "value": torch.ones(rows, 1, dtype=torch.float64)}


CASES = {
    "counting, at random": (MAKERS, None, {}),
    "counting, telling": (MAKERS, Told(1.0), {}),
    "logits": ("CartPole-v1", Upright(), {"num_envs": 4}),
    "continuous": ("Pendulum-v1", None, {"num_envs": 4}),
    "a dict, infos": (
        DictEnv,
        mixed,
        {"num_envs": 4, "rollout": RolloutConfig(info_keys=("success:bool", "pos:float32[2]"))},
    ),
    "random first": (MAKERS, Told(1.0), {"rollout": RolloutConfig(init_random_frames=4)}),
    "compact": (MAKERS, None, {"rollout": RolloutConfig(compact_obs=True)}),
}


@EVERYWHERE
@pytest.mark.parametrize("case", CASES)
def test_fake_batch_looks_like_the_next_one_and_is_zero(backend, case):
    env, policy, options = CASES[case]
    with make(backend, env, policy, total_frames=20, **options) as collector:
        before = collector.statistics()
        fakes = [collector.fake_tensordict()]
        after = collector.statistics()
        assert {key: after[key] for key in after if not key.endswith("_s")} == {
            key: before[key] for key in before if not key.endswith("_s")
        }
        batch = collector.collect()
        fakes.append(collector.fake_tensordict())
        for fake in fakes:
            assert looks(fake) == looks(batch)
            assert not any(column.any() for column in columns_of(fake).values())
            fake.zero_()  # its memory is its own
        list(collector)
        assert looks(collector.fake_tensordict()) == looks(batch)  # the last one was shorter, this is whole


@EVERYWHERE
def test_fake_batch_has_the_shape_that_the_backend_gives(backend):
    with make(backend) as collector:
        assert collector.fake_tensordict().shape == ((2, 4) if backend == "async" else (4, 2))
    with Collector(CountingEnv, frames_per_batch=5) as collector:
        fake = collector.fake_tensordict()
        assert (fake.shape, fake.names) == ((5,), ["time"])
        assert looks(fake) == looks(collector.collect())


@pytest.mark.parametrize("backend", ["direct", "sync"])
def test_fake_batch_of_rows_that_may_be_no_transitions_has_a_mask(backend):
    chosen = "direct" if backend == "direct" else ProcessBackend(1)
    with Collector(partial(CartPoleVectorEnv, 2), frames_per_batch=8, backend=chosen) as collector:
        fake = collector.fake_tensordict()
        assert fake["collector", "mask"].tolist() == [[False] * 4] * 2
        assert looks(fake) == looks(collector.collect())


def test_fake_batch_of_workers_that_are_hurried_has_a_mask():
    with Collector(MAKERS, frames_per_batch=8, backend=ProcessBackend(2, preempt_fraction=1.0)) as collector:
        fake = collector.fake_tensordict()
        assert not fake["collector", "mask"].any()
        assert looks(fake) == looks(collector.collect())


@BOTH
def test_fake_batch_has_an_action_mask_once_a_reset_has_shown_it(backend):
    with make(backend, partial(DictEnv, masks=True), num_envs=4) as collector:
        assert "action_mask" not in collector.fake_tensordict()
        batch = collector.collect()
        assert looks(collector.fake_tensordict()) == looks(batch)
        assert not collector.fake_tensordict()["action_mask"].any()


@EVERYWHERE
def test_fake_batch_resets_no_env(backend):
    with make(backend) as collector:
        collector.fake_tensordict()
        assert collector.getattr_env("episode") == -1


@BOTH
def test_fake_batch_is_not_seen_by_hooks(backend):
    hooks = {name: lambda *args: 1 / 0 for name in ("pre_collect", "postproc", "post_collect")}
    sink = Sink()
    with make(backend, hooks=hooks, replay_buffer=sink) as collector:
        assert collector.fake_tensordict().numel() == 8
        assert sink.batches == []


@BOTH
def test_fake_batch_is_on_the_device_of_batches(backend):
    with make(backend, devices=DeviceConfig(storage="meta")) as collector:
        assert collector.fake_tensordict().device == torch.device("meta")
