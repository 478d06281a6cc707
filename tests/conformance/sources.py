"""Every kind of env source, with a plain loop over the same env beside each, and what a `Collector` makes of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from tensordict import TensorDictBase
from torch import Tensor

from lit_collect import Collector, FrameContractError, check_batch
from lit_collect.seeding import env_seeds
from lit_collect.testing import CountingEnv
from tests.envs.games import Relay

SEED = 3
LENGTHS = [(1,), (2, 1), (3,), (50, 2)]
ENDS = ["terminated", "truncated", "both", "terminated"]
MAKERS = [partial(CountingEnv, i, LENGTHS[i], ends=ENDS[i]) for i in range(len(LENGTHS))]
REUSING = [partial(make, reuse_buffers=True) for make in MAKERS]
STEPS = 56  # of every copy, if none is spent on resetting: longer than the longest episode
SHORT, LONG = 7, 64  # steps of a batch

Columns = dict[Any, np.ndarray]
"""Rows [K, ...] of one copy by key."""


@dataclass(frozen=True)
class Source:
    """One kind of env, and how a plain loop steps it."""

    make: Callable[[], Any]
    """What a `Collector` takes: called anew for each."""
    loop: Callable[[Callable[..., Any], int], list[Iterator[dict[Any, Any]]]]
    """Takes a policy and a seed; the endless rows of each copy."""
    copies: int = len(MAKERS)
    num_envs: int | None = None
    """What the collector is told."""
    choices: int = 2
    """Actions of a Discrete space; 0: a Box of one number."""
    keys: tuple[str, ...] = ("observation",)
    masked: bool = False
    """Whether rows are spent on resetting, or on agents that are gone."""
    random: bool = False
    """Whether its episodes depend on their seeds."""
    needs: tuple[str, ...] = ()
    """Packages beyond Gymnasium."""


class Policy:
    """Acts by what it sees, and remembers it. Sums are of whole numbers, so that no order of summation changes them."""

    def __init__(self, choices: int) -> None:
        self.choices = choices
        self.broken = False
        self.seen: list[Tensor] = []

    def __call__(self, observation: Tensor | dict[str, Tensor]) -> Tensor:
        first = observation if isinstance(observation, Tensor) else next(iter(observation.values()))
        self.seen.append(first.clone())
        numbers = (first.reshape(len(first), -1).double() * 1000).long().sum(1)
        if not self.choices:
            return torch.where(numbers > 0, torch.nan if self.broken else 0.5, -0.25)[:, None].float()
        return numbers % self.choices + (self.choices if self.broken else 0)

    def of_array(self, observation: Any, dtype: Any = np.int64) -> np.ndarray:
        """The actions of a plain loop."""
        first = next(iter(observation.values())) if isinstance(observation, dict) else observation
        seen = list(self.seen)
        answer = self(torch.from_numpy(np.asarray(first, first.dtype))).numpy().astype(dtype)
        self.seen = seen
        return answer


class Counter(Policy):
    """Counts, as its recurrent state, the steps since it was told that an episode begins."""

    def initial_state(self, num_envs: int) -> Tensor:
        return torch.zeros(num_envs, dtype=torch.int64)

    def __call__(self, observation: Any, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().__call__(observation), state + 1


def row(obs: Any, action: Any, reward: Any, successor: Any, flags: Sequence[Any], first: bool) -> dict[Any, Any]:
    """One transition by key, copied."""
    rows: dict[Any, Any] = {"action": _stored(action), "is_init": bool(first)}
    for before, value in (((), obs), (("next",), successor)):
        for key, leaf in (value if isinstance(value, dict) else {"observation": value}).items():
            rows[(*before, key)] = _stored(leaf)
    rows["next", "reward"] = np.float32(reward)
    rows["next", "terminated"], rows["next", "truncated"] = map(bool, flags)
    rows["next", "done"] = bool(flags[0]) or bool(flags[1])
    return rows


def _stored(value: Any) -> np.ndarray:
    return np.array(value, np.float32 if value.dtype == np.float64 else value.dtype)


def single_loop(make: Callable[[], Any], act: Callable[..., Any], seed: int | None) -> Iterator[dict[Any, Any]]:
    """What Gymnasium's manual does with one env."""
    env = make()
    obs, first = env.reset(seed=seed)[0], True
    obs = {key: leaf.copy() for key, leaf in obs.items()} if isinstance(obs, dict) else obs.copy()
    while True:
        batched = {key: leaf[None] for key, leaf in obs.items()} if isinstance(obs, dict) else obs[None]
        action = act(batched, env.action_space.dtype)[0]
        successor, reward, *flags, _ = env.step(action)
        yield row(obs, action, reward, successor, flags, first)
        first = bool(flags[0] or flags[1])
        obs = env.reset()[0] if first else successor
        obs = {key: leaf.copy() for key, leaf in obs.items()} if isinstance(obs, dict) else obs.copy()


