"""Running statistics against NumPy on all rows at once, and what they do to observations and rewards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from trainers.normalization import (
    MappingNormalizer,
    RewardScaler,
    RunningMoments,
    RunningNormalizer,
    merge_moments,
    normalizer_for,
    returns_so_far,
)

BOX = {"kind": "box", "shape": [2], "dtype": "float32"}
BYTES = {"kind": "box", "shape": [3], "dtype": "uint8"}
GEAR = {"kind": "discrete", "n": 3, "start": 0}
ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, sys
import torch
from trainers.normalization import RunningMoments
rank, file = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
moments = RunningMoments([2])
moments.update(torch.arange(4.0).view(2, 2) + 10 * rank)
moments.update(torch.full((1, 2), 7.0), torch.tensor([rank == 1]))  # rank 0 has no row that counts
print(json.dumps([moments.count.item(), moments.mean.tolist(), moments.variance.tolist()]))
torch.distributed.destroy_process_group()
"""


def far_rows(count, seed=0):
    """Deviation 0.1 and 2 around 1,000 and -3: sums of squares in single precision would lose the first."""
    return np.random.default_rng(seed).normal([1000.0, -3.0], [0.1, 2.0], (count, 2))


def test_merge_moments_by_hand():
    # {0, 4}: n 2, mean 2, variance 4.  {9}: n 1, mean 9.  Together mean 13 / 3 and
    # variance (0 + 16 + 81) / 3 - (13 / 3)^2 = 97 / 3 - 169 / 9 = 122 / 9
    first = (torch.tensor(2), torch.tensor([2.0]), torch.tensor([4.0]))
    second = (torch.tensor(1), torch.tensor([9.0]), torch.tensor([0.0]))
    for one, other in ((first, second), (second, first)):
        count, mean, variance = merge_moments(one, other)
        assert count == 3
        torch.testing.assert_close(mean, torch.tensor([13 / 3]))
        torch.testing.assert_close(variance, torch.tensor([122 / 9]))


def test_merge_moments_with_no_rows_changes_nothing():
    nothing = (torch.tensor(0), torch.zeros(1), torch.ones(1))
    some = (torch.tensor(4), torch.tensor([7.0]), torch.tensor([2.0]))
    for merged in (merge_moments(nothing, some), merge_moments(some, nothing)):
        assert [part.item() for part in merged] == [4, 7.0, 2.0]
    assert [part.item() for part in merge_moments(nothing, nothing)] == [0, 0.0, 1.0]


def test_moments_of_many_batches_equal_numpy_on_all_rows():
    rows = far_rows(1000)
    moments = RunningMoments([2])
    for part in np.split(rows, [1, 2, 50, 777]):
        moments.update(torch.from_numpy(part))
    assert moments.count == 1000
    np.testing.assert_allclose(moments.mean.numpy(), rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance.numpy(), rows.var(0), rtol=1e-9)


