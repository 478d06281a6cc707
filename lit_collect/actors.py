"""Actors: a policy bound to the spaces of N env copies, as one call a step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModuleBase, set_interaction_type
from torch import Tensor, nn

from lit_collect.calls import Arguments, CompiledCall, is_compiled, missing_mask, shortest_call
from lit_collect.config import Exploration
from lit_collect.decoding import Decoder, check_names, check_nan, decoder_for
from lit_collect.envs.spaces import LeafSpec, TreeSpec, sample_leaf
from lit_collect.errors import FrameContractError
from lit_collect.frames import ACTION_MASK, RESERVED, Key, as_key
from lit_collect.lowering import LoweredActor, lower
from lit_collect.mlp import small_nets_in_numpy
from lit_collect.sampling import sample_allowed
from lit_collect.weights import module_of, uncompiled

_MODE_DEPENDENT = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._NormBase,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
)


class Actor(ABC):
    """A policy bound to the spaces of N env copies: one call, one step."""

    keys: tuple[Key, ...] = ()
    """Keys of what a call returns, in its order; known after the first call."""
    module: nn.Module | None = None
    """The module whose weights act, if there is one."""
    home: tuple[torch.device, torch.dtype] | None = None
    """Device and precision of the module, if they are not those of observations: the CPU and float32."""
    recurrent: bool = False
    """Whether it has a state of its own for each env copy."""
    compiled: bool = False
    """Whether what it calls is compiled, and should find the same circumstances in every call."""
    _acted = False

    @property
    def carried(self) -> tuple[Key, ...]:
        """Keys of its state, which are among `keys`; known after the first call."""
        return ()

    @abstractmethod
    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Act once.

        Args:
            leaves: [N, ...] for each leaf that comes with a step (see `see`).

        Returns:
            [N, ...] for each of `keys`.
        """

    def see(self, leaves: Sequence[LeafSpec]) -> None:  # noqa: B027  # most do not care
        """Be told what comes with every step, after the first reset (before, it is the observation alone).

        Args:
            leaves: the observation's, then those of the env's info.

        Raises:
            FrameContractError: if the policy needs something else.
        """

    def restart(self, rows: np.ndarray) -> None:  # noqa: B027  # most have no state
        """Be told which env copies begin an episode with the next call.

        Args:
            rows: [K] int64.
        """

    def follow(self, leaves: tuple[Tensor, ...]) -> Mapping[Key, Tensor]:
        """Be told what is seen in a step that somebody else acts.

        Returns:
            The state that entered, [N, ...] by key; valid until the next call.
        """
        return {}

    def preview(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """What a call would return, without a change of state."""
        return self(leaves)

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
        (lazy parameters, caches) must be of use to training too. A compiled one would be compiled anew for it. The
        module's device and precision are looked up anew each time, because a trainer may have changed them.
        """
        self.home = _foreign_home(self.module)
        no_gradients = torch.inference_mode() if self._acted and not self.compiled else torch.no_grad()
        in_numpy = small_nets_in_numpy(None if self.compiled else self.module)
        with no_gradients, _evaluating(self.module), in_numpy:
            yield
        self._acted = True

    def reseed(self, seed: int) -> None:  # noqa: B027  # most have none
        """Begin anew with random numbers of its own, if it has any.

        Args:
            seed: 32 bits.
        """

    def moved(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The observation on the module's device and in its precision (integers stay what they are)."""
        assert self.home is not None
        device, dtype = self.home
        # without waiting: what is seen lies still until the action is there, and that is waited for
        to = [(leaf, dtype if leaf.is_floating_point() else leaf.dtype) for leaf in leaves]
        return tuple([leaf.to(device, kind, non_blocking=True) for leaf, kind in to])


class RandomActor(Actor):
    """Uniform random actions from a generator of its own, among the allowed ones where the env says which those are.

    Args:
        action_spec: of one env copy.
        seed: 32 bits.
        first: index of the first env copy among those of its rank, for messages.
        may_mask: whether a step can be spent on resetting, so that what is drawn after an episode's end, where often
            nothing is allowed, does not matter.
    """

    def __init__(self, action_spec: TreeSpec, seed: int, *, first: int = 0, may_mask: bool = False) -> None:
        self.keys = tuple(leaf.key for leaf in action_spec.leaves)
        self._leaves = action_spec.leaves
        self._choices = _choices(action_spec.space)
        self._rng = np.random.default_rng(seed)
        self._first, self._may_mask = first, may_mask
        self._mask: int | None = None

    def see(self, leaves: Sequence[LeafSpec]) -> None:
        """Look for a mask, which says something of discrete actions only."""
        keys = [leaf.key for leaf in leaves]
        self._mask = keys.index(ACTION_MASK) if self._choices is not None and ACTION_MASK in keys else None

    def reseed(self, seed: int) -> None:
        """Begin anew with the actions of a seed."""
        self._rng = np.random.default_rng(seed)

    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Draw one action for each env copy."""
        count = leaves[0].shape[0]
        if self._mask is not None:
            return [torch.from_numpy(self._draw_allowed(leaves[self._mask].numpy()))]
        return [torch.from_numpy(sample_leaf(leaf, count, self._rng)) for leaf in self._leaves]

    def preview(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Draw, and leave the generator as it is."""
        before = self._rng.bit_generator.state
        try:
            return self(leaves)
        finally:
            self._rng.bit_generator.state = before

    def _draw_allowed(self, mask: np.ndarray) -> np.ndarray:
        assert self._choices is not None
        (leaf,) = self._leaves
        if mask.shape[1:] != (sum(self._choices),):
            raise FrameContractError(
                f"action_mask has a wrong shape : expected {(sum(self._choices),)} for each env copy, "
                f"got {mask.shape[1:]}"
            )
        columns = []
        for allowed in np.split(mask.astype(bool), np.cumsum(self._choices)[:-1], axis=1):
            nothing = allowed.sum(1) == 0
            if nothing.any() and not self._may_mask:
                raise FrameContractError(
                    f"action_mask of env copy {self._first + int(nothing.argmax())} forbids every action : expected "
                    f"at least one that is allowed"
                )
            columns.append(sample_allowed(allowed | nothing[:, None], self._rng))
        return np.stack(columns, 1).reshape(len(mask), *leaf.shape).astype(leaf.stored)


class FunctionActor(Actor):
    """A module or callable that maps an observation (a tensor, or a mapping of them) to an answer.

    If its call has a parameter `action_mask`, it gets the mask [N, A] bool of the allowed actions by keyword.

    Args:
        policy: what acts.
        observation_spec: of one env copy.
        action_spec: of one env copy.
        exploration: how actions are taken from distributions.
        compiled: whether to compile its call.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        *,
        observation_spec: TreeSpec,
        action_spec: TreeSpec,
        exploration: Exploration,
        compiled: bool = False,
    ) -> None:
        self.module = module_of(policy)
        self.compiled = compiled or is_compiled(policy)
        self._policy = CompiledCall(policy) if compiled else policy
        self._arguments = Arguments(policy, observation_spec)
        self._observed = frozenset(leaf.key[0] for leaf in observation_spec.leaves)
        self._action = action_spec.leaves[0]
        self._exploration: Exploration = exploration
        self._decoder: Decoder | None = None
        self._decode: Callable[[Any], Sequence[Tensor]] | None = None
        self._call = self._policy
        self._straight = False  # whether the first leaf can be given to the policy as it is

    def see(self, leaves: Sequence[LeafSpec]) -> None:
        """Look for an action mask."""
        self._arguments.see(leaves)
        self._observed = frozenset(leaf.key[0] for leaf in leaves)
        self._straight = False

    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Ask the policy and take its answer apart."""
        answer = self._call(leaves[0]) if self._straight else self._ask(leaves)
        if self._decode is None:
            self._decode = self._learn(answer)
        return self._apart(answer)

    def complete(self, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """The log-probabilities of the actions, if the answer held distribution parameters."""
        return self._decoder.complete(columns) if self._decoder is not None else {}

    @contextmanager
    def acting(self) -> Iterator[None]:
        """See `Actor.acting`; looks up anew whether the module's call is more than its `forward`."""
        with super().acting():
            self._call = shortest_call(self._policy)
            self._straight = self.home is None and self._arguments.plain
            yield

    def _ask(self, leaves: tuple[Tensor, ...], *state: Any) -> Any:
        """Call the policy with what it takes, and with its state if it has one."""
        needed: Sequence[Tensor] = [leaves[position] for position in self._arguments.needed]
        if self.home is not None:
            needed = self.moved(needed)
        observation, masks = self._arguments(needed)
        return self._call(observation, *state, **masks)

    def _apart(self, answer: Any) -> Sequence[Tensor]:
        """The values of an answer, taken apart like the first one."""
        assert self._decode is not None
        try:
            return self._decode(answer)
        except KeyError as error:
            raise FrameContractError(
                f"the policy's answer lacks {error} : expected {['.'.join(key) for key in self.keys]} each time"
            ) from error

    def _learn(self, answer: Any) -> Callable[[Any], Sequence[Tensor]]:
        """Choose by the first answer how all of them are taken apart."""
        self._decoder = decoder_for(answer, self._exploration, action=self._action, observed=self._observed)
        self.keys = self._decoder.keys
        return self._decoder.decode


class TensorDictActor(Actor):
    """A TensorDict module: as plain calls where it can be lowered (see `lit_collect.lowering`), else as it is.

    Args:
        policy: what acts.
        observation_spec: of one env copy.
        exploration: how actions are taken from distributions.
        compiled: whether to compile its calls; drawing the action is not among them where it is lowered.
    """

    def __init__(
        self,
        policy: TensorDictModuleBase,
        *,
        observation_spec: TreeSpec,
        exploration: Exploration,
        compiled: bool = False,
    ) -> None:
        self.module = uncompiled(policy)
        self.compiled = compiled or is_compiled(policy)
        self._in_keys, self._out_keys = _as_keys(policy.in_keys), _as_keys(policy.out_keys)
        self._policy = CompiledCall(policy) if compiled else policy
        self._lowered = lower(policy)
        if compiled and self._lowered is not None:
            self._lowered = _compiled_calls(self._lowered)
        self._interaction = InteractionType.from_str(exploration)
        family = None if self._lowered is None else self._lowered.family
        self._choose = None if family is None else family.chooser(exploration)
        self._bind([leaf.key for leaf in observation_spec.leaves])

    @property
    def lowered(self) -> bool:
        """Whether it acts as plain calls."""
        return self._plan is not None

    def see(self, leaves: Sequence[LeafSpec]) -> None:
        """Everything that comes with a step can be among the module's inputs."""
        keys = [leaf.key for leaf in leaves]
        if ACTION_MASK in self._in_keys and ACTION_MASK not in keys:
            raise missing_mask()
        self._bind(keys)

    def __call__(self, leaves: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Run the calls and draw the action, or call the module with a TensorDict [N]."""
        if self.home is not None:
            leaves = self.moved(leaves)
        inputs = dict(zip(self._observed, leaves, strict=True))
        if self._plan is None:
            answer = self._policy(TensorDict(inputs, batch_size=leaves[0].shape[:1]))
            return [answer.get(key) for key in self.keys]
        values = self._plan.run(inputs)
        if self._choose is not None:
            values[self._plan.action] = self._choose(*[values[key] for key in self._plan.parameters])
        return [values[key] for key in self.keys]

    def complete(self, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """The log-probabilities, if a lowered actor returns them."""
        plan = self._plan
        if plan is None:
            return {}
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

    def _bind(self, observed: Sequence[Key]) -> None:
        """Lower the module if all its calls find their inputs; if not, tensordict's own error is the better one."""
        plan = self._lowered
        self._observed = tuple(observed)
        self._plan = plan if plan is not None and _fits(plan, observed) else None
        if self._plan is None:
            given = [key for key in self._out_keys if "_" not in key]
        else:
            given = [key for stage in self._plan.stages for key in stage.gives]
            given += [self._plan.action] if self._plan.family is not None else []
        self.keys = output_keys(given, observed)


def output_keys(keys: Sequence[Key], observed: Sequence[Key]) -> tuple[Key, ...]:
    """What a TensorDict module gives besides a changed observation, which it changes again when it is trained.

    Args:
        keys: of everything that it gives.
        observed: keys of what comes with a step.

    Raises:
        FrameContractError: if a name means something else in a batch.
    """
    check_names([key[0] for key in keys], RESERVED)
    return tuple(dict.fromkeys(key for key in keys if key not in observed))


def _as_keys(keys: Sequence[Any]) -> tuple[Key, ...]:
    return tuple(as_key(key) for key in keys)


def _fits(plan: LoweredActor, observed: Sequence[Key]) -> bool:
    """Whether every call finds its inputs."""
    known = set(observed)
    for stage in plan.stages:
        if not known.issuperset(stage.takes):
            return False
        known.update(stage.gives)
    return (known - set(observed)).issuperset(plan.parameters)


def _compiled_calls(plan: LoweredActor) -> LoweredActor:
    return replace(plan, stages=tuple(replace(stage, module=CompiledCall(stage.module)) for stage in plan.stages))


def _choices(space: spaces.Space[Any]) -> list[int] | None:
    """How many values each discrete choice has, None if there are others too."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    return space.nvec.ravel().tolist() if isinstance(space, spaces.MultiDiscrete) else None


def _foreign_home(module: nn.Module | None) -> tuple[torch.device, torch.dtype] | None:
    """Device and precision of the module's parameters, unless observations have them already."""
    parameters = () if module is None else module.parameters()
    first = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
    if first is None or (first.device.type == "cpu" and first.dtype is torch.float32):
        return None
    return first.device, first.dtype


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