def single_loops(makers: Sequence[Callable[[], Any]], policy: Policy, seed: int) -> list[Iterator[dict[Any, Any]]]:
    """One loop for each copy, under the seeds that the copies of a collector get."""
    seeds = env_seeds(seed, "train", range(len(makers)))
    return [single_loop(make, policy.of_array, one) for make, one in zip(makers, seeds, strict=True)]


def vector_loops(
    make: Callable[[], Any], to_seed: Callable[[list[int]], Any], steps: int, policy: Policy, seed: int
) -> list[Iterator[dict[Any, Any]]]:
    """The rows of a vector env in its own mode, NEXT_STEP or SAME_STEP, as Gymnasium describes them."""
    env = make()
    lines: list[list[dict[Any, Any]]] = [[] for _ in range(env.num_envs)]
    dtype = env.single_action_space.dtype
    obs = env.reset(seed=to_seed(env_seeds(seed, "train", range(env.num_envs))))[0].copy()
    same_step = env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    ended, first = np.zeros(env.num_envs, bool), np.ones(env.num_envs, bool)
    for _ in range(steps):
        action = policy.of_array(obs, dtype)
        after, reward, terminated, truncated, infos = env.step(action)
        done = terminated.astype(bool) | truncated.astype(bool)
        for i in np.flatnonzero(~ended):
            successor = infos["final_obs"][i] if same_step and done[i] else after[i]
            lines[i].append(row(obs[i], action[i], reward[i], successor, (terminated[i], truncated[i]), first[i]))
        first = done if same_step else ended
        ended = np.zeros_like(done) if same_step else done
        obs = after.copy()
    env.close()
    return [iter(line) for line in lines]


def game_loops(policy: Policy, seed: int) -> list[Iterator[dict[Any, Any]]]:
    """Each agent's rows of two like games, as PettingZoo's manual plays them."""
    del seed
    return [line for _ in range(2) for line in _game_loop(Relay(), policy)]


def _game_loop(game: Relay, policy: Policy) -> list[Iterator[dict[Any, Any]]]:
    lines: dict[str, list[dict[Any, Any]]] = {name: [] for name in game.possible_agents}
    seen: dict[str, np.ndarray] = {}
    for step in range(3 * STEPS):
        if not game.agents:
            seen, begun = {name: obs.copy() for name, obs in game.reset()[0].items()}, step
        actions = {name: policy.of_array(seen[name][None])[0] for name in game.agents}
        answer = game.step(actions)
        obs = {name: value.copy() for name, value in answer[0].items()}
        for name, action in actions.items():
            flags = answer[2][name], answer[3][name]
            lines[name].append(row(seen[name], action, answer[1][name], obs[name], flags, step == begun))
        seen = obs
    return [iter(line) for line in lines.values()]


