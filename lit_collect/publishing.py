"""`Publisher`: the learner's side of weights: versions, who was offered which, and what goes with each request."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn.parameter import is_lazy

from lit_collect.schemes import WeightReceiver, WeightSyncScheme
from lit_collect.weights import ModelShapes, Weights, check_fit, hides_weights, module_of, named_tensors

_OWNERS: "WeakValueDictionary[int, Publisher]" = WeakValueDictionary()
"""Who publishes through a scheme, by its id."""


class Publisher:
    """Publishes weights to the workers of one group, under versions that only grow.

    Args:
        scheme: carries them.
        policy: what the learner trains, if it is a module (or a method of one).
        num_workers: how many workers there are.
        describe: asks a worker what the weights of a model must look like.

    Raises:
        ValueError: if the policy has parameters without a shape, which every worker would fill with others, or the
            scheme carries the weights of another collector.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        policy: Any,
        *,
        num_workers: int,
        describe: Callable[[str], ModelShapes],
    ) -> None:
        self.version = 0
        self.offered = [0] * num_workers
        """The newest version that each worker was offered."""
        self.scheme = scheme
        self._policy, self._module = policy, module_of(policy)
        lazy = [name for name, tensor in self._own_models().get("policy", {}).items() if is_lazy(tensor)]
        if lazy:
            raise ValueError(
                f"policy has parameters without a shape : expected none where it acts in another process, got {lazy}; "
                f"call it once on an observation first"
            )
        self._describe = describe
        self._shapes: dict[str, ModelShapes] = {}
        self._begun = False
        self._lock = RLock()  # a background thread asks for tickets while another one publishes
        if _OWNERS.setdefault(id(scheme), self) is not self:
            raise ValueError(
                "backend.weight_sync serves another collector : expected one that is free; give each its own, or none"
            )

    def expect(self, model_id: str, shapes: ModelShapes) -> None:
        """Know what the weights of a model must look like, without asking."""
        self._shapes[model_id] = shapes

    def knows(self, models: Iterable[str]) -> bool:
        """Whether the weights of these models can be checked without asking a worker."""
        return self._shapes.keys() >= set(models)

    def begin(self) -> None:
        """Offer what the learner has before anything else was published, under the version that a run begins with."""
        with self._lock:
            if not self._begun:
                self._offer(self._own_models(), self.version, None)

    def advance(self, models: Mapping[str, Weights], workers: Sequence[int] | None = None) -> None:
        """Publish under the next version.

        Args:
            models: weights by model id; none: those of the learner's policy as it is.
            workers: their indices, or None for all.

        Raises:
            ValueError: if weights do not fit their model.
            KeyError: if there is no such model.
            TypeError: if a model has no weights, or the policy is a function that uses a module, whose weights cannot
                be told from it.
        """
        if not models and self._module is None and hides_weights(self._policy):
            raise TypeError(
                f"policy has weights that cannot be published : expected a module or a method of one where it acts in "
                f"another process, got {self._policy!r}; pass the module (or freeze it, if it shall not learn)"
            )
        tensors = self._checked(models) if models else self._own_models()
        with self._lock:
            self.begin()  # those models and workers that are left out here begin with what the learner has
            self._offer(tensors, self.version + 1, workers)

    def resume(self, version: int) -> None:
        """Go on with the versions of another run; `receivers` that were given out before must be replaced."""
        with self._lock:
            self.version = version
            self.offered = [version] * len(self.offered)
            self._begun = False
            self.scheme.close()

    def ticket(self, worker: int) -> Any:
        """What goes with the next request for a batch."""
        with self._lock:
            self.begin()
            return self.scheme.ticket(worker)

    def receiver(self, worker: int) -> WeightReceiver:
        """The worker's side, for a worker that has nothing yet."""
        with self._lock:
            self.scheme.forget(worker)
            return self.scheme.receiver(worker)

    def close(self) -> None:
        """Release what the scheme holds; may be called again."""
        with self._lock:
            self.scheme.close()
            if _OWNERS.get(id(self.scheme)) is self:
                del _OWNERS[id(self.scheme)]

    def _offer(self, tensors: Mapping[str, Mapping[str, Tensor]], version: int, workers: Sequence[int] | None) -> None:
        self.scheme.publish(tensors, version, workers)
        self.version, self._begun = version, True
        for worker in range(len(self.offered)) if workers is None else workers:
            self.offered[worker] = version

    def _own_models(self) -> dict[str, Mapping[str, Tensor]]:
        return {} if self._module is None else {"policy": named_tensors(self._module)}

    def _checked(self, models: Mapping[str, Weights]) -> dict[str, Mapping[str, Tensor]]:
        tensors: dict[str, Mapping[str, Tensor]] = {}
        for model_id, weights in models.items():
            if model_id not in self._shapes:
                self._shapes[model_id] = self._describe(model_id)
            tensors[model_id] = named_tensors(weights)
            check_fit(tensors[model_id], self._shapes[model_id])
        return tensors


class Inlet:
    """Where the weights of models come from, if not from the learner of this process."""

    def __init__(self) -> None:
        self._schemes: dict[str, WeightReceiver | WeightSyncScheme] = {}
        self._receivers: dict[int, tuple[WeightReceiver, Callable[[], Any]]] = {}  # one for each object among those

    def __bool__(self) -> bool:
        """Whether there is any such place."""
        return bool(self._schemes)

    def register(self, schemes: Mapping[str, WeightReceiver | WeightSyncScheme]) -> None:
        """Look there from now on.

        Args:
            schemes: by model id: the worker's side of a scheme, or a scheme of this process.

        Raises:
            TypeError: if one is neither.
        """
        found: dict[int, tuple[WeightReceiver, Callable[[], Any]]] = {}
        for scheme in schemes.values():  # which may be the same for several models
            if isinstance(scheme, WeightSyncScheme):
                scheme.forget(0)  # so that what was published before comes, too
                found[id(scheme)] = scheme.receiver(0), partial(scheme.ticket, 0)
            elif isinstance(scheme, WeightReceiver):
                found[id(scheme)] = scheme, _no_ticket
            else:
                raise TypeError(f"a scheme must be a WeightSyncScheme or a WeightReceiver, got {scheme!r}")
        self._schemes.update(schemes)
        self._receivers.update(found)

    def fresh(self) -> dict[str, Weights]:
        """What has come since the last time, by model id."""
        come: dict[int, Mapping[str, Weights]] = {}
        for scheme in self._schemes.values():
            if id(scheme) not in come:
                receiver, ticket = self._receivers[id(scheme)]
                snapshot = receiver.receive(ticket())
                come[id(scheme)] = {} if snapshot is None else snapshot.models
        return {
            model_id: come[id(scheme)][model_id]
            for model_id, scheme in self._schemes.items()
            if model_id in come[id(scheme)]
        }


def _no_ticket() -> None:
    """Of a receiver that needs none."""
