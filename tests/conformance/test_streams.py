"""What a collector yields, from every source: the rows of a plain loop, whatever the batches."""

import numpy as np
import pytest
import torch

from lit_collect.metrics import EpisodeStatistics
from tests.conformance.sources import SEED, SHORT, STEPS, Interruptions, Recording, Source, columns, record, wanted

pytestmark = [
    # Python warns of forking a process that has threads, and torch's are always there.
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),  # envpool declares its spaces so
]


def test_c1_rows_are_those_of_a_plain_loop(source: Source, recording: Recording) -> None:
    lines = recording.lines()
    for line, expected in zip(lines, wanted(source, [len(line) for line in lines]), strict=True):
        got = columns(line, source)
        assert got.keys() == expected.keys()
        for key, column in expected.items():
            assert got[key].dtype == column.dtype, key
            np.testing.assert_array_equal(got[key], column, err_msg=str(key))


def test_c2_rows_of_an_episode_follow_each_other(source: Source, recording: Recording) -> None:
    for line in recording.lines():
        within = ~line["next", "done"][:-1, 0]
        for key in source.keys:
            assert torch.equal(line["next", key][:-1][within], line[key][1:][within])


def test_c3_policy_acts_on_what_the_rows_say_it_saw(source: Source, recording: Recording) -> None:
    stream = recording.stream
    steps = stream.batch_size[1]
    assert torch.equal(recording.seen[:, :steps], stream[source.keys[0]])


def test_c4_rows_and_trajectories_are_labelled(source: Source, recording: Recording) -> None:
    mask = recording.stream.get(("collector", "mask"), None)
    assert (mask is not None) == source.masked
    owners: dict[int, tuple[int, int]] = {}
    for copy, line in enumerate(recording.lines()):
        ids, first, done = line["collector", "traj_ids"], line["is_init"][:, 0], line["next", "done"][:, 0]
        assert first[0]
        assert torch.equal(first[1:], done[:-1])
        assert torch.equal(ids, copy + source.copies * (first.cumsum(0) - 1))
        for number in ids.unique().tolist():
            assert owners.setdefault(number, (copy, number)) == (copy, number)
    assert mask is None or bool((recording.stream["collector", "traj_ids"][~mask] == -1).all())


def test_c5_budget_is_met_to_the_frame(source: Source, recording: Recording, long_recording: Recording) -> None:
    frames = source.copies * STEPS
    for one in (recording, long_recording):
        assert sum(map(len, one.lines())) == frames
        numbers = one.statistics
        assert numbers["frames_yielded"] == frames
        assert numbers["frames_stepped"] == frames + numbers["frames_dropped"]


def test_c6_length_of_batches_changes_nothing(source: Source, recording: Recording, long_recording: Recording) -> None:
    assert len(long_recording.batches) < len(recording.batches)
    for short, long in zip(recording.lines(), long_recording.lines(), strict=True):
        assert set(short.keys(True, True)) == {*long.keys(True, True), "state"}
        for key in long.keys(True, True):
            assert torch.equal(short[key], long[key]), key


def test_c9_batches_never_change(recording: Recording) -> None:
    for batch, kept in zip(recording.batches, recording.kept, strict=True):
        batch = batch if batch.ndim == 2 else batch.unsqueeze(0)
        assert all(torch.equal(batch[key], kept[key]) for key in kept.keys(True, True))


def test_c11_manual_resets_begin_new_episodes(source: Source, interruptions: Interruptions) -> None:
    counting = source.keys == ("observation",) and interruptions.before["observation"].shape[2:] == (3,)
    batches = (interruptions.after_reset, interruptions.after_two_resets, interruptions.after_error)
    last = interruptions.before["collector", "traj_ids"].amax(1).tolist()
    for batch in batches:
        for copy, line in enumerate(batch):
            ids = line["collector", "traj_ids"]
            first = int((ids >= 0).nonzero()[0])  # a worker that forgot its reset spends a row on it
            assert line["is_init"][first]
            assert ids[first] > last[copy]
            # what was reset twice has begun one trajectory: only that of the batch that failed is lost
            assert ids[first] == last[copy] + source.copies or batch is interruptions.after_error
            assert not counting or line["observation"][first, 2] == 0
            last[copy] = int(ids.max())


def test_c13_both_flags_may_stand_in_one_row(recording: Recording, source: Source) -> None:
    for line in recording.lines():
        flags = line["next", "terminated"] | line["next", "truncated"]
        assert torch.equal(flags, line["next", "done"])
        assert flags.any() or source.copies == 1


def test_c19_wrong_action_is_refused_and_the_collector_goes_on(source: Source, interruptions: Interruptions) -> None:
    expected = "is not finite" if not source.choices else f"out of range : expected 0 to {source.choices - 1}"
    assert expected in interruptions.error


def test_c22_recurrent_state_is_the_step_within_the_episode(recording: Recording) -> None:
    for line in recording.lines():
        step = -1
        for first, state in zip(line["is_init"][:, 0].tolist(), line["state"].tolist(), strict=True):
            step = 0 if first else step + 1
            assert state == step


def test_c23_seeds_alone_decide(source: Source, recording: Recording) -> None:
    if not source.random:
        assert len(recording.batches)  # the oracle of C1 knows these rows
        return
    again, other = record(source, SHORT), record(source, SHORT, SEED + 1)
    key = source.keys[0]
    for line, same, different in zip(recording.lines(), again.lines(), other.lines(), strict=True):
        assert torch.equal(line[key], same[key])
        assert not torch.equal(line[key][0], different[key][0])


def test_c40_episode_metrics_are_those_of_counting(source: Source, recording: Recording) -> None:
    statistics = EpisodeStatistics(window=10_000)
    for batch in recording.kept:
        statistics.update(batch, source.copies)
    returns, lengths = [], []
    for line in recording.lines():
        total, length = 0.0, 0
        for reward, done in zip(
            line["next", "reward"][:, 0].tolist(), line["next", "done"][:, 0].tolist(), strict=True
        ):
            total, length = total + reward, length + 1
            if done:
                returns.append(total)
                lengths.append(length)
                total, length = 0.0, 0
    values = statistics.compute()
    assert returns
    assert values["length_mean"] == pytest.approx(np.mean(lengths))
    assert values["return_mean"] == pytest.approx(np.mean(returns))
