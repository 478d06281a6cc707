"""The command ``lit-collect``: LightningCLI with what collecting needs, and three commands besides."""

import argparse
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]  # its types are a package of their own
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lit_collect.callbacks import CollectionMonitor, FrameProgress, LearningCurve, WeightSync
from lit_collect.errors import LitCollectError
from lit_collect.offline.datamodule import OfflineDataModule

_DESCRIPTION = (
    "Train, evaluate and play with what lit_collect collects: Lightning's command line, and three commands of its own."
)
_EPILOG = (
    "Besides, 'lit-collect doctor --env ID' says what an env is, what is stored of it, how fast it is and what it does "
    "wrong, 'lit-collect tune --config CONFIG' measures which num_envs and backend make most frames per second, and "
    "'lit-collect collect --config CONFIG --out PATH' keeps what a policy does as data for offline training. "
    "Each has a --help of its own."
)
_USAGE = "lit-collect [-c CONFIG] {fit,validate,test,predict,doctor,tune,collect} ..."
_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_REFUSALS = (ValueError, TypeError, OSError, ModuleNotFoundError, LitCollectError)  # of a constructor
_TAKING = ("setup", "load_state_dict")  # where data modules check what could not be checked before
_ALWAYS_ON = {"weight_sync": WeightSync, "monitor": CollectionMonitor, "progress": FrameProgress}


class CollectorCLI(LightningCLI):
    """LightningCLI for any LightningModule and a `CollectorDataModule` (or another data module).

    `WeightSync`, `CollectionMonitor` and `FrameProgress` are on, each configurable under its own key
    (``--monitor.names=sb3``). A model that takes ``observation_spec`` or ``action_spec`` gets what the data module
    says of its env. ``--torch_threads=1`` is best for small networks on the CPU.

    Args:
        args: command line arguments, or a config; None takes those of the process.
        run: whether to run the subcommand at once.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "description": _DESCRIPTION,
                "epilog": _EPILOG,
                # A wrong option shows the usage, and what is wrong should not stand below sixty lines of it.
                **{
                    name: {"usage": f"lit-collect {name} --config CONFIG [--KEY.KEY=VALUE ...]"}
                    for name in _SUBCOMMANDS
                },
            },
            args=args,
            run=run,
        )

    @override
    def setup_parser(self, *args: Any) -> None:
        """Set up the parsers; the usage names the three commands besides the subcommands."""
        super().setup_parser(*args)
        self.parser.usage = _USAGE

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callbacks that are always on, and link the specs of the data to the model."""
        parser.add_argument(
            "--torch_threads",
            type=int | None,
            default=None,
            help="Threads within one operation of torch on the CPU; null leaves torch's own choice.",
        )
        for key, kind in _ALWAYS_ON.items():
            parser.add_lightning_class_args(kind, key)
        parser.link_arguments(
            "data", "model.init_args.observation_spec", compute_fn=_observation_spec, apply_on="instantiate"
        )
        parser.link_arguments("data", "model.init_args.action_spec", compute_fn=_action_spec, apply_on="instantiate")

    @override
    def before_instantiate_classes(self) -> None:
        """Set the number of threads before anything is computed."""
        threads = self._get(self.config, "torch_threads")
        if threads is not None:
            torch.set_num_threads(threads)

    @override
    def instantiate_classes(self) -> None:
        """Instantiate all classes; an error of a constructor is shown as it is, not as what a parser makes of it."""
        try:
            super().instantiate_classes()
        except _REFUSALS as error:
            raise _own_error(error) from None

    def after_fit(self) -> None:
        """Say where the results are, and what was reached."""
        lines = summary(self.trainer)  # on every rank: asking for the folder is a collective
        if self.trainer.is_global_zero:
            print("\n".join(lines))  # noqa: T201  # the last lines of the command are for people

    @override
    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> L.Trainer:
        """Leave out what the config turned off or brings itself; Lightning refuses two progress bars."""
        given = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        no_bar = config.get("enable_progress_bar") is False or any(isinstance(c, ProgressBar) for c in given)
        no_bar = no_bar or isinstance(self.datamodule, OfflineDataModule)  # no frames come; Lightning's own bar does
        replaced = [c for c in callbacks if any(isinstance(other, type(c)) for other in given)]
        kept = [c for c in callbacks if c not in replaced and not (no_bar and isinstance(c, ProgressBar))]
        return super()._instantiate_trainer(config, kept)


def summary(trainer: L.Trainer) -> list[str]:
    """What a run left, and what it reached, as lines for people.

    Args:
        trainer: after a fit.
    """
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    lines = ["", f"results in      {folder}"]
    lines += [f"config          {path}" for path in [folder / "config.yaml"] if path.is_file()]
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path:
            lines.append(f"checkpoint      {callback.best_model_path}")
        if isinstance(callback, LearningCurve) and callback.path is not None:
            lines.append(f"learning curve  {callback.path}")
    frames = getattr(trainer.datamodule, "frames_total", None)  # type: ignore[attr-defined]  # set by Lightning
    if frames is not None:
        lines.append(f"frames          {frames:,}")
    metrics = trainer.callback_metrics
    for name, key in (("training return", "episode/return_mean"), ("evaluation", "eval/return_mean")):
        if key in metrics:
            over = f" over {int(metrics['eval/episodes'])} episodes" if key.startswith("eval") else ""
            if key.startswith("episode") and "episode/count_total" not in metrics:
                over = " so far: no episode has ended"
            lines.append(f"{name:15} {float(metrics[key]):.1f}{over}")
    return lines


