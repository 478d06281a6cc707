"""Settings check themselves, and say what would do instead."""

import dataclasses
import re

import pytest

from lit_collect.config import (
    DeviceConfig,
    EvaluationConfig,
    RolloutConfig,
    TrajectoryConfig,
    UpdateConfig,
    check_frames,
    nearest_multiples,
    settings,
)
from lit_collect.replay.config import ReplayConfig
from lit_collect.replay.transforms import NStep

ALL = [
    RolloutConfig(),
    TrajectoryConfig(),
    ReplayConfig(capacity=10),
    UpdateConfig(),
    DeviceConfig(),
    EvaluationConfig(),
]
each_config = pytest.mark.parametrize("config", ALL, ids=lambda config: type(config).__name__)
CHOICES = "random, mode, mean, deterministic"


@each_config
def test_configs_are_frozen(config):
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, None)


@each_config
def test_configs_take_keywords_only(config):
    with pytest.raises(TypeError, match="positional argument"):
        type(config)(1)


@each_config
def test_configs_have_no_slots_and_are_equal_by_value(config):
    # LightningCLI looks into __dict__ to build its parser, and compares saved configs.
    assert vars(config) == dataclasses.asdict(config)
    assert config == dataclasses.replace(config)


def test_defaults_are_those_of_the_contract():
    assert vars(RolloutConfig()) == {
        "max_frames_per_traj": None,
        "init_random_frames": 0,
        "reset_at_each_iter": False,
        "exploration": "random",
        "set_truncated": False,
        "compact_obs": False,
        "clip_actions": True,
        "keep_float64": False,
        "info_keys": (),
        "check_finite": False,
        "compile_policy": False,
        "verify_envs": False,
    }
    assert vars(UpdateConfig()) == {"epochs": 1, "minibatch_size": None, "shuffle": True, "updates_per_batch": 1}
    assert vars(TrajectoryConfig()) == {
        "trajs_per_batch": None,
        "traj_format": "cat",
        "split_trajs": False,
        "drop_stale": False,
    }
    assert vars(ReplayConfig(capacity=10)) == {
        "capacity": 10,
        "batch_size": 256,
        "slice_len": None,
        "sampler": "uniform",
        "write_mode": "rollout",
        "trajs_per_write": None,
        "min_frames": 0,
        "storage": "memory",
        "path": None,
        "transforms": (),
        "background": False,
    }
    assert vars(DeviceConfig()) == {"policy": None, "env": None, "storage": None}
    assert vars(EvaluationConfig()) == {
        "num_episodes": 10,
        "num_envs": None,
        "exploration": "deterministic",
        "seed": None,
        "max_frames": None,
    }


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: RolloutConfig(max_frames_per_traj=0),
            "rollout.max_frames_per_traj must be at least 1 or None, got 0",
        ),
        (lambda: RolloutConfig(init_random_frames=-1), "rollout.init_random_frames must be at least 0, got -1"),
        (lambda: RolloutConfig(exploration="greedy"), f"rollout.exploration must be one of {CHOICES}, got 'greedy'"),
        (lambda: UpdateConfig(epochs=0), "updates.epochs must be at least 1, got 0"),
        (lambda: TrajectoryConfig(trajs_per_batch=0), "trajectories.trajs_per_batch must be at least 1 or None, got 0"),
        (
            lambda: TrajectoryConfig(trajs_per_batch=2, traj_format="flat"),
            "trajectories.traj_format must be one of cat, padded, got 'flat'",
        ),
        (
            lambda: TrajectoryConfig(traj_format="padded"),
            "trajectories.traj_format is about whole trajectories : expected trajs_per_batch with it, got None",
        ),
        (
            lambda: TrajectoryConfig(drop_stale=True),
            "trajectories.drop_stale is about whole trajectories : expected trajs_per_batch with it, got None",
        ),
        (
            lambda: TrajectoryConfig(trajs_per_batch=2, split_trajs=True),
            (
                "trajectories.split_trajs splits batches of a fixed number of frames : expected "
                "False with trajs_per_batch, got True; use traj_format='padded'"
            ),
        ),
        (lambda: ReplayConfig(capacity=0), "replay.capacity must be at least 1, got 0"),
        (lambda: ReplayConfig(capacity=9, batch_size=0), "replay.batch_size must be at least 1, got 0"),
        (lambda: ReplayConfig(capacity=9, slice_len=0), "replay.slice_len must be at least 1 or None, got 0"),
        (
            lambda: ReplayConfig(capacity=9, batch_size=10, slice_len=4),
            "replay.batch_size must be a multiple of slice_len=4, got 10; use 8 or 12",
        ),
        (
            lambda: ReplayConfig(capacity=9, batch_size=3, slice_len=4),
            "replay.batch_size must be a multiple of slice_len=4, got 3; use 4",
        ),
        (
            lambda: ReplayConfig(capacity=9, min_frames=10),
            "replay.min_frames must be at most capacity=9, got 10; there would never be a sample",
        ),
        (lambda: ReplayConfig(capacity=9, min_frames=-1), "replay.min_frames must be at least 0, got -1"),
        (
            lambda: ReplayConfig(capacity=9, write_mode="step"),
            "replay.write_mode must be one of rollout, trajectory, got 'step'",
        ),
        (
            lambda: ReplayConfig(capacity=9, trajs_per_write=2),
            "replay.trajs_per_write needs write_mode='trajectory', got 2 with 'rollout'",
        ),
        (
            lambda: ReplayConfig(capacity=9, storage="mapped"),
            (
                "replay.path is the folder of storage='mapped' : expected both or neither, got "
                "storage='mapped' and path=None"
            ),
        ),
        (
            lambda: ReplayConfig(capacity=9, path="x"),
            (
                "replay.path is the folder of storage='mapped' : expected both or neither, got "
                "storage='memory' and path='x'"
            ),
        ),
        (
            lambda: ReplayConfig(capacity=9, sampler="prio"),
            (
                "sampler must be one of uniform, without_replacement, prioritized, consuming, staleness, slice, "
                "slice_without_replacement, prioritized_slice, got 'prio'"
            ),
        ),
        (
            lambda: ReplayConfig(capacity=9, storage="disk"),
            "storage is unknown : expected 'memory', 'shared' or 'mapped', got 'disk'",
        ),
        (
            lambda: ReplayConfig(capacity=9, batch_size=8, slice_len=4, transforms=(NStep(3, 0.9),)),
            (
                "NStep works on single rows : expected a sampler of rows, got SliceSampler; leave the slices or the "
                "transform out"
            ),
        ),
        (lambda: UpdateConfig(updates_per_batch=0), "updates.updates_per_batch must be at least 1, got 0"),
        (lambda: UpdateConfig(minibatch_size=0), "updates.minibatch_size must be at least 1 or None, got 0"),
        (
            lambda: DeviceConfig(storage="gpu"),
            "devices.storage must name a torch device or be None, got 'gpu'; use 'cpu' or 'cuda:0'",
        ),
        (
            lambda: DeviceConfig(policy=""),
            "devices.policy must name a torch device or be None, got ''; use 'cpu' or 'cuda:0'",
        ),
        (lambda: EvaluationConfig(num_episodes=0), "evaluation.num_episodes must be at least 1, got 0"),
        (lambda: EvaluationConfig(num_envs=0), "evaluation.num_envs must be at least 1 or None, got 0"),
        (lambda: EvaluationConfig(max_frames=0), "evaluation.max_frames must be at least 1 or None, got 0"),
        (
            lambda: EvaluationConfig(exploration="eval"),
            f"evaluation.exploration must be one of {CHOICES}, got 'eval'",
        ),
        (
            lambda: EvaluationConfig(num_episodes=12, num_envs=5),
            "evaluation.num_envs must divide num_episodes=12, got 5; use 4 or 6",
        ),
        (
            lambda: EvaluationConfig(num_episodes=12, num_envs=24),
            "evaluation.num_envs must divide num_episodes=12, got 24; use 12",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_value_raises_and_says_what_would_do(build, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: RolloutConfig(max_frames_per_traj=2.5),
            "rollout.max_frames_per_traj must be an integer, got 2.5",
        ),
        (lambda: RolloutConfig(init_random_frames="4"), "rollout.init_random_frames must be an integer, got '4'"),
        (lambda: UpdateConfig(epochs=True), "updates.epochs must be an integer, got True"),
        (lambda: UpdateConfig(epochs=None), "updates.epochs must be an integer, got None"),
        (lambda: UpdateConfig(minibatch_size=64.0), "updates.minibatch_size must be an integer, got 64.0"),
        (lambda: ReplayConfig(capacity=9, sampler=3), "sampler must be a Sampler or a name, got 3"),
        (
            lambda: ReplayConfig(capacity=9, transforms=("NStep",)),
            "transforms must be of SampleTransform, got 'NStep'",
        ),
        (
            lambda: ReplayConfig(capacity=9, storage="mapped", path=3),
            "replay.path must be the path of a folder or None, got 3",
        ),
        (lambda: EvaluationConfig(num_episodes=1e1), "evaluation.num_episodes must be an integer, got 10.0"),
        (lambda: EvaluationConfig(num_envs="2"), "evaluation.num_envs must be an integer, got '2'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_type_raises_type_error(build, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        build()


@pytest.mark.parametrize("name", ["policy", "env", "storage"])
def test_devices_can_be_none_or_cpu(name):
    assert getattr(DeviceConfig(**{name: "cpu"}), name) == "cpu"


@pytest.mark.parametrize(
    ("num_episodes", "num_envs", "copies"), [(10, None, 10), (12, None, 6), (7, None, 7), (13, None, 1), (12, 3, 3)]
)
def test_evaluation_copies_divide_the_episodes(num_episodes, num_envs, copies):
    assert EvaluationConfig(num_episodes=num_episodes, num_envs=num_envs).copies == copies


@pytest.mark.parametrize(("value", "unit", "words"), [(100, 8, "96 or 104"), (5, 8, "8"), (9, 8, "8 or 16")])
def test_nearest_multiples_are_around_the_value(value, unit, words):
    assert nearest_multiples(value, unit) == words


@pytest.mark.parametrize("total_frames", [-1, 8, 1000])
def test_check_frames_passes_what_fits(total_frames):
    check_frames(64, total_frames, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, -1, 8, 8), "rollout.frames_per_batch must be a multiple of num_envs=8, got 100; use 96 or 104"),
        ((4, -1, 8, 8), "rollout.frames_per_batch must be a multiple of num_envs=8, got 4; use 8"),
        ((0, -1, 8, 8), "rollout.frames_per_batch must be at least 1, got 0"),
        ((8, -1, 0, 0), "num_envs must be at least 1 or None, got 0"),
        ((8, 0, 8, 8), "total_frames must be at least 1, or -1 for no limit, got 0"),
        ((8, -2, 8, 8), "total_frames must be at least 1, or -1 for no limit, got -2"),
        ((8, 1000, 4, 16), "total_frames must be a multiple of the 16 env copies, got 1000; use 992 or 1008"),
        ((8, 3, 4, 4), "total_frames must be a multiple of the 4 env copies, got 3; use 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_check_frames_raises_and_names_the_nearest_values(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_frames(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64.0, -1, 8, 8), "rollout.frames_per_batch must be an integer, got 64.0"),
        ((64, -1, "8", 8), "num_envs must be an integer, got '8'"),
        ((64, 640.0, 8, 8), "total_frames must be an integer, got 640.0"),
        ((64, "all", 8, 8), "total_frames must be an integer, got 'all'"),
        ((64, None, 8, 8), "total_frames must be an integer, got None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_check_frames_of_no_integer_raises_type_error(arguments, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        check_frames(*arguments)


def test_path_of_a_replay_config_is_plain(tmp_path):
    assert ReplayConfig(capacity=9, storage="mapped", path=tmp_path).as_plain()["path"] == str(tmp_path)


def test_settings_when_a_mapping_has_an_unknown_name_then_it_says_which_there_are():
    with pytest.raises(TypeError, match="replay has no setting 'batchsize' : expected some of capacity, batch_size, "):
        settings(ReplayConfig, {"capacity": 10, "batchsize": 5}, "replay")


def test_settings_when_a_mapping_lacks_one_without_a_default_then_it_says_so():
    with pytest.raises(TypeError, match="replay lacks the setting 'capacity', which has no default"):
        settings(ReplayConfig, {"batch_size": 5}, "replay")
    assert settings(ReplayConfig, {"capacity": 10}, "replay") == ReplayConfig(capacity=10)
