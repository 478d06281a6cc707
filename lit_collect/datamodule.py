"""`CollectorDataModule`: collected frames as ordinary Lightning data."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import lightning as L
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from lit_collect.backends import Backend, resolve_backend
from lit_collect.config import (
    DeviceConfig,
    EvaluationConfig,
    RolloutConfig,
    TrajectoryConfig,
    UpdateConfig,
    check_frames,
    check_shares,
    settings,
)
from lit_collect.dataset import CollectorDataset, CollectorLoader
from lit_collect.envs.factories import EnvLike, resolve_env
from lit_collect.envs.probe import SpaceProbe
from lit_collect.envs.spaces import describe_space
from lit_collect.evaluated import EvaluatedDataModule
from lit_collect.learner import Seat, add_callbacks, initialise_lazy, policy_of
from lit_collect.metrics import ReplayUse
from lit_collect.plan import Plan
from lit_collect.replay import MixedBuffer, ReplayBuffer
from lit_collect.replay.config import ReplayConfig
from lit_collect.replaying import Replaying
from lit_collect.seeding import Placement, Stage, resolve_entropy
from lit_collect.supply import Supply

_DEFAULT_ENVS = 8


class CollectorDataModule(EvaluatedDataModule):
    """Feeds `Trainer.fit` with frames that the module's own policy collects.

    An epoch is `batches_per_epoch` collected batches, each cut into minibatches as `updates` says; the next batch is
    collected after the last minibatch was trained on, with the weights of that moment. The run stops with the budget.
    Validation and test play whole episodes on envs of their own. Nothing is built before it is needed.

    The policy is the LightningModule's ``policy`` attribute (or what its ``collector_policy()`` returns), unless one
    is given. If the module defines ``prepare_rollout(batch) -> batch``, it sees each whole batch once, on the
    trainer's device, in its precision and without gradients. If it defines ``configure_spaces(observation_spec,
    action_spec)``, it is told both specs when the data module sets up, to build its networks from. A policy with lazy
    layers then acts once, in an env copy that is made for that, so that all layers know their shapes before any
    strategy wraps them.

    With several ranks each has env copies and frames of its own, `total_frames` is the budget of them all, and all of
    them train on equally many batches and minibatches, also where some get on more slowly.

    Args:
        env: a Gymnasium id, a dotted import path, a callable, an `EnvFactory`, a sequence of these (one for each
            copy), or a live env (then without evaluation).
        policy: who acts, if not the LightningModule's.
        frames_per_batch: frames of one batch of one rank, a multiple of `num_envs`.
        total_frames: the budget over all ranks, met to the frame; -1 for none.
        num_envs: env copies of one rank. None takes what the env says, else 8.
        updates: passes and minibatches.
        rollout: how a batch is collected.
        trajectories: whole trajectories instead of a fixed number of frames.
        replay: a replay buffer in between: a `ReplayConfig`, or an object with ``extend`` and ``sample``. Each
            collected batch is written to it, and `UpdateConfig.updates_per_batch` samples are trained on.
        devices: where things live.
        evaluation: episodes of a validation or test run, on each rank; None for none.
        backend: where frames are collected.
        batches_per_epoch: collected batches in one epoch. None takes the whole budget (1000 if there is none).
        seed: reproduces the data; None takes the one of `seed_everything`, else a fresh one.

    Raises:
        ValueError: if a setting is out of range or two of them do not fit; the message names values that would do.
        TypeError: if the env is of a kind that cannot be used.

    Example:
        >>> data = CollectorDataModule("CartPole-v1", num_envs=8, frames_per_batch=1024, total_frames=100_000,
        ...                            updates=UpdateConfig(epochs=10, minibatch_size=64))
        >>> len(data.train_dataloader())
        15630
    """

    def __init__(
        self,
        env: EnvLike,
        policy: Any = None,
        *,
        frames_per_batch: int = 2048,
        total_frames: int = -1,
        num_envs: int | None = None,
        updates: UpdateConfig = UpdateConfig(),
        rollout: RolloutConfig = RolloutConfig(),
        trajectories: TrajectoryConfig | None = None,
        # a command line tries them in turn: what sets one value of a mixed buffer must not be taken for a config
        replay: MixedBuffer | ReplayConfig | ReplayBuffer | None = None,
        devices: DeviceConfig = DeviceConfig(),
        evaluation: EvaluationConfig | None = EvaluationConfig(),
        backend: Backend | str = "auto",
        batches_per_epoch: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._seat = Seat()  # which Lightning attaches the trainer to
        super().__init__()
        updates, rollout = settings(UpdateConfig, updates, "updates"), settings(RolloutConfig, rollout, "rollout")
        devices = settings(DeviceConfig, devices, "devices")
        if evaluation is not None:
            evaluation = settings(EvaluationConfig, evaluation, "evaluation")
        self._source = resolve_env(env)
        self._backend = resolve_backend(backend)
        workers = self._backend.num_collectors
        self._num_envs = num_envs if num_envs is not None else self._source.copies(workers)
        self._default_envs = -(-_DEFAULT_ENVS // workers) * workers
        known = self._num_envs if self._num_envs is not None else self._default_envs if isinstance(env, str) else 1
        check_frames(frames_per_batch, total_frames, known, known)
        if self._num_envs is not None:
            check_shares(self._num_envs, workers)
        trajectories = None if trajectories is None else settings(TrajectoryConfig, trajectories, "trajectories")
        self._policy = policy
        self._rollout, self._devices = rollout, devices
        self._entropy = resolve_entropy(seed) if seed is not None else None
        self._probe = SpaceProbe(self._source)
        plan = Plan(
            source=self._source,
            policy=policy,
            backend=self._backend,
            num_envs=self._num_envs,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            rollout=rollout,
            trajectories=trajectories,
            devices=devices,
        )
        self._replaying = None if replay is None else Replaying(replay, plan=plan)
        self._supply = Supply(
            plan,
            self._seat,
            place=partial(self._place, "train"),
            probe=self._probe,
            replaying=self._replaying,
            listeners=self.rollout_listeners,
        )
        self._evaluate(self._source, evaluation, rollout=rollout, policy=partial(self._seat.policy, policy))
        self._stream = CollectorDataset(
            self, batches_per_epoch=batches_per_epoch, updates=updates, agree=self._seat.most
        )
        described = {
            **plan.describe(),
            "num_envs": num_envs,
            "updates": asdict(updates),
            "replay": None if self._replaying is None else self._replaying.description,
            "evaluation": None if evaluation is None else asdict(evaluation),
            "batches_per_epoch": batches_per_epoch,
            "seed": seed,
        }
        self.save_hyperparameters(described, logger=False)

    # --- what others read ---------------------------------------------------------------------------------------

    @property
    def observation_spec(self) -> dict[str, Any]:
        """The observation space of one env copy as plain data. Makes one env, which becomes copy 0 of the training."""
        return describe_space(self._probe.spaces()[0])

    @property
    def action_spec(self) -> dict[str, Any]:
        """The action space of one env copy as plain data (see `observation_spec`)."""
        return describe_space(self._probe.spaces()[1])

    @property
    def frames_per_batch(self) -> int:
        """Frames of one batch of one rank; may be changed until the first batch."""
        return self._supply.plan.frames_per_batch

    @frames_per_batch.setter
    def frames_per_batch(self, frames: int) -> None:
        self._supply.plan = replace(self._supply.plan, frames_per_batch=frames)

    @property
    def total_frames(self) -> int:
        """The budget over all ranks, -1 for none."""
        return self._supply.plan.total_frames

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent so far, by what they were spent on.

        In envs and in the policy (of the busiest worker), on handing batches over, in rollouts (mean of the workers),
        on waiting for batches, on publishing weights.
        """
        return self._supply.seconds

    @property
    def frames_total(self) -> int:
        """Frames handed out so far, over all ranks."""
        return self._supply.budget.yielded

    @property
    def copies_total(self) -> int | None:
        """Env copies over all ranks; None while nothing has been collected."""
        collector = self._supply.collector
        return None if collector is None else collector.num_envs * self._seat.world_size

    @property
    def frames_budget(self) -> int:
        """Frames of this rank in all, -1 without a limit."""
        return self._supply.frames_budget

    @property
    def frames_left(self) -> int | None:
        """Frames until the budget is spent, as many as any rank has left; None without one."""
        return self._supply.frames_left

    @property
    def trajs_per_batch(self) -> int | None:
        """Whole trajectories in one batch, None if batches have a fixed number of frames."""
        return self._supply.trajs_per_batch

    @property
    def batches_vary(self) -> bool:
        """Whether batches have any number of rows, as those of trajectories do."""
        return self._supply.batches_vary

    @property
    def collects_ahead(self) -> bool:
        """Whether frames are collected while the learner learns."""
        return self._supply.collects_ahead

    @property
    def num_ranks(self) -> int:
        """Ranks that collect."""
        return self._seat.world_size

    @property
    def progress(self) -> float:
        """How much of the budget was collected, from 0 to 1 (0 if there is none); drives schedules by frames."""
        collected = self._supply.budget.yielded + self._supply.budget.lost
        return 0.0 if self.total_frames == -1 else collected / self.total_frames

    @property
    def policy_version(self) -> int:
        """Version of the weights that act."""
        return self._supply.policy_version

    def statistics(self) -> dict[str, Any]:
        """The collector's counters (see `Collector.statistics`), also after a fit; empty before the first batch."""
        return self._supply.statistics()

    @property
    def learns_from_replay(self) -> bool:
        """Whether samples of a replay buffer are trained on."""
        return self._replaying is not None

    @property
    def min_frames(self) -> int:
        """Rows of the replay buffer that must be there before the first sample."""
        return 0 if self._replaying is None else self._replaying.min_frames

    @property
    def replay_buffer(self) -> Any:
        """What is sampled from, built when it is first asked for; None without one."""
        return None if self._replaying is None else self._replaying.target(self._place("train")).buffer

    def take_replay_use(self) -> ReplayUse | None:
        """What was done with the replay buffer since the last call, None if there is none."""
        return None if self._replaying is None else self._replaying.take_use(self._stream.samples)

    def update_priority(self, sample: TensorDictBase, priority: Tensor) -> None:
        """Say how much is to be learned from the rows of a sample; does nothing where the buffer has no priorities.

        Args:
            sample: as it was sampled, [M] or [S, L], or with a part of its keys.
            priority: as many numbers, at least 0.
        """
        if self._replaying is not None:
            self._replaying.update_priority(sample, priority)

    def __str__(self) -> str:
        """The settings; Lightning's own text would iterate over the loaders, and so collect."""
        return (
            f"{type(self).__name__}(env={self._source.description!r}, num_envs={self._num_envs}, "
            f"frames_per_batch={self.frames_per_batch}, total_frames={self.total_frames})"
        )

    # --- Lightning's hooks --------------------------------------------------------------------------------------

    @property
    def trainer(self) -> L.Trainer | None:
        """The trainer this is attached to."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        """Be attached: add the callbacks without which nothing would work.

        Raises:
            TypeError: if the trainer is of the package ``pytorch_lightning``.
        """
        if trainer is not None:
            add_callbacks(trainer, self._stream)
        self._trainer = self._seat.trainer = trainer

    @override
    def setup(self, stage: str) -> None:
        """Tell a module that wants to know about the spaces, and initialise lazy layers of the policy.

        Callbacks set up later, and find a finished module.
        """
        module = None if self.trainer is None else self.trainer.lightning_module
        configure = getattr(module, "configure_spaces", None)
        if configure is not None:
            configure(self.observation_spec, self.action_spec)
        policy = policy_of(module) if self._policy is None else self._policy
        if stage == "fit" and policy is not None:  # else the module has yet to build it
            place = self._place("train")
            initialise_lazy(policy, module, source=self._source, rollout=self._rollout, place=place)

    @override
    def train_dataloader(self) -> CollectorLoader:
        """Minibatches of collected batches; the same stream at every call."""
        return CollectorLoader(self._stream)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counters, ids, versions and seeds as plain data; talks to no worker and no other rank."""
        state = self._supply.state_dict()
        if self._replaying is not None:
            # Lightning asks a loader for its state only while it is used
            state.update(replay=self._replaying.state_dict(), **self._stream.feed.state_dict())
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another run was left (see `Collector.load_state_dict`)."""
        self._supply.load_state_dict(state_dict)
        if self._replaying is not None:
            self._replaying.load_state_dict(state_dict.get("replay"))
            self._stream.feed.load_state_dict(state_dict)

    # --- collecting ---------------------------------------------------------------------------------------------

    def collect(self) -> TensorDictBase:
        """The next whole batch, prepared for training: publish changed weights, collect, prepare.

        Raises:
            BudgetSpentError: if no frames are left, or they made no whole trajectory.
        """
        return self._supply.collect()

    def publish_in_between(self) -> None:
        """Publish changed weights now if somebody collects while the learner learns (see `WeightSync`)."""
        self._supply.publish_in_between()

    def close(self) -> None:
        """Close all envs; may be called again."""
        with ExitStack() as closing:  # whatever one of them raises, all are closed
            if self._evaluations is not None:
                closing.callback(self._evaluations.close)
            closing.callback(self._supply.close)
            self._stream.feed.forget()

    @property
    def _sample_dims(self) -> int:
        return self._stream.batch_dims

    def _place(self, stage: Stage) -> Placement:
        if self._entropy is None:
            self._entropy = resolve_entropy(None)
        return Placement(
            entropy=self._entropy,
            stage=stage,
            rank=self._seat.rank,
            world_size=self._seat.world_size,
            default_envs=self._default_envs,
        )
