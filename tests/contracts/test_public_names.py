"""What users import. A name here goes away only with a deprecation."""

import inspect

import pytest

import lit_collect
import trainers

NAMES = [
    "BackendUnavailableError",
    "BudgetSpentError",
    "CollectionMonitor",
    "Collector",
    "CollectorCLI",
    "CollectorClosedError",
    "CollectorDataModule",
    "CollectorDataset",
    "DeviceConfig",
    "DirectBackend",
    "EnvFactory",
    "EvaluationConfig",
    "FrameContractError",
    "FrameProgress",
    "GymEnvFactory",
    "LearningCurve",
    "LitCollectError",
    "PolicyFactory",
    "RandomPolicy",
    "ReplayConfig",
    "RolloutConfig",
    "TrajectoryConfig",
    "UpdateConfig",
    "WeightSnapshot",
    "WeightSync",
    "make_dataloader",
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
