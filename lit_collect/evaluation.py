"""Evaluation: whole episodes on env copies of their own, the same number on each."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lit_collect.config import EvaluationConfig, RolloutConfig
from lit_collect.envs.factories import EnvSource
from lit_collect.frames import MASK, NEXT_DONE
from lit_collect.rollout import RolloutRunner
from lit_collect.seeding import Placement, Stage
from lit_collect.worker import WorkerSpec, build_runner

_CHUNK = 32  # steps between two looks whether every copy has finished
_PATIENCE = 3125 * _CHUNK  # steps after which an episode that does not end is suspicious


class Evaluator:
    """Plays rounds: one whole episode on each env copy.

    Every run plays episodes of the same seeds, so that two evaluations differ by the policy alone, and how often one
    evaluates changes nothing. The first episode of each copy counts whatever its length, so that short episodes are
    not favoured.

    Args:
        source: makes the envs; not a live one.
        config: how many episodes, on how many copies.
        rollout: how actions reach the env.
        policy: gives who acts, when the first round is played.
        place: whose random numbers these are.
    """

    def __init__(
        self,
        source: EnvSource,
        config: EvaluationConfig,
        *,
        rollout: RolloutConfig,
        policy: Callable[[], Any],
        place: Placement,
    ) -> None:
        self.source = source
        self.place = place
        self._config = config
        self._rollout = RolloutConfig(
            max_frames_per_traj=config.max_frames if config.max_frames is not None else rollout.max_frames_per_traj,
            exploration=config.exploration,
            clip_actions=rollout.clip_actions,
            keep_float64=rollout.keep_float64,
        )
        self._policy = policy
        self._runner: RolloutRunner | None = None

    @property
    def num_rounds(self) -> int:
        """Rounds of one evaluation; with a fixed number of copies at least `num_episodes` are played."""
        return -(-self._config.num_episodes // (self.source.num_envs or self._config.copies))

    def rounds(self) -> Iterator[TensorDictBase]:
        """Play all episodes, one round at a time.

        Yields:
            [B, Tmax] as `lit_collect.frames` describes it, padded, with ("collector", "mask"); B = env copies, Tmax
            = the longest episode of the round.
        """
        runner = self._started()
        for number in range(self.num_rounds):
            runner.reseed(*self.place.streams(runner.indices, number))
            yield first_episodes(_play_until_all_ended(runner))

    def first_copy(self, source: EnvSource) -> WorkerSpec:
        """What the first env copy is made of, with an env of another source in its place.

        It plays the same episodes: the one of round k after `RolloutRunner.reseed` with its streams of restart k.
        """
        return replace(self._spec(), source=source, num_envs=1)

    def close(self) -> None:
        """Close the envs; may be called again, and `rounds` builds new ones."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            runner.close()

    def _check_copies(self, copies: int) -> None:
        """A callable may have made a vector env, whose copies nobody knew when the rounds were counted."""
        if copies != (self.source.num_envs or self._config.copies):
            self.close()
            raise ValueError(
                f"evaluation.num_envs must be the {copies} copies of the vector env that {self.source.description} "
                f"makes, got {self._config.num_envs}; use EvaluationConfig(num_envs={copies}, num_episodes={copies})"
            )

    def _started(self) -> RolloutRunner:
        if self._runner is None:
            self._runner = build_runner(self._spec())
            self._check_copies(self._runner.env.num_envs)
        return self._runner

    def _spec(self) -> WorkerSpec:
        return WorkerSpec(
            source=self.source,
            policy=self._policy(),
            rollout=self._rollout,
            num_envs=None,
            place=replace(self.place, default_envs=self._config.copies),
        )


class EvaluationLoader:
    """The rounds of one evaluation as a sized iterable."""

    def __init__(self, evaluator: Evaluator, listeners: list[Callable[[TensorDictBase], None]]) -> None:
        self.evaluator = evaluator
        self._listeners = listeners

    def __len__(self) -> int:
        """Rounds."""
        return self.evaluator.num_rounds

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Play from the first round on; nothing happens before it is asked for."""
        for batch in self.evaluator.rounds():
            for listener in self._listeners:
                listener(batch)
            yield batch


class Evaluations:
    """The evaluators of one data module, one for each stage, made when they are first asked for.

    Args:
        source: makes the envs.
        config: how many episodes, on how many copies.
        rollout: how actions reach the env.
        policy: gives who acts, when the first round of a stage is played.
        listeners: called with each round.
    """

    def __init__(
        self,
        source: EnvSource,
        config: EvaluationConfig,
        *,
        rollout: RolloutConfig,
        policy: Callable[[], Any],
        listeners: list[Callable[[TensorDictBase], None]],
    ) -> None:
        self._source, self._config, self._rollout = source, config, rollout
        self._policy, self._listeners = policy, listeners
        self._evaluators: dict[Stage, Evaluator] = {}

    def loader(self, place: Placement) -> EvaluationLoader:
        """The rounds of a stage.

        Args:
            place: whose random numbers these are; `EvaluationConfig.seed` takes the place of its entropy.
        """
        if place.stage not in self._evaluators:
            entropy = place.entropy if self._config.seed is None else self._config.seed
            self._evaluators[place.stage] = Evaluator(
                self._source,
                self._config,
                rollout=self._rollout,
                policy=self._policy,
                place=replace(place, entropy=entropy),
            )
        return EvaluationLoader(self._evaluators[place.stage], self._listeners)

    def close(self) -> None:
        """Close all envs; may be called again, and loaders that are asked for later build new ones."""
        evaluators, self._evaluators = self._evaluators, {}
        with ExitStack() as closing:  # whatever one of them raises, all are closed
            for evaluator in evaluators.values():
                closing.callback(evaluator.close)


def first_episodes(batch: TensorDictBase) -> TensorDictBase:
    """Cut a batch [N, T] to the first episode of each copy, padded to the longest.

    Args:
        batch: in which every copy has ended at least once.

    Returns:
        [N, Tmax] with ("collector", "mask") [N, Tmax] bool; padding rows are zero.
    """
    done = batch[NEXT_DONE].squeeze(-1)
    before = done.cumsum(-1) - done.long()  # episodes that ended before this row
    mask = before == 0
    if MASK in batch.keys(include_nested=True):
        mask = mask & batch[MASK]
    longest = int(mask.any(0).nonzero().max()) + 1
    cut = batch[:, :longest].clone()
    mask = mask[:, :longest].contiguous()
    for key in cut.keys(include_nested=True, leaves_only=True):
        leaf = cut[key]
        leaf.masked_fill_(~mask.reshape(*mask.shape, *[1] * (leaf.ndim - 2)), 0)
    cut[MASK] = mask
    return cut


def _play_until_all_ended(runner: RolloutRunner) -> TensorDict:
    chunks: list[TensorDict] = []
    ended = np.zeros(runner.env.num_envs, bool)
    steps = 0
    while not ended.all():
        steps += _CHUNK
        if steps == _PATIENCE:
            warnings.warn(
                f"evaluation has played {steps:,} steps, and env copy {int(np.argmin(ended))} has not ended its first "
                f"episode; give evaluation.max_frames a value if episodes do not end by themselves",
                stacklevel=2,
            )
        chunk = runner.collect(_CHUNK, version=0)
        ended |= chunk[NEXT_DONE].squeeze(-1).any(-1).numpy()
        chunks.append(chunk)
    return torch.cat(chunks, dim=1)  # type: ignore[arg-type, return-value]  # tensordict joins them
