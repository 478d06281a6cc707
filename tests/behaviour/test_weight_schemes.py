"""What carries weights may be chosen, written anew, or fed by somebody else, and is used again and again."""

from functools import partial

import pytest

from lit_collect import Collector, NoSync, Pipe, ProcessBackend, SharedMemory, StaleDataError
from lit_collect.schemes import WeightReceiver
from lit_collect.weights import WeightSnapshot
from tests.behaviour.telling import (
    MAKERS,
    FileScheme,
    OpponentEnv,
    SilentScheme,
    Told,
    backend_of,
    linear,
    told,
    versions,
)

pytestmark = [pytest.mark.usefixtures("nursery"), pytest.mark.processes, pytest.mark.timeout(120)]

BOTH = pytest.mark.parametrize("backend", ["direct", "sync"])


# --- schemes ----------------------------------------------------------------------------------------------------------


def test_scheme_of_ones_own_carries_weights(tmp_path):
    policy = Told()
    backend = ProcessBackend(2, weight_sync=FileScheme(tmp_path, 2))
    with Collector(MAKERS, policy, frames_per_batch=8, backend=backend) as collector:
        policy.fill(1.0)
        assert told(collector.collect()) == [1.0]
        for version in (1, 2):
            collector.update_policy_weights_(Told(10.0 + version))
            batch = collector.collect()
            assert (told(batch), versions(batch)) == ([10.0 + version], [version])
        collector.update_policy_weights_(Told(20.0), worker_ids=1)
        assert [told(row) for row in collector.collect()] == [[12.0]] * 2 + [[20.0]] * 2
        assert collector.statistics()["acknowledged_versions"] == [2, 3]
    assert list(tmp_path.iterdir()) == []  # it was closed


@pytest.mark.parametrize("bound", [None, 0, 2])
def test_scheme_that_delivers_nothing_is_found_out_in_synchronous_collection(bound):
    backend = ProcessBackend(2, weight_sync=SilentScheme(), max_staleness=bound)
    with Collector(MAKERS, Told(), frames_per_batch=4, backend=backend) as collector:
        for _ in range(bound or 0):
            collector.update_policy_weights_()
            assert versions(collector.collect()) == [0]
        collector.update_policy_weights_()
        for _ in range(2):  # each time it is asked
            with pytest.raises(StaleDataError, match=r"worker \d.* acted with version 0 : expected at least 1, which"):
                collector.collect()
        now = collector.statistics()
        assert now["frames_dropped"] > 0
        assert now["frames_stepped"] == now["frames_yielded"] + now["frames_dropped"]


def test_no_sync_carries_the_version_alone():
    policy = Told()
    with Collector(MAKERS, policy, frames_per_batch=4, backend=ProcessBackend(2, weight_sync=NoSync())) as collector:
        for version in (0, 1, 2):
            batch = collector.collect()
            assert (told(batch), versions(batch)) == ([0.0], [version])
            policy.fill(version + 1.0)
            collector.update_policy_weights_()


@pytest.mark.parametrize("scheme", [NoSync, Pipe, SharedMemory, partial(FileScheme, workers=2)])
def test_backend_and_its_scheme_serve_one_collector_after_the_other(scheme, tmp_path):
    made = scheme(tmp_path) if isinstance(scheme, partial) else scheme()
    backend = ProcessBackend(2, weight_sync=made)
    for first in (3.0, 4.0):
        policy = Told(first)
        with Collector(MAKERS, policy, frames_per_batch=4, backend=backend) as collector:
            assert (told(batch := collector.collect()), versions(batch)) == ([first], [0])
            for version in (1, 2, 3):
                collector.update_policy_weights_(policy.fill(first + version))
                batch = collector.collect()
                assert versions(batch) == [version]
                assert scheme is NoSync or told(batch) == [first + version]


def test_backend_serves_two_collectors_at_a_time_and_their_weights_stay_apart():
    backend = ProcessBackend(2)
    with (
        Collector(MAKERS, Told(1.0), frames_per_batch=4, backend=backend) as one,
        Collector(MAKERS, Told(2.0), frames_per_batch=4, backend=backend) as other,
    ):
        for version in (1, 2):
            one.update_policy_weights_(Told(10.0 + version))
            other.update_policy_weights_(Told(20.0 + version))
            other.update_policy_weights_(Told(30.0 + version))
            assert (told(batch := one.collect()), versions(batch)) == ([10.0 + version], [version])
            assert (told(batch := other.collect()), versions(batch)) == ([30.0 + version], [2 * version])


@pytest.mark.parametrize("scheme", [Pipe, SharedMemory])
def test_scheme_that_serves_a_collector_is_refused_to_another_one(scheme):
    backend = ProcessBackend(1, weight_sync=scheme())
    with Collector(MAKERS, Told(1.0), frames_per_batch=4, backend=backend) as collector:
        with pytest.raises(ValueError, match="weight_sync serves another collector : expected one that is free"):
            Collector(MAKERS, Told(2.0), frames_per_batch=4, backend=backend)
        assert told(collector.collect()) == [1.0]


