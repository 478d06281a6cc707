"""Rows as packed records: they come back bit by bit, and rows of another kind are refused."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from lit_collect.errors import FrameContractError
from lit_collect.replay.layout import RowLayout

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def column(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[count, *shape] whose bytes are all different from their neighbours'."""
    size = count * int(np.prod(shape)) * dtype.itemsize
    if dtype == torch.bool:
        return (torch.arange(size) % 3 == 0).reshape(count, *shape)
    return (torch.arange(size) % 120).to(torch.uint8).view(dtype).reshape(count, *shape)


def cartpole(count: int) -> TensorDict:
    """[count] rows as PPO's batches have them, each with numbers of its own."""
    number = torch.arange(count)
    flags = dict.fromkeys(("done", "terminated", "truncated"), (number % 3 == 0)[:, None])
    return TensorDict(
        {
            "observation": number[:, None] + torch.arange(4) / 8,
            "action": number,
            "is_init": (number % 5 == 0)[:, None],
            **flags,
            "next": {
                "observation": number[:, None] + torch.arange(4) / 8 + 1,
                "reward": -number[:, None].float(),
                **flags,
            },
            "collector": {"traj_ids": number + 7, "policy_version": number // 2},
        },
        batch_size=[count],
    )


def bits(rows: TensorDict) -> dict[tuple[str, ...], bytes]:
    return {
        key: value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
        for key, value in rows.items(True, True)
    }


def test_unpack_after_pack_gives_the_rows_back():
    rows = cartpole(9)
    layout = RowLayout.of(rows)
    found = layout.unpack(layout.pack(rows))
    assert found.batch_size == (9,)
    assert set(found.keys(True, True)) == set(rows.keys(True, True))
    assert bits(found) == bits(rows)
    assert all(
        found[key].dtype is rows[key].dtype and found[key].shape == rows[key].shape for key in rows.keys(True, True)
    )


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3, 2), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpack_of_any_dtype_and_shape_gives_the_same_bytes(dtype, shape):
    rows = TensorDict({"a": column(5, (1,), torch.uint8), "x": column(5, shape, dtype)}, batch_size=[5])
    layout = RowLayout.of(rows)
    found = layout.unpack(layout.pack(rows))
    assert found["x"].dtype is dtype
    assert found["x"].shape == (5, *shape)
    assert bits(found) == bits(rows)


def test_unpack_of_slices_has_two_dimensions_and_names():
    rows = cartpole(12)
    layout = RowLayout.of(rows)
    found = layout.unpack(layout.pack(rows).reshape(3, 4), names=[None, "time"])
    assert found.batch_size == (3, 4)
    assert found.names == [None, "time"]
    assert found["next"].names == [None, "time"]
    assert found["action"].tolist() == rows["action"].reshape(3, 4).tolist()
    assert found["next", "observation"].shape == (3, 4, 4)


def test_unpack_with_further_leaves_puts_them_beside_the_rows():
    rows = cartpole(3)
    layout = RowLayout.of(rows)
    weight, index = torch.rand(3), torch.tensor([4, 5, 6])
    found = layout.unpack(
        layout.pack(rows), {("index",): index, ("collector", "weight"): weight, ("extra", "x"): weight}
    )
    assert found["index"] is index
    assert found["collector", "weight"].equal(weight)
    assert found["collector", "traj_ids"].tolist() == [7, 8, 9]
    assert found["extra"].batch_size == (3,)


def test_unpack_shares_the_memory_of_the_records_and_pack_does_not_share_the_rows():
    rows = cartpole(3)
    layout = RowLayout.of(rows)
    records = layout.pack(rows)
    rows["action"].fill_(-1)
    found = layout.unpack(records)
    found["next", "reward"].fill_(5.0)
    assert found["action"].tolist() == [0, 1, 2]
    assert layout.unpack(records)["next", "reward"].flatten().tolist() == [5.0, 5.0, 5.0]


def test_unpack_when_called_without_gradients_gives_tensors_that_can_be_trained_on():
    layout = RowLayout.of(cartpole(2))
    with torch.inference_mode():
        found = layout.unpack(layout.pack(cartpole(2)))
    assert not found["observation"].is_inference()


