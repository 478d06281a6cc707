"""A replay buffer between the collector and the trainer: ratios, warm-up, exact rows, resuming, going on meanwhile."""

import copy
import logging
import pickle
import threading
from functools import partial

import lightning as L
import pytest
import torch

from lit_collect import (
    Collector,
    CollectorDataModule,
    CollectorDataset,
    NStep,
    ProcessBackend,
    ReplayBuffer,
    ReplayConfig,
    RolloutConfig,
    TrajectoryConfig,
    UpdateConfig,
)
from lit_collect.ahead import Ahead
from lit_collect.replay import ConsumingSampler, StalenessSampler
from lit_collect.testing import CountingEnv

pytestmark = pytest.mark.timeout(120)

LENGTHS = (3, 7, 1, 5)
MAKERS = [partial(CountingEnv, i, LENGTHS) for i in range(4)]
UPDATES = UpdateConfig(updates_per_batch=3)
BACKENDS = [
    pytest.param({}, {}, id="direct"),
    pytest.param({}, {"background": True}, id="direct in the background"),
    pytest.param({"backend": ProcessBackend(2)}, {}, id="processes", marks=pytest.mark.processes),
    pytest.param({"backend": ProcessBackend(2, sync=False)}, {}, id="asynchronous", marks=pytest.mark.processes),
    pytest.param(
        {"backend": ProcessBackend(2)}, {"background": True}, id="processes meanwhile", marks=pytest.mark.processes
    ),
]


def data_of(replay=None, **options) -> CollectorDataModule:
    settings = {"frames_per_batch": 16, "total_frames": 320, "updates": UPDATES, "evaluation": None, "seed": 0}
    return CollectorDataModule(
        MAKERS, replay=ReplayConfig(capacity=200, batch_size=8) if replay is None else replay, **{**settings, **options}
    )


def check_rows(sample) -> None:
    """Every row is a transition that happened."""
    seen, led_to = sample["observation"], sample["next", "observation"]
    assert torch.equal(led_to, seen + torch.tensor([0.0, 0.0, 1.0]))
    assert torch.equal(sample["next", "reward"].squeeze(-1), 100 * led_to[..., 1] + led_to[..., 2])
    lengths = torch.tensor(LENGTHS)[seen[..., 1].long() % len(LENGTHS)]
    assert torch.equal(sample["next", "terminated"].squeeze(-1), led_to[..., 2] == lengths)


