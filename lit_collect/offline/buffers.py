"""Replay buffers of offline rows: filled once, and only sampled afterwards."""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lit_collect.config import at_least
from lit_collect.offline.sources import OfflineRows, open_offline
from lit_collect.replay.buffer import ReplayBuffer
from lit_collect.replay.mapped import MappedStorage
from lit_collect.replay.names import check_path, resolve_storage
from lit_collect.replay.samplers import Sampler, resolve_sampler
from lit_collect.replay.settings import check_fit, check_transforms
from lit_collect.replay.staleness import ConsumingSampler
from lit_collect.replay.state import check_draws
from lit_collect.replay.storage import Storage
from lit_collect.replay.transforms import SampleTransform
from lit_collect.replay.writers import resolve_writer

_SOURCE = "source.json"  # beside the rows of a mapped storage: which data they are of


@dataclass(frozen=True, kw_only=True)
class OfflineSampling:
    """How offline rows are kept and sampled; what does not fit is refused before any row is read."""

    batch_size: int
    """Rows of a sample, over all of its slices."""
    slice_len: int | None = None
    """Rows of a slice; None for single rows."""
    sampler: Sampler | str = "uniform"
    """How rows are chosen (see `ReplayBuffer`)."""
    storage: Storage | str = "memory"
    """Where they lie (see `ReplayBuffer`)."""
    storage_path: str | None = None
    """The folder of ``storage="mapped"``."""
    transforms: Sequence[SampleTransform] = ()
    """What is done to each sample."""

    def __post_init__(self) -> None:
        """Check what can be checked without data.

        Raises:
            ValueError: if a setting is out of range, or two do not fit each other.
            TypeError: if one is of the wrong kind.
        """
        at_least("batch_size", self.batch_size, 1)
        sampler = resolve_sampler(self.sampler, slice_len=self.slice_len)
        sampler.check_batch_size(self.batch_size)
        if isinstance(sampler, ConsumingSampler):
            raise ValueError(
                "sampler='consuming' uses rows up, and offline data get no new ones : expected a sampler that goes on, "
                "such as 'without_replacement', got a ConsumingSampler"
            )
        check_path("storage_path", self.storage, self.storage_path)
        storage = resolve_storage(self.storage, self.storage_path)
        check_fit(sampler, resolve_writer("ring"), storage, check_transforms(self.transforms), compact_obs=False)

    def check_state(self, state: dict[str, Any], data: OfflineRows) -> None:
        """Raise unless a buffer of these rows can go on with a state.

        Args:
            state: of `ReplayBuffer.draw_state`, with what `mark_of` gave.
            data: the rows.

        Raises:
            ValueError: if it is of other data or another sampler.
        """
        difference = _difference(state, mark_of(data))
        if difference is not None:
            raise ValueError(f"the checkpoint is of other offline data : {difference} at {data.path}")
        check_draws(resolve_sampler(self.sampler, slice_len=self.slice_len), state)

    def buffer_of(self, data: OfflineRows, seed: int | None = None) -> ReplayBuffer:
        """A buffer that holds all rows.

        Rows that a mapped storage has already are not written again. If another process has its folder at the same
        time, another rank for instance, one of them writes the rows and the others wait.

        Args:
            data: the rows.
            seed: of the samples.

        Raises:
            ValueError: if the storage holds rows of other data.
            FrameContractError: if the rows do not fit each other.
        """
        storage = resolve_storage(self.storage, self.storage_path)
        with _source_of(storage) as source:
            known = source is not None and _is_of(source, data)
            buffer = ReplayBuffer(
                data.num_rows,
                self.batch_size,
                sampler=self.sampler,
                slice_len=self.slice_len,
                storage=storage,
                transforms=self.transforms,
                seed=seed,
            )
            try:
                if not (known and buffer.write_count == len(buffer) == data.num_rows):
                    _fill(buffer, data, source=source, again=known)
            except BaseException:
                buffer.close()
                raise
        return buffer


def offline_buffer(
    path: str,
    batch_size: int = 256,
    *,
    sampler: Sampler | str = "uniform",
    slice_len: int | None = None,
    storage: Storage | str = "memory",
    storage_path: str | None = None,
    transforms: Sequence[SampleTransform] = (),
    info_keys: Sequence[str] = (),
    seed: int | None = None,
) -> ReplayBuffer:
    """A replay buffer of offline rows, for instance as a part of a `MixedBuffer`.

    Args:
        path: see `open_offline`.
        batch_size: rows of a sample.
        sampler: see `ReplayBuffer`; none that uses rows up.
        slice_len: see `ReplayBuffer`.
        storage: where the rows lie; a mapped one is filled once, and found again.
        storage_path: the folder of ``storage="mapped"``, of this data set alone.
        transforms: what is done to each sample.
        info_keys: see `open_offline`.
        seed: of the samples.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if it is no data, settings do not fit, or the storage holds rows of other data.
        FrameContractError: if the rows do not fit each other.
    """
    sampling = OfflineSampling(
        batch_size=batch_size,
        slice_len=slice_len,
        sampler=sampler,
        storage=storage,
        storage_path=storage_path,
        transforms=transforms,
    )
    return sampling.buffer_of(open_offline(path, info_keys), seed)


def mark_of(data: OfflineRows) -> dict[str, Any]:
    """By what rows are known again: how many they are, and a digest of their files."""
    return {"rows": data.num_rows, "digest": data.digest}


@contextmanager
def _source_of(storage: Storage) -> Iterator[IO[str] | None]:
    """The file that says what the rows of a mapped storage are of, with no other process at it; else None."""
    if not isinstance(storage, MappedStorage):
        yield None
        return
    storage.make_folder()
    with (storage.path / _SOURCE).open("a+") as source:
        fcntl.flock(source, fcntl.LOCK_EX)  # the system drops it when a process ends, however it ends
        try:
            yield source
        finally:
            source.flush()
            fcntl.flock(source, fcntl.LOCK_UN)  # else a fork of this process would keep it


def _is_of(source: IO[str], data: OfflineRows) -> bool:
    """Whether rows were written of the data; False if nobody says what of.

    Raises:
        ValueError: if they were written of other data.
    """
    source.seek(0)
    try:
        there = json.loads(source.read())
    except ValueError:  # a new file, or one of a process that died over it
        return False
    difference = _difference(there, mark_of(data))
    if difference is not None:
        raise ValueError(
            f"the folder {Path(source.name).parent} holds the rows of other offline data, of {there['path']} as it was "
            f"then : {difference} at {data.path}; remove the folder, or name another"
        )
    return True


def _fill(buffer: ReplayBuffer, data: OfflineRows, *, source: IO[str] | None, again: bool) -> None:
    """Write all rows; those that an earlier process has left half way are written again."""
    if buffer.write_count and not again:
        raise ValueError(
            f"the storage holds {buffer.write_count} rows of another time : expected none, or those that were written "
            f"of {data.path}; give it a folder of its own"
        )
    if source is not None and not again:
        source.truncate(0)
        source.write(json.dumps({"path": str(data.path.absolute()), **mark_of(data)}))
        source.flush()
    if buffer.write_count:
        buffer.empty()
    for batch in data.batches():
        buffer.extend(batch)


def _difference(expected: dict[str, Any], got: dict[str, Any]) -> str | None:
    """How rows differ from those that were known; None if they are the same."""
    if expected["rows"] != got["rows"]:
        return f"expected {expected['rows']} rows, got {got['rows']}"
    if expected["digest"] != got["digest"]:
        return f"expected the same {expected['rows']} rows (and info_keys), got others"
    return None
