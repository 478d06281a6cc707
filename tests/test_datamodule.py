"""`CollectorDataModule`: what it builds, says, and hands to a Trainer."""

from functools import partial

import lightning as L
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lit_collect import (
    CollectionMonitor,
    CollectorDataModule,
    EvaluationConfig,
    GymEnvFactory,
    ProcessBackend,
    RolloutConfig,
    UpdateConfig,
    check_batch,
)
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv

MAKERS = [partial(CountingEnv, i) for i in range(2)]


def make_data(env=CountingEnv, **options) -> CollectorDataModule:
    options = {"num_envs": 2, "frames_per_batch": 8, "total_frames": 24, "evaluation": None, "seed": 1, **options}
    return CollectorDataModule(env, **options)


def run(model: L.LightningModule, data: L.LightningDataModule, *callbacks: Callback, **options) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=list(callbacks),
        **{"enable_checkpointing": False, "max_epochs": -1, "num_sanity_val_steps": 0, **options},
    )
    trainer.fit(model, datamodule=data)
    return trainer


# --- without a trainer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "num_envs", "description", "copies"),
    [
        ("CartPole-v1", None, "CartPole-v1", 8),
        ("CartPole-v1", 4, "CartPole-v1", 4),
        (GymEnvFactory("CartPole-v1"), None, "CartPole-v1", 8),
        (CountingEnv, None, "lit_collect.testing.CountingEnv", 8),
        (MAKERS, None, None, 2),
        (lambda: SyncVectorEnv(MAKERS), None, None, 2),
        (CountingEnv(), None, None, 1),
    ],
)
def test_copies_are_those_of_the_env_or_eight(env, num_envs, description, copies):
    data = CollectorDataModule(env, lambda obs: torch.zeros(len(obs)).long(), num_envs=num_envs, frames_per_batch=16)
    batch = data.collect()
    data.close()
    assert batch.batch_size == (copies, 16 // copies)
    check_batch(batch)
    assert description is None or data.hparams["env"] == description
    assert description is None or f"env={description!r}" in str(data)


def test_loop_without_a_trainer_gets_the_stream():
    data = make_data(policy=ConstantPolicy(num_actions=2), updates=UpdateConfig(minibatch_size=4))
    assert data.statistics() == {}
    sizes = [batch.numel() for batch in data.train_dataloader()]
    assert sizes == [4] * 6
    assert data.frames_total == 24
    assert data.statistics()["batches"] == 3
    data.teardown("fit")
    assert data.statistics()["batches"] == 3  # what the closed collector said last
    assert data.frames_total == 24


def test_evaluation_without_a_trainer():
    data = make_data(policy=ConstantPolicy(num_actions=2), evaluation=EvaluationConfig(num_episodes=4, num_envs=2))
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert [batch.shape for batch in loader] == [(2, 3), (2, 3)]
    data.close()


def test_loaders_are_views_of_one_stream():
    data = make_data(policy=ConstantPolicy(num_actions=2))
    first = next(iter(data.train_dataloader()))
    second = next(iter(data.train_dataloader()))
    data.close()
    assert (first["collector", "traj_ids"].max(), second["collector", "traj_ids"].min()) == (3, 2)
    assert second["observation"][0, 0].tolist() == [0, 1, 1]  # where the first one ended


def test_policy_is_asked_for_where_there_is_none():
    data = make_data()
    with pytest.raises(TypeError, match=r"fitted with datamodule=.*, or CollectorDataModule\(policy=\.\.\.\)"):
        data.collect()


@pytest.mark.parametrize(
    ("space", "described"),
    [
        (spaces.Discrete(3, start=-1), {"kind": "discrete", "n": 3, "start": -1}),
        (spaces.Box(-1.0, 1.0, (1,)), {"kind": "box", "shape": [1], "dtype": "float32", "low": [-1.0], "high": [1.0]}),
    ],
)
def test_specs_are_plain_data(space, described):
    data = make_data(partial(CountingEnv, action_space=space))
    assert data.action_spec == described
    assert data.observation_spec["kind"] == "box"
    data.close()


def test_specs_of_a_vector_env_are_those_of_one_copy():
    data = make_data(lambda: SyncVectorEnv(MAKERS), num_envs=None)
    assert data.observation_spec["shape"] == [3]
    assert data.action_spec["n"] == 2
    data.close()


def test_hyperparameters_are_plain_and_complete(tmp_path):
    data = make_data(evaluation=EvaluationConfig(num_episodes=4), rollout=RolloutConfig(init_random_frames=8))
    torch.save(dict(data.hparams), tmp_path / "hparams.pt")
    loaded = torch.load(tmp_path / "hparams.pt", weights_only=True)
    assert loaded["frames_per_batch"] == 8
    assert loaded["rollout"]["init_random_frames"] == 8
    assert loaded["updates"] == {"epochs": 1, "minibatch_size": None, "shuffle": True, "updates_per_batch": 1}
    assert loaded["evaluation"]["num_episodes"] == 4


# --- the module's say -------------------------------------------------------------------------------------------------


def test_policy_may_be_a_method_of_the_module():
    class Model(BoringRLModule):
        def collector_policy(self):
            return lambda observation: torch.ones(len(observation), dtype=torch.int64)

    model = Model()
    run(model, make_data())
    assert all((batch["action"] == 1).all() for batch in model.batches)


def test_policy_given_to_the_data_module_acts_in_the_modules_place():
    model = BoringRLModule()
    run(model, make_data(policy=lambda observation: torch.ones(len(observation), dtype=torch.int64)))
    assert all((batch["action"] == 1).all() for batch in model.batches)


def test_policy_that_is_built_in_setup_is_found():
    class Late(BoringRLModule):
        def __init__(self) -> None:
            super().__init__()
            del self.policy

        def setup(self, stage) -> None:
            self.policy = ConstantPolicy(1.0, num_actions=2)

    model = Late()
    run(model, make_data())
    assert len(model.batches) == 3


def test_prepare_rollout_sees_each_whole_batch_once_without_gradients():
    class Preparing(BoringRLModule):
        seen: list

        def prepare_rollout(self, batch):
            assert not torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert batch.device == self.device
            check_batch(batch)
            self.seen.append(batch.batch_size)
            return batch.select("observation").set("number", torch.full(batch.batch_size, len(self.seen)))

    model = Preparing()
    model.seen = []
    run(model, make_data(updates=UpdateConfig(epochs=2, minibatch_size=4)))
    assert model.seen == [(2, 4)] * 3
    assert [batch["number"].unique().tolist() for batch in model.batches] == [[1]] * 4 + [[2]] * 4 + [[3]] * 4
    assert all(set(batch.keys()) == {"observation", "number"} for batch in model.batches)


def test_prepare_rollout_may_give_other_rows():
    class Flat(BoringRLModule):
        def prepare_rollout(self, batch):
            return batch.reshape(-1)

    model = Flat()
    run(model, make_data())
    assert [batch.batch_size for batch in model.batches] == [(8,)] * 3


def test_listeners_see_whole_batches_before_they_are_prepared():
    class Preparing(BoringRLModule):
        def prepare_rollout(self, batch):
            return batch.exclude("action")

    data, heard = make_data(updates=UpdateConfig(minibatch_size=4)), []
    data.rollout_listeners.append(lambda batch: heard.append(set(batch.keys())))
    run(Preparing(), data)
    assert len(heard) == 3
    assert all("action" in keys for keys in heard)


def test_training_batches_need_no_gradient_and_take_part_in_one():
    class Learning(BoringRLModule):
        def training_step(self, batch, batch_idx):
            assert not batch["value"].requires_grad
            loss = self.policy(batch["observation"].flatten(0, 1))["value"].mean()
            loss.backward(retain_graph=True)  # the batch is no inference tensor
            self.zero_grad()
            return super().training_step(batch, batch_idx)

    class Valued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, observation):
            return {"action": torch.zeros(len(observation)).long(), "value": self.layer(observation)}

    model = Learning(Valued(), learning_rate=0.1)
    run(model, make_data())
    assert len(model.batches) == 3


