"""A game of several agents in PettingZoo's parallel API, whose every row is known, and a plain loop over it.

Workers import this module, so it needs no pytest, and PettingZoo is not needed either.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces


class Part(NamedTuple):
    """What an agent does in each game."""

    name: str
    leaves: int
    """The step with which it leaves."""
    how: str = "terminated"
    """Or "truncated", "both", or "silently"."""
    joins: int = 0
    """The step that brings it in; 0: it is there from the beginning."""


PARTS = (Part("ann", 2), Part("bob", 5, "truncated"), Part("cay", 3, "both"))


class Relay:
    """Agents leave (and join) at known steps; a game ends with the last of them.

    An agent observes ``(game, episode, step, agent)``; its reward is ``1000 * agent + 100 * episode + step``. The list
    of agents and the observations are changed in place, and rewards are a live defaultdict, as PettingZoo's own envs
    do. Actions of any but the agents that play raise.

    Args:
        index: which game this is.
        parts: of its agents.
        lingers: agents that have ended stay in `agents` until the game is over.
    """

    def __init__(self, index: int = 0, parts: Sequence[Part] = PARTS, *, lingers: bool = False) -> None:
        self.index = index
        self.parts = {part.name: part for part in parts}
        self.possible_agents = [part.name for part in parts]
        self.agents: list[str] = []
        self.episode, self.elapsed = -1, 0
        self.seeds: list[int | None] = []
        self.actions: list[dict[str, Any]] = []
        self.closes = 0
        self._lingers = lingers
        self._gone: set[str] = set()
        self._observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self._action_space = spaces.Discrete(2)
        self._buffers = {name: np.zeros(4, np.float32) for name in self.possible_agents}
        self._rewards: dict[str, float] = defaultdict(float)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        self.seeds.append(seed)
        self.episode += 1
        self.elapsed = 0
        self._gone.clear()
        self.agents[:] = [name for name, part in self.parts.items() if part.joins == 0]
        return {name: self.observe(name) for name in self.agents}, {name: self.tell(name) for name in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        playing = [name for name in self.agents if name not in self._gone]
        if set(actions) != set(playing):
            raise RuntimeError(f"actions of {sorted(actions)}, but {sorted(playing)} play")
        self.actions.append(dict(actions))
        self.elapsed += 1
        self._rewards.clear()
        for name in playing:
            self._rewards[name] += 1000.0 * self.possible_agents.index(name) + 100.0 * self.episode + self.elapsed
        ended = {name: self.parts[name].how for name in playing if self.elapsed == self.parts[name].leaves}
        joined = [name for name, part in self.parts.items() if part.joins == self.elapsed]
        self._gone.update(ended)
        seen = [*playing, *joined]
        if not self._lingers or len(self._gone) == len(self.parts):
            self.agents[:] = [name for name in self.agents if name not in self._gone]
        self.agents += joined
        return (
            {name: self.observe(name) for name in seen},
            self._rewards,
            {name: ended.get(name) in ("terminated", "both") for name in seen},
            {name: ended.get(name) in ("truncated", "both") for name in seen},
            {name: self.tell(name) for name in seen},
        )

    def close(self) -> None:
        self.closes += 1

    def observe(self, name: str) -> Any:
        self._buffers[name][:] = (self.index, self.episode, self.elapsed, self.possible_agents.index(name))
        return self._buffers[name]

    def tell(self, name: str) -> dict[str, Any]:
        return {}

    def __str__(self) -> str:
        return "relay_v0"


class MaskedRelay(Relay):
    """Observes a Dict with an action mask, as PettingZoo's classic games do."""

    def __init__(self, index: int = 0, parts: Sequence[Part] = PARTS) -> None:
        super().__init__(index, parts)
        mask = spaces.Box(0, 1, (2,), np.int8)
        self._observation_space = spaces.Dict({"observation": self._observation_space, "action_mask": mask})

    def observe(self, name: str) -> Any:
        return {"observation": super().observe(name), "action_mask": np.array([0, 1], np.int8)}


class TellingRelay(Relay):
    """Tells in its infos how far it is, and which action is allowed."""

    def tell(self, name: str) -> dict[str, Any]:
        return {"way": {"gone": self.elapsed}, "action_mask": np.array([self.elapsed % 2 == 0, True])}


def hand_loop(game: Relay, steps: int) -> list[list[tuple]]:
    """For each agent its rows (obs, reward, terminated, truncated, next_obs, is_init), as PettingZoo's manual plays."""
    rows: dict[str, list[tuple]] = {name: [] for name in game.possible_agents}
    seen: dict[str, np.ndarray] = {}
    for _ in range(steps):
        if not game.agents:
            seen = {name: obs.copy() for name, obs in game.reset()[0].items()}
            fresh = set(game.possible_agents)
        acting = list(game.agents)
        obs, rewards, terminations, truncations, _ = game.step(dict.fromkeys(acting, 0))
        obs = {name: value.copy() for name, value in obs.items()}
        for name in acting:
            flags = terminations[name], truncations[name]
            rows[name].append((seen[name].tolist(), rewards[name], *flags, obs[name].tolist(), name in fresh))
        fresh -= set(acting)
        seen = obs
    return list(rows.values())
