"""What one batch is: a fixed number of frames, those split by trajectory, or a number of whole trajectories."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from tensordict import TensorDictBase

from lit_collect.assembler import TrajectoryAssembler
from lit_collect.budget import Budget
from lit_collect.config import TrajectoryConfig
from lit_collect.errors import BudgetSpentError
from lit_collect.frames import count_frames
from lit_collect.supervisor import WorkerGroup
from lit_collect.trajectories import split_trajectories

Collect = Callable[[float | None], TensorDictBase | None]
"""Collects a fixed number of frames [N, T]; None if there were none within a number of seconds."""


class Packing(ABC):
    """Makes batches of what is collected, and counts them."""

    @abstractmethod
    def next(self, timeout_s: float | None) -> TensorDictBase | None:
        """One batch, None if there was none in time.

        Raises:
            BudgetSpentError: if what is left of the budget makes none.
        """

    def restart(self) -> None:  # noqa: B027 (not all of them keep anything)
        """All env copies begin new episodes: what is not whole will never be."""

    def discard(self) -> None:  # noqa: B027 (not all of them keep anything)
        """What was collected and not handed out is of another run: none of it will be."""


class FixedFrames(Packing):
    """Batches as they are collected, or split by trajectory.

    Args:
        collect: collects.
        budget: counts.
        split: whether each batch is split.
    """

    def __init__(self, collect: Collect, budget: Budget, *, split: bool = False) -> None:
        self._collect, self._budget, self._split = collect, budget, split

    def next(self, timeout_s: float | None) -> TensorDictBase | None:
        """See `Packing.next`."""
        batch = self._collect(timeout_s)
        if batch is None:
            return None
        self._budget.count(count_frames(batch))
        return split_trajectories(batch) if self._split else batch


class WholeTrajectories(Packing):
    """Batches of a number of complete trajectories, in the order in which they end.

    Frames of a trajectory that is still running, or was completed beyond the number, wait for a later batch, also over
    weight updates, pauses and new iterators.

    Args:
        collect: collects.
        budget: counts.
        settings: with `trajs_per_batch`.
        group: who collects; versions and bounds on staleness are asked of it.
    """

    def __init__(self, collect: Collect, budget: Budget, *, settings: TrajectoryConfig, group: WorkerGroup) -> None:
        assert settings.trajs_per_batch is not None
        self._collect, self._budget, self._group = collect, budget, group
        self._drop_stale = settings.drop_stale
        spec = group.members[0].spec
        self._ends_all = spec.rollout.reset_at_each_iter  # every collected batch ends all episodes, whole or not
        self._assembler = TrajectoryAssembler(
            settings.trajs_per_batch,
            settings.traj_format,
            pieces=spec.rollout.set_truncated,
            total_copies=group.num_envs * spec.place.world_size,
        )

    def next(self, timeout_s: float | None) -> TensorDictBase | None:
        """See `Packing.next`."""
        while True:
            self._drop_old()
            batch = self._assembler.take()
            if batch is not None:
                return self._released(batch)
            if self._budget.left == 0:
                return self._rest()
            collected = self._collect(timeout_s)
            if collected is None:
                return None
            self._budget.hold(count_frames(collected))
            self._budget.lose(self._assembler.add(collected))
            if self._budget.left == 0 or self._ends_all:
                self._budget.lose(self._assembler.drop_open())  # they will never be whole

    def restart(self) -> None:
        """See `Packing.restart`."""
        self._budget.lose(self._assembler.drop_open())

    def discard(self) -> None:
        """See `Packing.discard`."""
        self._budget.lose(self._assembler.forget())

    def _rest(self) -> TensorDictBase:
        self._budget.lose(self._assembler.drop_open())
        batch = self._assembler.rest()
        if batch is None:
            raise BudgetSpentError(
                f"all {self._budget.total} frames of total_frames have been collected; no whole trajectory is left"
            )
        return self._released(batch)

    def _released(self, batch: TensorDictBase) -> TensorDictBase:
        self._budget.release(count_frames(batch))
        return batch

    def _drop_old(self) -> None:
        if self._drop_stale:
            oldest = self._group.publisher.version - (self._group.max_staleness or 0)
            self._budget.lose(self._assembler.drop_older_than(oldest))
