"""What the ranks tell each other about a collected batch, apart from its episodes."""

from collections.abc import Sequence
from typing import NamedTuple

from lit_collect.metrics import ReplayUse


class Report(NamedTuple):
    """What one rank says: seconds since the last log, how old its rows were, how its workers are."""

    env_s: float
    policy_s: float
    transfer_s: float
    collect_s: float
    weight_sync_s: float
    busy_s: float
    stale_total: float
    stale_rows: float
    stale_highest: float
    stale_dropped: float
    workers_alive: float
    restarts: float
    queue_fill: float
    replay_size: float
    replay_age_total: float
    replay_rows: float
    replay_updates: float

    @property
    def replay(self) -> ReplayUse:
        """What was done with the replay buffer."""
        return ReplayUse(self.replay_size, self.replay_age_total, self.replay_rows, self.replay_updates)


SECONDS = ("env_s", "policy_s", "transfer_s", "collect_s", "weight_sync_s", "busy_s")
"""The fields of a `Report` that are taken from the data module's clock."""
COUNTS = ("stale_dropped", "workers_alive", "restarts", "queue_fill")
"""Those that are taken from its counters."""
_SUMS = (  # over ranks; of others the largest is taken
    "stale_total",
    "stale_rows",
    "stale_dropped",
    "workers_alive",
    "restarts",
    "replay_size",
    "replay_age_total",
    "replay_rows",
    "replay_updates",
)
_MEANS = ("busy_s", "queue_fill")


def joined(ranks: Sequence[Report]) -> Report:
    """Of all ranks together: the longest times, all rows, all workers."""
    if len(ranks) == 1:
        return ranks[0]
    columns = {name: [getattr(rank, name) for rank in ranks] for name in Report._fields}
    sums = {name: sum(columns[name]) for name in _SUMS}
    means = {name: sum(columns[name]) / len(ranks) for name in _MEANS}
    return Report(**{**{name: max(column) for name, column in columns.items()}, **sums, **means})
