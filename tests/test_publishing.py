"""Versions only grow, what does not fit is never offered, and weights from elsewhere are taken once."""

import gc

import pytest
import torch
from torch import nn

from lit_collect.publishing import Inlet, Publisher
from lit_collect.schemes import NoSync, Pipe, SharedMemory, WeightReceiver, WeightSyncScheme
from lit_collect.weights import ModelShapes, WeightSnapshot


def net(value: float, size: int = 1) -> nn.Module:
    module = nn.Linear(size, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


class Ledger(WeightSyncScheme):
    """Writes down what it is asked to carry."""

    def __init__(self) -> None:
        self.entries: list[tuple] = []
        self.error: Exception | None = None

    def publish(self, models, version, workers):
        if self.error is not None:
            raise self.error
        values = {name: {key: tensor.flatten().tolist() for key, tensor in m.items()} for name, m in models.items()}
        self.entries.append((values, version, workers))

    def ticket(self, worker):
        self.entries.append(("ticket", worker))
        return f"ticket of {worker}"

    def receiver(self, worker):
        self.entries.append(("receiver", worker))
        return SilentReceiver()

    def forget(self, worker):
        self.entries.append(("forget", worker))

    def close(self):
        self.entries.append(("close",))


class SilentReceiver(WeightReceiver):
    def receive(self, ticket):
        return None


class Questions:
    """Answers what the weights of a model must look like, and keeps what it was asked."""

    def __init__(self, **models: nn.Module) -> None:
        self._models = models
        self.asked: list[str] = []

    def __call__(self, model_id: str) -> ModelShapes:
        self.asked.append(model_id)
        if model_id not in self._models:
            raise KeyError(f"there is no model {model_id!r}")
        return ModelShapes.of(self._models[model_id])


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def publisher_of(ledger, policy=None, *, workers: int = 2, **models: nn.Module) -> Publisher:
    publisher = Publisher(ledger, policy, num_workers=workers, describe=Questions(**models))
    if isinstance(policy, nn.Module):
        publisher.expect("policy", ModelShapes.of(policy))
    return publisher


def own(value: float) -> dict:
    return {"policy": {"weight": [value]}}


# --- versions ---------------------------------------------------------------------------------------------------------


def test_begin_offers_what_the_learner_has_once_under_the_version_of_the_beginning(ledger):
    policy = net(1.0)
    publisher = publisher_of(ledger, policy)
    assert ledger.entries == []
    nn.init.constant_(policy.weight, 2.0)
    for _ in range(2):
        publisher.begin()
    assert ledger.entries == [(own(2.0), 0, None)]
    assert (publisher.version, publisher.offered) == (0, [0, 0])


def test_ticket_begins_if_nobody_has(ledger):
    publisher = publisher_of(ledger, net(1.0))
    assert [publisher.ticket(worker) for worker in (1, 0)] == ["ticket of 1", "ticket of 0"]
    assert ledger.entries == [(own(1.0), 0, None), ("ticket", 1), ("ticket", 0)]


def test_advance_offers_the_learners_own_weights_unless_it_is_given_others(ledger):
    policy = net(1.0)
    publisher = publisher_of(ledger, policy, other=net(0.0, 2))
    publisher.begin()
    nn.init.constant_(policy.weight, 2.0)
    publisher.advance({})
    publisher.advance({"policy": net(3.0)})
    publisher.advance({"other": {"weight": torch.full((1, 2), 4.0)}, "policy": net(5.0)})
    assert ledger.entries[1:] == [
        (own(2.0), 1, None),
        (own(3.0), 2, None),
        ({"other": {"weight": [4.0, 4.0]}, **own(5.0)}, 3, None),
    ]
    assert (publisher.version, publisher.offered) == (3, [3, 3])


@pytest.mark.parametrize(("workers", "offered"), [([1], [0, 1, 0]), ([0, 2], [1, 0, 1]), ([], [0, 0, 0])])
def test_advance_for_some_workers_offers_to_them_alone(ledger, workers, offered):
    publisher = publisher_of(ledger, net(1.0), workers=3)
    publisher.advance({"policy": net(2.0)}, workers)
    assert (publisher.version, publisher.offered) == (1, offered)
    assert ledger.entries == [(own(1.0), 0, None), (own(2.0), 1, workers)]  # the others begin with what there is
    publisher.advance({})
    assert publisher.offered == [2, 2, 2]


def test_advance_of_another_model_begins_with_the_policy(ledger):
    publisher = publisher_of(ledger, net(1.0), other=net(0.0))
    publisher.advance({"other": net(7.0)})
    assert ledger.entries == [(own(1.0), 0, None), ({"other": {"weight": [7.0]}}, 1, None)]


def test_policy_without_a_module_has_a_version_all_the_same(ledger):
    publisher = publisher_of(ledger, print)
    publisher.advance({})
    assert ledger.entries == [({}, 0, None), ({}, 1, None)]


def test_policy_that_is_a_method_publishes_its_module(ledger):
    publisher_of(ledger, net(1.0).forward).begin()
    assert ledger.entries == [(own(1.0), 0, None)]


def test_resume_goes_on_from_another_version_and_begins_again(ledger):
    publisher = publisher_of(ledger, net(1.0))
    for _ in range(5):
        publisher.advance({})
    del ledger.entries[:]
    publisher.resume(2)
    assert (publisher.version, publisher.offered) == (2, [2, 2])
    publisher.ticket(0)
    publisher.advance({})
    assert ledger.entries == [("close",), (own(1.0), 2, None), ("ticket", 0), (own(1.0), 3, None)]


def test_receiver_is_of_a_worker_that_has_nothing_yet(ledger):
    publisher = publisher_of(ledger)
    assert isinstance(publisher.receiver(1), SilentReceiver)
    assert ledger.entries == [("forget", 1), ("receiver", 1)]


# --- what is not offered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "error", "words"),
    [
        ({"policy": net(1.0, 3)}, ValueError, r"'weight' must have shape \(1, 1\), got \(1, 3\)"),
        ({"policy": {"bias": torch.zeros(1)}}, ValueError, r"missing \['weight'\], unknown \['bias'\]"),
        ({"policy": {"weight": 1.0}}, TypeError, "weights must be tensors"),
        ({"policy": net(1.0), "critic": net(1.0)}, KeyError, "there is no model 'critic'"),
        ({"policy": net(1.0), "other": net(1.0)}, ValueError, r"'weight' must have shape \(1, 2\)"),
    ],
)
def test_advance_of_what_does_not_fit_offers_nothing(ledger, models, error, words):
    publisher = publisher_of(ledger, net(0.0), other=net(0.0, 2))
    with pytest.raises(error, match=words):
        publisher.advance(models)
    assert (publisher.version, publisher.offered, ledger.entries) == (0, [0, 0], [])


