import pytest

from lit_collect import BackendUnavailableError, DirectBackend
from lit_collect.backends import Backend, resolve_backend
from lit_collect.config import RolloutConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.rollout import RolloutRunner
from lit_collect.seeding import Placement
from lit_collect.testing import CountingEnv
from lit_collect.worker import WorkerSpec


@pytest.mark.parametrize("name", ["direct", "auto"])
def test_resolve_backend_of_a_name_gives_its_kind(name):
    assert isinstance(resolve_backend(name), DirectBackend)


def test_resolve_backend_of_an_object_gives_that_object():
    backend = DirectBackend()
    assert resolve_backend(backend) is backend


def test_resolve_backend_of_an_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match="backend must be one of auto, direct, got 'threads'"):
        resolve_backend("threads")


@pytest.mark.parametrize("name", ["process", "ray", "rpc", "distributed", "submitit"])
def test_resolve_backend_of_one_that_is_to_come_says_what_there_is(name):
    with pytest.raises(BackendUnavailableError, match=f"backend '{name}' is not in this version; use direct"):
        resolve_backend(name)


@pytest.mark.parametrize("backend", [None, 3, DirectBackend])
def test_resolve_backend_of_anything_else_raises(backend):
    with pytest.raises(TypeError, match="backend must be a name or a Backend object, got"):
        resolve_backend(backend)


def test_backend_of_ones_own_starts_what_collects():
    class Counted(Backend):
        started = 0

        def start(self, spec: WorkerSpec) -> RolloutRunner:
            self.started += 1
            return DirectBackend().start(spec)

    backend = Counted()
    runner = resolve_backend(backend).start(
        WorkerSpec(
            source=resolve_env(CountingEnv),
            policy=None,
            rollout=RolloutConfig(),
            num_envs=2,
            place=Placement(entropy=3, rank=1, world_size=2),
        )
    )
    batch = runner.collect(4, version=9)
    runner.close()
    assert backend.started == 1
    assert batch["collector", "traj_ids"][:, 0].tolist() == [2, 3]  # rank 1 has the copies 2 and 3 of 4
    assert batch["collector", "policy_version"].unique().tolist() == [9]


def test_direct_backend_is_written_as_it_is_made():
    assert repr(DirectBackend()) == "DirectBackend()"
