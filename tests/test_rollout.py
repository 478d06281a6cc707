"""Batches are exactly what a plain loop over the envs would have seen."""

from collections import Counter
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from lit_collect.config import RolloutConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.errors import CollectorClosedError
from lit_collect.frames import check_batch
from lit_collect.rollout import RolloutRunner
from lit_collect.seeding import Placement, RandomStream, env_seeds
from lit_collect.testing import ConstantPolicy, CountingEnv, ScriptedEnv
from lit_collect.worker import WorkerSpec, build_runner

PLACE = Placement(entropy=0)
LENGTHS = [(1,), (2,), (3,), (50,), (1, 3, 2)]
each_length = pytest.mark.parametrize("lengths", LENGTHS, ids=str)
each_ending = pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])


def parity(observation: Tensor) -> Tensor:
    """An action that depends on everything that was seen."""
    return observation.sum(-1).long() % 2


def sampler(observation: Tensor) -> dict[str, Tensor]:
    return {"logits": torch.stack([observation[:, 1] - observation[:, 2], observation[:, 0]], -1)}


def counting(copies: int = 2, lengths: Any = (3,), **options: Any) -> list:
    return [partial(CountingEnv, index, lengths, **options) for index in range(copies)]


def runner(envs: Any, policy: Any = parity, *, place: Placement = PLACE, **options: Any) -> RolloutRunner:
    rollout = RolloutConfig(**options)
    spec = WorkerSpec(source=resolve_env(envs), policy=policy, rollout=rollout, num_envs=None, place=place)
    return build_runner(spec)


def collect(one: RolloutRunner, *steps: int) -> TensorDict:
    """Checked batches of these lengths, one after the other in time."""
    batches = [one.collect(t, version=0) for t in steps]
    for batch in batches:
        check_batch(batch)
    return torch.cat(batches, 1)


def by_hand(copies: int, steps: int, lengths: Any, ends: str) -> dict[str, np.ndarray]:
    """The plain loop: one env copy after the other, one step after the other."""
    rows: dict[str, list[list[Any]]] = {}
    for index in range(copies):
        env = CountingEnv(index, lengths, ends=ends)
        seen, first, episode = env.reset()[0], True, 0
        mine: dict[str, list[Any]] = {}
        for _ in range(steps):
            action = int(seen.sum()) % 2
            led_to, reward, terminated, truncated, _ = env.step(action)
            row = {
                "observation": seen,
                "action": action,
                "next observation": led_to,
                "reward": [reward],
                "terminated": [terminated],
                "truncated": [truncated],
                "is_init": [first],
                "traj_ids": episode * copies + index,
            }
            for name, value in row.items():
                mine.setdefault(name, []).append(value)
            seen, first = led_to, terminated or truncated
            if first:
                seen, episode = env.reset()[0], episode + 1
        for name, values in mine.items():
            rows.setdefault(name, []).append(values)
    return {name: np.array(values) for name, values in rows.items()}


@each_length
@each_ending
@pytest.mark.parametrize("reuse_buffers", [False, True])
def test_batches_are_what_a_plain_loop_sees(lengths, ends, reuse_buffers):
    with closing(runner(counting(3, lengths, ends=ends, reuse_buffers=reuse_buffers))) as one:
        batch = collect(one, 7, 1, 20, 64)
    expected = by_hand(3, 92, lengths, ends)
    got = {
        "observation": batch["observation"],
        "action": batch["action"],
        "next observation": batch["next", "observation"],
        "reward": batch["next", "reward"],
        "terminated": batch["next", "terminated"],
        "truncated": batch["next", "truncated"],
        "is_init": batch["is_init"],
        "traj_ids": batch["collector", "traj_ids"],
    }
    for name, values in got.items():
        np.testing.assert_array_equal(values.numpy(), expected[name], err_msg=name)
    for name in ("done", "terminated", "truncated"):
        assert not batch[name].any()
    assert batch["collector", "policy_version"].unique().tolist() == [0]


@each_length
@pytest.mark.parametrize("policy", [parity, sampler, None], ids=["deterministic", "sampling", "random"])
def test_stream_does_not_depend_on_the_length_of_batches(lengths, policy):
    with closing(runner(counting(2, lengths), policy)) as short, closing(runner(counting(2, lengths), policy)) as long:
        assert (collect(short, *[7] * 10)[:, :64] == collect(long, 64)).all()


def test_stream_of_another_seed_differs():
    envs = counting(2, (50,))
    with closing(runner(envs, sampler)) as one, closing(runner(envs, sampler, place=Placement(entropy=1))) as other:
        assert not torch.equal(collect(one, 64)["action"], collect(other, 64)["action"])


