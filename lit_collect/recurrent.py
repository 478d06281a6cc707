"""Policies with a state: it is carried from step to step, put back where an episode begins, and stored.

A recurrent policy has ``initial_state(num_envs)``, which gives a tensor [N, ...] or a (nested) mapping or tuple of
them, and is called as ``policy(observation, state)``; it returns its answer and the state that follows. A TensorDict
module names its state by key instead: ``initial_state`` gives a mapping of those keys, which are among its `in_keys`,
and among its `out_keys` under ``"next"``, as the modules of TorchRL have it.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase, set_interaction_type
from torch import Tensor

from lit_collect.actors import Actor, FunctionActor, output_keys
from lit_collect.calls import CompiledCall, is_compiled, missing_mask
from lit_collect.config import Exploration
from lit_collect.decoding import check_names
from lit_collect.envs.base import brief
from lit_collect.envs.spaces import LeafSpec, TreeSpec
from lit_collect.errors import FrameContractError
from lit_collect.frames import ACTION_MASK, IS_INIT, RESERVED, Key, as_key
from lit_collect.weights import uncompiled

STATE: Key = ("state",)
"""Where the state that entered a call is stored: a tensor, or nested names (positions of a tuple are "0", "1")."""

MakeState = Callable[[int], Any]


def initial_state_of(policy: Any) -> MakeState | None:
    """What makes the first state of a recurrent policy, None if the policy is not recurrent.

    Args:
        policy: a module, a callable, a method of one, or a `functools.partial` of these.
    """
    while isinstance(policy, partial) or uncompiled(policy) is not policy:
        policy = policy.func if isinstance(policy, partial) else uncompiled(policy)
    for owner in (policy, getattr(policy, "__self__", None)):
        make = getattr(owner, "initial_state", None)
        if callable(make):
            return make
    return None


class Memory:
    """The state of N env copies.

    It lies in two sets of tensors of its own, one of which holds what entered the last call until the next one: what
    a policy hands out may be changed by it later.

    Args:
        make: gives the state [N, ...] of N copies that begin an episode.
        root: where it is stored.
    """

    def __init__(self, make: MakeState, root: Key) -> None:
        self.keys: tuple[Key, ...] = ()
        """Of the state's tensors; known after the first call of `entering`."""
        self._make, self._root = make, root
        self._pattern: Any = None
        self._held: list[Tensor] = []
        self._spare: list[Tensor] = []
        self._initial: list[Tensor] | None = None
        self.fresh = np.ones(0, bool)
        """[N] bool, the copies that begin an episode with the next call."""

    def renew(self, *, moved: bool) -> None:
        """Ask for the first state anew: the weights that it may depend on have changed.

        Args:
            moved: whether they have another device or precision than before.
        """
        self._initial = None
        if moved and self._held:
            first = self._first(len(self.fresh))
            with torch.inference_mode(False):
                self._held = [old.to(new.device, new.dtype) for old, new in zip(self._held, first, strict=True)]
                self._spare = [torch.empty_like(held) for held in self._held]

    def restart(self, rows: np.ndarray) -> None:
        """Let these copies have the first state in the next call."""
        if self._held:  # before the first call all of them do
            self.fresh[rows] = True

    def entering(self, count: int) -> list[Tensor]:
        """What enters the next call, [N, ...] for each of `keys`; valid until `keep` was called twice."""
        if not self._held:
            self.fresh = np.ones(count, bool)
            with torch.inference_mode(False):
                self._held = [first.detach().clone() for first in self._first(count)]
                self._spare = [torch.empty_like(held) for held in self._held]
        elif self.fresh.any():
            rows = torch.from_numpy(np.flatnonzero(self.fresh))
            for held, first in zip(self._held, self._first(count), strict=True):
                held[rows] = first[rows].to(held.dtype)
        return self._held

    def given(self) -> Any:
        """A copy of what enters, in the form of `initial_state`, which the policy may change."""
        return _rebuilt(self._pattern, iter([held.clone() for held in self._held]))

    def keep(self, state: Any) -> None:
        """Let this enter the next call.

        Raises:
            FrameContractError: naming the part that differs from the first state.
        """
        parts = dict(_parts(state, self._root))
        if parts.keys() != set(self.keys):
            raise FrameContractError(
                f"the policy's new state has other parts than initial_state : expected {_names(self.keys)}, "
                f"got {_names(parts)}"
            )
        for key, held, spare in zip(self.keys, self._held, self._spare, strict=True):
            new = parts[key]
            if not isinstance(new, Tensor) or new.shape != held.shape or not torch.can_cast(new.dtype, held.dtype):
                raise FrameContractError(
                    f"the policy's new {'.'.join(key)} differs from initial_state : expected {_description(held)}, "
                    f"got {_description(new)}"
                )
            spare.copy_(new)
        self._held, self._spare = self._spare, self._held
        self.fresh.fill(False)

    def _first(self, count: int) -> list[Tensor]:
        """The first state of all copies."""
        if self._initial is None:
            self._pattern = self._make(count)
            listed = list(_parts(self._pattern, self._root))
            parts = dict(listed)
            for key, part in listed:
                if not isinstance(part, Tensor) or part.ndim == 0 or len(part) != count:
                    raise FrameContractError(
                        f"initial_state({count}) must give tensors with one row for each env copy : expected "
                        f"shape ({count}, ...) for {'.'.join(key)}, got {_description(part)}"
                    )
            if len(parts) != len(listed):
                names = _names(key for key, _ in listed)
                raise FrameContractError(
                    f"initial_state({count}) must give each tensor under a name of its own, got {names}"
                )
            if not parts or (self.keys and self.keys != tuple(parts)):
                raise FrameContractError(
                    f"initial_state({count}) must give the same tensors each time : expected "
                    f"{_names(self.keys) or 'at least one'}, got {_names(parts)}"
                )
            for key, held in zip(parts, self._held, strict=False):  # before the first call nothing is held
                if parts[key].shape != held.shape or not torch.can_cast(parts[key].dtype, held.dtype):
                    raise FrameContractError(
                        f"initial_state({count}) must give the same tensors each time : expected "
                        f"{_description(held)} for {'.'.join(key)}, got {_description(parts[key])}"
                    )
            self.keys, self._initial = tuple(parts), list(parts.values())
        return self._initial


