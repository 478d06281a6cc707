"""How weights get from the learner to the workers: `NoSync`, `Pipe` and `SharedMemory`.

The learner publishes, and asks for a ticket to go with each request to a worker; the worker hands that ticket to its
receiver between two batches and gets a whole `WeightSnapshot`, or None where it has the newest already. A worker that
missed some publications gets the newest set of all models, those included that were not in the last publication.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_collect.errors import CollectTimeoutError
from lit_collect.shared import SharedBlock
from lit_collect.weights import WeightSnapshot

Models = Mapping[str, Mapping[str, Tensor]]
"""Tensors by model id and dotted name."""

_NOTHING = -1  # older than every version


class WeightReceiver(ABC):
    """The worker's side of a scheme."""

    @abstractmethod
    def receive(self, ticket: Any) -> WeightSnapshot | None:
        """The newest snapshot there is, or None if there is none newer than the last one returned.

        Called between batches. The tensors returned may be reused by the next call.

        Args:
            ticket: what came with the request for the next batch.
        """


class WeightSyncScheme(ABC):
    """The learner's side: carries snapshots to workers. One object serves one collector, from one thread at a time."""

    @abstractmethod
    def publish(self, models: Models, version: int, workers: Sequence[int] | None) -> None:
        """Offer weights; they are copied before this returns, so that later training does not change them.

        What is published to all supersedes what single workers were given before.

        Args:
            models: live tensors by model id and dotted name, on any device; models left out stay as they are.
            version: above that of every earlier publication.
            workers: their indices, or None for all.
        """

    @abstractmethod
    def ticket(self, worker: int) -> Any:
        """What goes with the next request to a worker: something that can be pickled, or None.

        Args:
            worker: its index.
        """

    @abstractmethod
    def receiver(self, worker: int) -> WeightReceiver:
        """The worker's side, which travels to the worker when it starts.

        Args:
            worker: its index.
        """

    def forget(self, worker: int) -> None:  # noqa: B027 (most schemes that others write have nothing to forget)
        """A worker was replaced: the new one gets the newest snapshot with its first ticket.

        Args:
            worker: its index.
        """

    def close(self) -> None:  # noqa: B027 (nor to release)
        """Release memory; may be called again."""


class NoSync(WeightSyncScheme):
    """Nothing travels but the version: the policy is shared already, or has nothing to learn.

    Example:
        >>> scheme = NoSync()
        >>> scheme.publish({}, version=3, workers=None)
        >>> scheme.receiver(0).receive(scheme.ticket(0))
        WeightSnapshot(models={}, version=3)
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._own: dict[int, int] = {}  # of workers that were given more than all were

    @override
    def publish(self, models: Models, version: int, workers: Sequence[int] | None) -> None:
        if workers is None:
            self._version = version
            self._own.clear()
        else:
            self._own.update(dict.fromkeys(workers, version))

    @override
    def ticket(self, worker: int) -> int | None:
        return self._own.get(worker, self._version)

    @override
    def receiver(self, worker: int) -> WeightReceiver:
        return VersionReceiver()


class VersionReceiver(WeightReceiver):
    """The worker's side of `NoSync`: a version without models, by which rows are labelled."""

    def __init__(self) -> None:
        self._version = _NOTHING

    @override
    def receive(self, ticket: int | None) -> WeightSnapshot | None:
        if ticket is None or ticket <= self._version:
            return None
        self._version = ticket
        return WeightSnapshot(models={}, version=ticket)