def test_pack_of_rows_that_are_strided_or_need_gradients_copies_their_values():
    rows = TensorDict({"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(3, requires_grad=True)}, batch_size=[3])
    layout = RowLayout.of(rows)
    found = layout.unpack(layout.pack(rows))
    assert found["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found["b"].tolist() == [1.0, 1.0, 1.0]


def test_pack_of_equal_rows_makes_equal_bytes_also_where_records_are_padded():
    rows = TensorDict({"x": torch.arange(50), "flag": torch.ones(50, 3).bool()}, batch_size=[50])
    layout = RowLayout.of(rows)
    assert layout.dtype.itemsize == 16
    assert all(layout.pack(rows).tobytes() == layout.pack(rows.clone()).tobytes() for _ in range(20))


def test_pack_of_no_rows_makes_no_records():
    layout = RowLayout.of(cartpole(0))
    assert layout.pack(cartpole(0)).shape == (0,)
    assert layout.unpack(layout.pack(cartpole(0))).batch_size == (0,)


def test_column_is_a_view_of_the_records():
    rows = TensorDict({"x": torch.arange(3).bfloat16(), "y": torch.arange(3)}, batch_size=[3])
    layout = RowLayout.of(rows)
    records = layout.pack(rows)
    layout.column(records, ("x",)).fill_(7)
    assert layout.unpack(records)["x"].tolist() == [7.0, 7.0, 7.0]
    assert records[layout.field(("y",))].tolist() == [0, 1, 2]


def test_layout_of_the_same_leaves_in_another_order_is_equal_and_so_are_its_records():
    rows = cartpole(4)
    other = TensorDict({key: rows[key] for key in reversed(list(rows.keys()))}, batch_size=[4])
    layout, turned = RowLayout.of(rows), RowLayout.of(other)
    assert layout == turned
    assert hash(layout) == hash(turned)
    assert layout.pack(rows).tobytes() == turned.pack(other).tobytes()


def test_layout_when_described_or_pickled_comes_back_equal():
    layout = RowLayout.of(cartpole(2), leave_out=[("next", "observation")])
    assert RowLayout.from_description(layout.describe()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_field_of_keys_that_look_alike_is_different():
    rows = TensorDict({"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a~1b": torch.full((1,), 2.0)}, batch_size=[1])
    layout = RowLayout.of(rows)
    assert bits(layout.unpack(layout.pack(rows))) == bits(rows)


def test_pack_leaves_out_what_the_layout_leaves_out():
    rows = cartpole(3)
    layout = RowLayout.of(rows, leave_out=[("next", "observation"), "never there"])
    assert ("next", "observation") not in layout.keys
    assert ("next", "observation") not in layout.unpack(layout.pack(rows)).keys(True, True)
    layout.check(rows.exclude(("next", "observation")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows.exclude("action"), r"\('action',\) is missing"),
        (lambda rows: rows.exclude(("next", "reward")), r"\('next', 'reward'\) is missing"),
        (lambda rows: rows.set("more", torch.zeros(3)), r"\('more',\) is new"),
        (lambda rows: rows.set("action", torch.zeros(3)), r"\('action',\) : expected int64 \[\], got float32 \[\]"),
        (
            lambda rows: rows.set("observation", torch.zeros(3, 5)),
            r"\('observation',\) : expected float32 \[4\], got float32 \[5\]",
        ),
    ],
    ids=["missing", "missing within", "new", "dtype", "shape"],
)
@pytest.mark.parametrize("method", ["check", "pack"])
def test_check_and_pack_of_other_rows_name_what_differs(change, words, method):
    layout = RowLayout.of(cartpole(3))
    with pytest.raises(FrameContractError, match=words):
        getattr(layout, method)(change(cartpole(3)))


def test_mismatch_of_layouts_that_leave_out_other_keys_names_them():
    layout, other = RowLayout.of(cartpole(1)), RowLayout.of(cartpole(1), leave_out=["done"])
    assert layout != other
    assert "left out : expected [], got [('done',)]" in str(layout.mismatch(other))


@pytest.mark.parametrize(
    "value",
    [
        NonTensorData("words", batch_size=[2]),
        torch.zeros(2, 3).to_sparse(),
    ],
    ids=["words", "sparse"],
)
def test_of_when_a_value_cannot_be_stored_names_its_key(value):
    rows = TensorDict({"x": torch.zeros(2)}, batch_size=[2]).set("odd", value)
    with pytest.raises(FrameContractError, match=r"\('odd',\) cannot be stored"):
        RowLayout.of(rows)
    with pytest.raises(FrameContractError, match=r"\('odd',\)"):
        RowLayout.of(rows.select("x")).pack(rows)


def test_of_rows_without_leaves_is_refused():
    with pytest.raises(FrameContractError, match="nothing to store"):
        RowLayout.of(TensorDict({"a": {}}, batch_size=[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 100])
def test_pack_when_vectors_are_no_one_piece_of_memory_then_each_number_is_in_its_place(dtype, size):
    value = torch.arange(5 * size).reshape(size, 5).T.to(dtype)
    rows = TensorDict({"value": value, "flag": torch.zeros(5, 1, dtype=torch.bool)}, batch_size=[5])
    layout = RowLayout.of(rows)
    assert torch.equal(layout.unpack(layout.pack(rows))["value"], value)
    assert layout.pack(rows[:0]).shape == (0,)
