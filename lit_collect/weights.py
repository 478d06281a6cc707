"""`WeightSnapshot`: the parameters and buffers of all models that act, with one version."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Weights = nn.Module | TensorDictBase | Mapping[str, object]
"""What may stand for the weights of one model: a module, its TensorDict, or a (nested) mapping of tensors."""


@dataclass(frozen=True)
class WeightSnapshot:
    """Parameters and buffers by model id, and the version they are known by.

    All models of one snapshot are applied together, between batches.

    Example:
        >>> snapshot = WeightSnapshot.of({"policy": nn.Linear(2, 1)}, version=4)
        >>> sorted(snapshot.models["policy"]), snapshot.version
        (['bias', 'weight'], 4)
    """

    models: Mapping[str, Mapping[str, Tensor]]
    """Tensors by model id and dotted name."""
    version: int
    """0 for what a run begins with, one more for every snapshot that is published."""

    @classmethod
    def of(cls, models: Mapping[str, Weights], version: int) -> "WeightSnapshot":
        """Take a snapshot: detached copies that later training does not change.

        Args:
            models: weights by model id.
            version: of the snapshot.
        """
        copied = {
            model_id: {name: tensor.detach().clone() for name, tensor in named_tensors(weights).items()}
            for model_id, weights in models.items()
        }
        return cls(models=copied, version=version)


@dataclass(frozen=True)
class ModelShapes:
    """What weights of a model must look like."""

    shapes: Mapping[str, tuple[int, ...] | None]
    """By dotted name; None for lazy parameters, which have no shape yet."""
    saved: frozenset[str]
    """Names that must be given; the others are buffers that are never saved."""

    @classmethod
    def of(cls, module: nn.Module) -> "ModelShapes":
        """Those of a module."""
        tensors, saved = named_tensors(module), {_plain(name) for name in module.state_dict()}
        return cls(
            shapes={name: None if is_lazy(tensor) else tuple(tensor.shape) for name, tensor in tensors.items()},
            saved=frozenset(name for name in tensors if name in saved),
        )


def check_fit(source: Mapping[str, Tensor], expected: ModelShapes) -> None:
    """Raise unless tensors fit a model.

    Args:
        source: by dotted name.
        expected: of the model.

    Raises:
        ValueError: naming the names that are missing or unknown, or the shape that differs.
    """
    missing = sorted(expected.saved - source.keys())
    unknown = sorted(source.keys() - expected.shapes.keys())
    if missing or unknown:
        raise ValueError(f"weights do not fit the policy: missing {missing}, unknown {unknown}")
    for name, tensor in source.items():
        shape = expected.shapes[name]
        if shape is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"weight {name!r} must have shape {shape}, got {tuple(tensor.shape)}")


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """The tensors of one model by dotted name, as they are (not copied).

    Names are those that a module has without `torch.compile`, so that compiled and plain ones exchange weights.

    Args:
        weights: a module, a TensorDict of parameters, or a mapping of tensors, nested or with dotted names.

    Raises:
        TypeError: if a value is no tensor, or these are no weights at all.
    """
    if isinstance(weights, nn.Module):
        # A tensor with two names is given under both, as in a state_dict.
        parameters = weights.named_parameters(remove_duplicate=False)
        buffers = weights.named_buffers(remove_duplicate=False)
        return {_plain(name): tensor for name, tensor in (*parameters, *buffers)}
    if isinstance(weights, TensorDictBase):
        weights = weights.to_dict()
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a module, a TensorDict or a mapping of tensors, got {weights!r}")
    flat: dict[str, Tensor] = {}
    for name, value in weights.items():
        if isinstance(value, Tensor):
            flat[_plain(name)] = value
        elif isinstance(value, Mapping):
            flat.update({_plain(f"{name}.{inner}"): tensor for inner, tensor in named_tensors(value).items()})
        else:
            raise TypeError(f"weights must be tensors, got {type(value).__name__} for {name!r}")
    return flat


def module_of(policy: Any) -> nn.Module | None:
    """The module of a policy: itself, or the one that it is a method of, with some arguments given or not.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> module_of(functools.partial(layer.forward)) is layer
        True
    """
    while isinstance(policy, functools.partial) or uncompiled(policy) is not policy:
        policy = policy.func if isinstance(policy, functools.partial) else uncompiled(policy)
    owner = policy if isinstance(policy, nn.Module) else getattr(policy, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def uncompiled(policy: Any) -> Any:
    """What `torch.compile` made a module or function of; anything else as it is.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> uncompiled(torch.compile(layer, backend="eager")) is layer
        True
    """
    if isinstance(policy, nn.Module):
        compiled = "_orig_mod" in policy._modules  # that of a script has no `get`
        return policy._modules["_orig_mod"] if compiled else policy
    return getattr(policy, "_torchdynamo_orig_callable", policy)


def hides_weights(function: Any) -> bool:
    """Whether a function, or an object that can be called, uses a module with weights to learn, as far as can be seen.

    Args:
        function: no module, nor a method of one.
    """
    used: list[Any] = []
    while isinstance(function, functools.partial):
        used += [*function.args, *function.keywords.values()]
        function = function.func
    used += getattr(getattr(function, "__self__", function), "__dict__", {}).values()
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        used += [*variables.nonlocals.values(), *variables.globals.values(), *(function.__defaults__ or ())]
    modules = [module for module in used if isinstance(module, nn.Module)]
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def copy_weights(source: Mapping[str, Tensor], module: nn.Module) -> None:
    """Write tensors into the parameters and buffers of a module, in place. Nothing is written unless all of it fits.

    Args:
        source: tensors by dotted name; where they are the module's own, nothing happens to them.
        module: what shall act with them.

    Raises:
        ValueError: naming the names that are missing or unknown, or the shape that differs.
    """
    target = named_tensors(module)
    check_fit(source, ModelShapes.of(module))
    with torch.no_grad():
        for name, tensor in source.items():
            if tensor is not target[name]:
                target[name].copy_(tensor)


def models_to_update(
    policy_or_weights: Weights | None,
    weights: Weights | None,
    policy: nn.Module | None,
    model_id: str,
    weights_dict: Mapping[str, Weights] | None,
) -> dict[str, Weights]:
    """Which models the arguments of `update_policy_weights_` name, and their weights (none: as they are).

    Raises:
        ValueError: if more than one of the four ways to give weights is used.
    """
    named = {"policy_or_weights": policy_or_weights, "weights": weights, "policy": policy}
    given = {name: value for name, value in named.items() if value is not None}
    ways = [*given, *([] if weights_dict is None else ["weights_dict"])]
    if len(ways) > 1:
        raise ValueError(f"weights must be given in one way, got {' and '.join(ways)}")
    if weights_dict is not None:
        return dict(weights_dict)
    return {model_id: given[ways[0]]} if ways else {}


def _plain(name: str) -> str:
    """A name without the part that `torch.compile` puts into it."""
    return name.replace("_orig_mod.", "")
