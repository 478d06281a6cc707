"""The networks: shapes, initialisation, kinds of spaces, and the fast activation."""

import math

import pytest
import torch
from torch import nn

from trainers.networks import (
    ActorNetwork,
    CriticNetwork,
    Tanh,
    action_entropy,
    action_log_prob,
    mlp,
)

BOX = {"kind": "box", "shape": [4], "dtype": "float32", "low": [-1.0] * 4, "high": [1.0] * 4}
IMAGE = {"kind": "box", "shape": [2, 3], "dtype": "uint8", "low": [0] * 6, "high": [255] * 6}
TWO = {"kind": "discrete", "n": 2, "start": 0}


def test_tanh_equals_torch_in_value_and_gradient():
    x = torch.linspace(-12.0, 12.0, 1001, requires_grad=True)
    fast, reference = Tanh()(x), torch.tanh(x)
    torch.testing.assert_close(fast, reference, rtol=1e-6, atol=1e-7)
    weight = torch.linspace(-1.0, 1.0, 1001)
    torch.testing.assert_close(
        torch.autograd.grad(fast, x, weight), torch.autograd.grad(reference, x, weight), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tanh_of_other_precisions_is_torch(dtype):
    x = torch.linspace(-2.0, 2.0, 9).to(dtype)
    assert torch.equal(Tanh()(x), torch.tanh(x))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_tanh_without_gradients_gives_a_plain_tensor(guard):
    with guard():
        result = Tanh()(nn.Linear(3, 2)(torch.ones(1, 3)))
    assert not result.requires_grad


def test_mlp_has_orthogonal_weights_of_the_given_gains_and_zero_biases():
    first, _, second, _, last = mlp([8, 8, 8, 3], output_gain=0.01)
    for layer, gain in ((first, math.sqrt(2)), (second, math.sqrt(2)), (last, 0.01)):
        rows = layer.weight.shape[0]
        gram = layer.weight @ layer.weight.T
        torch.testing.assert_close(gram, gain**2 * torch.eye(rows), rtol=1e-4, atol=1e-5)
        assert not layer.bias.any()


def test_mlp_puts_the_activation_between_layers_only():
    assert [type(layer) for layer in mlp([2, 3, 4, 1], nn.ReLU)] == [
        nn.Linear,
        nn.ReLU,
        nn.Linear,
        nn.ReLU,
        nn.Linear,
    ]


@pytest.mark.parametrize("sizes", [[4], [4, 0, 2]])
def test_mlp_when_sizes_describe_no_network_raises(sizes):
    with pytest.raises(ValueError, match="sizes describe no network"):
        mlp(sizes)


def test_networks_when_the_observation_is_not_supported_name_its_kind():
    message = "observation space is not supported : expected kind 'box', .*, got 'graph'"
    with pytest.raises(ValueError, match=message):
        ActorNetwork({"kind": "graph"}, TWO)
    with pytest.raises(ValueError, match=message):
        CriticNetwork({"kind": "graph"})


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        ({"kind": "tuple", "spaces": [TWO]}, "got 'tuple';"),
        ({"kind": "multi_discrete", "nvec": [[2, 3]]}, "got 'multi_discrete';"),
        ({"kind": "multi_binary", "shape": [3, 1]}, r"got 'multi_binary' of shape \[3, 1\];"),
        (IMAGE, r"got 'box' of shape \[2, 3\];"),
    ],
)
def test_actor_when_the_action_is_not_supported_names_it(spec, given):
    with pytest.raises(ValueError, match=f"action space is not supported : expected .*, {given}"):
        ActorNetwork(BOX, spec)


def test_actor_for_discrete_actions_gives_one_logit_for_each_nearly_uniform():
    policy = ActorNetwork(BOX, {"kind": "discrete", "n": 3, "start": 5}, hidden=(16,))
    parameters = policy(torch.ones(7, 4))
    assert list(parameters) == ["logits"]
    assert parameters["logits"].shape == (7, 3)
    torch.testing.assert_close(parameters["logits"].softmax(-1), torch.full((7, 3), 1 / 3), rtol=0.1, atol=0.0)


def test_actor_for_continuous_actions_gives_loc_and_a_scale_that_ignores_the_observation():
    policy = ActorNetwork(BOX, {**BOX, "shape": [2]})
    with torch.no_grad():
        policy.log_std.copy_(torch.tensor([0.0, math.log(3.0)]))
    parameters = policy(torch.randn(5, 4))
    assert parameters["loc"].shape == (5, 2)
    torch.testing.assert_close(parameters["scale"], torch.tensor([[1.0, 3.0]]).expand(5, 2))
    parameters["scale"].sum().backward()
    torch.testing.assert_close(policy.log_std.grad, torch.tensor([5.0, 15.0]))  # d scale / d log_std = scale, 5 rows


