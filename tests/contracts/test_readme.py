"""What the README tells people to run runs, and the changelog has a place for what comes next."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from lit_collect.cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
FRAMES = 2048


def blocks(*languages: str) -> list[tuple[int, str]]:
    """Code blocks in these languages, each with the number of lines above it."""
    found = re.finditer(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    return [(TEXT.count("\n", 0, match.start(1)), match[1]) for match in found]


def commands() -> list[str]:
    """Every `lit-collect` command line, continued lines joined, without prompt and comment."""
    lines = [line for _, block in blocks("bash", "console", "sh") for line in block.replace("\\\n", " ").splitlines()]
    stripped = [line.removeprefix("$").strip() for line in lines]
    return [line for line in stripped if line.startswith("lit-collect ")]


@pytest.mark.slow
def test_python_blocks_run_one_after_the_other() -> None:
    assert blocks("python")
    names: dict[str, object] = {"__name__": "readme"}
    for lines_above, block in blocks("python"):
        small = re.sub(r"total_frames=[\d_]+", f"total_frames={FRAMES}", block)
        exec(compile("\n" * lines_above + small, "README.md", "exec"), names)


def test_there_are_commands() -> None:
    assert commands()


@pytest.mark.parametrize("command", commands())
def test_command_is_understood(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # its configs are relative to the repository
    words = shlex.split(command, comments=True)
    asks_for_help = words[1] in ("doctor", "tune")  # which measure; the rest parse a config
    monkeypatch.setattr(sys, "argv", [*words, "--help" if asks_for_help else "--print_config"])
    with pytest.raises(SystemExit) as stop:
        sys.exit(main())
    assert not stop.value.code, capsys.readouterr().err


def test_changelog_has_an_unreleased_section() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]$", text, re.MULTILINE)
