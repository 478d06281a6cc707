"""Doubles for tests of code that collects: envs and policies whose every number says where it came from."""

from typing import TYPE_CHECKING, Any

from lit_collect.testing.doubles import ConstantPolicy, CountingEnv, FailingEnv, ScriptedEnv

if TYPE_CHECKING:
    from lit_collect.testing.learner import BoringRLModule

for _double in (ConstantPolicy, CountingEnv, FailingEnv, ScriptedEnv):
    _double.__module__ = __name__  # where users find them, and messages say they are

__all__ = ["BoringRLModule", "ConstantPolicy", "CountingEnv", "FailingEnv", "ScriptedEnv"]


def __getattr__(name: str) -> Any:
    """Import what needs Lightning when it is first used: a worker process need not wait for that."""
    if name != "BoringRLModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_collect.testing.learner import BoringRLModule

    BoringRLModule.__module__ = __name__
    globals()[name] = BoringRLModule
    return BoringRLModule
