"""No source gives `verify` a reason to complain."""

import pytest

from lit_collect import RolloutConfig
from lit_collect.envs.factories import resolve_env
from lit_collect.envs.verify import verify
from tests.conformance.sources import Source, close

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),
]


def test_sources_keep_the_contract(source: Source) -> None:
    made = source.make()
    env = resolve_env(made).build(source.num_envs, rollout=RolloutConfig())
    try:
        found = verify(env, steps=60)
    finally:
        env.close()
        close(made)
    # counting envs go on counting their episodes, and envpool takes no second seed
    assert [finding.text for finding in found if "two resets with the same seed" not in finding.text] == []
    assert len(found) <= (not source.random)
