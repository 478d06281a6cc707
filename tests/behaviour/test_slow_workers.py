"""Nobody waits for a slow worker who need not, nothing that it makes is lost, and workers wait for a slow learner."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from lit_collect import Collector, ProcessBackend, RolloutConfig, check_batch
from lit_collect.frames import MASK, columns_of, count_frames
from lit_collect.testing import CountingEnv
from tests.behaviour.streams import COPIES, ENVS, LENGTHS, check_counters, check_stream, streams_of

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nursery")]


class Gate:
    """Counts how many may pass, in any process."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        if not path.exists():
            os.mkfifo(path)
        self._file = os.open(path, os.O_RDWR)

    def __reduce__(self):
        return Gate, (Path(self._path),)

    def let(self, count: int) -> None:
        os.write(self._file, bytes(count))

    def enter(self) -> None:
        assert len(os.read(self._file, 1)) == 1

    def close(self) -> None:
        os.close(self._file)


class SlowEnv(CountingEnv):
    """The only slow one: makes the last of so many steps when it is let, and before that lets others begin."""

    def __init__(self, gate: Gate, begin: Gate, others: int, steps: tuple[int, ...]) -> None:
        super().__init__(0, LENGTHS[0])
        self.gates = gate, begin
        self._others, self._pauses = others, set(accumulate(steps))

    def step(self, action):
        if len(self.actions) + 1 in self._pauses:
            self.gates[1].let(self._others)
            self.gates[0].enter()
        return super().step(action)

    def close(self):
        super().close()
        for gate in self.gates:
            gate.close()


class PatientEnv(CountingEnv):
    """Waits at the first step of batches of such sizes."""

    def __init__(self, index: int, begin: Gate, steps: tuple[int, ...]) -> None:
        super().__init__(index, LENGTHS[index])
        self._begin, self._pauses = begin, {0, *accumulate(steps)}

    def step(self, action):
        if len(self.actions) in self._pauses:
            self._begin.enter()
        return super().step(action)

    def close(self):
        super().close()
        self._begin.close()


@pytest.fixture
def gates(tmp_path) -> Iterator[tuple[Gate, Gate]]:
    gates = Gate(tmp_path / "gate"), Gate(tmp_path / "begin")
    yield gates
    for gate in gates:
        gate.close()


