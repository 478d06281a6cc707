"""The hot loop: one batched env and one policy make one batch. No processes, no Lightning."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lit_collect.columns import Columns, batch_major, flag, store
from lit_collect.config import RolloutConfig
from lit_collect.envs.base import BatchedEnv, Final, Leaves
from lit_collect.envs.spaces import ActionEncoder
from lit_collect.errors import CollectorClosedError, FrameContractError, LitCollectError
from lit_collect.frames import Key, is_private
from lit_collect.policies import Actor
from lit_collect.seeding import RandomStream

RANDOM_VERSION = -1
"""`policy_version` of rows that were acted at random."""


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
        self._total_copies = total_copies
        self._seeds: Sequence[int] | None = seeds
        self._stream = stream
        self._begun = np.zeros(env.num_envs, np.int64)  # number of each copy's running trajectory
        self._encode = ActionEncoder(env.action_spec, clip=config.clip_actions)
        self._clock = clock
        self._columns: Columns | None = None
        self._carried: Leaves | None = None  # what the policy sees next, None: reset first
        self._fresh = np.ones(env.num_envs, bool)  # which copies begin an episode with the next row
        self._open = np.zeros(env.num_envs, bool)  # which copies are within a trajectory that has rows
        self._closed = False

    @property
    def running_trajectories(self) -> list[int]:
        """For each copy the number of its first trajectory that is not begun yet."""
        return (self._begun + self._open).tolist()

    def collect(self, steps: int, version: int, frame_limit: int | None = None) -> TensorDict:
        """Make one batch.

        Args:
            steps: T.
            version: of the weights that act.
            frame_limit: rows beyond that many transitions are masked (only sources whose rows may be none).

        Returns:
            [N, T] as `lit_collect.frames` describes it, owned by the caller.

        Raises:
            WorkerFailedError: if the env or its constructor raised.
            FrameContractError: if the env or the policy broke the contract.
            CollectorClosedError: after `close`.
        """
        if self._closed:
            raise CollectorClosedError("the collector is closed; build a new one")
        random_steps = min(self.warm_up_steps, steps)
        versions = np.full(steps, version, np.int64)
        versions[:random_steps] = RANDOM_VERSION
        try:
            with self._stream.active(), _one_thread():
                if self._carried is None or self._config.reset_at_each_iter:
                    self._reset()
                columns = self._columns_for(steps)
                finals = self._roll(columns, steps, random_steps)
            if self._config.check_finite:
                _check_finite(columns, steps, finals)
            batch = self._finish(columns, steps, finals, versions, frame_limit)
        except BaseException:  # what the envs went through is lost, so the next batch begins new episodes
            self._abandon()
            raise
        self.warm_up_steps -= random_steps
        self._carried = columns.last_observation(steps)
        return batch

    def reset(self, index: int | None = None) -> None:
        """Begin new episodes before the next batch, in all copies or in one; open trajectories end where they are."""
        if index is None or self._carried is None:
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
        for carried, leaf in zip(self._carried, seen, strict=True):
            carried[index] = leaf[index]
        self._begun[index] += self._open[index]
        self._open[index] = False
        self._fresh[index] = True

    def reseed(self, seeds: Sequence[int], stream: RandomStream) -> None:
        """Begin new episodes under new seeds before the next batch."""
        self._abandon()
        self._seeds, self._stream = seeds, stream

    def resume(self, trajectories: Sequence[int], warm_up_steps: int) -> None:
        """Go on counting where an earlier run was left."""
        self._abandon()
        self._begun = np.array(trajectories, np.int64)
        self.warm_up_steps = warm_up_steps

    def close(self) -> None:
        """Close the envs; may be called again."""
        self._closed = True
        self._columns = None
        self.env.close()

    def _reset(self) -> None:
        if self._carried is not None:
            self._abandon()
        self._carried = self.env.reset(self._seeds)
        self._seeds = None  # from here on the copies' own generators go on
        self._fresh[:] = True

    def _abandon(self) -> None:
        """Leave all running trajectories; their ids are not used again."""
        self._begun += self._open
        self._open[:] = False
        self._fresh[:] = True
        self._carried = None

    def _columns_for(self, steps: int) -> Columns:
        assert self._carried is not None
        if self._columns is None or self._columns.steps < steps:
            with torch.inference_mode(False):
                self._columns = Columns(
                    steps,
                    self.env.num_envs,
                    observation_spec=self.env.observation_spec,
                    action_spec=self.env.action_spec,
                )
        self._columns.begin(self._carried)
        return self._columns

    def _roll(self, columns: Columns, steps: int, random_steps: int) -> list[tuple[int, Sequence[Final]]]:
        """Fill the columns."""
        finals: list[tuple[int, Sequence[Final]]] = []
        versions = [column._version for column in columns.observations]
        with self.actor.acting():
            if random_steps:
                self._learn_outputs(columns)
                self._act(self._warm_up, columns, 0, random_steps, finals)
            self._act(self.actor, columns, random_steps, steps, finals)
        # Only NumPy writes observations, which leaves torch's version counters alone: a change is the policy's doing.
        if versions != [column._version for column in columns.observations]:
            raise FrameContractError("the policy changed its observation in place; let it work on a copy")
        return finals

    def _act(
        self, actor: Actor, columns: Columns, start: int, stop: int, finals: list[tuple[int, Sequence[Final]]]
    ) -> None:
        clock, encode, step_into = self._clock, self._encode, self.env.step_into
        inputs, slots, copies = columns.inputs, columns.slots, self.env.num_envs
        actions, targets = columns.actions, columns.known_targets(actor.keys)
        sizes = [target.numel() for target in targets[0]] if targets else []
        policy_s = env_s = 0.0
        then = clock()
        for t in range(start, stop):
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
            self.frames_stepped += copies
            if ended:
                finals.append((t, ended))
        self.times.policy_s += policy_s
        self.times.env_s += env_s

    def _learn_outputs(self, columns: Columns) -> None:
        """Before random steps: see what the policy gives, without moving its random numbers, so all rows have it.

        It is zero in rows that the policy did not act.
        """
        state = torch.get_rng_state()
        values = self.actor(columns.inputs[0])
        columns.targets(self.actor.keys, values)
        torch.set_rng_state(state)
        for column in columns.outputs.values():
            column.zero_()

    def _finish(
        self,
        columns: Columns,
        steps: int,
        finals: list[tuple[int, Sequence[Final]]],
        versions: np.ndarray,
        frame_limit: int | None,
    ) -> TensorDict:
        """Copy the columns out as one batch, and move the episode bookkeeping on."""
        terminated, truncated = columns.terminated[:steps], columns.truncated[:steps]
        if self._config.set_truncated:
            truncated[-1] = True
        valid = columns.valid[:steps]
        shape = (self.env.num_envs, steps)
        with torch.inference_mode(False):
            root, successors = self._observation_columns(columns, steps, finals)
            for key, column in self._outputs(columns, steps, int((versions == RANDOM_VERSION).sum())).items():
                if not is_private(key):
                    _put(root, key, batch_major(column))
            done = terminated | truncated
            for name in ("done", "terminated", "truncated"):
                root[name] = torch.zeros((*shape, 1), dtype=torch.bool)
            root["is_init"] = flag(self._first_rows(finals, valid))
            successors["reward"] = flag(columns.reward[:steps])
            successors["done"] = flag(done)
            successors["terminated"], successors["truncated"] = flag(terminated), flag(truncated)
            root["next"] = successors
            root["collector"] = self._labels(done, valid, versions, frame_limit)
            return TensorDict(root, batch_size=shape, names=[None, "time"])  # type: ignore[list-item]  # None is a name

    def _outputs(self, columns: Columns, steps: int, random_steps: int) -> dict[Key, Tensor]:
        """What the policy gave, and what its actor completes for the rows that it acted."""
        outputs = {key: column[:steps] for key, column in columns.outputs.items()}
        if not random_steps:
            return {**outputs, **self.actor.complete(outputs)}
        completed = self.actor.complete({key: column[random_steps:] for key, column in outputs.items()})
        for key, column in completed.items():
            outputs[key] = torch.cat([column.new_zeros(random_steps, *column.shape[1:]), column])
        return outputs

    def _observation_columns(
        self, columns: Columns, steps: int, finals: list[tuple[int, Sequence[Final]]]
    ) -> tuple[dict, dict]:
        """What the policy saw, and the true successors: the following rows, patched where an episode ended."""
        root: dict = {}
        successors: dict = {}
        for position, leaf in enumerate(self.env.observation_spec.leaves):
            if is_private(leaf.key):
                continue
            column = columns.observations[position]
            following = batch_major(column[1 : steps + 1])
            array = following.numpy()
            for t, ended in finals:
                for final in ended:
                    array[final.row, t] = final.obs[position]
            _put(root, leaf.key, batch_major(column[:steps]))
            _put(successors, leaf.key, following)
        return root, successors

    def _first_rows(self, finals: list[tuple[int, Sequence[Final]]], valid: np.ndarray) -> np.ndarray:
        """[T, N] bool, the first row of each episode; remembers which copies begin one with the next batch."""
        first = np.empty((len(valid) + 1, self.env.num_envs), bool)
        first[0] = self._fresh
        np.logical_not(valid, out=first[1:])  # a row that was spent on resetting is followed by a first row
        for t, ended in finals:
            for final in ended:
                first[t + 1, final.row] = True
        self._fresh = first[-1]
        return first[:-1]

    def _labels(self, done: np.ndarray, valid: np.ndarray, versions: np.ndarray, frame_limit: int | None) -> dict:
        """Trajectory ids, versions and, where rows can be none, the mask."""
        steps, copies = done.shape
        ended = np.cumsum(done, 0)
        order = np.repeat(self._begun[None], steps, 0)
        order[1:] += ended[:-1]
        ids = order * self._total_copies + np.asarray(self.indices, np.int64)
        self._begun = self._begun + ended[-1]
        self._open = valid[-1] & ~done[-1]
        labels = {"policy_version": torch.from_numpy(np.repeat(versions[None], copies, 0))}
        if self.env.may_mask:
            self.frames_stepped -= int(valid.size - valid.sum())
            mask = valid.copy()
            if frame_limit is not None:
                mask &= (np.cumsum(valid.ravel()) <= frame_limit).reshape(valid.shape)
            ids[~mask] = -1
            labels["mask"] = torch.from_numpy(mask.T.copy())
        labels["traj_ids"] = torch.from_numpy(ids.T.copy())
        return labels


@contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread: acting is many small operations, which more threads slow down, on a busy machine badly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _put(tree: dict, key: Key, value: Tensor) -> None:
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
    tree[key[-1]] = value


def _check_finite(columns: Columns, steps: int, finals: list[tuple[int, Sequence[Final]]]) -> None:
    """Raise for the first reward or observation that is NaN or infinite.

    Raises:
        FrameContractError: naming the step and the env copy.
    """
    named = [("reward", columns.reward[:steps])]
    named += [("observation", leaf[: steps + 1].numpy()) for leaf in columns.observations if leaf.is_floating_point()]
    for name, values in named:
        if not np.isfinite(values).all():
            step, copy = np.argwhere(~np.isfinite(values))[0][:2].tolist()
            raise FrameContractError(f"{name} of env copy {copy} is not finite at step {step} of the batch")
    for t, ended in finals:
        for final in ended:
            if not all(np.isfinite(leaf).all() for leaf in final.obs):
                raise FrameContractError(
                    f"next observation of env copy {final.row} is not finite at step {t} of the batch"
                )
