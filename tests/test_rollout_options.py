"""What the options of a rollout change, and what is left when something goes wrong in it."""

from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict
from torch import Tensor, distributions

from lit_collect.config import RolloutConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.errors import FrameContractError, WorkerFailedError
from lit_collect.frames import check_batch, count_frames, limit_frames
from lit_collect.rollout import RolloutRunner
from lit_collect.seeding import Placement, RandomStream, env_seeds
from lit_collect.testing import CountingEnv, FailingEnv, ScriptedEnv
from lit_collect.worker import WorkerSpec, build_runner

MOVE = spaces.Box(-50, 50, (2,), np.float32)
SHORT = spaces.Box(-1, 1, (2,), np.float32)


def parity(observation: Tensor) -> Tensor:
    return observation.sum(-1).long() % 2


def sampler(observation: Tensor) -> dict[str, Tensor]:
    return {"logits": torch.stack([observation[:, 1] - observation[:, 2], observation[:, 0]], -1)}


def gaussian(observation: Tensor) -> dict[str, Tensor]:
    loc = observation[:, 1:] / 10
    return {"loc": loc, "scale": 0.1 + loc.abs(), "value": observation[:, 0]}


def counting(copies: int = 2, lengths: Any = (3,), **options: Any) -> list:
    return [partial(CountingEnv, index, lengths, **options) for index in range(copies)]


def runner(envs: Any, policy: Any = parity, **options: Any) -> RolloutRunner:
    source, place = resolve_env(envs), Placement(entropy=0)
    rollout = RolloutConfig(**options)
    return build_runner(WorkerSpec(source=source, policy=policy, rollout=rollout, num_envs=None, place=place))


def collect(one: RolloutRunner, *steps: int) -> list[TensorDict]:
    batches = [one.collect(t, version=0) for t in steps]
    for batch in batches:
        check_batch(batch)
    return batches


def ids(batch: TensorDict) -> list[list[int]]:
    return batch["collector", "traj_ids"].tolist()


# --- set_truncated, max_frames_per_traj, reset_at_each_iter


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_set_truncated_marks_the_edge_and_goes_on_under_a_new_id(ends):
    envs = counting(2, (3,), ends=ends)
    with closing(runner(envs, set_truncated=True)) as one, closing(runner(envs)) as plain:
        marked, unmarked = torch.cat(collect(one, 4, 2, 2), 1), torch.cat(collect(plain, 4, 2, 2), 1)
    edge = torch.tensor([False, False, False, True, False, True, False, True])
    # Episodes end after rows 2 and 5; row 5 is an edge too, rows 3 and 7 are edges within an episode.
    assert ids(marked) == [[0, 0, 0, 2, 4, 4, 6, 6], [1, 1, 1, 3, 5, 5, 7, 7]]
    truncated = unmarked["next", "truncated"].squeeze(-1) | edge
    assert torch.equal(marked["next", "truncated"].squeeze(-1), truncated)
    assert torch.equal(marked["next", "done"].squeeze(-1), truncated | unmarked["next", "terminated"].squeeze(-1))
    for key in ("observation", "is_init", "done", ("next", "observation"), ("next", "reward"), ("next", "terminated")):
        assert torch.equal(marked[key], unmarked[key]), key


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_max_frames_per_traj_truncates_and_leaves_terminated_alone(ends):
    with closing(runner(counting(2, (50, 2, 4), ends=ends), max_frames_per_traj=4)) as one:
        (batch,) = collect(one, 12)
    assert batch["observation"][0, :, 2].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1]
    assert batch["next", "observation"][0, [3, 9], 2].tolist() == [4, 4]  # not the reset ones
    done = batch["next", "done"][0].squeeze(-1).nonzero().squeeze(-1).tolist()
    assert done == [3, 5, 9]
    terminated = [False, True, True] if ends == "terminated" else [False] * 3
    assert batch["next", "terminated"][0, done].squeeze(-1).tolist() == terminated
    truncated = [True, False, True] if ends == "terminated" else [True] * 3
    assert batch["next", "truncated"][0, done].squeeze(-1).tolist() == truncated


