"""What `lit-collect doctor` finds out. Figures of speed are whatever they are."""

import json

import pytest

from lit_collect import Collector, RolloutConfig
from lit_collect.cli import main
from lit_collect.tools.doctor import as_text, verdict
from lit_collect.tools.examination import Examination

ENVS = "tests.tools.envs"
QUICK = ["--steps=64", "--num_envs=2"]


@pytest.fixture
def doctor(capsys):
    """Run the command; exit status and report."""

    def run(env, *options):
        status = main(["doctor", f"--env={env}", "--json", *(options or QUICK)])
        return status, json.loads(capsys.readouterr().out)

    return run


def keys_of(leaves):
    return {leaf["key"]: (leaf["shape"], leaf["dtype"]) for leaf in leaves}


def test_good_env_is_ready(doctor):
    status, found = doctor("CartPole-v1")
    assert status == 0
    assert found["verdict"] == "ready to collect from"
    assert found["findings"] == []
    assert found["source"].startswith("2 single envs in one loop: <TimeLimit")
    assert not found["masked_rows"]
    assert found["observation"] == [
        {"key": "observation", "space": "Box(-inf to inf)", "shape": [4], "dtype": "float32"}
    ]
    assert found["action"] == [{"key": "action", "space": "Discrete(2)", "shape": [], "dtype": "int64"}]
    stored = keys_of(found["stored"])
    assert stored["next.observation"] == ([4], "float32")
    assert stored["next.reward"] == ([1], "float32")
    assert stored["collector.traj_ids"] == ([], "int64")
    assert found["speed"]["env_fps"] > 0
    assert found["speed"]["policy_fps"] > 0
    assert 0 < found["speed"]["env_share"] + found["speed"]["policy_share"] <= 1


def test_texts_casts_and_infos_are_told(doctor):
    status, found = doctor(f"{ENVS}.Talking")
    assert status == 0
    assert found["dropped"] == ["mission"]
    assert found["cast"] == ["place"]
    assert keys_of(found["observation"]) == {"place": ([2], "float64")}
    assert keys_of(found["stored"])["place"] == ([2], "float32")
    assert "mission" not in keys_of(found["stored"])
    infos = {info["name"]: (info["info_key"], info["reported"]) for info in found["infos"]}
    assert infos == {
        "level": ("level:int64", "always"),
        "deep.pos": ("deep.pos:float32[3]", "steps, episode ends"),
        "words": ("words:str[16]", "steps, episode ends"),
        "ragged": ("", "steps, episode ends"),
        "success": ("success:bool", "episode ends"),
    }


@pytest.mark.parametrize("key", ["level:int64", "deep.pos:float32[3]", "words:str[16]", "success:bool"])
def test_suggested_info_key_can_be_used(key):
    with pytest.warns(UserWarning, match="mission"):
        collector = Collector(f"{ENVS}.Talking", frames_per_batch=6, rollout=RolloutConfig(info_keys=(key,)))
    with collector:
        batch = collector.collect()
    name = tuple(key.partition(":")[0].split("."))
    assert batch[("next", "reported", *name)].any()


def test_action_masks_are_found_and_obeyed(doctor):
    status, found = doctor(f"{ENVS}.Masked")
    assert (status, found["action_mask"], found["infos"]) == (0, True, [])
    assert keys_of(found["stored"])["action_mask"] == ([3], "bool")
    assert keys_of(found["stored"])["next.action_mask"] == ([3], "bool")


@pytest.mark.parametrize(
    ("env", "mode", "masked"),
    [("make_vector", "NEXT_STEP; each reset spends a step", True), ("make_same_step", "SAME_STEP; at once", False)],
)
def test_autoreset_mode_and_what_it_means(env, mode, masked, doctor):
    status, found = doctor(f"{ENVS}.{env}", "--steps=128")
    assert status == 0
    assert found["num_envs"] == 2
    assert found["source"].startswith("a vector env of 2 copies")
    assert found["autoreset"].startswith(mode)
    assert found["masked_rows"] is masked
    assert ("collector.mask" in keys_of(found["stored"])) is masked


def test_copies_are_eight_where_nobody_says_a_number(doctor):
    assert doctor(f"{ENVS}.Masked", "--steps=64")[1]["num_envs"] == 8


def test_env_without_repeatable_runs_is_usable_with_a_warning(doctor):
    status, found = doctor(f"{ENVS}.Unrepeatable")
    assert status == 0
    (finding,) = found["findings"]
    assert finding["level"] == "warning"
    assert finding["text"].startswith("the same seed gave other values of next.reward : runs of this env cannot be")
    assert found["verdict"] == "usable, with 1 warning"


