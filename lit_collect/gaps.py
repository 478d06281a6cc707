"""`Gaps`: what follows a dropped batch within a trajectory gets an id of its own, so that no trajectory has a hole."""

from torch import Tensor

_FAR = 1 << 32  # more trajectories than an env copy will ever have


class Gaps:
    """Remembers which trajectories lost rows.

    The rows behind the h-th hole of the k-th trajectory of env copy g have the id ``(k + h * 2**32) * G + g``.

    Args:
        total_copies: G, env copies over all workers and ranks.

    Example:
        >>> import torch
        >>> gaps = Gaps(total_copies=2)
        >>> gaps.lose(0, torch.tensor([[0, 0], [1, 3]]), done=torch.tensor([[False, False], [True, True]]))
        >>> ids = torch.tensor([[0, 2], [5, 5]])
        >>> gaps.mend(0, ids)
        >>> ids.tolist() == [[2 * 2**32, 2], [5, 5]]
        True
    """

    def __init__(self, total_copies: int) -> None:
        self._step = _FAR * total_copies
        self._open: dict[tuple[int, int], tuple[int, int]] = {}  # of a worker's row: its running id, what is added

    def lose(self, worker: int, ids: Tensor, done: Tensor) -> None:
        """A batch of a worker is dropped.

        Args:
            worker: its index.
            ids: [n, T] int64, as the worker gave them.
            done: [n, T] bool, rows that end a trajectory.
        """
        for row, (last, ended) in enumerate(zip(ids[:, -1].tolist(), done[:, -1].tolist(), strict=True)):
            before, added = self._open.pop((worker, row), (-1, 0))
            if last >= 0 and not ended:
                self._open[worker, row] = last, self._step + (added if before == last else 0)

    def mend(self, worker: int, ids: Tensor) -> None:
        """Give the rows behind a hole their own ids, in place.

        Args:
            worker: who made the batch.
            ids: [n, T] int64, as the worker gave them; owned by the caller.
        """
        for (index, row), (running, added) in list(self._open.items()):
            if index == worker:
                if int(ids[row, -1]) != running:  # it has ended
                    del self._open[index, row]
                ids[row].masked_fill_(ids[row] == running, running + added)

    def forget(self) -> None:
        """All trajectories begin anew."""
        self._open.clear()
