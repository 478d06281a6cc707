"""Collected batches on their way to disk: every row as it comes, or whole episodes."""

from collections.abc import Sequence
from typing import Protocol

import torch
from tensordict import TensorDictBase

from lit_collect.episodes import EpisodeTotals, summarise
from lit_collect.frames import NEXT_REWARD
from lit_collect.metrics import EpisodeStatistics
from lit_collect.offline.episodes import EpisodeJoiner, as_rows
from lit_collect.offline.memory_maps import RowWriter
from lit_collect.offline.minari import MinariWriter


class Recording(Protocol):
    """Writes batches as they come."""

    @property
    def frames(self) -> int:
        """Rows written so far."""

    @property
    def full(self) -> bool:
        """Whether as much was written as was asked for."""

    def add(self, batch: TensorDictBase) -> None:
        """Take up a batch, [N, T]."""

    def finish(self) -> int:
        """Write what was held back; returns how many episodes were cut off for that."""

    def episodes(self) -> dict[str, float]:
        """Returns and lengths of the episodes that ended, by the names of `lit_collect.episodes.summarise`."""

    def close(self) -> None:
        """Close the files; may be called again."""


class RowRecording:
    """Writes every row, in the order of the batches.

    Args:
        writer: takes the rows.
    """

    full = False

    def __init__(self, writer: RowWriter) -> None:
        self._writer = writer
        self._statistics = EpisodeStatistics()

    @property
    def frames(self) -> int:
        """Rows written so far."""
        return self._writer.num_rows

    def add(self, batch: TensorDictBase) -> None:
        """Write the transitions of a batch.

        Args:
            batch: [N, T].

        Raises:
            OSError: if they cannot be written.
        """
        self._writer.write(as_rows(batch))
        self._statistics.update(batch)

    def finish(self) -> int:
        """Nothing is held back."""
        return 0

    def episodes(self) -> dict[str, float]:
        """Returns and lengths of the last 100 episodes that ended."""
        return self._statistics.compute()

    def close(self) -> None:
        """Close the files; may be called again."""
        self._writer.close()


class EpisodeRecording:
    """Writes whole episodes, each once it has ended.

    Args:
        writer: takes them.
        most: how many; None writes those, too, that have not ended at last.
    """

    def __init__(self, writer: MinariWriter | RowWriter, most: int | None = None) -> None:
        self.frames = 0
        """Rows written so far."""
        self._writer, self._most = writer, most
        self._joiner = EpisodeJoiner()
        self._returns: list[float] = []
        self._lengths: list[int] = []

    @property
    def full(self) -> bool:
        """Whether `most` episodes were written."""
        return len(self._returns) == self._most

    def add(self, batch: TensorDictBase) -> None:
        """Write the episodes that end in a batch.

        Args:
            batch: [N, T].

        Raises:
            OSError: if they cannot be written.
        """
        ended = self._joiner.add(batch)
        if self._most is not None:
            ended = ended[: self._most - len(self._returns)]
        self._write(ended)
        self._returns += [float(episode[NEXT_REWARD].double().sum()) for episode in ended]
        self._lengths += [len(episode) for episode in ended]

    def finish(self) -> int:
        """Write the episodes that have not ended, as truncated; none of them where a number of episodes was given.

        Returns:
            How many these are.
        """
        begun = [] if self._most is not None else self._joiner.unfinished()
        self._write(begun)
        return len(begun)

    def episodes(self) -> dict[str, float]:
        """Returns and lengths of the episodes that ended."""
        return summarise([EpisodeTotals.of(self._returns, self._lengths)])

    def close(self) -> None:
        """Close the files; may be called again."""
        if isinstance(self._writer, RowWriter):
            self._writer.close()

    def _write(self, episodes: Sequence[TensorDictBase]) -> None:
        if isinstance(self._writer, MinariWriter):
            self._writer.write(episodes)
        elif episodes:
            self._writer.write(torch.cat(list(episodes)))  # type: ignore[arg-type]  # tensordict joins them
        self.frames += sum(map(len, episodes))