def test_advance_when_the_scheme_fails_keeps_the_version(ledger):
    publisher = publisher_of(ledger, net(1.0))
    publisher.advance({})
    ledger.error = OSError("the disk is full")
    for workers in (None, [1]):
        with pytest.raises(OSError, match="the disk is full"):
            publisher.advance({}, workers)
        assert (publisher.version, publisher.offered) == (1, [1, 1])
    ledger.error = None
    publisher.advance({})
    assert ledger.entries[-1] == (own(1.0), 2, None)


def test_shapes_are_asked_for_once(ledger):
    questions = Questions(other=net(0.0))
    publisher = Publisher(ledger, None, num_workers=1, describe=questions)
    publisher.expect("policy", ModelShapes.of(net(0.0)))
    assert publisher.knows(["policy"])
    assert publisher.knows([])
    assert not publisher.knows(["policy", "other"])
    for _ in range(2):
        publisher.advance({"policy": net(1.0), "other": net(1.0)})
    assert questions.asked == ["other"]
    assert publisher.knows(["policy", "other"])
    for _ in range(2):
        with pytest.raises(KeyError):
            publisher.advance({"critic": net(1.0)})
    assert questions.asked == ["other", "critic", "critic"]


def test_policy_with_parameters_without_a_shape_is_refused_and_leaves_the_scheme_free(ledger):
    with pytest.raises(ValueError, match=r"parameters without a shape : expected none .*got \['weight'"):
        publisher_of(ledger, nn.LazyLinear(1))
    publisher_of(ledger, net(1.0)).begin()
    assert ledger.entries == [(own(1.0), 0, None)]


# --- one scheme, one publisher ----------------------------------------------------------------------------------------


