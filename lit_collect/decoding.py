"""Answers of policies, taken apart: what a policy may return, as a fixed list of tensors under keys."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, distributions

from lit_collect.config import Exploration
from lit_collect.envs.spaces import LeafSpec
from lit_collect.errors import FrameContractError
from lit_collect.frames import ACTION, RESERVED, Key
from lit_collect.sampling import FAMILIES, Family, choose_from, family_of, joint

LOG_PROB: Key = ("log_prob",)


class Decoder(ABC):
    """Takes the answers of a policy apart; its kind is chosen by the first answer and does not change."""

    keys: tuple[Key, ...]

    @abstractmethod
    def decode(self, answer: Any) -> Sequence[Tensor]:
        """The values of `keys`."""

    def complete(self, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """What is computed once a batch."""
        return {}


class _PlainAction(Decoder):
    keys = (ACTION,)

    def decode(self, answer: Any) -> Sequence[Tensor]:
        return (answer if type(answer) is Tensor else torch.as_tensor(answer),)


class _NamedValues(Decoder):
    """A mapping that holds the action, and whatever else is to be stored."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.keys = tuple(_paths(answer))
        tensors = all(isinstance(_at(answer, key), Tensor) for key in self.keys)
        if tensors and len(self.keys) > 1 and all(len(key) == 1 for key in self.keys):
            self.decode = itemgetter(*[key[0] for key in self.keys])  # type: ignore[method-assign, assignment]  # in C

    def decode(self, answer: Any) -> Sequence[Tensor]:
        return [_as_tensor(_at(answer, key), key) for key in self.keys]


class _Parameters(Decoder):
    """A mapping that holds distribution parameters: the action is drawn here."""

    def __init__(self, answer: Mapping[str, Any], family: Family, exploration: Exploration, action: LeafSpec) -> None:
        given = _NamedValues(answer)
        self.keys = (*given.keys, ACTION)
        self._given = given.decode
        self._family, self._choose = family, family.chooser(exploration)
        self._event_dims = len(action.shape)
        self._parameters: tuple[Key, ...] = tuple((name,) for name in family.parameters)
        self._positions = [given.keys.index(key) for key in self._parameters]

    def decode(self, answer: Any) -> Sequence[Tensor]:
        values = self._given(answer)
        return [*values, self._choose(*[values[position] for position in self._positions])]

    def complete(self, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        parameters = [columns[key] for key in self._parameters]
        values = joint(self._family.log_prob(columns[ACTION], *parameters), self._event_dims)
        return {LOG_PROB: check_nan(values)}


class _KnownDistribution(_Parameters):
    """A distribution object of a known family; its parameters are kept under private keys."""

    def __init__(self, family: Family, exploration: Exploration, action: LeafSpec) -> None:
        super().__init__(dict.fromkeys(family.parameters), family, exploration, action)
        self._parameters = tuple((f"_{name}",) for name in family.parameters)
        self.keys = (*self._parameters, ACTION)

    def decode(self, answer: Any) -> Sequence[Tensor]:
        known = family_of(answer)
        if known is None or known[0] is not self._family:
            raise FrameContractError(f"the policy's answer changed its kind, got {answer}")
        return [*known[1], self._choose(*known[1])]


class _AnyDistribution(Decoder):
    """A distribution object that torch has to sample from."""

    keys = (ACTION, LOG_PROB)

    def __init__(self, exploration: Exploration, action: LeafSpec) -> None:
        self._exploration: Exploration = exploration
        self._whole = action.dtype.kind != "f"

    def decode(self, answer: Any) -> Sequence[Tensor]:
        action = choose_from(answer, self._exploration)
        log_prob = answer.log_prob(action)
        if self._whole and answer.support.is_discrete:  # a Bernoulli gives its zeros and ones as floats
            action = action.long()
        return action, joint(log_prob, log_prob.ndim - 1)


def decoder_for(answer: Any, exploration: Exploration, *, action: LeafSpec, observed: frozenset[str]) -> Decoder:
    """Choose how to take answers like this one apart.

    Args:
        answer: the policy's first.
        exploration: how actions are taken from distributions.
        action: the (first) leaf of the action space.
        observed: names that the observation has in a batch.

    Raises:
        FrameContractError: if it is none of what a policy may answer.
    """
    if isinstance(answer, (Tensor, np.ndarray)):
        return _PlainAction()
    if isinstance(answer, distributions.Distribution):
        check_names(LOG_PROB, observed)
        known = family_of(answer)
        return _KnownDistribution(known[0], exploration, action) if known else _AnyDistribution(exploration, action)
    if isinstance(answer, (Mapping, TensorDictBase)):
        names = set(answer.keys())
        check_names(names, RESERVED | observed)
        if "action" in names:
            return _NamedValues(answer)
        for family in FAMILIES:
            if names.issuperset(family.parameters):
                check_names(LOG_PROB, observed)
                return _Parameters(answer, family, exploration, action)
        raise FrameContractError(
            f"the policy returned a mapping without an action : expected 'action', or 'logits', or 'loc' and 'scale', "
            f"got {sorted(names)}"
        )
    raise FrameContractError(
        "the policy returned no action : expected a tensor, a mapping with 'action' or distribution parameters, or a "
        f"torch Distribution, got {type(answer).__name__}"
    )


def check_names(names: Iterable[str], reserved: frozenset[str]) -> None:
    """Refuse outputs under names that mean something else in a batch.

    Raises:
        FrameContractError: naming them.
    """
    taken = sorted({name for name in names if name in reserved - {"action"}})
    if taken:
        hint = " (or give a recurrent policy its initial_state)" if "next" in taken else ""
        raise FrameContractError(f"the policy returned {taken}, names that the batch itself takes; rename them{hint}")


def _paths(answer: Mapping[str, Any], prefix: Key = ()) -> Iterator[Key]:
    for name, value in answer.items():
        if not isinstance(name, str):
            raise FrameContractError(f"the policy returned a value under {name!r} : expected a text as its name")
        if isinstance(value, (Mapping, TensorDictBase)):
            yield from _paths(value, (*prefix, name))
        else:
            yield (*prefix, name)


def _at(answer: Any, key: Key) -> Tensor:
    for part in key:
        answer = answer[part]
    return answer


def _as_tensor(value: Any, key: Key) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FrameContractError(
            f"the policy's {'.'.join(key)} cannot be stored : expected a tensor or an array of numbers, "
            f"got {type(value).__name__}"
        ) from error


def check_nan(values: Tensor) -> Tensor:
    """Raise where a policy's parameters were NaN: sampling hides it, they and the log-probability do not.

    Args:
        values: [N, T, ...].

    Returns:
        The same values.

    Raises:
        FrameContractError: naming the env copy and the step.
    """
    if math.isnan(float(values.sum())) and bool(values.isnan().any()):
        copy, step = values.isnan().nonzero()[0][:2].tolist()
        raise FrameContractError(f"the policy gave NaN for env copy {copy} at step {step} of the batch")
    return values
