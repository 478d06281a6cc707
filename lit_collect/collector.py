"""`Collector`: the budget, the stream of batches, weights and state, whatever the backend."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from lit_collect.backends import Backend, resolve_backend
from lit_collect.config import (
    DeviceConfig,
    ReplayConfig,
    RolloutConfig,
    TrajectoryConfig,
    check_frames,
)
from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.factories import EnvLike, resolve_env
from lit_collect.errors import BudgetSpentError, CollectorClosedError
from lit_collect.frames import count_frames
from lit_collect.seeding import Placement, resolve_entropy
from lit_collect.weights import Weights, copy_weights, models_to_update, named_tensors
from lit_collect.worker import WorkerSpec


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions that see exactly what is yielded."""

    pre_collect: Callable[[], None] | None = None
    """Before each batch."""
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    """Turns each batch into what is yielded instead."""
    post_collect: Callable[[TensorDictBase], None] | None = None
    """After each batch, with what is yielded."""

    @classmethod
    def of(cls, hooks: "Hooks | Mapping[str, Callable[..., Any]] | None") -> "Hooks":
        """The hooks of a mapping from their names.

        Raises:
            ValueError: naming those that do not exist.
        """
        if isinstance(hooks, Hooks):
            return hooks
        unknown = sorted(set(hooks or {}) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"hooks must be among pre_collect, postproc and post_collect, got {unknown}")
        return cls(**(hooks or {}))


