"""`Publisher`: the learner's side of weights: versions, who was offered which, and what goes with each request."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any

from torch import Tensor, nn

from lit_collect.schemes import WeightReceiver, WeightSyncScheme
from lit_collect.weights import ModelShapes, Weights, check_fit, named_tensors


class Publisher:
    """Publishes weights to the workers of one group, under versions that only grow.

    Args:
        scheme: carries them.
        policy: what the learner trains, if it is a module (or a method of one).
        num_workers: how many workers there are.
        describe: asks a worker what the weights of a model must look like.
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
        self._module = module_of(policy)
        self._describe = describe
        self._shapes: dict[str, ModelShapes] = {}
        self._begun = False
        self._lock = RLock()  # a background thread asks for tickets while another one publishes

    def expect(self, model_id: str, shapes: ModelShapes) -> None:
        """Know what the weights of a model must look like, without asking."""
        self._shapes[model_id] = shapes

    def begin(self) -> None:
        """Offer what the learner has before anything else was published, under the version that a run begins with."""
        with self._lock:
            if not self._begun:
                self._offer(self._own_models(), None)

    def advance(self, models: Mapping[str, Weights], workers: Sequence[int] | None = None) -> None:
        """Publish under the next version.

        Args:
            models: weights by model id; none: those of the learner's policy as it is.
            workers: their indices, or None for all.

        Raises:
            ValueError: if weights do not fit their model.
            KeyError: if there is no such model.
            TypeError: if a model has no weights.
        """
        tensors = self._checked(models) if models else self._own_models()
        with self._lock:
            self.version += 1
            self._offer(tensors, workers)

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

    def _offer(self, tensors: Mapping[str, Mapping[str, Tensor]], workers: Sequence[int] | None) -> None:
        self._begun = True
        self.scheme.publish(tensors, self.version, workers)
        for worker in range(len(self.offered)) if workers is None else workers:
            self.offered[worker] = self.version

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
        self._receivers: dict[str, tuple[WeightReceiver, Callable[[], Any]]] = {}

    def __bool__(self) -> bool:
        """Whether there is any such place."""
        return bool(self._receivers)

    def register(self, schemes: Mapping[str, WeightReceiver | WeightSyncScheme]) -> None:
        """Look there from now on.

        Args:
            schemes: by model id: the worker's side of a scheme, or a scheme of this process.

        Raises:
            TypeError: if one is neither.
        """
        for model_id, scheme in schemes.items():
            if isinstance(scheme, WeightSyncScheme):
                self._receivers[model_id] = scheme.receiver(0), partial(scheme.ticket, 0)
            elif isinstance(scheme, WeightReceiver):
                self._receivers[model_id] = scheme, _no_ticket
            else:
                raise TypeError(f"a scheme must be a WeightSyncScheme or a WeightReceiver, got {scheme!r}")

    def fresh(self) -> dict[str, Weights]:
        """What has come since the last time, by model id."""
        found: dict[str, Weights] = {}
        for model_id, (receiver, ticket) in self._receivers.items():
            snapshot = receiver.receive(ticket())
            if snapshot is not None and model_id in snapshot.models:
                found[model_id] = snapshot.models[model_id]
        return found


def _no_ticket() -> None:
    """Of a receiver that needs none."""


def module_of(policy: Any) -> nn.Module | None:
    """The module of a policy: itself, or the one that it is a method of."""
    owner = policy if isinstance(policy, nn.Module) else getattr(policy, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
