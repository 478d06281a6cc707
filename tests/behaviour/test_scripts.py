"""Scripts, notebooks and the command line: workers run what stands there as it is, without guards or modules."""

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest
import yaml

from lit_collect import Collector, ProcessBackend
from lit_collect.cli import main
from lit_collect.testing import CountingEnv

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
SOON_S = 0.5  # what a further worker may take to start, processors shared with whatever else runs here

pytestmark = pytest.mark.processes

# A script without a guard. It says what came of each collector; a second run of it would leave a second mark.
SCRIPT = """
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import gymnasium
import lightning as L  # which workers of a fork server have already, then
import numpy as np
import torch

import beside
from lit_collect import Collector, EnvFactory, PolicyFactory, ProcessBackend

with Path(sys.argv[1]).open("a") as marks:
    marks.write(f"{os.getpid()} ")


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,))
    action_space = gymnasium.spaces.Discrete(10)

    def __init__(self, bonus=0):
        self.bonus = bonus
        self.had_lightning = "lightning.pytorch" in sys.modules

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), float(self.bonus + action), False, False, {}


class Factory(EnvFactory):
    def __call__(self):
        return Env(bonus=BONUS)


class Policy(torch.nn.Module):
    def __init__(self, action):
        super().__init__()
        self.action = torch.nn.Parameter(torch.tensor(float(action)))

    def forward(self, observation):
        return self.action.round().long().expand(len(observation))


class Makes(PolicyFactory):
    def __call__(self):
        return Policy(6)


def paid(bonus):
    def make():
        return Env(bonus)

    return make


BONUS = 100
gymnasium.register("Scripted-v0", entry_point=Env, kwargs={"bonus": 400})
gymnasium.register("ByName-v0", entry_point="__main__:Env", kwargs={"bonus": 500})
CASES = {
    "class": (Env, Policy(1)),
    "factory": (Factory, Makes()),
    "lambda": (lambda: Env(200), lambda observation: torch.full((len(observation),), 2)),
    "closure": (paid(300), Policy(3)),
    "id": ("Scripted-v0", Policy(4)),
    "name": ("ByName-v0", Policy(5)),
    "beside": (beside.make, beside.act),
}
with ExitStack() as stack:
    for name in sys.argv[3:]:
        env, policy = CASES[name]
        backend = ProcessBackend(1, start_method=sys.argv[2])
        collector = stack.enter_context(Collector(env, policy, num_envs=1, frames_per_batch=2, backend=backend))
        print(name, collector.collect()["next", "reward"].flatten().tolist(), end=" ")
        if name == "class":
            print(collector.cascade_execute("env.envs[0].had_lightning")[0], end=" ")
        if isinstance(policy, Policy):
            collector.update_policy_weights_(Policy(8))
            print(collector.collect()["next", "reward"].flatten().tolist(), end=" ")
        print(flush=True)
"""
BESIDE = """
import torch
from lit_collect.testing import CountingEnv

def make():
    return CountingEnv(lengths=(50,))

def act(observation):
    return torch.zeros(len(observation), dtype=torch.int64)
"""
EXPECTED = {
    "class": "class [1.0, 1.0] True [8.0, 8.0]",
    "factory": "factory [106.0, 106.0]",
    "lambda": "lambda [202.0, 202.0]",
    "closure": "closure [303.0, 303.0] [308.0, 308.0]",
    "id": "id [404.0, 404.0] [408.0, 408.0]",
    "name": "name [505.0, 505.0] [508.0, 508.0]",
    "beside": "beside [1.0, 2.0]",
}

# What somebody types, or a notebook's cells hold; `Env` and `act` are never found in a module.
TYPED = """
import gymnasium, sys, torch
from lit_collect import Collector, ProcessBackend

class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(5)
    def __init__(self):
        self.had_lightning = "lightning.pytorch" in sys.modules
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}
    def step(self, action):
        return 0, PAY + float(action), False, False, {}

PAY = 10
act = lambda observation: torch.full((len(observation),), 3)
collector = Collector(lambda: Env(), act, num_envs=2, frames_per_batch=4, backend=ProcessBackend(2))
print(WHERE, collector.collect()["next", "reward"].flatten().tolist(), flush=True)
"""
# The collectors are never closed: the interpreter's end ends their workers.
SESSION = f"""
import code, runpy, sys
TYPED = {TYPED!r}
WHERE = "stdin"
{TYPED}
from pathlib import Path
console = code.InteractiveConsole({{"__name__": "__console__", "WHERE": "console"}})
for line in TYPED.replace("\\n\\n", "\\n").replace("\\nPAY", "\\n\\nPAY").splitlines():
    console.push(line)
exec(compile(TYPED, "<cell 1>", "exec"), {{"__name__": "notebook", "WHERE": "exec"}})
Path("typed.py").write_text(TYPED)
kept = runpy.run_path("typed.py", {{"WHERE": "runpy"}})
collectors = [collector, console.locals["collector"], kept["collector"]]
print([known for each in collectors for known in each.cascade_execute("env.envs[0].had_lightning")])
print(*[member.channel.name.split()[1] for each in collectors for member in each.workers.members])
"""


