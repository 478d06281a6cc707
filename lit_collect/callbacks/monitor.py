"""`CollectionMonitor`: logs frames, episodes, times and evaluations of the collection."""

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from tensordict import TensorDictBase
from typing_extensions import override

from lit_collect.callbacks._hints import Hints
from lit_collect.callbacks._names import NAMES
from lit_collect.callbacks._reports import COUNTS, SECONDS, Report, joined
from lit_collect.callbacks._source import Collection, find_collection, gather_numbers
from lit_collect.episodes import EpisodeTotals, Finished, InfoTotals, episode_returns, info_means
from lit_collect.episodes import summarise as summarise_episodes
from lit_collect.metrics import EpisodeStatistics, ReplayUse, Staleness, Throughput, staleness

_SAVE_EVERY_S = 1.0  # loggers that keep rows in memory write them that often


class CollectionMonitor(Callback):
    """Logs the collection once per collected batch, and each evaluation, straight to the trainer's loggers.

    The values also go to ``trainer.callback_metrics``, from the first batch on, so that ``ModelCheckpoint`` and
    ``EarlyStopping`` can watch them: until the first episode has ended, ``episode/return_mean`` is the mean return so
    far of the running ones. Frames count steps of env copies, over all ranks and without action repeat; returns are
    undiscounted sums of stored rewards. ``time/fps`` includes training and evaluation, ``collect/fps`` does not.
    Numbers of the env's info that ``RolloutConfig(info_keys=...)`` names are logged as ``episode/<name>``: the mean of
    what the env reported at the ends of the same last episodes, from the first report on; ``success`` and
    ``is_success`` as ``episode/success_rate``. One of our own names wins over an equal one of the env.
    Seconds are of the interval since the last log, the largest of all ranks; ``time/collector_idle`` is the part of it
    that workers did not spend in rollouts, the mean of all workers. Evaluations are logged by the module
    (``eval/...``), for validation and test alike. Where the trainer or the collectors stay idle, or no episode ends, it
    says once what to change.

    Without a `CollectorDataModule` the callback does nothing.

    Args:
        names: whose names the loggers are given: ``"lit"``, or those of Stable-Baselines3 or CleanRL where these have
            one for the same value; the others keep theirs. ``callback_metrics`` has the names of ``"lit"``, too, so
            that what watches them goes on working.
        window: number of last finished episodes that ``episode/...`` is about, at least 1.
        prog_bar: also show the mean return in Lightning's own progress bars.

    Raises:
        ValueError: if there are no such names, or `window` is below 1.

    Example:
        >>> CollectionMonitor(window=10).latest
        {}
    """

    def __init__(
        self, names: Literal["lit", "sb3", "cleanrl"] = "lit", *, window: int = 100, prog_bar: bool = True
    ) -> None:
        if names not in NAMES:
            raise ValueError(f"monitor.names must be one of {tuple(NAMES)}, got {names!r}")
        if window < 1:
            raise ValueError(f"monitor.window must be at least 1, got {window}")
        self.latest: dict[str, float] = {}
        """The last values under the names of ``"lit"``, whatever `names` is; a new dict with every log."""
        self.evaluations = 0
        """Evaluations that were logged."""
        self.episode_listeners: list[Callable[[TensorDictBase, Finished], None]] = []
        """Called with each collected batch and the episodes that ended in it."""
        self._names = NAMES[names]
        self._prog_bar = prog_bar
        self._episodes = EpisodeStatistics(window)
        self._hints = Hints()
        self._count_total = 0  # episodes of all ranks
        self._is_first = True  # of all ranks
        self._source: Collection | None = None
        self._staleness = Staleness()
        self._pending = False
        self._forget_rounds()
        self._begin_interval()

    # --- Lightning's hooks --------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen to the data module; may be called again."""
        self._detach()
        self._is_first = trainer.is_global_zero
        self._source = find_collection(trainer)
        self._hints = Hints()
        if self._source is not None:
            self._source.rollout_listeners.append(self._see_batch)
            self._source.round_listeners.append(self._see_round)
        self._begin_interval()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure time from here on, without sanity check and set-up."""
        if not self._pending:
            self._begin_interval()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was collected since the last call, if anything was."""
        if self._pending:
            self._log(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log a last batch that was not trained on."""
        if self._pending:
            self._log(trainer)

    @override
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the evaluation, unless it is the sanity check."""
        self._log_evaluation(trainer, pl_module)

    @override
    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the evaluation."""
        self._log_evaluation(trainer, pl_module)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop listening."""
        self._detach()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop listening: Lightning calls no teardown after an exception."""
        self._detach()

    @override
    def state_dict(self) -> dict[str, Any]:
        """The window of episodes and their number, as plain data."""
        return {
            "returns": self._episodes.episodes[0].tolist(),
            "lengths": self._episodes.episodes[1].tolist(),
            "info": dict(zip(self._episodes.info_names, self._episodes.info.tolist(), strict=True)),
            "count_total": self._count_total,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting; episodes that were running begin anew."""
        self._count_total = state_dict["count_total"]
        if self._is_first:  # every rank is given the state of the first one, which counts for all
            info = state_dict.get("info", {})  # states of older versions have none
            self._episodes.restore(state_dict["returns"], state_dict["lengths"], self._count_total, info)

    # --- listening ----------------------------------------------------------------------------------------------

    def _see_batch(self, batch: TensorDictBase) -> None:
        assert self._source is not None
        self._episodes.update(batch, self._source.copies_total)
        self._staleness = self._staleness.joined(staleness(batch, self._source.policy_version))
        self._pending = True
        for listener in self.episode_listeners:
            listener(batch, self._episodes.finished)

    def _see_round(self, batch: TensorDictBase) -> None:
        self._rounds.append(torch.stack(episode_returns(batch)).cpu())  # frames are exact in float64, too

    def _detach(self) -> None:
        if self._source is not None:
            _discard(self._source.rollout_listeners, self._see_batch)
            _discard(self._source.round_listeners, self._see_round)
        self._source = None
        self._pending = False
        self._forget_rounds()

    def _forget_rounds(self) -> None:
        self._rounds = [torch.zeros(2, 0, dtype=torch.float64)]  # of each round the returns and the lengths

    def _begin_interval(self) -> None:
        self._throughput = Throughput()
        self._staleness = Staleness()
        self._seconds: dict[str, float] = {}
        self._frames = 0
        self._saved_at = monotonic()
        if self._source is not None:
            self._seconds = dict(self._source.seconds)
            self._frames = self._source.frames_total
            self._throughput.look(self._frames)

    # --- logging ------------------------------------------------------------------------------------------------

    def _log(self, trainer: L.Trainer) -> None:
        assert self._source is not None
        self._pending = False
        counts = self._source.statistics()
        spent, ages = self._spent(self._source.seconds), self._staleness
        info = self._episodes.info_totals()  # the same names on every rank
        replay = self._source.take_replay_use()
        mine = [*self._episodes.totals(), *spent, *ages, *[counts[name] for name in COUNTS], *(replay or ReplayUse())]
        split, end = len(EpisodeTotals._fields), len(mine)
        ranks = gather_numbers(trainer, [*mine, *[number for totals in info.values() for number in totals]])
        report = joined([Report(*rank[split:end]) for rank in ranks])
        fresh = self._source.frames_total - self._frames
        values = self._collected(self._source, report)
        if replay is not None:
            values.update({f"replay/{name}": value for name, value in report.replay.values(fresh).items()})
        means = info_means(
            [dict(zip(info, map(InfoTotals, rank[end::2], rank[end + 1 :: 2]), strict=True)) for rank in ranks]
        )
        episodes = {**means, **summarise_episodes([EpisodeTotals(*rank[:split]) for rank in ranks])}
        values.update({f"episode/{name}": value for name, value in episodes.items()})
        self._count_total = int(episodes.get("count_total", self._count_total))
        self._episodes.begin_interval()
        self._staleness = Staleness()
        self._publish(trainer, values)
        self._hints.see(values, ahead=getattr(self._source, "collects_ahead", False))

    def _spent(self, seconds: Mapping[str, float]) -> list[float]:
        """Seconds since the last log, of each kind."""
        before, self._seconds = self._seconds, dict(seconds)
        # A counter that is lower than it was has begun anew, with a new collector.
        return [now - before[name] if (now := seconds[name]) >= before[name] else now for name in SECONDS]

    def _collected(self, source: Collection, spent: Report) -> dict[str, float]:
        """The values that are not about episodes."""
        frames, version = source.frames_total, source.policy_version
        fresh, self._frames = frames - self._frames, frames
        fps = self._throughput.look(frames)
        wall_s = self._throughput.interval_s
        values: dict[str, float] = {
            "collect/frames_total": frames,
            "time/env_s": spent.env_s,
            "time/policy_s": spent.policy_s,
            "time/transfer_s": spent.transfer_s,
            "time/wait_data_s": spent.collect_s,
            "time/weight_sync_s": spent.weight_sync_s,
            "policy/version": version,
            "policy/syncs_total": version,
            "policy/stale_dropped_total": spent.stale_dropped,
            "workers/alive": spent.workers_alive,
            "workers/restarts_total": spent.restarts,
            "workers/queue_fill": spent.queue_fill,
        }
        collecting_s = max(spent.collect_s, spent.busy_s)  # workers that go on by themselves are hardly waited for
        if collecting_s > 0:
            values["collect/fps"] = fresh / collecting_s
        if fps is not None:
            values["time/fps"] = fps
            values["time/trainer_idle"] = min(spent.collect_s / wall_s, 1.0)
            values["time/collector_idle"] = 1.0 - min(spent.busy_s / wall_s, 1.0)
        if spent.stale_rows:
            values["policy/staleness_mean"] = spent.stale_total / spent.stale_rows
            values["policy/staleness_max"] = spent.stale_highest
        return values

    def _publish(self, trainer: L.Trainer, values: dict[str, float]) -> None:
        self.latest = {**self.latest, **values}
        named = {self._names.get(key, key): value for key, value in values.items()}
        watched = {**values, **named}
        # One tensor for all: a tensor for each value would cost more than the rest of this callback.
        tensors = torch.tensor(list(watched.values()), dtype=torch.float64).unbind()
        trainer.callback_metrics.update(zip(watched, tensors, strict=True))
        if self._prog_bar and "episode/return_mean" in values:
            key = self._names.get("episode/return_mean", "episode/return_mean")
            trainer.progress_bar_metrics[key] = values["episode/return_mean"]
        if not trainer.is_global_zero:
            return
        now = monotonic()
        due = now - self._saved_at >= _SAVE_EVERY_S
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)
            if due:
                logger.save()
        if due:
            self._saved_at = now

    def _log_evaluation(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        returns, lengths = torch.cat(self._rounds, 1)
        self._forget_rounds()
        if trainer.sanity_checking or self._source is None:
            return
        ranks = gather_numbers(trainer, EpisodeTotals.of(returns.tolist(), lengths.tolist()))
        summary = summarise_episodes([EpisodeTotals(*rank) for rank in ranks])
        if not summary:
            return
        values = {
            "eval/return_mean": summary["return_mean"],
            "eval/return_std": summary["return_std"],
            "eval/length_mean": summary["length_mean"],
            "eval/episodes": float(summary["count"]),
        }
        self.latest = {**self.latest, **values}
        self.evaluations += 1
        named = {self._names.get(key, key): value for key, value in values.items()}
        # All ranks have the same values by now; saying that they are synchronised keeps Lightning from a warning.
        pl_module.log_dict(named, batch_size=1, sync_dist=trainer.world_size > 1)
        watched = {key: value for key, value in values.items() if key not in named}
        pl_module.log_dict(watched, logger=False, batch_size=1, sync_dist=trainer.world_size > 1)


def _discard(listeners: list[Any], listener: Any) -> None:
    if listener in listeners:
        listeners.remove(listener)
