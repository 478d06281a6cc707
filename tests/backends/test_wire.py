"""Messages between two ends: whole, in order, in time, and with nothing lost or left behind when one end fails."""

import importlib.util
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lit_collect.backends._wire import MAX_DESCRIPTORS, Wire, dumps, loads
from lit_collect.shared import SharedBlock

LARGE = 1 << 22  # bytes: no socket's buffer holds that
NOW = 0.05  # seconds, for what does not come


@dataclass(frozen=True)
class Ticket:
    step: int
    worker: int


def explode() -> None:
    raise ArithmeticError("made while unpickling")


class Explosive:
    """Can be pickled, and raises when it is made again."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple:
        return Explosive._rebuild, (self.parts,)

    @staticmethod
    def _rebuild(parts: tuple) -> None:
        explode()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


@pytest.fixture
def ends(no_descriptor_leaks: None) -> Iterator[tuple[Wire, Wire]]:
    ours, theirs = Wire.pair()
    other = Wire(theirs)
    yield ours, other
    ours.close()
    other.close()


@pytest.fixture
def raw(no_descriptor_leaks: None) -> Iterator[tuple[Wire, socket.socket]]:
    """A wire, and its other end as a socket to send pieces of messages through."""
    ours, theirs = Wire.pair()
    with theirs:
        yield ours, theirs
    ours.close()


@pytest.fixture
def block(no_descriptor_leaks: None) -> Iterator[SharedBlock]:
    made = SharedBlock.create(64)
    yield made
    made.close()


@contextmanager
def process_with(sock: socket.socket) -> Iterator[subprocess.Popen]:
    """A process that holds a socket and does nothing with it."""
    command = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    with sock, subprocess.Popen(command, pass_fds=[sock.fileno()]) as process:
        sock.close()
        yield process
        process.kill()


def frame_of(message: object) -> bytes:
    """The bytes of a message."""
    ours, theirs = Wire.pair()
    with theirs:
        ours.send(message, timeout_s=1)
        ours.close()
        return theirs.recv(1 << 16)


@pytest.mark.parametrize("message", [None, 7, "text", b"", {"a": [1, (2.5, None)]}, Ticket(3, 1)], ids=repr)
def test_message_sent_arrives_equal(ends: tuple[Wire, Wire], message: object) -> None:
    ends[0].send(message, timeout_s=1)
    assert ends[1].receive(timeout_s=1) == message


def test_messages_arrive_one_by_one_and_the_descriptor_tells_when(ends: tuple[Wire, Wire]) -> None:
    poll = select.poll()
    poll.register(ends[1], select.POLLIN)
    assert poll.poll(0) == []
    for number in range(3):
        ends[0].send(number, timeout_s=1)
    for number in range(3):
        assert poll.poll(0) != []
        assert ends[1].receive(timeout_s=0) == number
    assert poll.poll(0) == []


def test_both_directions_do_not_mix(ends: tuple[Wire, Wire]) -> None:
    ends[0].send("request", timeout_s=1)
    ends[1].send("reply", timeout_s=1)
    assert (ends[0].receive(timeout_s=1), ends[1].receive(timeout_s=1)) == ("reply", "request")


def test_message_larger_than_the_sockets_buffer_arrives_whole(ends: tuple[Wire, Wire]) -> None:
    numbers = torch.arange(LARGE // 8)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(ends[0].send, numbers, 30)
        assert torch.equal(ends[1].receive(timeout_s=30), numbers)
        sending.result()


def test_lambda_arrives_as_it_acts(ends: tuple[Wire, Wire]) -> None:
    factor = 3
    ends[0].send(lambda x: factor * x, timeout_s=1)
    assert ends[1].receive(timeout_s=1)(14) == 42


def test_receive_without_a_message_times_out(ends: tuple[Wire, Wire]) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="did not answer"):
        ends[0].receive(timeout_s=NOW)
    assert NOW <= time.monotonic() - begin < 20 * NOW


def test_receive_with_no_deadline_at_all_waits(ends: tuple[Wire, Wire]) -> None:
    timer = threading.Timer(NOW, ends[1].send, ("late", 1))
    timer.start()
    assert ends[0].receive(timeout_s=math.inf) == "late"
    timer.join()


@pytest.mark.parametrize("cut", [1, 11, 12, 13, -1], ids=lambda cut: f"after byte {cut}")
def test_message_that_comes_in_two_parts_survives_a_time_out(raw: tuple[Wire, socket.socket], cut: int) -> None:
    wire, sock = raw
    frame = frame_of({"step": 9})
    sock.send(frame[:cut])
    with pytest.raises(TimeoutError):
        wire.receive(timeout_s=0)
    with pytest.raises(TimeoutError):
        wire.receive(timeout_s=NOW)
    sock.send(frame[cut:] + frame_of("the next"))
    assert wire.receive(timeout_s=1) == {"step": 9}
    assert wire.receive(timeout_s=1) == "the next"


def test_message_that_comes_byte_by_byte_arrives(raw: tuple[Wire, socket.socket]) -> None:
    wire, sock = raw
    for byte in (frame := frame_of(Ticket(5, 6)))[:-1]:
        sock.send(bytes([byte]))
        with pytest.raises(TimeoutError):
            wire.receive(timeout_s=0)
    sock.send(frame[-1:])
    assert wire.receive(timeout_s=0) == Ticket(5, 6)


@pytest.mark.parametrize("sent", [0, 5, 20], ids=lambda sent: f"after {sent} bytes")
def test_receive_when_the_other_side_has_closed_ends(raw: tuple[Wire, socket.socket], sent: int) -> None:
    wire, sock = raw
    sock.send(frame_of("a message of some length")[:sent])
    sock.close()
    for _ in range(2):
        with pytest.raises(EOFError, match="closed its end"):
            wire.receive(timeout_s=1)


def test_messages_sent_before_closing_are_still_received(ends: tuple[Wire, Wire]) -> None:
    ends[0].send("never read", timeout_s=1)  # makes the system report a reset instead of an end
    ends[1].send("last words", timeout_s=1)
    ends[1].close()
    with pytest.raises(EOFError):
        ends[0].send("more", timeout_s=1)
    assert ends[0].receive(timeout_s=1) == "last words"
    with pytest.raises(EOFError):
        ends[0].receive(timeout_s=1)


def test_send_when_the_other_side_has_closed_ends(ends: tuple[Wire, Wire]) -> None:
    ends[1].close()
    for _ in range(2):
        with pytest.raises(EOFError):
            ends[0].send(1, timeout_s=1)


@pytest.mark.parametrize("action", ["send", "receive"])
def test_closed_wire_says_so(ends: tuple[Wire, Wire], action: str) -> None:
    ends[0].close()
    ends[0].close()
    assert ends[0].fileno() == -1
    with pytest.raises(EOFError, match="closed"):
        ends[0].send(1, timeout_s=1) if action == "send" else ends[0].receive(timeout_s=1)


@pytest.mark.processes
def test_send_to_a_stopped_process_times_out_and_breaks_the_wire() -> None:
    wire, theirs = Wire.pair()
    with process_with(theirs) as process:
        process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            wire.send(bytes(LARGE), timeout_s=NOW)
        assert time.monotonic() - begin < 20 * NOW
        with pytest.raises(EOFError, match="broken in the middle"):
            wire.send("would be read as a part of the other one", timeout_s=NOW)
    wire.close()


def test_send_that_was_never_begun_does_not_break_the_wire(ends: tuple[Wire, Wire]) -> None:
    sent = 0
    with suppress(TimeoutError):
        while True:
            ends[0].send(sent, timeout_s=0)
            sent += 1
    assert [ends[1].receive(timeout_s=0) for _ in range(sent)] == list(range(sent))
    ends[0].send("on we go", timeout_s=1)
    assert ends[1].receive(timeout_s=1) == "on we go"


@pytest.mark.processes
def test_killed_process_is_noticed_at_once() -> None:
    wire, theirs = Wire.pair()
    with process_with(theirs) as process, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wire.receive, 60)
        process.kill()
        assert isinstance(waiting.exception(timeout=10), EOFError)
    wire.close()


def test_block_arrives_as_the_same_memory(ends: tuple[Wire, Wire], block: SharedBlock) -> None:
    ends[0].send({"block": block, "again": [block], "size": 64}, timeout_s=1)
    message = ends[1].receive(timeout_s=1)
    arrived = message["block"]
    assert message["again"] == [arrived]
    assert (arrived.size, arrived.descriptor != block.descriptor) == (64, True)
    assert not os.get_inheritable(arrived.descriptor)
    block.tensor(8, (3,), torch.int32).copy_(torch.tensor([5, 6, 7]))
    assert arrived.tensor(8, (3,), torch.int32).tolist() == [5, 6, 7]
    arrived.close()


def test_several_blocks_arrive_in_their_places(ends: tuple[Wire, Wire]) -> None:
    with ExitStack() as stack:
        blocks = []
        for number in range(MAX_DESCRIPTORS):
            blocks.append(SharedBlock.create(8 * (number + 1)))
            stack.callback(blocks[-1].close)
            blocks[-1].integers(0, 1)[0] = 100 + number
        ends[0].send(blocks[::-1], timeout_s=1)
        ends[0].send(blocks[0], timeout_s=1)
        arrived = ends[1].receive(timeout_s=1)
        arrived.append(ends[1].receive(timeout_s=1))
        for one in arrived:
            stack.callback(one.close)
        assert [one.integers(0, 1)[0] for one in arrived] == [*range(99 + MAX_DESCRIPTORS, 99, -1), 100]
        assert [one.size for one in arrived] == [*range(8 * MAX_DESCRIPTORS, 0, -8), 8]


def test_socket_arrives_as_the_same_connection(ends: tuple[Wire, Wire], raw: tuple[Wire, socket.socket]) -> None:
    wire, sock = raw
    ends[0].send(("here", sock), timeout_s=1)
    word, arrived = ends[1].receive(timeout_s=1)
    with arrived:
        assert (word, arrived.family, arrived.get_inheritable()) == ("here", socket.AF_UNIX, False)
        arrived.send(frame_of("through the copy"))
    assert wire.receive(timeout_s=1) == "through the copy"


def test_too_many_blocks_are_refused_before_anything_is_sent(ends: tuple[Wire, Wire]) -> None:
    blocks = [SharedBlock.create(8) for _ in range(MAX_DESCRIPTORS + 1)]
    with pytest.raises(ValueError, match="at most 32 blocks and sockets, got 33"):
        ends[0].send(blocks, timeout_s=1)
    for one in blocks:
        one.close()
    ends[0].send("fine", timeout_s=1)
    assert ends[1].receive(timeout_s=1) == "fine"


def test_message_that_cannot_be_pickled_is_refused_before_anything_is_sent(ends: tuple[Wire, Wire]) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        ends[0].send(["begin", threading.Lock()], timeout_s=1)
    ends[0].send("fine", timeout_s=1)
    assert ends[1].receive(timeout_s=1) == "fine"


def test_message_that_cannot_be_made_again_leaves_no_descriptor(ends: tuple[Wire, Wire], block: SharedBlock) -> None:
    before = descriptors()
    ends[0].send([block, Explosive(), Ticket(1, 2)], timeout_s=1)
    ends[0].send([Explosive(), block], timeout_s=1)
    ends[0].send("fine", timeout_s=1)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="made while unpickling"):
            ends[1].receive(timeout_s=1)
    assert descriptors() == before
    assert ends[1].receive(timeout_s=1) == "fine"


def test_descriptors_of_half_a_message_are_closed_with_the_wire(
    raw: tuple[Wire, socket.socket], block: SharedBlock
) -> None:
    wire, sock = raw
    header = struct.pack("=QI", 100, 1)
    before = descriptors()
    socket.send_fds(sock, [header, b"half of it"], [block.descriptor])
    with pytest.raises(TimeoutError):
        wire.receive(timeout_s=0)
    assert len(descriptors()) == len(before) + 1
    wire.close()
    assert len(descriptors()) == len(before) - 1  # the wire's own is closed, too


def test_process_out_of_descriptors_says_so_and_keeps_none(ends: tuple[Wire, Wire], block: SharedBlock) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = SharedBlock.create(8)
    ends[0].send([block, more], timeout_s=1)
    before = descriptors()
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        held = [os.dup(0) for _ in range(4)]
        stack.callback(lambda: [os.close(one) for one in held])
        # exactly one number is free: the highest of those that were just taken
        os.close(held.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 2, limits[1]))
        with pytest.raises(OSError, match="too many open files"):
            ends[1].receive(timeout_s=1)
    with pytest.raises(EOFError):
        ends[1].receive(timeout_s=1)
    ends[1].close()
    assert len(descriptors()) == len(before) - 1
    more.close()


def test_interruption_in_the_middle_of_sending_breaks_the_wire_for_sending_alone(
    ends: tuple[Wire, Wire], interrupt: Callable[[], None]
) -> None:
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        ends[0].send(bytes(LARGE), timeout_s=60)
    with pytest.raises(EOFError):
        ends[0].send("more", timeout_s=1)
    ends[1].send("other way", timeout_s=1)
    assert ends[0].receive(timeout_s=1) == "other way"


def test_interruption_while_waiting_for_a_message_ends_the_wait(
    raw: tuple[Wire, socket.socket], interrupt: Callable[[], None]
) -> None:
    interrupt()
    raw[1].send(frame_of("a message")[:9])
    with pytest.raises(KeyboardInterrupt):
        raw[0].receive(timeout_s=60)
    raw[1].send(frame_of("a message")[9:])
    assert raw[0].receive(timeout_s=1) == "a message"


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Presses Ctrl-C in a moment."""
    timer = threading.Timer(2 * NOW, os.kill, [os.getpid(), signal.SIGINT])
    yield timer.start
    timer.join()


