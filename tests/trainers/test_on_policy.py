"""What PPO and A2C share: every kind of space, masks, normalisation and scaling, alone and through a Trainer."""

import gymnasium
import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from lit_collect import CollectorDataModule, UpdateConfig
from trainers import A2C, IMPALA, PPO
from trainers.distributions import action_log_prob

BOX = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
TWO = {"kind": "discrete", "n": 2, "start": 0}

both = pytest.mark.parametrize("algorithm", [PPO, A2C])


class Toy(gymnasium.Env):
    """Episodes of three steps in any spaces; the reward is 1."""

    def __init__(self, observation, action):
        self.observation_space, self.action_space = observation, action
        self._step = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._step = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self._step += 1
        return self.observation_space.sample(), 1.0, self._step == 3, False, {}


class Picky(Toy):
    """Allows the first option of each choice and a random one, and raises where another is taken."""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation, {"action_mask": self._draw()}

    def step(self, action):
        space = self.action_space
        chosen = np.atleast_1d(action - getattr(space, "start", 0))
        allowed = np.split(self._mask, np.cumsum(self._options())[:-1])
        if not all(part[choice] for part, choice in zip(allowed, chosen, strict=True)):
            raise ValueError(f"{action} is not among {self._mask}")
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"action_mask": self._draw()}

    def _options(self):
        space = self.action_space
        if isinstance(space, spaces.MultiBinary):
            return [2] * space.n
        return np.atleast_1d(getattr(space, "nvec", getattr(space, "n", None))).tolist()

    def _draw(self):
        parts = [self.np_random.permutation(n) == 0 for n in self._options()]
        for part in parts:
            part[0] = True
        self._mask = np.concatenate(parts)
        return self._mask.copy()


def fit(folder, model, env, *, epochs=1, minibatch_size=None, frames=48, **options):
    updates = UpdateConfig(epochs=epochs, minibatch_size=minibatch_size)
    data = CollectorDataModule(
        env, num_envs=2, frames_per_batch=16, total_frames=frames, updates=updates, seed=0, **options
    )
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return trainer


def rows_of(shape=(2, 8), seed=0, **others):
    """A batch of random rows."""
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
        "log_prob": torch.full(shape, -0.7),
        "next": TensorDict(following, shape),
        **others,
    }
    return TensorDict(rows, shape)


BODY = spaces.Box(-1.0, 1.0, (3,))
EYE = spaces.Box(0, 255, (1, 36, 36), np.uint8)
OBSERVATIONS = {
    "dict": spaces.Dict({"body": BODY, "gear": spaces.Discrete(4), "in": spaces.Dict({"x": BODY})}),
    "goal": spaces.Dict({"observation": BODY, "desired_goal": BODY, "achieved_goal": BODY}),
    "tuple": spaces.Tuple((BODY, spaces.MultiBinary(2))),
    "image": EYE,
    "image in a dict": spaces.Dict({"eye": EYE, "body": BODY}),
    "choices": spaces.MultiDiscrete([2, 3], start=[1, 1]),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=5),
    "continuous": spaces.Box(-1.0, 1.0, (2,)),
    "multi_discrete": spaces.MultiDiscrete([2, 3], start=[0, 4]),
    "multi_binary": spaces.MultiBinary(3),
}


@pytest.mark.parametrize("algorithm", [PPO, A2C, IMPALA])
@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_fit_takes_every_kind_of_observation(algorithm, kind, tmp_path):
    options = {} if algorithm is IMPALA else {"normalize_observation": True}
    model = algorithm(hidden=(8,), **options)
    trainer = fit(tmp_path, model, lambda: Toy(OBSERVATIONS[kind], spaces.Discrete(2)))
    assert trainer.global_step == 3


@both
@pytest.mark.parametrize("kind", ACTIONS)
def test_fit_takes_every_kind_of_action(algorithm, kind, tmp_path):
    model = algorithm(hidden=(8,))
    before = None

    def watched(batch):
        nonlocal before
        before = action_log_prob(model.answer(batch), batch["action"])
        torch.testing.assert_close(batch["log_prob"], before, rtol=1e-4, atol=1e-5)  # acting and training agree
        return type(model).prepare_rollout(model, batch)

    model.prepare_rollout = watched
    trainer = fit(tmp_path, model, lambda: Toy(BODY, ACTIONS[kind]), minibatch_size=8)
    assert trainer.global_step == 6
    assert before is not None


@both
def test_observation_with_a_part_under_a_name_of_training_is_refused(algorithm):
    spec = {"kind": "dict", "spaces": {"x": BOX, "value": BOX}}
    with pytest.raises(ValueError, match=r"under names that training needs : .*, got \['value'\]; rename them"):
        algorithm(observation_spec=spec, action_spec=TWO)


@pytest.mark.parametrize("algorithm", [PPO, A2C, IMPALA])
@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "multi_binary"])
def test_fit_with_masks_takes_allowed_actions_only(algorithm, kind, tmp_path):
    trainer = fit(tmp_path, algorithm(hidden=(8,)), lambda: Picky(BODY, ACTIONS[kind]))
    assert trainer.global_step == 3


