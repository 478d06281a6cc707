"""Replay buffers: rows are kept, sampled and used again."""

from lit_collect.replay.buffer import ReplayBuffer
from lit_collect.replay.mapped import MappedStorage, SharedStorage
from lit_collect.replay.mixing import MixedBuffer
from lit_collect.replay.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from lit_collect.replay.samplers import Sampler, UniformSampler, WithoutReplacementSampler
from lit_collect.replay.slices import SliceSampler, SliceWithoutReplacementSampler
from lit_collect.replay.staleness import ConsumingSampler, StalenessSampler
from lit_collect.replay.storage import MemoryStorage, Storage
from lit_collect.replay.transforms import Hindsight, NStep, SampleTransform
from lit_collect.replay.writers import BestWriter, RingWriter, Writer

__all__ = [
    "BestWriter",
    "ConsumingSampler",
    "Hindsight",
    "MappedStorage",
    "MemoryStorage",
    "MixedBuffer",
    "NStep",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "ReplayBuffer",
    "RingWriter",
    "SampleTransform",
    "Sampler",
    "SharedStorage",
    "SliceSampler",
    "SliceWithoutReplacementSampler",
    "StalenessSampler",
    "Storage",
    "UniformSampler",
    "WithoutReplacementSampler",
    "Writer",
]
