"""PPO on synthetic batches: what it prepares, what it optimizes, and how it behaves under a Trainer."""

import csv
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from torch.distributions import Categorical, Normal

from trainers import PPO

LINE = {"kind": "box", "shape": [1], "dtype": "float32", "low": [-9.0], "high": [9.0]}
BOX = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
TWO = {"kind": "discrete", "n": 2, "start": 0}


def ppo(observation=BOX, action=TWO, **options):
    return PPO(observation_spec=observation, action_spec=action, **options)


def ten_times_critic(**options):
    """Its critic is the line V(x) = 10 x."""
    module = ppo(LINE, hidden=(), **options)
    with torch.no_grad():
        module.critic.layers[0].weight.fill_(10.0)
    return module


def line_batch(observation, next_observation, *, terminated=(), truncated=(), reward=1.0, **collector):
    """One env copy; `terminated` and `truncated` name the steps where it ends."""
    length = len(observation)
    flags = {"terminated": torch.zeros(1, length, 1, dtype=torch.bool), "truncated": None}
    flags["truncated"] = flags["terminated"].clone()
    flags["terminated"][0, list(terminated)] = True
    flags["truncated"][0, list(truncated)] = True
    following = {
        "observation": torch.tensor(next_observation).view(1, length, 1),
        "reward": torch.full((1, length, 1), reward),
        "done": flags["terminated"] | flags["truncated"],
        **flags,
    }
    rows = {
        "observation": torch.tensor(observation).view(1, length, 1),
        "action": torch.zeros(1, length, dtype=torch.int64),
        "log_prob": torch.full((1, length), math.log(0.5)),
        "next": TensorDict(following, [1, length]),
    }
    if collector:
        rows["collector"] = TensorDict({k: torch.tensor([v]) for k, v in collector.items()}, [1, length])
    return TensorDict(rows, [1, length])


def minibatch(module, num_rows=32, seed=0):
    """Rows whose acting policy was a little different from the module's."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(num_rows, 4, generator=generator)
    with torch.no_grad():
        parameters = module(observation)
    if "logits" in parameters:
        action = torch.randint(2, (num_rows,), generator=generator)
        log_prob = Categorical(logits=parameters["logits"]).log_prob(action)
    else:
        action = torch.randn(parameters["loc"].shape, generator=generator)
        log_prob = Normal(**parameters).log_prob(action).sum(-1)
    noise, advantage, target = torch.randn(3, num_rows, generator=generator)
    rows = {
        "observation": observation,
        "action": action,
        "log_prob": log_prob + 0.3 * noise,
        "advantage": advantage,
        "value_target": target,
    }
    return TensorDict(rows, [num_rows])


def reference_loss(module, rows, *, clip, value_coefficient, entropy_coefficient):
    parameters = module(rows["observation"])
    if "logits" in parameters:
        distribution = Categorical(logits=parameters["logits"])
        log_prob, entropy = distribution.log_prob(rows["action"]), distribution.entropy()
    else:
        distribution = Normal(**parameters)
        log_prob, entropy = distribution.log_prob(rows["action"]).sum(-1), distribution.entropy().sum(-1)
    advantage = rows["advantage"]
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
    total = 0.0
    for i in range(len(rows)):
        ratio = (log_prob[i] - rows["log_prob"][i]).exp()
        surrogate = torch.min(ratio * advantage[i], ratio.clamp(1 - clip, 1 + clip) * advantage[i])
        error = (module.critic(rows["observation"][i]) - rows["value_target"][i]) ** 2
        total = total - surrogate + value_coefficient * error - entropy_coefficient * entropy[i]
    return total / len(rows)


def train_alone(module, optimizer, rows):
    optimizer.zero_grad()
    module.training_step(rows, 0).backward()
    module.configure_gradient_clipping(optimizer)
    optimizer.step()


class SyntheticData(L.LightningDataModule):
    """Hands out prepared random batches, `epochs` minibatches of each, like a collector's data module."""

    observation_spec = BOX
    action_spec = TWO

    def __init__(self, num_batches=2, epochs=3):
        super().__init__()
        self.num_batches = num_batches
        self.epochs = epochs
        self.total_frames = num_batches * 16  # of `random_batch`
        self.progress = 0.0
        self.learning_rates = []

    def train_dataloader(self):
        return SyntheticLoader(self)

    def val_dataloader(self):
        return [TensorDict({"observation": torch.zeros(1, 3, 4)}, [1, 3])]


