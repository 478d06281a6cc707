"""What a `CollectionMonitor` tells the user in words, once each in a fit."""

from collections import deque
from collections.abc import Mapping

from lightning.pytorch.utilities.rank_zero import rank_zero_info

_WARM_UP = 5  # batches, in which caches fill and workers start
_WINDOW = 10  # batches
_HIGH = 0.7
_LONG = 10_000  # frames

_IDLE = {
    "time/trainer_idle": (
        "the trainer waited for frames {share:.0%} of the time in the last {batches} batches (time/trainer_idle): to "
        "collect faster, raise num_envs, or use ProcessBackend with more num_collectors on a machine with free cores"
    ),
    "time/collector_idle": (
        "the collectors were idle {share:.0%} of the time in the last {batches} batches (time/collector_idle), because "
        "learning takes it: larger updates.minibatch_size or fewer updates.epochs make it shorter, fewer "
        "num_collectors leave it more cores"
    ),
}
_IDLE_WITH_REPLAY = {
    **_IDLE,
    "time/collector_idle": (
        "the collectors were idle {share:.0%} of the time in the last {batches} batches (time/collector_idle), because "
        "learning takes it: fewer updates.updates_per_batch or a smaller replay.batch_size make it shorter"
    ),
}
_AHEAD = "; ProcessBackend(sync=False) collects while the trainer learns"
_AHEAD_WITH_REPLAY = "; replay.background=True collects while the trainer learns, one batch ahead"


class Hints:
    """Looks at what is logged, and says what to change where something stays odd; on the first rank."""

    def __init__(self) -> None:
        self._batches = 0
        self._frames: float | None = None  # when the first batch of the fit was logged
        self._idle = {key: deque[float](maxlen=_WINDOW) for key in _IDLE}
        self._awaits_episode = True

    def see(self, values: Mapping[str, float], *, ahead: bool = False) -> None:
        """Take up the values of one batch.

        Args:
            values: under the names of ``"lit"``.
            ahead: whether frames are collected while the trainer learns.
        """
        self._batches += 1
        if self._awaits_episode:
            self._watch_for_episodes(values)
        if self._idle and self._batches > _WARM_UP:
            self._watch_idle(values, ahead)

    def _watch_for_episodes(self, values: Mapping[str, float]) -> None:
        frames = values["collect/frames_total"]
        if self._frames is None:
            self._frames = frames
        if "episode/count_total" in values:
            self._awaits_episode = False
        elif self._batches >= _WINDOW and frames - self._frames >= _LONG:
            self._awaits_episode = False
            rank_zero_info(
                f"no episode has finished in {frames:,.0f} frames: until one has, episode/return_mean is the mean "
                f"return so far of the running ones; check that the env terminates or truncates its episodes (by "
                f"gymnasium's max_episode_steps, for instance), or set rollout.max_frames_per_traj"
            )

    def _watch_idle(self, values: Mapping[str, float], ahead: bool) -> None:
        for key, shares in list(self._idle.items()):
            if key in values:
                shares.append(values[key])
            if len(shares) == _WINDOW and min(shares) > _HIGH:
                del self._idle[key]
                texts, remedy = _IDLE, _AHEAD
                if "replay/size" in values:
                    texts, remedy = _IDLE_WITH_REPLAY, _AHEAD_WITH_REPLAY
                text = texts[key].format(share=sum(shares) / _WINDOW, batches=_WINDOW)
                rank_zero_info(text if ahead else text + remedy)
