"""Values of an env's info, as further leaves beside the observation they came with.

Gymnasium takes the dtype of such a value from whichever copy reports it first, so that 2 and then 2.7 become 2. Here
the dtype is declared, and what a copy does not report is filled.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from lit_collect.envs.base import brief
from lit_collect.envs.spaces import LeafSpec, TreeSpec
from lit_collect.envs.texts import CODE, encode_text
from lit_collect.errors import FrameContractError
from lit_collect.frames import ACTION_MASK, REPORTED, RESERVED_OBSERVED, Key, is_private

_DECLARATION = re.compile(r"(?P<name>[^:\[\]]+)(:(?P<dtype>\w+)(\[(?P<shape>\d+(,\s*\d+)*)\])?)?")
_MISSING = object()


class InfoReader:
    """Takes the declared values, and an action mask if there is one, out of infos.

    Args:
        declared: ``"name"`` (a float32 number), ``"name:dtype"``, ``"name:dtype[3]"`` or ``"name:str[32]"``; dots in
            a name lead into nested mappings. Texts of the observation (``"name:str"``) are left to `TreeSpec`.
        observation_spec: of one env copy, whose keys are taken.
        action_spec: of one env copy, which an action mask must fit.

    Raises:
        ValueError: if a declaration cannot be read, or its name is taken.

    Example:
        >>> box, choice = spaces.Box(0, 1, (2,)), spaces.Discrete(3)
        >>> reader = InfoReader(["speed"], observation_spec=TreeSpec.of(box, "observation"),
        ...                     action_spec=TreeSpec.of(choice, "action"))
        >>> [leaf.key for leaf in reader.leaves]
        [('speed',), ('reported', 'speed')]
        >>> [value.tolist() for value in reader.read({"speed": 3})]
        [3.0, True]
    """

    def __init__(self, declared: Sequence[str], *, observation_spec: TreeSpec, action_spec: TreeSpec) -> None:
        self._observed = {leaf.key for leaf in observation_spec.leaves}
        self._action = action_spec
        own = dict.fromkeys(text for text in declared if not _is_observed(text))
        self._values = [self._declare(text) for text in own]
        _check_distinct([leaf.key for leaf in self._values])
        self._mask: LeafSpec | None = None
        self._complete = ACTION_MASK in self._observed or any(leaf.key == ACTION_MASK for leaf in self._values)
        self.leaves: tuple[LeafSpec, ...] = tuple(leaf for value in self._values for leaf in (value, _flag_of(value)))
        """The values, each followed by whether it was reported, and last the action mask (see `discover`)."""

    def discover(self, info: Any) -> None:
        """Look for an action mask in the info of the very first reset; later ones are not looked at.

        Args:
            info: of one copy.

        Raises:
            FrameContractError: if the mask does not fit the action space.
        """
        if self._complete:
            return
        self._complete = True
        given = info.get(ACTION_MASK[0]) if isinstance(info, Mapping) else None
        if given is None:
            return
        mask = _as_mask(given)
        expected = _mask_shape(self._action)
        if expected is not None and mask.shape != expected:
            raise FrameContractError(
                f"info['action_mask'] does not fit the action space : expected shape {expected} for "
                f"{self._action.space}, got {mask.shape}"
            )
        self._mask = _leaf(ACTION_MASK, mask.shape, np.dtype(bool))
        self.leaves = (*self.leaves, self._mask)

    def read(self, info: Any) -> list[Any]:
        """The values of one copy.

        Args:
            info: as the env returned it.

        Returns:
            One for each of `leaves`, of its shape and dtype.

        Raises:
            FrameContractError: if a value is not what was declared.
        """
        if not isinstance(info, Mapping):
            raise FrameContractError(f"info is wrong : expected a mapping, got {type(info).__name__}")
        values: list[Any] = []
        for leaf in self._values:
            found = _follow(info, leaf.path)
            reported = found is not _MISSING and found is not None
            values += [_admit(leaf, found) if reported else _fill(leaf), np.bool_(reported)]
        if self._mask is not None:
            found = info.get(ACTION_MASK[0])
            values.append(np.ones(self._mask.shape, bool) if found is None else self._admit_mask(found))
        return values

    def discover_all(self, infos: Mapping[str, Any], num_envs: int) -> None:
        """Look for an action mask in the infos of a vector env's very first reset: that of the first copy with one.

        Args:
            infos: of all copies.
            num_envs: how many they are.

        Raises:
            FrameContractError: if the mask does not fit the action space.
        """
        try:
            first = next(_rows(infos, ACTION_MASK, num_envs), None)
            self.discover({} if first is None else {ACTION_MASK[0]: first[1]})
        except FrameContractError as error:
            raise FrameContractError(f"vector env, reset: {error}") from error

    def read_all(self, infos: Mapping[str, Any], num_envs: int, *, first: int = 0) -> list[np.ndarray]:
        """The values of all copies of a vector env.

        Args:
            infos: as the vector env returned them: arrays [N, ...] by name, and masks by ``_name``.
            num_envs: N.
            first: index of the first copy among those of its rank, for messages.

        Returns:
            [N, ...] for each of `leaves`.

        Raises:
            FrameContractError: if a value is not what was declared, naming the env copy.
        """
        columns: list[np.ndarray] = []
        row = 0
        try:
            for leaf in self._values:
                column = np.full((num_envs, *leaf.shape), _fill(leaf), leaf.dtype)
                rows = dict(_rows(infos, leaf.path, num_envs))
                for row, value in rows.items():
                    column[row] = _admit(leaf, value)
                reported = np.zeros(num_envs, bool)
                reported[list(rows)] = True
                columns += [column, reported]
            if self._mask is not None:
                masks = np.ones((num_envs, *self._mask.shape), bool)
                for row, value in _rows(infos, ACTION_MASK, num_envs):
                    masks[row] = self._admit_mask(value)
                columns.append(masks)
        except FrameContractError as error:
            raise FrameContractError(f"env copy {first + row}: {error}") from error
        return columns

    def _declare(self, text: str) -> LeafSpec:
        found = _DECLARATION.fullmatch(text) if isinstance(text, str) else None
        try:
            dtype = _dtype(found["dtype"] or "float32") if found else None
        except TypeError:
            dtype = None
        shape = tuple(int(size) for size in found["shape"].split(",")) if found and found["shape"] else ()
        if found is None or dtype is None or dtype.kind not in "biuf" or 0 in shape:
            raise ValueError(
                f"rollout.info_keys cannot be read : expected 'name', 'name:dtype' or 'name:dtype[3]' such as "
                f"'success:bool', got {text!r}"
            )
        key = tuple(found["name"].strip().split("."))
        if not all(key) or is_private(key):
            raise ValueError(
                f"rollout.info_keys: the name {'.'.join(key)!r} cannot be stored : expected parts that are not empty "
                f"and begin with no underscore; a wrapper of the env can rename it"
            )
        roots = {root for root, *_ in self._observed} | RESERVED_OBSERVED | {REPORTED}
        if key[0] in roots and key != ACTION_MASK:
            raise ValueError(f"rollout.info_keys: the name {key[0]!r} is taken by the batch or the observation")
        if found["dtype"] == "str":
            return replace(_leaf(key, shape[:1], CODE), space=spaces.Text(shape[0]))
        return _leaf(key, shape, dtype)

    def _admit_mask(self, value: Any) -> np.ndarray:
        assert self._mask is not None
        mask = _as_mask(value)
        if mask.shape != self._mask.shape:
            raise FrameContractError(
                f"info['action_mask'] changed its shape : expected {self._mask.shape}, got {mask.shape}"
            )
        return mask


def observed_texts(declared: Sequence[str]) -> tuple[str, ...]:
    """The names among the declarations that are of texts in the observation: ``"name:str"``."""
    return tuple(text.partition(":")[0].strip() for text in declared if _is_observed(text))


def _is_observed(text: Any) -> bool:
    return isinstance(text, str) and text.endswith(":str")


def _dtype(name: str) -> np.dtype[Any]:
    return CODE if name == "str" else np.dtype(name)


def _leaf(key: tuple[str, ...], shape: tuple[int, ...], dtype: np.dtype[Any]) -> LeafSpec:
    kind: Any = dtype.type
    if dtype.kind == "f":
        space = spaces.Box(-np.inf, np.inf, shape, kind)
    else:
        limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        space = spaces.Box(*limits, shape, kind)
    return LeafSpec(path=key, key=key, space=space, shape=shape, dtype=dtype, stored=dtype)


def _flag_of(leaf: LeafSpec) -> LeafSpec:
    return _leaf((REPORTED, *leaf.key), (), np.dtype(bool))


def _fill(leaf: LeafSpec) -> Any:
    """What stands for a value that was not reported."""
    return np.full(leaf.shape, np.nan if leaf.dtype.kind == "f" else 0, leaf.dtype)


def _follow(info: Any, path: tuple[str | int, ...]) -> Any:
    """What a path leads to; a name that is there as it was written, with its dots, comes first."""
    whole = ".".join(map(str, path))
    for part in (whole,) if whole in info else path:
        if not isinstance(info, Mapping):
            return _MISSING
        info = info.get(part, _MISSING)
    return info


def _rows(infos: Any, path: tuple[str | int, ...], num_envs: int) -> Iterator[tuple[int, Any]]:
    """The copies that reported a value, and what it is."""
    present = np.ones(num_envs, bool)
    whole = ".".join(map(str, path))
    for part in (whole,) if whole in infos else path:
        if not isinstance(infos, Mapping) or part not in infos:
            return
        present = present & np.asarray(infos.get(f"_{part}", True), bool)
        infos = infos[part]
    for row in np.flatnonzero(present).tolist():
        value = _of_row(infos, row, num_envs, whole)
        if value is not None:
            yield row, value


def _of_row(values: Any, row: int, num_envs: int, name: str) -> Any:
    """One copy's part of what a vector env reported."""
    try:
        count = None if isinstance(values, (Mapping, str)) else len(values)
    except TypeError:  # a single value
        count = None
    if count != num_envs:
        raise FrameContractError(
            f"info {name!r} of a vector env is wrong : expected one value for each of {num_envs} env copies, "
            f"got {brief(values)}"
        )
    return values[row]


