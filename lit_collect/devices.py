"""Where things live: policies and batches on an accelerator, env copies on the CPU.

Observations reach a policy on CUDA from pinned memory without waiting; what waits is the copy of its actions back,
which an env step needs anyway.
"""

import copy
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn

from lit_collect.weights import module_of

B = TypeVar("B", bound=TensorDictBase)


def usable(name: str | None, setting: str) -> torch.device | None:
    """The device of a setting.

    Args:
        name: such as ``"cuda:0"``; None for none.
        setting: its name, for messages.

    Raises:
        ValueError: if this machine has no such device.
    """
    if name is None:
        return None
    device = torch.device(name)
    if device.type in ("cpu", "meta"):
        return device
    module = getattr(torch, device.type, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if (device.index or 0) >= count:
        known = [f"{device.type}:{index}" for index in range(count)]
        raise ValueError(f"{setting} is not on this machine : expected {['cpu', *known]} or None, got {name!r}")
    return device


def acting_copy(policy: Any, device: torch.device | None, *, always: bool = False) -> Any:
    """The policy, or a copy of it on another device.

    Args:
        policy: whatever may act; what is no module (nor a method of one) stays where it is.
        device: where it is to act; None where it is.
        always: whether a copy acts on the same device, too.
    """
    module = module_of(policy)
    if module is None or (device is None and not always):
        return policy
    tensors = (*module.parameters(), *module.buffers())
    if not always and device is not None and all(_same(tensor.device, device) for tensor in tensors):
        return policy
    acting = copy.deepcopy(policy)
    copied = module_of(acting)
    assert copied is not None
    copied.to(device)
    return acting


def on_cuda(module: nn.Module | None) -> bool:
    """Whether a module computes on CUDA."""
    return module is not None and any(parameter.is_cuda for parameter in module.parameters())


def moved(batch: B, device: torch.device | None) -> B:
    """A batch on a device: itself if it is there, else a copy; to CUDA through pinned memory, without waiting.

    What the same CUDA stream does next comes after the copy.

    Args:
        batch: of any shape.
        device: None leaves it where it is.
    """
    if device is None or (batch.device is not None and _same(batch.device, device)):
        return batch
    return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch.to(device)


def _same(one: torch.device, other: torch.device) -> bool:
    """Whether two names mean the same device: ``cuda`` is ``cuda:0``."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)
