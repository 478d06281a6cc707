"""What is measured on collected data: episodes, the age of rows, throughput. Runs on the CPU, next to the collector.

Legend: see `lit_collect.frames`. Returns are undiscounted sums of stored rewards in float64.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchmetrics import Metric

from lit_collect.frames import IS_INIT, MASK, NEXT_DONE, NEXT_REWARD, POLICY_VERSION, TRAJ_IDS, Key, valid_rows

_ANY = -1  # instead of the id of a running trajectory: a new one begins
_NONE = -2  # instead of it: nothing is known, as of a copy that was never seen


class EpisodeTotals(NamedTuple):
    """Sums and counts over episodes: what one rank has to tell the others. All are numbers; `summarise` joins them."""

    episodes: float = 0
    """Episodes that the sums are over."""
    return_sum: float = 0
    return_squares: float = 0
    """Sum of squared distances from the mean return."""
    return_min: float = float("inf")
    return_max: float = float("-inf")
    length_sum: float = 0
    """Frames."""
    ended: float = 0
    """Episodes that ended in this interval."""
    ended_total: float = 0
    """Episodes that ended in all."""
    running_sum: float = 0
    """Sum of the returns so far of the episodes that have not ended."""
    copies: float = 0
    """Env copies."""

    @classmethod
    def of(cls, returns: Sequence[float], lengths: Sequence[int]) -> "EpisodeTotals":
        """The totals of finished episodes.

        Args:
            returns: of each episode.
            lengths: frames of the same episodes.
        """
        if not returns:
            return cls()
        total = sum(returns)
        mean = total / len(returns)
        return cls(
            episodes=len(returns),
            return_sum=total,
            return_squares=sum([(value - mean) ** 2 for value in returns]),
            return_min=min(returns),
            return_max=max(returns),
            length_sum=sum(lengths),
            ended=len(returns),
            ended_total=len(returns),
        )


def summarise(ranks: Sequence[EpisodeTotals]) -> dict[str, float]:
    """Join the totals of all ranks, every episode counting equally.

    Args:
        ranks: at least one.

    Returns:
        ``return_mean``, ``return_min``, ``return_max``, ``return_std`` (of the population), ``length_mean`` in frames
        and the integers ``count`` and ``count_total``. Before the first episode has ended only ``return_mean``: the
        mean return so far of the running episodes. Nothing if there are no env copies either.

    Example:
        >>> summarise([EpisodeTotals.of([1.0, 3.0], [4, 6])])["return_std"]
        1.0
    """
    episodes = sum(rank.episodes for rank in ranks)
    if not episodes:
        copies = sum(rank.copies for rank in ranks)
        return {"return_mean": sum(rank.running_sum for rank in ranks) / copies} if copies else {}
    mean = sum(rank.return_sum for rank in ranks) / episodes
    squares = sum(
        rank.return_squares + rank.episodes * (rank.return_sum / rank.episodes - mean) ** 2
        for rank in ranks
        if rank.episodes
    )
    return {
        "return_mean": mean,
        "return_min": min(rank.return_min for rank in ranks),
        "return_max": max(rank.return_max for rank in ranks),
        "return_std": (squares / episodes) ** 0.5,
        "length_mean": sum(rank.length_sum for rank in ranks) / episodes,
        "count": int(sum(rank.ended for rank in ranks)),
        "count_total": int(sum(rank.ended_total for rank in ranks)),
    }


class EpisodeStatistics(Metric):
    """Return and length of the last finished episodes; episodes may span any number of batches.

    A row with ``is_init`` begins an episode whatever came before, so an episode that was left without an end is not
    counted; nor is one that has lost rows (a batch that was too old). Where a batch marks its own edge truncated
    (``set_truncated``) the edge ends an episode here, too.
    The metric stays on the CPU and never talks to other ranks: gather `totals` and join them by `summarise`.

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
        self.add_state("episodes", torch.zeros(2, 0, dtype=torch.float64), persistent=True)
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
        done, first, mask = _rows(batch, NEXT_DONE), _rows_or_none(batch, IS_INIT), _rows_or_none(batch, MASK)
        rewards = _rows(batch, NEXT_REWARD).ravel().astype(np.float64)
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

        ids = None if first is None else _rows_or_none(batch, TRAJ_IDS)
        slots = self._slots(len(done), ids, total_copies)
        so_far, frames = self.running.tolist()
        open_ids = self.ids.tolist()
        finished = []
        for start, stop, part, length in zip(starts, stops, returns, lengths, strict=True):
            row, step = divmod(start, steps)
            copy = slots[row]
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
                    finished.append(((stop - 1) % steps, so_far[copy], frames[copy]))
                so_far[copy] = frames[copy] = 0.0
                open_ids[copy] = _ANY
        self.running = torch.from_numpy(np.array((so_far, frames)))
        self.ids = torch.tensor(open_ids)
        if finished:
            finished.sort(key=itemgetter(0))  # by time
            self._finish(finished)

    def compute(self) -> dict[str, float]:
        """What `summarise` says of this rank alone: plain numbers."""
        return summarise([self.totals()])

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

    def begin_interval(self) -> None:
        """Let ``count`` begin at 0 again."""
        self.count_before = self.count_total  # states are replaced, never changed in place
        self._computed = None

    def restore(self, returns: Sequence[float], lengths: Sequence[int], count_total: int) -> None:
        """Go on after episodes of an earlier run; the running episodes are forgotten.

        Args:
            returns: of its last episodes.
            lengths: frames of the same episodes.
            count_total: episodes that had ended.
        """
        self.reset()
        self.episodes = torch.tensor([returns, lengths], dtype=torch.float64)[:, -self.window :]
        self.count_total = torch.tensor(count_total)
        self.begin_interval()

    def _slots(self, rows: int, ids: np.ndarray | None, total_copies: int | None) -> list[int]:
        """Where the rows of a batch find their running episodes; new env copies get a place."""
        if ids is None or total_copies is None:
            if len(self.copies) != rows:
                self.copies = torch.arange(rows)
                self.running = torch.zeros(2, rows, dtype=torch.float64)
                self.ids = torch.full((rows,), _ANY)
            return list(range(rows))
        copies = (ids.max(1) % total_copies).tolist()
        known = self.copies.tolist()
        if new := sorted(set(copies) - set(known)):
            known += new
            self.copies = torch.tensor(known)
            self.running = torch.cat([self.running, torch.zeros(2, len(new), dtype=torch.float64)], 1)
            self.ids = torch.cat([self.ids, torch.full((len(new),), _NONE)])
        places = {copy: place for place, copy in enumerate(known)}
        return [places[copy] for copy in copies]

    def _finish(self, finished: list[tuple[int, float, float]]) -> None:
        """Take up episodes as step, return and frames."""
        new = np.array(finished).T[1:]
        self.episodes = torch.from_numpy(np.concatenate((self.episodes.numpy(), new), 1)[:, -self.window :])
        self.count_total = self.count_total + len(finished)


