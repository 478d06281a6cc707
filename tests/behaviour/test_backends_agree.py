"""Backends decide where frames are collected, never what they are: the same seed and copies give the same batches."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from lit_collect import Collector, ProcessBackend, RolloutConfig, check_batch
from lit_collect.frames import Key, columns_of, flatten_rows, valid_rows
from lit_collect.testing import CountingEnv, ScriptedEnv

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nursery")]

SEED = 11
WORKERS = (1, 2, 4)


# --- envs: what they give depends on their own seed and on what they were told ----------------------------------------


class Walk(gymnasium.Env):
    """A random walk that the actions shift; episodes end by chance, now and then by both reasons."""

    action_space = spaces.Discrete(3)
    dtype: Any = np.float32

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), self.dtype)
        self.position = np.zeros(2, self.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=2).astype(self.dtype)
        return self.observe(), {}

    def step(self, action):
        self.position = self.position + (self.np_random.normal(size=2) + 0.1 * float(action)).astype(self.dtype)
        ends = self.np_random.random(2) < 0.15
        return self.observe(), float(self.position[0]) + float(action), bool(ends[0]), bool(ends[1]), {}

    def observe(self):
        return self.position


class WideWalk(Walk):
    """The same in float64."""

    dtype = np.float64


class DictWalk(Walk):
    """The same as a nested dict, with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        inner = spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (1,), np.float32), "phase": spaces.Discrete(4, start=-2)})
        self.observation_space = spaces.Dict({"state": inner, "y": spaces.Box(-np.inf, np.inf, (), np.float32)})

    def observe(self):
        phase = int(self.position[0] * 10) % 4 - 2
        return {"state": {"x": self.position[:1], "phase": phase}, "y": self.position[1]}


class StartWalk(Walk):
    """Observes and takes numbers that do not begin at 0."""

    action_space = spaces.Discrete(3, start=5)

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Discrete(40, start=-20)

    def step(self, action):
        assert 5 <= action < 8
        return super().step(action)

    def observe(self):
        return int(np.clip(self.position[0] * 4, -20, 19))


class ImageWalk(Walk):
    """Paints where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (3, 40, 40), np.uint8)

    def observe(self):
        x, y = (np.clip(self.position * 4 + 20, 0, 39)).astype(int)
        image = np.full((3, 40, 40), abs(int(self.position[0] * 100)) % 256, np.uint8)
        image[:, x, y] = 255
        return image


class ForgetfulSync(SyncVectorEnv):
    """Spends a step on each reset."""

    def step(self, actions):
        return super().step(actions)


def vector_env(copies: int, mode: AutoresetMode, kind: type[SyncVectorEnv] = SyncVectorEnv) -> SyncVectorEnv:
    return kind([Walk] * copies, autoreset_mode=mode)


# --- policies: each action depends on its own row alone, so that no number of copies changes its rounding -------------


class Threshold(nn.Module):
    """Acts by a weight that the test changes, and says what it saw in float64."""

    def __init__(self, extras: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self.extras = extras

    def forward(self, observation: Any) -> Any:
        while not isinstance(observation, Tensor):
            observation = observation[sorted(observation)[-1]]
        seen = observation.reshape(len(observation), -1)[:, -1].float() * self.weight
        action = (seen > 0.5).long()
        if not self.extras:
            return action
        return {"action": action, "seen": seen.double()[:, None], "agent": {"sure": seen.abs() > 1, "_own": seen}}


def as_tensordict_module() -> TensorDictModule:
    return TensorDictModule(Threshold(extras=False), in_keys=["observation"], out_keys=["action"])


def by_hand(observation: Any) -> Tensor:
    while not isinstance(observation, Tensor):
        observation = observation[sorted(observation)[0]]
    return (observation.reshape(len(observation), -1)[:, 0] > 0.25).long()


class Sampling(nn.Module):
    """Draws its actions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        return {"logits": observation[:, :1] * self.weight}


# --- comparing --------------------------------------------------------------------------------------------------------


def run(env: Any, policy: Any, backend: Any = "direct", **options: Any) -> tuple[list[TensorDict], dict[str, Any]]:
    """All batches of a run whose policy learns a little between them, and its statistics."""
    batches = []
    with Collector(env, policy, backend=backend, seed=SEED, **options) as collector:
        for batch in collector:
            check_batch(batch)
            batches.append(batch)
            if isinstance(policy, nn.Module):
                next(policy.parameters()).data.add_(0.25)
                collector.update_policy_weights_()
        return batches, collector.statistics()


