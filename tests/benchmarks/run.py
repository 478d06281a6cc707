"""Compare collecting and training with their peers on this machine: `python tests/benchmarks/run.py`.

All contestants run on one thread, in turns, so that whatever else the machine does meets them alike: collecting in one
process, training runs each in a process of its own, which has imported nothing of the others.
Only the ratios mean something, and each is the median over repetitions of a ratio taken within one repetition.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

NUM_ENVS = (1, 8, 32)
LEARN_FRAMES = 100_000
SECONDS = "seconds of training: "
MIN_SECONDS = 0.25  # of one measurement: short enough to interleave, long enough for the clock
PACKAGES = ("lit_collect", "torch", "tensordict", "gymnasium", "lightning", "torchrl", "stable-baselines3")

# What each row runs, as module:function. The first row of a table is what the others are compared with.
COLLECT = {
    "hand loop, module": "hand_loop:module_collector",
    "hand loop, fused": "hand_loop:fused_collector",
    "lit_collect, module": "ours:module_collector",
    "lit_collect, TensorDict actor": "ours:actor_collector",
    "TorchRL Collector": "torchrl_peer:collector",
    "SB3 collect_rollouts": "sb3_peer:collector",
}
PROCESSES = {
    "direct, N copies": "ours_processes:direct",
    "2 workers, N copies": "ours_processes:two_workers",
    "2 workers, N copies each": "ours_processes:two_workers_of_as_many",
    "TorchRL, 2 workers, N copies": "torchrl_peer:two_workers",
}
OVERLAP = {
    "direct, then learn": "ours_processes:learn_in_turn",
    "1 asynchronous worker": "ours_processes:learn_meanwhile",
}
LEARN = {
    "SB3 learn": "sb3_peer:learn",
    "lit_collect Trainer.fit": "ours:fit",
}

Samples = dict[str, list[float]]


def load(target: str) -> Callable | None:
    """The function behind `module:function`, or None where its package is not installed."""
    module, _, function = target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ImportError as error:
        print(f"left out {target}: {error}")
        return None


def frames_per_second(collect: Callable[[], int]) -> float:
    """Collect whole batches for at least `MIN_SECONDS`."""
    frames, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < MIN_SECONDS:
        frames += collect()
    return frames / elapsed


def measure_collect(targets: dict[str, str], num_envs: int, repetitions: int) -> Samples:
    """Frames per second of every contestant, by turns, after one batch of warm-up each."""
    makers = {name: load(target) for name, target in targets.items()}
    contestants = {name: make(num_envs) for name, make in makers.items() if make}
    for collect in contestants.values():
        collect()
    samples: Samples = {name: [] for name in contestants}
    for _ in range(repetitions):
        for name, collect in contestants.items():
            samples[name].append(frames_per_second(collect))
    return samples


def measure_learn(repetitions: int, folder: Path) -> Samples:
    """Frames per second of a whole training run, by turns."""
    contestants = {name: target for name, target in LEARN.items() if load(target)}
    samples: Samples = {name: [] for name in contestants}
    for repetition in range(repetitions):
        for name, target in contestants.items():
            own = folder / f"{name.replace(' ', '_')}_{repetition}"
            command = [sys.executable, __file__, "--train", target, "--folder", str(own)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            samples[name].append(LEARN_FRAMES / float(output.rsplit(SECONDS, 1)[1]))
    return samples


def train(target: str, folder: Path) -> None:
    """Train once in this process, and print the seconds that it took, without set-up."""
    learn = load(target)
    assert learn is not None
    run = learn(LEARN_FRAMES, folder)
    start = time.perf_counter()
    run()
    print(f"{SECONDS}{time.perf_counter() - start}")


def cells(samples: Samples) -> dict[str, str]:
    """Ratio to the first contestant and frames per second of each, as text."""
    reference = next(iter(samples.values()), [])
    return {
        name: f"{statistics.median(a / b for a, b in zip(own, reference, strict=True)):.3f} "
        f"({statistics.median(own):,.0f}/s)"
        for name, own in samples.items()
    }


def table(columns: dict[str, Samples]) -> str:
    """One Markdown table: a row per contestant, a column per setting."""
    texts = {title: cells(samples) for title, samples in columns.items()}
    names = list(dict.fromkeys(name for column in texts.values() for name in column))
    header = ["contestant", *texts]
    rows = [[name, *(column.get(name, "-") for column in texts.values())] for name in names]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def conditions() -> str:
    """CPU, load average and versions: what a figure is worth nothing without."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    versions = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    load_average = " ".join(f"{load:.2f}" for load in os.getloadavg())
    return f"{model}, {os.cpu_count()} CPUs, load average {load_average}\n{', '.join(versions)}"


def print_costs() -> None:
    """What hand-overs between processes cost the learner."""
    for name, microseconds, copy in importlib.import_module("ours_processes").costs():
        compared = f" ({microseconds / copy:.2f} times one copy of it)" if copy else ""
        print(f"{name}: {microseconds:.0f} us{compared}")


def main() -> None:
    """Measure what the command line asks for and print one table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("collect", "processes", "learn", "all"), default="all")
    parser.add_argument(
        "--repetitions", type=int, default=5, help="of each measurement, at least 5 for a figure to quote"
    )
    parser.add_argument("--train", help=argparse.SUPPRESS)  # what the runner calls itself with
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.train:
        train(options.train, options.folder)
        return
    print(conditions())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tables: list[dict[str, Samples]] = []
        chosen, repetitions = options.what, options.repetitions
        if chosen in ("collect", "all"):
            tables.append(
                {f"collect, {n} env{'s' * (n > 1)}": measure_collect(COLLECT, n, repetitions) for n in NUM_ENVS}
            )
        if chosen in ("processes", "all"):
            tables.append({f"workers, N = {n}": measure_collect(PROCESSES, n, repetitions) for n in NUM_ENVS[1:]})
            tables.append(
                {f"learning as long, {n} envs": measure_collect(OVERLAP, n, repetitions) for n in NUM_ENVS[1:]}
            )
            print_costs()
        if chosen in ("learn", "all"):
            tables.append({f"learn, {LEARN_FRAMES:,} frames": measure_learn(repetitions, Path(folder))})
        os.chdir("/")
    print(f"\nratio to the first row of the column (median frames per second), {repetitions} repetitions")
    for columns in tables:
        print(f"\n{table(columns)}")
    print(f"\nload average afterwards {' '.join(f'{load:.2f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
