"""One place that turns (seed, stage, env index, restart) into seeds and keeps acting's own random stream.

Seeds are never ``seed + i``: every stream is a child of one `numpy.random.SeedSequence`, so that adjacent seeds,
env copies, ranks, workers and stages never share numbers.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

Stage = Literal["train", "validate", "test", "predict"]
_STAGES: dict[Stage, int] = {"train": 0, "validate": 1, "test": 2, "predict": 3}
_ACTING = 1  # fourth part of the spawn key: separates acting streams from the env streams of three parts
_REPLAY = 2  # likewise: which rows of a replay buffer are sampled


def resolve_entropy(seed: int | None) -> int:
    """The entropy of a run: the seed given, else the one of `seed_everything`, else fresh from the system.

    Args:
        seed: a non-negative integer of any size, or None.

    Returns:
        A non-negative integer that reproduces the run when it is given as the seed.

    Raises:
        TypeError: if the seed is no integer.
        ValueError: if it is negative.

    Example:
        >>> resolve_entropy(7)
        7
    """
    if seed is None:
        of_lightning = os.environ.get("PL_GLOBAL_SEED")
        return int(of_lightning) if of_lightning else int(np.random.SeedSequence().generate_state(2, np.uint64)[0])
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return int(seed)


def env_seeds(entropy: int, stage: Stage, indices: range, restart: int = 0) -> list[int]:
    """Seeds for the first reset of env copies, as Python integers of 31 bits (what every env accepts).

    Args:
        entropy: what `resolve_entropy` gave.
        stage: what the envs are for.
        indices: global env indices (over all ranks and workers).
        restart: how often the run was resumed; new episodes begin under new seeds.
    """
    return [_spawn(entropy, _STAGES[stage], index, restart) & 0x7FFFFFFF for index in indices]


def acting_seed(entropy: int, stage: Stage, first_index: int, restart: int = 0) -> int:
    """Seed (32 bits) of the random stream of whoever acts for the env copies from `first_index` on."""
    return _spawn(entropy, _STAGES[stage], first_index, restart, _ACTING)


def _spawn(entropy: int, *key: int) -> int:
    return int(np.random.SeedSequence(entropy, spawn_key=key).generate_state(1, np.uint32)[0])


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a collector stands in a run; one that knows takes this instead of a plain seed."""

    entropy: int
    """What `resolve_entropy` gave; the same on all ranks."""
    stage: Stage = "train"
    """What the envs are for."""
    rank: int = 0
    """Of this process among those that collect."""
    world_size: int = 1
    """How many collect."""
    default_envs: int | None = None
    """Env copies where neither the user nor the env says a number (None: one, and batches without that dimension)."""

    @property
    def replay_seed(self) -> int:
        """Seed (32 bits) of what is sampled from a replay buffer of this rank."""
        return _spawn(self.entropy, _STAGES[self.stage], self.rank, 0, _REPLAY)

    def streams(self, indices: range, restart: int = 0) -> "tuple[list[int], RandomStream]":
        """The random numbers of env copies: seeds for their first resets, and the stream of whoever acts for them.

        Args:
            indices: global env indices.
            restart: how often the run was resumed.
        """
        stream = RandomStream(acting_seed(self.entropy, self.stage, indices.start, restart))
        return env_seeds(self.entropy, self.stage, indices, restart), stream


class RandomStream:
    """The global random generators (torch CPU, NumPy's legacy one, Python's), as envs and policies see them.

    While the stream is active they continue from where *it* left them; afterwards they are as they were before. So
    the collected data do not depend on how often the trainer draws numbers, nor the trainer's on collecting. (One
    thing is lost: the second half of a pair of normals that ``numpy.random.randn`` may have held back.)

    Args:
        seed: 32 bits.

    Example:
        >>> stream = RandomStream(seed=3)
        >>> before = torch.get_rng_state()
        >>> with stream.active():
        ...     _ = torch.rand(2)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._numpy = np.random.MT19937(seed)
        self._python = random.Random(seed).getstate()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap the stream in, and on the way out (also after an exception) the caller's generators back."""
        outside = torch.get_rng_state(), get_bit_generator(), random.getstate()
        try:
            torch.set_rng_state(self._torch)
            set_bit_generator(self._numpy)  # exchanges the generator itself; copying its state takes 50 us
            random.setstate(self._python)
            yield
        finally:
            self._torch, self._python = torch.get_rng_state(), random.getstate()
            torch.set_rng_state(outside[0])
            set_bit_generator(outside[1])
            random.setstate(outside[2])
