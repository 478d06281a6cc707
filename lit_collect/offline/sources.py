"""Offline data in any format as batches of rows."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from lit_collect.offline.digests import digest_of
from lit_collect.offline.memory_maps import read_rows
from lit_collect.offline.minari import MinariRows, find_minari

_ROWS = 4096  # of one batch


class OfflineRows(Protocol):
    """Rows on disk."""

    path: Path
    """Where."""
    num_rows: int
    """All of them."""
    observation_spec: dict[str, Any] | None
    """The observation space as plain data, if it is known."""
    action_spec: dict[str, Any] | None
    """The action space as plain data, if it is known."""

    @property
    def digest(self) -> str:
        """What tells these rows from others, wherever they lie (see `digest_of`)."""

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
        self.path = Path(path)
        self.rows, about = read_rows(path)
        self.num_rows = len(self.rows)
        self.observation_spec: dict[str, Any] | None = about.get("observation_spec")
        self.action_spec: dict[str, Any] | None = about.get("action_spec")

    @cached_property
    def digest(self) -> str:
        """See `OfflineRows.digest`."""
        return digest_of(self.path, "*.memmap")

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
        self._data, self._info_keys = MinariRows(path, info_keys), tuple(info_keys)
        self.path = self._data.path
        self.num_rows = self._data.num_rows
        self.observation_spec: dict[str, Any] | None = self._data.observation_spec
        self.action_spec: dict[str, Any] | None = self._data.action_spec

    @cached_property
    def digest(self) -> str:
        """See `OfflineRows.digest`; infos that are read make other rows."""
        return digest_of(self.path, "*", *self._info_keys)

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
        TypeError: if the path is none.
        FileNotFoundError: if there is nothing.
        ValueError: if it is something else, or holds no rows.
        ModuleNotFoundError: if Minari is needed and not installed.
        LitCollectError: if it cannot be read.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"path must be the folder of offline data or the id of a Minari data set, got {path!r}")
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
