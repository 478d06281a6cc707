"""The one worker loop that every backend runs: envs and policy under one roof, whole batches out.

Nothing here knows how messages travel: see `Port`.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor, nn

from lit_collect.assembly import PRIVATE, Storage
from lit_collect.config import DeviceConfig, RolloutConfig, check_shares
from lit_collect.devices import usable
from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.factories import EnvSource
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.envs.verify import VerifiedEnv
from lit_collect.messages import (
    Call,
    Close,
    Collect,
    Collected,
    Describe,
    Done,
    Execute,
    Failed,
    Fake,
    Load,
    Profile,
    Progress,
    Ready,
    Reply,
    Request,
    Reseed,
    Reset,
    Resume,
    doing,
)
from lit_collect.paths import call, resolve
from lit_collect.policies import Actor, RandomActor, make_actor
from lit_collect.profiling import RolloutProfiler
from lit_collect.rollout import RolloutRunner
from lit_collect.schemes import WeightReceiver
from lit_collect.seeding import Placement
from lit_collect.weights import ModelShapes, check_fit, copy_weights


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
    """Env copies of this rank, over all workers (None: what the env says, else one for each worker)."""
    place: Placement
    """Whose random numbers these are."""
    devices: DeviceConfig = DeviceConfig()
    """Where the policy acts."""
    restart: int = 0
    """How often these copies were begun anew."""
    index: int = 0
    """Which worker of the rank this is."""
    num_workers: int = 1
    """How many there are."""
    num_threads: int = 1
    """Threads of torch in this worker."""
    receiver: WeightReceiver | None = None
    """Where weights come from (None: nowhere)."""
    version: int = 0
    """Of the weights that the policy has."""

    def check(self, num_workers: int, *, travels: bool) -> None:
        """Check what can be known before any worker is started.

        Args:
            num_workers: how many will share the env copies.
            travels: whether they are outside this process.

        Raises:
            ValueError: if the copies cannot be shared evenly, or a live env would have to leave this process.
        """
        copies = self.num_envs or self.source.copies(num_workers)
        if copies is not None:
            check_shares(copies, num_workers)
        if travels and self.source.live:
            raise ValueError(
                f"a live env cannot go to another process : expected what makes it, got {self.source.description}; "
                f"pass an id, a callable or an EnvFactory"
            )


class Port(Protocol):
    """The worker's end of a channel."""

    @property
    def storage(self) -> Storage:
        """Where the next batch is put together."""

    def receive(self) -> Request:
        """The next request.

        Raises:
            EOFError: if there will be none.
        """

    def reply(self, reply: Reply) -> None:
        """Answer the last request."""

    def interrupted(self) -> bool:
        """Whether the group wants the batch in progress as it is; asked after every step."""


def run_worker(port: Port, spec: Callable[[], WorkerSpec]) -> None:
    """Build a worker and serve until it is closed or nobody is left to serve.

    Args:
        port: to the group.
        spec: makes the spec; a failure to do so is a reply like any other.
    """
    worker: Worker | None = None
    try:
        try:
            worker = Worker(spec(), storage=port.storage, interrupted=port.interrupted)
        except BaseException as error:
            port.reply(Failed.of(error, "starting", Progress()))
            return
        port.reply(worker.ready())
        while not worker.closed:
            port.reply(worker.answer(port.receive()))
    except EOFError:  # the group is gone
        return
    finally:
        if worker is not None:
            worker.close()