def test_scheme_serves_one_publisher_at_a_time(ledger):
    first = publisher_of(ledger)
    with pytest.raises(ValueError, match="weight_sync serves another collector : expected one that is free"):
        publisher_of(ledger)
    publisher_of(Ledger())
    first.close()
    second = publisher_of(ledger)
    first.close()  # once more, which the second one does not feel
    with pytest.raises(ValueError, match="serves another collector"):
        publisher_of(ledger)
    del second  # nobody has closed it
    gc.collect()
    publisher_of(ledger).close()


# --- weights from elsewhere -------------------------------------------------------------------------------------------


class Mailbox(WeightReceiver):
    """A receiver that a test fills by hand."""

    def __init__(self, *letters: WeightSnapshot) -> None:
        self._letters = list(letters)
        self.looks = 0

    def receive(self, ticket):
        assert ticket is None
        self.looks += 1
        return self._letters.pop(0) if self._letters else None


def values(found: dict) -> dict[str, float]:
    return {model_id: float(weights["weight"]) for model_id, weights in found.items()}


def snapshot(version: int = 1, **models: float) -> WeightSnapshot:
    return WeightSnapshot.of({model_id: net(value) for model_id, value in models.items()}, version)


def test_inlet_is_empty_until_something_is_registered():
    inlet = Inlet()
    assert not inlet
    assert inlet.fresh() == {}
    inlet.register({})
    assert not inlet
    inlet.register({"policy": Mailbox()})
    assert inlet
    assert inlet.fresh() == {}


def test_inlet_takes_from_each_receiver_the_model_it_is_registered_for():
    inlet = Inlet()
    inlet.register({"policy": Mailbox(snapshot(policy=1.0, critic=2.0)), "critic": Mailbox(snapshot(critic=3.0))})
    assert values(inlet.fresh()) == {"policy": 1.0, "critic": 3.0}
    assert inlet.fresh() == {}


def test_inlet_looks_once_into_a_receiver_of_several_models():
    inlet, mailbox = Inlet(), Mailbox(snapshot(policy=1.0, critic=2.0, other=3.0), snapshot(critic=4.0))
    inlet.register({"policy": mailbox, "critic": mailbox})
    assert (values(inlet.fresh()), mailbox.looks) == ({"policy": 1.0, "critic": 2.0}, 1)
    assert (values(inlet.fresh()), mailbox.looks) == ({"critic": 4.0}, 2)


@pytest.mark.parametrize("kind", [Pipe, SharedMemory])
def test_inlet_takes_what_a_scheme_of_this_process_carries(kind):
    inlet, scheme = Inlet(), kind()
    try:
        scheme.publish({"policy": {"weight": torch.ones(1)}}, 3, None)
        inlet.register({"policy": scheme})
        assert values(inlet.fresh()) == {"policy": 1.0}
        assert inlet.fresh() == {}
        for version in (4, 5):
            scheme.publish({"policy": {"weight": torch.full((1,), float(version))}}, version, None)
        assert values(inlet.fresh()) == {"policy": 5.0}
        scheme.publish({"policy": {"weight": torch.full((1,), 6.0)}, "critic": {"weight": torch.ones(1)}}, 6, None)
        assert values(inlet.fresh()) == {"policy": 6.0}
        inlet.register({"critic": scheme})  # it gets what was published before
        assert values(inlet.fresh()) == {"policy": 6.0, "critic": 1.0}
    finally:
        scheme.close()


def test_inlet_of_a_scheme_without_weights_finds_none():
    inlet, scheme = Inlet(), NoSync()
    scheme.publish({}, 1, None)
    inlet.register({"policy": scheme})
    assert inlet.fresh() == {}


def test_inlet_takes_the_newest_registration_of_a_model():
    inlet, first = Inlet(), Mailbox(snapshot(policy=1.0))
    inlet.register({"policy": first})
    inlet.register({"policy": Mailbox(snapshot(policy=2.0))})
    assert (values(inlet.fresh()), first.looks) == ({"policy": 2.0}, 0)


@pytest.mark.parametrize("wrong", [None, "pipe", Pipe, {"weight": 1.0}])
def test_inlet_registers_nothing_if_one_is_no_scheme(wrong):
    inlet = Inlet()
    with pytest.raises(TypeError, match="a scheme must be a WeightSyncScheme or a WeightReceiver, got"):
        inlet.register({"policy": Mailbox(snapshot(policy=1.0)), "other": wrong})
    assert not inlet
