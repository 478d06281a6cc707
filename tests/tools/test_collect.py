"""What `lit-collect collect` writes."""

import os
import resource
import signal
import sys
import weakref
from pathlib import Path

import lightning as L
import pytest
import torch
from tensordict import TensorDict

from lit_collect import CollectorDataModule, OfflineDataModule, RolloutConfig
from lit_collect.cli import main
from lit_collect.offline import memory_maps
from lit_collect.offline.memory_maps import _set_rows, read_rows
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv, FailingEnv
from lit_collect.tools import collect

RUN = """
seed_everything: 1
trainer: {accelerator: cpu, max_epochs: -1, logger: false, enable_checkpointing: false, enable_model_summary: false}
model:
  class_path: lit_collect.testing.BoringRLModule
  init_args: {policy: {class_path: lit_collect.testing.ConstantPolicy, init_args: {action: 1.0, num_actions: 2}}}
data:
  class_path: lit_collect.CollectorDataModule
  init_args:
    env: tests.tools.envs.make_counting
    num_envs: 2
    frames_per_batch: 16
    total_frames: 80
    evaluation: null
"""


@pytest.fixture(autouse=True)
def own_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lit-collect"])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.fixture
def run(config, capsys):
    """Run the command; exit status, and what it says by its names."""

    def run(*options):
        status = main(["collect", f"--config={config}", *options])
        lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
        return status, {line[0]: line[1].strip() for line in lines if len(line) == 2}

    return run


@pytest.fixture
def refused(config, capsys):
    """Run the command, which is used wrongly; what it says."""

    def refused(*options):
        with pytest.raises(SystemExit) as error:
            main(["collect", f"--config={config}", *options])
        assert error.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return refused


def steps_of(rows):
    """Episode and step of each row."""
    return [tuple(row[1:]) for row in rows["observation"].int().tolist()]


def make_interrupting():
    return FailingEnv("step", at=20, error=KeyboardInterrupt(), lengths=(4,))


class Swallowing(CountingEnv):
    """Step 20 says so, waits for Ctrl-C, and takes it within a callback, which exceptions do not leave."""

    def __init__(self):
        super().__init__(lengths=(4,))
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 20:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            os.write(1, b"waiting\n")
            while signal.SIGINT not in signal.sigpending():
                pass
            held = Swallowing()
            seen = weakref.ref(held, lambda _: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]))
            del held
            assert seen() is None
        return super().step(action)


def make_failing():
    return FailingEnv("step", at=20, error=OSError("the door is stuck"), lengths=(4,))


# --- rows -------------------------------------------------------------------------------------------------------------


def test_every_row_is_written_in_the_order_of_the_batches(run, tmp_path):
    status, said = run(f"--out={tmp_path / 'rows'}")
    assert status == 0
    assert (said["frames"], said["episodes"], said["episode return"]) == ("80", "20 ended", "1810.0 (10.0 to 3610.0)")
    rows = TensorDict.load_memmap(tmp_path / "rows")
    counted = [divmod(step, 4) for step in range(40)]
    assert steps_of(rows) == [step for batch in range(5) for step in 2 * counted[8 * batch : 8 * batch + 8]]
    assert (rows["action"] == 1).all()
    about = read_rows(tmp_path / "rows")[1]
    assert (about["env"], about["rows"], about["complete"]) == ("tests.tools.envs.make_counting", 80, True)
    data = OfflineDataModule(str(tmp_path / "rows"), batch_size=8)
    assert data.action_spec == {"kind": "discrete", "n": 2, "start": 0}


def test_frames_are_met_exactly(run, tmp_path):
    assert run(f"--out={tmp_path / 'rows'}", "--frames=37")[1]["frames"] == "37"
    assert steps_of(read_rows(tmp_path / "rows")[0][32:]) == [(4, 0), (4, 1), (4, 2), (4, 0), (4, 1)]


def test_episodes_are_written_whole(run, tmp_path):
    status, said = run(f"--out={tmp_path / 'rows'}", "--episodes=5", "--data.frames_per_batch=14")
    assert (status, said["frames"], said["episodes"]) == (0, "20", "5 ended")
    rows = read_rows(tmp_path / "rows")[0]
    assert steps_of(rows) == [(number, step) for number in (0, 0, 1, 1, 2) for step in range(4)]
    assert rows["next", "done"].squeeze(-1).tolist() == 5 * [False, False, False, True]


