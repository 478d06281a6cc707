"""IMPALA on batches made by hand: what it makes of old rows, of cuts and padding, and how it runs under a Trainer."""

import csv
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from torch.distributions import Categorical, Independent, Normal

from lit_collect import CollectorDataModule, EvaluationConfig
from trainers import IMPALA

LINE = {"kind": "box", "shape": [1], "dtype": "float32", "low": [-9.0], "high": [9.0]}
BOX = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
TWO = {"kind": "discrete", "n": 2, "start": 0}
HALF = math.log(0.5)


def impala(observation=BOX, action=TWO, **options):
    return IMPALA(observation_spec=observation, action_spec=action, **options)


def ten_times_critic(**options):
    """Its critic is the line V(x) = 10 x."""
    module = impala(LINE, hidden=(), **options)
    with torch.no_grad():
        module.critic.layers[0].weight.fill_(10.0)
    return module


def batch_of(observation, following, reward, terminated, truncated, **others):
    """Rows [N, T]; what is left out of `others` is of no interest."""
    shape = reward.shape
    flags = {"terminated": terminated.unsqueeze(-1), "truncated": truncated.unsqueeze(-1)}
    flags["done"] = flags["terminated"] | flags["truncated"]
    rows = {
        "observation": observation,
        "action": others.pop("action", torch.zeros(shape, dtype=torch.int64)),
        "log_prob": others.pop("log_prob", torch.full(shape, HALF)),
        "next": TensorDict({"observation": following, "reward": reward.unsqueeze(-1), **flags}, shape),
    }
    if others:
        rows["collector"] = TensorDict(others, shape)
    return TensorDict(rows, shape)


def line_batch(observation, following, *, terminated=(), truncated=(), reward=1.0, **collector):
    """One env copy; `terminated` and `truncated` name the steps where it ends."""
    length = len(observation)
    flags = torch.zeros(2, 1, length, dtype=torch.bool)
    flags[0, 0, list(terminated)] = True
    flags[1, 0, list(truncated)] = True
    return batch_of(
        torch.tensor(observation).view(1, length, 1),
        torch.tensor(following).view(1, length, 1),
        torch.full((1, length), reward),
        *flags,
        **{name: torch.tensor([values]) for name, values in collector.items()},
    )


def random_batch(module, shape=(3, 9), *, age=0.0, seed=0):
    """A batch as a collector gives it, acted by weights that are `age` away from those of the module."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(shape[0], shape[1] + 1, 4, generator=generator)
    terminated, truncated = torch.rand(2, *shape, generator=generator) < 0.15
    following = observation[:, 1:].clone()
    ended = terminated | truncated
    following[ended] = torch.randn(int(ended.sum()), 4, generator=generator)  # terminal, not the next first one
    acting = impala(action=module.hparams["action_spec"])
    acting.load_state_dict(module.state_dict())
    with torch.no_grad():
        for parameter in acting.policy.parameters():
            parameter += age * torch.randn(parameter.shape, generator=generator)
    observation = observation[:, :-1]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        distribution = distribution_of(acting, observation)
        action = distribution.sample()
    log_prob = distribution.log_prob(action)
    reward = torch.randn(*shape, generator=generator)
    return batch_of(observation, following, reward, terminated, truncated, action=action, log_prob=log_prob)


def distribution_of(module, observation):
    parameters = module(observation)
    return Categorical(**parameters) if "logits" in parameters else Independent(Normal(**parameters), 1)


def reference_loss(module, batch, *, gamma, rho_bar, c_bar, entropy_coefficient, value_coefficient):
    """The paper's loss, one row at a time; every successor has a value of its own. Lambda is 1."""
    distribution = distribution_of(module, batch["observation"])
    log_prob = distribution.log_prob(batch["action"])
    value, next_value = module.critic(batch["observation"]), module.critic(batch["next", "observation"]).detach()
    ratio = (log_prob - batch["log_prob"]).exp().detach()
    reward, done, terminated = (batch["next", key].squeeze(-1) for key in ("reward", "done", "terminated"))
    total = 0.0
    for n in range(batch.shape[0]):
        ahead = 0.0  # v_{t+1} - V(s_{t+1})
        for t in reversed(range(batch.shape[1])):
            ahead = 0.0 if done[n, t] else ahead
            discount = 0.0 if terminated[n, t] else gamma
            rho, c = min(rho_bar, float(ratio[n, t])), min(c_bar, float(ratio[n, t]))
            baseline = value[n, t].detach()
            advantage = rho * (reward[n, t] + discount * (next_value[n, t] + ahead) - baseline)
            ahead = rho * (reward[n, t] + discount * next_value[n, t] - baseline) + discount * c * ahead
            error = 0.5 * (value[n, t] - (baseline + ahead)) ** 2
            total = total - log_prob[n, t] * advantage + value_coefficient * error
    return total / batch.numel() - entropy_coefficient * distribution.entropy().mean()


