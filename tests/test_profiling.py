"""Rollouts recorded as a Chrome trace."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lit_collect.profiling import ProfileConfig, RolloutProfiler

DEFAULT = Path("collector_profile_0.json")


def run(profiler: RolloutProfiler, rollouts: int) -> None:
    for _ in range(rollouts):
        with profiler.rollout():
            torch.ones(3).cumsum(0)


def events(path: Path, name: str = "rollout") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == name]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_rollouts": 2, "warmup_rollouts": 2}, r"num_rollouts must be more than profile.warmup_rollouts=2, got 2"),
        ({"num_rollouts": 0}, "num_rollouts must be at least 1, got 0"),
        ({"warmup_rollouts": -1}, "warmup_rollouts must be at least 0, got -1"),
        ({"workers": ()}, r"workers must be indices of workers, at least one, got \(\)"),
        ({"workers": (0, -1)}, r"workers must be indices of workers, at least one, got \(0, -1\)"),
        (
            {"workers": (0, 1), "save_path": "t.json"},
            r"save_path must contain \{worker\} where several .* got 't.json'",
        ),
    ],
)
def test_config_refuses_what_cannot_be(settings, message):
    with pytest.raises(ValueError, match=rf"^profile\.{message}"):
        ProfileConfig(**settings)


@pytest.mark.parametrize(("name", "value"), [("num_rollouts", 2.0), ("warmup_rollouts", True)])
def test_config_refuses_numbers_that_are_no_integers(name, value):
    with pytest.raises(TypeError, match=rf"profile\.{name} must be an integer, got {value}"):
        ProfileConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({}, "collector_profile_3.json"),
        ({"save_path": "a/{worker_idx}/b_{worker}.json", "workers": [2, 3]}, "a/3/b_3.json"),
        ({"save_path": "{run}/trace.json", "workers": (3,)}, "{run}/trace.json"),
    ],
)
def test_config_puts_the_workers_index_into_the_path(settings, path):
    config = ProfileConfig(**settings)
    assert config.path(3) == Path(path)
    assert hash(config) == hash(ProfileConfig(**settings))


@pytest.mark.parametrize(("num_rollouts", "warmup_rollouts"), [(3, 1), (1, 0), (5, 2)])
def test_profiler_records_all_but_the_first_rollouts_and_then_does_nothing(num_rollouts, warmup_rollouts):
    profiler = RolloutProfiler(ProfileConfig(num_rollouts=num_rollouts, warmup_rollouts=warmup_rollouts), worker=0)
    run(profiler, num_rollouts - 1)
    assert (profiler.finished, DEFAULT.exists()) == (False, False)
    run(profiler, 1)
    assert profiler.finished
    rollouts = events(DEFAULT)
    assert len(rollouts) == len(events(DEFAULT, "aten::cumsum")) == num_rollouts - warmup_rollouts
    assert {event["ph"] for event in rollouts} == {"X"}
    DEFAULT.unlink()
    run(profiler, 2)
    profiler.close()
    assert not DEFAULT.exists()
    assert not torch.autograd._profiler_enabled()


def test_profiler_makes_the_folders_of_its_file():
    run(RolloutProfiler(ProfileConfig(save_path="deep/down/{worker}.json"), worker=7), 3)
    assert len(events(Path("deep/down/7.json"))) == 2


def test_profiler_compresses_where_the_name_says_so():
    run(RolloutProfiler(ProfileConfig(save_path="trace.json.gz"), worker=0), 3)
    assert json.loads(gzip.decompress(Path("trace.json.gz").read_bytes()))["traceEvents"]


def test_profiler_records_shapes_memory_and_stacks_if_asked():
    config = ProfileConfig(record_shapes=True, profile_memory=True, with_stack=True)
    run(RolloutProfiler(config, worker=0), 3)
    assert events(DEFAULT, "aten::cumsum")[0]["args"]["Input Dims"][0] == [3]
    assert events(DEFAULT, "[memory]")
    assert any("test_profiling.py" in event["name"] for event in json.loads(DEFAULT.read_text())["traceEvents"])


@pytest.mark.parametrize(("rollouts", "recorded"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_close_writes_what_is_there(rollouts, recorded):
    profiler = RolloutProfiler(ProfileConfig(num_rollouts=9), worker=0)
    run(profiler, rollouts)
    profiler.close()
    profiler.close()
    run(profiler, 1)
    assert profiler.finished
    assert DEFAULT.exists() == bool(recorded)
    assert not recorded or len(events(DEFAULT)) == recorded


@pytest.mark.parametrize("error", [RuntimeError("broken env"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("before", [0, 2])
def test_an_exception_within_a_rollout_ends_the_recording(before, error):
    profiler = RolloutProfiler(ProfileConfig(), worker=0)
    run(profiler, before)
    with pytest.raises(type(error)) as caught, profiler.rollout():
        raise error
    assert caught.value is error
    assert profiler.finished
    assert not torch.autograd._profiler_enabled()
    profiler.close()
    run(profiler, 3)
    assert not DEFAULT.exists()


@pytest.mark.parametrize("path", [".", "file/trace.json"])
def test_a_trace_that_cannot_be_written_is_an_error(path):
    Path("file").touch()
    profiler = RolloutProfiler(ProfileConfig(save_path=path), worker=0)
    with pytest.raises(OSError, match=r"Is a directory|File exists|Not a directory"):
        run(profiler, 3)
    assert profiler.finished


def test_a_thread_that_is_profiled_already_is_refused():
    profiler = RolloutProfiler(ProfileConfig(warmup_rollouts=0), worker=0)
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match="a profiler of torch is recording already"),
    ):
        run(profiler, 1)
    assert profiler.finished
    run(profiler, 3)
    assert not DEFAULT.exists()
