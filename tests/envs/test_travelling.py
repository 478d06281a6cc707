"""What makes envs travels to other processes, and so do the ids that it needs."""

import os
import pickle
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from lit_collect.config import RolloutConfig
from lit_collect.envs.factories import register_missing, registrations, resolve_env
from lit_collect.testing import CountingEnv

USERS_MODULE = """
import threading
import gymnasium
from lit_collect.envs.base import EnvFactory
from lit_collect.testing import CountingEnv

gymnasium.register("mine/Count-v0", "lit_collect.testing:CountingEnv")

def make_env():
    return CountingEnv(5)

class Factory(EnvFactory):
    def __call__(self):
        return CountingEnv(6)

class Locked:
    def __init__(self):
        self.lock = threading.Lock()
    def __call__(self):
        return CountingEnv(8)

locked = Locked()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: dict) -> Iterator[str]:
    """A user's module that registers an id."""
    (tmp_path / "users_envs.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_envs"
    sys.modules.pop("users_envs", None)


@pytest.fixture
def registry() -> Iterator[dict]:
    """Gymnasium's registry, put back afterwards."""
    before = dict(gymnasium.registry)
    yield gymnasium.registry
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def test_registrations_are_what_gymnasium_alone_does_not_know(registry):
    own = "import gymnasium; print(*gymnasium.registry)"
    known = subprocess.run([sys.executable, "-c", own], capture_output=True, check=True, timeout=60).stdout
    unknown = registry.keys() - known.decode().split()
    replaced = registrations().keys() - unknown  # under an id of Gymnasium's own: shimmy does that
    assert registrations().keys() >= unknown
    assert not [name for name in replaced if str(registry[name].entry_point).startswith("gymnasium.")]
    before = registrations()
    gymnasium.register("Short-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=3)
    gymnasium.register("mine/Vector-v0", vector_entry_point="mine:Vector")
    gymnasium.register("mine/Call-v0", lambda: CountingEnv(3))
    added = {name: spec for name, spec in registrations().items() if name not in before}
    assert added == {name: registry[name] for name in ("Short-v0", "mine/Vector-v0", "mine/Call-v0")}


def test_registrations_of_many_ids_stay_small(registry):
    for i in range(1000):
        gymnasium.register(f"many/Game{i}-v5", "many.env:Game", kwargs={"game": f"game{i}", "sticky": 0.25, "skip": 4})
    assert len(cloudpickle.dumps(registrations())) < 200_000


def test_register_missing_adds_what_is_absent_and_leaves_the_rest(registry):
    gymnasium.register("mine/One-v0", "mine:One")
    kept = registry["mine/One-v0"]
    gymnasium.register("mine/Two-v0", "mine:Two")
    specs = pickle.loads(cloudpickle.dumps(registrations()))
    del registry["mine/Two-v0"]
    register_missing(specs)
    register_missing(specs)
    assert registry["mine/One-v0"] is kept
    assert registry["mine/Two-v0"] is specs["mine/Two-v0"]


def test_a_module_may_register_again_what_was_missing(registry):
    specs = {name: EnvSpec(name, "mine:One") for name in ("mine/One-v0", "mine/One-v1")}
    gymnasium.register("mine/One-v1", "mine:One")
    register_missing(specs)
    gymnasium.register("mine/One-v0", "mine:Other")
    assert registry["mine/One-v0"].entry_point == "mine:Other"
    with pytest.warns(UserWarning, match="Overriding environment mine/One-v1 already in registry"):
        gymnasium.register("mine/One-v1", "mine:Other")


def test_a_factory_travels_without_what_cannot_be_pickled(module):
    source = resolve_env(f"{module}.locked")
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        cloudpickle.dumps(sys.modules[module].locked)
    again = pickle.loads(cloudpickle.dumps(source))
    assert again.build(None, rollout=RolloutConfig()).reset()[0][0, 0] == 8
    assert again.description == f"{module}.locked"


MAIN_SCRIPT = """
import functools, pickle
import cloudpickle, gymnasium
from lit_collect.envs.base import EnvFactory
from lit_collect.envs.factories import GymEnvFactory, registrations, resolve_env
from lit_collect.testing import CountingEnv

class Mine(CountingEnv):
    pass

class Factory(EnvFactory):
    def __init__(self, index):
        self.index = index
    def __call__(self):
        return Mine(self.index)

def make():
    return Mine(5)

def wrap(env, by=100):
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs + by, env.observation_space)

gymnasium.register("main/Class-v0", Mine, kwargs={"index": 1})
gymnasium.register("main/Named-v0", "__main__:Mine", kwargs={"index": 2})
gymnasium.register("main/Made-v0", lambda: Mine(3))
offset = 4
wrappers = ["gymnasium.wrappers.FlattenObservation", "__main__.wrap", wrap, lambda env: wrap(env, 1000)]
wrappers += [{"class_path": "__main__.wrap", "init_args": {"by": 10_000}}]
envs = [
    "main/Class-v0", "main/Named-v0", "main/Made-v0",
    lambda: Mine(offset), "__main__.make", functools.partial(Mine, 6), Factory(7), Mine,
    "users_envs.locked", "users_envs.Factory", "users_envs:mine/Count-v0", ["users_envs.make_env", make],
    GymEnvFactory("main/Class-v0", wrappers=wrappers), GymEnvFactory("main/Class-v0", {"index": 9}),
]
blob = pickle.dumps([cloudpickle.dumps(registrations()), cloudpickle.dumps([resolve_env(env) for env in envs])])
"""
INDICES = [1, 2, 3, 4, 5, 6, 7, 0, 8, 6, 0, 5, 11201, 9]

OTHER_PROCESS = """
import pickle, sys
from lit_collect.config import RolloutConfig
from lit_collect.envs.factories import register_missing

specs, sources = pickle.load(sys.stdin.buffer)
register_missing(pickle.loads(specs))
for source in pickle.loads(sources):
    print(int(source.build(None, rollout=RolloutConfig()).reset()[0][0, 0]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_what_the_main_script_defines_and_registers_is_made_in_another_process(module, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(MAIN_SCRIPT)
    blob = runpy.run_path(str(script), run_name="__main__")["blob"]
    paths = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS],
        input=blob,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"Overriding" not in done.stderr
    assert [int(line) for line in done.stdout.split()] == INDICES