def test_a_checkpoint_acts_instead_of_the_first_weights(run, tmp_path):
    model = BoringRLModule(ConstantPolicy(0.0, num_actions=2))
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "zero.ckpt")
    status, _ = run(f"--out={tmp_path / 'rows'}", f"--ckpt_path={tmp_path / 'zero.ckpt'}")
    assert status == 0
    assert (read_rows(tmp_path / "rows")[0]["action"] == 0).all()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("nursery")
def test_workers_write_the_same_rows(run, tmp_path):
    run(f"--out={tmp_path / 'direct'}")
    backend = "--data.backend={class_path: lit_collect.ProcessBackend, init_args: {num_collectors: 2}}"
    assert run(f"--out={tmp_path / 'processes'}", backend)[0] == 0
    one, other = (read_rows(tmp_path / name)[0] for name in ("direct", "processes"))
    assert (one == other).all()


# --- Minari -----------------------------------------------------------------------------------------------------------


def test_a_name_with_a_version_makes_a_minari_data_set(run, tmp_path):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    status, said = run(f"--out={tmp_path / 'count-v0'}", "--frames=22")
    assert (status, said["frames"], said["episodes"]) == (0, "22", "4 ended")
    data = minari.MinariDataset(tmp_path / "count-v0" / "data")
    ends = [(len(one.rewards), bool(one.terminations[-1]), bool(one.truncations[-1])) for one in data]
    assert ends == [(4, True, False)] * 4 + [(3, False, True)] * 2
    assert OfflineDataModule(str(tmp_path / "count-v0"), batch_size=8).num_rows == 22


def test_an_env_with_an_id_can_be_made_again(run, tmp_path):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    run(f"--out={tmp_path / 'pole-v0'}", "--episodes=3", "--data.env=CartPole-v1")
    data = minari.MinariDataset(tmp_path / "pole-v0" / "data")
    assert (data.total_episodes, data.env_spec.id) == (3, "CartPole-v1")
    env = data.recover_environment()
    env.close()


# --- what is there already --------------------------------------------------------------------------------------------


def test_data_are_replaced_only_if_that_is_wanted(run, refused, tmp_path):
    out = f"--out={tmp_path / 'rows'}"
    run(out, "--frames=16")
    assert "is not empty; give --overwrite" in refused(out, "--frames=32")
    assert len(read_rows(tmp_path / "rows")[0]) == 16
    assert run(out, "--frames=32", "--overwrite")[0] == 0
    assert len(read_rows(tmp_path / "rows")[0]) == 32


def test_other_files_are_never_replaced(refused, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("all of it")
    assert "expected data of this command there" in refused(f"--out={tmp_path / 'work'}", "--overwrite")
    assert "must be a folder" in refused(f"--out={tmp_path / 'work' / 'thesis.txt'}", "--overwrite")
    assert (tmp_path / "work" / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize("name", ["rows", "rows-v0"])
def test_a_place_where_no_folder_can_be_is_refused(refused, tmp_path, name):
    if name.endswith("v0"):
        pytest.importorskip("minari")
    (tmp_path / "file").write_text("all of it")
    for out in (tmp_path / "file" / name, Path("/proc/nobody") / name, tmp_path / ("x" * 300) / name):
        words = refused(f"--out={out}", "--frames=16")
        assert f"--out={out} cannot be written: " in words
        assert words.endswith("; give another --out")


def test_data_stay_until_there_are_others(run, refused, tmp_path):
    out = f"--out={tmp_path / 'rows'}"
    run(out, "--frames=16")
    assert "cannot be read" in refused(out, "--overwrite", f"--ckpt_path={tmp_path / 'nothing.ckpt'}")
    assert len(read_rows(tmp_path / "rows")[0]) == 16


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_what_was_written_before_an_interruption_is_there(run, tmp_path, capsys):
    env = "--data.env=tests.tools.test_collect.make_interrupting"
    status, said = run(f"--out={tmp_path / 'rows'}", env)
    assert (status, said["frames"]) == (130, "32")
    assert steps_of(read_rows(tmp_path / "rows")[0][:8]) == [divmod(step, 4) for step in range(8)]


@pytest.mark.slow
def test_an_interruption_of_the_process_is_never_lost(start_script, config, tmp_path):
    script = start_script(f"""
import sys
from lit_collect.cli import main

sys.exit(main([
    "collect", "--config={config}", "--out={tmp_path / "rows"}", "--frames=1000000000", "--data.num_envs=1",
    "--data.env=tests.tools.test_collect.Swallowing",
]))
""")
    assert any(line == "waiting\n" for line in script.stdout)
    script.send_signal(signal.SIGINT)
    out, err = script.communicate(timeout=60.0)
    assert script.returncode == 130, err
    assert "frames          32\n" in out
    assert "Ctrl-C again to stop at once" in err
    assert "Exception ignored" not in err
    assert read_rows(tmp_path / "rows")[1]["rows"] == 32


def test_rows_are_counted_that_were_being_written_when_it_was_interrupted(run, tmp_path, monkeypatch):
    def set_rows(path, count):
        _set_rows(path, count)
        if count == 32:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(memory_maps, "_set_rows", set_rows)
    status, said = run(f"--out={tmp_path / 'rows'}")
    assert (status, said["frames"]) == (130, "32")
    rows, about = read_rows(tmp_path / "rows")
    assert len(rows) == about["rows"] == 32


def test_what_was_written_before_an_error_is_there(config, tmp_path, capsys):
    env = "--data.env=tests.tools.test_collect.make_failing"
    assert main(["collect", f"--config={config}", f"--out={tmp_path / 'rows'}", env]) == 1
    assert "the door is stuck" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "rows")[0]) == 32


