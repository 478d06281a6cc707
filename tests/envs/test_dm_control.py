"""dm_control through shimmy, as a Gymnasium id."""

import os

import gymnasium
import numpy as np
import pytest
import torch

from lit_collect import Collector, RolloutConfig
from lit_collect.envs.factories import GymEnvFactory, resolve_env
from lit_collect.envs.vector_quirks import refuse_dm

# dm_control looks for a screen when it is imported; nothing is drawn here.
_BEFORE = os.environ.get("MUJOCO_GL")
os.environ["MUJOCO_GL"] = "disable"
pytest.importorskip("dm_control")
pytest.importorskip("shimmy")
import dm_control.suite  # noqa: E402

if _BEFORE is None:
    del os.environ["MUJOCO_GL"]

ENV_ID = "shimmy:dm_control/cartpole-balance-v0"
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


def test_the_time_limit_truncates_and_rows_are_float32():
    with Collector(ENV_ID, num_envs=2, frames_per_batch=2002, total_frames=2002, seed=0) as collector:
        batch = next(collector)
    assert batch["position"].shape == (2, 1001, 3)
    assert {batch[key].dtype for key in ("position", "velocity", "action")} == {torch.float32}
    ends = [t == 999 for t in range(1001)]
    assert batch["next", "truncated"][:, :, 0].tolist() == [ends, ends]
    assert not batch["next", "terminated"].any()
    assert batch["is_init"][0, :, 0].nonzero().flatten().tolist() == [0, 1000]
    assert torch.equal(batch["next", "position"][:, :999], batch["position"][:, 1:1000])
    assert not torch.equal(batch["next", "position"][:, 999], batch["position"][:, 1000])


def test_float64_observations_can_be_kept():
    env = resolve_env(ENV_ID).build(1, rollout=RolloutConfig(keep_float64=True))
    assert [(leaf.key, leaf.stored) for leaf in env.observation_spec.leaves] == [
        (("position",), np.float64),
        (("velocity",), np.float64),
    ]
    env.close()


class Listening(gymnasium.Wrapper):
    """Keeps what it was given."""

    def step(self, action: np.ndarray) -> tuple:
        given.append(action)
        return super().step(action)


given: list[np.ndarray] = []


def test_actions_arrive_as_float64_within_their_bounds():
    given.clear()
    factory = GymEnvFactory(ENV_ID, wrappers=[Listening])
    with Collector(
        factory, lambda position: torch.full((1, 1), 7.0), num_envs=1, frames_per_batch=2, total_frames=2, seed=0
    ) as collector:
        batch = next(collector)
    assert batch["action"].flatten().tolist() == [7, 7]
    assert [(action.dtype, action.tolist()) for action in given] == [(np.float64, [1.0])] * 2


def test_an_env_of_dm_env_itself_is_refused_with_what_to_do():
    env = dm_control.suite.load("cartpole", "balance")
    with pytest.raises(TypeError, match=r"an env of dm_env is no gymnasium.Env, got Environment; wrap it, .* shimmy"):
        resolve_env(lambda: env).build(None, rollout=RolloutConfig())
    with pytest.raises(TypeError, match=r"shimmy:dm_control/cartpole-balance-v0"):
        resolve_env(env)
    refuse_dm(object())
