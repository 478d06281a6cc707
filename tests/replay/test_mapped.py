"""Rows in shared memory and on disk: found again, attached to, kept within bounds, and refused before they are lost."""

import copy
import errno
import gc
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.errors import CollectTimeoutError, FrameContractError, LitCollectError
from lit_collect.replay import storage as storage_module
from lit_collect.replay.files import HEAD_BYTES
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.mapped import MappedStorage, SharedStorage

CAPACITY = 9


def rows(first: int, stop: int) -> TensorDict:
    number = torch.arange(first, stop)
    return TensorDict({"number": number, "half": number[:, None].bfloat16() / 2}, batch_size=[stop - first])


LAYOUT = RowLayout.of(rows(0, 1))


def write(storage, first: int, stop: int) -> None:
    with storage.use():
        storage.write(LAYOUT.pack(rows(first, stop)))


def numbers(storage) -> list[int]:
    with storage.use():
        lost = np.zeros(storage.size, bool) if storage.is_void is None else storage.is_void[: storage.size]
        found = LAYOUT.unpack(storage.take(np.arange(storage.size)))["number"]
        return np.where(lost, -1, found.numpy()).tolist()


@pytest.fixture
def opened():
    """Opens storages, begins their rows, and closes them afterwards."""
    storages = []

    def open_one(storage=None, capacity: int = CAPACITY, begin: bool = True):
        storages.append(MappedStorage("rows") if storage is None else storage)
        storages[-1].open(capacity)
        if begin:
            storages[-1].begin(LAYOUT)
        return storages[-1]

    yield open_one
    for storage in storages:
        storage.close()


@pytest.fixture(params=["shared", "mapped"])
def two(request, opened):
    """Two storages of the same rows, as two processes have them; neither knows of any rows yet."""
    first = opened(SharedStorage() if request.param == "shared" else MappedStorage("rows"), begin=False)
    second = pickle.loads(pickle.dumps(first))
    yield first, second
    second.close()


