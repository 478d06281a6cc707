"""Names in settings and what they lead to: Gymnasium ids, dotted import paths, wrappers."""

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

ACCEPTED = (
    "a Gymnasium id ('CartPole-v1', 'namespace/Name-v0', 'module:Name-v0'), a dotted import path ('pkg.mod.make_env'), "
    "a callable without arguments, an EnvFactory, a sequence of these (one for each env copy), "
    "or a live gymnasium.Env, VectorEnv or parallel game of PettingZoo"
)
"""What may be passed as `env`, for messages."""

_VERSIONED = re.compile(r".*-v\d+")
_DOTTED = re.compile(r"\w+(\.\w+)+")


def is_env_id(name: str) -> bool:
    """Whether a name is a Gymnasium id, not a dotted import path."""
    return bool(_VERSIONED.fullmatch(name)) or name in gymnasium.registry or not _DOTTED.fullmatch(name)


def check_id(env_id: str) -> None:
    """Raise what `gymnasium.make` would raise, but now.

    Args:
        env_id: a Gymnasium id; ``"module:Name-v0"`` imports the module that registers it.

    Raises:
        ValueError: if the id is unknown or deprecated.
        TypeError: if it is no string.
    """
    if not isinstance(env_id, str):
        raise TypeError(f"env_id must be a string, got {env_id!r}")
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        namespace, base, version = parse_env_id(name)
        if version is None and name not in gymnasium.registry:  # means the newest
            name = get_env_id(namespace, base, find_highest_version(namespace, base))
        gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"env {env_id!r} is unknown: {str(error).rstrip('.')} : expected {ACCEPTED}") from error


def import_path(path: str) -> Any:
    """Import ``pkg.mod.name`` (also a name inside a class).

    Args:
        path: dotted.

    Raises:
        ValueError: saying what is missing.

    Example:
        >>> import_path("math.floor")(2.5)
        2
    """
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(module_name)
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and end > 1 and (module_name + ".").startswith(missing + "."):
                continue  # no such module: perhaps a class, further up
            raise ValueError(f"{path!r} cannot be imported : {type(error).__name__}: {error}") from error
        for part in parts[end:]:
            if not hasattr(found, part):
                raise ValueError(f"{path!r} cannot be imported : {found!r} has no attribute {part!r}")
            found = getattr(found, part)
        return found
    raise ValueError(f"{path!r} is no import path : expected a module and a name, such as 'pkg.mod.make_env'")


def as_kwargs(given: object) -> dict[str, Any]:
    """The keyword arguments of a maker of envs, as a dict of their own.

    Raises:
        TypeError: if they are no mapping of names.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"make_kwargs must be a mapping of names to values, got {given!r}")
    return dict(given)


def as_wrapper(wrapper: str | Mapping[str, Any] | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What wraps an env.

    Args:
        wrapper: a callable that takes the env, the dotted import path of one, or a mapping with ``class_path`` and
            ``init_args`` (given after the env).

    Raises:
        ValueError: if a mapping holds anything else, or a path leads nowhere.
        TypeError: if it is none of the three.
    """
    if isinstance(wrapper, Mapping):
        if "class_path" not in wrapper or set(wrapper) - {"class_path", "init_args"}:
            raise ValueError(f"a wrapper must be a mapping of class_path and init_args, got {dict(wrapper)}")
        return functools.partial(_apply, import_path(wrapper["class_path"]), dict(wrapper.get("init_args") or {}))
    found = import_path(wrapper) if isinstance(wrapper, str) else wrapper
    if not callable(found):
        raise TypeError(f"a wrapper must be a callable, a dotted import path or a mapping, got {wrapper!r}")
    return found


def _apply(wrap: Callable[..., Any], init_args: Mapping[str, Any], env: Any) -> Any:
    return wrap(env, **init_args)
