"""Dotted paths such as ``env.envs[0].unwrapped.state['x']``, read part by part: nothing is ever evaluated."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FIRST = re.compile(r"(?P<name>[^\W\d]\w*)")
_PART = re.compile(
    r"""\.(?P<name>[^\W\d]\w*)
      | \[(?P<index>-?[0-9]{1,18})\]
      | \[(?P<quote>['"])(?P<key>(?:(?!(?P=quote))[^\\])*)(?P=quote)\]""",
    re.VERBOSE,
)
_GRAMMAR = "names with a dot between them, [0], [-1] and ['key'], such as env.envs[0].state['x']"
_SHOWN = 10


def resolve(root: Mapping[str, Any], path: str) -> Any:
    """Follow a path.

    Args:
        root: what the first part of the path may name.
        path: names with dots between them, and indices and quoted keys in brackets.

    Raises:
        TypeError: if the path is no text.
        ValueError: if it is malformed, or names an attribute like ``__class__``.
        KeyError: if the first part or a key is not there.
        AttributeError: if an attribute is not there.
        IndexError: if an index is not there. All three name how far the path got, and what is there.

    Example:
        >>> resolve({"env": {"gears": [1, 2, 5]}}, "env['gears'][-1]")
        5
    """
    first, *parts = _parse(path)
    name = path[: first.end()]
    if name not in root:
        raise KeyError(f"{path!r} leads nowhere : expected it to begin with one of {nearest(name, root)}, got {name!r}")
    here = root[name]
    for part in parts:
        reached = path[: part.start()]
        if part["name"] is not None:
            here = _attribute(here, part["name"], reached)
        else:
            here = _item(here, int(part["index"]) if part["key"] is None else part["key"], reached)
    return here


def call(root: Mapping[str, Any], path: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call what a path leads to, or return it if it cannot be called.

    Args:
        root: see `resolve`.
        path: see `resolve`.
        args: positional arguments of the call.
        kwargs: its keyword arguments.

    Raises:
        TypeError: if there are arguments, but nothing to call.

    Example:
        >>> call({"env": {"gears": [1, 2, 5]}}, "env['gears'].index", (5,))
        2
    """
    found = resolve(root, path)
    if callable(found):
        return found(*args, **(kwargs or {}))
    if args or kwargs:
        raise TypeError(
            f"{path!r} takes no arguments : expected something that can be called, got a {type(found).__name__}"
        )
    return found


def _parse(path: str) -> list[re.Match[str]]:
    """The parts of a path; the first one is a name."""
    if not isinstance(path, str):
        raise TypeError(f"a path is no text : expected {_GRAMMAR}, got {path!r}")
    parts: list[re.Match[str]] = []
    end = 0
    while end < len(path) or not parts:
        part = (_PART if parts else _FIRST).match(path, end)
        if part is None:
            raise ValueError(f"path {path!r} is malformed at position {end} : expected {_GRAMMAR}")
        name = part["name"] or ""
        if name.startswith("__") and name.endswith("__"):
            raise ValueError(f"path {path!r} is refused : expected no name with two underscores around, got {name!r}")
        parts.append(part)
        end = part.end()
    return parts


def _attribute(here: Any, name: str, reached: str) -> Any:
    try:
        return getattr(here, name)
    except AttributeError as error:
        if hasattr(type(here), name):  # a property that failed: its own words say more
            raise
        raise AttributeError(
            f"{reached!r} has no attribute {name!r} : expected one of its own, such as {nearest(name, dir(here))}; "
            f"it is a {type(here).__name__}"
        ) from error


def _item(here: Any, key: int | str, reached: str) -> Any:
    try:
        return here[key]
    except (KeyError, IndexError, TypeError) as error:
        kind = KeyError if isinstance(key, str) or isinstance(error, KeyError) else IndexError
        if isinstance(here, Mapping):
            there = f"one of {nearest(str(key), here)}"
        elif isinstance(here, Sequence):
            there = f"an index below {len(here)}"
        else:
            there = f"what it takes ({error})"
        raise kind(f"{reached!r} has no item {key!r} : expected {there}; it is a {type(here).__name__}") from error


def first_name(path: str) -> str:
    """The name that a path begins with.

    Raises:
        ValueError: if the path is malformed.

    Example:
        >>> first_name("spec.kwargs['size']")
        'spec'
    """
    return _parse(path)[0]["name"]


def nearest(name: str, names: Iterable[object]) -> str:
    """Those names that are public, the most similar ones first, as text."""
    public = [str(one) for one in names if not str(one).startswith("_")]
    return ", ".join(difflib.get_close_matches(name, public, n=_SHOWN, cutoff=0.0)) or "none"
