"""What may act, and how it becomes one call a step.

A policy is a TensorDict module, an `nn.Module` or callable whose answer to an observation is an action, a mapping
with ``"action"`` and extras, a mapping with distribution parameters (``logits``, or ``loc`` and ``scale``), or a
`torch.distributions.Distribution`; or it is built by a `PolicyFactory`; or it is None: uniform random actions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModuleBase, set_interaction_type
from torch import Tensor, nn

from lit_collect.config import Exploration
from lit_collect.decoding import Decoder, check_names, check_nan, decoder_for
from lit_collect.envs.spaces import TreeSpec, nest, sample_leaf
from lit_collect.frames import RESERVED, Key, as_key
from lit_collect.lowering import LoweredActor, lower
from lit_collect.mlp import small_nets_in_numpy
from lit_collect.weights import module_of

_MODE_DEPENDENT = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
)


class PolicyFactory(ABC):
    """Builds a policy where it acts; for policies that cannot or should not travel.

    Example:
        >>> class Small(PolicyFactory):
        ...     def __call__(self) -> nn.Module:
        ...         return nn.Linear(4, 1)
    """

    @abstractmethod
    def __call__(self) -> Any:
        """Build the policy: anything that may act but None or another factory."""


class RandomPolicy:
    """Acts uniformly at random in the env's action space, as `policy=None` does."""


class Actor(ABC):
    """A policy bound to the spaces of N env copies: one call, one step."""

    keys: tuple[Key, ...] = ()
    """Keys of what a call returns, in its order; known after the first call."""
    module: nn.Module | None = None
    """The module whose weights act, if there is one."""
    home: tuple[torch.device, torch.dtype] | None = None
    """Device and precision of the module, if they are not those of observations: the CPU and float32."""
    _acted = False

    @abstractmethod
    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Act once.

        Args:
            leaves: [N, ...] for each leaf of the observation.

        Returns:
            [N, ...] for each of `keys`.
        """

    def complete(self, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Further outputs that are computed once for all rows of a batch.

        Args:
            columns: [N, T, ...] for each of `keys`.

        Returns:
            [N, T, ...] by key.
        """
        return {}

    @contextmanager
    def acting(self) -> Iterator[None]:
        """No gradients, and eval mode if that makes a difference; both are undone also after an exception.

        The first time is without inference mode, which is a few percent faster: what a module makes once and keeps
        (lazy parameters, caches) must be of use to training too. The module's device and precision are looked up
        anew each time, because a trainer may have changed them.
        """
        self.home = _foreign_home(self.module)
        no_gradients = torch.inference_mode() if self._acted else torch.no_grad()
        with no_gradients, _evaluating(self.module), small_nets_in_numpy(self.module):
            yield
        self._acted = True

    def reseed(self, seed: int) -> None:  # noqa: B027  # most have none
        """Begin anew with random numbers of its own, if it has any.

        Args:
            seed: 32 bits.
        """

    def moved(self, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The observation on the module's device and in its precision (integers stay what they are)."""
        assert self.home is not None
        device, dtype = self.home
        return tuple([leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype) for leaf in leaves])


class RandomActor(Actor):
    """Uniform random actions from a generator of its own."""

    def __init__(self, action_spec: TreeSpec, seed: int) -> None:
        self.keys = tuple(leaf.key for leaf in action_spec.leaves)
        self._leaves = action_spec.leaves
        self._rng = np.random.default_rng(seed)

    def reseed(self, seed: int) -> None:
        """Begin anew with the actions of a seed."""
        self._rng = np.random.default_rng(seed)

    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Draw one action for each env copy."""
        count = leaves[0].shape[0]
        return [torch.from_numpy(sample_leaf(leaf, count, self._rng)) for leaf in self._leaves]


class FunctionActor(Actor):
    """A module or callable that maps an observation (a tensor, or a mapping of them) to an answer.

    Args:
        policy: what acts.
        observation_spec: of one env copy.
        action_spec: of one env copy.
        exploration: how actions are taken from distributions.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        *,
        observation_spec: TreeSpec,
        action_spec: TreeSpec,
        exploration: Exploration,
    ) -> None:
        self.module = module_of(policy)
        self._policy = policy
        self._paths = None if observation_spec.is_plain else [leaf.path for leaf in observation_spec.leaves]
        self._observed = frozenset(leaf.key[0] for leaf in observation_spec.leaves)
        self._action = action_spec.leaves[0]
        self._exploration: Exploration = exploration
        self._decoder: Decoder | None = None
        self._decode: Callable[[Any], Sequence[Tensor]] | None = None
        self._call = policy

    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Ask the policy and take its answer apart."""
        if self.home is not None:
            leaves = self.moved(leaves)
        answer = self._call(leaves[0] if self._paths is None else nest(self._paths, leaves))
        if self._decode is None:
            self._decoder = decoder_for(answer, self._exploration, action=self._action, observed=self._observed)
            self.keys, self._decode = self._decoder.keys, self._decoder.decode
        return self._decode(answer)

    def complete(self, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """The log-probabilities of the actions, if the answer held distribution parameters."""
        return self._decoder.complete(columns) if self._decoder is not None else {}

    @contextmanager
    def acting(self) -> Iterator[None]:
        """See `Actor.acting`; looks up anew whether the module's call is more than its `forward`."""
        with super().acting():
            self._call = _plain_call(self._policy)
            yield