class Remembering(Actor):
    """What actors with a state have in common."""

    recurrent = True
    _memory: Memory

    @property
    def carried(self) -> tuple[Key, ...]:
        """Where the state is stored."""
        return self._memory.keys

    def restart(self, rows: np.ndarray) -> None:
        """Give these env copies the first state in the next call."""
        self._memory.restart(rows)

    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Act, and move the state on."""
        values, state = self._proceed(leaves)
        self._memory.keep(state)
        return values

    def preview(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Act, and leave the state as it is."""
        return self._proceed(leaves)[0]

    def follow(self, leaves: tuple[Tensor, ...]) -> Mapping[Key, Tensor]:
        """Move the state on by what is seen in a step that somebody else acts."""
        values, state = self._proceed(leaves)
        self._memory.keep(state)
        return dict(zip(self._memory.keys, values, strict=False))  # the answer comes after the state

    @contextmanager
    def acting(self) -> Iterator[None]:
        """See `Actor.acting`."""
        before = self.home
        with super().acting():
            self._memory.renew(moved=self.home != before)
            yield

    @abstractmethod
    def _proceed(self, leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], Any]:
        """What a call returns, the state that entered first, and the state that follows."""


class RecurrentActor(Remembering, FunctionActor):
    """A module or callable that takes and returns a state beside the observation and its answer.

    Args:
        policy: what acts.
        make: gives its first state.
        observation_spec: of one env copy.
        action_spec: of one env copy.
        exploration: how actions are taken from distributions.
        compiled: whether to compile its call.

    Raises:
        FrameContractError: if the observation has the name of the stored state.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        make: MakeState,
        *,
        observation_spec: TreeSpec,
        action_spec: TreeSpec,
        exploration: Exploration,
        compiled: bool = False,
    ) -> None:
        super().__init__(
            policy,
            observation_spec=observation_spec,
            action_spec=action_spec,
            exploration=exploration,
            compiled=compiled,
        )
        self._memory = Memory(make, STATE)
        self.see(observation_spec.leaves)

    def see(self, leaves: Sequence[LeafSpec]) -> None:
        """Look for an action mask, and for a name that is taken."""
        super().see(leaves)
        if STATE[0] in self._observed:
            raise FrameContractError(
                "the env has a 'state', under which the state of a recurrent policy is stored; rename the env's"
            )
        self._observed |= {STATE[0]}  # nor may the policy's answer have it

    def follow(self, leaves: tuple[Tensor, ...]) -> Mapping[Key, Tensor]:
        """Move the state on by what is seen in a step that somebody else acts."""
        entering = self._memory.entering(leaves[0].shape[0])
        self._memory.keep(self._asked(leaves)[1])
        return dict(zip(self._memory.keys, entering, strict=True))

    def _proceed(self, leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], Any]:
        """What a call returns, and the state that follows."""
        entering = self._memory.entering(leaves[0].shape[0])
        answer, state = self._asked(leaves)
        if self._decode is None:
            self._decode = self._learn(answer)
            self.keys = (*self._memory.keys, *self.keys)
        return [*entering, *self._apart(answer)], state

    def _asked(self, leaves: tuple[Tensor, ...]) -> tuple[Any, Any]:
        reply = self._ask(leaves, self._memory.given())
        if not (isinstance(reply, (tuple, list)) and len(reply) == 2):
            raise FrameContractError(
                f"a policy with initial_state must return its answer and its new state : expected a tuple of two, "
                f"got {brief(reply)}"
            )
        return reply[0], reply[1]


class RecurrentTensorDictActor(Remembering):
    """A TensorDict module whose state is among its inputs, and under ``"next"`` among its outputs.

    Where the module takes ``"is_init"``, it gets [N, 1] bool: the copies that begin an episode. The state is stored
    under the module's own keys.

    Args:
        policy: what acts.
        make: gives its first state: [N, ...] by key.
        observation_spec: of one env copy.
        exploration: how actions are taken from distributions.
        compiled: whether to compile its call.
    """

    def __init__(
        self,
        policy: TensorDictModuleBase,
        make: MakeState,
        *,
        observation_spec: TreeSpec,
        exploration: Exploration,
        compiled: bool = False,
    ) -> None:
        self.module = uncompiled(policy)
        self.compiled = compiled or is_compiled(policy)
        self._policy = CompiledCall(policy) if compiled else policy
        self._in_keys = {as_key(key) for key in policy.in_keys}
        self._out_keys = [key for key in map(as_key, policy.out_keys) if "_" not in key]
        self._interaction = InteractionType.from_str(exploration)
        self._memory = Memory(partial(_by_key, make), ())
        self._observed = [leaf.key for leaf in observation_spec.leaves]

    def see(self, leaves: Sequence[LeafSpec]) -> None:
        """Everything that comes with a step can be among the module's inputs."""
        self._observed = [leaf.key for leaf in leaves]
        if ACTION_MASK in self._in_keys and ACTION_MASK not in self._observed:
            raise missing_mask()

    @contextmanager
    def acting(self) -> Iterator[None]:
        """See `Actor.acting`; also sets tensordict's interaction type."""
        with super().acting(), set_interaction_type(self._interaction):
            yield

    def _proceed(self, leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], dict[Key, Tensor]]:
        """What a call returns, and the state that follows."""
        entering = self._memory.entering(leaves[0].shape[0])
        if not self.keys:
            self._learn()
        if self.home is not None:
            leaves = self.moved(leaves)
        inputs = {**dict(zip(self._observed, leaves, strict=True)), **self._memory.given()}
        if IS_INIT in self._in_keys:
            inputs[IS_INIT] = torch.from_numpy(self._memory.fresh[:, None].copy()).to(leaves[0].device)
        answer = self._policy(TensorDict(inputs, batch_size=leaves[0].shape[:1]))
        state = {key: answer.get(("next", *key)) for key in self._memory.keys}
        given = self.keys[len(self._memory.keys) :]
        return [*entering, *[answer.get(key) for key in given]], state

    def _learn(self) -> None:
        state = self._memory.keys
        lacking = [key for key in state if key not in self._in_keys or ("next", *key) not in self._out_keys]
        if lacking:
            raise FrameContractError(
                f"initial_state gives {_names(lacking)} : expected keys that are among the module's in_keys, and under "
                f"'next' among its out_keys"
            )
        check_names([key[0] for key in state], RESERVED)
        if set(state) & set(self._observed):
            raise FrameContractError(
                f"initial_state gives {_names(set(state) & set(self._observed))}, which the env gives too; rename them"
            )
        given = [key for key in self._out_keys if key[0] != "next" or key[1:] not in state]
        self.keys = (*state, *[key for key in output_keys(given, self._observed) if key not in state])