@contextmanager
def preempted(
    gates: tuple[Gate, Gate], made: Sequence[tuple[int, int]], *, workers: int, fraction: float, **options: Any
) -> Iterator[Collector]:
    """A collector whose worker 0 makes only so many steps of each batch, with those that the others make: it begins
    its last one before the others begin, and ends it when they have finished."""
    gate, begin = gates
    slow, all_of_them = zip(*made, strict=True)
    envs = [*ENVS]
    envs[0] = partial(SlowEnv, gate, begin, workers - 1, slow)
    for first in range(COPIES // workers, COPIES, COPIES // workers):
        envs[first] = partial(PatientEnv, first, begin, all_of_them)
    backend = ProcessBackend(workers, preempt_fraction=fraction, batch_timeout_s=30.0, shutdown_timeout_s=5.0)
    with Collector(envs, backend=backend, seed=0, **options) as collector:
        ended = 0

        def end_the_step() -> None:
            nonlocal ended
            others_wait = not any(member.waiting for member in collector.workers.members[1:])
            if others_wait and ended == collector.statistics()["batches"]:
                gate.let(1)
                ended += 1

        collector.workers.while_waiting = end_the_step
        yield collector


@pytest.mark.parametrize(("workers", "fraction"), [(2, 0.5), (2, 0.01), (4, 0.6)])
def test_slow_worker_hands_in_what_it_has_and_goes_on_from_there(workers, fraction, gates):
    made = ((3, 8), (1, 8), (7, 8), (2, 8))
    share, batches = COPIES // workers, []
    options = {"frames_per_batch": 64, "rollout": RolloutConfig(init_random_frames=5 * COPIES)}
    with preempted(gates, made, workers=workers, fraction=fraction, **options) as collector:
        for steps, _ in made:
            batches.append(batch := collector.collect())
            check_batch(batch)
            assert batch.batch_size == (8, 8)
            mask = batch[MASK]
            assert mask[share:].all()
            assert mask[:share, :steps].all()
            assert mask[:share].sum(1).tolist() == [steps] * share
            lacking = ~mask
            assert (batch["collector", "traj_ids"][lacking] == -1).all()
            assert (batch["collector", "traj_ids"][mask] >= 0).all()
            rest = columns_of(batch.exclude(("collector", "traj_ids")))
            assert not any(column[lacking].any() for column in rest.values())
            numbers = check_counters(collector, sum(count_frames(one) for one in batches))
            assert numbers["frames_dropped"] == 0
    for number, rows in enumerate(streams_of(batches)):
        assert len(rows) == (3 + 1 + 7 + 2 if number < share else 4 * 8)
        assert rows["collector", "policy_version"].tolist() == 5 * [-1] + (len(rows) - 5) * [0]
        check_stream(rows, number, COPIES, LENGTHS[number], number)


def test_budget_is_met_although_a_worker_is_slow(gates):
    # 5 steps for the 36 frames that are left after two batches, 2 for the last 12, which give 4 frames too many
    made = ((2, 6), (3, 6), (1, 5), (2, 2))
    with preempted(gates, made, workers=2, fraction=0.5, frames_per_batch=48, total_frames=104) as collector:
        sizes = []
        for batch in collector:
            sizes.append(count_frames(batch))
            check_batch(batch)
        numbers = check_counters(collector, 104)
    assert sizes == [4 * 6 + 4 * 2, 4 * 6 + 4 * 3, 4 * 5 + 4 * 1, 12]
    assert (numbers["frames_dropped"], numbers["batches"]) == (4, 4)


def test_mask_is_there_although_nobody_was_slow():
    backend = ProcessBackend(2, preempt_fraction=1.0)
    with Collector(ENVS, frames_per_batch=24, total_frames=56, backend=backend, seed=0) as collector:
        batches = list(collector)
    assert [batch.batch_size for batch in batches] == [(8, 3), (8, 3), (8, 1)]
    assert all(batch[MASK].all() for batch in batches)
    for number, rows in enumerate(streams_of(batches)):
        check_stream(rows, number, COPIES, LENGTHS[number], number)


def test_asynchronous_workers_wait_for_nobody(gates):
    gate, begin = gates
    envs = [partial(SlowEnv, gate, begin, 0, (1,)), *ENVS[1:]]  # stands still in its first step
    batches = []
    backend = ProcessBackend(2, sync=False)
    with Collector(envs, frames_per_batch=24, total_frames=240, backend=backend, seed=0) as collector:
        while len(batches) < 6:
            batches.append(collector.collect())
        assert all((batch["collector", "traj_ids"] % COPIES >= 4).all() for batch in batches)
        gate.let(1)
        batches += list(collector)
        check_counters(collector, 240)
    assert sum(bool((batch["collector", "traj_ids"] % COPIES < 4).all()) for batch in batches) >= 2
    for number, rows in enumerate(streams_of(batches)):
        check_stream(rows, number, COPIES, LENGTHS[number], number)


# --- a learner that is slow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_asynchronous_workers_stop_when_nobody_takes_their_batches(taken):
    backend = ProcessBackend(2, sync=False)
    with Collector(ENVS, frames_per_batch=24, backend=backend, seed=0) as collector:
        for _ in range(taken):
            collector.collect()

        def frames_made() -> list[int]:  # a worker answers when it has made all that it was asked for
            return [4 * len(actions) for actions in collector.cascade_execute("env.envs[0].unwrapped.actions")]

        made = frames_made()
        assert sum(made) == (24 * (taken + 4) if taken else 0)
        assert frames_made() == frames_made() == made
        numbers = check_counters(collector, 24 * taken)
        assert numbers["frames_stepped"] == sum(made)
        assert numbers["queue_fill"] == (1.0 if taken else 0.0)
