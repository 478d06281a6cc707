"""`TrajectoryWriter` and `ReplayTarget`: how whole trajectories get into a buffer, and what of them is kept back."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from lit_collect import Collector, ReplayBuffer, ReplayConfig
from lit_collect.frames import IS_INIT, NEXT_DONE, TRAJ_IDS
from lit_collect.testing import CountingEnv
from lit_collect.writing import TrajectoryWriter

LENGTHS = (3, 7, 1, 5)


def rows(*trajectories: tuple[int, int], open_rows: int = 0) -> TensorDict:
    """Whole trajectories given as (id, length), and rows of one that goes on."""
    ids = [name for name, length in trajectories for _ in range(length)] + [99] * open_rows
    steps = [step for _, length in trajectories for step in range(length)] + list(range(open_rows))
    ends = [step == length - 1 for _, length in trajectories for step in range(length)] + [False] * open_rows
    batch = TensorDict({"step": torch.tensor(steps)}, batch_size=[len(ids)])
    batch[TRAJ_IDS], batch[IS_INIT] = torch.tensor(ids), torch.tensor(steps)[:, None] == 0
    batch[NEXT_DONE] = torch.tensor(ends)[:, None]
    return batch


class Writes(list):
    """A sink that holds a number of rows in each write."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity

    def extend(self, batch: TensorDict) -> None:
        self.append(batch[TRAJ_IDS].unique_consecutive(return_counts=True))

    @property
    def told(self) -> list[list[tuple[int, int]]]:
        return [list(zip(ids.tolist(), counts.tolist(), strict=True)) for ids, counts in self]


def test_extend_when_more_ends_at_once_than_fits_then_it_is_several_writes():
    sink = Writes(capacity=7)
    TrajectoryWriter(sink).extend(rows((0, 4), (1, 3), (2, 6), (3, 1), (4, 2)))
    assert sink.told == [[(0, 4), (1, 3)], [(2, 6), (3, 1)], [(4, 2)]]


def test_extend_when_one_is_longer_than_the_buffer_then_it_is_refused():
    with ReplayBuffer(5) as buffer, pytest.raises(ValueError, match="at most capacity=5 rows, got 6"):
        TrajectoryWriter(buffer).extend(rows((0, 3), (1, 6)))


def test_budget_spent_when_fewer_wait_than_one_write_then_they_are_written():
    sink = Writes()
    writer = TrajectoryWriter(sink, 2)
    writer.extend(rows((0, 4), (1, 3), (2, 6), open_rows=5))
    assert sink.told == [[(0, 4), (1, 3)]]
    writer.budget_spent()
    assert sink.told == [[(0, 4), (1, 3)], [(2, 6)]]
    assert writer.frames_dropped == 5


def test_state_when_some_wait_then_another_writer_goes_on_with_them():
    first, second = Writes(), Writes()
    writer = TrajectoryWriter(first, 3)
    writer.extend(rows((0, 4), (1, 3), open_rows=5))
    other = TrajectoryWriter(second, 3)
    other.load_state_dict(writer.state_dict())
    other.extend(rows((5, 2), (6, 1)))
    assert (first.told, second.told) == ([], [[(0, 4), (1, 3), (5, 2)]])
    assert other.frames_dropped == 5
    assert other.state_dict()["waiting"]["collector"]["traj_ids"].tolist() == [6]


def test_collector_when_its_budget_is_spent_then_all_whole_trajectories_are_written():
    config = ReplayConfig(capacity=900, batch_size=8, write_mode="trajectory", trajs_per_write=40)
    makers = [partial(CountingEnv, number, LENGTHS) for number in range(4)]
    with Collector(makers, frames_per_batch=20, total_frames=400, replay_buffer=config) as collector:
        ended = sum(int(batch["next", "done"].sum()) for batch in collector)
        statistics = collector.statistics()
        written = collector.replay_buffer[:]
    assert int(written["next", "done"].sum()) == ended > 80
    assert len(written) + statistics["replay_dropped"] == statistics["frames_yielded"] == 400
