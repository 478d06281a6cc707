"""What off-policy algorithms share: target networks that follow, and means for the loggers."""

import lightning as L
import pytest
import torch
from torch import nn

from lit_collect import Collector, CollectorDataModule, MixedBuffer, NStep, ReplayBuffer, ReplayConfig
from trainers import DQN, PPO, SAC, TD3
from trainers.off_policy import Means, follow, target_of


def quick_trainer(**settings):
    return L.Trainer(
        accelerator="cpu",
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def test_target_of_is_a_copy_that_nothing_trains():
    source = nn.Linear(2, 1)
    target = target_of(source)
    assert torch.equal(target.weight, source.weight)
    assert target.weight.data_ptr() != source.weight.data_ptr()
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert all(parameter.requires_grad for parameter in source.parameters())


@pytest.mark.parametrize(("tau", "expected"), [(0.25, 0.25), (1.0, 1.0)])
def test_follow_moves_weights_by_tau_and_copies_buffers(tau, expected):
    source = nn.BatchNorm1d(2)
    nn.init.zeros_(source.weight)
    target = target_of(source)
    nn.init.ones_(source.weight)
    source.running_mean += 4.0
    follow(target, source, tau)
    assert target.weight.tolist() == [expected, expected]
    assert target.running_mean.tolist() == [4.0, 4.0]
    assert source.weight.tolist() == [1.0, 1.0]
    assert source.weight.requires_grad


def test_follow_repeated_is_a_moving_average():
    source, target = nn.Linear(1, 1), nn.Linear(1, 1)
    nn.init.ones_(source.weight)
    nn.init.zeros_(target.weight)
    for _ in range(10):
        follow(target, source, 0.1)
    assert target.weight.item() == pytest.approx(1 - 0.9**10)


def test_means_count_each_name_by_itself():
    means = Means()
    means.add({"loss": torch.tensor(1.0)})
    means.add({"loss": torch.tensor(3.0), "actor": torch.tensor(5.0, dtype=torch.bfloat16)})
    assert means.compute() == {"loss": 2.0, "actor": 5.0}
    assert means.num_updates == 2


def test_means_leave_what_they_were_given_alone():
    means, loss = Means(), torch.tensor(1.0, requires_grad=True)
    means.add({"loss": loss})
    means.add({"loss": loss})
    assert loss.item() == 1.0
    assert means.compute() == {"loss": 1.0}


def test_means_of_nothing_are_nothing():
    assert Means().compute() == {}


@pytest.mark.parametrize(
    ("model", "replay", "words"),
    [
        (DQN, None, "DQN is meant for a replay buffer: each batch is used once and forgotten"),
        (PPO, ReplayConfig(capacity=64, batch_size=8), "PPO is meant without a replay buffer: its gradients are wrong"),
    ],
)
def test_fit_on_data_of_the_other_kind_says_so(model, replay, words):
    data = CollectorDataModule("CartPole-v1", num_envs=2, frames_per_batch=16, total_frames=16, replay=replay)
    with pytest.warns(UserWarning, match=words):
        quick_trainer().fit(model(), datamodule=data)


def mixed_with(transform):
    """A mixed buffer whose offline part sums rewards."""
    with Collector("CartPole-v1", num_envs=2, frames_per_batch=16, seed=0) as collector:
        offline = ReplayBuffer(16, 8, transforms=[transform])
        offline.extend(collector.collect())
    return MixedBuffer(ReplayBuffer(64, 8), offline)


@pytest.mark.parametrize(
    "make", [lambda n_step: ReplayConfig(capacity=64, batch_size=8, transforms=(n_step,)), mixed_with]
)
def test_fit_when_rewards_are_summed_with_another_discount_then_says_so(make):
    data = CollectorDataModule(
        "CartPole-v1", num_envs=2, frames_per_batch=16, total_frames=16, replay=make(NStep(3, 0.9))
    )
    words = r"the discounts .* differ : .* got DQN\(gamma=0.5\) and NStep\(gamma=0.9\) in the buffer's transforms"
    with pytest.raises(ValueError, match=words):
        quick_trainer().fit(DQN(gamma=0.5), datamodule=data)
    assert data.frames_total == 16  # said with the first sample


@pytest.mark.parametrize("model", [SAC, TD3])
def test_fit_of_other_algorithms_with_another_discount_says_so_too(model):
    replay = ReplayConfig(capacity=64, batch_size=8, transforms=(NStep(3, 0.9),))
    data = CollectorDataModule("Pendulum-v1", num_envs=2, frames_per_batch=16, total_frames=16, replay=replay)
    with pytest.raises(ValueError, match=r"the discounts of algorithm and replay buffer differ"):
        quick_trainer().fit(model(), datamodule=data)


def test_fit_with_one_reward_each_then_their_discount_does_not_matter():
    replay = ReplayConfig(capacity=64, batch_size=8, transforms=(NStep(1, 0.9),))
    data = CollectorDataModule("CartPole-v1", num_envs=2, frames_per_batch=16, total_frames=16, replay=replay)
    trainer = quick_trainer()
    trainer.fit(DQN(gamma=0.5), datamodule=data)
    assert trainer.global_step == 1


@pytest.mark.parametrize("model", [DQN, PPO, SAC])
def test_mixed_precision_goes_with_clipping_by_the_trainer(model):
    replay = None if model is PPO else ReplayConfig(capacity=64, batch_size=8)
    data = CollectorDataModule(
        "Pendulum-v1" if model is SAC else "CartPole-v1",
        num_envs=2,
        frames_per_batch=16,
        total_frames=16,
        replay=replay,
    )
    trainer = quick_trainer(precision="bf16-mixed", gradient_clip_val=0.5)
    trainer.fit(model(max_grad_norm=None), datamodule=data)
    assert trainer.global_step == 1
