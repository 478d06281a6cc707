"""Batches of workers become one: joined in the order of the workers, padded where one is short, cut to the budget."""

import pytest
import torch
from tensordict import TensorDict

from lit_collect.errors import FrameContractError
from lit_collect.frames import (
    IS_INIT,
    MASK,
    NEXT_REWARD,
    NO_TRAJECTORY,
    POLICY_VERSION,
    TRAJ_IDS,
    Key,
    columns_of,
    count_frames,
    limit_frames,
)
from lit_collect.gathering import join

IMAGE, WIDE, NOTHING = ("image",), ("wide",), ("nothing",)


def columns(
    worker: int, copies: int = 2, steps: int = 3, *, mask: torch.Tensor | None = None
) -> dict[Key, torch.Tensor]:
    """Every value says which worker it is of (hundreds), which copy (tens) and which step; never zero, never -1."""
    step = 1 + torch.arange(steps).expand(copies, steps)
    number = 100 * (worker + 1) + 10 * torch.arange(copies)[:, None] + step
    made = {
        IMAGE: (number % 251).to(torch.uint8)[..., None, None].expand(copies, steps, 2, 2).clone(),
        WIDE: number.double()[..., None] + 0.25,
        NOTHING: torch.zeros(copies, steps, 0),
        IS_INIT: torch.ones(copies, steps, 1, dtype=torch.bool),
        NEXT_REWARD: number.float()[..., None],
        TRAJ_IDS: number.clone(),
        POLICY_VERSION: number.clone(),
    }
    return made if mask is None else {**made, MASK: mask}


def as_batch(part: dict[Key, torch.Tensor]) -> TensorDict:
    """The same columns as a batch of a worker in this process."""
    batch = TensorDict({}, batch_size=part[TRAJ_IDS].shape, names=[None, "time"])
    for key, column in part.items():
        batch[key] = column
    return batch


def is_padding(batch: TensorDict, rows: tuple) -> bool:
    """Whether all columns say that there is nothing."""
    ids, rest = batch[TRAJ_IDS][rows], batch.exclude(TRAJ_IDS)
    return bool((ids == NO_TRAJECTORY).all()) and not any(column[rows].any() for column in columns_of(rest).values())


# --- join -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [dict, as_batch], ids=["columns", "batches"])
@pytest.mark.parametrize("workers", [2, 4])
def test_join_puts_the_copies_in_the_order_of_the_workers(workers, convert):
    parts = [columns(worker) for worker in range(workers)]
    batch = join([convert(part) for part in parts], masked=False)
    assert batch.batch_size == (2 * workers, 3)
    assert batch.names == [None, "time"]
    assert columns_of(batch).keys() == parts[0].keys()
    for key, column in columns_of(batch).items():
        assert torch.equal(column, torch.cat([part[key] for part in parts]))
        assert column.dtype == parts[0][key].dtype


@pytest.mark.parametrize("workers", [1, 3])
def test_join_copies_columns_that_the_workers_will_write_again(workers):
    parts = [columns(worker) for worker in range(workers)]
    batch = join(parts, masked=False)
    before = batch.clone()
    for part in parts:
        for column in part.values():
            column.zero_()
    assert all(torch.equal(column, columns_of(before)[key]) for key, column in columns_of(batch).items())
    assert batch[TRAJ_IDS][0].tolist() == [101, 102, 103]


@pytest.mark.parametrize("masked", [False, True])
def test_join_of_one_batch_that_was_given_away_is_that_batch(masked):
    only = as_batch(columns(0))
    assert join([only], masked=masked) is only


def test_join_pads_shorter_parts_and_masks_what_they_lack():
    batch = join([columns(0, steps=1), columns(1, steps=3), columns(2, steps=2)], masked=True)
    assert batch.batch_size == (6, 3)
    assert batch[MASK].sum(1).tolist() == [1, 1, 3, 3, 2, 2]
    assert batch[TRAJ_IDS].tolist() == [
        [101, -1, -1], [111, -1, -1], [201, 202, 203], [211, 212, 213], [301, 302, -1], [311, 312, -1],
    ]  # fmt: skip
    assert is_padding(batch, (slice(0, 2), slice(1, 3)))
    assert is_padding(batch, (slice(4, 6), slice(2, 3)))
    assert batch[WIDE][5, 1].item() == 312.25
    assert {key: column.dtype for key, column in columns_of(batch).items() if key != MASK} == {
        key: column.dtype for key, column in columns(0).items()
    }


def test_join_of_equally_long_parts_has_a_mask_where_it_is_asked_for():
    parts = [columns(0), columns(1)]
    assert MASK not in columns_of(join(parts, masked=False))
    mask = join(parts, masked=True)[MASK]
    assert mask.shape == (4, 3)
    assert mask.dtype == torch.bool
    assert mask.all()


def test_join_keeps_the_masks_of_the_parts_and_masks_padding_besides():
    spent = torch.tensor([[True, False], [True, True]])
    whole = torch.tensor([[True, True, False], [False, True, True]])
    batch = join([columns(0, steps=2, mask=spent), columns(1, steps=3, mask=whole)], masked=True)
    assert torch.equal(batch[MASK], torch.cat([torch.nn.functional.pad(spent, (0, 1)), whole]))
    assert batch[TRAJ_IDS][:2, 2].tolist() == [NO_TRAJECTORY, NO_TRAJECTORY]
    assert is_padding(batch, (slice(0, 2), slice(2, 3)))


def test_join_of_workers_with_different_keys_names_them():
    odd = columns(1)
    odd["agent", "value"] = odd.pop(WIDE)
    with pytest.raises(FrameContractError, match=r"different keys : expected the same, got \['agent.value', 'wide'\]"):
        join([columns(0), odd], masked=False)


# --- limit_frames -----------------------------------------------------------------------------------------------------


def test_limit_frames_counts_step_by_step_over_all_copies():
    batch = limit_frames(as_batch(columns(0, copies=3, steps=3)), 5)
    assert batch[MASK].tolist() == [[True, True, False], [True, True, False], [True, False, False]]
    assert batch[TRAJ_IDS].tolist() == [[101, 102, -1], [111, 112, -1], [121, -1, -1]]
    assert count_frames(batch) == 5


def test_limit_frames_leaves_out_rows_that_are_no_frames():
    mask = torch.tensor([[True, False, True, True], [False, True, True, True]])
    batch = limit_frames(as_batch(columns(0, steps=4, mask=mask)), 3)
    assert batch[MASK].tolist() == [[True, False, True, False], [False, True, False, False]]
    assert batch[TRAJ_IDS][0, 3] == batch[TRAJ_IDS][1, 2] == batch[TRAJ_IDS][1, 3] == NO_TRAJECTORY
    assert batch[TRAJ_IDS][batch[MASK]].tolist() == [101, 103, 112]


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (1, 1), (5, 5), (6, 6), (99, 6)])
def test_limit_frames_keeps_at_most_that_many(limit, kept):
    batch = as_batch(columns(0))
    assert limit_frames(batch, limit) is batch
    assert count_frames(batch) == kept
    assert ((batch[TRAJ_IDS] == NO_TRAJECTORY) == ~batch[MASK]).all()