@pytest.mark.parametrize(("options", "replay"), BACKENDS)
def test_each_batch_is_followed_by_its_number_of_samples(options, replay, learner, trainer_with):
    data = data_of(ReplayConfig(capacity=200, batch_size=8, min_frames=60, **replay), **options)
    collected = []
    data.rollout_listeners.append(lambda batch: collected.append(batch.numel()))
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    # the fourth batch makes it 64 rows
    assert len(model.batches) == len(data.train_dataloader()) == 3 * (320 // 16 - 3)
    assert sum(collected) == data.frames_total == 320
    assert len(data.replay_buffer) == 200
    assert data.replay_buffer.write_count == 320
    for sample in model.batches:
        assert sample.batch_size == (8,)
        check_rows(sample)
    versions = torch.cat([sample["collector", "policy_version"] for sample in model.batches[-3:]])
    assert versions.max() <= data.policy_version


@pytest.mark.parametrize("mode", ["rollout", "trajectory"])
def test_slices_of_the_loader_lie_in_one_episode(mode, learner, trainer_with):
    data = data_of(ReplayConfig(capacity=100, batch_size=12, slice_len=3, write_mode=mode))
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert len(model.batches) > 40
    for sample in model.batches:
        assert sample.batch_size == (4, 3)
        check_whole = sample["observation"]
        assert torch.equal(check_whole[:, 1:], sample["next", "observation"][:, :-1])
        assert sample["next", "done"][:, -1].all()
        assert not sample["next", "done"][:, :-1].any()


def test_whole_trajectories_are_written_once_complete(learner, trainer_with):
    replay = ReplayConfig(capacity=400, batch_size=8, write_mode="trajectory", trajs_per_write=3)
    data = data_of(replay)
    trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
    buffer = data.replay_buffer
    rows = buffer[torch.arange(len(buffer))]
    starts = (rows["observation"][:, 2] == 0).nonzero().flatten()
    ends = rows["next", "done"].flatten().nonzero().flatten()
    assert len(starts) == len(ends)
    assert torch.equal(ends[:-1] + 1, starts[1:])  # one after the other, none interleaved
    assert len(buffer) == data.frames_total == 320  # also those that waited for others at the end
    assert data.statistics()["replay_dropped"] == 0


@pytest.mark.parametrize("background", [False, True])
def test_resumed_run_writes_the_whole_trajectories_that_waited(tmp_path, learner, trainer_with, background):
    config = ReplayConfig(capacity=900, batch_size=8, write_mode="trajectory", trajs_per_write=7, background=background)
    first = data_of(config, frames_per_batch=20, total_frames=400)
    trainer = trainer_with(max_steps=9)
    trainer.fit(learner(), datamodule=first)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    second = data_of(config, frames_per_batch=20, total_frames=400)
    trainer_with(max_epochs=-1).fit(learner(), datamodule=second, ckpt_path=tmp_path / "one.ckpt")
    assert second.frames_total == 400
    assert len(second.replay_buffer) + second.statistics()["replay_dropped"] == 400
    assert 0 < second.statistics()["replay_dropped"] < 2 * 4 * 7  # what was open at the checkpoint, and at the end


def test_samples_wait_until_there_is_a_slice_to_make(learner, trainer_with):
    data = data_of(ReplayConfig(capacity=200, batch_size=14, slice_len=7), frames_per_batch=4)  # one step of each copy
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert 0 < len(model.batches) < len(data.train_dataloader())
    assert all(sample.batch_size == (2, 7) for sample in model.batches)


def test_batch_of_which_all_rows_were_used_gives_no_more_samples(learner, trainer_with):
    # three samples of 5 rows in 16 frames, of which one is left each time; the last batch has 8 frames
    data = data_of(ReplayConfig(capacity=200, batch_size=5, sampler=ConsumingSampler()), total_frames=40)
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert len(model.batches) == 3 + 3 + 2
    assert data.frames_total == 40
    used = torch.cat([sample["collector", "written"] for sample in model.batches])
    assert len(used.unique()) == len(used) == 40


def test_rows_that_become_too_old_between_samples_are_not_waited_for():
    buffer = ReplayBuffer(100, batch_size=4, sampler=StalenessSampler(max_staleness=0), seed=0)
    with Collector(MAKERS, frames_per_batch=8, total_frames=16, replay_buffer=buffer) as collector:
        samples = 0
        for _ in CollectorDataset(collector, updates=UPDATES):
            samples += 1
            collector.increment_version()
            buffer.learner_version = collector.policy_version
    assert samples == 2  # one of each batch


def test_budget_in_which_no_slice_could_be_made_is_an_error(learner, trainer_with):
    data = data_of(ReplayConfig(capacity=200, batch_size=16, slice_len=8))  # no episode has more than 7 frames
    with pytest.raises(ValueError, match="no trajectory is long enough : expected slices of 8 rows, got at most 7"):
        trainer_with(max_epochs=-1).fit(learner(), datamodule=data)


def test_anything_with_extend_and_sample_is_a_replay_buffer(learner, trainer_with):
    class Newest(list):
        def extend(self, rows):
            self.append(rows)

        def sample(self):
            return self[-1]

    data = data_of(Newest())
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert [sample.batch_size for sample in model.batches] == [(16,)] * 60
    data.update_priority(model.batches[0], torch.zeros(16))  # it has none, which is fine


def test_priorities_reach_the_buffer(trainer_with, learner):
    class Prioritizing(learner):
        def training_step(self, batch, batch_idx):
            first = batch["observation"][:, 0] == 2  # only env copy 2 is worth it
            self.trainer.datamodule.update_priority(batch, first.float())
            return super().training_step(batch, batch_idx)

    data = data_of(ReplayConfig(capacity=1000, batch_size=64, sampler="prioritized"))
    model = Prioritizing()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    late = torch.cat([sample["observation"][:, 0] for sample in model.batches[-10:]])
    assert (late == 2).float().mean() > 0.8
    assert (model.batches[0]["observation"][:, 0] == 2).float().mean() < 0.6
    assert ("collector", "weight") in model.batches[0].keys(True, True)


def test_compact_batches_are_stored_once_and_come_back_whole(learner, trainer_with):
    data = data_of(rollout=RolloutConfig(compact_obs=True))
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert data.replay_buffer.compact_obs
    for sample in model.batches:
        check_rows(sample)


def test_prepared_batches_are_what_is_written(learner, trainer_with):
    class Preparing(learner):
        def prepare_rollout(self, batch):
            return batch.set("extra", batch["observation"][..., 2] * 2)

    data = data_of()
    model = Preparing()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert all(torch.equal(sample["extra"], 2 * sample["observation"][:, 2]) for sample in model.batches)


def test_loop_of_ones_own_gets_samples_too():
    config = ReplayConfig(capacity=100, batch_size=4, min_frames=32, transforms=(NStep(2, 0.5),))
    with Collector(MAKERS, frames_per_batch=16, total_frames=64, replay_buffer=config, seed=0) as collector:
        dataset = CollectorDataset(collector, updates=UPDATES)
        samples = list(dataset)
        assert len(samples) == len(dataset) == 9
        assert isinstance(collector.replay_buffer, ReplayBuffer)
        assert samples[0]["collector", "n_steps"].max() == 2


def test_whole_trajectories_can_be_collected_into_a_buffer(learner, trainer_with):
    data = data_of(trajectories=TrajectoryConfig(trajs_per_batch=2))
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=data)
    assert data.replay_buffer.write_count == data.frames_total
    assert len(model.batches) == 3 * data.statistics()["batches"]


