"""A2C: its loss against the plain formula, its optimizers, and a bandit."""

import csv

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from torch.distributions import Categorical

from lit_collect import CollectorDataModule
from trainers import A2C

BOX = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
TWO = {"kind": "discrete", "n": 2, "start": 0}


def a2c(**options):
    return A2C(observation_spec=BOX, action_spec=TWO, **options)


def prepared_rows(shape=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    advantage, target = torch.randn(2, *shape, generator=generator)
    rows = {
        "observation": torch.randn(*shape, 4, generator=generator),
        "action": torch.randint(2, shape, generator=generator),
        "log_prob": torch.zeros(shape),
        "advantage": advantage,
        "value_target": target,
    }
    return TensorDict(rows, shape)


def reference_loss(module, rows, value_coefficient, entropy_coefficient):
    total = 0.0
    for row in rows.reshape(-1):
        distribution = Categorical(logits=module(row["observation"])["logits"])
        error = (module.critic(row["observation"]) - row["value_target"]) ** 2
        gain = distribution.log_prob(row["action"]) * row["advantage"]
        total = total - gain + value_coefficient * error - entropy_coefficient * distribution.entropy()
    return total / rows.numel()


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.1])
def test_training_step_loss_and_gradient_equal_the_plain_formula(entropy_coefficient):
    module, rows = a2c(value_coefficient=0.7, entropy_coefficient=entropy_coefficient), prepared_rows()
    loss = module.training_step(rows)
    reference = reference_loss(module, rows, 0.7, entropy_coefficient)
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    parameters = list(module.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(reference, parameters), rtol=1e-4, atol=1e-6
    )


def test_training_step_with_normalised_advantages_ignores_their_scale():
    module, rows = a2c(value_coefficient=0.0, normalize_advantage=True), prepared_rows()
    loss = module.training_step(rows)
    rows["advantage"] = 3.0 + 50.0 * rows["advantage"]
    torch.testing.assert_close(module.training_step(rows), loss)


def test_training_step_takes_flat_rows_too():
    module, rows = a2c(), prepared_rows()
    torch.testing.assert_close(module.training_step(rows.reshape(-1)), module.training_step(rows))


@pytest.mark.parametrize(("optimizer", "kind"), [("rmsprop", torch.optim.RMSprop), ("adam", torch.optim.Adam)])
def test_optimizer_is_the_one_named_and_has_all_parameters(optimizer, kind):
    module = a2c(optimizer=optimizer, learning_rate=0.02)
    made = module.configure_optimizers()
    assert type(made) is kind
    assert [group["lr"] for group in made.param_groups] == [0.02]
    assert {id(p) for group in made.param_groups for p in group["params"]} == {id(p) for p in module.parameters()}


def test_a2c_when_the_optimizer_is_unknown_names_it():
    with pytest.raises(ValueError, match=r"optimizer is out of range : expected 'rmsprop' or 'adam', got 'sgd'"):
        a2c(optimizer="sgd")


def test_a2c_when_a_number_is_out_of_range_names_it():
    with pytest.raises(ValueError, match=r"gamma is out of range : .*; change A2C\(gamma=...\)"):
        a2c(gamma=2.0)


def test_bandit_without_a_trainer_learns_the_better_action():
    torch.manual_seed(0)
    module = a2c(learning_rate=0.01, lambda_=1.0)
    optimizer = module.configure_optimizers()
    shape, ended = (8, 8), torch.ones(8, 8, 1, dtype=torch.bool)
    still = torch.zeros(8, 8, 4)
    for _ in range(60):
        with torch.no_grad():
            action = Categorical(**module(still)).sample()
        following = {
            "observation": still,
            "reward": action.unsqueeze(-1).float(),
            "terminated": ended,
            "truncated": ~ended,
            "done": ended,
        }
        rows = {"observation": still, "action": action, "log_prob": torch.zeros(shape), "next": following}
        optimizer.zero_grad()
        module.training_step(module.prepare_rollout(TensorDict(rows, shape))).backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
    assert module(torch.zeros(1, 4))["logits"].softmax(-1)[0, 1] > 0.9


def test_fit_updates_once_for_each_batch_and_tells_the_loggers_now_and_then(tmp_path):
    data = CollectorDataModule("CartPole-v1", num_envs=2, frames_per_batch=8, total_frames=8 * 10, seed=0)
    logger = CSVLogger(tmp_path)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=-1, logger=logger, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=4, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(A2C(hidden=(8,)), datamodule=data)
    assert trainer.global_step == 10
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/policy_loss")]
    assert [int(row["step"]) for row in rows] == [4, 8, 10]
    names = {name for name in rows[0] if name.startswith("train/")}
    losses = {"train/policy_loss", "train/value_loss"}
    assert names == losses | {"train/entropy", "train/explained_variance", "train/learning_rate"}
