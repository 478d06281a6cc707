import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from lit_collect import Collector, RolloutConfig
from lit_collect.assembler import TrajectoryAssembler
from lit_collect.errors import FrameContractError
from lit_collect.frames import IS_INIT, LENGTHS, MASK, NEXT_DONE, POLICY_VERSION, TRAJ_IDS, check_batch
from lit_collect.testing import CountingEnv


def batch_of(*lines: Sequence[tuple[int, int, int]], version: int = 0, **columns) -> TensorDict:
    """A batch [N, T] of rows given as (id, step, whether it is done)."""
    ids, steps, done = torch.tensor(lines).unbind(-1)
    batch = TensorDict({"observation": steps[..., None].float(), "step": steps, **columns}, batch_size=ids.shape)
    batch[TRAJ_IDS], batch[IS_INIT], batch[NEXT_DONE] = ids, (steps == 0)[..., None], done[..., None].bool()
    batch[POLICY_VERSION] = torch.full_like(ids, version)
    return batch


def episode(name: int, length: int, start: int = 0) -> list[tuple[int, int, int]]:
    return [(name, step, int(step == length - 1)) for step in range(start, length)]


def told(batch: TensorDict) -> list[tuple[int, int]]:
    """(id, step) of each row."""
    batch = batch[batch[MASK]]
    return list(zip(batch[TRAJ_IDS].tolist(), batch["step"].tolist(), strict=True))


def whole(*trajectories: tuple[int, int]) -> list[tuple[int, int]]:
    """(id, step) of the rows of trajectories given as (id, length)."""
    return [(name, step) for name, length in trajectories for step in range(length)]


# --- what is complete, and in which order


def test_take_when_a_trajectory_spans_batches_then_it_comes_when_it_is_whole():
    assembler = TrajectoryAssembler(1)
    assert assembler.add(batch_of(episode(0, 5)[:2])) == 0
    assert assembler.take() is None
    assert (assembler.num_complete, assembler.frames_open, assembler.frames_held) == (0, 2, 2)
    assembler.add(batch_of(episode(0, 5)[2:4]))
    assembler.add(batch_of([*episode(0, 5, 4), (2, 0, 0)]))
    assert (assembler.num_complete, assembler.frames_complete, assembler.frames_open) == (1, 5, 1)
    assert told(assembler.take()) == whole((0, 5))
    assert (assembler.num_complete, assembler.frames_held) == (0, 1)


def test_take_when_several_end_in_a_batch_then_they_come_by_time_and_then_by_copy():
    assembler = TrajectoryAssembler(4)
    assembler.add(batch_of([*episode(0, 3), (3, 0, 0)], [*episode(1, 2), *episode(4, 2)], [*episode(2, 3), (5, 0, 0)]))
    assert told(assembler.take()) == whole((1, 2), (0, 3), (2, 3), (4, 2))


def test_take_when_they_ended_in_another_order_over_batches_then_the_earlier_batch_is_first():
    assembler = TrajectoryAssembler(2)
    assembler.add(batch_of(episode(0, 4)[:3], episode(1, 3)))
    assembler.add(batch_of(episode(0, 4, 3)))
    assert told(assembler.take()) == whole((1, 3), (0, 4))


def test_take_when_there_are_fewer_than_asked_then_rest_has_them():
    assembler = TrajectoryAssembler(2)
    assembler.add(batch_of([*episode(0, 1), *episode(1, 2), *episode(2, 1), (3, 0, 0)]))
    assert told(assembler.take()) == whole((0, 1), (1, 2))
    assert assembler.take() is None
    assert told(assembler.rest()) == whole((2, 1))
    assert assembler.rest() is None
    assert assembler.drop_open() == 1
    assert assembler.frames_held == 0


def test_rest_when_there_are_more_than_asked_then_it_gives_the_number():
    assembler = TrajectoryAssembler(2)
    assembler.add(batch_of([row for name in range(5) for row in episode(name, 1)]))
    assert [told(assembler.rest()) for _ in range(3)] == [whole((0, 1), (1, 1)), whole((2, 1), (3, 1)), whole((4, 1))]


def test_add_when_rows_of_trajectories_alternate_then_each_is_whole():
    assembler = TrajectoryAssembler(2)
    rows = [row for pair in zip(episode(0, 4), episode(1, 4), strict=True) for row in pair]
    assembler.add(batch_of(rows[:5])[0])
    assembler.add(batch_of(rows[5:])[0])
    assert told(assembler.take()) == whole((0, 4), (1, 4))