class DenseFinals(VectorEnv):
    """`CountingEnv` copies in SAME_STEP mode whose `final_obs` is one array, without a mask, and now and then absent.

    Args:
        tensors: gives and takes tensors, always the same ones.
        name: of the final observations.
    """

    def __init__(self, *, tensors: bool = False, name: str = "final_obs") -> None:
        self.copies = [make() for make in MAKERS]
        self.num_envs = len(self.copies)
        self.single_observation_space, self.single_action_space = spaces.Box(-np.inf, np.inf, (3,)), spaces.Discrete(2)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.num_envs, 3))
        self.action_space = spaces.MultiDiscrete([2] * self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._tensors, self._final = tensors, name
        self._arrays = [np.zeros((self.num_envs, 3), np.float32) for _ in range(2)]
        self._rows = [np.zeros(self.num_envs, dtype) for dtype in (np.float32, bool, bool)]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._arrays[0][:] = [copy.reset()[0] for copy in self.copies]
        return self._out(self._arrays[0]), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._tensors:
            assert isinstance(actions, Tensor)
        obs, last = self._arrays
        last[:] = -7  # of the copies that go on
        for i, copy in enumerate(self.copies):
            obs[i], self._rows[0][i], self._rows[1][i], self._rows[2][i], _ = copy.step(int(actions[i]))
            if copy.finished:
                last[i] = obs[i]
                obs[i] = copy.reset()[0]
        done = self._rows[1] | self._rows[2]
        infos = {self._final: self._out(last)} if done.any() else {}
        return self._out(obs), *map(self._out, self._rows), infos

    def _out(self, array: np.ndarray) -> Any:
        return torch.from_numpy(array) if self._tensors else array.copy()


class ForgetfulSync(SyncVectorEnv):
    """A vector env that nobody knows to reset single copies: it spends a step on each reset in NEXT_STEP mode."""

    def step(self, actions: Any) -> Any:
        return super().step(actions)


def make_cartpole(copies: int) -> VectorEnv:
    return gymnasium.make_vec("CartPole-v1", num_envs=copies, vectorization_mode="vector_entry_point")


def make_atari(mode: str) -> VectorEnv:
    from ale_py.vector_env import AtariVectorEnv

    limits = {"max_num_frames_per_episode": 52, "noop_max": 4, "use_fire_reset": False}
    return AtariVectorEnv(game="pong", num_envs=2, autoreset_mode=mode, num_threads=1, **limits)


def make_pool() -> Any:
    import envpool

    seeds = env_seeds(SEED, "train", range(2))
    options = {"num_envs": 2, "max_episode_steps": 9, "num_threads": 1}
    return envpool.make("CartPole-v1", env_type="gymnasium", seed=seeds[0] % 1000, **options)


def make_control() -> gymnasium.Env:
    import shimmy  # noqa: F401  # registers the envs

    return gymnasium.make("dm_control/cartpole-balance-v0", task_kwargs={"time_limit": 0.1})


def make_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=9)


def counting(make: Callable[[], Any], **options: Any) -> Source:
    """A source of the four counting copies."""
    return Source(make, partial(single_loops, MAKERS), **options)


def _vectorised() -> Iterator[tuple[str, Source]]:
    for mode, copy in product(("NextStep", "SameStep", "Disabled"), (True, False)):
        view = "" if copy else "-view"
        makers = MAKERS if mode == "SameStep" else REUSING
        yield f"sync-{mode}{view}", counting(partial(SyncVectorEnv, makers, autoreset_mode=mode, copy=copy))
        for shared in (True, False):
            options = {"autoreset_mode": mode, "copy": copy, "shared_memory": shared, "context": "fork"}
            masked = mode == "NextStep" and not shared
            name = f"async-{mode}{view}{'' if shared else '-pipe'}"
            yield name, counting(partial(AsyncVectorEnv, makers, **options), masked=masked)


def _first(seeds: list[int]) -> int:
    return seeds[0]


def _each(seeds: list[int]) -> np.ndarray:
    return np.array(seeds)


def _none(seeds: list[int]) -> None:
    del seeds


def _native(make: Callable[[], Any], seed: Callable[[list[int]], Any], **options: Any) -> Source:
    # copies that reset less often have more rows, and where the env would spend steps on resetting we may not
    steps = 3 * STEPS if options.get("masked") else STEPS * 5 // 4
    return Source(make, partial(vector_loops, make, seed, steps), **options)


SOURCES: dict[str, Source] = {
    "live-single": Source(REUSING[1], partial(single_loops, MAKERS[:1]), copies=1),
    "single": Source(lambda: MAKERS[0], partial(single_loops, MAKERS[:1]), copies=1),
    "direct": counting(lambda: MAKERS),
    "direct-reusing": counting(lambda: REUSING),
    "direct-id": Source(lambda: make_pole, partial(single_loops, [make_pole] * 3), copies=3, num_envs=3, random=True),
    **dict(_vectorised()),
    "sync-forgetful": counting(partial(ForgetfulSync, REUSING, autoreset_mode="NextStep", copy=False), masked=True),
    "dense": counting(DenseFinals),
    "torch": counting(partial(DenseFinals, tensors=True)),
    "torch-observation": counting(partial(DenseFinals, tensors=True, name="final_observation")),
    "cartpole-vector": _native(partial(make_cartpole, 3), _first, copies=3, masked=True, random=True),
    "atari-NextStep": _native(partial(make_atari, "NextStep"), _each, copies=2, choices=6, needs=("ale_py", "cv2")),
    "atari-SameStep": _native(partial(make_atari, "SameStep"), _each, copies=2, choices=6, needs=("ale_py", "cv2")),
    "envpool": _native(make_pool, _none, copies=2, masked=True, needs=("envpool",)),
    "game": Source(lambda: Relay, game_loops, copies=6, num_envs=6, masked=True),
    "dm-control": Source(
        lambda: make_control,
        partial(single_loops, [make_control] * 2),
        copies=2,
        num_envs=2,
        choices=0,
        keys=("position", "velocity"),
        random=True,
        needs=("shimmy", "dm_control"),
    ),
}
SOURCES["live-single"] = Source(REUSING[0], SOURCES["single"].loop, copies=1)


