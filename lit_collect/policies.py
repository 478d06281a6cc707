"""What may act, and how it becomes one call a step.

A policy is a TensorDict module, an `nn.Module` or callable whose answer to an observation is an action, a mapping
with ``"action"`` and extras, a mapping with distribution parameters (``logits``, or ``loc`` and ``scale``), or a
`torch.distributions.Distribution`; or it is built by a `PolicyFactory`; or it is None: uniform random actions.
Choices are counted from 0, whatever the ``start`` of a Discrete or MultiDiscrete space, which the env is given.

A policy whose call has a parameter `action_mask` gets the mask of the allowed actions, [N, A] bool, by keyword. One
that has `initial_state` is recurrent (see `lit_collect.recurrent`).
"""

from abc import ABC, abstractmethod
from typing import Any

from tensordict.nn import TensorDictModuleBase

from lit_collect.actors import Actor, FunctionActor, RandomActor, TensorDictActor
from lit_collect.calls import check_call
from lit_collect.config import Exploration
from lit_collect.envs.spaces import TreeSpec
from lit_collect.recurrent import RecurrentActor, RecurrentTensorDictActor, initial_state_of
from lit_collect.weights import uncompiled

__all__ = ["Actor", "PolicyFactory", "RandomActor", "RandomPolicy", "make_actor"]


class PolicyFactory(ABC):
    """Builds a policy where it acts; for policies that cannot or should not travel.

    Example:
        >>> from torch import nn
        >>> class Small(PolicyFactory):
        ...     def __call__(self) -> nn.Module:
        ...         return nn.Linear(4, 1)
    """

    @abstractmethod
    def __call__(self) -> Any:
        """Build the policy: anything that may act but None or another factory."""


class RandomPolicy:
    """Acts uniformly at random in the env's action space, as `policy=None` does: among the actions that are allowed."""


def make_actor(
    policy: Any,
    observation_spec: TreeSpec,
    action_spec: TreeSpec,
    *,
    exploration: Exploration,
    seed: int,
    compile_policy: bool = False,
    first: int = 0,
    may_mask: bool = False,
) -> Actor:
    """Bind a policy to the spaces it acts in.

    Args:
        policy: see the module docstring.
        observation_spec: of one env copy.
        action_spec: of one env copy.
        exploration: how actions are taken from distributions.
        seed: of random actions (32 bits).
        compile_policy: compile its call; the policy itself is left as it is.
        first: index of the first env copy among those of its rank, for messages.
        may_mask: whether a step can be spent on resetting.

    Raises:
        TypeError: if it cannot act.
    """
    if isinstance(policy, PolicyFactory):
        policy = policy()
        if policy is None or isinstance(policy, PolicyFactory):
            raise TypeError(f"policy cannot act : expected a PolicyFactory to build one, got {policy!r} from it")
    if policy is None or isinstance(policy, RandomPolicy):
        return RandomActor(action_spec, seed, first=first, may_mask=may_mask)
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(
            f"policy cannot act : expected an nn.Module, a callable, a PolicyFactory or None, got {policy!r}"
        )
    make_state = initial_state_of(policy)
    if isinstance(uncompiled(policy), TensorDictModuleBase):
        if make_state is None:
            return TensorDictActor(
                policy, observation_spec=observation_spec, exploration=exploration, compiled=compile_policy
            )
        return RecurrentTensorDictActor(
            policy, make_state, observation_spec=observation_spec, exploration=exploration, compiled=compile_policy
        )
    check_call(policy, recurrent=make_state is not None)
    if make_state is None:
        return FunctionActor(
            policy,
            observation_spec=observation_spec,
            action_spec=action_spec,
            exploration=exploration,
            compiled=compile_policy,
        )
    return RecurrentActor(
        policy,
        make_state,
        observation_spec=observation_spec,
        action_spec=action_spec,
        exploration=exploration,
        compiled=compile_policy,
    )
