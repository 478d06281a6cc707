import csv
import json
from functools import partial
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_collect import CollectorDataModule, ProcessBackend
from lit_collect.callbacks import CollectionMonitor, EpisodeLog
from lit_collect.testing import BoringRLModule, CountingEnv

HEADER = ["r", "l", "t", "frames", "env", "version"]


def read(path) -> list[dict[str, float]]:
    """The lines of a file, below what Stable-Baselines3 expects at its top."""
    with Path(path).open(newline="") as file:
        first = file.readline()
        assert first.startswith("#")
        assert set(json.loads(first[1:])) == {"t_start", "env_id"}
        lines = list(csv.DictReader(file))
    assert all(list(line) == HEADER for line in lines)
    return [{key: float(cell) for key, cell in line.items()} for line in lines]


def told(path, *columns: str) -> list[tuple[float, ...]]:
    return [tuple(line[column] for column in columns) for line in read(path)]


def counting(**options) -> CollectorDataModule:
    settings = {"num_envs": 2, "frames_per_batch": 8, "total_frames": 32, "evaluation": None, "seed": 0, **options}
    return CollectorDataModule([partial(CountingEnv, 0, (3,)), partial(CountingEnv, 1, (5,))], **settings)


@pytest.mark.parametrize("callbacks", [(), (CollectionMonitor,)])
@pytest.mark.parametrize("log_first", [False, True])
def test_every_episode_is_a_line_with_or_without_a_monitor(trainer_with, callbacks, log_first) -> None:
    log, others = EpisodeLog(), [make() for make in callbacks]
    trainer = trainer_with(*([log, *others] if log_first else [*others, log]))
    trainer.fit(BoringRLModule(), datamodule=counting())
    assert log.path == Path(trainer.logger.log_dir, "monitor.csv")
    # copy 0 ends after 3, 6, 9, 12, 15 of its 16 steps, copy 1 after 5, 10, 15; a version is 4 steps
    assert told(log.path, "r", "l", "frames", "env", "version") == [
        (6, 3, 6, 0, 0),
        (15, 5, 10, 1, 1),
        (306, 3, 12, 0, 1),
        (606, 3, 18, 0, 2),
        (515, 5, 20, 1, 2),
        (906, 3, 24, 0, 2),
        (1206, 3, 30, 0, 3),
        (1015, 5, 30, 1, 3),
    ]
    seconds = [line["t"] for line in read(log.path)]
    assert seconds == sorted(seconds)
    assert min(seconds) >= 0


def test_returns_are_exact(trainer_with, known_data, learner) -> None:
    data = known_data(batches=2)
    data.rollout_listeners.append(lambda batch: batch["next", "reward"].fill_(0.1))
    log = EpisodeLog()
    trainer_with(log).fit(learner, datamodule=data)
    text = log.path.read_text().splitlines()
    assert [line.split(",")[0] for line in text[2:]] == [repr(6 * 0.10000000149011612)] * 2


@pytest.mark.usefixtures("nursery")
def test_asynchronous_workers_lose_no_episode(trainer_with) -> None:
    log = EpisodeLog()
    data = counting(total_frames=160, backend=ProcessBackend(num_collectors=2, sync=False))
    trainer_with(log).fit(BoringRLModule(), datamodule=data)
    lines = read(log.path)
    by_env = [[line for line in lines if line["env"] == env] for env in (0, 1)]
    for env, length in enumerate((3, 5)):
        returns = [100 * episode * length + length * (length + 1) / 2 for episode in range(len(by_env[env]))]
        assert [line["r"] for line in by_env[env]] == returns  # none is missing in between
    assert sum(line["l"] for line in lines) > 160 - 2 * 5
    frames = [line["frames"] for line in lines]
    assert frames == sorted(frames)
    assert frames[-1] <= 160


