"""`Collector`: the budget, the stream of batches, weights and state, whatever the backend."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from lit_collect import questions
from lit_collect.backends import Backend, resolve_backend
from lit_collect.budget import Budget
from lit_collect.config import DeviceConfig, RolloutConfig, TrajectoryConfig, check_frames, settings
from lit_collect.devices import usable
from lit_collect.envs.factories import EnvLike, resolve_env
from lit_collect.errors import BudgetSpentError, second_to
from lit_collect.hooks import Hooks, Output
from lit_collect.ledger import Ledger
from lit_collect.profiling import ProfileConfig
from lit_collect.publishing import Inlet
from lit_collect.replay.config import ReplayConfig
from lit_collect.schemes import WeightReceiver, WeightSyncScheme
from lit_collect.seeding import Placement, resolve_entropy
from lit_collect.stream import Stream
from lit_collect.supervisor import WorkerGroup
from lit_collect.weights import Weights, models_to_update
from lit_collect.worker import WorkerSpec
from lit_collect.writing import ReplayTarget


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
        trajectories: whole trajectories instead of a fixed number of frames.
        replay_buffer: anything with ``extend``, which is given the transitions of every batch, [M]; or a
            `ReplayConfig`, of which the collector builds a `ReplayBuffer` (see `replay_buffer`).
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
        replay_buffer: Any = None,
        devices: DeviceConfig = DeviceConfig(),
        backend: Backend | str = "direct",
        seed: int | Placement | None = None,
        hooks: Hooks | Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        rollout, devices = settings(RolloutConfig, rollout, "rollout"), settings(DeviceConfig, devices, "devices")
        if trajectories is not None:
            trajectories = settings(TrajectoryConfig, trajectories, "trajectories")
        source, backend, hooks = resolve_env(env), resolve_backend(backend), Hooks.of(hooks)
        copies = num_envs if num_envs is not None else source.copies(backend.num_collectors) or backend.num_collectors
        check_frames(frames_per_batch, total_frames, copies, copies)
        if isinstance(replay_buffer, ReplayConfig):
            replay_buffer.check_holds(frames_per_batch)
        storage = usable(devices.storage, "devices.storage")
        place = seed if isinstance(seed, Placement) else Placement(entropy=resolve_entropy(seed))
        self._replay = ReplayTarget(replay_buffer, compact_obs=rollout.compact_obs, seed=place.replay_seed)
        self._group = WorkerGroup(
            WorkerSpec(source=source, policy=policy, rollout=rollout, num_envs=num_envs, place=place, devices=devices),
            backend,
        )
        self.num_envs = self._group.num_envs
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self._budget = Budget(total=total_frames)
        try:  # the copies are known for sure only now: a factory may have made a vector env
            check_frames(frames_per_batch, total_frames, self.num_envs, self.num_envs)
        except BaseException as error:
            with second_to(error):
                self._group.close()
            raise
        says_nothing = num_envs is None and source.num_envs is None and place.default_envs is None
        self._stream = Stream(
            self._group,
            Output(hooks, self._replay.sink(self.num_envs * place.world_size, pieces=rollout.set_truncated)),
            budget=self._budget,
            frames_per_batch=frames_per_batch,
            unbatched=says_nothing and self._group.ready.single and self.num_envs == 1,
            trajectories=trajectories,
            storage=storage,
            refresh=self._take_what_has_come,
        )
        self._ledger = Ledger(self._group, self._budget, place=place)
        self._policy = policy
        self.trajs_per_batch = None if trajectories is None else trajectories.trajs_per_batch
        self.batches_vary = trajectories is not None and trajectories.batches_vary
        self._inlet = Inlet()
        self._profile: ProfileConfig | None = None

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Go on with the stream.

        Raises:
            BudgetSpentError: if no frames are left.
            CollectorClosedError: after `shutdown`.
        """
        self._stream.check_open()
        self._budget.check()
        return self

    def __next__(self) -> TensorDictBase:
        """The next batch; StopIteration when the budget is spent."""
        if not self._stream.closed and self.frames_left == 0:
            raise StopIteration
        try:
            return self.collect()
        except BudgetSpentError:  # what was left made no whole trajectory
            raise StopIteration from None

    def __len__(self) -> int:
        """Batches that are left in the budget.

        Raises:
            TypeError: if there is no budget, or nobody knows how many whole trajectories will come.
        """
        if self.trajs_per_batch is not None:
            raise TypeError("a collector of whole trajectories has no length : nobody knows how many there will be")
        return self._budget.batches_left(self.frames_per_batch)

    def __enter__(self) -> "Collector":
        """The collector itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close, whatever happened."""
        with second_to(error):
            self.shutdown()

    def __getstate__(self) -> Any:
        """Refuse to be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a Collector cannot be pickled or copied : it holds envs and workers; build another one, and carry "
            "state_dict() over where it shall go on"
        )

    @property
    def frames_budget(self) -> int:
        """Frames of this collector in all, -1 without a limit."""
        return self.total_frames

    @property
    def frames_left(self) -> int | None:
        """Frames that are to be handed out until the budget is spent (fewer may come of it), None without one."""
        return self._budget.to_come

    @property
    def replay_buffer(self) -> Any:
        """What the transitions are written to, None if nothing."""
        return self._replay.buffer

    @property
    def learns_from_replay(self) -> bool:
        """Whether the transitions are written to what can be sampled."""
        return self._replay.can_be_sampled

    @property
    def min_frames(self) -> int:
        """Rows of the replay buffer that must be there before the first sample."""
        return self._replay.min_frames

    @property
    def budget(self) -> Budget:
        """Frames that may be handed out, and were; who shares them with others may change that between batches."""
        return self._budget

    @property
    def policy_version(self) -> int:
        """Version of the weights that act: 0 at first, one more for every publication."""
        return self._group.publisher.version

    @property
    def workers(self) -> WorkerGroup:
        """Who collects: health, bound on staleness, and what happens while a worker is waited for."""
        return self._group

    @property
    def observation_space(self) -> Any:
        """Of one env copy."""
        return self._group.ready.observation_space

    @property
    def action_space(self) -> Any:
        """Of one env copy."""
        return self._group.ready.action_space

    def collect(self) -> TensorDictBase:
        """Collect one batch.

        Returns:
            [N, T] (or [T], see `num_envs`) as `lit_collect.frames` describes it, owned by the caller. An asynchronous
            backend gives the batch of one worker, as many frames of its [n, T] env copies. With `trajectories`, [M]
            or [B, Tmax].

        Raises:
            BudgetSpentError: if no frames are left, or they made no whole trajectory.
            CollectorClosedError: after `shutdown`.
            WorkerFailedError: if an env raised; the next call begins new episodes.
            WorkerDiedError: if a worker ended and is not to be replaced.
            CollectTimeoutError: if a worker did not answer in time.
            StaleDataError: if a worker acted with older weights than the bound allows.
            FrameContractError: if an env or the policy broke the contract.
            RuntimeError: while frames are collected in the background.
        """
        return self._stream.collect()

    def rollout(self) -> TensorDictBase:
        """One batch without hooks, which nothing is done with; its frames count like any others."""
        return self._stream.make()

    def start(self) -> None:
        """Collect in the background, into `replay_buffer`, until the budget is spent or `async_shutdown` is called.

        Workers go on freely, each with batches of its own (on the direct backend a thread collects, and shares the
        global random generators with you). What goes wrong is raised by the next call of any method.

        Raises:
            BudgetSpentError: if no frames are left.
            RuntimeError: if there is no `replay_buffer`, or it runs already.
        """
        self._stream.start()

    def check_background(self) -> None:
        """Raise what went wrong in the background, once; waits for nobody."""
        self._stream.check_background()

    @property
    def is_running(self) -> bool:
        """Whether frames are collected in the background."""
        return self._stream.running

    def pause(self) -> AbstractContextManager[None]:
        """Collect nothing in the background inside of a ``with`` block.

        Raises:
            RuntimeError: if nothing is collected in the background.
        """
        return self._stream.paused()

    def async_shutdown(self) -> None:
        """The same as `shutdown`, which raises what went wrong in the background if no other call has."""
        self.shutdown()

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
            worker_ids: only these workers (not on the direct backend, which has none).
            model_id: which model they belong to.
            weights_dict: weights of several models by id.

        Raises:
            ValueError: if weights are given in two ways or do not fit the policy, or `worker_ids` is given.
            KeyError: if there is no such model.
            TypeError: if the policy has no weights.
        """
        self._stream.check_open()
        if worker_ids is not None and self._group.backend.in_process:
            raise ValueError("worker_ids needs a backend with workers : the direct backend has none")
        workers = None if worker_ids is None else self._group.indices(worker_ids, "worker_ids")
        models = models_to_update(policy_or_weights, weights, policy, model_id, weights_dict)
        # a policy that acts itself must not change meanwhile; copies of it take weights between batches anyway
        here = self._group.shared or not self._group.publisher.knows(models)
        with self._stream.turn.taken() if here else nullcontext():
            self._group.publish(models, workers)

    def increment_version(self) -> None:
        """Publish the policy as it is, under the next version."""
        self.update_policy_weights_()

    def receive_weights(
        self,
        policy_or_weights: Weights | None = None,
        *,
        weights: Weights | None = None,
        policy: nn.Module | None = None,
        model_id: str = "policy",
    ) -> None:
        """Take what the registered receivers have got, or else these weights, and publish it.

        Raises:
            ValueError: if weights are given although receivers are registered.
        """
        given = models_to_update(policy_or_weights, weights, policy, model_id, None)
        if self._inlet and given:
            raise ValueError("receive_weights takes no weights while receivers are registered; leave them out")
        fresh = self._inlet.fresh() if self._inlet else given
        if fresh or not self._inlet:
            self.update_policy_weights_(weights_dict=fresh)

    def register_scheme_receiver(
        self, schemes: Mapping[str, WeightReceiver | WeightSyncScheme], *, synchronize_weights: bool = True
    ) -> None:
        """Let weights of models come from elsewhere: they are looked for before each batch and passed on to workers.

        Args:
            schemes: where from, by model id.
            synchronize_weights: look at once.
        """
        self._stream.check_open()
        self._inlet.register(schemes)
        if synchronize_weights:
            self.receive_weights()

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: weights need no set-up. It is there for code that was written for TorchRL."""

    # what the envs, the policy and the replay buffer hold; the methods stand in a file of their own
    cascade_execute = questions.cascade_execute
    map_fn = questions.map_fn
    getattr_policy = questions.getattr_policy
    getattr_env = questions.getattr_env
    getattr_rb = questions.getattr_rb
    get_model = questions.get_model
    fake_tensordict = questions.fake_tensordict

    def enable_profile(
        self,
        workers: int | Sequence[int] = (0,),
        *,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str = "./collector_profile_{worker}.json",
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        """Record the first rollouts of some workers as Chrome traces (see `ProfileConfig`).

        Raises:
            RuntimeError: if a batch was collected already.
            ValueError: if `num_rollouts` leaves nothing to record, or there is no such worker.
        """
        self._stream.check_open()
        if self._stream.begun:
            raise RuntimeError("profiling begins with the first batch; call enable_profile before it is collected")
        self._profile = self._group.profile(
            ProfileConfig(
                workers=(workers,) if isinstance(workers, int) else tuple(workers),
                num_rollouts=num_rollouts,
                warmup_rollouts=warmup_rollouts,
                save_path=os.path.abspath(save_path),
                record_shapes=record_shapes,
                profile_memory=profile_memory,
                with_stack=with_stack,
            )
        )

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What `enable_profile` was given."""
        return self._profile

    def reset(self, index: int | None = None) -> None:
        """Leave the running episodes (of one env copy, or of all) and begin new ones with the next batch.

        Raises:
            TypeError: if `index` is no integer.
            IndexError: if there is no such copy.
            ValueError: if the env cannot reset one copy alone.
        """
        self._stream.check_open()
        given: object = index  # True would be copy 1
        if given is not None and (isinstance(given, bool) or not isinstance(given, Integral)):
            raise TypeError(f"index must be the number of an env copy or None, got {index!r}")
        with self._stream.turn.taken():
            self._group.reset(index)
            if index is None:
                self._restarted()

    def set_seed(self, seed: int) -> None:
        """Begin new episodes under a new seed with the next batch; what is collected already is dropped."""
        self._stream.check_open()
        entropy = resolve_entropy(seed)
        with self._stream.turn.taken():
            self._stream.gatherer.discard()
            self._stream.packing.discard()
            self._ledger.reseed(entropy)
            self._restarted()

    def statistics(self) -> dict[str, Any]:
        """Counters as plain numbers. ``frames_stepped = frames_yielded + frames_pending + frames_dropped`` always.

        Frames that were stepped but never handed out (an error in mid-batch, a row beyond the budget, a batch that was
        too old) are dropped; those of a batch that a worker died in are not known to have been stepped. Frames that
        wait to be handed out are pending. Seconds are those of the busiest worker. With
        ``ReplayConfig(write_mode="trajectory")`` ``replay_dropped`` counts those of the frames handed out that were not
        written, because their trajectory was never whole.
        """
        self._stream.check_background()
        with self._stream.turn.taken():
            return {**self._ledger.statistics(self._stream.gatherer), **self._replay.statistics()}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for ``weights_only=True``: counters, ids, versions and seeds. Asks no worker."""
        self._stream.check_background()
        with self._stream.turn.taken():
            return self._ledger.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was left: counters, versions and ids continue, episodes begin anew.

        The inside of an episode cannot be restored; the copies begin new episodes, under seeds that no earlier part
        of the run has used. The number of workers may be another one.

        Raises:
            TypeError: if it is no state of a collector.
            ValueError: if parts of it are missing, or it was made with another number of env copies.
        """
        self._stream.check_idle()
        self._ledger.check(state)
        self._stream.gatherer.discard()
        self._stream.packing.discard()
        self._restarted()
        self._ledger.load(state)

    def shutdown(self) -> None:
        """Close the envs and end the workers, within the backend's `shutdown_timeout_s` and a few seconds.

        May be called again.

        Raises:
            WorkerFailedError: if an env raised in its `close`; all are closed all the same.
            CollectTimeoutError: if a hook or `replay_buffer` hangs in the background; the workers end all the same.
        """
        try:
            self._stream.close()
        finally:
            self._replay.close()

    def _restarted(self) -> None:
        self._stream.packing.restart()
        self._replay.restart()

    def _take_what_has_come(self) -> None:
        if self._inlet:
            self.receive_weights()