def test_moments_of_several_ranks_equal_those_of_one():
    # what every rank has of its own rows, merged one after the other as after a gather
    rows = far_rows(60)
    merged = (torch.tensor(0), torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    for share in np.split(rows, [10, 45]):
        own = RunningMoments([2])
        own.update(torch.from_numpy(share))
        merged = merge_moments(merged, (own.count, own.mean, own.variance))
    np.testing.assert_allclose(merged[1].numpy(), rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(merged[2].numpy(), rows.var(0), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.ddp
def test_moments_in_two_processes_are_of_the_rows_of_both(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], env=environment, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    first, second = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    rows = np.array([[0, 1], [2, 3], [10, 11], [12, 13], [7, 7]], float)
    assert first == second
    assert first[0] == 5
    np.testing.assert_allclose(first[1], rows.mean(0))
    np.testing.assert_allclose(first[2], rows.var(0))


def test_moments_leave_masked_rows_out():
    moments = RunningMoments([1])
    mask = torch.tensor([[True, False], [True, True]])
    moments.update(torch.tensor([[[1.0], [99.0]], [[3.0], [5.0]]]), mask)
    assert (moments.count.item(), moments.mean.item()) == (3, 3.0)
    assert moments.variance.item() == pytest.approx(8 / 3)
    moments.update(torch.tensor([[[99.0]]]), torch.tensor([[False]]))
    assert (moments.count.item(), moments.mean.item()) == (3, 3.0)


def test_moments_of_bytes_are_exact():
    moments = RunningMoments([])
    moments.update(torch.tensor([0, 255, 255], dtype=torch.uint8))
    assert moments.mean.item() == pytest.approx(170)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moments_keep_their_precision_when_the_module_is_cast(dtype):
    moments = RunningMoments([2])
    moments.update(torch.from_numpy(far_rows(10)))
    before = {name: buffer.clone() for name, buffer in moments.named_buffers()}
    torch.nn.Sequential(moments).to(dtype)
    assert moments.count.dtype == torch.int64
    for name, buffer in moments.named_buffers():
        assert torch.equal(buffer, before[name])


def test_normalizer_without_rows_passes_what_it_is_given():
    observation = torch.tensor([[0.5, -2.0]])
    torch.testing.assert_close(RunningNormalizer([2])(observation), observation)


def test_normalizer_shifts_scales_and_clips_without_learning_from_it():
    normalizer = RunningNormalizer([2])
    normalizer.update(torch.tensor([[1.0, 7.0], [3.0, 7.0]]))  # mean 2 and deviation 1; 7 and no deviation
    with torch.no_grad():
        result = normalizer(torch.tensor([[4.0, 7.0], [-50.0, 8.0]]))
    torch.testing.assert_close(result, torch.tensor([[2.0, 0.0], [-10.0, 10.0]]))
    assert result.dtype == torch.float32
    assert normalizer.count == 2


def test_normalizer_keeps_leading_dimensions_and_double_precision():
    observation = torch.randn(4, 3, 2, dtype=torch.float64)
    assert RunningNormalizer([2])(observation).dtype == torch.float64
    assert RunningNormalizer([2])(observation).shape == (4, 3, 2)


@pytest.mark.parametrize("spec", [BYTES, GEAR, {"kind": "dict", "spaces": {"a": BYTES, "b": GEAR}}])
def test_normalizer_for_spaces_that_need_none_is_none(spec):
    assert normalizer_for(spec) is None


@pytest.mark.parametrize("kind", [dict, lambda parts: TensorDict(parts, [2])], ids=["dict", "TensorDict"])
def test_normalizer_for_a_dict_normalises_its_boxes_and_passes_the_rest(kind):
    inner = {"kind": "dict", "spaces": {"x": BOX}}
    spec = {"kind": "dict", "spaces": {"a.b": BOX, "gear": GEAR, "eye": BYTES, "in": inner}}
    normalizer = normalizer_for(spec)
    assert isinstance(normalizer, MappingNormalizer)
    rows = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    gear, eye = torch.tensor([0, 2]), torch.full((2, 3), 255, dtype=torch.uint8)
    observation = kind({"a.b": rows, "gear": gear, "eye": eye, "in": kind({"x": 10 * rows})})
    normalizer.update(observation)
    result = normalizer(observation)
    expected = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    torch.testing.assert_close(result["a.b"], expected)
    torch.testing.assert_close(result["in"]["x"], expected)
    assert result["gear"] is gear or torch.equal(result["gear"], gear)
    assert torch.equal(result["eye"], eye)
    assert torch.equal(observation["a.b"], rows)


def test_returns_so_far_by_hand():
    # gamma 0.5: 1 + 0.5 * 8 = 5;  1 + 2.5 = 3.5;  a new trajectory: 1;  1.5
    ends = torch.tensor([[False, True, False, False]])
    result = returns_so_far(torch.ones(1, 4), ends, gamma=0.5, before=torch.tensor([8.0]))
    assert result.tolist() == [[5.0, 3.5, 1.0, 1.5]]


def test_returns_so_far_equal_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    reward, before = torch.randn(3, 17, generator=generator), torch.randn(3, generator=generator)
    ends = torch.rand(3, 17, generator=generator) < 0.2
    result = returns_so_far(reward, ends, gamma=0.9, before=before)
    for copy in range(3):
        total = before[copy]
        for t in range(17):
            total = reward[copy, t] + 0.9 * (0 if t and ends[copy, t - 1] else total)
            assert result[copy, t].item() == pytest.approx(total.item(), abs=1e-5)


def test_reward_scaler_over_batches_equals_one_pass_over_the_whole_stream():
    generator = torch.Generator().manual_seed(0)
    reward = 7 * torch.randn(2, 60, generator=generator)
    ends = torch.rand(2, 60, generator=generator) < 0.1
    scaler = RewardScaler(gamma=0.9)
    for part in range(0, 60, 20):
        scaled = scaler(reward[:, part : part + 20], ends[:, part : part + 20])
    returns = returns_so_far(reward.double(), ends, 0.9, torch.zeros(2))
    deviation = returns.numpy().std()
    np.testing.assert_allclose(scaled.numpy(), reward[:, 40:].numpy() / deviation, rtol=1e-5)


def test_reward_scaler_begins_anew_where_another_trajectory_runs():
    scaler, one = RewardScaler(gamma=1.0), torch.ones(2, 2)
    going = torch.zeros(2, 2, dtype=torch.bool)
    scaler(one, going, torch.tensor([[0, 0], [1, 1]]))  # 1 2 and 1 2
    scaler(one, going, torch.tensor([[0, 0], [3, 3]]))  # 3 4 and, reset in between, 1 2
    assert scaler.moments.count == 8
    assert scaler.moments.mean.item() == pytest.approx(np.mean([1, 2, 1, 2, 3, 4, 1, 2]))


def test_reward_scaler_clips_and_keeps_the_dtype():
    scaler = RewardScaler(gamma=0.0)
    scaler.moments.update(torch.full((10_000,), 0.0))
    scaled = scaler(torch.tensor([[1000.0, -1000.0]]), torch.tensor([[True, True]]))
    assert scaled.tolist() == [[10.0, -10.0]]
    assert scaler(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[True]])).dtype == torch.bfloat16


def test_reward_scaler_leaves_masked_rows_out():
    scaler = RewardScaler(gamma=0.0)
    mask = torch.tensor([[True, True, False]])
    scaler(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[False, True, True]]), mask=mask)
    assert (scaler.moments.count.item(), scaler.moments.mean.item()) == (2, 2.0)


def test_state_of_a_reward_scaler_is_its_moments_alone():
    scaler = RewardScaler(gamma=0.9)
    scaler(torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.bool))
    assert set(scaler.state_dict()) == {"moments.count", "moments.mean", "moments.variance"}
    other = RewardScaler(gamma=0.9)
    other.load_state_dict(scaler.state_dict())
    assert other.moments.count == 12
