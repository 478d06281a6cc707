"""The doubles do what their docstrings promise: other tests stand on them."""

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch.utils.data import DataLoader

from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv, FailingEnv, ScriptedEnv


def play(env, steps):
    """Observation, reward and both flags of each step, with a reset after each episode."""
    rows = []
    env.reset()
    for _ in range(steps):
        obs, reward, terminated, truncated, _ = env.step(0)
        rows.append((obs.tolist(), reward, terminated, truncated))
        if terminated or truncated:
            env.reset()
    return rows


def test_counting_env_says_where_each_row_came_from():
    assert play(CountingEnv(7, (2, 1)), 4) == [
        ([7, 0, 1], 1, False, False),
        ([7, 0, 2], 2, True, False),
        ([7, 1, 1], 101, True, False),
        ([7, 2, 1], 201, False, False),
    ]


@pytest.mark.parametrize(
    ("ends", "flags"), [("terminated", (True, False)), ("truncated", (False, True)), ("both", (True, True))]
)
def test_counting_and_scripted_env_end_as_told(ends, flags):
    assert play(CountingEnv(0, (1,), ends=ends), 1)[0][2:] == flags
    assert play(ScriptedEnv([[0.0], [1.0]], [5], ends=ends), 2)[1][2:] == flags


def test_counting_env_reuses_its_buffer_on_request_only():
    for reuse in (False, True):
        env = CountingEnv(reuse_buffers=reuse)
        assert (env.reset()[0] is env.step(0)[0]) is reuse


def test_counting_env_remembers_what_it_was_given():
    env = CountingEnv(lengths=(5,))
    obs, info = env.reset(seed=3)
    assert obs in env.observation_space
    assert info == {}
    env.step("left")
    env.reset()
    env.close()
    assert (env.seeds, env.actions, env.closes) == ([3, None], ["left"], 1)


@pytest.mark.parametrize("finish", [False, True])
def test_counting_env_refuses_steps_outside_an_episode(finish):
    env = CountingEnv(lengths=(1,))
    if finish:
        play(env, 1)
        env.reset()
        env.step(0)
    with pytest.raises(RuntimeError, match="without a running episode"):
        env.step(0)


@pytest.mark.parametrize("wrong", [{"lengths": ()}, {"lengths": (0,)}, {"ends": "never"}])
def test_counting_env_refuses_nonsense(wrong):
    with pytest.raises(ValueError, match="must be one"):
        CountingEnv(**wrong)


def test_scripted_env_plays_its_lists_again_and_again():
    env = ScriptedEnv([[0, 0], [1, 2], [3, 4]], [10, 20])
    episode = [([1, 2], 10, False, False), ([3, 4], 20, True, False)]
    assert play(env, 4) == episode * 2
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)


def test_scripted_env_refuses_lists_that_do_not_fit():
    with pytest.raises(ValueError, match="one observation more than rewards, got 2 and 2"):
        ScriptedEnv([[0], [1]], [1, 2])


@pytest.mark.parametrize("where", ["init", "reset", "step", "close"])
def test_failing_env_raises_at_the_chosen_call_alone(where):
    at = 1 if where == "init" else 2

    def use() -> None:
        env = FailingEnv(where, at, error=OSError("here"))
        for call in (env.reset, lambda: env.step(0), env.close):
            call()
        getattr(env, where)(*([0] if where == "step" else []))

    with pytest.raises(OSError, match="here"):
        use()


def test_failing_env_gives_the_chosen_answer_once():
    env = FailingEnv("step", at=2, answer="shape", lengths=(9,))
    env.reset()
    assert [env.step(0)[0].shape for _ in range(3)] == [(3,), (4,), (3,)]
    env = FailingEnv("step", answer="dtype")
    env.reset()
    assert env.step(0)[0].dtype == np.float64
    env = FailingEnv("step", answer="tuple")
    env.reset()
    assert len(env.step(0)) == 4
    assert FailingEnv("reset", answer="none").reset()[0] is None
    assert len(FailingEnv("reset", answer="tuple").reset()) == 1


def test_constant_policy_acts_by_its_parameter_once_for_each_row():
    policy = ConstantPolicy([0.5, 2.0])
    observation = torch.zeros(4, 3)
    assert policy(observation).tolist() == [[0.5, 2.0]] * 4
    with torch.no_grad():
        policy.action[1] = 7
    assert policy({"a": {"b": observation}})[3].tolist() == [0.5, 7]
    assert ConstantPolicy(2.6, num_actions=2)(observation).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("automatic", [True, False])
def test_boring_module_lowers_every_weight_by_the_learning_rate_a_step(automatic):
    model = BoringRLModule(ConstantPolicy([1.0, 5.0]), learning_rate=0.25, automatic_optimization=automatic)
    batch = TensorDict({"observation": torch.zeros(2)}, batch_size=[2])
    loader = DataLoader([batch] * 3, batch_size=None, collate_fn=lambda one: one)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, loader)
    assert model.policy.action.tolist() == [0.25, 4.25]
    assert len(model.batches) == 3