class SyntheticLoader:
    def __init__(self, data):
        self._data = data

    def __len__(self):
        return self._data.num_batches * self._data.epochs

    def __iter__(self):
        data, module = self._data, self._data.trainer.lightning_module
        for index in range(data.num_batches):
            data.progress = (index + 1) / data.num_batches  # counts the batch at hand
            prepared = module.prepare_rollout(random_batch(seed=index)).reshape(-1)
            for _ in range(data.epochs):
                data.learning_rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])
                yield prepared


def random_batch(seed, shape=(2, 8)):
    generator = torch.Generator().manual_seed(seed)
    terminated, truncated = torch.rand(2, *shape, 1, generator=generator) < 0.2
    following = {
        "observation": torch.randn(*shape, 4, generator=generator),
        "reward": torch.randn(*shape, 1, generator=generator),
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    rows = {
        "observation": torch.randn(*shape, 4, generator=generator),
        "action": torch.randint(2, shape, generator=generator),
        "log_prob": torch.full(shape, math.log(0.5)),
        "next": TensorDict(following, shape),
    }
    return TensorDict(rows, shape)


def trainer(tmp_path, **options):
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": tmp_path,
    }
    return L.Trainer(**{**settings, **options})


def test_prepare_rollout_when_truncated_bootstraps_from_the_terminal_observation():
    # gamma 0.5, lambda 0, V(x) = 10 x, so A = 1 + 5 x' - 10 x.  The episode is cut behind step 1: its successor is the
    # terminal observation 7, not the observation 0 of the new episode in the next row.
    # A = [1 + 10 - 10, 1 + 35 - 20, 1 + 5 - 0] = [1, 16, 6];  target = A + V = [11, 36, 6]
    module = ten_times_critic(gamma=0.5, lambda_=0.0)
    prepared = module.prepare_rollout(line_batch([1.0, 2.0, 0.0], [2.0, 7.0, 1.0], truncated=[1]))
    torch.testing.assert_close(prepared["advantage"], torch.tensor([[1.0, 16.0, 6.0]]))
    torch.testing.assert_close(prepared["value_target"], torch.tensor([[11.0, 36.0, 6.0]]))
    torch.testing.assert_close(prepared["value"], torch.tensor([[10.0, 20.0, 0.0]]))


@pytest.mark.parametrize("truncated", [[], [1]])
def test_prepare_rollout_when_terminated_has_no_future_whatever_else_is_set(truncated):
    # A_1 = 1 - 20 = -19, target 1
    module = ten_times_critic(gamma=0.5, lambda_=0.0)
    prepared = module.prepare_rollout(line_batch([1.0, 2.0, 0.0], [2.0, 7.0, 1.0], terminated=[1], truncated=truncated))
    torch.testing.assert_close(prepared["advantage"], torch.tensor([[1.0, -19.0, 6.0]]))
    torch.testing.assert_close(prepared["value_target"], torch.tensor([[11.0, 1.0, 6.0]]))


def test_prepare_rollout_returns_what_training_needs_and_leaves_the_batch_alone():
    module, batch = ppo(), random_batch(seed=0)
    before = batch.clone()
    prepared = module.prepare_rollout(batch)
    expected = {"observation", "action", "log_prob", "value", "advantage", "value_target"}
    assert set(prepared.keys(include_nested=True, leaves_only=True)) == expected
    assert prepared.batch_size == batch.batch_size
    assert not any(tensor.requires_grad for tensor in prepared.values())
    assert (batch == before).all()
    assert torch.equal(prepared["action"], batch["action"])


def test_prepare_rollout_keeps_the_mask_and_cuts_before_a_masked_row():
    # Row 2 is padding behind a fragment that simply stops: nothing of it may flow into row 1.
    # gamma 1, lambda 1, V = 10 x: A_1 = 1 + 30 - 20 = 11, A_0 = 1 + 20 - 10 + 11 = 22
    module = ten_times_critic(gamma=1.0, lambda_=1.0)
    batch = line_batch([1.0, 2.0, 0.0], [2.0, 3.0, 0.0], reward=1.0, mask=[True, True, False])
    prepared = module.prepare_rollout(batch)
    assert prepared["collector", "mask"].tolist() == [[True, True, False]]
    torch.testing.assert_close(prepared["advantage"][0, :2], torch.tensor([22.0, 11.0]))


