"""Training from offline data."""

import sys

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDict

from lit_collect import CollectionMonitor, Collector, CollectorDataModule, EvaluationConfig, OfflineDataModule
from lit_collect.cli import main
from lit_collect.frames import INDEX, NEXT_REWARD, TRAJ_IDS, WEIGHT
from lit_collect.offline import offline_buffer
from lit_collect.offline.episodes import as_rows
from lit_collect.offline.memory_maps import RowWriter, read_rows
from lit_collect.offline.minari import MinariWriter
from lit_collect.offline.sources import check_spaces
from lit_collect.replay import MappedStorage, MixedBuffer, NStep, ReplayBuffer
from lit_collect.testing import BoringRLModule, CountingEnv


def make_trainer(**settings):
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    return L.Trainer(**{**quiet, **settings})


class Learner(BoringRLModule):
    """Knows what it was told, and gives priorities."""

    def configure_spaces(self, observation_spec, action_spec):
        self.told = observation_spec, action_spec

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.trainer.datamodule.update_priority(batch, batch["observation"].sum(-1))
        return loss


class Evaluated(Learner):
    """Plays in an env, too."""

    def validation_step(self, batch, batch_idx):
        self.evaluated = batch


class Keeper(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def identities(sample):
    """Copy, episode and step of each row."""
    return {tuple(row) for row in sample["observation"].reshape(-1, 3).int().tolist()}


# --- what is sampled --------------------------------------------------------------------------------------------------


def test_every_row_is_sampled_as_it_was_written(counted_rows):
    data = OfflineDataModule(str(counted_rows), batch_size=16, updates_per_epoch=3, sampler="without_replacement")
    rows = read_rows(counted_rows)[0]
    assert (data.num_rows, len(data.train_dataloader())) == (48, 3)
    samples = torch.cat(list(data.train_dataloader()))
    assert sorted(samples[INDEX].tolist()) == list(range(48))
    for key in rows.keys(True, True):
        assert torch.equal(samples[key], rows[key][samples[INDEX]]), key
    assert data.frames_total == 48
    data.close()


def test_slices_stay_within_episodes_that_lie_in_several_batches(counted_rows):
    data = OfflineDataModule(str(counted_rows), batch_size=60, slice_len=5, updates_per_epoch=20, seed=0)
    for sample in data.train_dataloader():
        assert sample.shape == (12, 5)
        assert (sample["observation"][:, :, 2] == torch.arange(5.0)).all()
        assert (sample[TRAJ_IDS] == sample[TRAJ_IDS][:, :1]).all()
    data.close()


def test_transforms_are_applied(counted_rows):
    data = OfflineDataModule(str(counted_rows), batch_size=48, transforms=[NStep(n=2, gamma=0.5)], seed=0)
    sample = data.sample()
    step, first = sample["observation"][:, 2], sample["observation"][:, 1] * 100
    ends = sample["next", "observation"][:, 2] - step == 1
    one = first + step + 1
    assert ends.any()
    assert torch.equal(sample[NEXT_REWARD][:, 0], torch.where(ends, one, one + 0.5 * (one + 1)))
    data.close()


def test_minari_data_are_sampled_with_their_spaces(tmp_path, play):
    pytest.importorskip("minari")
    pytest.importorskip("h5py")
    collector, episodes = play(CountingEnv)
    writer = MinariWriter(tmp_path / "c-v0", collector.observation_space, action_space=collector.action_space)
    writer.write(episodes)
    data = OfflineDataModule(str(tmp_path / "c-v0"), batch_size=60, sampler="without_replacement")
    assert data.action_spec == {"kind": "discrete", "n": 2, "start": 0}
    assert identities(data.sample()) == {(0, number, step) for number in range(20) for step in range(3)}
    data.close()


def test_seeds_decide_what_is_sampled(counted_rows):
    drawn = []
    for seed in (1, 1, 2):
        data = OfflineDataModule(str(counted_rows), batch_size=8, updates_per_epoch=2, seed=seed)
        drawn.append([sample[INDEX].tolist() for sample in data.train_dataloader()])
        data.close()
    assert drawn[0] == drawn[1] != drawn[2]


def test_mapped_rows_are_written_once_and_found_again(counted_rows, tmp_path):
    drawn = []
    for _ in range(2):
        with offline_buffer(str(counted_rows), 8, storage=MappedStorage(tmp_path / "store"), seed=3) as buffer:
            drawn.append(buffer.sample()[INDEX].tolist())
            assert len(buffer) == buffer.write_count == 48
    assert drawn[0] == drawn[1]


# --- in a fit ---------------------------------------------------------------------------------------------------------


def test_a_fit_trains_on_samples_and_evaluates_in_an_env(counted_rows):
    monitor = CollectionMonitor()
    data = OfflineDataModule(
        str(counted_rows),
        batch_size=8,
        updates_per_epoch=5,
        env=CountingEnv,
        evaluation=EvaluationConfig(num_episodes=2),
        seed=0,
    )
    model = Evaluated()
    make_trainer(max_epochs=2, callbacks=[monitor]).fit(model, datamodule=data)
    assert [batch.shape for batch in model.batches] == [(8,)] * 10
    assert model.told == (data.observation_spec, data.action_spec)
    assert (monitor.latest["eval/length_mean"], monitor.latest["eval/episodes"]) == (3.0, 2.0)
    assert model.evaluated.shape == (2, 3)
    assert monitor.evaluations == 2
    assert (data.progress, data.frames_total, data.total_frames) == (1.0, 80, 80)


def test_precision_leaves_samples_their_shape(counted_rows):
    data = OfflineDataModule(str(counted_rows), batch_size=10, slice_len=5, updates_per_epoch=2, seed=0)
    model = BoringRLModule()
    make_trainer(max_epochs=1, precision="bf16-true").fit(model, datamodule=data)
    assert [batch.shape for batch in model.batches] == [(2, 5), (2, 5)]


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "without_replacement"])
def test_a_resumed_fit_draws_what_the_whole_one_would_have_drawn(counted_rows, tmp_path, sampler):
    def fit(ckpt_path=None, **settings):
        data = OfflineDataModule(str(counted_rows), batch_size=8, updates_per_epoch=7, sampler=sampler, seed=5)
        model = Learner()
        make_trainer(max_epochs=2, **settings).fit(model, datamodule=data, ckpt_path=ckpt_path)
        assert data.frames_total == 14 * 8
        return [(batch[INDEX].tolist(), batch.get(WEIGHT, torch.zeros(0)).tolist()) for batch in model.batches]

    whole = fit(callbacks=[Keeper(tmp_path / "kept.ckpt", step=4)])
    assert len(whole) == 14
    assert fit(tmp_path / "kept.ckpt") == whole[4:]