def test_critic_gives_one_value_for_each_row_of_any_leading_shape():
    critic = CriticNetwork(BOX)
    rows = torch.randn(2, 3, 4)
    assert critic(rows).shape == (2, 3)
    torch.testing.assert_close(critic(rows)[1, 2], critic(rows[1, 2]))


def test_networks_cast_observations_to_their_own_precision():
    image = torch.ones(5, 2, 3, dtype=torch.uint8)
    assert CriticNetwork(IMAGE)(image).dtype == torch.float32
    assert CriticNetwork(BOX).double()(torch.ones(5, 4)).dtype == torch.float64
    assert ActorNetwork(BOX, TWO)(torch.ones(5, 4, dtype=torch.float64))["logits"].dtype == torch.float32


def test_networks_take_discrete_observations():
    spec = {"kind": "discrete", "n": 16, "start": 0}
    observation = torch.tensor([3, 15])
    assert ActorNetwork(spec, TWO)(observation)["logits"].shape == (2, 2)
    assert CriticNetwork(spec)(observation).shape == (2,)


def test_action_functions_choose_the_distribution_by_its_parameters():
    # uniform over two: log 1/2; standard normal at its mean: -0.5 log 2 pi
    logits = {"logits": torch.zeros(1, 2)}
    normal = {"loc": torch.zeros(1, 1), "scale": torch.ones(1, 1)}
    assert action_log_prob(logits, torch.tensor([1])).item() == pytest.approx(math.log(0.5))
    assert action_log_prob(normal, torch.zeros(1, 1)).item() == pytest.approx(-0.5 * math.log(2 * math.pi))
    assert action_entropy(logits).item() == pytest.approx(math.log(2))
    assert action_entropy(normal).item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e))


@pytest.mark.parametrize(
    ("spec", "nvec"),
    [
        ({"kind": "multi_discrete", "nvec": [2, 3], "start": [0, 7]}, [2, 3]),
        ({"kind": "multi_binary", "shape": [2]}, [2, 2]),
    ],
)
def test_actor_for_several_choices_gives_their_distribution(spec, nvec):
    answer = ActorNetwork(BOX, spec)(torch.zeros(5, 4))
    assert answer.nvec == nvec
    assert answer.logits.shape == (5, sum(nvec))
    torch.testing.assert_close(answer.entropy(), torch.full((5,), sum(map(math.log, nvec))), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("spec", [{"kind": "discrete", "n": 5, "start": 0}, {"kind": "multi_discrete", "nvec": [2, 3]}])
def test_actor_takes_masked_actions_out(spec):
    mask = torch.tensor([[True, False, True, True, False]])
    answer = ActorNetwork(BOX, spec)(torch.zeros(1, 4), action_mask=mask)
    logits = answer["logits"] if spec["kind"] == "discrete" else answer.logits
    assert ((logits > -1.0) == mask).all()
    assert logits.isfinite().all()


def test_actor_for_continuous_actions_refuses_a_mask():
    with pytest.raises(ValueError, match=r"continuous actions cannot be masked : .* got one of shape \(1, 2\)"):
        ActorNetwork(BOX, {**BOX, "shape": [2]})(torch.zeros(1, 4), torch.ones(1, 2, dtype=torch.bool))


def test_critic_shares_the_normalizer_of_the_policy_and_none_has_one_unless_asked():
    policy = ActorNetwork(BOX, TWO, normalize=True)
    critic = CriticNetwork(BOX, normalizer=policy.normalizer)
    rows = 100.0 + torch.randn(64, 4)
    before = critic(rows)
    policy.normalizer.update(rows)
    assert not torch.allclose(critic(rows), before)
    assert ActorNetwork(BOX, TWO).normalizer is None
    assert ActorNetwork({"kind": "discrete", "n": 2}, TWO, normalize=True).normalizer is None


def test_networks_normalise_before_they_encode():
    policy = ActorNetwork(BOX, TWO, normalize=True)
    rows = 100.0 + torch.randn(64, 4)
    policy.normalizer.update(rows)
    mean, scale = policy.normalizer.mean.float(), policy.normalizer.scale().float()
    torch.testing.assert_close(policy(rows)["logits"], policy.layers((rows - mean) / scale), rtol=1e-4, atol=1e-6)


def test_networks_look_at_images():
    image = {"kind": "box", "shape": [1, 36, 36], "dtype": "uint8"}
    observation = torch.randint(256, (3, 1, 36, 36), dtype=torch.uint8)
    assert ActorNetwork(image, TWO, hidden=())(observation)["logits"].shape == (3, 2)
    assert CriticNetwork(image, hidden=())(observation).shape == (3,)
