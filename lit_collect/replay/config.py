"""`ReplayConfig`: a replay buffer as settings, from which whoever needs it builds its own."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from lit_collect.config import at_least, nearest_multiples, one_of
from lit_collect.replay.buffer import ReplayBuffer
from lit_collect.replay.names import check_path, resolve_storage
from lit_collect.replay.samplers import Sampler, resolve_sampler
from lit_collect.replay.settings import check_fit, check_slices, check_transforms
from lit_collect.replay.storage import MemoryStorage, Storage
from lit_collect.replay.transforms import SampleTransform
from lit_collect.replay.writers import resolve_writer


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """A replay buffer between the collector and the trainer.

    Example:
        >>> ReplayConfig(capacity=100_000, batch_size=250, slice_len=16)
        Traceback (most recent call last):
        ...
        ValueError: replay.batch_size must be a multiple of slice_len=16, got 250; use 240 or 256
    """

    capacity: int
    """Rows that are kept; newer ones take the place of the oldest."""
    batch_size: int = 256
    """Rows of one sample, over all of its slices."""
    slice_len: int | None = None
    """Sample slices of that many consecutive rows of one episode: [batch_size / slice_len, slice_len]."""
    sampler: Sampler | str = "uniform"
    """How rows are chosen: a `Sampler`, or ``"uniform"``, ``"without_replacement"``, ``"prioritized"``,
    ``"consuming"`` or ``"staleness"``."""
    write_mode: Literal["rollout", "trajectory"] = "rollout"
    """Write each collected batch at once, or trajectories once they are complete."""
    trajs_per_write: int | None = None
    """Complete trajectories in one write (None: as many as there are); with ``write_mode="trajectory"``."""
    min_frames: int = 0
    """Rows that must be there before the first sample."""
    storage: Storage | str = "memory"
    """Where the rows are kept: a `Storage`, or ``"memory"``, ``"shared"`` (with other processes) or ``"mapped"``."""
    path: str | None = None
    """The folder of a mapped storage; each rank of several has one of its own in it."""
    transforms: tuple[SampleTransform, ...] = ()
    """What is done to each sample, for instance `NStep`."""
    background: bool = False
    """Go on collecting while the learner learns, one batch ahead (on the direct backend in a thread)."""

    def __post_init__(self) -> None:
        """Check what can be checked without data.

        Raises:
            ValueError: naming the setting and the value.
            TypeError: if a setting is of the wrong kind.
        """
        at_least("replay.capacity", self.capacity, 1)
        at_least("replay.batch_size", self.batch_size, 1)
        at_least("replay.min_frames", self.min_frames, 0)
        if not isinstance(self.background, bool):
            raise TypeError(f"replay.background must be True or False, got {self.background!r}")
        if self.slice_len is not None:
            at_least("replay.slice_len", self.slice_len, 1, or_none=True)
            _check_multiple(self.batch_size, self.slice_len)
        one_of("replay.write_mode", self.write_mode, ("rollout", "trajectory"))
        if self.trajs_per_write is not None:
            at_least("replay.trajs_per_write", self.trajs_per_write, 1, or_none=True)
            if self.write_mode != "trajectory":
                raise ValueError(
                    f"replay.trajs_per_write needs write_mode='trajectory', got {self.trajs_per_write} with "
                    f"{self.write_mode!r}"
                )
        if self.min_frames > self.capacity:
            raise ValueError(
                f"replay.min_frames must be at most capacity={self.capacity}, got {self.min_frames}; there would never "
                f"be a sample"
            )
        folder: object = self.path
        if isinstance(folder, PurePath):  # checkpoints of data modules hold plain data alone
            object.__setattr__(self, "path", str(folder))
        elif folder is not None and not isinstance(folder, str):
            raise TypeError(f"replay.path must be the path of a folder or None, got {folder!r}")
        check_path("replay.path", self.storage, self.path)
        given: object = self.transforms  # YAML gives lists
        if not isinstance(given, (tuple, list)):
            raise TypeError(f"replay.transforms must be a sequence, got {given!r}; use a tuple")
        object.__setattr__(self, "transforms", check_transforms(given))
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise where the buffer would, which is built long after."""
        sampler = resolve_sampler(self.sampler, slice_len=self.slice_len)
        sampler.check_batch_size(self.batch_size)
        check_slices(sampler, capacity=self.capacity, batch_size=self.batch_size)
        storage = resolve_storage(self.storage, self.path)
        check_fit(sampler, resolve_writer("ring"), storage, self.transforms, compact_obs=False)

    def check_holds(self, frames_per_batch: int) -> None:
        """Raise if a batch has more rows than are kept.

        Raises:
            ValueError: then.
        """
        if frames_per_batch > self.capacity:
            raise ValueError(
                f"replay.capacity must hold a batch of frames_per_batch={frames_per_batch}, got {self.capacity}"
            )

    @property
    def in_memory(self) -> bool:
        """Whether the rows are kept in memory of this process alone."""
        return self.storage == "memory" or isinstance(self.storage, MemoryStorage)

    def build(
        self, *, compact_obs: bool = False, seed: int | None = None, subfolder: str | None = None
    ) -> ReplayBuffer:
        """A buffer with these settings.

        Args:
            compact_obs: store observations once where the following row repeats them, if the storage can.
            seed: of the samples; None for a fresh one.
            subfolder: of a mapped storage, for one rank of several.

        Raises:
            ValueError: if settings do not fit each other.
        """
        return ReplayBuffer(
            self.capacity,
            self.batch_size,
            sampler=self.sampler,
            slice_len=self.slice_len,
            storage=self.storage,
            path=self.path if self.path is None or subfolder is None else f"{self.path}/{subfolder}",
            transforms=self.transforms,
            compact_obs=compact_obs and self.in_memory,
            seed=seed,
        )

    def as_plain(self) -> dict[str, Any]:
        """The settings for logs: kinds by their class names."""
        kinds = {"sampler": _named(self.sampler), "storage": _named(self.storage)}
        return {**vars(self), **kinds, "transforms": [_named(each) for each in self.transforms]}


def _named(kind: Any) -> str:
    return kind if isinstance(kind, str) else type(kind).__name__


def _check_multiple(batch_size: int, slice_len: int) -> None:
    if batch_size % slice_len:
        raise ValueError(
            f"replay.batch_size must be a multiple of slice_len={slice_len}, got {batch_size}; "
            f"use {nearest_multiples(batch_size, slice_len)}"
        )
