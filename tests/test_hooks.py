"""Hooks that cannot work are refused where they are given, and one that forgets its batch is told so."""

from functools import partial

import pytest

from lit_collect import Collector, Hooks
from lit_collect.testing import CountingEnv

MAKERS = [partial(CountingEnv, i) for i in range(2)]


@pytest.mark.parametrize("hooks", [print, 3, [("postproc", print)]], ids=repr)
def test_hooks_of_another_kind_are_refused(hooks):
    with pytest.raises(TypeError, match="hooks must be Hooks or a mapping from their names, got "):
        Collector(MAKERS, frames_per_batch=4, hooks=hooks)


@pytest.mark.parametrize("name", ["pre_collect", "postproc", "post_collect"])
def test_hook_that_cannot_be_called_is_refused_and_named(name):
    with pytest.raises(TypeError, match=rf"hooks.{name} must be something that can be called or None, got 5"):
        Hooks(**{name: 5})


def test_postproc_that_returns_nothing_is_told_so():
    hooks = {"postproc": lambda batch: batch.__setitem__("twice", 2 * batch["next", "reward"])}
    with (
        Collector(MAKERS, frames_per_batch=4, hooks=hooks, replay_buffer=[]) as collector,
        pytest.raises(TypeError, match=r"hooks\.postproc returned None : expected the batch .* return it"),
    ):
        collector.collect()
