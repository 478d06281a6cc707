"""``lit-collect collect``: what a policy does in an env, on disk, as rows or as a Minari data set."""

import argparse
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from tensordict import TensorDictBase
from torch.nn.parameter import is_lazy

from lit_collect.collector import Collector
from lit_collect.config import Exploration, RolloutConfig
from lit_collect.datamodule import CollectorDataModule
from lit_collect.envs.spaces import describe_space
from lit_collect.frames import count_frames, limit_frames
from lit_collect.learner import initialise_lazy
from lit_collect.offline.memory_maps import ABOUT, RowWriter
from lit_collect.offline.minari import MinariWriter, dataset_id, find_minari, is_minari_id
from lit_collect.offline.recording import EpisodeRecording, Recording, RowRecording
from lit_collect.tools.fitted import policy_in
from lit_collect.tools.interruption import Interruption
from lit_collect.tools.tables import table, whole

_DESCRIPTION = """\
Collect with the env and the policy of a config, and keep what was collected; nothing is trained. Takes the config and
overrides that `lit-collect fit` takes, and collects as they say, except that nothing is done at random at first.
"""
_EPILOG = """\
examples:
  lit-collect collect --config configs/ppo_cartpole.yaml --ckpt_path best.ckpt --out runs/cartpole-v0 --episodes 100
  lit-collect collect --config configs/ppo_cartpole.yaml --out runs/rows --frames 100000

A name with a version at its end, such as cartpole-v0, makes a Minari data set, another one a memory-mapped TensorDict.
lit_collect.OfflineDataModule trains from both. Of several env copies the shortest episodes end first: with --episodes,
take many times as many as there are copies, or give --data.num_envs=1.
"""
_PATIENCE = 100_000  # steps of each env copy without an end of an episode


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where what is collected goes.

    Example:
        >>> Target.of(parser().parse_args(["--out=runs/cartpole-v0"])).minari
        True
    """

    path: Path
    minari: bool
    """Whether to write a Minari data set, and not a memory-mapped TensorDict."""
    episodes: int | None
    """How many, if the number of frames does not decide."""

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Target":
        """What the options say.

        Args:
            given: of `parser`.

        Raises:
            ValueError: if there is something that must not be replaced, or the name does not do.
        """
        path = Path(given.out)
        chosen = given.format or ("minari" if is_minari_id(path.name) else "tensordict")
        target = cls(path=path, minari=chosen == "minari", episodes=given.episodes)
        if target.minari:
            dataset_id(path)
        with _to_be_written(path):
            if path.exists() and not path.is_dir():
                raise ValueError(f"--out must be a folder, got the file {path}")
            if target.is_taken and not given.overwrite:
                raise ValueError(f"{path} is not empty; give --overwrite to replace what is there, or another --out")
            if target.is_taken and find_minari(path.absolute()) is None and not (path / ABOUT).is_file():
                raise ValueError(f"{path} is not replaced : expected data of this command there, got other files")
        return target

    @property
    def is_taken(self) -> bool:
        """Whether there is something in the folder."""
        return self.path.is_dir() and any(self.path.iterdir())

    def begin(self, collector: Collector, rollout: RolloutConfig, *, env: str, spec: Any) -> Recording:
        """Begin to write; only now what was there is removed.

        Args:
            collector: whose frames are written.
            rollout: how they are collected.
            env: in plain text.
            spec: the env's own `EnvSpec`, if it has one.

        Raises:
            ValueError: if there can be no such folder.
        """
        with _to_be_written(self.path):
            if self.is_taken:
                shutil.rmtree(self.path)
            return self._recording(collector, rollout, env=env, spec=spec)

    def _recording(self, collector: Collector, rollout: RolloutConfig, *, env: str, spec: Any) -> Recording:
        if self.minari:
            writer = MinariWriter(
                self.path,
                collector.observation_space,
                action_space=collector.action_space,
                env_spec=spec,
                clip_actions=rollout.clip_actions,
                info_keys=rollout.info_keys,
                notes={"description": f"Collected from {env} by lit_collect."},
            )
            return EpisodeRecording(writer, self.episodes)
        about = {
            "env": env,
            "observation_spec": describe_space(collector.observation_space),
            "action_spec": describe_space(collector.action_space),
        }
        rows = RowWriter(self.path, about)
        return RowRecording(rows) if self.episodes is None else EpisodeRecording(rows, self.episodes)

    def how_to_read(self) -> str:
        """Code that opens the data."""
        plain = f"minari.MinariDataset('{self.path}/data')" if self.minari else f"TensorDict.load_memmap('{self.path}')"
        return f"lit_collect.OfflineDataModule('{self.path}'), or {plain}"


def collector_of(data: Any, model: Any, given: argparse.Namespace) -> tuple[Collector, RolloutConfig]:
    """What collects as the config says, with the policy of the checkpoint if there is one.

    Args:
        data: a `CollectorDataModule`.
        model: a LightningModule with a policy.
        given: of `parser`.

    Returns:
        The collector, to be shut down, and how it collects.

    Raises:
        TypeError: if the data module is of another kind, or there is no policy.
        ValueError: if the checkpoint does not fit.
    """
    policy = policy_in(data, model, command="collect")
    exploration = data._rollout.exploration if given.exploration is None else given.exploration
    rollout = replace(data._rollout, init_random_frames=0, compact_obs=False, exploration=exploration)
    place = data._place("train")
    initialise_lazy(policy, model, source=data._source, rollout=rollout, place=place)
    if given.ckpt_path is not None:
        load_weights(model, given.ckpt_path)
    in_process = data._backend.in_process
    collector = Collector(
        data._probe.handed_over() if in_process else data._source,
        policy,
        frames_per_batch=data.frames_per_batch,
        num_envs=data._num_envs,
        rollout=rollout,
        devices=data._devices,
        backend=data._backend,
        seed=place,
    )
    return collector, rollout


def load_weights(model: Any, path: str) -> None:
    """Give a module the weights of a checkpoint.

    Args:
        model: a LightningModule.
        path: of the checkpoint.

    Raises:
        ValueError: if it cannot be read, or its weights do not fit the module.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        weights = checkpoint["state_dict"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        (text, *_) = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"the checkpoint {path} cannot be read : expected one of a Trainer, got {text}") from error
    model.on_load_checkpoint(checkpoint)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        differences = _differences(model.state_dict(), weights) or str(error).splitlines()
        raise ValueError(
            f"the checkpoint {path} does not fit {type(model).__name__}: {differences[0]} (the first of "
            f"{len(differences)} differences) : expected one of the same model and settings; give the config it was "
            f"trained with"
        ) from error


