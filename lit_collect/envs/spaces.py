"""Gymnasium spaces as flat lists of leaves: what is stored, under which key, and what an env may return or receive."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from lit_collect.envs.texts import CODE, encode_text
from lit_collect.errors import FrameContractError
from lit_collect.frames import RESERVED_OBSERVED, Key

Path = tuple[str | int, ...]
"""Where a leaf is in an env's own (nested) value: dict keys and tuple positions."""

_LEAF_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """One array of an observation or action."""

    path: Path
    """Where it is in the env's own value; empty if that is the array itself."""
    key: Key
    """Where it is in a batch."""
    space: spaces.Space[Any]
    """Its own space: Box, Discrete, MultiDiscrete or MultiBinary, or a Text."""
    shape: tuple[int, ...]
    """Of one env copy."""
    dtype: np.dtype[Any]
    """The space's dtype: what an env returns and receives."""
    stored: np.dtype[Any]
    """What a batch holds."""

    @property
    def is_text(self) -> bool:
        """Whether it is a text, stored as code points."""
        return isinstance(self.space, spaces.Text)

    @property
    def torch_dtype(self) -> torch.dtype:
        """What a batch holds, for torch."""
        return torch.from_numpy(np.empty(0, self.stored)).dtype

    def admit(self, value: object) -> np.ndarray:
        """Check one value that an env returned, the slow and thorough way.

        Args:
            value: what the env gave for this leaf.

        Returns:
            The value as an array of this leaf's shape, safe to assign to storage.

        Raises:
            FrameContractError: if it is missing, or its shape or dtype differ from the space's.
        """
        name = ".".join(self.key)
        if self.is_text:
            return encode_text(value, self.shape[0], name)
        if value is None:
            raise FrameContractError(f"{name} is None : expected {self._expected()}")
        try:
            array = np.asarray(value)
        except ValueError as error:  # ragged lists
            raise FrameContractError(f"{name} is no array ({error}) : expected {self._expected()}") from error
        if array.shape != self.shape:
            raise FrameContractError(f"{name} has a wrong shape : expected {self._expected()}, got {array.shape}")
        # Numbers and lists have no dtype of their own; arrays must lose nothing on the way into the space's dtype.
        has_dtype = isinstance(value, np.ndarray) and array.ndim > 0
        if not has_dtype and array.dtype.kind in "iu" and self.dtype.kind in "iu":
            narrow = array.astype(self.dtype)
            array = narrow if np.array_equal(narrow, array) else array
        if not np.can_cast(array.dtype, self.dtype, "safe" if has_dtype else "same_kind"):
            raise FrameContractError(
                f"{name} has a wrong dtype : expected {self._expected()}, got {array.dtype}; "
                f"return that dtype or declare it in the space"
            )
        return array

    def _expected(self) -> str:
        return f"{self.dtype} with shape {self.shape}"