def test_add_when_the_batch_is_one_copy_or_deeper_then_it_is_the_same():
    lines = [episode(0, 3), episode(1, 3), episode(2, 3), episode(3, 3)]
    deep, flat = TrajectoryAssembler(4), TrajectoryAssembler(4)
    deep.add(batch_of(*lines).reshape(2, 2, 3))
    for line in lines:
        flat.add(batch_of(line)[0])
    assert told(deep.take()) == told(flat.take()) == whole((0, 3), (1, 3), (2, 3), (3, 3))


def test_add_when_rows_are_masked_then_they_are_skipped():
    assembler = TrajectoryAssembler(2)
    batch = batch_of([(0, 0, 0), (0, 9, 1), (0, 1, 1), (-1, 9, 1), (1, 0, 1)])
    batch[MASK] = torch.tensor([[True, False, True, True, True]])
    assembler.add(batch)
    assert assembler.frames_held == 3
    assert told(assembler.take()) == whole((0, 2), (1, 1))


def test_add_when_a_mask_comes_and_goes_then_batches_fit_all_the_same():
    assembler = TrajectoryAssembler(1)
    assembler.add(batch_of(episode(0, 4)[:2]))
    batch = batch_of(episode(0, 4)[2:])
    batch[MASK] = torch.ones(1, 2, dtype=torch.bool)
    assembler.add(batch)
    assert told(assembler.take()) == whole((0, 4))


def test_add_when_no_row_is_a_transition_then_nothing_happens():
    assembler = TrajectoryAssembler(1)
    assert assembler.add(batch_of([(-1, 0, 1), (-1, 0, 0)])) == 0
    assert assembler.frames_held == 0
    assert assembler.rest() is None


# --- what is given


@pytest.mark.parametrize("traj_format", ["cat", "padded"])
def test_take_when_a_collector_made_the_batches_then_rows_are_those_of_the_env(traj_format):
    assembler = TrajectoryAssembler(3, traj_format, total_copies=2)
    envs = [lambda: CountingEnv(0, (7, 1, 4)), lambda: CountingEnv(1, (2, 5))]
    config = RolloutConfig(compact_obs=True)
    with Collector(envs, num_envs=2, frames_per_batch=10, total_frames=100, seed=0, rollout=config) as collector:
        for batch in collector:
            assert assembler.add(batch) == 0
    count = 0
    while (batch := assembler.take()) is not None:
        flat = batch[batch[MASK]]
        check_batch(flat)
        assert batch.names[-1] == "time"
        assert batch.batch_dims == (1 if traj_format == "cat" else 2)
        starts = flat[IS_INIT].nonzero()[:, 0].tolist()
        assert len(starts) == 3
        ends = flat[NEXT_DONE].nonzero()[:, 0].tolist()
        assert ends == [*(start - 1 for start in starts[1:]), len(flat) - 1]
        for start, end in zip(starts, ends, strict=True):
            rows = flat[start : end + 1]
            assert rows["observation"][:, 2].tolist() == list(range(len(rows)))
            assert rows[LENGTHS].tolist() == [len(rows)] * len(rows)
            assert rows["observation"][:, :2].unique(dim=0).shape == (1, 2)
        count += 1
    assert count > 5
    assert assembler.num_complete < 3


def test_padded_when_lengths_differ_then_padding_is_told_apart():
    assembler = TrajectoryAssembler(3, "padded")
    assembler.add(batch_of([*episode(0, 1), *episode(1, 3), *episode(2, 2)], version=7))
    batch = assembler.take()
    assert batch.shape == (3, 3)
    assert batch.names == [None, "time"]
    assert batch[TRAJ_IDS].tolist() == [[0, -1, -1], [1, 1, 1], [2, 2, -1]]
    assert batch[LENGTHS].tolist() == [[1, 1, 1], [3, 3, 3], [2, 2, 2]]
    assert batch[MASK].tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert batch[POLICY_VERSION].tolist() == [[7, 0, 0], [7, 7, 7], [7, 7, 0]]


def test_take_when_it_is_done_then_what_is_given_shares_nothing_with_the_batch():
    assembler = TrajectoryAssembler(1)
    batch = batch_of(episode(0, 3))
    assembler.add(batch)
    taken = assembler.take()
    taken["step"].zero_()
    assert batch["step"].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.uint8, torch.float64], ids=str)
@pytest.mark.parametrize("traj_format", ["cat", "padded"])
def test_take_when_columns_are_of_any_kind_then_they_stay_what_they_are(dtype, traj_format):
    value = torch.arange(12).reshape(1, 4, 3).to(dtype)
    assembler = TrajectoryAssembler(2, traj_format)
    assembler.add(batch_of([*episode(0, 1), *episode(1, 3)], value=value))
    batch = assembler.take()
    assert batch["value"].dtype == dtype
    assert torch.equal(batch["value"][batch[MASK]], value[0])


