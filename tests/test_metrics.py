import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.episodes import EpisodeTotals, episode_returns, summarise
from lit_collect.metrics import EpisodeStatistics, Staleness, Throughput, staleness


def batch_of(rewards, done, *, mask=None, first=None) -> TensorDict:
    """A batch of what the metrics read; all arguments [N, T] or [T]."""
    done = torch.as_tensor(done)
    data = {
        "next": {
            "reward": torch.as_tensor(rewards, dtype=torch.float32).unsqueeze(-1),
            "done": done.unsqueeze(-1),
        }
    }
    if mask is not None:
        data["collector"] = {"mask": torch.as_tensor(mask)}
    if first is not None:
        data["is_init"] = torch.as_tensor(first).unsqueeze(-1)
    return TensorDict(data, batch_size=done.shape)


class Witness:
    """Counts row by row what the metric counts by segments."""

    def __init__(self, copies: int) -> None:
        self.returns, self.lengths = [0.0] * copies, [0] * copies
        self.finished: list[tuple[float, int]] = []

    def update(self, rewards, done, mask, first) -> None:
        copies, steps = done.shape
        for t in range(steps):
            for copy in range(copies):
                if first[copy, t]:
                    self.returns[copy], self.lengths[copy] = 0.0, 0
                if not mask[copy, t]:
                    continue
                self.returns[copy] += float(rewards[copy, t])
                self.lengths[copy] += 1
                if done[copy, t]:
                    self.finished.append((self.returns[copy], self.lengths[copy]))
                    self.returns[copy], self.lengths[copy] = 0.0, 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("given_first", [False, True])
@pytest.mark.parametrize("rate", [0.02, 0.3])  # 0.02: an episode lasts 50 rows on average, ten batches of 5
@pytest.mark.parametrize("window", [3, 100])
def test_statistics_agree_with_counting_row_by_row(masked, given_first, rate, window) -> None:
    random = np.random.default_rng(3)
    metric, witness = EpisodeStatistics(window), Witness(3)
    follows_end = np.ones(3, bool)
    for steps in [5] * 40 + [1, 2, 17]:
        rewards = random.integers(-4, 9, (3, steps)).astype(np.float32)
        done = random.random((3, steps)) < rate
        mask = np.ones((3, steps), bool)
        if masked:  # the row after an end is spent on resetting
            mask[:, 0] = ~follows_end
            for t in range(1, steps):
                mask[:, t] = ~(done[:, t - 1] & mask[:, t - 1])
            done &= mask
            follows_end = done[:, -1]
        first = np.zeros((3, steps), bool)
        if given_first:  # also where an episode was left without an end
            first = random.random((3, steps)) < 0.02
        metric.update(batch_of(rewards, done, mask=mask if masked else None, first=first if given_first else None))
        witness.update(rewards, done, mask, first)

    assert len(witness.finished) > 3
    returns, lengths = np.array(witness.finished).T
    got = metric.compute()
    assert metric.episodes[0].tolist() == returns[-window:].tolist()
    assert metric.episodes[1].tolist() == lengths[-window:].tolist()
    assert metric.running[0].tolist() == witness.returns
    assert metric.running[1].tolist() == witness.lengths
    assert got == pytest.approx(
        {
            "return_mean": returns[-window:].mean(),
            "return_min": returns[-window:].min(),
            "return_max": returns[-window:].max(),
            "return_std": returns[-window:].std(),
            "length_mean": lengths[-window:].mean(),
            "count": len(returns),
            "count_total": len(returns),
        }
    )


def test_episode_that_spans_five_batches_is_counted_once() -> None:
    metric = EpisodeStatistics()
    for number in range(5):
        metric.update(batch_of([[1.0, 10.0]], [[False, number == 4]]))
    assert metric.compute() == {
        "return_mean": 55.0,
        "return_min": 55.0,
        "return_max": 55.0,
        "return_std": 0.0,
        "length_mean": 10.0,
        "count": 1,
        "count_total": 1,
    }


def test_before_the_first_end_there_is_only_the_mean_running_return() -> None:
    metric = EpisodeStatistics()
    metric.update(batch_of([[1.0, 2.0], [10.0, 20.0]], [[False, False], [False, False]]))
    assert metric.compute() == {"return_mean": 16.5}


def test_unbatched_env_is_one_copy() -> None:
    metric = EpisodeStatistics()
    metric.update(batch_of([1.0, 2.0, 4.0], [False, True, False]))
    assert metric.episodes[0].tolist() == [3.0]
    assert metric.running[0].tolist() == [4.0]


def test_window_keeps_the_episodes_that_ended_last_in_time() -> None:
    metric = EpisodeStatistics(window=2)
    metric.update(batch_of([[1.0, 3.0], [2.0, 4.0]], [[True, True], [True, True]]))
    assert metric.episodes[0].tolist() == [3.0, 4.0]  # not the last ones in memory: copy by copy it would be 2, 4
    assert metric.compute()["count_total"] == 4


