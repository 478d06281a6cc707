"""SAC on samples made by hand: what it learns from, what it leaves alone, and how it behaves under a Trainer."""

import copy
import csv
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from torch.nn.functional import relu

from lit_collect.frames import MASK, N_STEPS, WEIGHT
from trainers import continuous_functional as functional
from trainers.sac import SAC, DiscreteSAC

BOX = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
ACTION = {"kind": "box", "shape": [2], "dtype": "float32", "low": [-2.0, 0.0], "high": [2.0, 1.0]}
THREE = {"kind": "discrete", "n": 3, "start": 0}
DICT = {"kind": "dict", "spaces": {"body": BOX, "gear": {"kind": "discrete", "n": 3, "start": 0}}}
IMAGE = {"kind": "box", "shape": [1, 36, 36], "dtype": "uint8"}


def sac(action=ACTION, *, observation=BOX, **options):
    kind = DiscreteSAC if action["kind"] == "discrete" else SAC
    return kind(observation_spec=observation, action_spec=action, **{"hidden": (16, 16), **options})


def observed(size, generator, observation=BOX):
    if observation is DICT:
        return {
            "body": torch.randn(size, 4, generator=generator),
            "gear": torch.randint(3, (size,), generator=generator),
        }
    if observation is IMAGE:
        return {"observation": torch.randint(256, (size, 1, 36, 36), generator=generator, dtype=torch.uint8)}
    return {"observation": torch.randn(size, 4, generator=generator)}


def sample(action=ACTION, *, size=8, seed=0, observation=BOX, terminated=(), truncated=()):
    """Random rows within the bounds; `terminated` and `truncated` name those that end."""
    generator = torch.Generator().manual_seed(seed)
    flags = {name: torch.zeros(size, 1, dtype=torch.bool) for name in ("terminated", "truncated")}
    flags["terminated"][list(terminated)] = True
    flags["truncated"][list(truncated)] = True
    following = {
        **observed(size, generator, observation),
        "reward": torch.randn(size, 1, generator=generator),
        "done": flags["terminated"] | flags["truncated"],
        **flags,
    }
    if action["kind"] == "discrete":
        taken = torch.randint(3, (size,), generator=generator)
    else:
        taken = torch.rand(size, 2, generator=generator) * torch.tensor([4.0, 1.0]) - torch.tensor([2.0, 0.0])
    rows = {**observed(size, generator, observation), "action": taken, "next": TensorDict(following, [size])}
    return TensorDict(rows, [size])


def constant_targets(module, *values):
    """Let the target critics give these values whatever they see."""
    with torch.no_grad():
        for parameter in module.target_critic.parameters():
            parameter.zero_()
        module.target_critic.members.biases[-1].copy_(torch.tensor(values).view(2, 1, -1))


def plain_critic(critic, member, features):
    """One of the critics, layer by layer."""
    weights, biases = critic.members.weights, critic.members.biases
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        features = (relu(features) if index else features) @ weight[member].T + bias[member]
    return features


def gradients(loss, module):
    names, parameters = zip(*module.named_parameters(), strict=True)
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    named = [name for name, parameter in zip(names, parameters, strict=True) if parameter.requires_grad]
    found = torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def train_alone(module, optimizer, rows):
    optimizer.zero_grad()
    module.training_step(rows, 0).backward()
    optimizer.step()
    module.count_update()


class Loader:
    """Lightning takes a list for a collection of loaders."""

    def __init__(self, samples):
        self._samples = samples

    def __len__(self):
        return len(self._samples)

    def __iter__(self):
        return iter(self._samples)


class Samples(L.LightningDataModule):
    """Hands out samples in their order, and takes priorities."""

    observation_spec = BOX

    def __init__(self, *samples):
        super().__init__()
        self.samples = samples
        self.action_spec = THREE if samples[0]["action"].ndim == 1 else ACTION
        self.told = []

    @classmethod
    def of(cls, *seeds, action=ACTION):
        return cls(*[sample(action, size=16, seed=seed) for seed in seeds])

    def train_dataloader(self):
        return Loader(self.samples)

    def val_dataloader(self):
        return Loader([TensorDict({"observation": torch.zeros(1, 3, 4)}, [1, 3])])

    def update_priority(self, rows, priority):
        self.told.append((rows, priority))


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


