"""The oracle of these tests, a plain loop over single envs row by row, and vector envs to hold against it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from lit_collect.envs.base import BatchedEnv, StepViews
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.testing import CountingEnv

KINDS = {
    "sync": partial(SyncVectorEnv, copy=True),
    "sync-view": partial(SyncVectorEnv, copy=False),
    "async": partial(AsyncVectorEnv, context="fork"),
    "async-view": partial(AsyncVectorEnv, context="fork", copy=False),
    "async-pipe": partial(AsyncVectorEnv, context="fork", shared_memory=False),
    "async-pipe-view": partial(AsyncVectorEnv, context="fork", shared_memory=False, copy=False),
}


class Row(NamedTuple):
    """One transition of one env copy."""

    obs: tuple
    reward: float
    terminated: bool
    truncated: bool
    next_obs: tuple
    is_init: bool


def _plain(values: Sequence[np.ndarray]) -> tuple:
    return tuple(np.asarray(value).tolist() for value in values)


def hand_loop(env: CountingEnv, steps: int) -> list[Row]:
    """The transitions of one env, stepped as Gymnasium's manual shows it."""
    rows, is_init = [], True
    obs = env.reset()[0].copy()
    for _ in range(steps):
        next_obs, reward, terminated, truncated, _ = env.step(0)
        next_obs = next_obs.copy()
        rows.append(Row(_plain([obs]), reward, terminated, truncated, _plain([next_obs]), is_init))
        is_init = terminated or truncated
        obs = env.reset()[0].copy() if is_init else next_obs
    return rows


def by_step(env: BatchedEnv, steps: int, action: Sequence[np.ndarray] | None = None) -> list[list[Row]]:
    """Valid rows of every copy, through the readable `BatchedEnv.step`."""
    action = [np.zeros(env.num_envs, np.int64)] if action is None else action
    rows: list[list[Row]] = [[] for _ in range(env.num_envs)]
    obs, is_init = env.reset(), np.ones(env.num_envs, bool)
    for _ in range(steps):
        out = env.step(tuple(leaf.copy() for leaf in action))
        for i in np.flatnonzero(out.valid):
            flags = bool(out.terminated[i]), bool(out.truncated[i])
            before, after = _plain([leaf[i] for leaf in obs]), _plain([leaf[i] for leaf in out.next_obs])
            rows[i].append(Row(before, float(out.reward[i]), *flags, after, bool(is_init[i])))
        assert not out.reward[~out.valid].any()
        assert not (out.terminated | out.truncated)[~out.valid].any()
        # a row that is no transition hands its beginning on to the next one
        obs, is_init = out.obs, out.is_init
    return rows


def by_views(env: BatchedEnv, steps: int, action: Sequence[np.ndarray] | None = None) -> list[list[Row]]:
    """Valid rows of every copy, through `step_into` on storage that was allocated before."""
    n = env.num_envs
    action = [np.zeros(n, np.int64)] if action is None else action
    seen = env.observation_spec.empty((steps + 1, n))
    reward, flags = np.full((steps, n), np.nan, np.float32), np.zeros((2, steps, n), bool)
    valid, begins = np.ones((steps, n), bool), np.zeros((steps + 1, n), bool)
    begins[0] = True
    for target, leaf in zip(seen, env.reset(), strict=True):
        target[0] = leaf
    patches = {}
    for t in range(steps):
        views = StepViews(tuple(leaf[t + 1] for leaf in seen), reward[t], flags[0, t], flags[1, t], valid[t])
        for final in env.step_into(tuple(leaf.copy() for leaf in action), views):
            patches[t, final.row] = final.obs
            begins[t + 1, final.row] = True
        begins[t + 1] |= ~valid[t]
    rows: list[list[Row]] = [[] for _ in range(n)]
    for t in range(steps):
        for i in np.flatnonzero(valid[t]):
            before = _plain([leaf[t, i] for leaf in seen])
            after = _plain(patches.get((t, i), [leaf[t + 1, i] for leaf in seen]))
            values = float(reward[t, i]), bool(flags[0, t, i]), bool(flags[1, t, i])
            rows[i].append(Row(before, *values, after, bool(begins[t, i])))
    return rows


@pytest.fixture
def oracle() -> Callable[[CountingEnv, int], list[Row]]:
    return hand_loop


@pytest.fixture(params=[by_step, by_views], ids=["step", "step_into"])
def collect(request: pytest.FixtureRequest) -> Callable[..., list[list[Row]]]:
    """Both ways to step a `BatchedEnv`."""
    return request.param


@pytest.fixture
def vectorise() -> Iterator[Callable[[str, str, Sequence[Callable[[], Any]]], VectorEnv]]:
    """Makes vector envs of a kind and mode, and closes them."""
    made: list[VectorEnv] = []

    def make(kind: str, mode: str, makers: Sequence[Callable[[], Any]]) -> VectorEnv:
        made.append(KINDS[kind](list(makers), autoreset_mode=mode))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture
def adapt(vectorise: Callable[..., VectorEnv]) -> Iterator[Callable[..., VectorEnvAdapter]]:
    """Makes adapters of vector envs of a kind and mode, and closes them."""
    made: list[VectorEnvAdapter] = []

    def make(kind: str, mode: str, makers: Sequence[Callable[[], Any]], **options: Any) -> VectorEnvAdapter:
        made.append(VectorEnvAdapter(vectorise(kind, mode, makers), **options))
        return made[-1]

    yield make
    for env in made:
        env.close()