# --- the trainer ------------------------------------------------------------------------------------------------------


def test_module_of_the_user_needs_no_evaluation_and_hears_no_warning():
    run(BoringRLModule(), make_data(), num_sanity_val_steps=2)


def test_data_module_without_evaluation_says_so_where_it_is_asked_for():
    class Evaluated(BoringRLModule):
        def validation_step(self, batch, batch_idx) -> None:
            pass

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(TypeError, match=r"Found None\..*implement `def val_dataloader"):
        trainer.validate(Evaluated(), datamodule=make_data())


def test_subclass_may_bring_its_own_validation_data():
    class Own(CollectorDataModule):
        def val_dataloader(self):
            return DataLoader(torch.zeros(3), batch_size=3)

    class Evaluated(BoringRLModule):
        seen = 0

        def validation_step(self, batch, batch_idx) -> None:
            self.seen += 1

    model = Evaluated()
    data = Own(CountingEnv, num_envs=2, frames_per_batch=8, total_frames=8, evaluation=None)
    run(model, data)
    assert model.seen == 1


def test_whole_rounds_reach_every_evaluating_step():
    class Evaluated(BoringRLModule):
        def __init__(self) -> None:
            super().__init__()
            self.shapes: list = []

        def validation_step(self, batch, batch_idx):
            self.shapes.append(batch.batch_size)
            return batch.batch_size[0]

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return batch.batch_size

    model = Evaluated()
    data = make_data(evaluation=EvaluationConfig(num_episodes=4, num_envs=2))
    trainer = run(model, data)
    trainer.test(model, datamodule=data, verbose=False)
    assert model.shapes == [(2, 3)] * 4
    assert trainer.predict(model, datamodule=data) == [(2, 3)] * 2


