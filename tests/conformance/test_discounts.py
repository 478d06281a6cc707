"""The discounts of dm_control: 0 ends an episode, 1 at its last step cuts it."""

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

from lit_collect import Collector

pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


@pytest.fixture
def make_control(bring: Callable[..., list[Any]]) -> Callable[[bool], gymnasium.Env]:
    """Makes a pole that falls after three steps, or a time limit that is reached then."""
    suite, shimmy = bring("dm_control.suite", "shimmy")

    def make(falls: bool) -> gymnasium.Env:
        env = suite.load("cartpole", "balance", task_kwargs={"time_limit": 1.0 if falls else 0.03})
        if falls:
            env.task.get_termination = lambda physics: 0.0 if physics.time() > 0.025 else None
        return shimmy.DmControlCompatibilityV0(env)

    return make


@pytest.mark.parametrize("falls", [True, False], ids=["discount 0", "discount 1"])
def test_c43_discount_0_terminates_and_discount_1_at_the_end_truncates(
    falls: bool, make_control: Callable[[bool], gymnasium.Env]
) -> None:
    with Collector(lambda: make_control(falls), frames_per_batch=7, seed=0) as collector:
        batch = collector.collect()
    ends = [False, False, True] * 2 + [False]
    assert batch["next", "terminated"][:, 0].tolist() == [falls and end for end in ends]
    assert batch["next", "truncated"][:, 0].tolist() == [not falls and end for end in ends]
