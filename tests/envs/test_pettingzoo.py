"""`ParallelEnvAdapter` against a plain loop over the same games."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lit_collect import (
    Collector,
    CollectorDataModule,
    EvaluationConfig,
    FrameContractError,
    RolloutConfig,
    WorkerFailedError,
    check_batch,
)
from lit_collect.envs.base import BatchedEnv
from lit_collect.envs.factories import resolve_env
from lit_collect.envs.pettingzoo import ParallelEnvAdapter
from lit_collect.successors import restore_successors
from tests.envs.games import PARTS, MaskedRelay, Part, Relay, TellingRelay, hand_loop

AGENTS = len(PARTS)


def zeros(env: BatchedEnv) -> tuple[np.ndarray, ...]:
    return (np.zeros(env.num_envs, np.int64),)


def plain(rows: list) -> list[tuple]:
    """Rows of the shared oracle as `hand_loop` gives them."""
    return [(row.obs[0], row.reward, row.terminated, row.truncated, row.next_obs[0], row.is_init) for row in rows]


CASTS = {
    "leaving one by one": PARTS,
    "leaving together": (Part("ann", 3), Part("bob", 3, "truncated")),
    "one step": (Part("ann", 1), Part("bob", 1, "both")),
    "alone": (Part("ann", 4),),
    "joining": (Part("ann", 2), Part("bob", 6, joins=2), Part("cay", 4, "truncated", joins=1)),
}


@pytest.mark.parametrize("parts", CASTS.values(), ids=CASTS)
def test_rows_of_every_agent_equal_a_plain_loop(parts, collect):
    env = ParallelEnvAdapter([Relay(0, parts), Relay(1, parts)])
    rows = collect(env, 40)
    assert [plain(line) for line in rows] == hand_loop(Relay(0, parts), 40) + hand_loop(Relay(1, parts), 40)


def test_agents_that_end_but_stay_in_the_list_end_the_game_all_the_same(collect):
    env = ParallelEnvAdapter([Relay(lingers=True)])
    assert [plain(line) for line in collect(env, 20)] == hand_loop(Relay(), 20)


def test_an_agent_that_is_gone_observes_zeros_and_gives_no_transition():
    env = ParallelEnvAdapter([Relay(7)])
    env.reset()
    steps = [env.step(zeros(env)) for _ in range(6)]
    assert [step.valid.tolist() for step in steps] == [
        [True, True, True],
        [True, True, True],
        [False, True, True],
        [False, True, False],
        [False, True, False],
        [True, True, True],
    ]
    assert steps[1].terminated.tolist() == [True, False, False]
    assert steps[1].next_obs[0][0].tolist() == [7, 0, 2, 0]
    assert steps[1].obs[0].tolist() == [[0, 0, 0, 0], [7, 0, 2, 1], [7, 0, 2, 2]]
    assert [step.reward.tolist() for step in steps[2:4]] == [[0, 1003, 2003], [0, 1004, 0]]
    assert steps[4].obs[0].tolist() == [[7, 1, 0, 0], [7, 1, 0, 1], [7, 1, 0, 2]]
    assert steps[4].next_obs[0][1].tolist() == [7, 0, 5, 1]


def test_what_was_handed_out_does_not_change_later():
    env = ParallelEnvAdapter([Relay()])
    first, out = env.reset(), env.step(zeros(env))
    kept = [leaf.copy() for leaf in (*first, *out.obs, *out.next_obs)]
    for _ in range(4):
        env.step(zeros(env))
    assert all(np.array_equal(old, now) for old, now in zip(kept, (*first, *out.obs, *out.next_obs), strict=True))


def test_only_agents_that_play_are_given_actions():
    game = Relay()
    env = ParallelEnvAdapter([game])
    env.reset()
    for _ in range(3):
        env.step((np.array([1, 0, 1]),))
    assert game.actions == [{"ann": 1, "bob": 0, "cay": 1}] * 2 + [{"bob": 0, "cay": 1}]


def test_an_agent_that_leaves_without_a_flag_is_truncated_with_one_warning(collect):
    parts = (Part("ann", 2, "silently"), Part("bob", 3, "silently"))
    env = ParallelEnvAdapter([Relay(0, parts)], first=4)
    with pytest.warns(UserWarning, match=r"env copy 4 \(agent 'ann'\) left its game neither terminated") as caught:
        ann, bob = collect(env, 12)
    assert len(caught) == 1
    assert [row.truncated for row in ann[:4]] == [False, True, False, True]
    assert [row.next_obs[0] for row in bob[2:4]] == [[0, 0, 3, 1], [0, 1, 1, 1]]
    assert not any(row.terminated for row in ann + bob)


def test_max_frames_per_traj_cuts_all_agents_of_a_game_together(collect):
    ann, bob, cay = collect(ParallelEnvAdapter([Relay()], max_frames_per_traj=3), 7)
    assert [(row.terminated, row.truncated) for row in ann[:4]] == [(False, False), (True, False)] * 2
    assert [row.truncated for row in bob] == [False, False, True, False, False, True, False]
    assert [(row.terminated, row.truncated) for row in cay[2:3]] == [(True, True)]
    assert [row.next_obs[0][1:3] for row in bob[2:4]] == [[0, 3], [1, 1]]


def test_each_game_gets_the_seed_of_its_first_agent_once():
    games = [Relay(0), Relay(1)]
    env = ParallelEnvAdapter(games)
    env.reset([11, 12, 13, 21, 22, 23])
    env.reset()
    assert [game.seeds for game in games] == [[11, None], [21, None]]


def test_a_masked_reset_is_of_whole_games():
    env = ParallelEnvAdapter([Relay(0), Relay(1)], first=6)
    env.reset()
    for _ in range(3):
        seen = env.step(zeros(env)).obs[0]
    (after,) = env.reset(mask=np.array([True] * AGENTS + [False] * AGENTS))
    assert after.tolist() == [[0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 0, 2], *seen[AGENTS:].tolist()]
    assert env.step(zeros(env)).valid.tolist() == [True, True, True, False, True, False]
    with pytest.raises(ValueError, match=r"a mask of whole games of 3 rows, got rows \[7\]; reset all copies"):
        env.reset(mask=np.arange(2 * AGENTS) == 1)
    with pytest.raises(ValueError, match="the first reset is of all games"):
        ParallelEnvAdapter([Relay()]).reset(mask=np.zeros(AGENTS, bool))


def test_a_reset_in_mid_game_begins_the_count_of_frames_anew():
    env = ParallelEnvAdapter([Relay()], max_frames_per_traj=3)
    env.reset()
    env.step(zeros(env))
    env.reset()
    steps = [env.step(zeros(env)).truncated.tolist() for _ in range(3)]
    assert steps == [[False, False, False]] * 2 + [[False, True, True]]


def test_an_action_mask_among_the_observations_allows_everything_once_its_agent_is_gone():
    env = ParallelEnvAdapter([MaskedRelay()])
    env.reset()
    env.step(zeros(env))
    mask, observation = env.step(zeros(env)).obs
    assert [leaf.key for leaf in env.leaves] == [("action_mask",), ("observation",)]
    assert mask.tolist() == [[1, 1], [0, 1], [0, 1]]
    assert observation[0].tolist() == [0, 0, 0, 0]


def test_infos_of_every_agent_are_read():
    env = ParallelEnvAdapter([TellingRelay()], info_keys=["way.gone:int64"])
    env.reset()
    assert [leaf.key for leaf in env.info_leaves] == [("way", "gone"), ("reported", "way", "gone"), ("action_mask",)]
    first, second = env.step(zeros(env)), env.step(zeros(env))
    assert [leaf.tolist() for leaf in first.obs[1:]] == [[1, 1, 1], [True] * 3, [[False, True]] * 3]
    assert [leaf.tolist() for leaf in second.obs[1:3]] == [[0, 2, 2], [False, True, True]]
    assert [leaf[0].tolist() for leaf in second.next_obs[1:]] == [2, True, [True, True]]


def test_several_actions_are_taken_apart_for_each_agent():
    game = Relay()
    game._action_space = spaces.Dict({"turn": spaces.Discrete(3), "push": spaces.Box(-1, 1, (1,))})
    env = ParallelEnvAdapter([game])
    env.reset()
    push, turn = np.array([[0.0], [0.5], [1.0]], np.float32), np.array([0, 1, 2])
    env.step((push, turn))  # the keys of a Dict are sorted
    assert game.actions == [
        {name: {"push": push[index], "turn": turn[index]} for index, name in enumerate(game.possible_agents)}
    ]


def test_agents_of_different_spaces_are_named_with_a_cure():
    class Mixed(Relay):
        def action_space(self, agent):
            return spaces.Discrete(3 if agent == "cay" else 2)

    message = "expected action_space Discrete(2) as of 'ann', got Discrete(3) for 'cay'; pad them with wrappers"
    with pytest.raises(ValueError, match=re.escape(message)):
        ParallelEnvAdapter([Mixed()])
    with pytest.raises(ValueError, match=r"relay_v0 has no possible_agents : expected at least one"):
        ParallelEnvAdapter([Relay(0, ())])
    with pytest.raises(ValueError, match=r"game 1 differs : expected the agents \['ann', 'bob', 'cay'\]"):
        ParallelEnvAdapter([Relay(), Relay(1, PARTS[:2])])


class Broken(Relay):
    """Gives something else than it should."""

    def __init__(self, **answers):
        super().__init__()
        self.answers = answers

    def _answer(self, name, usual):
        answer = self.answers.get(name, usual)
        if isinstance(answer, Exception):
            raise answer
        return answer(usual) if callable(answer) else answer

    def reset(self, seed=None, options=None):
        return self._answer("reset", super().reset(seed, options))

    def step(self, actions):
        return self._answer("step", super().step(actions))

    def close(self):
        super().close()
        self._answer("close", None)


def without(position, agent):
    def change(usual):
        parts = [dict(part) for part in usual]
        parts[position].pop(agent)
        return tuple(parts)

    return change


def instead(position, agent, value):
    def change(usual):
        parts = [dict(part) for part in usual]
        parts[position][agent] = value
        return tuple(parts)

    return change


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"reset": OSError("shut")}, WorkerFailedError, "the game of env copies 3 to 5 failed in reset: OSError: shut"),
        ({"reset": ({},)}, FrameContractError, "the game of env copies 3 to 5, reset: expected dicts by agent"),
        ({"reset": ({}, {})}, FrameContractError, "reset: nobody plays : expected an observation"),
        (
            {"step": KeyError("door")},
            WorkerFailedError,
            "the game of env copies 3 to 5 failed in step: KeyError: 'door'",
        ),
        ({"step": ({}, {})}, FrameContractError, "step: expected dicts by agent .* got tuple of 2"),
        ({"step": without(0, "bob")}, FrameContractError, r"env copy 4 \(agent 'bob'\), step: there is no observation"),
        (
            {"step": instead(0, "cay", np.zeros(3, np.float32))},
            FrameContractError,
            r"env copy 5 \(agent 'cay'\), step: observation has a wrong shape : expected float32 with shape \(4,\)",
        ),
        ({"step": instead(1, "ann", None)}, FrameContractError, r"env copy 3 \(agent 'ann'\), step: reward is None"),
        ({"step": instead(1, "ann", "many")}, FrameContractError, r"\(agent 'ann'\), step: expected a number and two"),
        ({"step": instead(4, "ann", [])}, FrameContractError, r"\(agent 'ann'\), step: info is wrong : expected a map"),
    ],
)
def test_what_goes_wrong_is_named(answers, error, message):
    env = ParallelEnvAdapter([Broken(**answers)], info_keys=["way"], first=3)

    def play():
        env.reset()
        env.step(zeros(env))

    with pytest.raises(error, match=message):
        play()


def test_rewards_that_are_missing_are_zero():
    env = ParallelEnvAdapter([Broken(step=without(1, "ann"))])
    env.reset()
    assert env.step(zeros(env)).reward.tolist() == [0, 1001, 2001]


def test_close_closes_every_game_once_and_names_the_first_failure():
    games = [Relay(0), Broken(close=OSError("stuck")), Relay(2)]
    env = ParallelEnvAdapter(games)
    with pytest.raises(WorkerFailedError, match="the game of env copies 3 to 5 failed in close: OSError: stuck"):
        env.close()
    env.close()
    assert [game.closes for game in games] == [1, 1, 1]
    live = ParallelEnvAdapter(games[:1], owned=False)
    live.close()
    assert games[0].closes == 1


@pytest.mark.parametrize(("num_envs", "default", "rows"), [(None, 1, 3), (None, 8, 9), (6, 1, 6)])
def test_rows_are_those_of_whole_games(num_envs, default, rows):
    env = resolve_env(Relay).build(num_envs, rollout=RolloutConfig(), default_copies=default)
    assert (env.num_envs, env.first) == (rows, 0)
    env.close()


def test_rows_of_a_worker_are_those_of_its_games():
    env = resolve_env(Relay).build(12, rollout=RolloutConfig(), indices=range(6, 12))
    assert (env.num_envs, env.first) == (6, 6)
    env.close()
    env = resolve_env(Relay).build(None, rollout=RolloutConfig(), default_copies=2, indices=range(1, 2))
    assert (env.num_envs, env.first) == (3, 3)
    env.close()


def test_rows_that_are_no_whole_games_are_refused_with_what_fits():
    made = []

    def make():
        made.append(Relay())
        return made[-1]

    source = resolve_env(make)
    with pytest.raises(ValueError, match=r"whose games have 3 agents .* expected a multiple of 3, got 7; use 6 or 9"):
        source.build(7, rollout=RolloutConfig())
    with pytest.raises(ValueError, match="expected a multiple of 6, got 10; use 6 or 12"):
        source.build(10, rollout=RolloutConfig(), indices=range(5))
    assert [game.closes for game in made] == [1, 1]


def test_a_live_game_says_its_agents_and_stays_open():
    game = Relay()
    source = resolve_env(game)
    assert (source.num_envs, source.live, source.description) == (AGENTS, True, "relay_v0")
    source.build(None, rollout=RolloutConfig()).close()
    assert game.closes == 0


class TurnBased(Relay):
    """Has what PettingZoo's AEC API has."""

    def agent_iter(self):
        return iter(self.agents)

    def last(self):
        return None


