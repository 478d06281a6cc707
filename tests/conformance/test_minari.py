"""Minari data sets go there and back."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensordict import TensorDictBase

from lit_collect import Collector
from lit_collect.frames import check_batch, flatten_rows
from lit_collect.offline.episodes import EpisodeJoiner
from lit_collect.offline.minari import MinariRows, MinariWriter
from lit_collect.testing import CountingEnv

LENGTHS = (1, 2, 3, 50, 1)
STEPS = 98  # of each copy: all lengths, then 1, 2, 3 and 35 of 50
OWN_LABELS = {("collector", "traj_ids"), ("collector", "policy_version")}


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_c41_rows_come_back_from_minari_with_single_steps_and_unfinished_episodes(
    ends: str, tmp_path: Path, bring: Callable[..., list[ModuleType]]
) -> None:
    bring("minari", "h5py")
    joiner, batches = EpisodeJoiner(), []
    envs = [lambda index=index: CountingEnv(index, LENGTHS, ends=ends) for index in range(3)]
    with Collector(envs, frames_per_batch=42, total_frames=3 * STEPS, seed=0) as collector:
        writer = MinariWriter(tmp_path / "c-v0", collector.observation_space, action_space=collector.action_space)
        for batch in collector:
            batches.append(batch)
            writer.write(joiner.add(batch))
        writer.write(joiner.unfinished())

    episodes = list(MinariRows(tmp_path / "c-v0").episodes())
    assert sorted(map(len, episodes)) == sorted(3 * [1, 2, 3, 50, 1, 1, 2, 3, 35])
    for episode in episodes:
        check_batch(episode)
        assert episode["observation"][:, 2].tolist() == list(range(len(episode)))
    given = flatten_rows(torch.cat(batches, 1))
    given["next", "truncated"][STEPS - 1 :: STEPS] = True  # where the collector stopped in the middle
    given["next", "done"][STEPS - 1 :: STEPS] = True
    given, back = in_order(given), in_order(torch.cat(episodes))
    for key in given.keys(True, True):
        assert key in OWN_LABELS or torch.equal(given[key], back[key]), key


def in_order(rows: TensorDictBase) -> TensorDictBase:
    """Rows by copy, episode and step, which they observe."""
    copies, episodes, steps = rows["observation"].long().unbind(-1)
    return rows[(copies * 10_000 + episodes * 100 + steps).argsort()]
