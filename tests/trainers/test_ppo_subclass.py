"""What a subclass of PPO may do in Lightning's ways."""

import lightning as L
import pytest

from lit_collect import CollectorDataModule, UpdateConfig
from trainers import PPO


class Skipping(PPO):
    """Leaves the first minibatches out, as a limit on the divergence would."""

    def __init__(self, skipped: int) -> None:
        super().__init__(hidden=(4,))
        self.skipped = skipped

    def training_step(self, minibatch, batch_idx=0):
        return None if batch_idx < self.skipped else super().training_step(minibatch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("skipped", [1, 8])
def test_fit_when_a_training_step_gives_no_loss_goes_on(skipped, tmp_path):
    updates = UpdateConfig(epochs=2, minibatch_size=8)
    data = CollectorDataModule("CartPole-v1", num_envs=2, frames_per_batch=16, total_frames=32, updates=updates)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=0,
    )  # fmt: skip
    model = Skipping(skipped)
    trainer.fit(model, datamodule=data)
    assert data.frames_total == 32
    assert bool(trainer.optimizers[0].state) == (skipped < 8)  # whether it ever had a gradient