@pytest.mark.parametrize("env", [TurnBased, TurnBased()], ids=["maker", "live"])
def test_a_game_in_which_agents_take_turns_is_refused_with_a_cure(env):
    with pytest.raises(TypeError, match=r"takes? turns .* wrap it with pettingzoo.utils.aec_to_parallel"):
        resolve_env(env).build(None, rollout=RolloutConfig())


def test_games_that_cannot_be_made_one_after_the_other_are_refused():
    with pytest.raises(TypeError, match="a sequence holds makers of single envs"):
        resolve_env([Relay, Relay]).build(None, rollout=RolloutConfig())
    game = Relay()
    with pytest.raises(ValueError, match="gave the same game twice; make the env inside the callable"):
        resolve_env(lambda: game).build(6, rollout=RolloutConfig())
    things = iter([Relay(), "no game"])
    with pytest.raises(TypeError, match="made no game of several agents : expected one as before, got 'no game'"):
        resolve_env(lambda: next(things)).build(6, rollout=RolloutConfig())


def act(observation: torch.Tensor) -> torch.Tensor:
    return observation.sum(-1).long() % 2


def stream(batches) -> torch.Tensor:
    return torch.cat(list(batches), 1)


def test_batches_of_games_have_the_mask_of_their_agents_and_meet_their_budget():
    with Collector(Relay, act, num_envs=6, frames_per_batch=30, total_frames=72, seed=0) as collector:
        batches = list(collector)
    for batch in batches:
        check_batch(batch)
    joined = stream(batches)
    mask = joined["collector", "mask"]
    assert int(mask.sum()) == 72
    for row, want in enumerate(hand_loop(Relay(), 40) * 2):
        kept = joined[row][mask[row]]
        got = zip(
            kept["observation"].tolist(),
            kept["next", "reward"][:, 0].tolist(),
            kept["next", "terminated"][:, 0].tolist(),
            kept["next", "truncated"][:, 0].tolist(),
            kept["next", "observation"].tolist(),
            kept["is_init"][:, 0].tolist(),
            strict=True,
        )
        assert list(got) == want[: len(kept)]
    assert not joined["observation"][~mask].any()