def test_seconds_add_up():
    data = make_data()
    run(BoringRLModule(), data)
    seconds = data.seconds
    assert seconds["env_s"] > 0
    assert seconds["policy_s"] > 0
    assert seconds["collect_s"] > seconds["env_s"] + seconds["policy_s"]
    assert seconds["weight_sync_s"] > 0


def test_frames_per_batch_may_be_changed_by_a_tuner():
    data = make_data()
    data.frames_per_batch = 12
    model = BoringRLModule()
    run(model, data)
    assert [batch.numel() for batch in model.batches] == [12, 12]


def test_seed_may_be_that_of_lightning(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    models = []
    for seed in (None, 5):
        models.append(BoringRLModule(learning_rate=0.0))
        run(models[-1], make_data("CartPole-v1", seed=seed))
    first, second = (torch.cat([batch["observation"] for batch in model.batches], 1) for model in models)
    assert torch.equal(first, second)


def test_data_module_is_of_lightning_and_describes_itself():
    data = make_data()
    assert isinstance(data, L.LightningDataModule)
    assert str(data) == (
        "CollectorDataModule(env='lit_collect.testing.CountingEnv', num_envs=2, frames_per_batch=8, total_frames=24)"
    )


def test_checkpoint_monitor_finds_a_key_before_any_episode_ended(tmp_path):
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "kept", monitor="episode/return_mean", mode="max", every_n_train_steps=1
    )
    data = make_data(partial(CountingEnv, lengths=(100,)))
    run(BoringRLModule(), data, CollectionMonitor(), checkpoint, enable_checkpointing=True)
    assert checkpoint.best_model_score > 0


class Sized(BoringRLModule):
    """Builds itself from the spaces."""

    def configure_spaces(self, observation_spec, action_spec) -> None:
        self.told = (observation_spec["shape"], action_spec["n"])


class Copying(Callback):
    """Needs a finished module when it sets up, as weight averaging does."""

    def setup(self, trainer, pl_module, stage) -> None:
        self.found = pl_module.told


def test_module_is_told_the_spaces_before_callbacks_set_up():
    envs, copying = [], Copying()

    def make() -> CountingEnv:
        envs.append(CountingEnv())
        return envs[-1]

    run(Sized(), make_data(make), copying)
    assert copying.found == ([3], 2)
    assert len(envs) == 2  # the one that was asked for its spaces is a copy that collects


class Evaluated(BoringRLModule):
    """Lets Lightning run the evaluation."""

    def validation_step(self, batch, batch_idx) -> None:
        pass


