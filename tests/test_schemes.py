"""Weights reach the workers whole, once, and only if they are newer; one contract for every scheme."""

import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from lit_collect.errors import CollectTimeoutError
from lit_collect.schemes import NoSync, Pipe, SharedMemory, SharedMemoryReceiver, SharedTicket
from lit_collect.shared import SharedBlock
from lit_collect.weights import named_tensors

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


class Messages:
    """Pickles tickets as a channel does: a block travels as a descriptor of the same memory."""

    def __init__(self) -> None:
        self._blocks = []

    def copy(self, ticket):
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer)
        pickler.dispatch_table = {SharedBlock: lambda block: (SharedBlock, (os.dup(block.descriptor), block.size))}
        pickler.dump(ticket)
        received = pickle.loads(buffer.getvalue())
        if isinstance(received, SharedTicket) and received.halves is not None:
            self._blocks.append(received.halves.block)
        return received

    def close(self) -> None:
        while self._blocks:
            self._blocks.pop().close()


class Worker:
    """What happens to tickets on their way, without a process."""

    messages: Messages

    def __init__(self, scheme, index: int) -> None:
        self._scheme, self._index = scheme, index
        self._receiver = cloudpickle.loads(cloudpickle.dumps(scheme.receiver(index)))

    def receive(self):
        return self._receiver.receive(self.messages.copy(self._scheme.ticket(self._index)))


@pytest.fixture(autouse=True)
def messages(monkeypatch) -> Iterator[Messages]:
    messages = Messages()
    monkeypatch.setattr(Worker, "messages", messages, raising=False)
    yield messages
    messages.close()


@pytest.fixture(params=[NoSync, Pipe, SharedMemory])
def scheme(request):
    scheme = request.param()
    yield scheme
    scheme.close()


@pytest.fixture(params=[Pipe, SharedMemory])
def carrier(request):
    """A scheme that carries tensors."""
    scheme = request.param()
    yield scheme
    scheme.close()


@pytest.fixture
def shared():
    scheme = SharedMemory()
    yield scheme
    scheme.close()


def weights(value: float, size: int = 2) -> dict[str, Tensor]:
    return {"weight": torch.full((size, 3), float(value)), "steps": torch.tensor(int(value))}


def brought(snapshot) -> tuple | None:
    """Version, and the value of each model (all elements must be equal)."""
    if snapshot is None:
        return None
    values = {}
    for model_id, tensors in snapshot.models.items():
        (values[model_id],) = {float(x) for tensor in tensors.values() for x in tensor.flatten()}
    return snapshot.version, values


def expected(scheme, version: int, **values: float) -> tuple:
    return version, {} if isinstance(scheme, NoSync) else values


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_receive_when_nothing_was_published_is_none(scheme):
    worker = Worker(scheme, 0)
    assert worker.receive() is None


def test_receive_is_what_was_published_and_then_none(scheme):
    worker = Worker(scheme, 0)
    for version in (0, 1, 5):
        scheme.publish({"policy": weights(version)}, version, None)
        assert brought(worker.receive()) == expected(scheme, version, policy=version)
        assert worker.receive() is None


def test_receive_after_several_publications_is_the_newest(scheme):
    first, second = Worker(scheme, 0), Worker(scheme, 1)
    scheme.publish({"policy": weights(0)}, 0, None)
    assert brought(first.receive()) == expected(scheme, 0, policy=0)
    for version in (1, 2, 3):
        scheme.publish({"policy": weights(version)}, version, None)
    for worker in (first, second):
        assert brought(worker.receive()) == expected(scheme, 3, policy=3)
        assert worker.receive() is None


def test_receive_when_no_model_was_published_is_the_version(scheme):
    worker = Worker(scheme, 0)
    for version in (0, 1):
        scheme.publish({}, version, None)
        assert brought(worker.receive()) == (version, {})
    scheme.publish({}, 2, [0])
    assert brought(worker.receive()) == (2, {})
    assert worker.receive() is None


def test_receive_when_a_model_has_no_tensor_has_it_nevertheless(carrier):
    worker = Worker(carrier, 0)
    carrier.publish({"policy": {}}, 0, None)
    assert worker.receive().models == {"policy": {}}


def test_publish_to_some_workers_reaches_them_only(scheme):
    workers = [Worker(scheme, index) for index in range(3)]
    scheme.publish({"policy": weights(0)}, 0, None)
    for worker in workers:
        worker.receive()
    scheme.publish({"policy": weights(1)}, 1, [0, 2])
    assert brought(workers[0].receive()) == expected(scheme, 1, policy=1)
    assert workers[1].receive() is None
    assert brought(workers[2].receive()) == expected(scheme, 1, policy=1)
    assert [worker.receive() for worker in workers] == [None, None, None]