def test_prepare_rollout_cuts_where_the_trajectory_id_changes():
    # Two fragments one behind the other: A_1 = 1 + 30 - 20 = 11, A_0 = 22, A_2 = 1 + 60 - 50 = 11
    module = ten_times_critic(gamma=1.0, lambda_=1.0)
    batch = line_batch([1.0, 2.0, 5.0], [2.0, 3.0, 6.0], traj_ids=[0, 0, 4])
    torch.testing.assert_close(module.prepare_rollout(batch)["advantage"], torch.tensor([[22.0, 11.0, 11.0]]))


@pytest.mark.parametrize("action", [TWO, {**BOX, "shape": [3]}], ids=["discrete", "continuous"])
@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
def test_training_step_loss_and_gradient_equal_the_plain_formula(action, entropy_coefficient):
    module = ppo(action=action, clip=0.2, value_coefficient=0.7, entropy_coefficient=entropy_coefficient)
    rows = minibatch(module)
    loss = module.training_step(rows, 0)
    reference = reference_loss(module, rows, clip=0.2, value_coefficient=0.7, entropy_coefficient=entropy_coefficient)
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    parameters = [*module.policy.parameters(), *module.critic.parameters()]
    ours, theirs = (
        torch.autograd.grad(x, parameters, allow_unused=True, materialize_grads=True) for x in (loss, reference)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_training_step_of_one_row_is_finite():
    module = ppo()
    loss = module.training_step(minibatch(module, num_rows=1), 0)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_training_step_without_normalization_uses_the_advantage_as_it_is():
    module = ppo(normalize_advantage=False, value_coefficient=0.0)
    rows = minibatch(module)
    rows["log_prob"] = Categorical(logits=module(rows["observation"])["logits"]).log_prob(rows["action"]).detach()
    loss = module.training_step(rows, 0)  # every ratio is 1
    torch.testing.assert_close(loss, -rows["advantage"].mean(), rtol=1e-5, atol=1e-6)


def test_discrete_bandit_without_a_trainer_learns_the_better_action():
    torch.manual_seed(0)
    module = ppo(LINE, learning_rate=0.01)
    optimizer = module.configure_optimizers()
    start = torch.zeros(1, 1)
    assert module(start)["logits"].softmax(-1)[0, 1] < 0.6
    for _ in range(20):
        batch = line_batch([0.0] * 64, [0.0] * 64, terminated=range(64))
        with torch.no_grad():
            distribution = Categorical(logits=module(batch["observation"])["logits"])
        batch["action"] = distribution.sample()
        batch["log_prob"] = distribution.log_prob(batch["action"])
        batch["next", "reward"] = batch["action"].float().unsqueeze(-1)
        prepared = module.prepare_rollout(batch).reshape(-1)
        for _ in range(5):
            train_alone(module, optimizer, prepared)
    assert module(start)["logits"].softmax(-1)[0, 1] > 0.9


def test_continuous_bandit_without_a_trainer_moves_its_mean_to_the_best_action():
    torch.manual_seed(0)
    module = ppo(LINE, LINE, learning_rate=0.01)
    optimizer = module.configure_optimizers()
    for _ in range(60):
        batch = line_batch([0.0] * 64, [0.0] * 64, terminated=range(64))
        with torch.no_grad():
            distribution = Normal(**module(batch["observation"]))
        batch["action"] = distribution.sample()
        batch["log_prob"] = distribution.log_prob(batch["action"]).sum(-1)
        batch["next", "reward"] = -((batch["action"] - 2.0) ** 2)
        prepared = module.prepare_rollout(batch).reshape(-1)
        for _ in range(5):
            train_alone(module, optimizer, prepared)
    parameters = module(torch.zeros(1, 1))
    assert parameters["loc"].item() == pytest.approx(2.0, abs=0.3)
    assert parameters["scale"].item() < 0.8


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_configure_gradient_clipping_equals_torch(scale):
    module, twin = ppo(), ppo()
    optimizer = module.configure_optimizers()
    generator = torch.Generator().manual_seed(0)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        p.grad = scale * torch.randn(p.shape, generator=generator)
        q.grad = p.grad.clone()
    module.configure_gradient_clipping(optimizer)
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=0.0)


