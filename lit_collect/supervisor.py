"""`WorkerGroup`: starts the workers of one collector, talks to them, watches their health, replaces and closes them."""

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from lit_collect.backends.base import Backend, Channel, Deadline, Launcher, close_channels
from lit_collect.errors import CollectTimeoutError, LitCollectError, WorkerDiedError
from lit_collect.messages import (
    Collect,
    Collected,
    Describe,
    Failed,
    Load,
    Profile,
    Progress,
    Ready,
    Reply,
    Request,
    Reseed,
    Reset,
    Resume,
)
from lit_collect.profiling import ProfileConfig
from lit_collect.publishing import Publisher
from lit_collect.seeding import Placement
from lit_collect.weights import ModelShapes, Weights, named_tensors
from lit_collect.worker import WorkerSpec

_SLICE_S = 0.2  # signal handlers of the trainer only set flags: waiting looks up that often
_LAST_WORDS_S = 1.0  # what finding out how a worker ended, or where it hangs, may take
_RESTART_STRIDE = 1 << 16  # seeds of replaced workers, far from those of resumed runs


@dataclass(kw_only=True)
class Member:
    """A worker of the group, and what is known of it."""

    spec: WorkerSpec
    channel: Channel
    ready: Ready | None = None
    progress: Progress = field(default_factory=Progress)
    """As of its last reply."""
    waiting: deque[Request] = field(default_factory=deque)
    """Requests that are not answered yet, the oldest first."""
    since: float = 0.0
    """When the oldest of them became the oldest."""
    restarts: int = 0
    stepped_before: int = 0
    """Frames stepped by the workers before it."""
    lost: str = ""
    """Why it cannot be used any more."""

    @property
    def index(self) -> int:
        """Which worker it is."""
        return self.spec.index

    @property
    def copies(self) -> int:
        """Its env copies."""
        return 0 if self.ready is None else self.ready.num_envs

    @property
    def batches_under_way(self) -> int:
        """Batches that it was asked for and that were not received."""
        return sum(isinstance(request, Collect) for request in self.waiting)


