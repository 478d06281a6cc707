"""What a collector worker is made of: the same parts wherever it runs."""

from dataclasses import dataclass
from typing import Any

from lit_collect.config import RolloutConfig
from lit_collect.envs.factories import EnvSource
from lit_collect.policies import RandomActor, make_actor
from lit_collect.rollout import RolloutRunner
from lit_collect.seeding import Placement


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything a worker needs to build its env copies and its policy."""

    source: EnvSource
    """Makes the envs."""
    policy: Any
    """Who acts (see `lit_collect.policies`)."""
    rollout: RolloutConfig
    """How batches are collected."""
    num_envs: int | None
    """Env copies of this rank (None: what the env says, else one)."""
    place: Placement
    """Whose random numbers these are."""


def build_runner(spec: WorkerSpec) -> RolloutRunner:
    """Build the envs and the policy, in the process that uses them.

    Raises:
        WorkerFailedError: if an env's constructor raised.
        TypeError: if the policy cannot act or a space cannot be stored.
        ValueError: if the number of env copies does not fit the env.
    """
    env = spec.source.build(spec.num_envs, rollout=spec.rollout, default_copies=spec.place.default_envs or 1)
    try:
        copies, place = env.num_envs, spec.place
        indices = range(place.rank * copies, (place.rank + 1) * copies)
        seeds, stream = place.streams(indices)
        actor = make_actor(
            spec.policy,
            env.observation_spec,
            env.action_spec,
            exploration=spec.rollout.exploration,
            seed=stream.seed,
        )
        return RolloutRunner(
            env,
            actor,
            config=spec.rollout,
            indices=indices,
            total_copies=copies * place.world_size,
            seeds=seeds,
            stream=stream,
            warm_up=RandomActor(env.action_spec, stream.seed),
            warm_up_steps=-(-spec.rollout.init_random_frames // (copies * place.world_size)),
        )
    except BaseException:
        env.close()
        raise
