"""A LightningModule for tests."""

import lightning as L
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from lit_collect.testing.doubles import ConstantPolicy


class BoringRLModule(L.LightningModule):
    """The smallest module that learns: every optimizer step lowers every weight of the policy by `learning_rate`.

    Args:
        policy: what acts (None: a `ConstantPolicy` for two discrete actions).
        learning_rate: the size of a step.
        automatic_optimization: whether Lightning steps the optimizer, or `training_step` does.

    Example:
        >>> model = BoringRLModule(ConstantPolicy(1.0), learning_rate=0.25)
        >>> model.policy.action.item()
        1.0
    """

    def __init__(
        self,
        policy: nn.Module | None = None,
        *,
        learning_rate: float = 1.0,
        automatic_optimization: bool = True,
    ) -> None:
        super().__init__()
        self.policy = policy or ConstantPolicy(0.0, num_actions=2)
        self.learning_rate = learning_rate
        self.automatic_optimization = automatic_optimization
        self.batches: list[TensorDictBase] = []
        """Every batch that it was trained on."""

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> Tensor:
        """Keep the batch, and push all weights down alike."""
        self.batches.append(batch)
        loss = torch.stack([weight.sum() for weight in self.policy.parameters() if weight.requires_grad]).sum()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.policy.parameters(), lr=self.learning_rate)
