import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from lit_collect import Collector, ProcessBackend, RolloutConfig
from lit_collect.episodes import EpisodeTotals, InfoTotals, info_at, info_means, summarise
from lit_collect.metrics import EpisodeStatistics
from lit_collect.testing import CountingEnv

EPISODE = 17  # frames: with 4 steps a batch, it spans five


class Reports(CountingEnv):
    """Reports its elapsed steps, and at every second end of an episode whether it was an even one."""

    def step(self, action):
        *result, info = super().step(action)
        info = {"elapsed": self.elapsed, "deep": {"index": self.index}, "place": np.array([1.0, 2.0])}
        if result[2] and self.episode % 2:
            info["is_success"] = self.episode % 4 == 1
        return (*result, info)


def reports(index: int):
    return lambda: Reports(index, lengths=(EPISODE - index,))


KEYS = ("elapsed:int64", "deep.index", "place:float32[2]", "is_success:bool")


def collect(env, batches: int, **options) -> tuple[list[TensorDict], EpisodeStatistics]:
    statistics, kept = EpisodeStatistics(), []
    settings = {"frames_per_batch": 8, "seed": 0, **options}
    with Collector(env, **settings) as collector:
        for _ in range(batches):
            kept.append(collector.collect())
            statistics.update(kept[-1], collector.num_envs)
    return kept, statistics


def counted(batches: list[TensorDict], copies: int = 2) -> list[tuple[float, int]]:
    """Row by row, from the stored rewards alone: returns and lengths of all episodes that ended."""
    returns, lengths = np.zeros(copies), np.zeros(copies, int)
    finished = []
    for batch in batches:
        ids = batch["collector", "traj_ids"]
        mask = batch.get(("collector", "mask"), torch.ones_like(ids, dtype=torch.bool))
        for t in range(batch.shape[-1]):
            for row in range(batch.shape[0]):
                if not mask[row, t]:
                    continue
                copy = ids[row, t].item() % copies
                returns[copy] += batch["next", "reward"][row, t].double().item()
                lengths[copy] += 1
                if batch["next", "done"][row, t]:
                    finished.append((returns[copy], lengths[copy]))
                    returns[copy], lengths[copy] = 0.0, 0
    return finished


def vector(mode: AutoresetMode):
    return lambda: SyncVectorEnv([reports(0), reports(1)], autoreset_mode=mode)


