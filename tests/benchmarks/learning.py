"""Train a config under several seeds: `python tests/benchmarks/learning.py configs/a2c_cartpole.yaml --goal 475`.

Every seed runs in a process of its own, one after the other, as the command line would run it, and leaves the points of
its curve (kind, frames, return) as a CSV file. The table says when the mean of one evaluation first reached the goal.
With `--figure` the curves of all seeds are drawn into one small picture.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

Points = list[tuple[float, float]]
SECONDS = "seconds of training: "


def train(config: Path, seed: int, file: Path, goal: float | None, options: list[str]) -> None:
    """Run the config in this process until an evaluation reaches the goal, if there is one, and write its curve."""
    from lightning.pytorch.callbacks import EarlyStopping

    from lit_collect import CollectorCLI, LearningCurve

    file = file.resolve()
    folder = file.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [f"--config={config.resolve()}", f"--seed_everything={seed}", "--progress.style=plain", *options]
    os.chdir(folder)
    cli = CollectorCLI(arguments, run=False)
    if goal is not None:
        stop = EarlyStopping("eval/return_mean", mode="max", stopping_threshold=goal, patience=1_000_000)
        cli.trainer.callbacks.append(stop)
    began = time.perf_counter()
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    seconds = time.perf_counter() - began
    (curve,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, LearningCurve)]
    points = curve.state_dict()
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["kind", "frames", "return"])
        writer.writerows(["training", int(frames), mean] for frames, mean, *_ in points["training"])
        writer.writerows(["evaluation", int(frames), mean] for frames, mean in points["evaluated"])
    print(f"{SECONDS}{seconds}")


def read(file: Path, kind: str) -> Points:
    """The points of one kind."""
    with file.open(newline="") as opened:
        return [(float(row["frames"]), float(row["return"])) for row in csv.DictReader(opened) if row["kind"] == kind]


def row(seed: int, file: Path, goal: float, seconds: float) -> list[str]:
    """What one run reached, as text."""
    evaluated = read(file, "evaluation")
    first = next((frames for frames, mean in evaluated if mean >= goal), None)
    reached = "-" if first is None else f"{first:,.0f}"
    best, last = max(mean for _, mean in evaluated), evaluated[-1][1]
    return [
        str(seed),
        reached,
        f"{best:,.1f}",
        f"{last:,.1f}",
        f"{read(file, 'training')[-1][1]:,.1f}",
        f"{seconds:.0f}",
    ]


def draw(files: list[Path], title: str, goal: float, picture: Path) -> None:
    """All runs in one picture: training thin, evaluations with dots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, file in enumerate(files):
        color = f"C{number}"
        axes.plot(*zip(*read(file, "training"), strict=True), color=color, alpha=0.4, linewidth=1)
        axes.plot(
            *zip(*read(file, "evaluation"), strict=True),
            color=color,
            marker="o",
            markersize=3,
            label=file.stem.replace("seed", "seed "),
        )
    axes.axhline(goal, color="0.5", linestyle=":", linewidth=1)
    axes.set(xlabel="frames", ylabel="return")
    axes.set_title(f"{title}: last 100 episodes (thin), evaluations (dots)", fontsize="medium")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)


def main() -> None:
    """Run all seeds, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--goal", type=float, required=True, help="return that an evaluation has to reach")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--figure", type=Path, help="where to draw the curves")
    parser.add_argument("--stop", action="store_true", help="end each run where it reached the goal")
    parser.add_argument("--title", default="")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # what it calls itself with
    options, others = parser.parse_known_args()  # what is not known goes to the command line: --data.total_frames=...
    files = {seed: options.folder / options.config.stem / f"seed{seed}.csv" for seed in options.seeds}
    if options.only is not None:
        goal = options.goal if options.stop else None
        train(options.config, options.only, files[options.only], goal, others)
        return
    rows = [["seed", "reached at", "best evaluation", "last evaluation", "last training", "seconds"]]
    for seed, file in files.items():
        command = [sys.executable, __file__, *sys.argv[1:], f"--only={seed}"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(row(seed, file, options.goal, float(output.rsplit(SECONDS, 1)[1])))
        print("  ".join(f"{name} {value}" for name, value in zip(rows[0], rows[-1], strict=True)), flush=True)
    widths = [max(len(line[i]) for line in rows) for i in range(len(rows[0]))]
    for line in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        print("| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |")
    if options.figure is not None:
        draw(list(files.values()), options.title or options.config.stem, options.goal, options.figure)


if __name__ == "__main__":
    main()
