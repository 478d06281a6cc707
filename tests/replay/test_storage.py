"""What every storage does: rows lie in turn, are committed whole, taken back, loaded, and refused in plain words."""

import copy
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.errors import CollectTimeoutError, FrameContractError
from lit_collect.replay import storage as storage_module
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.mapped import MappedStorage, SharedStorage
from lit_collect.replay.names import resolve_storage
from lit_collect.replay.storage import MemoryStorage, Storage

MAKERS = {"memory": MemoryStorage, "shared": SharedStorage, "mapped": lambda: MappedStorage("rows")}
KINDS = {**MAKERS, "mapped in pieces": lambda: MappedStorage("rows", 0)}


def rows(first: int, stop: int) -> TensorDict:
    """Rows whose number and flag say which they are."""
    number = torch.arange(first, stop)
    return TensorDict({"number": number, "flag": (number % 3 == 0)[:, None]}, batch_size=[stop - first])


LAYOUT = RowLayout.of(rows(0, 1))


def numbers(storage: Storage) -> list[int]:
    """Of the rows that are there, by position; -1 where one is void."""
    found = LAYOUT.unpack(storage.take(np.arange(storage.size)))
    assert found["flag"][:, 0].equal(found["number"] % 3 == 0)
    lost = np.zeros(storage.size, bool) if storage.is_void is None else storage.is_void[: storage.size]
    return np.where(lost, -1, found["number"].numpy()).tolist()


def write(storage: Storage, first: int, stop: int) -> list[int]:
    with storage.use():
        return storage.write(LAYOUT.pack(rows(first, stop))).tolist()


@pytest.fixture(params=KINDS)
def empty(request):
    """An open storage of 7 rows that has none yet."""
    storage = KINDS[request.param]()
    storage.open(7)
    yield storage
    storage.close()


@pytest.fixture
def storage(empty):
    """The same, which knows its rows."""
    empty.begin(LAYOUT)
    return empty


def test_storage_before_the_first_write_is_empty(empty):
    with empty.use():
        assert (empty.capacity, empty.size, empty.write_count, empty.epoch) == (7, 0, 0, 0)
        assert empty.layout is None
        assert empty.records is None
        assert empty.is_void is None


def test_write_puts_rows_in_turn_and_over_the_end(storage):
    assert write(storage, 0, 3) == [0, 1, 2]
    assert write(storage, 3, 8) == [3, 4, 5, 6, 0]
    assert write(storage, 8, 9) == [1]
    assert numbers(storage) == [7, 8, 2, 3, 4, 5, 6]
    assert (storage.size, storage.write_count) == (7, 9)


def test_write_of_as_many_rows_as_there_are_places_replaces_all(storage):
    write(storage, 0, 2)
    assert write(storage, 2, 9) == [2, 3, 4, 5, 6, 0, 1]
    assert numbers(storage) == [7, 8, 2, 3, 4, 5, 6]


def test_write_of_no_rows_changes_nothing(storage):
    write(storage, 0, 2)
    assert write(storage, 2, 2) == []
    assert numbers(storage) == [0, 1]


def test_write_of_too_many_rows_is_refused_and_loses_nothing(storage):
    write(storage, 0, 2)
    with pytest.raises(ValueError, match="too many rows at once : expected at most the capacity, 7, got 8"):
        write(storage, 2, 10)
    assert numbers(storage) == [0, 1]


def test_records_are_the_live_rows(storage):
    write(storage, 0, 7)
    assert storage.records[LAYOUT.field(("number",))].tolist() == [0, 1, 2, 3, 4, 5, 6]
    write(storage, 7, 8)
    assert storage.records[LAYOUT.field(("number",))][0] == 7


def test_take_copies_rows_into_any_shape(storage):
    write(storage, 0, 7)
    taken = storage.take(np.array([[6, 0], [3, 3]]))
    write(storage, 7, 14)
    assert LAYOUT.unpack(taken)["number"].tolist() == [[6, 0], [3, 3]]


@pytest.mark.parametrize("positions", [[-1, 1], [-7], [], [5, 6, 0, 1, 2, 2]], ids=str)
def test_take_of_neighbours_and_from_the_end_gives_what_is_there(storage, positions):
    write(storage, 0, 7)
    found = LAYOUT.unpack(storage.take(np.array(positions, np.int64)))["number"]
    assert found.tolist() == [position % 7 for position in positions]


@pytest.mark.parametrize("position", [7, -8])
def test_take_of_what_is_outside_is_refused(storage, position):
    write(storage, 0, 7)
    with pytest.raises(IndexError):
        storage.take(np.array([0, position]))


