"""Episodes joined from batches."""

import pytest
import torch

from lit_collect import Collector, RolloutConfig
from lit_collect.frames import check_batch, limit_frames
from lit_collect.offline.episodes import EpisodeJoiner, as_rows
from lit_collect.testing import CountingEnv

# which copy, which of its episodes and how long, of copies with episodes of 5, and of 2 and 3 steps
ENDED = [(1, 0, 2), (0, 0, 5), (1, 1, 3), (1, 2, 2), (0, 1, 5), (1, 3, 3), (1, 4, 2), (0, 2, 5), (1, 5, 3), (1, 6, 2)]


def make_envs():
    return [lambda: CountingEnv(0, (5,)), lambda: CountingEnv(1, (2, 3))]


@pytest.mark.parametrize("compact", [False, True], ids=["full", "compact"])
@pytest.mark.parametrize("frames_per_batch", [6, 36])
def test_episodes_come_whole_in_the_order_in_which_they_end(frames_per_batch, compact):
    joiner, ended = EpisodeJoiner(), []
    rollout = RolloutConfig(compact_obs=compact)
    with Collector(
        make_envs(), frames_per_batch=frames_per_batch, total_frames=36, rollout=rollout, seed=0
    ) as collector:
        for batch in collector:
            ended += joiner.add(batch)
    assert [(*episode["observation"][0, :2].int().tolist(), len(episode)) for episode in ended] == ENDED
    for episode in ended:
        check_batch(episode)
        assert episode["observation"][:, 2].tolist() == list(range(len(episode)))
        assert episode["next", "observation"][-1, 2] == len(episode)
    rest = joiner.unfinished()
    assert [(*episode["observation"][0, :2].int().tolist(), len(episode)) for episode in rest] == [(0, 3, 3), (1, 7, 1)]
    assert all(episode["next", "truncated"][-1] and not episode["next", "terminated"].any() for episode in rest)
    assert joiner.unfinished() == []


def test_cutting_off_an_episode_leaves_the_batch_as_it_was():
    with Collector(make_envs(), frames_per_batch=2, seed=0) as collector:
        batch = collector.collect()
    before = batch.clone()
    joiner = EpisodeJoiner()
    joiner.add(batch)
    joiner.unfinished()
    assert (batch == before).all()


def test_masked_rows_are_left_out():
    with Collector(make_envs(), frames_per_batch=12, seed=0) as collector:
        batch = limit_frames(collector.collect(), 5)
    rows = as_rows(batch)
    assert torch.equal(rows["observation"][:, 0], torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0]))
    assert ("collector", "mask") not in rows.keys(include_nested=True)
    joiner = EpisodeJoiner()
    assert [len(episode) for episode in joiner.add(batch)] == [2]
    assert [len(episode) for episode in joiner.unfinished()] == [3]