class Pipe(WeightSyncScheme):
    """The snapshot itself travels in the ticket, once per worker and version. It works wherever requests do.

    Example:
        >>> scheme = Pipe()
        >>> scheme.publish({"policy": {"bias": torch.ones(2)}}, version=1, workers=None)
        >>> scheme.receiver(0).receive(scheme.ticket(0))
        WeightSnapshot(models={'policy': {'bias': tensor([1., 1.])}}, version=1)
    """

    def __init__(self) -> None:
        self._newest: WeightSnapshot | None = None
        self._own: dict[int, WeightSnapshot] = {}  # of workers that were given more than all were
        self._sent: dict[int, int] = {}

    @override
    def publish(self, models: Models, version: int, workers: Sequence[int] | None) -> None:
        copies = _copies(models)
        if workers is None:
            self._newest = _merged(self._newest, copies, version)
            self._own.clear()
            return
        for worker in workers:
            self._own[worker] = _merged(self._own.get(worker, self._newest), copies, version)

    @override
    def ticket(self, worker: int) -> WeightSnapshot | None:
        snapshot = self._own.get(worker, self._newest)
        if snapshot is None or self._sent.get(worker) == snapshot.version:
            return None
        self._sent[worker] = snapshot.version
        return snapshot

    @override
    def receiver(self, worker: int) -> WeightReceiver:
        return PipeReceiver()

    @override
    def forget(self, worker: int) -> None:
        self._sent.pop(worker, None)

    @override
    def close(self) -> None:
        self._newest = None
        self._own.clear()
        self._sent.clear()


class PipeReceiver(WeightReceiver):
    """The worker's side of `Pipe`."""

    def __init__(self) -> None:
        self._version = _NOTHING

    @override
    def receive(self, ticket: WeightSnapshot | None) -> WeightSnapshot | None:
        if ticket is None or ticket.version <= self._version:
            return None
        self._version = ticket.version
        return ticket


class SharedMemory(WeightSyncScheme):
    """Double-buffered shared memory: the learner writes the idle half and flips, so nobody waits for anybody.

    For workers on this machine, in processes that requests can carry file descriptors to. The memory is made at the
    first publication, and anew when names, shapes or dtypes change. What is published to some workers only travels
    in their tickets, as with `Pipe`.

    Example:
        >>> scheme = SharedMemory()
        >>> scheme.publish({"policy": {"bias": torch.ones(2)}}, version=1, workers=None)
        >>> scheme.receiver(0).receive(scheme.ticket(0))
        WeightSnapshot(models={'policy': {'bias': tensor([1., 1.])}}, version=1)
        >>> scheme.close()
    """

    def __init__(self) -> None:
        self._halves: _Halves | None = None
        self._retired: SharedBlock | None = None  # kept open: a ticket for it may be on its way still
        self._own: dict[int, WeightSnapshot] = {}  # of workers that were given more than all were
        self._sent: dict[int, int] = {}  # versions of those
        self._opened: set[int] = set()  # workers that have been given the memory

    @override
    def publish(self, models: Models, version: int, workers: Sequence[int] | None) -> None:
        if workers is not None:
            self._give(models, version, workers)
            return
        if self._halves is None or not self._halves.fit(models):
            self._replace_halves(models, version)
        else:
            self._halves.write(models, version)
        self._own.clear()

    @override
    def ticket(self, worker: int) -> "SharedTicket | None":
        snapshot = self._own.get(worker)
        if snapshot is not None and self._sent.get(worker) == snapshot.version:
            snapshot = None
        halves = None if worker in self._opened else self._halves
        if snapshot is not None:
            self._sent[worker] = snapshot.version
        if halves is not None:
            self._opened.add(worker)
        return None if snapshot is None and halves is None else SharedTicket(halves, snapshot)

    @override
    def receiver(self, worker: int) -> WeightReceiver:
        return SharedMemoryReceiver()

    @override
    def forget(self, worker: int) -> None:
        self._sent.pop(worker, None)
        self._opened.discard(worker)

    @override
    def close(self) -> None:
        halves, self._halves = self._halves, None
        self._retire(halves)
        self._retire(None)
        self._own.clear()
        self._sent.clear()
        self._opened.clear()

    def _give(self, models: Models, version: int, workers: Sequence[int]) -> None:
        """Keep a snapshot for each of these workers, with the models left out as it has them."""
        copies = _copies(models)
        shared = None if self._halves is None else WeightSnapshot(_copies(self._halves.newest()), version)
        for worker in workers:
            self._own[worker] = _merged(self._own.get(worker, shared), copies, version)

    def _replace_halves(self, models: Models, version: int) -> None:
        """Write into new memory; a worker reads the old one until its next ticket."""
        old = self._halves
        whole = models if old is None else {**old.newest(), **models}
        table = _table(whole)
        block = SharedBlock.create(_HEADER_BYTES + 2 * _half_bytes(table))
        try:
            halves = _Halves(block, table)
            halves.write(whole, version)
        except BaseException:
            block.close()
            raise
        self._halves = halves
        self._opened.clear()
        self._retire(old)

    def _retire(self, halves: "_Halves | None") -> None:
        """Close what was retired before, and this the next time."""
        before, self._retired = self._retired, None if halves is None else halves.block
        if before is not None:
            before.close()


