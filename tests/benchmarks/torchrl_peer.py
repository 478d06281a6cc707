"""TorchRL's `Collector` on the same work: CartPole, the same net as a TensorDict actor with log-probability."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import partial

from policies import make_actor
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import EnvBase, GymEnv, SerialEnv


def make_env(num_envs: int) -> EnvBase:
    """One `GymEnv`, or as many of them in a `SerialEnv`."""

    def one_env() -> EnvBase:
        return GymEnv("CartPole-v1", categorical_action_encoding=True)

    return one_env() if num_envs == 1 else SerialEnv(num_envs, one_env)


def collector(num_envs: int, frames_per_batch: int = 2048) -> Callable[[], int]:
    """A function that collects one batch and returns how many frames it holds."""
    batches = iter(
        Collector(
            make_env(num_envs),
            make_actor(),
            frames_per_batch=frames_per_batch,
            total_frames=-1,
            device="cpu",
            auto_register_policy_transforms=False,
        )
    )
    return lambda: next(batches).numel()


def two_workers(num_envs: int, frames_per_batch: int = 2048) -> Callable[[], int]:
    """The same with two synchronous worker processes, the env copies divided between them."""
    collector = MultiSyncCollector(
        [partial(make_env, num_envs // 2)] * 2,
        make_actor(),
        frames_per_batch=frames_per_batch,
        total_frames=-1,
        device="cpu",
        auto_register_policy_transforms=False,
    )
    atexit.register(collector.shutdown)  # else the interpreter waits for its workers, which wait for work
    batches = iter(collector)
    return lambda: next(batches).numel()
