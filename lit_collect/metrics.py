"""What is measured on collected data: episodes, the age of rows, throughput. Runs on the CPU, next to the collector.

Legend: see `lit_collect.frames`. Returns are undiscounted sums of stored rewards in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchmetrics import Metric

from lit_collect.episodes import (
    EpisodeTotals,
    Finished,
    InfoTotals,
    info_at,
    info_means,
    per_row,
    per_row_or_none,
    summarise,
)
from lit_collect.frames import IS_INIT, MASK, NEXT_DONE, NEXT_REWARD, POLICY_VERSION, TRAJ_IDS

_ANY = -1  # instead of the id of a running trajectory: a new one begins
_NONE = -2  # instead of it: nothing is known, as of a copy that was never seen


class EpisodeStatistics(Metric):
    """Return and length of the last finished episodes; episodes may span any number of batches.

    A row with ``is_init`` begins an episode whatever came before, so an episode that was left without an end is not
    counted; nor is one that has lost rows (a batch that was too old). Where a batch marks its own edge truncated
    (``set_truncated``) the edge ends an episode here, too.
    Numbers that the env reports in its info and the batch holds (``RolloutConfig(info_keys=...)``) are taken from the
    last row of each episode.
    The metric stays on the CPU and never talks to other ranks: gather `totals` and `info_totals` and join them by
    `summarise` and `info_means`.

    Args:
        window: number of last finished episodes that are summarised, at least 1.

    Raises:
        ValueError: if `window` is below 1.

    Example:
        >>> from tensordict import TensorDict
        >>> after = {"reward": torch.ones(1, 3, 1), "done": torch.tensor([[[False], [True], [False]]])}
        >>> statistics = EpisodeStatistics()
        >>> statistics.update(TensorDict({"next": after}, batch_size=[1, 3]))
        >>> statistics.compute()["return_mean"]
        2.0
    """

    full_state_update = True
    is_differentiable = False

    episodes: Tensor
    """[2, up to window] float64, returns and frames of the last finished episodes, in the order in which they ended."""
    info: Tensor
    """[K, up to window] float64, info values of the same episodes, named by `info_names`; NaN where unreported."""
    running: Tensor
    """[2, N] float64, returns and frames so far of each env copy's running episode; frames are NaN if it lost rows."""
    copies: Tensor
    """[N] int64, which env copies these are."""
    ids: Tensor
    """[N] int64, their running trajectories; -1 where a new one begins."""
    count_total: Tensor
    """int64, episodes that have ended."""
    count_before: Tensor
    """int64, those of them that ended before this interval."""

    def __init__(self, window: int = 100) -> None:
        super().__init__(sync_on_compute=False)
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.window = window
        self.info_names: tuple[str, ...] = ()
        """The names of the last batch's info values."""
        self.finished = Finished([], [], [], [])
        """The episodes that ended in the last batch."""
        self.add_state("episodes", torch.zeros(2, 0, dtype=torch.float64), persistent=True)
        self.add_state("info", torch.zeros(0, 0, dtype=torch.float64))  # not persistent: its names are no tensors
        self.add_state("running", torch.zeros(2, 0, dtype=torch.float64), persistent=True)
        self.add_state("copies", torch.zeros(0, dtype=torch.int64), persistent=True)
        self.add_state("ids", torch.zeros(0, dtype=torch.int64), persistent=True)
        self.add_state("count_total", torch.tensor(0), persistent=True)
        self.add_state("count_before", torch.tensor(0), persistent=True)

    def update(self, batch: TensorDictBase, total_copies: int | None = None) -> None:
        """Go on with every env copy of a batch.

        Args:
            batch: [N, T] or [T] with ``("next", "reward")``, ``("next", "done")`` and, where they exist, ``is_init``,
                ``("collector", "traj_ids")`` and ``("collector", "mask")``.
            total_copies: env copies over all workers and ranks, by which ids tell whose rows these are. Without it
                rows are those of the same env copies in every batch, and another N than before begins new episodes.
        """
        steps = batch.shape[-1]
        done, first, mask = per_row(batch, NEXT_DONE), per_row_or_none(batch, IS_INIT), per_row_or_none(batch, MASK)
        rewards = per_row(batch, NEXT_REWARD).ravel().astype(np.float64)
        if mask is not None:
            rewards[~mask.ravel()] = 0.0
            done = done & mask
        last = set(done.ravel().nonzero()[0].tolist())  # rows are numbered copy by copy
        firsts = set() if first is None else set(first.ravel().nonzero()[0].tolist())
        cuts = {*range(0, done.size, steps), *(row + 1 for row in last), *firsts} - {done.size}
        starts = sorted(cuts)  # of the parts of episodes that lie in this batch
        stops = [*starts[1:], done.size]
        returns = np.add.reduceat(rewards, starts).tolist()
        if mask is None:
            lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        else:
            lengths = np.add.reduceat(mask.ravel(), starts, dtype=np.int64).tolist()

        ids = None if first is None else per_row_or_none(batch, TRAJ_IDS)
        slots = self._slots(len(done), ids, total_copies)
        so_far, frames = self.running.tolist()
        open_ids, copies = self.ids.tolist(), self.copies.tolist()
        finished = []
        for start, stop, part, length in zip(starts, stops, returns, lengths, strict=True):
            row, step = divmod(start, steps)
            copy = slots[row]
            if copy is None:  # nothing happened in this row, and it does not say whose it is
                continue
            if step or start in firsts:
                so_far[copy] = frames[copy] = 0.0
            elif ids is not None and ids[row, 0] >= 0 and open_ids[copy] not in (ids[row, 0], _ANY):
                frames[copy] = float("nan")  # rows are missing in between
            so_far[copy] += part
            frames[copy] += length
            if ids is not None:
                open_ids[copy] = int(ids[row, (stop - 1) % steps])
            if stop - 1 in last:
                if frames[copy] == frames[copy]:
                    ended = (so_far[copy], int(frames[copy]), copies[copy], stop - 1)
                    finished.append(((stop - 1) % steps, ended))
                so_far[copy] = frames[copy] = 0.0
                open_ids[copy] = _ANY
        self.running = torch.from_numpy(np.array((so_far, frames)))
        self.ids = torch.tensor(open_ids)
        self.finished = _in_time(finished)
        self._take_up(info_at(batch, self.finished.rows))

    def compute(self) -> dict[str, float]:
        """What `info_means` and `summarise` say of this rank alone: plain numbers."""
        return {**info_means([self.info_totals()]), **summarise([self.totals()])}

    def totals(self) -> EpisodeTotals:
        """The same as sums and counts, for `summarise`."""
        total = int(self.count_total)
        so_far, _ = self.running.tolist()
        return EpisodeTotals.of(*self.episodes.tolist())._replace(
            ended=total - int(self.count_before),
            ended_total=total,
            running_sum=sum(so_far),
            copies=len(so_far),
        )

    def info_totals(self) -> dict[str, InfoTotals]:
        """Sums and counts of the info values by name, for `info_means`."""
        return {name: InfoTotals.of(values) for name, values in zip(self.info_names, self.info.numpy(), strict=True)}

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.info_names = ()
        self.finished = Finished([], [], [], [])

    def begin_interval(self) -> None:
        """Let ``count`` begin at 0 again."""
        self.count_before = self.count_total  # states are replaced, never changed in place
        self._computed = None

    def restore(
        self,
        returns: Sequence[float],
        lengths: Sequence[int],
        count_total: int,
        info: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Go on after episodes of an earlier run; the running episodes are forgotten.

        Args:
            returns: of its last episodes.
            lengths: frames of the same episodes.
            count_total: episodes that had ended.
            info: values of the same episodes by name, NaN where the env reported none.
        """
        self.reset()
        self.episodes = torch.tensor([returns, lengths], dtype=torch.float64)[:, -self.window :]
        self.info_names = tuple(info or ())
        if info:
            self.info = torch.tensor([list(values) for values in info.values()], dtype=torch.float64)[:, -self.window :]
        self.count_total = torch.tensor(count_total)
        self.begin_interval()

    def _slots(self, rows: int, ids: np.ndarray | None, total_copies: int | None) -> Sequence[int | None]:
        """Where the rows of a batch find their running episodes; new env copies get a place, masked rows none."""
        if ids is None or total_copies is None:
            if len(self.copies) != rows:
                self.copies = torch.arange(rows)
                self.running = torch.zeros(2, rows, dtype=torch.float64)
                self.ids = torch.full((rows,), _ANY)
            return list(range(rows))
        copies = [highest % total_copies if highest >= 0 else None for highest in ids.max(1).tolist()]
        known = self.copies.tolist()
        if new := sorted({copy for copy in copies if copy is not None} - set(known)):
            known += new
            self.copies = torch.tensor(known)
            self.running = torch.cat([self.running, torch.zeros(2, len(new), dtype=torch.float64)], 1)
            self.ids = torch.cat([self.ids, torch.full((len(new),), _NONE)])
        places = {copy: place for place, copy in enumerate(known)}
        return [None if copy is None else places[copy] for copy in copies]

    def _take_up(self, info: dict[str, np.ndarray]) -> None:
        """Put the episodes that have just ended into the window, with their info values."""
        if (names := tuple(info)) != self.info_names:
            known = dict(zip(self.info_names, self.info, strict=True))
            unknown = torch.full((self.episodes.shape[1],), float("nan"), dtype=torch.float64)
            self.info = torch.stack([known.get(name, unknown) for name in names]) if names else torch.zeros(0, 0)
            self.info_names = names
        if self.finished.returns:
            new = np.array((self.finished.returns, self.finished.lengths), np.float64)
            self.episodes = torch.from_numpy(np.concatenate((self.episodes.numpy(), new), 1)[:, -self.window :])
            self.count_total = self.count_total + len(self.finished.returns)
            if names:
                values = np.concatenate((self.info.numpy(), np.stack(list(info.values()))), 1)
                self.info = torch.from_numpy(values[:, -self.window :])


def _in_time(ended: list[tuple[int, tuple[float, int, int, int]]]) -> Finished:
    """Episodes in the order of their last steps, which stand before what `Finished` has of each."""
    ended.sort(key=itemgetter(0))
    columns = zip(*[episode for _, episode in ended], strict=True) if ended else ([], [], [], [])
    return Finished(*map(list, columns))


class Staleness(NamedTuple):
    """How many versions the weights that acted were behind; of rows that were not acted at random."""

    total: float = 0
    """Sum over the rows."""
    rows: float = 0
    highest: float = 0

    def joined(self, other: "Staleness") -> "Staleness":
        """That of both sets of rows."""
        return Staleness(self.total + other.total, self.rows + other.rows, max(self.highest, other.highest))


def staleness(batch: TensorDictBase, version: int) -> Staleness:
    """Compare the rows' policy versions with the learner's.

    Args:
        batch: [N, T] or [T] with ``("collector", "policy_version")``; rows of version -1 were acted at random and
            do not count, nor do masked rows.
        version: the learner's when the batch is used.
    """
    versions, mask = per_row(batch, POLICY_VERSION), per_row_or_none(batch, MASK)
    if mask is not None:
        versions = versions[mask]
    lowest = int(versions.min()) if versions.size else -1
    if lowest == version:  # nothing is newer than the learner: all rows are of its version
        return Staleness(rows=versions.size)
    if lowest < 0:
        versions = versions[versions >= 0]
    if not versions.size:
        return Staleness()
    ages = version - versions
    return Staleness(int(ages.sum()), versions.size, int(ages.max()))


class ReplayUse(NamedTuple):
    """What was done with a replay buffer in an interval, as numbers that can be summed over ranks.

    Example:
        >>> ReplayUse(size=100, age_total=96.0, rows=32, updates=1).values(frames=4)
        {'size': 100, 'age_mean': 3.0, 'updates_per_frame': 0.25}
    """

    size: float = 0
    """Rows in it."""
    age_total: float = 0
    """Summed over the rows that were sampled: how many rows were written after each."""
    rows: float = 0
    """Rows that were sampled."""
    updates: float = 0
    """Samples."""

    def values(self, frames: float) -> dict[str, float]:
        """Size in rows, mean age in frames, and samples for each frame; the latter two only where there are any.

        Args:
            frames: that were collected in the interval.
        """
        values = {"size": self.size}
        if self.rows:
            values["age_mean"] = self.age_total / self.rows
        if frames:
            values["updates_per_frame"] = self.updates / frames
        return values


class Throughput:
    """Frames per second between two looks.

    Args:
        clock: monotonic seconds.

    Example:
        >>> seconds = iter([0.0, 2.0])
        >>> throughput = Throughput(clock=lambda: next(seconds))
        >>> throughput.look(0), throughput.look(100)
        (None, 50.0)
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._last: tuple[float, int] | None = None
        self.interval_s = 0.0

    def look(self, frames_total: int) -> float | None:
        """Frames per second since the last look, None at the first one; `interval_s` is then the time between them.

        Args:
            frames_total: a count that only grows.
        """
        now = self._clock()
        then, frames = self._last or (now, frames_total)
        self._last = now, frames_total
        self.interval_s = now - then
        return (frames_total - frames) / self.interval_s if self.interval_s > 0 else None
