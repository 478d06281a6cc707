"""Algorithms for lit_collect: LightningModules whose data come from a collector.

:class:`PPO`, :class:`A2C` and :class:`IMPALA` train on what was collected last, :class:`DQN`, :class:`SAC`,
:class:`DiscreteSAC` and :class:`TD3` on samples of a replay buffer. :mod:`trainers.functional`,
:mod:`trainers.off_policy_functional` and :mod:`trainers.continuous_functional` hold the mathematics,
:mod:`trainers.networks`, :mod:`trainers.q_networks` and :mod:`trainers.continuous` the networks,
:mod:`trainers.normalization` running statistics.
"""

from trainers.a2c import A2C
from trainers.distributions import MultiCategorical, action_entropy, action_log_prob
from trainers.dqn import DQN
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
from trainers.sac import SAC, DiscreteSAC
from trainers.td3 import TD3

__all__ = [
    "A2C",
    "DQN",
    "IMPALA",
    "PPO",
    "SAC",
    "TD3",
    "ActorNetwork",
    "CriticNetwork",
    "DiscreteSAC",
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
