"""Each source is collected from once, and looked at by many tests."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.conformance.sources import LONG, SHORT, SOURCES, Interruptions, Recording, Source, interrupt, record


@pytest.fixture
def bring(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ModuleType]]:
    """Imports packages that may be missing, without the environment variables that some of them leave behind."""

    def bring(*names: str) -> list[ModuleType]:
        monkeypatch.setenv("MUJOCO_GL", "disabled")  # dm_control would look for a screen
        before = dict(os.environ)
        modules = [pytest.importorskip(name) for name in names]
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        return modules

    return bring


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, bring: Callable[..., list[ModuleType]]) -> Source:
    """Every source in turn."""
    found = SOURCES[request.param]
    bring(*found.needs)
    return found


@pytest.fixture(scope="session")
def remembered() -> Callable[..., Any]:
    """Calls a function once for each set of arguments."""
    results: dict[Any, Any] = {}

    def call(function: Callable[..., Any], *args: Any) -> Any:
        key = (function, *(id(arg) if isinstance(arg, Source) else arg for arg in args))
        if key not in results:
            results[key] = function(*args)
        return results[key]

    return call


@pytest.fixture
def recording(source: Source, remembered: Callable[..., Any]) -> Recording:
    """In batches of seven steps."""
    return remembered(record, source, SHORT)


@pytest.fixture
def long_recording(source: Source, remembered: Callable[..., Any]) -> Recording:
    """In as few batches as possible."""
    return remembered(record, source, LONG)


@pytest.fixture
def interruptions(source: Source, remembered: Callable[..., Any]) -> Interruptions:
    return remembered(interrupt, source)
