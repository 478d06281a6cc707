"""The command line, in this process."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar

from lit_collect import CollectionMonitor, Collector, CollectorCLI, FrameProgress, LearningCurve, WeightSync
from lit_collect.cli import main, summary
from lit_collect.frames import flatten_rows
from lit_collect.testing import BoringRLModule
from trainers import PPO

# a run of two batches: PPO on CartPole, with an evaluation of two short episodes
PPO_RUN = """
seed_everything: 3
trainer:
  accelerator: cpu
  max_epochs: -1
  num_sanity_val_steps: 0
  enable_model_summary: false
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: runs, name: cli}
model:
  class_path: trainers.PPO
  init_args: {hidden: [8]}
data:
  class_path: lit_collect.CollectorDataModule
  init_args:
    env: CartPole-v1
    num_envs: 2
    frames_per_batch: 32
    total_frames: 64
    updates: {epochs: 2, minibatch_size: 16}
    evaluation: {num_episodes: 2, max_frames: 10}
"""

# a module that knows nothing of specs, on an env that is named by its import path
BORING_RUN = [
    "--seed_everything=1",
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=-1",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_model_summary=false",
    "--model=lit_collect.testing.BoringRLModule",
    "--data=lit_collect.CollectorDataModule",
    "--data.env=lit_collect.testing.CountingEnv",
    "--data.num_envs=2",
    "--data.frames_per_batch=8",
    "--data.total_frames=24",
    "--data.evaluation=null",
]


class OwnSync(WeightSync):
    """A user's own."""


class Unwilling(L.LightningModule):
    """A user's own, with a fault: the traceback says where."""

    def __init__(self):
        super().__init__()
        raise ValueError("broken on purpose")


class Terminating(Callback):
    """A scheduler that ends the run after its first batch."""

    def on_train_batch_end(self, *_):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def own_command_line(monkeypatch):
    """Lightning warns if there are arguments of the process besides those given; here they are pytest's."""
    monkeypatch.setattr(sys, "argv", ["lit-collect"])


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "ppo.yaml"
    path.write_text(PPO_RUN)
    return path


@pytest.fixture
def lit_collect(config, capsys) -> Callable[..., CollectorCLI]:
    """Run a subcommand with the config, and give the finished command; what it printed is thrown away."""

    def run(subcommand: str, *arguments: str) -> CollectorCLI:
        cli = CollectorCLI(args=[subcommand, f"--config={config}", *arguments])
        capsys.readouterr()
        return cli

    return run


def count(trainer: L.Trainer, kind: type) -> int:
    return sum(isinstance(callback, kind) for callback in trainer.callbacks)


# --- fit --------------------------------------------------------------------------------------------------------------


def test_fit_trains_with_the_specs_of_the_data(lit_collect):
    cli = lit_collect("fit")
    assert isinstance(cli.model, PPO)
    assert cli.datamodule.frames_total == 64
    assert cli.trainer.global_step == 2 * 2 * 2
    assert cli.model.hparams["action_spec"] == {"kind": "discrete", "n": 2, "start": 0}
    assert cli.model.hparams["observation_spec"]["shape"] == [4]
    assert cli.trainer.callback_metrics["eval/episodes"] == 2


def test_last_lines_of_fit_say_where_the_results_are_and_what_was_reached(config, capsys):
    main(["fit", f"--config={config}", "--trainer.callbacks=LearningCurve"])
    lines = capsys.readouterr().out.rstrip().splitlines()
    lines = lines[next(number for number, line in enumerate(lines) if line.startswith("results in")) :]
    folder = Path("runs/cli/version_0")
    assert lines[0] == f"results in      {folder}"
    assert lines[1] == f"config          {folder / 'config.yaml'}"
    for line, name in zip(lines[1:4], ("config", "learning curve", "checkpoint"), strict=True):
        assert line.startswith(name)
        assert Path(line.removeprefix(name).strip()).is_file()
    assert lines[4] == "frames          64"
    assert re.fullmatch(r"training return \d+\.\d", lines[5])
    assert re.fullmatch(r"evaluation      10\.0 over 2 episodes", lines[6])
    assert len(lines) == 7
    assert (folder / "metrics.csv").is_file()


def test_last_lines_of_fit_say_that_no_episode_has_ended():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit_loop.epoch_progress.reset()
    trainer._logger_connector._callback_metrics = {"episode/return_mean": torch.tensor(3.0)}
    assert summary(trainer)[-1] == "training return 3.0 so far: no episode has ended"


def test_progress_bar_counts_frames(config, capsys):
    main(["fit", f"--config={config}", "--progress.style=plain"])
    assert re.search(r"64 ?/ ?64", capsys.readouterr().out)


