"""What particular vector envs do otherwise than Gymnasium says, in one place.

| source | what it does | what is done about it |
|---|---|---|
| `AsyncVectorEnv` | without shared memory forgets only by stepping that a copy is to be reset | rows are masked |
| | waits for dead workers without a limit when closed | `close_async` |
| | waits without a limit for an exception that could not be pickled | `BoundedErrors` |
| | with shared memory gives the texts of its first reset for ever | refused where a text is stored |
| both of Gymnasium | an info has the dtype of the copy that reports it first, so that 2.7 becomes 2 | `narrowed_info` |
| `CartPoleVectorEnv` | takes ``reset_mask`` and resets all copies | rows are masked |
| vector wrappers | forget the running episodes at a partial reset | rows are masked |
| `FunctionalJaxVectorEnv` | undoes the step of all copies when one is reset | refused |
| `AtariVectorEnv` | writes its mode into the metadata of the base class | those are not believed |
| | takes seeds as an array | `seed_giver` |
| envpool | warns of the bounds of its own spaces | `read_spaces` |
| | takes seeds when it is made, and only then | `seed_giver` |
| | ``env_type="dm"`` has the same discount for a time limit as for an end | refused |
| both pools | hand out some copies at a time if ``batch_size < num_envs`` | refused |

An episode of envpool that ends at its time limit in the same step is reported as truncated alone.
"""

import contextlib
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from lit_collect.envs.spaces import LeafSpec

_CLOSE_TIMEOUT_S = 10.0
_TERMINATE_TIMEOUT_S = 1.0
_ERROR_TIMEOUT_S = 5.0
_WIDTHS = {"b": 0, "i": 1, "u": 1, "f": 2}  # of NumPy's kinds of numbers
_ASYNC_METHODS = ("reset", "reset_async", "reset_wait", "step", "step_async", "step_wait")
_BATCHED = ("num_envs", "single_observation_space", "single_action_space")
_ALE_RESETS_COPIES = (0, 12, 1)  # the first version of ale-py whose partial resets are known to be right
_ENVPOOL_SEED = 42  # what envpool takes where nobody gives a seed

SeedGiver = Callable[[Sequence[int | None], np.ndarray | None], Any]
"""Turns one seed for each copy, and the mask of the copies that are reset, into what `VectorEnv.reset` takes."""


class BatchedView(VectorEnv[Any, Any, Any]):
    """An env that steps many copies at once but is no `VectorEnv`, as one.

    Simulators on a GPU are often a `gymnasium.Env` with `num_envs`, `single_observation_space` and
    `single_action_space` of their own.

    Args:
        env: the env; wrappers around it are kept.
    """

    def __init__(self, env: Any) -> None:
        base = getattr(env, "unwrapped", env)
        self.env = env
        self.num_envs = int(base.num_envs)
        self.single_observation_space, self.single_action_space = (
            base.single_observation_space,
            base.single_action_space,
        )
        self.metadata = dict(getattr(base, "metadata", None) or {})
        self.autoreset_mode = getattr(base, "autoreset_mode", None)
        self.device = getattr(base, "device", None)
        self.spec = getattr(base, "spec", None)
        self.closed = True  # else Gymnasium would close the env when this view of it is forgotten

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """See `gymnasium.Env.reset`."""
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        """See `gymnasium.Env.step`."""
        return self.env.step(actions)

    def close(self, **kwargs: Any) -> None:
        """Close the env."""
        self.env.close(**kwargs)

    def __repr__(self) -> str:
        """The name of the env's own class and its copies."""
        return f"{type(getattr(self.env, 'unwrapped', self.env)).__name__}(num_envs={self.num_envs})"


class BoundedErrors:
    """The queue from which an `AsyncVectorEnv` takes its workers' exceptions, with a limit on waiting.

    A worker says that it failed, then sends its exception; one that cannot be pickled never arrives.

    Args:
        errors: the queue.
    """

    def __init__(self, errors: Any) -> None:
        self._errors = errors

    def get(self) -> tuple[int, type[Exception], Any, str]:
        """Worker, type and value of its exception, and the traceback; the type can be called with the value.

        Raises:
            RuntimeError: if the exception cannot be had.
        """
        try:
            index, kind, value, trace = self._errors.get(timeout=_ERROR_TIMEOUT_S)
        except Exception as error:  # nothing came, or it cannot be put together again here
            why = "" if isinstance(error, queue.Empty) else f" ({type(error).__name__}: {error})"
            raise RuntimeError(
                f"a worker failed with an exception that cannot be pickled{why}; see its output"
            ) from None
        try:
            kind(value)
        except Exception:  # its constructor takes something else
            return index, RuntimeError, f"{kind.__name__}: {value}", trace
        return index, kind, value, trace

    def __getattr__(self, name: str) -> Any:
        """Everything else is the queue's own."""
        return getattr(self._errors, name)


