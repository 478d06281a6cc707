"""The opponent: the fastest hand-written loop for CartPole and a 2x64 tanh policy that we know how to write.

One process, one thread, whole batches with every key of the batch contract. What makes it fast, each kept because it
measured faster: storage and its per-step views are made once, the net is a chain of in-place `addmm` and `tanh` on
bound weights, the sampling noise of a batch is drawn in one call, log-probabilities, successors, trajectory ids and
flags are filled in bulk at the end of a batch, and one TensorDict is built per batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import gymnasium as gym
import numpy as np
import torch
from policies import NUM_ACTIONS, OBSERVATION_DIM, WIDTH, SamplingPolicy, make_net
from tensordict import TensorDict
from torch import Tensor

Act = Callable[[int], list[int]]


class Actor(Protocol):
    """How a loop acts: once prepared for a batch, it is asked step by step, then for what it did."""

    def begin(self, observation: Tensor) -> Act:
        """Prepare for a batch of [T, N, O] observations, written step by step; the result acts at step t."""

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Action and log-probability of the batch, [T, N] each."""


class FusedActor:
    """The fastest way: bound weights, preallocated activations, noise and log-probabilities in bulk.

    The softmax shifts a row by a constant and cannot move its argmax, and the noise is subtracted with the bias of the
    last layer, so that a step is three `addmm`, two `tanh` and one `argmax`; the logits are recovered afterwards.
    """

    def __init__(self, num_steps: int, num_envs: int) -> None:
        parameters = [parameter.detach() for parameter in make_net().parameters()]
        self._weights = [weight.t().contiguous() for weight in parameters[0::2]]
        self._biases = parameters[1::2]
        self._noise, self._shifted_bias, self._scores = (torch.empty(num_steps, num_envs, NUM_ACTIONS) for _ in "nbs")
        self._action = torch.empty(num_steps, num_envs, dtype=torch.int64)
        self._rows = list(zip(self._shifted_bias.unbind(), self._scores.unbind(), self._action.unbind(), strict=True))
        self._hidden = torch.empty(num_envs, WIDTH), torch.empty(num_envs, WIDTH)
        self._observations: tuple[Tensor, ...] = ()

    def begin(self, observation: Tensor) -> Act:
        (w1, w2, w3), (b1, b2, b3), (hidden1, hidden2) = self._weights, self._biases, self._hidden
        self._noise.exponential_().log_()
        torch.sub(b3, self._noise, out=self._shifted_bias)
        self._observations = observations = self._observations or observation.unbind()
        rows, addmm, argmax = self._rows, torch.addmm, torch.argmax

        def act(t: int) -> list[int]:
            shifted_bias, scores, action = rows[t]
            addmm(b1, observations[t], w1, out=hidden1).tanh_()
            addmm(b2, hidden1, w2, out=hidden2).tanh_()
            argmax(addmm(shifted_bias, hidden2, w3, out=scores), 1, out=action)
            return action.tolist()

        return act

    def outputs(self) -> tuple[Tensor, Tensor]:
        log_probs = torch.log_softmax(self._scores + self._noise, dim=-1)
        return self._action, log_probs.gather(-1, self._action.unsqueeze(-1)).squeeze(-1)


class ModuleActor:
    """`SamplingPolicy` called once a step: what a loop can do when the policy is somebody else's module."""

    def __init__(self, num_steps: int, num_envs: int) -> None:
        self._policy = SamplingPolicy()
        self._observations: tuple[Tensor, ...] = ()
        self._actions: list[Tensor] = []
        self._log_probs: list[Tensor] = []

    def begin(self, observation: Tensor) -> Act:
        policy = self._policy
        self._observations = observations = self._observations or observation.unbind()
        self._actions, self._log_probs = actions, log_probs = [], []

        def act(t: int) -> list[int]:
            output = policy(observations[t])
            actions.append(output["action"])
            log_probs.append(output["log_prob"])
            return output["action"].tolist()

        return act

    def outputs(self) -> tuple[Tensor, Tensor]:
        return torch.stack(self._actions), torch.stack(self._log_probs)


