"""`Member`: one worker of a `WorkerGroup`, as the group sees it."""

from collections import deque
from dataclasses import dataclass, field

from lit_collect.backends.base import Channel
from lit_collect.messages import Collect, Progress, Ready, Request, doing
from lit_collect.worker import WorkerSpec


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
    before: Progress = field(default_factory=Progress)
    """What the workers before it have done."""
    lost: str = ""
    """Why it cannot be used any more."""

    @property
    def index(self) -> int:
        """Which worker it is."""
        return self.spec.index

    @property
    def done(self) -> Progress:
        """Where it stands, with the work of those before it."""
        return self.progress.after(self.before)

    @property
    def copies(self) -> int:
        """Its env copies."""
        return 0 if self.ready is None else self.ready.num_envs

    @property
    def batches_under_way(self) -> int:
        """Batches that it was asked for and that were not received."""
        return sum(isinstance(request, Collect) for request in self.waiting)

    @property
    def doing(self) -> str:
        """What it is at, in words."""
        return doing(self.waiting[0]) if self.waiting else "idle"
