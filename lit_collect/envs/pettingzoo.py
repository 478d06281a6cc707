"""`ParallelEnvAdapter`: games of several agents (PettingZoo's parallel API) as a `BatchedEnv`, one row for each agent.

PettingZoo itself is never imported: whatever has `possible_agents` and asks for spaces by agent is taken.

An agent that has left the game, or has not joined it yet, has rows that are no transitions (``valid=False``), so that
the mask of a batch is the mask of its agents. They observe zeros, and an action mask allows everything. When no agent
is left, the game is reset at once.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from lit_collect.config import nearest_multiples
from lit_collect.envs.base import BatchedEnv, Final, Leaves, StepViews, brief, close_each, env_failed
from lit_collect.envs.infos import InfoReader, observed_texts
from lit_collect.envs.spaces import LeafSpec, TreeSpec, empty_leaves
from lit_collect.errors import FrameContractError, LitCollectError
from lit_collect.frames import ACTION_MASK


def is_parallel_env(env: object) -> bool:
    """Whether something is a game in PettingZoo's parallel API."""
    return _has_agents(env) and not _is_turn_based(env)


def refuse_turn_based(env: object) -> None:
    """Refuse a game in PettingZoo's AEC API, in which one agent moves at a time.

    Raises:
        TypeError: if it is one.
    """
    if _is_turn_based(env):
        raise TypeError(
            f"{env} lets its agents take turns : expected a game in which they act at once; "
            f"wrap it with pettingzoo.utils.aec_to_parallel or turn_based_aec_to_parallel"
        )


def count_agents(env: object) -> int | None:
    """How many agents a game can have; None if something else than a game is given."""
    return len(env.possible_agents) if is_parallel_env(env) else None  # type: ignore[attr-defined]