def test_a_state_of_other_data_is_refused(counted_rows):
    data = OfflineDataModule(str(counted_rows), batch_size=8, seed=0)
    data.sample()
    state = data.state_dict()
    data.close()
    for change, words in (({"rows": 47}, "expected 47 rows, got 48"), ({"digest": "0"}, "expected the same 48 rows")):
        with pytest.raises(ValueError, match=f"of other offline data : {words}.* at .*counted"):
            data.load_state_dict({**state, "buffer": {**state["buffer"], **change}})
    data.load_state_dict(state)


def test_a_state_of_another_sampler_is_refused_before_a_sample_is_drawn(counted_rows):
    data = OfflineDataModule(str(counted_rows), batch_size=8, seed=0)
    data.sample()
    state = data.state_dict()
    data.close()
    other = OfflineDataModule(str(counted_rows), batch_size=8, sampler="prioritized", seed=0)
    with pytest.raises(ValueError, match="not that of a buffer with a PrioritizedSampler"):
        other.load_state_dict(state)


def test_fitting_twice_goes_on(counted_rows):
    data, model = OfflineDataModule(str(counted_rows), batch_size=8, updates_per_epoch=3, seed=0), BoringRLModule()
    for _ in range(2):
        make_trainer(max_epochs=1).fit(model, datamodule=data)
    drawn = [batch[INDEX].tolist() for batch in model.batches]
    assert len(drawn) == 6
    assert drawn[:3] != drawn[3:]


def test_rows_nobody_knows_the_spaces_of_need_an_env(tmp_path, counted_rows):
    read_rows(counted_rows)[0].clone().memmap(str(tmp_path / "bare"))
    data = OfflineDataModule(str(tmp_path / "bare"), batch_size=8)
    assert data.observation_spec is None
    with pytest.raises(ValueError, match="nobody says what the spaces of the rows"):
        make_trainer(max_epochs=1).fit(Learner(), datamodule=data)
    data = OfflineDataModule(str(tmp_path / "bare"), batch_size=8, env="CartPole-v1")
    assert data.observation_spec["shape"] == [4]
    data.close()


