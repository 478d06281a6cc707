"""`Replaying`: the replay buffer of a data module, from the first batch over several fits and checkpoints."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tensordict import TensorDictBase
from torch import Tensor

from lit_collect.config import settings
from lit_collect.frames import INDEX
from lit_collect.hooks import extend
from lit_collect.metrics import ReplayUse
from lit_collect.plan import Plan
from lit_collect.ranks import Gather
from lit_collect.replay import MixedBuffer, ReplayBuffer
from lit_collect.replay.config import ReplayConfig
from lit_collect.seeding import Placement
from lit_collect.writing import ReplayTarget


class Replaying:
    """Builds the buffer when it is first needed, writes to it, and saves it if it is one of ours.

    Args:
        given: a `ReplayConfig`, a mapping of its settings, or anything with ``extend`` and ``sample``.
        plan: what is collected.

    Raises:
        TypeError: if it is something else.
        ValueError: if the buffer does not fit what is collected.
    """

    def __init__(self, given: Any, *, plan: Plan) -> None:
        if isinstance(given, Mapping):
            given = settings(ReplayConfig, given, "replay")
        self.config = given if isinstance(given, ReplayConfig) else None
        if self.config is None and (
            isinstance(given, type) or not (hasattr(given, "extend") and hasattr(given, "sample"))
        ):
            raise TypeError(
                f"replay must be a ReplayConfig or an object with extend and sample, got {given!r}; give the "
                f"collector's replay_buffer= what is only written to"
            )
        self._given = given
        self._compact_obs, self._pieces = plan.rollout.compact_obs, plan.rollout.set_truncated
        if self.config is not None:
            _check_fit(self.config, plan)
        self._target: ReplayTarget | None = None
        self._state: dict[str, Any] | None = None  # of the buffer that was or is to come
        self._rank = 0
        self._counts: list[int] = []  # rows that each of several ranks has written
        self._samples = self._rows = 0  # when `take_use` was called last

    @property
    def background(self) -> bool:
        """Whether frames are collected while the learner learns."""
        return self.config is not None and self.config.background

    @property
    def min_frames(self) -> int:
        """Rows that must be there before the first sample."""
        return 0 if self.config is None else self.config.min_frames

    def target(self, place: Placement) -> ReplayTarget:
        """The buffer and the way into it.

        Args:
            place: whose random numbers are drawn, and whose folder is used.
        """
        if self._target is None:
            self._target = ReplayTarget(
                self._given,
                compact_obs=self._compact_obs,
                seed=place.replay_seed,
                subfolder=None if place.world_size == 1 else f"rank_{place.rank}",
            )
            self._rank = place.rank
            if self._state is not None:
                self._load(self._target, self._state)
                self._state = None
            elif self.config is not None and self.config.path is not None and (rows := len(self._target.buffer)):
                rank_zero_info(f"the replay buffer at {self.config.path} goes on with {rows:,} rows of an earlier run")
        return self._target

    def write(self, batch: TensorDictBase, place: Placement, total_copies: int) -> None:
        """Add the transitions of a batch.

        Args:
            batch: [N, T].
            place: see `target`.
            total_copies: env copies over all ranks.
        """
        sink = self.target(place).sink(total_copies, pieces=self._pieces)
        extend(sink, batch)

    def budget_spent(self) -> None:
        """No rows will come: what waits for others is written."""
        if self._target is not None:
            self._target.budget_spent()

    def statistics(self) -> dict[str, int]:
        """See `ReplayTarget.statistics`."""
        return {} if self._target is None else self._target.statistics()

    def count(self, gather: Gather) -> None:
        """Tell the other ranks how many rows were written: a checkpoint, which is the first rank's, says it of all.

        Args:
            gather: exchanges numbers with them.
        """
        written = 0 if self._target is None else getattr(self._target.buffer, "write_count", 0)
        self._counts = [int(count) for (count,) in gather([written])]

    def update_priority(self, sample: TensorDictBase, priority: Tensor) -> None:
        """See `CollectorDataModule.update_priority`."""
        update = None if self._target is None else getattr(self._target.buffer, "update_priority", None)
        if update is not None:
            update(sample if self._is_ours else sample.get(INDEX), priority)

    def see_version(self, version: int) -> None:
        """Say which version of the weights the learner has by now; how stale a row is depends on it."""
        if self._target is not None and self._is_ours:
            self._target.buffer.learner_version = version

    def take_use(self, samples: int) -> ReplayUse:
        """What was done with the buffer since the last call.

        Args:
            samples: that were taken so far.
        """
        updates, self._samples = samples - self._samples, samples
        buffer: Any = None if self._target is None else self._target.buffer
        if not hasattr(buffer, "take_statistics"):
            return ReplayUse(size=len(buffer) if hasattr(buffer, "__len__") else 0, updates=updates)
        numbers = buffer.take_statistics()
        rows, self._rows = max(numbers["sampled"] - self._rows, 0), numbers["sampled"]  # a loaded state may have fewer
        return ReplayUse(numbers["size"], numbers.get("age_mean", 0.0) * rows, rows, updates)

    @property
    def description(self) -> Any:
        """The settings as plain data, for loggers."""
        return type(self._given).__name__ if self.config is None else self.config.as_plain()

    def restart(self) -> None:
        """All env copies begin new episodes."""
        if self._target is not None:
            self._target.restart()

    def state_dict(self) -> dict[str, Any] | None:
        """Of a buffer of ours; None of any other, which whoever made it saves."""
        buffer = self._given if self._target is None else self._target.buffer
        if not self._is_ours or isinstance(buffer, ReplayConfig):
            return self._state
        state = {**buffer.state_dict(), "rank": self._rank, "write_counts": list(self._counts)}
        waiting = None if self._target is None else self._target.writer_state()
        return state if waiting is None else {**state, "writer": waiting}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on with what a buffer held."""
        if self._target is None:
            self._state = state
        elif state is not None:
            self._load(self._target, state)
        elif self.config is not None and self.config.path is None:  # of a moment before it was built
            self._target.close()
            self._target = None

    def park(self) -> None:
        """Give back what a buffer holds besides memory of this process; it comes back with the next use."""
        if self._target is None or self.config is None or self.config.in_memory:
            return
        self._state = self.state_dict()
        self._target.close()
        self._target = None

    def _load(self, target: ReplayTarget, state: dict[str, Any]) -> None:
        """Go on where this rank was left; from another's state with its rows, or those in files of one's own."""
        buffer = target.buffer
        target.load_writer_state(state.get("writer"))
        self._counts = list(state.get("write_counts", ()))
        if state.get("rank", self._rank) != self._rank and isinstance(buffer, ReplayBuffer):
            own = buffer.state_dict()
            if "path" in own:  # no word on its priorities, but on how many of its rows were there
                state = {**own, "write_count": self._counts[self._rank]} if self._rank < len(self._counts) else own
            else:
                state = {**state, "random": own["random"]}  # else both would draw the same samples
        buffer.load_state_dict(state)

    @property
    def _is_ours(self) -> bool:
        return isinstance(self._given, ReplayConfig | ReplayBuffer | MixedBuffer)


def _check_fit(config: ReplayConfig, plan: Plan) -> None:
    """Raise if there would never be a sample, or no batch could be written."""
    if plan.total_frames != -1 and config.min_frames >= plan.total_frames:
        raise ValueError(
            f"replay.min_frames must be below total_frames={plan.total_frames}, got {config.min_frames}; there would "
            f"never be a sample"
        )
    config.check_holds(plan.frames_per_batch)
