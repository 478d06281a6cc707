"""Neither the collector nor the learner runs away."""

import pytest
import torch
from tensordict import TensorDict

from lit_collect import (
    BudgetSpentError,
    Collector,
    CollectTimeoutError,
    LitCollectError,
    PacedBuffer,
    ProcessBackend,
    ReplayBuffer,
    WorkerFailedError,
)
from lit_collect.testing import CountingEnv, FailingEnv


class Rows(list):
    """A buffer that gives its newest batch."""

    def extend(self, batch):
        self.append(batch)

    def sample(self, batch_size=None):
        return self[-1]


def rows(count: int) -> TensorDict:
    return TensorDict({"observation": torch.zeros(count, 3)}, batch_size=[count])


def test_samples_are_due_in_the_ratio_that_was_asked_for():
    buffer = PacedBuffer(Rows(), updates_per_frame=0.5, frames_ahead=100)
    assert buffer.updates_due == 0
    buffer.extend(rows(7))
    assert buffer.updates_due == 3
    buffer.sample()
    buffer.extend(rows(1))
    assert buffer.updates_due == 3


def test_warm_up_gives_no_samples_and_is_not_caught_up_with():
    buffer = PacedBuffer(Rows(), updates_per_frame=1.0, min_frames=10, frames_ahead=4)
    buffer.extend(rows(8))
    assert (buffer.updates_due, buffer.wait_for_room(0.0)) == (0, True)
    buffer.extend(rows(8))
    assert (buffer.updates_due, buffer.wait_for_room(0.0)) == (6, False)
    for _ in range(3):
        buffer.sample()
    assert buffer.wait_for_room(0.0)


def test_sample_that_no_frames_come_for_says_so():
    buffer = PacedBuffer(Rows(), updates_per_frame=1.0, frames_ahead=4, timeout_s=0.0)
    with pytest.raises(CollectTimeoutError, match="came within 0 s : expected more than 0 for sample number 1"):
        buffer.sample()


def test_everything_else_is_asked_of_the_buffer():
    buffer = PacedBuffer(ReplayBuffer(10), updates_per_frame=1.0, frames_ahead=4)
    assert (buffer.capacity, len(buffer)) == (10, 0)
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = buffer.no_such_thing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updates_per_frame": 0.0}, "updates_per_frame must be a number above 0, got 0.0"),
        ({"updates_per_frame": 1.0, "frames_ahead": 0}, "frames_ahead must be at least 1, got 0"),
        ({"updates_per_frame": 1.0, "min_frames": -1}, "min_frames must be at least 0, got -1"),
    ],
)
def test_wrong_number_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        PacedBuffer(Rows(), **{"frames_ahead": 4, **options})


@pytest.mark.parametrize("backend", ["direct", pytest.param(ProcessBackend(2), marks=pytest.mark.processes)])
def test_collector_waits_for_the_learner_and_the_learner_for_the_collector(backend):
    buffer = PacedBuffer(
        ReplayBuffer(1000, batch_size=4, seed=0), updates_per_frame=0.25, min_frames=32, frames_ahead=32
    )
    with Collector(
        CountingEnv, num_envs=4, frames_per_batch=16, total_frames=256, backend=backend, replay_buffer=buffer
    ) as collector:
        collector.start()
        for update in range((256 - 32) // 4):
            assert buffer.sample().batch_size == (4,)
            written = collector.statistics()["frames_yielded"]
            assert 4 * (update + 1) <= written - 32 < 4 * (update + 1) + 32 + 16
        assert buffer.updates_due == 0
        with collector.pause():  # it waits for room in small pieces, so that this comes back at once
            pass


def test_collector_that_waits_for_room_can_be_closed():
    buffer = PacedBuffer(Rows(), updates_per_frame=1.0, frames_ahead=16)
    with Collector(CountingEnv, num_envs=2, frames_per_batch=16, replay_buffer=buffer) as collector:
        collector.start()
        buffer.sample()
        collector.async_shutdown()
    assert 16 <= sum(len(batch.reshape(-1)) for batch in buffer.buffer) <= 32


def test_what_goes_wrong_in_the_background_is_raised():
    buffer = PacedBuffer(Rows(), updates_per_frame=1.0, frames_ahead=1000)
    collector = Collector(lambda: FailingEnv("step", at=20), frames_per_batch=16, replay_buffer=buffer)
    collector.start()
    for _ in range(16):
        buffer.sample()
    with pytest.raises(LitCollectError, match=r"no frames will come .* has failed: .*broken") as told:
        buffer.sample()
    assert isinstance(told.value.__cause__, WorkerFailedError)
    with pytest.raises(WorkerFailedError, match="broken on purpose"):
        collector.shutdown()


def test_what_goes_wrong_in_the_background_is_told_once():
    buffer = PacedBuffer(Rows(), updates_per_frame=1.0, frames_ahead=1000)
    collector = Collector(lambda: FailingEnv("step", at=20), frames_per_batch=16, replay_buffer=buffer)

    def learn() -> None:
        with collector:  # closes without a warning
            collector.start()
            while True:
                buffer.sample()

    with pytest.raises(LitCollectError, match="broken on purpose"):
        learn()


def test_sample_that_needs_more_frames_than_may_be_ahead_gets_them():
    buffer = PacedBuffer(Rows(), updates_per_frame=1 / 64, frames_ahead=16, timeout_s=30.0)
    with Collector(CountingEnv, frames_per_batch=16, total_frames=256, replay_buffer=buffer) as collector:
        collector.start()
        for _ in range(4):
            buffer.sample()
    assert buffer.updates_due == 0


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), "1", None])
def test_rate_that_is_no_number_is_refused(rate):
    with pytest.raises(ValueError, match=f"updates_per_frame must be a number above 0, got {rate!r}"):
        PacedBuffer(Rows(), updates_per_frame=rate, frames_ahead=4)


@pytest.mark.parametrize("buffer", [3, ReplayBuffer, [1]])
def test_buffer_that_is_none_is_refused(buffer):
    with pytest.raises(TypeError, match="buffer must be an object with extend and sample, got"):
        PacedBuffer(buffer, updates_per_frame=1.0, frames_ahead=4)


def test_budget_that_is_spent_ends_the_waiting():
    buffer = PacedBuffer(Rows(), updates_per_frame=1.0, frames_ahead=1000)
    with Collector(CountingEnv, frames_per_batch=4, total_frames=8, replay_buffer=buffer) as collector:
        collector.start()
        for _ in range(8):
            buffer.sample()
        with pytest.raises(BudgetSpentError, match="the collector has ended"):
            buffer.sample()