def test_data_module_is_made_again_from_a_checkpoint(tmp_path):
    options = {"num_envs": 4, "frames_per_batch": 8, "total_frames": 16, "seed": 5}
    data = CollectorDataModule(
        "CartPole-v1",
        updates=UpdateConfig(epochs=2, minibatch_size=4),
        rollout=RolloutConfig(max_frames_per_traj=7),
        evaluation=EvaluationConfig(num_episodes=4),
        **options,
    )
    trainer = run(Evaluated(ConstantPolicy(num_actions=2)), data)
    trainer.save_checkpoint(tmp_path / "data.ckpt")
    again = CollectorDataModule.load_from_checkpoint(tmp_path / "data.ckpt", weights_only=True)
    assert dict(again.hparams) == dict(data.hparams)
    assert len(again.train_dataloader()) == len(data.train_dataloader())


# --- lazy layers ------------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    def forward(self, values):
        return {"logits": values}


class LazyLearner(BoringRLModule):
    """Its layers learn their sizes, and its normalisation its statistics, from what they are given."""

    def __init__(self) -> None:
        policy = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2), Logits())
        super().__init__(policy, learning_rate=0.01)

    def policy_weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.policy.parameters()])


class Weighing(Callback):
    """Needs the weights when it sets up."""

    def __init__(self, weights=LazyLearner.policy_weights) -> None:
        self._weights_of = weights

    def setup(self, trainer, pl_module, stage) -> None:
        self.weights = self._weights_of(pl_module)
        self.buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
        self.training = pl_module.policy.training
        self.drawn = torch.rand(3)


@pytest.mark.parametrize("env", [CountingEnv, "CartPole-v1", MAKERS, lambda: SyncVectorEnv(MAKERS)])
def test_lazy_layers_are_initialised_before_callbacks_set_up(env):
    model, weighing = LazyLearner(), Weighing()
    num_envs = 2 if env in (CountingEnv, "CartPole-v1") else None
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    run(model, make_data(env, num_envs=num_envs), weighing, WeightAveraging())
    assert len(weighing.weights) == len(model.policy_weights())
    assert weighing.training
    assert weighing.buffers["policy.1.num_batches_tracked"] == 0
    assert weighing.buffers["policy.1.running_mean"].eq(0).all()
    assert torch.equal(weighing.drawn, expected)  # the weights were drawn from other numbers
    assert len(model.batches) == 3


def test_lazy_layers_get_the_same_weights_from_the_same_seed():
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(seen))
        seen.append(Weighing())
        run(LazyLearner(), make_data(seed=seed), seen[-1])
    assert torch.equal(seen[0].weights, seen[1].weights)
    assert not torch.equal(seen[0].weights, seen[2].weights)


def test_lazy_policy_that_is_not_the_modules_is_initialised_as_well():
    policy = nn.Sequential(nn.LazyLinear(2), Logits())
    weighing = Weighing(lambda model: policy[0].weight.detach())
    run(BoringRLModule(), make_data(policy=policy), weighing)
    assert weighing.weights.shape == (2, 3)


def test_lazy_layers_use_up_no_env_and_no_frame():
    envs: list[CountingEnv] = []

    def make() -> CountingEnv:
        envs.append(CountingEnv())
        return envs[-1]

    model = LazyLearner()
    run(model, make_data(make))
    assert [env.closes for env in envs] == [1, 1, 1]
    first = model.batches[0]["observation"][:, 0]
    assert first[:, 1:].eq(0).all()  # the first step of the first episode


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("nursery")
def test_lazy_layers_are_initialised_before_workers_get_the_policy():
    model = LazyLearner()
    run(model, make_data("CartPole-v1", backend=ProcessBackend(2)))
    assert len(model.batches) == 3
    assert model.policy[0].weight.shape == (8, 4)


@pytest.mark.parametrize("name", ["updates", "rollout", "devices", "evaluation"])
def test_settings_of_another_kind_are_refused_and_named(name):
    with pytest.raises(TypeError, match=rf"{name} must be given as \w+Config\(\.\.\.\), got 'x'"):
        CollectorDataModule("CartPole-v1", **{name: "x"})