def _admit(leaf: LeafSpec, value: Any) -> np.ndarray:
    """A value as it was declared, or an error."""
    name = ".".join(leaf.key)
    if isinstance(leaf.space, spaces.Text):
        return encode_text(value, leaf.shape[0], f"info {name!r}")
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        array = np.asarray(value, object)
    if array.dtype.kind not in "biuf":
        raise FrameContractError(f"info {name!r} is no number : expected {leaf.dtype}, got {type(value).__name__}")
    if array.shape != leaf.shape:
        sizes = ",".join(map(str, array.shape))
        raise FrameContractError(
            f"info {name!r} has a wrong shape : expected {leaf.shape}, got {array.shape}; "
            f"declare rollout.info_keys=('{name}:{leaf.dtype}{f'[{sizes}]' if sizes else ''}',)"
        )
    narrow = array.astype(leaf.dtype)
    if leaf.dtype.kind != "f" and not np.array_equal(narrow, array):
        raise FrameContractError(
            f"info {name!r} does not fit : expected {leaf.dtype}, got {value!r}; "
            f"declare another dtype, such as '{name}:float32'"
        )
    return narrow


def _as_mask(value: Any) -> np.ndarray:
    """A mask as bools; Gymnasium's tuple of one mask for each choice of a MultiDiscrete space becomes one array."""
    try:
        given = np.concatenate([np.ravel(part) for part in value]) if isinstance(value, tuple) else np.asarray(value)
    except ValueError:  # ragged
        given = np.asarray(None)
    mask = given.astype(bool)
    if given.dtype.kind != "b" and (given.dtype.kind not in "iuf" or (mask != given).any()):
        raise FrameContractError(
            f"info['action_mask'] is no mask : expected 1 for what is allowed and 0 for the rest, got {value!r}"
        )
    return mask


def _check_distinct(keys: Sequence[Key]) -> None:
    """Refuse names that are declared twice, or that lead into each other."""
    for position, key in enumerate(keys):
        for other in keys[:position]:
            shorter = min(len(key), len(other))
            if key[:shorter] == other[:shorter]:
                raise ValueError(
                    f"rollout.info_keys: {'.'.join(other)!r} and {'.'.join(key)!r} cannot both be stored : expected "
                    f"each name once, and none that leads into another"
                )


def _mask_shape(action_spec: TreeSpec) -> tuple[int, ...] | None:
    """Shape of a mask where the action space says it."""
    space = action_spec.space
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return (int(space.nvec.sum()),)
    return None