@dataclass
class Recording:
    """What a collector made of a source, and copies of it from the moment it was handed out."""

    batches: list[TensorDictBase] = field(default_factory=list)
    kept: list[TensorDictBase] = field(default_factory=list)
    seen: Tensor | None = None
    """[N, all T, ...]: what the policy was given."""
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def stream(self) -> TensorDictBase:
        """[N, all T]."""
        return torch.cat(self.kept, 1)

    def lines(self) -> list[TensorDictBase]:
        """The transitions of each copy."""
        stream = self.stream
        mask = stream.get(("collector", "mask"), None)
        return [line if mask is None else line[mask[i]] for i, line in enumerate(stream)]


def record(source: Source, steps: int, seed: int = SEED) -> Recording:
    """Collect the whole budget in batches of that many steps; a recurrent policy makes the short ones."""
    made, policy, recording = source.make(), (Counter if steps == SHORT else Policy)(source.choices), Recording()
    frames = source.copies * STEPS
    options = {"num_envs": source.num_envs, "total_frames": frames, "seed": seed}
    try:
        with Collector(made, policy, frames_per_batch=source.copies * min(steps, STEPS), **options) as collector:
            for batch in collector:
                check_batch(batch)
                recording.batches.append(batch)
                recording.kept.append((batch if batch.ndim == 2 else batch.unsqueeze(0)).clone())
            recording.statistics = collector.statistics()
    finally:
        close(made)
    recording.seen = torch.stack(policy.seen, 1)
    return recording


@dataclass
class Interruptions:
    """First batches after what a user does in between, and whether the error was the right one."""

    before: TensorDictBase
    after_reset: TensorDictBase
    after_two_resets: TensorDictBase
    after_error: TensorDictBase
    error: str


def interrupt(source: Source) -> Interruptions:
    """Reset in the middle of episodes and right after ends, reset twice, and let the policy be wrong."""
    made, policy = source.make(), Policy(source.choices)
    try:
        options = {"num_envs": source.num_envs, "seed": SEED}
        with Collector(made, policy, frames_per_batch=source.copies * 4, **options) as collector:
            before = collector.collect()
            collector.reset()
            first = collector.collect()
            collector.reset()
            collector.reset()
            second = collector.collect()
            policy.broken, error = True, ""
            try:
                collector.collect()
            except FrameContractError as raised:
                error = str(raised)
            policy.broken = False
            third = collector.collect()
    finally:
        close(made)
    batches = [batch if batch.ndim == 2 else batch.unsqueeze(0) for batch in (before, first, second, third)]
    return Interruptions(*batches, error=error)


def close(made: Any) -> None:
    """Close what was live."""
    if isinstance(made, (gymnasium.Env, VectorEnv)):
        made.close()


def columns(line: TensorDictBase, source: Source) -> Columns:
    """The transitions of a copy as arrays."""
    keys = [(*before, key) for key in source.keys for before in ((), ("next",))]
    flags = [("is_init",), *(("next", name) for name in ("reward", "terminated", "truncated", "done"))]
    plain = {key[0] if len(key) == 1 and key[0] == "is_init" else key: line[key][..., 0].numpy() for key in flags}
    return {**{key: line[key].numpy() for key in keys}, **plain, "action": line["action"].numpy()}


def wanted(source: Source, counts: Sequence[int], seed: int = SEED) -> list[Columns]:
    """As many rows of each copy from the plain loop."""
    loops = source.loop(Policy(source.choices), seed)
    found = []
    for loop, count in zip(loops, counts, strict=True):
        rows = [next(loop) for _ in range(count)]
        found.append({key: np.stack([one[key] for one in rows]) for key in rows[0]})
    return found