def test_begin_with_an_equal_layout_changes_nothing(storage):
    write(storage, 0, 2)
    storage.begin(RowLayout.of(rows(0, 1)))
    assert numbers(storage) == [0, 1]


def test_begin_with_other_rows_names_what_differs(storage):
    write(storage, 0, 2)
    other = rows(0, 1).set("more", torch.zeros(1))
    with pytest.raises(FrameContractError, match=r"do not fit those that are stored : \('more',\) is new"):
        storage.begin(RowLayout.of(other))
    assert numbers(storage) == [0, 1]


@pytest.mark.parametrize("capacity", [0, -3])
@pytest.mark.parametrize("kind", MAKERS)
def test_open_with_no_room_is_refused(kind, capacity):
    with pytest.raises(ValueError, match=f"capacity is too small : expected at least 1, got {capacity}"):
        MAKERS[kind]().open(capacity)


def test_open_again_with_the_same_capacity_changes_nothing_and_with_another_is_refused(storage):
    write(storage, 0, 2)
    storage.open(7)
    assert numbers(storage) == [0, 1]
    with pytest.raises(ValueError, match="another capacity : expected 7, got 8"):
        storage.open(8)


def test_void_after_before_anything_was_replaced_forgets_the_last_rows(storage):
    write(storage, 0, 6)
    storage.void_after(4)
    assert numbers(storage) == [0, 1, 2, 3]
    assert (storage.write_count, storage.epoch) == (4, 1)
    assert storage.is_void is None
    assert write(storage, 40, 42) == [4, 5]
    assert numbers(storage) == [0, 1, 2, 3, 40, 41]


def test_void_after_loses_the_rows_that_were_replaced_until_they_are_written_again(storage):
    write(storage, 0, 7)
    write(storage, 7, 10)
    storage.void_after(8)
    assert numbers(storage) == [7, -1, -1, 3, 4, 5, 6]
    assert write(storage, 80, 81) == [1]
    assert numbers(storage) == [7, 80, -1, 3, 4, 5, 6]
    write(storage, 90, 91)
    assert numbers(storage) == [7, 80, 90, 3, 4, 5, 6]
    assert storage.is_void is None


@pytest.mark.parametrize(("before", "left"), [(5, [-1, -1, -1, 3, 4]), (0, [])])
def test_void_after_of_fewer_rows_than_there_are_places_knows_only_what_is_left(storage, before, left):
    write(storage, 0, 5)
    write(storage, 5, 10)
    storage.void_after(before)
    assert numbers(storage) == left


def test_void_after_a_whole_round_leaves_nothing(storage):
    for first in range(0, 21, 7):
        write(storage, first, first + 7)
    storage.void_after(9)
    assert numbers(storage) == [-1] * 7


@pytest.mark.parametrize("write_count", [-1, 4])
def test_void_after_what_was_never_written_is_refused(storage, write_count):
    write(storage, 0, 3)
    with pytest.raises(ValueError, match=f"expected 0 to 3 rows written, got {write_count}"):
        storage.void_after(write_count)
    assert numbers(storage) == [0, 1, 2]


@pytest.mark.parametrize("kind", MAKERS)
def test_load_replaces_everything_by_what_another_storage_held(storage, kind):
    write(storage, 0, 7)
    write(storage, 7, 10)
    storage.void_after(9)
    other = MAKERS[kind]() if kind != "mapped" else MappedStorage("elsewhere")
    other.open(7)
    other.begin(LAYOUT)
    write(other, 50, 57)
    other.load(storage.take(np.arange(storage.size)), storage.write_count, storage.is_void)
    assert numbers(other) == numbers(storage) == [7, 8, -1, 3, 4, 5, 6]
    assert (other.write_count, other.epoch) == (9, 1)
    assert write(other, 9, 11) == [2, 3]
    other.close()


def test_load_of_a_few_rows_into_a_full_storage_leaves_those_alone(storage):
    write(storage, 0, 7)
    storage.load(LAYOUT.pack(rows(30, 32)), 2)
    assert numbers(storage) == [30, 31]


def test_load_of_another_number_of_rows_is_refused(storage):
    write(storage, 0, 3)
    with pytest.raises(ValueError, match="a buffer of 7 after 9 were written : expected 7 rows, got 5"):
        storage.load(LAYOUT.pack(rows(0, 5)), 9)
    assert numbers(storage) == [0, 1, 2]


def test_use_within_itself_is_entered_at_once(storage):
    with storage.use(), storage.use():
        write(storage, 0, 1)
    assert numbers(storage) == [0]


