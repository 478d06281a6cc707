import csv
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_collect import CollectorDataModule, EvaluationConfig, UpdateConfig
from lit_collect.callbacks import CollectionMonitor, FrameProgress, LearningCurve
from lit_collect.testing import BoringRLModule, CountingEnv

ALWAYS = {
    "collect/frames_total",
    "collect/fps",
    "time/fps",
    "time/env_s",
    "time/policy_s",
    "time/transfer_s",
    "time/wait_data_s",
    "time/weight_sync_s",
    "time/trainer_idle",
    "time/collector_idle",
    "policy/version",
    "policy/syncs_total",
    "policy/stale_dropped_total",
    "policy/staleness_mean",
    "policy/staleness_max",
    "workers/alive",
    "workers/restarts_total",
    "workers/queue_fill",
    "episode/return_mean",
}
SINCE_FIRST_END = {
    "episode/return_min",
    "episode/return_max",
    "episode/return_std",
    "episode/length_mean",
    "episode/count",
    "episode/count_total",
}


def rows(trainer, having: str = "collect/frames_total") -> list[dict[str, float]]:
    """The lines of the CSV file that have a key, without the cells that are empty."""
    with Path(trainer.logger.log_dir, "metrics.csv").open(newline="") as file:
        lines = [{key: float(cell) for key, cell in line.items() if cell} for line in csv.DictReader(file)]
    return [line for line in lines if having in line]


class Watcher(Callback):
    """Keeps what the trainer's callbacks can see after each minibatch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append(dict(trainer.callback_metrics))


def test_each_collected_batch_is_logged_once(known_data, learner, trainer_with) -> None:
    trainer = trainer_with(CollectionMonitor())
    trainer.fit(learner, datamodule=known_data(batches=5, minibatches=3))
    lines = rows(trainer)
    assert [line["collect/frames_total"] for line in lines] == [8, 16, 24, 32, 40]
    assert [line["step"] for line in lines] == [1, 4, 7, 10, 13]  # after the first minibatch of each


def test_logged_keys_are_those_of_the_design(known_data, learner, trainer_with) -> None:
    trainer = trainer_with(CollectionMonitor())
    trainer.fit(learner, datamodule=known_data(batches=3))
    lines = rows(trainer)
    assert [set(line) - {"step"} for line in lines] == [
        ALWAYS,
        ALWAYS | SINCE_FIRST_END,
        ALWAYS | SINCE_FIRST_END,
    ]


def test_logged_values_are_those_of_the_data(known_data, learner, trainer_with) -> None:
    monitor = CollectionMonitor()
    trainer = trainer_with(monitor)
    trainer.fit(learner, datamodule=known_data(batches=3))
    first, second, third = rows(trainer)
    assert first["episode/return_mean"] == 6.0  # so far 4 and 8
    assert [second[f"episode/return_{name}"] for name in ("mean", "min", "max", "std")] == [9, 6, 12, 3]
    assert second["episode/length_mean"] == 6
    assert [line["episode/count"] for line in (second, third)] == [2, 2]
    assert [line["episode/count_total"] for line in (second, third)] == [2, 4]
    names = ("env_s", "policy_s", "wait_data_s", "weight_sync_s", "transfer_s")
    assert [[line[f"time/{name}"] for name in names] for line in (first, second, third)] == [
        [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8]
    ] * 3
    assert [line["policy/staleness_max"] for line in (first, second, third)] == [0, 1, 1]
    assert [line["policy/staleness_mean"] for line in (first, second, third)] == [0, 1, 1]
    assert [line["policy/version"] for line in (first, second, third)] == [1, 2, 3]
    assert [line["policy/stale_dropped_total"] for line in (first, second, third)] == [5, 10, 15]
    assert [first[f"workers/{name}"] for name in ("alive", "restarts_total", "queue_fill")] == [3, 1, 0.25]
    assert all(line["time/fps"] > 0 for line in (first, second, third))
    assert monitor.latest["collect/frames_total"] == 24


@pytest.mark.parametrize(("without", "seconds"), [("busy_s", 3 / 8), ("collect_s", 6 / 8), (None, 6 / 8)])
def test_collection_alone_takes_what_is_waited_for_or_what_workers_are_busy(
    known_data, learner, trainer_with, without, seconds
) -> None:
    data = known_data(batches=2)
    data.rollout_listeners.append(lambda batch: data.seconds.update({without: 0.0} if without else {}))
    trainer = trainer_with(CollectionMonitor())
    trainer.fit(learner, datamodule=data)
    assert [line["collect/fps"] for line in rows(trainer)] == pytest.approx([8 / seconds] * 2)


@pytest.mark.parametrize(("without", "idle"), [("busy_s", (1, 1)), ("collect_s", (0, 0)), (None, (1, 0))])
def test_who_is_idle_is_measured_for_each_alone(known_data, learner, trainer_with, without, idle) -> None:
    data = known_data(batches=2)  # which say that they took longer than they did
    data.rollout_listeners.append(lambda batch: data.seconds.update({without: 0.0} if without else {}))
    trainer = trainer_with(CollectionMonitor())
    trainer.fit(learner, datamodule=data)
    assert [(line["time/trainer_idle"], line["time/collector_idle"]) for line in rows(trainer)] == [idle] * 2


class WithAnotherRank(SingleDeviceStrategy):
    """Of two ranks the first one; the other one has the same numbers, and one more of each."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.world_size = 2

    def reduce(self, tensor, *args, **kwargs):
        if tensor.ndim < 2:  # the lengths of loaders
            return 2 * tensor
        return self.all_gather(tensor[0])

    def all_gather(self, tensor, *args, **kwargs):
        return torch.stack((tensor, tensor + 1))


