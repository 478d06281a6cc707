"""What infos hold, seen from outside."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lit_collect.envs.factories import resolve_env
from lit_collect.tools.infos import ENDS, RESETS, STEPS, InfoSurvey, InfoValue


def value_of(*values):
    value = InfoValue(name="it")
    for one in values:
        value.add(one, STEPS)
    return value


@pytest.mark.parametrize(
    ("values", "declaration"),
    [
        ([True, np.bool_(False)], "it:bool"),
        ([1, True], "it:int64"),
        ([2, 2.7], "it"),
        ([np.float32(1)], "it"),
        ([np.zeros(3)], "it:float32[3]"),
        ([np.zeros((2, 3), np.int8)], "it:int64[2,3]"),
        (["left", "right"], "it:str[16]"),
        (["a" * 30], "it:str[32]"),
        ([np.zeros(3), np.zeros(2)], ""),
        ([[1], [1, 2]], ""),
        ([[[1], [1, 2]]], ""),
        ([1, "left"], ""),
        ([object()], ""),
    ],
)
def test_declaration_holds_all_that_was_seen(values, declaration):
    assert value_of(*values).declaration == declaration


def test_name_that_cannot_be_declared_has_no_declaration():
    value = InfoValue(name="a:b", kinds={"f"}, shapes={()})
    assert value.declaration == ""


class Reporting(gymnasium.Env):
    """Episodes of three steps; the infos name the occasion."""

    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return 0, {"always": 1, "at": {"reset": 1}}

    def step(self, action):
        self.steps += 1
        done = self.steps == 3
        return self.steps, 0.0, done, False, {"always": 1, "at": {"end" if done else "step": 1}}


OCCASIONS = {"always": "always", "at.reset": RESETS, "at.step": STEPS, "at.end": ENDS}


def told(survey):
    return {value.name: survey.occasions(value) for value in survey.values}


def test_survey_says_when_values_of_single_envs_are_reported():
    survey = InfoSurvey()
    env = survey.watch(resolve_env(Reporting)).make(0)
    for _ in range(2):
        env.reset()
        for _ in range(3):
            env.step(0)
    assert told(survey) == OCCASIONS


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_survey_says_when_values_of_vector_envs_are_reported(mode):
    survey = InfoSurvey()
    source = resolve_env(lambda: SyncVectorEnv([Reporting, Reporting], autoreset_mode=mode))
    env = survey.watch(source).make(0)
    env.reset()
    for _ in range(9):
        _, _, terminated, _, _ = env.step(np.zeros(2, np.int64))
        if mode is AutoresetMode.DISABLED and terminated.any():
            env.reset(options={"reset_mask": terminated})
    env.close()
    assert told(survey) == OCCASIONS


def test_survey_says_that_some_steps_report_a_value():
    survey = InfoSurvey()
    for info in ({"coin": 1}, {}, {"coin": 2}):
        survey.note(info, STEPS)
    assert told(survey) == {"coin": "some steps"}