SOURCES = {
    "direct": [reports(0), reports(1)],
    "next step": vector(AutoresetMode.NEXT_STEP),
    "same step": vector(AutoresetMode.SAME_STEP),
    "disabled": vector(AutoresetMode.DISABLED),
    "spends steps on resetting": lambda: gymnasium.make_vec(
        "CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point"
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_episodes_over_many_batches_are_those_of_the_stored_rewards(source) -> None:
    batches, statistics = collect(SOURCES[source], 40)
    expected = counted(batches)
    assert len(expected) >= (8 if source == "spends steps on resetting" else 16)
    assert list(zip(*statistics.episodes.tolist(), strict=True)) == expected[-100:]
    assert statistics.compute()["return_mean"] == pytest.approx(np.mean([value for value, _ in expected]), rel=1e-15)
    if source != "spends steps on resetting":
        assert {length for _, length in expected} == {EPISODE, EPISODE - 1}


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("sync", [True, False])
def test_episodes_of_workers_are_those_of_the_stored_rewards(sync) -> None:
    batches, statistics = collect(SOURCES["direct"], 30, backend=ProcessBackend(num_collectors=2, sync=sync))
    assert list(zip(*statistics.episodes.tolist(), strict=True)) == counted(batches)


def test_two_halves_are_joined_as_if_they_were_one_rank() -> None:
    random = np.random.default_rng(0)
    both, halves = EpisodeStatistics(500), [EpisodeStatistics(500), EpisodeStatistics(500)]
    for _ in range(60):
        done = torch.from_numpy(random.random((4, 5, 1)) < 0.1)
        flags = torch.from_numpy(random.random((4, 5)) < 0.5)
        after = {
            "reward": torch.from_numpy(random.normal(size=(4, 5, 1)).astype(np.float32)),
            "done": done,
            "success": torch.from_numpy(random.random((4, 5)) < 0.5),
            "reported": {"success": flags},
        }
        batch = TensorDict({"next": after}, batch_size=[4, 5])
        both.update(batch)
        halves[0].update(batch[:1])
        halves[1].update(batch[1:])
    ranks = [half.totals() for half in halves]
    assert summarise(ranks) == pytest.approx(summarise([both.totals()]))
    joined = info_means([half.info_totals() for half in halves])
    assert joined == pytest.approx(info_means([both.info_totals()]))
    assert 0 < joined["success_rate"] < 1


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("backend", ["direct", ProcessBackend(num_collectors=2), ProcessBackend(2, sync=False)])
def test_named_info_values_are_those_of_the_last_rows(backend) -> None:
    rollout = RolloutConfig(info_keys=KEYS)
    _, statistics = collect(SOURCES["direct"], 40, rollout=rollout, backend=backend)
    assert statistics.info_names == ("deep.index", "elapsed", "success_rate")
    values = dict(zip(statistics.info_names, statistics.info.tolist(), strict=True))
    returns, lengths = statistics.episodes.tolist()
    assert values["elapsed"] == lengths
    assert values["deep.index"] == [EPISODE - length for length in lengths]
    for value, total, length in zip(values["success_rate"], returns, lengths, strict=True):
        episode = round((total - length * (length + 1) / 2) / (100 * length))
        assert math.isnan(value) if episode % 2 == 0 else value == (episode % 4 == 1)
    reported = [value for value in values["success_rate"] if not math.isnan(value)]
    assert statistics.compute()["success_rate"] == pytest.approx(np.mean(reported))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_named_info_values_are_the_final_ones_in_every_autoreset_mode(mode) -> None:
    _, statistics = collect(vector(mode), 20, rollout=RolloutConfig(info_keys=("elapsed:int64",)))
    assert statistics.info.tolist() == [statistics.episodes[1].tolist()]


def test_name_is_absent_until_it_was_reported_at_an_end() -> None:
    _, statistics = collect(SOURCES["direct"], 5, rollout=RolloutConfig(info_keys=KEYS))
    assert statistics.compute()["elapsed"] == 16.5  # one episode of each copy has ended, whose success nobody knows
    assert "success_rate" not in statistics.compute()


def batch_with(done, **values) -> TensorDict:
    after = {"reward": torch.ones(1, len(done), 1), "done": torch.tensor(done).view(1, -1, 1), "reported": {}}
    for name, column in values.items():
        column = torch.tensor([column])
        after["reported"][name] = ~column.isnan()
        after[name] = column.nan_to_num()
    return TensorDict({"next": after}, batch_size=[1, len(done)])


def test_info_is_of_the_same_window_as_the_returns() -> None:
    statistics = EpisodeStatistics(window=2)
    statistics.update(batch_with([True, True, True, True], speed=[1.0, 2.0, math.nan, 4.0]))
    assert statistics.compute()["speed"] == 4.0
    statistics.update(batch_with([True, False, False, False], speed=[6.0, 9.0, 9.0, 9.0]))
    assert statistics.compute()["speed"] == 5.0
    assert statistics.compute()["return_mean"] == 1.0


def test_either_name_of_success_makes_the_rate() -> None:
    batch = batch_with([True] * 3, success=[1.0, 1.0, math.nan], is_success=[math.nan, 0.0, 0.0])
    assert {name: values.tolist() for name, values in info_at(batch, [0, 1, 2]).items()} == {"success_rate": [1, 0, 0]}


def test_window_outlives_other_names() -> None:
    statistics = EpisodeStatistics()
    statistics.update(batch_with([True], speed=[2.0]))
    statistics.update(batch_with([True], height=[5.0], speed=[4.0]))
    assert {name: statistics.compute()[name] for name in ("speed", "height")} == {"speed": 3.0, "height": 5.0}
    statistics.update(batch_with([True], height=[7.0]))
    assert "speed" not in statistics.compute()
    statistics.update(TensorDict({"next": {"reward": torch.ones(1, 1, 1), "done": torch.ones(1, 1, 1).bool()}}, [1, 1]))
    assert statistics.info_names == ()
    assert statistics.compute()["count"] == 4


def test_restored_info_goes_on() -> None:
    statistics = EpisodeStatistics()
    statistics.restore([1.0, 2.0], [1, 1], 2, {"speed": [3.0, math.nan]})
    statistics.update(batch_with([True], speed=[5.0]))
    assert statistics.compute()["speed"] == 4.0
    statistics.reset()
    assert statistics.info_totals() == {}


def test_finished_episodes_of_the_last_batch_are_told_in_the_order_of_time() -> None:
    statistics = EpisodeStatistics()
    done = torch.tensor([[0, 0, 1], [1, 0, 1]]).bool().unsqueeze(-1)
    reward = torch.tensor([[1.0, 2, 4], [8, 16, 32]]).unsqueeze(-1)
    statistics.update(TensorDict({"next": {"reward": reward, "done": done}}, batch_size=[2, 3]))
    finished = statistics.finished
    assert finished.returns == [8, 7, 48]
    assert finished.lengths == [1, 3, 2]
    assert finished.copies == [1, 0, 1]
    assert finished.rows == [3, 2, 5]


def test_totals_of_nothing_are_neutral() -> None:
    assert summarise([EpisodeTotals()]) == {}
    assert info_means([{"speed": InfoTotals()}]) == {}
