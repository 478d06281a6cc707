"""How a policy is called: what its call takes, whether it is compiled, and by the shortest way."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_collect.envs.spaces import LeafSpec, TreeSpec, nest
from lit_collect.errors import FrameContractError, LitCollectError, text_of
from lit_collect.frames import ACTION_MASK
from lit_collect.weights import uncompiled

Taken = Literal["no", "optional", "required"]


class Arguments:
    """What a policy is called with: the observation, and the action mask if its call has a parameter of that name.

    Args:
        policy: what is called.
        observation_spec: of one env copy.
    """

    def __init__(self, policy: Callable[..., Any], observation_spec: TreeSpec) -> None:
        self._paths = None if observation_spec.is_plain else [leaf.path for leaf in observation_spec.leaves]
        self._width = len(observation_spec.leaves)
        self._taken = taken_argument(policy, ACTION_MASK[0])
        self.see(observation_spec.leaves)

    def see(self, leaves: Sequence[LeafSpec]) -> None:
        """Look among everything that comes with a step for what the policy takes."""
        keys = [leaf.key for leaf in leaves]
        self._mask = keys.index(ACTION_MASK) if self._taken != "no" and ACTION_MASK in keys else None
        self.needed = [*range(self._width), *([] if self._mask is None else [self._mask])]
        """Positions of the leaves that a call takes; the mask's is the last."""
        self.plain = self._paths is None and self._mask is None and self._taken != "required"
        """Whether the first leaf is all there is to a call."""

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """The observation, and the arguments by keyword.

        Args:
            leaves: [N, ...] for each of `needed`.

        Raises:
            FrameContractError: if the policy needs a mask and the env gives none.
        """
        observation = leaves[0] if self._paths is None else nest(self._paths, leaves[: self._width])
        if self._mask is not None:
            return observation, {ACTION_MASK[0]: leaves[-1].bool()}
        if self._taken == "required":
            raise missing_mask()
        return observation, {}


class CompiledCall:
    """A policy whose call is compiled; the policy itself stays as it is and shares its weights.

    Args:
        policy: a module or callable.
    """

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._call = torch.compile(policy)

    def __call__(self, *args: Any, **masks: Tensor) -> Any:
        """Call it; the first call compiles.

        Raises:
            LitCollectError: if it cannot be compiled.
        """
        try:
            return self._call(*args, **masks)
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            first_words = text_of(error).strip().split("\n\n")[0]
            raise LitCollectError(
                f"the policy cannot be compiled : expected torch.compile to take it, got {type(error).__name__}: "
                f"{first_words}; leave rollout.compile_policy at False"
            ) from error


def missing_mask() -> FrameContractError:
    """The error of a policy that needs an action mask where there is none."""
    return FrameContractError(
        "policy takes an action_mask, but the env's reset info has none : expected an array 'action_mask' of the "
        "allowed actions there, or under that key of a Dict observation; wrap the env so that it gives one, or give "
        "the argument a default; fake_tensordict knows of a mask only after the first batch"
    )


def taken_argument(policy: Any, name: str) -> Taken:
    """Whether a policy's call has a parameter of a name that is still free, as far as can be seen.

    Args:
        policy: a module (whose `forward` is looked at), a callable, or a `functools.partial` of one.
        name: of the parameter.

    Example:
        >>> taken_argument(lambda observation, action_mask=None: observation, "action_mask")
        'optional'
    """
    signature, names = _signature(policy)
    parameter = None if signature is None else signature.parameters.get(name)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if parameter is None or parameter.kind not in by_keyword or name in names:
        return "no"
    return "required" if parameter.default is inspect.Parameter.empty else "optional"


def check_call(policy: Any, *, recurrent: bool) -> None:
    """Check that a policy can be called with an observation, as far as can be seen.

    Args:
        policy: see `taken_argument`.
        recurrent: whether it is called with a state, too.

    Raises:
        TypeError: if its call takes fewer arguments, or needs more.
    """
    signature, names = _signature(policy)
    if signature is None or (isinstance(policy, nn.Module) and policy._forward_pre_hooks):  # which may give arguments
        return
    mask = {} if taken_argument(policy, ACTION_MASK[0]) == "no" else {ACTION_MASK[0]: None}
    try:
        signature.bind(*[None] * (1 + recurrent), **{**dict.fromkeys(names), **mask})
    except TypeError as error:
        called = "policy(observation, state)" if recurrent else "policy(observation)"
        hint = "" if recurrent else "; what builds a policy must be a PolicyFactory, one with a state has initial_state"
        raise TypeError(
            f"policy cannot be called : expected {called} to do, got {error} for parameters {signature}{hint}"
        ) from error


def _signature(policy: Any) -> tuple[inspect.Signature | None, set[str]]:
    """The parameters of a policy's call that partials left free, None where it does not tell; names they gave."""
    given: list[Any] = []
    names: set[str] = set()
    while isinstance(policy, functools.partial) or uncompiled(policy) is not policy:
        if isinstance(policy, functools.partial):
            given, names = [*policy.args, *given], names | policy.keywords.keys()
            policy = policy.func
        else:
            policy = uncompiled(policy)
    if isinstance(policy, nn.Module) and type(policy).__call__ is nn.Module.__call__:
        policy = policy.forward
    try:
        return inspect.signature(functools.partial(policy, *given)), names
    except (TypeError, ValueError):  # built-in functions and scripts do not tell
        return None, names


def is_compiled(policy: Any) -> bool:
    """Whether a policy, or a module within it, is compiled."""
    if uncompiled(policy) is not policy:
        return True
    parts = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(part._compiled_call_impl is not None or uncompiled(part) is not part for part in parts)


def shortest_call(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a module whose call does nothing else (no hooks, not compiled), else the policy itself."""
    if not isinstance(policy, nn.Module) or type(policy).__call__ is not nn.Module.__call__:
        return policy
    state = policy.__dict__
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(state[name] for name in hooks) or state.get("_compiled_call_impl") is not None:
        return policy
    return policy if nn.modules.module._has_any_global_hook() else policy.forward
