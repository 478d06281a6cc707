"""The one policy of the benchmarks in its three spellings, with equal weights: net, plain module, TensorDict actor."""

from __future__ import annotations

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import Tensor, nn

OBSERVATION_DIM = 4
NUM_ACTIONS = 2
WIDTH = 64


def make_net(seed: int = 0) -> nn.Sequential:
    """The 2x64 tanh net that every contestant acts with."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(OBSERVATION_DIM, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_ACTIONS)
    )


class SamplingPolicy(nn.Module):
    """The net, a sampled action and its log-probability, as a user would write them without TensorDict.

    `argmax(log_softmax(logits) - log(q))` with `q ~ Exp(1)` is a sample of the categorical distribution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        log_probs = torch.log_softmax(self.net(observation), dim=-1)
        noise = torch.empty_like(log_probs).exponential_().log_()
        action = (log_probs - noise).argmax(-1)
        return {"action": action, "log_prob": log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)}


def make_actor() -> TensorDictSequential:
    """The net as the usual TensorDict actor: logits, a sampled action and its log-probability."""
    return TensorDictSequential(
        TensorDictModule(make_net(), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ),
    )