class HandLoop:
    """CartPole copies stepped in a Python loop; `actor_class` decides how a step acts."""

    def __init__(
        self,
        num_envs: int,
        actor_class: Callable[[int, int], Actor] = FusedActor,
        *,
        frames_per_batch: int = 2048,
        seed: int = 0,
    ) -> None:
        self._shape = frames_per_batch // num_envs, num_envs
        self._actor = actor_class(*self._shape)
        self._observation = torch.zeros(self._shape[0] + 1, num_envs, OBSERVATION_DIM)
        self._rows = list(self._observation.numpy())
        envs = [gym.make("CartPole-v1", disable_env_checker=True) for _ in range(num_envs)]
        self._steps = [env.step for env in envs]
        self._resets = [env.reset for env in envs]
        self._rows[-1][:] = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
        self._traj_ids = np.arange(num_envs)
        self._is_init = np.ones(num_envs, dtype=bool)

    def collect(self) -> TensorDict:
        """One batch, [N, T]; it shares no memory with the loop."""
        rows, steps, resets = self._rows, self._steps, self._resets
        rows[0][:] = rows[-1]
        act = self._actor.begin(self._observation[:-1])
        rewards: list[float] = []
        ends: list[tuple[int, int, bool, bool]] = []
        last_observations: list[np.ndarray] = []
        observations = list(rows[0])
        with torch.inference_mode():
            for t in range(self._shape[0]):
                for i, action in enumerate(act(t)):
                    observation, reward, terminated, truncated, _ = steps[i](action)
                    rewards.append(reward)
                    if terminated or truncated:
                        ends.append((t, i, terminated, truncated))
                        last_observations.append(observation)
                        observation, _ = resets[i]()
                    observations[i] = observation
                rows[t + 1][:] = observations
        return self._batch(rewards, ends, last_observations)

    def _batch(
        self, rewards: list[float], ends: list[tuple[int, int, bool, bool]], last_observations: list[np.ndarray]
    ) -> TensorDict:
        num_steps, num_envs = self._shape
        terminated, truncated = np.zeros(self._shape, dtype=bool), np.zeros(self._shape, dtype=bool)
        is_init = np.zeros((num_steps + 1, num_envs), dtype=bool)
        traj_ids = np.zeros((num_steps + 1, num_envs), dtype=np.int64)
        is_init[0], traj_ids[0] = self._is_init, self._traj_ids
        successor = self._observation[1:].clone()
        if ends:
            t, i, terminal, limit = (np.array(column) for column in zip(*ends, strict=True))
            successor.numpy()[t, i] = last_observations
            terminated[t, i], truncated[t, i] = terminal, limit
            is_init[t + 1, i], traj_ids[t + 1, i] = True, num_envs
        traj_ids = traj_ids.cumsum(0)
        self._is_init, self._traj_ids = is_init[-1], traj_ids[-1]
        action, log_prob = self._actor.outputs()

        def env_major(values: Tensor) -> Tensor:
            return values.transpose(0, 1).clone(memory_format=torch.contiguous_format)

        def flag(values: np.ndarray) -> Tensor:
            return env_major(torch.from_numpy(values).unsqueeze(-1))

        size = (num_envs, num_steps)
        successors = {
            "observation": env_major(successor),
            "reward": env_major(torch.tensor(rewards).view(num_steps, num_envs, 1)),
            "done": flag(terminated | truncated),
            "terminated": flag(terminated),
            "truncated": flag(truncated),
        }
        collector = {
            "traj_ids": env_major(torch.from_numpy(traj_ids[:-1])),
            "policy_version": torch.zeros(size, dtype=torch.int64),
        }
        return TensorDict(
            {
                "observation": env_major(self._observation[:-1]),
                "action": env_major(action),
                "log_prob": env_major(log_prob),
                "done": torch.zeros(*size, 1, dtype=torch.bool),
                "terminated": torch.zeros(*size, 1, dtype=torch.bool),
                "truncated": torch.zeros(*size, 1, dtype=torch.bool),
                "is_init": flag(is_init[:-1]),
                "next": TensorDict(successors, batch_size=size),
                "collector": TensorDict(collector, batch_size=size),
            },
            batch_size=size,
            names=[None, "time"],
        )


def fused_collector(num_envs: int) -> Callable[[], int]:
    """A function that collects one batch the fastest way and returns how many frames it holds."""
    loop = HandLoop(num_envs, FusedActor)
    return lambda: loop.collect().numel()


def module_collector(num_envs: int) -> Callable[[], int]:
    """The same around a module that is called once a step."""
    loop = HandLoop(num_envs, ModuleActor)
    return lambda: loop.collect().numel()