def test_publish_to_some_workers_before_all_reaches_them_only(scheme):
    first, second = Worker(scheme, 0), Worker(scheme, 1)
    scheme.publish({"policy": weights(0)}, 0, [1])
    assert first.receive() is None
    assert brought(second.receive()) == expected(scheme, 0, policy=0)


@pytest.mark.parametrize("fetched", [True, False], ids=["after it was fetched", "before it was fetched"])
def test_publish_to_all_supersedes_what_some_were_given(scheme, fetched):
    first, second = Worker(scheme, 0), Worker(scheme, 1)
    scheme.publish({"policy": weights(0)}, 0, None)
    scheme.publish({"policy": weights(1)}, 1, [1])
    if fetched:
        assert brought(second.receive()) == expected(scheme, 1, policy=1)
    scheme.publish({"policy": weights(2)}, 2, None)
    for worker in (first, second):
        assert brought(worker.receive()) == expected(scheme, 2, policy=2)
        assert worker.receive() is None


def test_replaced_worker_gets_the_newest_with_its_first_ticket(scheme):
    Worker(scheme, 0).receive()
    scheme.publish({"policy": weights(1)}, 1, None)
    Worker(scheme, 0).receive()
    scheme.forget(0)
    new = Worker(scheme, 0)
    assert brought(new.receive()) == expected(scheme, 1, policy=1)
    assert new.receive() is None


def test_replaced_worker_gets_what_it_alone_was_given(scheme):
    scheme.publish({"policy": weights(1)}, 1, None)
    scheme.publish({"policy": weights(2)}, 2, [0])
    Worker(scheme, 0).receive()
    scheme.forget(0)
    new = Worker(scheme, 0)
    assert brought(new.receive()) == expected(scheme, 2, policy=2)
    assert new.receive() is None


def test_publish_of_some_models_keeps_the_newest_of_the_others(carrier):
    kept_up, late = Worker(carrier, 0), Worker(carrier, 1)
    carrier.publish({"policy": weights(0), "critic": weights(0)}, 0, None)
    kept_up.receive()
    carrier.publish({"policy": weights(1)}, 1, None)
    carrier.publish({"critic": weights(2)}, 2, None)
    carrier.publish({"policy": weights(3)}, 3, None)
    for worker in (kept_up, late):
        assert brought(worker.receive()) == (3, {"policy": 3, "critic": 2})


def test_publish_of_some_models_to_some_workers_keeps_what_these_have_of_the_others(carrier):
    first, second = Worker(carrier, 0), Worker(carrier, 1)
    carrier.publish({"policy": weights(0), "critic": weights(0)}, 0, None)
    carrier.publish({"policy": weights(1)}, 1, [0])
    carrier.publish({"critic": weights(2)}, 2, [0, 1])
    carrier.publish({"extra": weights(3)}, 3, [1])
    assert brought(first.receive()) == (2, {"policy": 1, "critic": 2})
    assert brought(second.receive()) == (3, {"policy": 0, "critic": 2, "extra": 3})


def test_publish_of_further_models_and_other_shapes_reaches_old_and_new_workers(carrier):
    old, new = Worker(carrier, 0), Worker(carrier, 1)
    carrier.publish({"policy": weights(0)}, 0, None)
    assert brought(old.receive()) == (0, {"policy": 0})
    carrier.publish({"critic": weights(1)}, 1, None)
    assert brought(old.receive()) == (1, {"policy": 0, "critic": 1})
    carrier.publish({"policy": weights(2, size=5)}, 2, None)
    snapshot = old.receive()
    assert brought(snapshot) == brought(new.receive()) == (2, {"policy": 2, "critic": 1})
    assert snapshot.models["policy"]["weight"].shape == (5, 3)


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": torch.ones(2, 3), "steps": torch.ones(1)},
        {"weight": torch.ones(2, 3), "steps": torch.tensor(1.0)},
        {"weight": torch.ones(2, 3)},
        {"weight": torch.ones(2, 3), "count": torch.tensor(1)},
        {"weight": torch.ones(2, 3), "steps": torch.tensor(1), "bias": torch.ones(1)},
    ],
    ids=["shape", "dtype", "one less", "another name", "one more"],
)
def test_publish_of_another_set_of_tensors_brings_exactly_these(carrier, changed):
    worker = Worker(carrier, 0)
    carrier.publish({"policy": weights(0)}, 0, None)
    worker.receive()
    carrier.publish({"policy": changed}, 1, None)
    tensors = worker.receive().models["policy"]
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        name: (t.shape, t.dtype) for name, t in changed.items()
    }
    assert all(torch.equal(tensors[name], tensor) for name, tensor in changed.items())


