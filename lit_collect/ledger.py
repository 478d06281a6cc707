"""`Ledger`: what one collector has done under which seeds, and how another run goes on from there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lit_collect.budget import Budget
from lit_collect.gathering import Gatherer
from lit_collect.seeding import Placement
from lit_collect.supervisor import WorkerGroup


class Ledger:
    """Accounts for frames, ids, versions and seeds. Asks no worker to do so; whoever calls it has its turn.

    Args:
        group: the workers.
        budget: frames that were handed out.
        place: whose random numbers these are.
    """

    def __init__(self, group: WorkerGroup, budget: Budget, *, place: Placement) -> None:
        self._group, self._budget, self._place = group, budget, place
        self._restart = 0

    def statistics(self, gatherer: Gatherer) -> dict[str, Any]:
        """See `Collector.statistics`.

        Args:
            gatherer: who has batches that were not handed out.
        """
        stepped, pending = self._frames_stepped, gatherer.frames_pending + self._budget.held
        return {
            "frames_stepped": stepped,
            "frames_yielded": self._budget.yielded,
            "frames_pending": pending,
            "frames_dropped": stepped - self._budget.yielded - pending,
            "batches": self._budget.batches,
            "total_frames": self._budget.total,
            "policy_version": self._group.publisher.version,
            **self._group.statistics(),
            **gatherer.statistics(),
        }

    def state(self) -> dict[str, Any]:
        """See `Collector.state_dict`."""
        return {
            "frames_stepped": self._frames_stepped,
            "frames_yielded": self._budget.yielded,
            "frames_lost": self._budget.lost,
            "batches": self._budget.batches,
            "policy_version": self._group.publisher.version,
            "trajectories": self._group.trajectories,
            "warm_up_steps": self._group.warm_up_steps,
            "entropy": self._place.entropy,
            "restart": self._restart,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a run can go on here.

        Raises:
            TypeError: if it is no state of a collector.
            ValueError: if parts of it are missing, or it had another number of env copies.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state must be a mapping that Collector.state_dict gave, got {state!r}")
        missing = sorted(self.state().keys() - state.keys() - {"frames_lost"})  # which older versions did not count
        if missing:
            raise ValueError(f"the state lacks {missing} : expected what Collector.state_dict gives, got {list(state)}")
        copies, own = len(state["trajectories"]), self._group.num_envs
        if copies != own:
            raise ValueError(f"the state is of {copies} env copies, this collector has {own}; use num_envs={copies}")

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a run was left (see `Collector.load_state_dict`).

        Args:
            state: of that run.
        """
        stepped = max(state["frames_stepped"], self._frames_stepped)
        self._budget.before_resume = stepped - self._group.frames_stepped
        self._budget.yielded, self._budget.batches = state["frames_yielded"], state["batches"]
        self._budget.held, self._budget.lost = 0, state.get("frames_lost", 0)
        self._restart = state["restart"] + 1
        self.reseed(state["entropy"])
        self._group.resume(state["trajectories"], state["warm_up_steps"], state["policy_version"])

    def reseed(self, entropy: int) -> None:
        """Begin new episodes under another seed.

        Args:
            entropy: see `Placement`.
        """
        self._place = replace(self._place, entropy=entropy)
        self._group.reseed(self._place, self._restart)

    @property
    def _frames_stepped(self) -> int:
        return self._budget.before_resume + self._group.frames_stepped
