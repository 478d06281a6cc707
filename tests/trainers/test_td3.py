"""TD3 on samples made by hand: its targets, its delayed policy, its noise, and how it behaves under a Trainer."""

import copy
import math

import lightning as L
import pytest
import torch
from tensordict import TensorDict

from lit_collect.frames import N_STEPS
from lit_collect.sampling import choose_from
from trainers.continuous import DeterministicActor, EnsembleMLP, TwinCritic, action_bounds
from trainers.td3 import TD3

BOX = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
ACTION = {"kind": "box", "shape": [2], "dtype": "float32", "low": [-2.0, 0.0], "high": [2.0, 1.0]}
CENTER, HALF_RANGE = torch.tensor([0.0, 0.5]), torch.tensor([2.0, 0.5])


def td3(**options):
    return TD3(observation_spec=BOX, action_spec=ACTION, **{"hidden": (16, 16), **options})


def sample(*, size=8, seed=0, terminated=(), truncated=()):
    """Random rows within the bounds; `terminated` and `truncated` name those that end."""
    generator = torch.Generator().manual_seed(seed)
    flags = {name: torch.zeros(size, 1, dtype=torch.bool) for name in ("terminated", "truncated")}
    flags["terminated"][list(terminated)] = True
    flags["truncated"][list(truncated)] = True
    following = {
        "observation": torch.randn(size, 4, generator=generator),
        "reward": torch.randn(size, 1, generator=generator),
        "done": flags["terminated"] | flags["truncated"],
        **flags,
    }
    rows = {
        "observation": torch.randn(size, 4, generator=generator),
        "action": CENTER + HALF_RANGE * (2 * torch.rand(size, 2, generator=generator) - 1),
        "next": TensorDict(following, [size]),
    }
    return TensorDict(rows, [size])


def constant_targets(module, *values):
    """Let the target critics give these values whatever they see."""
    with torch.no_grad():
        for parameter in module.target_critic.parameters():
            parameter.zero_()
        module.target_critic.members.biases[-1].copy_(torch.tensor(values).view(2, 1, 1))


class Loader:
    """Lightning takes a list for a collection of loaders."""

    def __init__(self, samples):
        self._samples = samples

    def __len__(self):
        return len(self._samples)

    def __iter__(self):
        return iter(self._samples)


class Samples(L.LightningDataModule):
    """Hands out a sample for each seed, in their order."""

    observation_spec = BOX
    action_spec = ACTION

    def __init__(self, *seeds):
        super().__init__()
        self.samples = [sample(size=16, seed=seed) for seed in seeds]

    def train_dataloader(self):
        return Loader(self.samples)

    def val_dataloader(self):
        return Loader([TensorDict({"observation": torch.zeros(1, 3, 4)}, [1, 3])])


class PolicyHistory(L.Callback):
    """Keeps the weights of the policy, and of its target, after each step."""

    def __init__(self):
        self.policies, self.targets = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.policies.append(copy.deepcopy(pl_module.policy.state_dict()))
        self.targets.append(copy.deepcopy(pl_module.target_critic.state_dict()))


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


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def test_action_values_bootstrap_from_truncated_rows_and_not_from_terminated_ones():
    # r + 0.5 min(10, 20) for rows 0 (goes on) and 2 (truncated), r alone for 1 and 3
    module = td3(gamma=0.5)
    constant_targets(module, 10.0, 20.0)
    rows = sample(size=4, terminated=[1, 3], truncated=[2, 3])
    _, target = module.action_values(rows, rows["observation"])
    torch.testing.assert_close(target, rows["next", "reward"].squeeze(-1) + torch.tensor([5.0, 0.0, 5.0, 0.0]))


def test_action_values_over_several_steps_discount_by_their_number():
    module = td3(gamma=0.5)
    constant_targets(module, 20.0, 10.0)
    rows = sample(size=2)
    rows[N_STEPS] = torch.tensor([1, 3])
    _, target = module.action_values(rows, rows["observation"])
    torch.testing.assert_close(target, rows["next", "reward"].squeeze(-1) + torch.tensor([5.0, 1.25]))


@pytest.mark.parametrize(("noise_clip", "largest"), [(0.0, 0.0), (0.1, 0.1)])
def test_action_values_smooth_the_target_policy_within_the_clip(noise_clip, largest):
    # Q'(s, a) = the sum of the action's components, so that the target shows which action was valued
    module, rows = td3(gamma=1.0, target_noise=50.0, noise_clip=noise_clip), sample(size=64)
    module.target_critic = TwinCritic(BOX, num_inputs=2, hidden=())
    with torch.no_grad():
        module.target_critic.members.weights[0].copy_(torch.tensor([0.0] * 4 + [1.0] * 2))
    _, target = module.action_values(rows, rows["observation"])
    with torch.no_grad():
        action = module.target_policy.act(rows["next", "observation"])
    noise = target - rows["next", "reward"].squeeze(-1) - action.sum(-1)
    assert float(noise.abs().max()) == pytest.approx(2 * largest, abs=1e-5)


def test_policy_loss_is_minus_the_first_critic_and_teaches_the_critics_nothing():
    module, rows = td3(policy_delay=1), sample()
    loss, noted = module.policy_loss(rows, rows["observation"])
    expected = -module.critic(rows["observation"], module.policy.act(rows["observation"]))[0].mean()
    torch.testing.assert_close(loss, expected)
    assert set(noted) == {"train/policy_loss"}
    found = torch.autograd.grad(loss, list(module.critic.parameters()), allow_unused=True)
    assert all(gradient is None for gradient in found)


