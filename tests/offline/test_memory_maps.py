"""Rows on disk as a memory-mapped TensorDict."""

import json
import resource
import signal
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

from lit_collect.errors import FrameContractError, LitCollectError
from lit_collect.offline.memory_maps import ABOUT, RowWriter, read_rows


def rows(first, count):
    """Rows whose every value is its number."""
    numbers = torch.arange(first, first + count)
    flags = (numbers % 2 == 0)[:, None]
    return TensorDict(
        {
            "action": numbers,
            "half": numbers[:, None].to(torch.bfloat16),
            "odd/name.x": numbers.to(torch.uint8),
            "nothing": torch.zeros(count, 0),
            "next": {"reward": numbers[:, None].float(), "done": flags, "deep": {"x": numbers[:, None].double()}},
        },
        batch_size=[count],
    )


def same(one, other):
    return sorted(map(str, one.keys(True, True))) == sorted(map(str, other.keys(True, True))) and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one.keys(True, True)
    )


def test_rows_are_one_tensordict_for_tensordict_itself(tmp_path):
    with RowWriter(tmp_path / "rows", {"env": "Some-v0"}) as writer:
        for first, count in ((0, 5), (5, 1), (6, 0), (6, 7)):
            writer.write(rows(first, count))
        assert writer.num_rows == 13
    assert same(TensorDict.load_memmap(tmp_path / "rows"), rows(0, 13))
    found, about = read_rows(tmp_path / "rows")
    assert same(found, rows(0, 13))
    assert about == {"env": "Some-v0", "rows": 13, "complete": True}


def test_rows_can_be_read_while_more_are_written(tmp_path):
    writer = RowWriter(tmp_path, {})
    writer.write(rows(0, 3))
    first, about = read_rows(tmp_path)
    writer.write(rows(3, 40))
    assert same(first, rows(0, 3))
    assert not about["complete"]
    assert same(read_rows(tmp_path)[0], rows(0, 43))
    writer.close()


KILLED = """
import sys
import torch
from tensordict import TensorDict
from lit_collect.offline.memory_maps import RowWriter
writer = RowWriter(sys.argv[1], {})
for number in range(1000):
    numbers = torch.arange(10 * number, 10 * number + 10)
    after = {"reward": numbers[:, None].float(), "done": numbers[:, None] % 2 == 0}
    writer.write(TensorDict({"action": numbers, "next": after}, batch_size=[10]))
    print(number, flush=True)
"""


@pytest.mark.slow
def test_rows_survive_a_killed_writer(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "rows")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == 5:
                process.send_signal(signal.SIGKILL)
    found, _ = read_rows(tmp_path / "rows")
    assert 60 <= len(found) < 10_000
    assert torch.equal(found["action"], torch.arange(len(found)))
    assert torch.equal(found["next", "reward"].squeeze(-1), found["action"].float())
    assert torch.equal(found["next", "done"].squeeze(-1), found["action"] % 2 == 0)


@pytest.mark.parametrize("deep", ["next", "next/deep"])
def test_rows_are_found_that_were_cut_off_while_being_counted(tmp_path, deep):
    writer = RowWriter(tmp_path, {})
    writer.write(rows(0, 4))
    writer.write(rows(4, 2))
    files = [tmp_path / "meta.json", tmp_path / deep / "meta.json"]  # the first is written last
    for file in files[:1]:
        file.write_text(file.read_text().replace("[6", "[4"))
    assert json.loads(files[1].read_text())["shape"] == [6]
    assert same(read_rows(tmp_path)[0], rows(0, 4))
    writer.close()


@pytest.mark.parametrize("name", ["action.memmap", "next/reward.memmap", "next/deep/x.memmap"])
@pytest.mark.parametrize("bytes_left", [0, 7])
def test_files_that_are_cut_off_are_told_and_not_filled_up(tmp_path, name, bytes_left):
    with RowWriter(tmp_path / "rows", {}) as writer:
        writer.write(rows(0, 5))
    file = tmp_path / "rows" / name
    file.write_bytes(file.read_bytes()[:bytes_left])
    with pytest.raises(LitCollectError, match=rf"{name} is cut off, expected \d+ bytes for 5 rows, got {bytes_left} "):
        read_rows(tmp_path / "rows")
    assert file.stat().st_size == bytes_left