def test_max_frames_per_traj_counts_across_batches():
    with closing(runner(counting(1, (50,)), max_frames_per_traj=5)) as one:
        batch = torch.cat(collect(one, 3, 3, 3, 3), 1)
    assert batch["observation"][0, :, 2].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("set_truncated", [False, True])
def test_reset_at_each_iter_begins_every_batch_with_new_episodes(set_truncated):
    with closing(runner(counting(2, (3,)), reset_at_each_iter=True, set_truncated=set_truncated)) as one:
        first, second, third = collect(one, 5, 3, 2)
    assert ids(first) == [[0, 0, 0, 2, 2], [1, 1, 1, 3, 3]]
    assert ids(second) == [[4, 4, 4], [5, 5, 5]]
    assert ids(third) == [[6, 6], [7, 7]]
    for batch in (first, second, third):
        assert batch["is_init"][:, 0].all()
        assert batch["observation"][:, 0, 2].tolist() == [0, 0]
    assert first["next", "observation"][:, -1, 2].tolist() == [2, 2]  # what really followed, not the reset
    assert first["next", "done"][:, -1].squeeze(-1).tolist() == [set_truncated] * 2


# --- random frames at first


@pytest.mark.parametrize(("frames", "steps"), [(0, 0), (1, 1), (4, 2), (5, 3), (9, 5), (100, 50)])
def test_init_random_frames_are_rounded_up_to_whole_steps(frames, steps):
    with closing(runner(counting(2, (50,)), lambda x: x[:, 0].long() * 0, init_random_frames=frames)) as one:
        batch = torch.cat(collect(one, 4, 4, 60), 1)  # over several batches
    versions = [-1] * steps + [0] * (68 - steps)
    assert batch["collector", "policy_version"].tolist() == [versions] * 2
    assert not batch["action"][:, steps:].any()
    assert batch["action"][:, :steps].any() == (steps > 0)


@pytest.mark.parametrize(("policy", "space"), [(sampler, spaces.Discrete(2)), (gaussian, MOVE)])
def test_outputs_of_random_frames_are_zero_and_later_ones_the_policys(policy, space):
    envs = counting(2, (3,), action_space=space)
    with closing(runner(envs, policy, init_random_frames=6)) as one:
        batch = torch.cat(collect(one, 2, 2, 4), 1)
    assert not batch["log_prob"][:, :3].any()
    expected = policy(batch["observation"].flatten(0, 1))
    for name, values in expected.items():
        assert not batch[name][:, :3].any()
        assert torch.equal(batch[name][:, 3:], values.unflatten(0, (2, 8))[:, 3:])
    if policy is sampler:
        made: distributions.Distribution = distributions.Categorical(logits=batch["logits"][:, 3:])
    else:
        made = distributions.Independent(distributions.Normal(batch["loc"][:, 3:], batch["scale"][:, 3:]), 1)
    torch.testing.assert_close(batch["log_prob"][:, 3:], made.log_prob(batch["action"][:, 3:]))


def test_random_frames_leave_the_policys_own_random_numbers_alone():
    def noise(observation: Tensor) -> dict[str, Tensor]:
        return {"loc": torch.zeros(2, 2), "scale": torch.ones(2, 2)}

    envs = counting(2, (3,), action_space=MOVE)
    with closing(runner(envs, noise, init_random_frames=6)) as late, closing(runner(envs, noise)) as early:
        (first,), (second,) = collect(late, 8), collect(early, 5)
    assert torch.equal(first["action"][:, 3:], second["action"])


def test_policy_of_other_random_numbers_acts_alike_however_random_frames_are_cut_into_batches():
    def policy_with_its_own() -> Any:
        own = np.random.default_rng(0)
        return lambda x: {"action": x[:, 0].long() * 0, "noise": np.array([[np.random.rand(), own.random()]] * 2)}

    noises = []
    for steps in ([9], [1] * 9, [4, 5]):
        with closing(runner(counting(2, (3,)), policy_with_its_own(), init_random_frames=6)) as one:
            noises.append(torch.cat([batch["noise"] for batch in collect(one, *steps)], 1))
    assert torch.equal(noises[0], noises[1])
    assert torch.equal(noises[0], noises[2])
    with closing(runner(counting(2, (3,)), policy_with_its_own())) as one:
        assert torch.equal(collect(one, 6)[0]["noise"][..., 0], noises[0][:, 3:, 0])  # nor were global ones moved


