"""What the tests of weights, control and the background share: policies and envs that tell what acted, and schemes.

Workers import this module, so it needs neither pytest nor Lightning.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_collect import ProcessBackend
from lit_collect.schemes import WeightReceiver, WeightSyncScheme
from lit_collect.testing import CountingEnv
from lit_collect.weights import WeightSnapshot

MAKERS = [partial(CountingEnv, index) for index in range(4)]
DEADLINE_S = 60.0


class Told(nn.Module):
    """Puts the sum of all its tensors, each of which is `value`, next to each action."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False)
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.fill(value)

    @torch.no_grad()
    def fill(self, value: float) -> "Told":
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.fill_(value)
        return self

    def forward(self, observation):
        rows = len(observation)
        tensors = [self.inner.weight[0], self.shift, self.count, self.scratch]
        told = torch.cat([tensor.float() for tensor in tensors]).expand(rows, 4)
        return {"action": torch.zeros(rows, dtype=torch.int64), "told": told}


class Wide(nn.Module):
    """Shows the least and the greatest of its many weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10_000))

    def forward(self, observation):
        rows = len(observation)
        ends = torch.stack([self.weight.min(), self.weight.max(), self.weight[0], self.weight[-1]])
        return {"action": torch.zeros(rows, dtype=torch.int64), "told": ends.expand(rows, 4)}


class OpponentEnv(CountingEnv):
    """Observes the weight of a module of its own instead of its steps."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.opponent = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.opponent.weight)

    def _observe(self):
        observation = super()._observe()
        observation[2] = self.opponent.weight.item()
        return observation


class Unwelcome:
    """Cannot be pickled, and says so in words of its own."""

    def __reduce__(self):
        raise RuntimeError("I stay here")


class Spoilt:
    """Can be pickled, but not be made again."""

    def __reduce__(self):
        return int, ("not a number",)


class ControlledEnv(CountingEnv):
    """Has things to read and to call."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.level = {"gravity": [9.0, 10.0 + index]}
        self.lock = threading.Lock()
        self.unwelcome, self.spoilt = Unwelcome(), Spoilt()
        self.told: list[object] = []

    def tell(self, *values, **options):
        self.told.append((values, options))
        return self.index, values, options

    def linger(self):
        time.sleep(0.5)

    def fail(self):
        raise ValueError("no such lever")

    @property
    def broken(self):
        raise AttributeError("the gauge is broken")


class SlowEnv(CountingEnv):
    """Takes longer for a step than the thread waits at a stretch."""

    def step(self, action):
        time.sleep(0.07)
        return super().step(action)


def linear(value: float) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def told(batch) -> list[float]:
    """What all tensors of the policy were, in the rows of a batch."""
    return batch["told"].unique().tolist()


def versions(batch) -> list[int]:
    return batch["collector", "policy_version"].unique().tolist()


def opponents(value: float, copies: int) -> dict[str, nn.Module]:
    return {f"env.envs[{index}].unwrapped.opponent": linear(value) for index in range(copies)}


def backend_of(name: str, **options: Any) -> str | ProcessBackend:
    """The backend "direct", or two processes: "sync" or "async"."""
    return name if name == "direct" else ProcessBackend(2, sync=name != "async", **options)


def invariant(statistics: dict[str, Any]) -> bool:
    """Whether every frame is in its place."""
    parts = [statistics[f"frames_{name}"] for name in ("yielded", "pending", "dropped")]
    return statistics["frames_stepped"] == sum(parts) and min(parts) >= 0


def wait_for(condition: Callable[[], bool]) -> None:
    """Until something is so, as another thread sees it."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)


class Sink:
    """Keeps what it is given, and may do something else each time."""

    def __init__(self, then: Callable[[], object] = int) -> None:
        self.batches: list = []
        self._then = then

    def extend(self, rows) -> None:
        self.batches.append(rows)
        self._then()

    @property
    def rows(self) -> int:
        return sum(len(rows) for rows in self.batches)

    def newest_versions(self) -> dict[float, int]:
        """What acted in the last row of each env copy."""
        rows = torch.cat(self.batches[-50:])
        return dict(zip(rows["observation"][:, 0].tolist(), rows["collector", "policy_version"].tolist(), strict=True))

    def wait_for_more(self, batches: int = 0) -> None:
        """Until a batch has come that was not asked for yet, where so many may be under way."""
        count = len(self.batches)
        wait_for(lambda: len(self.batches) > count + batches)


class FileReceiver(WeightReceiver):
    def __init__(self, path: Path) -> None:
        self._path, self._version = path, -1

    def receive(self, ticket):
        assert ticket == f"for {self._path.name}"
        if not self._path.exists():
            return None
        snapshot = torch.load(self._path, weights_only=False)
        if snapshot.version <= self._version:
            return None
        self._version = snapshot.version
        return snapshot


class FileScheme(WeightSyncScheme):
    """One of a user's own: writes a file for each worker."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers

    def _path(self, worker: int) -> Path:
        return self._folder / f"worker_{worker}.pt"

    def publish(self, models, version, workers):
        for worker in range(self._workers) if workers is None else workers:
            before = torch.load(self._path(worker), weights_only=False).models if self._path(worker).exists() else {}
            detached = {name: {key: tensor.detach() for key, tensor in model.items()} for name, model in models.items()}
            written = self._path(worker).with_suffix(".new")
            torch.save(WeightSnapshot({**before, **detached}, version), written)
            os.replace(written, self._path(worker))

    def ticket(self, worker):
        return f"for {self._path(worker).name}"

    def receiver(self, worker):
        return FileReceiver(self._path(worker))

    def close(self):
        for worker in range(self._workers):
            self._path(worker).unlink(missing_ok=True)


class SilentReceiver(WeightReceiver):
    def receive(self, ticket):
        return None


class SilentScheme(WeightSyncScheme):
    """Delivers nothing."""

    def publish(self, models, version, workers):
        pass

    def ticket(self, worker):
        return None

    def receiver(self, worker):
        return SilentReceiver()
