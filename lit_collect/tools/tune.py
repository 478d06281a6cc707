"""``lit-collect tune``: how many env copies and worker processes make most frames per second, for a given config."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lit_collect.config import nearest_multiples
from lit_collect.datamodule import CollectorDataModule
from lit_collect.tools.fitted import policy_in
from lit_collect.tools.tables import per_second, table, whole
from lit_collect.tools.trials import GOOD_ENOUGH, Candidate, Setup, Trial, Tuner, choose

_DESCRIPTION = """\
Measure how many frames per second are collected with different numbers of env copies and worker processes, with the
env and the policy of a config; nothing is trained. Takes the config and overrides that `lit-collect fit` takes.
"""
_EPILOG = """\
examples:
  lit-collect tune --config configs/ppo_cartpole.yaml
  lit-collect tune --config configs/ppo_cartpole.yaml --seconds 60 --data.env=Acrobot-v1
"""


def report(setup: Setup, now: Candidate, trials: Sequence[Trial]) -> list[str]:
    """What was measured and what to write into the config, as lines."""
    rows: list[Sequence[str]] = [("backend", "num_collectors", "num_envs", "T", "frames/s", "")]
    chosen = choose(trials, sync=setup.backend.sync)
    for trial in trials:
        one = trial.candidate
        remarks = ["the config's" if one == now else "", "chosen" if trial is chosen else "", trial.failure]
        numbers = [str(one.num_collectors or "-"), str(one.num_envs), str(trial.steps)]
        rate = per_second(trial.rate) if trial.rates else "-"
        rows.append((one.backend, *numbers, rate, ", ".join(filter(None, remarks))))
    lines = [f"env {setup.source.description}, batches of {setup.frames_per_batch} frames", "", *table(rows), ""]
    if chosen is None:
        return [*lines, "nothing could be measured : see the reasons above"]
    lines += [
        "to use what was chosen, write into the config:",
        *as_yaml(chosen),
        *_warnings(setup, now, trials, chosen),
    ]
    return lines


def as_yaml(trial: Trial) -> list[str]:
    """The settings as lines of a config.

    Example:
        >>> as_yaml(Trial(candidate=Candidate(num_envs=16), steps=128))[2:]
        ['    num_envs: 16', '    frames_per_batch: 2048', '    backend: direct']
    """
    one = trial.candidate
    lines = [
        "data:",
        "  init_args:",
        f"    num_envs: {one.num_envs}",
        f"    frames_per_batch: {trial.frames_per_batch}",
    ]
    if not one.num_collectors:
        return [*lines, "    backend: direct"]
    return [
        *lines,
        "    backend:",
        "      class_path: lit_collect.ProcessBackend",
        "      init_args:",
        f"        num_collectors: {one.num_collectors}",
        f"        sync: {str(one.sync).lower()}",
    ]


def _warnings(setup: Setup, now: Candidate, trials: Sequence[Trial], chosen: Trial) -> list[str]:
    """What changes besides the speed."""
    lines = []
    steps = max(setup.frames_per_batch // now.num_envs, 1)
    if chosen.steps != steps:
        than = "shorter" if chosen.steps < steps else "longer"
        lines.append(
            f"each copy then makes {chosen.steps} steps a batch instead of {steps}: {than} rollouts may learn otherwise"
        )
    if setup.total_frames != -1 and setup.total_frames % chosen.candidate.num_envs:
        near = nearest_multiples(setup.total_frames, chosen.candidate.num_envs)
        lines.append(f"total_frames={setup.total_frames} is no multiple of {chosen.candidate.num_envs}: use {near}")
    fastest = max(trials, key=lambda trial: trial.rate)
    if fastest.rate * GOOD_ENOUGH > chosen.rate:
        lines.append(
            f"asynchronous workers made {per_second(fastest.rate)} frames/s, but of older weights: only for an "
            f"algorithm that bears them, such as IMPALA"
        )
    return ["", *(f"note: {line}" for line in lines)] if lines else []


def setup_of(data: Any, model: Any) -> Setup:
    """What a data module would collect with for a model.

    Args:
        data: a `CollectorDataModule`.
        model: a LightningModule with a policy.

    Raises:
        TypeError: if the data module is of another kind, or there is no policy.
    """
    policy = policy_in(data, model, command="tune")
    return Setup(
        source=data._source,
        policy=policy,
        frames_per_batch=data.frames_per_batch,
        total_frames=data.total_frames,
        num_envs=data._num_envs,
        rollout=replace(data._rollout, init_random_frames=0),
        devices=data._devices,
        backend=data._backend,
    )


def run(data: Any, model: Any, given: argparse.Namespace) -> int:
    """Measure, and print the report.

    Args:
        data: a `CollectorDataModule`; closed afterwards.
        model: a LightningModule with a policy.
        given: of `parser`.

    Returns:
        The exit status: 0, or 1 if nothing could be measured.

    Raises:
        TypeError: if the data module is of another kind, or there is no policy.
    """
    try:
        setup = setup_of(data, model)
    finally:
        if isinstance(data, CollectorDataModule):
            data.close()
    tuner = Tuner(setup, given.seconds)
    trials = tuner.run(given.max_envs, given.max_collectors)
    print("\n".join(report(tuner.setup, tuner.now, trials)))  # noqa: T201  # the report
    return int(choose(trials, sync=setup.backend.sync) is None)


def parser() -> argparse.ArgumentParser:
    """The options of ``lit-collect tune``; all others are those of ``lit-collect fit``."""
    options = argparse.ArgumentParser(
        prog="lit-collect tune",
        usage="lit-collect tune --config CONFIG [options] [--data.num_envs=... and whatever else fit takes]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument("--seconds", type=_positive, default=30.0, help="for all measurements together (default: 30)")
    options.add_argument(
        "--max_envs", type=whole(1), help="env copies to try at most (default: 64, or 8 times the config's)"
    )
    options.add_argument(
        "--max_collectors", type=whole(0), help="processes to try at most, 0 for none (default: one for each CPU)"
    )
    return options


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value
