"""Algorithms for lit_collect: LightningModules whose data come from a collector.

:class:`PPO`, :class:`A2C` and :class:`IMPALA` train; :mod:`trainers.functional` holds the mathematics,
:mod:`trainers.networks` the networks, :mod:`trainers.normalization` running statistics.
"""

from trainers.a2c import A2C
from trainers.distributions import MultiCategorical, action_entropy, action_log_prob
from trainers.encoders import FlatObservation, ImageEncoder, encoder_for
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
    multi_categorical_entropy,
    multi_categorical_log_prob,
    normalize,
    ppo_policy_loss,
    value_loss,
    vtrace,
)
from trainers.impala import IMPALA
from trainers.networks import ActorNetwork, CriticNetwork, Tanh, mlp
from trainers.normalization import RewardScaler, RunningNormalizer
from trainers.ppo import PPO

__all__ = [
    "A2C",
    "IMPALA",
    "PPO",
    "ActorNetwork",
    "CriticNetwork",
    "FlatObservation",
    "ImageEncoder",
    "MultiCategorical",
    "RewardScaler",
    "RunningNormalizer",
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
    "encoder_for",
    "explained_variance",
    "generalized_advantage",
    "mlp",
    "multi_categorical_entropy",
    "multi_categorical_log_prob",
    "normalize",
    "ppo_policy_loss",
    "value_loss",
    "vtrace",
]