def test_batch_has_the_layout_of_the_contract():
    with closing(runner(counting())) as one:
        batch = one.collect(5, version=3)
    assert batch.batch_size == (2, 5)
    assert batch.names == [None, "time"]
    assert set(batch.keys(True, True)) == {
        "observation",
        "action",
        "done",
        "terminated",
        "truncated",
        "is_init",
        ("next", "observation"),
        ("next", "reward"),
        ("next", "done"),
        ("next", "terminated"),
        ("next", "truncated"),
        ("collector", "traj_ids"),
        ("collector", "policy_version"),
    }
    assert batch["collector", "policy_version"].unique().tolist() == [3]
    assert all(value.is_contiguous() for value in batch.values(True, True))


@each_length
@each_ending
def test_successor_of_the_last_row_of_an_episode_is_its_terminal_observation(lengths, ends):
    with closing(runner(counting(2, lengths, ends=ends))) as one:
        batch = collect(one, 7, 64)
    last = batch[batch["next", "done"].squeeze(-1)]
    index, episode, step = last["next", "observation"].unbind(-1)
    assert torch.equal(index, last["observation"][:, 0])
    assert torch.equal(episode, last["observation"][:, 1])
    assert step.tolist() == [lengths[int(k) % len(lengths)] for k in episode]
    assert last["next", "terminated"].all() == (ends != "truncated")
    assert last["next", "truncated"].all() == (ends != "terminated")
    assert last["next", "terminated"].any() == (ends != "truncated")
    assert last["next", "truncated"].any() == (ends != "terminated")


@each_length
def test_policy_sees_each_reset_observation_first_and_every_stored_one_once(lengths):
    seen: list[Tensor] = []

    def recording(observation: Tensor) -> Tensor:
        seen.append(observation.clone())
        return parity(observation)

    with closing(runner(counting(2, lengths), recording)) as one:
        batch = collect(one, 7, 20)
    assert torch.equal(torch.stack(seen, 1), batch["observation"])
    first = batch["is_init"].squeeze(-1)
    assert torch.equal(first, batch["observation"][..., 2] == 0)
    assert len({tuple(row) for row in batch["observation"][first].tolist()}) == int(first.sum())


@each_length
def test_trajectory_ids_count_the_episodes_of_each_copy_of_all_ranks(lengths):
    with closing(runner(counting(2, lengths), place=Placement(entropy=0, rank=1, world_size=3))) as one:
        batch = collect(one, 7, 20)
    episode, copy = batch["observation"][..., 1].long(), torch.tensor([[2], [3]])  # of 6 copies, these are the middle
    assert torch.equal(batch["collector", "traj_ids"], episode * 6 + copy)


def test_ranks_have_the_seeds_of_their_own_copies():
    envs = [CountingEnv(index) for index in range(4)]
    for rank in (0, 1):
        mine = [lambda env=env: env for env in envs[2 * rank : 2 * rank + 2]]
        with closing(runner(mine, place=Placement(entropy=9, rank=rank, world_size=2))) as one:
            collect(one, 7)
            one.reset()
            collect(one, 2)
    assert [env.seeds[0] for env in envs] == env_seeds(9, "train", range(4))
    assert all(env.seeds[1:] == [None] * 3 for env in envs)  # the copies' own generators go on


@pytest.mark.parametrize("reuse_buffers", [False, True])
def test_yielded_batch_never_changes(reuse_buffers):
    policy = ConstantPolicy(1.0, num_actions=2)
    with closing(runner(counting(2, (3,), reuse_buffers=reuse_buffers), policy)) as one:
        batches = [one.collect(7, version=0) for _ in range(2)]
        copies = [batch.clone() for batch in batches]
        with torch.no_grad():
            policy.action.fill_(0.0)
        later = collect(one, 7, 20)
        one.reset()
        collect(one, 7)
    assert all((batch == copy).all() for batch, copy in zip(batches, copies, strict=True))
    assert batches[0]["action"].unique().tolist() == [1]
    assert later["action"].unique().tolist() == [0]


def test_batch_belongs_to_the_user_who_may_overwrite_it():
    with closing(runner(counting(2, (50,)))) as one, closing(runner(counting(2, (50,)))) as untouched:
        for _ in range(3):
            batch = one.collect(7, version=0)
            assert (batch == untouched.collect(7, version=0)).all()
            for value in batch.values(True, True):
                value.fill_(1)


def test_batch_shares_no_memory_between_its_keys():
    with closing(runner(counting())) as one:
        batch = one.collect(7, version=0)
    uses = Counter(value.untyped_storage().data_ptr() for value in batch.values(True, True))
    assert set(uses.values()) == {1}


