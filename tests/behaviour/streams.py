"""What the tests of whole runs on several backends share: env copies whose every frame is known, and looks at them.

Workers import this module, so it needs neither pytest nor Lightning.
"""

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lit_collect import Collector
from lit_collect.frames import flatten_rows
from lit_collect.testing import CountingEnv

COPIES = 8
LENGTHS = [(2 + index % 3, 5, 1) for index in range(COPIES)]
ENVS = [partial(CountingEnv, index, LENGTHS[index]) for index in range(COPIES)]


class Telling(nn.Module):
    """Says in every row which weights acted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        rows = len(observation)
        return {"action": torch.zeros(rows, dtype=torch.int64), "weight": self.weight.expand(rows, 1)}


def learn(collector: Collector, policy: nn.Module) -> None:
    """One update, which makes the weight equal to the version."""
    policy.weight.data += 1
    collector.update_policy_weights_(policy)
    assert collector.policy_version == policy.weight.item()


def check_counters(collector: Collector, yielded: int) -> dict[str, Any]:
    """The statistics, whose parts must add up."""
    numbers = collector.statistics()
    parts = [numbers[name] for name in ("frames_yielded", "frames_pending", "frames_dropped")]
    assert numbers["frames_stepped"] == sum(parts)
    assert min(parts) >= 0
    assert numbers["frames_yielded"] == yielded
    return numbers


def streams_of(batches: list[TensorDict], copies: int = COPIES) -> list[TensorDict]:
    """The rows of each env copy in their order, by the copy that their ids name."""
    rows = torch.cat([flatten_rows(batch) for batch in batches])
    owner = rows["collector", "traj_ids"] % copies
    return [rows[owner == number] for number in range(copies)]


def check_stream(rows: TensorDict, number: int, copies: int, lengths: tuple[int, ...], index: int) -> None:
    """Whether the rows of one env copy are all of its frames from the first on, under the ids that they must have."""
    played = [(episode, step) for episode in range(len(rows)) for step in range(lengths[episode % len(lengths)])]
    expected = torch.tensor([(index, *frame) for frame in played[: len(rows)]], dtype=torch.float32)
    assert torch.equal(rows["observation"], expected.reshape(-1, 3))
    assert torch.equal(rows["collector", "traj_ids"], expected[:, 1].long() * copies + number)
    versions = rows["collector", "policy_version"]
    assert (versions.diff() >= 0).all()
