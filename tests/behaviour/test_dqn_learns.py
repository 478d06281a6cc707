"""Q-learning from a replay buffer learns, the whole of it."""

import lightning as L
import pytest

from lit_collect import CollectionMonitor, CollectorDataModule, EvaluationConfig, NStep, ReplayConfig, UpdateConfig
from trainers.dqn import DQN


@pytest.mark.slow
def test_dqn_learns_to_balance_the_pole(trainer_with):
    L.seed_everything(1)
    data = CollectorDataModule(
        "CartPole-v1",
        num_envs=8,
        frames_per_batch=64,
        total_frames=12_032,
        replay=ReplayConfig(capacity=12_032, batch_size=128, min_frames=1024, transforms=(NStep(3, 0.99),)),
        updates=UpdateConfig(updates_per_batch=16),
        evaluation=EvaluationConfig(num_episodes=10),
    )
    model = DQN(hidden=(128, 128), epsilon_fraction=0.3)
    trainer = trainer_with(max_epochs=-1, callbacks=[CollectionMonitor()])
    trainer.fit(model, datamodule=data)
    assert model.num_updates == 16 * (1 + (12_032 - 1024) // 64)  # the first of them when 1,024 rows were there
    assert trainer.callback_metrics["eval/return_mean"] >= 100  # at random it is about 22
