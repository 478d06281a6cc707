"""Every example is short, says what it shows, and runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 80
FRAMES = 512
TIMEOUT_S = 150

in_every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def test_there_are_examples() -> None:
    assert EXAMPLES


@in_every_example
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@in_every_example
def test_example_begins_by_saying_what_it_shows(path: Path) -> None:
    assert path.read_text().startswith("# ")


@pytest.mark.slow
@in_every_example
def test_example_runs(path: Path) -> None:
    environment = {
        **os.environ,
        "LIT_COLLECT_EXAMPLE_FRAMES": str(FRAMES),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    result = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@in_every_example
def test_example_reads_its_budget_from_the_environment(path: Path) -> None:
    assert "LIT_COLLECT_EXAMPLE_FRAMES" in path.read_text()
