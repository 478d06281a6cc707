import pytest
import torch

from lit_collect import Collector, ProcessBackend
from lit_collect.gaps import Gaps
from lit_collect.testing import ConstantPolicy, CountingEnv

FAR = 2**32


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def done(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def mended(gaps: Gaps, worker: int, given: torch.Tensor) -> list[list[int]]:
    given = given.clone()
    gaps.mend(worker, given)
    return given.tolist()


def test_rows_behind_a_hole_get_an_id_of_the_same_env_copy():
    gaps = Gaps(total_copies=2)
    gaps.lose(0, ids([4, 4], [5, 5]), done([0, 0], [0, 1]))
    assert mended(gaps, 0, ids([4, 6], [7, 7])) == [[4 + 2 * FAR, 6], [7, 7]]
    assert mended(gaps, 0, ids([6, 6], [7, 7])) == [[6, 6], [7, 7]]


def test_hole_lasts_as_long_as_its_trajectory_and_a_second_one_has_another_id():
    gaps = Gaps(total_copies=1)
    gaps.lose(0, ids([3, 3]), done([0, 0]))
    assert mended(gaps, 0, ids([3, 3])) == mended(gaps, 0, ids([3, 3])) == [[3 + FAR, 3 + FAR]]
    gaps.lose(0, ids([3, 3]), done([0, 0]))
    assert mended(gaps, 0, ids([3, 4])) == [[3 + 2 * FAR, 4]]
    gaps.lose(0, ids([4, 4]), done([0, 0]))
    assert mended(gaps, 0, ids([4, 4])) == [[4 + FAR, 4 + FAR]]


def test_holes_are_those_of_one_worker():
    gaps = Gaps(total_copies=2)
    gaps.lose(1, ids([1, 1]), done([0, 0]))
    assert mended(gaps, 0, ids([1, 1])) == [[1, 1]]


def test_trajectory_that_ended_in_the_hole_needs_no_other_id():
    gaps = Gaps(total_copies=1)
    gaps.lose(0, ids([0, 0]), done([0, 0]))
    gaps.lose(0, ids([0, 1]), done([1, 1]))
    gaps.lose(0, ids([2, -1]), done([1, 0]))  # the last row was spent on resetting
    assert mended(gaps, 0, ids([0, 2])) == [[0, 2]]


@pytest.mark.processes
@pytest.mark.usefixtures("nursery")
def test_trajectories_of_stale_batches_have_no_holes():
    policy, copies = ConstantPolicy(0.0, num_actions=2), 4
    seen: dict[int, list[float]] = {}
    with Collector(
        CountingEnv, policy, num_envs=copies, frames_per_batch=8,
        backend=ProcessBackend(2, sync=False, max_staleness=2),
    ) as collector:  # fmt: skip
        for number in range(200):
            for _ in range(4 if number % 12 == 11 else 1):  # a burst that nobody could foresee
                collector.update_policy_weights_(policy)
            for row in collector.collect().unbind(0):
                for frame in row.unbind(0):
                    seen.setdefault(int(frame["collector", "traj_ids"]), []).append(float(frame["observation"][2]))
        assert collector.statistics()["stale_dropped"] > 0
    for steps in seen.values():  # within one id no step is left out
        assert steps == [steps[0] + i for i in range(len(steps))]
