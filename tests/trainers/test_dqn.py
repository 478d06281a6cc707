"""DQN on samples made by hand: what it learns from, what it tells others, and how it acts."""

import copy
import csv

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from torch import nn

from lit_collect import Collector, CollectorDataModule, NStep, OfflineDataModule, ReplayConfig, UpdateConfig
from lit_collect.frames import MASK, N_STEPS, WEIGHT
from lit_collect.offline.episodes import as_rows
from lit_collect.offline.memory_maps import RowWriter
from lit_collect.replay import SliceSampler
from trainers.dqn import DQN

BOX = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
LINE = {"kind": "box", "shape": [1], "dtype": "float32", "low": [-9.0], "high": [9.0]}
TWO = {"kind": "discrete", "n": 2, "start": 0}
DICT = {"kind": "dict", "spaces": {"body": BOX, "gear": {"kind": "discrete", "n": 3, "start": 0}}}
IMAGE = {"kind": "box", "shape": [1, 36, 36], "dtype": "uint8"}


def dqn(observation=BOX, action=TWO, **options):
    return DQN(observation_spec=observation, action_spec=action, **{"hidden": (8,), **options})


def line_dqn(**options):
    """Its network gives (x, 2 x), its target (10 x, 5 x)."""
    module = dqn(LINE, hidden=(), **options)
    with torch.no_grad():
        module.policy.network.layers[0].weight.copy_(torch.tensor([[1.0], [2.0]]))
        module.target.layers[0].weight.copy_(torch.tensor([[10.0], [5.0]]))
    return module


def line_sample(next_observation, *, terminated=(), truncated=(), **others):
    """Rows with reward 1 and action 0; `terminated` and `truncated` name those that end."""
    size = len(next_observation)
    flags = {"terminated": torch.zeros(size, 1, dtype=torch.bool), "truncated": torch.zeros(size, 1, dtype=torch.bool)}
    flags["terminated"][list(terminated)] = True
    flags["truncated"][list(truncated)] = True
    following = {
        "observation": torch.tensor(next_observation).view(size, 1),
        "reward": torch.ones(size, 1),
        "done": flags["terminated"] | flags["truncated"],
        **flags,
    }
    rows = {"observation": torch.zeros(size, 1), "action": torch.zeros(size, dtype=torch.int64), "next": following}
    sample = TensorDict(rows, [size])
    for key, value in others.items():
        sample[{"n_steps": N_STEPS, "weight": WEIGHT, "mask": MASK}[key]] = torch.tensor(value)
    return sample


def random_sample(size=32, seed=0, *, observation=None):
    generator = torch.Generator().manual_seed(seed)
    observed = observation or (lambda: {"observation": torch.randn(size, 4, generator=generator)})
    following = {
        **observed(),
        "reward": torch.randn(size, 1, generator=generator),
        "terminated": torch.rand(size, 1, generator=generator) < 0.2,
    }
    action = torch.randint(2, (size,), generator=generator)
    return TensorDict({**observed(), "action": action, "next": following}, [size])


class Samples(L.LightningDataModule):
    """Gives random samples as a data module with a replay buffer does, a few of each collected batch."""

    frames_per_batch = 10

    def __init__(self, updates=8, updates_per_batch=2, prioritized=False, total_frames=None):
        super().__init__()
        self.updates, self.updates_per_batch, self.prioritized = updates, updates_per_batch, prioritized
        self.total_frames = updates // updates_per_batch * 10 if total_frames is None else total_frames
        self.frames_total = 0
        self.told = []

    @property
    def progress(self):
        return self.frames_total / self.total_frames

    def update_priority(self, sample, priority):
        self.told.append((sample["index"], priority))

    def train_dataloader(self):
        return self

    def __len__(self):
        return self.updates

    def val_dataloader(self):
        return []

    def __iter__(self):
        while self.frames_total // 10 * self.updates_per_batch < self.updates:
            self.frames_total += 10
            for number in range(self.updates_per_batch):
                sample = random_sample(seed=self.frames_total + number)
                sample["index"] = torch.arange(32) + 100 * self.frames_total + number
                if self.prioritized:
                    sample[WEIGHT] = torch.linspace(0.1, 1.0, 32)
                yield sample