@pytest.mark.parametrize("storage", ["memory", "shared", "mapped"])
def test_fit_that_is_resumed_goes_on_with_the_same_buffer(storage, learner, trainer_with, tmp_path):
    path = str(tmp_path / "rows") if storage == "mapped" else None
    replay = ReplayConfig(capacity=200, batch_size=8, sampler="prioritized", storage=storage, path=path)

    class Prioritizing(learner):
        def training_step(self, batch, batch_idx):
            self.trainer.datamodule.update_priority(batch, batch["observation"][:, 2] + 0.5)
            return super().training_step(batch, batch_idx)

    data = data_of(replay)
    trainer = trainer_with(max_steps=20)  # in the middle of the samples of batch 7
    trainer.fit(Prioritizing(), datamodule=data)
    trainer.save_checkpoint(tmp_path / "at20.ckpt")
    assert len(data.replay_buffer) == 7 * 16
    before = data.replay_buffer.state_dict()
    data.close()

    again = data_of(replay)
    model = Prioritizing()
    model.on_train_start = lambda: found.append(again.replay_buffer.state_dict())
    found = []
    trainer_with(max_epochs=-1).fit(model, datamodule=again, ckpt_path=tmp_path / "at20.ckpt", weights_only=True)
    assert_equal(found[0], before)
    # one sample was left of batch 7, then there are 13 batches more
    assert len(model.batches) == 1 + 3 * 13
    assert again.replay_buffer.write_count == again.frames_total == 320
    for sample in model.batches:
        check_rows(sample)
    rows = again.replay_buffer[torch.arange(200)]
    ids = rows["collector", "traj_ids"]
    for name in ids.unique():  # no episode goes on in another one
        steps = rows["observation"][ids == name]
        assert (steps[:, :2] == steps[0, :2]).all()
    again.close()