# --- what it learns from ----------------------------------------------------------------------------------------------


def test_action_values_bootstrap_from_truncated_rows_and_not_from_terminated_ones():
    # r + 0.5 (min(10, 20) - alpha log pi) for rows 0 (goes on) and 2 (truncated), r alone for 1 and 3
    module = sac(gamma=0.5, temperature=0.2)
    constant_targets(module, 10.0, 20.0)
    rows = sample(size=4, terminated=[1, 3], truncated=[2, 3])
    torch.manual_seed(3)
    _, target = module.action_values(rows, rows["observation"])
    torch.manual_seed(3)
    with torch.no_grad():
        _, log_prob = module.policy.propose(rows["next", "observation"])
    alive = torch.tensor([1.0, 0.0, 1.0, 0.0])
    expected = rows["next", "reward"].squeeze(-1) + 0.5 * alive * (10.0 - 0.2 * log_prob)
    torch.testing.assert_close(target, expected)
    assert not target.requires_grad


def test_action_values_over_several_steps_discount_by_their_number():
    # 0.5 ** 3 * 10 after three steps; the temperature is so small that the entropy does not show
    module = sac(gamma=0.5, temperature=1e-9)
    constant_targets(module, 10.0, 20.0)
    rows = sample(size=2)
    rows[N_STEPS] = torch.tensor([1, 3])
    _, target = module.action_values(rows, rows["observation"])
    torch.testing.assert_close(target, rows["next", "reward"].squeeze(-1) + torch.tensor([5.0, 1.25]))


def test_action_values_see_actions_in_units_of_their_bounds():
    # the action at its upper bounds (2, 1) is (1, 1) to the critics, that at the middle (0, 0.5) is (0, 0)
    module, rows = sac(), sample(size=2)
    rows["action"] = torch.tensor([[2.0, 1.0], [0.0, 0.5]])
    q, _ = module.action_values(rows, rows["observation"])
    features = torch.cat((rows["observation"], torch.tensor([[1.0, 1.0], [0.0, 0.0]])), -1)
    expected = torch.stack([plain_critic(module.critic, member, features).squeeze(-1) for member in (0, 1)])
    torch.testing.assert_close(q, expected)


def test_training_step_loss_and_gradient_equal_the_plain_formula():
    module, rows = sac(temperature=0.3), sample(size=32, terminated=[4])
    torch.manual_seed(7)
    loss = module.training_step(rows, 0)
    torch.manual_seed(7)
    alpha = module.temperature
    observation, following = rows["observation"], rows["next", "observation"]
    with torch.no_grad():
        action, log_prob = module.policy.propose(following)
        features = torch.cat((following, action), -1)
        q1, q2 = (plain_critic(module.target_critic, member, features).squeeze(-1) for member in (0, 1))
        alive = (~rows["next", "terminated"].squeeze(-1)).float()
        target = rows["next", "reward"].squeeze(-1) + 0.99 * alive * (torch.min(q1, q2) - alpha * log_prob)
    features = torch.cat((observation, module.policy.to_unit(rows["action"])), -1)
    critic_loss = sum(
        0.5 * (plain_critic(module.critic, member, features).squeeze(-1) - target).square().mean() for member in (0, 1)
    )
    action, log_prob = module.policy.propose(observation)
    frozen = copy.deepcopy(module.critic).requires_grad_(False)
    features = torch.cat((observation, action), -1)
    q1, q2 = (plain_critic(frozen, member, features).squeeze(-1) for member in (0, 1))
    policy_loss = (alpha * log_prob - torch.min(q1, q2)).mean()
    temperature_loss = -(module.log_temperature * (log_prob.detach() - 2.0)).mean()  # target entropy -2
    expected = critic_loss + policy_loss + temperature_loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(loss, module), gradients(expected, module)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(gradient.any() for name, gradient in ours.items() if "weight" in name)