@both
def test_prepare_rollout_keeps_the_masks_of_actions_for_training(algorithm):
    module = algorithm(observation_spec=BOX, action_spec=TWO, normalize_advantage=False)
    only_first = torch.tensor([True, False]).expand(2, 8, 2)
    batch = rows_of(action_mask=only_first, action=torch.zeros(2, 8, dtype=torch.int64), log_prob=torch.zeros(2, 8))
    prepared = module.prepare_rollout(batch)
    assert torch.equal(prepared["action_mask"], only_first)
    # with one action left its probability is 1: nothing to learn for the policy
    module.training_step(prepared).backward()
    assert all(not parameter.grad.any() for parameter in module.policy.parameters())


@both
def test_normalised_observations_are_those_of_the_batch_at_hand_and_of_those_before(algorithm):
    module = algorithm(observation_spec=BOX, action_spec=TWO, normalize_observation=True)
    first, second = rows_of(seed=1), rows_of(seed=2)
    second["observation"] += 5.0
    seen = []
    for batch in (first, second):
        seen.append(batch["observation"].reshape(-1, 4).double().numpy())
        module.prepare_rollout(batch)
        np.testing.assert_allclose(module.policy.normalizer.mean.numpy(), np.concatenate(seen).mean(0), rtol=1e-9)
    assert module.critic.normalizer is module.policy.normalizer


@both
def test_training_and_acting_leave_the_statistics_alone(algorithm):
    module = algorithm(observation_spec=BOX, action_spec=TWO, normalize_observation=True)
    prepared = module.prepare_rollout(rows_of())
    module.training_step(prepared)
    module(prepared["observation"])
    assert module.policy.normalizer.count == 16


@both
def test_masked_rows_are_left_out_of_the_statistics_and_of_the_loss(algorithm):
    options = {"observation_spec": BOX, "action_spec": TWO, "normalize_observation": True, "scale_reward": True}
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, 6:] = False
    torch.manual_seed(0)
    whole = algorithm(**options)
    torch.manual_seed(0)
    part = algorithm(**options)
    batch = rows_of(collector=TensorDict({"mask": mask}, [2, 8]))
    batch["observation"][:, 6:] = 1e6
    batch["next", "reward"][:, 6:] = 1e6
    short = batch[:, :6].exclude("collector")
    losses = [m.training_step(m.prepare_rollout(b)) for m, b in ((whole, batch), (part, short))]
    assert whole.policy.normalizer.count == 12
    assert whole.reward_scaler.moments.count == 12
    torch.testing.assert_close(*losses)


@both
def test_scaled_rewards_make_smaller_targets_and_the_batch_keeps_its_own(algorithm):
    options = {"observation_spec": BOX, "action_spec": TWO, "lambda_": 1.0, "gamma": 0.0}
    module, batch = algorithm(scale_reward=True, **options), rows_of()
    batch["next", "reward"] *= 100
    before = batch["next", "reward"].clone()
    target = module.prepare_rollout(batch)["value_target"]
    assert torch.equal(batch["next", "reward"], before)
    torch.testing.assert_close(target, before.squeeze(-1) / before.numpy().std(), rtol=1e-5, atol=1e-6)


@both
def test_without_the_options_nothing_is_normalised(algorithm):
    module = algorithm(observation_spec=BOX, action_spec=TWO)
    assert module.policy.normalizer is None
    assert module.reward_scaler is None
    assert not dict(module.named_buffers())


@both
def test_checkpoint_holds_the_running_statistics(algorithm, tmp_path):
    model = algorithm(hidden=(8,), normalize_observation=True, scale_reward=True)
    trainer = fit(tmp_path, model, lambda: Toy(BODY, spaces.Discrete(2)))
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    loaded = algorithm.load_from_checkpoint(path, weights_only=True)
    assert loaded.policy.normalizer.count == 48
    assert torch.equal(loaded.policy.normalizer.mean, model.policy.normalizer.mean)
    assert torch.equal(loaded.reward_scaler.moments.variance, model.reward_scaler.moments.variance)
    assert loaded.critic.normalizer is loaded.policy.normalizer


def test_evaluation_leaves_the_statistics_alone(tmp_path):
    model = PPO(hidden=(8,), normalize_observation=True)
    data = CollectorDataModule(lambda: Toy(BODY, spaces.Discrete(2)), num_envs=2, frames_per_batch=16, total_frames=32)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    assert model.policy.normalizer.count == 32
    trainer.validate(model, datamodule=data, verbose=False)
    assert model.policy.normalizer.count == 32


@pytest.mark.slow
@pytest.mark.processes
def test_workers_act_with_the_statistics_of_the_learner(tmp_path):
    model = PPO(hidden=(8,), normalize_observation=True)
    agreed = []

    def watched(batch):
        agreed.append(
            torch.allclose(action_log_prob(model.answer(batch), batch["action"]), batch["log_prob"], atol=1e-5)
        )
        return PPO.prepare_rollout(model, batch)

    model.prepare_rollout = watched
    wide = spaces.Box(90.0, 110.0, (3,))
    with torch.no_grad():
        fit(tmp_path, model, lambda: Toy(wide, spaces.Discrete(2)), backend="process", frames=64)
    assert agreed == [True] * 4


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_statistics_stay_precise_whatever_the_trainer_runs_in(precision, tmp_path):
    model = PPO(hidden=(8,), normalize_observation=True, scale_reward=True)
    data = CollectorDataModule(lambda: Toy(BODY, spaces.Discrete(2)), num_envs=2, frames_per_batch=16, total_frames=32)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, precision=precision, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    assert model.policy.normalizer.mean.dtype == torch.float64
    assert model.policy.normalizer.count == 32
