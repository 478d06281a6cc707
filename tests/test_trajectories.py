import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from lit_collect import Collector, RolloutConfig
from lit_collect.errors import FrameContractError
from lit_collect.frames import LENGTHS, MASK, NEXT_DONE, TRAJ_IDS
from lit_collect.testing import CountingEnv
from lit_collect.trajectories import split_trajectories

LAYOUTS = ["padded", "nested", "jagged", "cat"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8]


def rows_of(ids: list, done: list | None = None, *, where: tuple[str, ...] = TRAJ_IDS) -> TensorDict:
    """A batch whose observation numbers its rows, from 1 on."""
    names = torch.tensor(ids)
    flags = torch.zeros_like(names) if done is None else torch.tensor(done)
    number = torch.arange(1, names.numel() + 1).reshape(names.shape)
    batch = TensorDict(
        {"observation": number[..., None].float(), "next": {"done": flags[..., None].bool()}}, batch_size=names.shape
    )
    batch[where] = names
    return batch


def numbers(batch: TensorDictBase) -> list:
    return batch["observation"][..., 0].int().tolist()


def collected(**options) -> TensorDictBase:
    options = {"num_envs": 2, "frames_per_batch": 10, "seed": 0, **options}
    with Collector([lambda: CountingEnv(0, (3,)), lambda: CountingEnv(1, (2, 4))], **options) as collector:
        return collector.collect()


# --- what belongs together


def test_split_when_ids_alternate_in_a_flat_batch_then_each_is_whole():
    split = split_trajectories(rows_of([7, 3, 7, 3, 3]))
    assert numbers(split) == [[1, 3, 0], [2, 4, 5]]
    assert split[TRAJ_IDS].tolist() == [[7, 7, -1], [3, 3, 3]]


def test_split_when_an_id_goes_on_in_another_line_then_it_is_one_trajectory():
    assert numbers(split_trajectories(rows_of([[0, 0], [1, 0]]))) == [[1, 2, 4], [3, 0, 0]]


def test_split_when_the_batch_is_deeper_then_rows_are_taken_in_flattened_order():
    split = split_trajectories(rows_of([[[0, 0], [1, 1]], [[2, 3], [0, 1]]]))
    assert numbers(split) == [[1, 2, 7], [3, 4, 8], [5, 0, 0], [6, 0, 0]]


def test_split_when_two_slices_are_of_one_episode_then_they_are_two_trajectories():
    slices = rows_of([[4, 4, 4], [9, 9, 9], [4, 4, 4]], done=[[0, 0, 1]] * 3)
    once = split_trajectories(slices)
    assert numbers(once) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert numbers(split_trajectories(once)) == numbers(once)


def test_split_when_the_first_id_is_zero_then_padding_is_told_apart():
    split = split_trajectories(rows_of([0, 0, 1]))
    assert split[TRAJ_IDS].tolist() == [[0, 0], [1, -1]]
    assert split[MASK].tolist() == [[True, True], [True, False]]
    assert split[LENGTHS].tolist() == [[2, 2], [1, 1]]


def test_split_when_there_are_no_ids_then_it_cuts_at_done_and_at_the_edge_of_time():
    batch = rows_of([[0, 0, 0], [0, 0, 0]], done=[[0, 1, 0], [0, 0, 0]]).exclude("collector")
    split = split_trajectories(batch)
    assert numbers(split) == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert split["mask"].sum() == 6
    assert split["lengths"].tolist() == [[2, 2, 2], [1, 1, 1], [3, 3, 3]]


def test_split_when_another_flag_is_named_then_it_cuts_there():
    batch = rows_of([0, 0, 0, 0]).exclude("collector", NEXT_DONE)
    batch["next", "over"] = torch.tensor([False, True, False, False])  # without the last dimension
    assert numbers(split_trajectories(batch, done_key="over")) == [[1, 2], [3, 4]]