def test_compact_batches_of_games_are_restored_whole():
    def batches(compact_obs):
        options = {"num_envs": 6, "frames_per_batch": 60, "total_frames": 120, "seed": 0}
        with Collector(Relay, act, rollout=RolloutConfig(compact_obs=compact_obs), **options) as collector:
            return list(collector)

    for whole, compact in zip(batches(False), batches(True), strict=True):
        restored = restore_successors(compact)
        assert all(torch.equal(whole[key], restored[key]) for key in whole.keys(True, True))


def test_evaluation_plays_one_episode_of_every_agent():
    evaluation = EvaluationConfig(num_episodes=6, num_envs=6)
    data = CollectorDataModule(Relay, policy=act, frames_per_batch=36, total_frames=72, evaluation=evaluation)
    (played,) = data.val_dataloader()
    data.teardown("validate")
    assert played["collector", "mask"].sum(1).tolist() == [2, 5, 3, 2, 5, 3]


@pytest.mark.processes
@pytest.mark.usefixtures("nursery")
def test_games_in_processes_give_the_same_rows():
    def rows(backend):
        options = {"num_envs": 6, "frames_per_batch": 60, "seed": 0, "backend": backend}
        with Collector(Relay, act, **options) as collector:
            return stream([collector.collect() for _ in range(3)])

    here, there = rows("direct"), rows("process")
    for key in here.keys(True, True):
        assert torch.equal(here[key], there[key]), key


def test_a_data_module_takes_games():
    data = CollectorDataModule(partial(Relay), policy=act, frames_per_batch=36, total_frames=72, seed=1)
    batches = [batch.batch_size for batch in data.train_dataloader()]
    data.teardown("fit")
    assert batches[0] == torch.Size([9, 4])  # the first games that have at least 8 rows


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pygame, when it is imported
def test_knights_archers_and_zombies(monkeypatch):
    monkeypatch.setenv("SDL_AUDIODRIVER", "dummy")  # which the game would set for good
    zombies = pytest.importorskip("pettingzoo.butterfly.knights_archers_zombies_v11")
    make = partial(zombies.parallel_env, spawn_delay=2, max_zombies=40, max_cycles=150)
    with Collector(make, num_envs=8, frames_per_batch=1600, total_frames=4000, seed=0) as collector:
        batches = list(collector)
    for batch in batches:
        check_batch(batch)
    joined = stream(batches)
    mask = joined["collector", "mask"]
    assert int(mask.sum()) == 4000
    assert joined["next", "terminated"][mask].any()
    assert not mask[:, :-4].all()  # somebody died before the others
    with pytest.raises(TypeError, match="lets its agents take turns"):
        resolve_env(zombies.env).build(None, rollout=RolloutConfig())