def test_values_of_all_ranks_are_joined(known_data, learner, trainer_with) -> None:
    monitor = CollectionMonitor()
    trainer = trainer_with(monitor, strategy=WithAnotherRank())
    trainer.fit(learner, datamodule=known_data(batches=1))
    (line,) = rows(trainer)
    sums = {"workers/alive": 3 + 4, "workers/restarts_total": 1 + 2, "policy/stale_dropped_total": 5 + 6}
    means = {"workers/queue_fill": (0.25 + 1.25) / 2, "policy/staleness_mean": (0 + 1) / (8 + 9)}
    largest = {"time/env_s": 1 + 1 / 8, "time/transfer_s": 1 + 5 / 8, "policy/staleness_max": 1}
    busy_s = (6 / 8 + 1 + 6 / 8) / 2
    expected = {**sums, **means, **largest, "collect/fps": 8 / max(busy_s, 1 + 3 / 8)}
    assert {key: line[key] for key in expected} == pytest.approx(expected)


def test_callback_metrics_have_the_values_from_the_first_minibatch_on(known_data, learner, trainer_with) -> None:
    watcher = Watcher()
    trainer = trainer_with(CollectionMonitor(), watcher)
    trainer.fit(learner, datamodule=known_data(batches=2, minibatches=2))
    assert [seen["episode/return_mean"].item() for seen in watcher.seen] == [6, 6, 9, 9]
    assert watcher.seen[0]["collect/frames_total"].dtype == torch.float64
    assert trainer.progress_bar_metrics["episode/return_mean"] == 9


def test_frames_beyond_float32_are_exact(known_data, learner, trainer_with) -> None:
    data = known_data(batches=1)
    data.frames_total = 2**24
    trainer = trainer_with(CollectionMonitor())
    trainer.fit(learner, datamodule=data)
    assert trainer.callback_metrics["collect/frames_total"].item() == 2**24 + 8
    assert rows(trainer)[0]["collect/frames_total"] == 2**24 + 8


def test_model_checkpoint_watches_the_return_from_the_first_batch_on(
    known_data, learner, trainer_with, tmp_path
) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "best", "{step}", monitor="episode/return_mean", mode="max", every_n_train_steps=1, save_top_k=-1
    )
    trainer = trainer_with(CollectionMonitor(), checkpoint, enable_checkpointing=True)
    trainer.fit(learner, datamodule=known_data(batches=3, minibatches=2))
    assert [round(score.item()) for score in checkpoint.best_k_models.values()] == [6, 6, 9, 9, 9, 9]
    assert checkpoint.best_model_path.endswith("step=3.ckpt")  # the first minibatch of the second batch
    saved = torch.load(checkpoint.best_model_path, weights_only=True)
    assert saved["callbacks"]["CollectionMonitor"] == {
        "returns": [6, 12],
        "lengths": [6, 6],
        "info": {},
        "count_total": 2,
    }


def test_early_stopping_watches_the_return(known_data, learner, trainer_with) -> None:
    data = known_data(batches=2)
    stopping = EarlyStopping("episode/return_mean", mode="max", patience=1, stopping_threshold=8.5)
    trainer = trainer_with(CollectionMonitor(), stopping, max_epochs=5)
    trainer.fit(learner, datamodule=data)
    assert data.frames_total == 16  # one epoch of five
    assert "episode/return_mean = 9.0" in stopping.stopping_reason_message


