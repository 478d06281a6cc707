"""Buffers of offline rows: filled once, with rows of their own data alone."""

import json
import shutil

import pytest
import torch

from lit_collect import NStep, OfflineDataModule
from lit_collect.frames import INDEX, NEXT_REWARD
from lit_collect.offline import offline_buffer
from lit_collect.offline.buffers import OfflineSampling
from lit_collect.offline.digests import digest_of
from lit_collect.offline.memory_maps import read_rows
from lit_collect.offline.minari import MinariWriter
from lit_collect.offline.sources import MappedRows, open_offline
from lit_collect.replay import ConsumingSampler, MappedStorage, MemoryStorage, ReplayBuffer
from lit_collect.testing import CountingEnv


@pytest.fixture
def store(tmp_path):
    """The folder of a mapped storage."""
    return tmp_path / "store"


def mapped(data, store, **settings):
    return offline_buffer(str(data), 8, storage="mapped", storage_path=str(store), seed=3, **settings)


def written(buffer):
    """All rows, in the order of writing."""
    return buffer[:]["observation"]


def change(folder):
    """As many rows of the same kind, with other rewards."""
    file = folder / "next" / "reward.memmap"
    rewards = torch.from_file(str(file), shared=True, size=48)
    rewards.add_(1.0)


# --- whose rows a mapped storage holds --------------------------------------------------------------------------------


def test_rows_in_a_mapped_storage_are_found_again_wherever_the_data_lie(counted_rows, store, tmp_path, monkeypatch):
    with mapped(counted_rows, store) as buffer:
        first = buffer.sample()
    shutil.copytree(counted_rows, tmp_path / "elsewhere")
    shutil.rmtree(counted_rows)
    monkeypatch.setattr(MappedRows, "batches", lambda self: pytest.fail("the rows are there"))
    with mapped(tmp_path / "elsewhere", store) as buffer:
        assert (buffer.sample()[INDEX] == first[INDEX]).all()


def test_as_many_rows_of_other_data_are_refused(counted_rows, store):
    mapped(counted_rows, store).close()
    change(counted_rows)
    words = r"store holds the rows of other offline data, of .*counted as it was then : expected the same 48 rows .*"
    with pytest.raises(ValueError, match=words + "remove the folder, or name another"):
        mapped(counted_rows, store)
    data = OfflineDataModule(str(counted_rows), batch_size=8, storage=MappedStorage(store))
    with pytest.raises(ValueError, match=words):
        data.setup("fit")
    data.close()
    shutil.rmtree(store)
    with mapped(counted_rows, store) as buffer:
        assert torch.equal(buffer[:][NEXT_REWARD], read_rows(counted_rows)[0][NEXT_REWARD])


def test_other_data_of_another_size_are_refused_in_the_same_words(counted_rows, store, tmp_path):
    mapped(counted_rows, store).close()
    read_rows(counted_rows)[0][:40].clone().memmap(str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"other offline data, of .*counted as it was then : expected 48 rows, got 40"):
        mapped(tmp_path / "other", store)


def test_other_infos_of_the_same_data_are_refused(tmp_path, store, play):
    pytest.importorskip("minari")
    pytest.importorskip("h5py")
    collector, episodes = play(CountingEnv)
    writer = MinariWriter(tmp_path / "c-v0", collector.observation_space, action_space=collector.action_space)
    writer.write(episodes)
    mapped(tmp_path / "c-v0", store).close()
    mapped(tmp_path / "c-v0", store).close()
    with pytest.raises(ValueError, match=r"the same 60 rows \(and info_keys\), got others"):
        mapped(tmp_path / "c-v0", store, info_keys=["level:int64"])


@pytest.mark.parametrize("left", [0, 7, 48])
def test_rows_that_were_left_half_way_are_written_again(counted_rows, store, left):
    mapped(counted_rows, store).close()
    with ReplayBuffer(48, storage=MappedStorage(store)) as buffer:
        buffer.empty()
        if left:
            buffer.extend(read_rows(counted_rows)[0][48 - left :])
        if left == 48:  # as if a process had died while it wrote the last of them
            buffer._storage._void[-1] = True
            buffer._storage._numbers[8] = 1
            assert len(buffer) == 47
    with mapped(counted_rows, store) as buffer:
        assert len(buffer) == buffer.write_count == 48
        assert torch.equal(written(buffer), read_rows(counted_rows)[0]["observation"])


def test_rows_that_nobody_knows_are_refused(counted_rows, store):
    with ReplayBuffer(48, storage=MappedStorage(store)) as buffer:
        buffer.extend(read_rows(counted_rows)[0])
    for text in ("", '{"path": "/a', ""):
        (store / "source.json").write_text(text)
        with pytest.raises(ValueError, match="holds 48 rows of another time"):
            mapped(counted_rows, store)


def test_a_storage_that_is_in_use_is_not_taken_for_one_that_is_filled(counted_rows):
    storage = MemoryStorage()
    with (
        offline_buffer(str(counted_rows), 8, storage=storage),
        pytest.raises(ValueError, match="holds 48 rows of another time"),
    ):
        offline_buffer(str(counted_rows), 8, storage=storage)


def test_the_source_is_noted_for_people(counted_rows, store):
    mapped(counted_rows, store).close()
    about = json.loads((store / "source.json").read_text())
    assert (about["path"], about["rows"]) == (str(counted_rows), 48)


# --- digests ----------------------------------------------------------------------------------------------------------


def test_digest_looks_into_every_part_of_the_data(counted_rows):
    before = open_offline(counted_rows).digest
    for file in sorted(counted_rows.rglob("*.memmap")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert digest_of(counted_rows, "*.memmap") != before, file
        file.write_bytes(content)
    (counted_rows / "lit_collect.json").write_text('{"note": "the good one"}')
    (counted_rows / "store").mkdir()
    (counted_rows / "store" / "rows.bin").write_bytes(b"cached")
    assert open_offline(counted_rows).digest == before


def test_digest_reads_a_part_of_large_files_and_of_many(tmp_path):
    size = 50 * 8192
    (tmp_path / "large").write_bytes(bytes(size))
    whole = digest_of(tmp_path, "*")
    for at, told in ((0, True), (size - 1, True), (size // 50 * 49 - 1, False)):
        content = bytearray(size)
        content[at] = 1
        (tmp_path / "large").write_bytes(content)
        assert (digest_of(tmp_path, "*") != whole) == told


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampler": "consuming"}, "uses rows up, and offline data get no new ones"),
        ({"sampler": ConsumingSampler(3)}, "uses rows up, and offline data get no new ones"),
        ({"storage": "mapped"}, "expected both or neither, got storage='mapped' and storage_path=None"),
        ({"storage_path": "rows"}, "expected both or neither, got storage='memory' and storage_path='rows'"),
        ({"storage": "disk"}, "storage is unknown"),
        ({"slice_len": 4, "transforms": [NStep(n=2, gamma=0.5)]}, "NStep works on single rows"),
    ],
)
def test_what_does_not_fit_is_refused_before_data_are_looked_for(settings, words):
    with pytest.raises(ValueError, match=words):
        OfflineDataModule("nowhere", batch_size=8, **settings)
    with pytest.raises(ValueError, match=words):
        OfflineSampling(batch_size=8, **settings)