def test_left_episode_is_not_counted_when_a_new_one_begins() -> None:
    metric = EpisodeStatistics()
    metric.update(batch_of([[100.0, 100.0]], [[False, False]]))
    metric.update(batch_of([[1.0, 2.0]], [[False, True]], first=[[True, False]]))
    assert metric.episodes[0].tolist() == [3.0]
    assert metric.episodes[1].tolist() == [2]


def test_other_number_of_copies_begins_new_episodes() -> None:
    metric = EpisodeStatistics()
    metric.update(batch_of([[100.0]], [[False]]))
    metric.update(batch_of([[1.0], [2.0]], [[True], [True]]))
    assert metric.episodes[0].tolist() == [1.0, 2.0]


def test_returns_are_summed_in_float64() -> None:
    metric = EpisodeStatistics()
    metric.update(batch_of([[2.0**24, 1.0]], [[False, False]]))
    metric.update(batch_of([[1.0]], [[True]]))
    assert metric.episodes[0].tolist() == [2.0**24 + 2]


def test_bad_reward_spoils_only_its_own_episode() -> None:
    metric = EpisodeStatistics()
    metric.update(batch_of([[math.nan, 1.0, 2.0]], [[True, True, True]]))
    assert metric.episodes[0].tolist()[1:] == [1.0, 2.0]
    assert math.isnan(metric.episodes[0, 0])


def test_count_begins_anew_with_an_interval() -> None:
    metric = EpisodeStatistics()
    metric.update(batch_of([[1.0, 1.0]], [[True, True]]))
    metric.begin_interval()
    metric.update(batch_of([[1.0, 1.0]], [[True, False]]))
    assert (metric.compute()["count"], metric.compute()["count_total"]) == (1, 3)
    metric.begin_interval()
    assert (metric.compute()["count"], metric.compute()["count_total"]) == (0, 3)


def test_state_is_plain_tensors_and_carries_running_episodes() -> None:
    metric, other = EpisodeStatistics(window=2), EpisodeStatistics(window=2)
    metric.update(batch_of([[1.0, 2.0, 4.0]], [[True, True, False]]))
    state = metric.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    other.load_state_dict(state)
    kept = {name: value.clone() for name, value in state.items()}
    for one in (metric, other):
        one.update(batch_of([[8.0]], [[True]]))
        one.begin_interval()
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    assert other.compute() == metric.compute()
    assert other.episodes[0].tolist() == [2.0, 12.0]


def test_reset_forgets_everything() -> None:
    metric = EpisodeStatistics()
    metric.update(batch_of([[1.0, 2.0]], [[True, False]]))
    metric.reset()
    metric.update(batch_of([[5.0]], [[True]]))
    assert metric.episodes[0].tolist() == [5.0]
    assert metric.compute()["count_total"] == 1


def test_restore_goes_on_counting_without_the_running_episodes() -> None:
    metric = EpisodeStatistics(window=3)
    metric.update(batch_of([[100.0]], [[False]]))
    metric.restore([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1], count_total=7)
    metric.update(batch_of([[5.0]], [[True]]))
    assert metric.episodes[0].tolist() == [3.0, 4.0, 5.0]
    assert (metric.compute()["count"], metric.compute()["count_total"]) == (1, 8)


def test_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        EpisodeStatistics(window=0)


def test_ranks_are_joined_as_if_their_episodes_were_one_set() -> None:
    random = np.random.default_rng(0)
    sets = [random.normal(1e6, 1.0, size) for size in (1, 7, 30)]
    ranks = [EpisodeTotals.of(returns.tolist(), [3] * len(returns)) for returns in sets]
    ranks.insert(1, EpisodeTotals(running_sum=5.0, copies=2))  # a rank without an episode
    together = np.concatenate(sets)
    assert summarise(ranks) == pytest.approx(
        {
            "return_mean": together.mean(),
            "return_min": together.min(),
            "return_max": together.max(),
            "return_std": together.std(),
            "length_mean": 3.0,
            "count": 38,
            "count_total": 38,
        },
        rel=1e-9,
    )


def test_ranks_without_episodes_are_joined_over_their_copies() -> None:
    assert summarise([EpisodeTotals(running_sum=6.0, copies=1), EpisodeTotals(running_sum=0.0, copies=2)]) == {
        "return_mean": 2.0
    }
    assert summarise([EpisodeTotals()]) == {}


def test_episode_returns_leave_padding_out() -> None:
    batch = batch_of(
        [[1.0, 2.0, math.nan], [4.0, 5.0, 6.0]],
        [[False, True, False], [False, False, True]],
        mask=[[True, True, False], [True, True, True]],
    )
    returns, lengths = episode_returns(batch)
    assert returns.dtype == torch.float64
    assert lengths.dtype == torch.int64
    assert returns.tolist() == [3.0, 15.0]
    assert lengths.tolist() == [2, 3]