def shared_spaces(env: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """The observation and action space that all agents of a game have.

    Args:
        env: a parallel env.

    Raises:
        ValueError: if there are no agents, or if two of them have different spaces.
    """
    agents = list(env.possible_agents)
    if not agents:
        raise ValueError(f"{env} has no possible_agents : expected at least one")
    found = []
    for name in ("observation_space", "action_space"):
        first = getattr(env, name)(agents[0])
        for agent in agents[1:]:
            other = getattr(env, name)(agent)
            if other != first:
                raise ValueError(
                    f"the agents of {env} cannot share a policy : expected {name} {first} as of {agents[0]!r}, "
                    f"got {other} for {agent!r}; pad them with wrappers such as supersuit's pad_observations_v0 and "
                    f"pad_action_space_v0, or collect each kind of agent from an env of its own"
                )
        found.append(first)
    return found[0], found[1]


def make_games(
    games: list[Any], make: Callable[[int], Any], *, indices: range, num_envs: int | None, description: str
) -> None:
    """Make as many games as it takes to have the rows asked for.

    Args:
        games: holds the first game, and gets the others.
        make: makes the game of a row.
        indices: rows of this process.
        num_envs: rows of the rank that were asked for; None if the rows are only to be at least so many.
        description: of what makes them, for messages.

    Raises:
        ValueError: if the rows asked for are no whole games, or if the same game is made twice.
        TypeError: if something else is made.
    """
    size = len(games[0].possible_agents)
    if num_envs is not None and size and len(indices) % size:
        step = size * (num_envs // len(indices))
        raise ValueError(
            f"num_envs does not fit {description}, whose games have {size} agents with a row each : "
            f"expected a multiple of {step}, got {num_envs}; use {nearest_multiples(num_envs, step)}"
        )
    for start in range(size, len(indices), max(size, 1)):
        game = make(indices.start + start)
        if not is_parallel_env(game):
            raise TypeError(f"{description} made no game of several agents : expected one as before, got {game!r}")
        if any(game is other for other in games):
            raise ValueError(f"{description} gave the same game twice; make the env inside the callable")
        games.append(game)


class ParallelEnvAdapter(BatchedEnv):
    """Games of several agents, in which every possible agent of every game is one env copy.

    Rows go game by game, in the order of `possible_agents`. An agent's episode ends when it is terminated or truncated.
    One that leaves the game without either is marked truncated, with one warning.

    Args:
        games: parallel envs of the same possible agents, all of which have the same spaces.
        keep_float64: store float64 observations as they are instead of as float32.
        max_frames_per_traj: cut a game after that many frames: every agent that still plays is truncated.
        info_keys: values of the agents' infos to be read (see `InfoReader`).
        owned: whether `close` closes the games.
        first: index of the first row among those of its rank, for messages.

    Raises:
        ValueError: if the games or their agents differ, or if an info key cannot be read.
        TypeError: if a space cannot be stored.
    """

    may_mask = True

    def __init__(
        self,
        games: Sequence[Any],
        *,
        keep_float64: bool = False,
        max_frames_per_traj: int | None = None,
        info_keys: Sequence[str] = (),
        owned: bool = True,
        first: int = 0,
    ) -> None:
        self.games = tuple(games)
        self.agents = tuple(self.games[0].possible_agents)  # a copy: envs change their lists in place
        """Of each game, in the order of the rows."""
        self.first = first
        self.num_envs = len(self.games) * len(self.agents)
        found = shared_spaces(self.games[0])
        for index, game in enumerate(self.games[1:], start=1):
            if tuple(game.possible_agents) != self.agents or shared_spaces(game) != found:
                raise ValueError(
                    f"game {index} differs : expected the agents {list(self.agents)} and the spaces of game 0, "
                    f"got {list(game.possible_agents)}"
                )
        texts = observed_texts(info_keys)
        self.observation_spec = TreeSpec.of(found[0], "observation", keep_float64=keep_float64, text_keys=texts)
        self.action_spec = TreeSpec.of(found[1], "action")
        self._infos = InfoReader(info_keys, observation_spec=self.observation_spec, action_spec=self.action_spec)
        self._blank: Leaves = ()
        self._acting = np.zeros(self.num_envs, bool)  # rows whose agents act in the next step
        self._left = np.zeros(self.num_envs, bool)  # rows whose agents do not come back before the game ends
        self._limit = max_frames_per_traj
        self._ages = [0] * len(self.games)  # frames of the running games
        self._seen: Leaves | None = None  # what the policy saw last, for partial resets
        self._owned = owned
        self._closed = False
        self._warned = False

    @property
    def info_leaves(self) -> tuple[LeafSpec, ...]:  # type: ignore[override]  # a constant where infos are not read
        """Values of the infos; an action mask among them is found by the first reset."""
        return self._infos.leaves

    def reset(self, seeds: Sequence[int | None] | None = None, mask: np.ndarray | None = None) -> Leaves:
        """Reset all games, or those whose agents are all in the mask (see `BatchedEnv.reset`).

        A game is reset with the seed of its first agent.

        Raises:
            ValueError: if a mask has some agents of a game and not the others.
        """
        size = len(self.agents)
        chosen = np.ones(len(self.games), bool) if mask is None else np.reshape(mask, (-1, size)).all(1)
        if mask is not None and not np.array_equal(np.repeat(chosen, size), mask):
            raise ValueError(
                f"the agents of a game are reset together : expected a mask of whole games of {size} rows, "
                f"got rows {(self.first + np.flatnonzero(mask)).tolist()}; reset all copies"
            )
        begun = {
            game: self._reset_game(game, None if seeds is None else seeds[game * size])
            for game in np.flatnonzero(chosen).tolist()
        }
        if self._seen is None and not chosen.all():
            raise ValueError("the first reset is of all games; pass no mask")
        seen = empty_leaves(self.leaves, (self.num_envs,)) if self._seen is None else _copies(self._seen)
        for game, rows in begun.items():
            for agent, leaves in enumerate(rows):
                _write(seen, game * size + agent, leaves)
        self._seen = _copies(seen)
        return seen

    def step_into(self, action: Leaves, views: StepViews) -> Sequence[Final]:
        """Step all games (see `BatchedEnv.step_into`)."""
        self._seen = views.obs
        if self.action_spec.is_plain:
            actions = list(action[0])
        else:
            actions = [self.action_spec.unflatten(leaves) for leaves in zip(*action, strict=True)]
        views.valid[:] = self._acting
        views.reward[~self._acting] = 0.0
        finals: list[Final] = []
        for game in range(len(self.games)):
            finals += self._step_game(game, actions, views)
        return finals

    def close(self) -> None:
        """Close every game, whatever the others do; the first error is raised at the end."""
        if self._closed or not self._owned:
            return
        self._closed = True
        close_each({self._name_game(index): game for index, game in enumerate(self.games)})

    def _step_game(self, game: int, actions: list[Any], views: StepViews) -> list[Final]:
        """Step one game, and begin the next one if nobody is left in it."""
        start = game * len(self.agents)
        rows = [start + index for index in range(len(self.agents)) if self._acting[start + index]]
        env = self.games[game]
        try:
            answer: Any = env.step({self.agents[row - start]: actions[row] for row in rows})
        except Exception as error:
            raise env_failed(self._name_game(game), "step", error) from error
        if not (isinstance(answer, tuple) and len(answer) == 5 and all(hasattr(part, "get") for part in answer)):
            raise FrameContractError(
                f"{self._name_game(game)}, step: expected dicts by agent (observations, rewards, terminations, "
                f"truncations, infos), got {brief(answer)}"
            )
        self._ages[game] += 1
        cut = self._limit is not None and self._ages[game] >= self._limit
        present = set(env.agents)
        finals = [final for row in rows if (final := self._take(row, answer, views, present, cut))]
        self._admit_newcomers(start, present, answer, views)
        if cut or not self._acting[start : start + len(self.agents)].any():
            for index, leaves in enumerate(self._reset_game(game, None)):
                _write(views.obs, start + index, leaves)
        return finals

    def _take(self, row: int, answer: Any, views: StepViews, present: set[Any], cut: bool) -> Final | None:
        """Write what happened to an agent that acted; its true successor if its episode ended."""
        agent, name = self.agents[row % len(self.agents)], self._name(row)
        obs, rewards, terminations, truncations, infos = answer
        if agent not in obs:
            raise FrameContractError(f"{name}, step: there is no observation : expected one of every agent that acted")
        leaves = self._admit(row, "step", obs[agent], infos.get(agent, {}))
        reward = rewards.get(agent, 0.0)
        if reward is None:
            raise FrameContractError(f"{name}, step: reward is None : expected a number")
        try:
            views.reward[row] = reward
            terminated, truncated = bool(terminations.get(agent, False)), bool(truncations.get(agent, False)) or cut
        except (TypeError, ValueError) as error:
            raise FrameContractError(f"{name}, step: expected a number and two flags ({error})") from error
        if not (terminated or truncated or agent in present):
            truncated = True
            self._warn_of_leaving(name)
        if not (terminated or truncated):
            _write(views.obs, row, leaves)
            return None
        views.terminated[row], views.truncated[row] = terminated, truncated
        self._acting[row], self._left[row] = False, True
        _write(views.obs, row, self._blank)
        return Final(row, tuple([np.array(v, s.stored) for v, s in zip(leaves, self.leaves, strict=True)]))

    def _admit_newcomers(self, start: int, present: set[Any], answer: Any, views: StepViews) -> None:
        """Rows of agents that did not act: those who have joined see something, and act from the next step on."""
        for index, agent in enumerate(self.agents):
            row = start + index
            if self._acting[row] or views.terminated[row] or views.truncated[row]:
                continue
            joins = agent in present and agent in answer[0] and not self._left[row]
            leaves = self._admit(row, "step", answer[0][agent], answer[4].get(agent, {})) if joins else self._blank
            _write(views.obs, row, leaves)
            self._acting[row] = joins

    def _reset_game(self, game: int, seed: int | None) -> list[Leaves]:
        """Begin a game; what each agent sees, blank for those who are not there."""
        env, start = self.games[game], game * len(self.agents)
        try:
            answer: Any = env.reset(seed=seed)
        except Exception as error:
            raise env_failed(self._name_game(game), "reset", error) from error
        if not (isinstance(answer, tuple) and len(answer) == 2 and all(hasattr(part, "get") for part in answer)):
            raise FrameContractError(
                f"{self._name_game(game)}, reset: expected dicts by agent (observations, infos), got {brief(answer)}"
            )
        obs, infos = answer
        present = [agent in obs and agent in env.agents for agent in self.agents]
        if not any(present):
            raise FrameContractError(
                f"{self._name_game(game)}, reset: nobody plays : expected an observation of at least one agent"
            )
        self._learn_infos(infos.get(self.agents[present.index(True)], {}))
        self._ages[game] = 0
        self._acting[start : start + len(present)] = present
        self._left[start : start + len(present)] = False
        return [
            self._admit(start + index, "reset", obs[agent], infos.get(agent, {})) if here else self._blank
            for index, (agent, here) in enumerate(zip(self.agents, present, strict=True))
        ]

    def _learn_infos(self, info: Any) -> None:
        """With the very first info it is known what is stored, and so what stands for an agent that is not there."""
        if self._blank:
            return
        self._infos.discover(info)
        blank = [np.zeros(leaf.shape, leaf.stored) for leaf in self.observation_spec.leaves]
        for leaf, value in zip(self.observation_spec.leaves, blank, strict=True):
            if leaf.key[-1] == ACTION_MASK[0]:  # a policy that may do nothing at all would have no probabilities
                value[...] = 1
        self._blank = (*blank, *self._infos.read({}))

    def _admit(self, row: int, doing: str, obs: Any, info: Any) -> Leaves:
        spec = self.observation_spec
        try:
            leaves = [leaf.admit(value) for leaf, value in zip(spec.leaves, spec.flatten(obs), strict=True)]
            return (*leaves, *self._infos.read(info)) if self.info_leaves else tuple(leaves)
        except LitCollectError as error:
            raise FrameContractError(f"{self._name(row)}, {doing}: {error}") from error

    def _warn_of_leaving(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{name} left its game neither terminated nor truncated : it is marked truncated, so that its value "
                f"is bootstrapped; let the env set terminations if its episode was over",
                stacklevel=5,
            )

    def _name(self, row: int) -> str:
        return f"env copy {self.first + row} (agent {self.agents[row % len(self.agents)]!r})"

    def _name_game(self, game: int) -> str:
        start = self.first + game * len(self.agents)
        return f"the game of env copies {start} to {start + len(self.agents) - 1}"


def _has_agents(env: object) -> bool:
    known = not isinstance(env, type) and hasattr(env, "possible_agents")
    return known and callable(getattr(env, "observation_space", None))


def _is_turn_based(env: object) -> bool:
    return _has_agents(env) and callable(getattr(env, "agent_iter", None)) and callable(getattr(env, "last", None))


def _copies(leaves: Leaves) -> Leaves:
    return tuple([leaf.copy() for leaf in leaves])


def _write(targets: Sequence[np.ndarray], row: int, leaves: Leaves) -> None:
    for target, leaf in zip(targets, leaves, strict=True):
        target[row] = leaf
