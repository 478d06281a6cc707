"""Collected batches as whole episodes."""

import torch
from tensordict import TensorDictBase

from lit_collect.frames import MASK, NEXT_DONE, NEXT_TRUNCATED, TRAJ_IDS, flatten_rows, valid_rows
from lit_collect.successors import restore_successors


def as_rows(batch: TensorDictBase) -> TensorDictBase:
    """All transitions of a collected batch.

    Args:
        batch: [N, T] or [T].

    Returns:
        [M], env copy by env copy in the order of time, with all successors and without a mask.
    """
    return flatten_rows(restore_successors(batch)).exclude(MASK)


class EpisodeJoiner:
    """Joins what the batches hold of each episode; unlike trajectories in batches, unfinished ones can be had too.

    Example:
        >>> from lit_collect import Collector
        >>> joiner = EpisodeJoiner()
        >>> with Collector("CartPole-v1", num_envs=2, frames_per_batch=200, seed=0) as collector:
        ...     episodes = joiner.add(collector.collect())
        >>> all(bool(episode["next", "done"][-1]) for episode in episodes), len(joiner.unfinished())
        (True, 2)
    """

    def __init__(self) -> None:
        self._open: dict[int, list[TensorDictBase]] = {}

    def add(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """Take up a batch.

        Args:
            batch: [N, T] or [T], kept until its episodes have ended.

        Returns:
            The episodes that ended in it, [T] each, in the order in which they did.
        """
        rows, mask = as_rows(batch), valid_rows(batch)
        steps = torch.arange(batch.shape[-1]).expand(batch.shape)
        steps = steps.reshape(-1) if mask is None else steps[mask]
        ids, done = rows[TRAJ_IDS], rows[NEXT_DONE].squeeze(-1)
        last = done.clone()
        last[:-1] |= ids[1:] != ids[:-1]
        last[-1:] = True
        ends = last.nonzero().squeeze(-1)
        lengths = ends.diff(prepend=ends.new_tensor([-1])).tolist()
        complete: list[tuple[int, int, TensorDictBase]] = []
        for end, piece in zip(ends.tolist(), rows.split(lengths), strict=True):
            number = int(ids[end])
            self._open.setdefault(number, []).append(piece)
            if done[end]:
                complete.append((int(steps[end]), end, _joined(self._open.pop(number))))
        return [episode for _, _, episode in sorted(complete, key=lambda ended: ended[:2])]

    def unfinished(self) -> list[TensorDictBase]:
        """The beginnings of episodes that have not ended, cut there: truncated. They are forgotten.

        Returns:
            [T] each, in the order of their ids.
        """
        begun, self._open = self._open, {}
        cut = [_joined(begun[number]) for number in sorted(begun)]
        for episode in cut:
            for key in (NEXT_TRUNCATED, NEXT_DONE):
                episode[key][-1] = True
        return cut


def _joined(pieces: list[TensorDictBase]) -> TensorDictBase:
    joined: TensorDictBase = torch.cat(pieces)  # type: ignore[arg-type, assignment]  # tensordict joins them
    return joined