def test_policy_loss_teaches_the_critics_nothing_and_the_target_never_learns():
    module, rows = sac(), sample()
    loss, _ = module.policy_loss(rows, rows["observation"])
    found = gradients(loss, module)
    assert not any(gradient.any() for name, gradient in found.items() if name.startswith("critic"))
    assert all(gradient.any() for name, gradient in found.items() if name.startswith("policy.layers"))
    assert not any(parameter.requires_grad for parameter in module.target_critic.parameters())


@pytest.mark.parametrize(("target_entropy", "expected"), [(None, -2.0), (-0.5, -0.5)])
def test_target_entropy_when_left_open_is_minus_the_size_of_the_action(target_entropy, expected):
    assert sac(target_entropy=target_entropy).target_entropy == expected


@pytest.mark.parametrize(("target_entropy", "rises"), [(50.0, True), (-50.0, False)])
def test_temperature_rises_where_there_is_too_little_entropy_and_falls_where_there_is_too_much(target_entropy, rises):
    module = sac(target_entropy=target_entropy, temperature=0.1, learning_rate=0.01)
    optimizer = module.configure_optimizers()
    for seed in range(5):
        train_alone(module, optimizer, sample(seed=seed))
    assert bool(module.temperature > 0.1) is rises


def test_temperature_that_is_fixed_stays_and_is_in_no_optimizer():
    module = sac(learn_temperature=False, temperature=0.25)
    optimizer = module.configure_optimizers()
    train_alone(module, optimizer, sample())
    assert float(module.temperature) == pytest.approx(0.25)
    assert not any(p is module.log_temperature for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("action", [ACTION, THREE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("observation", [BOX, DICT, IMAGE], ids=["box", "dict", "image"])
def test_training_step_of_each_kind_of_observation_trains_every_layer(action, observation):
    module = sac(action, observation=observation)
    loss = module.training_step(sample(action, observation=observation), 0)
    assert loss.isfinite()
    found = gradients(loss, module)
    assert [name for name, gradient in found.items() if "weight" in name and not gradient.any()] == []


@pytest.mark.parametrize("action", [ACTION, THREE], ids=["continuous", "discrete"])
def test_training_step_of_padded_slices_equals_that_of_their_rows(action):
    module, slices = sac(action), sample(action, size=12).reshape(3, 4)
    slices[MASK] = torch.ones(3, 4, dtype=torch.bool)
    slices[MASK][1, 2:] = False
    slices["observation"][1, 2:] = float("nan")  # it would spoil the loss
    torch.manual_seed(1)
    loss = module.training_step(slices, 0)
    torch.manual_seed(1)
    torch.testing.assert_close(loss, module.training_step(slices[slices[MASK]].exclude("collector"), 0))


def test_training_step_with_weights_scales_the_errors_of_the_critics():
    module, rows = sac(learn_temperature=False, temperature=1e-9), sample(size=2)
    torch.manual_seed(0)
    q, target = (tensor.detach() for tensor in module.action_values(rows, rows["observation"]))
    rows[WEIGHT] = torch.tensor([1.0, 0.25])
    torch.manual_seed(0)
    weighted = module.training_step(rows, 0)
    torch.manual_seed(0)
    alone = module.training_step(rows.exclude("collector"), 0)
    errors = (q - target).square().sum(0)
    torch.testing.assert_close(alone - weighted, 0.5 * 0.75 * errors[1] / 2, rtol=1e-3, atol=1e-4)


def test_training_step_without_a_trainer_learns_the_best_action():
    # a bandit: the reward is highest, 0, at the action (1, 0.25), whatever is seen
    torch.manual_seed(0)
    best = torch.tensor([1.0, 0.25])
    module = sac(learning_rate=0.01, gamma=0.0, target_entropy=-4.0)
    optimizer = module.configure_optimizers()
    for seed in range(300):
        rows = sample(size=64, seed=seed)
        rows["next", "reward"] = -(rows["action"] - best).square().sum(-1, keepdim=True)
        train_alone(module, optimizer, rows)
    action = module(torch.zeros(1, 4)).mode[0]
    torch.testing.assert_close(action, best, rtol=0, atol=0.15)


# --- discrete actions -------------------------------------------------------------------------------------------------


def test_discrete_action_values_take_the_expectation_over_all_actions():
    # with weights of 0 the policy is uniform: V = (1 + 2 + 6) / 3 + alpha log 3, the minimum over (4, 2, 6), (1, 9, 9)
    module = sac(THREE, gamma=0.5, temperature=2.0)
    constant_targets(module, [[4.0, 2.0, 6.0]], [[1.0, 9.0, 9.0]])
    with torch.no_grad():
        module.policy.layers[-1].weight.zero_()
    rows = sample(THREE, size=2, terminated=[1])
    q, target = module.action_values(rows, rows["observation"])
    reward = rows["next", "reward"].squeeze(-1)
    torch.testing.assert_close(target, reward + torch.tensor([0.5 * (3.0 + 2.0 * math.log(3.0)), 0.0]))
    all_values = plain_critic(module.critic, 1, rows["observation"])
    torch.testing.assert_close(q[1], all_values[torch.arange(2), rows["action"]])


def test_discrete_action_values_of_a_masked_successor_leave_forbidden_actions_out():
    module = sac(THREE, gamma=1.0, temperature=1e-9)
    constant_targets(module, [[4.0, 2.0, 6.0]], [[4.0, 2.0, 6.0]])
    rows = sample(THREE, size=2)
    rows["next", "action_mask"] = torch.tensor([[True, False, False], [False, True, False]])
    _, target = module.action_values(rows, rows["observation"])
    torch.testing.assert_close(target, rows["next", "reward"].squeeze(-1) + torch.tensor([4.0, 2.0]))


def test_discrete_target_entropy_when_left_open_is_half_of_the_largest():
    assert sac(THREE).target_entropy == pytest.approx(0.5 * math.log(3.0))


def test_discrete_training_step_without_a_trainer_learns_the_best_action():
    torch.manual_seed(0)
    module = sac(THREE, learning_rate=0.01, gamma=0.0, temperature=0.1, target_entropy=0.1)
    optimizer = module.configure_optimizers()
    for seed in range(200):
        rows = sample(THREE, size=64, seed=seed)
        rows["next", "reward"] = (rows["action"] == 1).float().unsqueeze(-1)
        train_alone(module, optimizer, rows)
    assert module(torch.zeros(1, 4))["logits"].softmax(-1)[0, 1].item() > 0.9


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"temperature is out of range : expected a number > 0, got 0.0; change SAC\("),
        ({"tau": 0.0}, "tau is out of range"),
        ({"gamma": 1.5}, "gamma is out of range"),
        ({"learning_rate": -1.0}, "learning_rate is out of range"),
    ],
)
def test_constructor_with_a_number_out_of_range_says_what_is_expected(options, message):
    with pytest.raises(ValueError, match=message):
        sac(**options)


