"""What the trainer can ask of workers between batches: values, calls, resets, seeds, profiles; and what hooks see."""

import json
import os
import threading
import traceback
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lit_collect import Collector, ProcessBackend, RolloutConfig, WorkerFailedError
from lit_collect.testing import ConstantPolicy, CountingEnv, FailingEnv
from tests.behaviour.telling import ControlledEnv, Spoilt, Unwelcome

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]

BOTH = pytest.mark.parametrize("backend", ["direct", "process"])
MAKERS = [partial(CountingEnv, i) for i in range(4)]


CONTROLLED = [partial(ControlledEnv, i) for i in range(4)]


def make(backend: str, env=CONTROLLED, policy=None, **options) -> Collector:
    """Two workers of two copies each, or one of four."""
    chosen = backend if backend == "direct" else ProcessBackend(2, sync=backend != "async")
    return Collector(env, policy, **{"frames_per_batch": 8, "seed": 5, **options}, backend=chosen)


def steps(batch) -> list[list[float]]:
    """(episode, step) of each row, by env copy."""
    return [[(row[1], row[2]) for row in copy] for copy in batch["observation"].tolist()]


# --- cascade_execute --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["direct", "process", "async"])
def test_values_and_calls_of_all_workers(backend):
    firsts, lasts = ([0], [3]) if backend == "direct" else ([0, 2], [1, 3])
    with make(backend, policy=ConstantPolicy(1.0, num_actions=2)) as collector:
        for _ in range(2):
            assert collector.cascade_execute("env.envs[0].unwrapped.index") == firsts
            assert collector.cascade_execute("env.envs[-1].unwrapped.index") == lasts
            assert collector.cascade_execute("env.envs[0].unwrapped.level['gravity'][1]") == [10.0 + i for i in firsts]
            assert collector.cascade_execute("env.num_envs") == ([4] if backend == "direct" else [2, 2])
            assert [weight.item() for weight in collector.cascade_execute("policy.action")] == [1.0] * len(firsts)
            told = collector.cascade_execute("env.envs[1].unwrapped.tell", 3, "x", tensor=torch.ones(2))
            assert [(index, values) for index, values, _ in told] == [(i + 1, (3, "x")) for i in firsts]
            assert all(options["tensor"].tolist() == [1.0, 1.0] for _, _, options in told)
            assert collector.collect().numel() == 8
        assert [len(told) for told in collector.cascade_execute("env.envs[1].unwrapped.told")] == [2] * len(firsts)
        collector.update_policy_weights_(ConstantPolicy(2.0))
        for _ in range(6):
            collector.collect()
        assert [weight.item() for weight in collector.cascade_execute("policy.action")] == [2.0] * len(firsts)


@pytest.mark.parametrize("backend", ["direct", "process", "async"])
def test_what_cannot_be_read_or_called_is_explained_and_the_collector_goes_on(backend):
    with make(backend) as collector:
        execute = collector.cascade_execute
        before = collector.collect()
        with pytest.raises(
            AttributeError, match=r"'env\.envs\[0\]\.unwrapped' has no attribute 'levl' .*such as level"
        ):
            execute("env.envs[0].unwrapped.levl")
        with pytest.raises(AttributeError, match="the gauge is broken"):
            execute("env.envs[0].unwrapped.broken")
        with pytest.raises(IndexError, match=r"'env\.envs' has no item 9 : expected an index below [24]"):
            execute("env.envs[9]")
        with pytest.raises(KeyError, match=r"has no item 'mass' : expected one of gravity"):
            execute("env.envs[0].unwrapped.level['mass']")
        with pytest.raises(KeyError, match=r"expected it to begin with one of .*env.*, got 'model'"):
            execute("model.weight")
        with pytest.raises(ValueError, match="is malformed at position 3"):
            execute("env..envs")
        with pytest.raises(TypeError, match="takes no arguments : expected something that can be called, got a int"):
            execute("env.envs[0].unwrapped.index", 3)
        with pytest.raises(ValueError, match="no such lever") as caught:
            execute("env.envs[0].unwrapped.fail")
        assert "in fail" in "".join(traceback.format_exception(caught.value))
        assert execute("env.envs[0].unwrapped.index")[0] == 0
        after = collector.collect()
        assert before.numel() == after.numel() == 8
        assert torch.equal(after["is_init"].squeeze(-1), after["observation"][..., 2] == 0)


