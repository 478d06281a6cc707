"""Values of infos: declared dtypes, what is missing, action masks."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lit_collect import Collector, FrameContractError, RolloutConfig
from lit_collect.envs.direct import DirectEnv
from lit_collect.envs.infos import InfoReader
from lit_collect.envs.spaces import TreeSpec
from lit_collect.envs.texts import decode_texts
from lit_collect.frames import check_batch

PLACE = TreeSpec.of(spaces.Box(0, 1, (2,)), "observation")
CHOICE = TreeSpec.of(spaces.Discrete(3), "action")


def reader(*declared, observation=PLACE, action=CHOICE):
    return InfoReader(declared, observation_spec=observation, action_spec=action)


class Telling(gymnasium.Env):
    """Episodes of 3 steps. Observation, info and mask all say (episode, step); `bonus` is told from step 2 on."""

    observation_space = spaces.Box(-1, 99, (2,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self):
        self._episode, self._t = -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._episode, self._t = self._episode + 1, 0
        return self._seen(), self._info()

    def step(self, action):
        self._t += 1
        return self._seen(), 1.0, self._t == 3, False, self._info()

    def _seen(self):
        return np.array([self._episode, self._t], np.float32)

    def _info(self):
        mask = np.zeros(4, np.int8)
        mask[self._t] = 1
        info = {"at": {"episode": self._episode, "step": self._t}, "action_mask": mask, "name": f"e{self._episode}"}
        return info if self._t < 2 else {**info, "bonus": 2 if self._t == 2 else 2.75}


@pytest.mark.parametrize("backend", ["direct", "process"])
def test_values_stand_beside_the_observation_they_came_with(backend):
    rollout = RolloutConfig(info_keys=("at.episode:int64", "at.step:uint8", "bonus", "name:str[4]"))
    with Collector(Telling, num_envs=2, frames_per_batch=16, rollout=rollout, seed=0, backend=backend) as collector:
        batch = torch.cat([collector.collect() for _ in range(3)], 1)
    check_batch(batch)
    for place in (batch, batch["next"]):
        episode, step = place["observation"].unbind(-1)
        assert torch.equal(place["at", "episode"], episode.long())
        assert torch.equal(place["at", "step"], step.to(torch.uint8))
        assert torch.equal(place["action_mask"].int().argmax(-1), step.long())
        assert decode_texts(place["name"])[0] == [f"e{int(number)}" for number in episode[0]]
        assert torch.equal(place["reported", "bonus"], step >= 2)
        assert torch.equal(place["bonus"][step == 2], torch.full_like(place["bonus"][step == 2], 2.0))
        assert torch.equal(place["bonus"][step == 3], torch.full_like(place["bonus"][step == 3], 2.75))
        assert place["bonus"][step < 2].isnan().all()
    assert batch["at", "episode"].dtype == torch.int64
    assert batch["bonus"].dtype == torch.float32
    assert not (batch["observation"][..., 1] == 3).any(), "a terminal observation is nobody's root"


def test_direct_env_after_a_masked_reset_keeps_the_values_of_the_others():
    env = DirectEnv([Telling(), Telling()], info_keys=("at.step:int64",))
    env.reset()
    env.step((np.zeros(2, np.int64),))
    seen = env.reset(mask=np.array([False, True]))
    names = [leaf.key for leaf in env.leaves]
    assert seen[names.index(("at", "step"))].tolist() == [1, 0]
    assert seen[names.index(("action_mask",))].argmax(1).tolist() == [1, 0]


def test_reader_without_declarations_has_no_leaves():
    assert reader().leaves == ()


@pytest.mark.parametrize(
    ("declared", "value", "message"),
    [
        ("count:int64", 2.7, "info 'count' does not fit : expected int64, got 2.7; declare another dtype"),
        ("won:bool", 5, "info 'won' does not fit : expected bool, got 5"),
        ("speed", [1.0, 2.0], "declare rollout.info_keys=('speed:float32[2]',)"),
        ("speed:float32[2]", 1.0, "info 'speed' has a wrong shape : expected (2,), got ()"),
        ("speed", "fast", "info 'speed' is no number : expected float32, got str"),
        ("speed:float32[2]", [[1], [1, 2]], "info 'speed' is no number : expected float32, got list"),
        ("count:uint8", 300, "info 'count' does not fit : expected uint8, got 300"),
        ("level:str[2]", "abc", "info 'level' is wrong : expected a text of up to 2 characters, got 3 characters"),
    ],
)
def test_value_that_is_not_as_declared_is_an_error(declared, value, message):
    name = declared.partition(":")[0]
    with pytest.raises(FrameContractError, match=re.escape(message)):
        reader(declared).read({name: value})
    column = np.empty(1, object)
    column[0] = value
    with pytest.raises(FrameContractError, match=re.escape(message)):
        reader(declared).read_all({name: column}, 1)


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [("won:bool", 1.0, True), ("won:bool", np.bool_(False), False), ("speed", 2, 2.0), ("n:int8", np.float64(3), 3)],
)
def test_value_that_means_the_declared_one_is_taken(declared, value, expected):
    name = declared.partition(":")[0]
    assert reader(declared).read({name: value})[0].item() == expected


UNREADABLE = ["", "a:", "a:object", "a:float32[x]", ":bool", "a:complex64", 3, "a:str[]", "a:str[0]", "a:float32[2,0]"]


@pytest.mark.parametrize("declared", UNREADABLE)
def test_declaration_that_cannot_be_read_is_an_error(declared):
    with pytest.raises(ValueError, match="info_keys cannot be read"):
        reader(declared)


@pytest.mark.parametrize("name", ["action", "next", "reward", "observation", "reported", "collector.x"])
def test_name_that_is_taken_is_an_error(name):
    with pytest.raises(ValueError, match="is taken by the batch or the observation"):
        reader(name)


@pytest.mark.parametrize("name", ["a..b", ".a", "a.", "_a", "a._b:bool"])
def test_name_that_no_batch_can_show_is_an_error(name):
    with pytest.raises(
        ValueError, match="cannot be stored : expected parts that are not empty and begin with no under"
    ):
        reader(name)


@pytest.mark.parametrize("names", [("a", "a:int64"), ("a.b", "a"), ("a:bool", "a.b.c"), ("x", "a.b", "a.b:bool")])
def test_names_that_are_in_each_others_way_are_an_error(names):
    with pytest.raises(ValueError, match=r"'a(\.b)?' and 'a.*' cannot both be stored|'a.b' and 'a' cannot both"):
        reader(*names)


def test_names_that_merely_begin_alike_are_taken():
    assert len(reader("a.b", "a.bc", "ab").leaves) == 6


ROWLESS = {
    "number": 3.0,
    "0-d": np.float32(3),
    "too many": np.zeros(3),
    "too few": [1.0],
    "text": "ab",
    "mapping": {0: 1.0, 1: 2.0},
    "nothing": None,
}


@pytest.mark.parametrize("value", ROWLESS.values(), ids=ROWLESS.keys())
def test_value_of_a_vector_env_that_has_no_row_for_each_copy_is_an_error(value):
    expected = r"info 'speed' of a vector env is wrong : expected one value for each of 2 env copies, got"
    with pytest.raises(FrameContractError, match=f"^env copy 4: {expected}"):
        reader("speed").read_all({"speed": value}, 2, first=4)
    with pytest.raises(FrameContractError, match=r"^vector env, reset: info 'action_mask' of a vector env is wrong"):
        reader().discover_all({"action_mask": value}, 2)


def test_wrong_value_of_a_vector_env_names_its_copy():
    with pytest.raises(FrameContractError, match=r"^env copy 5: info 'speed' is no number"):
        reader("speed").read_all({"speed": np.array([1.0, "fast"], object)}, 2, first=4)


def test_mask_of_a_vector_env_is_that_of_the_first_copy_that_reports_one():
    found = reader()
    masks = np.array([None, np.array([1, 0, 1], np.int8)], object)
    found.discover_all({"action_mask": masks, "_action_mask": np.array([False, True])}, 2)
    assert [leaf.shape for leaf in found.leaves] == [(3,)]


def test_read_all_takes_the_rows_that_reported():
    values = reader("speed", "pos:int64[2]").read_all(
        {
            "speed": np.array([1.5, 0.0, 3.5]),
            "_speed": np.array([True, False, True]),
            "pos": np.array([[1, 2], [3, 4], [0, 0]]),
            "_pos": np.array([True, True, False]),
        },
        3,
    )
    np.testing.assert_array_equal(values[0], np.array([1.5, np.nan, 3.5], np.float32))
    assert [value.tolist() for value in values[1:]] == [
        [True, False, True],
        [[1, 2], [3, 4], [0, 0]],
        [True, True, False],
    ]


def test_read_all_follows_nested_infos_and_their_masks():
    infos = {"at": {"x": np.array([1, 2]), "_x": np.array([True, True])}, "_at": np.array([False, True])}
    value, reported = reader("at.x:int64").read_all(infos, 2)
    assert value.tolist() == [0, 2]
    assert reported.tolist() == [False, True]


def test_info_that_is_no_mapping_is_an_error():
    with pytest.raises(FrameContractError, match="info is wrong : expected a mapping, got list"):
        reader("speed").read([])


def test_mask_is_found_once_and_filled_with_permissions():
    found = reader()
    found.discover({"action_mask": np.array([1, 0, 1], np.int8)})
    assert [leaf.key for leaf in found.leaves] == [("action_mask",)]
    assert found.read({})[0].tolist() == [True, True, True]
    assert found.read({"action_mask": [0, 0, 1]})[0].tolist() == [False, False, True]
    late = reader()
    late.discover({})
    late.discover({"action_mask": np.ones(3)})
    assert late.leaves == ()


@pytest.mark.parametrize("mask", [np.ones(4), np.ones((3, 1)), 1, True])
def test_mask_that_does_not_fit_the_actions_is_an_error(mask):
    with pytest.raises(FrameContractError, match=r"action_mask.* does not fit .* expected shape \(3,\)"):
        reader().discover({"action_mask": mask})


NO_MASKS = [[0.0, -np.inf, 0.0], [1, 2, 0], [np.nan] * 3, "abc", {"a": 1}, [[1], [1, 0]], (["x"], [1])]


@pytest.mark.parametrize("mask", NO_MASKS, ids=repr)
def test_what_is_no_mask_is_an_error(mask):
    found = reader()
    found.discover({"action_mask": np.ones(3)})
    for look in (found.read, reader().discover):
        with pytest.raises(
            FrameContractError, match=r"info\['action_mask'\] is no mask : expected 1 for what is allowed"
        ):
            look({"action_mask": mask})


def test_mask_that_changes_its_shape_is_an_error():
    found = reader()
    found.discover({"action_mask": np.ones(3)})
    with pytest.raises(FrameContractError, match="changed its shape"):
        found.read({"action_mask": np.ones(2)})


def test_mask_of_several_choices_is_one_array():
    found = reader(action=TreeSpec.of(spaces.MultiDiscrete([2, 3]), "action"))
    found.discover({"action_mask": (np.array([1, 0]), np.array([0, 1, 1]))})
    assert found.leaves[0].shape == (5,)
    assert found.read({"action_mask": (np.array([0, 1]), np.array([1, 0, 0]))})[0].tolist() == [0, 1, 1, 0, 0]


def test_mask_in_the_observation_is_not_looked_for_in_the_info():
    observation = TreeSpec.of(spaces.Dict({"action_mask": spaces.MultiBinary(3)}), "observation")
    found = reader(observation=observation)
    found.discover({"action_mask": np.ones(3)})
    assert found.leaves == ()