def test_last_batch_is_logged_even_if_it_was_not_trained_on(known_data, learner, trainer_with) -> None:
    data = known_data(batches=3)
    learner.on_train_batch_start = lambda batch, batch_idx: -1 if data.collected == 3 else None
    trainer = trainer_with(CollectionMonitor())
    trainer.fit(learner, datamodule=data)
    assert [line["collect/frames_total"] for line in rows(trainer)] == [8, 16, 24]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("sb3", {"time/total_timesteps", "time/fps", "rollout/ep_rew_mean", "rollout/ep_len_mean", "eval/mean_reward"}),
        (
            "cleanrl",
            {"global_step", "charts/SPS", "charts/episodic_return", "charts/episodic_length", "eval/episodic_return"},
        ),
    ],
)
def test_other_houses_names_stand_for_the_same_values(
    evaluated_data, evaluated_learner, trainer_with, names, expected
) -> None:
    monitor = CollectionMonitor(names)
    trainer = trainer_with(monitor)
    trainer.fit(evaluated_learner, datamodule=evaluated_data(batches=2))
    own = {"collect/frames_total", "episode/return_mean", "eval/return_mean"}
    assert expected | own <= set(trainer.callback_metrics)  # checkpoints that watch our names go on working
    assert all(rows(trainer, key) for key in expected)
    assert not any(rows(trainer, key) for key in own)
    assert set(monitor.latest) >= ALWAYS | SINCE_FIRST_END
    assert monitor.latest["episode/return_mean"] == trainer.callback_metrics["episode/return_mean"] == 9


def test_evaluation_is_of_all_rounds(evaluated_data, evaluated_learner, trainer_with) -> None:
    monitor = CollectionMonitor()
    trainer = trainer_with(monitor)
    trainer.fit(evaluated_learner, datamodule=evaluated_data(batches=2))
    (line,) = rows(trainer, "eval/return_mean")
    expected = {"eval/return_mean": 3.75, "eval/return_std": 2.1875**0.5, "eval/length_mean": 2.5, "eval/episodes": 4}
    assert {key: line[key] for key in expected} == pytest.approx(expected)
    assert {key: monitor.latest[key] for key in expected} == pytest.approx(expected)
    assert trainer.callback_metrics["eval/return_mean"].item() == 3.75
    assert monitor.evaluations == 1


def test_sanity_check_is_not_logged_and_not_counted_later(evaluated_data, evaluated_learner, trainer_with) -> None:
    monitor = CollectionMonitor()
    trainer = trainer_with(monitor, num_sanity_val_steps=2)
    trainer.fit(evaluated_learner, datamodule=evaluated_data(batches=1))
    assert [line["eval/episodes"] for line in rows(trainer, "eval/episodes")] == [4]
    assert monitor.evaluations == 1


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_evaluation_alone_is_logged(evaluated_data, evaluated_learner, trainer_with, verb) -> None:
    trainer = trainer_with(CollectionMonitor())
    (values,) = getattr(trainer, verb)(evaluated_learner, datamodule=evaluated_data(), verbose=False)
    assert values["eval/return_mean"] == 3.75
    assert values["eval/episodes"] == 4


def test_evaluation_without_rounds_logs_nothing(known_data, learner, trainer_with) -> None:
    trainer = trainer_with(CollectionMonitor())
    trainer.fit(learner, datamodule=known_data(batches=1))
    assert rows(trainer, "eval/episodes") == []


def test_listeners_are_gone_after_a_fit_and_a_second_one_adds_them_once(known_data, learner, trainer_with) -> None:
    data, monitor = known_data(batches=2), CollectionMonitor()
    for fits in (1, 2):
        trainer = trainer_with(monitor)
        trainer.fit(learner, datamodule=data)
        assert data.rollout_listeners == data.round_listeners == []
        assert [line["collect/frames_total"] for line in rows(trainer)] == [16 * fits - 8, 16 * fits]


def test_set_up_twice_listens_once(known_data, learner, trainer_with) -> None:
    data, monitor = known_data(), CollectionMonitor()
    trainer = trainer_with(monitor)
    trainer.datamodule = data
    monitor.setup(trainer, learner, "fit")
    monitor.setup(trainer, learner, "fit")
    assert (len(data.rollout_listeners), len(data.round_listeners)) == (1, 1)
    monitor.teardown(trainer, learner, "fit")
    monitor.on_exception(trainer, learner, RuntimeError())
    assert data.rollout_listeners == data.round_listeners == []