class SecondOfTwo(SingleDeviceStrategy):
    """Of two ranks the second one, as far as files are concerned."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.world_size, self.global_rank = 2, 1

    def reduce(self, tensor, *args, **kwargs):
        return 2 * tensor


def test_other_ranks_write_files_of_their_own_and_count_all_frames(trainer_with, known_data, learner, tmp_path) -> None:
    log = EpisodeLog(tmp_path / "logs")
    data = known_data(batches=2)
    data.rollout_listeners.append(lambda batch: setattr(data, "frames_total", 16 * data.collected))  # 8 of each rank
    trainer_with(log, strategy=SecondOfTwo(), logger=False).fit(learner, datamodule=data)
    assert log.path == tmp_path / "logs" / "rank1.monitor.csv"
    assert told(log.path, "r", "frames") == [(6, 24), (12, 24)]  # the second of four steps


def test_without_a_logger_the_file_is_in_the_root_folder(trainer_with, tmp_path) -> None:
    log = EpisodeLog()
    trainer_with(log, logger=False, default_root_dir=tmp_path).fit(BoringRLModule(), datamodule=counting())
    assert log.path == tmp_path / "monitor.csv"
    assert len(read(log.path)) == 8


def test_resumed_run_goes_on_after_the_episodes_of_its_checkpoint(trainer_with, tmp_path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            trainer.save_checkpoint(tmp_path / f"step={trainer.global_step}.ckpt")

    def run(log, ckpt_path=None) -> None:
        trainer_with(log, Saves()).fit(BoringRLModule(), datamodule=counting(), ckpt_path=ckpt_path)

    whole = EpisodeLog(tmp_path / "logs")
    run(whole)
    columns = ("l", "frames", "env")
    before = told(whole.path, *columns)
    log = EpisodeLog(tmp_path / "logs")
    run(log, tmp_path / "step=2.ckpt")  # after 16 of 32 frames
    after = told(log.path, *columns)
    assert after[:3] == [line for line in before if line[1] <= 16] == before[:3]
    assert after[3:] == [(3, 22, 0), (5, 26, 1), (3, 28, 0)]  # new episodes began at frame 16
    seconds = [line["t"] for line in read(log.path)]
    assert seconds == sorted(seconds)
    assert [path.name for path in log.path.parent.iterdir()] == ["monitor.csv"]


def test_line_that_was_cut_by_a_crash_is_taken_out_on_resuming(tmp_path, trainer_with) -> None:
    log = EpisodeLog(tmp_path)
    trainer_with(log).fit(BoringRLModule(), datamodule=counting())
    lines = read(log.path)
    with log.path.open("a") as file:
        file.write("12.5,3,0.")
    again = EpisodeLog(tmp_path)
    again.load_state_dict(log.state_dict())
    trainer_with(again).fit(BoringRLModule(), datamodule=counting(total_frames=8))
    assert read(again.path)[: len(lines)] == lines


def test_another_run_leaves_an_earlier_ones_episodes_alone(tmp_path, trainer_with) -> None:
    for _ in range(3):
        log = EpisodeLog(tmp_path)
        trainer_with(log).fit(BoringRLModule(), datamodule=counting())
    names = ["monitor.csv", "monitor.csv.1", "monitor.csv.2"]
    assert sorted(path.name for path in tmp_path.glob("monitor.*")) == names
    assert [len(read(tmp_path / name)) for name in names] == [8, 8, 8]


def test_fit_that_goes_on_with_the_same_data_adds_to_the_file(tmp_path, trainer_with) -> None:
    log, data = EpisodeLog(tmp_path), counting(batches_per_epoch=2)
    for _ in range(2):
        trainer_with(log, max_epochs=1).fit(BoringRLModule(), datamodule=data)
    assert told(log.path, "frames", "env") == [(6, 0), (10, 1), (12, 0), (22, 0), (26, 1), (28, 0)]


def test_fit_of_new_data_begins_a_file_of_its_own(tmp_path, trainer_with) -> None:
    log = EpisodeLog(tmp_path)
    for _ in range(2):
        trainer_with(log).fit(BoringRLModule(), datamodule=counting())
    assert len(read(tmp_path / "monitor.csv")) == len(read(tmp_path / "monitor.csv.1")) == 8


def test_exception_leaves_a_closed_file_with_all_episodes(trainer_with, known_data, learner) -> None:
    data, log = known_data(batches=4), EpisodeLog()
    data.fail_at = 3
    with pytest.raises(RuntimeError, match="the env broke"):
        trainer_with(log).fit(learner, datamodule=data)
    assert told(log.path, "r") == [(6,), (12,), (6,), (12,)]
    assert data.rollout_listeners == []


def test_listeners_are_gone_after_a_fit(trainer_with, known_data, learner) -> None:
    data, monitor, log = known_data(batches=2), CollectionMonitor(), EpisodeLog()
    for _ in range(2):
        trainer_with(monitor, log).fit(learner, datamodule=data)
        assert monitor.episode_listeners == data.rollout_listeners == []


def test_file_is_complete_at_each_checkpoint(trainer_with, known_data, learner, tmp_path) -> None:
    class Reads(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            trainer.save_checkpoint(tmp_path / "now.ckpt")
            seen.append(len(read(log.path)))

    log, seen = EpisodeLog(), []
    trainer_with(log, Reads()).fit(learner, datamodule=known_data(batches=3, minibatches=1))
    assert seen == [0, 2, 4]


def test_file_of_another_kind_is_not_continued(tmp_path, trainer_with) -> None:
    (tmp_path / "monitor.csv").write_text("r,l,t\n1,2,3\n")
    log = EpisodeLog(tmp_path)
    log.load_state_dict({"frames": 8})
    with pytest.raises(ValueError, match="cannot be continued : expected a file that EpisodeLog has written"):
        trainer_with(log).fit(BoringRLModule(), datamodule=counting())
    assert (tmp_path / "monitor.csv").read_text() == "r,l,t\n1,2,3\n"


def test_without_a_collecting_data_module_nothing_happens(known_data, learner, trainer_with, tmp_path) -> None:
    log = EpisodeLog(tmp_path / "logs")
    trainer_with(log).fit(learner, known_data(batches=2).train_dataloader())
    assert log.path is None
    assert not (tmp_path / "logs").exists()


def test_pandas_and_stable_baselines_can_read_the_file(trainer_with) -> None:
    pandas = pytest.importorskip("pandas")
    log = EpisodeLog()
    trainer_with(log).fit(BoringRLModule(), datamodule=counting())
    table = pandas.read_csv(log.path, skiprows=1)
    assert list(table.columns) == HEADER
    assert table["r"].sum() == sum(line["r"] for line in read(log.path))
