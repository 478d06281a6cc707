"""The hot loop: one batched env and one policy make one batch. No processes, no Lightning."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lit_collect.assembly import PRIVATE, Assembly, Episodes, Storage
from lit_collect.blank import blank_batch
from lit_collect.columns import Columns, store
from lit_collect.config import RolloutConfig
from lit_collect.devices import on_cuda
from lit_collect.envs.base import BatchedEnv, Final
from lit_collect.envs.spaces import ActionEncoder
from lit_collect.errors import CollectorClosedError, FrameContractError, LitCollectError
from lit_collect.policies import Actor
from lit_collect.seeding import RandomStream

RANDOM_VERSION = -1
"""`policy_version` of rows that were acted at random."""

_WINDOW = 64  # steps; longer ones fall out of the cache, shorter ones are copied out too often


@dataclass
class RolloutTimes:
    """Seconds since the last look, of one runner."""

    env_s: float = 0.0
    policy_s: float = 0.0


class RolloutRunner:
    """Makes batches of one batched env and one policy, and owns the env.

    Args:
        env: N env copies; closed by `close`.
        actor: who acts.
        warm_up: who acts for the first `warm_up_steps` steps.
        warm_up_steps: steps that are acted at random.
        threads: of torch, while a batch is made.
        config: how batches are collected.
        indices: global indices of the env copies.
        total_copies: env copies over all workers and ranks.
        seeds: for the first reset of each copy.
        stream: the random numbers of acting and of envs that use global generators.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        env: BatchedEnv,
        actor: Actor,
        *,
        config: RolloutConfig,
        indices: range,
        total_copies: int,
        seeds: Sequence[int],
        stream: RandomStream,
        warm_up: Actor,
        warm_up_steps: int = 0,
        threads: int = 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.env = env
        self.actor = actor
        self.warm_up_steps = warm_up_steps
        self.times = RolloutTimes()
        self.frames_stepped = 0
        self._warm_up = warm_up
        self._config = config
        self.indices = indices
        self._episodes = Episodes(indices, total_copies)
        self._seeds: Sequence[int] | None = seeds
        self._stream = stream
        self._encode = ActionEncoder(env.action_spec, clip=config.clip_actions, first=env.first)
        self._threads = threads
        self._clock = clock
        self._columns: Columns | None = None
        self._ready = False  # whether the columns hold what the policy sees next; else reset first
        self._closed = False

    @property
    def running_trajectories(self) -> list[int]:
        """For each copy the number of its first trajectory that is not begun yet."""
        return self._episodes.next_numbers

    def collect(
        self,
        steps: int,
        version: int,
        *,
        storage: Storage = PRIVATE,
        interrupted: Callable[[], bool] | None = None,
    ) -> TensorDict:
        """Make one batch.

        Args:
            steps: T.
            version: of the weights that act.
            storage: where the large columns lie.
            interrupted: asked after each step; if it says so, the batch ends there.

        Returns:
            [N, T] as `lit_collect.frames` describes it, owned by the caller; fewer steps after an interruption.

        Raises:
            WorkerFailedError: if the env or its constructor raised.
            FrameContractError: if the env or the policy broke the contract.
            CollectorClosedError: after `close`.
        """
        if self._closed:
            raise CollectorClosedError("the collector is closed; build a new one")
        random_steps = min(self.warm_up_steps, steps)
        try:
            with self._stream.active(), _torch_threads(self._threads):
                if not self._ready or self._config.reset_at_each_iter:
                    self._reset(steps)
                assembly = self._assembly(steps, storage)
                made = self._roll(assembly, steps, random_steps, interrupted)
            if made < steps:
                assembly.cut(made)
                random_steps = min(random_steps, made)
            if self._config.check_finite:
                assembly.check_finite()
            batch = self._finish(assembly, version, random_steps)
        except BaseException:  # what the envs went through is lost, so the next batch begins new episodes
            self._abandon()
            raise
        self.warm_up_steps -= random_steps
        return batch

    def fake(self, steps: int) -> TensorDict:
        """A batch [N, T] of zeros, with the keys, shapes and dtypes of a real one. Steps no env and counts nothing.

        Args:
            steps: T.
        """
        if self._columns is None:
            self.actor.see(self.env.leaves)
        with RandomStream(self._stream.seed).active(), _torch_threads(self._threads), self.actor.acting():
            return blank_batch(self.env, self.actor, steps, assembly=lambda count: self._assembly(count, PRIVATE))

    def reset(self, index: int | None = None) -> None:
        """Begin new episodes before the next batch, in all copies or in one; open trajectories end where they are."""
        if index is None or self._columns is None or not self._ready:
            self._abandon()
            return
        mask = np.zeros(self.env.num_envs, bool)
        mask[index] = True
        try:
            with self._stream.active():
                seen = self.env.reset(mask=mask)
        except LitCollectError:
            self._abandon()
            raise
        self._columns.begin(seen, mask)
        self._episodes.leave(mask)
        self.actor.restart(np.flatnonzero(mask))

    def reseed(self, seeds: Sequence[int], stream: RandomStream) -> None:
        """Begin new episodes under new seeds before the next batch."""
        self._abandon()
        self._seeds, self._stream = seeds, stream
        for actor in (self.actor, self._warm_up):
            actor.reseed(stream.seed)

    def resume(self, trajectories: Sequence[int], warm_up_steps: int) -> None:
        """Go on counting where an earlier run was left."""
        self._ready = False
        self._episodes.restore(trajectories)
        self.warm_up_steps = warm_up_steps

    def close(self) -> None:
        """Close the envs; may be called again."""
        self._closed = True
        self._columns = None
        self.env.close()

    def _reset(self, steps: int) -> None:
        self._abandon()
        seen = self.env.reset(self._seeds)
        self._seeds = None  # from here on the copies' own generators go on
        if self._columns is None:
            with torch.inference_mode(False):
                self._columns = Columns(
                    min(steps, _WINDOW),
                    self.env.num_envs,
                    leaves=self.env.leaves,
                    action_spec=self.env.action_spec,
                    pinned=on_cuda(self.actor.module),
                )
            for actor in (self.actor, self._warm_up):
                actor.see(self.env.leaves)
        self.actor.restart(np.arange(self.env.num_envs))
        self._columns.turn(0)
        self._columns.begin(seen)
        self._ready = True

    def _assembly(self, steps: int, storage: Storage) -> Assembly:
        observed, compact = len(self.env.observation_spec.leaves), self._config.compact_obs
        return Assembly(
            steps, self.env.num_envs, leaves=self.env.leaves, observed=observed, storage=storage, compact=compact
        )

    def _abandon(self) -> None:
        """Leave all running trajectories; the next batch begins new episodes."""
        self._episodes.leave()
        self._ready = False

    def _roll(self, assembly: Assembly, steps: int, random_steps: int, interrupted: Callable[[], bool] | None) -> int:
        """Fill the batch, window by window; returns how many steps were made."""
        columns = self._columns
        assert columns is not None
        changes = [column._version for column in columns.observations]
        with self.actor.acting():
            if random_steps:
                if columns.known_targets(self.actor.keys) is None:
                    self._learn_outputs(columns)
                assembly.fill(columns)
            start = 0
            while start < steps:
                actor, end = (self._warm_up, random_steps) if start < random_steps else (self.actor, steps)
                wanted = min(columns.steps, end - start)
                made, finals = self._act(actor, columns, wanted, interrupted)
                keys = actor.keys if actor is self.actor else (*actor.keys, *self.actor.carried)
                assembly.take(columns, start, start + made, keys=keys, finals=finals)
                columns.turn(made)
                start += made
                if made < wanted:
                    break
        # Only NumPy writes observations, which leaves torch's version counters alone: a change is the policy's doing.
        if changes != [column._version for column in columns.observations]:
            raise FrameContractError("the policy changed its observation in place; let it work on a copy")
        return start

    def _act(
        self, actor: Actor, columns: Columns, steps: int, interrupted: Callable[[], bool] | None
    ) -> tuple[int, list[tuple[int, Final]]]:
        """Fill the first steps of the window and say how many; this is the hot loop."""
        clock, encode, step_into = self._clock, self._encode, self.env.step_into
        inputs, slots = columns.inputs, columns.slots
        recurrent = self.actor if self.actor.recurrent else None
        actions, targets = columns.actions, columns.known_targets(actor.keys)
        sizes = [target.numel() for target in targets[0]] if targets else []
        finals: list[tuple[int, Final]] = []
        policy_s = env_s = 0.0
        stepped = 0
        then = clock()
        try:
            for t in range(steps):
                if recurrent is not None and actor is not recurrent:
                    for key, entered in recurrent.follow(inputs[t]).items():
                        columns.outputs[key][t].copy_(entered)
                values = actor(inputs[t])
                if targets is None:
                    targets, actions = columns.targets(actor.keys, values), columns.actions
                    sizes = [target.numel() for target in targets[0]]
                store(values, targets[t], sizes, actor.keys)
                now = clock()
                policy_s += now - then
                ended = step_into(encode(actions[t]), slots[t])
                then = clock()
                env_s += then - now
                stepped += 1
                if ended:
                    finals += [(t, final) for final in ended]
                if recurrent is not None:
                    recurrent.restart(_beginning(ended, slots[t].valid))
                if interrupted is not None and interrupted():
                    break
        finally:  # frames that an error takes away were stepped all the same; rows spent on resetting are no frames
            self.frames_stepped += int(np.count_nonzero(columns.valid[:stepped]))
            self.times.policy_s += policy_s
            self.times.env_s += env_s
        return stepped, finals

    def _learn_outputs(self, columns: Columns) -> None:
        """See before the first random step what the policy gives, so that all rows have it; moves no random numbers."""
        with RandomStream(self._stream.seed).active():
            values = self.actor.preview(columns.inputs[0])
        columns.targets(self.actor.keys, values)

    def _finish(self, assembly: Assembly, version: int, random_steps: int) -> TensorDict:
        """Complete the outputs, say which rows count, and make the batch."""
        if self._config.set_truncated:
            assembly.truncated[-1] |= assembly.valid[-1]  # an episode that has ended does not end once more
        versions = np.full(len(assembly.valid), version, np.int64)
        versions[:random_steps] = RANDOM_VERSION
        with torch.inference_mode(False):
            acted = {key: value[:, random_steps:] for key, value in assembly.outputs.items()}
            completed = self.actor.complete(acted)
            if random_steps:
                completed = {key: _after_zeros(value, random_steps) for key, value in completed.items()}
        mask = assembly.valid.copy() if self.env.may_mask else None
        return assembly.finish(self._episodes, versions=versions, completed=completed, mask=mask)


def _beginning(ended: Sequence[Final], valid: np.ndarray) -> np.ndarray:
    """Env copies whose next row begins an episode: those that ended and were reset, or spent this step on resetting."""
    return np.array([*(final.row for final in ended), *np.flatnonzero(~valid)], np.int64)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """One thread as a rule: acting is many small operations, which more threads slow down, on a busy machine badly."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _after_zeros(value: Tensor, steps: int) -> Tensor:
    """[N, T', ...] -> [N, steps + T', ...], zero in the first steps, which somebody else acted."""
    return torch.cat([value.new_zeros(value.shape[0], steps, *value.shape[2:]), value], 1)