def batches(collector: Collector, frames: int | None) -> Iterator[TensorDictBase]:
    """Batches of so many frames in all; rows that were stepped beyond them are masked.

    Args:
        collector: without a budget of its own.
        frames: None for no end.
    """
    left = frames
    while left is None or left:
        batch = collector.collect()
        if left is not None:
            count = count_frames(batch)
            if count > left:
                batch, count = limit_frames(batch, left), left
            left -= count
        yield batch


def record(stream: Iterator[TensorDictBase], recording: Recording, patience: int) -> None:
    """Write batches until they end, or there is enough of them.

    Args:
        stream: batches [N, T].
        recording: takes them.
        patience: frames without an end of an episode, after which a warning says so.
    """
    seen = 0
    for batch in stream:
        recording.add(batch)
        before, seen = seen, seen + batch.numel()
        if before < patience <= seen and "count_total" not in recording.episodes():
            warnings.warn(
                f"no episode has ended in {seen:,} frames; give --data.rollout.max_frames_per_traj a value if "
                f"episodes do not end by themselves",
                stacklevel=2,
            )
        if recording.full:
            return


def run(data: Any, model: Any, given: argparse.Namespace) -> int:
    """Collect, write, and say what was written.

    Args:
        data: a `CollectorDataModule`; closed afterwards.
        model: a LightningModule with a policy.
        given: of `parser`.

    Returns:
        The exit status: 0, or 130 if it was interrupted; then what was written is there.

    Raises:
        TypeError: if the data module is of another kind, or there is no policy.
        ValueError: if settings do not fit, or the target is not free.
        ModuleNotFoundError: if Minari is not installed.
        OSError: if the disk is full, or cannot be written to.
        LitCollectError: whatever goes wrong while frames are collected.
    """
    target, interrupted, cut_off = Target.of(given), False, 0
    with ExitStack() as closing:
        spec = None
        if isinstance(data, CollectorDataModule):
            closing.callback(data.close)
            spec = _spec_of(data)  # before the collector takes over the env that has it
        collector, rollout = collector_of(data, model, given)
        closing.callback(collector.shutdown)
        frames = given.frames
        if frames is None and given.episodes is None:
            frames = data.total_frames
            if frames == -1:
                raise ValueError("nobody says how much to collect : expected --frames, --episodes or data.total_frames")
        interruption = closing.enter_context(Interruption())
        recording = target.begin(collector, rollout, env=data._source.description, spec=spec)
        closing.callback(recording.close)
        try:
            stream = interruption.until_noted(batches(collector, frames))
            record(stream, recording, _PATIENCE * collector.num_envs)
            interrupted = interruption.noted
            cut_off = 0 if interrupted else recording.finish()
        except KeyboardInterrupt:
            interrupted = True
    print("\n".join(report(target, recording, cut_off)))  # noqa: T201  # the report
    if given.ckpt_path is None:
        print("note: without --ckpt_path the policy acts with the weights it begins with")  # noqa: T201
    if interrupted:
        print("interrupted: only what is named above was written")  # noqa: T201
    return 130 if interrupted else 0


