"""`TrajectoryAssembler`: whole trajectories out of batches that cut them wherever they were full.

Rows are copied once, when their trajectory ends; those of open ones lie in the batches until then.

Legend: see `lit_collect.frames`. R = rows of a batch, P = pieces of trajectories in it, M = rows of the trajectories
that are taken.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from lit_collect.config import at_least
from lit_collect.errors import FrameContractError
from lit_collect.finished import Finished
from lit_collect.fragments import Columns, Fragment, Moves, Store, as_arrays, filled, gather, moves_of, picked
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
from lit_collect.pieces import find_pieces, per_row
from lit_collect.successors import restore_successors

TrajectoryFormat = Literal["cat", "padded"]

_UNKNOWN = np.iinfo(np.int64).max  # version of rows that were acted at random


@dataclass(slots=True, eq=False)
class _Trajectory:
    """Rows of one id that came with earlier batches."""

    fragments: list[Fragment] = field(default_factory=list)
    length: int = 0
    version: int = _UNKNOWN  # the oldest weights that acted in it


class _Arrived(NamedTuple):
    """The pieces of trajectories in a batch, in the order of their first rows."""

    rows: np.ndarray  # [M] int64, positions in the flattened batch, piece by piece
    starts: np.ndarray  # [P] int64, the first row of each
    lasts: np.ndarray  # [P] int64, the last row of each
    lengths: np.ndarray  # [P] int64
    ids: np.ndarray  # [P] int64
    begins: np.ndarray  # [P] bool, it is the beginning of a trajectory
    ends: np.ndarray  # [P] bool, it is the end of one
    versions: np.ndarray  # [P] int64, the oldest weights that acted


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
        self._finished = Finished()
        self._open: dict[int, _Trajectory | None] = {}  # by id; None: not whole, so that its rows are dropped
        self._running: dict[int, int] = {}  # of each env copy: the id of its latest trajectory
        self._store = Store()
        self._kind: dict[Key, tuple[torch.dtype, torch.Size]] = {}  # of each column

    @property
    def num_complete(self) -> int:
        """Trajectories that can be taken."""
        return self._finished.count

    @property
    def frames_complete(self) -> int:
        """Rows of those."""
        return self._finished.rows

    @property
    def frames_open(self) -> int:
        """Rows of trajectories that go on."""
        return self._store.rows_needed

    @property
    def frames_held(self) -> int:
        """Rows of both."""
        return self.frames_complete + self.frames_open

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
        arrived = self._arrived(batch)
        if not len(arrived.rows):
            return 0
        self._kind = self._kind or _kinds(columns, batch.batch_dims)
        arrays = as_arrays(columns, batch.batch_dims)
        if (arrived.lasts - arrived.starts != arrived.lengths - 1).any():  # rows of others lie in between
            arrays = {key: picked(column, arrived.rows) for key, column in arrays.items()}
            arrived = arrived._replace(starts=np.cumsum(arrived.lengths) - arrived.lengths)
        before = self.frames_held
        ended, running = self._sorted(arrived)
        if ended:
            line, step = np.divmod(arrived.lasts[list(ended)], batch.shape[-1])
            self._finish(arrays, arrived, ended, np.lexsort((line, step)).tolist())
        if running:
            self._append(arrays, arrived, running)
        self._store.tidy(lambda: _fragments(self._open.values()))
        return before + len(arrived.rows) - self.frames_held

    def take(self) -> TensorDict | None:
        """The oldest complete trajectories, exactly `trajs_per_batch` of them.

        Returns:
            [M] or [B, T], with ``("collector", "mask")`` and ``("collector", "lengths")`` (the length of each row's
            trajectory); None if there are fewer. No two batches share a row, but they may be parts of the same memory.
        """
        return self._take(self._count) if self.num_complete >= self._count else None

    def rest(self) -> TensorDict | None:
        """The oldest complete trajectories, at most `trajs_per_batch` of them.

        Returns:
            See `take`; None if there are none.
        """
        return self._take(min(self._count, self.num_complete)) if self.num_complete else None

    def waiting(self) -> TensorDict | None:
        """Copies of the rows of complete trajectories, which stay; another assembler may `add` them.

        Returns:
            [M], None if there are none.
        """
        if not self.num_complete:
            return None
        with torch.inference_mode(False):
            return _as_batch(self._finished.waiting(), (self.frames_complete,), names=["time"]).clone()

    def drop_open(self) -> int:
        """Drop what is not complete, because it never will be.

        Returns:
            Rows that were dropped.
        """
        dropped = self.frames_open
        self._open.clear()
        self._running.clear()
        self._store = Store()
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
        return self._finished.drop_older_than(version)

    def forget(self) -> int:
        """Drop everything; the next batch may have other keys.

        Returns:
            Rows that were dropped.
        """
        dropped = self.frames_complete + self.drop_open()
        self._finished.clear()
        self._kind = {}
        return dropped

    def _checked(self, batch: TensorDictBase) -> dict[Key, Tensor]:
        """The columns of a batch by key."""
        if not batch.batch_dims:
            raise FrameContractError("a batch must have at least the dimension of time, got the batch size []")
        given = columns_of(batch)
        given.pop(MASK, None)
        needed = (TRAJ_IDS, NEXT_DONE) if self._pieces else (TRAJ_IDS, NEXT_DONE, IS_INIT)
        missing = [key for key in needed if key not in given]
        if missing:
            raise FrameContractError(
                f"whole trajectories cannot be found in a batch : expected the keys {', '.join(map(str, needed))}, got "
                f"none at {', '.join(map(str, missing))}; give batches as a Collector makes them"
            )
        kind = _kinds(given, batch.batch_dims)
        if not self._kind:
            self._check_tensors(batch, given)
        elif kind != self._kind:
            raise FrameContractError(
                f"batches of one assembler must have the same columns : {_difference(self._kind, kind)}; give these to "
                f"another one, or call forget() first"
            )
        return given

    @staticmethod
    def _check_tensors(batch: TensorDictBase, given: Mapping[Key, Tensor]) -> None:
        everything = map(as_key, batch.keys(True, True, is_leaf=is_leaf_nontensor))
        others = [key for key in everything if key not in given and key != MASK]
        if others:
            raise FrameContractError(
                f"trajectories are assembled of tensors only : expected no {', '.join(map(str, others))}; exclude it"
            )

    def _arrived(self, batch: TensorDictBase) -> _Arrived:
        """What is in a batch."""
        ids, done = per_row(batch, TRAJ_IDS), per_row(batch, NEXT_DONE)
        valid = ids != NO_TRAJECTORY
        if valid_rows(batch) is not None:
            valid &= per_row(batch, MASK)
        found = find_pieces(ids, done, valid)
        starts, lasts = found.rows[found.starts], found.rows[found.starts + found.lengths - 1]
        begins = np.ones(len(starts), bool) if self._pieces else per_row(batch, IS_INIT)[starts]
        if batch.get(POLICY_VERSION, None) is None or not len(starts):
            versions = np.full(len(starts), _UNKNOWN)
        else:
            acted = per_row(batch, POLICY_VERSION)[found.rows]
            versions = np.minimum.reduceat(np.where(acted < 0, _UNKNOWN, acted), found.starts)
        return _Arrived(
            rows=found.rows,
            starts=starts,
            lasts=lasts,
            lengths=found.lengths,
            ids=ids[starts],
            begins=begins,
            ends=done[lasts],
            versions=versions,
        )

    def _sorted(self, arrived: _Arrived) -> tuple[dict[int, _Trajectory], dict[int, _Trajectory]]:
        """The trajectories that end in a batch and those that go on, by their pieces; others are not whole."""
        ended: dict[int, _Trajectory] = {}
        running: dict[int, _Trajectory] = {}
        each = zip(arrived.ids.tolist(), arrived.begins.tolist(), arrived.ends.tolist(), strict=True)
        for piece, (name, begins, ends) in enumerate(each):
            if name not in self._open:
                self._begin(name, whole=begins)
            trajectory = self._open.pop(name) if ends else self._open[name]
            if trajectory is not None:
                (ended if ends else running)[piece] = trajectory
        still = {id(trajectory) for trajectory in self._open.values()}  # others had a piece and were then replaced
        return ended, {piece: trajectory for piece, trajectory in running.items() if id(trajectory) in still}

    def _begin(self, name: int, *, whole: bool) -> None:
        """A new id: an earlier one of the same env copy will never end."""
        if self._total_copies is not None:
            copy = name % self._total_copies
            earlier = self._open.pop(self._running.get(copy, NO_TRAJECTORY), None)
            self._running[copy] = name
            if earlier is not None:
                self._release(earlier)
        self._open[name] = _Trajectory() if whole else None

    def _finish(
        self, arrays: Columns, arrived: _Arrived, ended: Mapping[int, _Trajectory], order: Sequence[int]
    ) -> None:
        """Put whole trajectories together."""
        pieces, trajectories = np.array(list(ended))[order], [list(ended.values())[position] for position in order]
        before = np.array([trajectory.length for trajectory in trajectories])
        lengths = before + arrived.lengths[pieces]
        firsts = np.cumsum(lengths) - lengths
        moves = [Moves(arrays, arrived.starts[pieces], arrived.lengths[pieces], firsts + before)]
        earlier = [
            (first, trajectory)
            for first, trajectory in zip(firsts.tolist(), trajectories, strict=True)
            if trajectory.fragments
        ]
        if earlier:
            targets: list[int] = []
            for first, trajectory in earlier:
                targets += accumulate((part.length for part in trajectory.fragments[:-1]), initial=first)
            moves += moves_of(_fragments(trajectory for _, trajectory in earlier), targets)
        versions = np.minimum(arrived.versions[pieces], [trajectory.version for trajectory in trajectories])
        self._finished.put(gather(moves, int(lengths.sum())), lengths, versions)
        for _, trajectory in earlier:
            self._release(trajectory)

    def _append(self, arrays: Columns, arrived: _Arrived, running: Mapping[int, _Trajectory]) -> None:
        """Keep the rows of trajectories that go on."""
        block = self._store.keep(arrays, int(arrived.lengths[list(running)].sum()))
        for piece, trajectory in running.items():
            length = int(arrived.lengths[piece])
            trajectory.fragments.append(Fragment(block=block, start=int(arrived.starts[piece]), length=length))
            trajectory.length += length
            trajectory.version = min(trajectory.version, int(arrived.versions[piece]))

    def _take(self, count: int) -> TensorDict:
        columns, lengths = self._finished.take(count)
        with torch.inference_mode(False):
            return _padded(columns, lengths) if self._is_padded else _joined(columns, lengths)

    def _release(self, trajectory: _Trajectory) -> None:
        for fragment in trajectory.fragments:
            self._store.release(fragment.block, fragment.length)


def _joined(columns: Columns, lengths: np.ndarray) -> TensorDict:
    """[M], one after the other."""
    repeated = np.repeat(lengths, lengths)
    return _labelled(columns, np.ones(len(repeated), bool), repeated, names=["time"])


def _padded(columns: Columns, lengths: np.ndarray) -> TensorDict:
    """[B, T], one below the other."""
    longest = int(lengths.max())
    repeated = np.repeat(lengths[:, None], longest, 1)
    mask = np.arange(longest) < repeated
    places = np.flatnonzero(mask)
    spread = {}
    for key, column in columns.items():
        shape = column.shape[1:]
        rows = column.reshape(-1) if shape == (1,) else column  # NumPy is faster so
        room = filled(rows, mask.size, NO_TRAJECTORY if key == TRAJ_IDS else 0)
        room[places] = rows
        spread[key] = room.reshape(*mask.shape, *shape)
    return _labelled(spread, mask, repeated, names=[None, "time"])


def _labelled(columns: Columns, mask: np.ndarray, lengths: np.ndarray, names: list[str | None]) -> TensorDict:
    """A batch with mask and lengths, which have its shape already."""
    device = getattr(columns[TRAJ_IDS], "device", "cpu")
    told = {MASK: torch.from_numpy(mask).to(device), LENGTHS: torch.from_numpy(lengths).to(device)}
    return _as_batch({**columns, **told}, mask.shape, names)


def _as_batch(columns: Columns, shape: tuple[int, ...], names: list[str | None]) -> TensorDict:
    root: dict[str, Any] = {}
    for key, column in columns.items():
        put_at(root, key, torch.from_numpy(column) if isinstance(column, np.ndarray) else column)
    return TensorDict(root, batch_size=shape, names=names)  # type: ignore[arg-type]


def _fragments(trajectories: Iterable[_Trajectory | None]) -> list[Fragment]:
    return [part for trajectory in trajectories if trajectory is not None for part in trajectory.fragments]


def _kinds(columns: Mapping[Key, Tensor], dims: int) -> dict[Key, tuple[torch.dtype, torch.Size]]:
    """What a row is in each column."""
    return {key: (column.dtype, column.shape[dims:]) for key, column in columns.items()}


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
