"""What a command takes from the data and the model of a ``fit`` config, without fitting."""

from typing import Any

from lit_collect.datamodule import CollectorDataModule
from lit_collect.learner import policy_of


def policy_in(data: Any, model: Any, *, command: str) -> Any:
    """Who would act for a model, whose networks are built if the spaces tell how.

    Args:
        data: a `CollectorDataModule`.
        model: a LightningModule with a policy.
        command: who asks, for messages.

    Raises:
        TypeError: if the data module is of another kind, or there is no policy.
    """
    if not isinstance(data, CollectorDataModule):
        raise TypeError(f"{command} needs a config whose data is a CollectorDataModule, got {type(data).__name__}")
    configure = getattr(model, "configure_spaces", None)
    if configure is not None:
        configure(data.observation_spec, data.action_spec)
    policy = data._policy if data._policy is not None else policy_of(model)
    if policy is None:
        raise TypeError(f"there is no policy to act with : expected an attribute `policy` of {type(model).__name__}")
    return policy
