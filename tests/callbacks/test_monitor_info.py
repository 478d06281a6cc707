"""What the monitor makes of the env's info, and what it says in words."""

import csv
import logging
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_collect import CollectorDataModule, ProcessBackend, RolloutConfig, UpdateConfig
from lit_collect.callbacks import CollectionMonitor
from lit_collect.callbacks._hints import Hints
from lit_collect.callbacks._names import NAMES
from lit_collect.testing import BoringRLModule, CountingEnv


class Reports(CountingEnv):
    """Reports its elapsed steps, and at its ends whether the episode was an odd one."""

    def step(self, action):
        *result, info = super().step(action)
        info = {"elapsed": self.elapsed, "place": [1.0, 2.0]}
        if result[2]:
            info["is_success"] = self.episode % 2 == 1
        return (*result, info)


def episodes_of(frames: int):
    return partial(Reports, lengths=(frames,))


def data(env=None, **options) -> CollectorDataModule:
    settings = {
        "num_envs": 2,
        "frames_per_batch": 4,
        "total_frames": 32,
        "updates": UpdateConfig(epochs=2, minibatch_size=4),
        "rollout": RolloutConfig(info_keys=("elapsed", "place:float32[2]", "is_success:bool", "never")),
        "evaluation": None,
        "seed": 0,
        **options,
    }
    return CollectorDataModule(env or episodes_of(3), **settings)


