"""A network for any spaces."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lit_collect import Collector
from lit_collect.envs.spaces import TreeSpec
from lit_collect.testing import ScriptedEnv
from lit_collect.tools.small_policy import SmallPolicy

OBSERVED = spaces.Dict(
    {"eye": spaces.Box(0, 255, (2, 2), np.uint8), "pair": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))}
)


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Discrete(3, start=5),
        spaces.Box(-1, 1, (2, 2)),
        spaces.Box(0, 9, (2,), np.int64),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        spaces.Dict({"go": spaces.Discrete(2), "push": spaces.Box(-1, 1, (1,))}),
        spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3]))),
    ],
    ids=str,
)
def test_small_policy_acts_in_every_space(action_space):
    OBSERVED.seed(1)
    seen = OBSERVED.sample()

    def make():
        return ScriptedEnv([seen] * 4, [0.0] * 3, observation_space=OBSERVED, action_space=action_space)

    policy = SmallPolicy(TreeSpec.of(OBSERVED, "observation"), TreeSpec.of(action_space, "action"))
    with Collector(make, policy, num_envs=2, frames_per_batch=8, seed=1) as collector:
        assert collector.collect().batch_size == (2, 4)


def test_small_policy_draws_only_what_the_mask_allows():
    observation = TreeSpec.of(spaces.Box(0, 1, (1,)), "observation")
    mask = torch.tensor([[False, True], [True, False]])
    logits = SmallPolicy(observation, TreeSpec.of(spaces.Discrete(2), "action"))(torch.zeros(2, 1), mask)["logits"]
    assert torch.isneginf(logits).equal(~mask)
    choices = SmallPolicy(observation, TreeSpec.of(spaces.MultiDiscrete([2, 2]), "action"))
    action = choices(torch.zeros(2, 1), torch.cat([mask, ~mask], 1))["action"]
    assert action.tolist() == [[1, 0], [0, 1]]
