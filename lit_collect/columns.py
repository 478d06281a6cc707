"""A window of steps: preallocated storage, time first, and the views of it that one step needs.

The views of every step are made once and kept, because indexing a tensor or an array anew at each step costs more
than the bookkeeping itself. The window is short, so that views and values stay in the processor's cache; the rows of
a batch are copied out window by window (see `lit_collect.assembly`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_collect.envs.base import Leaves, StepViews
from lit_collect.envs.spaces import LeafSpec, TreeSpec, empty_leaves
from lit_collect.errors import FrameContractError
from lit_collect.frames import Key


class Columns:
    """Storage for W steps of N env copies.

    Args:
        steps: W.
        num_envs: N.
        leaves: what comes with every step of one env copy.
        action_spec: of one env copy.
        pinned: whether observations lie where CUDA can fetch them by itself.
    """

    def __init__(
        self,
        steps: int,
        num_envs: int,
        *,
        leaves: Sequence[LeafSpec],
        action_spec: TreeSpec,
        pinned: bool = False,
    ) -> None:
        self.steps = steps
        self._shape = (steps, num_envs)
        self._action_leaves = action_spec.leaves
        observations = [torch.from_numpy(array) for array in empty_leaves(leaves, (steps + 1, num_envs))]
        self.observations = tuple(seen.pin_memory() if pinned else seen for seen in observations)  # [W + 1, N, ...]
        self._arrays = tuple(seen.numpy() for seen in self.observations)
        self.reward = np.zeros(self._shape, np.float32)
        self.terminated = np.zeros(self._shape, bool)
        self.truncated = np.zeros(self._shape, bool)
        self.valid = np.ones(self._shape, bool)
        self.outputs: dict[Key, Tensor] = {}  # [W, N, ...], the policy's; known after the first call of the policy
        self.inputs = [tuple(leaf[t] for leaf in self.observations) for t in range(steps)]
        self.slots = [
            StepViews(
                tuple(array[t + 1] for array in self._arrays),
                self.reward[t],
                self.terminated[t],
                self.truncated[t],
                self.valid[t],
            )
            for t in range(steps)
        ]
        self.actions: list[Leaves] = []
        self._targets: dict[tuple[Key, ...], list[list[Tensor]]] = {}

    def begin(self, observation: Sequence[np.ndarray], rows: Any = slice(None)) -> None:
        """Let the policy see these observations next, in all env copies or in some rows."""
        for array, leaf in zip(self._arrays, observation, strict=True):
            array[0, rows] = leaf[rows]

    def turn(self, steps: int) -> None:
        """Begin the next window with what the policy sees after `steps` steps of this one."""
        for array in self._arrays:
            array[0] = array[steps]
        self.terminated.fill(False)
        self.truncated.fill(False)
        self.valid.fill(True)
        self.reward.fill(0.0)

    def known_targets(self, keys: tuple[Key, ...]) -> list[list[Tensor]] | None:
        """Where outputs with these keys are written, if that was found out before."""
        return self._targets.get(keys)

    def targets(self, keys: tuple[Key, ...], values: Sequence[Tensor]) -> list[list[Tensor]]:
        """Where outputs with these keys are written: a list for each step, in the order of the keys.

        Args:
            keys: of the outputs.
            values: [N, ...] each, one step of them; their shapes and dtypes are taken for what the policy always
                gives.

        Raises:
            FrameContractError: if an output is no tensor of [N, ...], or an action does not fit its space.
        """
        for key, value in zip(keys, values, strict=True):
            if key not in self.outputs:
                self.outputs[key] = self._allocate(key, value)
        self._targets[keys] = [[self.outputs[key][t] for key in keys] for t in range(self.steps)]
        self.actions = self._action_views()
        return self._targets[keys]

    def _allocate(self, key: Key, value: Tensor) -> Tensor:
        leaf = next((leaf for leaf in self._action_leaves if leaf.key == key), None)
        if leaf is not None:
            _check_action(leaf, value, self._shape[1])
        elif value.ndim == 0 or value.shape[0] != self._shape[1]:
            raise FrameContractError(
                f"the policy's {'.'.join(key)} must have one row for each of {self._shape[1]} env copies, "
                f"got shape {tuple(value.shape)}"
            )
        dtype = value.dtype
        if leaf is not None and dtype is torch.bool:
            dtype = torch.from_numpy(np.empty(0, leaf.stored)).dtype
        elif leaf is not None and dtype.is_floating_point and dtype is not torch.float64:  # NumPy has no bfloat16
            dtype = torch.float32
        # Integers stay as the policy gave them: a narrower dtype could turn a wrong index into a right one.
        with torch.inference_mode(False):
            return torch.zeros((*self._shape, *value.shape[1:]), dtype=dtype)

    def _action_views(self) -> list[Leaves]:
        missing = [leaf.key for leaf in self._action_leaves if leaf.key not in self.outputs]
        if missing:
            raise FrameContractError(
                f"the policy gave no {'.'.join(missing[0])} : expected the leaves of the action space, "
                f"got {['.'.join(key) for key in self.outputs]}"
            )
        arrays = [self.outputs[leaf.key].numpy() for leaf in self._action_leaves]
        return [tuple(array[t] for array in arrays) for t in range(self.steps)]


def store(values: Sequence[Any], targets: list[Tensor], sizes: Sequence[int], keys: Sequence[Key]) -> None:
    """Copy one step of outputs into storage, in one call.

    They are copied although keeping them for the end of the batch would be faster: a policy may hand out the same
    buffer every time.

    Args:
        values: of one actor's call.
        targets: where they go.
        sizes: elements of each.
        keys: of each.

    Raises:
        FrameContractError: if the shape of an output changed since the first step.
    """
    for value, size in zip(values, sizes):  # noqa: B905  # the hot loop; both are of one actor
        if value.numel() != size:  # the cheapest check; what else does not fit, the copy refuses
            position = next(i for i, v in enumerate(values) if v is value)
            raise FrameContractError(
                f"the policy's {'.'.join(keys[position])} changed its shape : expected "
                f"{tuple(targets[position].shape)}, got {tuple(value.shape)}"
            )
    torch._foreach_copy_(targets, values)  # type: ignore[arg-type]  # any sequence will do


def _check_action(leaf: LeafSpec, value: Tensor, num_envs: int) -> None:
    name, expected = ".".join(leaf.key), (num_envs, *leaf.shape)
    if tuple(value.shape) != expected:
        hint = "; squeeze the last dimension" if tuple(value.shape) == (*expected, 1) else ""
        raise FrameContractError(
            f"the policy's {name} has a wrong shape : expected {expected} (env copies first), "
            f"got {tuple(value.shape)}{hint}"
        )
    floating = value.is_floating_point()
    if floating != (leaf.dtype.kind == "f"):
        kind = "floating point" if leaf.dtype.kind == "f" else "integers"
        raise FrameContractError(f"the policy's {name} has a wrong dtype : expected {kind}, got {value.dtype}")
