"""Envs that step on a device with torch: what they give as NumPy arrays, and actions as tensors where they expect them.

An array that shares memory with a tensor of the env is only good until the env is called again, because such envs write
into the same tensors at every step: whoever asks for it copies it out before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NO_NUMPY = (torch.bfloat16,)  # dtypes that NumPy does not have


def to_numpy(value: Any) -> np.ndarray:
    """A value as an array; the tensors of a CPU are not copied.

    Args:
        value: a tensor on any device, or whatever NumPy takes.

    Example:
        >>> to_numpy(torch.tensor([1, 2])).tolist()
        [1, 2]
    """
    if not isinstance(value, Tensor):
        return np.asarray(value)
    tensor = value.detach()
    return (tensor.float() if tensor.dtype in _NO_NUMPY else tensor).cpu().numpy()


def tree_to_numpy(value: Any) -> Any:
    """Infos with arrays instead of tensors, however deep in mappings they are."""
    if isinstance(value, Mapping):
        return {key: tree_to_numpy(inner) for key, inner in value.items()}
    return to_numpy(value) if isinstance(value, Tensor) else value


def device_of(env: Any, observation: Any) -> torch.device | None:
    """Where an env expects its actions: its own ``device``, else that of its observations; None if it uses NumPy.

    Args:
        env: the batched env.
        observation: one array or tensor that its reset gave.
    """
    if not isinstance(observation, Tensor):
        return None
    stated = next((d for d in (getattr(one, "device", None) for one in (env, env.unwrapped)) if d is not None), None)
    return observation.device if stated is None else torch.device(stated)


def to_tensors(leaves: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Actions as tensors on a device; on a CPU they share the memory of the arrays."""
    return [torch.from_numpy(leaf).to(device) for leaf in leaves]