@pytest.mark.parametrize(
    ("kind", "action", "message"),
    [
        (SAC, THREE, "expected kind 'box' of one dimension and of floats, got 'discrete'"),
        (SAC, {**ACTION, "shape": [2, 1]}, r"got 'box' of shape \[2, 1\]"),
        (SAC, {**ACTION, "dtype": "int64"}, "and dtype int64"),
        (
            SAC,
            {**ACTION, "high": [2.0, math.inf]},
            "no bounds in dimension 1 : expected finite low < high, got 0.0 and",
        ),
        (SAC, {**ACTION, "low": [2.0, 0.0]}, "no bounds in dimension 0"),
        (DiscreteSAC, ACTION, "expected kind 'discrete', got 'box'; take SAC for continuous actions"),
    ],
)
def test_constructor_with_actions_of_another_kind_says_what_is_expected(kind, action, message):
    with pytest.raises(ValueError, match=message):
        kind(observation_spec=BOX, action_spec=action)


# --- under a Trainer --------------------------------------------------------------------------------------------------


def test_fit_moves_the_target_critics_a_little_after_each_step(tmp_path):
    module = sac(tau=0.25)
    before, target = copy.deepcopy(module.critic.state_dict()), copy.deepcopy(module.target_critic.state_dict())
    trainer(tmp_path).fit(module, datamodule=Samples.of(0))
    assert module.global_step == module.num_updates == 1
    for name, parameter in module.critic.state_dict().items():
        assert not torch.equal(parameter, before[name])
        expected = 0.75 * target[name] + 0.25 * parameter
        torch.testing.assert_close(module.target_critic.state_dict()[name], expected)


