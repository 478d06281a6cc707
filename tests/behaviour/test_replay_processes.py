"""Several processes write into one replay buffer and read from it: no row is torn, and a death costs its own rows."""

import base64
import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.errors import CollectTimeoutError
from lit_collect.replay import storage as storage_module
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.mapped import MappedStorage, SharedStorage

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),  # of torch, idle ones
]

CAPACITY, ROWS, WIDTH = 1000, 8, 300  # eight rows a write, of 300 numbers each
SECONDS = {"shared": 20.0, "mapped": 2.0, "mapped in pieces": 2.0}
FORK = multiprocessing.get_context("fork")


def rows(first: int, count: int = ROWS) -> TensorDict:
    """Rows that prove themselves: what follows is one more, in every place."""
    number = torch.arange(first, first + count, dtype=torch.float64)
    seen = number[:, None].expand(count, WIDTH)
    return TensorDict({"observation": seen, "next": {"observation": seen + 1}, "number": number}, batch_size=[count])


LAYOUT = RowLayout.of(rows(0))


def proven(storage, positions: np.ndarray) -> np.ndarray:
    """The numbers of whole rows; fails for any other."""
    found = LAYOUT.unpack(storage.take(positions))
    number = found["number"][:, None]
    assert (found["observation"] == number).all()
    assert (found["next", "observation"] == number + 1).all()
    return found["number"].numpy()


def all_proven(storage) -> list[int]:
    with storage.use():
        there = np.arange(storage.size)
        lost = storage.is_void
        return proven(storage, there if lost is None else there[~lost[there]]).tolist()


@pytest.fixture(params=["shared", "mapped", "mapped in pieces"])
def storage(request):
    storage = SharedStorage() if request.param == "shared" else MappedStorage("rows", 1 << 30)
    if request.param == "mapped in pieces":
        storage = MappedStorage("rows", 0)
    storage.open(CAPACITY)
    yield storage
    storage.close()


@pytest.fixture
def start():
    """Starts a function in a forked process, with one end of a pipe; what still runs afterwards is killed."""
    started = []

    def start_one(target, *args):
        here, there = FORK.Pipe()
        started.append(FORK.Process(target=target, args=(*args, there)))
        started[-1].start()
        there.close()
        return started[-1], here

    yield start_one
    for process in started:
        process.kill()
        process.join(10)


def keep_writing(sent: bytes, first: int, seconds: float, channel) -> None:
    storage = pickle.loads(sent)
    storage.begin(LAYOUT)
    writes, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        storage.write(LAYOUT.pack(rows(first + writes * ROWS)))
        writes += 1
        if seconds > 60:
            channel.send(writes)
    channel.send(writes)


def keep_reading(sent: bytes, seconds: float, channel) -> None:
    storage = pickle.loads(sent)
    rng = np.random.default_rng(0)
    reads, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        assert storage.write_count % ROWS == 0  # also where nobody keeps the writers out
        with storage.use():
            if storage.size:
                proven(storage, rng.integers(0, storage.size, 64))
                reads += 1
    channel.send(reads)


