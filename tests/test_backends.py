import pytest

from lit_collect import BackendUnavailableError, Collector, DirectBackend, NoSync, ProcessBackend, WeightSyncScheme
from lit_collect.backends import Backend, resolve_backend
from lit_collect.backends.base import Launcher
from lit_collect.seeding import Placement
from lit_collect.testing import CountingEnv


@pytest.mark.parametrize("name", ["direct", "auto"])
def test_resolve_backend_of_a_name_gives_its_kind(name):
    assert isinstance(resolve_backend(name), DirectBackend)


def test_resolve_backend_of_process_gives_its_kind():
    assert isinstance(resolve_backend("process"), ProcessBackend)


def test_resolve_backend_of_an_object_gives_that_object():
    backend = DirectBackend()
    assert resolve_backend(backend) is backend


def test_resolve_backend_of_an_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match="backend must be one of auto, direct, process, got 'threads'"):
        resolve_backend("threads")


@pytest.mark.parametrize("name", ["ray", "rpc", "distributed", "submitit"])
def test_resolve_backend_of_one_that_is_to_come_says_what_there_is(name):
    with pytest.raises(BackendUnavailableError, match=f"backend '{name}' is not in this version; use direct, process"):
        resolve_backend(name)


@pytest.mark.parametrize("backend", [None, 3, DirectBackend])
def test_resolve_backend_of_anything_else_raises(backend):
    with pytest.raises(TypeError, match="backend must be a name or a Backend object, got"):
        resolve_backend(backend)


def test_backend_of_ones_own_starts_what_collects():
    class Counted(Backend):
        in_process = True
        started = 0

        def launcher(self) -> Launcher:
            self.started += 1
            return DirectBackend().launcher()

        def scheme(self) -> WeightSyncScheme:
            return NoSync()

    backend = Counted()
    place = Placement(entropy=3, rank=1, world_size=2)
    with Collector(CountingEnv, num_envs=2, frames_per_batch=8, backend=backend, seed=place) as collector:
        batch = collector.collect()
    assert backend.started == 1
    assert batch["collector", "traj_ids"][:, 0].tolist() == [2, 3]  # rank 1 has the copies 2 and 3 of 4
    assert batch["collector", "policy_version"].unique().tolist() == [0]


def test_direct_backend_is_written_as_it_is_made():
    assert repr(DirectBackend()) == "DirectBackend()"


@pytest.mark.parametrize("name", ["batch_timeout_s", "shutdown_timeout_s", "preempt_fraction"])
@pytest.mark.parametrize("value", ["5", True])
def test_process_backend_of_a_setting_that_is_no_number_raises(name, value):
    with pytest.raises(TypeError, match=f"backend.{name} must be a number, got {value!r}"):
        ProcessBackend(2, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("batch_timeout_s", 0, "above 0"),
        ("shutdown_timeout_s", -1.0, "above 0"),
        ("preempt_fraction", 1.5, "at most 1"),
    ],
)
def test_process_backend_of_a_number_out_of_range_raises(name, value, rule):
    with pytest.raises(ValueError, match=f"backend.{name} must be .*{rule}, got {value}"):
        ProcessBackend(2, **{name: value})