def trainer_in(folder, **options):
    return L.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        limit_val_batches=0,
        **{"max_epochs": 1, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 2, **options},
    )  # fmt: skip


# --- targets --------------------------------------------------------------------------------------------------------


def test_value_target_when_terminated_is_the_reward_and_when_truncated_looks_ahead():
    sample = line_sample([2.0, 2.0, 2.0], terminated=[1], truncated=[2])
    # the successors are worth 2 * 10, by the target's own choice
    target = line_dqn(gamma=0.5, double=False).value_target(sample)
    assert target.tolist() == [11.0, 1.0, 11.0]


def test_value_target_when_double_takes_the_action_of_the_trained_network():
    # the trained network prefers action 1 where x > 0 and action 0 where x < 0
    target = line_dqn(gamma=0.5).value_target(line_sample([2.0, -2.0]))
    assert target.tolist() == [1 + 0.5 * 10, 1 - 0.5 * 20]


def test_value_target_of_several_steps_discounts_by_their_number():
    target = line_dqn(gamma=0.5, double=False).value_target(line_sample([2.0, 2.0], n_steps=[1, 3]))
    assert target.tolist() == [1 + 0.5 * 20, 1 + 0.125 * 20]


def test_value_target_takes_only_actions_that_the_successor_allows():
    sample = line_sample([2.0, 2.0])
    sample["next", "action_mask"] = torch.tensor([[False, True], [True, True]])
    target = line_dqn(gamma=0.5, double=False).value_target(sample)
    assert target.tolist() == [1 + 0.5 * 10, 1 + 0.5 * 20]


def test_training_step_is_the_huber_loss_of_the_taken_actions():
    module = dqn()
    sample = random_sample()
    values = module.policy.network(sample["observation"])
    taken = values[torch.arange(32), sample["action"]]
    expected = nn.functional.smooth_l1_loss(taken, module.value_target(sample))
    torch.testing.assert_close(module.training_step(sample), expected)


def test_training_step_weighs_rows_by_importance():
    module = dqn()
    sample = random_sample()
    half = sample.clone()
    half[WEIGHT] = torch.cat([torch.ones(16), torch.zeros(16)])
    torch.testing.assert_close(module.training_step(half), module.training_step(sample[:16]) / 2)


def test_training_step_on_slices_leaves_padding_out():
    module = dqn()
    sample = random_sample()
    slices = sample.reshape(4, 8)
    torch.testing.assert_close(module.training_step(slices), module.training_step(sample))
    slices[MASK] = torch.ones(4, 8, dtype=torch.bool)
    slices[MASK][1, 3:] = False
    slices["observation"][1, 3:] = 1e6
    kept = torch.cat([sample[:11], sample[16:]])
    torch.testing.assert_close(module.training_step(slices), module.training_step(kept))


@pytest.mark.parametrize("dueling", [False, True])
def test_training_step_reaches_every_weight_that_is_trained_and_no_other(dueling):
    module = dqn(hidden=(8, 8), dueling=dueling)
    module.training_step(random_sample()).backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None) == name.startswith("policy."), name
        assert parameter.requires_grad == name.startswith("policy."), name


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("kind", ["dict", "image"])
def test_training_step_takes_dicts_and_images(kind, dueling):
    def parts():
        return {"body": torch.randn(32, 4), "gear": torch.randint(3, (32,))}

    def pixels():
        return {"observation": torch.randint(256, (32, 1, 36, 36), dtype=torch.uint8)}

    module = dqn(DICT if kind == "dict" else IMAGE, dueling=dueling)
    sample = random_sample(observation=parts if kind == "dict" else pixels)
    assert module.training_step(sample).isfinite()


# --- acting ---------------------------------------------------------------------------------------------------------


def test_policy_at_the_start_acts_at_random_and_its_likeliest_action_is_the_best():
    module, observation = dqn(), torch.randn(100, 4)
    logits = module(observation)["logits"]
    torch.testing.assert_close(logits.softmax(-1), torch.full((100, 2), 0.5), atol=1e-4, rtol=0)
    assert torch.equal(logits.argmax(-1), module.policy.network(observation).argmax(-1))


