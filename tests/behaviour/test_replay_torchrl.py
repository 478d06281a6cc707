"""TorchRL's replay buffers in place of ours: anything with extend and sample will do."""

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from lit_collect import CollectorDataModule, UpdateConfig
from lit_collect.testing import CountingEnv

data = pytest.importorskip("torchrl.data")

pytestmark = pytest.mark.timeout(120)

MAKERS = [partial(CountingEnv, i, (3, 7, 1, 5)) for i in range(4)]


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Its storages hold locks in shared memory for as long as they live, and refer to themselves."""
    yield
    gc.collect()


def data_of(replay, **options) -> CollectorDataModule:
    settings = {"frames_per_batch": 16, "total_frames": 320, "updates": UpdateConfig(updates_per_batch=3)}
    return CollectorDataModule(MAKERS, replay=replay, evaluation=None, seed=0, **{**settings, **options})


def test_buffer_of_torchrl_is_written_and_sampled(learner, trainer_with):
    replay = data.ReplayBuffer(storage=data.LazyTensorStorage(200), batch_size=8)
    module = data_of(replay)
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=module)
    assert module.replay_buffer is replay
    assert module.frames_total == 320
    assert len(replay) == 200
    assert len(model.batches) == len(module.train_dataloader()) == 3 * 20
    for sample in model.batches:
        assert sample.batch_size == (8,)
        assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0.0, 0.0, 1.0]))


def test_slices_of_torchrl_lie_in_one_episode(learner, trainer_with):
    sampler = data.SliceSampler(slice_len=2, traj_key=("collector", "traj_ids"), strict_length=True)
    replay = data.ReplayBuffer(storage=data.LazyTensorStorage(400), sampler=sampler, batch_size=8)
    module = data_of(replay, frames_per_batch=32)
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=module)
    for sample in model.batches:
        seen = sample["observation"].reshape(4, 2, 3)
        assert torch.equal(seen[:, 1], seen[:, 0] + torch.tensor([0.0, 0.0, 1.0]))


def test_priorities_reach_a_buffer_of_torchrl(learner, trainer_with):
    class Noting(data.RandomSampler):
        told = torch.full((1000,), -1.0)

        def update_priority(self, index, priority, **options):
            self.told[index] = priority

    class Prioritizing(learner):
        def training_step(self, batch, batch_idx):
            self.trainer.datamodule.update_priority(batch, batch["observation"][:, 2])
            return super().training_step(batch, batch_idx)

    replay = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(1000), sampler=Noting(), batch_size=64)
    trainer_with(max_epochs=-1).fit(Prioritizing(), datamodule=data_of(replay))
    told = Noting.told >= 0
    assert told.sum() > 200  # of 320; those that came last are seldom drawn
    assert torch.equal(Noting.told[told], replay[:]["observation"][told[:320], 2])
