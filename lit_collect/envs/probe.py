"""Spaces before anything is stepped: one env is made, and not wasted."""

from dataclasses import replace
from typing import Any

from gymnasium import spaces
from gymnasium.vector import VectorEnv

from lit_collect.envs.factories import EnvSource
from lit_collect.envs.pettingzoo import is_parallel_env, shared_spaces


class SpaceProbe:
    """Makes one env to read its spaces, and hands it over as the first copy of whoever steps envs next.

    Args:
        source: makes the envs.
    """

    def __init__(self, source: EnvSource) -> None:
        self._source = source
        self._spaces: tuple[spaces.Space[Any], spaces.Space[Any]] | None = None
        self._env: Any = None

    def spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Observation and action space of one env copy."""
        if self._spaces is None:
            env = self._source.make(0)
            if isinstance(env, VectorEnv):
                self._spaces = env.single_observation_space, env.single_action_space
            elif is_parallel_env(env):
                self._spaces = shared_spaces(env)
            else:
                self._source.check_kind(env, 0)
                self._spaces = env.observation_space, env.action_space
            self._env = None if self._source.live else env
        return self._spaces

    def handed_over(self) -> EnvSource:
        """The source, whose first env is the one that was made here, if there is one."""
        env, self._env = self._env, None
        if env is None:
            return self._source
        kept = [env]
        first = self._source.makers[0]

        def make_first() -> Any:
            return kept.pop() if kept else first()

        return replace(self._source, makers=(make_first, *self._source.makers[1:]))

    def close(self) -> None:
        """Close the env that nobody took over."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
