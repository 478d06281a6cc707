"""What a user may pass as `env`, and how it becomes a `BatchedEnv`: `GymEnvFactory`, `resolve_env`, `EnvSource`.

An `EnvSource` travels to another process by cloudpickle, and `registrations` say what its ids mean there.
"""

import contextlib
import dataclasses
import functools
import linecache
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from lit_collect.config import RolloutConfig
from lit_collect.envs.base import BatchedEnv, EnvFactory, env_failed
from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.names import ACCEPTED, as_kwargs, as_wrapper, check_id, import_path, is_env_id
from lit_collect.envs.pettingzoo import ParallelEnvAdapter, count_agents, is_parallel_env, make_games, refuse_turn_based
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.envs.vector_factory import VectorEnvFactory
from lit_collect.envs.vector_quirks import as_vector_env, describe_env, refuse_dm
from lit_collect.envs.verify import VerifiedEnv

EnvMaker = str | EnvFactory | Callable[[], Any]
"""One maker of envs: a Gymnasium id or dotted import path, a factory, or a callable without arguments."""

# jsonargparse tries the members in order. Only this order, with the callable last, takes ids, dotted paths,
# class_path mappings and lists of them, and dumps each so that it can be read again.
EnvLike = str | EnvFactory | Sequence[EnvMaker] | Callable[[], Any]
"""What `resolve_env` takes, as far as a YAML file can say it (live envs are accepted besides)."""


class GymEnvFactory(EnvFactory):
    """Makes a registered Gymnasium env, with keyword arguments and wrappers.

    Args:
        env_id: a Gymnasium id; ``"module:Name-v0"`` imports the module that registers it.
        make_kwargs: keyword arguments of `gymnasium.make`.
        wrappers: applied in order, the first next to the env. Each is a callable that takes the env, the dotted
            import path of one, or a mapping with ``class_path`` and ``init_args`` (given after the env).

    Raises:
        ValueError: if the id is unknown or deprecated.
        TypeError: if a wrapper is none of the three.

    Example:
        >>> stack = {"class_path": "gymnasium.wrappers.FrameStackObservation", "init_args": {"stack_size": 3}}
        >>> factory = GymEnvFactory("CartPole-v1", {"max_episode_steps": 20}, wrappers=[stack])
        >>> factory().observation_space.shape
        (3, 4)
    """

    def __init__(
        self,
        env_id: str,
        make_kwargs: dict[str, Any] | None = None,
        *,
        wrappers: Sequence[str | dict[str, Any] | Callable[[Any], Any]] = (),
    ) -> None:
        check_id(env_id)
        self.env_id = env_id
        self.make_kwargs = as_kwargs(make_kwargs)
        self.wrappers = tuple(wrappers)
        self._wrap = tuple(as_wrapper(wrapper) for wrapper in self.wrappers)

    def __call__(self) -> gymnasium.Env[Any, Any]:
        """Make one env."""
        # Gymnasium's passive checker is left out: what an env returns is checked here anyway, and more strictly.
        env = gymnasium.make(self.env_id, **{"disable_env_checker": True, **self.make_kwargs})
        for wrap in self._wrap:
            env = wrap(env)
        return env

    def __repr__(self) -> str:
        """The call that makes an equal factory."""
        given = [repr(self.env_id)]
        given += [f"make_kwargs={self.make_kwargs}"] if self.make_kwargs else []
        given += [f"wrappers={list(self.wrappers)}"] if self.wrappers else []
        return f"GymEnvFactory({', '.join(given)})"