def bound_errors(base: "AsyncVectorEnv[Any, Any]") -> None:
    """Let an `AsyncVectorEnv` wait no longer than some seconds for what went wrong in its workers."""
    if not isinstance(base.error_queue, BoundedErrors):
        base.error_queue = BoundedErrors(base.error_queue)  # type: ignore[assignment]  # all that is used of a queue


def narrowed_info(base: Any, infos: Any, leaves: Sequence[LeafSpec]) -> str | None:
    """A warning if a declared value of the infos may have lost digits on its way through Gymnasium.

    Args:
        base: the vector env without its wrappers.
        infos: of all copies.
        leaves: what is declared.
    """
    if not isinstance(base, (SyncVectorEnv, AsyncVectorEnv)):
        return None
    for leaf in leaves:
        value = infos
        for part in leaf.path:
            value = value.get(part) if isinstance(value, dict) else None
        kind = value.dtype.kind if isinstance(value, np.ndarray) else ""
        if kind in _WIDTHS and _WIDTHS[kind] < _WIDTHS[leaf.dtype.kind]:
            name = ".".join(leaf.key)
            return (
                f"info {name!r} came as {value.dtype}, which {describe_env(base)} took from whichever copy reported it "
                f"first : expected {leaf.dtype}, which would have lost digits by then; pass what makes single envs, or "
                f"declare '{name}:{value.dtype}' if it always is"
            )
    return None


def as_vector_env(env: Any) -> Any:
    """An env of many copies as a `VectorEnv`; anything else as it is."""
    if isinstance(env, (VectorEnv, type)):
        read_spaces(env)
        return env
    base = getattr(env, "unwrapped", env)
    return BatchedView(env) if all(hasattr(base, name) for name in _BATCHED) else env


def read_spaces(env: Any) -> None:
    """Let envpool make its spaces, which it does once, without Gymnasium's warnings about bounds in float64."""
    if _is_envpool(env):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
            _ = env.single_observation_space, env.single_action_space


def describe_env(env: Any) -> str:
    """An env in a few words; envpool's own text is several pages of spaces."""
    text = str(env)
    copies = getattr(env, "num_envs", None)
    return text if len(text) <= 120 or copies is None else f"{type(env).__name__}(num_envs={copies})"


def detect_mode(env: VectorEnv[Any, Any, Any], given: AutoresetMode | str | None) -> AutoresetMode:
    """The mode as given, else as the env's own attribute says, else as its metadata says.

    Raises:
        ValueError: if nothing says it, if it is no mode, or if an env whose word can be taken says otherwise.
    """
    base = env.unwrapped
    own = [getattr(one, "autoreset_mode", None) for one in (env, base)]
    # ale_py writes its mode into the dict of the base class, which would then speak for every other vector env.
    stated = env.metadata.get("autoreset_mode") if env.metadata is not VectorEnv.metadata else None
    said = next((one for one in (*own, stated) if one is not None), None)
    if given is None and said is None:
        raise ValueError(
            f"{describe_env(env)} does not say how it resets : expected one of {_choices()}; pass it as autoreset=, "
            f"or set it as the env's attribute autoreset_mode"
        )
    mode = _mode(said if given is None else given)
    if given is not None and _says_the_truth(base) and mode is not _mode(said):
        raise ValueError(
            f"autoreset does not fit {describe_env(env)} : expected {_mode(said).value!r} or None, got {given!r}; "
            f"to choose another mode, make the env with autoreset_mode={mode.value!r}"
        )
    return mode


def honours_mask(env: VectorEnv[Any, Any, Any]) -> bool:
    """Whether single copies can be reset: where reset and step are those of a class that is known to do it."""
    if isinstance(env, AsyncVectorEnv) and env.worker is not None:
        return False
    for kind, names in ((SyncVectorEnv, ("reset", "step")), (AsyncVectorEnv, _ASYNC_METHODS)):
        if isinstance(env, kind):
            return all(getattr(type(env), name) is getattr(kind, name) for name in names)
    return _is_atari(type(env)) and _version("ale-py") >= _ALE_RESETS_COPIES


def seed_giver(base: VectorEnv[Any, Any, Any], first: int) -> SeedGiver:
    """How an env takes its seeds.

    Args:
        base: the env without its wrappers.
        first: index of its first copy among those of its rank.
    """
    if isinstance(base, (SyncVectorEnv, AsyncVectorEnv)):
        return lambda seeds, mask: list(seeds)
    if any(_is_atari(kind) for kind in type(base).__mro__):
        return _array_of_seeds
    if _is_envpool(base):
        _warn_of_equal_pools(base, first)
        return lambda seeds, mask: None  # it would only warn that they are ignored
    return lambda seeds, mask: next((seed for seed in seeds if seed is not None), None)