def test_follow_progress_lowers_epsilon_which_is_among_the_weights():
    module = dqn(epsilon_start=0.9, epsilon_end=0.1, epsilon_fraction=0.5)
    seen = []
    for progress in (0.0, 0.25, 0.5, 1.0):
        module.follow_progress(progress)
        seen.append(module.policy.state_dict()["epsilon"].item())
    assert seen == pytest.approx([0.9, 0.5, 0.1, 0.1])


def test_policy_with_a_mask_forbids_actions():
    mask = torch.tensor([[True, False]]).expand(10, 2)
    logits = dqn()(torch.randn(10, 4), mask)["logits"]
    assert torch.equal(logits.softmax(-1), torch.tensor([[1.0, 0.0]]).expand(10, 2))


# --- target networks ------------------------------------------------------------------------------------------------


def test_target_moves_after_every_so_many_updates(tmp_path):
    model = DQN(hidden=(8,), target_update_every=3, observation_spec=BOX, action_spec=TWO)
    behind = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            pairs = zip(module.target.parameters(), module.policy.network.parameters(), strict=True)
            behind.append(not all(torch.equal(old, new) for old, new in pairs))

    trainer_in(tmp_path, callbacks=[Watch()]).fit(model, datamodule=Samples(updates=8))
    # a callback that saves a checkpoint at an update finds the target of that update
    assert behind == [True, True, False, True, True, False, True, True]
    assert model.num_updates == 8


def test_updates_are_counted_by_optimizer_steps_under_accumulation(tmp_path):
    model = DQN(hidden=(8,), observation_spec=BOX, action_spec=TWO)
    trainer_in(tmp_path, accumulate_grad_batches=4).fit(model, datamodule=Samples(updates=8))
    assert model.num_updates == 2


# --- with a data module ---------------------------------------------------------------------------------------------


def test_fit_lowers_epsilon_with_the_frames(tmp_path):
    model, epsilons = dqn(epsilon_end=0.0, epsilon_fraction=1.0), []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            epsilons.append(module.policy.epsilon.item())

    trainer_in(tmp_path, callbacks=[Watch()]).fit(model, datamodule=Samples(updates=8))
    assert epsilons == pytest.approx([0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0.0, 0.0])


def test_fit_without_a_frame_budget_says_that_epsilon_cannot_fall(tmp_path):
    with pytest.raises(ValueError, match=r"epsilon cannot fall from 1 to 0.05 : expected a frame budget"):
        trainer_in(tmp_path).fit(dqn(), datamodule=Samples(total_frames=-1))


def test_fit_from_offline_data_without_an_end_needs_no_budget_as_nobody_acts(tmp_path):
    with (
        Collector("CartPole-v1", num_envs=2, frames_per_batch=64, seed=0) as collector,
        RowWriter(tmp_path / "rows", {}) as writer,
    ):
        writer.write(as_rows(collector.collect()))
    data = OfflineDataModule(str(tmp_path / "rows"), batch_size=8, updates_per_epoch=2, env="CartPole-v1", seed=0)
    stop = LambdaCallback(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True))
    trainer = trainer_in(tmp_path, max_epochs=-1, callbacks=[stop])
    trainer.fit(DQN(hidden=(8,)), datamodule=data)
    assert data.total_frames == -1
    assert trainer.global_step > 0


def test_fit_tells_a_prioritized_sampler_how_wrong_each_row_was(tmp_path):
    model, data = dqn(learning_rate=1e-12, target_update_every=1000), Samples(updates=2, prioritized=True)
    trainer_in(tmp_path).fit(model, datamodule=data)
    assert [index[0].item() for index, _ in data.told] == [1000, 1001]
    sample = random_sample(seed=11)
    value = model.policy.network(sample["observation"])[torch.arange(32), sample["action"]]
    expected = (value - model.value_target(sample)).abs()
    torch.testing.assert_close(data.told[1][1], expected.detach())
    assert not data.told[1][1].requires_grad


def test_fit_tells_nobody_where_nothing_is_prioritized(tmp_path):
    data = Samples(updates=2)
    trainer_in(tmp_path).fit(dqn(), datamodule=data)
    assert data.told == []


