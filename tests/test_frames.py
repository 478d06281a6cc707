"""The contract is checked where it can be broken, and rows are counted and flattened by it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.errors import FrameContractError
from lit_collect.frames import (
    MASK,
    check_batch,
    count_frames,
    flatten_rows,
    is_private,
    to_numpy_dtype,
    valid_rows,
)


def batch(copies: int = 2, steps: int = 6, length: int = 3) -> TensorDict:
    """Episodes of one length in every copy; observations are (copy, step of the copy), reset rows (copy, -episode)."""
    step = torch.arange(steps).expand(copies, steps)
    copy = torch.arange(copies)[:, None].expand(copies, steps)
    episode, age = step // length, step % length
    done = (age == length - 1)[..., None]
    no = torch.zeros_like(done)
    seen = torch.stack([copy, torch.where(age == 0, -episode, step)], -1).float()
    after = torch.stack([copy, step + 1], -1).float()
    return TensorDict(
        {
            "observation": seen,
            "action": torch.ones(copies, steps, dtype=torch.int64),
            "done": no.clone(),
            "terminated": no.clone(),
            "truncated": no.clone(),
            "is_init": (age == 0)[..., None],
            "next": {
                "observation": after,
                "reward": torch.ones(copies, steps, 1),
                "done": done,
                "terminated": done.clone(),
                "truncated": no.clone(),
            },
            "collector": {
                "traj_ids": episode * copies + copy,
                "policy_version": torch.zeros(copies, steps, dtype=torch.int64),
            },
        },
        batch_size=(copies, steps),
        names=[None, "time"],
    )


def masked() -> TensorDict:
    """Copy 0 spends its row 3 on resetting, copy 1 has its last row cut off."""
    data = batch(length=6)
    data[MASK] = torch.ones(2, 6, dtype=torch.bool)
    for copy, row in ((0, 3), (1, 5)):
        data[MASK][copy, row] = False
        data["collector", "traj_ids"][copy, row] = -1
    data["collector", "traj_ids"][0, 4:] = 2
    data["is_init"][0, 4] = True
    data["next", "done"][0, 2] = data["next", "truncated"][0, 2] = True
    data["observation"][0, 4] = -7.0  # the reset observation
    data["observation"][0, 3] = data["next", "observation"][0, 2]
    return data


def without(*key: str) -> Callable[[TensorDict], None]:
    return lambda data: data.del_(key)


def converted(key: tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[TensorDict], None]:
    return lambda data: data.set(key, change(data[key]))


def at(key: tuple[str, ...], row: tuple[int, ...], value: float) -> Callable[[TensorDict], None]:
    def change(data: TensorDict) -> None:
        data[key][row] = value

    return change


def test_good_batch_passes():
    check_batch(batch())
    check_batch(batch(copies=1, steps=1))


@pytest.mark.parametrize("given", [None, {"action": 1}], ids=repr)
def test_what_is_no_tensordict_is_no_batch(given):
    with pytest.raises(TypeError, match="a batch must be a TensorDict, got "):
        check_batch(given)


def test_good_batch_without_copies_passes():
    check_batch(batch()[0])


def test_good_batch_with_masked_rows_passes():
    check_batch(masked())


def test_batch_whose_trajectories_are_cut_at_its_edge_passes():
    data = batch(steps=4)  # copy by copy: a whole episode and the first row of the next
    data["next", "truncated"][:, -1] = data["next", "done"][:, -1] = True
    check_batch(data)


def test_batch_with_nan_in_its_observations_passes():
    data = batch()
    data["observation"][0, 1, 1] = data["next", "observation"][0, 0, 1] = torch.nan
    check_batch(data)


VIOLATIONS = {
    "done missing": (without("done"), "lacks the key"),
    "action missing": (without("action"), "lacks the key"),
    "reward missing": (without("next", "reward"), "lacks the key"),
    "ids missing": (without("collector", "traj_ids"), "lacks the key"),
    "version missing": (without("collector", "policy_version"), "lacks the key"),
    "observation missing": (without("observation"), "lacks the key"),
    "successor missing": (without("next", "observation"), "lacks the key .*next.*observation"),
    "flag without its last dimension": (
        converted(("next", "terminated"), lambda x: x.squeeze(-1)),
        r"\('next', 'terminated'\) must be torch.bool with shape \(2, 6, 1\), got torch.bool with shape \(2, 6\)",
    ),
    "reward without its last dimension": (converted(("next", "reward"), lambda x: x.squeeze(-1)), "shape"),
    "reward in float64": (converted(("next", "reward"), torch.Tensor.double), "torch.float32 .*, got torch.float64"),
    "flag in integers": (converted(("is_init",), torch.Tensor.long), "torch.bool .*, got torch.int64"),
    "ids in int32": (converted(("collector", "traj_ids"), torch.Tensor.int), "torch.int64 .*, got torch.int32"),
    "version with a last dimension": (converted(("collector", "policy_version"), lambda x: x[..., None]), "shape"),
    "done without a reason": (at(("next", "done"), (0, 0), True), "must be terminated or truncated"),
    "end that is not done": (at(("next", "done"), (0, 2), False), "must be terminated or truncated"),
    "id that goes on after an end": (at(("collector", "traj_ids"), (0, 3), 0), "must change after the last row"),
    "id that changes within an episode": (at(("collector", "traj_ids"), (0, 1), 9), "must not change within"),
    "first row that is not marked": (at(("is_init",), (0, 3), False), "is_init"),
    "mark within an episode": (at(("is_init",), (0, 1), True), "is_init"),
    "successor of a reset": (at(("observation",), (1, 1), 5.0), "must be the successor"),
    "successor that is not what was seen": (at(("next", "observation"), (1, 0), 5.0), "must be the successor"),
}


@pytest.mark.parametrize(("break_it", "message"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_violation_raises_and_names_the_key(break_it, message):
    data = batch()
    break_it(data)
    with pytest.raises(FrameContractError, match=message):
        check_batch(data)


@pytest.mark.parametrize("change", [lambda x: x[..., None], torch.Tensor.long], ids=["a last dimension", "integers"])
def test_mask_of_another_kind_raises(change):
    data = masked()
    data[MASK] = change(data[MASK])
    with pytest.raises(FrameContractError, match=r"\('collector', 'mask'\) must be torch.bool with shape \(2, 6\)"):
        check_batch(data)


def test_violation_at_a_row_that_is_no_transition_passes():
    data = masked()
    data["next", "observation"][0, 3] = 99.0
    check_batch(data)


def test_end_of_a_dict_observation_is_checked_by_leaf():
    data = batch()
    for place in (data, data["next"]):
        place["state", "x"] = place.pop("observation")
    check_batch(data)
    data["state", "x"][0, 1] = 99.0
    with pytest.raises(FrameContractError, match=r"\('state', 'x'\) must be the successor"):
        check_batch(data)


def test_count_frames_leaves_masked_rows_out():
    assert count_frames(batch()) == 12
    assert count_frames(batch()[0]) == 6
    assert count_frames(masked()) == 10


def test_valid_rows_is_none_where_all_rows_are_transitions():
    assert valid_rows(batch()) is None
    assert valid_rows(masked()).sum(-1).tolist() == [5, 5]


def test_flatten_rows_goes_copy_by_copy_in_the_order_of_time():
    rows = flatten_rows(batch())
    assert rows.batch_size == (12,)
    copy, step = rows["next", "observation"].unbind(-1)
    assert copy.tolist() == [0] * 6 + [1] * 6
    assert step.tolist() == [1, 2, 3, 4, 5, 6] * 2


def test_flatten_rows_leaves_masked_rows_out():
    rows = flatten_rows(masked())
    assert rows.batch_size == (10,)
    assert rows["next", "observation"][:, 1].tolist() == [1, 2, 3, 5, 6, 1, 2, 3, 4, 5]
    assert rows[MASK].all()


def test_flatten_rows_of_a_batch_without_copies_is_that_batch():
    assert flatten_rows(batch()[1])["next", "observation"][:, 1].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("key", "private"),
    [(("action",), False), (("_logits",), True), (("next", "_hidden"), True), (("_state", "h"), True)],
)
def test_is_private_looks_at_every_part_of_a_key(key, private):
    assert is_private(key) == private


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int64, np.bool_])
def test_to_numpy_dtype_goes_back_where_torch_came_from(dtype):
    assert to_numpy_dtype(torch.from_numpy(np.zeros(1, dtype)).dtype) == np.dtype(dtype)
