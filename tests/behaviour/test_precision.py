"""Batches keep their shape and their integers under every precision of the Trainer."""

from functools import partial

import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_collect import (
    CollectorDataModule,
    EvaluationConfig,
    RolloutConfig,
    UpdateConfig,
    check_batch,
    restore_successors,
)
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv
from trainers import PPO

# Lightning says so of every module that has this hook; the data module's own asks the module's, too.
# On the CPU it takes bfloat16 instead of float16 for mixed precision.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer` in both"),
    pytest.mark.filterwarnings("ignore:You passed `Trainer.accelerator='cpu', precision='16-mixed'.`"),
]

COPIES, FRAMES = 2, 8
FLOATS = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.float32,
    "16-mixed": torch.float32,
    "16-true": torch.float16,
}
INTEGERS = {
    "action": torch.int64,
    "is_init": torch.bool,
    ("next", "done"): torch.bool,
    ("next", "terminated"): torch.bool,
    ("next", "truncated"): torch.bool,
    ("collector", "traj_ids"): torch.int64,
    ("collector", "policy_version"): torch.int64,
}


class Linear(nn.Module):
    """A policy whose layer refuses numbers of another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: set[torch.dtype] = set()

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        self.seen.add(observation.dtype)
        return {"logits": self.layer(observation)}


class Model(BoringRLModule):
    """Has all the hooks through which a batch goes."""

    def __init__(self) -> None:
        super().__init__(Linear(), learning_rate=0.01)
        self.hooked: list[torch.Size] = []
        self.rounds: list = []

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.hooked.append(batch.batch_size)
        return batch.set("mark", torch.ones(batch.batch_size))

    def training_step(self, batch, batch_idx):
        assert self.policy.layer(batch["observation"].to(self.policy.layer.weight.dtype)).shape[-1] == 2
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.rounds.append(batch)


@pytest.fixture
def run(trainer_with):
    def fit(precision: str, model: BoringRLModule, updates: UpdateConfig = UpdateConfig(), **options):
        data = CollectorDataModule(
            partial(CountingEnv, 0, (3,)),
            num_envs=COPIES,
            frames_per_batch=FRAMES,
            total_frames=2 * FRAMES,
            evaluation=EvaluationConfig(num_episodes=2),
            updates=updates,
            **options,
        )
        trainer_with(max_epochs=-1, precision=precision, num_sanity_val_steps=1).fit(model, datamodule=data)
        return model

    return fit


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize(
    ("updates", "shape"),
    [(UpdateConfig(), (COPIES, FRAMES // COPIES)), (UpdateConfig(minibatch_size=4), (4,)),
     (UpdateConfig(minibatch_size=FRAMES), (FRAMES,))],
    ids=["whole", "minibatches", "one-minibatch"],
)  # fmt: skip
def test_batches_keep_shape_and_integers(updates, shape, precision, run):
    model = run(precision, Model(), updates)
    for batch in model.batches:
        assert batch.batch_size == shape
        assert batch["next"].batch_size == batch["collector"].batch_size == shape
        assert {key: batch[key].dtype for key in INTEGERS} == INTEGERS
        assert batch["observation"].dtype == batch["next", "reward"].dtype == FLOATS[precision]
        assert batch["mark"].shape == shape
    for batch in model.rounds:
        assert batch.batch_size == (2, 3)
        assert batch["collector", "mask"].dtype == torch.bool
    assert len(model.batches) == 2 * FRAMES // torch.Size(shape).numel()
    assert len(model.hooked) == len(model.batches) + len(model.rounds)


class Combined(CollectorDataModule):
    """Frames next to other data."""

    def train_dataloader(self):
        return CombinedLoader({"frames": super().train_dataloader(), "other": DataLoader(torch.ones(4))}, "min_size")


@pytest.mark.parametrize("precision", FLOATS)
def test_frames_next_to_other_data_keep_their_shape(precision, trainer_with):
    class Taking(BoringRLModule):
        def training_step(self, batch, batch_idx):
            assert batch["other"].dtype == FLOATS[precision]
            return super().training_step(batch["frames"], batch_idx)

    model = Taking(ConstantPolicy(num_actions=2))
    data = Combined(CountingEnv, num_envs=COPIES, frames_per_batch=FRAMES, total_frames=2 * FRAMES, evaluation=None)
    trainer_with(max_epochs=-1, precision=precision).fit(model, datamodule=data)
    assert [batch.batch_size for batch in model.batches] == [(COPIES, FRAMES // COPIES)] * 2
    assert [batch["next"].batch_size for batch in model.batches] == [(COPIES, FRAMES // COPIES)] * 2


@pytest.mark.parametrize("precision", FLOATS)
def test_rows_are_exact_before_the_trainer_makes_them_coarser(precision, run, trainer_with):
    seen = []

    class Preparing(Model):
        def prepare_rollout(self, batch):
            seen.append(batch.clone())
            return batch

    run(precision, Preparing())
    ids = torch.cat([batch["collector", "traj_ids"] for batch in seen], 1)
    steps = torch.arange(FRAMES)
    assert torch.equal(ids, torch.stack([steps // 3 * 2, steps // 3 * 2 + 1]))


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"])
def test_ppo_trains_and_is_evaluated(precision, trainer_with):
    data = CollectorDataModule(
        "CartPole-v1",
        num_envs=COPIES,
        frames_per_batch=16,
        total_frames=32,
        updates=UpdateConfig(epochs=2, minibatch_size=8),
        evaluation=EvaluationConfig(num_episodes=2, max_frames=20),
    )
    model = PPO()
    trainer = trainer_with(max_epochs=-1, precision=precision)
    trainer.fit(model, datamodule=data)
    assert trainer.global_step == 8
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_prepared_batches_of_other_keys_keep_their_shape(run):
    class Preparing(Model):
        def prepare_rollout(self, batch):
            return batch.select("observation", "action").set("advantage", torch.zeros(batch.batch_size))

        def training_step(self, batch, batch_idx):
            assert batch["advantage"].shape == batch.batch_size == (4,)
            return super().training_step(batch, batch_idx)

    assert len(run("64-true", Preparing(), UpdateConfig(minibatch_size=4)).batches) == 4


@pytest.mark.parametrize("precision", FLOATS)
def test_continuous_actions_reach_the_env_under_every_precision(precision, trainer_with):
    env = CountingEnv(0, (3,), action_space=spaces.Box(-1.0, 1.0, (2,)))
    data = CollectorDataModule(env, frames_per_batch=4, total_frames=8)
    model = BoringRLModule(ConstantPolicy([0.5, 0.25]))
    trainer_with(max_epochs=-1, precision=precision).fit(model, datamodule=data)
    assert [action.tolist() for action in env.actions] == [[0.5, 0.25]] * 4 + [[-0.5, -0.75]] * 4
    assert all(action.dtype == "float32" for action in env.actions)


@pytest.mark.parametrize("precision", FLOATS)
def test_compact_batches_can_be_restored(precision, run):
    model = run(precision, Model(), rollout=RolloutConfig(compact_obs=True))
    for batch in model.batches:
        restored = restore_successors(batch)
        assert restored["next", "observation"].dtype == FLOATS[precision]
        check_batch(restored.apply(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf))