@pytest.mark.parametrize("scheme", [None, NoSync, Pipe, SharedMemory])
def test_state_of_an_earlier_version_goes_on_with_the_weights_of_now(scheme):
    policy = Told()
    with Collector(MAKERS, policy, frames_per_batch=4, backend=ProcessBackend(2)) as collector:
        collector.update_policy_weights_(policy.fill(1.0))
        collector.collect()
        state = collector.state_dict()
    policy = Told(2.0)
    backend = "direct" if scheme is None else ProcessBackend(2, weight_sync=scheme())
    with Collector(MAKERS, policy, frames_per_batch=4, backend=backend) as collector:
        for version in (1, 2, 3):
            collector.update_policy_weights_(policy.fill(10.0 + version))
            collector.collect()
        collector.load_state_dict(state)
        policy.fill(50.0)  # of the checkpoint
        for version in (1, 2, 3):
            batch = collector.collect()
            assert versions(batch) == [version]
            assert scheme is NoSync or told(batch) == [49.0 + version]
            collector.update_policy_weights_(policy.fill(50.0 + version))
        assert collector.policy_version == 4


# --- weights from elsewhere -------------------------------------------------------------------------------------------


class Mailbox(WeightReceiver):
    """A receiver that a test fills by hand."""

    def __init__(self) -> None:
        self.letters: list[WeightSnapshot] = []

    def receive(self, ticket):
        assert ticket is None
        return self.letters.pop() if self.letters else None


@BOTH
def test_collector_takes_weights_from_a_scheme_that_somebody_else_feeds(backend):
    scheme = Pipe()
    scheme.publish({"policy": dict(Told(4.0).state_dict())}, 17, None)
    with Collector(MAKERS, Told(), frames_per_batch=8, backend=backend_of(backend)) as collector:
        collector.register_scheme_receiver({"policy": scheme})
        assert collector.policy_version == 1  # its own counting
        batch = collector.collect()
        assert (batch["told"][0, 0, 0].item(), versions(batch)) == (4.0, [1])
        assert versions(collector.collect()) == [1]  # nothing new
        for value in (5.0, 6.0):
            scheme.publish({"policy": dict(Told(value).named_parameters())}, int(20 + value), None)
        with pytest.raises(ValueError, match="do not fit"):
            collector.collect()
        assert collector.policy_version == 1
        scheme.publish({"policy": dict(Told(7.0).state_dict())}, 40, None)
        batch = collector.collect()  # it looks before each batch
        assert (batch["told"][0, 0, 0].item(), versions(batch)) == (7.0, [2])


@BOTH
def test_collector_takes_weights_from_a_receiver(backend):
    mailbox = Mailbox()
    with Collector(MAKERS, Told(), frames_per_batch=8, backend=backend_of(backend)) as collector:
        mailbox.letters.append(WeightSnapshot.of({"policy": Told(1.0)}, 1))
        collector.register_scheme_receiver({"policy": mailbox}, synchronize_weights=False)
        assert (collector.policy_version, len(mailbox.letters)) == (0, 1)
        collector.receive_weights()
        assert (collector.policy_version, len(mailbox.letters)) == (1, 0)
        assert told(collector.collect()) == [1.0]
        collector.receive_weights()
        assert collector.policy_version == 1
        mailbox.letters.append(WeightSnapshot.of({"policy": Told(2.0), "other": linear(1.0)}, 2))
        batch = collector.collect()
        assert (told(batch), versions(batch)) == ([2.0], [2])


@BOTH
@pytest.mark.parametrize("scheme", [Pipe, SharedMemory, Mailbox])
def test_several_models_come_from_one_scheme(backend, scheme):
    source, ids = scheme(), ["policy", "env.envs[0].unwrapped.opponent"]

    def publish(value: float) -> None:
        models = {ids[0]: Told(value), ids[1]: linear(value)}
        snapshot = WeightSnapshot.of(models, int(value))
        if isinstance(source, Mailbox):
            source.letters.append(snapshot)
        else:
            source.publish(snapshot.models, snapshot.version, None)

    makers = [partial(OpponentEnv, index) for index in range(2)]
    with Collector(makers, Told(), frames_per_batch=4, backend=backend_of(backend)) as collector:
        collector.register_scheme_receiver(dict.fromkeys(ids, source))
        for version in (1, 2, 3):
            publish(float(version))
            batch = collector.collect()
            assert (told(batch), versions(batch)) == ([float(version)], [version])
            assert batch["next", "observation"][0, :, 2].tolist() == [float(version)] * 2
    if not isinstance(source, Mailbox):
        source.close()


@BOTH
def test_receive_weights_without_receivers_publishes_what_it_is_given(backend):
    policy = Told()
    with Collector(MAKERS, policy, frames_per_batch=8, backend=backend_of(backend)) as collector:
        collector.receive_weights(Told(1.0))
        assert told(collector.collect()) == [1.0]
        collector.receive_weights(weights=dict(Told(2.0).state_dict()))
        assert collector.collect()["told"][0, 0, 0].item() == 2.0
        policy.fill(3.0)
        collector.receive_weights()
        batch = collector.collect()
        assert (told(batch), versions(batch)) == ([3.0], [3])


@BOTH
def test_register_of_what_is_no_scheme_changes_nothing(backend):
    with Collector(MAKERS, Told(), frames_per_batch=8, backend=backend_of(backend)) as collector:
        with pytest.raises(TypeError, match="a scheme must be a WeightSyncScheme or a WeightReceiver, got 'pipe'"):
            collector.register_scheme_receiver({"policy": Pipe(), "other": "pipe"})
        collector.receive_weights(Told(1.0))  # nothing is registered
        assert told(collector.collect()) == [1.0]
        collector.register_scheme_receiver({"policy": Pipe()})
        with pytest.raises(ValueError, match="receive_weights takes no weights while receivers are registered"):
            collector.receive_weights(Told(2.0))
        assert collector.policy_version == 1