@pytest.mark.timeout(120)
def test_three_writers_and_two_readers_at_once_see_whole_rows_and_all_get_their_turn(storage, start, request):
    seconds = SECONDS[request.node.callspec.params["storage"]]
    sent = pickle.dumps(storage)
    writers = [start(keep_writing, sent, k * 10**9, seconds) for k in range(3)]
    readers = [start(keep_reading, sent, seconds) for _ in range(2)]
    writes, reads = [
        [channel.recv() for _, channel in kind if channel.poll(seconds + 20)] for kind in (writers, readers)
    ]
    assert len(writes) == 3
    assert len(reads) == 2
    with storage.use():
        assert storage.write_count == ROWS * sum(writes)
        assert storage.is_void is None
    assert {int(number // 10**9) for number in all_proven(storage)} <= {0, 1, 2}
    assert min(writes + reads) > 20 * seconds


class Dying(SharedStorage):
    """The process is killed in the middle of a write."""

    def _copy(self, rows, write_count):
        super()._copy(rows[: len(rows) // 2], write_count)
        torn = self._opaque.view(np.uint8).reshape(self.capacity, -1)
        torn[(write_count + len(rows) // 2) % self.capacity, : WIDTH * 4] = 255
        os.kill(os.getpid(), signal.SIGKILL)


def die_writing(storage, channel) -> None:
    storage.__class__ = Dying
    storage.write(LAYOUT.pack(rows(10**6)))


def test_writer_that_is_killed_in_the_middle_of_a_write_costs_the_rows_of_that_write_alone(start):
    storage = SharedStorage()
    storage.open(20)
    storage.begin(LAYOUT)
    storage.write(LAYOUT.pack(rows(0, 20)))
    process, _ = start(die_writing, storage)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert all_proven(storage) == list(range(8, 20))
    assert np.flatnonzero(storage.is_void).tolist() == list(range(8))
    assert storage.write_count == 28
    storage.write(LAYOUT.pack(rows(28, 20)))
    assert sorted(all_proven(storage)) == list(range(28, 48))
    assert storage.is_void is None
    storage.close()


@pytest.mark.timeout(120)
def test_writers_that_are_killed_at_any_moment_leave_whole_rows(storage, start):
    """What a writer said it had committed is there, whenever it was killed."""
    rng = np.random.default_rng(1)
    for number in range(8):
        with storage.use():
            before = storage.write_count
        process, channel = start(keep_writing, pickle.dumps(storage), number * 10**6, 1000.0)
        assert channel.poll(30)
        time.sleep(rng.uniform(0, 0.03))  # the moment
        process.kill()
        process.join(10)
        said = 0
        while channel.poll():
            try:
                said = channel.recv()
            except EOFError:
                break
        found = all_proven(storage)
        with storage.use():
            assert before + ROWS * said <= storage.write_count <= before + ROWS * (said + 2)
            assert storage.write_count % ROWS == 0
        kept = range(max(said * ROWS - CAPACITY + 2 * ROWS, 0), said * ROWS)
        assert {number * 10**6 + k for k in kept} <= set(found)


def test_mapped_rows_of_a_process_that_was_killed_are_there_when_the_folder_is_opened_again(start):
    storage = MappedStorage("rows")
    process, channel = start(open_and_write, storage)
    assert channel.recv() == 3
    process.kill()
    process.join(10)
    storage.open(CAPACITY)
    assert storage.layout == LAYOUT
    assert storage.write_count == 3 * ROWS
    assert all_proven(storage) == list(range(3 * ROWS))
    storage.close()


def open_and_write(storage, channel) -> None:
    storage.open(CAPACITY)
    storage.begin(LAYOUT)
    for number in range(3):
        storage.write(LAYOUT.pack(rows(number * ROWS)))
    channel.send(3)
    time.sleep(100)


def try_to_enter(storage, channel) -> None:
    storage_module.DEADLINE_S = 0.1
    try:
        with storage.use():
            channel.send("entered")
    except CollectTimeoutError as error:
        channel.send(str(error))


def test_use_in_a_forked_process_waits_for_the_one_it_came_from(storage, start):
    with storage.use():
        _, channel = start(try_to_enter, storage)
        assert channel.poll(30)
        assert f"process {os.getpid()} has kept" in channel.recv()
    _, channel = start(try_to_enter, storage)
    assert channel.poll(30)
    assert channel.recv() == "entered"


def be_idle(channel) -> None:
    channel.send("ready")
    channel.recv()


def test_use_after_the_death_of_a_process_that_has_a_forked_child_is_free(start):
    """The child inherited the files of the dead one, but must not keep its lock."""
    storage = SharedStorage()
    storage.open(CAPACITY)
    sent = pickle.dumps(storage)
    process, channel = start(fork_and_die, sent)
    assert channel.poll(30)
    assert channel.recv() == "ready"
    process.join()  # with a deadline it would wait for the child as well
    with storage.use():
        pass
    channel.send("enough")
    storage.close()


def fork_and_die(sent: bytes, channel) -> None:
    storage = pickle.loads(sent)
    with storage.use():
        if os.fork() == 0:
            try:
                be_idle(channel)
            finally:
                os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_shared_memory_outlives_the_process_that_made_it_as_long_as_another_has_it(start_script):
    script = start_script("""
import base64, pickle, time, torch
from tensordict import TensorDict
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.mapped import SharedStorage

rows = TensorDict({"x": torch.arange(5)}, batch_size=[5])
storage = SharedStorage()
storage.open(10)
storage.begin(RowLayout.of(rows))
storage.write(storage.layout.pack(rows))
print(base64.b64encode(pickle.dumps(storage)).decode(), flush=True)
time.sleep(600)
""")
    storage = pickle.loads(base64.b64decode(script.stdout.readline()))
    script.kill()
    script.wait(10)
    with storage.use():
        found = storage.layout.unpack(storage.take(np.arange(storage.size)))
    assert found["x"].tolist() == [0, 1, 2, 3, 4]
    storage.close()