def gradients(module, loss):
    parameters = [*module.policy.parameters(), *module.critic.parameters()]
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def train_alone(module, optimizer, batch):
    optimizer.zero_grad()
    module.training_step(batch, 0).backward()
    optimizer.step()


def estimate_on_policy(module, batch):
    return module.estimate(batch, torch.zeros(batch.shape), module.critic(batch["observation"]).detach())


def trainer(tmp_path, **options):
    settings = {
        "accelerator": "cpu",
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "default_root_dir": tmp_path,
    }
    return L.Trainer(**{**settings, **options})


def pole(num_batches=4):
    evaluation = EvaluationConfig(num_episodes=2, max_frames=20)
    return CollectorDataModule(
        "CartPole-v1", num_envs=2, frames_per_batch=16, total_frames=16 * num_batches, evaluation=evaluation
    )


# --- targets and advantages -------------------------------------------------------------------------------------------


def test_estimate_on_policy_is_the_n_step_return_and_bootstraps_where_truncated():
    # gamma 0.5, V(x) = 10 x. The episode is cut behind step 1: its successor is the terminal observation 7, not the
    # observation 0 of the new episode in the next row. At the edge of the batch the last successor is 1.
    # G_1 = 1 + 0.5 * 70 = 36,  G_0 = 1 + 0.5 * 36 = 19,  G_2 = 1 + 0.5 * 10 = 6;  A = G - 10 x
    module = ten_times_critic(gamma=0.5)
    target, advantage = estimate_on_policy(module, line_batch([1.0, 2.0, 0.0], [2.0, 7.0, 1.0], truncated=[1]))
    torch.testing.assert_close(target, torch.tensor([[19.0, 36.0, 6.0]]))
    torch.testing.assert_close(advantage, torch.tensor([[9.0, 16.0, 6.0]]))


@pytest.mark.parametrize("truncated", [[], [1]])
def test_estimate_when_terminated_has_no_future_whatever_else_is_set(truncated):
    # G_1 = 1,  G_0 = 1 + 0.5 * 1 = 1.5
    module = ten_times_critic(gamma=0.5)
    batch = line_batch([1.0, 2.0, 0.0], [2.0, 7.0, 1.0], terminated=[1], truncated=truncated)
    target, advantage = estimate_on_policy(module, batch)
    torch.testing.assert_close(target, torch.tensor([[1.5, 1.0, 6.0]]))
    torch.testing.assert_close(advantage, torch.tensor([[-8.5, -19.0, 6.0]]))


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_estimate_on_policy_is_generalized_advantage_estimation(lambda_):
    module = impala(gamma=0.9, lambda_=lambda_)
    batch = random_batch(module)
    target, advantage = estimate_on_policy(module, batch)
    value, next_value = (module.critic(rows["observation"]).detach() for rows in (batch, batch["next"]))
    for n in range(3):
        running = 0.0
        for t in reversed(range(9)):
            following = {key: batch["next", key][n, t, 0] for key in ("reward", "terminated", "done")}
            future = 0.0 if following["terminated"] else 0.9 * next_value[n, t]
            running = 0.0 if following["done"] else 0.9 * lambda_ * running
            running = following["reward"] + future - value[n, t] + running
            torch.testing.assert_close(advantage[n, t], running)
            torch.testing.assert_close(target[n, t], value[n, t] + running)


