"""How weights get from the learner to the workers: `NoSync`, `Pipe` and `SharedMemory`.

The learner publishes, and asks for a ticket to go with each request to a worker; the worker hands that ticket to its
receiver between two batches and gets a whole `WeightSnapshot`, or None where it has the newest already. A worker that
missed some publications gets the newest set of all models, those included that were not in the last publication.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from lit_collect.errors import CollectTimeoutError
from lit_collect.halves import HEADER_BYTES, Halves, Models, half_bytes, table_of, views_of
from lit_collect.shared import SharedBlock
from lit_collect.weights import WeightSnapshot

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
        self._halves: Halves | None = None
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
        table = table_of(whole)
        block = SharedBlock.create(HEADER_BYTES + 2 * half_bytes(table))
        try:
            halves = Halves(block, table)
            halves.write(whole, version)
        except BaseException:
            block.close()
            raise
        self._halves = halves
        self._opened.clear()
        self._retire(old)

    def _retire(self, halves: "Halves | None") -> None:
        """Close what was retired before, and this the next time."""
        before, self._retired = self._retired, None if halves is None else halves.block
        if before is not None:
            before.close()


@dataclass(frozen=True)
class SharedTicket:
    """What a worker is told by `SharedMemory`: where the memory is, and what it alone is given."""

    halves: "Halves | None"
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
        self._halves: Halves | None = None
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

    def _open(self, halves: "Halves") -> None:
        """Use this memory from here on."""
        old, self._halves = self._halves, halves
        if old is not None and old.block is not halves.block:
            old.block.close()
        with torch.inference_mode(False):  # they are written in any mode
            self._bytes = torch.empty(half_bytes(halves.table), dtype=torch.uint8)
        self._models = views_of(self._bytes, halves.table)

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
