"""Collecting in the process that trains."""

from lit_collect.backends.base import Backend
from lit_collect.rollout import RolloutRunner
from lit_collect.worker import WorkerSpec, build_runner


class DirectBackend(Backend):
    """Steps the envs in the calling process, with the policy object itself: its weights are always the current ones.

    Example:
        >>> DirectBackend()
        DirectBackend()
    """

    def start(self, spec: WorkerSpec) -> RolloutRunner:
        """Build the runner here (see `Backend.start`)."""
        return build_runner(spec)

    def __repr__(self) -> str:
        """As it was written."""
        return "DirectBackend()"
