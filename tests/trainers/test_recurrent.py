"""PPO with memory, as the example has it: what is trained on is what acted."""

import importlib.util
from pathlib import Path

import pytest
import torch

from lit_collect import Collector

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recurrent_ppo.py"
BOX = {"kind": "box", "shape": [2], "dtype": "float32"}
TWO = {"kind": "discrete", "n": 2, "start": 0}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("recurrent_ppo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sequences_replayed_from_a_batch_give_the_probabilities_that_acted(example):
    torch.manual_seed(0)
    module = example.RecurrentPPO(observation_spec=BOX, action_spec=TWO)
    collector = Collector(example.blind_cartpole, module.policy, num_envs=4, frames_per_batch=160, seed=0)
    with collector:
        batches = [collector.collect() for _ in range(2)]
    later = batches[1]  # begins in the middle of episodes, and more begin within it
    assert later["state"][:, 0].any(-1).any()
    assert later["is_init"][:, 1:].any()
    for batch in batches:
        prepared = module.prepare_rollout(batch)
        answer, value = module.evaluate(prepared)
        log_prob = answer["logits"].log_softmax(-1).gather(-1, prepared["action"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(log_prob, prepared["log_prob"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(value, prepared["value"], rtol=1e-4, atol=1e-5)
    assert module.training_step(prepared).isfinite()
