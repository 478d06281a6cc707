"""Minari data sets: written from collected episodes, and read as rows of the batch contract.

A data set lies in a folder named like its id, ``cartpole-v0``, with Minari's files below ``data``. Plain Minari loads
it with ``minari.MinariDataset("runs/cartpole-v0/data")``, or with ``minari.load_dataset("cartpole-v0")`` while the
environment variable ``MINARI_DATASETS_PATH`` is the folder around it. Nothing is ever downloaded.

Minari keeps what the env saw: observations in the space's dtype, actions as the env was given them (clipped, choices
counted from the space's ``start``). Rows have the dtypes of a batch, and choices counted from 0.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDict, TensorDictBase

from lit_collect.envs.infos import InfoReader, observed_texts
from lit_collect.envs.spaces import ActionEncoder, LeafSpec, TreeSpec, describe_space
from lit_collect.envs.texts import decode_texts, encode_text
from lit_collect.errors import FrameContractError, LitCollectError
from lit_collect.frames import (
    ACTION_MASK,
    DONE,
    IS_INIT,
    NEXT_DONE,
    NEXT_REWARD,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    POLICY_VERSION,
    REPORTED,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    columns_of,
    put_at,
)

_ID = re.compile(r"([-_\w]+/)*[-_\w]+-v\d+")
_STATE = frozenset({"done", "terminated", "truncated", "reward"})
_UNKNOWN = -1  # version of the weights that acted


def _minari() -> ModuleType:
    try:
        import h5py  # type: ignore[import-untyped]  # noqa: F401  # Minari looks for it only when it writes
        import minari  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Minari data sets need the package {error.name} : expected it to be installed; "
            f"run `pip install 'lit_collect[minari]'`"
        ) from error
    return minari


def is_minari_id(name: str) -> bool:
    """Whether a name could be that of a Minari data set: it ends with a version.

    Example:
        >>> is_minari_id("cartpole-v0"), is_minari_id("cartpole")
        (True, False)
    """
    return bool(_ID.fullmatch(name))


def find_minari(path: str | Path) -> Path | None:
    """Where the files of a data set lie, None if there are none.

    Args:
        path: its folder (or the one named ``data`` within), or its id among the data sets that Minari knows.
    """
    known = _root() / path
    for folder in (Path(path), Path(path, "data"), known / "data"):
        if (folder / "metadata.json").is_file():
            return folder
    return None


def _root() -> Path:
    return Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")


def dataset_id(path: str | Path) -> str:
    """The id of the data set in a folder: its path below Minari's own folder, elsewhere its name.

    Raises:
        ValueError: if Minari does not take that for an id.

    Example:
        >>> dataset_id("runs/cartpole-v0")
        'cartpole-v0'
    """
    whole, root = Path(path).absolute(), _root().absolute()
    name = whole.relative_to(root).as_posix() if whole.is_relative_to(root) else whole.name
    if not is_minari_id(name):
        raise ValueError(
            f"{name!r} cannot be the name of a Minari data set : expected letters, digits, - and _ with a version at "
            f"the end, such as 'cartpole-v0'"
        )
    return name


class MinariWriter:
    """Writes whole episodes as a Minari data set.

    Each `write` is there once it has returned. Texts of an observation that are not stored, and what the policy gave
    besides actions, are left out; values of infos become Minari's infos.

    Args:
        path: the folder of the data set, whose name is its id; not there yet, or empty.
        observation_space: of one env copy.
        action_space: of one env copy.
        env_spec: of the env, so that ``recover_environment`` makes one.
        clip_actions: whether Box actions were clipped on the way to the env.
        info_keys: `RolloutConfig.info_keys` of the rows.
        notes: further entries of Minari's metadata, for instance ``description``.

    Raises:
        ModuleNotFoundError: if Minari is not installed.
        FileExistsError: if there is something in the folder.
        ValueError: if its name is no id, or a key of a space cannot be written.
        TypeError: if a space cannot be stored.
    """

    def __init__(
        self,
        path: str | Path,
        observation_space: spaces.Space[Any],
        *,
        action_space: spaces.Space[Any],
        env_spec: EnvSpec | None = None,
        clip_actions: bool = True,
        info_keys: Sequence[str] = (),
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        version = _minari().__version__
        from minari.dataset.minari_storage import MinariStorage  # type: ignore[import-untyped]

        self.path, name = Path(path), dataset_id(path)
        self.num_episodes = 0
        """Episodes written so far."""
        if self.path.is_dir() and any(self.path.iterdir()):
            raise FileExistsError(f"{path} is not empty : expected an empty folder, or none; choose another name")
        self._observed = _stored_spec(observation_space, info_keys)
        self._action = TreeSpec.of(action_space, "action")
        for leaf in (*self._observed.leaves, *self._action.leaves):
            _check_name(leaf.key)
        self._encode = ActionEncoder(self._action, clip=clip_actions)
        folder = self.path.absolute() / "data"  # Minari joins what is relative twice
        folder.mkdir(parents=True, exist_ok=True)
        self._storage = MinariStorage.new(
            folder,
            observation_space=self._observed.space,
            action_space=action_space,
            env_spec=env_spec if _can_be_written(env_spec) else None,
            jpeg_encoding=False,  # which loses what it does not see
        )
        self._storage.update_metadata({"dataset_id": name, "minari_version": version, **(notes or {})})

    def write(self, episodes: Sequence[TensorDictBase]) -> None:
        """Append episodes.

        Args:
            episodes: [T] each, whole: an episode that has not ended is written as truncated.

        Raises:
            OSError: if the disk is full, or cannot be written to.
        """
        if not episodes:
            return
        try:
            self._storage.update_episodes([self._buffer(episode) for episode in episodes])
        except OSError as error:
            raise OSError(
                error.errno or 0,
                f"{len(episodes)} episodes could not be written to {self.path}: {error} : expected room for them on "
                f"the disk; of the {self.num_episodes} before them a copy may be damaged",
            ) from error
        self.num_episodes += len(episodes)

    def _buffer(self, episode: TensorDictBase) -> Any:
        """An episode as Minari takes it."""
        from minari.data_collector import EpisodeBuffer  # type: ignore[import-untyped]

        columns = {key: column.detach().cpu().numpy() for key, column in columns_of(episode).items()}
        observed = [_with_last(columns, leaf.key) for leaf in self._observed.leaves]
        acted = self._encode([columns[leaf.key] for leaf in self._action.leaves])
        terminated, truncated = (columns[key][:, 0].copy() for key in (NEXT_TERMINATED, NEXT_TRUNCATED))
        truncated[-1] |= not terminated[-1]
        return EpisodeBuffer(
            observations=self._observed.unflatten(
                [_as_env(leaf, values) for leaf, values in zip(self._observed.leaves, observed, strict=True)]
            ),
            actions=self._action.unflatten(acted),
            rewards=columns[NEXT_REWARD][:, 0].astype(np.float64),
            terminations=terminated,
            truncations=truncated,
            infos=self._infos(columns),
        )

    def _infos(self, columns: Mapping[Key, np.ndarray]) -> dict[str, Any]:
        """What is there of each observation besides itself: [T + 1]."""
        infos: dict[str, Any] = {}
        known = {leaf.key for leaf in self._observed.leaves}
        for key in columns:
            if key not in known and key[0] not in _STATE and ("next", *key) in columns:
                _check_name(key)
                put_at(infos, key, _with_last(columns, key))
        return infos


class MinariRows:
    """Reads a Minari data set as rows.

    The id of an episode's trajectory is its number in the data set; the version of the weights that acted is -1.

    Args:
        path: the folder of the data set, or its id among those that Minari knows.
        info_keys: which infos become keys of the rows, and which texts of the observation are read: see
            `RolloutConfig.info_keys`. An ``action_mask`` is always read.

    Raises:
        ModuleNotFoundError: if Minari is not installed.
        LitCollectError: if the files cannot be read.
        TypeError: if a space cannot be stored.
        ValueError: if `info_keys` cannot be read.
    """

    def __init__(self, path: str | Path, info_keys: Sequence[str] = ()) -> None:
        minari = _minari()
        folder = find_minari(path)
        if folder is None:
            raise FileNotFoundError(f"there is no Minari data set at {path}; Minari's own command can download one")
        self.path = folder
        """Where its files lie."""
        try:
            self._dataset = minari.MinariDataset(self.path)
        except (OSError, ValueError, KeyError, AssertionError, gymnasium.error.Error) as error:
            raise LitCollectError(
                f"the Minari data set at {path} cannot be read: {error} : expected what minari.load_dataset reads"
            ) from error
        self._observed = _stored_spec(self._dataset.observation_space, info_keys)
        self._action = TreeSpec.of(self._dataset.action_space, "action")
        self._infos = InfoReader(info_keys, observation_spec=self._observed, action_spec=self._action)
        self.num_rows = int(self._dataset.total_steps)
        """Rows of all episodes."""
        self.observation_spec = describe_space(self._observed.space)
        """The observation space as plain data."""
        self.action_spec = describe_space(self._action.space)
        """The action space as plain data."""

    def episodes(self) -> Iterator[TensorDictBase]:
        """All episodes, one after the other.

        Yields:
            [T] as `lit_collect.frames` describes it.

        Raises:
            LitCollectError: if the files cannot be read.
            FrameContractError: if an episode is not as long as it says, or an info is not what was declared.
        """
        episodes = iter(self._dataset.iterate_episodes())
        for number in range(len(self._dataset.episode_indices)):
            try:
                episode = next(episodes)
            except (OSError, KeyError, AssertionError) as error:
                raise LitCollectError(
                    f"episode {number} of {self.path} cannot be read: {error}; the data set may have been cut off "
                    f"while it was written"
                ) from error
            try:
                yield self._rows(episode, number)
            except FrameContractError as error:
                raise FrameContractError(f"episode {number} of {self.path}: {error}") from error

    def _rows(self, episode: Any, number: int) -> TensorDictBase:
        rewards = np.asarray(episode.rewards, np.float32).reshape(-1, 1)
        steps = len(rewards)
        tree: dict[str, Any] = {}
        observed = zip(self._observed.leaves, self._observed.flatten(episode.observations), strict=True)
        seen = {leaf.key: _as_stored(leaf, values, steps + 1) for leaf, values in observed}
        seen |= self._info_columns(episode.infos or {}, steps + 1)
        for key, values in seen.items():
            put_at(tree, key, values[:-1])
            put_at(tree, ("next", *key), values[1:])
        for leaf, values in zip(self._action.leaves, self._action.flatten(episode.actions), strict=True):
            put_at(tree, leaf.key, _from_start(leaf, _as_stored(leaf, values, steps)))
        terminated = np.array(episode.terminations, bool).reshape(-1, 1)
        truncated = np.array(episode.truncations, bool).reshape(-1, 1)
        truncated[-1] |= ~terminated[-1]
        first = np.zeros((steps, 1), bool)
        first[:1] = True
        columns = {
            **{key: np.zeros((steps, 1), bool) for key in (DONE, TERMINATED, TRUNCATED)},
            IS_INIT: first,
            NEXT_REWARD: rewards,
            NEXT_TERMINATED: terminated,
            NEXT_TRUNCATED: truncated,
            NEXT_DONE: terminated | truncated,
            TRAJ_IDS: np.full(steps, number),
            POLICY_VERSION: np.full(steps, _UNKNOWN),
        }
        for key, values in columns.items():
            put_at(tree, key, values)
        return TensorDict(_as_tensors(tree), batch_size=[steps])

    def _info_columns(self, infos: Mapping[str, Any], count: int) -> dict[Key, np.ndarray]:
        if ACTION_MASK[0] in infos:
            self._infos.discover({ACTION_MASK[0]: np.asarray(infos[ACTION_MASK[0]])[0]})
        columns: dict[Key, np.ndarray] = {}
        for leaf in self._infos.leaves:
            found = _follow(infos, leaf.key)
            if found is not None:
                columns[leaf.key] = _as_stored(leaf, found, count)
            elif leaf.key[0] == REPORTED:  # which only data sets written here say
                columns[leaf.key] = np.full(count, _follow(infos, leaf.key[1:]) is not None)
            else:
                columns[leaf.key] = np.full((count, *leaf.shape), np.nan if leaf.dtype.kind == "f" else 0, leaf.dtype)
        return columns


def _stored_spec(space: spaces.Space[Any], info_keys: Sequence[str]) -> TreeSpec:
    """The leaves of an observation that are stored, of a space without the texts that are not."""
    spec = TreeSpec.of(space, "observation", text_keys=observed_texts(info_keys))
    kept = _without(space, (), {leaf.path for leaf in spec.leaves})
    return TreeSpec.of(kept, "observation", text_keys=observed_texts(info_keys))


def _without(space: spaces.Space[Any], path: tuple[str | int, ...], kept: set[tuple[str | int, ...]]) -> Any:
    """The space with only those leaves; None if there is none of them."""
    if isinstance(space, spaces.Dict):
        inner = {key: _without(one, (*path, key), kept) for key, one in space.spaces.items()}
        return spaces.Dict({key: one for key, one in inner.items() if one is not None})
    if isinstance(space, spaces.Tuple):
        parts = [_without(one, (*path, index), kept) for index, one in enumerate(space.spaces)]
        return spaces.Tuple([one for one in parts if one is not None])
    return space if path in kept else None


def _with_last(columns: Mapping[Key, np.ndarray], key: Key) -> np.ndarray:
    """What was seen, the terminal one included: [T + 1]."""
    return np.concatenate([columns[key], columns[("next", *key)][-1:]])


def _as_env(leaf: LeafSpec, values: np.ndarray) -> Any:
    """Stored values as the env gave them."""
    return decode_texts(torch.from_numpy(values)) if leaf.is_text else values.astype(leaf.dtype, copy=False)


def _as_stored(leaf: LeafSpec, values: Any, count: int) -> np.ndarray:
    """Values of a data set as a batch has them, or an error."""
    name = ".".join(leaf.key)
    if leaf.is_text and len(values) and isinstance(values[0], (str, bytes)):
        texts = [text.decode() if isinstance(text, bytes) else text for text in values]
        array = np.stack([encode_text(text, leaf.shape[0], name) for text in texts])
    else:
        array = np.asarray(values)
    if array.shape == (count, 1) and leaf.shape == ():
        array = array[:, 0]
    if array.shape != (count, *leaf.shape) or not np.can_cast(array.dtype, leaf.stored, "same_kind"):
        raise FrameContractError(
            f"{name} does not fit : expected {leaf.stored} with shape {(count, *leaf.shape)}, got {array.dtype} with "
            f"shape {array.shape}"
        )
    return array.astype(leaf.stored)


def _from_start(leaf: LeafSpec, choices: np.ndarray) -> np.ndarray:
    """Choices counted from 0."""
    if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
        return choices - np.asarray(leaf.space.start, choices.dtype)
    return choices


def _as_tensors(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _as_tensors(value) if isinstance(value, Mapping) else torch.from_numpy(value.copy())
        for key, value in tree.items()
    }


def _follow(tree: Any, path: Key) -> Any:
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return None if isinstance(tree, Mapping) else tree


def _check_name(key: Key) -> None:
    if any("/" in part or part in ("", ".") for part in key):
        raise ValueError(
            f"the key {key} cannot be written by Minari : expected names without '/'; rename it by a wrapper"
        )


def _can_be_written(spec: EnvSpec | None) -> bool:
    """Whether the spec survives as text: not with a wrapper or an entry point that is no more than an object."""
    try:
        return spec is not None and bool(spec.to_json())
    except (TypeError, ValueError):
        return False