def difference(one: TensorDict, other: TensorDict) -> str:
    """In what two batches differ; empty if they are equal to the bit."""
    if one.batch_size != other.batch_size or one.names != other.names:
        return f"{one.batch_size} {one.names} and {other.batch_size} {other.names}"
    first, second = columns_of(one), columns_of(other)
    if first.keys() != second.keys():
        return f"the keys {sorted(first.keys() ^ second.keys())}"
    return " ".join(str(key) for key, column in first.items() if not _same_bits(column, second[key]))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().view(-1).numpy().tobytes() == other.contiguous().view(-1).numpy().tobytes()


def assert_same(env: Any, make_policy: Callable[[], Any], workers: tuple[int, ...] = WORKERS, **options: Any) -> None:
    """Whether processes give what is given directly, in all keys of all batches, and count it alike."""
    expected, counted = run(env, make_policy(), **options)
    assert len(expected) > 1
    for count in workers:
        batches, statistics = run(env, make_policy(), ProcessBackend(count), **options)
        assert [difference(one, other) for one, other in zip(expected, batches, strict=True)] == [""] * len(batches)
        counters = [name for name in counted if name.startswith(("frames", "batches", "policy_version"))]
        assert {name: statistics[name] for name in counters} == {name: counted[name] for name in counters}


# --- the same data ----------------------------------------------------------------------------------------------------


SCRIPTED = partial(ScriptedEnv, [[0.0, 1.0], [0.5, -1.0], [1.0, 2.0], [0.1, 0.2]], [1, 2, 3], ends="both")
COUNTING = [partial(CountingEnv, i, (2 + i % 3, 4), ends=("terminated", "truncated", "both")[i % 3]) for i in range(8)]
SAMENESS = {
    "walk": (Walk, Threshold, 8),
    "walk in 4 copies": (Walk, Threshold, 4),
    "function": (Walk, lambda: by_hand, 8),
    "TensorDict module": (Walk, as_tensordict_module, 8),
    "one factory for each copy": (COUNTING, Threshold, None),
    "one factory for each of 4 copies": (COUNTING[:4], partial(Threshold, extras=False), 4),
    "scripted": (SCRIPTED, Threshold, 4),
    "CartPole": ("CartPole-v1", Threshold, 8),
    "dict": (DictWalk, Threshold, 8),
    "discrete start": (StartWalk, Threshold, 4),
    "images": (ImageWalk, Threshold, 4),
}


@pytest.mark.parametrize(("env", "policy", "copies"), SAMENESS.values(), ids=SAMENESS.keys())
def test_processes_give_the_same_batches_as_this_process(env, policy, copies):
    assert_same(env, policy, num_envs=copies, frames_per_batch=48, total_frames=168)  # the last one is shorter


ROLLOUTS = {
    "set_truncated": RolloutConfig(set_truncated=True),
    "max_frames_per_traj": RolloutConfig(max_frames_per_traj=3),
    "reset_at_each_iter": RolloutConfig(reset_at_each_iter=True),
    "all of these": RolloutConfig(set_truncated=True, max_frames_per_traj=3, reset_at_each_iter=True),
    "keep_float64": RolloutConfig(keep_float64=True),
}


