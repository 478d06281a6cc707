"""Weights are read, copied and written whole, or not at all."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lit_collect.weights import (
    WeightSnapshot,
    copy_weights,
    hides_weights,
    models_to_update,
    module_of,
    named_tensors,
)


class Tied(nn.Module):
    """Two names for one parameter, as embeddings and their heads often have."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.first.weight, value)
        self.second.weight = self.first.weight


def net(value: float) -> nn.Module:
    """A module with parameters and buffers, all of one value."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for tensor in (*module.parameters(), *module.buffers()):
        nn.init.constant_(tensor, value)
    return module


def values(module: nn.Module) -> set[float]:
    return {float(x) for tensor in module.state_dict().values() for x in tensor.flatten()}


def test_named_tensors_of_a_module_are_its_own_parameters_and_buffers():
    module = net(1.0)
    tensors = named_tensors(module)
    assert tensors.keys() == module.state_dict().keys()
    assert tensors["0.weight"] is module[0].weight
    assert tensors["1.running_mean"] is module[1].running_mean


@pytest.mark.parametrize(
    "form",
    [
        lambda module: module.state_dict(),
        lambda module: TensorDict.from_module(module),
        lambda module: TensorDict.from_module(module).data,
        lambda module: {"0": {"weight": module[0].weight, "bias": module[0].bias}, "1": dict(named_tensors(module[1]))},
    ],
    ids=["state_dict", "TensorDict", "TensorDict of data", "nested mapping"],
)
def test_named_tensors_of_every_form_are_those_of_the_module(form):
    module = net(1.0)
    expected, tensors = named_tensors(module), named_tensors(form(module))
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in expected.items())


def test_named_tensors_of_no_tensor_raises():
    with pytest.raises(TypeError, match="weights must be tensors, got list for 'bias'"):
        named_tensors({"weight": torch.zeros(1), "bias": [0.0]})


def test_named_tensors_of_what_has_none_raises():
    with pytest.raises(TypeError, match="weights must be a module, a TensorDict or a mapping of tensors, got 3"):
        named_tensors(3)


def test_snapshot_is_not_changed_by_later_training():
    module = net(1.0)
    snapshot = WeightSnapshot.of({"policy": module}, version=4)
    with torch.no_grad():
        module[0].weight.fill_(9.0)
    assert snapshot.version == 4
    assert snapshot.models["policy"]["0.weight"].unique().tolist() == [1.0]
    assert not any(tensor.requires_grad for tensor in snapshot.models["policy"].values())


def test_snapshot_holds_every_model():
    snapshot = WeightSnapshot.of({"policy": net(1.0), "critic": {"w": torch.ones(1)}}, version=0)
    assert snapshot.models.keys() == {"policy", "critic"}
    assert snapshot.models["critic"]["w"].tolist() == [1.0]


def test_copy_weights_writes_parameters_and_buffers_in_place():
    source, target = net(2.0), net(1.0)
    tensors = named_tensors(target)
    copy_weights(named_tensors(source), target)
    assert values(target) == {2.0}
    assert values(source) == {2.0}
    assert all(tensors[name] is tensor for name, tensor in named_tensors(target).items())
    assert target[0].weight.requires_grad
    assert not torch.equal(target[0].weight, torch.ones(3, 2))


def test_copy_weights_of_a_module_into_itself_leaves_autograd_alone():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    loss = module(torch.ones(1, 2)).sum()  # the second weight is needed to go back
    copy_weights(named_tensors(module), module)
    loss.backward()  # would raise had it been written
    assert module[0].weight.grad is not None


@pytest.mark.parametrize("form", [named_tensors, nn.Module.state_dict], ids=["module", "state_dict"])
def test_copy_weights_takes_a_parameter_with_two_names(form):
    target = Tied(1.0)
    copy_weights(form(Tied(2.0)), target)
    assert values(target) == {2.0}
    assert target.second.weight is target.first.weight


def test_copy_weights_of_missing_and_unknown_names_raises_and_writes_nothing():
    target = net(1.0)
    source = dict(named_tensors(net(2.0)))
    source["head.weight"] = source.pop("0.bias")
    with pytest.raises(ValueError, match=r"missing \['0.bias'\], unknown \['head.weight'\]"):
        copy_weights(source, target)
    assert values(target) == {1.0}


def test_copy_weights_of_another_shape_raises_and_writes_nothing():
    target = net(1.0)
    source = {**named_tensors(net(2.0)), "1.bias": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"weight '1.bias' must have shape \(3,\), got \(4,\)"):
        copy_weights(source, target)
    assert values(target) == {1.0}


def test_models_to_update_without_arguments_is_none_of_them():
    assert models_to_update(None, None, None, "policy", None) == {}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_models_to_update_takes_one_model_under_its_id(position):
    module, arguments = net(1.0), [None, None, None]
    arguments[position] = module
    assert models_to_update(*arguments, "critic", None) == {"critic": module}


def test_models_to_update_takes_several_models_by_id():
    models = {"policy": net(1.0), "critic": net(2.0)}
    assert models_to_update(None, None, None, "policy", models) == models


def test_models_to_update_of_two_ways_raises():
    with pytest.raises(ValueError, match="weights must be given in one way, got weights and policy"):
        models_to_update(None, {}, net(1.0), "policy", None)


def test_copy_weights_when_a_buffer_is_never_saved_takes_a_state_dict_without_it():
    def make() -> nn.Module:
        module = nn.Linear(2, 1)
        module.register_buffer("scratch", torch.zeros(3), persistent=False)
        return module

    source, target = make(), make()
    copy_weights(named_tensors(source.state_dict()), target)
    assert torch.equal(target.weight, source.weight)


class Acts:
    """Can be called, and keeps what it needs."""

    def __init__(self, needs) -> None:
        self.needs = needs

    def __call__(self, observation):
        return self.needs(observation)

    def act(self, observation):
        return self.needs(observation)


class Slotted:
    """Has no dictionary of its own."""

    __slots__ = ()

    def act(self, observation):
        return observation


def enclosing(module):
    return lambda observation: module(observation)


def defaulting(module):
    def act(observation, net=module):
        return net(observation)

    return act


LAYER = nn.Linear(2, 1)
OWNED = {
    "module": LAYER,
    "method": LAYER.forward,
    "partial": partial(LAYER),
    "partial of a method": partial(partial(LAYER.forward), torch.zeros(2)),
}
HIDDEN = {
    "closure": enclosing(LAYER),
    "default": defaulting(LAYER),
    "global": lambda observation: LAYER(observation),
    "object": Acts(LAYER),
    "method of an object": Acts(LAYER).act,
    "argument": partial(torch.nn.functional.relu, LAYER),
    "keyword": partial(print, file=LAYER),
}
HARMLESS = {
    "nothing": None,
    "function": torch.zeros_like,
    "method": "text".upper,
    "frozen": enclosing(nn.Linear(2, 1).requires_grad_(False)),
    "object": Acts(torch.tanh),
    "slots": Slotted().act,
    "partial": partial(torch.clamp, min=0),
}


@pytest.mark.parametrize("policy", OWNED.values(), ids=OWNED)
def test_module_of_a_policy_is_the_one_that_acts(policy) -> None:
    assert module_of(policy) is LAYER


@pytest.mark.parametrize(
    "policy", [*HIDDEN.values(), *HARMLESS.values()], ids=[*HIDDEN, *(f"no {n}" for n in HARMLESS)]
)
def test_policy_that_is_no_module_has_none(policy) -> None:
    assert module_of(policy) is None


@pytest.mark.parametrize("policy", HIDDEN.values(), ids=HIDDEN)
def test_weights_to_learn_that_a_function_uses_are_seen(policy) -> None:
    assert hides_weights(policy)


@pytest.mark.parametrize("policy", HARMLESS.values(), ids=HARMLESS)
def test_function_without_weights_to_learn_hides_none(policy) -> None:
    assert not hides_weights(policy)