class Interrupted(SharedStorage):
    """Stops in the middle of a write, as a process does that is killed."""

    def _copy(self, rows, write_count):
        super()._copy(rows[: len(rows) // 2], write_count)
        raise KeyboardInterrupt


def test_rows_of_one_are_seen_by_the_other(two):
    first, second = two
    first.begin(LAYOUT)
    write(first, 0, 4)
    assert numbers(second) == [0, 1, 2, 3]
    assert second.layout == LAYOUT
    write(second, 4, 11)
    assert numbers(first) == [9, 10, 2, 3, 4, 5, 6, 7, 8]
    assert first.write_count == second.write_count == 11


def test_void_rows_and_epochs_of_one_are_seen_by_the_other(two):
    first, second = two
    first.begin(LAYOUT)
    write(first, 0, 9)
    write(first, 9, 12)
    first.void_after(10)
    assert numbers(second) == [9, -1, -1, 3, 4, 5, 6, 7, 8]
    assert second.epoch == 1


def test_begin_of_the_second_with_other_rows_is_refused(two):
    first, second = two
    first.begin(LAYOUT)
    with pytest.raises(FrameContractError, match=r"\('half',\) is missing"):
        second.begin(RowLayout.of(rows(0, 1).select("number")))
    second.begin(LAYOUT)


def test_use_while_the_other_keeps_it_waits_for_the_deadline_and_names_the_process(two, monkeypatch):
    monkeypatch.setattr(storage_module, "DEADLINE_S", 0.05)
    first, second = two
    with (
        first.use(),
        pytest.raises(CollectTimeoutError, match=rf"process {os.getpid()} has kept .* for 0\.05 s"),
        second.use(),
    ):
        pass
    with second.use():
        pass


def test_close_of_one_leaves_the_other_its_rows(two):
    first, second = two
    first.begin(LAYOUT)
    write(first, 0, 3)
    assert numbers(second) == [0, 1, 2]
    first.close()
    write(second, 3, 5)
    assert numbers(second) == [0, 1, 2, 3, 4]


def test_use_after_close_is_refused(two):
    first, _ = two
    first.close()
    with pytest.raises(LitCollectError, match="is not open"):
        first.use()


def test_write_that_is_interrupted_voids_the_rows_it_was_to_replace_and_no_others(opened):
    storage = opened(SharedStorage())
    write(storage, 0, 9)
    write(storage, 9, 11)
    storage.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        write(storage, 11, 15)
    storage.__class__ = SharedStorage
    assert numbers(storage) == [9, 10, -1, -1, -1, -1, 6, 7, 8]
    assert storage.write_count == 15
    write(storage, 15, 20)
    assert numbers(storage) == [18, 19, -1, -1, -1, -1, 15, 16, 17]
    write(storage, 20, 24)
    assert storage.is_void is None


def test_write_that_is_interrupted_within_one_use_is_seen_by_the_next_write(opened):
    storage = opened(Interrupted())
    with storage.use():
        with pytest.raises(KeyboardInterrupt):
            storage.write(LAYOUT.pack(rows(0, 4)))
        storage.__class__ = SharedStorage
        storage.write(LAYOUT.pack(rows(4, 6)))
    assert numbers(storage) == [-1, -1, -1, -1, 4, 5]


# --- shared ---------------------------------------------------------------------------------------------------------


def test_shared_memory_leaves_no_descriptor(opened):
    before = len(os.listdir("/proc/self/fd"))
    storage = opened(SharedStorage())
    same = pickle.loads(pickle.dumps(storage))
    write(same, 0, 3)
    same.close()
    storage.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", [SharedStorage, lambda: MappedStorage("rows", 0)], ids=["shared", "mapped"])
def test_storage_that_nobody_closed_leaves_no_descriptor_when_it_is_gone(kind):
    before = len(os.listdir("/proc/self/fd"))
    storage = kind()
    storage.open(CAPACITY)
    storage.begin(LAYOUT)
    write(storage, 0, 5)
    assert len(os.listdir("/proc/self/fd")) > before
    del storage
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_shared_memory_without_the_system_call_is_a_file_that_its_maker_takes_away(opened, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = opened(SharedStorage())
    same = pickle.loads(pickle.dumps(storage))
    write(storage, 0, 3)
    assert numbers(same) == [0, 1, 2]
    same.close()
    assert len(list(tmp_path.iterdir())) == 1
    storage.close()
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_that_is_not_open_cannot_be_sent():
    with pytest.raises(TypeError, match="expected an open one"):
        pickle.dumps(SharedStorage())


@pytest.mark.parametrize("again", [False, True], ids=["nothing there", "another one there"])
def test_shared_memory_that_is_gone_cannot_be_opened(opened, again):
    storage = opened(SharedStorage())
    sent = pickle.dumps(storage)
    storage.close()
    if again:
        opened(SharedStorage())
    with pytest.raises(LitCollectError, match="the shared memory of a replay buffer is gone"):
        pickle.loads(sent)


# --- mapped ---------------------------------------------------------------------------------------------------------


def test_mapped_rows_are_there_when_the_folder_is_opened_again(opened):
    storage = opened()
    write(storage, 0, 9)
    write(storage, 9, 12)
    storage.close()
    again = opened(begin=False)
    assert again.layout == LAYOUT
    assert numbers(again) == [9, 10, 11, 3, 4, 5, 6, 7, 8]
    assert again.write_count == 12
    assert LAYOUT.unpack(again.take(np.array([2])))["half"].tolist() == [[5.5]]


def test_mapped_folder_when_opened_again_keeps_the_order_of_its_leaves_though_batches_have_another(opened):
    write(opened(), 0, 3)
    turned = TensorDict({"half": rows(3, 5)["half"], "number": rows(3, 5)["number"]}, batch_size=[2])
    again = opened(begin=False)
    again.begin(RowLayout.of(turned))
    again.write(again.layout.pack(turned))
    assert numbers(again) == [0, 1, 2, 3, 4]


def test_mapped_folder_of_another_capacity_is_refused(opened, tmp_path):
    opened().close()
    with pytest.raises(ValueError, match=rf"folder {tmp_path}/rows has another capacity : expected 9, got 10"):
        opened(capacity=10)


@pytest.mark.parametrize("words", [b"a diary" * 20_000, b"a note"], ids=["long", "short"])
def test_mapped_folder_of_something_else_is_refused_and_left_alone(opened, words):
    Path("rows").mkdir()
    Path("rows/rows.bin").write_bytes(words)
    with pytest.raises(
        ValueError, match="is no replay buffer of this version : expected a file of at least 65536 bytes"
    ):
        opened()
    assert Path("rows/rows.bin").read_bytes() == words


def test_open_while_another_keeps_the_folder_waits_for_the_deadline(opened, monkeypatch):
    monkeypatch.setattr(storage_module, "DEADLINE_S", 0.05)
    storage = opened()
    with storage.use(), pytest.raises(CollectTimeoutError, match="process of unknown number has kept the folder"):
        opened()
    assert numbers(opened()) == []


def test_rows_of_more_memory_than_there_is_are_refused(huge):
    with pytest.raises(OSError, match=r"no room for a replay buffer of 1000000000000 rows in .*bytes free") as got:
        huge.begin(LAYOUT)
    assert got.value.errno == errno.ENOSPC
    assert huge.layout is None


@pytest.fixture(params=[SharedStorage, lambda: MappedStorage("rows")], ids=["shared", "mapped"])
def huge(request, opened):
    return opened(request.param(), capacity=10**12, begin=False)


def test_mapped_file_that_is_cut_off_is_refused(opened):
    opened().close()
    os.truncate("rows/rows.bin", HEAD_BYTES + 100)
    with pytest.raises(ValueError, match=rf"is cut off : expected \d+ bytes, got {HEAD_BYTES + 100}"):
        opened(begin=False)


@pytest.mark.parametrize("damage", [b"\xff\xfe\xfd", b"nothing", b"[1, 2", b"[1,2]           "], ids=repr)
def test_mapped_file_with_a_damaged_head_is_refused(opened, damage):
    opened().close()
    content = Path("rows/rows.bin").read_bytes()
    at = content.index(b'{"leaves')
    Path("rows/rows.bin").write_bytes(content[:at] + damage + content[at + len(damage) :])
    with pytest.raises(ValueError, match="rows is damaged : expected the keys of its rows in its head"):
        opened(begin=False)


def test_mapped_file_whose_maker_died_before_it_began_is_as_a_new_one(opened):
    Path("rows").mkdir()
    Path("rows/rows.bin").write_bytes(bytes(HEAD_BYTES))
    storage = opened()
    write(storage, 0, 2)
    assert numbers(storage) == [0, 1]


def test_mapped_path_is_kept_when_the_program_changes_its_folder(opened, monkeypatch, tmp_path):
    storage = MappedStorage("rows")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    opened(storage)
    assert (tmp_path / "rows" / "rows.bin").exists()


def test_mapped_storage_that_is_not_open_may_be_copied(opened):
    same = copy.deepcopy(MappedStorage("rows"))
    assert (same.path, same.capacity) == (Path("rows").absolute(), 0)
    assert numbers(opened(same)) == []


def test_mapped_text_of_the_rows_can_be_read_in_the_file(opened):
    opened()
    assert b'"key": ["number"], "shape": [], "dtype": "int64"' in Path("rows/rows.bin").read_bytes()


def test_mapped_rows_on_a_full_disk_are_refused_before_anything_is_written(opened, monkeypatch):
    storage = opened(begin=False)

    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            OSError, match=rf"9 rows in the folder {storage.path} : expected \d+ bytes, got \d+ bytes free"
        ) as got:
            storage.begin(LAYOUT)
    assert got.value.errno == errno.ENOSPC
    assert storage.layout is None
    assert os.path.getsize("rows/rows.bin") == HEAD_BYTES
    storage.begin(LAYOUT)  # room was made
    write(storage, 0, 3)
    assert numbers(storage) == [0, 1, 2]


def test_mapped_file_larger_than_the_system_allows_is_refused_before_anything_is_written(opened):
    storage = opened(capacity=1_000_000, begin=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="no room for a replay buffer of 1000000 rows"):
            storage.begin(LAYOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.layout is None


def test_mapped_file_where_room_cannot_be_reserved_is_written_with_zeros(opened, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    storage = opened(capacity=300_000)
    needed = HEAD_BYTES + 300_000 * LAYOUT.dtype.itemsize
    assert os.stat("rows/rows.bin").st_blocks * 512 >= needed
    write(storage, 0, 3)
    assert numbers(storage) == [0, 1, 2]


def test_rows_with_more_leaves_than_a_file_can_describe_are_refused(opened):
    storage = opened(begin=False)
    many = TensorDict({f"leaf {number}": torch.zeros(1) for number in range(2000)}, batch_size=[1])
    with pytest.raises(ValueError, match="too many leaves for a file"):
        storage.begin(RowLayout.of(many))
    assert storage.layout is None


@pytest.mark.parametrize("below", ["", "rows"])
def test_mapped_path_that_is_a_file_is_refused_and_left_alone(tmp_path, below):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"is no folder : expected a folder, .*got a file at .*notes.txt"):
        MappedStorage(file / below).open(CAPACITY)
    assert file.read_text() == "mine"


def test_mapped_storage_that_maps_a_negative_number_of_bytes_is_refused():
    with pytest.raises(ValueError, match="mapped_bytes is too small : expected at least 0, got -5"):
        MappedStorage("rows", -5)


def test_mapped_file_that_is_read_piece_by_piece_is_seen_by_one_that_is_mapped(opened):
    whole, pieces = opened(), opened(MappedStorage("rows", 0))
    write(whole, 0, 7)
    write(pieces, 7, 12)
    assert numbers(whole) == numbers(pieces) == [9, 10, 11, 3, 4, 5, 6, 7, 8]
    assert pieces.records[LAYOUT.field(("number",))].tolist() == numbers(whole)


def test_mapped_file_when_cut_off_while_it_is_read_piece_by_piece_says_so(opened):
    storage = opened(MappedStorage("rows", 0))
    write(storage, 0, 9)
    os.truncate("rows/rows.bin", os.path.getsize("rows/rows.bin") - 1)
    with pytest.raises(EOFError, match="cut off"):
        numbers(storage)


@pytest.mark.parametrize("bounded", [True, False])
def test_mapped_rows_that_are_not_to_be_in_memory_are_not(opened, bounded):
    """A file of 64 MB, written and read through; when it is mapped, all of it comes into memory."""
    wide = TensorDict({"x": torch.zeros(512, 1024, dtype=torch.int32)}, batch_size=[512])  # 2 MB
    layout = RowLayout.of(wide)
    storage = opened(MappedStorage("rows", 1 << (20 if bounded else 30)), capacity=16_384, begin=False)
    storage.begin(layout)
    before, most = resident(), 0
    for number in range(32):
        storage.write(layout.pack(wide.apply(lambda x, number=number: x + number)))
        most = max(most, resident() - before)
    for positions in np.random.default_rng(0).permutation(16_384).reshape(32, 512):
        found = layout.unpack(storage.take(positions))["x"]
        assert found[:, -1].tolist() == (positions // 512).tolist()
        most = max(most, resident() - before)
    for number in range(32):
        assert (storage.records["/x"][512 * number : 512 * (number + 1), 0] == number).all()
        most = max(most, resident() - before)
    assert (most < 16 << 20) == bounded


def resident() -> int:
    """Bytes of files that are in this process's memory."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssFile:")[2].split()[0]) * 1024
