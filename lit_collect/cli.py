"""The command ``lit-collect fit|validate|test|predict``: LightningCLI with what collecting needs."""

import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from typing_extensions import override

from lit_collect.callbacks import CollectionMonitor, FrameProgress, LearningCurve, WeightSync

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
            args=args,
            run=run,
        )

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
        except (ValueError, TypeError) as error:
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
            lines.append(f"{name:15} {float(metrics[key]):.1f}{over}")
    return lines


def main(args: ArgsType = None) -> None:
    """Entry point of ``lit-collect``."""
    # Lightning 2.6 asks torch 2.13 a question in a deprecated way, at every start.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    CollectorCLI(args)


def _own_error(error: BaseException) -> BaseException:
    """The exception that a constructor raised, within what jsonargparse wrapped around it."""
    inner: BaseException | None = error
    while inner is not None:
        frames = list(traceback.walk_tb(inner.__traceback__))
        if frames and not frames[-1][0].f_globals.get("__name__", "").startswith("jsonargparse"):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


def _observation_spec(data: Any) -> dict[str, Any] | None:
    return getattr(data, "observation_spec", None)


def _action_spec(data: Any) -> dict[str, Any] | None:
    return getattr(data, "action_spec", None)