class Worker:
    """Carries out requests, one by one.

    Args:
        spec: what it is made of.
        storage: where batches are put together.
        interrupted: asked after every step whether the batch shall end there (None: never).

    Raises:
        WorkerFailedError: if an env's constructor raised.
        TypeError: if the policy cannot act or a space cannot be stored.
        ValueError: if the number of env copies does not fit the env.
    """

    def __init__(
        self, spec: WorkerSpec, *, storage: Storage = PRIVATE, interrupted: Callable[[], bool] | None = None
    ) -> None:
        self._spec = spec
        self._storage, self._interrupted = storage, interrupted
        self.runner = build_runner(spec)
        self.closed = False
        self._receiver = spec.receiver
        self._version = spec.version
        self._busy_s = 0.0
        self._profiler: RolloutProfiler | None = None
        self._actions: dict[type, Callable[[Any], Any]] = {
            Load: lambda request: self._write(request.models),
            Reset: lambda request: self.runner.reset(request.index),
            Reseed: self._reseed,
            Resume: self._resume,
            Describe: lambda request: ModelShapes.of(self._model(request.model_id)),
            Execute: lambda request: call(self._names(), request.path, request.args, request.kwargs),
            Call: self._call,
            Fake: lambda request: self.runner.fake(request.steps),
            Profile: self._profile,
            Close: lambda request: self.close(),
        }

    @property
    def progress(self) -> Progress:
        """Where it stands."""
        runner = self.runner
        return Progress(
            frames_stepped=runner.frames_stepped,
            trajectories=runner.running_trajectories,
            warm_up_steps=runner.warm_up_steps,
            version=self._version,
            env_s=runner.times.env_s,
            policy_s=runner.times.policy_s,
            busy_s=self._busy_s,
        )

    def ready(self) -> Ready:
        """What the group is told first."""
        env, module = self.runner.env, self.runner.actor.module
        return Ready(
            num_envs=env.num_envs,
            observation_space=env.observation_spec.space,
            action_space=env.action_spec.space,
            single=isinstance(env.env if isinstance(env, VerifiedEnv) else env, DirectEnv),
            policy=None if module is None else ModelShapes.of(module),
            progress=self.progress,
        )

    def answer(self, request: Request) -> Reply:
        """Carry out a request; whatever goes wrong is the reply."""
        try:
            if isinstance(request, Collect):
                return Collected(batch=self._collect(request), progress=self.progress)
            return Done(value=self._actions[type(request)](request), progress=self.progress)
        except BaseException as error:
            return Failed.of(error, doing(request), self.progress)

    def close(self) -> None:
        """Close the envs; may be called again."""
        self.closed = True
        if self._profiler is not None:
            self._profiler.close()
        self.runner.close()

    def _collect(self, request: Collect) -> Any:
        began = perf_counter()
        self._take_weights(request.ticket)
        recording = nullcontext() if self._profiler is None else self._profiler.rollout()
        with recording:
            batch = self.runner.collect(
                request.steps, self._version, storage=self._storage, interrupted=self._interrupted
            )
        self._busy_s += perf_counter() - began
        return batch

    def _take_weights(self, ticket: Any) -> None:
        """Between batches: all models of a snapshot together."""
        snapshot = None if self._receiver is None else self._receiver.receive(ticket)
        if snapshot is not None:
            self._write(snapshot.models)
            self._version = snapshot.version

    def _write(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Weights by model id; nothing is written unless all of it fits."""
        models = {model_id: self._model(model_id) for model_id in weights}
        for model_id, model in models.items():
            check_fit(weights[model_id], ModelShapes.of(model))
        for model_id, model in models.items():
            copy_weights(weights[model_id], model)

    def _reseed(self, request: Reseed) -> None:
        self.runner.reseed(*request.place.streams(self.runner.indices, request.restart))

    def _resume(self, request: Resume) -> None:
        self.runner.resume(request.trajectories, request.warm_up_steps)
        self._version, self._receiver = request.version, request.receiver

    def _profile(self, request: Profile) -> None:
        self._profiler = RolloutProfiler(request.config, self._spec.index)

    def _call(self, request: Call) -> Any:
        names = self._names()
        return request.fn(names["env"], names["policy"], *request.args, **request.kwargs)

    def _names(self) -> dict[str, Any]:
        """What a path may begin with."""
        actor = self.runner.actor
        return {"env": self.runner.env, "policy": actor.module if actor.module is not None else self._spec.policy}

    def _model(self, model_id: str) -> nn.Module:
        """The module of a model id: the policy, or a path to any other.

        Raises:
            KeyError: if there is none.
            TypeError: if the policy is no module.
        """
        found = self.runner.actor.module if model_id == "policy" else self._find_model(model_id)
        if not isinstance(found, nn.Module):
            raise TypeError(f"the {model_id} has no weights : only an nn.Module can be updated")
        return found

    def _find_model(self, path: str) -> Any:
        try:
            return resolve(self._names(), path)
        except (ValueError, LookupError, AttributeError) as error:
            raise KeyError(f"there is no model {path!r} : expected 'policy' or the path of a module") from error


def build_runner(spec: WorkerSpec) -> RolloutRunner:
    """Build the envs and the policy, in the process that uses them.

    Raises:
        WorkerFailedError: if an env's constructor raised.
        TypeError: if the policy cannot act or a space cannot be stored.
        ValueError: if the number of env copies does not fit the env.
    """
    default = spec.place.default_envs or 1
    default = -(-default // spec.num_workers) * spec.num_workers
    share = (spec.num_envs or spec.source.copies(spec.num_workers) or default) // spec.num_workers
    env = spec.source.build(
        spec.num_envs,
        rollout=spec.rollout,
        default_copies=default,
        indices=range(spec.index * share, (spec.index + 1) * share) if spec.num_workers > 1 else None,
    )
    vector = env.env if isinstance(env, VerifiedEnv) else env
    try:
        device = usable(spec.devices.env, "devices.env")
        if isinstance(vector, VectorEnvAdapter):
            vector.device = device
        copies, place = env.num_envs * spec.num_workers, spec.place
        first = place.rank * copies + spec.index * env.num_envs
        indices = range(first, first + env.num_envs)
        seeds, stream = place.streams(indices, spec.restart)
        actor = make_actor(
            spec.policy,
            env.observation_spec,
            env.action_spec,
            exploration=spec.rollout.exploration,
            seed=stream.seed,
            compile_policy=spec.rollout.compile_policy,
            first=env.first,
            may_mask=env.may_mask,
        )
        _place(actor, spec.devices)
        return RolloutRunner(
            env,
            actor,
            config=spec.rollout,
            indices=indices,
            total_copies=copies * place.world_size,
            seeds=seeds,
            stream=stream,
            warm_up=RandomActor(env.action_spec, stream.seed, first=env.first, may_mask=env.may_mask),
            warm_up_steps=-(-spec.rollout.init_random_frames // (copies * place.world_size)),
            threads=spec.num_threads,
        )
    except BaseException:
        env.close()
        raise


def _place(actor: Actor, devices: DeviceConfig) -> None:
    """Move the policy of a worker to the device it acts on."""
    device = usable(devices.policy, "devices.policy")
    if device is None or isinstance(actor, RandomActor):
        return
    if actor.module is None:
        raise TypeError("devices.policy needs a policy that can be moved : expected an nn.Module or a method of one")
    actor.module.to(device)