def main(args: ArgsType = None) -> int:
    """Entry point of ``lit-collect``.

    Args:
        args: command line arguments, or a config; None takes those of the process. Then the folder it is called in is
            a place to import from, as with ``python -m``.

    Returns:
        The exit status.

    Raises:
        SystemExit: with 2 after wrong usage, and after a setting that lit_collect refuses; with 143 after SIGTERM.
    """
    # Lightning 2.6 asks torch 2.13 a question in a deprecated way, at every start.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    if args is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    given = sys.argv[1:] if args is None else args
    if isinstance(given, Sequence) and given and given[0] in _COMMANDS:
        return _COMMANDS[given[0]](given[1:])
    try:
        CollectorCLI(args)
    except SIGTERMException as error:  # a SystemExit with status 0, as if the run had come to its end
        raise SystemExit(128 + signal.SIGTERM) from error
    except _REFUSALS as error:
        if not _is_refusal(error):
            raise
        print(f"lit-collect: error: {error}", file=sys.stderr)  # noqa: T201  # as a parser says it
        raise SystemExit(2) from error
    return 0


class _NotRun(CollectorCLI):
    """The command with everything instantiated, and its subcommand left alone."""

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        pass


def _doctor(args: Sequence[str]) -> int:
    from lit_collect.tools import doctor

    return doctor.main(args)


def _tune(args: Sequence[str]) -> int:
    from lit_collect.tools import tune

    return _with_fit(tune.parser(), tune.run, args)


def _collect(args: Sequence[str]) -> int:
    from lit_collect.tools import collect

    return _with_fit(collect.parser(), collect.run, args)


def _with_fit(
    parser: argparse.ArgumentParser, run: Callable[[Any, Any, argparse.Namespace], int], args: Sequence[str]
) -> int:
    """Run a command on data and model of a config of fit, whose arguments are those that the parser does not know."""
    given, rest = parser.parse_known_args(list(args))
    before, after = _by_shape(rest)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")  # these are those of the process
        try:
            cli = _NotRun([*before, "fit", *after])
            return run(cli.datamodule, cli.model, given)
        except (ValueError, TypeError, ModuleNotFoundError) as error:
            parser.error(str(error))
        except (LitCollectError, OSError) as error:  # the env cannot be made, even to ask it for its spaces
            print(f"{parser.prog}: {error}", file=sys.stderr)  # noqa: T201
            return 1


def _by_shape(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments before and after the subcommand: a config that has a section for it belongs before it."""
    before: list[str] = []
    after: list[str] = []
    rest = iter(args)
    for argument in rest:
        name, given, path = argument.partition("=")
        words = [argument]
        if name in ("--config", "-c"):
            words = words if given else [argument, *islice(rest, 1)]
            (before if _has_section(path or words[-1]) else after).extend(words)
        else:
            after += words
    return before, after


def _has_section(path: str) -> bool:
    """Whether a config is one of the whole command, with settings of fit in a section of that name."""
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError):  # the parser says what is wrong with it
        return False
    return isinstance(config, dict) and "fit" in config


_COMMANDS = {"doctor": _doctor, "tune": _tune, "collect": _collect}


def _own_error(error: BaseException) -> BaseException:
    """The exception that a constructor raised, within what jsonargparse wrapped around it."""
    waiting = deque([error])
    while waiting:
        inner = waiting.popleft()
        origin = _origin(inner)
        if origin and not origin.startswith("jsonargparse"):
            return inner
        waiting.extend(_within(inner))
    return error


def _within(error: BaseException) -> list[BaseException]:
    """What an exception came from; of several types that a value may be of, what each of them said of it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    # jsonargparse chains only what the first type said; the others are with whoever raised
    tried = frames[-1][0].f_locals.get("exceptions", ()) if frames else ()
    return [each for each in (*tried, error.__cause__ or error.__context__) if isinstance(each, BaseException)]


def _is_refusal(error: BaseException) -> bool:
    """Whether one of our classes refused a setting: then the message says it all.

    They do so while they are made, when a stage is set up, or as they go on from a checkpoint, and then nobody else's
    code may have been in between.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = list(takewhile(_is_ours, reversed(frames)))
    if ours and any(frame.f_code is CollectorCLI.instantiate_classes.__code__ for frame in frames):
        return True
    return isinstance(error, (ValueError, TypeError)) and any(frame.f_code.co_name in _TAKING for frame in ours)


def _is_ours(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] in ("lit_collect", "trainers")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _origin(error: BaseException) -> str:
    """The name of the module that raised an exception."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return _module(frames[-1][0]) if frames else ""


def _observation_spec(data: Any) -> dict[str, Any] | None:
    return getattr(data, "observation_spec", None)


def _action_spec(data: Any) -> dict[str, Any] | None:
    return getattr(data, "action_spec", None)