def test_random_frames_are_those_of_no_policy():
    envs = counting(2, (3,), action_space=SHORT)
    with closing(runner(envs, lambda x: x[:, 1:], init_random_frames=16)) as one, closing(runner(envs, None)) as other:
        assert torch.equal(collect(one, 8)[0]["action"], collect(other, 8)[0]["action"])


# --- policies that do what they must not


@pytest.mark.parametrize("dirty_batch", [0, 1, 2])
def test_policy_that_changes_its_observation_in_place_raises(dirty_batch):
    calls = 0

    def policy(observation: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4 * dirty_batch + 2:
            observation.div_(10)
        return parity(observation)

    with closing(runner(counting(), policy)) as one:
        before = collect(one, *[4] * dirty_batch)
        with pytest.raises(FrameContractError, match="changed its observation in place; let it work on a copy"):
            one.collect(4, version=0)
        (after,) = collect(one, 4)
    check_new_episodes(before, after)


def check_new_episodes(before: list[TensorDict], after: TensorDict) -> None:
    """A batch after a lost one begins new episodes, under ids that were not given before."""
    assert after["is_init"][:, 0].all()
    assert after["observation"][:, 0, 2].tolist() == [0.0] * len(after)
    for batch in before:
        assert ids(batch)[0][-1] < ids(after)[0][0]
        assert (batch["observation"][:, -1, 1] < after["observation"][:, 0, 1]).all()
    assert [row[0] % len(after) for row in ids(after)] == list(range(len(after)))


def test_nan_logits_lose_the_batch_and_the_next_one_begins_new_episodes():
    calls = 0

    def policy(observation: Tensor) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        return {"logits": observation[:, :2] * (torch.nan if calls == 7 else 1)}

    with closing(runner(counting(), policy)) as one:
        before = collect(one, 4)
        with pytest.raises(FrameContractError, match="gave NaN for env copy 0 at step 2 of the batch"):
            one.collect(4, version=0)
        (after,) = collect(one, 4)
    check_new_episodes(before, after)


def test_policy_that_raises_loses_the_batch_and_the_next_one_begins_new_episodes():
    calls = 0

    def policy(observation: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyError("broken policy")
        return parity(observation)

    with closing(runner(counting(), policy)) as one:
        before = collect(one, 4)
        with pytest.raises(Exception, match="broken policy"):
            one.collect(4, version=0)
        (after,) = collect(one, 4)
    check_new_episodes(before, after)


# --- envs that fail


@pytest.mark.parametrize("at", [5, 6, 7, 8])
def test_env_that_raises_loses_the_batch_and_the_next_one_begins_new_episodes(at):
    state = torch.get_rng_state()
    with closing(runner([partial(CountingEnv, 0), partial(FailingEnv, "step", at=at, index=1)], sampler)) as one:
        before = collect(one, 4)
        with pytest.raises(WorkerFailedError, match="env copy 1 failed in step: RuntimeError: broken on purpose"):
            one.collect(4, version=0)
        after, later = collect(one, 4, 7)
    check_new_episodes(before, after)
    assert ids(later)[0][0] == ids(after)[0][-1]
    assert torch.equal(torch.get_rng_state(), state)  # the caller's own


def test_env_that_fails_in_its_first_reset_is_reset_under_the_same_seed():
    envs = [CountingEnv(0), FailingEnv("reset", at=1, index=1)]
    with closing(runner([lambda env=env: env for env in envs])) as one:
        with pytest.raises(WorkerFailedError, match="env copy 1 failed in reset: RuntimeError: broken on purpose"):
            one.collect(4, version=0)
        (batch,) = collect(one, 4)
    assert ids(batch) == [[0, 0, 0, 2], [1, 1, 1, 3]]
    assert [env.seeds[-2] for env in envs] == env_seeds(0, "train", range(2))


def nan_at(place: int) -> list[list[float]]:
    """Four observations, the one at that place not a number."""
    return [[torch.nan if t == place else float(t)] for t in range(4)]


@pytest.mark.parametrize(
    ("observations", "rewards", "message"),
    [
        (nan_at(0), [1, 2, 3], "^observation of env copy 0 is not finite at step 0 of the batch"),
        (nan_at(2), [1, 2, 3], "^observation of env copy 0 is not finite at step 2 of the batch"),
        (nan_at(3), [1, 2, 3], "^next observation of env copy 0 is not finite at step 2 of the batch"),
        (nan_at(9), [1, torch.nan, 3], "^reward of env copy 0 is not finite at step 1 of the batch"),
        (nan_at(9), [1, 2, -torch.inf], "^reward of env copy 0 is not finite at step 2 of the batch"),
    ],
    ids=["reset", "step", "terminal", "reward", "infinite reward"],
)
def test_check_finite_finds_every_value_and_is_off_by_default(observations, rewards, message):
    env = partial(ScriptedEnv, observations, rewards)
    with closing(runner(env, None, check_finite=True)) as one, pytest.raises(FrameContractError, match=message):
        one.collect(5, version=0)
    with closing(runner(env, None)) as one:
        collect(one, 5)


def test_check_finite_passes_what_is_finite():
    with closing(runner(counting(), check_finite=True)) as one, closing(runner(counting())) as other:
        assert (collect(one, 7)[0] == collect(other, 7)[0]).all()


def test_check_finite_loses_the_batch_and_the_next_one_begins_new_episodes():
    rewards = [1.0] * 5 + [torch.inf] + [1.0]
    with closing(runner(partial(ScriptedEnv, [[float(t)] for t in range(8)], rewards), None, check_finite=True)) as one:
        (before,) = collect(one, 5)
        with pytest.raises(FrameContractError, match="reward of env copy 0"):
            one.collect(5, version=0)
        (after,) = collect(one, 5)
    assert (ids(before), ids(after)) == ([[0] * 5], [[1] * 5])
    assert after["is_init"].squeeze(-1).tolist() == [[True] + [False] * 4]


# --- resets from outside, and going on after a resume


def test_reset_begins_new_episodes_in_all_copies():
    with closing(runner(counting(2, (5,)))) as one:
        before = collect(one, 7)
        one.reset()
        (after,) = collect(one, 3)
    check_new_episodes(before, after)
    assert ids(after) == [[4] * 3, [5] * 3]


def test_reset_of_one_copy_leaves_the_others_alone():
    with closing(runner(counting(3, (5,)))) as one:
        collect(one, 7)
        one.reset(1)
        (after,) = collect(one, 3)
    assert after["observation"][:, 0].tolist() == [[0, 1, 2], [1, 2, 0], [2, 1, 2]]
    assert after["is_init"][:, 0].squeeze(-1).tolist() == [False, True, False]
    assert ids(after) == [[3] * 3, [7] * 3, [5] * 3]


def test_reset_twice_or_before_the_first_batch_skips_no_id():
    with closing(runner(counting(2, (5,)))) as one:
        one.reset(0)
        one.reset()
        (first,) = collect(one, 7)
        one.reset(0)
        one.reset(0)
        one.reset()
        (second,) = collect(one, 3)
    assert (ids(first), ids(second)) == ([[0] * 5 + [2] * 2, [1] * 5 + [3] * 2], [[4] * 3, [5] * 3])


def test_reseed_begins_new_episodes_under_the_new_seeds():
    envs = [CountingEnv(0, (50,)), CountingEnv(1, (50,))]
    with closing(runner([lambda env=env: env for env in envs], lambda x: {"logits": torch.zeros(2, 2)})) as one:
        before = collect(one, 4)
        one.reseed([11, 12], RandomStream(3))
        (after,) = collect(one, 6)
        one.reseed([11, 12], RandomStream(3))
        (again,) = collect(one, 6)
    check_new_episodes(before, after)
    assert [env.seeds[1:] for env in envs] == [[11, 11], [12, 12]]
    assert torch.equal(after["action"], again["action"])
    assert not torch.equal(after["action"][:, :4], before[0]["action"])


def test_resume_goes_on_counting():
    with closing(runner(counting(2, (3,)), init_random_frames=4)) as one:
        (before,) = collect(one, 4)
        trajectories = one.running_trajectories
    with closing(runner(counting(2, (3,)))) as other:
        other.resume(trajectories, warm_up_steps=1)
        (after,) = collect(other, 4)
    assert trajectories == [2, 2]
    assert (ids(before), ids(after)) == ([[0, 0, 0, 2], [1, 1, 1, 3]], [[4, 4, 4, 6], [5, 5, 5, 7]])
    assert after["collector", "policy_version"][0].tolist() == [-1, 0, 0, 0]


def test_resume_leaves_nothing_of_earlier_batches_in_random_rows():
    with closing(runner(counting(2, (50,), action_space=MOVE), gaussian)) as one:
        collect(one, 4)
        one.resume([1, 1], warm_up_steps=2)
        (batch,) = collect(one, 4)
    assert batch["value"][1].tolist() == [0, 0, 1, 1]
    assert not batch["log_prob"][:, :2].any()
    assert batch["scale"][:, 2:].all()


def test_running_trajectories_are_the_first_ids_that_are_free():
    with closing(runner(counting(2, (3,)), set_truncated=True)) as one:
        assert one.running_trajectories == [0, 0]
        collect(one, 3)
        assert one.running_trajectories == [1, 1]
        collect(one, 1)
        assert one.running_trajectories == [2, 2]  # the batch edge ended a trajectory


# --- sources that spend steps on resetting


class ForgetfulSync(SyncVectorEnv):
    """Spends a step on each reset."""

    def step(self, actions):
        return super().step(actions)


def test_set_truncated_ends_no_trajectory_in_a_row_that_is_none():
    envs = ForgetfulSync(counting(2, (2,)), autoreset_mode="NextStep")
    with closing(envs), closing(runner(envs, set_truncated=True)) as one:
        batches = collect(one, 3, 2, 2, 1)  # edges: in a reset, at an end, and twice within an episode
    assert [ids(batch)[0] for batch in batches] == [[0, 0, -1], [2, 2], [-1, 4], [6]]
    assert [ids(batch)[1] for batch in batches] == [[1, 1, -1], [3, 3], [-1, 5], [7]]
    truncated = [batch["next", "truncated"][0].squeeze(-1).tolist() for batch in batches]
    assert truncated == [[False] * 3, [False, True], [False, True], [True]]
    assert batches[3]["observation"][0].tolist() == [[0, 2, 1]]


def test_rows_that_are_no_transitions_are_masked_and_not_counted():
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    with closing(envs), closing(runner(envs, lambda x: torch.zeros(2, dtype=torch.int64))) as one:
        batches = collect(one, 30, 10)
        mask = torch.cat([batch["collector", "mask"] for batch in batches], 1)
        assert one.frames_stepped == sum(map(count_frames, batches)) == int(mask.sum()) < 80
        traj_ids = torch.cat([batch["collector", "traj_ids"] for batch in batches], 1)
        assert torch.equal(traj_ids == -1, ~mask)
        cut = limit_frames(one.collect(10, version=0), 5)
        check_batch(cut)
        assert count_frames(cut) == 5
        assert (cut["collector", "mask"].sum(0) > 0).nonzero().max() <= 4  # the first ones in time


def test_rows_that_are_no_transitions_are_not_counted_when_the_batch_is_lost():
    calls = 0

    def policy(observation: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 71:  # behind a whole window, and within the next one
            raise KeyError("broken policy")
        return parity(observation)

    class Forgetful(gymnasium.vector.VectorWrapper):
        """Not known to reset single copies."""

    copies = [CountingEnv(0, (1,)), CountingEnv(1, (3,))]
    envs = gymnasium.vector.SyncVectorEnv([lambda env=env: env for env in copies], autoreset_mode="NextStep")
    with closing(envs), closing(runner(Forgetful(envs), policy)) as one:
        with pytest.raises(KeyError, match="broken policy"):
            one.collect(80, version=0)
        assert one.frames_stepped == sum(len(env.actions) for env in copies) < 140