@dataclass(frozen=True, kw_only=True)
class EnvSource:
    """A resolved `env`: how its copies are made, how many it says there are, and its name in plain text."""

    makers: tuple[Callable[[], Any], ...]
    """One for all copies, or one for each."""
    num_envs: int | None
    """What the env itself says: the length of a sequence, the copies of a vector env that is live or comes from a
    `VectorEnvFactory` (of one worker, then), else None."""
    live: bool
    """Whether the env was made by the user, who then also closes it."""
    description: str
    """For configs and messages, for instance ``CartPole-v1``."""
    autoreset: AutoresetMode | str | None = None
    """Mode of a vector env that does not say it itself."""
    per_worker: bool = False
    """Whether each worker makes `num_envs` copies, not all of them together."""

    def copies(self, num_workers: int) -> int | None:
        """What the env itself says of all workers together: `num_envs`, or that many in each of them."""
        return self.num_envs * num_workers if self.num_envs and self.per_worker else self.num_envs

    def build(
        self,
        num_envs: int | None,
        *,
        rollout: RolloutConfig,
        default_copies: int = 1,
        indices: range | None = None,
    ) -> BatchedEnv:
        """Make the env copies in this process and put them under one roof.

        Args:
            num_envs: env copies of the rank (None: what the env says, else `default_copies`); each agent of a game is
                one, and where nobody says how many, the last game may bring more than `default_copies`.
            default_copies: env copies where nobody says how many.
            rollout: says what is read, how long episodes may be, and whether the envs are verified.
            indices: which of these copies to make (None: all of them).

        Raises:
            ValueError: if `num_envs` is not what the env says, if a maker gives the same env twice, or if the envs
                cannot be collected from as they are (see `DirectEnv` and `VectorEnvAdapter`).
            TypeError: if a maker returns something that is no env.
            WorkerFailedError: if a maker raises; the message names the env copy.
        """
        said = (None if self.per_worker else self.num_envs) or (1 if self.live else None)
        if num_envs is not None and said is not None and num_envs != said:
            raise ValueError(f"num_envs does not fit {self.description} : expected {said} or None, got {num_envs}")
        total = num_envs or said or self.num_envs or default_copies
        indices = range(total) if indices is None else indices
        if self.live and indices != range(total):
            raise ValueError(f"a live env cannot be split over workers, got {self.description}; pass what makes it")
        env = self._gather(indices, num_envs, rollout=rollout)
        return VerifiedEnv(env) if rollout.verify_envs else env

    def _gather(self, indices: range, num_envs: int | None, *, rollout: RolloutConfig) -> BatchedEnv:
        """Make the copies, or what holds several of them; closes what was made if that fails."""
        envs: list[Any] = []
        try:
            for index in indices:
                envs.append(self.make(index))
                if isinstance(envs[0], VectorEnv):
                    return self._adapt(envs[0], indices, num_envs, rollout=rollout)
                if is_parallel_env(envs[0]):
                    return self._adapt_games(envs, indices, num_envs, rollout=rollout)
                self._check(envs, index)
            return DirectEnv(
                envs,
                keep_float64=rollout.keep_float64,
                max_frames_per_traj=rollout.max_frames_per_traj,
                info_keys=rollout.info_keys,
                owned=not self.live,
                first=indices.start,
            )
        except BaseException:
            if not self.live:
                _close_all(envs)
            raise

    def make(self, index: int) -> Any:
        """Make one env copy, or the vector env that holds them all.

        Raises:
            WorkerFailedError: if the maker raises.
        """
        maker = self.makers[index if len(self.makers) > 1 else 0]
        try:
            return as_vector_env(maker())
        except Exception as error:
            raise env_failed(f"env copy {index}", "its constructor", error) from error

    def _adapt(
        self, env: VectorEnv[Any, Any, Any], indices: range, num_envs: int | None, *, rollout: RolloutConfig
    ) -> VectorEnvAdapter:
        if len(self.makers) > 1 or (self.num_envs is not None and not self.live and not self.per_worker):
            raise TypeError(f"a sequence holds makers of single envs : expected gymnasium.Env, got {describe_env(env)}")
        if num_envs is not None and len(indices) != env.num_envs:
            workers = num_envs // len(indices)
            each = f" in each of {workers} workers" if workers > 1 else ""
            raise ValueError(
                f"num_envs does not fit {self.description}, a vector env of {env.num_envs} copies{each} : "
                f"expected {workers * env.num_envs} or None, got {num_envs}"
            )
        return VectorEnvAdapter(
            env,
            autoreset=self.autoreset,
            keep_float64=rollout.keep_float64,
            max_frames_per_traj=rollout.max_frames_per_traj,
            info_keys=rollout.info_keys,
            owned=not self.live,
            first=indices.start // len(indices) * env.num_envs,
        )

    def _adapt_games(
        self, games: list[Any], indices: range, num_envs: int | None, *, rollout: RolloutConfig
    ) -> ParallelEnvAdapter:
        """`games` holds the first game, and gets the others as they are made."""
        if len(self.makers) > 1 or (self.num_envs is not None and not self.live):
            raise TypeError(f"a sequence holds makers of single envs : expected gymnasium.Env, got {games[0]}")
        make_games(games, self.make, indices=indices, num_envs=num_envs, description=self.description)
        share = len(games) * len(games[0].possible_agents)
        return ParallelEnvAdapter(
            games,
            keep_float64=rollout.keep_float64,
            max_frames_per_traj=rollout.max_frames_per_traj,
            info_keys=rollout.info_keys,
            owned=not self.live,
            first=indices.start // len(indices) * share,
        )

    def check_kind(self, env: Any, index: int, *, alone: bool = True) -> None:
        """Refuse what is no env that stands for one copy, or says nothing of its spaces.

        Args:
            env: what the maker returned.
            index: of the copy.
            alone: whether it could have been a vector env as well.

        Raises:
            TypeError: if it is no env, or a space is missing.
        """
        refuse_turn_based(env)
        refuse_dm(env)
        if not isinstance(env, gymnasium.Env):
            raise TypeError(
                f"{self.description} made no env for copy {index} : expected gymnasium.Env"
                f"{' or VectorEnv' if alone else ''}, got {_named(env)}"
            )
        for name in ("observation_space", "action_space"):
            space = getattr(env, name, None)
            if not isinstance(space, gymnasium.Space):
                raise TypeError(
                    f"{self.description} has no {name} : expected a gymnasium.Space, got {_named(space)}; "
                    f"set it in the env's constructor"
                )

    def _check(self, envs: Sequence[Any], index: int) -> None:
        self.check_kind(envs[-1], index, alone=len(envs) == 1)
        if any(envs[-1] is other for other in envs[:-1]):
            raise ValueError(
                f"{self.description} gave the same env twice, at copy {index} : every copy needs an env of its own; "
                f"make the env inside the callable"
            )


