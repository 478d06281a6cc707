"""`CollectorDataset`, its loaders, and how a batch is cut."""

from collections.abc import Sequence
from functools import partial

import lightning as L
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict

from lit_collect import BudgetSpentError, Collector, CollectorDataset, UpdateConfig, make_dataloader
from lit_collect.dataset import CollectorLoader
from lit_collect.testing import ConstantPolicy, CountingEnv

COPIES, FRAMES = 2, 8


class Source:
    """Hands out numbered rows: [2, 4] batches, with some of them masked on demand."""

    def __init__(self, batches: int = 3, last: int = FRAMES, masked: int = 0) -> None:
        self.frames_per_batch = FRAMES
        self.frames_budget = (batches - 1) * FRAMES + last
        self.collected = 0
        self._masked = masked

    @property
    def frames_left(self) -> int:
        return self.frames_budget - self.collected

    def collect(self) -> TensorDict:
        frames = min(FRAMES, self.frames_left)
        rows = torch.arange(self.collected, self.collected + frames).view(COPIES, -1)
        self.collected += frames
        batch = TensorDict({"row": rows}, batch_size=rows.shape)
        if self._masked:
            batch["collector", "mask"] = (torch.arange(frames) >= self._masked).view(COPIES, -1)
        return batch


def rows_of(batches) -> list[list[int]]:
    return [batch["row"].flatten().tolist() for batch in batches]


# --- length and epochs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "length"),
    [
        (UpdateConfig(), 3),
        (UpdateConfig(epochs=4), 12),
        (UpdateConfig(minibatch_size=8), 3),
        (UpdateConfig(minibatch_size=100), 3),
        (UpdateConfig(minibatch_size=4), 2 + 2 + 2),
        (UpdateConfig(minibatch_size=3, epochs=2), 2 * (3 + 3 + 2)),
    ],
)
def test_length_is_what_is_delivered(updates, length):
    dataset = CollectorDataset(Source(batches=3, last=6), updates=updates)
    assert len(dataset) == length
    assert sum(1 for _ in dataset) == length
    assert len(dataset) == length  # also afterwards
    assert dataset.exhausted


def test_length_without_a_budget():
    with Collector(CountingEnv, num_envs=COPIES, frames_per_batch=FRAMES) as collector:
        assert len(CollectorDataset(collector)) == 1000
        assert len(CollectorDataset(collector, updates=UpdateConfig(epochs=2, minibatch_size=4))) == 4000
        assert len(CollectorDataset(collector, batches_per_epoch=5)) == 5
        assert not CollectorDataset(collector).exhausted


def test_epochs_of_a_fixed_number_of_batches_go_on_with_the_stream():
    dataset = CollectorDataset(Source(batches=5), batches_per_epoch=2, updates=UpdateConfig(minibatch_size=8))
    assert [rows_of(dataset) for _ in range(3)] == [
        [list(range(8)), list(range(8, 16))],
        [list(range(16, 24)), list(range(24, 32))],
        [list(range(32, 40))],
    ]
    with pytest.raises(BudgetSpentError, match="an epoch was asked for although all of total_frames"):
        next(iter(dataset))


def test_number_of_batches_below_one_raises():
    with pytest.raises(ValueError, match="batches_per_epoch must be at least 1 or None, got 0"):
        CollectorDataset(Source(), batches_per_epoch=0)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([1, 2], {}, r"source must be a Collector, or what else has its collect, got \[1, 2\]"),
        (Source(), {"batches_per_epoch": "2"}, "batches_per_epoch must be an integer, got '2'"),
        (Source(), {"updates": 4}, r"updates must be given as UpdateConfig\(\.\.\.\), got 4"),
    ],
)
def test_argument_of_another_kind_raises(source, options, message):
    with pytest.raises(TypeError, match=message):
        CollectorDataset(source, **options)


def test_iter_does_nothing_until_the_first_batch_is_asked_for():
    source = Source()
    dataset = CollectorDataset(source, updates=UpdateConfig(minibatch_size=4))
    iterators = [iter(dataset) for _ in range(3)]
    assert source.collected == 0
    next(iterators[2])
    assert source.collected == FRAMES


def test_a_batch_is_collected_when_the_one_before_is_used_up():
    source = Source()
    iterator = iter(CollectorDataset(source, updates=UpdateConfig(epochs=2, minibatch_size=4)))
    collected = [source.collected for _ in iterator]
    assert collected == [8] * 4 + [16] * 4 + [24] * 4


def test_exhausted_only_after_the_last_minibatch():
    dataset = CollectorDataset(Source(batches=2), updates=UpdateConfig(minibatch_size=4))
    assert [dataset.exhausted for _ in dataset] == [False, False, False, True]