def test_fit_of_a_module_without_specs(capsys):
    cli = CollectorCLI(args=["fit", *BORING_RUN])
    assert isinstance(cli.model, BoringRLModule)
    assert [batch.shape for batch in cli.model.batches] == [(2, 4)] * 3
    assert "frames          24" in capsys.readouterr().out
    assert Path("config.yaml").is_file()  # in the trainer's own folder, as there is no logger


def test_command_that_is_not_to_run_builds_no_env():
    cli = CollectorCLI(args=BORING_RUN, run=False)
    assert cli.datamodule.state_dict()["collector"] is None
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert len(cli.model.batches) == 3


def test_single_values_of_a_mixed_buffer_of_a_config_are_set_on_the_command_line(tmp_path):
    with Collector("lit_collect.testing.CountingEnv", num_envs=2, frames_per_batch=8) as collector:
        flatten_rows(collector.collect()).memmap(str(tmp_path / "rows"))
    parts = {
        "online": {"class_path": "lit_collect.ReplayBuffer", "init_args": {"capacity": 100, "batch_size": 6}},
        "offline": {"class_path": "lit_collect.offline_buffer", "init_args": {"path": "nowhere", "batch_size": 7}},
    }
    replay = {"class_path": "lit_collect.MixedBuffer", "init_args": parts}
    own = {"class_path": "lit_collect.CollectorDataModule", "init_args": {"replay": replay}}
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump({"data": own}))
    changes = [
        "--data.replay.init_args.offline.init_args.path=rows",
        "--data.replay.online.capacity=90",
        "--data.replay.batch_size=8",
        "--data.replay.fraction=0.25",
    ]
    cli = CollectorCLI(args=[*BORING_RUN, "--config=mixed.yaml", *changes], run=False)
    mixed = cli.datamodule.replay_buffer
    assert (mixed.online.capacity, mixed.online.batch_size, mixed.batch_size, mixed.fraction) == (90, 6, 8, 0.25)
    assert (len(mixed.offline), mixed.offline.batch_size) == (8, 7)


def test_transforms_of_a_config_are_replaced_on_the_command_line(tmp_path):
    transforms = [{"class_path": "lit_collect.NStep", "init_args": {"n": 3, "gamma": 0.99}}]
    given = {"capacity": 100, "batch_size": 6, "transforms": transforms}
    own = {"class_path": "lit_collect.CollectorDataModule", "init_args": {"replay": given}}
    (tmp_path / "replay.yaml").write_text(yaml.safe_dump({"data": own}))
    change = "--data.replay.transforms=[{class_path: lit_collect.NStep, init_args: {n: 5, gamma: 0.9}}]"
    cli = CollectorCLI(args=[*BORING_RUN, "--config=replay.yaml", change], run=False)
    buffer = cli.datamodule.replay_buffer
    assert [(each.n, each.gamma) for each in buffer.transforms] == [(5, 0.9)]
    assert (buffer.capacity, buffer.batch_size) == (100, 6)


def test_same_seed_on_the_command_line_gives_the_same_weights(lit_collect):
    weights = [
        torch.cat([p.flatten() for p in lit_collect("fit", f"--seed_everything={seed}").model.parameters()])
        for seed in (3, 3, 4)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# --- the callbacks that are always on ---------------------------------------------------------------------------------


def test_callbacks_are_on_once_each(lit_collect):
    trainer = lit_collect("fit").trainer
    assert count(trainer, WeightSync) == count(trainer, CollectionMonitor) == count(trainer, FrameProgress) == 1
    assert count(trainer, ProgressBar) == 1
    assert count(trainer, LearningCurve) == 0


def test_callbacks_are_configured_under_their_own_keys(lit_collect):
    trainer = lit_collect("fit", "--monitor.names=sb3", "--monitor.window=5", "--weight_sync.every_n_steps=3").trainer
    assert "time/total_timesteps" in trainer.callback_metrics
    assert [line[:15].rstrip() for line in summary(trainer)[-3:]] == ["frames", "training return", "evaluation"]
    assert next(c for c in trainer.callbacks if isinstance(c, WeightSync)).every_n_steps == 3
    saved = yaml.safe_load(Path("runs/cli/version_0/config.yaml").read_text())
    assert saved["monitor"] == {"names": "sb3", "window": 5, "prog_bar": True}
    assert saved["weight_sync"]["every_n_steps"] == 3


def test_checkpoint_watches_our_names_whatever_the_loggers_are_given(lit_collect):
    watching = ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.monitor=eval/return_mean"]
    trainer = lit_collect("fit", "--monitor.names=sb3", *watching).trainer
    assert trainer.checkpoint_callback.best_model_score == 10


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("lit_collect.CollectionMonitor", CollectionMonitor),
        ("lit_collect.WeightSync", WeightSync),
        ("lit_collect.FrameProgress", FrameProgress),
    ],
)
def test_callback_of_the_config_takes_the_place_of_the_one_that_is_always_on(path, kind, lit_collect):
    assert count(lit_collect("fit", f"--trainer.callbacks={path}").trainer, kind) == 1


