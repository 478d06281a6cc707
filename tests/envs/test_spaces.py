"""Spaces as leaves, and the actions that envs receive."""

import json
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lit_collect import Collector, GymEnvFactory, RolloutConfig
from lit_collect.envs.spaces import ActionEncoder, TreeSpec, describe_space, nest, sample_leaf
from lit_collect.errors import FrameContractError

CAR = spaces.Dict(
    {
        "eye.left": spaces.Box(0, 255, (2, 2), np.uint8),
        "body": spaces.Dict({"gear": spaces.Discrete(5, start=-1), "pose": spaces.Box(-9, 9, (3,), np.float64)}),
        "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-1, 1, ()))),
    },
    sort_keys=False,
)
PLAIN = [
    (spaces.Box(-1, 1, (3,)), (3,), "float32", "float32"),
    (spaces.Box(-1, 1, (), np.float64), (), "float64", "float32"),
    (spaces.Box(-1, 1, (0,), np.float16), (0,), "float16", "float16"),
    (spaces.Box(0, 255, (2, 2), np.uint8), (2, 2), "uint8", "uint8"),
    (spaces.Box(0, 1, (2,), np.bool_), (2,), "bool", "bool"),
    (spaces.Discrete(4, start=2), (), "int64", "int64"),
    (spaces.MultiDiscrete([[2, 3], [4, 5]]), (2, 2), "int64", "int64"),
    (spaces.MultiBinary((2, 3)), (2, 3), "int8", "int8"),
]


def encode(space, *leaves, clip=True):
    return ActionEncoder(TreeSpec.of(space, "action"), clip=clip)([np.asarray(leaf) for leaf in leaves])


def observation_leaf(space):
    return TreeSpec.of(space, "observation").leaves[0]


@pytest.mark.parametrize(("space", "shape", "dtype", "stored"), PLAIN, ids=lambda value: str(value)[:24])
def test_a_plain_space_is_one_leaf_under_its_root(space, shape, dtype, stored):
    spec = TreeSpec.of(space, "observation")
    (leaf,) = spec.leaves
    assert (leaf.key, leaf.path, leaf.shape, str(leaf.dtype), str(leaf.stored)) == (
        ("observation",),
        (),
        shape,
        dtype,
        stored,
    )
    assert spec.is_plain
    (storage,) = spec.empty((5,))
    assert (storage.shape, str(storage.dtype)) == ((5, *shape), stored)
    assert leaf.admit(space.sample()).shape == shape


def test_float64_is_kept_on_request():
    spec = TreeSpec.of(spaces.Box(-1, 1, (1,), np.float64), "observation", keep_float64=True)
    assert spec.leaves[0].stored == np.float64


def test_a_nested_observation_gives_its_own_keys_in_the_order_of_the_space():
    spec = TreeSpec.of(CAR, "observation")
    assert [leaf.key for leaf in spec.leaves] == [
        ("eye.left",),
        ("body", "gear"),
        ("body", "pose"),
        ("pair", "0"),
        ("pair", "1"),
    ]
    assert not spec.is_plain


def test_a_nested_action_stays_under_its_root():
    spec = TreeSpec.of(spaces.Tuple((spaces.Discrete(2), spaces.Dict({"x": spaces.Discrete(3)}))), "action")
    assert [leaf.key for leaf in spec.leaves] == [("action", "0"), ("action", "1", "x")]


def test_unflatten_is_the_way_back_from_flatten():
    spec, value = TreeSpec.of(CAR, "observation"), CAR.sample()
    back = spec.unflatten(spec.flatten(value))
    assert back == value
    assert back in CAR


def test_nest_turns_tuple_positions_into_strings():
    paths = [leaf.path for leaf in TreeSpec.of(CAR, "observation").leaves]
    assert nest(paths, [1, 2, 3, 4, 5]) == {"eye.left": 1, "body": {"gear": 2, "pose": 3}, "pair": {"0": 4, "1": 5}}


def test_text_is_dropped_with_one_warning():
    space = spaces.Dict({"mission": spaces.Text(9), "image": spaces.Box(0, 1, (2,))})
    with pytest.warns(UserWarning, match=r"the texts \[.mission.\] are not stored") as caught:
        spec = TreeSpec.of(space, "observation")
    assert len(caught) == 1
    assert [leaf.key for leaf in spec.leaves] == [("image",)]


def test_text_alone_and_text_as_an_action_are_refused():
    with pytest.warns(UserWarning, match="not stored"), pytest.raises(TypeError, match="holds nothing"):
        TreeSpec.of(spaces.Text(3), "observation")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TypeError, match="Text spaces cannot be"):
            TreeSpec.of(spaces.Tuple((spaces.Text(3), spaces.Discrete(2))), "action")


@pytest.mark.parametrize(
    "space",
    [
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Box(0, 1, (2,)), None),
        spaces.OneOf([spaces.Discrete(2)]),
    ],
    ids=lambda space: type(space).__name__,
)
def test_ragged_spaces_are_refused_with_a_cure(space):
    with pytest.raises(TypeError, match=rf"{type(space).__name__} spaces cannot be stored as arrays.*TransformObserv"):
        TreeSpec.of(spaces.Dict({"x": space}), "observation")


