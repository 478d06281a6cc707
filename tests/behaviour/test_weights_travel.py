"""Weights reach whoever acts, in every form and of every model, whatever carries them and however many workers."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lit_collect import Collector, Pipe, ProcessBackend
from tests.behaviour.telling import (
    MAKERS,
    OpponentEnv,
    Told,
    backend_of,
    linear,
    opponents,
    told,
    versions,
)

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]

BOTH = pytest.mark.parametrize("backend", ["direct", "sync"])


# --- every form -------------------------------------------------------------------------------------------------------

FORMS = {
    "module": lambda collector, source: collector.update_policy_weights_(source),
    "policy": lambda collector, source: collector.update_policy_weights_(policy=source),
    "state_dict": lambda collector, source: collector.update_policy_weights_(
        {**source.state_dict(), "scratch": source.scratch}
    ),
    "weights, nested": lambda collector, source: collector.update_policy_weights_(
        weights={"inner": {"weight": source.inner.weight}, **dict(source.named_buffers())}
    ),
    "TensorDict": lambda collector, source: collector.update_policy_weights_(TensorDict.from_module(source)),
    "TensorDict of data": lambda collector, source: collector.update_policy_weights_(
        weights=TensorDict.from_module(source).data
    ),
    "weights_dict": lambda collector, source: collector.update_policy_weights_(weights_dict={"policy": source}),
    "model_id": lambda collector, source: collector.update_policy_weights_(source, model_id="policy"),
}


@pytest.mark.parametrize(
    ("workers", "backend"),
    [(1, "direct"), *((n, ProcessBackend(n)) for n in (1, 2, 4)), (2, ProcessBackend(2, weight_sync=Pipe()))],
    ids=str,
)
def test_weights_of_every_form_act_in_the_batch_after_their_publication(workers, backend):
    policy = Told()
    with Collector(MAKERS, policy, frames_per_batch=8, backend=backend) as collector:
        assert (told(batch := collector.collect()), versions(batch)) == ([0.0], [0])
        for version, update in enumerate(FORMS.values(), 1):
            source = Told(10.0 + version)
            update(collector, source)
            source.fill(-1.0)  # what is trained later is not what was published
            batch = collector.collect()
            assert (told(batch), versions(batch)) == ([10.0 + version], [version])
        for update in (collector.update_policy_weights_, collector.increment_version):
            policy.fill(100.0 + collector.policy_version)
            update()
            batch = collector.collect()
            assert (told(batch), versions(batch)) == ([99.0 + collector.policy_version], [collector.policy_version])
        assert collector.statistics()["acknowledged_versions"] == [collector.policy_version] * workers


def test_weights_reach_asynchronous_workers_with_their_next_batch():
    policy, seen = Told(), {0.0: [0], 2.0: [0]}
    with Collector(MAKERS, policy, frames_per_batch=4, backend=ProcessBackend(2, sync=False)) as collector:
        collector.collect()
        collector.update_policy_weights_(policy.fill(1.0))
        while not all(own[-1] for own in seen.values()):
            batch = collector.collect()
            assert told(batch) == [float(version) for version in versions(batch)]
            seen[batch["observation"][0, 0, 0].item()] += versions(batch)
        assert collector.statistics()["acknowledged_versions"] == [1, 1]
    # a worker was at one batch and had leave for another when it was published
    assert all(own == sorted(own) and len(own) <= 5 for own in seen.values())


@BOTH
def test_weights_of_another_precision_are_taken_by_a_float32_policy(backend):
    with Collector(MAKERS, Told(), frames_per_batch=4, backend=backend_of(backend)) as collector:
        for version, dtype in enumerate(
            [torch.bfloat16, torch.bfloat16, torch.float16, torch.float64, torch.float32], 1
        ):
            collector.update_policy_weights_(Told(version + 0.5).to(dtype))
            batch = collector.collect()
            assert versions(batch) == [version]
            assert batch["told"].dtype == torch.float32
            assert batch["told"].unique().tolist() == [float(version), version + 0.5]  # integers stay integers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_learner_that_changes_its_precision_goes_on_publishing(dtype):
    policy = Told()
    with Collector(MAKERS, policy, frames_per_batch=4, backend=ProcessBackend(2)) as collector:
        collector.collect()
        policy.to(dtype)
        for version in (1, 2):
            policy.fill(float(version))
            collector.update_policy_weights_()
            batch = collector.collect()
            assert (told(batch), versions(batch)) == ([float(version)], [version])
            assert batch["told"].dtype == torch.float32


def test_saved_weights_leave_out_what_is_never_saved():
    policy = Told(3.0)
    with Collector(MAKERS, policy, frames_per_batch=4, backend=ProcessBackend(2)) as collector:
        collector.update_policy_weights_(Told(5.0).state_dict())
        assert collector.collect()["told"][0, 0].tolist() == [5.0, 5.0, 5.0, 3.0]
        collector.update_policy_weights_(Told(7.0))
        assert told(collector.collect()) == [7.0]
        collector.update_policy_weights_(Told(8.0).state_dict())
        assert collector.collect()["told"][0, 0].tolist() == [8.0, 8.0, 8.0, 7.0]


# --- several models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["direct", ProcessBackend(2), ProcessBackend(2, weight_sync=Pipe())], ids=str)
def test_models_of_one_publication_arrive_together(backend):
    makers = [partial(OpponentEnv, index) for index in range(4)]
    copies = 4 if backend == "direct" else 2
    with Collector(makers, Told(), frames_per_batch=8, backend=backend) as collector:
        for version in (1, 2, 3):
            collector.update_policy_weights_(
                weights_dict={"policy": Told(float(version)), **opponents(float(version), copies)}
            )
            batch = collector.collect()
            assert (told(batch), versions(batch)) == ([float(version)], [version])
            assert batch["next", "observation"][..., 2].unique().tolist() == [float(version)]
        collector.update_policy_weights_(weights_dict=opponents(9.0, copies))
        batch = collector.collect()
        assert (told(batch), versions(batch)) == ([3.0], [4])
        assert batch["next", "observation"][..., 2].unique().tolist() == [9.0]
        collector.update_policy_weights_(Told(5.0))
        batch = collector.collect()
        assert told(batch) == [5.0]
        assert batch["next", "observation"][..., 2].unique().tolist() == [9.0]


def test_models_of_one_publication_stay_together_in_asynchronous_batches():
    makers = [partial(OpponentEnv, index) for index in range(2)]
    with Collector(makers, Told(), frames_per_batch=2, backend=ProcessBackend(2, sync=False)) as collector:
        for version in range(1, 60):
            value = float(version)
            collector.update_policy_weights_(weights_dict={"policy": Told(value), **opponents(value, 1)})
            batch = collector.collect()
            assert told(batch) == [float(versions(batch)[0])] == batch["next", "observation"][..., 2].unique().tolist()


@BOTH
def test_model_of_the_env_can_be_updated_before_the_policy_ever_was(backend):
    policy = Told()
    makers = [partial(OpponentEnv, index) for index in range(2)]
    with Collector(makers, policy, frames_per_batch=4, backend=backend_of(backend)) as collector:
        policy.fill(2.0)  # trained before anything was published
        collector.update_policy_weights_(linear(7.0), model_id="env.envs[0].unwrapped.opponent")
        batch = collector.collect()
    assert (told(batch), versions(batch)) == ([2.0], [1])
    assert batch["next", "observation"][0, :, 2].tolist() == [7.0, 7.0]


# --- some workers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [None, Pipe])
def test_weights_for_some_workers_act_there_alone_under_the_newer_version(scheme):
    backend = ProcessBackend(4, weight_sync=scheme and scheme())
    with Collector(MAKERS, Told(), frames_per_batch=8, backend=backend) as collector:

        def rows() -> list[tuple[float, int]]:
            batch = collector.collect()
            assert all(told(row) and len(versions(row)) == 1 for row in batch)
            return [(told(row)[0], versions(row)[0]) for row in batch]

        collector.update_policy_weights_(Told(1.0), worker_ids=2)
        assert rows() == [(0.0, 0), (0.0, 0), (1.0, 1), (0.0, 0)]
        collector.update_policy_weights_(Told(2.0), worker_ids=[0, 2])
        assert rows() == [(2.0, 2), (0.0, 0), (2.0, 2), (0.0, 0)]
        assert collector.statistics()["acknowledged_versions"] == [2, 0, 2, 0]
        collector.update_policy_weights_(Told(3.0))
        assert rows() == [(3.0, 3)] * 4
        collector.update_policy_weights_(Told(4.0), worker_ids=(3,))
        assert rows() == [(3.0, 3)] * 3 + [(4.0, 4)]


def test_weights_for_one_worker_leave_the_others_what_the_learner_began_with():
    policy = Told()
    with Collector(MAKERS, policy, frames_per_batch=8, backend=ProcessBackend(2)) as collector:
        policy.fill(2.0)
        collector.update_policy_weights_(Told(5.0), worker_ids=0)
        batch = collector.collect()
    assert [(told(row), versions(row)) for row in batch] == [([5.0], [1])] * 2 + [([2.0], [0])] * 2


# --- what cannot be published -----------------------------------------------------------------------------------------

REFUSED = [
    ({"weights": {"wrong": torch.zeros(1)}}, ValueError, r"do not fit .*missing .*unknown \['wrong'\]"),
    ({"policy": nn.Linear(2, 2)}, ValueError, "do not fit the policy"),
    ({"weights": {**Told().state_dict(), "shift": torch.zeros(2)}}, ValueError, r"'shift' must have shape \(1,\)"),
    ({"policy": Told(), "model_id": "critic"}, KeyError, "there is no model 'critic'"),
    ({"policy": Told(), "model_id": "env.envs[9].net"}, KeyError, r"there is no model 'env\.envs\[9\]\.net'"),
    ({"policy": Told(), "model_id": "env"}, TypeError, "the env has no weights"),
    ({"policy": Told(), "weights": Told()}, ValueError, "must be given in one way, got weights and policy"),
    ({"policy_or_weights": Told(), "weights_dict": {}}, ValueError, "must be given in one way"),
    ({"weights": {"shift": 3.0}}, TypeError, "weights must be tensors, got float for 'shift'"),
    ({"weights_dict": {"policy": Told(9.0), "env.envs[0].unwrapped.opponent": nn.Linear(2, 2)}}, ValueError, "fit"),
    ({"weights_dict": {"policy": Told(9.0), "nobody": linear(9.0)}}, KeyError, "there is no model 'nobody'"),
]


@BOTH
def test_what_does_not_fit_changes_nothing(backend):
    makers = [partial(OpponentEnv, index) for index in range(2)]
    with Collector(makers, Told(1.0), frames_per_batch=4, backend=backend_of(backend)) as collector:
        for arguments, error, words in REFUSED:
            with pytest.raises(error, match=words):
                collector.update_policy_weights_(**arguments)
            assert collector.policy_version == 0
            batch = collector.collect()
            assert (told(batch), versions(batch)) == ([1.0], [0])
            assert batch["next", "observation"][..., 2].unique().tolist() == [0.0]
        collector.update_policy_weights_(Told(2.0))
        assert told(collector.collect()) == [2.0]


def test_workers_that_do_not_exist_are_named():
    with Collector(MAKERS, Told(), frames_per_batch=4, backend=ProcessBackend(2)) as collector:
        for worker_ids in (2, -1, [0, 7]):
            with pytest.raises(ValueError, match=r"worker_ids must be from 0 to 1, got (2|-1|7)"):
                collector.update_policy_weights_(Told(1.0), worker_ids=worker_ids)
        assert collector.policy_version == 0
        assert told(collector.collect()) == [0.0]
    with Collector(MAKERS, Told(), frames_per_batch=4) as collector:
        with pytest.raises(ValueError, match="worker_ids needs a backend with workers : the direct backend has none"):
            collector.update_policy_weights_(Told(1.0), worker_ids=0)
        assert told(collector.collect()) == [0.0]


@pytest.mark.parametrize("policy", [None, lambda observation: torch.zeros(len(observation), dtype=torch.int64)])
def test_policy_without_weights_takes_none_in_a_process(policy):
    with Collector(MAKERS, policy, frames_per_batch=4, backend=ProcessBackend(2)) as collector:
        with pytest.raises(TypeError, match=r"the policy has no weights : only an nn\.Module can be updated"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})
        collector.update_policy_weights_()
        assert versions(collector.collect()) == [1]


# --- before the first batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("scheme", [None, Pipe])
def test_weights_trained_before_the_first_batch_act_in_it_under_version_0(sync, scheme):
    policy = Told()
    backend = ProcessBackend(2, sync, weight_sync=scheme and scheme())
    with Collector(MAKERS, policy, frames_per_batch=4, backend=backend) as collector:
        policy.fill(6.0)
        batch = collector.collect()
        assert (told(batch), versions(batch)) == ([6.0], [0])
        policy.fill(7.0)  # not published
        assert told(collector.collect()) == [6.0]


def test_init_updater_does_nothing():
    with Collector(MAKERS, Told(), frames_per_batch=4) as collector:
        assert collector.init_updater(1, worker=2) is None
        assert collector.policy_version == 0
