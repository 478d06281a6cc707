"""What users import. A name here goes away only with a deprecation."""

import inspect
import subprocess
import sys

import pytest

import lit_collect
import trainers

NAMES = [
    "Backend",
    "BackendUnavailableError",
    "BudgetSpentError",
    "CollectTimeoutError",
    "CollectionMonitor",
    "Collector",
    "CollectorCLI",
    "CollectorClosedError",
    "CollectorDataModule",
    "CollectorDataset",
    "DeviceConfig",
    "DirectBackend",
    "EnvFactory",
    "EpisodeLog",
    "EpisodeVideo",
    "EvaluationConfig",
    "FrameContractError",
    "FrameProgress",
    "GymEnvFactory",
    "Hindsight",
    "Hooks",
    "LearningCurve",
    "LitCollectError",
    "MixedBuffer",
    "NStep",
    "NoSync",
    "OfflineDataModule",
    "PacedBuffer",
    "Pipe",
    "Placement",
    "PolicyFactory",
    "ProcessBackend",
    "RandomPolicy",
    "ReplayBuffer",
    "ReplayConfig",
    "RolloutConfig",
    "SharedMemory",
    "StaleDataError",
    "TrajectoryAssembler",
    "TrajectoryConfig",
    "UpdateConfig",
    "VectorEnvFactory",
    "WeightReceiver",
    "WeightSnapshot",
    "WeightSync",
    "WeightSyncScheme",
    "WorkerDiedError",
    "WorkerFailedError",
    "check_batch",
    "decode_texts",
    "make_dataloader",
    "masked_logits",
    "offline_buffer",
    "restore_successors",
    "split_trajectories",
]
CONFIGS = [name for name in NAMES if name.endswith("Config")]
ERRORS = [name for name in NAMES if name.endswith("Error")]


@pytest.mark.parametrize("name", NAMES)
def test_name_is_public(name: str) -> None:
    assert name in lit_collect.__all__


@pytest.mark.parametrize("name", sorted({*NAMES, *lit_collect.__all__}))
def test_public_name_exists_and_is_documented(name: str) -> None:
    thing = getattr(lit_collect, name)
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else inspect.getdoc(thing)
    assert text
    assert not text.startswith(f"{name}(")  # what dataclass writes where nobody did


def test_package_shows_its_public_names_before_they_are_imported() -> None:
    code = "import sys, lit_collect; print(set(lit_collect.__all__) <= set(dir(lit_collect)), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["True", "False"]


def test_name_that_does_not_exist_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'lit_collect' has no attribute 'Colector'"):
        _ = lit_collect.Colector


METHODS = [
    "async_shutdown",
    "cascade_execute",
    "collect",
    "enable_profile",
    "fake_tensordict",
    "frames_left",
    "get_model",
    "getattr_env",
    "getattr_policy",
    "getattr_rb",
    "increment_version",
    "init_updater",
    "is_running",
    "load_state_dict",
    "map_fn",
    "pause",
    "policy_version",
    "profile_config",
    "receive_weights",
    "register_scheme_receiver",
    "reset",
    "rollout",
    "set_seed",
    "shutdown",
    "start",
    "state_dict",
    "statistics",
    "update_policy_weights_",
    "workers",
]


@pytest.mark.parametrize("name", METHODS)
def test_collector_has_its_documented_methods(name: str) -> None:
    assert inspect.getdoc(getattr(lit_collect.Collector, name))


def test_public_names_are_listed_once() -> None:
    assert len(lit_collect.__all__) == len(set(lit_collect.__all__))


def test_ppo_is_a_trainer() -> None:
    assert "PPO" in trainers.__all__
    assert inspect.getdoc(trainers.PPO)


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_a_lit_collect_error(name: str) -> None:
    assert issubclass(getattr(lit_collect, name), lit_collect.LitCollectError)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_frozen_and_keyword_only(name: str) -> None:
    config = getattr(lit_collect, name)
    assert config.__dataclass_params__.frozen
    assert {p.kind for p in inspect.signature(config).parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
