"""`verify` and `VerifiedEnv` find what envs do otherwise than they should, and nothing else."""

import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from lit_collect import Collector, FrameContractError, RolloutConfig
from lit_collect.envs.base import BatchedEnv, Final, Leaves, StepViews
from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.factories import resolve_env
from lit_collect.envs.pettingzoo import ParallelEnvAdapter
from lit_collect.envs.spaces import TreeSpec
from lit_collect.envs.vector import VectorEnvAdapter
from lit_collect.envs.verify import Finding, VerifiedEnv, check_seeding, verify
from lit_collect.testing import ScriptedEnv
from tests.envs.games import Relay


class Walk(gymnasium.Env):
    """Walks from a place that its seed chooses, always one further; an episode has three steps."""

    observation_space = spaces.Box(0, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = float(self.np_random.integers(50)), 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), 1.0, self.steps == 3, False, {}

    def observe(self):
        return np.array([self.place, self.steps], np.float32)


class Forgetful(Walk):
    """Begins anywhere, whatever its seed."""

    counts = iter(range(50))

    def reset(self, *, seed=None, options=None):
        super().reset()
        self.place = next(self.counts)
        return self.observe(), {}


class SelfResetting(Walk):
    """Resets itself at the end of an episode and hands out that observation."""

    def step(self, action):
        answer = super().step(action)
        return (super().reset(seed=7)[0], *answer[1:]) if answer[2] else answer

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=7)


class Speaking(Walk):
    """Says a word."""

    observation_space = spaces.Dict({"word": spaces.Text(4), "place": Walk.observation_space})

    def observe(self):
        return {"word": "zürn"[: self.steps + 1], "place": super().observe()}


class Own(BatchedEnv):
    """A batched env of three copies that counts, ends each episode after two steps, and breaks a rule."""

    num_envs = 3
    first = 10

    def __init__(self, broken: str = "") -> None:
        self.observation_spec = TreeSpec.of(spaces.Box(0, 9, (1,), np.float32), "observation")
        self.action_spec = TreeSpec.of(spaces.Discrete(2), "action")
        self.broken = broken
        self.may_mask = broken in ("reward", "flag")
        self.place = np.zeros(3, np.float32)
        self.steps = 0
        self.closes = 0

    def reset(self, seeds=None, mask=None) -> Leaves:
        chosen = np.ones(3, bool) if mask is None or self.broken == "mask" else mask
        self.place[chosen] = 0
        dtype = np.float64 if self.broken == "kinds" else np.float32
        return (self.place[:, None].astype(dtype),)

    def step_into(self, action: Leaves, views: StepViews) -> list[Final]:
        self.steps += 1
        self.place += 1
        views.reward[:] = 1
        self.mistake(views)
        if self.broken in ("reward", "flag"):
            self.place[:] = self.place % 9
            views.obs[0][:, 0] = self.place
            return []
        ended = np.flatnonzero(self.place >= 2).tolist()
        views.terminated[ended] = True
        finals = [Final(row, (np.array([self.final(row)], self.final_dtype),)) for row in ended]
        self.place[ended] = 0
        views.obs[0][:, 0] = self.place
        if self.broken == "no final":
            return finals[1:]
        return [*finals, *([] if ended or self.broken != "final" else [Final(2, (np.ones(1, np.float32),))])]

    @property
    def final_dtype(self):
        return np.float64 if self.broken == "final kinds" else np.float32

    def final(self, row):
        return {"final nan": np.nan, "final bounds": 99.0}.get(self.broken, self.place[row]) if row == 1 else 2.0

    def mistake(self, views: StepViews) -> None:
        if self.broken == "not finite":
            views.reward[1] = np.inf
        if self.broken in ("reward", "flag"):
            views.valid[2] = False
            views.reward[2] = 5.0 if self.broken == "reward" else 0.0
            views.truncated[2] = self.broken == "flag"

    def close(self) -> None:
        self.closes += 1


class Freezing(gymnasium.vector.VectorEnv):
    """Holds still all copies while one is reset, as the JAX envs of Gymnasium 1.4 do."""

    num_envs = 2
    single_observation_space = spaces.Box(0, 9, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 9, (2, 1), np.float32)
    action_space = spaces.MultiDiscrete([2, 2])
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.place, self.ended = np.array([0, 0]), np.zeros(2, bool)
        return self.place[:, None].astype(np.float32), {}

    def step(self, actions):
        self.place = np.where(self.ended, 0, self.place + (0 if self.ended.any() else 1))
        self.ended = self.place == [2, 5]
        return self.place[:, None].astype(np.float32), np.zeros(2), self.ended, np.zeros(2, bool), {}


