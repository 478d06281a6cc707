"""Seeds never meet, and acting's random numbers stay apart from everybody else's."""

import random

import numpy as np
import pytest
import torch

from lit_collect.seeding import RandomStream, acting_seed, env_seeds, resolve_entropy

STAGES = ("train", "validate", "test", "predict")


def draw() -> tuple[list[float], list[float], list[float]]:
    """A few numbers of each global generator."""
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.fixture(autouse=True)
def own_generators(monkeypatch: pytest.MonkeyPatch):
    """Give the global generators back, and start without Lightning's seed."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


def test_resolve_entropy_of_an_integer_is_that_integer():
    assert resolve_entropy(0) == 0
    assert resolve_entropy(2**200) == 2**200
    entropy = resolve_entropy(np.int64(5))
    assert entropy == 5
    assert type(entropy) is int


def test_resolve_entropy_without_a_seed_takes_the_one_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "123")
    assert resolve_entropy(None) == 123
    assert resolve_entropy(7) == 7


def test_resolve_entropy_without_any_seed_is_fresh_each_time():
    seed_all(0)
    first = resolve_entropy(None)
    seed_all(0)
    assert resolve_entropy(None) != first


@pytest.mark.parametrize("seed", [1.0, "1", True])
def test_resolve_entropy_of_no_integer_raises(seed):
    with pytest.raises(TypeError, match=f"seed must be an integer or None, got {seed!r}"):
        resolve_entropy(seed)


def test_resolve_entropy_of_a_negative_integer_raises():
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        resolve_entropy(-1)


def test_seeds_of_adjacent_runs_stages_copies_and_restarts_are_all_different():
    indices = range(16)
    seeds = [
        seed
        for entropy in (0, 1, 2, 3, 2**32, 2**32 + 1, 2**64)
        for stage in STAGES
        for restart in range(3)
        for seed in (
            *env_seeds(entropy, stage, indices, restart),
            *(acting_seed(entropy, stage, index, restart) for index in indices),
        )
    ]
    assert len(set(seeds)) == len(seeds)


def test_env_seeds_of_a_rank_are_its_part_of_the_seeds_of_one_process():
    whole = env_seeds(5, "train", range(8))
    assert env_seeds(5, "train", range(4)) + env_seeds(5, "train", range(4, 8)) == whole


def test_env_seeds_are_plain_integers_of_31_bits():
    seeds = env_seeds(5, "train", range(200))
    assert {type(seed) for seed in seeds} == {int}
    assert min(seeds) >= 0
    assert 2**30 < max(seeds) < 2**31


def test_seeds_are_the_same_in_every_version():
    # Whoever changes these numbers breaks the reproduction of all earlier runs.
    assert env_seeds(0, "train", range(2)) == [1530983934, 1246905493]
    assert env_seeds(7, "validate", range(3, 5), restart=2) == [187518014, 1565307574]
    assert acting_seed(0, "test", 1) == 570148773


def test_stream_gives_the_numbers_of_its_seed_whatever_was_drawn_outside():
    with RandomStream(3).active():
        expected = draw()
    seed_all(99)
    draw()
    np.random.randn()  # holds a second normal back, which must not reach the stream
    with RandomStream(3).active():
        assert draw() == expected
    np.random.randn()
    with RandomStream(3).active():
        inside = np.random.randn(2).tolist()
    assert inside == np.random.RandomState(np.random.MT19937(3)).randn(2).tolist()


def test_stream_goes_on_where_it_left_off():
    stream = RandomStream(3)
    with stream.active():
        first, second = draw(), draw()
    stream = RandomStream(3)
    with stream.active():
        assert draw() == first
    draw()
    with stream.active():
        assert draw() == second


def test_stream_leaves_the_callers_numbers_as_they_were():
    seed_all(5)
    expected = draw()
    seed_all(5)
    with RandomStream(3).active():
        draw()
        seed_all(0)  # as an env or a policy may do
    assert draw() == expected


def test_stream_leaves_the_callers_numbers_as_they_were_after_an_exception():
    seed_all(5)
    expected = draw()
    seed_all(5)
    stream = RandomStream(3)
    with pytest.raises(ZeroDivisionError), stream.active():
        assert draw() == 1 / 0
    assert draw() == expected
    with stream.active():
        goes_on = draw()
    with RandomStream(3).active():
        assert [draw(), draw()][1] == goes_on


def test_streams_of_different_seeds_differ_in_every_generator():
    with RandomStream(3).active():
        one = draw()
    with RandomStream(4).active():
        other = draw()
    assert all(a != b for a, b in zip(one, other, strict=True))