def test_dumps_and_loads_give_an_equal_object() -> None:
    message = {"ticket": Ticket(1, 2), "numbers": np.arange(3), "weights": torch.tensor([1.5, 2.5])}
    again = loads(dumps(message))
    assert again["ticket"] == Ticket(1, 2)
    assert again["numbers"].tolist() == [0, 1, 2]
    assert again["weights"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize("kind", ["block", "socket"])
def test_dumps_of_what_needs_a_wire_is_refused(kind: str, block: SharedBlock, raw: tuple[Wire, socket.socket]) -> None:
    with pytest.raises(TypeError, match="through a Wire"):
        dumps(["thing", block if kind == "block" else raw[1]])


def test_tied_parameters_stay_tied() -> None:
    first = torch.nn.Linear(2, 2)
    second = torch.nn.Linear(2, 2)
    second.weight = first.weight
    one, two = loads(dumps((first, second)))
    assert one.weight is two.weight
    assert torch.equal(one.weight, first.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    layer = torch.nn.Linear(2, 2).cuda()
    wanted = torch.arange(3.0, device="cuda", requires_grad=True)
    nested = TensorDict({"x": torch.ones(2, 1, device="cuda")}, [2], device="cuda")
    tensor, module, data = loads(dumps((wanted, layer, nested)))
    assert (tensor.device.type, tensor.requires_grad, tensor.tolist()) == ("cpu", True, [0.0, 1.0, 2.0])
    assert module.weight.device.type == "cpu"
    assert torch.equal(module.weight, layer.weight.cpu())
    assert (data.device.type, data["x"].device.type) == ("cpu", "cpu")
    assert (layer.weight.device.type, nested["x"].device.type) == ("cuda", "cuda")


TOOL_MADE = """
SECRET = 7

class Door:
    def open(self):
        return SECRET

def knock():
    return Door().open()
"""


@pytest.mark.parametrize("name", ["made_by_a_tool", "made_by_a_tool.part", "<run_path>", "fractions"])
def test_what_stands_in_a_module_that_another_process_would_not_find_travels_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tool.py"
    path.write_text(TOOL_MADE)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    registered = cloudpickle.list_registry_pickle_by_value()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        data = dumps((module.Door, module.knock))
        assert cloudpickle.list_registry_pickle_by_value() == registered
    door, knock = loads(data)  # there is no such module any more, or another one
    assert door().open() == knock() == 7


def test_what_another_process_finds_travels_by_name() -> None:
    assert loads(dumps(Wire)) is Wire
    assert loads(dumps(math)) is math
    assert len(dumps(Wire)) < 100
