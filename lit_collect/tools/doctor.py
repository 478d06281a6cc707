"""``lit-collect doctor``: what an env is, what is stored of it, how fast it is, and whether it keeps its word."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lit_collect.envs.factories import resolve_env
from lit_collect.tools.examination import DEFAULT_COPIES, Examination, Leaf, examine
from lit_collect.tools.tables import per_second, shape_text, table, whole

_DESCRIPTION = """\
Look at an environment: its spaces, how its episodes end, what a batch would hold, how fast it is alone and with a
small policy, and whether it keeps the contract that exact data need.
"""
_EPILOG = """\
examples:
  lit-collect doctor --env CartPole-v1
  lit-collect doctor --env my_package.envs.make_env --num_envs 4
  lit-collect doctor --env "my_package.envs:Maze-v0" --json > maze.json

exit status: 0 if nothing is broken, 1 if a guarantee is, 2 if it was called wrongly
"""


def main(args: Sequence[str]) -> int:
    """Run the command.

    Args:
        args: what follows ``lit-collect doctor``.

    Returns:
        The exit status: 0, or 1 if a guarantee is broken.

    Raises:
        SystemExit: with 2 after wrong usage, with 0 after ``--help``.
    """
    parser = _parser()
    given = parser.parse_args(list(args))
    try:
        found = examine(resolve_env(given.env), given.num_envs, steps=given.steps, seed=given.seed)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(as_data(found), indent=2) if given.json else "\n".join(as_text(found)))  # noqa: T201  # the report
    return int(bool(found.broken))


def as_data(found: Examination) -> dict[str, Any]:
    """The report as plain numbers, strings, lists and mappings."""
    findings = [{"level": finding.level, "text": finding.text} for finding in found.findings]
    return {**asdict(found), "findings": findings, "verdict": verdict(found), "broken": bool(found.broken)}


def as_text(found: Examination) -> list[str]:
    """The report as lines."""
    lines = table(
        [("env", found.env), ("source", found.source or "-"), ("autoreset", found.autoreset or "-")], indent=0
    )
    lines += _spaces(found)
    if found.stored:
        lines += ["", f"what a batch holds (N = {found.num_envs} env copies, T steps)"]
        lines += _leaf_table(found.stored, ["N", "T"])
        notes = [
            ("not stored", f"{key}: text (rollout.info_keys='{key}:str' stores its characters)")
            for key in found.dropped
        ]
        notes += [("cast", f"{key}: float64 -> float32 (rollout.keep_float64=true keeps it)") for key in found.cast]
        notes += [("action mask", "found in the info, and given to the policy" if found.action_mask else "none")]
        lines += ["", *table(notes, indent=0)]
    lines += _infos(found)
    if found.speed is not None:
        speed = found.speed
        rest = max(1.0 - speed.env_share - speed.policy_share, 0.0)
        shares = f"env {speed.env_share:.0%}, policy {speed.policy_share:.0%}, rest {rest:.0%} of the time"
        rows = [
            ("env alone", per_second(speed.env_fps), "random actions"),
            ("with a policy", per_second(speed.policy_fps), f"two layers of 64; {shares}"),
        ]
        lines += ["", "frames per second, in one process with one thread", *table(rows)]
    lines += ["", "findings"]
    lines += table([(finding.level, finding.text) for finding in found.findings] or [("none",)])
    lines += table([("note", note) for note in found.notes]) if found.notes else []
    return [*lines, "", f"verdict: {verdict(found)}"]


def verdict(found: Examination) -> str:
    """One sentence.

    Example:
        >>> verdict(Examination(env="CartPole-v1"))
        'ready to collect from'
    """
    broken, warned = len(found.broken), sum(finding.level == "warning" for finding in found.findings)
    if broken:
        return f"broken : {_count(broken, 'error')} to mend before anything is learned from this env"
    return f"usable, with {_count(warned, 'warning')}" if warned else "ready to collect from"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _spaces(found: Examination) -> list[str]:
    lines = []
    for name, leaves in (("observation space", found.observation), ("action space", found.action)):
        if leaves:
            rows = [(leaf.key, leaf.space, shape_text(leaf.shape), leaf.dtype) for leaf in leaves]
            lines += ["", name, *table(rows)]
    return lines


def _leaf_table(leaves: Sequence[Leaf], before: Sequence[str]) -> list[str]:
    rows = [("key", "shape", "dtype")]
    return table(rows + [(leaf.key, shape_text([*before, *leaf.shape]), leaf.dtype) for leaf in leaves])


def _infos(found: Examination) -> list[str]:
    if not found.infos:
        return []
    rows = [("name", "dtype", "reported with", "to have it stored, add to rollout.info_keys")]
    none = "(no array of one shape)"
    rows += [(info.name, info.dtype or "-", info.reported, info.info_key or none) for info in found.infos]
    return ["", "infos", *table(rows)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lit-collect doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--env", required=True, help="a Gymnasium id (also module:Name-v0), or the import path of what makes the env"
    )
    parser.add_argument(
        "--num_envs", type=whole(1), help=f"env copies (default: what the env says, else {DEFAULT_COPIES})"
    )
    parser.add_argument(
        "--steps", type=whole(1), default=4096, help="frames of one measurement at most (default: 4096)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of the episodes and the random actions (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser
