import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.errors import FrameContractError
from lit_collect.pieces import find_pieces, lengths_of_rows, per_row, ranges


def pieces(groups, ends=None, valid=None) -> list[list[int]]:
    """Positions of the rows of each trajectory."""
    found = find_pieces(np.array(groups, np.int64), None if ends is None else np.array(ends, bool), valid)
    spans = zip(found.starts, found.lengths, strict=True)
    return [found.rows[start : start + length].tolist() for start, length in spans]


def test_find_pieces_when_ids_alternate_then_each_is_whole():
    assert pieces([7, 3, 7, 3, 3]) == [[0, 2], [1, 3, 4]]


def test_find_pieces_when_a_row_ends_within_an_id_then_it_is_two():
    assert pieces([5, 5, 8, 5], ends=[0, 1, 0, 0]) == [[0, 1], [2], [3]]


def test_find_pieces_when_rows_are_invalid_then_they_are_nowhere():
    assert pieces([5, 9, 5, 5], ends=[1, 1, 0, 0], valid=np.array([1, 0, 1, 1], bool)) == [[0], [2, 3]]


def test_find_pieces_when_there_are_no_rows_then_there_are_none():
    assert pieces([]) == []
    assert pieces([1, 2], valid=np.zeros(2, bool)) == []


def test_find_pieces_when_rows_of_each_id_lie_together_then_it_is_as_if_they_were_sorted():
    random = np.random.default_rng(0)
    for _ in range(200):
        groups = np.repeat(random.permutation(6), random.integers(0, 4, 6))  # no id has two runs
        ends, valid = random.random((2, len(groups))) < [[0.3], [0.8]]
        wanted: dict[tuple[int, int], list[int]] = {}
        for row in np.flatnonzero(valid).tolist():
            ended = sum(
                ends[earlier] for earlier in np.flatnonzero(valid) if earlier < row and groups[earlier] == groups[row]
            )
            wanted.setdefault((groups[row], ended), []).append(row)
        assert pieces(groups, ends, valid) == sorted(wanted.values())


def test_lengths_of_rows_when_trajectories_differ_then_each_row_tells_its_own():
    assert lengths_of_rows(find_pieces(np.array([4, 6, 6]), None, None)).tolist() == [1, 2, 2]


def test_ranges_when_one_is_empty_then_it_is_skipped():
    assert ranges(np.array([3, 9, 0]), np.array([2, 0, 1])).tolist() == [3, 4, 0]


def test_per_row_when_there_are_several_values_a_row_then_it_raises():
    batch = TensorDict({"next": {"done": torch.zeros(2, 3, 4, dtype=torch.bool)}}, batch_size=[2, 3])
    with pytest.raises(FrameContractError, match=r"\('next', 'done'\) must have one value a row : .*\(2, 3\), got .*4"):
        per_row(batch, ("next", "done"))