def test_use_after_an_exception_is_free(storage):
    with pytest.raises(ZeroDivisionError), storage.use():
        1 / 0  # noqa: B018
    entered = []
    thread = threading.Thread(target=lambda: entered.append(write(storage, 0, 1)))
    thread.start()
    thread.join(10)
    assert entered == [[0]]


def test_use_while_another_thread_keeps_it_waits_for_the_deadline(storage, monkeypatch):
    monkeypatch.setattr(storage_module, "DEADLINE_S", 0.05)
    held, enough = threading.Event(), threading.Event()

    def keep():
        with storage.use():
            held.set()
            enough.wait(10)

    thread = threading.Thread(target=keep)
    thread.start()
    held.wait(10)
    with (
        pytest.raises(CollectTimeoutError, match=r"another thread has kept the replay buffer for 0\.05 s"),
        storage.use(),
    ):
        pass
    enough.set()
    thread.join(10)
    assert write(storage, 0, 1) == [0]


@pytest.mark.slow
def test_threads_that_write_and_read_at_once_see_whole_rows_only(storage):
    """Each write is five rows of one value; a torn one would show two."""
    seen, stop = [], time.monotonic() + 1.0

    def writer(number: int) -> None:
        while time.monotonic() < stop:
            with storage.use():
                storage.write(LAYOUT.pack(rows(number, number + 5)))

    def reader() -> None:
        while time.monotonic() < stop:
            with storage.use():
                seen.append(set(numbers(storage)))

    threads = [threading.Thread(target=writer, args=(100 * k,)) for k in range(3)] + [threading.Thread(target=reader)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert storage.write_count % 5 == 0
    assert len(seen) > 10
    assert set().union(*seen) <= {100 * k + offset for k in range(3) for offset in range(5)}


def test_close_may_be_called_again_and_before_open(empty):
    empty.close()
    empty.close()
    MemoryStorage().close()
    SharedStorage().close()
    MappedStorage("rows").close()


def test_flush_returns_before_and_after_rows_are_written(empty):
    empty.flush()
    empty.begin(LAYOUT)
    write(empty, 0, 3)
    empty.flush()
    assert numbers(empty) == [0, 1, 2]


def test_write_to_given_positions_replaces_those_in_memory():
    storage = MemoryStorage()
    storage.open(5)
    storage.begin(LAYOUT)
    write(storage, 0, 5)
    assert storage.write(LAYOUT.pack(rows(8, 10)), np.array([3, 1])).tolist() == [3, 1]
    assert numbers(storage) == [0, 9, 2, 8, 4]
    assert storage.write_count == 7


@pytest.mark.parametrize("kind", ["shared", "mapped"])
def test_write_to_given_positions_is_refused_where_others_follow_the_turns(kind):
    storage = MAKERS[kind]()
    storage.open(5)
    storage.begin(LAYOUT)
    with pytest.raises(ValueError, match="have their places"):
        storage.write(LAYOUT.pack(rows(8, 10)), np.array([3, 1]))
    assert storage.size == 0
    storage.close()


@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_memory_when_sent_to_another_process_says_what_to_use(send):
    with pytest.raises(TypeError, match="expected storage='shared' or 'mapped', got 'memory'"):
        send(MemoryStorage())


def test_memory_when_there_is_none_says_how_much_is_missing():
    storage = MemoryStorage()
    storage.open(1 << 58)
    with pytest.raises(
        MemoryError, match=r"no memory for a replay buffer of 288230376151711744 rows : expected \d+ bytes"
    ):
        storage.begin(LAYOUT)
    assert storage.layout is None


def test_resolve_storage_knows_names_and_storages():
    own = MemoryStorage()
    assert type(resolve_storage("memory")) is MemoryStorage
    assert type(resolve_storage("shared")) is SharedStorage
    assert type(resolve_storage("mapped", "rows")) is MappedStorage
    assert resolve_storage(own) is own


@pytest.mark.parametrize(
    ("storage", "path", "error", "words"),
    [
        ("mapped", None, ValueError, "lacks its path : expected a folder, got None"),
        (
            "memory",
            "rows",
            ValueError,
            "path is not used : expected storage='mapped', got storage='memory' and path='rows'",
        ),
        ("disk", None, ValueError, "storage is unknown : expected 'memory', 'shared' or 'mapped', got 'disk'"),
        (7, None, TypeError, "expected a name or a Storage, got int"),
    ],
)
def test_resolve_storage_of_anything_else_is_refused(storage, path, error, words):
    with pytest.raises(error, match=words):
        resolve_storage(storage, path)
