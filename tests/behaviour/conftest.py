"""What the tests of whole runs share: a quiet trainer, and makers of envs that remember what they made."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest

from lit_collect.testing import BoringRLModule, CountingEnv
from tests.behaviour.streams import Telling


class Census:
    """Makes envs, and knows which of them are open."""

    def __init__(self, make: Callable[[], CountingEnv]) -> None:
        self._make = make
        self.made: list[CountingEnv] = []

    def __call__(self) -> CountingEnv:
        self.made.append(self._make())
        return self.made[-1]

    @property
    def still_open(self) -> int:
        return sum(env.closes == 0 for env in self.made)


class Learner(BoringRLModule):
    """Lowers its weight by 1 in each optimizer step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Telling(), **options)


class EvaluatedLearner(Learner):
    """Takes part in every kind of run, and keeps the rounds it was shown."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rounds: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rounds.append(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.rounds.append(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        self.rounds.append(batch)
        return batch.batch_size[0]


def make_trainer(folder: Any, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": folder,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


@pytest.fixture
def trainer_with(tmp_path) -> Callable[..., L.Trainer]:
    """Make a trainer of some options that shows and writes nothing."""
    return partial(make_trainer, tmp_path)


@pytest.fixture
def census() -> Callable[..., Census]:
    """Make a maker of envs, by default of `CountingEnv` with episodes of 3 frames."""
    return lambda make=CountingEnv: Census(make)


@pytest.fixture
def learner() -> type[Learner]:
    return Learner


@pytest.fixture
def evaluated_learner() -> type[EvaluatedLearner]:
    return EvaluatedLearner