@dataclass(frozen=True)
class SharedTicket:
    """What a worker is told by `SharedMemory`: where the memory is, and what it alone is given."""

    halves: "_Halves | None"
    """The memory, if it is new to the worker."""
    snapshot: WeightSnapshot | None
    """What was published to this worker and not to all."""


class SharedMemoryReceiver(WeightReceiver):
    """The worker's side of `SharedMemory`: copies the newest half out, and again if it was written meanwhile.

    Args:
        timeout_s: seconds after which it gives up when every copy was spoilt by a publication.
        clock: seconds, from any start.
    """

    def __init__(self, *, timeout_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._version = _NOTHING
        self._halves: _Halves | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._models: Models = {}  # views of these bytes

    @override
    def receive(self, ticket: SharedTicket | None) -> WeightSnapshot | None:
        """See the base class.

        Raises:
            CollectTimeoutError: if weights were published faster than they can be copied.
        """
        snapshot = None
        if ticket is not None:
            snapshot = ticket.snapshot
            if ticket.halves is not None:
                self._open(ticket.halves)
        if snapshot is not None and snapshot.version <= self._version:
            snapshot = None
        newest = self._read(self._version if snapshot is None else snapshot.version) or snapshot
        if newest is not None:
            self._version = newest.version
        return newest

    def _open(self, halves: "_Halves") -> None:
        """Use this memory from here on."""
        old, self._halves = self._halves, halves
        if old is not None and old.block is not halves.block:
            old.block.close()
        with torch.inference_mode(False):  # they are written in any mode
            self._bytes = torch.empty(_half_bytes(halves.table), dtype=torch.uint8)
        self._models = _views(self._bytes, halves.table)

    def _read(self, newer_than: int) -> WeightSnapshot | None:
        """What is in the memory, if it is newer than a version."""
        if self._halves is None:
            return None
        deadline = None
        while True:
            version = self._halves.copy_newest(newer_than, self._bytes)
            if version == newer_than:
                return None
            if version is not None:
                return WeightSnapshot(models=self._models, version=version)
            now = self._clock()
            deadline = now + self._timeout_s if deadline is None else deadline
            if now > deadline:
                raise CollectTimeoutError(
                    f"no copy of the weights was whole: expected one within {self._timeout_s:g} s, got two "
                    "publications during each; publish less often (every_n_steps of WeightSync)"
                )


class _Place(NamedTuple):
    """Where a tensor lies in each half."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


_Table = Mapping[str, Mapping[str, _Place]]

_ALIGNMENT = 64  # bytes: the widest vector registers, and a cache line
_HEADER_BYTES = _ALIGNMENT
_ACTIVE = 0  # which half is the newest; the integers after it are pairs, one per half:
_SEQUENCE = (1, 3)  # odd while the half is being written
_VERSION = (2, 4)


class _Halves:
    """Two sets of the same tensors in shared memory, of which one is the newest and the other may be written.

    One process writes. Each half is guarded by a seqlock: its sequence is odd while it is written and never the same
    again, so a reader whose half was written in the meantime (it was slow and the writer has flipped twice) finds
    another number than before its copy. All this relies on stores becoming visible in the order in which they are
    made, and on loads being made in order, as on x86, across calls that no compiler can reorder, and on aligned
    64-bit integers being read and written whole.

    Args:
        block: the memory, zeroed before the first use.
        table: places by model id and name.
    """

    def __init__(self, block: SharedBlock, table: _Table) -> None:
        size = _half_bytes(table)
        self.block = block
        self.table = table
        self._header = block.integers(0, 5)
        self._bytes = [block.tensor(_HEADER_BYTES + half * size, (size,), torch.uint8) for half in (0, 1)]
        self._models = [_views(half, table) for half in self._bytes]

    def __reduce__(self) -> tuple[type["_Halves"], tuple[SharedBlock, _Table]]:
        return type(self), (self.block, self.table)

    def fit(self, models: Models) -> bool:
        """Whether models can be written: they are known, and all their tensors have their places."""
        for model_id, tensors in models.items():
            places = self.table.get(model_id)
            if places is None or places.keys() != tensors.keys():
                return False
            for name, tensor in tensors.items():
                place = places[name]
                if tensor.shape != place.shape or tensor.dtype != place.dtype:
                    return False
        return True

    def newest(self) -> Models:
        """Views of the newest set, for the process that writes."""
        return self._models[self._header[_ACTIVE]]

    def write(self, models: Models, version: int) -> None:
        """Write the idle half and make it the newest; models left out are taken from the other half."""
        header, newest = self._header, self.newest()
        half = 1 - header[_ACTIVE]
        sequence = header[_SEQUENCE[half]] | 1  # odd already if an exception ended the last attempt
        header[_SEQUENCE[half]] = sequence
        header[_VERSION[half]] = version
        with torch.no_grad():
            for model_id, targets in self._models[half].items():
                sources = models.get(model_id, newest[model_id])
                for name, target in targets.items():
                    target.copy_(sources[name])
        header[_SEQUENCE[half]] = sequence + 1
        header[_ACTIVE] = half

    def copy_newest(self, newer_than: int, target: Tensor) -> int | None:
        """Copy the newest half if it is newer than a version.

        Args:
            newer_than: the version.
            target: bytes, as many as a half has.

        Returns:
            The version of what was copied, `newer_than` if there is nothing newer, None if the copy is worthless.
        """
        header = self._header
        half = header[_ACTIVE]
        sequence = header[_SEQUENCE[half]]
        if sequence % 2:
            return None
        version = header[_VERSION[half]]
        if version <= newer_than:
            return newer_than
        target.copy_(self._bytes[half])
        return version if header[_SEQUENCE[half]] == sequence else None


def _table(models: Models) -> _Table:
    """Give every tensor of these models its place."""
    table: dict[str, dict[str, _Place]] = {}
    offset = 0
    for model_id, tensors in models.items():
        places = table[model_id] = {}
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            places[name] = _Place(tensor.dtype, tuple(tensor.shape), offset, size)
            offset += size + -size % _ALIGNMENT
    return table


def _half_bytes(table: _Table) -> int:
    end = max((place.offset + place.size for places in table.values() for place in places.values()), default=0)
    return end + -end % _ALIGNMENT


@torch.inference_mode(False)
def _views(half: Tensor, table: _Table) -> Models:
    """The tensors that lie in the bytes of a half."""
    return {
        model_id: {
            name: half[place.offset : place.offset + place.size].view(place.dtype).reshape(place.shape)
            for name, place in places.items()
        }
        for model_id, places in table.items()
    }


def _copies(models: Models) -> Models:
    """Detached, contiguous copies on the CPU."""
    cpu, dense = torch.device("cpu"), torch.contiguous_format
    return {
        model_id: {name: tensor.detach().to(cpu, copy=True, memory_format=dense) for name, tensor in tensors.items()}
        for model_id, tensors in models.items()
    }


def _merged(base: WeightSnapshot | None, models: Models, version: int) -> WeightSnapshot:
    """These models, and those of an earlier snapshot that are not among them."""
    return WeightSnapshot(models={**base.models, **models} if base is not None else models, version=version)