def test_take_when_torch_is_in_inference_mode_then_the_batch_can_be_trained_on():
    assembler = TrajectoryAssembler(1)
    batch = batch_of(episode(0, 3))
    with torch.inference_mode():
        assembler.add(batch)
        taken = assembler.take()
    assert not any(column.is_inference() for column in taken.values(True, True))


# --- trajectories that are not whole


def test_add_when_a_trajectory_begins_inside_of_an_episode_then_it_is_dropped_and_counted():
    assembler = TrajectoryAssembler(1)
    assert assembler.add(batch_of(episode(0, 6)[2:4])) == 2
    assert assembler.add(batch_of([*episode(0, 6, 4), *episode(1, 2)])) == 2
    assert assembler.frames_held == 2
    assert told(assembler.take()) == whole((1, 2))


def test_add_when_pieces_are_wanted_then_those_that_a_cut_made_are_whole():
    assembler = TrajectoryAssembler(2, pieces=True)
    config = RolloutConfig(set_truncated=True)
    env = lambda: CountingEnv(0, (10,))  # noqa: E731
    with Collector(env, frames_per_batch=4, total_frames=12, seed=0, rollout=config) as collector:
        for batch in collector:
            assert assembler.add(batch) == 0
    first, second = assembler.take(), assembler.take()
    assert first["observation"][:, 2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert first[TRAJ_IDS].tolist() == [0] * 4 + [1] * 4
    assert second["observation"][:, 1:].tolist() == [[0, 8], [0, 9], [1, 0], [1, 1]]
    assert assembler.frames_held == 0


def test_add_when_a_copy_begins_another_one_then_the_one_that_never_ended_is_dropped():
    assembler = TrajectoryAssembler(1, total_copies=2)
    assembler.add(batch_of(episode(0, 9)[:4], episode(1, 9)[:4]))
    assert assembler.add(batch_of(episode(2, 3))) == 4  # of copy 0, whose envs were reset
    assert assembler.frames_open == 4
    assert assembler.add(batch_of(episode(1 + 2 * 2**32, 9)[6:])) == 4 + 3  # behind a hole
    assert told(assembler.take()) == whole((2, 3))
    assert assembler.frames_held == 0


def test_add_when_copies_are_not_told_then_what_never_ends_waits_for_drop_open():
    assembler = TrajectoryAssembler(1)
    assembler.add(batch_of(episode(0, 9)[:4]))
    assert assembler.add(batch_of(episode(2, 3))) == 0
    assert assembler.drop_open() == 4
    assert assembler.add(batch_of(episode(0, 9)[4:])) == 5  # its beginning is gone
    assert told(assembler.take()) == whole((2, 3))


def test_add_when_an_id_goes_on_after_its_end_then_it_is_no_whole_one():
    assembler = TrajectoryAssembler(1, total_copies=1)
    assert assembler.add(batch_of([*episode(0, 2), *episode(0, 5, 3)])) == 2
    assert told(assembler.take()) == whole((0, 2))
    assert assembler.frames_held == 0


# --- dropping


def test_drop_older_than_when_old_weights_acted_in_one_then_it_is_dropped_and_counted():
    assembler = TrajectoryAssembler(1)
    assembler.add(batch_of([*episode(0, 2), *episode(1, 4)[:2]], version=3))
    assembler.add(batch_of([*episode(1, 4)[2:], *episode(2, 1)], version=4))
    assembler.add(batch_of(episode(3, 1), version=5))
    assert assembler.drop_older_than(3) == 0
    assert assembler.drop_older_than(4) == 2 + 4
    assert (assembler.num_complete, assembler.frames_complete) == (2, 2)
    assert told(assembler.take()) == whole((2, 1))


def test_drop_older_than_when_rows_were_acted_at_random_then_those_have_no_age():
    assembler = TrajectoryAssembler(1)
    batch = batch_of([*episode(0, 2), *episode(1, 3)])
    batch[POLICY_VERSION] = torch.tensor([[-1, -1, -1, 2, 3]])
    assembler.add(batch)
    assert assembler.drop_older_than(2) == 0
    assert assembler.drop_older_than(3) == 3
    assert told(assembler.take()) == whole((0, 2))


def test_drop_older_than_when_versions_are_unknown_then_it_says_so():
    assembler = TrajectoryAssembler(1)
    assert assembler.drop_older_than(1) == 0
    assembler.add(batch_of(episode(0, 2)).exclude(POLICY_VERSION))
    with pytest.raises(FrameContractError, match="policy_version"):
        assembler.drop_older_than(1)


def test_forget_when_it_is_called_then_other_batches_fit():
    assembler = TrajectoryAssembler(1)
    assembler.add(batch_of([*episode(0, 2), (1, 0, 0)]))
    assert assembler.forget() == 3
    assert (assembler.frames_held, assembler.num_complete) == (0, 0)
    assembler.add(batch_of(episode(0, 2), extra=torch.ones(1, 2)))
    assert assembler.take()["extra"].tolist() == [1, 1]


# --- memory


def test_add_when_one_trajectory_is_long_then_old_batches_are_let_go():
    assembler = TrajectoryAssembler(1, total_copies=8)
    alive: list[weakref.ref] = []
    for number in range(40):
        short = [[(copy + 8 * (50 * number + step), 0, 1) for step in range(50)] for copy in range(1, 8)]
        batch = batch_of([(0, 50 * number + step, 0) for step in range(50)], *short)
        alive.append(weakref.ref(batch["observation"].untyped_storage()))
        assembler.add(batch)
        while assembler.take() is not None:
            pass
        del batch
    gc.collect()
    kept = sum(1 for reference in alive if reference() is not None)
    assert kept < 12  # of 40
    assembler.add(batch_of([(0, 2000, 1)]))
    assert told(assembler.take()) == whole((0, 2001))


# --- errors


@pytest.mark.parametrize("arguments", [{"trajs_per_batch": 0}, {"trajs_per_batch": 1, "total_copies": 0}])
def test_assembler_when_a_count_is_too_small_then_it_names_it(arguments):
    with pytest.raises(ValueError, match=f"{list(arguments)[-1]} must be at least 1"):
        TrajectoryAssembler(**arguments)


def test_assembler_when_there_is_no_such_format_then_it_names_them():
    with pytest.raises(ValueError, match="traj_format must be 'cat' or 'padded', got 'list'"):
        TrajectoryAssembler(1, "list")


def test_add_when_it_is_given_no_batch_then_it_says_so():
    with pytest.raises(TypeError, match="must be a TensorDict, got list"):
        TrajectoryAssembler(1).add([1])
    with pytest.raises(FrameContractError, match="dimension of time"):
        TrajectoryAssembler(1).add(batch_of(episode(0, 1))[0, 0])


@pytest.mark.parametrize("key", [TRAJ_IDS, NEXT_DONE, IS_INIT])
def test_add_when_a_key_is_missing_then_it_says_which_and_what_to_do(key):
    with pytest.raises(FrameContractError, match=rf"none at \({', '.join(map(repr, key))}.*as a Collector makes them"):
        TrajectoryAssembler(1).add(batch_of(episode(0, 2)).exclude(key))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, r"\('value',\) is missing"),
        ({"value": torch.zeros(1, 2), "other": torch.zeros(1, 2)}, r"\('other',\) is new"),
        ({"value": torch.zeros(1, 2).long()}, r"torch.float32 of \[\], got torch.int64 of \[\]"),
        ({"value": torch.zeros(1, 2, 3)}, r"torch.float32 of \[\], got torch.float32 of \[3\]"),
    ],
)
def test_add_when_columns_differ_from_earlier_ones_then_it_says_which_and_loses_nothing(columns, message):
    assembler = TrajectoryAssembler(1)
    assembler.add(batch_of(episode(0, 4)[:2], value=torch.zeros(1, 2)))
    with pytest.raises(FrameContractError, match=message):
        assembler.add(batch_of(episode(0, 4)[2:], **columns))
    assembler.add(batch_of(episode(0, 4)[2:], value=torch.ones(1, 2)))
    assert assembler.take()["value"].tolist() == [0, 0, 1, 1]


def test_add_when_flags_have_a_wrong_shape_then_nothing_was_taken_in():
    assembler = TrajectoryAssembler(1)
    batch = batch_of(episode(0, 2))
    batch[NEXT_DONE] = torch.zeros(1, 2, 3, dtype=torch.bool)
    with pytest.raises(FrameContractError, match=r"\('next', 'done'\) must have one value a row"):
        assembler.add(batch)
    assembler.add(batch_of(episode(0, 2)))
    assert told(assembler.take()) == whole((0, 2))


def test_add_when_a_value_is_no_tensor_then_it_says_which():
    batch = batch_of(episode(0, 2))
    batch["task"] = NonTensorData("walk", batch_size=[1, 2])
    with pytest.raises(FrameContractError, match=r"expected no \('task',\)"):
        TrajectoryAssembler(1).add(batch)
