"""`TrajectoryAssembler`: whole trajectories out of batches that cut them wherever they were full.

Rows are not copied until a trajectory is taken (see `lit_collect.fragments`).

Legend: see `lit_collect.frames`. R = rows of a batch, M = rows of the trajectories that are taken.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from lit_collect.config import at_least
from lit_collect.errors import FrameContractError
from lit_collect.fragments import Fragment, Store, gather
from lit_collect.frames import (
    IS_INIT,
    LENGTHS,
    MASK,
    NEXT_DONE,
    NO_TRAJECTORY,
    POLICY_VERSION,
    TRAJ_IDS,
    Key,
    as_key,
    columns_of,
    put_at,
    valid_rows,
)
from lit_collect.pieces import Pieces, find_pieces, per_row
from lit_collect.successors import restore_successors

TrajectoryFormat = Literal["cat", "padded"]

_UNKNOWN = np.iinfo(np.int64).max  # version of rows that were acted at random


@dataclass(slots=True, eq=False)
class _Trajectory:
    """Rows of one id."""

    fragments: list[Fragment] = field(default_factory=list)
    length: int = 0
    version: int = _UNKNOWN  # the oldest weights that acted in it


class TrajectoryAssembler:
    """Collects the rows of trajectories over batches and gives them away once they are complete.

    A trajectory is complete with a row of ``("next", "done")``, which also a cut at the edge of a batch sets
    (``RolloutConfig(set_truncated=True)``). Trajectories come in the order in which they end: by batch, then by time
    step, then by env copy. Those whose first row does not begin an episode are no whole ones, as after a batch that was
    dropped in between: their rows are dropped. Batches are kept, not copied, so leave them alone once they are given.

    Args:
        trajs_per_batch: trajectories that `take` gives.
        traj_format: ``"cat"``: [M], one after the other. ``"padded"``: one row of time per trajectory [B, T], shorter
            ones padded with zeros and the id -1.
        pieces: whether trajectories may begin inside of an episode, as they do after a cut by ``set_truncated`` (which
            leaves no trajectory in two batches, so that none can have a hole).
        total_copies: env copies over all workers and ranks, the G in ids ``k * G + g``. If it is given, a trajectory
            is dropped when a later one of the same copy begins, because it will never end; else it waits for
            `drop_open`.

    Raises:
        ValueError: if there is no such format, or a number is below 1.

    Example:
        >>> from lit_collect import Collector
        >>> from lit_collect.testing import CountingEnv
        >>> assembler = TrajectoryAssembler(3, "padded")
        >>> with Collector(CountingEnv, num_envs=2, frames_per_batch=8, seed=0) as collector:  # episodes of 3 frames
        ...     for batch in (collector.collect(), collector.collect()):
        ...         dropped = assembler.add(batch)
        >>> assembler.num_complete, assembler.frames_complete, assembler.frames_open
        (4, 12, 4)
        >>> batch = assembler.take()
        >>> batch.shape, batch["collector", "traj_ids"][:, 0].tolist()
        (torch.Size([3, 3]), [0, 1, 2])
        >>> assembler.take() is None, assembler.rest().shape, assembler.drop_open()
        (True, torch.Size([1, 3]), 4)
    """

    def __init__(
        self,
        trajs_per_batch: int,
        traj_format: TrajectoryFormat = "cat",
        *,
        pieces: bool = False,
        total_copies: int | None = None,
    ) -> None:
        at_least("trajs_per_batch", trajs_per_batch, 1)
        if traj_format not in ("cat", "padded"):
            raise ValueError(f"traj_format must be 'cat' or 'padded', got {traj_format!r}")
        if total_copies is not None:
            at_least("total_copies", total_copies, 1, or_none=True)
        self._count, self._is_padded, self._pieces = trajs_per_batch, traj_format == "padded", pieces
        self._total_copies = total_copies
        self._complete: deque[_Trajectory] = deque()
        self._open: dict[int, _Trajectory | None] = {}  # by id; None: not whole, so that its rows are dropped
        self._running: dict[int, int] = {}  # of each env copy: the id of its latest trajectory
        self._store = Store()
        self._kind: dict[Key, tuple[torch.dtype, torch.Size]] = {}  # of each column
        self._frames_complete = self._frames_open = 0

    @property
    def num_complete(self) -> int:
        """Trajectories that can be taken."""
        return len(self._complete)

    @property
    def frames_complete(self) -> int:
        """Rows of those."""
        return self._frames_complete

    @property
    def frames_open(self) -> int:
        """Rows of trajectories that go on."""
        return self._frames_open

    @property
    def frames_held(self) -> int:
        """Rows of both."""
        return self._frames_complete + self._frames_open

    def add(self, batch: TensorDictBase) -> int:
        """Take in the rows of a batch.

        Args:
            batch: [T], [N, T] or deeper as `lit_collect.frames` describes it; of each trajectory the rows in the order
                of time, others may lie in between. Masked rows and those of the id -1 are skipped. A compact batch is
                restored.

        Returns:
            Rows that were dropped: of trajectories that are not whole, also earlier rows.

        Raises:
            FrameContractError: if a key is missing that says where trajectories begin and end, or the keys, shapes or
                dtypes are not those of the batches before. Nothing was taken in then.
            TypeError: if the batch is no TensorDict.
        """
        if not isinstance(batch, TensorDictBase):
            raise TypeError(f"a batch must be a TensorDict, got {type(batch).__name__}")
        batch = restore_successors(batch)
        columns = self._checked(batch)
        ids, done = per_row(batch, TRAJ_IDS), per_row(batch, NEXT_DONE)
        mask = valid_rows(batch)
        valid = ids != NO_TRAJECTORY
        found = find_pieces(ids, done, valid if mask is None else valid & per_row(batch, MASK))
        if not len(found.rows):
            return 0
        self._kind = self._kind or {key: (column.dtype, column.shape[1:]) for key, column in columns.items()}
        firsts = found.rows[found.starts]
        lasts = found.rows[found.starts + found.lengths - 1]
        starts = firsts
        if (lasts - firsts != found.lengths - 1).any():  # rows of others lie in between
            rows = torch.from_numpy(found.rows)
            columns = {key: column.index_select(0, rows.to(column.device)) for key, column in columns.items()}
            starts = found.starts
        block = self._store.keep(columns, len(found.rows))
        fragments = [
            Fragment(block=block, start=start, length=length)
            for start, length in zip(starts.tolist(), found.lengths.tolist(), strict=True)
        ]
        begins = np.ones(len(firsts), bool) if self._pieces else per_row(batch, IS_INIT)[firsts]
        dropped, ended = 0, []
        for fragment, name, whole, version, ends in zip(
            fragments,
            *(column.tolist() for column in (ids[firsts], begins, _oldest(batch, found), done[lasts])),
            strict=True,
        ):
            if name not in self._open:
                dropped += self._begin(name, whole=whole)
            trajectory = self._open[name]
            dropped += self._append(trajectory, fragment, version)
            if ends:
                del self._open[name]
                ended.append(trajectory)
        line, step = np.divmod(lasts[done[lasts]], batch.shape[-1])
        for position in np.lexsort((line, step)).tolist():
            self._complete_one(ended[position])
        self._store.tidy(lambda: _fragments([*self._complete, *self._open.values()]))
        return dropped

    def take(self) -> TensorDict | None:
        """The oldest complete trajectories, exactly `trajs_per_batch` of them.

        Returns:
            [M] or [B, T], with ``("collector", "mask")`` and ``("collector", "lengths")`` (the length of each row's
            trajectory); None if there are fewer.
        """
        return self._take(self._count) if len(self._complete) >= self._count else None

    def rest(self) -> TensorDict | None:
        """The oldest complete trajectories, at most `trajs_per_batch` of them.

        Returns:
            See `take`; None if there are none.
        """
        return self._take(min(self._count, len(self._complete))) if self._complete else None

    def drop_open(self) -> int:
        """Drop what is not complete, because it never will be.

        Returns:
            Rows that were dropped.
        """
        dropped = self._frames_open
        for trajectory in self._open.values():
            if trajectory is not None:
                self._release(trajectory)
        self._open.clear()
        self._running.clear()
        self._frames_open = 0
        return dropped

    def drop_older_than(self, version: int) -> int:
        """Drop complete trajectories in which weights acted that are older than allowed.

        Args:
            version: the oldest `policy_version` that is allowed; rows that were acted at random have none.

        Returns:
            Rows that were dropped.

        Raises:
            FrameContractError: if batches do not say which weights acted.
        """
        if self._kind and POLICY_VERSION not in self._kind:
            raise FrameContractError(f"a batch lacks the key {POLICY_VERSION} : expected the version of each row")
        before = self._frames_complete
        kept: deque[_Trajectory] = deque()
        for trajectory in self._complete:
            if trajectory.version >= version:
                kept.append(trajectory)
            else:
                self._release(trajectory)
                self._frames_complete -= trajectory.length
        self._complete = kept
        return before - self._frames_complete

    def forget(self) -> int:
        """Drop everything; the next batch may have other keys.

        Returns:
            Rows that were dropped.
        """
        dropped = self.frames_held
        self._complete.clear()
        self._open.clear()
        self._running.clear()
        self._kind = {}
        self._store = Store()
        self._frames_complete = self._frames_open = 0
        return dropped

    def _checked(self, batch: TensorDictBase) -> dict[Key, Tensor]:
        """The columns of a batch by key, [R, ...]."""
        if not batch.batch_dims:
            raise FrameContractError("a batch must have at least the dimension of time, got the batch size []")
        dims = batch.batch_dims
        given = columns_of(batch)
        given.pop(MASK, None)
        needed = (TRAJ_IDS, NEXT_DONE) if self._pieces else (TRAJ_IDS, NEXT_DONE, IS_INIT)
        missing = [key for key in needed if key not in given]
        if missing:
            raise FrameContractError(
                f"whole trajectories cannot be found in a batch : expected the keys {', '.join(map(str, needed))}, got "
                f"none at {', '.join(map(str, missing))}; give batches as a Collector makes them"
            )
        kind = {key: (column.dtype, column.shape[dims:]) for key, column in given.items()}
        if not self._kind:
            self._check_tensors(batch, given)
        elif kind != self._kind:
            raise FrameContractError(
                f"batches of one assembler must have the same columns : {_difference(self._kind, kind)}; give these to "
                f"another one, or call forget() first"
            )
        return {key: column.reshape(-1, *column.shape[dims:]) for key, column in given.items()}

    @staticmethod
    def _check_tensors(batch: TensorDictBase, given: Mapping[Key, Tensor]) -> None:
        everything = map(as_key, batch.keys(True, True, is_leaf=is_leaf_nontensor))
        others = [key for key in everything if key not in given and key != MASK]
        if others:
            raise FrameContractError(
                f"trajectories are assembled of tensors only : expected no {', '.join(map(str, others))}; exclude it"
            )

    def _begin(self, name: int, *, whole: bool) -> int:
        """A new id. Returns rows that are dropped because an earlier one of the same env copy never ended."""
        earlier = None
        if self._total_copies is not None:
            copy = name % self._total_copies
            earlier = self._open.pop(self._running.get(copy, NO_TRAJECTORY), None)
            self._running[copy] = name
        self._open[name] = _Trajectory() if whole else None
        if earlier is None:
            return 0
        self._release(earlier)
        self._frames_open -= earlier.length
        return earlier.length

    def _append(self, trajectory: _Trajectory | None, fragment: Fragment, version: int) -> int:
        """More rows of a trajectory. Returns how many are dropped."""
        if trajectory is None:
            self._store.release(fragment.block, fragment.length)
            return fragment.length
        trajectory.fragments.append(fragment)
        trajectory.length += fragment.length
        trajectory.version = min(trajectory.version, version)
        self._frames_open += fragment.length
        return 0

    def _complete_one(self, trajectory: _Trajectory | None) -> None:
        if trajectory is not None:
            self._complete.append(trajectory)
            self._frames_open -= trajectory.length
            self._frames_complete += trajectory.length

    def _take(self, count: int) -> TensorDict:
        taken = [self._complete.popleft() for _ in range(count)]
        self._frames_complete -= sum(trajectory.length for trajectory in taken)
        with torch.inference_mode(False):
            batch = _padded(taken) if self._is_padded else _joined(taken)
        for trajectory in taken:
            self._release(trajectory)
        return batch

    def _release(self, trajectory: _Trajectory) -> None:
        for fragment in trajectory.fragments:
            self._store.release(fragment.block, fragment.length)


def _oldest(batch: TensorDictBase, found: Pieces) -> np.ndarray:
    """[B] int64: the oldest weights that acted in each trajectory."""
    if batch.get(POLICY_VERSION, None) is None:
        return np.full(len(found.starts), _UNKNOWN)
    versions = per_row(batch, POLICY_VERSION)[found.rows]
    return np.minimum.reduceat(np.where(versions < 0, _UNKNOWN, versions), found.starts)


def _joined(taken: Sequence[_Trajectory]) -> TensorDict:
    """[M], one after the other."""
    lengths = torch.tensor([trajectory.length for trajectory in taken])
    repeated = lengths.repeat_interleave(lengths)
    columns = gather(_fragments(taken), len(repeated))
    return _labelled(columns, repeated.shape, torch.ones_like(repeated, dtype=torch.bool), repeated)


def _padded(taken: Sequence[_Trajectory]) -> TensorDict:
    """[B, T], one below the other."""
    lengths = torch.tensor([trajectory.length for trajectory in taken])
    longest = int(lengths.max())
    repeated = lengths[:, None].repeat(1, longest)
    mask = torch.arange(longest) < repeated
    targets: list[int] = []
    for line, trajectory in enumerate(taken):
        targets += accumulate((part.length for part in trajectory.fragments[:-1]), initial=line * longest)
    columns = gather(_fragments(taken), mask.numel(), targets)
    ids = columns[TRAJ_IDS]
    ids.view(-1).masked_fill_(~mask.view(-1).to(ids.device), NO_TRAJECTORY)
    return _labelled(columns, mask.shape, mask, repeated)


def _fragments(trajectories: Iterable[_Trajectory | None]) -> list[Fragment]:
    return [part for trajectory in trajectories if trajectory is not None for part in trajectory.fragments]


def _labelled(columns: dict[Key, Tensor], shape: torch.Size, mask: Tensor, lengths: Tensor) -> TensorDict:
    """A batch of that shape; mask and lengths have it already."""
    device = columns[TRAJ_IDS].device
    root: dict[str, Any] = {}
    for key, column in columns.items():
        put_at(root, key, column if len(shape) == 1 else column.view(*shape, *column.shape[1:]))
    put_at(root, MASK, mask.to(device))
    put_at(root, LENGTHS, lengths.to(device))
    names = [None, "time"][-len(shape) :]
    return TensorDict(root, batch_size=shape, names=names)  # type: ignore[arg-type]


def _difference(expected: Mapping[Key, Any], got: Mapping[Key, Any]) -> str:
    """In words, what is another."""
    told = [f"{key} is missing" for key in expected if key not in got]
    told += [f"{key} is new" for key in got if key not in expected]
    told += [
        f"{key} must have {_words(*kind)}, got {_words(*got[key])}"
        for key, kind in expected.items()
        if key in got and got[key] != kind
    ]
    return ", ".join(told)


def _words(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} of {list(shape)}"
