"""What `CollectionMonitor` says of a replay buffer."""

from functools import partial

import lightning as L
import pytest

from lit_collect import CollectionMonitor, CollectorDataModule, ReplayConfig, UpdateConfig
from lit_collect.metrics import ReplayUse
from lit_collect.testing import BoringRLModule, CountingEnv


class Keeping(L.Callback):
    """Keeps what the monitor has logged after each batch."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, *args):
        monitor = next(callback for callback in trainer.callbacks if isinstance(callback, CollectionMonitor))
        if monitor.latest not in self.values:
            self.values.append(monitor.latest)


def fit(**options):
    data = CollectorDataModule(
        [partial(CountingEnv, i) for i in range(4)],
        frames_per_batch=16,
        total_frames=160,
        evaluation=None,
        seed=0,
        **options,
    )
    keeping = Keeping()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[CollectionMonitor(), keeping],
    )
    trainer.fit(BoringRLModule(), datamodule=data)
    return keeping.values


def test_fill_age_and_updates_per_frame_are_logged():
    values = fit(
        replay=ReplayConfig(capacity=100, batch_size=32, min_frames=48), updates=UpdateConfig(updates_per_batch=4)
    )
    # logged with the first sample of each batch; warm-up frames came before the first
    assert [each["replay/size"] for each in values] == [48, 64, 80, 96, 100, 100, 100, 100]
    assert values[0]["replay/updates_per_frame"] == 1 / 48
    assert [each["replay/updates_per_frame"] for each in values[1:]] == [4 / 16] * 7
    for each in values:
        assert 0 <= each["replay/age_mean"] < each["replay/size"] + 16
    assert 30 < values[-1]["replay/age_mean"] < 70  # uniform over the last 100 rows


def test_buffer_of_somebody_else_is_asked_for_no_more_than_its_length():
    class Newest(list):
        def extend(self, rows):
            self.append(rows)

        def sample(self):
            return self[-1]

    values = fit(replay=Newest())
    assert values[-1]["replay/size"] == 10
    assert "replay/age_mean" not in values[-1]


def test_nothing_is_said_without_a_buffer():
    assert not [key for key in fit()[-1] if key.startswith("replay/")]


@pytest.mark.parametrize(
    ("use", "frames", "values"),
    [
        (ReplayUse(10, 6.0, 4, 2), 8, {"size": 10, "age_mean": 1.5, "updates_per_frame": 0.25}),
        (ReplayUse(10), 8, {"size": 10, "updates_per_frame": 0.0}),
        (ReplayUse(10), 0, {"size": 10}),
    ],
)
def test_values_are_there_where_there_is_something_to_tell(use, frames, values):
    assert use.values(frames) == values
