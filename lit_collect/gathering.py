"""How the batches of the workers become those of the collector: all workers together, or first come first served."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lit_collect.errors import FrameContractError, StaleDataError
from lit_collect.frames import MASK, NO_TRAJECTORY, TRAJ_IDS, Key, columns_of, count_frames, limit_frames
from lit_collect.messages import Collect, Collected
from lit_collect.supervisor import Member, WorkerGroup

Columns = Mapping[Key, Tensor]


class Gatherer(ABC):
    """Makes the batches of one collector."""

    frames_pending: int = 0
    """Frames that are here and were not handed out."""
    stale_dropped: int = 0
    """Frames that were too old to be handed out."""
    transfer_s: float = 0.0
    """Seconds spent on handing batches over."""

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


class Together(Gatherer):
    """Every batch is made by all workers, [N, T] in the order of the env copies.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        fraction = group.backend.preempt_fraction
        self._enough = None if fraction is None else max(1, round(fraction * len(group.members)))

    def collect(self, frames: int, left: int | None, timeout_s: float | None = None) -> TensorDict | None:
        """See `Gatherer.collect`; always waits for the whole batch."""
        self.discard()  # of a batch that was broken off
        steps = -(-min(frames, frames if left is None else left) // self._group.num_envs)
        for member in self._group.members:
            member.channel.interrupt(False)
            self._group.send(member, Collect(steps, self._group.publisher.ticket(member.index)))
        parts: dict[int, Collected] = {}
        while len(parts) < len(self._group.members):
            received = self._group.receive()
            assert received is not None
            member, reply = received
            assert isinstance(reply, Collected)
            self._check_age(member, reply.progress.version)
            parts[member.index] = reply
            if self._enough is not None and len(parts) == self._enough:
                self._hurry(parts)
        began = perf_counter()
        batch = join([parts[member.index].batch for member in self._group.members], masked=self._enough is not None)
        self.transfer_s += perf_counter() - began
        return batch if left is None else _within(batch, left)

    def discard(self) -> None:
        """Wait for the batches that nobody will look at."""
        self._group.drain()

    def _check_age(self, member: Member, version: int) -> None:
        offered, allowed = self._group.publisher.offered[member.index], self._group.max_staleness or 0
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
        for member in group.members:
            member.channel.interrupt(False)

    def statistics(self) -> dict[str, Any]:
        """See `Gatherer.statistics`."""
        slots = sum(member.channel.slots for member in self._group.members)
        return {**super().statistics(), "queue_fill": len(self._arrived) / slots}

    def collect(self, frames: int, left: int | None, timeout_s: float | None = None) -> TensorDict | None:
        """See `Gatherer.collect`."""
        self._look_at_versions()
        self._drop_stale()
        self._give_leave(frames, left, in_use=0)
        while not self._arrived:
            if not self._receive(timeout_s):
                return None
            self._drop_stale()
            self._give_leave(frames, left, in_use=0)
        _, part, count, _ = self._arrived.popleft()
        self.frames_pending -= count
        began = perf_counter()
        batch = join([part], masked=False)
        self.transfer_s += perf_counter() - began
        batch = batch if left is None else _within(batch, left)
        self._give_leave(frames, None if left is None else left - count_frames(batch), in_use=1)
        return batch

    def discard(self) -> None:
        """Drop what is here and what is under way."""
        self._group.drain()
        self._arrived.clear()
        self.frames_pending = 0

    def _receive(self, timeout_s: float | None) -> bool:
        """Take in one batch, and whatever else has arrived."""
        if self._group.kept:
            received: Any = self._group.kept.popleft()
        else:
            received = self._group.receive(timeout_s)
        while received is not None:
            member, reply = received
            self._keep(member, reply)
            received = self._group.kept.popleft() if self._group.kept else self._group.receive(0.0)
        return bool(self._arrived)

    def _keep(self, member: Member, reply: Collected) -> None:
        count = _count(reply.batch)
        self.frames_pending += count
        self._arrived.append((member, reply.batch, count, reply.progress.version))

    def _look_at_versions(self) -> None:
        """How fast versions go by, from one batch to the next; a burst is remembered for a while."""
        version = self._group.publisher.version
        self._versions_per_batch = max(version - self._version_before, 0.8 * self._versions_per_batch, 1.0)
        self._version_before = version

    def _drop_stale(self) -> None:
        allowed = self._group.max_staleness
        if allowed is None:
            return
        for entry in list(self._arrived):
            _, _, count, version = entry
            if self._group.publisher.version - version > allowed:
                self._arrived.remove(entry)
                self.frames_pending -= count
                self.stale_dropped += count

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
            member = min(free, key=self._taken)
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
    lengths = [part[TRAJ_IDS].shape[1] for part in columns]
    for part in columns:
        if part.keys() != columns[0].keys():
            different = sorted(".".join(key) for key in part.keys() ^ columns[0].keys())
            raise FrameContractError(f"the workers give different keys : expected the same, got {different} of some")
    steps = max(lengths)
    root: dict[str, Any] = {}
    if min(lengths) == steps:
        for key in columns[0]:
            _put(root, key, torch.cat([part[key] for part in columns]))
    else:
        for key in columns[0]:
            _put(root, key, _padded([part[key] for part in columns], steps, NO_TRAJECTORY if key == TRAJ_IDS else 0))
    count = sum(part[TRAJ_IDS].shape[0] for part in columns)
    if masked and MASK not in columns[0]:
        present = [torch.ones(part[TRAJ_IDS].shape, dtype=torch.bool) for part in columns]
        _put(root, MASK, _padded(present, steps, 0))
    return TensorDict(root, batch_size=(count, steps), names=[None, "time"])  # type: ignore[list-item]


def _columns(part: TensorDict | Columns) -> Columns:
    return columns_of(part) if isinstance(part, TensorDict) else part


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


def _put(tree: dict[str, Any], key: Key, value: Tensor) -> None:
    for name in key[:-1]:
        tree = tree.setdefault(name, {})
    tree[key[-1]] = value
