"""The layers of an env, from the `BatchedEnv` through wrappers to the first copy itself, and what they know."""

from collections.abc import Iterator
from typing import Any

import gymnasium

from lit_collect.envs.base import BatchedEnv
from lit_collect.envs.pettingzoo import is_parallel_env
from lit_collect.paths import first_name, nearest, resolve

_KINDS = (BatchedEnv, gymnasium.Env, gymnasium.vector.VectorEnv)


def layers(env: Any) -> Iterator[Any]:
    """The env, what it wraps, what that wraps, and so on; of several copies the first.

    Args:
        env: a `BatchedEnv`, or an env of Gymnasium.
    """
    here, seen = env, set[int]()
    while (isinstance(here, _KINDS) or is_parallel_env(here)) and id(here) not in seen:
        yield here
        seen.add(id(here))
        copies = here.__dict__.get("envs") or here.__dict__.get("games") or (None,)
        here = here.__dict__.get("env", copies[0])


def env_attribute(env: Any, path: str) -> Any:
    """Read an attribute of the first layer of an env that has it.

    Args:
        env: see `layers`.
        path: of the attribute, such as ``spec.id`` (see `lit_collect.paths`).

    Raises:
        AttributeError: naming the layers, if none of them has it.
        LookupError: if a key or an index in the path is not there.
        ValueError: if the path is malformed.

    Example:
        >>> env_attribute(gymnasium.make("CartPole-v1"), "gravity")
        9.8
    """
    name = first_name(path)
    names: list[str] = []
    for layer in layers(env):
        own = not (name.startswith("_") and isinstance(layer, BatchedEnv))  # its private parts are nobody's business
        if own and (hasattr(type(layer), name) or hasattr(layer, name)):  # a property that fails says why itself
            return resolve({"env": layer}, f"env.{path}")
        names += dir(layer)
    raise AttributeError(
        f"the env has no attribute {name!r} : expected one of its own, such as {nearest(name, dict.fromkeys(names))}; "
        f"it is a {' of a '.join(type(layer).__name__ for layer in layers(env))}"
    )
