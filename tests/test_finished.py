from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lit_collect.finished import Finished

STEP = ("step",)


def put(finished: Finished, first: int, lengths: Sequence[int], versions: Sequence[int] | None = None) -> None:
    """Trajectories whose rows count up from a number."""
    rows = np.arange(first, first + sum(lengths))
    finished.put({STEP: rows}, np.array(lengths), np.array(versions or [0] * len(lengths)))


def taken(finished: Finished, count: int) -> tuple[list[int], list[int]]:
    columns, lengths = finished.take(count)
    return columns[STEP].tolist(), lengths.tolist()


def test_take_when_a_bundle_has_them_then_they_come_in_order():
    finished = Finished()
    put(finished, 0, [2, 1, 3])
    assert taken(finished, 2) == ([0, 1, 2], [2, 1])
    assert (finished.count, finished.rows) == (1, 3)
    assert taken(finished, 1) == ([3, 4, 5], [3])
    assert (finished.count, finished.rows) == (0, 0)


def test_take_when_they_lie_in_several_bundles_then_they_are_joined():
    finished = Finished()
    for first, lengths in ((0, [2, 1]), (10, [1]), (20, [3, 2])):
        put(finished, first, lengths)
    assert taken(finished, 1) == ([0, 1], [2])
    assert taken(finished, 3) == ([2, 10, 20, 21, 22], [1, 1, 3])
    assert taken(finished, 1) == ([23, 24], [2])


def test_take_when_numpy_has_no_such_dtype_then_tensors_are_joined():
    finished = Finished()
    for first in (0, 2):
        columns = {STEP: torch.arange(first, first + 2).to(torch.bfloat16)}
        finished.put(columns, np.array([2]), np.array([0]))
    columns, _ = finished.take(2)
    assert torch.equal(columns[STEP], torch.arange(4).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("version", "dropped", "left"),
    [(1, 0, [2, 3, 10, 11, 12]), (4, 1, [2, 10, 11, 12]), (6, 3, [10, 11]), (7, 5, [])],
)
def test_drop_older_than_when_some_were_taken_then_only_what_waits_is_asked(version, dropped, left):
    finished = Finished()
    put(finished, 0, [2, 1, 1], [1, 4, 3])
    put(finished, 10, [2, 1], [6, 5])
    assert taken(finished, 1) == ([0, 1], [2])
    assert finished.drop_older_than(version) == dropped
    assert finished.rows == len(left) == 5 - dropped
    if left:
        assert taken(finished, finished.count)[0] == left