def test_subclass_in_the_config_takes_the_place_of_the_one_that_is_always_on(lit_collect):
    trainer = lit_collect("fit", f"--trainer.callbacks={OwnSync.__module__}.OwnSync").trainer
    assert [type(c) for c in trainer.callbacks if isinstance(c, WeightSync)] == [OwnSync]


@pytest.mark.parametrize("switch", [True, False])
def test_progress_bar_can_be_turned_off(switch, lit_collect):
    trainer = lit_collect("fit", f"--trainer.enable_progress_bar={str(switch).lower()}").trainer
    assert count(trainer, ProgressBar) == int(switch)


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_other_progress_bar_takes_the_place_of_ours(bar, lit_collect):
    trainer = lit_collect("fit", f"--trainer.callbacks=lightning.pytorch.callbacks.{bar}").trainer
    assert count(trainer, ProgressBar) == 1
    assert count(trainer, FrameProgress) == 0


def test_checkpoint_of_the_config_watches_the_evaluation(lit_collect):
    trainer = lit_collect(
        "fit",
        "--trainer.callbacks=ModelCheckpoint",
        "--trainer.callbacks.monitor=eval/return_mean",
        "--trainer.callbacks.mode=max",
        "--trainer.callbacks.filename=best",
    ).trainer
    checkpoint = next(c for c in trainer.callbacks if isinstance(c, ModelCheckpoint))
    assert Path(checkpoint.best_model_path).name == "best.ckpt"
    assert checkpoint.best_model_score == trainer.callback_metrics["eval/return_mean"]


# --- the other subcommands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_validate_and_test_evaluate(subcommand, lit_collect):
    cli = lit_collect(subcommand)
    assert cli.trainer.callback_metrics["eval/episodes"] == 2
    assert cli.datamodule.frames_total == 0


def test_predict_plays_episodes(lit_collect):
    cli = lit_collect("predict", "--return_predictions=true")
    (played,) = cli.trainer.predict_loop.predictions
    assert played["length"].tolist() == [10, 10]  # no pole falls sooner
    assert played["return"].tolist() == [10.0, 10.0]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # each run logs to a folder of its own
def test_checkpoint_of_a_fit_is_evaluated_and_resumed(lit_collect, config):
    fitted = lit_collect("fit")
    checkpoint = next(c for c in fitted.trainer.callbacks if isinstance(c, ModelCheckpoint)).best_model_path
    tested = lit_collect("test", f"--ckpt_path={checkpoint}")
    assert all(torch.equal(a, b) for a, b in zip(fitted.model.parameters(), tested.model.parameters(), strict=True))
    resumed = lit_collect("fit", f"--ckpt_path={checkpoint}", "--data.total_frames=128")
    assert resumed.datamodule.frames_total == 128
    assert resumed.trainer.global_step == 2 * fitted.trainer.global_step


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        "lit_collect.testing.CountingEnv",
        {"class_path": "lit_collect.GymEnvFactory", "init_args": {"env_id": "CartPole-v1"}},
        ["CartPole-v1", "CartPole-v1"],
    ],
    ids=["id", "path", "factory", "list"],
)
def test_printed_config_gives_the_same_config_again(env, config, capsys):
    given = yaml.safe_load(PPO_RUN)
    given["data"]["init_args"]["env"] = env
    config.write_text(yaml.safe_dump(given))
    printed = print_config(config, capsys)
    assert printed["data"]["init_args"]["num_envs"] == 2
    config.write_text(yaml.safe_dump(printed))
    again = print_config(config, capsys)
    assert again == printed
    main(["fit", f"--config={config}"])
    assert "frames          64" in capsys.readouterr().out
    saved = yaml.safe_load(Path("runs/cli/version_0/config.yaml").read_text())
    assert saved["data"] == printed["data"]
    main(["fit", "--config=runs/cli/version_0/config.yaml"])
    assert "frames          64" in capsys.readouterr().out


def print_config(path: Path, capsys) -> dict:
    with pytest.raises(SystemExit) as finished:
        CollectorCLI(args=["fit", f"--config={path}", "--print_config"])
    assert finished.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


def test_printed_config_leaves_out_what_comes_from_the_data(config, capsys):
    printed = print_config(config, capsys)
    assert "observation_spec" not in printed["model"]["init_args"]
    assert "action_spec" not in printed["model"]["init_args"]