def resolve_env(env: Any) -> EnvSource:
    """Turn what a user passed as `env` into an `EnvSource`, without making an env.

    Args:
        env: a Gymnasium id, a dotted import path, a callable without arguments, an `EnvFactory`, a sequence of these
            (one for each env copy), or a live `gymnasium.Env`, `gymnasium.vector.VectorEnv` or parallel game of
            PettingZoo. What a callable makes may be any of these three.

    Raises:
        ValueError: if an id is unknown, a path leads nowhere, or a sequence is empty.
        TypeError: if it is none of the above.

    Example:
        >>> resolve_env("CartPole-v1").description
        'CartPole-v1'
        >>> resolve_env(["CartPole-v1", "Acrobot-v1"]).num_envs
        2
    """
    if isinstance(env, EnvSource):
        return env
    env = as_vector_env(env)
    if isinstance(env, (gymnasium.Env, VectorEnv)) or is_parallel_env(env):
        copies = env.num_envs if isinstance(env, VectorEnv) else count_agents(env)
        return EnvSource(
            makers=(functools.partial(_same, env),), num_envs=copies, live=True, description=describe_env(env)
        )
    refuse_turn_based(env)
    refuse_dm(env)
    if isinstance(env, Sequence) and not isinstance(env, (str, bytes)):
        if not env:
            raise ValueError(f"env is an empty sequence : expected {ACCEPTED}")
        names = ", ".join(_describe(one) for one in env)
        makers = tuple(_maker(one) for one in env)
        return EnvSource(makers=makers, num_envs=len(makers), live=False, description=f"[{names}]")
    maker = _maker(env)
    factory = maker.made_by if isinstance(maker, _Imported) else maker
    vector = factory if isinstance(factory, VectorEnvFactory) else None
    return EnvSource(
        makers=(maker,),
        num_envs=None if vector is None else vector.num_envs,
        live=False,
        description=_describe(env),
        autoreset=None if vector is None else vector.autoreset,
        per_worker=vector is not None,
    )


