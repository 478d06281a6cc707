"""Writers decide where rows go: over the oldest ones, or over the worst."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from tensordict import TensorDictBase

from lit_collect.errors import FrameContractError
from lit_collect.frames import Key, as_key


class Writer(ABC):
    """Chooses the places of rows in a buffer; each buffer has a writer of its own."""

    in_order: bool = True
    """Whether rows take each other's places in the order in which they were written, so that those that followed each
    other can be found again."""

    def check(self, rows: TensorDictBase) -> None:  # noqa: B027  # most writers take whatever comes
        """Raise unless `place` would find what it looks at; nothing is changed.

        Args:
            rows: [M].
        """

    @abstractmethod
    def place(self, rows: TensorDictBase, capacity: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Choose places; the caller writes the rows there.

        Args:
            rows: [M], at most as many as the capacity.
            capacity: of the buffer.

        Returns:
            Which rows are kept and the positions where each of them goes, int64 [K] both. None: all of them, over the
            oldest ones.
        """

    def reopen(self, rows: TensorDictBase) -> None:  # noqa: B027  # most writers need not know
        """Take note of what a buffer holds after its state was loaded, or that it was emptied.

        Args:
            rows: all of them, from position 0 on.
        """


class RingWriter(Writer):
    """Writes each row over the oldest one once the buffer is full."""

    def place(self, rows: TensorDictBase, capacity: int) -> None:
        """All rows, over the oldest ones."""
        return


class BestWriter(Writer):
    """Keeps the rows with the largest values of a key; of equal ones those that came first.

    Rows that followed each other do not stay together, so that there are no slices, no n-step returns and no compact
    observations with it, and the rows must be in this process's memory. A write into a full buffer looks at all values.

    Args:
        key: of one number in each row, for instance ``("next", "reward")``.

    Example:
        >>> from tensordict import TensorDict
        >>> from lit_collect.replay import ReplayBuffer
        >>> buffer = ReplayBuffer(3, batch_size=2, writer=BestWriter("score"))
        >>> buffer.extend(TensorDict({"score": torch.tensor([5.0, 1.0, 4.0, 3.0])[:3]}, batch_size=[3])).tolist()
        [0, 1, 2]
        >>> buffer.extend(TensorDict({"score": torch.tensor([0.0, 3.0])}, batch_size=[2])).tolist()
        [-1, 1]
    """

    in_order = False

    def __init__(self, key: str | tuple[str, ...]) -> None:
        if not key or not all(isinstance(part, str) and part for part in as_key(key)):
            raise ValueError(f"key must name a column of the rows : expected a string or a tuple of them, got {key!r}")
        self.key: Key = as_key(key)
        self._values = np.empty(0, np.float64)  # of the rows that are there, by position

    def check(self, rows: TensorDictBase) -> None:
        """Raise unless each row has such a value.

        Raises:
            FrameContractError: if there is none, not exactly one number, or NaN.
        """
        self._values_of(rows)

    def place(self, rows: TensorDictBase, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows that are better than the worst one, which goes for each of them."""
        values = self._values_of(rows)
        room = min(capacity - len(self._values), len(values))
        kept, positions = np.arange(room), np.arange(len(self._values), len(self._values) + room)
        self._values = np.concatenate([self._values, values[:room]])
        if room == len(values):
            return kept, positions
        return self._replace(values, kept, positions)

    def reopen(self, rows: TensorDictBase) -> None:
        """Read the values of the rows that are there."""
        self._values = self._values_of(rows) if len(rows) else np.empty(0, np.float64)

    def _replace(self, values: np.ndarray, kept: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Exchange the worst for the rest of the rows, those that were placed just now among them."""
        room, rest = len(kept), np.arange(len(kept), len(values))
        count = min(len(rest), len(self._values))
        better = rest[np.argsort(-values[rest], kind="stable")[:count]]
        worst = np.argpartition(self._values, count - 1)[:count]
        worst = worst[np.argsort(self._values[worst], kind="stable")]
        exchange = values[better] > self._values[worst]  # first the best for the worst: once it is no gain, none is
        better, worst = better[exchange], worst[exchange]
        self._values[worst] = values[better]
        stays = ~np.isin(positions, worst)
        assert room == len(stays)
        return np.concatenate([kept[stays], better]), np.concatenate([positions[stays], worst])

    def _values_of(self, rows: TensorDictBase) -> np.ndarray:
        column = rows.get(self.key, None)
        name = ".".join(self.key)
        if not isinstance(column, torch.Tensor):
            raise FrameContractError(
                f"the rows to keep by {name!r} lack it : expected one of "
                f"{sorted('.'.join(as_key(key)) for key in rows.keys(True, True))}"
            )
        if column.numel() != len(rows):
            raise FrameContractError(
                f"{name!r} must be one number in each row to keep the best by it, got shape {tuple(column.shape[1:])}"
            )
        values = column.detach().cpu().reshape(-1).double().numpy()
        if np.isnan(values).any():
            raise FrameContractError(
                f"{name!r} is NaN in row {int(np.isnan(values).argmax())}; the best cannot be told"
            )
        return values


def resolve_writer(writer: "str | Writer") -> Writer:
    """A writer by name, or as it is.

    Args:
        writer: ``"ring"``, or a `Writer`.

    Raises:
        ValueError: if there is none of that name.
        TypeError: if it is neither.
    """
    if isinstance(writer, Writer):
        return writer
    if not isinstance(writer, str):
        raise TypeError(f"writer must be 'ring' or a Writer, got {writer!r}")
    if writer != "ring":
        raise ValueError(f"writer must be 'ring', or a Writer such as BestWriter(key), got {writer!r}")
    return RingWriter()