def test_fit_takes_the_spaces_from_the_data_module_and_tells_the_loggers(tmp_path):
    logger = CSVLogger(tmp_path)
    module = SAC(hidden=[16])
    trainer(tmp_path, logger=logger).fit(module, datamodule=Samples.of(*range(6)))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    names = {"critic_loss", "policy_loss", "temperature_loss", "q_mean", "entropy", "temperature"}
    assert {f"train/{name}" for name in names} <= set(rows[-1])
    assert all(math.isfinite(float(rows[-1][f"train/{name}"])) for name in names)


def test_fit_tells_a_prioritized_buffer_how_wrong_each_row_was(tmp_path):
    rows = sample(size=16)
    rows[WEIGHT] = torch.ones(16)
    data = Samples(rows)
    trainer(tmp_path).fit(sac(), datamodule=data)
    ((told, priority),) = data.told
    assert torch.equal(told["action"], rows["action"])
    assert priority.shape == (16,)
    assert bool((priority >= 0).all())


@pytest.mark.parametrize("action", [ACTION, THREE], ids=["continuous", "discrete"])
def test_fit_after_a_checkpoint_goes_on_exactly_as_without_the_break(tmp_path, action):
    torch.manual_seed(5)
    whole = sac(action)
    first = copy.deepcopy(whole)
    torch.manual_seed(6)
    trainer(tmp_path).fit(whole, datamodule=Samples.of(*range(6), action=action))
    torch.manual_seed(6)
    interrupted = trainer(tmp_path, max_steps=3)
    interrupted.fit(first, datamodule=Samples.of(*range(6), action=action))
    interrupted.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(99)
    resumed = type(whole).load_from_checkpoint(tmp_path / "half.ckpt", weights_only=True)
    rest = Samples.of(3, 4, 5, action=action)
    go_on = trainer(tmp_path, max_epochs=2)
    go_on.fit(resumed, datamodule=rest, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert resumed.num_updates == whole.num_updates == 6
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_load_from_checkpoint_alone_leaves_the_global_random_state(tmp_path):
    fit = trainer(tmp_path)
    fit.fit(sac(), datamodule=Samples.of(0))
    fit.save_checkpoint(tmp_path / "one.ckpt")
    torch.manual_seed(1)
    SAC.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    built = torch.get_rng_state()
    torch.manual_seed(1)
    sac()
    assert torch.equal(built, torch.get_rng_state())


def test_fit_in_reduced_precision_stays_finite(tmp_path):
    module = sac()
    trainer(tmp_path, precision="bf16-mixed").fit(module, datamodule=Samples.of(0, 1, 2))
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_fit_with_gradient_clipping_limits_the_step(tmp_path):
    module = sac(max_grad_norm=1e-12)  # far below Adam's epsilon, so that nothing moves
    before = copy.deepcopy(module.policy.state_dict())
    trainer(tmp_path).fit(module, datamodule=Samples.of(0, 1))
    torch.testing.assert_close(module.policy.state_dict(), before, rtol=0, atol=1e-6)


def test_soft_target_of_a_module_uses_the_temperature_of_the_moment():
    module, rows = sac(temperature=0.1), sample(size=3)
    constant_targets(module, 0.0, 0.0)
    with torch.no_grad():
        module.log_temperature.fill_(math.log(5.0))
    torch.manual_seed(0)
    _, target = module.action_values(rows, rows["observation"])
    torch.manual_seed(0)
    with torch.no_grad():
        _, log_prob = module.policy.propose(rows["next", "observation"])
    reward = rows["next", "reward"].squeeze(-1)
    expected = functional.soft_target(reward, torch.zeros(2, 3), log_prob, torch.full((3,), 0.99), 5.0)
    torch.testing.assert_close(target, expected)
