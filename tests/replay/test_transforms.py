"""Sample transforms: n-step returns and hindsight, with numbers that were worked out by hand."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect import FrameContractError
from lit_collect.frames import (
    INDEX,
    N_STEPS,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    TRAJ_IDS,
    WRITTEN,
)
from lit_collect.replay import Hindsight, NStep, ReplayBuffer, SampleTransform
from lit_collect.replay.transforms import sum_discounted


def walks(lengths, ends):
    """[M] rows of episodes: the observation is (episode, step), rewards are 10 * episode + step + 1."""
    rows = []
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        step = torch.arange(length)
        seen = torch.stack([torch.full((length,), number), step], 1).float()
        last = (step == length - 1)[:, None]
        rows.append(
            TensorDict(
                {
                    "observation": seen,
                    "collector": {"traj_ids": torch.full((length,), number)},
                    "next": {
                        "observation": seen + torch.tensor([0.0, 1.0]),
                        "reward": (10.0 * number + step + 1)[:, None],
                        "done": last & (end != "open"),
                        "terminated": last & (end == "terminated"),
                        "truncated": last & (end == "truncated"),
                    },
                },
                batch_size=[length],
            )
        )
    return torch.cat(rows)


def all_rows(transform, rows, **settings):
    """Every stored row once, as it is sampled, in the order of positions."""
    buffer = ReplayBuffer(64, len(rows), sampler="without_replacement", transforms=[transform], seed=0, **settings)
    buffer.extend(rows)
    sample = buffer.sample()
    return sample[sample[INDEX].argsort()], buffer


# --- n steps ----------------------------------------------------------------------------------------------------------


def test_sum_discounted_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [8.0, np.nan, 16.0]])
    known = torch.tensor([[True, True, True], [True, False, False]])
    assert sum_discounted(rewards, 0.5, known).tolist() == [1 + 0.5 * 2 + 0.25 * 4, 8.0]
    assert sum_discounted(rewards[..., None], 0.0, known).tolist() == [[1.0], [8.0]]


def test_n_step_by_hand():
    sample, buffer = all_rows(NStep(3, gamma=0.5), walks([4, 2, 2], ["terminated", "truncated", "open"]))
    assert sample[N_STEPS].tolist() == [3, 3, 2, 1, 2, 1, 2, 1]
    assert sample[NEXT_REWARD][:, 0].tolist() == [
        1 + 2 / 2 + 3 / 4,
        2 + 3 / 2 + 4 / 4,
        3 + 4 / 2,
        4,
        11 + 12 / 2,
        12,
        21 + 22 / 2,
        22,
    ]
    assert sample["next", "observation"][:, 1].tolist() == [3, 4, 4, 4, 2, 2, 2, 2]
    assert sample[NEXT_TERMINATED][:, 0].tolist() == [False, True, True, True, *[False] * 4]
    assert sample[NEXT_TRUNCATED][:, 0].tolist() == [*[False] * 4, True, True, False, False]
    assert torch.equal(sample[NEXT_DONE], sample[NEXT_TERMINATED] | sample[NEXT_TRUNCATED])
    assert torch.equal(sample["observation"], buffer[:]["observation"])
    assert torch.equal(sample[WRITTEN], torch.arange(8))
    assert buffer[:][NEXT_REWARD][0, 0] == 1  # the rows themselves are as they were


@pytest.mark.parametrize("compact_obs", [False, True])
def test_n_step_when_rows_are_overwritten_then_ends_where_rows_are_known(compact_obs):
    rows = walks([6, 6], ["terminated", "terminated"])
    buffer = ReplayBuffer(8, 64, transforms=[NStep(4, 1.0)], compact_obs=compact_obs, seed=0)
    buffer.extend(rows[:7])
    buffer.extend(rows[7:11])
    sample = buffer.sample()
    written, last = sample[WRITTEN], torch.where(sample[WRITTEN] < 6, 5, 10)
    assert sorted(written.unique().tolist()) == list(range(3, 11))
    assert torch.equal(sample[N_STEPS], (last - written + 1).clamp(max=4))
    rewards = rows[NEXT_REWARD][:, 0]
    wanted = [rewards[first : first + count].sum() for first, count in zip(written, sample[N_STEPS], strict=True)]
    assert sample[NEXT_REWARD][:, 0].tolist() == wanted
    assert torch.equal(sample["next", "observation"], rows["next", "observation"][written + sample[N_STEPS] - 1])


def test_n_step_with_interleaved_env_copies_then_follows_each():
    rows = walks([5, 5], ["open", "open"]).reshape(2, 5).transpose(0, 1)
    buffer = ReplayBuffer(16, 64, transforms=[NStep(3, 1.0)], seed=0)
    for step in rows:
        buffer.extend(step)
    sample = buffer.sample()
    assert torch.equal(sample["next", "observation"][:, 0], sample["observation"][:, 0])
    assert torch.equal(sample["next", "observation"][:, 1], sample["observation"][:, 1] + sample[N_STEPS])


def test_n_step_of_one_then_changes_nothing():
    rows = walks([4, 2], ["terminated", "open"])
    sample, _ = all_rows(NStep(1, gamma=0.5), rows)
    for key in rows.keys(True, True):
        assert torch.equal(sample[key], rows[key])


# --- hindsight --------------------------------------------------------------------------------------------------------


def goals(lengths, ends="truncated"):
    """[M] rows of a goal env in which what is achieved is (episode, step)."""
    rows = walks(lengths, [ends] * len(lengths))
    for place in (rows, rows["next"]):
        place["achieved_goal"] = place["observation"].clone()
        place["desired_goal"] = torch.full((len(rows), 2), -1.0)
    return rows


def minus_distance(achieved, desired, info):
    assert isinstance(achieved, np.ndarray)
    assert isinstance(desired, np.ndarray)
    assert info == {}
    return -np.abs(achieved - desired).sum(-1)


def test_hindsight_then_goals_are_achieved_later_in_the_episode():
    buffer = ReplayBuffer(64, 4000, transforms=[Hindsight(minus_distance, ratio=1.0)], seed=0)
    buffer.extend(goals([7, 4]))
    sample = buffer.sample()
    assert torch.equal(sample["desired_goal"], sample["next", "desired_goal"])
    assert torch.equal(sample["desired_goal"][:, 0], sample["observation"][:, 0])
    ahead = (sample["desired_goal"] - sample["next", "achieved_goal"])[:, 1]
    assert torch.equal(sample[NEXT_REWARD][:, 0], -ahead)
    first = (sample[TRAJ_IDS] == 0) & (sample["observation"][:, 1] == 2)
    counts = torch.bincount(ahead[first].long(), minlength=5) / first.sum()
    assert len(counts) == 5  # steps 3 to 7 are achieved from step 2 on
    assert counts.min() > 0.1
    assert counts.max() < 0.3
    assert (ahead >= 0).all()


def test_hindsight_then_changes_the_ratio_of_rows_and_nothing_else_of_them():
    rows = goals([7, 4])
    buffer = ReplayBuffer(64, 4000, transforms=[Hindsight(minus_distance)], seed=0)
    buffer.extend(rows)
    sample = buffer.sample()
    changed = (sample["desired_goal"] != -1).any(1)
    assert 0.77 < changed.double().mean() < 0.83
    stored = buffer[sample[INDEX]]
    assert torch.equal(stored["desired_goal"].unique(), torch.tensor([-1.0]))
    for key in rows.keys(True, True):
        same = sample[key] == stored[key]
        assert same[~changed].all()
        if key not in ("desired_goal", ("next", "desired_goal"), NEXT_REWARD):
            assert same.all()


def test_hindsight_with_terminated_then_flags_follow_the_goal():
    def reached(achieved, desired, info):
        return (achieved == desired).all(-1)

    transform = Hindsight(minus_distance, 1.0, compute_terminated=reached)
    buffer = ReplayBuffer(64, 500, transforms=[transform], seed=0)
    buffer.extend(goals([7, 4]))
    sample = buffer.sample()
    at_goal = (sample["desired_goal"] == sample["next", "achieved_goal"]).all(1)
    assert at_goal.any()
    assert not at_goal.all()
    assert torch.equal(sample[NEXT_TERMINATED][:, 0], at_goal)
    assert torch.equal(sample[NEXT_DONE], sample[NEXT_TERMINATED] | sample[NEXT_TRUNCATED])


@pytest.mark.parametrize("compact_obs", [False, True])
def test_hindsight_in_a_long_episode_then_walks_far(compact_obs):
    buffer = ReplayBuffer(512, 2000, transforms=[Hindsight(minus_distance, 1.0)], compact_obs=compact_obs, seed=0)
    buffer.extend(goals([400]))
    ahead = -buffer.sample()[NEXT_REWARD]
    assert ahead.max() > 300
    assert ahead.min() >= 0


def test_hindsight_with_equal_seeds_then_is_equal():
    samples = []
    for _ in range(2):
        buffer = ReplayBuffer(64, 100, transforms=[Hindsight(minus_distance)], seed=3)
        buffer.extend(goals([7, 4]))
        samples.append(buffer.sample()["desired_goal"])
    assert torch.equal(*samples)


def test_hindsight_without_goals_then_says_so():
    buffer = ReplayBuffer(64, 8, transforms=[Hindsight(minus_distance)], seed=0)
    buffer.extend(walks([4], ["open"]))
    with pytest.raises(FrameContractError, match=r"rows lack 'next.achieved_goal' : expected 'achieved_goal'"):
        buffer.sample()


def test_hindsight_with_one_reward_for_all_then_says_so():
    buffer = ReplayBuffer(64, 8, transforms=[Hindsight(lambda a, d, info: np.abs(a - d).sum(), 1.0)], seed=0)
    buffer.extend(goals([7]))
    with pytest.raises(FrameContractError, match=r"compute_reward must give one number for each of 8 rows, got shape"):
        buffer.sample()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_hindsight_when_a_reward_is_not_finite_then_names_the_function_and_the_goals(wrong):
    def compute_reward(achieved, desired, info):
        return np.where(desired[:, 1] == 7, wrong, -1.0)

    buffer = ReplayBuffer(64, 100, transforms=[Hindsight(compute_reward, 1.0)], seed=0)
    buffer.extend(goals([7]))
    words = rf"compute_reward must give finite rewards, got {wrong} \(in \d+ of 100 rows\), first for achieved_goal=\["
    with pytest.raises(FrameContractError, match=words + r".*desired_goal=\[0.0, 7.0\]"):
        buffer.sample()


# --- settings ---------------------------------------------------------------------------------------------------------


def test_nstep_of_rows_without_rewards_then_says_what_is_missing():
    buffer = ReplayBuffer(8, batch_size=2, transforms=[NStep(2, gamma=0.9)])
    buffer.extend(TensorDict({"observation": torch.zeros(3), "next": {"done": torch.zeros(3) > 0}}, batch_size=[3]))
    with pytest.raises(
        FrameContractError, match=r"rows lack \('next', 'reward'\) : expected that key, got .*leave NStep"
    ):
        buffer.sample()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: NStep(0, 0.9), ValueError, "n must be at least 1, got 0"),
        (lambda: NStep(2.0, 0.9), TypeError, "n must be an integer, got 2.0"),
        (lambda: NStep(2, 1.1), ValueError, "gamma must be between 0 and 1, got 1.1"),
        (lambda: Hindsight(None), TypeError, "compute_reward must be a function"),
        (lambda: Hindsight(minus_distance, 2), ValueError, "ratio must be between 0 and 1, got 2"),
        (lambda: Hindsight(minus_distance, compute_terminated=3), TypeError, "compute_terminated must be a function"),
        (lambda: ReplayBuffer(8, transforms=NStep(2, 0.9)), TypeError, "transforms must be a sequence"),
        (lambda: ReplayBuffer(8, transforms=[abs]), TypeError, "transforms must be of SampleTransform, got"),
        (
            lambda: ReplayBuffer(8, transforms=[NStep(2, 0.9), Hindsight(minus_distance)]),
            ValueError,
            r"must not undo each other : .* got \['NStep', 'Hindsight'\]",
        ),
        (
            lambda: ReplayBuffer(8, 8, slice_len=4, transforms=[NStep(2, 0.9)]),
            ValueError,
            "NStep works on single rows : expected a sampler of rows, got SliceSampler",
        ),
    ],
)
def test_wrong_setting_then_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_transform_of_ones_own_then_is_applied_in_turn():
    class Scaled(SampleTransform):
        takes_slices = True

        def __call__(self, sample, rows):
            sample["scaled"] = sample[NEXT_REWARD] * 2
            assert rows.walk(sample[INDEX].numpy(), 2).shape == (8, 2)
            return sample

    buffer = ReplayBuffer(64, 8, transforms=[NStep(2, 1.0), Scaled()], seed=0)
    buffer.extend(walks([7], ["open"]))
    sample = buffer.sample()
    assert torch.equal(sample["scaled"], sample[NEXT_REWARD] * 2)
    assert sample[N_STEPS].max() == 2
