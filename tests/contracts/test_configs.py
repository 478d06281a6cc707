"""Every shipped configuration is understood by the command line, survives being printed, and trains."""

import sys
from pathlib import Path

import pytest
import yaml

from lit_collect.cli import main

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
BATCHES = 2  # one to start with, one more that is collected with new weights

in_every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run `lit-collect` in this process."""
    monkeypatch.setattr(sys, "argv", ["lit-collect", *arguments])
    main()


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """The whole configuration that a file stands for."""
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "fit", f"--config={path}", "--print_config")
    assert not stop.value.code
    return capsys.readouterr().out


def test_there_are_configs() -> None:
    assert CONFIGS


@in_every_config
def test_config_when_printed_and_read_again_is_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = printed(monkeypatch, capsys, path)
    Path("again.yaml").write_text(first)
    assert yaml.safe_load(printed(monkeypatch, capsys, Path("again.yaml"))) == yaml.safe_load(first)


@pytest.mark.slow
@in_every_config
def test_config_trains(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = yaml.safe_load(printed(monkeypatch, capsys, path))["data"]
    settings = data.get("init_args", data)
    size, replay = settings["frames_per_batch"], settings["replay"] or {"min_frames": 0}
    frames = (BATCHES + -(-replay["min_frames"] // size)) * size
    run(
        monkeypatch,
        "fit",
        f"--config={path}",
        f"--data.total_frames={frames}",
        "--data.updates.epochs=1",  # over a batch: more of the same
        "--trainer.max_epochs=1",
        f"--trainer.default_root_dir={Path.cwd()}",
    )