class Listing(gymnasium.Env):
    """Observes a list that grows by one with each step, and a float64."""

    observation_space = spaces.Dict(
        {"seen": spaces.Sequence(spaces.Discrete(9)), "exact": spaces.Box(-9, 9, (), np.float64)}
    )
    action_space = spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), 0.0, self.steps == 2, False, {}

    def _observe(self):
        return {"seen": tuple(range(1, self.steps + 1)), "exact": 0.1 + self.steps}


def pad_the_list(env):
    space = spaces.Dict({**env.observation_space.spaces, "seen": spaces.Box(0, 9, (3,), np.int64)})

    def padded(observation):
        return {**observation, "seen": np.array([*observation["seen"], 0, 0, 0][:3])}

    return gymnasium.wrappers.TransformObservation(env, padded, space)


@pytest.fixture
def listing():
    gymnasium.register("Listing-v0", Listing)
    yield "Listing-v0"
    del gymnasium.registry["Listing-v0"]


def test_ragged_observation_is_refused_and_its_cure_works(listing):
    with pytest.raises(TypeError, match="Sequence spaces cannot be stored"):
        Collector(listing, frames_per_batch=4)
    with Collector(GymEnvFactory(listing, wrappers=[pad_the_list]), frames_per_batch=3) as collector:
        batch = collector.collect()
    assert batch["seen"].tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert batch["next", "seen"].tolist() == [[1, 0, 0], [1, 2, 0], [1, 0, 0]]


@pytest.mark.parametrize("keep", [False, True])
def test_float64_is_rounded_in_batches_unless_it_is_kept(keep, listing):
    factory, rollout = GymEnvFactory(listing, wrappers=[pad_the_list]), RolloutConfig(keep_float64=keep)
    with Collector(factory, frames_per_batch=2, rollout=rollout) as collector:
        exact = collector.collect()["next", "exact"]
    assert exact.numpy().dtype == (np.float64 if keep else np.float32)
    assert exact.tolist() == [1.1, 2.1] if keep else exact.tolist() == np.float32([1.1, 2.1]).tolist()


@pytest.mark.parametrize("name", ["action", "next", "collector", "done", "is_init", "reward"])
def test_keys_that_a_batch_needs_are_refused(name):
    with pytest.raises(ValueError, match=f"'{name}'"):
        TreeSpec.of(spaces.Dict({name: spaces.Discrete(2)}), "observation")


def test_a_missing_leaf_is_named():
    with pytest.raises(FrameContractError, match=r"lacks body\.pose"):
        TreeSpec.of(CAR, "observation").flatten({"eye.left": 0, "body": {"gear": 1}, "pair": (0, 0)})


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(4), 3),
        (spaces.Discrete(4), np.int32(3)),
        (spaces.Box(0, 9, (2,)), [1, 2.5]),
        (spaces.Box(0, 9, ()), 2.5),
        (spaces.Box(0, 9, ()), np.float64(2.5)),
        (spaces.Box(0, 9, (2,)), np.zeros(2, np.float16)),
        (spaces.Box(0, 9, (2,), np.uint8), [1, 2]),
        (spaces.Box(0, 9, (), np.uint8), 3),
    ],
)
def test_numbers_lists_and_narrower_arrays_are_admitted(space, value):
    assert observation_leaf(space).admit(value).tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"observation is None : expected float32 with shape \(2,\)"),
        ([[1], [2, 3]], "observation is no array"),
        (np.zeros(3, np.float32), r"wrong shape : .* got \(3,\)"),
        (np.zeros(2), "wrong dtype : .* got float64"),
        (["a", "b"], "wrong dtype"),
    ],
    ids=["none", "ragged", "shape", "float64", "text"],
)
def test_what_a_space_did_not_promise_is_refused(value, message):
    with pytest.raises(FrameContractError, match=message):
        observation_leaf(spaces.Box(0, 9, (2,))).admit(value)


def test_a_fraction_is_no_index():
    with pytest.raises(FrameContractError, match="wrong dtype"):
        observation_leaf(spaces.Discrete(4)).admit(1.5)