class WorkerGroup:
    """The workers of one collector. Whatever happens, `close` ends them all.

    Args:
        spec: of the whole group; each worker is given its part.
        backend: where the workers run.

    Raises:
        WorkerFailedError: if an env's constructor raised.
        WorkerDiedError: if a worker ended while it was building.
        CollectTimeoutError: if a worker was not ready in time.
        TypeError: if the policy cannot act, a space cannot be stored, or something cannot travel to a worker.
        ValueError: if the number of env copies does not fit the env or the workers.
    """

    def __init__(self, spec: WorkerSpec, backend: Backend) -> None:
        self.backend = backend
        self.max_staleness = backend.max_staleness
        """See `Backend.max_staleness`; may be changed between batches."""
        self.restarts = 0
        """Workers that were replaced."""
        self.episodes_dropped = 0
        """Episodes that were open in them."""
        self.while_waiting: Callable[[], None] = _nothing
        """Called again and again while a worker is waited for; may raise."""
        self.members: list[Member] = []
        self.kept: deque[tuple[Member, Collected]] = deque()
        """Batches that arrived while something else was waited for."""
        self.publisher = Publisher(
            backend.scheme(),
            None if backend.in_process else spec.policy,
            num_workers=backend.num_collectors,
            describe=self._describe,
        )
        self._closed = False
        self._process = os.getpid()
        self._launcher = backend.launcher()
        # If nobody calls close(), the workers end all the same, with the group or with the interpreter.
        self._finalizer = weakref.finalize(
            self, _forgotten, self.members, self._launcher, backend.shutdown_timeout_s, os.getpid()
        )
        try:
            for index in range(backend.num_collectors):
                own = replace(spec, index=index, num_workers=backend.num_collectors, num_threads=backend.num_threads)
                own = replace(own, receiver=self.publisher.receiver(index))
                self.members.append(Member(spec=own, channel=self._launcher.start(own), since=monotonic()))
            deadline = Deadline(backend.batch_timeout_s)
            for member in self.members:
                self._await_first_reply(member, deadline)
        except BaseException:
            self._close_quietly()
            raise
        if self.ready.policy is not None:
            self.publisher.expect("policy", self.ready.policy)

    # --- what is known ------------------------------------------------------------------------------------------

    @property
    def ready(self) -> Ready:
        """What the first worker said; all have the same spaces."""
        ready = self.members[0].ready
        assert ready is not None
        return ready

    @property
    def num_envs(self) -> int:
        """Env copies of all workers."""
        return sum(member.copies for member in self.members)

    @property
    def frames_stepped(self) -> int:
        """Frames of all workers, as of their last replies."""
        return sum(member.stepped_before + member.progress.frames_stepped for member in self.members)

    @property
    def trajectories(self) -> list[int]:
        """For each env copy the number of its first trajectory that is not begun yet."""
        return [number for member in self.members for number in member.progress.trajectories]

    @property
    def warm_up_steps(self) -> int:
        """Steps of each copy that are still to be acted at random."""
        return max(member.progress.warm_up_steps for member in self.members)

    @property
    def alive(self) -> int:
        """Workers that can be used."""
        return 0 if self._closed else sum(not member.lost for member in self.members)

    def statistics(self) -> dict[str, Any]:
        """Numbers about the workers, as of their last replies; seconds are those of the busiest one."""
        progress = [member.progress for member in self.members]
        return {
            "workers": len(progress),
            "workers_alive": self.alive,
            "restarts": self.restarts,
            "episodes_dropped": self.episodes_dropped,
            "acknowledged_versions": [each.version for each in progress],
            "env_s": max(each.env_s for each in progress),
            "policy_s": max(each.policy_s for each in progress),
            "busy_s": sum(each.busy_s for each in progress) / len(progress),
        }

    def indices(self, chosen: int | Sequence[int], name: str) -> list[int]:
        """Indices of workers that a user gave.

        Raises:
            ValueError: naming one that does not exist.
        """
        indices = [chosen] if isinstance(chosen, int) else list(chosen)
        for index in indices:
            if not 0 <= index < len(self.members):
                raise ValueError(f"{name} must be from 0 to {len(self.members) - 1}, got {index}")
        return indices

    def rows(self) -> Iterator[tuple[Member, range]]:
        """Each worker with its rows of a batch."""
        first = 0
        for member in self.members:
            yield member, range(first, first + member.copies)
            first += member.copies

    # --- talking ------------------------------------------------------------------------------------------------

    def send(self, member: Member, request: Request) -> None:
        """Give a worker a request; `receive` brings the reply.

        Raises:
            WorkerDiedError: if it has ended and is not replaced.
            CollectTimeoutError: if it does not take the request.
        """
        self._check_usable(member)
        if not member.waiting:
            member.since = monotonic()
        member.waiting.append(request)
        try:
            member.channel.send(request, self.backend.batch_timeout_s)
        except EOFError:
            self._replace(member)  # which sends all that is waiting once more
        except TimeoutError:
            raise self._too_late(member) from None

    def receive(
        self, timeout_s: float | None = None, *, of: Sequence[Member] | None = None
    ) -> tuple[Member, Reply] | None:
        """The next reply of any of some workers (None: of all), which must have requests.

        Args:
            timeout_s: return None after that long; None waits until the backend's time is up.
            of: the workers.

        Raises:
            WorkerDiedError: if one of them has ended and is not replaced.
            CollectTimeoutError: if one of them does not answer.
            Exception: what a worker failed with.
        """
        deadline = None if timeout_s is None else Deadline(timeout_s)
        while True:
            asked = [member for member in of or self.members if member.waiting]
            for member in asked:
                self._check_usable(member)
            slice_s = _SLICE_S if deadline is None else min(_SLICE_S, deadline.left_s)
            ready = self._launcher.wait([member.channel for member in asked], slice_s)
            # the one that has waited longest goes first
            for member in sorted((m for m in asked if m.channel in ready), key=lambda member: member.since):
                reply = self._take(member)
                if isinstance(reply, Failed):
                    raise reply.as_exception(self.describe(member))
                if reply is not None:
                    return member, reply
            self.while_waiting()
            if deadline is not None and deadline.left_s == 0.0:
                return None
            if not ready:
                self._check_times(asked)

    def drain(self) -> None:
        """Wait for all replies and forget them, failures too: they are of a batch that was given up already."""
        for member in self.members:
            while member.waiting:
                ready = self._launcher.wait([member.channel], _SLICE_S)
                if ready:
                    self._take(member)
                else:
                    self.while_waiting()
                    self._check_times([member])
        self.kept.clear()

    def ask(self, member: Member, request: Request) -> Any:
        """Give a worker a request and wait for the value of its reply; batches that come first are kept.

        Args:
            member: the worker.
            request: no `Collect`.
        """
        self.send(member, request)
        while True:
            received = self.receive(of=[member])
            assert received is not None
            if not isinstance(received[1], Collected):
                return getattr(received[1], "value", None)
            self.kept.append((member, received[1]))

    def ask_all(self, request: Request) -> list[Any]:
        """The same request for each worker; the values of their replies."""
        return [self.ask(member, request) for member in self.members]

    def publish(self, models: Mapping[str, Weights], workers: Sequence[int] | None) -> None:
        """Publish weights under the next version (see `Publisher.advance`)."""
        if self.backend.in_process:
            if models:
                self.ask(self.members[0], Load({name: named_tensors(weights) for name, weights in models.items()}))
            models = {}
        self.publisher.advance(models, workers)

    def reset(self, index: int | None) -> None:
        """Begin new episodes, in one env copy or in all.

        Raises:
            IndexError: if there is no such copy.
        """
        if index is not None and not 0 <= index < self.num_envs:
            raise IndexError(f"there is no env copy {index} : expected 0 to {self.num_envs - 1}")
        for member, rows in self.rows():
            if index is None or index in rows:
                self.ask(member, Reset(None if index is None else index - rows[0]))

    def profile(self, config: ProfileConfig) -> ProfileConfig:
        """Let some workers record their next rollouts."""
        for index in self.indices(config.workers, "workers"):
            self.ask(self.members[index], Profile(config))
        return config

    def resume(self, trajectories: Sequence[int], warm_up_steps: int, version: int) -> None:
        """Go on where another run was left: ids, random steps and versions."""
        self.publisher.resume(version)
        for member, rows in self.rows():
            own = [trajectories[row] for row in rows]
            self.ask(
                member,
                Resume(
                    trajectories=own,
                    warm_up_steps=warm_up_steps,
                    version=version,
                    receiver=self.publisher.receiver(member.index),
                ),
            )

    def reseed(self, place: Placement, restart: int) -> None:
        """Begin anew under other seeds."""
        for member in self.members:
            member.spec = replace(member.spec, place=place, restart=restart)  # also of those that replace it
        self.ask_all(Reseed(place, restart))

    def close(self) -> None:
        """End all workers; may be called again. Bounded by the backend's `shutdown_timeout_s` and a few seconds.

        Raises:
            WorkerFailedError: if an env raised in its `close`, once all are closed.
        """
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        if os.getpid() != self._process:  # a forked copy of the trainer: the workers are not its own
            return
        try:
            failures = close_channels([member.channel for member in self.members], self.backend.shutdown_timeout_s)
        finally:
            self._launcher.close(self.backend.shutdown_timeout_s)
            self.publisher.close()
        for member in self.members:
            member.waiting.clear()
        if failures:
            raise failures[0].as_exception("a worker")

    # --- health -------------------------------------------------------------------------------------------------

    def _take(self, member: Member) -> Reply | None:
        """One reply; None if the worker had ended and was replaced."""
        try:
            reply = member.channel.receive(self.backend.batch_timeout_s)
        except EOFError:
            self._replace(member)
            return None
        except TimeoutError:
            raise self._too_late(member) from None
        member.waiting.popleft()
        member.since = monotonic()
        member.progress = reply.progress
        return reply

    def _await_first_reply(self, member: Member, deadline: Deadline) -> None:
        while not self._launcher.wait([member.channel], min(deadline.left_s, _SLICE_S)):
            self.while_waiting()
            if deadline.left_s == 0.0:
                raise self._too_late(member, "was not ready")
        try:
            reply = member.channel.receive(deadline.left_s)
        except EOFError:
            raise self._died(member, "starting") from None
        except TimeoutError:
            raise self._too_late(member, "was not ready") from None
        if isinstance(reply, Failed):
            raise reply.as_exception(self.describe(member))
        assert isinstance(reply, Ready)
        member.ready, member.progress = reply, reply.progress

    def _replace(self, member: Member) -> None:
        """Start another worker in place of one that has ended; raise if there were enough of them."""
        doing = "idle"
        if member.waiting:
            request = member.waiting[0]
            doing = f"collecting {request.steps} steps" if isinstance(request, Collect) else type(request).__name__
        error = self._died(member, doing)
        if self.restarts >= self.backend.max_restarts:
            member.lost = str(error)
            raise error
        warnings.warn(f"{error}; it is replaced, and its episodes begin anew", stacklevel=2)
        self.restarts += 1
        self.episodes_dropped += member.copies
        member.restarts += 1
        close_channels([member.channel], 0.0)
        receiver = self.publisher.receiver(member.index)
        restart = member.spec.restart + member.restarts * _RESTART_STRIDE
        before, member.ready = member.progress, None
        member.channel = self._launcher.start(replace(member.spec, restart=restart, receiver=receiver))
        self._await_first_reply(member, Deadline(self.backend.batch_timeout_s))
        member.stepped_before += before.frames_stepped
        try:
            self._go_on(
                member,
                Resume(
                    trajectories=before.trajectories,
                    warm_up_steps=before.warm_up_steps,
                    version=0,
                    receiver=receiver,
                ),
            )
        except EOFError:
            self._replace(member)

    def _go_on(self, member: Member, resume: Resume) -> None:
        """Let a new worker continue where another one was left, and do what that one has left undone."""
        timeout_s = self.backend.batch_timeout_s
        member.channel.send(resume, timeout_s)
        member.progress = member.channel.receive(timeout_s).progress
        for position, request in enumerate(member.waiting):
            if isinstance(request, Collect):
                request = replace(request, ticket=self.publisher.ticket(member.index))
                member.waiting[position] = request
            member.channel.send(request, timeout_s)
        member.since = monotonic()

    def _died(self, member: Member, doing: str) -> WorkerDiedError:
        how = member.channel.how_it_ended(_LAST_WORDS_S)
        return WorkerDiedError(
            f"{self.describe(member)} died while {doing}: {how}; what killed it (the system when memory runs out, a "
            f"crash in native code) is not known here, and ProcessBackend(max_restarts=...) goes on without it"
        )

    def _too_late(self, member: Member, what: str = "did not answer") -> CollectTimeoutError:
        doing = "" if not member.waiting else f" ({type(member.waiting[0]).__name__})"
        return CollectTimeoutError(
            f"{self.describe(member)} {what} within batch_timeout_s={self.backend.batch_timeout_s:g} s{doing}; "
            f"{member.channel.where_it_hangs(_LAST_WORDS_S)}"
        )

    def _check_times(self, asked: Sequence[Member]) -> None:
        now = monotonic()
        for member in asked:
            if now - member.since > self.backend.batch_timeout_s:
                raise self._too_late(member)

    def _check_usable(self, member: Member) -> None:
        if member.lost:
            raise WorkerDiedError(f"{member.lost} (this collector cannot go on; build a new one)")

    def describe(self, member: Member) -> str:
        """A worker in words."""
        if self.backend.in_process:
            return "the worker"
        copies = ""
        for other, rows in self.rows():
            if other is member and rows:
                copies = f" (env copies {rows[0]} to {rows[-1]})"
        return f"worker {member.index}, {member.channel.name}{copies}"

    def _describe(self, model_id: str) -> ModelShapes:
        shapes: ModelShapes = self.ask(self.members[0], Describe(model_id))
        return shapes

    def _close_quietly(self) -> None:
        """Close after something else went wrong, which is the one to be seen."""
        try:
            self.close()
        except LitCollectError as error:
            warnings.warn(f"closing the workers failed too: {error}", stacklevel=2)


def _forgotten(members: list[Member], launcher: Launcher, timeout_s: float, process: int) -> None:
    """End the workers of a group that nobody closed."""
    if os.getpid() == process:
        close_channels([member.channel for member in members], timeout_s)
        launcher.close(timeout_s)


def _nothing() -> None:
    pass
