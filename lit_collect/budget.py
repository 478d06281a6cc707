"""`Budget`: how many frames a collector may step to hand them out, and what became of them."""

from dataclasses import dataclass

from lit_collect.errors import BudgetSpentError


@dataclass(kw_only=True)
class Budget:
    """Counts frames and batches that were handed out, and frames that wait for the rest of their trajectory.

    Example:
        >>> budget = Budget(total=20)
        >>> budget.count(8)
        >>> budget.left, budget.batches_left(8)
        (12, 2)
    """

    total: int
    """Frames in all, -1 without a limit."""
    yielded: int = 0
    """Frames that were handed out."""
    batches: int = 0
    """Batches that were handed out."""
    held: int = 0
    """Frames that were collected and wait to be handed out with the rest of their trajectory."""
    lost: int = 0
    """Frames that were collected and will never be handed out: their trajectories were not whole, or too old."""
    before_resume: int = 0
    """Frames stepped by the runs before this one."""

    @property
    def left(self) -> int | None:
        """Frames that may still be collected, None without a limit."""
        # a state that was loaded may be of a larger budget
        return None if self.total == -1 else max(self.total - self.yielded - self.held - self.lost, 0)

    @property
    def to_come(self) -> int | None:
        """Frames that may still be handed out, None without a limit."""
        return None if self.left is None else self.left + self.held

    def batches_left(self, frames_per_batch: int) -> int:
        """Batches until it is spent.

        Raises:
            TypeError: if there is no limit.
        """
        if self.left is None:
            raise TypeError("a collector without total_frames has no length")
        return -(-self.left // frames_per_batch)

    def check(self) -> None:
        """Raise if it is spent.

        Raises:
            BudgetSpentError: then.
        """
        if self.to_come == 0:
            raise BudgetSpentError(
                f"all {self.total} frames of total_frames have been collected; raise the budget or build a new "
                f"collector"
            )

    def count(self, frames: int) -> None:
        """One more batch of so many frames."""
        self.yielded += frames
        self.batches += 1

    def hold(self, frames: int) -> None:
        """So many frames were collected and wait."""
        self.held += frames

    def release(self, frames: int) -> None:
        """So many of those that waited are handed out, as one more batch."""
        self.held -= frames
        self.count(frames)

    def lose(self, frames: int) -> None:
        """So many of those that waited will not be handed out."""
        self.held -= frames
        self.lost += frames

    def limit(self, frames: int) -> None:
        """Let only so many more be handed out."""
        self.total = self.yielded + self.held + self.lost + frames

    def take_back(self, frames: int) -> None:
        """So many frames of the last batch are not used: they were not handed out, but dropped."""
        self.yielded -= frames