def test_fit_trains_the_policy_and_moves_all_targets_in_every_other_step(tmp_path):
    module, history = td3(policy_delay=2), PolicyHistory()
    trainer(tmp_path, callbacks=history).fit(module, datamodule=Samples(*range(6)))
    moved = [not same(*pair) for pair in zip(history.policies, history.policies[1:], strict=False)]
    assert moved == [True, False, True, False, True]  # in steps 2, 4 and 6
    moved = [not same(*pair) for pair in zip(history.targets, history.targets[1:], strict=False)]
    assert moved == [True, False, True, False, True]


def test_fit_with_momentum_leaves_the_policy_alone_in_the_steps_between(tmp_path):
    # Adam would go on moving a parameter whose gradient is 0
    module, history = td3(policy_delay=3), PolicyHistory()
    trainer(tmp_path, callbacks=history).fit(module, datamodule=Samples(*range(7)))
    moved = [not same(*pair) for pair in zip(history.policies, history.policies[1:], strict=False)]
    assert moved == [False, True, False, False, True, False]


def test_fit_after_a_checkpoint_goes_on_exactly_as_without_the_break(tmp_path):
    torch.manual_seed(5)
    whole = td3()
    first = copy.deepcopy(whole)
    torch.manual_seed(6)
    trainer(tmp_path).fit(whole, datamodule=Samples(*range(6)))
    torch.manual_seed(6)
    interrupted = trainer(tmp_path, max_steps=3)  # an odd number: the policy's turn comes first
    interrupted.fit(first, datamodule=Samples(*range(6)))
    interrupted.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(99)
    resumed = TD3.load_from_checkpoint(tmp_path / "half.ckpt", weights_only=True)
    go_on = trainer(tmp_path, max_epochs=2)
    go_on.fit(resumed, datamodule=Samples(3, 4, 5), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert resumed.num_updates == whole.num_updates == 6
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_training_step_without_a_trainer_learns_the_best_action():
    # a bandit: the reward is highest, 0, at the action (1, 0.25), and -1.06 at the middle of the bounds
    torch.manual_seed(0)
    best = torch.tensor([1.0, 0.25])
    module = td3(learning_rate=0.01, gamma=0.0, policy_delay=4, hidden=(32, 32))
    optimizer = module.configure_optimizers()
    for seed in range(600):
        rows = sample(size=64, seed=seed)
        rows["observation"].zero_()
        rows["next", "reward"] = -(rows["action"] - best).square().sum(-1, keepdim=True)
        optimizer.zero_grad()
        module.training_step(rows, 0).backward()
        optimizer.step()
        module.count_update()
    action = module(torch.zeros(1, 4)).mode[0].detach()
    assert float((action - best).square().sum()) < 0.15


def test_forward_explores_around_the_action_that_evaluation_takes():
    torch.manual_seed(0)
    module = td3(exploration_noise=0.1)
    with torch.no_grad():
        answer = module(torch.zeros(5000, 4))
    action = CENTER + HALF_RANGE * module.policy.act(torch.zeros(1, 4)).detach()
    assert torch.equal(choose_from(answer, "deterministic"), action.expand(5000, 2))
    explored = choose_from(answer, "random")
    torch.testing.assert_close(explored.std(0), 0.1 * HALF_RANGE, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    "options",
    [{"policy_delay": 0}, {"exploration_noise": -0.1}, {"target_noise": -1.0}, {"noise_clip": -1.0}, {"tau": 2.0}],
)
def test_constructor_with_a_number_out_of_range_names_it(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name} is out of range : expected .*; change TD3\({name}="):
        td3(**options)


def test_constructor_with_unbounded_actions_says_what_is_expected():
    unbounded = {**ACTION, "low": [-math.inf, 0.0]}
    with pytest.raises(ValueError, match="action space has no bounds in dimension 0 : expected finite low < high"):
        TD3(observation_spec=BOX, action_spec=unbounded)


# --- the networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_action_bounds_hold_after_rounding_too(seed):
    generator = torch.Generator().manual_seed(seed)
    low, width = torch.randn(100, generator=generator), torch.rand(100, generator=generator) + 1e-3
    high = low + width
    spec = {"kind": "box", "shape": [100], "dtype": "float32", "low": low.tolist(), "high": high.tolist()}
    center, half_range = action_bounds(spec)
    assert bool((center + half_range <= high).all())
    assert bool((center - half_range >= low).all())
    torch.testing.assert_close(half_range, width / 2, rtol=1e-3, atol=1e-6)


def test_ensemble_members_are_independent_networks():
    ensemble = EnsembleMLP([3, 8, 8, 2], members=3)
    features = torch.randn(5, 3)
    values = ensemble(features)
    assert values.shape == (3, 5, 2)
    for member in range(3):
        x = features
        for index, (weight, bias) in enumerate(zip(ensemble.weights, ensemble.biases, strict=True)):
            x = (x.relu() if index else x) @ weight[member].T + bias[member]
        torch.testing.assert_close(values[member], x)
    assert not torch.equal(values[0], values[1])


def test_ensemble_frozen_gives_the_features_a_gradient_and_the_weights_none():
    ensemble = EnsembleMLP([3, 8, 1])
    features = torch.randn(5, 3, requires_grad=True)
    expected, result = ensemble(features), ensemble.frozen(features)
    torch.testing.assert_close(result, expected)
    (wanted,) = torch.autograd.grad(expected.sum(), features)
    result.sum().backward()
    torch.testing.assert_close(features.grad, wanted)
    assert all(parameter.grad is None for parameter in ensemble.parameters())
    torch.testing.assert_close(ensemble.frozen(features, members=1), expected[:1])


def test_deterministic_actor_at_the_start_acts_in_the_middle_of_the_bounds():
    actor = DeterministicActor(BOX, ACTION, hidden=(16,))
    torch.testing.assert_close(actor(torch.randn(8, 4)).mode, CENTER.expand(8, 2), rtol=0, atol=0.1)