def _by_key(make: MakeState, count: int) -> dict[Key, Any]:
    """The first state of a TensorDict module, by whole keys."""
    state = make(count)
    if not isinstance(state, (Mapping, TensorDictBase)):
        raise FrameContractError(
            f"initial_state({count}) of a TensorDict module must give a mapping of its state's keys, "
            f"got {type(state).__name__}"
        )
    if isinstance(state, TensorDictBase):
        return {as_key(key): value for key, value in state.items(True, True)}
    return {as_key(key): value for key, value in state.items()}


def _parts(state: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """The tensors of a state by key, in the order of its own."""
    if isinstance(state, (Mapping, TensorDictBase)):
        for name, value in state.items():
            if not isinstance(name, (str, tuple)):
                raise FrameContractError(f"a policy's state has the name {name!r} : expected a text")
            yield from _parts(value, key + as_key(name))
    elif isinstance(state, (tuple, list)):
        for position, value in enumerate(state):
            yield from _parts(value, (*key, str(position)))
    else:
        yield key, state


def _rebuilt(pattern: Any, tensors: Iterator[Tensor]) -> Any:
    """A state of the pattern's form."""
    if isinstance(pattern, TensorDictBase):
        values = {name: _rebuilt(value, tensors) for name, value in pattern.items()}
        return TensorDict(values, batch_size=pattern.batch_size)
    if isinstance(pattern, Mapping):
        return {name: _rebuilt(value, tensors) for name, value in pattern.items()}
    if isinstance(pattern, tuple) and hasattr(pattern, "_fields"):
        return type(pattern)(*[_rebuilt(value, tensors) for value in pattern])
    if isinstance(pattern, (tuple, list)):
        return type(pattern)([_rebuilt(value, tensors) for value in pattern])
    return next(tensors)


def _names(keys: Any) -> list[str]:
    return [".".join(key) for key in keys]


def _description(value: Any) -> str:
    return f"{value.dtype} with shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
