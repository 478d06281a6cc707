"""What `lit-collect tune` measures and proposes. Figures of speed are whatever they are."""

import sys
from itertools import count

import pytest
import yaml

from lit_collect import CollectorDataModule, DirectBackend, ProcessBackend, RolloutConfig
from lit_collect.cli import main
from lit_collect.config import DeviceConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.testing import BoringRLModule, ConstantPolicy, CountingEnv
from lit_collect.tools.trials import Candidate, Setup, Trial, Tuner, choose
from lit_collect.tools.tune import report, setup_of
from trainers import PPO

ENVS = "tests.tools.envs"
RUN = """
seed_everything: 1
trainer: {accelerator: cpu, max_epochs: -1, logger: false, enable_checkpointing: false, enable_model_summary: false}
model: {class_path: lit_collect.testing.BoringRLModule}
data:
  class_path: lit_collect.CollectorDataModule
  init_args:
    env: tests.tools.envs.make_counting
    num_envs: 2
    frames_per_batch: 16
    total_frames: 80
    evaluation: null
"""
QUICK = ["--seconds=2", "--max_envs=4", "--max_collectors=0"]


@pytest.fixture(autouse=True)
def own_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lit-collect"])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.fixture
def tune(config, capsys):
    """Run the command; exit status, rows of the table, and the settings that it proposes."""

    def run(*options):
        status = main(["tune", f"--config={config}", *(options or QUICK)])
        lines = capsys.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.split("  ") if cell] for line in lines[3 : lines.index("", 3)]]
        begin = lines.index("data:") if "data:" in lines else len(lines)
        end = lines.index("", begin) if "" in lines[begin:] else len(lines)
        return status, rows, yaml.safe_load("\n".join(lines[begin:end]))

    return run


def make_setup(**changes):
    given = {
        "source": resolve_env(CountingEnv),
        "policy": ConstantPolicy(num_actions=2),
        "frames_per_batch": 256,
        "total_frames": -1,
        "num_envs": 8,
        "rollout": RolloutConfig(),
        "devices": DeviceConfig(),
        "backend": DirectBackend(),
    }
    return Setup(**{**given, **changes})


def trial(num_envs=8, rate=100.0, *, num_collectors=0, sync=True, frames=256, failure=""):
    candidate = Candidate(num_envs=num_envs, num_collectors=num_collectors, sync=sync)
    return Trial(candidate=candidate, steps=frames // num_envs, rates=[] if failure else [rate], failure=failure)


# --- the command ------------------------------------------------------------------------------------------------------


def test_tune_measures_and_proposes_settings_of_the_config(tune):
    status, rows, proposed = tune()
    assert status == 0
    assert [row[:4] for row in rows] == [
        ["direct", "-", "1", "16"],
        ["direct", "-", "2", "8"],
        ["direct", "-", "4", "4"],
    ]
    assert all(float(row[4].replace(",", "")) > 0 for row in rows)
    assert "the config's" in rows[1][5]
    (chosen,) = [row for row in rows if "chosen" in row[-1]]
    assert proposed["data"]["init_args"] == {"num_envs": int(chosen[2]), "frames_per_batch": 16, "backend": "direct"}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("nursery")
def test_tune_measures_processes_and_leaves_none(tune):
    status, rows, _ = tune("--seconds=20", "--max_envs=2", "--max_collectors=1")
    assert status == 0
    measured = {tuple(row[:3]) for row in rows if row[4] != "-"}
    assert {("process", "1", "2"), ("process, async", "1", "2")} <= measured


@pytest.mark.slow
def test_proposed_settings_are_a_config(tune, config, tmp_path, capsys):
    _, _, proposed = tune()
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(proposed))
    assert main(["fit", f"--config={config}", f"--config={tmp_path / 'tuned.yaml'}"]) == 0
    assert "frames          80" in capsys.readouterr().out


