"""What is known of episodes: those that ended in a batch, and sums over them that ranks can tell each other.

Legend: see `lit_collect.frames`. K = finished episodes. Returns are undiscounted sums of stored rewards in float64.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from lit_collect.frames import NEXT_REWARD, REPORTED, Key, as_key, valid_rows

SUCCESS = "success_rate"
"""What the mean of the info values ``success`` and ``is_success`` is called."""

_SUCCESSES = ("success", "is_success")


class Finished(NamedTuple):
    """Episodes that ended in one batch, in the order of time; without those that lost rows."""

    returns: list[float]
    lengths: list[int]
    """Frames."""
    copies: list[int]
    """Global indices of their env copies, as far as ids tell them."""
    rows: list[int]
    """Their last rows in the batch, numbered env copy by env copy: row r is step ``r % T`` of copy ``r // T``."""


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


class InfoTotals(NamedTuple):
    """Sum and count of one info value over episodes: what one rank has to tell the others."""

    total: float = 0
    episodes: float = 0
    """Episodes at whose end it was reported."""

    @classmethod
    def of(cls, values: np.ndarray) -> "InfoTotals":
        """The totals of one value.

        Args:
            values: [K] float64, NaN where it was not reported.
        """
        reported = values[~np.isnan(values)]
        return cls(float(reported.sum()), len(reported))


def info_means(ranks: "Sequence[dict[str, InfoTotals]]") -> dict[str, float]:
    """Join the info values of all ranks, every episode counting equally.

    Args:
        ranks: at least one, all with the same names.

    Returns:
        The mean by name; a name is left out until it was reported at the end of an episode.

    Example:
        >>> info_means([{"speed": InfoTotals(6.0, 2)}, {"speed": InfoTotals(0.0, 1)}])
        {'speed': 2.0}
    """
    means = {}
    for name in ranks[0]:
        episodes = sum(rank[name].episodes for rank in ranks)
        if episodes:
            means[name] = sum(rank[name].total for rank in ranks) / episodes
    return means


def info_at(batch: TensorDictBase, rows: Sequence[int]) -> dict[str, np.ndarray]:
    """The numbers among the named values of the env's info, as they came with the successors of some rows.

    Args:
        batch: [N, T] or [T], collected with ``RolloutConfig(info_keys=...)``; other batches have no such values.
        rows: K of them, numbered as in `Finished`.

    Returns:
        [K] float64 by name in alphabetic order, NaN where the env reported none. Nested names are joined by dots;
        ``success`` and ``is_success`` are called ``success_rate``. Arrays are left out.

    Example:
        >>> from tensordict import TensorDict
        >>> after = {"success": torch.tensor([[True, False]]), "reported": {"success": torch.tensor([[True, False]])}}
        >>> info_at(TensorDict({"next": after}, batch_size=[1, 2]), [0, 1])
        {'success_rate': array([ 1., nan])}
    """
    flags = batch.get(("next", REPORTED), None)
    if flags is None:
        return {}
    chosen = torch.as_tensor(rows, dtype=torch.int64)
    found: dict[str, np.ndarray] = {}
    for key in sorted(as_key(key) for key in flags.keys(True, True)):
        column = batch[("next", *key)]
        if column.numel() != batch.numel():
            continue
        picked = column.reshape(-1)[chosen.to(column.device)].double().cpu()
        reported = flags[key].reshape(-1)[chosen.to(column.device)].cpu()
        values = picked.masked_fill(~reported, float("nan")).numpy()
        name = ".".join(key)
        name = SUCCESS if name in _SUCCESSES else name
        # an env may report success under both names
        found[name] = np.where(np.isnan(found[name]), values, found[name]) if name in found else values
    return dict(sorted(found.items()))


def per_row(batch: TensorDictBase, key: Key) -> np.ndarray:
    """A column with one value a row, as [N, T]."""
    return batch[key].cpu().numpy().reshape(-1, batch.shape[-1])


def per_row_or_none(batch: TensorDictBase, key: Key) -> np.ndarray | None:
    """The same, None where there is no such column."""
    column = batch.get(key, None)
    return None if column is None else column.cpu().numpy().reshape(-1, batch.shape[-1])