# --- with collected rows ----------------------------------------------------------------------------------------------


def test_offline_and_collected_rows_come_in_one_sample(counted_rows):
    mixed = MixedBuffer(ReplayBuffer(1000, 12, seed=0), offline_buffer(str(counted_rows), seed=0), fraction=0.25)
    data = CollectorDataModule(
        lambda: CountingEnv(7), num_envs=2, frames_per_batch=8, total_frames=40, replay=mixed, evaluation=None, seed=0
    )
    model = BoringRLModule()
    make_trainer(max_epochs=-1).fit(model, datamodule=data)
    assert len(model.batches) == 5
    for batch in model.batches:
        copies = batch["observation"][:, 0]
        assert batch.shape == (12,)
        assert (copies[:3] == 7).all()
        assert (copies[3:] < 2).all()
        assert batch["collector", "offline"].tolist() == [False] * 3 + [True] * 9


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def config(counted_rows, tmp_path, monkeypatch):
    """A config of a run of three samples."""
    monkeypatch.setattr(sys, "argv", ["lit-collect"])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    config = {
        "seed_everything": 1,
        "trainer": {"accelerator": "cpu", "max_epochs": 1, **quiet},
        "model": {"class_path": "lit_collect.testing.BoringRLModule"},
        "data": {
            "class_path": "lit_collect.OfflineDataModule",
            "init_args": {
                "path": str(counted_rows),
                "batch_size": 8,
                "updates_per_epoch": 3,
                "sampler": {"class_path": "lit_collect.replay.PrioritizedSampler", "init_args": {"alpha": 0.5}},
                "transforms": [{"class_path": "lit_collect.NStep", "init_args": {"n": 2, "gamma": 0.9}}],
            },
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def refused(config, capsys):
    """Run the command, which refuses a setting; what it says."""

    def refused(*options):
        with pytest.raises(SystemExit) as error:
            main(["fit", f"--config={config}", *options])
        assert error.value.code == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lit-collect: error: ")]
        return line

    return refused


def test_the_command_line_trains_from_a_config(config, capsys):
    assert main(["fit", f"--config={config}"]) == 0
    assert "frames          24" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--data.path=nothing", "there is no offline data at nothing"),
        ("--data.slice_len=4", "NStep works on single rows"),
        ("--data.storage=mapped", "got storage='mapped' and storage_path=None"),
        ("--data.env=Pendulum-v1", "the env has another action space than the rows at"),
    ],
)
def test_a_refused_setting_is_one_line_on_the_command_line(refused, option, words):
    assert words in refused("--data.sampler=uniform", "--data.evaluation=null", option)


def test_a_checkpoint_of_another_sampler_is_one_line_on_the_command_line(config, refused, tmp_path):
    save = {"class_path": "tests.offline.test_datamodule.Keeper", "init_args": {"path": "kept.ckpt", "step": 2}}
    main(["fit", f"--config={config}", f"--trainer.callbacks={save}"])
    words = refused("--ckpt_path=kept.ckpt", "--data.sampler=without_replacement")
    assert "not that of a buffer with a WithoutReplacementSampler" in words


class Careless(Learner):
    """Calls something of ours in a wrong way: only the traceback says where."""

    def configure_spaces(self, observation_spec, action_spec):
        NStep(n=0, gamma=0.5)


def test_an_error_of_a_module_that_is_set_up_keeps_its_traceback(config):
    with pytest.raises(ValueError, match="n must be"):
        main(["fit", f"--config={config}", "--model=tests.offline.test_datamodule.Careless"])


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_no_data_is_refused(tmp_path):
    for path in (None, 3):
        with pytest.raises(TypeError, match=f"path must be the folder of offline data .*, got {path}"):
            OfflineDataModule(path)
    with pytest.raises(FileNotFoundError, match="`lit-collect collect` makes both"):
        OfflineDataModule(str(tmp_path / "nothing"))
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ValueError, match="holds no offline data"):
        OfflineDataModule(str(tmp_path / "thesis"))
    TensorDict(
        {"action": torch.zeros(0), "next": {"reward": torch.zeros(0, 1), "done": torch.zeros(0, 1)}}, [0]
    ).memmap(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="are empty : expected at least one row"):
        OfflineDataModule(str(tmp_path / "empty"))


