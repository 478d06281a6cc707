"""`Supply`: the training batches of a data module, from one fit to the next."""

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from tensordict import TensorDictBase

from lit_collect.ahead import Ahead
from lit_collect.backends import DirectBackend
from lit_collect.collector import Collector
from lit_collect.config import check_frames
from lit_collect.envs.probe import SpaceProbe
from lit_collect.errors import BudgetSpentError
from lit_collect.learner import Seat, prepared
from lit_collect.plan import Plan
from lit_collect.ranks import SharedBudget
from lit_collect.replaying import Replaying
from lit_collect.seeding import Placement

Listener = Callable[[TensorDictBase], None]
_SECONDS = ("env_s", "policy_s", "transfer_s", "busy_s", "collect_s", "weight_sync_s")
_OF_COLLECTOR = _SECONDS[:4]


class Supply:
    """Builds a collector when a batch is first asked for, and counts with the other ranks.

    Args:
        plan: what is collected.
        seat: who learns from it.
        place: whose random numbers are drawn.
        probe: knows the spaces, and may have an env already.
        replaying: the replay buffer that batches are written to, if there is one.
        listeners: called with each whole batch [N, T] before it is trained on.
    """

    def __init__(
        self,
        plan: Plan,
        seat: Seat,
        *,
        place: Callable[[], Placement],
        probe: SpaceProbe,
        replaying: Replaying | None,
        listeners: list[Listener],
    ) -> None:
        self.seconds = dict.fromkeys(_SECONDS, 0.0)
        """See `CollectorDataModule.seconds`."""
        self.budget = SharedBudget(total=plan.total_frames)
        """Counts the frames of all ranks."""
        self.collector: Collector | None = None
        """While a fit lasts, from the first batch on."""
        self.plan, self._seat, self._place = plan, seat, place
        self._probe, self._replaying, self._listeners = probe, replaying, listeners
        self._ahead: Ahead | None = None  # if it collects in the background
        self._state: dict[str, Any] | None = None  # of the collector that was or is to come
        self._statistics: dict[str, Any] = {}  # of the last batch
        self._beginning: dict[str, Any] = {}  # the state of a collector that has done nothing yet

    @property
    def frames_budget(self) -> int:
        """Frames of this rank in all, -1 without a limit."""
        return -1 if self.plan.total_frames == -1 else self.plan.total_frames // self._seat.world_size

    @property
    def frames_left(self) -> int | None:
        """Frames until the budget is spent, as many as any rank has left; None without one."""
        counts_ahead = self._ahead is not None  # the collector's counts are ahead of what was handed out
        if self.trajs_per_batch is not None and self.collector is not None and not (self.budget.spent or counts_ahead):
            return self.collector.frames_left
        return self.budget.share(0, self._seat.world_size)

    @property
    def trajs_per_batch(self) -> int | None:
        """Whole trajectories in one batch, None if batches have a fixed number of frames."""
        return None if self.plan.trajectories is None else self.plan.trajectories.trajs_per_batch

    @property
    def batches_vary(self) -> bool:
        """Whether batches have any number of rows."""
        return self.plan.trajectories is not None and self.plan.trajectories.batches_vary

    @property
    def collects_ahead(self) -> bool:
        """Whether somebody collects while the learner learns."""
        return not self.plan.backend.sync or self._ahead is not None

    @property
    def policy_version(self) -> int:
        """Version of the weights that act."""
        if self.collector is not None:
            return self.collector.policy_version
        return 0 if self._state is None else int(self._state["policy_version"])

    def statistics(self) -> dict[str, Any]:
        """The collector's counters, also after a fit; empty before the first batch."""
        told = self._statistics
        if self.collector is not None and self._ahead is None:  # which would wait for the batch that is being made
            told = self.collector.statistics()
        return {**told, **({} if self._replaying is None else self._replaying.statistics())}

    def collect(self) -> TensorDictBase:
        """The next whole batch: publish changed weights, collect, prepare, write to the replay buffer.

        Raises:
            BudgetSpentError: if no frames are left, or they made no whole trajectory.
        """
        if self.frames_left == 0:
            raise BudgetSpentError(f"all {self.plan.total_frames} frames of total_frames have been collected")
        began = perf_counter()
        collector = self._started()
        self._publish(collector)
        batch = self._next(collector)
        self.seconds.update({name: self._statistics[name] for name in _OF_COLLECTOR})
        self.seconds["collect_s"] += perf_counter() - began
        for listener in self._listeners:
            listener(batch)
        if self._replaying is None:
            return prepared(batch, self._seat.trainer)
        if self._seat.prepares:
            batch = prepared(batch, self._seat.trainer)
        self._replaying.write(batch, self._place(), collector.num_envs * self._seat.world_size)
        if self.frames_left == 0:
            self._replaying.budget_spent()
        if self._seat.world_size > 1:
            self._replaying.count(self._seat.gather)
        self._replaying.see_version(collector.policy_version)
        return batch

    def publish_in_between(self) -> None:
        """Publish changed weights now if somebody collects while the learner learns."""
        if self.collector is not None and self.collects_ahead:
            self._publish(self.collector)
            if self._replaying is not None:
                self._replaying.see_version(self.collector.policy_version)

    def state_dict(self) -> dict[str, Any]:
        """Counters, ids, versions and seeds as plain data; talks to no worker and no other rank."""
        # Not empty even before the first batch: Lightning hands back only what is there, also to the runs of a tuner.
        state = self._state if self.collector is None else self.collector.state_dict()
        if self._ahead is not None and state is not None:
            state = self._ahead.counted_out(state)
        return {"collector": state, "budget": self.budget.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run was left (see `Collector.load_state_dict`)."""
        if self._ahead is not None:  # what is being collected belongs to the run that is left
            self.close()
        self._state = state["collector"]
        self.budget.load_state_dict(state["budget"])
        if self.collector is not None:
            self._go_on_from(self.collector, self._beginning if self._state is None else self._state)

    def close(self) -> None:
        """Close the envs; may be called again. A later batch comes from new ones, and is counted on."""
        collector, self.collector = self.collector, None
        ahead, self._ahead = self._ahead, None
        with ExitStack() as closing:  # whatever one of them raises, all are closed
            closing.callback(self._probe.close)
            if self._replaying is not None:
                closing.callback(self._replaying.park)
            if collector is not None:
                closing.callback(collector.shutdown)
                state = collector.state_dict()
                self._state = state if ahead is None else ahead.counted_out(state)
                statistics = collector.statistics()
                self._statistics = statistics if ahead is None else ahead.dropped_out(statistics)

    def _next(self, collector: Collector) -> TensorDictBase:
        """One batch of this rank, counted over all."""
        if self._ahead is not None:
            try:
                batch, self._statistics = self._ahead.take(self._seat.check_signals)
            except BudgetSpentError:  # what was left made no whole trajectory
                self._statistics = collector.statistics()
                self.budget.lost, self.budget.spent = collector.budget.lost, True
                raise
            self.budget.count(collector, batch)
            return batch
        ranks, gather = self._seat.world_size, self._seat.gather
        if self.trajs_per_batch is not None:
            batch = self.budget.collect_whole(collector, ranks=ranks, gather=gather)
        else:
            batch = self.budget.collect(collector, rank=self._seat.rank, ranks=ranks, gather=gather)
        self._statistics = collector.statistics()
        return batch

    def _started(self) -> Collector:
        if self.collector is None:
            self.collector = self._built()
            self._set_bounds(self.collector)
            copies = self.collector.num_envs
            check_frames(self.plan.frames_per_batch, self.plan.total_frames, copies, copies * self._seat.world_size)
            self._beginning = self.collector.state_dict()
            if self._state is not None:
                self._go_on_from(self.collector, self._state)
            if self._ahead is not None:
                self._ahead.start(self.collector)
        return self.collector

    def _built(self) -> Collector:
        plan, backend = self.plan, self.plan.backend
        if not backend.in_process:
            self._probe.close()  # its env cannot travel to a worker
        if self._replaying is not None:
            self._replaying.restart()
        if self._replaying is not None and self._replaying.background:
            self._check_alone()
            self._ahead = Ahead()
            if backend.in_process:  # whoever learns meanwhile changes the policy itself
                backend = DirectBackend(copy_policy=True)
        return Collector(
            self._probe.handed_over(),
            self._seat.policy(plan.policy),
            frames_per_batch=plan.frames_per_batch,
            total_frames=self.frames_budget,
            num_envs=plan.num_envs,
            rollout=plan.rollout,
            trajectories=plan.trajectories,
            replay_buffer=self._ahead,
            devices=plan.devices,
            backend=backend,
            seed=self._place(),
        )

    def _set_bounds(self, collector: Collector) -> None:
        collector.workers.while_waiting = self._seat.check_signals
        sync = self._seat.weight_sync
        if sync is not None and sync.max_staleness is not None:
            collector.workers.max_staleness = sync.max_staleness

    def _check_alone(self) -> None:
        if self._seat.world_size > 1:
            raise ValueError(
                f"replay.background needs a single rank, got {self._seat.world_size}; use ProcessBackend(sync=False), "
                f"whose workers go on, too"
            )

    def _go_on_from(self, collector: Collector, state: dict[str, Any]) -> None:
        ranks = self._seat.world_size
        collector.load_state_dict(self.budget.placed(state, ranks))
        share = self.budget.share(self._seat.rank, ranks)
        if self.trajs_per_batch is not None and ranks > 1 and share is not None:
            collector.budget.limit(share)  # the state is the first rank's, which has got on otherwise
        if (sync := self._seat.weight_sync) is not None:
            sync.mark_changed()  # nobody watched the weights between that state and now

    def _publish(self, collector: Collector) -> None:
        sync = self._seat.weight_sync
        if sync is not None and sync.take_change(sync.every_n_steps if self.collects_ahead else 1):
            began = perf_counter()
            collector.update_policy_weights_()
            self.seconds["weight_sync_s"] += perf_counter() - began
