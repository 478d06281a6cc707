# ruff: noqa: D417  # `self` is the collector
"""The methods of a `Collector` that ask what its envs, its policy and its replay buffer hold, between batches."""

from collections.abc import Callable
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import nn

from lit_collect.envs.layers import env_attribute
from lit_collect.frames import MASK
from lit_collect.gathering import join
from lit_collect.messages import Call, Execute, Fake
from lit_collect.paths import nearest, resolve
from lit_collect.policies import PolicyFactory
from lit_collect.stream import Stream
from lit_collect.supervisor import WorkerGroup
from lit_collect.weights import module_of


class Asked(Protocol):
    """What these methods need of their collector."""

    frames_per_batch: int
    """Of a whole batch."""
    _group: WorkerGroup
    _stream: Stream
    _policy: Any

    @property
    def replay_buffer(self) -> Any:
        """What the transitions are written to, None if nothing."""


def cascade_execute(self: Asked, path: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Read an attribute, or call a method, of what the workers hold.

    Args:
        path: begins with ``env`` or ``policy``, for instance ``env.envs[0].unwrapped.gravity``.
        *args: of the method.
        **kwargs: of the method.

    Returns:
        The values, one for each worker.

    Raises:
        ValueError: if the path is malformed.
        AttributeError: if it leads nowhere (KeyError, IndexError: at a key or an index).
    """
    return _ask_all(self, Execute(path=path, args=args, kwargs=kwargs))


def map_fn(self: Asked, fn: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call ``fn(env, policy, *args, **kwargs)`` in every worker, or what a path leads to (see `cascade_execute`).

    Args:
        fn: takes the worker's `BatchedEnv`, whose ``envs`` are the env copies, and the policy that acts there. From
            another process its results come back as copies.
        *args: further arguments.
        **kwargs: further arguments.

    Returns:
        What it returns, one value for each worker.

    Raises:
        TypeError: if it cannot be called, or it, an argument or a result cannot travel.
        Exception: what it raises; from another process as a `WorkerFailedError`, unless it is one of Python's own.

    Example:
        >>> from lit_collect import Collector
        >>> with Collector("CartPole-v1", num_envs=4, frames_per_batch=8) as collector:
        ...     collector.map_fn(lambda env, policy, key: getattr(env, key), "num_envs")
        [4]
    """
    if isinstance(fn, str):
        return _ask_all(self, Execute(path=fn, args=args, kwargs=kwargs))
    if not callable(fn):
        raise TypeError(f"fn must be a path or something that can be called, got {fn!r}")
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return _ask_all(self, Call(what=f"calling {name}", fn=fn, args=args, kwargs=kwargs))


def getattr_policy(self: Asked, name: str) -> Any:
    """An attribute of the policy as the first worker has it; a copy, if that is in another process.

    Args:
        name: of the attribute, or a path such as ``net[0].weight``.

    Raises:
        AttributeError: if there is none (KeyError, IndexError: at a key or an index of the path).
        TypeError: if it cannot travel.
    """
    return _ask_first(self, Call(what=f"reading {_below('policy', name)}", fn=_policy_attribute, args=(name,)))


def getattr_env(self: Asked, name: str) -> Any:
    """An attribute of the first worker's `BatchedEnv`, or else of its first env copy, wrappers first.

    Args:
        name: of the attribute, or a path such as ``spec.id``.

    Raises:
        AttributeError: if there is none (KeyError, IndexError: at a key or an index of the path).
        TypeError: if it cannot travel.

    Example:
        >>> from lit_collect import Collector
        >>> with Collector("CartPole-v1", num_envs=4, frames_per_batch=8) as collector:
        ...     collector.getattr_env("num_envs"), collector.getattr_env("spec.id"), collector.getattr_env("gravity")
        (4, 'CartPole-v1', 9.8)
    """
    return _ask_first(self, Call(what=f"reading {_below('env', name)}", fn=_env_attribute, args=(name,)))


def getattr_rb(self: Asked, name: str) -> Any:
    """An attribute of `replay_buffer`.

    Args:
        name: of the attribute, or a path.

    Raises:
        RuntimeError: if there is no replay buffer.
        AttributeError: if it has no such attribute (KeyError, IndexError: at a key or an index of the path).
    """
    self._stream.check_open()
    if self.replay_buffer is None:
        raise RuntimeError("there is no replay buffer to read from : expected Collector(replay_buffer=...)")
    return resolve({"replay_buffer": self.replay_buffer}, _below("replay_buffer", name))


def get_model(self: Asked, model_id: str = "policy") -> nn.Module:
    """The module itself that is trained in this process, and published from it.

    Args:
        model_id: the policy, or the path of a module in it such as ``policy.net[0]``; where envs are stepped in this
            process, also of one in them.

    Raises:
        KeyError: if there is no such model in this process.
        TypeError: if it is no module: a function, or what a `PolicyFactory` builds in another process.
    """
    self._stream.check_open()
    here = _models_here(self)
    try:
        found = resolve(here, model_id)
    except (ValueError, LookupError, AttributeError) as error:
        raise KeyError(f"there is no model {model_id!r} in this process : expected {_known(here, model_id)}") from error
    if isinstance(found, nn.Module):
        return found
    hint = ""
    if isinstance(found, PolicyFactory):
        hint = "; it builds one in each worker, so build another one here and publish that"
    raise TypeError(f"{model_id} is no model of this process : expected an nn.Module, got {found!r}{hint}")


def fake_tensordict(self: Asked) -> TensorDictBase:
    """A batch of zeros with the keys, shapes and dtypes of the next whole one, before hooks see it.

    No env is stepped or reset, nothing is counted, and the random numbers that follow stay the same. The policy is
    asked once. What only a reset can show (action masks) is left out before the first one.

    Returns:
        [N, T] (or [T]) as `Collector.collect` gives it; of an asynchronous backend, or in the background, [n, T].

    Raises:
        FrameContractError: if the policy's answer breaks the contract.
    """
    self._stream.check_open()
    with self._stream.turn.taken():
        together = self._stream.together
        makers = self._group.members if together else self._group.members[:1]
        steps = self.frames_per_batch // sum(member.copies for member in makers)
        parts = [self._group.ask(member, Fake(steps)) for member in makers]
    batch = join(parts, masked=together and self._group.backend.preempt_fraction is not None)
    if MASK in batch:  # of zeros like all the rest
        batch[MASK].zero_()
    return self._stream.as_handed_out(batch)


def _ask_all(collector: Asked, request: Execute | Call) -> list[Any]:
    collector._stream.check_open()
    with collector._stream.turn.taken():
        return collector._group.ask_all(request)


def _ask_first(collector: Asked, request: Call) -> Any:
    collector._stream.check_open()
    with collector._stream.turn.taken():
        return collector._group.ask(collector._group.members[0], request)


def _models_here(collector: Asked) -> dict[str, Any]:
    """What the path of a model may begin with."""
    module = module_of(collector._policy)
    here = {"policy": collector._policy if module is None else module}
    if collector._group.backend.in_process:
        env, policy = _ask_first(collector, Call(what="looking for a model", fn=_env_and_policy))
        here = {"policy": policy if module is None else module, "env": env}
    return here


def _known(here: dict[str, Any], model_id: str) -> str:
    inner = here["policy"].named_modules(prefix="policy") if isinstance(here["policy"], nn.Module) else ()
    known = f"one of {nearest(model_id, dict.fromkeys(['policy', *(_as_path(name) for name, _ in inner)]))}"
    if "env" not in here and model_id.startswith("env"):
        known += "; models of envs are in the workers (see cascade_execute and update_policy_weights_)"
    return known


def _env_and_policy(env: Any, policy: Any) -> tuple[Any, Any]:
    return env, policy


def _policy_attribute(env: Any, policy: Any, name: str) -> Any:
    return resolve({"policy": policy}, _below("policy", name))


def _env_attribute(env: Any, policy: Any, name: str) -> Any:
    return env_attribute(env, name)


def _below(root: str, name: str) -> str:
    """The path of something in a root; its own may begin with an index."""
    if not isinstance(name, str):
        raise TypeError(f"the name of an attribute must be a text, got {name!r}")
    return f"{root}{name}" if name.startswith("[") else f"{root}.{name}"


def _as_path(name: str) -> str:
    """The dotted name of a module as a path, in which numbers are indices."""
    first, *parts = name.split(".")
    return first + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)