def registrations() -> dict[str, EnvSpec]:
    """The registered envs that a process which imports Gymnasium and nothing else does not know.

    An entry point in the main script becomes the object itself (`cloudpickle` sends it whole), because another process
    has another main script.

    Returns:
        Specs by id, in the order of their registration.

    Example:
        >>> [name for name in registrations() if name.startswith("CartPole")]
        []
    """
    return {env_id: _portable(spec) for env_id, spec in gymnasium.registry.items() if not _is_gymnasiums_own(spec)}


def register_missing(specs: Mapping[str, EnvSpec]) -> None:
    """Register what another process knows and this one does not; only Gymnasium's own envs may be replaced.

    A module that is imported later may register the same ids again: Gymnasium's warning about that is silenced.

    Args:
        specs: what `registrations` gave there.
    """
    known = gymnasium.registry
    added = [env_id for env_id in specs if env_id not in known or _is_gymnasiums_own(known[env_id])]
    gymnasium.registry.update({env_id: specs[env_id] for env_id in added})
    if added:
        ids = "|".join(re.escape(env_id) for env_id in added)
        warnings.filterwarnings("ignore", rf".*Overriding environment ({ids}) already in registry")


def _maker(env: Any) -> Callable[[], Any]:
    """What makes the env, for everything but live envs and sequences."""
    if isinstance(env, str):
        if is_env_id(env):
            return GymEnvFactory(env)
        path, env = env, import_path(env)
        if not path.startswith("__main__.") and _makes_envs(env):
            return _Imported(path, env)
    if _makes_envs(env):
        return _instance(env)
    raise TypeError(f"env is of the wrong kind : expected {ACCEPTED}, got {_named(env)}")


def _makes_envs(value: Any) -> bool:
    return callable(value) and not isinstance(value, (gymnasium.Env, VectorEnv))


def _instance(maker: Any) -> Callable[[], Any]:
    return maker() if isinstance(maker, type) and issubclass(maker, EnvFactory) else maker


class _Imported:
    """What a dotted path leads to. Another process imports it again, so that it need not be picklable."""

    def __init__(self, path: str, found: Any) -> None:
        self._path = path
        self.made_by = _instance(found)

    def __call__(self) -> Any:
        return self.made_by()

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return _maker, (self._path,)


def _describe(env: Any) -> str:
    if isinstance(env, str):
        return env
    if isinstance(env, VectorEnvFactory):
        return repr(env)
    if isinstance(env, GymEnvFactory):
        return env.env_id if not (env.make_kwargs or env.wrappers) else repr(env)
    if isinstance(env, functools.partial):
        return f"{_describe(env.func)}(...)"
    if hasattr(env, "__qualname__"):
        return f"{env.__module__}.{env.__qualname__}"
    return f"{type(env).__module__}.{type(env).__qualname__}(...)"


def _is_gymnasiums_own(spec: EnvSpec) -> bool:
    """Whether importing Gymnasium registers it, which the mere class of a user's CartPole variant does not say."""
    entries = [entry for entry in (spec.entry_point, spec.vector_entry_point) if entry is not None]
    modules = [entry if isinstance(entry, str) else getattr(entry, "__module__", "") for entry in entries]
    return f'"{spec.id}"' in _registering_source() and all(name.startswith("gymnasium.") for name in modules)


@functools.cache
def _registering_source() -> str:
    """The text that registers Gymnasium's own envs; empty where it cannot be had, and then they travel needlessly."""
    return "".join(linecache.getlines(gymnasium.envs.__file__))


def _portable(spec: EnvSpec) -> EnvSpec:
    """The spec with its entry points in the main script replaced by what they name."""
    return dataclasses.replace(
        spec, entry_point=_object(spec.entry_point), vector_entry_point=_object(spec.vector_entry_point)
    )


def _object(entry: Any) -> Any:
    module, _, name = entry.partition(":") if isinstance(entry, str) else ("", "", "")
    return getattr(sys.modules["__main__"], name, entry) if module == "__main__" else entry


def _same(env: Any) -> Any:
    return env


def _close_all(envs: Sequence[Any]) -> None:
    """Close what was built when the rest could not be; the error that led here is the one to be seen."""
    for env in envs:
        with contextlib.suppress(Exception):
            env.close()


def _named(value: object) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else f"{value!r} ({type(value).__name__})"
