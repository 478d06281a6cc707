"""Evaluation acts with the weights that Lightning evaluates, training with its own."""

import lightning as L
import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn

from lit_collect import CollectorDataModule, EvaluationConfig, ProcessBackend
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv

DECAY = 0.5


class Evaluated(BoringRLModule):
    """Keeps what the evaluation was played with; every step takes 1 off the action, which begins at 0."""

    def __init__(self) -> None:
        super().__init__(ConstantPolicy([0.0]))
        self.evaluated: list[float] = []

    def validation_step(self, batch, batch_idx) -> None:
        self.evaluated.append(batch["action"].unique().item())


def make_env() -> CountingEnv:
    return CountingEnv(action_space=spaces.Box(-100, 100, (1,)))


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("backend", ["direct", ProcessBackend(num_collectors=2)])
def test_evaluation_acts_with_the_averaged_weights_and_training_with_its_own(backend) -> None:
    model, averaging = Evaluated(), EMAWeightAveraging(decay=DECAY)
    data = CollectorDataModule(
        make_env,
        num_envs=2,
        frames_per_batch=4,
        total_frames=16,
        batches_per_epoch=1,
        evaluation=EvaluationConfig(num_episodes=1),
        backend=backend,
        seed=0,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[averaging],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=data)
    trained = [batch["action"].unique().item() for batch in model.batches]
    assert trained == [0, -1, -2, -3]
    average, averages = None, []
    blend = get_ema_avg_fn(DECAY)
    for weight in (-1.0, -2.0, -3.0, -4.0):  # after each step
        average = weight if average is None else blend(torch.tensor(average), torch.tensor(weight), 0).item()
        averages.append(average)
    assert model.evaluated == averages
    assert averages[-1] > -4