def test_estimate_weights_old_rows_by_the_bounded_ratio():
    # ratios 4 and 0.5 -> rho = c = 2, 0.5; gamma 0.5, V = 10 x, rewards 1
    # v_1 - V = 0.5 * (1 + 5 * 3 - 20) = -2;  v_0 - V = 2 * (1 + 5 * 2 - 10) + 0.5 * 2 * -2 = 0
    module = ten_times_critic(gamma=0.5, rho_bar=2.0, c_bar=2.0)
    batch = line_batch([1.0, 2.0], [2.0, 3.0])
    target, advantage = module.estimate(batch, torch.tensor([[4.0, 0.5]]).log(), torch.tensor([[10.0, 20.0]]))
    torch.testing.assert_close(target, torch.tensor([[10.0, 18.0]]))
    torch.testing.assert_close(advantage, torch.tensor([[0.0, -2.0]]))


def test_estimate_scales_the_rewards_and_not_the_values():
    # gamma 0.5: G = 0.25 * 4 + 0.5 * 30 = 16, A = 16 - 20
    module = ten_times_critic(gamma=0.5, reward_scale=0.25)
    target, advantage = estimate_on_policy(module, line_batch([2.0], [3.0], reward=4.0))
    torch.testing.assert_close(target, torch.tensor([[16.0]]))
    torch.testing.assert_close(advantage, torch.tensor([[-4.0]]))


def test_estimate_cuts_where_the_trajectory_id_changes():
    # gamma 1: G_1 = 1 + 30 = 31, G_0 = 32, G_2 = 1 + 60 = 61; A = G - 10 x
    module = ten_times_critic(gamma=1.0)
    batch = line_batch([1.0, 2.0, 5.0], [2.0, 3.0, 6.0], traj_ids=[0, 0, 4])
    target, advantage = estimate_on_policy(module, batch)
    torch.testing.assert_close(target, torch.tensor([[32.0, 31.0, 61.0]]))
    torch.testing.assert_close(advantage, torch.tensor([[22.0, 11.0, 11.0]]))


def test_estimate_cuts_before_a_masked_row():
    # a fragment that simply stops: the successor 3 of its last row has a value, the padding behind has none
    module = ten_times_critic(gamma=1.0)
    batch = line_batch([1.0, 2.0, 50.0, 60.0], [2.0, 3.0, 60.0, 70.0], mask=[True, True, False, False])
    target, advantage = estimate_on_policy(module, batch)
    torch.testing.assert_close(target[0, :2], torch.tensor([32.0, 31.0]))
    torch.testing.assert_close(advantage[0, :2], torch.tensor([22.0, 11.0]))


def test_estimate_reads_successors_only_where_the_next_row_does_not_repeat_them():
    module = ten_times_critic(gamma=1.0)
    batch = line_batch([1.0, 2.0, 5.0], [math.nan, 3.0, 6.0], truncated=[1])
    target, _ = estimate_on_policy(module, batch)
    torch.testing.assert_close(target, torch.tensor([[32.0, 31.0, 61.0]]))


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [TWO, {**BOX, "shape": [3]}], ids=["discrete", "continuous"])
@pytest.mark.parametrize("age", [0.0, 0.1, 1.0], ids=["fresh", "old", "very-old"])
def test_training_step_loss_and_gradient_equal_the_plain_formula(action, age):
    settings = {"gamma": 0.9, "rho_bar": 1.5, "c_bar": 0.8, "entropy_coefficient": 0.1, "value_coefficient": 0.7}
    module = impala(action=action, **settings)
    batch = random_batch(module, age=age)
    loss = module.training_step(batch, 0)
    reference = reference_loss(module, batch, **settings)
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(module, loss), gradients(module, reference), rtol=1e-4, atol=1e-6)


def test_training_step_of_one_worker_is_its_share_of_the_batch():
    module = impala()
    batch = random_batch(module, (4, 8), age=0.1)
    shares = [module.training_step(rows, 0) for rows in (batch[:1], batch[1:])]
    torch.testing.assert_close(module.training_step(batch, 0), 0.25 * shares[0] + 0.75 * shares[1])


def test_training_step_leaves_the_batch_alone():
    module = impala()
    batch = random_batch(module)
    before = batch.clone()
    module.training_step(batch, 0).backward()
    assert (batch == before).all()


