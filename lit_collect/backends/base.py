"""`Backend`: where frames are collected, never what they are."""

from abc import ABC, abstractmethod

from lit_collect.rollout import RolloutRunner
from lit_collect.worker import WorkerSpec


class Backend(ABC):
    """A place where collector workers run. Kinds are subclasses, so that a saved YAML keeps their class."""

    @abstractmethod
    def start(self, spec: WorkerSpec) -> RolloutRunner:
        """Build what collects; whoever calls this owns it and closes it."""
