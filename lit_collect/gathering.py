"""How the batches of the workers become those of the collector: all workers together, or first come first served."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lit_collect.backends.base import Deadline
from lit_collect.errors import FrameContractError, StaleDataError
from lit_collect.frames import (
    MASK,
    NEXT_DONE,
    NO_TRAJECTORY,
    SUCCESSORS,
    TRAJ_IDS,
    Key,
    columns_of,
    count_frames,
    limit_frames,
    put_at,
)
from lit_collect.gaps import Gaps
from lit_collect.members import Member
from lit_collect.messages import Collect, Collected, Failed
from lit_collect.successors import SuccessorTable, table_of
from lit_collect.supervisor import WorkerGroup

Columns = Mapping[Key, Any]
"""The tensors of a batch [n, T, ...] by key, and perhaps a `SuccessorTable`."""


class Gatherer(ABC):
    """Makes the batches of one collector."""

    stale_dropped: int = 0
    """Frames that were too old to be handed out."""
    transfer_s: float = 0.0
    """Seconds spent on handing batches over."""

    @property
    def frames_pending(self) -> int:
        """Frames that are here and were not handed out."""
        return 0

    @abstractmethod
    def collect(self, frames: int, left: int | None, timeout_s: float | None = None) -> TensorDict | None:
        """One batch.

        Args:
            frames: of a whole batch.
            left: frames that may still be handed out (None: any number).
            timeout_s: return None after that long; None waits as long as the backend allows.

        Returns:
            [N, T] as `lit_collect.frames` describes it, owned by the caller.

        Raises:
            StaleDataError: if a worker acted with older weights than it was offered.
            LitCollectError: see `WorkerGroup.receive`.
        """

    def statistics(self) -> dict[str, Any]:
        """Numbers: frames that were too old, seconds of handing over, the part of places for batches that is taken."""
        return {"stale_dropped": self.stale_dropped, "transfer_s": self.transfer_s, "queue_fill": 0.0}

    @abstractmethod
    def discard(self) -> None:
        """Drop what was collected and not handed out."""

    def forget(self) -> None:  # noqa: B027 (not all of them keep anything)
        """Drop what is here, which takes up memory, and ask nobody: the workers are closed."""


def make_gatherer(group: WorkerGroup, *, sync: bool, earlier: Gatherer | None = None) -> Gatherer:
    """Who makes the batches of a group.

    Args:
        group: the workers.
        sync: whether they make each batch together.
        earlier: who made them before; what that one has not handed out is dropped.
    """
    kind = Together if sync else FirstCome
    if isinstance(earlier, kind):
        return earlier
    made = kind(group)
    if earlier is not None:
        earlier.discard()
        made.stale_dropped, made.transfer_s = earlier.stale_dropped, earlier.transfer_s
    return made


class Together(Gatherer):
    """Every batch is made by all workers, [N, T] in the order of the env copies.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        fraction = group.backend.preempt_fraction
        # a little less, so that 0.1 of 10 workers is 1 of them and not 2
        self._enough = None if fraction is None else max(1, ceil(fraction * len(group.members) - 1e-9))
        self._unfinished = False  # a batch was broken off

    def collect(self, frames: int, left: int | None, timeout_s: float | None = None) -> TensorDict | None:
        """See `Gatherer.collect`; always waits for the whole batch."""
        self.discard()
        self._unfinished = True
        steps = -(-min(frames, frames if left is None else left) // self._group.num_envs)
        offered = list(self._group.publisher.offered)  # another thread may publish meanwhile
        for member in self._group.members:
            member.channel.interrupt(False)
            self._group.send(member, Collect(steps, self._group.publisher.ticket(member.index)))
        parts: dict[int, Collected] = {}
        while len(parts) < len(self._group.members):
            received = self._group.receive()
            assert received is not None
            member, reply = received
            assert isinstance(reply, Collected)
            self._check_age(member, offered[member.index], reply.progress.version)
            parts[member.index] = reply
            if self._enough is not None and len(parts) == self._enough:
                self._hurry(parts)
        began = perf_counter()
        batch = join([parts[member.index].batch for member in self._group.members], masked=self._enough is not None)
        self._unfinished = False
        self.transfer_s += perf_counter() - began
        return batch if left is None else _within(batch, left)

    def discard(self) -> None:
        """Wait for the parts of a batch that was broken off; new episodes follow those that lack rows now."""
        self._group.drain()
        if self._unfinished:
            self._group.reset(None)
            self._unfinished = False

    def _check_age(self, member: Member, offered: int, version: int) -> None:
        allowed = self._group.max_staleness or 0
        if offered - version > allowed:
            raise StaleDataError(
                f"{self._group.describe(member)} acted with version {version} : expected at least "
                f"{offered - allowed}, which its weight sync scheme should have brought"
            )

    def _hurry(self, parts: Mapping[int, Collected]) -> None:
        for member in self._group.members:
            if member.index not in parts:
                member.channel.interrupt(True)


class FirstCome(Gatherer):
    """Every batch is made by one worker, [n, T] of its env copies; the others go on meanwhile.

    A worker is given leave for a batch only while there is room for it: in its memory, in the budget, and in the bound
    on staleness, as far as the number of publications for each batch can be foreseen.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._arrived: deque[tuple[Member, TensorDict | Columns, int, int]] = deque()  # batch, frames, version
        self._version_before = group.publisher.version
        self._versions_per_batch = 1.0  # publications between two batches, lately
        self._in_vain: Deadline | None = None  # since batches are too old, one after the other
        self._gaps = Gaps(group.num_envs * group.members[0].spec.place.world_size)
        for member in group.members:
            member.channel.interrupt(False)

    @property
    def frames_pending(self) -> int:
        """See `Gatherer.frames_pending`."""
        return sum(entry[2] for entry in self._arrived) + sum(_count(reply.batch) for reply in self._kept_batches())

    def statistics(self) -> dict[str, Any]:
        """See `Gatherer.statistics`."""
        slots = sum(member.channel.slots for member in self._group.members)
        return {**super().statistics(), "queue_fill": (len(self._arrived) + len(self._kept_batches())) / slots}

    def collect(self, frames: int, left: int | None, timeout_s: float | None = None) -> TensorDict | None:
        """See `Gatherer.collect`."""
        self._group.check_usable(self._group.members)
        self._take_kept()
        self._drop_stale()
        self._give_leave(frames, left, in_use=0)
        while not self._arrived:
            if not self._receive(timeout_s):
                return None
            self._drop_stale()
            self._give_leave(frames, left, in_use=0)
        member, part, _, _ = self._arrived.popleft()
        self._in_vain = None
        self._look_at_versions()
        began = perf_counter()
        batch = join([part], masked=False)
        self._gaps.mend(member.index, batch[TRAJ_IDS])
        self.transfer_s += perf_counter() - began
        batch = batch if left is None else _within(batch, left)
        if not self._group.backend.in_process:  # there a batch is made when it is asked for, by the newest weights
            self._give_leave(frames, None if left is None else left - count_frames(batch), in_use=1)
        return batch

    def discard(self) -> None:
        """Drop what is here and what is under way; new episodes follow those that lack rows now."""
        if self._group.drain() or self._arrived:
            self._arrived.clear()
            self._gaps.forget()
            self._group.reset(None)

    def forget(self) -> None:
        """See `Gatherer.forget`."""
        self._arrived = deque()  # another thread may be looking at the old one

    def _receive(self, timeout_s: float | None) -> bool:
        """Take in one batch, and whatever else has arrived."""
        received = self._group.receive(timeout_s)
        while received is not None:
            member, reply = received
            if isinstance(reply, Collected):  # else the answer to a question that was broken off
                self._keep(member, reply)
            received = self._group.receive(0.0)
        return bool(self._arrived)

    def _kept_batches(self) -> list[Collected]:
        return [reply for _, reply in self._group.kept if isinstance(reply, Collected)]

    def _take_kept(self) -> None:
        """Take in what came while something else was waited for: it takes up room like the rest."""
        while self._group.kept:
            member, reply = self._group.kept.popleft()
            if isinstance(reply, Failed):
                raise reply.as_exception(self._group.describe(member))
            self._keep(member, reply)

    def _keep(self, member: Member, reply: Collected) -> None:
        self._arrived.append((member, reply.batch, _count(reply.batch), reply.progress.version))

    def _look_at_versions(self) -> None:
        """How fast versions go by, from one batch handed out to the next; a burst is remembered for a while."""
        version = self._group.publisher.version
        self._versions_per_batch = max(version - self._version_before, 0.8 * self._versions_per_batch, 1.0)
        self._version_before = version

    def _drop_stale(self) -> None:
        allowed = self._group.max_staleness
        if allowed is None:
            return
        oldest = self._group.publisher.version - allowed
        stale = [entry for entry in self._arrived if entry[3] < oldest]
        if not stale:
            return
        for member, part, count, _ in stale:
            self.stale_dropped += count
            self._gaps.lose(member.index, part[TRAJ_IDS], done=part[NEXT_DONE].squeeze(-1))
        self._arrived = deque(entry for entry in self._arrived if entry[3] >= oldest)
        limit_s = self._group.backend.batch_timeout_s
        self._in_vain = self._in_vain or Deadline(limit_s)
        if not self._arrived and self._in_vain.left_s == 0.0:
            self._in_vain = None
            raise StaleDataError(
                f"no batch was fresh enough within {limit_s:g} s : expected max_staleness={allowed} to leave time for "
                f"one, got weights that were published more often; raise it, publish less often or collect less at once"
            )

    def _give_leave(self, frames: int, left: int | None, *, in_use: int) -> None:
        """Ask workers for batches, those with the least to do first.

        Args:
            frames: of a whole batch.
            left: frames that may still be handed out, those under way included.
            in_use: batches that were handed out and whose updates are still to come.
        """
        while self._is_fresh_enough(in_use):
            free = [member for member in self._group.members if self._taken(member) < member.channel.slots]
            wanted = frames if left is None else min(frames, left - self._reserved())
            if not free or wanted <= 0:
                return
            member = min(free, key=lambda each: (self._taken(each), each.done.frames_stepped))
            ticket = self._group.publisher.ticket(member.index)
            self._group.send(member, Collect(-(-wanted // member.copies), ticket))

    def _is_fresh_enough(self, in_use: int) -> bool:
        """Whether one more batch can be used within the bound, after all that were asked for before it."""
        allowed = self._group.max_staleness
        if allowed is None:
            return True
        ahead = in_use + sum(self._taken(member) for member in self._group.members)
        return ahead * self._versions_per_batch <= allowed

    def _taken(self, member: Member) -> int:
        """Slots of a worker that are in use."""
        return member.batches_under_way + sum(entry[0] is member for entry in self._arrived)

    def _reserved(self) -> int:
        """Frames that are here or under way."""
        asked = [
            request.steps * member.copies
            for member in self._group.members
            for request in member.waiting
            if isinstance(request, Collect)
        ]
        return self.frames_pending + sum(asked)


def join(parts: Sequence[TensorDict | Columns], *, masked: bool) -> TensorDict:
    """One batch of those of several workers.

    Args:
        parts: [n, T_w] each; columns are copied, a TensorDict is given away.
        masked: always give the batch a mask, which says where a part was shorter than the others.

    Returns:
        [N, T], T the longest of them; rows that a part lacks are zero and masked.

    Raises:
        FrameContractError: if workers have different keys.
    """
    first = parts[0]
    if len(parts) == 1 and isinstance(first, TensorDict):
        return first
    columns = [_columns(part) for part in parts]
    tables = [part.pop(SUCCESSORS) for part in columns if SUCCESSORS in part]
    lengths = [part[TRAJ_IDS].shape[1] for part in columns]
    for part in columns:
        if part.keys() != columns[0].keys():
            different = sorted(".".join(key) for key in part.keys() ^ columns[0].keys())
            raise FrameContractError(f"the workers give different keys : expected the same, got {different} of some")
    steps = max(lengths)
    root: dict[str, Any] = {}
    if min(lengths) == steps:
        for key in columns[0]:
            put_at(root, key, torch.cat([part[key] for part in columns]))
    else:
        for key in columns[0]:
            put_at(root, key, _padded([part[key] for part in columns], steps, NO_TRAJECTORY if key == TRAJ_IDS else 0))
    count = sum(part[TRAJ_IDS].shape[0] for part in columns)
    if masked and MASK not in columns[0]:
        present = [torch.ones(part[TRAJ_IDS].shape, dtype=torch.bool) for part in columns]
        put_at(root, MASK, _padded(present, steps, 0))
    if tables:
        put_at(root, SUCCESSORS, SuccessorTable.joined(tables).entry())
    return TensorDict(root, batch_size=(count, steps), names=[None, "time"])  # type: ignore[list-item]


def _columns(part: TensorDict | Columns) -> dict[Key, Any]:
    if not isinstance(part, TensorDict):
        return dict(part)
    table = table_of(part)
    return {**columns_of(part), **({} if table is None else {SUCCESSORS: table})}


def _padded(parts: Sequence[Tensor], steps: int, fill: int) -> Tensor:
    rows = sum(part.shape[0] for part in parts)
    whole = parts[0].new_full((rows, steps, *parts[0].shape[2:]), fill)
    first = 0
    for part in parts:
        whole[first : first + part.shape[0], : part.shape[1]] = part
        first += part.shape[0]
    return whole


def _count(part: TensorDict | Columns) -> int:
    if isinstance(part, TensorDict):
        return count_frames(part)
    return int(part[MASK].sum()) if MASK in part else part[TRAJ_IDS].numel()


def _within(batch: TensorDict, left: int) -> TensorDict:
    """At most so many transitions."""
    if count_frames(batch) > left:
        limit_frames(batch, left)
    return batch
