"""What goes wrong is said once, early, in the user's words, and nothing hangs."""

import gc
import signal
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
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
    LitCollectError,
    ReplayConfig,
    RolloutConfig,
    UpdateConfig,
    WorkerFailedError,
    make_dataloader,
)
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv, FailingEnv, ScriptedEnv

pytestmark = pytest.mark.timeout(30)

MAKERS = [partial(CountingEnv, i) for i in range(2)]


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
        ({"frames_per_batch": 8, "num_envs": 8, "total_frames": 0}, ValueError, "total_frames must be .* 1, or -1 for"),
        ({"frames_per_batch": 8, "num_envs": 8, "total_frames": -2}, ValueError, "total_frames must be at least 1"),
        ({"frames_per_batch": 8, "num_envs": 8, "total_frames": 12}, ValueError, "8 env copies, got 12; use 8 or 16"),
        ({"frames_per_batch": 8, "num_envs": 8, "total_frames": 1e3}, TypeError, "total_frames must be an integer"),
        ({"frames_per_batch": 8, "seed": -1}, ValueError, "seed must not be negative, got -1"),
        ({"frames_per_batch": 8, "seed": "x"}, TypeError, "seed must be an integer or None, got 'x'"),
        ({"frames_per_batch": 8, "backend": "thread"}, ValueError, "backend must be one of .*, process, got 'thread'"),
        ({"frames_per_batch": 8, "backend": "ray"}, BackendUnavailableError, "'ray' is not in this version; use"),
        ({"frames_per_batch": 8, "trajectories": 3}, TypeError, "trajectories must be given as TrajectoryConfig"),
    ],
)  # fmt: skip
def test_wrong_setting(options, error, words, build):
    with pytest.raises(error, match=words):
        build("CartPole-v1", **options)


@pytest.mark.parametrize(
    ("buffer", "error", "words"),
    [
        (ReplayConfig(capacity=4), ValueError, "capacity must hold a batch of frames_per_batch=8, got 4"),
        (list, TypeError, "expected an object with extend, or a ReplayConfig, got <class 'list'>"),
        ({"capacity": 10}, TypeError, "expected an object with extend, or a ReplayConfig, got {'capacity': 10}"),
    ],
)
def test_wrong_replay_buffer(buffer, error, words):
    with pytest.raises(error, match=words):
        Collector("CartPole-v1", frames_per_batch=8, replay_buffer=buffer)


def test_wrong_setting_of_the_data_module_alone():
    replay = ReplayConfig(capacity=100)
    with pytest.raises(ValueError, match=r"replay\.capacity must hold a batch of frames_per_batch=2048, got 100"):
        CollectorDataModule("CartPole-v1", replay=replay)
    with pytest.raises(ValueError, match=r"replay\.min_frames must be below total_frames=64, got 64"):
        CollectorDataModule("CartPole-v1", frames_per_batch=64, total_frames=64, replay=replace(replay, min_frames=64))
    with pytest.raises(ValueError, match="expected 1 and None with a replay buffer, got 2 and None"):
        CollectorDataModule("CartPole-v1", frames_per_batch=64, replay=replay, updates=UpdateConfig(epochs=2))
    with pytest.raises(ValueError, match="counts samples of a replay buffer : expected 1 without one, got 2"):
        CollectorDataModule("CartPole-v1", updates=UpdateConfig(updates_per_batch=2))
    with pytest.raises(TypeError, match="replay must be a ReplayConfig or an object with extend and sample"):
        CollectorDataModule("CartPole-v1", replay=[])
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
        (lambda: DeviceConfig(policy="gpu"), "devices.policy must name a torch device or be None, got 'gpu'"),
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
    with pytest.raises(ValueError, match=r"num_envs does not fit .*expected 2 or None, got 4"):
        Collector(MAKERS, num_envs=4, frames_per_batch=8)


