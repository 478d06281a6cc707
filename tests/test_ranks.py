"""The budget of all ranks is met to the frame, and never leaves one of them without a row."""

import random
from functools import partial

import pytest
from gymnasium.vector import SyncVectorEnv

from lit_collect import Collector, FrameContractError
from lit_collect.frames import count_frames
from lit_collect.ranks import SharedBudget, usable
from lit_collect.testing import CountingEnv


class Forgetful(SyncVectorEnv):
    """Spends a step of its copies on resetting."""

    def step(self, actions):
        return super().step(actions)


def spending(lengths: tuple[int, ...], copies: int = 2) -> Forgetful:
    return Forgetful([partial(CountingEnv, i, lengths) for i in range(copies)], autoreset_mode="NextStep")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("free", [False, True], ids=["share", "all that is left"])
def test_usable_leaves_nothing_or_enough_for_all(ranks, free):
    rng = random.Random(ranks)
    for _ in range(500):
        per_batch = rng.randint(1, 12)
        budget = SharedBudget(total=ranks * rng.randint(1, 100))
        while budget.left:
            shares = [budget.share(rank, ranks) for rank in range(ranks)]
            assert sum(shares) == budget.left
            most = [budget.left if free else share for share in shares]
            few = budget.left < 2 * ranks
            counts = shares if few else [rng.randint(1, min(per_batch, limit)) for limit in most]
            used = usable(counts, budget.left)
            assert all(1 <= some <= count for some, count in zip(used, counts, strict=True))
            budget.yielded += sum(used)
            assert budget.left == 0 or budget.left >= ranks


def test_frames_beyond_the_budget_are_taken_from_those_who_have_most():
    assert usable([8, 2, 8], 10) == [4, 2, 4]


def test_single_rank_is_the_whole_budget():
    budget = SharedBudget(total=20)
    with Collector(CountingEnv, num_envs=2, frames_per_batch=8, total_frames=20) as collector:
        sizes = []
        while budget.left:
            batch = budget.collect(collector, rank=0, ranks=1, gather=lambda numbers: [list(numbers)])
            sizes.append(tuple(batch.shape))
    assert sizes == [(2, 4), (2, 4), (2, 2)]
    assert budget.yielded == 20


@pytest.mark.parametrize("lengths", [(1,), (1, 2), (3,), (7,)])
@pytest.mark.parametrize("other", [1, 4, 7, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_counts_for_both(lengths, other, rank):
    """The other rank is played by numbers: `other` rows in each batch as long as there are as many."""
    budget, ranks, mine = SharedBudget(total=48), 2, []
    with Collector(lambda: spending(lengths), frames_per_batch=8) as collector:
        while budget.left:
            share = budget.share(1 - rank, ranks)
            theirs = share if budget.left < 2 * ranks else min(other, share)
            asked = []

            def gather(numbers, theirs=theirs, asked=asked):
                asked.append(numbers)
                rows = [[theirs, 0], [theirs, 0]]
                rows[rank] = list(numbers)
                return rows

            before = budget.yielded
            batch = budget.collect(collector, rank=rank, ranks=ranks, gather=gather)
            mine.append(count_frames(batch))
            assert len(asked) == 1
            assert 1 <= mine[-1] <= asked[0][0]
            assert 0 < budget.yielded - before - mine[-1] <= theirs
        statistics = collector.statistics()
    assert budget.yielded == 48
    assert statistics["frames_yielded"] == sum(mine)
    assert statistics["frames_stepped"] == statistics["frames_yielded"] + statistics["frames_dropped"]
    assert budget.next_id % 4 == 0


def test_env_that_hardly_ever_steps_is_named():
    budget = SharedBudget(total=4, yielded=1)
    with (
        Collector(lambda: spending((1,), copies=1), frames_per_batch=2) as collector,
        pytest.raises(FrameContractError, match="nearly all of its steps on resetting : expected 2 transitions"),
    ):
        budget.collect(collector, rank=0, ranks=2, gather=lambda numbers: [list(numbers)] * 2)


def test_state_is_plain_and_goes_on():
    budget = SharedBudget(total=100, yielded=40, next_id=21, ranks=2)
    again = SharedBudget(total=100)
    again.load_state_dict(budget.state_dict())
    assert again == budget
    assert all(type(value) is int for value in budget.state_dict().values())


@pytest.mark.parametrize(("before", "ranks"), [(2, 2), (2, 1), (1, 2)])
def test_ids_go_on_above_those_of_all_ranks(before, ranks):
    budget = SharedBudget(total=-1, next_id=21, ranks=before)
    state = {"trajectories": [1, 2], "policy_version": 3}
    placed = budget.placed(state, ranks)
    assert placed["policy_version"] == 3
    assert min(placed["trajectories"]) * 2 * ranks >= 21
    assert state["trajectories"] == [1, 2]


def test_single_rank_goes_on_exactly_where_it_was():
    state = {"trajectories": [1, 2]}
    assert SharedBudget(total=-1, next_id=21).placed(state, 1) == state
