"""`RowLayout`: how the leaves of one transition lie side by side in one packed record.

A buffer of records is one block of memory, so a sample of rows is a single `take`, and each leaf of the sample is a
strided view of what was taken.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from lit_collect.errors import FrameContractError
from lit_collect.frames import Key, as_key, put_at

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By item size: in what dtype items travel whose own dtype NumPy does not know."""

_NO_LEAVES: Mapping[Key, Tensor] = {}

_SHORT = 64  # bytes of a vector up to which NumPy copies it faster as one item than number by number


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One leaf of a row."""

    key: Key
    shape: tuple[int, ...]
    """Of one row."""
    dtype: torch.dtype

    @property
    def field(self) -> str:
        """Its name in the record: the parts of the key between slashes (a slash in a part is written ~1)."""
        return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in self.key)

    @property
    def carrier(self) -> torch.dtype:
        """The dtype in which the items lie in the record, of the same size."""
        try:
            torch.empty(0, dtype=self.dtype).numpy()
        except TypeError:
            return _CARRIERS[self.dtype.itemsize]
        return self.dtype

    @property
    def format(self) -> tuple[np.dtype, tuple[int, ...]]:
        """NumPy's dtype of the items in the record, and their shape."""
        return torch.empty(0, dtype=self.carrier).numpy().dtype, self.shape

    @property
    def whole(self) -> str | None:
        """NumPy's dtype of a short vector as one item, None for others."""
        return f"V{_size(self)}" if len(self.shape) == 1 and self.shape[0] > 1 and _size(self) <= _SHORT else None

    def __str__(self) -> str:
        return f"{_name(self.dtype)} {list(self.shape)}"