def test_callable_that_makes_no_env():
    with pytest.raises(TypeError, match=r"made no env for copy 0 : expected gymnasium\.Env"):
        Collector(dict, frames_per_batch=8)


def test_callable_that_gives_the_same_env_twice():
    env = CountingEnv()
    with pytest.raises(ValueError, match="gave the same env twice, at copy 1"):
        Collector(lambda: env, num_envs=2, frames_per_batch=8)


# --- envs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "words"),
    [("init", "in its constructor"), ("reset", "in reset"), ("step", "in step")],
)
def test_env_that_raises(where, words):
    makers = [CountingEnv, partial(FailingEnv, where, error=KeyError("door"))]
    expected = pytest.raises(WorkerFailedError, match=f"env copy 1 failed {words}: KeyError: 'door'")
    with expected as caught, Collector(makers, frames_per_batch=8) as collector:
        collector.collect()
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("where", "answer", "words"),
    [
        ("reset", "shape", r"observation has a wrong shape : expected .*\(3,\), got \(4,\)"),
        ("reset", "dtype", "observation has a wrong dtype : expected .*float32.*, got float64"),
        ("reset", "none", "observation is None|observation .*got NoneType"),
        ("reset", "tuple", r"expected \(observation, info\), got tuple of 1"),
        ("step", "shape", r"observation has a wrong shape : expected .*\(3,\), got \(4,\)"),
        ("step", "dtype", "observation has a wrong dtype : expected .*float32.*, got float64"),
        ("step", "none", "observation is None|observation .*got NoneType"),
        ("step", "tuple", r"expected \(observation, reward, terminated, truncated, info\)"),
        ("step", "reward", "reward is None : expected a number"),
    ],
)
def test_env_that_returns_what_it_must_not(where, answer, words):
    makers = [CountingEnv, partial(FailingEnv, where, answer=answer)]
    with Collector(makers, frames_per_batch=8) as collector, pytest.raises(FrameContractError, match=words) as caught:
        collector.collect()
    assert f"env copy 1, {where}" in str(caught.value)


@pytest.mark.parametrize("reward", ["much", [1.0, 2.0], {}])
def test_env_whose_reward_is_no_number(reward):
    env = ScriptedEnv([[0.0], [1.0]], [reward])
    with Collector(env, frames_per_batch=1) as collector, pytest.raises(FrameContractError, match="env copy 0, step"):
        collector.collect()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["reward", "observation"])
def test_number_that_is_not_finite_when_that_is_to_be_checked(name, value):
    observations = [[0.0], [1.0], [value if name == "observation" else 2.0]]
    env = ScriptedEnv(observations, [0.0, value if name == "reward" else 1.0])
    expected = pytest.raises(FrameContractError, match=f"{name} of env copy 0 is not finite at step 1")
    with Collector(env, frames_per_batch=4, rollout=RolloutConfig(check_finite=True)) as collector, expected:
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

    with (
        Collector(lambda: Endless(CountingEnv()), frames_per_batch=4) as collector,
        pytest.raises(WorkerFailedError, match=r"failed in step: RuntimeError: step\(\) without a running episode"),
    ):
        collector.collect()


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


@pytest.fixture
def sigchld():
    """Torch's loader sets a handler for good."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_dataset_in_a_worker_of_a_dataloader(sigchld, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # seconds it waits for a worker to end
    with Collector(MAKERS, frames_per_batch=4, total_frames=8) as collector:
        dataset = CollectorDataset(collector)
        loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(LitCollectError, match=r"cannot run in a DataLoader worker .*use num_workers=0"):
            for _ in loader:
                pass
        assert [batch.shape for batch in make_dataloader(dataset)] == [(2, 2)] * 2
    del loader
    gc.collect()  # the error holds on to the loader's worker


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
    words = r"Trainer of the package lightning, got pytorch_lightning.*import lightning as L"
    with pytest.raises(TypeError, match=words):
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