def test_listeners_are_gone_after_an_exception_and_rows_are_kept(known_data, learner, trainer_with) -> None:
    data = known_data(batches=3)
    data.fail_at = 2
    trainer = trainer_with(CollectionMonitor())
    with pytest.raises(RuntimeError, match="the env broke"):
        trainer.fit(learner, datamodule=data)
    assert data.rollout_listeners == data.round_listeners == []
    assert [line["collect/frames_total"] for line in rows(trainer)] == [8, 16]


def test_clock_of_a_new_collector_begins_anew(known_data, learner, trainer_with) -> None:
    class Restarts(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if data.collected == 2:
                data.seconds["env_s"] = 0.0625

    data = known_data(batches=2)
    trainer = trainer_with(CollectionMonitor(), Restarts())
    trainer.fit(learner, datamodule=data)
    assert [line["time/env_s"] for line in rows(trainer)] == [0.125, 0.0625]


def test_without_a_collecting_data_module_nothing_happens(known_data, learner, trainer_with) -> None:
    monitor = CollectionMonitor()
    trainer = trainer_with(monitor)
    trainer.fit(learner, known_data(batches=2).train_dataloader())
    assert monitor.latest == {}
    assert not set(trainer.callback_metrics)


def test_state_goes_on_counting(known_data, learner, trainer_with) -> None:
    monitor = CollectionMonitor(window=2)
    trainer_with(monitor).fit(learner, datamodule=known_data(batches=3))
    state = monitor.state_dict()
    assert state == {"returns": [6, 12], "lengths": [6, 6], "info": {}, "count_total": 4}
    other = CollectionMonitor()
    other.load_state_dict(state)
    trainer_with(other).fit(learner, datamodule=known_data(batches=2))
    assert other.latest["episode/count_total"] == 6
    assert other.latest["episode/count"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"names": "rllib"}, r"monitor.names must be one of \('lit', 'sb3', 'cleanrl'\), got 'rllib'"),
        ({"window": 0}, "monitor.window must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        CollectionMonitor(**settings)


def test_real_collection_is_measured_exactly(trainer_with, tmp_path) -> None:
    class Evaluated(BoringRLModule):
        def validation_step(self, batch, batch_idx) -> None:
            pass

    data = CollectorDataModule(
        partial(CountingEnv, lengths=(3,)),
        num_envs=2,
        frames_per_batch=8,
        total_frames=32,
        updates=UpdateConfig(epochs=2, minibatch_size=4),
        evaluation=EvaluationConfig(num_episodes=2),
        seed=0,
    )
    monitor, curve = CollectionMonitor(), LearningCurve()
    checkpoint = ModelCheckpoint(tmp_path / "best", monitor="episode/return_mean", mode="max", every_n_train_steps=1)
    trainer = trainer_with(
        monitor, FrameProgress("plain"), curve, checkpoint, enable_checkpointing=True, enable_progress_bar=True
    )
    trainer.fit(Evaluated(), datamodule=data)

    lines = rows(trainer)
    assert [line["collect/frames_total"] for line in lines] == [8, 16, 24, 32]
    assert [line["episode/count"] for line in lines] == [2, 2, 4, 2]  # rows 3, 6, 9 and 12, 15 of each copy
    assert [line["policy/version"] for line in lines] == [0, 1, 2, 3]
    assert [line["policy/staleness_max"] for line in lines] == [0] * 4
    assert all(0 < line["time/env_s"] < line["time/wait_data_s"] for line in lines)
    busy_s = [(1 - line["time/collector_idle"]) * 8 / line["time/fps"] for line in lines]
    assert sum(busy_s) == pytest.approx(data.seconds["busy_s"])
    assert all(line["workers/alive"] == 1 and line["time/transfer_s"] >= 0 for line in lines)
    assert lines[0]["episode/return_mean"] == 1 + 2 + 3
    expected = np.array([6.0, 306.0, 606.0, 906.0, 1206.0])  # the reward is 100 x episode + step
    assert lines[-1]["episode/return_mean"] == expected.mean()
    assert lines[-1]["episode/return_std"] == pytest.approx(expected.std())
    assert lines[-1]["episode/length_mean"] == 3
    assert monitor.latest["eval/return_mean"] == 6
    assert monitor.latest["eval/episodes"] == 2
    assert checkpoint.best_model_score == expected.mean()
    assert curve.path.exists()
    assert data.rollout_listeners == data.round_listeners == []
