"""What goes wrong is said once, early, in the user's words, and nothing hangs."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.utils.data import DataLoader

from lit_collect import (
    BackendUnavailableError,
    BudgetSpentError,
    Collector,
    CollectorClosedError,
    CollectorDataModule,
    CollectorDataset,
    DeviceConfig,
    EvaluationConfig,
    FrameContractError,
    ReplayConfig,
    RolloutConfig,
    TrajectoryConfig,
    UpdateConfig,
    WorkerFailedError,
    make_dataloader,
)
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv, FailingEnv, ScriptedEnv

pytestmark = pytest.mark.timeout(30)

MAKERS = [partial(CountingEnv, i) for i in range(2)]


def box(low: float, high: float) -> spaces.Box:
    return spaces.Box(low, high, (2,))


# --- settings, where they are given -----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Collector, CollectorDataModule])
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be at least 1, got 0"),
        ({"frames_per_batch": -8}, ValueError, "frames_per_batch must be at least 1, got -8"),
        ({"frames_per_batch": 8.0}, TypeError, "frames_per_batch must be an integer, got 8.0"),
        ({"frames_per_batch": "8"}, TypeError, "frames_per_batch must be an integer, got '8'"),
        ({"frames_per_batch": 100, "num_envs": 8}, ValueError, "multiple of num_envs=8, got 100; use 96 or 104"),
        ({"frames_per_batch": 3, "num_envs": 8}, ValueError, "multiple of num_envs=8, got 3; use 8"),
        ({"frames_per_batch": 8, "num_envs": 0}, ValueError, "num_envs must be at least 1 or None, got 0"),
        ({"frames_per_batch": 8, "num_envs": 2.0}, TypeError, "num_envs must be an integer"),
        ({"frames_per_batch": 8, "num_envs": 8, "total_frames": 0}, ValueError, "total_frames must be at least 1, or -1"),
        ({"frames_per_batch": 8, "num_envs": 8, "total_frames": -2}, ValueError, "total_frames must be at least 1"),
        ({"frames_per_batch": 8, "num_envs": 8, "total_frames": 12}, ValueError, "8 env copies, got 12; use 8 or 16"),
        ({"frames_per_batch": 8, "num_envs": 8, "total_frames": 1e3}, TypeError, "total_frames must be an integer"),
        ({"frames_per_batch": 8, "seed": -1}, ValueError, "seed must not be negative, got -1"),
        ({"frames_per_batch": 8, "seed": "x"}, TypeError, "seed must be an integer or None, got 'x'"),
        ({"frames_per_batch": 8, "backend": "thread"}, ValueError, "backend must be one of .*direct, got 'thread'"),
        ({"frames_per_batch": 8, "backend": "ray"}, BackendUnavailableError, "'ray' is not in this version; use direct"),
        ({"frames_per_batch": 8, "trajectories": TrajectoryConfig()}, ValueError, "trajectories is not available"),
    ],
)  # fmt: skip
def test_wrong_setting(options, error, words, build):
    with pytest.raises(error, match=words):
        build("CartPole-v1", **options)


def test_wrong_setting_of_the_data_module_alone():
    with pytest.raises(ValueError, match="replay is not available in this version"):
        CollectorDataModule("CartPole-v1", replay=ReplayConfig(capacity=8))
    with pytest.raises(ValueError, match="batches_per_epoch must be at least 1 or None, got 0"):
        CollectorDataModule("CartPole-v1", batches_per_epoch=0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: UpdateConfig(epochs=0), "updates.epochs must be at least 1, got 0"),
        (lambda: UpdateConfig(minibatch_size=0), "updates.minibatch_size must be at least 1"),
        (lambda: RolloutConfig(exploration="greedy"), "rollout.exploration must be one of .*got 'greedy'"),
        (lambda: RolloutConfig(max_frames_per_traj=0), "rollout.max_frames_per_traj must be at least 1"),
        (lambda: EvaluationConfig(num_episodes=0), "evaluation.num_episodes must be at least 1"),
        (lambda: EvaluationConfig(num_episodes=10, num_envs=4), "must divide num_episodes=10, got 4; use 2 or 5"),
        (lambda: DeviceConfig(policy="cuda"), "devices.policy='cuda' is not available in this version"),
    ],
)
def test_wrong_config(config, words):
    with pytest.raises(ValueError, match=words):
        config()


@pytest.mark.parametrize("build", [Collector, CollectorDataModule])
@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        ("CartPool-v1", ValueError, "env 'CartPool-v1' is unknown: .*expected a Gymnasium id"),
        ("CartPole-v99", ValueError, "env 'CartPole-v99' is unknown"),
        ("no_such_module:Thing-v0", ValueError, "env 'no_such_module:Thing-v0' is unknown"),
        ("no_such_module.make", ValueError, "'no_such_module.make' cannot be imported"),
        ("lit_collect.testing.NoSuchEnv", ValueError, "has no attribute 'NoSuchEnv'"),
        (7, TypeError, r"env is of the wrong kind .*got 7 \(int\)"),
        ([], ValueError, "env is an empty sequence"),
    ],
)
def test_wrong_env(env, error, words, build):
    with pytest.raises(error, match=words):
        build(env, frames_per_batch=8)


def test_number_of_copies_that_is_not_the_envs_own():
    with pytest.raises(ValueError, match="num_envs does not fit .*expected 2 or None, got 4"):
        Collector(MAKERS, num_envs=4, frames_per_batch=8)


def test_callable_that_makes_no_env():
    with pytest.raises(TypeError, match="made no env for copy 0 : expected gymnasium.Env"):
        Collector(dict, frames_per_batch=8)


def test_callable_that_gives_the_same_env_twice():
    env = CountingEnv()
    with pytest.raises(ValueError, match="gave the same env twice, at copy 1"):
        Collector(lambda: env, num_envs=2, frames_per_batch=8)


def test_unknown_hook():
    with pytest.raises(TypeError, match="unexpected keyword argument 'after'"):
        Collector("CartPole-v1", frames_per_batch=8, hooks={"after": print})


# --- envs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "words"),
    [("init", "in its constructor"), ("reset", "in reset"), ("step", "in step")],
)
def test_env_that_raises(where, words):
    makers = [CountingEnv, partial(FailingEnv, where, error=KeyError("door"))]
    with pytest.raises(WorkerFailedError, match=f"env copy 1 failed {words}: KeyError: 'door'") as caught:
        with Collector(makers, frames_per_batch=8) as collector:  # noqa: SIM117  # the message is of the inner one
            collector.collect()
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("shape", r"observation has a wrong shape : expected .*\(3,\), got \(4,\)"),
        ("dtype", "observation has a wrong dtype : expected .*float32.*, got float64"),
        ("none", "observation"),
        ("tuple", r"expected \(observation, .*info\)"),
        ("reward", "reward is None"),
    ],
)
def test_env_that_returns_what_it_must_not(answer, words, where):
    if (answer, where) == ("reward", "reset"):
        pytest.skip("a reset has no reward")
    makers = [CountingEnv, partial(FailingEnv, where, answer=answer)]
    with Collector(makers, frames_per_batch=8) as collector, pytest.raises(FrameContractError, match=words) as caught:
        collector.collect()
    assert f"env copy 1, {where}" in str(caught.value)


@pytest.mark.parametrize("reward", ["much", [1.0, 2.0], {}])
def test_env_whose_reward_is_no_number(reward):
    env = ScriptedEnv([[0.0], [1.0]], [reward])
    with Collector(env, frames_per_batch=1) as collector, pytest.raises(FrameContractError, match="env copy 0, step"):
        collector.collect()


@pytest.mark.parametrize(("value", "name"), [(np.nan, "reward"), (np.inf, "reward")])
def test_reward_that_is_not_finite_when_that_is_to_be_checked(value, name):
    env, rollout = ScriptedEnv([[0.0], [1.0], [2.0]], [0.0, value]), RolloutConfig(check_finite=True)
    with Collector(env, frames_per_batch=4, rollout=rollout) as collector:
        with pytest.raises(FrameContractError, match=f"{name} of env copy 0 is not finite at step 1"):
            collector.collect()


@pytest.mark.parametrize("which", ["observation_space", "action_space"])
@pytest.mark.parametrize(
    "space",
    [spaces.Sequence(spaces.Discrete(3)), spaces.Graph(spaces.Discrete(3), None)],
    ids=["sequence", "graph"],
)
def test_space_that_cannot_be_stored(space, which):
    class Odd(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, which, space)

    with pytest.raises(TypeError, match=f"{type(space).__name__}"):
        Collector(Odd, frames_per_batch=8)


def test_copies_whose_spaces_differ():
    makers = [CountingEnv, partial(CountingEnv, action_space=spaces.Discrete(3))]
    with pytest.raises(ValueError, match="action_space of env copy 1 differs"):
        Collector(makers, frames_per_batch=8)


def test_env_that_forgets_to_be_reset_is_not_hidden():
    class Endless(gymnasium.Wrapper):
        def reset(self, **kwargs):
            return np.zeros(3, np.float32), {}

    with Collector(lambda: Endless(CountingEnv()), frames_per_batch=4) as collector:
        with pytest.raises(WorkerFailedError, match=r"failed in step: RuntimeError: step\(\) without a running episode"):
            collector.collect()


# --- policies ---------------------------------------------------------------------------------------------------------


def act_with(value):
    """A policy that gives the same answer for each copy."""
    return lambda observation: torch.as_tensor(value).expand(len(observation), *torch.as_tensor(value).shape)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda obs: torch.zeros(len(obs), 1, dtype=torch.int64), r"wrong shape : expected \(2,\).*got \(2, 1\); squeeze"),
        (lambda obs: torch.zeros(3, dtype=torch.int64), r"wrong shape : expected \(2,\).*got \(3,\)"),
        (lambda obs: torch.tensor(0), r"wrong shape : expected \(2,\).*got \(\)"),
        (act_with(0.5), "wrong dtype : expected integers, got torch.float32"),
        (act_with(2), "action"),
        (act_with(-1), "action"),
        (lambda obs: None, "returned no action .*got NoneType"),
        (lambda obs: {"value": torch.zeros(2)}, r"mapping without an action .*got \['value'\]"),
        (lambda obs: {"action": torch.zeros(2).long(), "next": torch.zeros(2)}, "names that the batch itself takes"),
        (lambda obs: {"action": torch.zeros(2).long(), "value": torch.zeros(3)}, "value must have one row for each of 2"),
        (lambda obs: {"logits": torch.full((2, 2), torch.nan)}, "policy gave NaN for env copy 0 at step 0"),
        (lambda obs: {"action": torch.zeros(2).long(), "kept": obs.add_(1.0)}, "changed its observation in place"),
    ],
)  # fmt: skip
def test_policy_whose_answer_is_wrong(policy, words):
    with Collector(MAKERS, policy, frames_per_batch=8) as collector:
        with pytest.raises(FrameContractError, match=words):
            collector.collect()
        assert collector.statistics()["frames_yielded"] == 0


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (act_with([torch.nan, 0.0]), "NaN|nan|finite"),
        (lambda obs: torch.distributions.Normal(torch.full((2, 2), torch.nan), 1.0, validate_args=False), "NaN|nan"),
        (lambda obs: {"loc": torch.full((2, 2), torch.nan), "scale": torch.ones(2, 2)}, "NaN|nan"),
        (lambda obs: torch.zeros(2), r"wrong shape : expected \(2, 2\)"),
        (lambda obs: torch.zeros(2, 2, dtype=torch.int64), "expected floating point, got torch.int64"),
    ],
)
def test_policy_of_continuous_actions_whose_answer_is_wrong(policy, words):
    makers = [partial(CountingEnv, i, action_space=box(-1.0, 1.0)) for i in range(2)]
    with Collector(makers, policy, frames_per_batch=8) as collector, pytest.raises(FrameContractError, match=words):
        collector.collect()


def test_action_out_of_range_moves_no_env():
    envs = [CountingEnv(i) for i in range(2)]
    calls = iter([0, 2])

    def policy(observation):
        return torch.full((2,), next(calls))

    with Collector([lambda: envs[0], lambda: envs[1]], policy, frames_per_batch=8) as collector:
        with pytest.raises(FrameContractError, match="action"):
            collector.collect()
    assert [len(env.actions) for env in envs] == [1, 1]


def test_continuous_action_out_of_range_is_refused_without_clipping():
    env, policy = CountingEnv(action_space=box(-1.0, 1.0)), ConstantPolicy([0.0, 3.0])
    with Collector(env, policy, frames_per_batch=4) as collector:
        assert collector.collect()["action"].tolist() == [[0.0, 3.0]] * 4
    assert [action.tolist() for action in env.actions] == [[0.0, 1.0]] * 4
    with Collector(env, policy, frames_per_batch=4, rollout=RolloutConfig(clip_actions=False)) as collector:
        with pytest.raises(FrameContractError, match="action"):
            collector.collect()


@pytest.mark.parametrize("policy", [3, "policy", nn.Linear])
def test_policy_that_cannot_act(policy):
    with pytest.raises(TypeError, match="policy cannot act : expected an nn.Module"):
        Collector("CartPole-v1", policy, frames_per_batch=8)


def test_policy_that_raises_keeps_its_own_error_and_the_collector():
    calls = iter([True])

    def policy(observation):
        if next(calls, False):
            raise ZeroDivisionError("of the user")
        return torch.zeros(len(observation), dtype=torch.int64)

    with Collector(MAKERS, policy, frames_per_batch=8, total_frames=8) as collector:
        with pytest.raises(ZeroDivisionError, match="of the user"):
            collector.collect()
        (batch,) = collector
    assert batch["is_init"][:, 0].all()


# --- use --------------------------------------------------------------------------------------------------------------


def test_spent_budget_iterated_again():
    with Collector(MAKERS, frames_per_batch=4, total_frames=8) as collector:
        assert len(list(collector)) == 2
        for ask in (lambda: iter(collector), collector.collect, collector.rollout, lambda: list(collector)):
            with pytest.raises(BudgetSpentError, match="all 8 frames of total_frames have been collected; raise"):
                ask()
        dataset = CollectorDataset(collector)
        with pytest.raises(BudgetSpentError, match="raise the budget"):
            next(iter(dataset))


def test_use_after_shutdown():
    collector = Collector(MAKERS, ConstantPolicy(num_actions=2), frames_per_batch=4, total_frames=8)
    state = collector.state_dict()
    collector.shutdown()
    collector.shutdown()
    uses = [
        collector.collect, collector.rollout, collector.reset, collector.update_policy_weights_,
        lambda: iter(collector), lambda: next(collector), lambda: collector.set_seed(1),
        lambda: collector.load_state_dict(state),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(CollectorClosedError, match="the collector is closed; build a new one"):
            use()
    assert collector.statistics()["frames_stepped"] == 0


@pytest.mark.processes
def test_dataset_in_a_worker_of_a_dataloader():
    with Collector(MAKERS, frames_per_batch=4, total_frames=8) as collector:
        loader = DataLoader(
            CollectorDataset(collector), batch_size=None, num_workers=1, collate_fn=lambda batch: batch,
            multiprocessing_context="fork",
        )  # fmt: skip
        with pytest.raises(Exception, match="cannot run in a DataLoader worker .*use num_workers=0"):
            next(iter(loader))
        assert [batch.shape for batch in make_dataloader(CollectorDataset(collector))] == [(2, 2)] * 2


def test_trainer_of_the_other_package():
    other = pytest.importorskip("pytorch_lightning")

    class Module(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.policy = ConstantPolicy(num_actions=2)

        def training_step(self, batch, batch_idx):
            return self.policy.action

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    data = CollectorDataModule(MAKERS, frames_per_batch=4, total_frames=8, evaluation=None)
    trainer = other.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(TypeError, match="Trainer of the package lightning, got pytorch_lightning.*import lightning as L"):
        trainer.fit(Module(), datamodule=data)


def test_module_without_a_policy(trainer_with):
    class Module(BoringRLModule):
        def __init__(self) -> None:
            super().__init__()
            self.actor = self.policy
            del self.policy

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    data = CollectorDataModule(MAKERS, frames_per_batch=4, total_frames=8, evaluation=None)
    with pytest.raises(TypeError, match="no policy to act with : expected an attribute `policy`"):
        trainer_with(max_epochs=-1).fit(Module(), datamodule=data)


def test_prepared_batch_that_is_no_batch(trainer_with):
    class Module(BoringRLModule):
        def prepare_rollout(self, batch):
            batch.zero_()

    data = CollectorDataModule(MAKERS, frames_per_batch=4, total_frames=8, evaluation=None)
    with pytest.raises(TypeError, match="prepare_rollout must return the batch as a TensorDict, got NoneType"):
        trainer_with(max_epochs=-1).fit(Module(), datamodule=data)