def episode_returns(batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Return and length of padded whole episodes.

    Args:
        batch: [B, T] (or [T]), one episode a row, padding masked by ``("collector", "mask")``.

    Returns:
        returns: [B] float64.
        lengths: [B] int64 frames.

    Example:
        >>> from tensordict import TensorDict
        >>> data = {"next": {"reward": torch.ones(2, 3, 1)}, "collector": {"mask": torch.ones(2, 3).bool()}}
        >>> episode_returns(TensorDict(data, batch_size=[2, 3]))
        (tensor([3., 3.], dtype=torch.float64), tensor([3, 3]))
    """
    rewards = batch[NEXT_REWARD].reshape(-1, batch.shape[-1]).double()
    mask = valid_rows(batch)
    if mask is None:
        return rewards.sum(-1), torch.full((len(rewards),), rewards.shape[-1], device=rewards.device)
    mask = mask.reshape(rewards.shape)
    return rewards.masked_fill(~mask, 0.0).sum(-1), mask.sum(-1)


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
    versions, mask = _rows(batch, POLICY_VERSION), _rows_or_none(batch, MASK)
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


def _rows(batch: TensorDictBase, key: Key) -> np.ndarray:
    """A column with one value a row, as [N, T]."""
    return batch[key].cpu().numpy().reshape(-1, batch.shape[-1])


def _rows_or_none(batch: TensorDictBase, key: Key) -> np.ndarray | None:
    column = batch.get(key, None)
    return None if column is None else column.cpu().numpy().reshape(-1, batch.shape[-1])