def test_split_when_a_flag_is_named_though_there_are_ids_then_both_cut():
    batch = rows_of([0, 0, 0, 1])
    batch["next", "over"] = torch.tensor([[True], [False], [False], [False]])
    assert numbers(split_trajectories(batch, done_key="over")) == [[1, 0], [2, 3], [4, 0]]


def test_split_when_rows_have_ids_alone_then_nothing_else_is_needed():
    assert numbers(split_trajectories(rows_of([0, 0, 1]).exclude("next"))) == [[1, 2], [3, 0]]


# --- masks, prefixes and keys


def test_split_when_rows_are_masked_or_have_no_trajectory_then_they_are_left_out():
    batch = rows_of([[0, 0, -1, 2], [1, 1, 1, 1]])
    batch[MASK] = torch.tensor([[True, False, True, True], [True, True, True, False]])
    split = split_trajectories(batch)
    assert numbers(split) == [[1, 0, 0], [4, 0, 0], [5, 6, 7]]
    assert split[MASK].sum() == 5


def test_split_when_it_was_split_before_then_it_stays_the_same():
    once = split_trajectories(collected())
    assert (split_trajectories(once) == once).all()
    assert (split_trajectories(split_trajectories(once, "cat")) == once).all()


@pytest.mark.parametrize("prefix", ["agents", ("agents", "left"), ()])
def test_split_when_a_prefix_is_named_then_ids_mask_and_lengths_stand_under_it(prefix):
    root = (prefix,) if isinstance(prefix, str) else prefix
    batch = rows_of([5, 5, 6, 6], where=(*root, "traj_ids"))
    batch[(*root, "mask")] = torch.tensor([True, True, True, False])
    split = split_trajectories(batch, prefix=prefix)
    assert numbers(split) == [[1, 2], [3, 0]]
    assert split[(*root, "traj_ids")].tolist() == [[5, 5], [6, -1]]
    assert split[(*root, "mask")].tolist() == [[True, True], [True, False]]
    assert split[(*root, "lengths")].tolist() == [[2, 2], [1, 1]]
    assert not split.get("collector", None)


def test_split_when_the_prefix_has_no_ids_then_those_of_the_collector_count():
    split = split_trajectories(rows_of([0, 1, 0]), prefix="mine")
    assert numbers(split) == [[1, 3], [2, 0]]
    assert split["mine", "lengths"].tolist() == [[2, 2], [1, 1]]


def test_split_when_the_ids_are_named_then_those_are_padded():
    batch = rows_of([0, 0, 0])
    batch["episode"] = torch.tensor([[8], [8], [9]])
    split = split_trajectories(batch, trajectory_key="episode")
    assert split["episode"][..., 0].tolist() == [[8, 8], [9, -1]]
    assert split[TRAJ_IDS].tolist() == [[0, 0], [0, 0]]


def test_split_when_it_is_done_then_the_given_batch_is_as_before():
    batch = collected()
    before, split = batch.clone(), split_trajectories(batch)
    split["observation"].zero_()
    assert (batch == before).all()
    assert set(batch.keys(True, True)) == set(before.keys(True, True))


# --- batches of a collector


@pytest.mark.parametrize("options", [{}, {"rollout": RolloutConfig(compact_obs=True)}])
def test_split_when_a_collector_made_the_batch_then_rows_count_up_in_each_trajectory(options):
    split = split_trajectories(collected(**options))
    assert split.names == [None, "time"]
    assert split[TRAJ_IDS][:, 0].tolist() == [0, 2, 1, 3]
    assert split[LENGTHS][:, 0].tolist() == [3, 2, 2, 3]
    for line in split:
        rows = line[line[MASK]]
        assert rows["observation"][:, 2].tolist() == list(range(len(rows)))
        assert torch.equal(rows["next", "observation"][:, 2], rows["observation"][:, 2] + 1)
        padding = line[~line[MASK]]
        for key, column in padding.items(True, True):
            assert key in (TRAJ_IDS, LENGTHS) or not column.any(), key


