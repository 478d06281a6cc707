"""Algorithms for lit_collect: LightningModules whose data come from a collector.

:class:`PPO` and :class:`IMPALA` train; :mod:`trainers.functional` holds the mathematics, :mod:`trainers.networks` the
networks.
"""

from trainers.functional import (
    approx_kl,
    categorical_entropy,
    categorical_log_prob,
    clip_fraction,
    diagonal_normal_entropy,
    diagonal_normal_log_prob,
    discounted_returns,
    explained_variance,
    generalized_advantage,
    normalize,
    ppo_policy_loss,
    value_loss,
    vtrace,
)
from trainers.impala import IMPALA
from trainers.networks import (
    ActorNetwork,
    CriticNetwork,
    FlatObservation,
    Tanh,
    action_entropy,
    action_log_prob,
    mlp,
)
from trainers.ppo import PPO

__all__ = [
    "IMPALA",
    "PPO",
    "ActorNetwork",
    "CriticNetwork",
    "FlatObservation",
    "Tanh",
    "action_entropy",
    "action_log_prob",
    "approx_kl",
    "categorical_entropy",
    "categorical_log_prob",
    "clip_fraction",
    "diagonal_normal_entropy",
    "diagonal_normal_log_prob",
    "discounted_returns",
    "explained_variance",
    "generalized_advantage",
    "mlp",
    "normalize",
    "ppo_policy_loss",
    "value_loss",
    "vtrace",
]
