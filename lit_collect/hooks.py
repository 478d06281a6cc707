"""What happens to batches before they are handed out: `Hooks` of the user, and a sink."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tensordict import TensorDictBase

from lit_collect.frames import flatten_rows
from lit_collect.successors import restore_successors


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions that see exactly what is yielded; they run in the process that asks for batches."""

    pre_collect: Callable[[], None] | None = None
    """Before each batch."""
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    """Turns each batch into what is yielded instead."""
    post_collect: Callable[[TensorDictBase], None] | None = None
    """After each batch, with what is yielded."""

    def __post_init__(self) -> None:
        """Check that they can be called.

        Raises:
            TypeError: naming one that cannot.
        """
        for field in fields(self):
            hook = getattr(self, field.name)
            if hook is not None and not callable(hook):
                raise TypeError(f"hooks.{field.name} must be something that can be called or None, got {hook!r}")

    @classmethod
    def of(cls, hooks: "Hooks | Mapping[str, Callable[..., Any]] | None") -> "Hooks":
        """The hooks of a mapping from their names.

        Raises:
            ValueError: naming those that do not exist.
            TypeError: if it is neither, or a hook cannot be called.
        """
        if isinstance(hooks, Hooks):
            return hooks
        if hooks is not None and not isinstance(hooks, Mapping):
            raise TypeError(f"hooks must be Hooks or a mapping from their names, got {hooks!r}")
        unknown = sorted(set(hooks or {}) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"hooks must be among pre_collect, postproc and post_collect, got {unknown}")
        return cls(**(hooks or {}))


def extend(sink: Any, batch: TensorDictBase) -> None:
    """Write the transitions of a batch.

    Args:
        sink: anything with ``extend``, which is given them as rows [M]; with ``takes_batches`` the batch as it is.
        batch: [N, T], or whatever was collected.
    """
    whole = getattr(sink, "takes_batches", False)
    # rows apart cannot be restored any more
    sink.extend(batch if whole else flatten_rows(restore_successors(batch)))


class Output:
    """What a collector does before and after each batch.

    Args:
        hooks: of the user.
        sink: is given the transitions of each batch (see `extend`); None for none. If it has
            ``wait_for_room(timeout_s) -> bool``, frames are collected in the background only while it says so;
            ``collection_ended(error)`` is called when no more will be, with what went wrong or None. If it has
            ``budget_spent()``, that is called after the last batch of the budget.
    """

    def __init__(self, hooks: Hooks, sink: Any) -> None:
        self.sink = sink
        self._hooks = hooks

    def begin(self) -> None:
        """Before a batch."""
        if self._hooks.pre_collect is not None:
            self._hooks.pre_collect()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether the sink can take another batch, or could within a number of seconds."""
        wait: Callable[[float], bool] | None = getattr(self.sink, "wait_for_room", None)
        return wait is None or wait(timeout_s)

    def budget_spent(self) -> None:
        """There will be no batch any more: a sink writes what it has kept back."""
        tell: Callable[[], None] | None = getattr(self.sink, "budget_spent", None)
        if tell is not None:
            tell()

    def ended(self, error: BaseException | None) -> None:
        """Nothing is collected in the background any more; `error` says what went wrong."""
        tell: Callable[[BaseException | None], None] | None = getattr(self.sink, "collection_ended", None)
        if tell is not None:
            tell(error)

    def finish(self, batch: TensorDictBase) -> TensorDictBase:
        """After a batch; returns what is handed out.

        Raises:
            TypeError: if `postproc` returned nothing.
        """
        if self._hooks.postproc is not None:
            made: TensorDictBase | None = self._hooks.postproc(batch)
            if made is None:
                raise TypeError("hooks.postproc returned None : expected the batch that is to be handed out; return it")
            batch = made
        if self.sink is not None:
            extend(self.sink, batch)
        if self._hooks.post_collect is not None:
            self._hooks.post_collect(batch)
        return batch
