import torch

from lit_collect.fragments import Block, Fragment, Store, gather

WIDE = ("picture",)  # rows of 2 kB, which are copied another way than narrow ones
NARROW = ("step",)


def block_of(store: Store, first: int, size: int, needed: int | None = None) -> Block:
    steps = torch.arange(first, first + size)
    pictures = steps.view(-1, 1, 1).to(torch.uint8).expand(-1, 64, 32).contiguous()
    return store.keep({NARROW: steps, WIDE: pictures}, size if needed is None else needed)


def test_gather_when_fragments_lie_in_several_blocks_then_rows_come_in_their_order():
    store = Store()
    early, late = block_of(store, 10, 5), block_of(store, 20, 5)
    rows = gather(
        [
            Fragment(block=late, start=1, length=2),
            Fragment(block=early, start=4, length=1),
            Fragment(block=late, start=0, length=1),
        ],
        4,
    )
    assert rows[NARROW].tolist() == [21, 22, 14, 20]
    assert torch.equal(rows[WIDE][:, 5, 7].long(), rows[NARROW])


def test_gather_when_targets_are_given_then_the_other_rows_are_zero():
    store = Store()
    early, late = block_of(store, 10, 5), block_of(store, 20, 5)
    rows = gather([Fragment(block=late, start=1, length=2), Fragment(block=early, start=4, length=1)], 6, [0, 4])
    assert rows[NARROW].tolist() == [21, 22, 0, 0, 14, 0]
    assert torch.equal(rows[WIDE][:, 63, 31].long(), rows[NARROW])


def test_gather_when_it_is_done_then_the_rows_are_copies():
    store = Store()
    block = block_of(store, 10, 5)
    rows = gather([Fragment(block=block, start=0, length=5)], 5)
    rows[NARROW].zero_()
    rows[WIDE].zero_()
    again = gather([Fragment(block=block, start=0, length=5)], 5)
    assert again[NARROW].tolist() == [10, 11, 12, 13, 14]
    assert torch.equal(again[WIDE][:, 0, 0].long(), again[NARROW])


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
    assert gather(fragments, 100)[NARROW].tolist() == [10 * number + 7 for number in range(100)]


def test_tidy_when_most_rows_are_needed_then_nothing_moves():
    store = Store()
    fragments = [Fragment(block=block_of(store, 10 * number, 10), start=0, length=10) for number in range(20)]
    before = [fragment.block for fragment in fragments]
    store.tidy(lambda: fragments)
    assert [fragment.block for fragment in fragments] == before