def test_files_that_are_missing_are_told(tmp_path):
    with RowWriter(tmp_path / "rows", {}) as writer:
        writer.write(rows(0, 5))
    (tmp_path / "rows" / "next" / "reward.memmap").unlink()
    with pytest.raises(LitCollectError, match=r"next/reward.memmap is missing, expected 20 bytes for 5 rows"):
        read_rows(tmp_path / "rows")


@pytest.mark.parametrize(("text", "words"), [('{"env": "Cart', "cannot be read: "), ("[1]", "expected a JSON object")])
def test_a_description_that_is_damaged_is_told(tmp_path, text, words):
    with RowWriter(tmp_path / "rows", {}) as writer:
        writer.write(rows(0, 5))
    (tmp_path / "rows" / "lit_collect.json").write_text(text)
    with pytest.raises(LitCollectError, match=rf"rows/lit_collect.json .*{words}"):
        read_rows(tmp_path / "rows")


def test_full_disk_is_told_and_loses_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = RowWriter(tmp_path, {})
    writer.write(rows(0, 1000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, hard))  # no file may grow beyond that
    try:
        with pytest.raises(OSError, match=r"5000 rows could not be written to .* the 1000 rows before them"):
            writer.write(rows(1000, 5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert same(read_rows(tmp_path)[0], rows(0, 1000))
    writer.write(rows(1000, 2))  # there is room again
    writer.close()
    assert same(read_rows(tmp_path)[0], rows(0, 1002))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.exclude("half"), r"\('half',\) are missing"),
        (lambda given: given.set("more", torch.zeros(3)), r"\('more',\) are new"),
        (lambda given: given.set("action", torch.zeros(3)), r"torch.int64 with shape \(\) for \('action',\)"),
        (lambda given: given.set(("next", "reward"), torch.zeros(3, 2)), r"torch.float32 with shape \(1,\)"),
    ],
)
def test_rows_of_other_keys_are_refused_and_nothing_is_lost(tmp_path, change, message):
    with RowWriter(tmp_path, {}) as writer:
        writer.write(rows(0, 3))
        with pytest.raises(FrameContractError, match=message):
            writer.write(change(rows(3, 3)))
        writer.write(rows(3, 1))
    assert same(read_rows(tmp_path)[0], rows(0, 4))


def test_what_is_no_tensor_is_refused(tmp_path):
    with RowWriter(tmp_path, {}) as writer, pytest.raises(FrameContractError, match="expected tensors alone"):
        writer.write(rows(0, 1).set_non_tensor("name", "left"))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(FileExistsError, match="is not empty"):
        RowWriter(tmp_path, {})


def test_what_holds_no_rows_is_refused(tmp_path):
    RowWriter(tmp_path / "cut", {})
    with pytest.raises(LitCollectError, match="a run that was cut off before its first rows leaves none"):
        read_rows(tmp_path / "cut")
    rows(0, 6).exclude("action").memmap(str(tmp_path / "strange"))
    with pytest.raises(FrameContractError, match=r"are no transitions : .* got no \[\('action',\)\]"):
        read_rows(tmp_path / "strange")
    rows(0, 6).reshape(2, 3).memmap(str(tmp_path / "batch"))
    with pytest.raises(FrameContractError, match=r"expected shape \[M\], got \[2, 3\]"):
        read_rows(tmp_path / "batch")


def test_rows_of_tensordict_alone_are_read(tmp_path):
    rows(0, 6).memmap(str(tmp_path))
    found, about = read_rows(tmp_path)
    assert same(found, rows(0, 6))
    assert about == {}
    assert not (tmp_path / ABOUT).exists()