class RowLayout:
    """Keys, shapes and dtypes of the rows of a buffer, and where they lie in a record.

    Two layouts of the same leaves are equal, and their records too, in whatever order the leaves were given.

    Args:
        leaves: of a row.
        left_out: keys that batches may have and records have not.

    Example:
        >>> rows = TensorDict({"action": torch.arange(3), "next": {"done": torch.zeros(3, 1).bool()}}, batch_size=[3])
        >>> layout = RowLayout.of(rows)
        >>> layout.unpack(layout.pack(rows)[[2, 0]])["action"]
        tensor([2, 0])
    """

    def __init__(self, leaves: Iterable[Leaf], *, left_out: Collection[Key] = ()) -> None:
        # Large items first: each item then lies at a multiple of its own size, and nothing is lost between leaves.
        self.leaves = tuple(sorted(leaves, key=lambda leaf: (-leaf.dtype.itemsize, leaf.key)))
        self.left_out = frozenset(left_out)
        self.keys: tuple[Key, ...] = tuple(leaf.key for leaf in self.leaves)
        self.dtype = _record(self.leaves)
        """Of a record: one field for each leaf, see `field`."""
        self.opaque = np.dtype(f"V{self.dtype.itemsize}")
        """Of a record whose inside does not matter: NumPy copies such records ten times as fast."""
        self._used = sum(_size(leaf) for leaf in self.leaves)
        self._expected = {leaf.key: (leaf.shape, leaf.dtype) for leaf in self.leaves}
        self._columns = {leaf.key: (leaf.field, _if_other(leaf.carrier, leaf.dtype)) for leaf in self.leaves}
        nodes = sorted(
            {key[:depth] for key in self.keys for depth in range(1, len(key))}, key=lambda node: (len(node), node)
        )
        numbers = {node: number for number, node in enumerate([(), *nodes])}
        self._nodes = [(numbers[node[:-1]], node[-1]) for node in nodes]  # each: number of its parent, name in it
        self._whole = {leaf.key: leaf.whole for leaf in self.leaves}
        self._views = [  # each: number of its node, name in it, field, its dtype if the field has another one
            (numbers[leaf.key[:-1]], leaf.key[-1], leaf.field, _if_other(leaf.dtype, leaf.carrier))
            for leaf in self.leaves
        ]

    @classmethod
    def of(cls, rows: TensorDictBase, *, leave_out: Collection[Key] = ()) -> "RowLayout":
        """The layout of rows like these.

        Args:
            rows: [M], any M.
            leave_out: keys that are not stored; they need not be there.

        Raises:
            FrameContractError: if there is nothing to store, or something that is no dense tensor.
        """
        left_out = frozenset(as_key(key) for key in leave_out)
        leaves = []
        for name, value in rows.items(True, True, is_leaf=is_leaf_nontensor):
            if (key := as_key(name)) not in left_out:
                leaves.append(Leaf(key=key, shape=tuple(_dense(key, value).shape[1:]), dtype=value.dtype))
        if not leaves:
            raise FrameContractError(
                f"rows have nothing to store : expected at least one tensor, got the keys {_list(rows)}"
            )
        return cls(leaves, left_out=left_out)

    def field(self, key: Key) -> str:
        """The name of a leaf's field in the records.

        Raises:
            KeyError: if rows have no such leaf.
        """
        return self._columns[key][0]

    def check(self, rows: TensorDictBase) -> None:
        """Raise unless rows have the keys, shapes and dtypes of this layout.

        Args:
            rows: [M], any M.

        Raises:
            FrameContractError: naming the keys that are missing, new or of another shape or dtype.
        """
        self._chosen(rows)

    def pack(self, rows: TensorDictBase) -> np.ndarray:
        """Copy rows into fresh records.

        Args:
            rows: [M], checked as `check` does it; on any device.

        Returns:
            [M] of `dtype`.
        """
        columns = self._chosen(rows)
        records = np.empty(len(rows), self.dtype)
        if self._used < self.dtype.itemsize:  # equal rows make equal records, to the last byte
            records.view(np.uint8).reshape(len(rows), self.dtype.itemsize)[:, self._used :] = 0
        for key, column in columns:
            field, carrier = self._columns[key]
            if carrier is not None:
                column = column.view(carrier)
            _copy(records[field], column.numpy(force=True), self._whole[key])
        return records

    def unpack(
        self,
        records: np.ndarray,
        extra: Mapping[Key, Tensor] = _NO_LEAVES,
        *,
        names: Sequence[str | None] | None = None,
    ) -> TensorDict:
        """Rows as a TensorDict whose leaves are views of the records.

        Args:
            records: [...] of `dtype`, writable; owned by what is returned from here on.
            extra: further leaves, [...] each.
            names: of the dimensions.

        Returns:
            [...], nested as the rows were.
        """
        nodes: list[dict[str, Any]] = [{}]
        for parent, name in self._nodes:
            nodes.append({})
            nodes[parent][name] = nodes[-1]
        with outside_inference():
            for node, name, field, dtype in self._views:
                column = torch.from_numpy(records[field])
                nodes[node][name] = column if dtype is None else column.view(dtype)
            for key, value in extra.items():
                put_at(nodes[0], key, value)
            return TensorDict(nodes[0], batch_size=records.shape, names=names)  # type: ignore[arg-type]

    def column(self, records: np.ndarray, key: Key) -> Tensor:
        """One leaf of records as a view.

        Args:
            records: [...] of `dtype`, writable.
            key: of the leaf.

        Returns:
            [..., *shape of the leaf].
        """
        field, carrier = self._columns[key]
        column = torch.from_numpy(records[field])
        return column if carrier is None else column.view(self._expected[key][1])

    def describe(self) -> dict[str, Any]:
        """The layout as lists, strings and numbers, for a file."""
        leaves = [
            {"key": list(leaf.key), "shape": list(leaf.shape), "dtype": _name(leaf.dtype)} for leaf in self.leaves
        ]
        return {"leaves": leaves, "left_out": sorted(list(key) for key in self.left_out)}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "RowLayout":
        """The layout that `describe` described."""
        leaves = [
            Leaf(key=tuple(leaf["key"]), shape=tuple(leaf["shape"]), dtype=getattr(torch, leaf["dtype"]))
            for leaf in description["leaves"]
        ]
        return cls(leaves, left_out=[tuple(key) for key in description["left_out"]])

    def mismatch(self, other: "RowLayout") -> FrameContractError:
        """The error that says what rows of another layout have otherwise."""
        differences = _differences(self.leaves, other.leaves)
        if self.left_out != other.left_out:
            differences.append(f"left out : expected {sorted(self.left_out)}, got {sorted(other.left_out)}")
        return FrameContractError(
            f"rows do not fit those that are stored : {', '.join(differences)}; write rows of one kind into a buffer, "
            "or make another buffer for these"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowLayout) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __reduce__(self) -> tuple[Any, ...]:
        return RowLayout.from_description, (self.describe(),)

    def __repr__(self) -> str:
        return f"RowLayout({', '.join(f'{leaf.key}: {leaf}' for leaf in self.leaves)})"

    def _identity(self) -> tuple[Any, ...]:
        return self.leaves, self.left_out

    def _chosen(self, rows: TensorDictBase) -> list[tuple[Key, Tensor]]:
        """The leaves of rows that are stored, all of them and each as it must be."""
        chosen = []
        for name, column in rows.items(True, True, is_leaf=is_leaf_nontensor):
            key = as_key(name)
            expected = self._expected.get(key)
            if expected is None:
                if key in self.left_out:
                    continue
                raise self.mismatch(RowLayout.of(rows, leave_out=self.left_out))
            column = _dense(key, column)
            if column.dtype is not expected[1] or tuple(column.shape[1:]) != expected[0]:
                raise self.mismatch(RowLayout.of(rows, leave_out=self.left_out))
            chosen.append((key, column))
        if len(chosen) != len(self.leaves):
            raise self.mismatch(RowLayout.of(rows, leave_out=self.left_out))
        return chosen


