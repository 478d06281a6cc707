"""`CollectorDataModule`: collected frames as ordinary Lightning data."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import EVAL_DATALOADERS
from tensordict import TensorDictBase
from typing_extensions import override

from lit_collect.backends import Backend, resolve_backend
from lit_collect.callbacks._source import find_callback, gather_numbers
from lit_collect.callbacks.weight_sync import WeightSync
from lit_collect.collector import Collector
from lit_collect.config import (
    DeviceConfig,
    EvaluationConfig,
    ReplayConfig,
    RolloutConfig,
    TrajectoryConfig,
    UpdateConfig,
    check_frames,
    check_shares,
    refuse_later,
    settings,
)
from lit_collect.dataset import CollectorDataset, CollectorLoader
from lit_collect.envs.factories import EnvLike, resolve_env
from lit_collect.envs.probe import SpaceProbe
from lit_collect.envs.spaces import describe_space
from lit_collect.errors import BudgetSpentError
from lit_collect.evaluation import Evaluations
from lit_collect.learner import (
    add_callbacks,
    hide_loaders,
    initialise_lazy,
    policy_of,
    prepared,
    required_policy,
    restore_batch_size,
)
from lit_collect.ranks import SharedBudget
from lit_collect.seeding import Placement, Stage, resolve_entropy

Listener = Callable[[TensorDictBase], None]
_DEFAULT_ENVS = 8
_SECONDS = ("env_s", "policy_s", "transfer_s", "busy_s", "collect_s", "weight_sync_s")


class CollectorDataModule(L.LightningDataModule):
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
        trajectories: whole trajectories instead of a fixed number of frames (not in this version).
        replay: a replay buffer in between (not in this version).
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
        replay: ReplayConfig | None = None,
        devices: DeviceConfig = DeviceConfig(),
        evaluation: EvaluationConfig | None = EvaluationConfig(),
        backend: Backend | str = "auto",
        batches_per_epoch: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        updates, rollout = settings(UpdateConfig, updates, "updates"), settings(RolloutConfig, rollout, "rollout")
        devices = settings(DeviceConfig, devices, "devices")
        if evaluation is not None:
            evaluation = settings(EvaluationConfig, evaluation, "evaluation")
        self._source = resolve_env(env)
        self._backend = resolve_backend(backend)
        said = self._source.copies(self._backend.num_collectors)
        self._num_envs = num_envs if num_envs is not None else said
        self._default_envs = -(-_DEFAULT_ENVS // self._backend.num_collectors) * self._backend.num_collectors
        known = self._num_envs if self._num_envs is not None else self._default_envs if isinstance(env, str) else 1
        check_frames(frames_per_batch, total_frames, known, known)
        if self._num_envs is not None:
            check_shares(self._num_envs, self._backend.num_collectors)
        refuse_later(trajectories=trajectories, replay=replay)
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.rollout_listeners: list[Listener] = []
        """Called with each whole batch [N, T] before it is trained on."""
        self.round_listeners: list[Listener] = []
        """Called with each round of evaluation episodes [B, Tmax]."""
        self.seconds = dict.fromkeys(_SECONDS, 0.0)
        """Seconds spent so far: in envs and in the policy (of the busiest worker), on handing batches over, in
        rollouts (mean of the workers), on waiting for batches, on publishing weights."""
        self._policy = policy
        self._rollout, self._updates, self._devices = rollout, updates, devices
        self._entropy = resolve_entropy(seed) if seed is not None else None
        self._probe = SpaceProbe(self._source)
        self._collector: Collector | None = None
        self._budget = SharedBudget(total=total_frames)
        self._state: dict[str, Any] | None = None  # of the collector that was or is to come
        self._statistics: dict[str, Any] = {}  # of the collector that was
        self._beginning: dict[str, Any] = {}  # the state of a collector that has done nothing yet
        self._evaluations: Evaluations | None = None
        if evaluation is not None and not self._source.live:
            self._evaluations = Evaluations(
                self._source,
                evaluation,
                rollout=rollout,
                policy=self._acting_policy,
                listeners=self.round_listeners,
            )
        self._stream = CollectorDataset(self, batches_per_epoch=batches_per_epoch, updates=updates, agree=self._most)
        if self._evaluations is None:
            hide_loaders(self, CollectorDataModule)
        self.save_hyperparameters(
            {
                "env": self._source.description,
                "frames_per_batch": frames_per_batch,
                "total_frames": total_frames,
                "num_envs": num_envs,
                "updates": asdict(updates),
                "rollout": {**asdict(rollout), "info_keys": list(rollout.info_keys)},
                "evaluation": None if evaluation is None else asdict(evaluation),
                "batches_per_epoch": batches_per_epoch,
                "seed": seed,
            },
            logger=False,
        )

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
    def frames_total(self) -> int:
        """Frames handed out so far, over all ranks."""
        return self._budget.yielded

    @property
    def copies_total(self) -> int | None:
        """Env copies over all ranks; None while nothing has been collected."""
        return None if self._collector is None else self._collector.num_envs * self._world_size

    @property
    def frames_budget(self) -> int:
        """Frames of this rank in all, -1 without a limit."""
        return -1 if self.total_frames == -1 else self.total_frames // self._world_size

    @property
    def frames_left(self) -> int | None:
        """Frames until the budget is spent, as many as any rank has left; None without one."""
        return self._budget.share(0, self._world_size)

    @property
    def progress(self) -> float:
        """How much of the budget was collected, from 0 to 1 (0 if there is none); drives schedules by frames."""
        return 0.0 if self.total_frames == -1 else self.frames_total / self.total_frames

    @property
    def policy_version(self) -> int:
        """Version of the weights that act."""
        if self._collector is not None:
            return self._collector.policy_version
        return 0 if self._state is None else int(self._state["policy_version"])

    def statistics(self) -> dict[str, Any]:
        """The collector's counters (see `Collector.statistics`), also after a fit; empty before the first batch."""
        return dict(self._statistics) if self._collector is None else self._collector.statistics()

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
        self._trainer = trainer

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
    def val_dataloader(self) -> EVAL_DATALOADERS:
        """Rounds of evaluation episodes."""
        return self._rounds("validate")

    @override
    def test_dataloader(self) -> EVAL_DATALOADERS:
        """Rounds of evaluation episodes under seeds of their own."""
        return self._rounds("test")

    @override
    def predict_dataloader(self) -> EVAL_DATALOADERS:
        """Rounds of evaluation episodes under seeds of their own."""
        return self._rounds("predict")

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Give TensorDicts back the batch size that some precision plugins take from them, then ask the module."""
        if self.trainer is None:
            return batch
        batch = restore_batch_size(batch, self._stream.batch_dims if self.trainer.training else 2)
        return self.trainer.lightning_module.on_before_batch_transfer(batch, dataloader_idx)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counters, ids, versions and seeds as plain data; talks to no worker and no other rank."""
        # Not empty even before the first batch: Lightning hands back only what is there, also to the runs of a tuner.
        collector = self._state if self._collector is None else self._collector.state_dict()
        return {"collector": collector, "budget": self._budget.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another run was left (see `Collector.load_state_dict`)."""
        self._state = state_dict["collector"]
        self._budget.load_state_dict(state_dict["budget"])
        if self._collector is not None:
            self._go_on_from(self._collector, self._beginning if self._state is None else self._state)

    @override
    def teardown(self, stage: str) -> None:
        """Close all envs; a later fit builds new ones and goes on counting."""
        self.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Close all envs: Lightning calls no teardown after an exception."""
        try:
            self.close()
        except Exception as error:  # the first exception is the one to be seen
            rank_zero_warn(f"closing the envs failed too: {error}")

    # --- collecting ---------------------------------------------------------------------------------------------

    def collect(self) -> TensorDictBase:
        """The next whole batch, prepared for training: publish changed weights, collect, prepare.

        Raises:
            BudgetSpentError: if no frames are left.
        """
        if self.frames_left == 0:
            raise BudgetSpentError(f"all {self.total_frames} frames of total_frames have been collected")
        began = perf_counter()
        collector = self._started()
        self._publish(collector)
        batch = self._budget.collect(
            collector, rank=self._place("train").rank, ranks=self._world_size, gather=self._gather
        )
        statistics = collector.statistics()
        self.seconds.update({name: statistics[name] for name in ("env_s", "policy_s", "transfer_s", "busy_s")})
        self.seconds["collect_s"] += perf_counter() - began
        for listener in self.rollout_listeners:
            listener(batch)
        return batch if self.trainer is None else prepared(batch, self.trainer)

    def publish_in_between(self) -> None:
        """Publish changed weights now if workers go on while the learner learns (see `WeightSync`)."""
        if self._collector is not None and not self._backend.sync:
            self._publish(self._collector)

    def close(self) -> None:
        """Close all envs; may be called again."""
        collector, self._collector = self._collector, None
        with ExitStack() as closing:  # whatever one of them raises, all are closed
            if self._evaluations is not None:
                closing.callback(self._evaluations.close)
            closing.callback(self._probe.close)
            if collector is not None:
                closing.callback(collector.shutdown)
                self._state, self._statistics = collector.state_dict(), collector.statistics()

    def _started(self) -> Collector:
        if self._collector is None:
            if not self._backend.in_process:
                self._probe.close()  # its env cannot travel to a worker
            self._collector = Collector(
                self._probe.handed_over(),
                self._acting_policy(),
                frames_per_batch=self.frames_per_batch,
                total_frames=self.frames_budget,
                num_envs=self._num_envs,
                rollout=self._rollout,
                devices=self._devices,
                backend=self._backend,
                seed=self._place("train"),
            )
            self._collector.workers.while_waiting = self._check_signals
            if (sync := self._weight_sync) is not None and sync.max_staleness is not None:
                self._collector.workers.max_staleness = sync.max_staleness
            copies = self._collector.num_envs
            check_frames(self.frames_per_batch, self.total_frames, copies, copies * self._world_size)
            self._beginning = self._collector.state_dict()
            if self._state is not None:
                self._go_on_from(self._collector, self._state)
        return self._collector

    def _check_signals(self) -> None:
        """Stop waiting for frames when the process was told to end: Lightning would look only after the batch."""
        if self.trainer is not None and self.trainer.received_sigterm:
            raise SIGTERMException

    def _go_on_from(self, collector: Collector, state: dict[str, Any]) -> None:
        collector.load_state_dict(self._budget.placed(state, self._world_size))
        if (sync := self._weight_sync) is not None:
            sync.mark_changed()  # nobody watched the weights between that state and now

    def _publish(self, collector: Collector) -> None:
        sync = self._weight_sync
        if sync is not None and sync.take_change(1 if self._backend.sync else sync.every_n_steps):
            began = perf_counter()
            collector.update_policy_weights_()
            self.seconds["weight_sync_s"] += perf_counter() - began

    def _acting_policy(self) -> Any:
        """The policy given, else the module's."""
        module = None if self.trainer is None else self.trainer.lightning_module
        return required_policy(module) if self._policy is None else self._policy

    def _gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers)] if self.trainer is None else gather_numbers(self.trainer, numbers)

    def _most(self, count: int) -> int:
        """The largest count of all ranks."""
        return int(max(numbers[0] for numbers in self._gather([count])))

    def _rounds(self, stage: Stage) -> EVAL_DATALOADERS:
        return [] if self._evaluations is None else self._evaluations.loader(self._place(stage))

    def _place(self, stage: Stage) -> Placement:
        if self._entropy is None:
            self._entropy = resolve_entropy(None)
        rank = 0 if self.trainer is None else self.trainer.global_rank
        return Placement(
            entropy=self._entropy,
            stage=stage,
            rank=rank,
            world_size=self._world_size,
            default_envs=self._default_envs,
        )

    @property
    def _world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size

    @property
    def _weight_sync(self) -> WeightSync | None:
        return None if self.trainer is None else find_callback(self.trainer, WeightSync)
