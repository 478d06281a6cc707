"""What a checkpoint says of a storage: its rows, or where the files are that hold them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lit_collect.replay.drawing import Sampler
from lit_collect.replay.layout import RowLayout
from lit_collect.replay.mapped import MappedStorage
from lit_collect.replay.storage import Storage

_OF_BUFFER = (
    "capacity",
    "write_count",
    "layout",
    "sampler_kind",
    "compact_obs",
    "sampler",
    "random",
    "sampled",
    "age_sum",
    "learner_version",
)
_OF_MEMORY = ("records", "void")


def contents_of(storage: Storage) -> dict[str, Any]:
    """Rows and counters of a storage as plain values and tensors; used while the storage is.

    Args:
        storage: opened. Of a mapped one only the folder and the counters are told, and everything is flushed.
    """
    layout = storage.layout
    state: dict[str, Any] = {
        "capacity": storage.capacity,
        "write_count": storage.write_count,
        "layout": None if layout is None else layout.describe(),
    }
    if isinstance(storage, MappedStorage):
        storage.flush()
        return {**state, "path": str(storage.path)}
    if layout is not None:
        records = storage.take(np.arange(storage.size))
        lost = storage.is_void
        state["records"] = torch.from_numpy(records.view(np.uint8).reshape(len(records), layout.dtype.itemsize))
        state["void"] = None if lost is None else torch.from_numpy(lost[: len(records)].copy())
    return state


def check_complete(state: Mapping[str, Any]) -> None:
    """Raise unless a state has all that one of a buffer has.

    Args:
        state: anything.

    Raises:
        TypeError: if it is no mapping.
        ValueError: naming what it lacks.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state of a replay buffer must be a mapping, got {type(state).__name__}")
    needed = _OF_BUFFER if "path" in state or state.get("layout") is None else (*_OF_BUFFER, *_OF_MEMORY)
    missing = [name for name in needed if name not in state]
    if missing:
        raise ValueError(
            f"the state is not that of a replay buffer : expected {', '.join(needed)}, got none of "
            f"{', '.join(missing)}; give what state_dict() gave"
        )


def check_draws(sampler: Sampler, state: Mapping[str, Any]) -> None:
    """Raise unless a state has all that a sampler needs to draw on.

    Args:
        sampler: that of the buffer.
        state: with ``sampler`` and ``random``.

    Raises:
        ValueError: naming what it lacks.
    """
    there = state.get("sampler", {})
    missing = [f"sampler.{name}" for name in sampler.state_dict() if name not in there]
    missing += [name for name in ("sampler", "random") if name not in state]
    if missing:
        raise ValueError(
            f"the state is not that of a buffer with a {type(sampler).__name__} : expected also {', '.join(missing)}; "
            f"give what state_dict() gave"
        )


def check_contents(storage: Storage, state: Mapping[str, Any]) -> None:
    """Raise unless a storage can hold what a state tells.

    Args:
        storage: opened.
        state: what `contents_of` gave.

    Raises:
        ValueError: if it is of another capacity or kind, of other rows, or rows are missing in the files.
    """
    if state["capacity"] != storage.capacity:
        raise ValueError(
            f"the state is of a buffer of another capacity : expected capacity={storage.capacity}, got "
            f"{state['capacity']}; build the buffer as it was"
        )
    in_files = isinstance(storage, MappedStorage)
    if ("path" in state) != in_files:
        kinds = ("in memory", "in files")
        raise ValueError(
            f"the state is of another kind of storage : expected rows {kinds[in_files]}, got rows "
            f"{kinds[not in_files]}; build the buffer with the storage it had"
        )
    described = None if state["layout"] is None else RowLayout.from_description(state["layout"])
    if described is not None and storage.layout is not None and described != storage.layout:
        raise ValueError(f"the state is of other rows : {storage.layout.mismatch(described)}")
    if in_files and storage.write_count < state["write_count"]:
        raise ValueError(
            f"the files of the buffer lack rows of the state : expected {state['write_count']} rows written in "
            f"{state['path']}, got {storage.write_count} in {getattr(storage, 'path', None)}; bring the folder along "
            f"with the checkpoint"
        )


def load_contents(storage: Storage, state: Mapping[str, Any]) -> None:
    """Hold what a state tells, and nothing else; used while the storage is.

    Args:
        storage: opened; checked by `check_contents`.
        state: what `contents_of` gave.
    """
    if "path" in state or state["layout"] is None:
        storage.void_after(state["write_count"])
        return
    layout = RowLayout.from_description(state["layout"])
    storage.begin(layout)
    records = np.ascontiguousarray(state["records"].numpy()).reshape(-1).view(layout.opaque).view(layout.dtype)
    void = state["void"]
    storage.load(records, state["write_count"], None if void is None else void.numpy())
