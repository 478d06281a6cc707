"""Texts: left out with one warning, or kept as code points where they are named."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from lit_collect import Collector, FrameContractError, RolloutConfig, decode_texts
from lit_collect.envs.texts import encode_text
from lit_collect.frames import check_batch


class Missions(gymnasium.Env):
    """Tells its step in words; episodes of 3 steps."""

    observation_space = spaces.Dict({"image": spaces.Box(0, 9, (2,), np.float32), "mission": spaces.Text(8)})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._seen(), {}

    def step(self, action):
        self._t += 1
        return self._seen(), 1.0, self._t == 3, False, {}

    def _seen(self):
        return {"image": np.full(2, self._t, np.float32), "mission": f"step {self._t}"}


def sources():
    yield Missions
    for mode in AutoresetMode:
        yield lambda mode=mode: SyncVectorEnv([Missions] * 2, autoreset_mode=mode)
        yield lambda mode=mode: in_processes(shared_memory=False, autoreset_mode=mode)


def in_processes(**options):
    return AsyncVectorEnv([Missions] * 2, context="fork", **options)


@pytest.mark.parametrize("env", list(sources()))
def test_named_text_is_kept_beside_its_observation(env):
    rollout = RolloutConfig(info_keys=("mission:str",))
    with Collector(env, num_envs=2, frames_per_batch=16, rollout=rollout, seed=0) as collector:
        batch = collector.collect()
    check_batch(batch)
    for place in (batch, batch["next"]):
        assert place["mission"].dtype == torch.int32
        expected = [[f"step {int(step)}" for step in row] for row in place["image"][..., 0].tolist()]
        assert decode_texts(place["mission"]) == expected
    assert (batch["next", "image"] == 3).any(), "terminal observations are there"


def test_text_that_gymnasium_reads_only_once_is_refused():
    rollout = RolloutConfig(info_keys=("mission:str",))
    with pytest.raises(
        ValueError, match=r"the text 'mission' of AsyncVectorEnv\(.* never changes .*shared_memory=False"
    ):
        Collector(in_processes, num_envs=2, frames_per_batch=16, rollout=rollout)


def test_text_that_is_not_named_is_left_out_with_one_warning():
    with pytest.warns(UserWarning, match=r"the texts \['mission'\] are not stored; .*'mission:str'") as caught:
        collector = Collector(Missions, num_envs=3, frames_per_batch=9)
    assert len(caught) == 1
    with collector:
        assert "mission" not in collector.collect()


def test_wrong_text_of_a_vector_env_names_its_copy():
    class Wordy(Missions):
        def _seen(self):
            return {**super()._seen(), "mission": "far too long a text" if self._t else "short"}

    rollout = RolloutConfig(info_keys=("mission:str",))
    with (
        Collector(
            lambda: SyncVectorEnv([Missions, Wordy]), num_envs=2, frames_per_batch=16, rollout=rollout
        ) as collector,
        pytest.raises(
            FrameContractError, match=r"^env copy 1: mission is wrong : expected a text of up to 8 characters"
        ),
    ):
        collector.collect()


def test_name_of_no_text_is_an_error():
    rollout = RolloutConfig(info_keys=("misson:str",))
    with pytest.raises(ValueError, match=r"no text of the observation : expected \['mission'\], got \['misson'\]"):
        Collector(Missions, frames_per_batch=9, rollout=rollout)


@pytest.mark.parametrize("text", ["", "abc", "äöü", "日本", "\U0001f600"])
def test_encoded_text_is_decoded(text):
    codes = encode_text(text, 5, "mission")
    assert codes.shape == (5,)
    assert decode_texts(torch.from_numpy(codes)) == text


@pytest.mark.parametrize("text", ["abcdef", None, 3])
def test_what_is_no_such_text_is_an_error(text):
    with pytest.raises(FrameContractError, match="mission is wrong : expected a text of up to 5 characters"):
        encode_text(text, 5, "mission")


@pytest.mark.parametrize("codes", [torch.zeros(3), torch.tensor(104), ["a"]], ids=["floats", "one number", "list"])
def test_what_holds_no_code_points_is_not_decoded(codes):
    with pytest.raises(TypeError, match=r"expected a tensor \[\.\.\., L\] of integers, got "):
        decode_texts(codes)