def test_fit_that_is_resumed_although_its_rows_are_gone_begins_with_new_ones(learner, trainer_with, tmp_path):
    replay = ReplayConfig(capacity=32, batch_size=8, storage="mapped", path=str(tmp_path / "rows"))
    data = data_of(replay)
    trainer = trainer_with(max_steps=7)  # in the middle of the samples of batch 3
    trainer.fit(learner(), datamodule=data)
    trainer.save_checkpoint(tmp_path / "at7.ckpt")
    for _ in range(2):  # batches of a time that is taken back: nothing is left in the files of what was there
        data.replay_buffer.extend(data.replay_buffer[torch.arange(32)])
    data.close()

    again = data_of(replay)
    model = learner()
    trainer_with(max_epochs=-1).fit(model, datamodule=again, ckpt_path=tmp_path / "at7.ckpt", weights_only=True)
    assert again.frames_total == again.replay_buffer.write_count == 320
    assert len(model.batches) == 3 * 17
    again.close()


def assert_equal(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_buffer_is_kept_from_fit_to_fit(learner, trainer_with):
    data = data_of(total_frames=-1, batches_per_epoch=5)
    trainer_with(max_epochs=1).fit(learner(), datamodule=data)
    assert len(data.replay_buffer) == 80
    model = learner()
    trainer_with(max_epochs=1).fit(model, datamodule=data)
    assert data.replay_buffer.write_count == 160
    assert len(model.batches) == 15


def test_background_is_refused_where_it_cannot_be(learner, trainer_with):
    data = data_of(ReplayConfig(capacity=200, background=True))
    data._seat.trainer = type("TwoRanks", (), {"world_size": 2, "global_rank": 0})()
    with pytest.raises(ValueError, match=r"single rank, got 2; use ProcessBackend\(sync=False\)"):
        data._supply._check_alone()


@pytest.mark.parametrize(("options", "replay"), [BACKENDS[1], BACKENDS[4]])
def test_rows_of_the_background_were_acted_by_the_weights_that_they_name(options, replay, learner, trainer_with):
    data = data_of(ReplayConfig(capacity=400, batch_size=8, **replay), **options)
    trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
    rows = data.replay_buffer[torch.arange(320)]
    # each optimizer step lowers the weight by 1 and is published
    assert torch.equal(-rows["weight"].squeeze(-1), rows["collector", "policy_version"].float())
    assert rows["collector", "policy_version"].max() > 10


def test_collector_in_the_background_waits_for_the_learner(learner, trainer_with):
    ahead = []

    class Watching(learner):
        def training_step(self, batch, batch_idx):
            collector = self.trainer.datamodule._supply.collector
            ahead.append(collector.budget.yielded - self.trainer.datamodule.frames_total)
            return super().training_step(batch, batch_idx)

    data = data_of(ReplayConfig(capacity=200, batch_size=8, background=True))
    trainer_with(max_epochs=-1).fit(Watching(), datamodule=data)
    assert max(ahead) <= 32  # one batch waits, one is being made


def test_batch_that_is_on_its_way_from_the_background_was_not_handed_out():
    made, on_its_way, may_arrive = [], threading.Event(), threading.Event()

    def held_back(batch):
        made.append(batch)
        if len(made) == 2:
            on_its_way.set()
            assert may_arrive.wait(30)
        return batch

    ahead = Ahead()
    options = {"frames_per_batch": 8, "total_frames": 64, "replay_buffer": ahead, "hooks": {"postproc": held_back}}
    with Collector(MAKERS, **options) as collector:
        ahead.start(collector)
        assert ahead.take(lambda: None)[0].numel() == 8
        assert on_its_way.wait(30)
        state = ahead.counted_out(collector.state_dict())
        may_arrive.set()
    assert (state["frames_yielded"], state["batches"]) == (8, 1)


def test_what_goes_wrong_in_the_background_ends_the_fit(learner, trainer_with):
    class Broken(CountingEnv):
        def step(self, action):
            if self.episode == 3:
                raise OSError("the door is locked")
            return super().step(action)

    data = CollectorDataModule(
        [Broken] * 2,
        frames_per_batch=4,
        replay=ReplayConfig(capacity=200, batch_size=8, background=True),
        evaluation=None,
    )
    with pytest.raises(Exception, match="the door is locked"):
        trainer_with(max_epochs=-1).fit(learner(), datamodule=data)


def test_trajectories_of_the_background_are_all_handed_out(learner, trainer_with):
    options = {"total_frames": 320, "trajectories": TrajectoryConfig(trajs_per_batch=3)}
    data = data_of(ReplayConfig(capacity=400, batch_size=8, background=True), **options)

    class Slow(learner):
        def training_step(self, batch, batch_idx):
            supply = self.trainer.datamodule._supply
            while supply.collector.is_running and supply._ahead.wait_for_room(0.01):
                pass  # until a batch waits, or there will be none
            return super().training_step(batch, batch_idx)

    trainer_with(max_epochs=-1).fit(Slow(), datamodule=data)
    counts = data.statistics()
    assert counts["frames_stepped"] == 320
    assert counts["frames_yielded"] == data.frames_total == len(data.replay_buffer)
    assert counts["frames_dropped"] == 320 - data.frames_total
    assert data.progress == 1.0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_copy_of_a_data_module_has_a_buffer_of_its_own(duplicate, learner, trainer_with):
    data = data_of()
    other = duplicate(data)
    for each in (data, other):
        trainer_with(max_epochs=-1).fit(learner(), datamodule=each)
    assert other.replay_buffer is not data.replay_buffer
    assert len(other.replay_buffer) == len(data.replay_buffer) == 200


@pytest.mark.parametrize("background", [False, True])
def test_state_of_before_the_first_batch_is_of_no_rows(background, learner, trainer_with, tmp_path):
    data = data_of(ReplayConfig(capacity=400, batch_size=8, background=background))
    before = copy.deepcopy(data.state_dict())

    class GoBack(L.Callback):  # as Lightning's tuner does, within a fit
        def on_train_end(self, trainer, pl_module):
            data.load_state_dict(before)

    trainer_with(max_epochs=-1, max_steps=9, callbacks=[GoBack()]).fit(learner(), datamodule=data)
    assert (data.frames_total, len(data.replay_buffer)) == (0, 0)
    trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
    assert data.frames_total == len(data.replay_buffer) == 320


@pytest.mark.parametrize(("options", "replay"), BACKENDS)
def test_counts_after_a_fit_that_was_stopped_are_of_what_was_handed_out(options, replay, learner, trainer_with):
    data = data_of(ReplayConfig(capacity=400, batch_size=8, **replay), **options)
    trainer_with(max_steps=7).fit(learner(), datamodule=data)
    counts = data.statistics()
    assert counts["frames_yielded"] == data.frames_total
    assert counts["frames_stepped"] == sum(counts[f"frames_{what}"] for what in ("yielded", "pending", "dropped"))


def test_second_run_on_a_mapped_folder_is_told_that_it_goes_on(tmp_path, learner, trainer_with, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")
    replay = ReplayConfig(capacity=400, batch_size=8, storage="mapped", path=str(tmp_path / "rows"))
    for rows in (64, 128):
        caplog.clear()
        data = data_of(replay, total_frames=64)
        trainer_with(max_epochs=-1).fit(learner(), datamodule=data)
        assert len(data.replay_buffer) == rows
        data.replay_buffer.close()
        said = [text for text in caplog.messages if "goes on with 64 rows of an earlier run" in text]
        assert len(said) == (rows == 128)