# --- minibatches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("minibatch_size", [1, 3, 5, 8, 50])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_pass_has_every_row_once(minibatch_size, shuffle):
    updates = UpdateConfig(epochs=3, minibatch_size=minibatch_size, shuffle=shuffle)
    pieces = rows_of(CollectorDataset(Source(batches=1), updates=updates))
    per_pass = len(pieces) // 3
    for number in range(3):
        part = [row for piece in pieces[number * per_pass : (number + 1) * per_pass] for row in piece]
        assert sorted(part) == list(range(8))
        assert shuffle or part == list(range(8))
    assert max(map(len, pieces)) <= minibatch_size


def test_rows_are_drawn_anew_in_each_pass():
    torch.manual_seed(0)
    source = Source(batches=1)
    pieces = rows_of(CollectorDataset(source, updates=UpdateConfig(epochs=4, minibatch_size=2)))
    passes = {str(pieces[first : first + 4]) for first in range(0, 16, 4)}
    assert len(passes) == 4


def test_whole_batches_keep_their_time_dimension():
    dataset = CollectorDataset(Source(batches=1), updates=UpdateConfig(epochs=2))
    pieces = list(dataset)
    assert [piece.batch_size for piece in pieces] == [(2, 4), (2, 4)]
    assert dataset.batch_dims == 2
    assert pieces[0] is not pieces[1]
    pieces[0]["new"] = torch.zeros(2, 4)
    assert pieces[1].get("new", None) is None


def test_minibatches_are_rows():
    dataset = CollectorDataset(Source(batches=1), updates=UpdateConfig(minibatch_size=4))
    assert [piece.batch_size for piece in dataset] == [(4,), (4,)]
    assert dataset.batch_dims == 1


@pytest.mark.parametrize("masked", [1, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("minibatch_size", [2, 3, 8])
def test_masked_rows_are_left_out_and_the_length_is_kept(minibatch_size, masked):
    dataset = CollectorDataset(Source(batches=1, masked=masked), updates=UpdateConfig(minibatch_size=minibatch_size))
    pieces = rows_of(dataset)
    assert len(pieces) == len(dataset)
    assert {row for piece in pieces for row in piece} == set(range(masked, 8))
    assert all(pieces)  # none of them empty
    assert max(map(len, pieces)) <= minibatch_size
    if 8 - masked >= len(pieces):
        assert sum(map(len, pieces)) == 8 - masked  # each row once


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5, 7])
def test_loaded_state_leaves_out_what_was_delivered(taken):
    updates = UpdateConfig(epochs=2, minibatch_size=4)  # 4 of each batch
    first = CollectorDataset(Source(batches=9), batches_per_epoch=2, updates=updates)
    for _ in zip(range(taken), first, strict=False):
        pass
    state = first.state_dict()
    assert state == {"delivered": taken}
    second = CollectorDataset(Source(batches=9), batches_per_epoch=2, updates=updates)
    second.load_state_dict(state)
    assert len(list(second)) == 8 - taken
    assert len(list(second)) == 8  # the epoch after it is whole


