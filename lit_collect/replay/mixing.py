"""`MixedBuffer`: rows that are collected and rows that were there before, in one sample."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from lit_collect.errors import FrameContractError
from lit_collect.frames import ACTION_MASK, INDEX, MASK, N_STEPS, OFFLINE, WEIGHT, WRITTEN, Key, as_key
from lit_collect.replay.buffer import ReplayBuffer
from lit_collect.replay.transforms import NStep

_FILLED: Mapping[Key, tuple[torch.dtype, float]] = {
    INDEX: (torch.int64, -1),
    WRITTEN: (torch.int64, -1),
    WEIGHT: (torch.float32, 1.0),
    N_STEPS: (torch.int64, 1),
    MASK: (torch.bool, True),
}
_IN_BOTH: tuple[Key, ...] = (ACTION_MASK, ("next", *ACTION_MASK))  # who finds none takes all actions for allowed


class MixedBuffer:
    """Samples of two buffers in one, as for learning online with demonstrations (Ball et al. 2023, arXiv:2302.02948).

    Collected rows go to the online buffer; the offline one is only read. A sample has the online rows first, then the
    offline ones, and ``("collector", "offline")`` says which row is of which part.

    It has the keys that both parts have. What only one of them adds to its samples is filled in for the other: weight
    1, one step, no padding, an unknown place. Any other key that only one has is left out (infos, what the policy
    said), so that whoever needs it finds it missing. Not so ``"action_mask"``, without which all actions would count as
    allowed: it must be in both or in none.

    Args:
        online: takes and gives rows: a `ReplayBuffer`, or another object with ``extend`` and ``sample``.
        offline: gives rows: a `ReplayBuffer`, or another object with ``sample(batch_size)``.
        fraction: part of each sample that is online, 0-1.
        batch_size: rows of a sample; None for the online buffer's.

    Raises:
        TypeError: if a part or a setting is of the wrong kind.
        ValueError: if a setting is out of range, or the parts sum rewards (`NStep`) with different discounts.

    Example:
        >>> from tensordict import TensorDict
        >>> from lit_collect.replay import ReplayBuffer
        >>> offline, online = ReplayBuffer(8), ReplayBuffer(8)
        >>> for number, buffer in enumerate((online, offline)):
        ...     _ = buffer.extend(TensorDict({"observation": torch.full((3,), number)}, batch_size=[3]))
        >>> sample = MixedBuffer(online, offline, fraction=0.25).sample(8)
        >>> sample["observation"].tolist(), sample["collector", "offline"].sum().item()
        ([0, 0, 1, 1, 1, 1, 1, 1], 6)
    """

    def __init__(
        self, online: ReplayBuffer, offline: ReplayBuffer, *, fraction: float = 0.5, batch_size: int | None = None
    ) -> None:
        for name, part, methods in (("online", online, ("extend", "sample")), ("offline", offline, ("sample",))):
            missing = [method for method in methods if not callable(getattr(part, method, None))]
            if missing:
                raise TypeError(
                    f"{name} must have {' and '.join(methods)} : got {type(part).__name__} without {missing}"
                )
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"fraction must be a number, got {fraction!r}; give the online part of a sample, 0 to 1")
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be between 0 and 1, got {fraction!r}")
        _check_discounts(online, offline)
        self.online = online
        self.offline = offline
        self.fraction = fraction
        size = getattr(online, "batch_size", None) if batch_size is None else batch_size
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"batch_size must be at least 1, got {size!r}; the online buffer may have none, give it here"
            )
        self.batch_size = size

    @property
    def takes_batches(self) -> bool:
        """Whether whole batches [N, T] may be given to `extend`."""
        return bool(getattr(self.online, "takes_batches", False))

    @property
    def runs_out(self) -> bool:
        """Whether `can_sample` may come to be False without a write."""
        return any(getattr(buffer, "runs_out", False) for buffer in (self.online, self.offline))

    @property
    def has_priorities(self) -> bool:
        """Whether `update_priority` does something."""
        return any(_takes_priorities(buffer) for buffer in (self.online, self.offline))

    @property
    def learner_version(self) -> int:
        """Version of the weights that learn, from which the staleness of rows is counted."""
        return int(getattr(self.online, "learner_version", 0))

    @learner_version.setter
    def learner_version(self, version: int) -> None:
        for buffer in (self.online, self.offline):
            if hasattr(buffer, "learner_version"):
                buffer.learner_version = version

    def extend(self, batch: TensorDictBase) -> Any:
        """Write rows to the online buffer."""
        return self.online.extend(batch)

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Draw from both.

        Args:
            batch_size: rows; None for the buffer's own. The online part is rounded to whole rows (whole slices).

        Returns:
            [M] or slices [S, L], online rows first.

        Raises:
            FrameContractError: if what both have differs in shape or dtype, or one has action masks and the other none.
            ValueError: whatever the parts raise, for instance while one is empty.
        """
        counts = self._counts(self.batch_size if batch_size is None else batch_size)
        parts = []
        for offline, (buffer, count) in enumerate(zip((self.online, self.offline), counts, strict=True)):
            if count:
                part = buffer.sample(count)
                parts.append(part.copy().set(OFFLINE, torch.full(part.batch_size, bool(offline))))
        if len(parts) == 1:
            return parts[0]
        _fill(parts)
        return _joined(parts)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether both can give their parts (one that cannot tell is taken to)."""
        counts = self._counts(self.batch_size if batch_size is None else batch_size)
        for buffer, count in zip((self.online, self.offline), counts, strict=True):
            ask = getattr(buffer, "can_sample", None)
            if count and ask is not None and not ask(count):
                return False
        return True

    def update_priority(self, sample: TensorDictBase, priority: Tensor) -> None:
        """Give new priorities to the rows of a sample, each in the buffer that it is of; one without any takes none.

        Args:
            sample: as `sample` gave it, [M] or [S, L].
            priority: of its rows, with the same shape, or with one more dimension of size 1.

        Raises:
            ValueError: if they are not as many as rows, or one is negative or not finite.
            TypeError: if it is no sample of a mixed buffer: positions alone do not tell the buffer.
        """
        if not isinstance(sample, TensorDictBase) or sample.get(OFFLINE, None) is None:
            raise TypeError(
                f"priorities of a mixed buffer go with the sample : expected the TensorDict that sample() gave, got "
                f"{type(sample).__name__}"
            )
        priority = torch.as_tensor(priority)
        if priority.numel() != sample.numel():
            raise ValueError(
                f"priorities must be one for each row : expected {sample.numel()}, got {priority.numel()}; no priority "
                f"was changed"
            )
        wrong = priority[~((priority >= 0) & (priority < torch.inf))]
        if wrong.numel() and self.has_priorities:  # before one of the parts takes its own
            raise ValueError(
                f"priorities must be finite and not negative, got {wrong[0].item()}; no priority was changed"
            )
        priority = priority.reshape(sample.batch_size)
        offline = sample.get(OFFLINE).reshape(len(sample), -1)[:, 0]
        for buffer, chosen in ((self.online, ~offline), (self.offline, offline)):
            update = getattr(buffer, "update_priority", None)
            if update is not None and chosen.any():
                update(sample[chosen].exclude(OFFLINE), priority[chosen.to(priority.device)])

    def __len__(self) -> int:
        """Rows of the online buffer."""
        return len(self.online)

    def take_statistics(self) -> dict[str, float]:
        """Those of the online buffer, see `ReplayBuffer.take_statistics`; its size if it has no more to tell."""
        take = getattr(self.online, "take_statistics", None)
        numbers: dict[str, float] = {"size": len(self), "sampled": 0} if take is None else take()
        return numbers

    def close(self) -> None:
        """Close the online buffer; the offline one is its maker's."""
        close = getattr(self.online, "close", None)
        if close is not None:
            close()

    def state_dict(self) -> dict[str, Any]:
        """The state of the online buffer; the offline one is not changed by anything."""
        state: dict[str, Any] = self.online.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the online buffer from a state."""
        self.online.load_state_dict(state)

    def _counts(self, batch_size: int) -> tuple[int, int]:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        unit = getattr(self.online, "slice_len", None) or 1
        online = round(batch_size * self.fraction / unit) * unit
        return online, batch_size - online


def summed_with(buffer: Any) -> set[float]:
    """The discounts by which a buffer sums rewards over several steps.

    Args:
        buffer: one of ours; of another kind nobody knows.

    Example:
        >>> summed_with(ReplayBuffer(8, transforms=[NStep(3, gamma=0.9)])), summed_with(ReplayBuffer(8))
        ({0.9}, set())
    """
    if isinstance(buffer, MixedBuffer):
        return summed_with(buffer.online) | summed_with(buffer.offline)
    transforms = buffer.transforms if isinstance(buffer, ReplayBuffer) else ()
    return {each.gamma for each in transforms if isinstance(each, NStep) and each.n > 1}


def _check_discounts(online: Any, offline: Any) -> None:
    here, there = summed_with(online), summed_with(offline)
    if not all(math.isclose(one, other) for one in here for other in there):
        raise ValueError(
            f"both parts must sum rewards with the same discount, got NStep with gamma={min(here)} online and "
            f"gamma={min(there)} offline; give both the gamma of the algorithm"
        )


def _takes_priorities(buffer: Any) -> bool:
    return hasattr(buffer, "update_priority") and bool(getattr(buffer, "has_priorities", True))


def _fill(parts: list[TensorDictBase]) -> None:
    """Give what a buffer adds to its samples to the part that lacks it."""
    for key, (dtype, value) in _FILLED.items():
        if any(part.get(key, None) is not None for part in parts):
            for part in parts:
                if part.get(key, None) is None:
                    part.set(key, torch.full(part.batch_size, value, dtype=dtype))


def _check_masks(online: TensorDictBase, offline: TensorDictBase) -> None:
    for key in _IN_BOTH:
        lacking = [name for name, part in (("online", online), ("offline", offline)) if part.get(key, None) is None]
        if len(lacking) == 1:
            raise FrameContractError(
                f"{'.'.join(key)!r} must be in the rows of both parts or of none : the {lacking[0]} rows lack it, and "
                f"all actions would count as allowed; write the masks into those rows, or leave them out of the others"
            )


def _joined(parts: list[TensorDictBase]) -> TensorDictBase:
    first, second = parts
    if first.batch_size[1:] != second.batch_size[1:]:
        raise FrameContractError(
            f"the samples of both parts must have the same kind of rows, got {tuple(first.batch_size)} online and "
            f"{tuple(second.batch_size)} offline; give both the same slice_len"
        )
    _check_masks(first, second)
    common = [as_key(key) for key in first.keys(True, True) if second.get(key, None) is not None]
    for key in common:
        here, there = first.get(key), second.get(key)
        if (here.shape[1:], here.dtype) != (there.shape[1:], there.dtype):
            raise FrameContractError(
                f"{'.'.join(key)!r} must be the same in both parts, got {here.dtype} {tuple(here.shape[1:])} online "
                f"and {there.dtype} {tuple(there.shape[1:])} offline"
            )
    joined: Any = torch.cat([part.select(*common) for part in parts], 0)
    return joined