class Paying(gymnasium.vector.VectorEnv):
    """Says that it is in NEXT_STEP mode and pays for the steps that reset."""

    num_envs = 1
    single_observation_space = observation_space = spaces.Box(0, 9, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    autoreset_mode = gymnasium.vector.AutoresetMode.NEXT_STEP

    def reset(self, *, seed=None, options=None):
        self.place = 0
        return self.observe(), {}

    def step(self, actions):
        self.place = (self.place + 1) % 4
        return self.observe(), np.ones(1), np.array([self.place == 3]), np.zeros(1, bool), {}

    def observe(self):
        return np.array([[self.place]], np.float32)


def make_direct(*kinds):
    return DirectEnv([kind() for kind in kinds])


GOOD = {
    "direct": lambda: make_direct(Walk, Walk),
    "sync": lambda: VectorEnvAdapter(SyncVectorEnv([Walk, Walk])),
    "same step": lambda: VectorEnvAdapter(SyncVectorEnv([Walk, Walk], autoreset_mode="SameStep")),
    "masked": lambda: VectorEnvAdapter(gymnasium.make_vec("CartPole-v1", num_envs=2)),
    "game": lambda: ParallelEnvAdapter([Relay()]),
    "scalars": lambda: DirectEnv([gymnasium.make("FrozenLake-v1") for _ in range(2)]),
    "constant": lambda: DirectEnv([ScriptedEnv([[1.0, 2.0]] * 3, [0, 0])]),  # whose observation tells nothing
    "mask in the info": lambda: DirectEnv([gymnasium.make("Taxi-v4") for _ in range(2)]),
    "text": lambda: DirectEnv([Speaking()], info_keys=["word:str"]),
    "own": Own,
}


@pytest.mark.parametrize("make", [GOOD[name] for name in GOOD if name != "game"], ids=[n for n in GOOD if n != "game"])
def test_nothing_is_found_in_an_env_that_keeps_its_word(make):
    env = make()
    assert verify(env, steps=60) == []
    env.close()


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_a_verified_env_gives_what_the_env_gives(make):
    def rows(env):
        seen = env.reset([3] * env.num_envs)
        steps = [env.step((np.zeros(env.num_envs, np.int64),)) for _ in range(30)]
        env.close()
        return [seen, *steps]

    for plain, verified in zip(rows(make()), rows(VerifiedEnv(make())), strict=True):
        for one, other in zip(plain, verified, strict=True):
            np.testing.assert_equal(one, other)


def answer_of(position, value):
    """A `Walk` whose second step has something else in its answer."""

    class Odd(Walk):
        def step(self, action):
            answer = list(super().step(action))
            if self.steps == 2:
                answer[position] = value
            return tuple(answer)

    return Odd


@pytest.mark.parametrize(
    ("env", "level", "text"),
    [
        (lambda: make_direct(Walk, answer_of(1, np.nan)), "error", "env copy 1, step: reward is not finite"),
        (
            lambda: make_direct(Walk, answer_of(0, np.array([1, np.inf], np.float32))),
            "error",
            "env copy 1, step: observation is not finite : got [ 1., inf]",
        ),
        (
            lambda: make_direct(Walk, answer_of(0, np.array([1, 101], np.float32))),
            "warning",
            "env copy 1, step: observation leaves its space : expected Box(0.0, 100.0, (2,), float32), got [  1., 1",
        ),
        (lambda: make_direct(Walk, answer_of(0, None)), "error", "env copy 1, step: observation is None"),
        (lambda: make_direct(Forgetful), "warning", "env copy 0: observation differs after two resets with the same"),
        (
            lambda: make_direct(SelfResetting),
            "warning",
            "env copy 0, like others before, ended an episode with the very",
        ),
        (lambda: VectorEnvAdapter(Freezing()), "warning", "env copy 1 stands still in every step that resets another"),
        (lambda: VectorEnvAdapter(Paying()), "warning", "a copy gave a reward of 1 in the step that resets it"),
        (lambda: Own("kinds"), "error", "all env copies, reset: expected arrays float32 (3, 1), got float64 (3, 1)"),
        (lambda: Own("mask"), "error", "env copy 11, reset: observation changed although the mask leaves it out"),
        (lambda: Own("not finite"), "error", "env copy 11, step: reward is not finite : expected a number, got inf"),
        (lambda: Own("reward"), "error", "env copy 12, step: a reward in a row that is no transition"),
        (lambda: Own("flag"), "error", "env copy 12, step: an end of an episode in a row that is no transition"),
        (lambda: Own("no final"), "error", "env copy 10, step: an episode ended without its true successor"),
        (lambda: Own("final"), "error", "env copy 12, step: a terminal observation, but no end of an episode"),
        (lambda: Own("final kinds"), "error", "env copy 10, step: terminal observation: expected arrays float32 (1,),"),
        (lambda: Own("final nan"), "error", "env copy 11, step: terminal observation is not finite : got [nan]"),
        (lambda: Own("final bounds"), "warning", "env copy 11, step: terminal observation leaves its space"),
    ],
)
def test_what_is_wrong_is_found_once_and_named(env, level, text):
    found = verify(env(), steps=42)
    assert [finding.level for finding in found] == [level]
    assert found[0].text.startswith(text)


def test_an_env_that_raises_is_found_and_what_was_found_before_is_kept():
    class Failing(answer_of(0, np.array([1, 101], np.float32))):
        def reset(self, *, seed=None, options=None):
            if getattr(self, "steps", 0) == 3:
                raise OSError("no more")
            return super().reset(seed=seed)

    levels = [(finding.level, finding.text[:11]) for finding in verify(make_direct(Failing))]
    assert levels == [("warning", "env copy 0,"), ("error", "env copy 0 ")]


def test_warnings_of_the_env_are_findings():
    game = ParallelEnvAdapter([Relay()])
    assert [finding.level for finding in verify(game, steps=20)] == ["warning"]  # its episodes go on being counted
    reusing = VectorEnvAdapter(SyncVectorEnv([partial(Reusing, 1)], autoreset_mode="SameStep"))
    assert any("seems to reuse its observation array" in finding.text for finding in verify(reusing, steps=20))


class Reusing(Walk):
    """Always hands out the same array."""

    def __init__(self, place):
        self.array = np.array([place, 0], np.float32)

    def observe(self):
        self.array[1] = self.steps
        return self.array


def test_verify_leaves_the_env_open_and_seeds_it():
    env = Own()
    verify(env, steps=5)
    assert (env.closes, env.steps) == (0, 5)
    assert check_seeding(make_direct(Walk), 1) == []
    (finding,) = check_seeding(make_direct(Forgetful), 1)
    assert finding == Finding("warning", finding.text)


def test_a_verified_env_raises_errors_and_warns_once():
    with pytest.raises(FrameContractError, match="env copy 1, step: reward is not finite"):
        step_all(VerifiedEnv(make_direct(Walk, answer_of(1, np.nan))), 3)
    with pytest.warns(UserWarning, match="leaves its space") as caught:
        step_all(VerifiedEnv(make_direct(answer_of(0, np.array([1, 101], np.float32)))), 5)
    assert len(caught) == 1
    env = VerifiedEnv(Own("mask"))
    env.reset()
    env.step((np.zeros(3, np.int64),))
    with pytest.raises(FrameContractError, match="env copy 11, reset: observation changed although"):
        env.reset(mask=np.array([True, False, False]))


def step_all(env, steps):
    env.reset([1] * env.num_envs)
    for _ in range(steps):
        env.step((np.zeros(env.num_envs, np.int64),))


def test_a_verified_env_steps_out_of_the_way_after_two_episodes_of_each_copy():
    class Late(Walk):
        def step(self, action):
            answer = super().step(action)
            self.episodes = getattr(self, "episodes", 0) + answer[2]
            return (np.array([self.episodes * 1000, 1], np.float32), *answer[1:]) if self.episodes > 2 else answer

    env = VerifiedEnv(make_direct(Late))
    step_all(env, 12)  # the third episode leaves the space, which nobody looks at any more
    assert env.step_into == env.env.step_into


def test_a_verified_env_that_stepped_out_of_the_way_blames_no_partial_reset():
    env = VerifiedEnv(make_direct(Walk, Walk))
    step_all(env, 13)
    seen = env.step((np.zeros(2, np.int64),)).obs[0].copy()
    assert env.step_into == env.env.step_into
    assert env.reset(mask=np.array([True, False]))[0][1].tolist() == seen[1].tolist()


def test_a_verified_env_is_what_it_wraps():
    env = VerifiedEnv(DirectEnv([gymnasium.make("Taxi-v4")], info_keys=["prob"], first=5))
    env.reset()
    assert env.first == 5
    assert env.leaves == env.env.leaves
    assert len(env.info_leaves) == 3
    assert env.envs is env.env.envs
    with pytest.raises(AttributeError, match="nothing"):
        _ = env.nothing
    env.close()


def test_verify_envs_verifies_what_a_collector_steps():
    rollout = RolloutConfig(verify_envs=True)
    assert isinstance(resolve_env(Walk).build(1, rollout=rollout), VerifiedEnv)
    odd = answer_of(1, np.nan)
    with Collector(odd, frames_per_batch=4) as collector:
        assert collector.collect()["next", "reward"].isnan().any()
    with (
        Collector(odd, frames_per_batch=4, rollout=rollout) as collector,
        pytest.raises(FrameContractError, match="reward is not finite"),
    ):
        collector.collect()


def test_verifying_changes_no_batch():
    def batches(verify_envs):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rollout = RolloutConfig(verify_envs=verify_envs)
            with Collector(Walk, frames_per_batch=7, total_frames=21, seed=3, rollout=rollout) as collector:
                return list(collector)

    for plain, verified in zip(batches(False), batches(True), strict=True):
        assert plain.batch_size == verified.batch_size == torch.Size([7])
        assert all(torch.equal(plain[key], verified[key]) for key in plain.keys(True, True))
