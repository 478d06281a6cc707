"""Standard TensorDict actors as plain functions on tensors, with equal outputs.

The wrappers of `tensordict.nn` cost 200 to 400 us a step where the net needs 20. What is built of
`TensorDictModule`, `TensorDictSequential`, `ProbabilisticTensorDictModule` and `ProbabilisticTensorDictSequential`
(exactly these classes, with plain options) does not need them while acting. Anything else is left as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, distributions, nn

from lit_collect.frames import Key, as_key
from lit_collect.sampling import CATEGORICAL, NORMAL, Family

_FAMILIES: dict[Any, Family] = {distributions.Categorical: CATEGORICAL, distributions.Normal: NORMAL}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One call of a plain module: which values it takes and which it gives."""

    module: Callable[..., Any]
    takes: tuple[Key, ...]
    gives: tuple[Key, ...]


@dataclass(frozen=True, kw_only=True)
class LoweredActor:
    """A TensorDict actor as a list of calls, and how its action is drawn at the end."""

    stages: tuple[Stage, ...]
    """Calls in order."""
    family: Family | None
    """How the action is drawn; None if a stage gives it."""
    parameters: tuple[Key, ...]
    """Where the family's parameters are."""
    action: Key
    """Where the drawn action goes."""
    log_prob: Key | None
    """Where its log-probability goes."""

    def run(self, values: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Call all stages; `values` (the observation by key) is extended in place by what they give."""
        for stage in self.stages:
            out = stage.module(*[values[key] for key in stage.takes])
            if isinstance(out, Tensor):
                values[stage.gives[0]] = out
            elif isinstance(out, (Mapping, TensorDictBase)):
                values.update({key: out[key if len(key) > 1 else key[0]] for key in stage.gives})
            else:
                values.update(zip(stage.gives, out, strict=True))
        return values


def lower(policy: nn.Module) -> LoweredActor | None:
    """Lower a TensorDict actor.

    Args:
        policy: any module.

    Returns:
        The calls it consists of, or None if it is not of the standard kind.

    Example:
        >>> actor = TensorDictSequential(
        ...     TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        ...     ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=distributions.Categorical),
        ... )
        >>> lower(actor).parameters
        (('logits',),)
    """
    modules = _flat(policy)
    if modules is None:
        return None
    last = modules[-1] if type(modules[-1]) is ProbabilisticTensorDictModule else None
    stages = [_stage(module) for module in (modules[:-1] if last is not None else modules)]
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages):
        return None
    if last is None:
        return LoweredActor(stages=tuple(known), family=None, parameters=(), action=("action",), log_prob=None)
    return _with_draw(tuple(known), last)


def _flat(module: nn.Module) -> list[nn.Module] | None:
    """The modules of (nested) sequences in order, or None if a sequence has options of its own."""
    if type(module) in (TensorDictModule, ProbabilisticTensorDictModule):
        return [module]
    if type(module) not in (TensorDictSequential, ProbabilisticTensorDictSequential):
        return None
    assert isinstance(module, TensorDictSequential)
    if module.partial_tolerant or getattr(module, "_select_before_return", False) or _has_hooks(module):
        return None
    parts: list[nn.Module] = []
    for inner in module.module:
        flat = _flat(inner)
        if flat is None:
            return None
        parts.extend(flat)
    return parts or None


def _stage(module: nn.Module) -> Stage | None:
    if type(module) is not TensorDictModule or _has_hooks(module):
        return None
    if getattr(module, "_kwargs", None) is not None or getattr(module, "method", None) is not None:
        return None  # inputs given by keyword, or another method than forward
    takes, gives = _keys(module.in_keys), _keys(module.out_keys)
    if any(part == "_" for key in gives for part in key):
        return None
    return Stage(module=module.module, takes=takes, gives=gives)


def _with_draw(stages: tuple[Stage, ...], last: ProbabilisticTensorDictModule) -> LoweredActor | None:
    family = _FAMILIES.get(last.distribution_class)
    names = tuple(str(name) for name in last.dist_keys)
    plain = not (last.distribution_kwargs or last.num_samples is not None or _has_hooks(last))
    seeded = any(getattr(last, name, None) is not None for name in ("_generator", "_generator_key"))
    out_keys = [key for key in last.out_keys if not last.return_log_prob or key != last.log_prob_key]
    if family is None or not plain or seeded or len(out_keys) != 1:
        return None
    (action,) = _keys(out_keys)
    if any(action in stage.gives for stage in stages):  # it is not drawn again then
        return None
    parameters = dict(zip(names, _keys(last.in_keys), strict=True))
    if set(parameters) != set(family.parameters):
        return None
    return LoweredActor(
        stages=stages,
        family=family,
        parameters=tuple(parameters[name] for name in family.parameters),
        action=action,
        log_prob=_keys([last.log_prob_key])[0] if last.return_log_prob else None,
    )


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling it is more than its `forward`, or is compiled."""
    compiled = module._compiled_call_impl is not None
    return bool(module._forward_hooks or module._forward_pre_hooks) or compiled


def _keys(keys: Sequence[Any]) -> tuple[Key, ...]:
    return tuple(as_key(key) for key in keys)