def report(target: Target, recording: Recording, cut_off: int) -> list[str]:
    """What was written, as lines.

    Args:
        target: where it is.
        recording: what wrote it.
        cut_off: episodes that had not ended.
    """
    ended = recording.episodes()
    rows = [("frames", f"{recording.frames:,}"), ("episodes", f"{int(ended.get('count_total', 0)):,} ended")]
    if cut_off:
        rows.append(("", f"{cut_off:,} cut off (truncated)"))
    if "return_min" in ended:
        rows.append(
            ("episode return", f"{ended['return_mean']:.1f} ({ended['return_min']:.1f} to {ended['return_max']:.1f})")
        )
    rows += [("written to", str(target.path)), ("read by", target.how_to_read())]
    return table(rows, indent=0)


def parser() -> argparse.ArgumentParser:
    """The options of ``lit-collect collect``; all others are those of ``lit-collect fit``."""
    options = argparse.ArgumentParser(
        prog="lit-collect collect",
        usage="lit-collect collect --config CONFIG --out PATH [options] [--data.num_envs=... and whatever fit takes]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument("--out", required=True, metavar="PATH", help="the folder to write, empty or not there yet")
    much = options.add_mutually_exclusive_group()
    much.add_argument("--frames", type=whole(1), help="how many to write (default: the config's total_frames)")
    much.add_argument("--episodes", type=whole(1), help="how many to write, each whole, as they end")
    options.add_argument(
        "--format", choices=("minari", "tensordict"), help="of what is written (default: as the name says, see below)"
    )
    options.add_argument(
        "--ckpt_path", metavar="CKPT", help="a checkpoint of the config's model (default: weights as they begin)"
    )
    options.add_argument(
        "--exploration", choices=get_args(Exploration), help="how actions are taken (default: as the config says)"
    )
    options.add_argument("--overwrite", action="store_true", help="replace data that are there already")
    return options


@contextmanager
def _to_be_written(path: Path) -> Iterator[None]:
    """Say which folder it is that cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--out={path} cannot be written: {error.strerror or error} : expected a folder, or a place where one can "
            f"be made; give another --out"
        ) from error


def _differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """How the weights of a checkpoint differ from those of a model."""
    found = [f"{name} is missing" for name in expected if name not in got]
    found += [f"{name} is unknown" for name in got if name not in expected]
    for name in (name for name in expected if name in got and not is_lazy(expected[name])):
        shapes = [list(getattr(weights[name], "shape", ())) for weights in (got, expected)]
        if shapes[0] != shapes[1]:
            found.append(f"{name} has shape {shapes[0]} instead of {shapes[1]}")
    return found


def _spec_of(data: CollectorDataModule) -> Any:
    """The registered spec of the env that was made to read its spaces, None if it has none."""
    data.observation_spec  # noqa: B018  # makes one
    try:
        return getattr(data._probe._env, "spec", None)
    except (TypeError, ValueError):  # of a wrapper that Gymnasium cannot make again
        return None
