"""From every kind of observation to features."""

import pytest
import torch

from trainers.encoders import FlatObservation, ImageEncoder, MappingEncoder, encoder_for, is_image

BOX = {"kind": "box", "shape": [2], "dtype": "float32"}
BYTES = {"kind": "box", "shape": [2, 3], "dtype": "uint8"}


def image_of(*shape, dtype="uint8"):
    return {"kind": "box", "shape": list(shape), "dtype": dtype}


def test_flat_observation_flattens_only_the_dimensions_of_the_space_and_divides_bytes_by_255():
    bytes_ = torch.arange(30, dtype=torch.uint8).view(5, 2, 3)
    encoder = FlatObservation(BYTES)
    assert encoder.size == 6
    torch.testing.assert_close(encoder(bytes_), torch.arange(30.0).view(5, 6) / 255)


def test_flat_observation_of_a_scalar_box_has_one_feature():
    encoder = FlatObservation({"kind": "box", "shape": [], "dtype": "float32"})
    assert encoder.size == 1
    assert encoder(torch.tensor([3.0, 4.0])).tolist() == [[3.0], [4.0]]


def test_flat_observation_of_a_discrete_space_counts_from_its_start():
    encoder = FlatObservation({"kind": "discrete", "n": 3, "start": -1})
    assert encoder(torch.tensor([[-1, 1]])).tolist() == [[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]


def test_flat_observation_of_several_choices_puts_them_side_by_side():
    encoder = FlatObservation({"kind": "multi_discrete", "nvec": [2, 3], "start": [0, 5]})
    assert encoder.size == 5
    assert encoder(torch.tensor([[1, 5], [0, 7]])).tolist() == [[0.0, 1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0]]


def test_flat_observation_of_a_table_of_choices_goes_row_by_row():
    encoder = FlatObservation({"kind": "multi_discrete", "nvec": [[2], [2]], "start": [[0], [0]]})
    assert encoder(torch.tensor([[[1], [0]]])).tolist() == [[0.0, 1.0, 1.0, 0.0]]


def test_flat_observation_of_binaries_keeps_them():
    assert FlatObservation({"kind": "multi_binary", "shape": [3]})(torch.tensor([[1, 0, 1]])).tolist() == [[1, 0, 1]]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (image_of(4, 84, 84), True),
        (image_of(84, 84, 3), True),
        (image_of(1, 36, 40), True),
        (image_of(4, 84, 84, dtype="float32"), False),
        (image_of(84, 84), False),
        (image_of(7, 7, 3), False),
        (image_of(3, 84, 20), False),
        ({"kind": "discrete", "n": 2}, False),
    ],
)
def test_is_image(spec, expected):
    assert is_image(spec) is expected


def test_image_encoder_sees_the_same_whichever_side_the_channels_are_on():
    torch.manual_seed(0)
    first, last = ImageEncoder(image_of(3, 40, 50)), ImageEncoder(image_of(40, 50, 3))
    last.load_state_dict(first.state_dict())
    images = torch.randint(256, (2, 3, 40, 50), dtype=torch.uint8)
    torch.testing.assert_close(last(images.movedim(1, -1)), first(images))


def test_image_encoder_of_any_leading_shape_and_precision():
    encoder = ImageEncoder(image_of(1, 36, 36)).double()
    images = torch.randint(256, (2, 3, 1, 36, 36), dtype=torch.uint8)
    features = encoder(images)
    assert features.shape == (2, 3, 512)
    assert features.dtype == torch.float64
    torch.testing.assert_close(features[1, 2], encoder(images[1, 2]))


def test_image_encoder_divides_by_255():
    encoder = ImageEncoder(image_of(1, 36, 36))
    white = torch.full((1, 1, 36, 36), 255, dtype=torch.uint8)
    torch.testing.assert_close(encoder(white), encoder.layers(torch.ones(1, 1, 36, 36)))


def test_encoder_for_a_dict_joins_the_features_of_its_parts():
    spec = {
        "kind": "dict",
        "spaces": {"a.b": BOX, "gear": {"kind": "discrete", "n": 2}, "pair": {"kind": "tuple", "spaces": [BOX, BOX]}},
    }
    encoder = encoder_for(spec)
    assert isinstance(encoder, MappingEncoder)
    assert encoder.size == 8
    observation = {
        "a.b": torch.tensor([[1.0, 2.0]]),
        "gear": torch.tensor([1]),
        "pair": {"0": torch.tensor([[3.0, 4.0]]), "1": torch.tensor([[5.0, 6.0]])},
    }
    assert encoder(observation).tolist() == [[1.0, 2.0, 0.0, 1.0, 3.0, 4.0, 5.0, 6.0]]


def test_encoder_for_a_dict_with_an_image_runs_convolutions_on_it():
    encoder = encoder_for({"kind": "dict", "spaces": {"eye": image_of(1, 36, 36), "body": BOX}})
    features = encoder({"eye": torch.zeros(3, 1, 36, 36, dtype=torch.uint8), "body": torch.zeros(3, 2)})
    assert features.shape == (3, 514)


def test_encoder_for_an_unknown_kind_names_it():
    with pytest.raises(ValueError, match=r"observation space is not supported : expected kind 'box', .*, got 'graph'"):
        encoder_for({"kind": "dict", "spaces": {"a": {"kind": "graph"}}})
