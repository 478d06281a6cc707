"""How collected batches get into a replay buffer: at once, or as whole trajectories."""

from typing import Any

from tensordict import TensorDictBase

from lit_collect.assembler import TrajectoryAssembler
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
        self._whole = trajs_per_write is not None
        self._assembler = TrajectoryAssembler(trajs_per_write or _ANY_NUMBER, pieces=pieces, total_copies=total_copies)

    def extend(self, batch: TensorDictBase) -> None:
        """Write what became complete.

        Args:
            batch: [N, T] or [M]; of each trajectory the rows in the order of time.
        """
        self._assembler.add(batch)
        take = self._assembler.take if self._whole else self._assembler.rest
        while (trajectories := take()) is not None:
            self.buffer.extend(trajectories)

    def restart(self) -> None:
        """All env copies begin new episodes: rows of the trajectories that were running will never be written."""
        self._assembler.drop_open()


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
                self._sink = TrajectoryWriter(
                    self.buffer, self.config.trajs_per_write, pieces=pieces, total_copies=total_copies
                )
        return self._sink

    def restart(self) -> None:
        """All env copies begin new episodes."""
        if isinstance(self._sink, TrajectoryWriter):
            self._sink.restart()

    def close(self) -> None:
        """Release what was built here; may be called again."""
        if self.config is not None:
            self.buffer.close()
