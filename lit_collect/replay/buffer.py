"""`ReplayBuffer`: rows are kept, and drawn again in the keys they were written with."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lit_collect.config import at_least
from lit_collect.errors import FrameContractError
from lit_collect.frames import INDEX, WEIGHT, WRITTEN
from lit_collect.replay.compact import LinkedSuccessors, linked_keys
from lit_collect.replay.intake import Intake
from lit_collect.replay.layout import RowLayout, outside_inference
from lit_collect.replay.names import resolve_storage
from lit_collect.replay.reading import RowAccess, addressed, as_positions, mark_slices, places_of
from lit_collect.replay.rows import StoredRows
from lit_collect.replay.samplers import Drawn, Sampler, resolve_sampler
from lit_collect.replay.settings import check_fit, check_transforms
from lit_collect.replay.state import check_complete, check_contents, check_draws, contents_of, load_contents
from lit_collect.replay.storage import Storage
from lit_collect.replay.transforms import SampleTransform
from lit_collect.replay.writers import Writer, resolve_writer
from lit_collect.seeding import resolve_entropy

_NO_ROWS = TensorDict({}, batch_size=[0])
_DERIVED = ("_rows", "_access", "_successors", "_intake", "_rng")


class ReplayBuffer:
    """Keeps rows and draws samples of them; threads may write and sample at the same time.

    A sample is a TensorDict [M] in the keys of the rows, with ``"index"`` (where each row lies) and
    ``("collector", "written")`` (its serial number). With slices it is [S, L], each slice within one episode; its last
    row is marked truncated and done where the episode goes on. A sample belongs to the caller.

    Args:
        capacity: rows that are kept.
        batch_size: rows of a sample, over all of its slices.
        sampler: how rows are chosen: a `Sampler`, of which the buffer takes a copy, or a name.
        slice_len: rows of each slice; None for single rows.
        num_slices: slices of a sample, instead of their length.
        writer: ``"ring"`` to write over the oldest rows, or a `Writer`, of which the buffer takes a copy.
        storage: where the rows lie: ``"memory"``, ``"shared"``, ``"mapped"`` or a `Storage`.
        path: the folder of a mapped storage.
        transforms: what is done to each sample, in this order.
        compact_obs: store an observation once where the following row's successor repeats it (in memory only).
        seed: of the samples; None for a fresh one.

    Raises:
        ValueError: if a setting is out of range, or settings do not fit each other.
        TypeError: if a setting is of the wrong kind.

    Example:
        >>> from tensordict import TensorDict
        >>> buffer = ReplayBuffer(capacity=100, batch_size=8, seed=0)
        >>> rows = TensorDict({"observation": torch.arange(50.0)[:, None], "action": torch.arange(50)}, batch_size=[50])
        >>> positions = buffer.extend(rows)
        >>> sample = buffer.sample()
        >>> sample.batch_size, torch.equal(rows["action"][sample["index"]], sample["action"])
        (torch.Size([8]), True)
    """

    takes_batches = True
    """Whole batches [N, T] may be given to `extend`, masked rows and compact ones among them."""

    def __init__(
        self,
        capacity: int,
        batch_size: int = 256,
        *,
        sampler: Sampler | str = "uniform",
        slice_len: int | None = None,
        num_slices: int | None = None,
        writer: Writer | str = "ring",
        storage: Storage | str = "memory",
        path: str | Path | None = None,
        transforms: Sequence[SampleTransform] = (),
        compact_obs: bool = False,
        seed: int | None = None,
    ) -> None:
        at_least("capacity", capacity, 1)
        at_least("batch_size", batch_size, 1)
        self.capacity = capacity
        self.batch_size = batch_size
        self.transforms = check_transforms(transforms)
        self.compact_obs = compact_obs
        self._sampler = copy.deepcopy(resolve_sampler(sampler, slice_len=slice_len, num_slices=num_slices))
        self._sampler.check_batch_size(batch_size)
        self._writer = copy.deepcopy(resolve_writer(writer))
        self._storage = resolve_storage(storage, path)
        check_fit(self._sampler, self._writer, self._storage, self.transforms, compact_obs=compact_obs)
        self._rng = np.random.default_rng(None if seed is None else resolve_entropy(seed))
        self._sampled = self._age_sum = 0  # rows handed out, and how many were written after each of them
        self._asked = (0, 0)  # both when `take_statistics` was called last
        self._learner_version = 0
        self._closed = False
        self._intake = Intake()
        self._storage.open(capacity)
        self._begin()

    # --- writing ------------------------------------------------------------------------------------------------------

    def extend(self, batch: TensorDictBase) -> Tensor:
        """Write the transitions of a batch; masked rows are left out, compact batches restored.

        Rows without trajectory ids get some: a batch of one dimension continues the one before it, and each env copy
        of a batch [N, T] begins a trajectory.

        Args:
            batch: [M] or [N, T], on any device; at most as many rows as the capacity. It is copied.

        Returns:
            [M] int64, where the rows lie; -1 for one that the writer did not keep.

        Raises:
            TypeError: if it is no TensorDict.
            ValueError: if there are more rows than the capacity.
            FrameContractError: if keys, shapes or dtypes are not those of the rows that are there.
            CollectTimeoutError: if another thread or process has kept the buffer for a minute.
        """
        with self._use():
            rows = self._intake.rows(batch)
            if len(rows) > self.capacity:
                raise ValueError(
                    f"a batch must fit into the buffer : expected at most capacity={self.capacity} rows, got "
                    f"{len(rows)}; raise the capacity or write smaller batches"
                )
            if not len(rows):
                return torch.empty(0, dtype=torch.int64)
            self._writer.check(rows)
            records = self._pack(rows)
            placed = self._writer.place(rows, self.capacity)
            if placed is not None:
                return self._write_at(records, *placed)
            positions = self._storage.write(records)
            if self._successors is not None:
                self._successors.write(rows, positions)
            return torch.from_numpy(positions)

    def add(self, row: TensorDictBase) -> int:
        """Write one transition.

        Args:
            row: without a batch dimension.

        Returns:
            Where it lies.
        """
        if not isinstance(row, TensorDictBase):
            raise TypeError(f"what is written into a replay buffer must be a TensorDict, got {type(row).__name__}")
        if row.batch_dims:
            raise FrameContractError(f"a row must have no batch dimension, got {tuple(row.batch_size)}; use extend")
        return int(self.extend(row.unsqueeze(0)))

    # --- sampling -----------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Draw rows.

        Args:
            batch_size: how many; None for the buffer's own number.

        Returns:
            [M] or slices [S, L], copies in the memory of the CPU.

        Raises:
            ValueError: if the buffer is empty, no trajectory is long enough, or the size is no multiple of a slice's.
            StaleDataError: if all rows are older than is allowed.
            CollectTimeoutError: if another thread or process has kept the buffer for a minute.
        """
        size = self._size(batch_size)
        with self._use():
            self._catch_up()
            drawn = self._sampler.draw(self._rows, size, self._rng)
            positions = drawn.positions
            written = self._rows.serials(positions)
            with outside_inference():
                extra = {INDEX: torch.from_numpy(positions), WRITTEN: torch.from_numpy(written)}
                if drawn.weights is not None:
                    extra[WEIGHT] = torch.from_numpy(drawn.weights)
            sample: TensorDictBase = self._access.take(positions, extra)
            self._count(written, drawn)
            if drawn.slices:
                mark_slices(sample, positions, padded=drawn.padded)
            for transform in self.transforms:
                sample = transform(sample, self._access)
            return sample

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether `sample` would find the rows it needs.

        Args:
            batch_size: how many; None for the buffer's own number.
        """
        size = self._size(batch_size)
        with self._use():
            self._catch_up()
            return self._sampler.can_draw(self._rows, size)

    def update_priority(self, index: TensorDictBase | Tensor | np.ndarray, priority: Tensor | np.ndarray) -> None:
        """Change how likely rows are drawn; nothing happens without a prioritized sampler.

        Args:
            index: a sample, so that rows that were overwritten since are left alone; or positions.
            priority: one number of at least 0 for each of its rows.

        Raises:
            ValueError: if a priority is negative or not finite, if they are not as many as rows, or a position is
                out of range.
            TypeError: if positions are no integers; a mask is none.
        """
        with self._use():
            self._catch_up()
            positions, priorities = addressed(index, priority, self._rows)
            self._sampler.update_priority(self._rows, positions, priorities)

    def __getitem__(self, positions: int | slice | Sequence[int] | Tensor | np.ndarray) -> TensorDictBase:
        """Rows by position, copies; one without a dimension for a single position.

        Raises:
            IndexError: if there is no row at a position.
            TypeError: if positions are no integers; a mask is none.
        """
        with self._use():
            self._catch_up()
            if isinstance(positions, slice):
                wanted = np.arange(*positions.indices(self._rows.extent))
            else:
                wanted = as_positions(positions)
            bad = ~self._rows.is_valid(np.where(wanted < 0, self.capacity, wanted))
            if bad.any():
                raise IndexError(
                    f"there is no row at position {int(wanted[bad].flat[0])} : expected {places_of(self._rows)}"
                )
            if self._storage.layout is None:
                raise IndexError("there are no rows yet, and nobody knows their keys; extend the buffer before")
            rows: TensorDictBase = self._access.take(wanted.reshape(-1))
            return rows.reshape(wanted.shape)

    # --- what it holds ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows that may be drawn; those that a process lost when it died do not count."""
        with self._use():
            self._catch_up()
            return self._rows.size

    @property
    def write_count(self) -> int:
        """Rows ever written."""
        with self._storage.use():
            return self._storage.write_count

    @property
    def nbytes(self) -> int:
        """Memory of the rows, in bytes."""
        with self._storage.use():
            records = self._storage.records
            links = 0 if self._successors is None else self._successors.nbytes
            return links + (0 if records is None else records.nbytes)

    @property
    def slice_len(self) -> int | None:
        """Rows of a slice of a whole sample; None for single rows."""
        shape = getattr(self._sampler, "shape", None)
        return None if shape is None else int(shape.of(self.batch_size)[1])

    @property
    def has_priorities(self) -> bool:
        """Whether `update_priority` does something."""
        return self._sampler.has_priorities

    @property
    def runs_out(self) -> bool:
        """Whether `can_sample` may come to be False without a write: rows are used up, too old, or of priority 0."""
        return self._sampler.runs_out

    @property
    def learner_version(self) -> int:
        """Version of the weights that learn, from which the staleness of rows is counted."""
        return self._learner_version

    @learner_version.setter
    def learner_version(self, version: int) -> None:
        self._learner_version = self._rows.learner_version = version

    def statistics(self) -> dict[str, float]:
        """Plain numbers.

        Returns:
            ``size`` and ``capacity`` (rows), ``write_count`` and ``sampled`` (rows ever written and handed out), and
            ``age_mean``: how many rows were written, on the average, after a row that was handed out since
            `take_statistics` was called last. It is absent if none was.
        """
        with self._use():
            numbers: dict[str, float] = {
                "size": len(self),
                "capacity": self.capacity,
                "write_count": self._storage.write_count,
                "sampled": self._sampled,
            }
            count = self._sampled - self._asked[0]
            if count:
                numbers["age_mean"] = (self._age_sum - self._asked[1]) / count
            return numbers

    def take_statistics(self) -> dict[str, float]:
        """The same, and from here on ages are averaged anew."""
        with self._use():
            numbers = self.statistics()
            self._asked = (self._sampled, self._age_sum)
            return numbers

    # --- life ---------------------------------------------------------------------------------------------------------

    def empty(self) -> None:
        """Forget all rows; the next ones may be of another trajectory, but must have the same keys."""
        with self._use():
            self._storage.void_after(0)
            self._intake = Intake()
            self._writer.reopen(_NO_ROWS)
            self._begin()

    def flush(self) -> None:
        """Return when all rows would outlive a loss of power, where the storage outlives anything."""
        with self._use():
            self._storage.flush()

    def close(self) -> None:
        """Give the memory back; a mapped storage keeps its files. May be called again."""
        self._closed = True
        self._storage.close()

    def __enter__(self) -> "ReplayBuffer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: the rows (unless they are in files), cursor, sampler and random state."""
        with self._use():
            self._catch_up()
            state = contents_of(self._storage)
            state["sampler_kind"], state["compact_obs"] = type(self._sampler).__name__, self.compact_obs
            state.update(self.draw_state())
            state["sampled"], state["age_sum"] = self._sampled, self._age_sum
            state["learner_version"] = self._learner_version
            if not self._rows.in_order:
                state["serials"] = torch.from_numpy(self._rows.serials(np.arange(self._rows.extent)))
            if self._successors is not None:
                state["successors"] = self._successors.state_dict(self._rows.extent)
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the same rows, and draw the same samples, as the buffer whose state it is.

        Of a mapped storage the rows are those in its files; those written after the state was taken are taken back.

        Args:
            state: what `state_dict` gave.

        Raises:
            ValueError: if it is of another capacity, kind of storage, sampler or rows, lacks something, or files lack
                its rows.
        """
        with self._use():
            self._check_state(state)
            load_contents(self._storage, state)
            self._intake = Intake()
            self._begin()
            if self._successors is not None and "successors" in state:
                self._successors.load_state_dict(state["successors"])
            self._catch_up()
            if "serials" in state:
                self._rows.know_serials(state["serials"].numpy())
            if not self._writer.in_order:
                self._writer.reopen(self[:] if self._rows.extent else _NO_ROWS)
            self.load_draw_state(state)
            self._sampled, self._age_sum = int(state["sampled"]), int(state["age_sum"])
            self._asked = (self._sampled, self._age_sum)
            self.learner_version = int(state["learner_version"])

    def draw_state(self) -> dict[str, Any]:
        """How it would draw on, without the rows: sampler (with priorities, for instance) and random state."""
        with self._use():
            self._catch_up()
            return {"sampler": self._sampler.state_dict(), "random": self._rng.bit_generator.state}

    def load_draw_state(self, state: Mapping[str, Any]) -> None:
        """Draw the same samples as the buffer whose state it is, from the same rows.

        Args:
            state: what `draw_state` or `state_dict` gave.

        Raises:
            ValueError: if it is of another sampler, or lacks something.
        """
        with self._use():
            self._catch_up()
            check_draws(self._sampler, state)
            self._sampler.load_state_dict(state["sampler"])
            self._rng.bit_generator.state = state["random"]

    def __getstate__(self) -> dict[str, Any]:
        """For another process: the settings and the shared rows. What is derived of them is derived there."""
        return {name: value for name, value in vars(self).items() if name not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._rng = np.random.default_rng()
        self._intake = Intake()
        self._begin()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Know nothing of the rows: all that there are will be looked at."""
        self._rows = StoredRows(self._storage)
        self._rows.learner_version = self._learner_version
        self._sampler.begin(self._rows)
        layout = self._storage.layout
        self._successors: LinkedSuccessors | None = None
        if self.compact_obs and layout is not None:
            self._successors = LinkedSuccessors(self.capacity, tuple(key[1:] for key in sorted(layout.left_out)))
        self._access = RowAccess(self._storage, self._rows, successors=self._successors, rng=self._rng)

    def _catch_up(self) -> None:
        """Take note of all rows that were written, by whomever."""
        epoch = self._rows.epoch
        new = self._rows.catch_up()
        if self._rows.epoch != epoch:
            self._sampler.begin(self._rows)
        if len(new):
            self._sampler.appended(self._rows, new)

    def _pack(self, rows: TensorDictBase) -> np.ndarray:
        """Rows as records; the first ones say what all are like."""
        if self._storage.layout is None:
            observed = linked_keys(rows) if self.compact_obs else ()
            if self.compact_obs and not observed:
                raise FrameContractError(
                    "compact_obs found no observation with a successor : expected the same key at the root and under "
                    f"'next', got {sorted(map(str, rows.keys(True, True)))}"
                )
            self._storage.begin(RowLayout.of(rows, leave_out=[("next", *key) for key in observed]))
            self._begin()
        layout = self._storage.layout
        assert layout is not None
        if self._successors is not None:
            self._successors.check(rows)
        return layout.pack(rows)

    def _write_at(self, records: np.ndarray, kept: np.ndarray, places: np.ndarray) -> Tensor:
        """Write some of the rows where the writer wants them."""
        positions = np.full(len(records), -1)
        positions[kept] = places
        if len(kept):
            self._storage.write(records[kept], places)
            self._sampler.appended(self._rows, self._rows.catch_up(places))
        return torch.from_numpy(positions)

    def _use(self) -> AbstractContextManager[None]:
        if self._closed:
            raise ValueError("the replay buffer is closed; build a new one")
        return self._storage.use()

    def _size(self, batch_size: int | None) -> int:
        if batch_size is None:
            return self.batch_size
        at_least("batch_size", batch_size, 1)
        return batch_size

    def _count(self, written: np.ndarray, drawn: Drawn) -> None:
        count = int((written >= 0).sum()) if drawn.padded else written.size
        total = int(written.sum()) + written.size - count  # padding has -1
        self._sampled += count
        self._age_sum += count * (self._rows.write_count - 1) - total

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_complete(state)
        for name, here in (("sampler_kind", type(self._sampler).__name__), ("compact_obs", self.compact_obs)):
            if state[name] != here:
                raise ValueError(
                    f"the state is of another buffer : expected {name}={here!r}, got {state[name]!r}; build the buffer "
                    f"as it was"
                )
        check_draws(self._sampler, state)
        check_contents(self._storage, state)