@dataclass(frozen=True)
class TreeSpec:
    """A space, flat: the leaves in the order of the space, and the way between them and the env's own value."""

    space: spaces.Space[Any]
    """The space of one env copy."""
    leaves: tuple[LeafSpec, ...]
    """Its arrays."""

    @classmethod
    def of(
        cls, space: spaces.Space[Any], root: str, *, keep_float64: bool = False, text_keys: Sequence[str] = ()
    ) -> "TreeSpec":
        """Flatten a space.

        Args:
            space: of one env copy; Dict and Tuple may be nested.
            root: the key in a batch. An observation of a Dict space gives its own keys instead.
            keep_float64: store float64 as it is instead of as float32.
            text_keys: texts that are stored, as code points; others are left out with a warning.

        Raises:
            TypeError: for spaces whose values are no arrays of one shape (Sequence, Graph, OneOf and own kinds).
            ValueError: if a key of a Dict is taken by the batch contract, or no string, or there is no such text.

        Example:
            >>> space = spaces.Dict({"eye": spaces.Box(0, 1, (2,)), "gear": spaces.Discrete(3)})
            >>> spec = TreeSpec.of(space, "observation")
            >>> [(leaf.key, leaf.shape, str(leaf.stored)) for leaf in spec.leaves]
            [(('eye',), (2,), 'float32'), (('gear',), (), 'int64')]
        """
        own_keys = root == "observation" and isinstance(space, spaces.Dict)
        prefix: Key = () if own_keys else (root,)
        leaves, unread = [], []
        for path, leaf in _walk(space, ()):
            key = prefix + tuple(str(part) for part in path)
            _check_key(key, RESERVED_OBSERVED if own_keys else frozenset())
            if isinstance(leaf, spaces.Text):
                if root == "action":
                    raise TypeError(_unsupported(leaf))
                if ".".join(key) not in text_keys:
                    unread.append(".".join(key))
                    continue
            leaves.append(_leaf_spec(path, key, leaf, keep_float64))
        read = {".".join(leaf.key) for leaf in leaves if leaf.is_text}
        if missing := sorted(set(text_keys) - read):
            raise ValueError(f"rollout.info_keys names no text of the observation : expected {unread}, got {missing}")
        if unread:
            hint = f"rollout.info_keys=('{unread[0]}:str',)"
            warnings.warn(f"the texts {unread} are not stored; {hint} would keep the first", stacklevel=2)
        if not leaves:
            raise TypeError(f"{root} space {space} holds nothing that can be stored")
        return cls(space, tuple(leaves))

    @property
    def is_plain(self) -> bool:
        """Whether the env's own value is one array, not a dict or tuple of them."""
        return self.leaves[0].path == ()

    def empty(self, shape: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Uninitialised arrays ``[*shape, ...]``, one for each leaf, in the stored dtype."""
        return empty_leaves(self.leaves, shape)

    def flatten(self, value: Any) -> tuple[Any, ...]:
        """The leaves of an env's own value, unchecked; a missing one is an error of the env.

        Raises:
            FrameContractError: naming the leaf that is not there.
        """
        if self.is_plain:
            return (value,)
        return tuple(_follow(value, leaf) for leaf in self.leaves)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The env's own value (array, dict, tuple, nested) of leaves in order."""
        return _rebuild(self.space, iter(leaves))


def empty_leaves(leaves: Sequence[LeafSpec], shape: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Uninitialised arrays ``[*shape, ...]``, one for each leaf, in the stored dtype."""
    return tuple(np.empty((*shape, *leaf.shape), leaf.stored) for leaf in leaves)


class ActionEncoder:
    """Turns the policy's actions into what the envs receive, and checks them before any env moves.

    Discrete indices are checked and offset by the space's ``start``, Box actions checked for NaN, cast to the
    space's dtype and clipped. Arrays that reach an env are always its own, because many keep the last action or
    change it in place; only the indices of a Discrete space may be a view of storage, since they become numbers.

    Args:
        spec: of one env copy's action.
        clip: whether Box actions are clipped to their bounds.
        first: index of the first env copy among those of its rank, for messages.
    """

    def __init__(self, spec: TreeSpec, *, clip: bool = True, first: int = 0) -> None:
        self._encoders = tuple(_leaf_encoder(leaf, clip, first) for leaf in spec.leaves)

    def __call__(self, leaves: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Encode one step.

        Args:
            leaves: [N, ...] each, what the policy gave.

        Raises:
            FrameContractError: naming the env copy whose action is out of range or not finite.
        """
        if len(leaves) == 1:  # nearly always
            return (self._encoders[0](leaves[0]),)
        return tuple([encode(leaf) for encode, leaf in zip(self._encoders, leaves, strict=True)])


def describe_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as plain data (numbers, strings, lists), for models, configs and checkpoints.

    Example:
        >>> describe_space(spaces.Discrete(2))
        {'kind': 'discrete', 'n': 2, 'start': 0}

    Raises:
        TypeError: for a space that cannot be stored.
    """
    if isinstance(space, spaces.Box):
        return {
            "kind": "box",
            "shape": list(space.shape),
            "dtype": str(space.dtype),
            "low": space.low.tolist(),
            "high": space.high.tolist(),
        }
    if isinstance(space, spaces.Discrete):
        return {"kind": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "multi_discrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "multi_binary", "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        inner = {k: describe_space(v) for k, v in space.spaces.items() if not isinstance(v, spaces.Text)}
        return {"kind": "dict", "spaces": inner}
    if isinstance(space, spaces.Tuple):
        kept = [inner for inner in space.spaces if not isinstance(inner, spaces.Text)]
        return {"kind": "tuple", "spaces": [describe_space(inner) for inner in kept]}
    raise TypeError(_unsupported(space))


def sample_leaf(leaf: LeafSpec, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` values of a leaf uniformly (as Gymnasium does where a bound is infinite).

    Args:
        leaf: of an action.
        count: N.
        rng: where the numbers come from.

    Returns:
        [N, ...]: indices from 0 for discrete leaves, values for Box.
    """
    space, shape = leaf.space, (count, *leaf.shape)
    if isinstance(space, spaces.Discrete):
        return rng.integers(0, space.n, shape)
    if isinstance(space, spaces.MultiDiscrete):
        return rng.integers(0, space.nvec, shape).astype(leaf.stored)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, shape).astype(leaf.stored)
    assert isinstance(space, spaces.Box)
    if leaf.dtype.kind != "f":
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        return rng.integers(low, high, shape, endpoint=True).astype(leaf.stored)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    below, above = np.isfinite(low), np.isfinite(high)
    both = below & above
    bounded = rng.uniform(np.where(both, low, 0.0), np.where(both, high, 1.0), shape)
    tail = rng.exponential(size=shape)
    value = np.where(
        both,
        bounded,
        np.where(below, low + tail, np.where(above, high - tail, rng.standard_normal(shape))),
    )
    return value.astype(leaf.stored)


def _walk(space: spaces.Space[Any], path: Path) -> Iterator[tuple[Path, spaces.Space[Any]]]:
    """Leaves of a space with their paths, in the space's order."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            if not isinstance(key, str):
                raise ValueError(f"keys of a Dict space must be strings, got {key!r}")
            yield from _walk(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _walk(inner, (*path, index))
    elif isinstance(space, (*_LEAF_SPACES, spaces.Text)):
        yield path, space
    else:
        raise TypeError(_unsupported(space))


def _unsupported(space: object) -> str:
    return (
        f"{type(space).__name__} spaces cannot be stored as arrays : expected Box, Discrete, MultiDiscrete, "
        f"MultiBinary, Dict or Tuple, got {space}; wrap the env with a transform, for instance "
        f"GymEnvFactory(..., wrappers=[...]) with gymnasium.wrappers.TransformObservation"
    )


def _check_key(key: Key, taken: frozenset[str]) -> None:
    if key[0] in taken:
        raise ValueError(f"the env's key {key[0]!r} is taken by the batch itself; rename it with a wrapper")


def _leaf_spec(path: Path, key: Key, space: spaces.Space[Any], keep_float64: bool) -> LeafSpec:
    if isinstance(space, spaces.Text):
        return LeafSpec(path=path, key=key, space=space, shape=(space.max_length,), dtype=CODE, stored=CODE)
    dtype = np.dtype(space.dtype)
    stored = np.dtype(np.float32) if dtype == np.float64 and not keep_float64 else dtype
    assert space.shape is not None  # holds for all leaf spaces
    return LeafSpec(path=path, key=key, space=space, shape=tuple(space.shape), dtype=dtype, stored=stored)


def _follow(value: Any, leaf: LeafSpec) -> Any:
    for part in leaf.path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError) as error:
            raise FrameContractError(f"the env's observation lacks {'.'.join(leaf.key)}") from error
    return value


def _rebuild(space: spaces.Space[Any], leaves: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _rebuild(inner, leaves) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_rebuild(inner, leaves) for inner in space.spaces)
    return next(leaves)


def _leaf_encoder(leaf: LeafSpec, clip: bool, first: int) -> Callable[[np.ndarray], np.ndarray]:
    space = leaf.space
    if isinstance(space, spaces.Discrete):
        return _discrete_encoder(leaf, int(space.n), int(space.start), first)
    if isinstance(space, spaces.MultiDiscrete):
        return _choices_encoder(leaf, space.nvec, space.start, first)
    if isinstance(space, spaces.MultiBinary):
        return _choices_encoder(leaf, np.full(leaf.shape, 2), np.zeros(leaf.shape, leaf.dtype), first)
    assert isinstance(space, spaces.Box)
    return _box_encoder(leaf, space, clip, first)


def _discrete_encoder(leaf: LeafSpec, n: int, start: int, first: int) -> Callable[[np.ndarray], np.ndarray]:
    name, dtype = ".".join(leaf.key), leaf.dtype
    choices = frozenset(range(n))
    hint = f"; choices are counted from 0, and the env is given {start} more" if start else ""

    def encode(action: np.ndarray) -> np.ndarray:
        indices = action.tolist()
        try:
            in_range = choices.issuperset(indices)
        except TypeError:  # lists: there is a dimension too many
            _check_shape(leaf, action)
            raise
        if not in_range:
            index = next(i for i, choice in enumerate(indices) if choice not in choices)
            raise FrameContractError(
                f"{name} of env copy {first + index} is out of range : expected 0 to {n - 1}, "
                f"got {indices[index]}{hint}"
            )
        return action if not start and action.dtype is dtype else (action + start).astype(dtype)

    return encode


def _choices_encoder(
    leaf: LeafSpec, nvec: np.ndarray, start: np.ndarray, first: int
) -> Callable[[np.ndarray], np.ndarray]:
    name = ".".join(leaf.key)
    hint = f"; choices are counted from 0, and the env is given {start.tolist()} more" if start.any() else ""

    def encode(action: np.ndarray) -> np.ndarray:
        _check_shape(leaf, action)
        good = (action >= 0) & (action < nvec)
        if action.dtype.kind == "f":  # a Bernoulli distribution samples 0.0 and 1.0
            good &= action == np.floor(action)
        if not good.all():
            index = int(np.argwhere(~good)[0][0])
            raise FrameContractError(
                f"{name} of env copy {first + index} is out of range : expected 0 to {(nvec - 1).tolist()}, "
                f"got {action[index].tolist()}{hint}"
            )
        return (action + start).astype(leaf.dtype)

    return encode


def _box_encoder(leaf: LeafSpec, space: spaces.Box, clip: bool, first: int) -> Callable[[np.ndarray], np.ndarray]:
    name = ".".join(leaf.key)
    bounds = (space.low, space.high) if clip else None
    range_of_ints = np.iinfo(leaf.dtype) if leaf.dtype.kind in "iu" else None

    def encode(action: np.ndarray) -> np.ndarray:
        _check_shape(leaf, action)
        if not np.isfinite(action).all():
            index = int(np.argwhere(~np.isfinite(action))[0][0])
            raise FrameContractError(f"{name} of env copy {first + index} is not finite, got {action[index].tolist()}")
        if bounds is None:
            if range_of_ints is not None and not ((action >= range_of_ints.min) & (action <= range_of_ints.max)).all():
                raise FrameContractError(f"{name} does not fit {leaf.dtype} : got {action.tolist()}")
            return action.astype(leaf.dtype)
        return np.minimum(np.maximum(action, bounds[0]), bounds[1]).astype(leaf.dtype, copy=False)

    return encode


def _check_shape(leaf: LeafSpec, action: np.ndarray) -> None:
    if action.shape[1:] != leaf.shape:
        raise FrameContractError(
            f"{'.'.join(leaf.key)} has a wrong shape : expected {leaf.shape} for each env copy, got {action.shape[1:]}"
        )


def nest(keys: Sequence[Path], values: Sequence[Any]) -> Mapping[str, Any]:
    """Values by path as nested dicts (tuple positions become strings)."""
    tree: dict[str, Any] = {}
    for path, value in zip(keys, values, strict=True):
        here = tree
        for part in path[:-1]:
            here = here.setdefault(str(part), {})
        here[str(path[-1])] = value
    return tree
