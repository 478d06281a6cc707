"""How the ranks of a run agree: one budget for all, met to the frame, in the same number of batches on each of them.

Ranks train in step: one that ran out of batches would leave the others waiting for ever. Where rows of a batch can be
masked, ranks get on unequally, and none can count for the others. So after each collected batch they tell each other
how many transitions they have; from then on all of them know what is left, and they stop together.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from lit_collect.collector import Collector
from lit_collect.errors import BudgetSpentError, FrameContractError
from lit_collect.frames import count_frames, limit_frames

Gather = Callable[[Sequence[float]], list[list[float]]]
"""Gives the numbers of every rank, rank by rank, to every rank; all of them must call it."""

_TRIES = 16  # batches that hold too few transitions, each longer than the one before


@dataclass(kw_only=True)
class SharedBudget:
    """Counts the frames of all ranks together; each rank has one, and they are always equal.

    Example:
        >>> budget = SharedBudget(total=20, yielded=13)
        >>> budget.left, [budget.share(rank, 2) for rank in range(2)]
        (7, [4, 3])
    """

    total: int
    """Frames in all, -1 without a limit."""
    yielded: int = 0
    """Frames that were handed out."""
    lost: int = 0
    """Frames that were collected and will never be handed out: their trajectories were not whole, or too old."""
    lost_here: int = 0
    """What the collector of this rank had lost when it was asked last."""
    next_id: int = 0
    """Higher than the ids of all trajectories that were begun on any rank."""
    ranks: int = 1
    """How many shared it when it was last collected from."""
    spent: bool = False
    """Whether a rank has no batch any more, whatever the counts say."""

    @property
    def left(self) -> int | None:
        """Frames until it is spent, None without a limit."""
        if self.spent:
            return 0
        # a state that was loaded may be of a larger budget
        return None if self.total == -1 else max(self.total - self.yielded - self.lost, 0)

    def share(self, rank: int, ranks: int) -> int | None:
        """How many of the frames that are left belong to a rank, None without a limit."""
        return None if self.left is None else self.left // ranks + (rank < self.left % ranks)

    def collect(self, collector: Collector, *, rank: int, ranks: int, gather: Gather) -> TensorDictBase:
        """Collect one batch of this rank, and count those of all.

        Args:
            collector: of this rank.
            rank: of this process.
            ranks: how many there are.
            gather: exchanges numbers with the others.

        Returns:
            [N, T] with at least one transition, if there were frames left: at least as many as ranks always are.

        Raises:
            Exception: see `Collector.collect`; the other ranks wait for this one until its process ends.
        """
        left, share = self.left, self.share(rank, ranks)
        if left is None or share is None:
            batch = collector.collect()
        elif left < 2 * ranks:  # too few to leave one for each rank: there must not be another batch
            batch = _collect_exactly(collector, share)
        else:
            # workers that go on by themselves are not cut short before the last batch: another one may follow already
            collector.budget.limit(share if collector.workers.backend.sync else left)
            batch = collector.collect()
        mine = count_frames(batch)
        table = gather([mine, max(collector.workers.trajectories)])
        counts = [int(count) for count, _ in table]
        used = counts if left is None else usable(counts, left)
        if used[rank] < mine:
            limit_frames(batch, used[rank])
            collector.budget.take_back(mine - used[rank])
        self.yielded += sum(used)
        self.next_id = collector.num_envs * ranks * int(max(number for _, number in table))
        self.ranks = ranks
        if self.left and (used[rank] < mine or mine == share):  # rows may be missing, and there is another batch
            collector.reset()
        return batch

    def collect_whole(self, collector: Collector, *, ranks: int, gather: Gather) -> TensorDictBase:
        """Collect one batch of whole trajectories of this rank; each rank steps its own part of the budget.

        All stop together once one of them has no batch any more; those of the others are dropped.

        Args:
            collector: of this rank.
            ranks: how many there are.
            gather: exchanges numbers with the others.

        Raises:
            BudgetSpentError: if a rank has no batch any more.
            Exception: see `Collector.collect`.
        """
        batch: TensorDictBase | None = None
        with suppress(BudgetSpentError):
            batch = collector.collect()
        mine = 0 if batch is None else count_frames(batch)
        budget = collector.budget
        table = gather(
            [mine, max(collector.workers.trajectories), budget.lost - self.lost_here, float(budget.to_come == 0)]
        )
        counts, firsts, lost, ends = ([int(number) for number in column] for column in zip(*table, strict=True))
        self.lost, self.lost_here = self.lost + sum(lost), budget.lost
        self.next_id, self.ranks = collector.num_envs * ranks * max(firsts), ranks
        self.spent = any(ends) or 0 in counts
        if batch is None or 0 in counts:
            budget.take_back(mine)
            raise BudgetSpentError("what is left of total_frames makes no whole trajectories on every rank")
        self.yielded += sum(counts)
        return batch

    def count(self, collector: Collector, batch: TensorDictBase) -> None:
        """Count a batch that the collector of a single rank has made in the background."""
        self.yielded += count_frames(batch)
        self.lost = collector.budget.lost
        self.next_id, self.ranks = collector.num_envs * max(collector.workers.trajectories), 1

    def state_dict(self) -> dict[str, int]:
        """What is common to all ranks, as plain numbers. Talks to nobody."""
        return {"frames_total": self.yielded, "frames_lost": self.lost, "next_id": self.next_id, "ranks": self.ranks}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting."""
        self.yielded, self.next_id, self.ranks = state["frames_total"], state["next_id"], state["ranks"]
        self.lost, self.spent = state.get("frames_lost", 0), False

    def placed(self, state: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """The state of the first rank's collector, as another one may go on from it.

        A checkpoint holds the state of the first rank alone, so the others do not know how many trajectories their
        env copies had. All go on from the highest number, and ids stay unique.

        Args:
            state: see `Collector.state_dict`.
            ranks: how many go on.
        """
        self.lost_here = state.get("frames_lost", 0)
        if ranks == self.ranks == 1:
            return dict(state)
        copies = len(state["trajectories"])
        return {**state, "trajectories": [-(-self.next_id // (copies * ranks))] * copies}


def usable(counts: Sequence[int], left: int) -> list[int]:
    """How many transitions each rank uses: at most those that are left, and at least one.

    Afterwards none are left, or enough for another one on each rank.

    Args:
        counts: transitions of each rank, at least one.
        left: frames that were left. If these are less than two for each rank, there must be as many transitions.

    Example:
        >>> usable([4, 4], 20), usable([4, 3], 8), usable([4, 4], 5)
        ([4, 4], [3, 3], [2, 3])
    """
    used = list(counts)
    rest = left - sum(used)
    surplus = -rest if rest < 0 else len(used) - rest if 0 < rest < len(used) else 0
    for _ in range(surplus):
        used[used.index(max(used))] -= 1
    return used


def _collect_exactly(collector: Collector, frames: int) -> TensorDictBase:
    """A batch of so few transitions, although steps can be spent on resetting."""
    for tries in range(_TRIES):
        collector.budget.limit(frames + tries * collector.num_envs)
        batch = collector.collect()
        count = count_frames(batch)
        if count >= frames:
            collector.budget.take_back(count - frames)
            return batch if count == frames else limit_frames(batch, frames)
        collector.budget.take_back(count)
        collector.reset()
    raise FrameContractError(
        f"the env spends nearly all of its steps on resetting : expected {frames} transitions in a batch, got {count}; "
        f"raise frames_per_batch"
    )