def refuse_lossy(base: Any) -> None:
    """Refuse vector envs that lose transitions, or hand out some of their copies at a time.

    Raises:
        ValueError: saying why.
    """
    # The JAX envs of Gymnasium 1.4: when one copy is reset, the others' step is undone but paid.
    if any(kind.__name__ == "FunctionalJaxVectorEnv" for kind in type(base).__mro__):
        raise ValueError(
            f"{base} loses the transitions of all copies whenever one is reset (an error of Gymnasium); "
            f"pass the env's id instead, which makes single envs"
        )
    rows = base.config["batch_size"] if _is_envpool(base) else getattr(base, "batch_size", None)
    if isinstance(rows, int) and rows != base.num_envs:
        raise ValueError(
            f"{describe_env(base)} hands out {rows} of its {base.num_envs} copies at a time : expected all of them in "
            f"every step, got batch_size={rows}; make it without batch_size"
        )


def refuse_frozen_texts(base: Any, leaves: Sequence[LeafSpec]) -> None:
    """Refuse texts of an `AsyncVectorEnv` that reads them from shared memory once, when it is made (Gymnasium 1.4).

    Args:
        base: the vector env without its wrappers.
        leaves: of the observation, as far as it is stored.

    Raises:
        ValueError: naming the text.
    """
    text = next((".".join(leaf.key) for leaf in leaves if leaf.is_text), None)
    if text is not None and isinstance(base, AsyncVectorEnv) and base.shared_memory:
        raise ValueError(
            f"the text {text!r} of {describe_env(base)} never changes (an error of Gymnasium) : expected an "
            f"AsyncVectorEnv with shared_memory=False; make it so, or leave '{text}:str' out of rollout.info_keys"
        )


def refuse_dm(env: Any) -> None:
    """Refuse envs of DeepMind's interface.

    Raises:
        TypeError: saying what to do instead.
    """
    if isinstance(env, gymnasium.Env) or not any(kind.__module__.startswith("dm_env") for kind in type(env).__mro__):
        return
    if hasattr(env, "config"):
        raise TypeError(
            "env_type='dm' of envpool gives the discount 0 where a time limit ends an episode, as if it had terminated "
            ": expected env_type='gymnasium'"
        )
    raise TypeError(
        f"an env of dm_env is no gymnasium.Env, got {type(env).__name__}; wrap it, for instance with "
        f"shimmy.DmControlCompatibilityV0, or pass an id such as 'shimmy:dm_control/cartpole-balance-v0'"
    )


def close_async(env: VectorEnv[Any, Any, Any], base: "AsyncVectorEnv[Any, Any]", *, graceful: bool) -> None:
    """Ask, wait, terminate, kill. Gymnasium's own `close` waits without a limit for workers that are gone."""
    asking = threading.Thread(target=_quietly_close, args=(env,), daemon=True)
    if graceful and all(process.is_alive() for process in base.processes):
        asking.start()
        asking.join(_CLOSE_TIMEOUT_S)
    for stop, patience_s in (("terminate", _TERMINATE_TIMEOUT_S), ("kill", _CLOSE_TIMEOUT_S)):
        alive = [process for process in base.processes if process.is_alive()]
        for process in alive:
            getattr(process, stop)()
        deadline = time.monotonic() + patience_s
        for process in alive:
            process.join(max(deadline - time.monotonic(), 0.0))
    if asking.is_alive():  # its worker is gone, so that it learns of it now
        asking.join(_CLOSE_TIMEOUT_S)
    for pipe in base.parent_pipes:
        if pipe is not None:
            pipe.close()
    base.closed = True


def _quietly_close(env: VectorEnv[Any, Any, Any]) -> None:
    with contextlib.suppress(Exception):  # whatever is left is terminated
        env.close()


def _choices() -> str:
    return ", ".join(repr(one.value) for one in AutoresetMode)


def _mode(name: Any) -> AutoresetMode:
    for one in AutoresetMode:
        if name is one or (isinstance(name, str) and name.lower() in (one.value.lower(), one.name.lower())):
            return one
    raise ValueError(f"autoreset is unknown : expected one of {_choices()}, got {name!r}")


def _says_the_truth(base: Any) -> bool:
    known = isinstance(base, (SyncVectorEnv, AsyncVectorEnv)) or _is_envpool(base)
    return known or any(_is_atari(kind) for kind in type(base).__mro__)


def _is_atari(kind: type) -> bool:
    return kind.__name__ == "AtariVectorEnv" and kind.__module__.partition(".")[0] == "ale_py"


def _is_envpool(base: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "envpool" for kind in type(base).__mro__)


def _version(package: str) -> tuple[int, ...]:
    digits = [part for part in metadata.version(package).split(".") if part.isdigit()]
    return tuple(int(part) for part in digits)


def _array_of_seeds(seeds: Sequence[int | None], mask: np.ndarray | None) -> np.ndarray:
    """One seed for each copy that is reset; -1 leaves a copy's generator alone."""
    array = np.array([-1 if seed is None else seed for seed in seeds], np.int64)
    return array if mask is None else array[mask]


def _warn_of_equal_pools(base: Any, first: int) -> None:
    if first > 0 and base.config["seed"] == _ENVPOOL_SEED and not base.config["env_seed"]:
        warnings.warn(
            f"the copies of {describe_env(base)} in every worker get the same seeds : envpool takes them when it is "
            f"made, and only then; give envpool.make another seed= in each worker, or use one worker",
            stacklevel=2,
        )