class Collector:
    """Steps env copies with a policy and yields batches of exactly counted frames.

    Iterating never restarts anything: it continues the stream where it was left. The envs are built by the
    constructor and closed by `shutdown`, which a ``with`` block calls.

    Args:
        env: a Gymnasium id, a dotted import path, a callable, an `EnvFactory`, a sequence of these (one for each
            copy), or a live env.
        policy: who acts (see `lit_collect.policies`); None acts uniformly at random.
        frames_per_batch: frames of one batch over all env copies, a multiple of their number.
        total_frames: the budget, met to the frame; -1 for none.
        num_envs: env copies. None takes what the env says; where it says nothing there is one, and batches are [T].
        rollout: how a batch is collected.
        trajectories: whole trajectories instead of a fixed number of frames (not in this version).
        replay_buffer: where batches are written (not in this version).
        devices: where things live.
        backend: where frames are collected.
        seed: reproduces the run; None takes the one of `seed_everything`, else a fresh one.
        hooks: `Hooks`, or a mapping with some of their names.

    Raises:
        ValueError: if a setting is out of range or two of them do not fit; the message names values that would do.
        TypeError: if the env, the policy or a space is of a kind that cannot be used.
        WorkerFailedError: if an env's constructor raised.
        BackendUnavailableError: if the backend cannot be used here.

    Example:
        >>> with Collector("CartPole-v1", num_envs=2, frames_per_batch=8, total_frames=20, seed=0) as collector:
        ...     print([batch.shape for batch in collector])
        [torch.Size([2, 4]), torch.Size([2, 4]), torch.Size([2, 2])]
    """

    def __init__(
        self,
        env: EnvLike | Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        num_envs: int | None = None,
        rollout: RolloutConfig = RolloutConfig(),
        trajectories: TrajectoryConfig | None = None,
        replay_buffer: ReplayConfig | None = None,
        devices: DeviceConfig = DeviceConfig(),
        backend: Backend | str = "direct",
        seed: int | Placement | None = None,
        hooks: Hooks | Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        refuse_later(trajectories=trajectories, replay_buffer=replay_buffer)
        source = resolve_env(env)
        copies = num_envs if num_envs is not None else source.num_envs or 1
        check_frames(frames_per_batch, total_frames, copies, copies)
        self._place = seed if isinstance(seed, Placement) else Placement(entropy=resolve_entropy(seed))
        self._hooks = Hooks.of(hooks)
        self._runner = resolve_backend(backend).start(
            WorkerSpec(source=source, policy=policy, rollout=rollout, num_envs=num_envs, place=self._place)
        )
        self.num_envs = self._runner.env.num_envs
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self._check_counts()
        says_nothing = num_envs is None and source.num_envs is None and self._place.default_envs is None
        self._unbatched = says_nothing and isinstance(self._runner.env, DirectEnv)
        self._version = 0
        self._batches = 0
        self._yielded = 0
        self._before_resume = 0  # frames stepped by the runs before this one
        self._restart = 0
        self._closed = False

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Go on with the stream.

        Raises:
            BudgetSpentError: if no frames are left.
            CollectorClosedError: after `shutdown`.
        """
        self._check_open()
        if self.frames_left == 0:
            raise self._spent()
        return self

    def __next__(self) -> TensorDictBase:
        """The next batch; StopIteration when the budget is spent."""
        if not self._closed and self.frames_left == 0:
            raise StopIteration
        return self.collect()

    def __len__(self) -> int:
        """Batches that are left in the budget.

        Raises:
            TypeError: if there is no budget.
        """
        if self.frames_left is None:
            raise TypeError("a collector without total_frames has no length")
        return -(-self.frames_left // self.frames_per_batch)

    def __enter__(self) -> "Collector":
        """The collector itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, whatever happened."""
        self.shutdown()

    @property
    def frames_budget(self) -> int:
        """Frames of this collector in all, -1 without a limit."""
        return self.total_frames

    @property
    def frames_left(self) -> int | None:
        """Frames until the budget is spent, None without one."""
        # a state that was loaded may be of a larger budget
        return None if self.total_frames == -1 else max(self.total_frames - self._yielded, 0)

    @property
    def policy_version(self) -> int:
        """Version of the weights that act: 0 at first, one more for every publication."""
        return self._version

    @property
    def observation_space(self) -> Any:
        """Of one env copy."""
        return self._runner.env.observation_spec.space

    @property
    def action_space(self) -> Any:
        """Of one env copy."""
        return self._runner.env.action_spec.space

    def collect(self) -> TensorDictBase:
        """Collect one batch.

        Returns:
            [N, T] (or [T], see `num_envs`) as `lit_collect.frames` describes it, owned by the caller.

        Raises:
            BudgetSpentError: if no frames are left.
            CollectorClosedError: after `shutdown`.
            WorkerFailedError: if an env raised; the next call begins new episodes.
            FrameContractError: if an env or the policy broke the contract.
        """
        if self._hooks.pre_collect is not None:
            self._check_open()
            self._hooks.pre_collect()
        batch = self.rollout()
        if self._hooks.postproc is not None:
            batch = self._hooks.postproc(batch)
        if self._hooks.post_collect is not None:
            self._hooks.post_collect(batch)
        return batch

    def rollout(self) -> TensorDictBase:
        """One batch without hooks; its frames count like any others."""
        self._check_open()
        left = self.frames_left
        if left == 0:
            raise self._spent()
        frames = self.frames_per_batch if left is None else min(left, self.frames_per_batch)
        counted = 0
        while counted == 0:  # a short batch can be spent on resetting alone, and nobody can learn from it
            batch: TensorDict = self._runner.collect(-(-frames // self.num_envs), self._version, left)
            counted = count_frames(batch)
        self._yielded += counted
        self._batches += 1
        return batch[0] if self._unbatched else batch

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        weights: Weights | None = None,
        policy: nn.Module | None = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str = "policy",
        weights_dict: Mapping[str, Weights] | None = None,
    ) -> None:
        """Publish weights: the next batch is acted by them, under a version that is one higher.

        Args:
            policy_or_weights: a module, a TensorDict or a mapping of tensors; None publishes the policy as it is.
            weights: the same, by name.
            policy: a module, by name.
            worker_ids: not on the direct backend, which has no workers.
            model_id: which model they belong to.
            weights_dict: weights of several models by id.

        Raises:
            ValueError: if weights are given in two ways or do not fit the policy, or `worker_ids` is given.
            KeyError: if there is no such model.
            TypeError: if the policy has no weights.
        """
        self._check_open()
        if worker_ids is not None:
            raise ValueError("worker_ids needs a backend with workers : the direct backend has none")
        models = models_to_update(policy_or_weights, weights, policy, model_id, weights_dict)
        unknown = sorted(models.keys() - {"policy"})
        if unknown:
            raise KeyError(f"there is no model {unknown[0]!r} : expected 'policy'")
        if "policy" in models:
            module = self._runner.actor.module
            if module is None:
                raise TypeError("the policy has no weights : only an nn.Module can be updated")
            copy_weights(named_tensors(models["policy"]), module)
        self._version += 1

    def reset(self, index: int | None = None) -> None:
        """Leave the running episodes (of one env copy, or of all) and begin new ones with the next batch."""
        self._check_open()
        self._runner.reset(index)

    def set_seed(self, seed: int) -> None:
        """Begin new episodes under a new seed with the next batch."""
        self._check_open()
        self._place = Placement(
            entropy=resolve_entropy(seed),
            stage=self._place.stage,
            rank=self._place.rank,
            world_size=self._place.world_size,
        )
        self._reseed()

    def statistics(self) -> dict[str, Any]:
        """Counters as plain numbers. ``frames_stepped = frames_yielded + frames_pending + frames_dropped`` always.

        Frames that were stepped but never handed out (an error in mid-batch, a row beyond the budget) are dropped.
        """
        stepped = self._before_resume + self._runner.frames_stepped
        return {
            "frames_stepped": stepped,
            "frames_yielded": self._yielded,
            "frames_pending": 0,
            "frames_dropped": stepped - self._yielded,
            "batches": self._batches,
            "total_frames": self.total_frames,
            "policy_version": self._version,
            "env_s": self._runner.times.env_s,
            "policy_s": self._runner.times.policy_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists: counters, ids, versions and seeds; loads with ``weights_only=True``."""
        return {
            "frames_stepped": self._before_resume + self._runner.frames_stepped,
            "frames_yielded": self._yielded,
            "batches": self._batches,
            "policy_version": self._version,
            "trajectories": self._runner.running_trajectories,
            "warm_up_steps": self._runner.warm_up_steps,
            "entropy": self._place.entropy,
            "restart": self._restart,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was left: counters, versions and ids continue, episodes begin anew.

        The inside of an episode cannot be restored; the copies begin new episodes, under seeds that no earlier part
        of the run has used.

        Raises:
            ValueError: if the state was made with another number of env copies.
        """
        self._check_open()
        if len(state["trajectories"]) != self.num_envs:
            raise ValueError(
                f"the state is of {len(state['trajectories'])} env copies, this collector has {self.num_envs}; "
                f"use num_envs={len(state['trajectories'])}"
            )
        stepped = max(state["frames_stepped"], self._before_resume + self._runner.frames_stepped)
        self._before_resume = stepped - self._runner.frames_stepped
        self._yielded, self._batches = state["frames_yielded"], state["batches"]
        self._version, self._restart = state["policy_version"], state["restart"] + 1
        self._place = Placement(
            entropy=state["entropy"], stage=self._place.stage, rank=self._place.rank, world_size=self._place.world_size
        )
        self._reseed()
        self._runner.resume(state["trajectories"], state["warm_up_steps"])

    def shutdown(self) -> None:
        """Close the envs; may be called again."""
        if not self._closed:
            self._closed = True
            self._runner.close()

    def _reseed(self) -> None:
        self._runner.reseed(*self._place.streams(self._runner.indices, self._restart))

    def _check_counts(self) -> None:
        """The copies are known for sure only now: a factory may have made a vector env."""
        try:
            check_frames(self.frames_per_batch, self.total_frames, self.num_envs, self.num_envs)
        except BaseException:
            self._runner.close()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise CollectorClosedError("the collector is closed; build a new one")

    def _spent(self) -> BudgetSpentError:
        return BudgetSpentError(
            f"all {self.total_frames} frames of total_frames have been collected; raise the budget or build a new "
            f"collector"
        )


def refuse_later(**settings: object) -> None:
    """Refuse settings of parts that are still to come.

    Raises:
        ValueError: if one of them is given.
    """
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"{name} is not available in this version : expected None, got {value!r}")