def test_fit_logs_means_over_at_least_as_many_updates_as_the_trainer_says(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="run")
    model, data = dqn(epsilon_end=0.0, epsilon_fraction=1.0), Samples(updates=12)
    trainer_in(tmp_path, logger=logger, log_every_n_steps=4).fit(model, datamodule=data)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/value_loss")]
    assert [int(row["step"]) for row in rows] == [4, 8, 12]
    assert {"train/value_loss", "train/q_mean", "train/epsilon", "train/learning_rate"} <= set(rows[0])


def test_fit_limits_the_gradient_to_max_grad_norm(tmp_path):
    model, norms = dqn(max_grad_norm=1e-3), []

    class Watch(L.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            gradients = [p.grad for p in module.policy.parameters() if p.grad is not None]
            if gradients:
                norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())

    trainer_in(tmp_path, callbacks=[Watch()]).fit(model, datamodule=Samples(updates=4))
    assert norms
    assert max(norms) <= 1e-3 * (1 + 1e-3)


def test_resumed_run_ends_with_the_same_weights_targets_and_epsilon(tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole = dqn(target_update_every=3, epsilon_fraction=1.0)
    begin = copy.deepcopy(whole)
    trainer_in(tmp_path, callbacks=[Save()], max_epochs=1).fit(whole, datamodule=Samples(updates=8))
    assert begin.num_updates == 0

    checkpoint = torch.load(tmp_path / "middle.ckpt", weights_only=True)
    rest = DQN.load_from_checkpoint(tmp_path / "middle.ckpt", weights_only=True)
    assert rest.num_updates == 4
    assert rest.policy.epsilon.item() == pytest.approx(1 - 0.95 * 0.5)
    optimizer = rest.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for number in range(4, 8):
        frames = (number // 2 + 1) * 10
        optimizer.zero_grad()
        rest.training_step(random_sample(seed=frames + number % 2)).backward()
        nn.utils.clip_grad_norm_(rest.policy.parameters(), rest.max_grad_norm)
        optimizer.step()
        rest.count_update()
    rest.follow_progress(1.0)
    for (name, ours), (_, theirs) in zip(rest.state_dict().items(), whole.state_dict().items(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_fit_runs_in_other_precisions(precision, tmp_path):
    model = dqn(dueling=True)
    trainer_in(tmp_path, precision=precision).fit(model, datamodule=Samples(updates=4))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("learning_rate", 0.0), ("gamma", 1.1), ("tau", 0.0), ("tau", 1.5), ("target_update_every", 0),
        ("epsilon_start", 1.5), ("epsilon_end", -0.1), ("epsilon_fraction", 2.0), ("max_grad_norm", 0.0),
    ],
)  # fmt: skip
def test_setting_out_of_range_is_refused_by_name(name, number):
    with pytest.raises(ValueError, match=rf"{name} is out of range : expected .*, got {number}; change DQN\({name}="):
        DQN(**{name: number})


@pytest.mark.parametrize("kind", ["box", "multi_discrete", "multi_binary"])
def test_actions_that_are_not_one_choice_are_refused(kind):
    with pytest.raises(ValueError, match=rf"expected kind 'discrete' to learn a value for each action, got '{kind}'"):
        dqn(action={"kind": kind, "shape": [2], "nvec": [2, 2]})


@pytest.mark.parametrize("hidden", [(), (8,), (8, 6)])
def test_dueling_streams_share_all_hidden_layers_but_the_last(hidden):
    head = dqn(hidden=hidden, dueling=True).policy.network.layers
    shared = [layer.out_features for layer in head.shared.modules() if isinstance(layer, nn.Linear)]
    assert shared == list(hidden[:-1])
    for stream, outputs in ((head.value, 1), (head.advantage, 2)):
        sizes = [layer.out_features for layer in stream if isinstance(layer, nn.Linear)]
        assert sizes == [*hidden[-1:], outputs]


# --- with a replay buffer -------------------------------------------------------------------------------------------


class Picky(gymnasium.Env):
    """Episodes of five steps; says which actions are allowed, and raises where another is taken."""

    action_space = gymnasium.spaces.Discrete(3, start=1)

    def __init__(self, observation):
        self.observation_space = observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._step = 0
        return self.observation_space.sample(), {"action_mask": self._draw()}

    def step(self, action):
        if not self._allowed[action - 1]:
            raise ValueError(f"{action} is not among {self._allowed}")
        self._step += 1
        return self.observation_space.sample(), 1.0, self._step == 5, False, {"action_mask": self._draw()}

    def _draw(self):
        self._allowed = self.np_random.random(3) < 0.4
        self._allowed[self.np_random.integers(3)] = True
        return self._allowed.copy()


BODY = gymnasium.spaces.Box(-1.0, 1.0, (3,))
OBSERVATIONS = {
    "box": BODY,
    "dict": gymnasium.spaces.Dict({"body": BODY, "gear": gymnasium.spaces.Discrete(4)}),
    "image": gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8),
}


def replayed(env, replay, *, frames=96, **options):
    return CollectorDataModule(
        env,
        num_envs=2,
        frames_per_batch=16,
        total_frames=frames,
        replay=replay,
        updates=UpdateConfig(updates_per_batch=2),
        seed=0,
        **options,
    )


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_fit_from_a_buffer_takes_allowed_actions_only(kind, tmp_path):
    model = DQN(hidden=(8,), dueling=True, epsilon_end=0.0, epsilon_fraction=0.5)
    data = replayed(lambda: Picky(OBSERVATIONS[kind]), ReplayConfig(capacity=64, batch_size=8))
    trainer_in(tmp_path, max_epochs=-1).fit(model, datamodule=data)
    assert model.num_updates == 12
    assert model.policy.epsilon == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"transforms": (NStep(3, 0.9),)},
        {"sampler": "prioritized"},
        {"sampler": "prioritized", "transforms": (NStep(3, 0.9),)},
        {"slice_len": 4},
        {"sampler": SliceSampler(slice_len=8, strict_length=False)},
    ],
    ids=["n-step", "prioritized", "both", "slices", "padded slices"],
)
def test_fit_takes_every_kind_of_sample(settings, tmp_path):
    model, seen = DQN(hidden=(8,), gamma=0.9), []

    def watched(sample, batch_idx=0):
        seen.append(sample)
        return DQN.training_step(model, sample, batch_idx)

    model.training_step = watched
    data = replayed(lambda: Picky(BODY), ReplayConfig(capacity=64, batch_size=16, **settings))
    trainer_in(tmp_path, max_epochs=-1).fit(model, datamodule=data)
    assert len(seen) == 12
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if "transforms" in settings:
        rows = model.rows(seen[-1])
        ends = rows["next", "terminated"].squeeze(-1)
        torch.testing.assert_close(model.discount(rows), torch.where(ends, 0.0, 0.9 ** rows[N_STEPS].float()))
        assert rows[N_STEPS].max() == 3
    if settings.get("sampler") == "prioritized":
        assert seen[-1][WEIGHT].unique().numel() > 1  # errors have become priorities