@pytest.mark.parametrize("rollout", ROLLOUTS.values(), ids=ROLLOUTS.keys())
def test_rollout_options_mean_the_same_in_processes(rollout):
    assert_same(WideWalk, Threshold, (1, 4), num_envs=4, frames_per_batch=24, total_frames=56, rollout=rollout)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_copies_of_vector_envs_are_the_same_in_processes(mode):
    options = {"num_envs": 4, "frames_per_batch": 32, "total_frames": 56}
    expected, _ = run(partial(vector_env, 4, mode), Threshold(), **options)
    for workers in (1, 2):
        env = partial(vector_env, 4 // workers, mode)
        batches, _ = run(env, Threshold(), ProcessBackend(workers), **options)
        assert [difference(one, other) for one, other in zip(expected, batches, strict=True)] == [""] * len(batches)


@pytest.mark.parametrize("kind", ["SyncVectorEnv", "CartPoleVectorEnv"])
def test_masked_rows_are_the_same_in_one_process(kind):
    envs = {
        "SyncVectorEnv": partial(vector_env, 4, AutoresetMode.NEXT_STEP, ForgetfulSync),
        "CartPoleVectorEnv": partial(CartPoleVectorEnv, 4),
    }
    expected, _ = run(envs[kind], Threshold(), frames_per_batch=120, total_frames=308)
    assert any(not valid_rows(batch).all() for batch in expected)
    batches, _ = run(envs[kind], Threshold(), ProcessBackend(1), frames_per_batch=120, total_frames=308)
    assert [difference(one, other) for one, other in zip(expected, batches, strict=True)] == [""] * len(batches)


@pytest.mark.parametrize("policy", [Sampling, lambda: None], ids=["sampling", "random"])
@pytest.mark.parametrize("sync", [True, False])
def test_one_process_draws_the_same_actions(policy, sync):
    options = {
        "num_envs": 4,
        "frames_per_batch": 24,
        "total_frames": 64,
        "rollout": RolloutConfig(init_random_frames=6),
    }
    expected, _ = run(Walk, policy(), **options)
    batches, _ = run(Walk, policy(), ProcessBackend(1, sync=sync), **options)
    # an asynchronous worker goes on before it can know what is published meanwhile
    compared = len(expected) if sync or policy() is None else 1
    differences = [difference(one, other) for one, other in zip(expected, batches, strict=True)]
    assert differences[:compared] == [""] * compared


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("asked", [5, 30])
def test_random_frames_are_as_many_with_any_number_of_workers(asked, workers):
    options = {"num_envs": 4, "frames_per_batch": 24, "total_frames": 56}
    expected, _ = run(Walk, Threshold(), rollout=RolloutConfig(init_random_frames=asked), **options)
    rollout = RolloutConfig(init_random_frames=asked)
    batches, _ = run(Walk, Threshold(), ProcessBackend(workers), rollout=rollout, **options)
    for one, other in zip(expected, batches, strict=True):
        assert torch.equal(one["collector", "policy_version"], other["collector", "policy_version"])
    at_random = sum(int((batch["collector", "policy_version"] == -1).sum()) for batch in batches)
    assert at_random == -(-asked // 4) * 4


@pytest.mark.parametrize("workers", [2, 4])
def test_asynchronous_workers_play_the_episodes_of_this_process(workers):
    options = {"num_envs": 4, "frames_per_batch": 24, "total_frames": 168}
    expected, _ = run(Walk, by_hand, **options)
    batches, _ = run(Walk, by_hand, ProcessBackend(workers, sync=False), **options)
    assert sum(batch.numel() for batch in batches) == 168
    streams = streams_of(expected, 4)
    for number, columns in streams_of(batches, 4).items():
        for key, column in columns.items():
            rows = min(len(column), len(streams[number][key]))  # how far each copy gets is up to the system
            assert _same_bits(column[:rows], streams[number][key][:rows]), key


def streams_of(batches: list[TensorDict], copies: int) -> dict[int, dict[Key, Tensor]]:
    """All rows of each env copy, by the copy that their ids name."""
    rows = torch.cat([flatten_rows(batch) for batch in batches])
    owner = rows["collector", "traj_ids"] % copies
    return {number: columns_of(rows[owner == number]) for number in range(copies)}


# --- how many copies --------------------------------------------------------------------------------------------------


SIZES = {
    "one copy": (Walk, None, 1, (24,)),
    "one copy that was asked for": (Walk, 1, 1, (1, 24)),
    "one copy for each worker": (Walk, None, 4, (4, 6)),
    "one factory for each copy": (COUNTING[:4], None, 2, (4, 6)),
    "a vector env": (partial(vector_env, 3, AutoresetMode.NEXT_STEP), None, 1, (3, 8)),
    "a vector env in each worker": (partial(vector_env, 3, AutoresetMode.NEXT_STEP), None, 2, (6, 4)),
    "a vector env in each worker, as asked for": (partial(vector_env, 2, AutoresetMode.NEXT_STEP), 8, 4, (8, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("env", "num_envs", "workers", "shape"), SIZES.values(), ids=SIZES.keys())
def test_batches_have_the_copies_of_all_workers(env, num_envs, workers, shape):
    copies = shape[0] if len(shape) == 2 else 1
    with Collector(env, num_envs=num_envs, frames_per_batch=24, backend=ProcessBackend(workers)) as collector:
        batch = collector.collect()
        assert collector.num_envs == copies
    assert batch.batch_size == shape
    assert batch.names[-1] == "time"
    assert batch["collector", "traj_ids"][..., 0].reshape(-1).tolist() == list(range(copies))
    check_batch(batch)


def test_one_copy_of_an_asynchronous_worker_is_not_batched_either():
    with Collector(Walk, frames_per_batch=24, backend=ProcessBackend(1, sync=False)) as collector:
        assert collector.collect().batch_size == (24,)


def test_copies_of_two_workers_are_not_alike():
    with Collector(Walk, num_envs=4, frames_per_batch=4, seed=SEED, backend=ProcessBackend(2)) as collector:
        starts = collector.collect()["observation"][:, 0]
    assert len(starts.unique(dim=0)) == 4


# --- what cannot be shared among processes, which is said before one is started ---------------------------------------


class Watched(ProcessBackend):
    """Knows whether anything was started."""

    started = 0

    def launcher(self):
        self.started += 1
        return super().launcher()


REFUSED = {
    "copies": (Walk, None, 8, r"num_envs must be a multiple of num_collectors=3, got 8; use 6 or 9"),
    "few copies": (Walk, None, 2, r"num_envs must be a multiple of num_collectors=3, got 2; use 3"),
    "factories": (COUNTING[:4], None, None, r"num_envs must be a multiple of num_collectors=3, got 4; use 3 or 6"),
    "live env": (Walk(), None, None, r"a live env cannot go to another process : expected what makes it, got <Walk"),
    "live vector env": (
        vector_env(3, AutoresetMode.NEXT_STEP), None, None, r"a live env cannot .*; pass an id, a callable or an EnvFac"
    ),
    "lazy policy": (
        Walk, nn.Sequential(nn.LazyLinear(3)), 3,
        r"policy has parameters without a shape : .*\['0.weight', '0.bias'\]; call it once on an observation first",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("env", "policy", "copies", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("sync", [True, False])
def test_what_cannot_be_shared_is_refused_before_a_process_is_started(sync, env, policy, copies, message):
    backend = Watched(3, sync)
    with pytest.raises(ValueError, match=message):
        Collector(env, policy, num_envs=copies, frames_per_batch=24, backend=backend)
    assert backend.started == 0


def test_live_env_in_one_process_is_refused_too():
    with pytest.raises(ValueError, match="a live env cannot go to another process"):
        Collector(Walk(), frames_per_batch=24, backend=ProcessBackend(1))


def test_lazy_policy_that_was_called_once_is_taken():
    policy = nn.Sequential(nn.LazyLinear(3), Index())
    policy(torch.zeros(1, 2))
    assert_same(Walk, lambda: copy.deepcopy(policy), (1,), num_envs=2, frames_per_batch=4, total_frames=12)


class Index(nn.Module):
    """Takes the largest of its inputs."""

    def forward(self, values: Tensor) -> Tensor:
        return values.argmax(-1)


UNLIKE = {
    "observation": (
        ["CartPole-v1", "Acrobot-v1"],
        "observation_space of env copy 1 differs : .* as in copy 0, got Box",
    ),
    "action": (
        [partial(CountingEnv, i, action_space=spaces.Discrete(2 + i // 2)) for i in range(4)],
        r"action_space of env copy 2 differs : expected Discrete\(2\) as in copy 0, got Discrete\(3\)",
    ),
}


@pytest.mark.parametrize(("env", "message"), UNLIKE.values(), ids=UNLIKE.keys())
@pytest.mark.parametrize("backend", ["direct", ProcessBackend(2), ProcessBackend(2, sync=False)], ids=repr)
def test_copies_with_other_spaces_are_refused_by_every_backend(backend, env, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[") if "Box" in message else message):
        Collector(env, frames_per_batch=24, backend=backend)


def test_vector_envs_that_do_not_fit_the_copies_asked_for_are_refused():
    env = partial(vector_env, 4, AutoresetMode.NEXT_STEP)
    message = "a vector env of 4 copies in each of 2 workers : expected 8 or None, got 6"
    with pytest.raises(ValueError, match=message):
        Collector(env, num_envs=6, frames_per_batch=24, backend=ProcessBackend(2))


class Growing:
    """Makes a larger vector env in whichever process comes second."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> SyncVectorEnv:
        try:
            Path(self.path).touch(exist_ok=False)
        except FileExistsError:
            return vector_env(3, AutoresetMode.NEXT_STEP)
        return vector_env(2, AutoresetMode.NEXT_STEP)


def test_vector_envs_of_different_sizes_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"the vector env of worker 1 differs : expected \d copies as in worker 0, got"
    ):
        Collector(Growing(str(tmp_path / "made")), frames_per_batch=24, backend=ProcessBackend(2))