def test_a_full_disk_is_told(config, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))  # not enough for 800 observations
    try:
        assert main(["collect", f"--config={config}", f"--out={tmp_path / 'rows'}", "--frames=800"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "16 rows could not be written" in capsys.readouterr().err


def test_wrong_use_is_told(refused, tmp_path):
    out = f"--out={tmp_path / 'rows'}"
    assert "required: --out" in refused()
    assert "must be at least 1, got 0" in refused(out, "--frames=0")
    assert "not allowed with" in refused(out, "--frames=5", "--episodes=5")
    assert "expected --frames, --episodes or data.total_frames" in refused(out, "--data.total_frames=-1")
    assert "such as 'cartpole-v0'" in refused(f"--out={tmp_path / 'rows'}", "--format=minari")
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    assert "text.ckpt cannot be read : expected one of a Trainer" in refused(
        out, f"--ckpt_path={tmp_path / 'text.ckpt'}"
    )
    torch.save({"state_dict": {"other": torch.zeros(2)}}, tmp_path / "other.ckpt")
    assert not (tmp_path / "rows").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    torch.save({"state_dict": {"other": torch.zeros(2)}}, tmp_path / "other.ckpt")
    model = BoringRLModule(torch.nn.Linear(2, 3))
    weights = model.state_dict()
    (name, *_) = weights
    for changed, words in (
        ({"other": torch.zeros(2)}, rf"{name} is missing \(the first of {1 + len(weights)} differences\)"),
        ({**weights, "other": torch.zeros(2)}, r"other is unknown \(the first of 1 differences\)"),
        ({**weights, name: torch.zeros(7)}, rf"{name} has shape \[7\] instead of \[.*\] \(the first of 1 "),
    ):
        torch.save({"state_dict": changed}, tmp_path / "other.ckpt")
        with pytest.raises(ValueError, match=rf"other.ckpt does not fit BoringRLModule: {words}"):
            collect.load_weights(model, str(tmp_path / "other.ckpt"))


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (L.LightningDataModule(), BoringRLModule(), "a CollectorDataModule, got LightningDataModule"),
        (CollectorDataModule(CountingEnv, evaluation=None), L.LightningModule(), "no policy to act with"),
    ],
)
def test_what_cannot_collect_is_refused(tmp_path, data, model, message):
    given = collect.parser().parse_args([f"--out={tmp_path / 'rows'}", "--frames=8"])
    with pytest.raises(TypeError, match=message):
        collect.run(data, model, given)


def test_exploration_is_that_of_the_config_unless_one_is_given():
    for option, expected in (([], "mean"), (["--exploration=mode"], "mode")):
        given = collect.parser().parse_args(["--out=rows", *option])
        rollout = RolloutConfig(exploration="mean", init_random_frames=100)
        data = CollectorDataModule(CountingEnv, ConstantPolicy(num_actions=2), rollout=rollout, evaluation=None)
        collector, used = collect.collector_of(data, BoringRLModule(), given)
        assert (used.exploration, used.init_random_frames) == (expected, 0)
        collector.shutdown()
        data.close()


def test_episodes_that_do_not_end_are_told_of(tmp_path):
    given = collect.parser().parse_args([f"--out={tmp_path / 'rows'}", "--frames=8"])
    data = CollectorDataModule(lambda: CountingEnv(lengths=(1000,)), frames_per_batch=8, evaluation=None)
    collector, rollout = collect.collector_of(data, BoringRLModule(), given)
    recording = collect.Target.of(given).begin(collector, rollout, env="counting", spec=None)
    with pytest.warns(UserWarning, match="no episode has ended in 24 frames"):
        collect.record(collect.batches(collector, 40), recording, patience=20)
    recording.close()
    collector.shutdown()
    data.close()
