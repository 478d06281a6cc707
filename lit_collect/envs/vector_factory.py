"""`VectorEnvFactory`: vector envs that are named in a YAML file."""

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from lit_collect.envs.base import EnvFactory
from lit_collect.envs.names import as_kwargs, check_id, import_path, is_env_id
from lit_collect.envs.vector_quirks import as_vector_env, refuse_dm


class VectorEnvFactory(EnvFactory):
    """Makes a vector env: Gymnasium's own for an id, ALE's, or whatever a callable makes (envpool).

    Each worker makes one of these. With W workers there are ``W * num_envs`` env copies, so that ``num_envs`` of the
    collector is left out, or is that product.

    Args:
        env_id: a Gymnasium id for `gymnasium.make_vec` (``"module:Name-v0"`` imports the module that registers it), or
            the dotted import path of a callable that takes ``num_envs`` and `make_kwargs`, and returns a vector env.
        num_envs: env copies of each worker.
        make_kwargs: further keyword arguments; among them ``vector_kwargs`` for `SyncVectorEnv` and `AsyncVectorEnv`
            (``{"vector_kwargs": {"autoreset_mode": "SameStep"}}``).
        vectorization_mode: of `gymnasium.make_vec`, ``"sync"``, ``"async"`` or ``"vector_entry_point"`` (None: the
            env's own vector env where it has one, else ``"sync"``).
        autoreset: the mode of a vector env that does not say it itself; it does not change the mode.

    Raises:
        ValueError: if the id is unknown, a path leads nowhere, or `num_envs` is less than 1.
        TypeError: if the path leads to something that cannot be called, or an argument is of another kind.

    Example:
        >>> factory = VectorEnvFactory("CartPole-v1", 4)
        >>> env = factory()
        >>> env
        CartPoleVectorEnv(CartPole-v1, num_envs=4)
        >>> env.close()
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        *,
        make_kwargs: dict[str, Any] | None = None,
        vectorization_mode: str | None = None,
        autoreset: str | None = None,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs!r}")
        _maker(env_id, vectorization_mode)
        self.env_id = env_id
        self.num_envs = num_envs
        self.make_kwargs = as_kwargs(make_kwargs)
        self.vectorization_mode = vectorization_mode
        self.autoreset = autoreset

    def __call__(self) -> VectorEnv[Any, Any, Any]:
        """Make one vector env.

        Raises:
            TypeError: if the callable returned something else.
        """
        make = _maker(self.env_id, self.vectorization_mode)
        env = as_vector_env(make(num_envs=self.num_envs, **self.make_kwargs))
        if not isinstance(env, VectorEnv):
            if hasattr(env, "close"):
                env.close()
            refuse_dm(env)
            raise TypeError(f"{self.env_id} made no vector env : expected gymnasium.vector.VectorEnv, got {env!r}")
        return env

    def __repr__(self) -> str:
        """The call that makes an equal factory."""
        given = [repr(self.env_id), repr(self.num_envs)]
        for name in ("make_kwargs", "vectorization_mode", "autoreset"):
            value = getattr(self, name)
            given += [f"{name}={value!r}"] if value else []
        return f"VectorEnvFactory({', '.join(given)})"


def _maker(env_id: str, vectorization_mode: str | None) -> Callable[..., Any]:
    """What makes the vector env of a name; another process looks it up again."""
    if not isinstance(env_id, str):
        raise TypeError(f"env_id must be a string, got {env_id!r}")
    if is_env_id(env_id):
        check_id(env_id)
        return functools.partial(gymnasium.make_vec, env_id, vectorization_mode=vectorization_mode)
    if vectorization_mode is not None:
        raise ValueError(
            f"vectorization_mode is for Gymnasium ids : expected None with {env_id!r}, got {vectorization_mode!r}"
        )
    found = import_path(env_id)
    if not callable(found):
        raise TypeError(f"{env_id!r} leads to no callable, got {found!r}")
    return found
