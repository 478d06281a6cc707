"""Evaluation plays whole episodes, the same number on each copy, each of them once."""

from functools import partial

import lightning as L
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from lightning.pytorch.callbacks import EMAWeightAveraging
from tensordict import TensorDict
from torch import nn

from lit_collect import (
    CollectionMonitor,
    CollectorDataModule,
    EvaluationConfig,
    RolloutConfig,
    WorkerFailedError,
    evaluation,
)
from lit_collect.envs.factories import resolve_env
from lit_collect.episodes import episode_returns
from lit_collect.evaluation import EvaluationLoader, Evaluator, first_episodes
from lit_collect.seeding import Placement
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv, FailingEnv


def make_evaluator(env, policy=None, rollout=RolloutConfig(), **config) -> Evaluator:
    return Evaluator(
        resolve_env(env),
        EvaluationConfig(**config),
        rollout=rollout,
        policy=lambda: policy,
        place=Placement(entropy=3, stage="validate"),
    )


class Leaning(nn.Module):
    """Prefers action 1, but not always."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.0, 0.5]))

    def forward(self, observation):
        return {"logits": self.logits.expand(len(observation), 2)}


@pytest.fixture
def play():
    """Play all rounds of an evaluator, and close it."""
    opened: list[Evaluator] = []

    def rounds(evaluator: Evaluator) -> list[TensorDict]:
        opened.append(evaluator)
        return list(evaluator.rounds())

    yield rounds
    for evaluator in opened:
        evaluator.close()


@pytest.mark.parametrize(
    ("config", "rounds", "copies"),
    [
        ({"num_episodes": 1}, 1, 1),
        ({"num_episodes": 10}, 1, 10),
        ({"num_episodes": 20}, 2, 10),
        ({"num_episodes": 7}, 1, 7),
        ({"num_episodes": 13}, 13, 1),
        ({"num_episodes": 6, "num_envs": 2}, 3, 2),
    ],
)
def test_rounds_times_copies_are_the_episodes(config, rounds, copies, play):
    evaluator = make_evaluator(CountingEnv, **config)
    played = play(evaluator)
    assert len(EvaluationLoader(evaluator, [])) == len(played) == rounds
    assert all(batch.batch_size[0] == copies for batch in played)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 70])
def test_a_round_is_one_whole_episode_of_each_copy(length, play):
    (batch,) = play(make_evaluator(partial(CountingEnv, lengths=(length,)), num_episodes=2))
    assert batch.batch_size == (2, length)
    assert batch["collector", "mask"].all()
    assert batch["is_init"][:, 0].all()
    assert batch["next", "done"][:, -1].all()
    assert not batch["next", "done"][:, :-1].any()
    assert batch["observation"][0, :, 2].tolist() == list(range(length))
    assert batch["next", "observation"][0, :, 2].tolist() == list(range(1, length + 1))


def test_first_episode_of_each_copy_counts_whatever_its_length(play):
    makers = [partial(CountingEnv, 0, (2,)), partial(CountingEnv, 1, (40,)), partial(CountingEnv, 2, (1, 90))]
    (batch,) = play(make_evaluator(makers, num_episodes=3))
    assert batch.batch_size == (3, 40)
    assert batch["collector", "mask"].sum(1).tolist() == [2, 40, 1]
    returns, lengths = episode_returns(batch)
    assert lengths.tolist() == [2, 40, 1]
    assert returns.tolist() == [3, 820, 1]
    padding = batch[~batch["collector", "mask"]]
    assert not any(leaf.any() for leaf in padding.exclude(("collector", "mask")).values(True, True))


def test_sequence_of_envs_plays_at_least_the_episodes_on_all_of_them(play):
    makers = [partial(CountingEnv, i) for i in range(4)]
    rounds = play(make_evaluator(makers, num_episodes=10))
    assert [batch.batch_size[0] for batch in rounds] == [4, 4, 4]


def test_vector_env_is_evaluated_on_its_own_copies(play):
    def make():
        return SyncVectorEnv([partial(CountingEnv, i, (2 + 3 * i,)) for i in range(2)])

    rounds = play(make_evaluator(make, num_episodes=4, num_envs=2))
    assert [batch["collector", "mask"].sum(1).tolist() for batch in rounds] == [[2, 5], [2, 5]]


def test_vector_env_that_spends_steps_on_resetting_gives_whole_episodes(play):
    class Forgetful(SyncVectorEnv):
        def step(self, actions):
            return super().step(actions)

    def make():
        return Forgetful([partial(CountingEnv, i, (1 + 2 * i,)) for i in range(2)], autoreset_mode="NextStep")

    for batch in play(make_evaluator(make, num_episodes=4, num_envs=2)):
        assert batch["collector", "mask"].sum(1).tolist() == [1, 3]
        assert episode_returns(batch)[1].tolist() == [1, 3]


def test_rounds_play_other_episodes_and_evaluations_the_same(play):
    evaluator = make_evaluator("CartPole-v1", num_episodes=4, num_envs=2)
    first, second = play(evaluator), play(evaluator)
    starts = [batch["observation"][:, 0].flatten() for batch in first]
    assert not torch.isin(starts[0], starts[1]).any()
    for one, other in zip(first, second, strict=True):
        keys = set(one.keys(True, True)) - {("collector", "traj_ids")}  # which go on
        assert all(torch.equal(one[key], other[key]) for key in keys)


@pytest.mark.parametrize(("exploration", "actions"), [("deterministic", {1}), ("mode", {1}), ("random", {0, 1})])
def test_actions_are_taken_as_the_config_says(exploration, actions, play):
    policy = Leaning()
    rollout = RolloutConfig(exploration="random")
    evaluator = make_evaluator(
        partial(CountingEnv, lengths=(50,)), policy, rollout, num_episodes=2, exploration=exploration
    )
    (batch,) = play(evaluator)
    assert set(batch["action"].unique().tolist()) == actions


@pytest.mark.parametrize(("limit", "rollout_limit", "length"), [(5, None, 5), (None, 4, 4), (5, 4, 5), (None, None, 9)])
def test_episodes_are_cut_where_that_is_asked_for(limit, rollout_limit, length, play):
    rollout = RolloutConfig(max_frames_per_traj=rollout_limit)
    evaluator = make_evaluator(partial(CountingEnv, lengths=(9,)), None, rollout, num_episodes=2, max_frames=limit)
    (batch,) = play(evaluator)
    assert batch.batch_size == (2, length)
    assert batch["next", "truncated"][:, -1].all().item() == (length < 9)


def test_newest_weights_act_in_each_round(play):
    policy = ConstantPolicy(0.0, num_actions=2)
    evaluator = make_evaluator(CountingEnv, policy, num_episodes=4, num_envs=2)
    seen = []
    for batch in evaluator.rounds():
        seen.append(batch["action"].unique().tolist())
        with torch.no_grad():
            policy.action += 1.0
    evaluator.close()
    assert seen == [[0], [1]]


def test_module_stays_in_its_mode_and_keeps_its_gradients(play):
    policy = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    evaluator = make_evaluator(CountingEnv, lambda obs: {"logits": policy(obs)}, num_episodes=2)
    policy(torch.zeros(1, 3)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in policy.parameters()]
    play(evaluator)
    assert policy.training
    assert all(torch.equal(p.grad, g) for p, g in zip(policy.parameters(), gradients, strict=True))


def test_envs_are_built_with_the_first_round_and_kept():
    made = []

    def make():
        made.append(CountingEnv())
        return made[-1]

    evaluator = make_evaluator(make, num_episodes=4, num_envs=2)
    loader = EvaluationLoader(evaluator, [])
    iter(loader)
    evaluator.close()
    assert made == []
    for _ in range(2):
        assert len(list(loader)) == 2
    assert len(made) == 2
    evaluator.close()
    evaluator.close()
    assert [env.closes for env in made] == [1, 1]
    assert len(list(loader)) == 2
    evaluator.close()
    assert [env.closes for env in made] == [1] * 4


def test_listeners_see_each_round_before_it_is_handed_out(play):
    heard = []
    evaluator = make_evaluator(CountingEnv, num_episodes=4, num_envs=2)
    for number, batch in enumerate(EvaluationLoader(evaluator, [heard.append, heard.append])):
        assert len(heard) == 2 * (number + 1)
        assert heard[-1] is batch
    evaluator.close()


def test_evaluation_under_inference_mode_spoils_none_that_comes_later(play):
    evaluator = make_evaluator(CountingEnv, ConstantPolicy(num_actions=2), num_episodes=2)
    with torch.inference_mode():
        (batch,) = play(evaluator)
    (again,) = play(evaluator)
    again["next", "reward"] += 0  # an ordinary tensor
    assert batch.shape == again.shape == (2, 3)


def test_first_episodes_of_known_rows():
    done = torch.tensor([[False, True, False, True], [False, False, True, False]])
    value = torch.arange(8.0).view(2, 4)
    batch = TensorDict({"value": value, "next": {"done": done.unsqueeze(-1)}}, batch_size=[2, 4])
    cut = first_episodes(batch)
    assert cut.batch_size == (2, 3)
    assert cut["collector", "mask"].tolist() == [[True, True, False], [True, True, True]]
    assert cut["value"].tolist() == [[0, 1, 0], [4, 5, 6]]
    assert value.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # the batch itself is left alone


def test_evaluation_when_a_callable_makes_a_vector_env_asks_for_its_copies():
    def make() -> SyncVectorEnv:
        return SyncVectorEnv([partial(CountingEnv, index, lengths=(2,)) for index in range(4)])

    with pytest.raises(ValueError, match=r"evaluation.num_envs must be the 4 copies .* EvaluationConfig\(num_envs=4"):
        next(make_evaluator(make, num_episodes=10).rounds())
    rounds = list(make_evaluator(make, num_envs=4, num_episodes=8).rounds())
    assert [tuple(batch.shape) for batch in rounds] == [(4, 2)] * 2


def test_evaluation_of_an_episode_that_does_not_end_says_so_and_goes_on(monkeypatch):
    monkeypatch.setattr(evaluation, "_PATIENCE", 64)
    evaluator = make_evaluator(partial(CountingEnv, lengths=(100,)), num_episodes=1)
    with pytest.warns(UserWarning, match=r"64 steps, and env copy 0 has not ended .* evaluation.max_frames"):
        assert next(evaluator.rounds()).shape == (1, 100)
    evaluator.close()


# --- in a fit ---------------------------------------------------------------------------------------------------------


class Evaluated(BoringRLModule):
    """Keeps what evaluation was acted by, and what it left behind."""

    def __init__(self, policy: nn.Module, **options) -> None:
        super().__init__(policy, **options)
        self.acted: list[float] = []
        self.averages: list[float] = []

    def validation_step(self, batch, batch_idx) -> None:
        self.acted.append(batch["action"].unique().item())
        self.averages.append(self.policy.action.item())


def fit(model, env, *callbacks, total_frames=24, evaluation=EvaluationConfig(num_episodes=2), **options):
    data = CollectorDataModule(
        env,
        num_envs=2,
        frames_per_batch=8,
        total_frames=total_frames,
        batches_per_epoch=1,
        evaluation=evaluation,
        seed=1,
        **options,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        max_epochs=-1,
        callbacks=list(callbacks),
    )
    trainer.fit(model, datamodule=data)
    return trainer


def test_mean_is_that_of_all_copies_however_long_their_episodes_are():
    makers = [partial(CountingEnv, 0, (2,)), partial(CountingEnv, 1, (20,))]
    monitor = CollectionMonitor()
    fit(Evaluated(ConstantPolicy(num_actions=2), learning_rate=0.0), makers, monitor, total_frames=8)
    assert monitor.latest["eval/length_mean"] == 11
    assert monitor.latest["eval/episodes"] == 2
    assert monitor.latest["eval/return_mean"] == (3 + 210) / 2


def test_averaged_weights_act_in_evaluation_and_the_trained_ones_in_training():
    model = Evaluated(ConstantPolicy(0.0), learning_rate=1.0)
    env = partial(CountingEnv, action_space=spaces.Box(-9.0, 9.0, ()))
    fit(model, env, EMAWeightAveraging(decay=0.5))
    assert [batch["action"].unique().item() for batch in model.batches] == [0.0, -1.0, -2.0]
    assert model.acted == model.averages
    trained = [-1.0, -2.0, -3.0]
    assert all(average > weight for average, weight in zip(model.averages[1:], trained[1:], strict=True))


class Normalised(nn.Module):
    """Has a mode, and statistics that change in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.action = nn.Parameter(torch.zeros(()))  # what `Evaluated` looks at

    def forward(self, observation):
        assert not self.net[1].training
        return {"logits": self.net(observation)}


class Bounded(Evaluated):
    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        assert self.policy.training
        return self.policy.action * 1.0

    def validation_step(self, batch, batch_idx) -> None:
        assert not self.training


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_mode_and_statistics_are_as_before_an_evaluation():
    model = Bounded(Normalised())
    before = buffers(model)
    fit(model, CountingEnv)
    assert model.training
    assert model.policy.net[1].training
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert len(model.batches) == 3


@pytest.mark.parametrize("where", ["reset", "step"])
def test_mode_and_statistics_are_as_before_an_evaluation_that_failed(where):
    policy = Normalised()
    before = buffers(policy)
    evaluator = make_evaluator(partial(FailingEnv, where, at=2 if where == "step" else 1), policy, num_episodes=1)
    with pytest.raises(WorkerFailedError, match="broken on purpose"):
        next(evaluator.rounds())
    evaluator.close()
    assert all(module.training for module in policy.modules())
    assert all(torch.equal(before[name], buffer) for name, buffer in policy.named_buffers())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
