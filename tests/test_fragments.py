from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch

from lit_collect.fragments import Block, Fragment, Store, as_arrays, filled, gather, moves_of

WIDE = ("picture",)  # rows of 2 kB, which are copied another way than narrow ones
NARROW = ("step",)


def block_of(store: Store, first: int, size: int, needed: int | None = None) -> Block:
    steps = torch.arange(first, first + size)
    pictures = steps.view(-1, 1, 1).to(torch.uint8).expand(-1, 64, 32).contiguous()
    return store.keep(as_arrays({NARROW: steps, WIDE: pictures}), size if needed is None else needed)


def rows_of(fragments: Sequence[Fragment]) -> dict[tuple[str, ...], np.ndarray]:
    """The rows of fragments one after the other."""
    *targets, size = accumulate((fragment.length for fragment in fragments), initial=0)
    return gather(moves_of(fragments, targets), size)


def test_gather_when_fragments_lie_in_several_blocks_then_rows_come_in_their_order():
    store = Store()
    early, late = block_of(store, 10, 5), block_of(store, 20, 5)
    rows = rows_of(
        [
            Fragment(block=late, start=1, length=2),
            Fragment(block=early, start=4, length=1),
            Fragment(block=late, start=0, length=1),
        ]
    )
    assert rows[NARROW].tolist() == [21, 22, 14, 20]
    assert np.array_equal(rows[WIDE][:, 5, 7], rows[NARROW])


def test_gather_when_targets_are_in_any_order_then_each_fragment_lies_at_its_own():
    store = Store()
    early, late = block_of(store, 10, 5), block_of(store, 20, 5)
    fragments = [Fragment(block=late, start=1, length=2), Fragment(block=early, start=2, length=3)]
    rows = gather(moves_of(fragments, [3, 0]), 5)
    assert rows[NARROW].tolist() == [12, 13, 14, 21, 22]
    assert np.array_equal(rows[WIDE][:, 63, 31], rows[NARROW])


def test_gather_when_it_is_done_then_the_rows_are_copies():
    store = Store()
    block = block_of(store, 10, 5)
    rows = rows_of([Fragment(block=block, start=0, length=5)])
    rows[NARROW][:] = 0
    rows[WIDE][:] = 0
    again = rows_of([Fragment(block=block, start=0, length=5)])
    assert again[NARROW].tolist() == [10, 11, 12, 13, 14]
    assert np.array_equal(again[WIDE][:, 0, 0], again[NARROW])


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16], ids=str)
def test_filled_when_a_value_is_given_then_rows_are_of_the_same_kind(dtype):
    like = as_arrays({NARROW: torch.ones(2, 3, dtype=dtype)})[NARROW]
    rows = filled(like, 4, -1)
    assert (type(rows), rows.dtype, tuple(rows.shape)) == (type(like), like.dtype, (4, 3))
    assert rows.tolist() == [[-1] * 3] * 4


def test_store_when_a_block_is_released_then_it_is_given_up():
    store = Store()
    block = block_of(store, 0, 5, needed=3)
    store.release(block, 2)
    assert (store.rows, store.rows_needed) == (5, 1)
    store.release(block, 1)
    assert (store.rows, store.rows_needed) == (0, 0)


def test_tidy_when_few_rows_of_many_blocks_are_needed_then_what_is_kept_is_bounded():
    store = Store()
    fragments: list[Fragment] = []
    for number in range(100):
        block = block_of(store, 10 * number, 10, needed=1)
        fragments.append(Fragment(block=block, start=7, length=1))
        store.tidy(lambda: fragments)
        assert store.rows_needed == len(fragments)
        assert store.rows <= 2 * len(fragments) + 4 * 10
    assert store.rows < 300  # of 1,000
    assert rows_of(fragments)[NARROW].tolist() == [10 * number + 7 for number in range(100)]


def test_tidy_when_most_rows_are_needed_then_nothing_moves():
    store = Store()
    fragments = [Fragment(block=block_of(store, 10 * number, 10), start=0, length=10) for number in range(20)]
    before = [fragment.block for fragment in fragments]
    store.tidy(lambda: fragments)
    assert [fragment.block for fragment in fragments] == before
