"""`WorkerGroup`: starts the workers of one collector, talks to them, watches their health, replaces and closes them."""

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from lit_collect.backends.base import Backend, Channel, Deadline, Launcher, close_channels
from lit_collect.devices import acting_copy, usable
from lit_collect.errors import CollectorClosedError, CollectTimeoutError, WorkerDiedError, second_to
from lit_collect.members import Member
from lit_collect.messages import (
    Collect,
    Collected,
    Describe,
    Failed,
    Load,
    Profile,
    Ready,
    Reply,
    Request,
    Reseed,
    Reset,
    Resume,
)
from lit_collect.profiling import ProfileConfig
from lit_collect.publishing import Publisher
from lit_collect.schemes import Pipe, WeightSyncScheme
from lit_collect.seeding import Placement
from lit_collect.weights import ModelShapes, Weights, named_tensors
from lit_collect.worker import WorkerSpec

_SLICE_S = 0.2  # signal handlers of the trainer only set flags: waiting looks up that often
_LAST_WORDS_S = 1.0  # what finding out how a worker ended, or where it hangs, may take
_HURRY_S = 1.0  # what closing its envs may take when somebody has pressed Ctrl-C while it was waited for
_RESTART_STRIDE = 1 << 16  # seeds of replaced workers, far from those of resumed runs


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
        ValueError: if the number of env copies does not fit the env or the workers, or the env or the policy cannot
            go to them as it is.
    """

    def __init__(self, spec: WorkerSpec, backend: Backend) -> None:
        spec.check(backend.num_collectors, travels=not backend.in_process)
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
        self.kept: deque[tuple[Member, Collected | Failed]] = deque()
        """Batches, and failures to make one, that arrived while something else was waited for."""
        learned = spec.policy
        if backend.in_process:
            device = usable(spec.devices.policy, "devices.policy")
            spec = replace(spec, policy=acting_copy(learned, device, always=backend.copies_policy))
        self.shared = backend.in_process and spec.policy is learned  # what the learner changes acts at once
        self.publisher = Publisher(
            Pipe() if backend.in_process and not self.shared else backend.scheme(),
            None if self.shared else learned,
            num_workers=backend.num_collectors,
            describe=self._describe,
        )
        self._patience_s = backend.shutdown_timeout_s
        self._closed = False
        self._process = os.getpid()
        self._launcher = backend.launcher()
        # If nobody calls close(), the workers end all the same, with the group or with the interpreter.
        owned = (self.members, self._launcher, self.publisher.scheme)
        self._finalizer = weakref.finalize(self, _forgotten, *owned, backend.shutdown_timeout_s, os.getpid())
        try:
            for index in range(backend.num_collectors):
                own = replace(spec, index=index, num_workers=backend.num_collectors, num_threads=backend.num_threads)
                own = replace(own, receiver=self.publisher.receiver(index))
                self.members.append(Member(spec=own, channel=self._launcher.start(own), since=monotonic()))
            deadline = Deadline(backend.batch_timeout_s)
            for member in self.members:
                self._await_first_reply(member, deadline)
        except BaseException as error:
            with second_to(error):
                self.close()
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
        return sum(member.done.frames_stepped for member in self.members)

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
        progress = [member.done for member in self.members]
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
            Exception: what pickling the request raised.
        """
        self.check_usable([member])
        doing = member.doing
        if not member.waiting:
            member.since = monotonic()
        # a ticket holds weights, and if the request must be sent once more, it is with a new one
        member.waiting.append(replace(request, ticket=None) if isinstance(request, Collect) else request)
        try:
            member.channel.send(request, self.backend.batch_timeout_s)
        except EOFError:
            self._replace(member, doing)  # which sends all that is waiting once more
        except TimeoutError:
            raise self._too_late(member) from None
        except Exception:  # something in it cannot travel
            member.waiting.pop()
            raise

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
        received = self._next_reply(timeout_s, of)
        if received is not None and isinstance(received[1], Failed):
            raise received[1].as_exception(self.describe(received[0]))
        return received

    def _next_reply(self, timeout_s: float | None, of: Sequence[Member] | None) -> tuple[Member, Reply] | None:
        deadline = None if timeout_s is None else Deadline(timeout_s)
        while True:
            asked = [member for member in of or self.members if member.waiting]
            self.check_usable(asked)
            slice_s = _SLICE_S if deadline is None else min(_SLICE_S, deadline.left_s)
            ready = self._wait(asked, slice_s)
            # the one that has waited longest goes first
            for member in sorted((m for m in asked if m.channel in ready), key=lambda member: member.since):
                reply = self._take(member)
                if reply is not None:
                    return member, reply
            if deadline is not None and deadline.left_s == 0.0:
                return None
            if not ready:
                self._check_times(asked)

    def drain(self) -> bool:
        """Wait for all replies and forget them, failures too: they are of a batch that was given up already.

        Returns:
            Whether there was a batch among them.
        """
        self.check_usable(self.members)
        batches = sum(isinstance(reply, Collected) for _, reply in self.kept)
        for member in self.members:
            while member.waiting:
                if self._wait([member], _SLICE_S):
                    batches += isinstance(self._take(member), Collected)
                else:
                    self._check_times([member])
        self.kept.clear()
        return batches > 0

    def ask(self, member: Member, request: Request) -> Any:
        """Give a worker a request and wait for the value of its reply; what comes of earlier ones is kept.

        Args:
            member: the worker.
            request: no `Collect`.
        """
        self.send(member, request)
        while True:
            received = self._next_reply(None, [member])
            assert received is not None
            reply = received[1]
            if not any(waiting is request for waiting in member.waiting):
                if isinstance(reply, Failed):
                    raise reply.as_exception(self.describe(member))
                return getattr(reply, "value", None)
            if isinstance(reply, Collected | Failed):
                self.kept.append((member, reply))

    def ask_all(self, request: Request) -> list[Any]:
        """The same request for each worker; the values of their replies."""
        return [self.ask(member, request) for member in self.members]

    def publish(self, models: Mapping[str, Weights], workers: Sequence[int] | None) -> None:
        """Publish weights under the next version (see `Publisher.advance`)."""
        if self.shared:
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
            channels = [member.channel for member in self.members]
            failures = close_channels(channels, self._patience_s)
        finally:
            self._launcher.close(self.backend.shutdown_timeout_s)
            self.publisher.close()
            self.kept = deque()  # batches in memory of the workers
        for channel, failed in failures:
            raise failed.as_exception(self.describe(self.members[channels.index(channel)]))

    # --- health -------------------------------------------------------------------------------------------------

    def _wait(self, members: Sequence[Member], timeout_s: float) -> list[Channel]:
        """Those of their channels on which there is something to receive."""
        try:
            ready = self._launcher.wait([member.channel for member in members], timeout_s)
            if not ready:
                self.while_waiting()
        except (KeyboardInterrupt, SystemExit):  # whoever wants to leave now does not wait for a worker that hangs
            self._patience_s = min(self._patience_s, _HURRY_S)
            raise
        return ready

    def _take(self, member: Member) -> Reply | None:
        """One reply; None if the worker had ended and was replaced."""
        try:
            reply = member.channel.receive(self.backend.batch_timeout_s)
        except EOFError:
            self._replace(member, member.doing)
            return None
        except TimeoutError:
            raise self._too_late(member) from None
        member.waiting.popleft()
        member.since = monotonic()
        member.progress = reply.progress
        return reply

    def _await_first_reply(self, member: Member, deadline: Deadline) -> None:
        while not self._wait([member], min(deadline.left_s, _SLICE_S)):
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
        reply.check_like(self.ready, member.index)

    def _replace(self, member: Member, doing: str) -> None:
        """Start another worker in place of one that has ended; raise if there were enough of them."""
        self.check_usable(())
        member.lost = str(self._died(member, doing))  # until there is another one in its place
        if self.restarts >= self.backend.max_restarts:
            raise WorkerDiedError(member.lost)
        warnings.warn(f"{member.lost}; it is replaced, and its episodes begin anew", stacklevel=2)
        self.restarts += 1
        self.episodes_dropped += member.copies
        member.restarts += 1
        close_channels([member.channel], 0.0)
        receiver = self.publisher.receiver(member.index)
        restart = member.spec.restart + member.restarts * _RESTART_STRIDE
        before = member.done
        member.channel = self._launcher.start(replace(member.spec, restart=restart, receiver=receiver))
        self._await_first_reply(member, Deadline(self.backend.batch_timeout_s))
        member.before = before
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
            self._replace(member, "starting")
        except TimeoutError:
            raise self._too_late(member) from None
        member.lost = ""

    def _go_on(self, member: Member, resume: Resume) -> None:
        """Let a new worker continue where another one was left, and do what that one has left undone."""
        timeout_s = self.backend.batch_timeout_s
        member.channel.send(resume, timeout_s)
        member.progress = member.channel.receive(timeout_s).progress
        for request in member.waiting:
            if isinstance(request, Collect):
                request = replace(request, ticket=self.publisher.ticket(member.index))
            member.channel.send(request, timeout_s)
        member.since = monotonic()

    def _died(self, member: Member, doing: str) -> WorkerDiedError:
        how, most = member.channel.how_it_ended(_LAST_WORDS_S), self.backend.max_restarts
        before = f"{self.restarts} of max_restarts={most} were used before"
        return WorkerDiedError(
            f"{self.describe(member)} died while {doing}: {how}; what killed it (the system when memory runs out, a "
            f"crash in native code) is not known here, and "
            f"{before if most else 'ProcessBackend(max_restarts=...) goes on without it'}"
        )

    def _too_late(self, member: Member, what: str = "did not answer") -> CollectTimeoutError:
        doing = f" while {member.doing}" if member.waiting else ""
        return CollectTimeoutError(
            f"{self.describe(member)} {what} within batch_timeout_s={self.backend.batch_timeout_s:g} s{doing}; "
            f"{member.channel.where_it_hangs(_LAST_WORDS_S)}"
        )

    def _check_times(self, asked: Sequence[Member]) -> None:
        now = monotonic()
        for member in asked:
            if now - member.since > self.backend.batch_timeout_s:
                raise self._too_late(member)

    def check_usable(self, members: Sequence[Member]) -> None:
        """Check that some workers can still be used.

        Raises:
            CollectorClosedError: if somebody else has closed the group, a signal handler for instance, or this process
                is a forked copy of the trainer.
            WorkerDiedError: if one of them has ended.
        """
        if self._closed:
            raise CollectorClosedError("the collector was closed while it was used; build a new one")
        if not self.backend.in_process and os.getpid() != self._process:
            raise CollectorClosedError(
                f"the workers of this collector belong to process {self._process} : expected use there, got process "
                f"{os.getpid()}, its copy; build a new collector here"
            )
        for member in members:
            if member.lost:
                raise WorkerDiedError(f"{member.lost} (this collector cannot go on; build a new one)")

    def describe(self, member: Member) -> str:
        """A worker in words."""
        if self.backend.in_process:
            return "the worker"
        copies = ""
        for other, rows in self.rows():
            if other is member and rows:
                copies = f" (env copies {rows[0]} to {rows[-1]})" if len(rows) > 1 else f" (env copy {rows[0]})"
        return f"worker {member.index}, {member.channel.name}{copies}"

    def _describe(self, model_id: str) -> ModelShapes:
        shapes: ModelShapes = self.ask(self.members[0], Describe(model_id))
        return shapes


def _forgotten(
    members: list[Member], launcher: Launcher, scheme: WeightSyncScheme, timeout_s: float, process: int
) -> None:
    """End the workers of a group that nobody closed."""
    if os.getpid() == process:
        try:
            close_channels([member.channel for member in members], timeout_s)
        finally:
            launcher.close(timeout_s)
            scheme.close()


def _nothing() -> None:
    pass