def test_discrete_actions_are_stored_from_zero_and_sent_from_start():
    env = CountingEnv(action_space=spaces.Discrete(3, start=5))
    with closing(runner(lambda: env, lambda x: x[:, 2].long() % 3)) as one:
        batch = collect(one, 6)
    assert batch["action"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert [int(action) for action in env.actions] == [5, 6, 7, 5, 6, 7]


@pytest.mark.parametrize(("clip_actions", "sent"), [(True, [1.0, -1.0]), (False, [3.0, -4.0])])
def test_batch_keeps_the_raw_action_whatever_is_sent(clip_actions, sent):
    env = CountingEnv(action_space=spaces.Box(-1, 1, (2,), np.float32))
    with closing(runner(lambda: env, ConstantPolicy([3.0, -4.0]), clip_actions=clip_actions)) as one:
        batch = collect(one, 4)
    assert batch["action"].tolist() == [[[3.0, -4.0]] * 4]
    assert [action.tolist() for action in env.actions] == [sent] * 4


def test_actions_that_an_env_keeps_are_its_own():
    env = CountingEnv(action_space=spaces.Box(-9, 9, (1,), np.float32), lengths=(50,))
    with closing(runner(lambda: env, lambda x: x[:, 2:])) as one:
        collect(one, 4, 4)
    assert [float(action[0]) for action in env.actions] == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("keep_float64", "dtype"), [(False, torch.float32), (True, torch.float64)])
def test_float64_observations_are_stored_as_asked(keep_float64, dtype):
    values = [np.array([1 / 3]), np.array([2 / 3])]
    with closing(
        runner(partial(ScriptedEnv, values, [1.0]), lambda x: x[:, 0].long(), keep_float64=keep_float64)
    ) as one:
        batch = collect(one, 3)
    assert torch.equal(batch["observation"], torch.tensor(1 / 3, dtype=dtype).expand(1, 3, 1))
    assert torch.equal(batch["next", "observation"], torch.tensor(2 / 3, dtype=dtype).expand(1, 3, 1))
    assert batch["next", "reward"].dtype == torch.float32


def test_dict_observations_keep_their_own_keys_and_dtypes():
    space = spaces.Dict(
        eye=spaces.Box(0, 255, (2, 2), np.uint8), body=spaces.Dict(gear=spaces.Discrete(9), on=spaces.MultiBinary(2))
    )
    values = [
        {"eye": np.full((2, 2), t, np.uint8), "body": {"gear": np.int64(t), "on": np.array([t % 2, 1], np.int8)}}
        for t in range(4)
    ]
    with closing(
        runner([partial(ScriptedEnv, values, [1, 2, 3], observation_space=space)] * 2, lambda x: x["body"]["gear"] % 2)
    ) as one:
        batch = collect(one, 2, 3)
    assert batch["body", "gear"].tolist() == [[0, 1, 2, 0, 1]] * 2
    assert batch["next", "body", "gear"].tolist() == [[1, 2, 3, 1, 2]] * 2
    assert batch["eye"].dtype == batch["next", "eye"].dtype == torch.uint8
    assert batch["eye"][0, :, 1, 1].tolist() == [0, 1, 2, 0, 1]
    assert batch["body", "on"].dtype == torch.int8
    assert not {"observation"} & set(batch.keys())


def test_private_outputs_are_not_yielded():
    def policy(x: Tensor) -> dict[str, Any]:
        return {"action": parity(x), "_secret": x, "memory": {"_h": x, "c": x}}

    with closing(runner(counting(), policy)) as one:
        batch = collect(one, 7)
    assert batch["memory"].keys() == {"c"}
    assert not {"_secret"} & set(batch.keys())


def test_collecting_under_inference_mode_gives_tensors_that_can_be_trained_on():
    with closing(runner(counting(), sampler)) as one, closing(runner(counting(), sampler)) as plain:
        with torch.inference_mode():
            batch = collect(one, 7, 20)
        assert (batch == collect(plain, 7, 20)).all()
        one_more = one.collect(7, version=0)
    assert not any(value.is_inference() for value in one_more.values(True, True))


def test_frames_and_seconds_are_counted():
    ticks = count()
    with closing(runner(counting(3))) as built:
        one = RolloutRunner(
            built.env,
            built.actor,
            config=RolloutConfig(),
            indices=range(3),
            total_copies=3,
            seeds=[0, 1, 2],
            stream=RandomStream(0),
            warm_up=built.actor,
            clock=lambda: next(ticks),
        )
        collect(one, 4, 2)
    assert one.frames_stepped == 18
    assert (one.times.policy_s, one.times.env_s) == (6, 6)  # one tick each in every step


def test_closed_runner_closes_its_envs_once_and_says_so():
    envs = [CountingEnv(index) for index in range(2)]
    one = runner([lambda env=env: env for env in envs])
    collect(one, 3)
    one.close()
    one.close()
    assert [env.closes for env in envs] == [1, 1]
    with pytest.raises(CollectorClosedError, match="the collector is closed; build a new one"):
        one.collect(3, version=0)