@pytest.mark.parametrize("backend", ["process", "async"])
def test_results_and_arguments_that_cannot_travel_are_explained_and_the_collector_goes_on(backend):
    with make(backend) as collector:
        collector.collect()
        for name, error, words in [
            ("lock", TypeError, "cannot pickle '_thread.lock' object .*sending the answer"),
            ("unwelcome", RuntimeError, "I stay here .*sending the answer"),
            ("spoilt", Exception, "not a number"),
        ]:
            for _ in range(2):
                with pytest.raises(error, match=words):
                    collector.cascade_execute(f"env.envs[0].unwrapped.{name}")
                assert collector.cascade_execute("env.envs[0].unwrapped.index") == [0, 2]
        for argument, error, words in [
            (threading.Lock(), TypeError, "cannot pickle"),
            (Unwelcome(), RuntimeError, "I stay here"),
            (Spoilt(), Exception, "not a number"),
        ]:
            with pytest.raises(error, match=words):
                collector.cascade_execute("env.envs[0].unwrapped.tell", argument)
            assert collector.cascade_execute("env.envs[0].unwrapped.told") == [[], []]
        batch = collector.collect()
        assert batch.numel() == 8
        assert collector.statistics()["frames_dropped"] == 0


def test_asking_workers_in_the_middle_of_asynchronous_collection_loses_nothing():
    seen: dict[float, list[tuple[float, float]]] = {}
    with make("async", frames_per_batch=4, total_frames=120) as collector:
        for batch in collector:
            for copy, rows in zip(batch["observation"][:, 0, 0].tolist(), steps(batch), strict=True):
                seen.setdefault(copy, []).extend(rows)
            for _ in range(3):
                assert collector.cascade_execute("env.num_envs") == [2, 2]
            now = collector.statistics()
            assert now["frames_dropped"] == 0
            assert now["frames_stepped"] == now["frames_yielded"] + now["frames_pending"]
            assert 0.0 <= now["queue_fill"] <= 1.0
    assert all(rows == [(i // 3, i % 3) for i in range(len(rows))] for rows in seen.values())
    assert sum(map(len, seen.values())) == 120


def test_failure_of_a_batch_does_not_answer_another_question():
    makers = [partial(FailingEnv, "step", 6, index=i) for i in range(2)]  # in the second batch
    with make("async", makers, frames_per_batch=4) as collector:
        failures = 0
        for _ in range(8):
            try:
                assert collector.collect().numel() == 4
            except WorkerFailedError:
                failures += 1
            assert collector.cascade_execute("env.envs[0].unwrapped.index") == [0, 1]
        assert failures == 2  # each worker's, once
        now = collector.statistics()
        assert now["frames_stepped"] == now["frames_yielded"] + now["frames_pending"] + now["frames_dropped"]


@pytest.mark.parametrize("backend", ["process", "async"])
def test_question_that_is_broken_off_leaves_its_answer_to_nobody(backend):
    def interrupt() -> None:
        collector.workers.while_waiting = int
        raise InterruptedError

    with make(backend) as collector:
        collector.collect()
        for _ in range(2):
            collector.workers.while_waiting = interrupt
            with pytest.raises(InterruptedError):
                collector.cascade_execute("env.envs[0].unwrapped.linger")
            answered: set[float] = set()
            while not answered >= {0.0, 2.0}:  # by both workers, the interrupted one included
                answered.update(collector.collect()["observation"][:, 0, 0].tolist())
            assert collector.cascade_execute("env.envs[0].unwrapped.index") == [0, 2]
        now = collector.statistics()
        assert now["frames_stepped"] == now["frames_yielded"] + now["frames_pending"] + now["frames_dropped"]


# --- resets and seeds -------------------------------------------------------------------------------------------------


@BOTH
def test_reset_begins_new_episodes_everywhere_or_in_one_row(backend):
    with make(backend, MAKERS) as collector:
        assert steps(collector.collect()) == [[(0, 0), (0, 1)]] * 4
        collector.reset(2)
        batch = collector.collect()
        assert [rows[0] for rows in steps(batch)] == [(0, 2), (0, 2), (1, 0), (0, 2)]
        assert batch["collector", "traj_ids"][:, 0].tolist() == [0, 1, 6, 3]
        assert batch["is_init"][:, 0, 0].tolist() == [False, False, True, False]
        collector.reset()
        batch = collector.collect()
        assert [rows[0][1] for rows in steps(batch)] == [0] * 4
        assert batch["is_init"][:, 0, 0].all()
        ids = batch["collector", "traj_ids"]
        assert sorted(ids.unique().tolist()) == ids[:, 0].sort().values.tolist()
        for index in (4, -1):
            with pytest.raises(IndexError, match=f"there is no env copy {index} : expected 0 to 3"):
                collector.reset(index)
        assert collector.statistics()["frames_dropped"] == 0


def test_reset_in_asynchronous_collection_reaches_the_batches_asked_for_after_it():
    with make("async", MAKERS, frames_per_batch=4, total_frames=64) as collector:
        collector.collect()
        before = collector.cascade_execute("env.envs[1].unwrapped.episode")
        collector.reset(3)
        after = collector.cascade_execute("env.envs[1].unwrapped.episode")
        assert after[1] > before[1]
        rows = [row for batch in collector for row in batch if row["observation"][0, 0] == 3.0]
    for earlier, later in pairwise(rows):
        assert later["collector", "traj_ids"][0] >= earlier["collector", "traj_ids"][-1]


@pytest.mark.parametrize("backend", ["direct", "process"])
def test_set_seed_reproduces_the_data(backend):
    def data() -> list[torch.Tensor]:
        collector.set_seed(11)
        batches = [collector.collect() for _ in range(3)]
        return [torch.cat([batch[key].float() for batch in batches], 1) for key in ("observation", "action")]

    policy = nn.Sequential(nn.Linear(4, 2))
    with make(backend, "CartPole-v1", lambda x: {"logits": policy(x)}, num_envs=4, frames_per_batch=80) as collector:
        first = data()
        collector.collect()
        second = data()
        collector.set_seed(12)
        other = collector.collect()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not torch.equal(other["observation"], first[0][:, :20])


def test_set_seed_drops_what_asynchronous_workers_have_made_already():
    with make("async", "CartPole-v1", num_envs=2, frames_per_batch=10) as collector:

        def first_batches() -> dict[float, list[float]]:
            collector.set_seed(11)
            made: dict[int, list[float]] = {}
            while len(made) < 2:
                batch = collector.collect()
                made.setdefault(int(batch["collector", "traj_ids"][0, 0]) % 2, batch["observation"].tolist())
            return made

        first = first_batches()
        collector.cascade_execute("env.num_envs")  # answered after the batches that are under way
        waiting = collector.statistics()["frames_pending"]
        assert waiting > 0
        second = first_batches()
        now = collector.statistics()
    assert first == second
    assert now["frames_dropped"] >= waiting
    assert now["frames_stepped"] == now["frames_yielded"] + now["frames_pending"] + now["frames_dropped"]


# --- profiles ---------------------------------------------------------------------------------------------------------


def rollouts(path: Path) -> int:
    """How many rollouts a Chrome trace shows."""
    events = json.loads(path.read_text())["traceEvents"]
    assert all({"ph", "name"} <= event.keys() for event in events)
    return sum(event["name"] == "rollout" and event["ph"] == "X" for event in events)


@BOTH
def test_profile_writes_a_trace_for_each_worker_that_was_named(backend, tmp_path):
    workers = (0,) if backend == "direct" else (0, 1)
    with make(backend, MAKERS) as collector:
        assert collector.profile_config is None
        collector.enable_profile(workers, num_rollouts=3, warmup_rollouts=1, save_path="traces/of_{worker}.json")
        assert collector.profile_config.workers == workers
        for count in range(4):
            assert (tmp_path / "traces").exists() == (count >= 3)
            collector.collect()
    assert sorted(os.listdir(tmp_path / "traces")) == [f"of_{worker}.json" for worker in workers]
    assert [rollouts(tmp_path / f"traces/of_{worker}.json") for worker in workers] == [2] * len(workers)


def test_profile_of_one_worker_leaves_the_other_alone(tmp_path):
    with make("process", MAKERS) as collector:
        collector.enable_profile([1], num_rollouts=2, with_stack=True)
        for _ in range(2):
            collector.collect()
    assert os.listdir(tmp_path) == ["collector_profile_1.json"]
    assert rollouts(tmp_path / "collector_profile_1.json") == 1


def test_profile_is_written_by_shutdown_if_there_were_fewer_rollouts(tmp_path):
    with make("process", MAKERS) as collector:
        collector.enable_profile([0, 1], num_rollouts=9, warmup_rollouts=0)
        for _ in range(2):
            collector.collect()
    assert [rollouts(tmp_path / f"collector_profile_{worker}.json") for worker in (0, 1)] == [2, 2]


@BOTH
def test_profile_shows_shapes_memory_and_lines_if_they_are_wanted(backend, tmp_path):
    net = nn.Linear(3, 2)
    with make(backend, MAKERS, lambda observation: {"logits": net(observation)}) as collector:
        wanted = {"record_shapes": True, "profile_memory": True, "with_stack": True}
        collector.enable_profile(num_rollouts=2, save_path="trace.json", **wanted)
        assert {name: getattr(collector.profile_config, name) for name in wanted} == wanted
        for _ in range(2):
            collector.collect()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event["name"] == "[memory]" for event in events)


@BOTH
def test_profile_that_cannot_be_is_refused(backend):
    with make(backend, MAKERS) as collector:
        with pytest.raises(ValueError, match=r"num_rollouts must be more than profile\.warmup_rollouts=2, got 2"):
            collector.enable_profile(num_rollouts=2, warmup_rollouts=2)
        with pytest.raises(ValueError, match=r"workers must be from 0 to [01], got 2"):
            collector.enable_profile([0, 2])
        with pytest.raises(ValueError, match=r"save_path must contain \{worker\}"):
            collector.enable_profile([0, 1], save_path="one.json")
        assert collector.profile_config is None
        collector.collect()
        with pytest.raises(RuntimeError, match="profiling begins with the first batch"):
            collector.enable_profile()


def test_profile_that_names_a_wrong_worker_profiles_none(tmp_path):
    with make("process", MAKERS) as collector:
        with pytest.raises(ValueError, match="workers must be from 0 to 1, got 2"):
            collector.enable_profile([0, 2], num_rollouts=2)
        for _ in range(3):
            collector.collect()
    assert os.listdir(tmp_path) == []


# --- weights that are received ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "receive",
    [
        lambda collector, source: collector.receive_weights(source),
        lambda collector, source: collector.receive_weights(policy=source),
        lambda collector, source: collector.receive_weights(TensorDict.from_module(source)),
        lambda collector, source: collector.receive_weights(dict(source.state_dict())),
        lambda collector, source: collector.receive_weights(weights=source.state_dict()),
        lambda collector, source: collector.receive_weights(source, model_id="policy"),
    ],
)
def test_received_weights_may_come_in_every_form(backend, receive):
    with make(backend, policy=ConstantPolicy(0.0, num_actions=2)) as collector:
        receive(collector, ConstantPolicy(1.0))
        assert collector.policy_version == 1
        batch = collector.collect()
        assert batch["action"].unique().tolist() == batch["collector", "policy_version"].unique().tolist() == [1]
        with pytest.raises(ValueError, match="must be given in one way, got weights and policy"):
            collector.receive_weights(weights=ConstantPolicy(1.0), policy=ConstantPolicy(1.0))
        with pytest.raises(KeyError, match="there is no model 'critic'"):
            collector.receive_weights(ConstantPolicy(1.0), model_id="critic")
        assert collector.policy_version == 1


# --- hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["direct", "process", "async"])
def test_hooks_run_here_and_see_exactly_what_is_yielded(backend):
    calls: list[object] = []

    def double(batch):
        calls.append((os.getpid(), "postproc", batch.shape))
        batch["doubled"] = batch["observation"] * 2
        return batch

    hooks = {
        "pre_collect": lambda: calls.append((os.getpid(), "pre_collect")),
        "postproc": double,
        "post_collect": calls.append,
    }
    with make(backend, MAKERS, total_frames=20, hooks=hooks) as collector:
        yielded = list(collector)
    assert sorted(batch.numel() for batch in yielded) == [4, 8, 8]
    assert len(calls) == 9
    for number, batch in enumerate(yielded):
        pre, post, seen = calls[3 * number : 3 * number + 3]
        assert (pre, post[:2]) == ((os.getpid(), "pre_collect"), (os.getpid(), "postproc"))
        assert seen is batch
        assert torch.equal(batch["doubled"], batch["observation"] * 2)


@pytest.mark.parametrize("backend", ["process", "async"])
def test_hook_that_raises_costs_nothing_but_its_batch(backend):
    def fail(batch) -> None:
        raise OSError("the disk is full")

    with make(backend, MAKERS, total_frames=24, hooks={"post_collect": fail}) as collector:
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is full"):
                collector.collect()
        assert collector.rollout().numel() == 8
        assert collector.frames_left == 0


@BOTH
def test_rows_acted_at_random_say_so_whatever_is_published(backend):
    rollout = RolloutConfig(init_random_frames=12)
    with make(backend, MAKERS, ConstantPolicy(1.0, num_actions=2), rollout=rollout) as collector:
        collector.update_policy_weights_()
        seen = torch.cat([collector.collect()["collector", "policy_version"] for _ in range(3)], 1)
    assert seen.tolist() == [[-1] * 3 + [1] * 3] * 4