def test_fit_takes_the_spaces_from_the_data_module_and_trains(tmp_path):
    module, data = PPO(), SyntheticData()
    run = trainer(tmp_path, limit_val_batches=1)
    run.fit(module, datamodule=data)
    assert run.global_step == 6
    assert module.hparams["observation_spec"] == BOX
    assert data.learning_rates == [3e-4] * 6


def test_fit_when_the_trainer_clips_gradients_leaves_it_to_the_trainer(tmp_path):
    norms = []

    class Norms(L.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                norms.append(torch.nn.utils.get_total_norm(gradients).item())

    run = trainer(tmp_path, gradient_clip_val=1e-3, limit_val_batches=0, callbacks=[Norms()])
    run.fit(PPO(max_grad_norm=0.5), datamodule=SyntheticData())
    assert norms == pytest.approx([1e-3] * len(norms), rel=1e-2)
    assert norms


def test_fit_with_annealing_lowers_rate_and_clip_with_the_progress_of_the_data(tmp_path):
    module, data = PPO(learning_rate=0.01, clip=0.4, anneal=True), SyntheticData(num_batches=4, epochs=1)
    trainer(tmp_path, limit_val_batches=0).fit(module, datamodule=data)
    assert data.learning_rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    # the last batch came at 3/4 of the budget: the ratio may now move by a quarter of 0.4
    rows = minibatch(module)
    reference = reference_loss(module, rows, clip=0.1, value_coefficient=0.5, entropy_coefficient=0.0)
    torch.testing.assert_close(module.training_step(rows, 0), reference, rtol=1e-5, atol=1e-6)


def test_fit_hands_the_statistics_of_every_batch_to_the_loggers_once(tmp_path):
    logger = CSVLogger(tmp_path)
    trainer(tmp_path, logger=logger, limit_val_batches=0).fit(PPO(), datamodule=SyntheticData(num_batches=3, epochs=2))
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [2, 4, 6]
    losses = {"train/policy_loss", "train/value_loss"}
    diagnostics = {"train/entropy", "train/approx_kl", "train/clip_fraction", "train/explained_variance"}
    assert set(rows[0]) == losses | diagnostics | {"train/learning_rate", "step"}
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())
    assert float(rows[0]["train/entropy"]) == pytest.approx(math.log(2), abs=0.01)
    assert float(rows[0]["train/learning_rate"]) == pytest.approx(3e-4)


def test_checkpoint_after_fit_loads_with_plain_data_only_and_rebuilds_the_networks(tmp_path):
    module = PPO(hidden=(8, 8), gamma=0.9)
    run = trainer(tmp_path, limit_val_batches=0)
    run.fit(module, datamodule=SyntheticData())
    path = tmp_path / "ppo.ckpt"
    run.save_checkpoint(path)
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]
    assert hparams["observation_spec"] == BOX
    assert hparams["action_spec"] == TWO
    loaded = PPO.load_from_checkpoint(path, weights_only=True)
    assert loaded.gamma == 0.9
    observation = torch.randn(5, 4)
    torch.testing.assert_close(loaded(observation), module(observation))
    torch.testing.assert_close(loaded.critic(observation), module.critic(observation))


def test_fit_when_nobody_knows_the_spaces_says_who_should(tmp_path):
    data = SyntheticData()
    data.observation_spec = None
    with pytest.raises(ValueError, match="observation_spec is unknown : expected it from PPO or from the data module"):
        trainer(tmp_path).fit(PPO(), datamodule=data)


def test_predict_step_measures_returns_and_lengths_without_the_padding():
    batch = line_batch([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], reward=2.5, mask=[True, True, False])
    result = ppo(LINE).predict_step(batch, 0)
    assert result["return"].tolist() == [5.0]
    assert result["return"].dtype == torch.float64
    assert result["length"].tolist() == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, r"gamma is out of range : expected a number in \[0, 1\], got 1.1; change PPO\(gamma=...\)"),
        ({"lambda_": -0.1}, "lambda_ is out of range"),
        ({"clip": 0.0}, "clip is out of range : expected a number > 0"),
        ({"learning_rate": 0.0}, "learning_rate is out of range"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is out of range : expected None or a number > 0"),
    ],
)
def test_ppo_when_a_number_is_out_of_range_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        PPO(**options)


def test_ppo_when_a_space_is_not_supported_names_it():
    with pytest.raises(ValueError, match=r"action space is not supported : .* got 'tuple'"):
        ppo(action={"kind": "tuple", "spaces": [TWO]})