def logged(trainer) -> list[dict[str, float]]:
    with Path(trainer.logger.log_dir, "metrics.csv").open(newline="") as file:
        return [{key: float(cell) for key, cell in line.items() if cell} for line in csv.DictReader(file)]


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("backend", ["direct", ProcessBackend(num_collectors=2)])
def test_named_info_is_logged_from_its_first_report_at_an_end_on(trainer_with, backend) -> None:
    trainer = trainer_with(CollectionMonitor())
    trainer.fit(BoringRLModule(), datamodule=data(backend=backend))
    lines = logged(trainer)
    assert not any("episode/never" in line or "episode/place" in line for line in lines)
    # each copy ends after 3, 6, 9, 12, 15 steps, and a batch is two
    ended = [0, 1, 2, 2, 3, 4, 4, 5]
    assert [line.get("episode/elapsed") for line in lines] == [None, *[3.0] * 7]
    rates = [line.get("episode/success_rate") for line in lines]
    assert rates == [None if n == 0 else pytest.approx((n // 2) / n) for n in ended]


def test_success_rate_has_the_name_that_stable_baselines_gives_it(trainer_with) -> None:
    trainer = trainer_with(CollectionMonitor("sb3"))
    trainer.fit(BoringRLModule(), datamodule=data())
    assert logged(trainer)[-1]["rollout/success_rate"] == trainer.callback_metrics["episode/success_rate"] == 2 / 5


def test_others_names_are_only_those_that_they_use() -> None:
    assert set(NAMES["sb3"].values()) == {
        "time/total_timesteps",
        "time/fps",
        "time/episodes",
        "rollout/ep_rew_mean",
        "rollout/ep_len_mean",
        "rollout/success_rate",
        "eval/mean_reward",
        "eval/mean_ep_length",
    }
    assert set(NAMES["cleanrl"].values()) == {
        "global_step",
        "charts/SPS",
        "charts/episodic_return",
        "charts/episodic_length",
        "eval/episodic_return",
    }


class WithAnotherRank(SingleDeviceStrategy):
    """Of two ranks the first one; the other one says that success was reported three times, each time 1."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.world_size = 2

    def reduce(self, tensor, *args, **kwargs):
        if tensor.ndim < 2:  # the lengths of loaders
            return 2 * tensor
        return self.all_gather(tensor[0])

    def all_gather(self, tensor, *args, **kwargs):
        return torch.stack((tensor, torch.cat((tensor[:-6], tensor.new_tensor([0, 0, 3, 3, 0, 0])))))


def test_info_of_all_ranks_is_joined_by_episode(known_data, learner, trainer_with) -> None:
    def add_info(batch) -> None:
        done = batch["next", "done"].squeeze(-1)
        batch["next", "reported"] = {"a": done, "is_success": done, "z": torch.zeros_like(done)}
        for name in ("a", "is_success", "z"):
            batch["next", name] = torch.zeros(done.shape)

    source = known_data(batches=2)
    source.rollout_listeners.append(add_info)
    trainer = trainer_with(CollectionMonitor(), strategy=WithAnotherRank())
    trainer.fit(learner, datamodule=source)
    last = logged(trainer)[-1]
    assert last["episode/success_rate"] == 3 / 5  # none of two, three of three
    assert last["episode/a"] == 0
    assert "episode/z" not in last


def test_state_holds_info_as_plain_data_and_goes_on(trainer_with, tmp_path) -> None:
    monitor = CollectionMonitor(window=3)
    trainer = trainer_with(monitor)
    trainer.fit(BoringRLModule(), datamodule=data())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    state = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]["CollectionMonitor"]
    assert state["info"]["success_rate"] == [1.0, 0.0, 0.0]
    assert all(math.isnan(value) for value in state["info"]["never"])
    other = CollectionMonitor(window=5)
    other.load_state_dict(state)
    trainer_with(other).fit(BoringRLModule(), datamodule=data(total_frames=8))
    assert other.latest["episode/success_rate"] == 1 / 5


def test_state_of_an_older_version_has_no_info() -> None:
    monitor = CollectionMonitor()
    monitor.load_state_dict({"returns": [1.0], "lengths": [2.0], "count_total": 1})
    assert monitor.state_dict()["info"] == {}


# --- checkpoints and early stopping


@pytest.mark.parametrize(
    "when",
    [{"every_n_train_steps": 1}, {"every_n_train_steps": 3}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}],
)
def test_checkpoints_can_watch_the_return_before_an_episode_has_ended(trainer_with, tmp_path, when) -> None:
    saving = ModelCheckpoint(tmp_path / "best", monitor="episode/return_mean", mode="max", save_top_k=-1, **when)
    trainer = trainer_with(CollectionMonitor(), saving, enable_checkpointing=True, max_epochs=-1)
    trainer.fit(BoringRLModule(), datamodule=data(episodes_of(9), batches_per_epoch=2))
    assert len(saving.best_k_models) == {"every_n_train_steps": 16 // when.get("every_n_train_steps", 1)}.get(
        next(iter(when)), 4
    )
    # the first batches are of running episodes: 1 + 2, and then 1 + 2 + 3 + 4
    scores = [score.item() for score in saving.best_k_models.values()]
    assert scores[0] == {1: 3, 3: 10, None: 10}[when.get("every_n_train_steps")]
    assert scores[-1] == 45  # of the first episode


@pytest.mark.parametrize(("threshold", "frames"), [(3.5, 8), (20.5, 16), (1000.0, 32)])
def test_early_stopping_can_watch_the_return_from_the_first_epoch_on(trainer_with, threshold, frames) -> None:
    stopping = EarlyStopping("episode/return_mean", mode="max", patience=10, stopping_threshold=threshold)
    source = data(episodes_of(9), batches_per_epoch=2)
    trainer_with(CollectionMonitor(), stopping, max_epochs=-1).fit(BoringRLModule(), datamodule=source)
    assert source.frames_total == frames  # an epoch is 8: the running returns are 10, 36, and then 45 of one episode


# --- hints


def values(frames: int, *, trainer_idle: float = 0.1, collector_idle: float = 0.9, ended: bool = True) -> dict:
    first = {"collect/frames_total": frames, "time/trainer_idle": trainer_idle, "time/collector_idle": collector_idle}
    return {**first, "episode/count_total": 1} if ended else first


@pytest.fixture
def said(caplog) -> list[str]:
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")

    class Said:
        def __call__(self) -> list[str]:
            return [record.getMessage() for record in caplog.records]

    return Said()


@pytest.mark.parametrize("key", ["trainer_idle", "collector_idle"])
def test_who_stays_idle_is_told_once_what_helps(said, key) -> None:
    hints, calm = Hints(), {"trainer_idle": 0.1, "collector_idle": 0.1}
    for batch in range(14):
        hints.see(values(batch, **{**calm, key: 0.8}))
        assert said() == []
    for batch in range(30):
        hints.see(values(batch, **{**calm, key: 0.8}))
    (text,) = said()
    assert "80% of the time in the last 10 batches" in text
    assert f"(time/{key})" in text
    assert "ProcessBackend(sync=False)" in text


@pytest.mark.parametrize("replay", [{}, {"replay/size": 10}])
@pytest.mark.parametrize("ahead", [False, True])
def test_collecting_meanwhile_is_a_remedy_only_where_nobody_does(said, ahead, replay) -> None:
    hints = Hints()
    for batch in range(30):
        hints.see({**values(batch), **replay}, ahead=ahead)
    (text,) = said()
    assert ("while the trainer learns" in text) is not ahead


def test_who_is_idle_now_and_then_is_told_nothing(said) -> None:
    hints = Hints()
    for batch in range(100):
        hints.see(values(batch, trainer_idle=0.9 if batch % 8 else 0.5, collector_idle=0.5 if batch % 8 else 0.9))
    assert said() == []


@pytest.mark.parametrize(("each", "batches"), [(10_000, 10), (500, 21)])
def test_run_without_an_end_of_an_episode_is_told_once(said, each, batches) -> None:
    hints = Hints()
    for batch in range(batches - 1):
        hints.see(values(each * (batch + 1), collector_idle=0, ended=False))
    assert said() == []
    for batch in range(batches - 1, 60):
        hints.see(values(each * (batch + 1), collector_idle=0, ended=False))
    (text,) = said()
    assert f"no episode has finished in {each * batches:,} frames" in text
    assert "rollout.max_frames_per_traj" in text


def test_run_with_an_end_of_an_episode_is_told_nothing(said) -> None:
    hints = Hints()
    for batch in range(60):
        hints.see(values(10_000 * batch, collector_idle=0, ended=batch >= 8))
    assert said() == []


def test_monitor_hints_at_what_it_logs(said, trainer_with) -> None:
    source = data(episodes_of(10**6), num_envs=8, frames_per_batch=1024, total_frames=12 * 1024)
    trainer_with(CollectionMonitor()).fit(BoringRLModule(), datamodule=source)
    assert sum("no episode has finished in 11,264 frames" in text for text in said()) == 1