def test_episode_returns_without_mask_take_all_rows() -> None:
    returns, lengths = episode_returns(batch_of([1.0, 2.0], [False, True]))
    assert (returns.tolist(), lengths.tolist()) == ([3.0], [2])


def versions_of(versions, mask=None) -> TensorDict:
    labels = {"policy_version": torch.tensor(versions)}
    if mask is not None:
        labels["mask"] = torch.tensor(mask)
    return TensorDict({"collector": labels}, batch_size=labels["policy_version"].shape)


def test_staleness_leaves_out_random_and_masked_rows() -> None:
    batch = versions_of([[-1, 3, 5], [4, 0, 5]], [[True, True, True], [True, False, True]])
    assert staleness(batch, 5) == Staleness(total=2 + 0 + 1 + 0, rows=4, highest=2)


def test_staleness_of_random_rows_alone_is_of_no_rows() -> None:
    assert staleness(versions_of([-1, -1]), 4) == Staleness()


def test_staleness_of_several_batches_is_of_all_their_rows() -> None:
    joined = staleness(versions_of([1, 2]), 2).joined(staleness(versions_of([0]), 3))
    assert joined == Staleness(total=4, rows=3, highest=3)


def test_throughput_is_of_the_time_between_two_looks() -> None:
    seconds = iter([1.0, 3.0, 3.0, 3.5])
    throughput = Throughput(clock=lambda: next(seconds))
    assert throughput.look(10) is None
    assert throughput.look(110) == 50.0
    assert throughput.interval_s == 2.0
    assert throughput.look(110) is None  # no time has passed
    assert throughput.look(210) == 200.0


# --- batches of different workers


def part(ids: list[list[int]], *, first: list[list[int]], done: list[list[int]]) -> TensorDict:
    """Rows with a reward of 1 each; [n, T]."""
    flags = {name: torch.tensor(rows, dtype=torch.bool).unsqueeze(-1) for name, rows in (("i", first), ("d", done))}
    n, steps = len(ids), len(ids[0])
    return TensorDict(
        {
            "is_init": flags["i"],
            "next": {"reward": torch.ones(n, steps, 1), "done": flags["d"]},
            "collector": {"traj_ids": torch.tensor(ids)},
        },
        batch_size=[n, steps],
    )


def test_episodes_of_workers_that_hand_in_by_turns_are_not_mixed():
    episodes = EpisodeStatistics()
    episodes.update(part([[0, 0]], first=[[1, 0]], done=[[0, 0]]), total_copies=2)
    episodes.update(part([[1, 1]], first=[[1, 0]], done=[[0, 1]]), total_copies=2)
    episodes.update(part([[3, 3]], first=[[1, 0]], done=[[0, 0]]), total_copies=2)
    episodes.update(part([[0, 2]], first=[[0, 1]], done=[[1, 0]]), total_copies=2)
    episodes.update(part([[3, 3]], first=[[0, 0]], done=[[0, 1]]), total_copies=2)
    assert episodes.episodes.tolist() == [[2, 3, 4], [2, 3, 4]]


def test_episode_that_lost_rows_is_not_counted():
    episodes = EpisodeStatistics()
    episodes.update(part([[0, 0]], first=[[1, 0]], done=[[0, 0]]), total_copies=1)
    episodes.update(part([[2**32, 1]], first=[[0, 1]], done=[[1, 0]]), total_copies=1)  # behind a hole
    episodes.update(part([[1, 2]], first=[[0, 1]], done=[[1, 0]]), total_copies=1)
    assert episodes.episodes.tolist() == [[2], [2]]


def test_episode_whose_beginning_was_never_seen_is_not_counted():
    episodes = EpisodeStatistics()
    episodes.update(part([[4, 5]], first=[[0, 1]], done=[[1, 0]]), total_copies=1)
    episodes.update(part([[5, 5]], first=[[0, 0]], done=[[0, 1]]), total_copies=1)
    assert episodes.episodes.tolist() == [[3], [3]]


def test_rows_of_a_batch_in_which_nothing_happened_belong_to_nobody():
    statistics = EpisodeStatistics()
    for step, ids in enumerate(([[2], [3]], [[-1], [3]])):  # copy 0 has left a game that copy 1 is still playing
        mask, done = [[ids[0][0] >= 0], [True]], [[step == 0], [step == 1]]
        batch = batch_of([[1.0], [10.0]], done, mask=mask, first=[[True], [step == 0]])
        batch["collector", "traj_ids"] = torch.tensor(ids)
        statistics.update(batch, 2)
    assert statistics.episodes.tolist() == [[1.0, 20.0], [1.0, 2.0]]
    assert statistics.finished.copies == [1]


def test_batch_edges_that_end_trajectories_end_episodes_and_lose_none():
    episodes = EpisodeStatistics()
    episodes.update(part([[0, 0]], first=[[1, 0]], done=[[0, 1]]), total_copies=1)
    episodes.update(part([[1, 1]], first=[[0, 0]], done=[[0, 1]]), total_copies=1)
    assert episodes.episodes.tolist() == [[2, 2], [2, 2]]
