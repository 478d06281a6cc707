"""The state of a recurrent policy is the one of its episode at every row, wherever and however rows are collected."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, distributions, nn

from lit_collect import Collector, CollectorDataModule, EvaluationConfig, ProcessBackend, RolloutConfig, check_batch
from lit_collect.frames import valid_rows
from lit_collect.policies import PolicyFactory
from lit_collect.testing import BoringRLModule, CountingEnv

COPIES, T, BATCHES = 4, 11, 6
LENGTHS = [(2 + index, 30, 1) for index in range(COPIES)]
WORKERS = [1, 2]


class Counter(nn.Module):
    """Counts its calls in an episode, in the same buffer that it was given; begins at 100."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def initial_state(self, num_envs: int) -> Tensor:
        return torch.full((num_envs,), 100)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        seen = state.clone()
        state += 1  # in place
        action = torch.zeros(len(observation), dtype=torch.int64)
        return {"action": action, "seen": seen, "weight": self.bias.expand(len(observation))}, state


class CountingTensorDict(TensorDictModule):
    """The same in the manner of TorchRL."""

    def __init__(self) -> None:
        keys = [("next", "count"), "action", "seen", "told"]
        super().__init__(self.count, ["count", "is_init"], keys)

    @staticmethod
    def count(count: Tensor, is_init: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return count + 1, torch.zeros(len(count), dtype=torch.int64), count.clone(), is_init.clone()

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        return {"count": torch.full((num_envs,), 100)}


class Builds(PolicyFactory):
    """Builds the counter where it acts."""

    def __call__(self) -> nn.Module:
        return Counter()


class Forgetful(SyncVectorEnv):
    """Spends a step on each reset, because nobody knows that it could do otherwise."""

    def step(self, actions: Any) -> Any:
        return super().step(actions)


def copies() -> list[Callable[[], CountingEnv]]:
    return [partial(CountingEnv, index, LENGTHS[index]) for index in range(COPIES)]


def vector(kind: type[SyncVectorEnv], mode: AutoresetMode) -> SyncVectorEnv:
    return kind(copies(), autoreset_mode=mode)


SOURCES: dict[str, Any] = {
    "single envs": copies(),
    "disabled": partial(vector, SyncVectorEnv, AutoresetMode.DISABLED),
    "same step": partial(vector, SyncVectorEnv, AutoresetMode.SAME_STEP),
    "next step": partial(vector, SyncVectorEnv, AutoresetMode.NEXT_STEP),
    "next step with spent rows": partial(vector, Forgetful, AutoresetMode.NEXT_STEP),
}


def collector_of(env: Any, policy: Any = None, *, backend: Any = "direct", **options: Any) -> Collector:
    return Collector(
        env,
        Counter() if policy is None else policy,
        frames_per_batch=COPIES * T,
        num_envs=COPIES,
        backend=backend,
        rollout=RolloutConfig(**options),
        seed=3,
    )


def collect(env: Any, policy: Any = None, *, batches: int = BATCHES, **options: Any) -> TensorDict:
    with collector_of(env, policy, **options) as collector:
        made = [collector.collect() for _ in range(batches)]
    for batch in made:
        check_batch(batch)
    return torch.cat(made, 1)


def check_count(batch: TensorDict, state: str = "state", *, since: int = 0) -> None:
    """The state is the step within the episode in every row that is a transition; the policy acts from `since` on."""
    valid = valid_rows(batch)
    valid = torch.ones(batch.shape, dtype=torch.bool) if valid is None else valid.clone()
    steps = 100 + batch["observation"][..., 2].long()
    assert torch.equal(batch[state][valid], steps[valid])
    valid[:, :since] = False
    assert torch.equal(batch["seen"][valid], steps[valid])
    assert batch["is_init"][valid].any()


@pytest.mark.parametrize("policy", [Counter, CountingTensorDict])
@pytest.mark.parametrize("source", SOURCES)
def test_state_is_the_step_within_the_episode_over_batches_and_resets(source, policy):
    batch = collect(SOURCES[source], policy())
    check_count(batch, "state" if policy is Counter else "count")
    assert (valid_rows(batch) is not None) == (source == "next step with spent rows")
    if policy is CountingTensorDict:
        valid = valid_rows(batch)
        told = batch["told"] == batch["is_init"]
        assert (told if valid is None else told[valid]).all()


OPTIONS: dict[str, dict[str, Any]] = {
    "set_truncated": {"set_truncated": True},
    "max_frames_per_traj": {"max_frames_per_traj": 4},
    "reset_at_each_iter": {"reset_at_each_iter": True},
    "compact_obs": {"compact_obs": True},
    "info_keys": {"info_keys": ("nothing",)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_state_is_the_step_within_the_episode_under_each_option(name):
    with collector_of(SOURCES["single envs"], **OPTIONS[name]) as collector:
        batch = torch.cat([collector.collect() for _ in range(BATCHES)], 1)
    check_count(batch)
    if name == "set_truncated":  # the episode goes on, and so does its state
        assert (batch["state"][:, T::T] > 100).any()


@pytest.mark.parametrize("policy", [Counter, CountingTensorDict])
@pytest.mark.parametrize("source", SOURCES)
def test_state_follows_the_episode_while_somebody_else_acts(source, policy):
    random_steps = T + 3
    batch = collect(SOURCES[source], policy(), init_random_frames=random_steps * COPIES)
    state = "state" if policy is Counter else "count"
    assert (batch["collector", "policy_version"][:, :random_steps] == -1).all()
    assert not batch["seen"][:, :random_steps].any()
    check_count(batch, state, since=random_steps)


def test_state_is_that_of_a_new_episode_after_resets():
    with collector_of(SOURCES["single envs"]) as collector:
        collector.collect()
        collector.reset(2)
        one = collector.collect()
        collector.reset()
        all_of_them = collector.collect()
        collector.set_seed(5)
        seeded = collector.collect()
    for batch in (one, all_of_them, seeded):
        check_count(batch)
    assert one["state"][:, 0].tolist()[2] == 100
    assert (one["state"][[0, 1, 3], 0] > 100).any()
    assert (all_of_them["state"][:, 0] == 100).all()
    assert (seeded["state"][:, 0] == 100).all()


def test_state_is_that_of_a_new_episode_after_an_error():
    class Fails(Counter):
        calls = 0

        def forward(self, observation: Tensor, state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            self.calls += 1
            if self.calls == T + 5:
                raise KeyError("broken policy")
            return super().forward(observation, state)

    with collector_of(SOURCES["single envs"], Fails()) as collector:
        collector.collect()
        with pytest.raises(Exception, match="broken policy"):
            collector.collect()
        after = collector.collect()
    check_count(after)
    assert (after["state"][:, 0] == 100).all()


class Still(nn.Module):
    """Counts on an env whose observations do not tell the step."""

    def initial_state(self, num_envs: int) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros(num_envs, 1), {"calls": torch.zeros(num_envs)}

    def forward(self, observation: Tensor, state: Any) -> tuple[Tensor, Any]:
        count, inner = state
        return observation[:, 2].gt(0).long(), (count + 1, {"calls": inner["calls"] + 2})


@pytest.mark.parametrize("set_truncated", [False, True])
def test_vector_env_that_spends_steps_on_resetting_gives_each_episode_its_count(set_truncated):
    env = partial(CartPoleVectorEnv, num_envs=COPIES)
    batch = collect(env, Still(), batches=9, set_truncated=set_truncated)
    mask, first = valid_rows(batch), batch["is_init"].squeeze(-1)
    assert not mask.all()
    for copy in range(COPIES):
        expected = 0
        for t in range(batch.shape[1]):
            expected = 0 if first[copy, t] else expected + 1
            if mask[copy, t]:
                assert batch["state", "0"][copy, t].item() == expected
                assert batch["state", "1", "calls"][copy, t].item() == 2 * expected
    assert first.sum() > 2 * COPIES


@pytest.mark.processes
@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("policy", [Counter, CountingTensorDict, Builds])
def test_workers_give_what_one_process_gives(policy, workers):
    options = {"init_random_frames": COPIES * 3, "max_frames_per_traj": 9}
    ours = collect(SOURCES["single envs"], policy(), backend=ProcessBackend(num_collectors=workers), **options)
    theirs = collect(SOURCES["single envs"], policy(), **options)
    check_count(ours, "count" if policy is CountingTensorDict else "state", since=3)
    for key in ("observation", "seen", "is_init", ("next", "observation")):
        assert torch.equal(ours[key], theirs[key])


@pytest.mark.processes
@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("backend", ["direct", ProcessBackend(num_collectors=2)])
def test_new_weights_come_between_batches_and_leave_the_state_alone(backend):
    policy, made = Counter(), []
    with collector_of(SOURCES["single envs"], policy, backend=backend) as collector:
        for version in range(4):
            policy.bias.data.fill_(version)
            collector.update_policy_weights_(policy)
            made.append(collector.collect())
    batch = torch.cat(made, 1)
    check_count(batch)
    assert torch.equal(batch["weight"], torch.arange(4.0).repeat_interleave(T).expand(COPIES, -1))


# --- a slice can be replayed


class Gru(nn.Module):
    """A GRU of two layers whose first state is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.GRU(3, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 2)
        self.begin = nn.Parameter(torch.randn(2, 5))

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        return {"hidden": self.begin.expand(num_envs, 2, 5)}

    def forward(self, observation: Tensor, state: dict[str, Tensor]) -> tuple[distributions.Distribution, Any]:
        hidden = state["hidden"].transpose(0, 1).contiguous()
        out, hidden = self.core(observation[:, None] / 10, hidden)
        return {"logits": self.head(out[:, 0])}, {"hidden": hidden.transpose(0, 1)}


@pytest.mark.parametrize("source", SOURCES)
def test_slice_is_replayed_from_its_stored_state(source):
    torch.manual_seed(0)
    policy = Gru()
    batch = collect(SOURCES[source], policy, batches=3)
    ids, replayed = batch["collector", "traj_ids"], 0
    for begin in range(0, 2 * T, 5):  # also over the border of two batches
        state = {"hidden": batch["state", "hidden"][:, begin]}
        same = torch.ones(COPIES, dtype=torch.bool)
        for t in range(begin, begin + T):
            same &= (ids[:, t] == ids[:, begin]) & (ids[:, t] >= 0)
            torch.testing.assert_close(batch["state", "hidden"][same, t], state["hidden"][same])
            with torch.no_grad():
                out, state = policy(batch["observation"][:, t], state)
            torch.testing.assert_close(batch["logits"][same, t], out["logits"][same])
            replayed += int(same.sum())
    assert replayed > 40
    first = batch["is_init"].squeeze(-1) & (ids >= 0)
    assert torch.equal(batch["state", "hidden"][first], policy.begin.detach().expand(int(first.sum()), 2, 5))


def test_whole_rollout_is_replayed_with_gradients():
    torch.manual_seed(0)
    policy = Gru()
    batch = collect([partial(CountingEnv, index, (50,)) for index in range(COPIES)], policy, batches=1)
    hidden = batch["state", "hidden"][:, 0].transpose(0, 1).contiguous()
    out, _ = policy.core(batch["observation"] / 10, hidden)
    torch.testing.assert_close(policy.head(out), batch["logits"])
    policy.head(out).sum().backward()
    assert policy.core.weight_hh_l0.grad.abs().sum() > 0


# --- the Lightning face


class Recurrent(BoringRLModule):
    """Evaluates, and keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__(Counter())
        self.rounds: list[TensorDict] = []

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        self.rounds.append(batch)


def test_evaluation_has_states_of_its_own(trainer_with):
    data = CollectorDataModule(
        SOURCES["single envs"][0],
        num_envs=2,
        frames_per_batch=2 * T,
        total_frames=6 * T,
        evaluation=EvaluationConfig(num_episodes=6, num_envs=3),
        batches_per_epoch=1,
    )
    learner = Recurrent()
    trainer_with(max_epochs=3).fit(learner, data)
    assert learner.rounds
    for batch in learner.rounds:
        valid = valid_rows(batch)
        steps = 100 + batch["observation"][..., 2].long()
        assert torch.equal(
            batch["state"][valid] if valid is not None else batch["state"], steps if valid is None else steps[valid]
        )


@pytest.mark.parametrize("seed", [0, 1])
def test_stream_does_not_depend_on_how_it_is_cut_into_batches(seed):
    def stream(steps: int, batches: int) -> TensorDict:
        torch.manual_seed(seed)
        with Collector(copies(), Gru(), frames_per_batch=COPIES * steps, seed=seed) as collector:
            return torch.cat([collector.collect() for _ in range(batches)], 1)

    whole, cut = stream(30, 1), stream(5, 6)
    for key in ("observation", "action", ("state", "hidden")):
        torch.testing.assert_close(whole[key], cut[key])
    assert np.unique(whole["action"]).tolist() == [0, 1]
