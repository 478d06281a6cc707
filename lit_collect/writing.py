"""How collected batches get into a replay buffer: at once, or as whole trajectories."""

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDict, TensorDictBase

from lit_collect.assembler import TrajectoryAssembler
from lit_collect.frames import LENGTHS
from lit_collect.replay.config import ReplayConfig

_ANY_NUMBER = 1 << 62


class TrajectoryWriter:
    """Writes trajectories to a buffer once they are complete; rows of the others wait here.

    Args:
        buffer: anything with ``extend``.
        trajs_per_write: trajectories in one write; None writes as many as there are.
        pieces: see `TrajectoryAssembler`.
        total_copies: see `TrajectoryAssembler`.

    Example:
        >>> from lit_collect import Collector
        >>> written = []
        >>> writer = TrajectoryWriter(written)
        >>> with Collector("CartPole-v1", num_envs=2, frames_per_batch=128, seed=0) as collector:
        ...     writer.extend(collector.collect())
        >>> bool(written[-1]["next", "done"])
        True
    """

    takes_batches = True

    def __init__(
        self,
        buffer: Any,
        trajs_per_write: int | None = None,
        *,
        pieces: bool = False,
        total_copies: int | None = None,
    ) -> None:
        self.buffer = buffer
        self.frames_dropped = 0
        """Rows that were never written: their trajectories were not whole."""
        self._whole = trajs_per_write is not None
        self._assembler = TrajectoryAssembler(trajs_per_write or _ANY_NUMBER, pieces=pieces, total_copies=total_copies)

    def extend(self, batch: TensorDictBase) -> None:
        """Write what became complete.

        Args:
            batch: [N, T] or [M]; of each trajectory the rows in the order of time.
        """
        self.frames_dropped += self._assembler.add(batch)
        self._write(self._assembler.take if self._whole else self._assembler.rest)

    def restart(self) -> None:
        """All env copies begin new episodes: rows of the trajectories that were running will never be written."""
        self.frames_dropped += self._assembler.drop_open()

    def budget_spent(self) -> None:
        """No rows will come: write what is complete, however few, and drop what is not."""
        self._write(self._assembler.rest)
        self.restart()

    def state_dict(self) -> dict[str, Any]:
        """Complete trajectories that wait for others, as nested tensors; running ones cannot be gone on with."""
        waiting = self._assembler.waiting()
        return {
            "waiting": None if waiting is None else waiting.to_dict(),
            "frames_dropped": self.frames_dropped + self._assembler.frames_open,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the same trajectories."""
        self._assembler.forget()
        self.frames_dropped = state["frames_dropped"]
        if state["waiting"] is not None:
            self._assembler.add(TensorDict.from_dict(state["waiting"], batch_dims=1))

    def _write(self, take: Callable[[], TensorDictBase | None]) -> None:
        while (trajectories := take()) is not None:
            for rows in _that_fit(trajectories, getattr(self.buffer, "capacity", None)):
                self.buffer.extend(rows)


def _that_fit(trajectories: TensorDictBase, capacity: int | None) -> list[TensorDictBase]:
    """Rows of whole trajectories in as few parts as have at most so many rows; a longer one has its own."""
    if capacity is None or len(trajectories) <= capacity:
        return [trajectories]
    lengths, parts, first, end = trajectories[LENGTHS].tolist(), [], 0, 0
    while end < len(lengths):
        if end > first and end + lengths[end] - first > capacity:
            parts.append(trajectories[first:end])
            first = end
        end += lengths[end]
    return [*parts, trajectories[first:]]


class ReplayTarget:
    """A replay buffer and the way into it.

    Args:
        given: a `ReplayConfig`, of which a buffer is built here; anything with ``extend``; or None.
        compact_obs: of a buffer that is built.
        seed: of the samples of a buffer that is built.
        subfolder: of the storage of a buffer that is built.

    Raises:
        TypeError: if it cannot be written to.
        ValueError: if settings do not fit each other.
    """

    def __init__(
        self, given: Any, *, compact_obs: bool = False, seed: int | None = None, subfolder: str | None = None
    ) -> None:
        self.config = given if isinstance(given, ReplayConfig) else None
        if self.config is None and given is not None and (isinstance(given, type) or not hasattr(given, "extend")):
            raise TypeError(
                f"replay_buffer cannot be written to : expected an object with extend, or a ReplayConfig, got {given!r}"
            )
        self.buffer = given
        """What is sampled from; None if there is none."""
        if self.config is not None:
            self.buffer = self.config.build(compact_obs=compact_obs, seed=seed, subfolder=subfolder)
        self._sink: Any = None
        self._state: Mapping[str, Any] | None = None  # of the writer that is to come

    @property
    def min_frames(self) -> int:
        """Rows that must be there before the first sample."""
        return 0 if self.config is None else self.config.min_frames

    @property
    def can_be_sampled(self) -> bool:
        """Whether one can learn from it."""
        return hasattr(self.buffer, "sample")

    def sink(self, total_copies: int, *, pieces: bool) -> Any:
        """What is given the transitions.

        Args:
            total_copies: env copies over all ranks.
            pieces: whether trajectories may begin inside of an episode.
        """
        if self._sink is None:
            self._sink = self.buffer
            if self.config is not None and self.config.write_mode == "trajectory":
                self._sink = writer = TrajectoryWriter(
                    self.buffer, self.config.trajs_per_write, pieces=pieces, total_copies=total_copies
                )
                if self._state is not None:
                    writer.load_state_dict(self._state)
        return self._sink

    @property
    def writer(self) -> TrajectoryWriter | None:
        """What writes whole trajectories, once it is there."""
        return self._sink if isinstance(self._sink, TrajectoryWriter) else None

    def restart(self) -> None:
        """All env copies begin new episodes."""
        if self.writer is not None:
            self.writer.restart()

    def budget_spent(self) -> None:
        """No rows will come: what waits for others is written."""
        if self.writer is not None:
            self.writer.budget_spent()

    def statistics(self) -> dict[str, int]:
        """``replay_dropped``: frames whose trajectories were never whole, so that they were not written."""
        return {} if self.writer is None else {"replay_dropped": self.writer.frames_dropped}

    def writer_state(self) -> Mapping[str, Any] | None:
        """What waits to be written, None if there is no such thing."""
        return self._state if self.writer is None else self.writer.state_dict()

    def load_writer_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on with what waited to be written."""
        self._state = state
        if self.writer is not None and state is not None:
            self.writer.load_state_dict(state)

    def close(self) -> None:
        """Release what was built here; may be called again."""
        if self.config is not None:
            self.buffer.close()