def test_training_step_of_one_frame_is_finite():
    module = impala()
    module.training_step(random_batch(module, (1, 1)), 0).backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_training_step_counts_no_masked_row():
    module = impala()
    batch = random_batch(module, (2, 6), age=0.1)
    padded = torch.cat([random_batch(module, (2, 2), seed=1), batch, random_batch(module, (2, 3), seed=2)], 1)
    padded["next", "reward"][:, :2] = 1e6
    padded["collector"] = TensorDict({"mask": torch.tensor([[False] * 2 + [True] * 6 + [False] * 3] * 2)}, [2, 11])
    loss, expected = module.training_step(padded, 0), module.training_step(batch, 0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(module, loss), gradients(module, expected), rtol=1e-4, atol=1e-6)


def test_training_step_without_a_row_that_counts_moves_nothing():
    module = impala()
    batch = random_batch(module, (2, 3))
    batch["collector"] = TensorDict({"mask": torch.zeros(2, 3, dtype=torch.bool)}, [2, 3])
    loss = module.training_step(batch, 0)
    assert loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in gradients(module, loss))


def test_training_step_of_shuffled_rows_says_what_to_leave():
    module = impala()
    with pytest.raises(ValueError, match=r"expected a whole batch \[N, T\], got shape \(27,\); leave updates"):
        module.training_step(random_batch(module).reshape(-1), 0)


# --- learning ---------------------------------------------------------------------------------------------------------


def bandit(action, log_prob, reward):
    """Episodes of one step."""
    ended = torch.ones(reward.shape, dtype=torch.bool)
    still = torch.zeros(*reward.shape, 1)
    return batch_of(still, still, reward, ended, ~ended, action=action, log_prob=log_prob)


def test_discrete_bandit_learns_the_better_action_from_one_who_prefers_the_worse():
    # These rows are never acted by the module's own weights: action 1 pays 1, and is taken one time in ten.
    torch.manual_seed(0)
    module = impala(LINE, learning_rate=0.01)
    optimizer = module.configure_optimizers()
    acting = Categorical(torch.tensor([0.9, 0.1]))
    for _ in range(60):
        action = acting.sample((4, 64))
        train_alone(module, optimizer, bandit(action, acting.log_prob(action), action.float()))
    assert module(torch.zeros(1, 1))["logits"].softmax(-1)[0, 1] > 0.9


def test_discrete_bandit_values_are_of_the_policy_trained_and_not_of_the_one_that_acted():
    # One's own policy takes both actions alike, so it earns 0.5 on average; whoever acts here earns 0.25.
    torch.manual_seed(0)
    module = impala(LINE, rho_bar=4.0)
    acting = Categorical(torch.tensor([0.75, 0.25]))
    action = acting.sample((64, 64))
    with torch.no_grad():
        module.policy.layers[-1].weight.zero_()
    batch = bandit(action, acting.log_prob(action), action.float())
    target, _ = module.estimate(batch, HALF - batch["log_prob"], torch.zeros(64, 64))
    assert target.mean().item() == pytest.approx(0.5, abs=0.05)


def test_continuous_bandit_moves_its_mean_to_the_best_action_with_old_data():
    torch.manual_seed(0)
    module = impala(LINE, LINE, learning_rate=0.02, entropy_coefficient=0.0)
    optimizer = module.configure_optimizers()
    start = torch.zeros(1, 1)
    for number in range(200):
        if number % 4 == 0:  # weights that act are up to three versions old
            with torch.no_grad():
                acting = distribution_of(module, start)
        action = acting.sample((4, 64)).squeeze(2)
        reward = -((action - 2.0) ** 2).squeeze(-1)
        train_alone(module, optimizer, bandit(action, acting.log_prob(action), reward))
    assert module(start)["loc"].item() == pytest.approx(2.0, abs=0.3)


# --- under a Trainer --------------------------------------------------------------------------------------------------


def test_fit_trains_once_on_each_batch_and_says_how_old_it_was(tmp_path):
    logger, data = CSVLogger(tmp_path), pole(num_batches=4)
    run = trainer(tmp_path, logger=logger, log_every_n_steps=2)
    run.fit(IMPALA(), datamodule=data)
    assert run.global_step == 4
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss/policy"]]
    assert [int(row["step"]) for row in rows] == [1, 3]
    for row in rows:  # nothing was: the direct backend collects with the newest weights
        assert float(row["impala/rho_mean"]) == pytest.approx(1.0, abs=1e-4)
        assert float(row["impala/approx_kl"]) == pytest.approx(0.0, abs=1e-4)
        assert float(row["impala/clip_fraction"]) == 0.0
        assert float(row["loss/entropy"]) == pytest.approx(math.log(2), abs=0.02)
        assert float(row["loss/value"]) > 0
        assert float(row["impala/explained_variance"]) <= 1


