"""What an env puts into its infos, seen from outside while frames are collected."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from lit_collect.envs.factories import EnvSource

RESETS, STEPS, ENDS = "resets", "steps", "episode ends"
_SHORT_TEXT = 16  # characters
_FINAL_INFO = "final_info"  # of vector envs in SAME_STEP mode: what a step at an episode end reported
_FINAL_OBS = ("final_obs", "final_observation")  # are data, not infos


@dataclass(kw_only=True)
class InfoValue:
    """One value that infos held."""

    name: str
    """Dots lead into nested mappings."""
    kinds: set[str] = field(default_factory=set)
    """NumPy's letters of the dtypes that were seen, ``"U"`` for texts, ``"O"`` for what cannot be stored."""
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """The shapes that were seen."""
    counts: dict[str, int] = field(default_factory=dict)
    """How often it was reported, by occasion."""

    @property
    def dtype(self) -> str:
        """The narrowest of bool, int64, float32 and str that holds all that was seen; empty if none does."""
        if self.kinds == {"U"}:
            return "str"
        if not self.kinds <= set("biuf") or len(self.shapes) != 1:
            return ""
        return "bool" if self.kinds == {"b"} else "int64" if self.kinds <= set("biu") else "float32"

    @property
    def declaration(self) -> str:
        """What to write into ``rollout.info_keys`` to have it stored; empty if it cannot be.

        Example:
            >>> InfoValue(name="success", kinds={"b"}, shapes={()}).declaration
            'success:bool'
            >>> InfoValue(name="pos", kinds={"f"}, shapes={(3,)}).declaration
            'pos:float32[3]'
        """
        if not self.dtype or any(letter in self.name for letter in ":[]"):
            return ""
        if self.dtype == "str":  # room for longer ones than were seen
            longest = max(length for (length,) in self.shapes)
            return f"{self.name}:str[{max(_SHORT_TEXT, 1 << longest.bit_length())}]"
        (shape,) = self.shapes
        if shape:
            return f"{self.name}:{self.dtype}[{','.join(map(str, shape))}]"
        return self.name if self.dtype == "float32" else f"{self.name}:{self.dtype}"

    def add(self, value: object, occasion: str) -> None:
        """Take one more value into account."""
        try:
            array = np.asarray(value)
        except ValueError:  # ragged
            array = np.asarray(value, object)
        if isinstance(value, str):
            self.kinds.add("U")
            self.shapes.add((len(value),))
        else:
            self.kinds.add(array.dtype.kind if array.dtype.kind in "biuf" else "O")
            self.shapes.add(array.shape)
        self.counts[occasion] = self.counts.get(occasion, 0) + 1


class InfoSurvey:
    """Notes the infos of the envs that a source makes.

    Example:
        >>> from lit_collect.envs.factories import resolve_env
        >>> survey = InfoSurvey()
        >>> env = survey.watch(resolve_env("Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3")).make(0)
        >>> _ = env.reset(seed=1)
        >>> [value.name for value in survey.values]
        ['prob', 'action_mask']
        >>> env.close()
    """

    def __init__(self) -> None:
        self._values: dict[str, InfoValue] = {}
        self._totals: dict[str, int] = {}

    @property
    def values(self) -> list[InfoValue]:
        """Everything that was seen, in the order of its first appearance."""
        return list(self._values.values())

    def watch(self, source: EnvSource) -> EnvSource:
        """The source, whose envs tell their infos here."""
        return replace(source, makers=tuple(_watched(maker, self) for maker in source.makers))

    def occasions(self, value: InfoValue) -> str:
        """When a value is reported, in words."""
        words = []
        for occasion, total in self._totals.items():
            count = value.counts.get(occasion, 0)
            if count:
                words.append(occasion if count == total else f"some {occasion}")
        return "always" if words == list(self._totals) else ", ".join(words)

    def note(self, info: Any, occasion: str) -> None:
        """Note the info of one env copy.

        Args:
            info: as the env returned it.
            occasion: one of "resets", "steps" and "episode ends".
        """
        self._totals[occasion] = self._totals.get(occasion, 0) + 1
        for name, value in _entries(info):
            self._values.setdefault(name, InfoValue(name=name)).add(value, occasion)

    def note_all(self, infos: Any, occasions: Mapping[int, str]) -> None:
        """Note the infos of a vector env.

        Args:
            infos: arrays [N, ...] by name, and which of their rows count by ``_name``.
            occasions: by env copy; the others are left out.
        """
        if not isinstance(infos, Mapping):
            return
        finals = infos.get(_FINAL_INFO)
        for row, occasion in occasions.items():
            if occasion == ENDS and isinstance(finals, Mapping):  # then the rest came with the reset
                self.note(_row(finals, row), ENDS)
                occasion = RESETS
            self.note(_row(infos, row), occasion)


class _Watched(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], survey: InfoSurvey) -> None:
        super().__init__(env)
        self._survey = survey

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        answer = self.env.reset(seed=seed, options=options)
        if isinstance(answer, tuple) and len(answer) == 2:
            self._survey.note(answer[1], RESETS)
        return answer

    def step(self, action: Any) -> Any:
        answer: Any = self.env.step(action)
        if isinstance(answer, tuple) and len(answer) == 5:
            self._survey.note(answer[4], ENDS if answer[2] or answer[3] else STEPS)
        return answer


class _WatchedVector(VectorWrapper[Any, Any, Any]):
    def __init__(self, env: VectorEnv[Any, Any, Any], survey: InfoSurvey) -> None:
        super().__init__(env)
        self._survey = survey
        self._mode = env.metadata.get("autoreset_mode")
        self._ended = np.zeros(env.num_envs, bool)  # copies whose next step is spent on resetting

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        begun = np.array((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        answer = self.env.reset(seed=seed, options=options)
        if isinstance(answer, tuple) and len(answer) == 2:
            self._survey.note_all(answer[1], dict.fromkeys(np.flatnonzero(begun).tolist(), RESETS))
            self._ended = self._ended & ~begun
        return answer

    def step(self, actions: Any) -> Any:
        answer: Any = self.env.step(actions)
        if isinstance(answer, tuple) and len(answer) == 5:
            ended = np.logical_or(*(np.asarray(flags, bool) for flags in answer[2:4]))
            occasions = [
                ENDS if end else RESETS if before else STEPS for end, before in zip(ended, self._ended, strict=True)
            ]
            self._survey.note_all(answer[4], dict(enumerate(occasions)))
            self._ended = ended & (self._mode is AutoresetMode.NEXT_STEP)
        return answer


def _watched(maker: Callable[[], Any], survey: InfoSurvey) -> Callable[[], Any]:
    def make() -> Any:
        env = maker()
        if isinstance(env, gymnasium.Env):
            return _Watched(env, survey)
        return _WatchedVector(env, survey) if isinstance(env, VectorEnv) else env

    return make


def _entries(info: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of nested mappings."""
    for name, value in info.items() if isinstance(info, Mapping) else ():
        if not isinstance(name, str):
            continue
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value


def _row(infos: Mapping[str, Any], row: int) -> dict[str, Any]:
    """What one copy of a vector env reported."""
    found: dict[str, Any] = {}
    for name, values in infos.items():
        if name.startswith("_") or name in (_FINAL_INFO, *_FINAL_OBS):
            continue
        present = infos.get(f"_{name}")
        if present is not None and not present[row]:
            continue
        if isinstance(values, Mapping):
            found[name] = _row(values, row)
        elif hasattr(values, "__len__") and len(values) > row:
            found[name] = values[row]
    return found