def test_settings_are_checked_at_once(counted_rows):
    path = str(counted_rows)
    with pytest.raises(ValueError, match="batch_size must be a multiple of slice_len=5, got 12"):
        OfflineDataModule(path, batch_size=12, slice_len=5)
    with pytest.raises(ValueError, match="updates_per_epoch must be at least 1, got 0"):
        OfflineDataModule(path, updates_per_epoch=0)
    with pytest.raises(ValueError, match="info_keys choose from a Minari data set"):
        OfflineDataModule(path, info_keys=["level"])
    with pytest.warns(UserWarning, match="batch_size=256 is more than the 48 rows"):
        OfflineDataModule(path)


def test_a_slice_longer_than_any_episode_is_refused(counted_rows):
    data = OfflineDataModule(str(counted_rows), batch_size=12, slice_len=6)
    with pytest.raises(ValueError, match="expected slices of 6 rows, got at most 5"):
        data.sample()
    data.close()


def test_rows_of_another_time_in_a_storage_are_told(counted_rows, tmp_path):
    with (
        Collector("CartPole-v1", num_envs=1, frames_per_batch=9, seed=0) as collector,
        RowWriter(tmp_path / "other", {}) as writer,
    ):
        writer.write(as_rows(collector.collect()))
    with ReplayBuffer(48, storage=MappedStorage(tmp_path / "store")) as buffer:
        buffer.extend(read_rows(counted_rows)[0][:7])
    with pytest.raises(ValueError, match="holds 7 rows of another time"):
        offline_buffer(str(counted_rows), storage=MappedStorage(tmp_path / "store"))


class Examined(Evaluated):
    """May be tested, too."""

    def test_step(self, batch, batch_idx):
        self.tested = batch


@pytest.mark.parametrize("run", ["fit", "validate", "test"])
def test_an_env_with_other_spaces_than_the_data_is_refused_before_anything_runs(counted_rows, run):
    data = OfflineDataModule(str(counted_rows), batch_size=8, env="Pendulum-v1", seed=0)
    wrong = r"another action space than the rows at .*counted : expected discrete with n=2, got box with shape=\[1\]; "
    with pytest.raises(ValueError, match=wrong):
        getattr(make_trainer(max_epochs=1), run)(Examined(), datamodule=data)


class Closing(CountingEnv):
    """Counts how many are open."""

    open = 0

    def __init__(self):
        super().__init__()
        Closing.open += 1

    def close(self):
        Closing.open -= 1


def test_the_env_that_is_asked_for_its_spaces_is_closed(counted_rows):
    data = OfflineDataModule(str(counted_rows), batch_size=8, env=Closing, seed=0)
    data.setup("fit")
    assert Closing.open == 0


BOX = {"kind": "box", "shape": [3], "dtype": "float32", "low": [-9.0] * 3, "high": [9.0] * 3}
CHOICES = {"kind": "multi_discrete", "nvec": [2, 3], "start": [0, 0]}


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (BOX, {**BOX, "shape": [4]}, r"expected box with shape=\[3\], got box with shape=\[4\]"),
        (CHOICES, {**CHOICES, "nvec": [2, 4]}, r"nvec=\[2, 3\], got multi_discrete with nvec=\[2, 4\]"),
        ({"kind": "dict", "spaces": {"a": BOX}}, {"kind": "dict", "spaces": {"b": BOX}}, "dict of a, got dict of b"),
        (
            {"kind": "dict", "spaces": {"a": {"kind": "tuple", "spaces": [CHOICES, BOX]}}},
            {"kind": "dict", "spaces": {"a": {"kind": "tuple", "spaces": [CHOICES, {**BOX, "shape": [1]}]}}},
            "another space at 'a' at 1 than",
        ),
        ({"kind": "tuple", "spaces": [BOX]}, {"kind": "tuple", "spaces": [BOX, BOX]}, "tuple of 0, got tuple of 0, 1"),
    ],
)
def test_other_spaces_are_told_by_where_they_differ(expected, got, words):
    with pytest.raises(ValueError, match=words):
        check_spaces("runs/old", {"space": expected}, {"space": got})


def test_spaces_that_differ_in_bounds_and_dtypes_alone_are_alike():
    alike = {**BOX, "dtype": "float64", "low": [0.0] * 3}
    check_spaces("runs/old", {"space": BOX, "other": None}, {"space": alike, "other": BOX})
    inner = {"kind": "dict", "spaces": {"a": BOX, "b": CHOICES}}
    check_spaces("runs/old", {"space": inner}, {"space": {"kind": "dict", "spaces": {"b": CHOICES, "a": alike}}})