@pytest.mark.parametrize("workers", [None, [0]], ids=["all", "some"])
def test_publish_copies_so_that_later_training_does_not_show(carrier, workers):
    module, worker = nn.Linear(2, 2), Worker(carrier, 0)
    for version in (0, 1):
        nn.init.constant_(module.weight, version)
        nn.init.constant_(module.bias, version)
        carrier.publish({"policy": named_tensors(module)}, version, workers)
        nn.init.constant_(module.weight, 99.0)
        snapshot = worker.receive()
        assert brought(snapshot) == (version, {"policy": version})
        assert not any(tensor.requires_grad for tensor in snapshot.models["policy"].values())


@pytest.mark.parametrize("workers", [None, [0]], ids=["all", "some"])
def test_tensors_of_every_kind_arrive_bit_by_bit(carrier, workers):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (16 * 6,), dtype=torch.uint8, generator=generator)
    tensors = {str(dtype): raw[: 6 * dtype.itemsize].view(dtype).reshape(2, 3) for dtype in DTYPES}
    tensors["torch.bool"] = torch.tensor([[True, False, True], [False, True, True]])  # other bytes are no bools
    tensors["not a number"] = torch.tensor([float("nan"), float("-inf"), -0.0])
    tensors |= {"of no dimension": torch.tensor(7), "empty": torch.ones(0, 3), "one byte": torch.tensor([True])}
    tensors |= {"transposed": torch.arange(6.0).reshape(2, 3).t(), "expanded": torch.tensor([3.0]).expand(2, 2)}
    tensors |= {"strided": torch.arange(9.0)[::2], "parameter": nn.Parameter(torch.ones(2))}
    tensors["parameter again"] = tensors["parameter"]
    carrier.publish({"policy": tensors}, 0, workers)
    received = Worker(carrier, 0).receive().models["policy"]
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received[name].dtype is tensor.dtype, name
        assert received[name].shape == tensor.shape, name
        given = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(received[name].contiguous().reshape(-1).view(torch.uint8), given), name


def test_receive_in_inference_mode_and_outside_brings_the_same(carrier):
    worker = Worker(carrier, 0)
    for version in (0, 1, 2):
        with torch.inference_mode(version != 1):
            carrier.publish({"policy": weights(version)}, version, None)
        with torch.inference_mode(version != 1):
            assert brought(worker.receive()) == (version, {"policy": version})


def test_scheme_when_closed_may_be_closed_again_and_used_anew(scheme):
    for _ in range(2):
        scheme.publish({"policy": weights(1)}, 1, None)
        assert brought(Worker(scheme, 0).receive()) == expected(scheme, 1, policy=1)
        scheme.close()
        scheme.close()


def test_pipe_sends_a_version_once_to_each_worker_and_copies_it_once():
    scheme = Pipe()
    scheme.publish({"policy": weights(1)}, 1, None)
    first, second = scheme.ticket(0), scheme.ticket(1)
    assert first.models["policy"]["weight"] is second.models["policy"]["weight"]
    assert scheme.ticket(0) is None
    scheme.forget(0)
    assert scheme.ticket(0) is first


def test_shared_memory_needs_a_ticket_only_for_new_memory_and_single_workers(shared, messages):
    receiver = shared.receiver(0)
    shared.publish({"policy": weights(0)}, 0, None)
    receiver.receive(messages.copy(shared.ticket(0)))
    shared.publish({"policy": weights(1)}, 1, None)
    assert shared.ticket(0) is None
    assert brought(receiver.receive(None)) == (1, {"policy": 1})
    shared.publish({"policy": weights(2)}, 2, [0])
    assert shared.ticket(0).halves is None
    assert shared.ticket(0) is None
    shared.publish({"policy": weights(3, size=4)}, 3, None)
    assert shared.ticket(0).halves is not None


def test_shared_memory_when_shapes_change_and_closed_leaves_no_descriptor(messages):
    before = descriptors()
    shared, receiver = SharedMemory(), SharedMemoryReceiver()
    for version in range(20):
        shared.publish({"policy": weights(version, size=1 + version)}, version, None)
        assert brought(receiver.receive(messages.copy(shared.ticket(0)))) == (version, {"policy": version})
    shared.close()
    del receiver
    messages.close()
    assert descriptors() == before


def test_shared_memory_when_shapes_change_while_a_ticket_is_on_its_way_the_ticket_still_arrives(shared, messages):
    receiver = shared.receiver(0)
    shared.publish({"policy": weights(0)}, 0, None)
    ticket = shared.ticket(0)
    shared.publish({"policy": weights(1, size=4)}, 1, None)
    assert brought(receiver.receive(messages.copy(ticket))) == (0, {"policy": 0})
    assert brought(receiver.receive(messages.copy(shared.ticket(0)))) == (1, {"policy": 1})