class TensorDictActor(Actor):
    """A TensorDict module that cannot be lowered, called as it is."""

    def __init__(self, policy: TensorDictModuleBase, *, observation_spec: TreeSpec, exploration: Exploration) -> None:
        self.module = policy
        self._policy = policy
        self._observation_keys = [leaf.key for leaf in observation_spec.leaves]
        self.keys = _output_keys([as_key(key) for key in policy.out_keys if "_" not in as_key(key)], observation_spec)
        self._interaction = InteractionType.from_str(exploration)

    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Call the module with a TensorDict [N] of the observation."""
        if self.home is not None:
            leaves = self.moved(leaves)
        data = TensorDict(dict(zip(self._observation_keys, leaves, strict=True)), batch_size=leaves[0].shape[:1])
        answer = self._policy(data)
        return [answer.get(key) for key in self.keys]

    @contextmanager
    def acting(self) -> Iterator[None]:
        """See `Actor.acting`; also sets tensordict's interaction type."""
        with super().acting(), set_interaction_type(self._interaction):
            yield


class LoweredTensorDictActor(Actor):
    """A standard TensorDict actor as plain calls (see `lit_collect.lowering`)."""

    def __init__(
        self, policy: TensorDictModuleBase, plan: LoweredActor, *, observation_spec: TreeSpec, exploration: Exploration
    ) -> None:
        self.module = policy
        self._plan = plan
        self._interaction = InteractionType.from_str(exploration)
        self._observation_keys = tuple(leaf.key for leaf in observation_spec.leaves)
        self._choose = plan.family.chooser(exploration) if plan.family is not None else None
        given = [key for stage in plan.stages for key in stage.gives]
        self.keys = _output_keys([*given, plan.action] if plan.family is not None else given, observation_spec)

    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Run the calls and draw the action."""
        if self.home is not None:
            leaves = self.moved(leaves)
        values = self._plan.run(dict(zip(self._observation_keys, leaves, strict=True)))
        if self._choose is not None:
            values[self._plan.action] = self._choose(*[values[key] for key in self._plan.parameters])
        return [values[key] for key in self.keys]

    def complete(self, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """The log-probabilities, if the actor returns them."""
        plan = self._plan
        if plan.family is None or plan.log_prob is None:
            for key in plan.parameters:
                check_nan(columns[key])
            return {}
        values = plan.family.log_prob(columns[plan.action], *[columns[key] for key in plan.parameters])
        return {plan.log_prob: check_nan(values)}

    @contextmanager
    def acting(self) -> Iterator[None]:
        """See `Actor.acting`; also sets tensordict's interaction type, which inner modules may ask for."""
        with super().acting(), set_interaction_type(self._interaction):
            yield


def make_actor(
    policy: Any, observation_spec: TreeSpec, action_spec: TreeSpec, *, exploration: Exploration, seed: int
) -> Actor:
    """Bind a policy to the spaces it acts in.

    Args:
        policy: see the module docstring.
        observation_spec: of one env copy.
        action_spec: of one env copy.
        exploration: how actions are taken from distributions.
        seed: of random actions (32 bits).

    Raises:
        TypeError: if it cannot act.
    """
    if isinstance(policy, PolicyFactory):
        policy = policy()
        if policy is None or isinstance(policy, PolicyFactory):
            raise TypeError(f"policy cannot act : expected a PolicyFactory to build one, got {policy!r} from it")
    if policy is None or isinstance(policy, RandomPolicy):
        return RandomActor(action_spec, seed)
    if isinstance(policy, TensorDictModuleBase):
        plan = lower(policy)
        if plan is not None and _fits(plan, observation_spec):
            return LoweredTensorDictActor(policy, plan, observation_spec=observation_spec, exploration=exploration)
        return TensorDictActor(policy, observation_spec=observation_spec, exploration=exploration)
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(
            f"policy cannot act : expected an nn.Module, a callable, a PolicyFactory or None, got {policy!r}"
        )
    return FunctionActor(policy, observation_spec=observation_spec, action_spec=action_spec, exploration=exploration)


def _output_keys(keys: Sequence[Key], observation_spec: TreeSpec) -> tuple[Key, ...]:
    """What a TensorDict module gives besides a changed observation, which it changes again when it is trained."""
    check_names([key[0] for key in keys], RESERVED)
    observed = {leaf.key for leaf in observation_spec.leaves}
    return tuple(dict.fromkeys(key for key in keys if key not in observed))


def _fits(plan: LoweredActor, observation_spec: TreeSpec) -> bool:
    """Whether every call finds its inputs; if not, tensordict's own error is the better one."""
    observed = {leaf.key for leaf in observation_spec.leaves}
    known = set(observed)
    for stage in plan.stages:
        if not known.issuperset(stage.takes):
            return False
        known.update(stage.gives)
    return (known - observed).issuperset(plan.parameters)


def _foreign_home(module: nn.Module | None) -> tuple[torch.device, torch.dtype] | None:
    """Device and precision of the module's parameters, unless observations have them already."""
    parameters = () if module is None else module.parameters()
    first = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
    if first is None or (first.device.type == "cpu" and first.dtype is torch.float32):
        return None
    return first.device, first.dtype


def _plain_call(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a module whose call does nothing else (no hooks, not compiled), else the policy itself."""
    if not isinstance(policy, nn.Module) or type(policy).__call__ is not nn.Module.__call__:
        return policy
    state = policy.__dict__
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(state[name] for name in hooks) or state.get("_compiled_call_impl") is not None:
        return policy
    return policy if nn.modules.module._has_any_global_hook() else policy.forward


@contextmanager
def _evaluating(module: nn.Module | None) -> Iterator[None]:
    """Eval mode for a module with dropout, batch norm and the like, then every part's own mode again."""
    training = _training_parts(module)
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def _training_parts(module: nn.Module | None) -> list[nn.Module]:
    if module is None or not any(isinstance(part, _MODE_DEPENDENT) for part in module.modules()):
        return []
    return [part for part in module.modules() if part.training]
