"""Rows become a batch: windows of steps are copied into [N, T] tensors, and episodes get their ids."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lit_collect.columns import Columns
from lit_collect.envs.base import Final
from lit_collect.envs.spaces import LeafSpec
from lit_collect.errors import FrameContractError
from lit_collect.frames import SUCCESSORS, Key, is_private, put_at
from lit_collect.successors import SuccessorTable


class Episodes:
    """Where each env copy is in its sequence of trajectories.

    The k-th trajectory of global env g has the id ``k * G + g``, G = env copies over all workers and ranks.

    Args:
        indices: global indices of the env copies.
        total_copies: G.
    """

    def __init__(self, indices: range, total_copies: int) -> None:
        self.indices = indices
        self._total_copies = total_copies
        self._number = np.zeros(len(indices), np.int64)  # of each copy's running trajectory
        self._open = np.zeros(len(indices), bool)  # which running trajectories have rows
        self.fresh = np.ones(len(indices), bool)
        """[N] bool: which copies begin an episode with their next row."""

    @property
    def next_numbers(self) -> list[int]:
        """For each copy the number of its first trajectory that has no rows yet."""
        return (self._number + self._open).tolist()

    def restore(self, numbers: Sequence[int]) -> None:
        """Go on counting from another run's `next_numbers`, with new episodes."""
        self.leave()
        self._number = np.array(numbers, np.int64)

    def leave(self, rows: Any = slice(None)) -> None:
        """Leave running trajectories where they are; their ids are not used again."""
        self._number[rows] += self._open[rows]
        self._open[rows] = False
        self.fresh[rows] = True

    def advance(self, done: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Move on by one batch.

        Args:
            done: [T, N] bool, rows that end a trajectory.
            valid: [T, N] bool, rows that are transitions.

        Returns:
            [T, N] int64, the rows' ids.
        """
        ended = np.cumsum(done, 0)
        numbers = np.repeat(self._number[None], len(done), 0)
        numbers[1:] += ended[:-1]
        self._number = self._number + ended[-1]
        self._open = valid[-1] & ~done[-1]
        return numbers * self._total_copies + np.asarray(self.indices, np.int64)


class Storage(Protocol):
    """Where the large columns of a batch are put together."""

    def empty(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a column of any content.

        Args:
            key: of the column.
            shape: [N, T, ...].
            dtype: of the column.
        """


class PrivateStorage:
    """Fresh memory for every batch, which then belongs to whoever is given the batch."""

    def empty(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Storage.empty`."""
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype)


PRIVATE = PrivateStorage()


class Assembly:
    """One batch in the making. What it hands out shares no memory with anything that is written again.

    Args:
        steps: T.
        num_envs: N.
        leaves: what comes with every step of one env copy.
        observed: how many of them, from the first on, are the observation.
        storage: where the large columns lie.
        compact: whether the successors of the observation are left out (see `lit_collect.successors`).
    """

    def __init__(
        self,
        steps: int,
        num_envs: int,
        *,
        leaves: Sequence[LeafSpec],
        observed: int,
        storage: Storage = PRIVATE,
        compact: bool = False,
    ) -> None:
        self._shape = (num_envs, steps)
        self._leaves = leaves
        self._observed = observed
        self._compact = observed if compact else 0  # so many leaves have no column of successors
        self._storage = storage
        self._seen = [self._column(leaf.key, leaf) for leaf in leaves]
        self._successors = [self._column(("next", *leaf.key), leaf) for leaf in leaves[self._compact :]]
        self._edge: list[Tensor] = []  # what follows the last step
        self.outputs: dict[Key, Tensor] = {}
        """[N, T, ...] by key: what the policy gave."""
        self.reward = np.zeros((steps, num_envs), np.float32)
        self.terminated = np.zeros((steps, num_envs), bool)
        self.truncated = np.zeros((steps, num_envs), bool)
        self.valid = np.ones((steps, num_envs), bool)
        self._finals: list[tuple[int, Final]] = []

    def take(
        self, columns: Columns, start: int, stop: int, *, keys: Sequence[Key], finals: Sequence[tuple[int, Final]]
    ) -> None:
        """Copy the first steps of a window into the steps from `start` to `stop` of the batch.

        Args:
            columns: the window.
            start: first step.
            stop: the step after the last one.
            keys: outputs that were written.
            finals: true successors of rows that ended, by step of the window.
        """
        count = stop - start
        for position, column in enumerate(columns.observations):
            self._seen[position][:, start:stop].copy_(column[:count].transpose(0, 1))
            if position >= self._compact:
                successors = self._successors[position - self._compact]
                successors[:, start:stop].copy_(column[1 : count + 1].transpose(0, 1))
        self._edge = [column[count].clone() for column in columns.observations[: self._compact]]
        for key in keys:
            self._output(key, columns)[:, start:stop].copy_(columns.outputs[key][:count].transpose(0, 1))
        for name in ("reward", "terminated", "truncated", "valid"):
            getattr(self, name)[start:stop] = getattr(columns, name)[:count]
        for step, final in finals:
            self._finals.append((start + step, final))
            for successors, leaf in zip(self._successors, final.obs[self._compact :], strict=True):
                successors.numpy()[final.row, start + step] = leaf

    def cut(self, steps: int) -> None:
        """Make a batch of the first steps only."""
        self._shape = (self._shape[0], steps)
        self._seen = [column[:, :steps] for column in self._seen]
        self._successors = [column[:, :steps] for column in self._successors]
        self.outputs = {key: column[:, :steps] for key, column in self.outputs.items()}
        for name in ("reward", "terminated", "truncated", "valid"):
            setattr(self, name, getattr(self, name)[:steps])

    def fill(self, columns: Columns) -> None:
        """Give rows that the policy did not act what it would have given: zeros, unless something is written later."""
        for key in columns.outputs:
            self._output(key, columns)

    def finish(
        self, episodes: Episodes, *, versions: np.ndarray, completed: Mapping[Key, Tensor], mask: np.ndarray | None
    ) -> TensorDict:
        """Make the batch, and move the episodes on.

        Args:
            episodes: of these env copies.
            versions: [T] int64, of the weights that acted.
            completed: [N, T, ...] further outputs by key.
            mask: [T, N] bool, rows that count; None if all do.

        Returns:
            [N, T] as `lit_collect.frames` describes it.
        """
        done = self.terminated | self.truncated
        root: dict[str, Any] = {}
        successors: dict[str, Any] = {}
        for leaf, seen in zip(self._leaves, self._seen, strict=True):
            if not is_private(leaf.key):
                put_at(root, leaf.key, seen)
        for leaf, following in zip(self._leaves[self._compact :], self._successors, strict=True):
            if not is_private(leaf.key):
                put_at(successors, leaf.key, following)
        for key, value in {**self.outputs, **completed}.items():
            if not is_private(key):
                put_at(root, key, value)
        with torch.inference_mode(False):
            for name in ("done", "terminated", "truncated"):
                root[name] = torch.zeros((*self._shape, 1), dtype=torch.bool)
            root["is_init"] = _flag(self._first_rows(episodes))
            successors["reward"] = _flag(self.reward)
            successors["done"] = _flag(done)
            successors["terminated"], successors["truncated"] = _flag(self.terminated), _flag(self.truncated)
            root["next"] = successors
            root["collector"] = self._labels(episodes.advance(done, self.valid), versions, mask)
            if self._compact:
                put_at(root, SUCCESSORS, self._table().entry())
            return TensorDict(root, batch_size=self._shape, names=[None, "time"])  # type: ignore[list-item]

    def check_finite(self) -> None:
        """Raise for the first reward or observation that is NaN or infinite.

        Raises:
            FrameContractError: naming the step and the env copy.
        """
        named = [("reward", self.reward.T)]
        seen, following = self._seen[: self._observed], self._successors[: self._observed - self._compact]
        for name, columns in (("observation", seen), ("next observation", following)):
            named += [(name, column.numpy()) for column in columns if column.is_floating_point()]
        if self._compact:
            self._check_finite_table()
        for name, values in named:
            if not np.isfinite(values).all():
                copy, step = np.argwhere(~np.isfinite(values))[0][:2].tolist()
                raise FrameContractError(f"{name} of env copy {copy} is not finite at step {step} of the batch")

    def _table(self) -> SuccessorTable:
        """The successors that no row repeats: those of rows that ended, then those of the last step."""
        num_envs, last = self._shape[0], self._shape[1] - 1
        finals = [(step, final) for step, final in self._finals if step <= last]
        ended_last = {final.row for step, final in finals if step == last}
        others = [row for row in range(num_envs) if row not in ended_last]
        values = {}
        for position, leaf in enumerate(self._leaves[: self._compact]):
            ends = [torch.from_numpy(np.asarray(final.obs[position])) for _, final in finals]
            values[leaf.key] = torch.stack([*ends, *self._edge[position][others].unbind()])
        return SuccessorTable(
            shape=self._shape,
            copies=torch.tensor([*(final.row for _, final in finals), *others], dtype=torch.int64),
            steps=torch.tensor([*(step for step, _ in finals), *(last for _ in others)], dtype=torch.int64),
            values={key: value for key, value in values.items() if not is_private(key)},
        )

    def _check_finite_table(self) -> None:
        table = self._table()
        for values in table.values.values():
            wrong = ~values.isfinite().reshape(len(values), -1).all(-1)
            if bool(wrong.any()):
                copy, step = int(table.copies[wrong][0]), int(table.steps[wrong][0])
                raise FrameContractError(
                    f"next observation of env copy {copy} is not finite at step {step} of the batch"
                )

    def _output(self, key: Key, columns: Columns) -> Tensor:
        if key not in self.outputs:
            column = columns.outputs[key]
            self.outputs[key] = self._storage.empty(key, (*self._shape, *column.shape[2:]), column.dtype).zero_()
        return self.outputs[key]

    def _column(self, key: Key, leaf: LeafSpec) -> Tensor:
        return self._storage.empty(key, (*self._shape, *leaf.shape), leaf.torch_dtype)

    def _first_rows(self, episodes: Episodes) -> np.ndarray:
        """[T, N] bool, the first row of each episode; remembers which copies begin one with the next batch."""
        first = np.empty((self._shape[1] + 1, self._shape[0]), bool)
        first[0] = episodes.fresh
        np.logical_not(self.valid, out=first[1:])  # a row that was spent on resetting is followed by a first row
        for step, final in self._finals:
            first[step + 1, final.row] = True
        episodes.fresh = first[-1]
        return first[:-1]

    def _labels(self, ids: np.ndarray, versions: np.ndarray, mask: np.ndarray | None) -> dict[str, Tensor]:
        labels = {"policy_version": torch.from_numpy(np.repeat(versions[None], self._shape[0], 0))}
        if mask is not None:
            ids[~mask] = -1
            labels["mask"] = torch.from_numpy(mask.T.copy())
        labels["traj_ids"] = torch.from_numpy(ids.T.copy())
        return labels


def _flag(column: np.ndarray) -> Tensor:
    """[T, N] -> a copy [N, T, 1]."""
    return torch.from_numpy(column.T[..., None].copy())