def test_split_when_the_batch_is_unbatched_then_it_is_split_all_the_same():
    with Collector(CountingEnv, frames_per_batch=7, seed=0) as collector:
        split = split_trajectories(collector.collect())
    assert split[LENGTHS][:, 0].tolist() == [3, 3, 1]


# --- layouts


@pytest.mark.parametrize("lengths", [(3, 1, 2), (2, 2), (4,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [(), (1,), (2, 3)], ids=str)
def test_layouts_when_they_are_padded_then_they_are_equal(lengths, dtype, tail):
    batch = rows_of(np.repeat(np.arange(len(lengths)), lengths).tolist())
    batch["value"] = torch.arange(1, 1 + batch.numel() * int(np.prod(tail))).reshape(*batch.shape, *tail).to(dtype)
    padded = split_trajectories(batch)
    for layout, shape in (("nested", padded.shape), ("jagged", padded.shape[:1])):
        nested = split_trajectories(batch, layout)
        assert nested.batch_dims == len(shape)
        assert all(column.is_nested for column in nested.values(True, True))
        filled = nested.to_padded_tensor()
        assert filled.batch_size == shape
        for key in ("value", "observation", MASK, NEXT_DONE):
            assert filled[key].dtype == padded[key].dtype
            assert torch.equal(filled[key], padded[key]), (layout, key)
        ids = nested[TRAJ_IDS].to_padded_tensor(-1)
        assert torch.equal(ids, padded[TRAJ_IDS])
    joined = split_trajectories(batch, "cat")
    assert torch.equal(joined["value"], padded["value"][padded[MASK]])


def test_nested_when_lengths_differ_then_time_is_part_of_the_batch():
    nested = split_trajectories(collected(), "nested")
    assert nested.batch_size == torch.Size([4, -1])
    assert nested.names == [None, "time"]
    assert nested["observation"].layout == torch.strided
    assert [one["observation"].shape[0] for one in nested.unbind(0)] == [3, 2, 2, 3]
    assert [int(one[LENGTHS].unique()) for one in nested.unbind(0)] == [3, 2, 2, 3]
    assert all(one[MASK].all() for one in nested.unbind(0))


def test_jagged_when_lengths_differ_then_leaves_share_their_offsets():
    nested = split_trajectories(collected(), "jagged")
    assert nested.batch_size == torch.Size([4])
    assert nested["observation"].layout == torch.jagged
    assert nested["observation"].offsets().tolist() == [0, 3, 5, 7, 10]
    assert nested["observation"].shape[1] == nested["next", "reward"].shape[1]
    assert nested[LENGTHS].values().tolist() == [3, 3, 3, 2, 2, 2, 2, 3, 3, 3]
    assert nested[MASK].values().all()


def test_cat_when_lengths_differ_then_rows_tell_them():
    joined = split_trajectories(collected(), "cat")
    assert joined.names == ["time"]
    assert joined[LENGTHS].tolist() == [3, 3, 3, 2, 2, 2, 2, 3, 3, 3]
    assert joined[MASK].all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [rows_of([[0, 1]])[:, :0], rows_of([-1, -1])], ids=["no rows", "no transitions"])
def test_layouts_when_there_is_no_trajectory_then_they_are_empty(layout, batch):
    split = split_trajectories(batch, layout)
    assert split.batch_size == {"cat": (0,), "jagged": (0,)}.get(layout, (0, 0))
    assert split["observation"].numel() == split[MASK].numel() == split[LENGTHS].numel() == 0
    assert split["observation"].shape[-1] == 1


def test_layouts_when_values_are_no_tensors_then_rows_keep_theirs():
    batch = rows_of([[0, 1, 0], [2, 2, 2]])
    batch["task"] = NonTensorData("walk", batch_size=[2, 3])
    batch["note"] = NonTensorStack(*[NonTensorStack(*[f"{n}.{t}" for t in range(3)]) for n in range(2)])
    joined = split_trajectories(batch, "cat")
    assert joined["task"] == "walk"
    assert joined.get("note").tolist() == ["0.0", "0.2", "0.1", "1.0", "1.1", "1.2"]
    padded = split_trajectories(batch)
    assert padded.get("note").tolist() == [["0.0", "0.2", "0.2"], ["0.1"] * 3, ["1.0", "1.1", "1.2"]]
    for layout in ("nested", "jagged"):
        with pytest.raises(FrameContractError, match=r"expected no \('task',\), \('note',\) with layout="):
            split_trajectories(batch, layout)


def test_padded_when_a_gradient_is_wanted_then_it_reaches_the_rows_that_count():
    batch = rows_of([0, 0, 1])
    value = torch.ones(3, requires_grad=True)
    batch["value"] = value
    for layout in ("padded", "jagged", "nested", "cat"):
        split = split_trajectories(batch, layout)["value"]
        split = split.to_padded_tensor(0.0) if split.is_nested else split
        (gradient,) = torch.autograd.grad((2 * split).sum(), value)
        assert gradient.tolist() == [2, 2, 2]


# --- errors


def test_split_when_there_is_no_such_layout_then_it_names_them():
    with pytest.raises(ValueError, match="expected one of padded, nested, jagged, cat, got 'list'"):
        split_trajectories(rows_of([0]), "list")


def test_split_when_it_is_given_no_batch_then_it_says_so():
    with pytest.raises(TypeError, match="must be a TensorDict, got dict"):
        split_trajectories({"observation": torch.zeros(2)})
    with pytest.raises(FrameContractError, match="dimension of time"):
        split_trajectories(rows_of([0])[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trajectory_key": "episode"}, r"lacks the key \('episode',\) : .*trajectory_key"),
        ({"done_key": "over"}, r"lacks the key \('next', 'over'\) : .*done_key"),
    ],
)
def test_split_when_a_named_key_is_missing_then_it_says_which(options, message):
    with pytest.raises(FrameContractError, match=message):
        split_trajectories(rows_of([0, 1]), **options)


def test_split_when_there_are_neither_ids_nor_flags_then_it_says_what_would_do():
    with pytest.raises(FrameContractError, match="expected ids or flags to cut at"):
        split_trajectories(rows_of([0, 1]).select("observation"))


def test_split_when_what_stands_at_the_mask_is_none_then_it_is_not_overwritten():
    batch = rows_of([0, 1]).exclude("collector")
    batch["mask"] = torch.zeros(2, 5)
    with pytest.raises(FrameContractError, match="name another prefix"):
        split_trajectories(batch)
    assert numbers(split_trajectories(batch, prefix="collector")) == [[1, 2]]
    batch["mask"] = torch.zeros(2, 5, dtype=torch.bool)  # an env's action mask
    with pytest.raises(FrameContractError, match="one value a row"):
        split_trajectories(batch)


@pytest.mark.parametrize("layout", ["nested", "jagged"])
@pytest.mark.parametrize("ids", [[0, 0, 1], [0, 0, 1, 1]])
def test_split_when_it_is_given_nested_rows_then_it_says_which_layouts_it_takes(layout, ids):
    with pytest.raises(FrameContractError, match=r"a batch is nested : .*'padded' or 'cat'"):
        split_trajectories(split_trajectories(rows_of(ids), layout))


@pytest.mark.parametrize("name", ["prefix", "trajectory_key", "done_key"])
@pytest.mark.parametrize("key", [3, ("next", 3), ["next"]])
def test_split_when_a_key_is_none_then_it_says_so(name, key):
    with pytest.raises(TypeError, match=f"{name} must be a string or a tuple of strings, got "):
        split_trajectories(rows_of([0, 1]), **{name: key})


@pytest.mark.parametrize(
    ("prefix", "taken"),
    [("observation", "observation"), (("observation", "x"), "observation"), (("next", "done"), "done")],
)
def test_split_when_a_tensor_stands_at_the_prefix_then_it_says_so(prefix, taken):
    with pytest.raises(FrameContractError, match=f"under the prefix .* got .*'{taken}'.*name another prefix"):
        split_trajectories(rows_of([0, 1]), prefix=prefix)
