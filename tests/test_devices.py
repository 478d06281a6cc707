"""Devices: a policy acts on a copy where it is asked to, batches are handed out where they are wanted."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from lit_collect import Collector, DeviceConfig, DirectBackend, PolicyFactory
from lit_collect.devices import acting_copy, moved, usable
from lit_collect.testing import CountingEnv


class Told(nn.Module):
    """Answers with a value that says which weights acted."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(float(value)))

    def forward(self, observation):
        return {"action": torch.zeros(len(observation), dtype=torch.int64), "told": self.value.expand(len(observation))}


class Make(PolicyFactory):
    def __call__(self):
        return Told(7)


@pytest.mark.parametrize("backend", ["direct", "process"])
def test_storage_says_where_batches_are_handed_out(backend):
    devices = DeviceConfig(storage="meta")
    with Collector(CountingEnv, num_envs=2, frames_per_batch=8, seed=0, devices=devices, backend=backend) as collector:
        batch = collector.collect()
    assert batch.device == torch.device("meta")
    assert {leaf.device.type for leaf in batch.values(True, True)} == {"meta"}
    assert batch.shape == (2, 4)


def test_policy_on_another_device_is_a_copy_that_follows_publications():
    class Elsewhere(Told):  # parameters on meta stand for a module that is on another device
        pass

    policy = Elsewhere(1).to("meta")
    copied = acting_copy(policy, torch.device("meta"))
    assert copied is policy, "it is there already"
    here = Told(1)
    there = acting_copy(here, torch.device("meta"))
    assert there is not here
    assert there.value.device.type == "meta"
    assert here.value.device.type == "cpu"
    method = acting_copy(here.forward, torch.device("meta"))
    assert method.__self__ is not here
    assert method.__self__.value.device.type == "meta"


def test_policy_that_is_where_it_shall_act_acts_itself():
    policy = Told(1)
    devices = DeviceConfig(policy="cpu")
    with Collector(CountingEnv, policy, num_envs=2, frames_per_batch=8, seed=0, devices=devices) as collector:
        policy.value.data.fill_(5)
        assert collector.collect()["told"].unique().tolist() == [5]


def test_copy_acts_with_what_was_published(monkeypatch):
    # There is one device here that can compute, so the copy is made on the same one.
    policy = Told(1)
    monkeypatch.setattr("lit_collect.supervisor.acting_copy", lambda module, device, always: _copy(module))
    with Collector(
        CountingEnv, policy, num_envs=2, frames_per_batch=8, seed=0, devices=DeviceConfig(policy="cpu")
    ) as collector:
        assert collector.collect()["told"].unique().tolist() == [1]
        policy.value.data.fill_(5)
        assert collector.collect()["told"].unique().tolist() == [1], "not published yet"
        collector.update_policy_weights_()
        batch = collector.collect()
    assert batch["told"].unique().tolist() == [5]
    assert batch["collector", "policy_version"].unique().tolist() == [1]


def _copy(module):
    made = Told()
    made.load_state_dict(module.state_dict())
    return made


@pytest.mark.parametrize("backend", ["direct", "process"])
def test_factory_is_asked_and_its_policy_moved(backend):
    devices = DeviceConfig(policy="cpu")
    with Collector(
        CountingEnv, Make(), num_envs=2, frames_per_batch=8, seed=0, devices=devices, backend=backend
    ) as collector:
        assert collector.collect()["told"].unique().tolist() == [7]


@pytest.mark.parametrize("backend", ["direct", "process"])
def test_function_cannot_be_moved(backend):
    with pytest.raises(Exception, match=r"devices\.policy needs a policy that can be moved"):
        Collector(
            CountingEnv,
            _zeros,
            num_envs=2,
            frames_per_batch=8,
            devices=DeviceConfig(policy="cpu"),
            backend=backend,
        )


def _zeros(observation):
    return torch.zeros(len(observation), dtype=torch.int64)


def test_device_that_is_not_there_is_an_error_that_names_those_that_are():
    with pytest.raises(ValueError, match=r"devices.policy is not on this machine : expected \['cpu'.*got 'cuda:99'"):
        usable("cuda:99", "devices.policy")
    with pytest.raises(ValueError, match=r"devices\.storage is not on this machine"):
        Collector(CountingEnv, frames_per_batch=8, devices=DeviceConfig(storage="cuda:99"))


def test_moved_gives_the_batch_itself_where_it_is_there():
    with Collector(CountingEnv, frames_per_batch=8, seed=0) as collector:
        batch = collector.collect()
    assert moved(batch, None) is batch
    there = moved(batch, torch.device("meta"))
    assert moved(there, torch.device("meta")) is there


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_policy_and_batches_on_cuda():
    devices = DeviceConfig(policy="cuda", storage="cuda")
    policy = Told(3)
    for backend in ("direct", "process"):
        with Collector(
            CountingEnv, policy, num_envs=2, frames_per_batch=8, seed=0, devices=devices, backend=backend
        ) as collector:
            batch = collector.collect()
            policy.value.data.fill_(4)
            collector.update_policy_weights_()
            again = collector.collect()
        assert batch.device.type == "cuda"
        assert again["told"].unique().tolist() == [4]
        policy.value.data.fill_(3)


def test_env_of_tensors_takes_its_actions_where_it_is_told():
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv

    class OnDevice(VectorEnv):
        num_envs = 2
        single_observation_space = spaces.Box(-1, 1, (3,))
        single_action_space = spaces.Discrete(2)
        metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        where: ClassVar = []

        def reset(self, *, seed=None, options=None):
            return torch.zeros(2, 3), {}

        def step(self, actions):
            self.where.append(actions.device.type)
            flags = torch.zeros(2, dtype=torch.bool)
            return torch.zeros(2, 3), torch.zeros(2), flags, flags, {}

    for device, expected in ((None, "cpu"), ("meta", "meta")):
        OnDevice.where.clear()
        with Collector(OnDevice, frames_per_batch=4, devices=DeviceConfig(env=device), seed=0) as collector:
            collector.collect()
        assert OnDevice.where == [expected] * 2


def test_copy_acts_with_what_is_published_and_not_with_what_is_learned_meanwhile():
    policy = Told()
    with Collector(CountingEnv, policy, frames_per_batch=8, backend=DirectBackend(copy_policy=True)) as collector:
        for version in range(3):
            policy.value.data.fill_(version)
            collector.update_policy_weights_()
            policy.value.data.fill_(100)  # as an optimizer does while frames are collected
            batch = collector.collect()
            assert (batch["told"] == version).all()
            assert (batch["collector", "policy_version"] == version + 1).all()


def test_copy_of_a_function_is_the_function():
    def act(observation):
        return torch.zeros(len(observation), dtype=torch.int64)

    assert acting_copy(act, None, always=True) is act
    assert repr(DirectBackend(copy_policy=True)) == "DirectBackend(copy_policy=True)"