def run_python(*arguments: str, text: str | None = None, paths: tuple[Path, ...] = ()) -> str:
    """What a Python process prints that must end well and say nothing of trouble."""
    path = os.pathsep.join([*map(str, paths), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A folder that is not the current one, with the script and a module next to it."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "scripted.py").write_text(SCRIPT)
    (folder / "beside.py").write_text(BESIDE)
    return folder


@pytest.mark.slow
def test_script_needs_no_guard_and_no_modules(elsewhere, tmp_path):
    printed = run_python(str(elsewhere / "scripted.py"), str(tmp_path / "marks"), "forkserver", *EXPECTED)
    assert [line.strip() for line in printed.splitlines()] == list(EXPECTED.values())
    assert len((tmp_path / "marks").read_text().split()) == 1  # no worker runs the script


@pytest.mark.slow
def test_fresh_interpreters_find_what_a_script_that_runs_as_a_module_has(elsewhere, tmp_path):
    cases = ["name", "beside"]
    printed = run_python("-m", "scripted", str(tmp_path / "marks"), "spawn", *cases, paths=(elsewhere,))
    assert [line.strip() for line in printed.splitlines()] == [EXPECTED[case] for case in cases]
    assert len((tmp_path / "marks").read_text().split()) == 1


@pytest.mark.slow
def test_what_is_typed_or_stands_in_a_notebook_runs_and_ends_with_the_interpreter():
    lines = run_python("-", text=SESSION).splitlines()
    assert lines[:4] == [f"{where} {[13.0] * 4}" for where in ("stdin", "console", "exec", "runpy")]
    assert lines[4] == str([False] * 6)  # nobody here has imported it
    workers = lines[5].split()
    assert len(set(workers)) == 6
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


# --- the command line -------------------------------------------------------------------------------------------

ASYNCHRONOUS = [
    "--data.backend.class_path=lit_collect.ProcessBackend",
    "--data.backend.init_args.num_collectors=3",
    "--data.backend.init_args.sync=false",
    "--data.num_envs=3",
    "--data.frames_per_batch=48",
    "--data.total_frames=144",
]


def command(monkeypatch, *arguments: str) -> None:
    """Run `lit-collect fit` in this process."""
    debug = ROOT / "configs" / "debug.yaml"
    monkeypatch.setattr(sys, "argv", ["lit-collect", "fit", f"--config={debug}", *arguments])
    main()


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize(
    ("arguments", "frames"), [(["--data.backend=process"], 128), (ASYNCHRONOUS, 144)], ids=["process", "asynchronous"]
)
def test_command_trains_with_frames_of_processes(arguments, frames, monkeypatch, capsys):
    command(monkeypatch, *arguments)
    assert f"frames          {frames}" in capsys.readouterr().out


def printed_config(monkeypatch, capsys, *arguments: str) -> dict:
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, *arguments, "--print_config")
    assert not stop.value.code
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [["--data.backend=process"], ASYNCHRONOUS], ids=["process", "asynchronous"])
def test_printed_config_with_a_backend_can_be_read_again(arguments, monkeypatch, capsys, tmp_path):
    first = printed_config(monkeypatch, capsys, *arguments)
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(first))
    assert printed_config(monkeypatch, capsys, f"--config={path}") == first
    backend = first["data"]["init_args"]["backend"]
    if arguments is ASYNCHRONOUS:
        assert backend["class_path"] == "lit_collect.ProcessBackend"
        assert backend["init_args"].items() >= {"num_collectors": 3, "sync": False, "max_restarts": 0}.items()
    else:
        assert backend == "process"


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("proces", "backend must be one of auto, direct, process, got 'proces'"),
        ("ray", "backend 'ray' is not in this version; use direct, process"),
    ],
)
def test_backend_that_does_not_exist_is_named_with_those_that_do(backend, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        command(monkeypatch, f"--data.backend={backend}")
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# --- how long it takes ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nursery")
def test_further_workers_start_in_no_time():
    def seconds(workers: int) -> float:
        began = perf_counter()
        with Collector(CountingEnv, num_envs=4, frames_per_batch=4, backend=ProcessBackend(workers)):
            return perf_counter() - began

    seconds(1)  # the first one of all waits for the imports
    alone = min(seconds(1) for _ in range(3))
    four = min(seconds(4) for _ in range(3))
    assert (four - alone) / 3 < SOON_S
