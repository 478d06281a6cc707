"""A worker's batches arrive through two slots of shared memory as they were, and stay until two more are asked for."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from lit_collect.backends._slots import SLOTS, InSlot, Layout, SlotReader, SlotWriter
from lit_collect.frames import Key, columns_of
from lit_collect.shared import SharedBlock

COPIES = 2
DTYPES = {
    "uint8": torch.uint8, "bool": torch.bool, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}  # fmt: skip


class Way:
    """From a worker to its group, without a process: a block travels as a descriptor of the same memory."""

    def __init__(self) -> None:
        self.writer, self.reader = SlotWriter(), SlotReader()
        self.layouts = 0

    def send(self, batch: TensorDict) -> dict[Key, torch.Tensor]:
        message = self.writer.put(batch)
        if message.memory is not None:
            block, layout = message.memory
            self.layouts += 1
            message = replace(message, memory=(SharedBlock(os.dup(block.descriptor), block.size), layout))
        return self.reader.take(message)


@pytest.fixture
def way() -> Iterator[Way]:
    way = Way()
    yield way
    way.reader.close()


def batch(number: int, steps: int = 3, *, more: bool = False) -> TensorDict:
    """Every value says which batch it is of, and which copy and step."""
    value = 10 * number + torch.arange(COPIES)[:, None] + 2 * torch.arange(steps)
    data = {name: value[..., None].expand(COPIES, steps, 3).to(dtype) for name, dtype in DTYPES.items()}
    data |= {"nothing": torch.zeros(COPIES, steps, 0), "next": {"reward": value.float()[..., None]}}
    data |= {"more": value.clone()} if more else {}
    return TensorDict(data, batch_size=(COPIES, steps))


def equal(columns: dict[Key, torch.Tensor], expected: TensorDict) -> bool:
    """Whether all columns are those of a batch, bit by bit."""
    wanted = columns_of(expected)
    assert columns.keys() == wanted.keys()
    assert all(columns[key].dtype == column.dtype for key, column in wanted.items())
    return all(torch.equal(columns[key], column) for key, column in wanted.items())


def write(writer: SlotWriter, wanted: TensorDict) -> TensorDict:
    """Make a batch in the places that the writer gives, as a rollout does."""
    made = TensorDict({}, batch_size=wanted.batch_size)
    for key, column in columns_of(wanted).items():
        made[key] = writer.empty(key, tuple(column.shape), column.dtype).copy_(column)
    return made


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_layout_gives_every_column_room_of_its_own():
    columns = columns_of(batch(0))
    layout = Layout.of(columns, steps=5)
    block = SharedBlock.create(SLOTS * layout.slot_size)
    slots = [layout.views(block, slot) for slot in range(SLOTS)]
    for slot, views in enumerate(slots):
        for number, view in enumerate(views.values()):
            view.fill_((slot + number) % 2)
    for slot, views in enumerate(slots):
        for number, (key, view) in enumerate(views.items()):
            assert view.shape == (COPIES, 5, *columns[key].shape[2:])
            assert view.dtype == columns[key].dtype
            assert view.data_ptr() % view.element_size() == 0
            assert (view == (slot + number) % 2).all()
    block.close()


def test_layout_of_columns_without_values_has_a_size():
    layout = Layout.of({("nothing",): torch.zeros(2, 3, 0)}, steps=3)
    assert layout.slot_size > 0


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (lambda columns: columns, True),
        (lambda columns: {key: column[:, :1] for key, column in columns.items()}, True),
        (lambda columns: {key: torch.cat([column, column], 1) for key, column in columns.items()}, False),
        (lambda columns: {key: column[:1] for key, column in columns.items()}, False),
        (lambda columns: {**columns, ("other",): columns["int64",]}, False),
        (lambda columns: {key: column for key, column in columns.items() if key != ("int64",)}, False),
        (lambda columns: {**columns, ("int64",): columns["int64",].int()}, False),
        (lambda columns: {**columns, ("int64",): columns["int64",][..., :2]}, False),
    ],
    ids=["same", "shorter", "longer", "fewer copies", "more keys", "fewer keys", "other dtype", "other shape"],
)
def test_layout_holds_batches_of_its_kind_that_are_not_longer(change, holds):
    columns = columns_of(batch(0))
    assert Layout.of(columns, steps=3).holds(change(columns)) is holds


# --- there and back ---------------------------------------------------------------------------------------------------


def test_batches_arrive_as_they_were_sent(way):
    for number in range(5):
        assert equal(way.send(batch(number)), batch(number))
    assert way.layouts == 1


def test_batch_stays_until_two_more_are_sent(way):
    first, second = way.send(batch(1)), way.send(batch(2))
    assert equal(first, batch(1))
    assert equal(second, batch(2))
    way.send(batch(3))
    assert equal(first, batch(3))  # the same memory
    assert equal(second, batch(2))


@pytest.mark.parametrize("steps", [1, 2])
def test_shorter_batches_use_the_same_memory(steps, way):
    way.send(batch(1))
    assert equal(way.send(batch(2, steps)), batch(2, steps))
    assert equal(way.send(batch(3)), batch(3))
    assert way.layouts == 1


@pytest.mark.parametrize("other", [batch(3, steps=7), batch(3, more=True)], ids=["longer", "another key"])
def test_batches_of_another_kind_get_new_memory_and_earlier_ones_stay(other, way):
    first, second = way.send(batch(1)), way.send(batch(2))
    assert equal(way.send(other), other)
    assert equal(first, batch(1))
    assert equal(second, batch(2))
    assert way.layouts == 2
    assert equal(way.send(other), other)
    assert way.layouts == 2


def test_new_memory_has_room_for_the_longest_batch_so_far(way):
    way.send(batch(1, steps=6))
    way.send(batch(2, steps=2, more=True))
    assert equal(way.send(batch(3, steps=6, more=True)), batch(3, steps=6, more=True))
    assert way.layouts == 2


def test_what_was_taken_outlives_the_reader(way):
    taken = way.send(batch(1))
    way.reader.close()
    way.reader.close()
    assert equal(taken, batch(1))


# --- putting a batch together where it will lie -----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 2])
def test_columns_of_later_batches_are_made_in_their_slot(steps, way):
    first, second = way.send(write(way.writer, batch(1))), way.send(batch(2))
    made = write(way.writer, batch(3, steps))
    assert equal({key: column[:, :steps] for key, column in first.items()}, made)  # without anything being sent
    assert equal(second, batch(2))
    assert equal(way.send(made), batch(3, steps))


def test_column_that_does_not_fit_is_made_in_private_memory(way):
    way.send(batch(1))
    for key, shape, dtype in (
        (("other",), (COPIES, 3, 3), torch.int64),
        (("int64",), (COPIES, 4, 3), torch.int64),
        (("int64",), (COPIES + 1, 3, 3), torch.int64),
        (("int64",), (COPIES, 3, 4), torch.int64),
        (("int64",), (COPIES, 3, 3), torch.int32),
    ):
        place = way.writer.empty(key, shape, dtype)
        assert place.shape == shape
        assert place.dtype == dtype
        place.fill_(9)
    assert equal(way.send(batch(2)), batch(2))


def test_batch_that_was_broken_off_leaves_the_one_before_it_alone(way):
    way.send(batch(1))
    taken = way.send(batch(2))
    write(way.writer, batch(9))  # an env raised; nothing is sent
    assert equal(taken, batch(2))
    assert equal(way.send(write(way.writer, batch(3))), batch(3))
    assert equal(taken, batch(2))


def test_batch_that_is_cut_after_it_was_begun_arrives_cut(way):
    way.send(batch(1))
    made = write(way.writer, batch(2))
    cut = TensorDict({key: column[:, :2] for key, column in columns_of(made).items()}, batch_size=(COPIES, 2))
    assert equal(way.send(cut), batch(2, steps=2))


def test_message_of_a_known_kind_is_small(way):
    way.send(batch(1))
    assert way.writer.put(batch(2)) == InSlot(slot=1, steps=3)
