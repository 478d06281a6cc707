"""Offline data in any format as batches of rows, and as a replay buffer."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from lit_collect.offline.memory_maps import read_rows
from lit_collect.offline.minari import MinariRows, find_minari
from lit_collect.replay.buffer import ReplayBuffer
from lit_collect.replay.samplers import Sampler
from lit_collect.replay.storage import Storage
from lit_collect.replay.transforms import SampleTransform

_ROWS = 4096  # of one batch


class OfflineRows(Protocol):
    """Rows on disk."""

    num_rows: int
    """All of them."""
    observation_spec: dict[str, Any] | None
    """The observation space as plain data, if it is known."""
    action_spec: dict[str, Any] | None
    """The action space as plain data, if it is known."""

    def batches(self) -> Iterator[TensorDictBase]:
        """All rows in the order of writing, [M] at a time."""


class MappedRows:
    """A memory-mapped TensorDict of rows.

    Args:
        path: its folder.

    Raises:
        LitCollectError: if it cannot be read.
        FrameContractError: if it holds no rows of transitions.
    """

    def __init__(self, path: str | Path) -> None:
        self.rows, about = read_rows(path)
        self.num_rows = len(self.rows)
        self.observation_spec: dict[str, Any] | None = about.get("observation_spec")
        self.action_spec: dict[str, Any] | None = about.get("action_spec")

    def batches(self) -> Iterator[TensorDictBase]:
        """Some thousand rows at a time, mapped."""
        for begin in range(0, self.num_rows, _ROWS):
            yield self.rows[begin : begin + _ROWS]


class MinariBatches:
    """A Minari data set.

    Args:
        path: its folder, or its id.
        info_keys: see `MinariRows`.
    """

    def __init__(self, path: str | Path, info_keys: Sequence[str] = ()) -> None:
        self._data = MinariRows(path, info_keys)
        self.num_rows = self._data.num_rows
        self.observation_spec: dict[str, Any] | None = self._data.observation_spec
        self.action_spec: dict[str, Any] | None = self._data.action_spec

    def batches(self) -> Iterator[TensorDictBase]:
        """Whole episodes, some thousand rows at a time."""
        kept: list[TensorDictBase] = []
        for episode in self._data.episodes():
            kept.append(episode)
            if sum(map(len, kept)) >= _ROWS:
                yield _joined(kept)
                kept.clear()
        if kept:
            yield _joined(kept)


def open_offline(path: str | Path, info_keys: Sequence[str] = ()) -> OfflineRows:
    """Find out what lies at a path, and open it; the rows are read later.

    Args:
        path: the folder of a Minari data set or of a memory-mapped TensorDict, or the id of a data set that Minari has
            downloaded.
        info_keys: of a Minari data set, which infos and texts become keys of the rows (see `RolloutConfig.info_keys`).

    Raises:
        FileNotFoundError: if there is nothing.
        ValueError: if it is something else, or holds no rows.
        ModuleNotFoundError: if Minari is needed and not installed.
        LitCollectError: if it cannot be read.
    """
    folder = Path(path)
    if find_minari(folder) is not None:
        found: OfflineRows = MinariBatches(folder, info_keys)
    elif not folder.exists():
        raise FileNotFoundError(
            f"there is no offline data at {path} : expected the folder of a Minari data set or of a memory-mapped "
            f"TensorDict; `lit-collect collect` makes both, `minari download` gets those of others"
        )
    elif not (folder / "meta.json").is_file():
        raise ValueError(
            f"{path} holds no offline data : expected a Minari data set (with data/metadata.json) or a memory-mapped "
            f"TensorDict (with meta.json); a run that was cut off before its first rows leaves neither"
        )
    else:
        if info_keys:
            raise ValueError(
                f"info_keys choose from a Minari data set : expected none for {path}, whose rows have keys"
            )
        found = MappedRows(folder)
    if found.num_rows == 0:
        raise ValueError(f"the offline data at {path} are empty : expected at least one row")
    return found


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
        sampler: see `ReplayBuffer`.
        slice_len: see `ReplayBuffer`.
        storage: where the rows lie; a mapped one is filled once, and found again.
        storage_path: the folder of ``storage="mapped"``.
        transforms: what is done to each sample.
        info_keys: see `open_offline`.
        seed: of the samples.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if it is no data, or settings do not fit.
        FrameContractError: if the rows do not fit each other.
    """
    data = open_offline(path, info_keys)
    buffer = ReplayBuffer(
        data.num_rows,
        batch_size,
        sampler=sampler,
        slice_len=slice_len,
        storage=storage,
        path=storage_path,
        transforms=transforms,
        seed=seed,
    )
    fill(buffer, data)
    return buffer


def check_spaces(path: str | Path, of_data: Mapping[str, Any], of_env: Mapping[str, Any]) -> None:
    """Raise unless an env has the spaces of the data, but for bounds and dtypes.

    Args:
        path: of the data.
        of_data: spaces as plain data by name; None for one that nobody knows.
        of_env: the same of the env.

    Raises:
        ValueError: naming the first one that differs.
    """
    for name, expected in of_data.items():
        found = None if expected is None else _difference(name, expected, of_env[name])
        if found is not None:
            raise ValueError(
                f"the env has another {found[0]} than the rows at {path} : expected {found[1]}, got {found[2]}; give "
                f"the env that they were collected in"
            )


def fill(buffer: ReplayBuffer, data: OfflineRows) -> None:
    """Write all rows into a buffer, unless they are there.

    Args:
        buffer: with a capacity of as many rows.
        data: the rows.

    Raises:
        ValueError: if the buffer holds other rows, or some of them.
    """
    if buffer.write_count == data.num_rows:
        return
    if buffer.write_count:
        raise ValueError(
            f"the storage holds {buffer.write_count} rows of another time : expected none, or the {data.num_rows} of "
            f"the data; give it a folder of its own"
        )
    for batch in data.batches():
        buffer.extend(batch)


def _difference(name: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Where one space differs from another, and what stands there in both; None if they are alike."""
    first, second = _inner(expected), _inner(got)
    if _outline(expected) != _outline(got):
        return name, _outline(expected), _outline(got)
    differences = (_difference(f"{name} at {key!r}", first[key], second[key]) for key in first)
    return next((found for found in differences if found is not None), None)


def _inner(space: Mapping[str, Any]) -> Mapping[Any, Any]:
    """The spaces within a space."""
    inner = space.get("spaces", {})
    return inner if isinstance(inner, Mapping) else dict(enumerate(inner))


def _outline(space: Mapping[str, Any]) -> str:
    """The kind of a space, and what decides which values fit a network: neither bounds nor dtypes."""
    if "spaces" in space:
        return f"{space['kind']} of {', '.join(sorted(map(str, _inner(space))))}"
    sizes = [f"{name}={space[name]}" for name in ("shape", "n", "nvec") if name in space]
    return f"{space['kind']} with {', '.join(sizes)}"


def _joined(episodes: list[TensorDictBase]) -> TensorDictBase:
    rows: TensorDictBase = torch.cat(episodes)  # type: ignore[arg-type, assignment]  # tensordict joins them
    return rows