def test_indices_are_offset_by_start():
    assert encode(spaces.Discrete(3, start=5), [0, 2])[0].tolist() == [5, 7]
    assert encode(spaces.MultiDiscrete([2, 3], start=[10, -1]), [[0, 2], [1, 0]])[0].tolist() == [[10, 1], [11, -1]]
    assert encode(spaces.MultiBinary(2), [[0, 1]])[0].dtype == np.int8


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (spaces.Discrete(3), [0, 3], "action of env copy 1 is out of range : expected 0 to 2, got 3"),
        (
            spaces.Discrete(3, start=5),
            [-1, 0],
            "expected 0 to 2, got -1; choices are counted from 0, and the env is given 5 more",
        ),
        (
            spaces.MultiDiscrete([3, 4], start=[-1, 10]),
            [[0, 0], [0, 10]],
            r"env copy 1 is out of range : expected 0 to \[2, 3\], got \[0, 10\]; .* the env is given \[-1, 10\] more",
        ),
        (spaces.Discrete(3), [0.5, 1.0], "action of env copy 0"),
        (spaces.Discrete(3), [np.nan, 1.0], "action of env copy 0"),
        (spaces.Discrete(3), [[0], [1]], "action"),
        (spaces.MultiDiscrete([2, 3]), [[0, 0], [0, 3]], r"env copy 1 .* expected 0 to \[1, 2\], got \[0, 3\]"),
        (spaces.MultiDiscrete([2, 3]), [[0.7, 0], [0, 1]], "action of env copy 0"),
        (spaces.MultiDiscrete([2, 3]), [[0], [1]], "action"),
        (spaces.MultiBinary(2), [[0, 1], [2, 0]], "env copy 1 is out of range"),
        (spaces.Box(-1, 1, (2,)), np.array([[0, 0], [np.nan, 0]]), "action of env copy 1 is not finite"),
        (spaces.Box(-1, 1, (2,)), np.array([[np.inf, 0], [0, 0]]), "action of env copy 0 is not finite"),
        (spaces.Box(-1, 1, (2,)), np.zeros((2, 1), np.float32), "action"),
        (spaces.Box(-1, 1, ()), np.zeros((2, 1), np.float32), "action"),
    ],
)
def test_actions_that_no_env_may_see_are_refused(space, action, message):
    with pytest.raises(FrameContractError, match=message):
        encode(space, action)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(3), [0, 3]),
        (spaces.MultiDiscrete([2, 3]), [[0, 0], [0, 3]]),
        (spaces.MultiBinary(2), [[0, 0], [0, 2]]),
        (spaces.Box(-1, 1, (2,)), np.array([[0, 0], [0, np.nan]])),
    ],
    ids=["discrete", "multi-discrete", "multi-binary", "box"],
)
def test_messages_count_copies_from_the_first_one(space, action):
    encoder = ActionEncoder(TreeSpec.of(space, "action"), first=4)
    with pytest.raises(FrameContractError, match="action of env copy 5 is"):
        encoder([np.asarray(action)])


def test_a_wrong_leaf_of_a_nested_action_is_named():
    space = spaces.Dict({"go": spaces.Discrete(2), "push": spaces.Box(-1, 1, (1,))})
    with pytest.raises(FrameContractError, match=r"action\.push of env copy 0 is not finite"):
        encode(space, [0], [[np.nan]])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_box_actions_are_clipped_and_cast_even_when_they_are_huge(dtype):
    raw = np.full((1, 2), np.finfo(dtype).max, dtype)
    (sent,) = encode(spaces.Box(np.array([-1, -3], np.float32), np.array([1, 3], np.float32)), raw)
    assert sent.tolist() == [[1, 3]]
    assert sent.dtype == np.float32
    assert raw[0, 0] == np.finfo(dtype).max


def test_box_actions_are_sent_as_they_are_without_clip():
    raw = np.array([[5, -5]], np.float32)
    (sent,) = encode(spaces.Box(-1, 1, (2,)), raw, clip=False)
    assert sent.tolist() == [[5, -5]]
    assert not np.shares_memory(sent, raw)


@pytest.mark.parametrize(("space", "shape", "dtype", "stored"), PLAIN, ids=lambda value: str(value)[:24])
def test_sampled_actions_are_what_the_encoder_takes(space, shape, dtype, stored):
    spec = TreeSpec.of(space, "action")
    values = sample_leaf(spec.leaves[0], 50, np.random.default_rng(3))
    assert (values.shape, str(values.dtype)) == ((50, *shape), stored)
    (sent,) = ActionEncoder(spec)([values])
    assert all(np.asarray(action, space.dtype) in space for action in sent)


def test_samples_cover_the_space():
    rng = np.random.default_rng(0)
    assert set(sample_leaf(observation_leaf(spaces.Discrete(3, start=7)), 100, rng).tolist()) == {0, 1, 2}
    low, high = np.array([0, -np.inf, -np.inf, 2], np.float32), np.array([1, np.inf, 3, np.inf], np.float32)
    values = sample_leaf(observation_leaf(spaces.Box(low, high)), 1000, rng)
    assert ((values >= low) & (values <= high)).all()
    assert values[:, 0].std() == pytest.approx(12**-0.5, abs=0.03)
    assert values[:, 1].std() == pytest.approx(1, abs=0.1)
    assert values[:, 2].mean() == pytest.approx(2, abs=0.15)
    assert values[:, 3].mean() == pytest.approx(3, abs=0.15)


def test_a_description_is_plain_data():
    described = describe_space(CAR)
    assert described["spaces"]["body"]["spaces"]["gear"] == {"kind": "discrete", "n": 5, "start": -1}
    assert described["spaces"]["pair"]["spaces"][0] == {"kind": "multi_binary", "shape": [2]}
    assert json.loads(json.dumps(described)) == described
    assert describe_space(spaces.MultiDiscrete([2, 3], start=[1, 0]))["start"] == [1, 0]