def test_shared_memory_when_a_publication_fails_keeps_the_last_one(shared):
    worker = Worker(shared, 0)
    shared.publish({"policy": weights(0)}, 0, None)
    broken = {**weights(1), "steps": torch.zeros((), dtype=torch.int64, device="meta")}
    with pytest.raises(NotImplementedError):
        shared.publish({"policy": broken}, 1, None)
    assert brought(worker.receive()) == (0, {"policy": 0})
    assert worker.receive() is None
    for version in (2, 3):
        shared.publish({"policy": weights(version)}, version, None)
        assert brought(worker.receive()) == (version, {"policy": version})


class Interrupted:
    """Bytes to copy into; something happens before the copy is checked."""

    def __init__(self, happens) -> None:
        self._happens = happens

    def copy_(self, source: Tensor) -> None:
        self._happens()


@pytest.mark.parametrize(("publications", "copied"), [(1, 0), (2, None), (3, None), (4, None)])
def test_halves_when_written_during_a_copy_tell_whether_it_is_whole(shared, publications, copied):
    def publish() -> None:
        for version in range(1, 1 + publications):
            shared.publish({"policy": weights(version)}, version, None)

    shared.publish({"policy": weights(0)}, 0, None)
    halves = shared.ticket(0).halves
    assert halves.copy_newest(-1, Interrupted(publish)) == copied
    assert halves.copy_newest(publications, Interrupted(lambda: None)) == publications


def spoil(shared: SharedMemory, index: int) -> None:
    """Leave both halves as if they were being written."""
    block = shared.ticket(index).halves.block
    for offset in (8, 24):
        block.integers(offset, 1)[0] |= 1


def test_shared_memory_receiver_when_no_copy_is_whole_gives_up_after_its_time(shared, messages):
    times = iter(range(100))
    receiver = SharedMemoryReceiver(clock=lambda: float(next(times)))
    shared.publish({"policy": weights(0)}, 0, None)
    ticket = messages.copy(shared.ticket(0))
    spoil(shared, 1)
    with pytest.raises(CollectTimeoutError, match="expected one within 10 s"):
        receiver.receive(ticket)
    assert next(times) == 12  # it looked again for 10 s


def test_shared_memory_receiver_when_a_copy_is_spoilt_takes_the_next(shared, messages):
    def clock() -> float:  # asked once the copy was spoilt
        shared.publish({"policy": weights(1)}, 1, None)
        return 0.0

    receiver = SharedMemoryReceiver(clock=clock)
    shared.publish({"policy": weights(0)}, 0, None)
    ticket = messages.copy(shared.ticket(0))
    spoil(shared, 1)
    assert brought(receiver.receive(ticket)) == (1, {"policy": 1})


READER = """
import pickle, sys
from lit_collect.schemes import SharedMemoryReceiver

receiver, ticket, version, read = SharedMemoryReceiver(), pickle.load(sys.stdin.buffer), -1, 0
while read < int(sys.argv[1]):
    snapshot = receiver.receive(ticket)
    ticket = None
    if snapshot is None:
        continue
    read += 1
    wrong = [name for name, tensor in snapshot.models["policy"].items() if not bool((tensor == snapshot.version).all())]
    if wrong or snapshot.version <= version:
        sys.exit(f"after {read} snapshots: version {snapshot.version} after {version}, torn {wrong}")
    version = snapshot.version
"""


@pytest.mark.slow
@pytest.mark.processes
def test_shared_memory_in_another_process_is_never_read_torn(shared):
    value, steps = (
        torch.zeros(()),
        torch.zeros((), dtype=torch.int64),
    )  # expanded: publishing is hardly more than writing
    tensors = {f"layer {k}": value.expand(256, 256) for k in range(4)} | {"steps": steps.expand(64)}
    shared.publish({"policy": tensors}, 0, None)
    ticket, buffer = shared.ticket(0), io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {SharedBlock: lambda block: (SharedBlock, (block.descriptor, block.size))}  # inherited
    pickler.dump(ticket)
    child = subprocess.Popen(
        [sys.executable, "-c", READER, "2500"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[ticket.halves.block.descriptor],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    version, deadline = 0, time.monotonic() + 120.0
    with child:
        try:
            child.stdin.write(buffer.getvalue())
            child.stdin.close()
            while child.poll() is None and time.monotonic() < deadline:
                for _ in range(100):
                    version += 1
                    value.fill_(version)
                    steps.fill_(version)
                    shared.publish({"policy": tensors}, version, None)
        finally:
            child.kill()
        assert child.wait() == 0, child.stderr.read().decode()
    assert version >= 2500