def test_overrides_and_a_section_for_fit_are_taken(tune, config):
    config.write_text(yaml.safe_dump({"fit": yaml.safe_load(RUN)}))
    _, rows, _ = tune(*QUICK, "--data.frames_per_batch=32", "--data.num_envs=1")
    assert [row[2:4] for row in rows] == [["1", "32"], ["2", "16"], ["4", "8"]]
    assert "the config's" in rows[0][5]


def test_module_that_learns_of_the_spaces_late(tune):
    status, rows, _ = tune(*QUICK, "--model=trainers.PPO", "--model.hidden=[8]")
    assert (status, len(rows)) == (0, 3)


def test_candidates_that_fail_are_listed_with_their_reason(tune):
    status, rows, proposed = tune(*QUICK, f"--data.env={ENVS}.make_vector", "--data.num_envs=null")
    assert status == 0
    assert [row[2] for row in rows] == ["1", "2", "4"]
    for row in (rows[0], rows[2]):
        assert row[4] == "-"
        assert row[5].startswith(f"num_envs does not fit {ENVS}.make_vector")
    assert proposed["data"]["init_args"]["num_envs"] == 2


def test_env_that_cannot_be_made_is_told(config, capsys):
    options = [f"--data.env={ENVS}.fails_in_init", "--model=trainers.PPO"]
    assert main(["tune", f"--config={config}", *QUICK, *options]) == 1
    words = "lit-collect tune: env copy 0 failed in its constructor: RuntimeError: broken on purpose"
    assert capsys.readouterr().err.strip().splitlines()[-1] == words


def test_env_that_cannot_be_collected_from_is_told(config, capsys):
    assert main(["tune", f"--config={config}", *QUICK, f"--data.env={ENVS}.fails_in_reset"]) == 1
    lines = capsys.readouterr().out.rstrip().splitlines()
    reason = "WorkerFailedError: env copy 0 failed in reset: RuntimeError: broken on purpose"
    assert all(line.endswith(reason) for line in lines[3:6])
    assert lines[-1] == "nothing could be measured : see the reasons above"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seconds=0"], "--seconds: must be above 0, got 0"),
        (["--max_envs=0"], "--max_envs: must be at least 1, got 0"),
        (["--data.frames_per_batch=33"], "multiple of num_envs=2, got 33; use 32 or 34"),
        (["--data=lightning.pytorch.demos.boring_classes.BoringDataModule"], "whose data is a CollectorDataModule"),
        (["--second=3"], "second"),
    ],
)
def test_wrong_usage_is_told_and_ends_with_2(options, words, config, capsys):
    with pytest.raises(SystemExit) as finished:
        main(["tune", f"--config={config}", *options])
    assert finished.value.code == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


def test_help_names_the_options_and_the_rest(capsys):
    with pytest.raises(SystemExit) as finished:
        main(["tune", "--help"])
    assert finished.value.code == 0
    out = capsys.readouterr().out
    assert "--seconds" in out
    assert "whatever else fit takes" in out


# --- measuring --------------------------------------------------------------------------------------------------------


def test_measuring_stops_when_the_time_is_over():
    ticks = count()
    tuner = Tuner(make_setup(), seconds=30.0, clock=lambda: float(next(ticks)))
    trials = tuner.run(max_envs=64, max_collectors=0)
    assert next(ticks) < 60
    assert [one.candidate.num_envs for one in trials] == [1, 2, 4, 8, 16, 32, 64]
    assert trials[0].rates
    assert {one.failure for one in trials if not one.rates} == {"no time left; give more with --seconds"}


def test_all_are_measured_in_turns():
    tuner = Tuner(make_setup(frames_per_batch=8, num_envs=2), seconds=4.0)
    trials = tuner.run(max_envs=4, max_collectors=0)
    assert {len(one.rates) for one in trials[:3]} <= {1, 2, 3, 4, 5, 6}
    assert all(one.rates for one in trials)


