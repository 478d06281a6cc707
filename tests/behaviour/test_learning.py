"""The whole of it learns."""

import lightning as L
import pytest

from lit_collect import CollectionMonitor, CollectorDataModule, EvaluationConfig, UpdateConfig
from trainers import A2C, PPO


@pytest.mark.slow
def test_ppo_learns_to_balance_the_pole(trainer_with):
    L.seed_everything(1)
    data = CollectorDataModule(
        "CartPole-v1",
        num_envs=8,
        frames_per_batch=256,
        total_frames=30_000,
        updates=UpdateConfig(epochs=20, minibatch_size=256),
        evaluation=EvaluationConfig(num_episodes=10),
    )
    model = PPO(learning_rate=1e-3, gamma=0.98, lambda_=0.8)
    trainer = trainer_with(max_epochs=-1, callbacks=[CollectionMonitor()])
    trainer.fit(model, datamodule=data)
    assert data.frames_total == 30_000
    assert trainer.callback_metrics["eval/return_mean"] >= 150  # at random it is about 22
    assert trainer.callback_metrics["eval/episodes"] == 10


@pytest.mark.slow
def test_a2c_learns_to_balance_the_pole(trainer_with):
    L.seed_everything(1)
    data = CollectorDataModule(
        "CartPole-v1",
        num_envs=8,
        frames_per_batch=128,
        total_frames=40_064,
        evaluation=EvaluationConfig(num_episodes=10),
    )
    model = A2C(learning_rate=3e-3, lambda_=0.95, optimizer="adam", normalize_advantage=True)
    trainer = trainer_with(max_epochs=-1, callbacks=[CollectionMonitor()])
    trainer.fit(model, datamodule=data)
    assert trainer.global_step == 313  # one update for each batch
    assert trainer.callback_metrics["eval/return_mean"] >= 100  # at random it is about 22