def test_loaded_state_resumes_in_the_pass_that_was_left():
    updates = UpdateConfig(epochs=3, minibatch_size=4, shuffle=False)
    dataset = CollectorDataset(Source(batches=1), updates=updates)
    dataset.load_state_dict({"delivered": 3})
    assert rows_of(dataset) == [[4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_state_after_a_whole_epoch_is_the_beginning_of_the_next():
    dataset = CollectorDataset(Source(batches=4), batches_per_epoch=2)
    assert len(list(dataset)) == 2
    assert dataset.state_dict() == {"delivered": 0}


# --- loaders ----------------------------------------------------------------------------------------------------------


def test_loader_is_a_sized_iterable_of_the_same_stream():
    dataset = CollectorDataset(Source())
    loader = CollectorLoader(dataset)
    assert len(loader) == 3
    assert not hasattr(loader, "dataset")  # Lightning would take it for a DataLoader
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert loader.state_dict() == dataset.state_dict() == {"delivered": 1}


def test_dataloader_passes_batches_as_they_are():
    with Collector(CountingEnv, num_envs=COPIES, frames_per_batch=FRAMES, total_frames=20) as collector:
        loader = make_dataloader(CollectorDataset(collector))
        batches = list(loader)
    assert [batch.batch_size for batch in batches] == [(2, 4), (2, 4), (2, 2)]
    assert (loader.num_workers, loader.batch_size) == (0, None)
    assert batches[0]["next", "reward"].shape == (2, 4, 1)


def test_dataloader_serves_fabric():
    policy = ConstantPolicy(num_actions=2)
    fabric = L.Fabric(accelerator="cpu", devices=1)
    with Collector(CountingEnv, policy, num_envs=COPIES, frames_per_batch=FRAMES, total_frames=24) as collector:
        module, optimizer = fabric.setup(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
        versions = []
        dataset = CollectorDataset(collector, updates=UpdateConfig(minibatch_size=4))
        for batch in fabric.setup_dataloaders(make_dataloader(dataset)):
            versions.append(batch["collector", "policy_version"].unique().item())
            optimizer.zero_grad()
            fabric.backward(module(batch["observation"]).float().mean() * 0 + policy.action)
            optimizer.step()
            collector.update_policy_weights_(policy)
    assert versions == [0, 0, 2, 2, 4, 4]


def test_masked_collector_is_cut_as_its_length_promised():
    class Forgetful(SyncVectorEnv):
        def step(self, actions):
            return super().step(actions)

    env = Forgetful([partial(CountingEnv, i, (1,)) for i in range(COPIES)], autoreset_mode="NextStep")
    with Collector(env, frames_per_batch=FRAMES, total_frames=16) as collector:
        dataset = CollectorDataset(collector, updates=UpdateConfig(minibatch_size=2), batches_per_epoch=1)
        sizes = [[len(piece) for piece in dataset] for _ in range(4)]
    env.close()
    # half of the rows are spent on resetting; when 4 frames are left, it takes two shorter batches to meet the budget
    assert sizes == [[1, 1, 1, 1]] * 3 + [[1, 1, 2]]
    assert dataset.exhausted


def test_resume_into_a_shorter_batch_uses_what_there_is_of_it():
    dataset = CollectorDataset(Source(batches=1, last=4), updates=UpdateConfig(epochs=2, minibatch_size=2))
    dataset.load_state_dict({"delivered": 7})  # of the 8 that a whole batch has; this one has 4
    assert [len(piece) for piece in dataset] == [2]
    assert dataset.exhausted


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, 3, 5, 8])
def test_minibatches_are_as_many_as_those_of_the_rank_with_most_of_them(most):
    asked = []

    def agree(cuts: int) -> int:
        asked.append(cuts)
        return most

    updates = UpdateConfig(epochs=2, minibatch_size=4)
    pieces = rows_of(CollectorDataset(Source(batches=1), updates=updates, agree=agree))
    assert asked == [2]
    assert len(pieces) == 2 * most
    for number in range(2):
        rows = [row for piece in pieces[number * most : (number + 1) * most] for row in piece]
        assert sorted(rows) == list(range(FRAMES))


def test_whole_batches_need_no_agreement():
    def agree(cuts: int) -> int:
        raise AssertionError("nobody would answer")

    assert len(list(CollectorDataset(Source(), agree=agree))) == 3


# --- trajectories -----------------------------------------------------------------------------------------------------


class Trajectories:
    """Batches of 8 frames' worth that have any number of rows, as those of whole trajectories."""

    frames_per_batch = FRAMES
    batches_vary = True
    trajs_per_batch = 2

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._first = 0
        self.frames_budget = sum(sizes)

    @property
    def frames_left(self) -> int:
        return sum(self._sizes)

    def collect(self) -> TensorDict:
        size = self._sizes.pop(0)
        self._first += size
        return TensorDict({"row": torch.arange(self._first - size, self._first)}, batch_size=[size])


SIZES = [3, 9, 1, 4, 17, 2]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("minibatch_size", [1, 4, 100])
def test_minibatches_of_trajectories_have_their_size_and_each_row_once_in_a_pass(minibatch_size, epochs):
    updates = UpdateConfig(epochs=epochs, minibatch_size=minibatch_size)
    dataset = CollectorDataset(Trajectories(SIZES), updates=updates)
    pieces = rows_of(dataset)
    assert len(pieces) == epochs * sum(-(-size // minibatch_size) for size in SIZES) <= len(dataset)
    assert max(map(len, pieces)) <= minibatch_size
    assert sorted(row for piece in pieces for row in piece) == sorted(list(range(sum(SIZES))) * epochs)
    assert dataset.exhausted


def test_epoch_of_trajectories_that_ends_within_a_batch_is_gone_on_with():
    updates = UpdateConfig(minibatch_size=4)
    dataset = CollectorDataset(Trajectories(SIZES), batches_per_epoch=1, updates=updates)
    assert len(dataset) == 2  # of 4 rows each
    epochs = []
    while not dataset.exhausted:
        epochs.append(rows_of(dataset))
    assert [len(epoch) for epoch in epochs] == [2] * 6
    assert sorted(row for epoch in epochs for piece in epoch for row in piece) == list(range(sum(SIZES)))


def test_what_an_epoch_of_trajectories_has_left_is_not_for_another_fit():
    dataset = CollectorDataset(Trajectories(SIZES), batches_per_epoch=1, updates=UpdateConfig(minibatch_size=4))
    assert len(rows_of(dataset)) == 2  # of the batches of 3 and of 9 rows, of which 2 minibatches are left
    dataset.feed.forget()
    assert [sorted(piece) for piece in rows_of(dataset)] == [[12], [13, 14, 15, 16]]


def test_budget_without_a_whole_trajectory_is_an_error():
    class Nothing(Trajectories):
        def collect(self) -> TensorDict:
            self._sizes.clear()
            raise BudgetSpentError("no whole trajectory is left")

    with pytest.raises(ValueError, match=r"no whole trajectory was made within the budget : .* raise total_frames"):
        list(CollectorDataset(Nothing(SIZES)))