def test_env_that_begins_alike_under_every_seed_is_worth_a_note(doctor):
    assert doctor(f"{ENVS}.Masked")[1]["notes"] == ["episodes begin in the same state under every seed"]
    assert doctor("CartPole-v1")[1]["notes"] == []


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("fails_in_init", "env copy 0 failed in its constructor: RuntimeError: broken on purpose"),
        ("fails_in_reset", "env copy 0 failed in reset: RuntimeError: broken on purpose"),
        ("fails_in_step", "env copy 0 failed in step: RuntimeError: broken on purpose"),
        ("fails_in_close", "env copy 0 failed in close: RuntimeError: broken on purpose"),
        ("gives_a_wrong_shape", "observation has a wrong shape : expected float32 with shape (3,), got (4,)"),
        ("gives_no_info", "env copy 0, reset: expected (observation, info)"),
        ("needs_an_argument", "needs_an_argument() missing 1 required positional argument: 'level'"),
        ("makes_nothing", "made no env for copy 0 : expected gymnasium.Env"),
        ("Spaceless", "has no observation_space : expected a gymnasium.Space, got None"),
        ("Listing", "Sequence spaces cannot be stored as arrays"),
    ],
)
def test_broken_env_is_told_in_one_line_each(env, words, doctor):
    status, found = doctor(f"{ENVS}.{env}")
    assert status == 1
    assert found["broken"]
    assert [finding["level"] for finding in found["findings"]] == ["error"]
    assert words in found["findings"][0]["text"]
    assert found["verdict"].startswith("broken : 1 error")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--env=Nope-v3"], "env 'Nope-v3' is unknown"),
        ([f"--env={ENVS}.nope"], "has no attribute 'nope'"),
        (["--env=os.path"], "env is of the wrong kind"),
        (["--env=CartPole-v1", "--num_envs=0"], "--num_envs: must be at least 1, got 0"),
        (["--env=CartPole-v1", "--steps=x"], "--steps: invalid whole number value: 'x'"),
        (["--env=CartPole-v1", "--seed=-1"], "--seed: must be at least 0, got -1"),
        ([f"--env={ENVS}.make_vector", "--num_envs=3"], "num_envs does not fit"),
        (["--environment=CartPole-v1"], "--env"),
        ([], "the following arguments are required: --env"),
    ],
)
def test_wrong_usage_is_told_and_ends_with_2(options, words, capsys):
    with pytest.raises(SystemExit) as finished:
        main(["doctor", *options])
    assert finished.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("lit-collect doctor: error: ")
    assert words in last


def test_report_for_people(capsys):
    assert main(["doctor", f"--env={ENVS}.Talking", *QUICK]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == f"env        {ENVS}.Talking"
    assert lines[-1] == "verdict: ready to collect from"
    for line in (
        "what a batch holds (N = 2 env copies, T steps)",
        "not stored   mission: text (rollout.info_keys='mission:str' stores its characters)",
        "cast         place: float64 -> float32 (rollout.keep_float64=true keeps it)",
        "action mask  none",
        "findings",
    ):
        assert line in lines
    assert any(line.split() == ["next.place", "[N,", "T,", "2]", "float32"] for line in lines)
    assert any(line.split() == ["success", "bool", "episode", "ends", "success:bool"] for line in lines)
    assert any(line.startswith("  env alone") for line in lines)


def test_report_of_an_env_that_could_not_be_made_is_short(capsys):
    assert main(["doctor", f"--env={ENVS}.fails_in_init"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"env        {ENVS}.fails_in_init",
        "source     -",
        "autoreset  -",
        "",
        "findings",
        "  error  env copy 0 failed in its constructor: RuntimeError: broken on purpose",
        "",
        "verdict: broken : 1 error to mend before anything is learned from this env",
    ]


def test_help_says_what_it_does_and_how_it_ends(capsys):
    with pytest.raises(SystemExit) as finished:
        main(["doctor", "--help"])
    assert finished.value.code == 0
    out = capsys.readouterr().out
    assert "--env my_package.envs.make_env" in out
    assert "exit status: 0 if nothing is broken" in out


def test_notes_stand_below_the_findings():
    found = Examination(env="it")
    found.notes.append("worth knowing")
    assert as_text(found)[-4:] == ["  none", "  note  worth knowing", "", f"verdict: {verdict(found)}"]


def test_notes_are_without_colours(doctor):
    _, found = doctor("CartPole")
    [note] = found["notes"]
    assert note.startswith("WARN: Using the latest versioned environment")
    assert "\x1b" not in note