def test_no_more_copies_are_tried_than_there_are_frames():
    trials = Tuner(make_setup(frames_per_batch=4, num_envs=2), seconds=2.0).run(max_collectors=0)
    assert [(one.candidate.num_envs, one.frames_per_batch) for one in trials] == [(1, 4), (2, 4), (4, 4)]


def test_sequence_of_envs_says_how_many_there_are():
    setup = make_setup(source=resolve_env([CountingEnv] * 3), num_envs=3, frames_per_batch=12)
    trials = Tuner(setup, seconds=2.0).run(max_collectors=0)
    assert [one.candidate.num_envs for one in trials] == [3]


def test_settings_of_a_config_with_processes_are_tried_first():
    tuner = Tuner(make_setup(backend=ProcessBackend(3, sync=False), num_envs=None), seconds=2.0)
    assert tuner.now == Candidate(num_envs=9, num_collectors=3, sync=False)


# --- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "sync", "chosen"),
    [
        ([trial(1, 100), trial(8, 300)], True, 1),
        ([trial(8, 300), trial(16, 310)], True, 0),
        ([trial(8, 300), trial(16, 330)], True, 1),
        ([trial(8, 300), trial(8, 305, num_collectors=2)], True, 0),
        ([trial(8, 300), trial(8, 900, num_collectors=2, sync=False)], True, 0),
        ([trial(8, 300), trial(8, 900, num_collectors=2, sync=False)], False, 1),
        ([trial(8, failure="no"), trial(2, 1)], True, 1),
    ],
    ids=["faster", "hardly", "clearly", "simpler", "older-rows", "older-rows-allowed", "failed"],
)
def test_choice_is_nearly_the_fastest_with_little(trials, sync, chosen):
    assert choose(trials, sync=sync) is trials[chosen]


def test_there_is_no_choice_where_nothing_was_measured():
    assert choose([trial(failure="no")], sync=True) is None


def test_report_warns_of_what_changes_besides_the_speed():
    slow, fast = trial(8, 100), trial(32, 300)
    older = trial(32, 600, num_collectors=2, sync=False)
    lines = report(make_setup(total_frames=1000), slow.candidate, [slow, fast, older])
    notes = [line for line in lines if line.startswith("note: ")]
    assert notes[:2] == [
        "note: each copy then makes 8 steps a batch instead of 32: shorter rollouts may learn otherwise",
        "note: total_frames=1000 is no multiple of 32: use 992 or 1024",
    ]
    assert notes[2].startswith("note: asynchronous workers made 600 frames/s, but of older weights")
    assert len(notes) == 3


def test_report_of_processes_is_a_config():
    fast = trial(24, 300, num_collectors=3, frames=240)
    lines = report(make_setup(frames_per_batch=250), trial(8, 100).candidate, [fast])
    block = lines[lines.index("data:") : lines.index("", lines.index("data:"))]
    arguments = yaml.safe_load("\n".join(block))["data"]["init_args"]
    assert (arguments["num_envs"], arguments["frames_per_batch"]) == (24, 240)
    assert arguments["backend"] == {
        "class_path": "lit_collect.ProcessBackend",
        "init_args": {"num_collectors": 3, "sync": True},
    }


def test_setup_is_that_of_the_data_without_random_frames():
    rollout = RolloutConfig(init_random_frames=99, max_frames_per_traj=5)
    policy = ConstantPolicy(num_actions=2)
    data = CollectorDataModule(CountingEnv, num_envs=2, frames_per_batch=8, rollout=rollout)
    setup = setup_of(data, BoringRLModule(policy))
    assert setup.rollout == RolloutConfig(max_frames_per_traj=5)
    assert setup.policy is policy
    assert (setup.num_envs, setup.frames_per_batch, setup.total_frames) == (2, 8, -1)


def test_setup_takes_the_policy_of_the_data_before_the_module_s():
    policy = ConstantPolicy(num_actions=2)
    data = CollectorDataModule("CartPole-v1", policy, num_envs=2, frames_per_batch=8)
    module = PPO(hidden=[8])
    assert setup_of(data, module).policy is policy
    data.close()