@pytest.mark.parametrize(
    "backend", ["direct", pytest.param("process", marks=[pytest.mark.slow, pytest.mark.processes])]
)
def test_who_collects_acts_with_the_epsilon_of_the_learner(backend, tmp_path):
    model = DQN(hidden=(8,), epsilon_end=0.0, epsilon_fraction=1.0)
    data, acted_with = replayed("CartPole-v1", ReplayConfig(capacity=64, batch_size=8), frames=64, backend=backend), []
    data.rollout_listeners.append(lambda batch: acted_with.append(2 * batch["logits"].exp().min().item()))
    trainer_in(tmp_path, max_epochs=-1).fit(model, datamodule=data)
    # each batch with what the updates on the one before it left
    assert acted_with == pytest.approx([1.0, 0.75, 0.5, 0.25], abs=1e-3)


def test_resumed_fit_goes_on_with_targets_counter_and_epsilon(tmp_path):
    def run(frames, ckpt_path=None):
        model = DQN(hidden=(8,), target_update_every=5)
        data = replayed("CartPole-v1", ReplayConfig(capacity=64, batch_size=8), frames=frames)
        trainer = trainer_in(tmp_path, max_epochs=-1)
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
        trainer.save_checkpoint(tmp_path / f"{frames}.ckpt")
        return model, data

    first, _ = run(48)
    assert first.num_updates == 6
    second, data = run(96, tmp_path / "48.ckpt")
    assert second.num_updates == 12
    assert data.replay_buffer.write_count == 96
    assert second.policy.epsilon == pytest.approx(0.05)