def outside_inference() -> AbstractContextManager[Any]:
    """Where tensors are made that anything may be done with, also by a caller in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _copy(into: np.ndarray, values: np.ndarray, whole: str | None) -> None:
    """Copy one leaf of rows; `whole` is its dtype as one item."""
    if whole is None:
        into[...] = values
    else:
        into.view(whole)[:, 0] = np.ascontiguousarray(values).view(whole)[:, 0]


def _record(leaves: Sequence[Leaf]) -> np.dtype:
    """The dtype of a record; its size is a multiple of the largest item's, as torch wants it of strides."""
    offsets, used = [], 0
    for leaf in leaves:
        offsets.append(used)
        used += _size(leaf)
    unit = max((leaf.dtype.itemsize for leaf in leaves), default=1)
    return np.dtype(
        {
            "names": [leaf.field for leaf in leaves],
            "formats": [leaf.format for leaf in leaves],
            "offsets": offsets,
            "itemsize": max(-(-used // unit), 1) * unit,
        }
    )


def _size(leaf: Leaf) -> int:
    """Bytes of a leaf."""
    return leaf.dtype.itemsize * int(np.prod(leaf.shape))


def _dense(key: Key, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided or value.is_quantized:
        kind = type(value).__name__ if not isinstance(value, Tensor) else "a nested, sparse or quantized one"
        raise FrameContractError(
            f"the value of {key} cannot be stored : expected a dense tensor, got {kind}; leave the key out of the batch"
        )
    return value


def _differences(there: Sequence[Leaf], given: Sequence[Leaf]) -> list[str]:
    expected = {leaf.key: str(leaf) for leaf in there}
    got = {leaf.key: str(leaf) for leaf in given}
    return [
        *(f"{key} is missing" for key in expected if key not in got),
        *(f"{key} is new" for key in got if key not in expected),
        *(f"{key} : expected {text}, got {got[key]}" for key, text in expected.items() if got.get(key, text) != text),
    ]


def _if_other(dtype: torch.dtype, than: torch.dtype) -> torch.dtype | None:
    return None if dtype is than else dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(rows: TensorDictBase) -> list[Key]:
    return [as_key(key) for key in rows.keys(True, True)]