def test_training_step_under_a_trainer_measures_old_rows_without_the_masked_ones(tmp_path):
    class Old(IMPALA):
        def training_step(self, batch, batch_idx=0):
            # the policy of today is uniform: ratios 2, 2, 2, 2, 0.5, 0.5, 0.5, 0.5 in each line, then padding
            batch["log_prob"] = torch.tensor([0.25] * 4 + [1.0] * 4).log().expand(2, 8).clone()
            batch["collector", "mask"] = torch.tensor([True] * 6 + [False] * 2).expand(2, 8).clone()
            return super().training_step(batch, batch_idx)

    module = Old()
    module.configure_spaces(pole().observation_spec, TWO)
    with torch.no_grad():
        module.policy.layers[-1].weight.zero_()
    run = trainer(tmp_path)
    run.fit(module, datamodule=pole(num_batches=1))
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    assert metrics["impala/rho_mean"] == pytest.approx((4 * 2 + 2 * 0.5) / 6)
    assert metrics["impala/clip_fraction"] == pytest.approx(4 / 6)
    assert metrics["impala/approx_kl"] == pytest.approx((4 * (1 - math.log(2)) + 2 * (math.log(2) - 0.5)) / 6)


def test_fit_with_annealing_lowers_the_rate_with_the_progress_of_the_data(tmp_path):
    rates = []

    class Rates(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    trainer(tmp_path, callbacks=[Rates()]).fit(IMPALA(learning_rate=0.01, anneal=True), datamodule=pole(num_batches=4))
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_fit_in_any_precision_stays_finite(precision, tmp_path):
    module = IMPALA()
    run = trainer(tmp_path, precision=precision, limit_val_batches=1)
    run.fit(module, datamodule=pole(num_batches=2))
    assert run.global_step == 2
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_checkpoint_after_fit_loads_with_plain_data_only_and_rebuilds_the_networks(tmp_path):
    module = IMPALA(hidden=(8, 8), rho_bar=1.5)
    run = trainer(tmp_path)
    run.fit(module, datamodule=pole(num_batches=1))
    path = tmp_path / "impala.ckpt"
    run.save_checkpoint(path)
    loaded = IMPALA.load_from_checkpoint(path, weights_only=True)
    assert loaded.rho_bar == 1.5
    observation = torch.randn(5, 4)
    torch.testing.assert_close(loaded(observation), module(observation))
    torch.testing.assert_close(loaded.critic(observation), module.critic(observation))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_fit_when_nobody_knows_the_spaces_says_who_should(tmp_path):
    with pytest.raises(ValueError, match="observation_spec is unknown : expected it from IMPALA or from the data"):
        trainer(tmp_path, max_epochs=1).fit(IMPALA(), train_dataloaders=[random_batch(impala())])


def test_predict_step_measures_returns_and_lengths_without_the_padding():
    batch = line_batch([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], reward=2.5, mask=[True, True, False])
    result = impala(LINE).predict_step(batch, 0)
    assert result["return"].tolist() == [5.0]
    assert result["return"].dtype == torch.float64
    assert result["length"].tolist() == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, r"gamma is out of range : expected a number in \[0, 1\], got 1.1; change IMPALA\(gamma=...\)"),
        ({"lambda_": -0.1}, "lambda_ is out of range"),
        ({"rho_bar": 0.0}, "rho_bar is out of range : expected a number > 0"),
        ({"c_bar": 1.5}, r"c_bar is out of range : expected a number in \[0, rho_bar=1.0\], got 1.5"),
        ({"learning_rate": 0.0}, "learning_rate is out of range"),
        ({"reward_scale": 0.0}, "reward_scale is out of range : expected a number > 0"),
    ],
)
def test_impala_when_a_number_is_out_of_range_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        IMPALA(**options)


def test_impala_when_a_space_is_not_supported_names_it():
    with pytest.raises(ValueError, match=r"action space is not supported : .* got 'tuple'"):
        impala(action={"kind": "tuple", "spaces": [TWO]})
