"""Shared memory: every view sees the same bytes, and nothing is left of it."""

import os

import pytest
import torch

from lit_collect.shared import SharedBlock


@pytest.fixture(params=["memfd", "nameless file"])
def create(request, monkeypatch):
    """`SharedBlock.create`, with and without the system call that not every system has; what it made is closed."""
    if request.param == "nameless file":
        monkeypatch.delattr(os, "memfd_create")
    blocks = []

    def make(size: int) -> SharedBlock:
        blocks.append(SharedBlock.create(size))
        return blocks[-1]

    yield make
    for block in blocks:
        block.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_block_when_created_is_zeroed(create):
    block = create(10_000)
    assert block.size == 10_000
    assert block.tensor(0, (10_000,), torch.uint8).count_nonzero() == 0


def test_tensor_when_written_is_seen_through_another_view_of_the_block(create):
    block = create(64)
    block.tensor(8, (2, 3), torch.float32).copy_(torch.arange(6.0).reshape(2, 3))
    assert block.tensor(8, (2, 3), torch.float32).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert block.tensor(12, (1,), torch.float32).item() == 1.0


def test_tensor_when_written_is_seen_through_another_block_of_the_same_memory(create):
    block = create(64)
    same = SharedBlock(os.dup(block.descriptor), block.size)
    view = same.tensor(0, (2,), torch.int64)
    block.tensor(0, (2,), torch.int64).fill_(7)
    assert view.tolist() == [7, 7]
    view.fill_(8)
    assert block.tensor(0, (2,), torch.int64).tolist() == [8, 8]
    same.close()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_tensor_has_the_shape_and_dtype_asked_for(create, shape, dtype):
    tensor = create(64).tensor(16, shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()


def test_tensor_when_made_in_inference_mode_can_be_written_outside(create):
    with torch.inference_mode():
        tensor = create(64).tensor(0, (2,), torch.float32)
    assert tensor.add_(1.0).tolist() == [1.0, 1.0]


def test_integers_are_the_bytes_of_an_int64_tensor(create):
    block = create(64)
    integers = block.integers(8, 3)
    assert integers.tolist() == [0, 0, 0]
    integers[0], integers[2] = -5, 1 << 62
    assert block.tensor(8, (3,), torch.int64).tolist() == [-5, 0, 1 << 62]
    block.tensor(16, (1,), torch.int64).fill_(9)
    assert integers[1] == 9


@pytest.mark.parametrize("view", ["tensor", "integers"])
def test_close_when_a_view_is_held_leaves_it_its_memory(create, view):
    block = create(1 << 16)
    held = block.tensor(0, (4,), torch.int64) if view == "tensor" else block.integers(0, 4)
    held[2] = 3
    block.close()
    held[3] = 4
    assert held.tolist() == [0, 0, 3, 4]


def test_close_when_another_block_has_the_memory_leaves_it_that(create):
    block = create(64)
    block.tensor(0, (1,), torch.float32).fill_(2.0)
    same = SharedBlock(os.dup(block.descriptor), block.size)
    block.close()
    assert same.tensor(0, (1,), torch.float32).item() == 2.0
    same.close()


def test_close_may_be_called_again(create):
    block = create(64)
    block.close()
    before = descriptors()
    block.close()
    assert descriptors() == before


@pytest.mark.parametrize("held", [False, True], ids=["no view", "a view until after closing"])
def test_blocks_when_closed_and_gone_leave_no_descriptor(held):
    before = descriptors()
    for _ in range(100):
        block = SharedBlock.create(4096)
        view = block.tensor(0, (4,), torch.float32) if held else None
        block.close()
        del block, view
    assert descriptors() == before