def test_several_configs_are_laid_over_each_other(config, capsys, tmp_path):
    (tmp_path / "small.yaml").write_text("data: {init_args: {total_frames: 32}}")
    main(["fit", f"--config={config}", f"--config={tmp_path / 'small.yaml'}"])
    assert "frames          32" in capsys.readouterr().out


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--data.frames_per_batch=33", "multiple of num_envs=2, got 33; use 32 or 34"),
        ("--data.env=CartPool-v1", "env 'CartPool-v1' is unknown"),
        ("--data.env=tests.tools.envs.Spaceless", "has no observation_space : expected a gymnasium.Space, got None"),
        ("--data.env=tests.tools.envs.makes_nothing", "made no env for copy 0 : expected gymnasium.Env"),
        ("--data.backend=ray", "'ray' is not in this version"),
        ("--data.replay={capacity: 64, batch_size: 20, slice_len: 8}", "batch_size must be a multiple of slice_len=8"),
        ("--data.replay={capacity: 64, sampler: nope}", "sampler must be one of uniform, "),
        ("--data.replay={class_path: lit_collect.ReplayBuffer, init_args: {capacity: 0}}", "at least 1, got 0"),
    ],
)
def test_wrong_setting_is_told_in_its_own_words(argument, words, config, capsys):
    with pytest.raises(SystemExit) as finished:
        main(["fit", f"--config={config}", argument])
    assert finished.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lit-collect: error: ")]
    assert words in line


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--data.replay.capacity=128", "expected capacity=128, got 64"),
        ("--data.replay.sampler=prioritized", "expected sampler_kind='PrioritizedSampler', got 'UniformSampler'"),
        ("--data.num_envs=4", "is of 2 env copies, this collector has 4"),
    ],
)
def test_checkpoint_of_other_settings_is_told_in_one_line(argument, words, tmp_path, capsys):
    replayed = ["fit", *BORING_RUN, "--data.replay={capacity: 64, batch_size: 8}"]
    cli = CollectorCLI(args=replayed)
    cli.trainer.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.raises(SystemExit) as finished:
        main([*replayed, "--data.total_frames=48", f"--ckpt_path={tmp_path / 'end.ckpt'}", argument])
    assert finished.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lit-collect: error: ")]
    assert words in line


@pytest.mark.parametrize("argument", ["--data.frame_per_batch=32", "--monitor.windows=3", "--data.updates.epoches=1"])
def test_misspelt_option_is_refused(argument, config, capsys):
    with pytest.raises(SystemExit) as finished:
        main(["fit", f"--config={config}", argument])
    assert finished.value.code == 2
    words = capsys.readouterr().err
    assert argument.split("=")[0].rpartition(".")[2] in words
    assert len(words.splitlines()) < 20


def test_error_of_a_class_that_is_not_ours_keeps_its_traceback(config):
    with pytest.raises(ValueError, match="broken on purpose"):
        main(["fit", f"--config={config}", "--model=tests.test_cli.Unwilling"])


def test_unknown_subcommand_is_told_all_seven(capsys):
    with pytest.raises(SystemExit):
        main(["doctr"])
    assert "{fit,validate,test,predict,doctor,tune,collect}" in capsys.readouterr().err


# --- the two commands of its own --------------------------------------------------------------------------------------


def test_help_names_the_two_commands_of_its_own(capsys):
    with pytest.raises(SystemExit) as finished:
        main(["--help"])
    assert finished.value.code in (0, None)
    words = " ".join(capsys.readouterr().out.split())
    assert "lit-collect doctor --env ID" in words
    assert "lit-collect tune --config CONFIG" in words


@pytest.mark.parametrize("command", ["doctor", "tune"])
def test_command_of_its_own_is_found_on_the_command_line_of_the_process(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["lit-collect", command, "--help"])
    with pytest.raises(SystemExit) as finished:
        main()
    assert finished.value.code == 0
    assert f"lit-collect {command}" in capsys.readouterr().out


def test_process_imports_from_the_folder_it_was_called_in(monkeypatch, tmp_path, capsys):
    (tmp_path / "envs_of_this_folder.py").write_text("from lit_collect.testing import CountingEnv as make_env")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["lit-collect", "doctor", "--env=envs_of_this_folder.make_env", "--steps=16"])
    assert main() == 0
    assert "envs_of_this_folder.make_env" in capsys.readouterr().out


def test_fit_ends_with_status_zero(config):
    assert main(["fit", f"--config={config}"]) == 0


def test_terminated_fit_does_not_look_finished(config):
    with pytest.raises(SystemExit) as finished:
        main(["fit", f"--config={config}", "--trainer.callbacks=tests.test_cli.Terminating"])
    assert finished.value.code == 128 + signal.SIGTERM


def test_unknown_subcommand_is_refused(capsys):
    with pytest.raises(SystemExit) as finished:
        main(["train"])
    assert finished.value.code == 2
    assert "train" in capsys.readouterr().err
