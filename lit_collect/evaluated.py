"""`EvaluatedDataModule`: what data modules have in common that play evaluation episodes."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import EVAL_DATALOADERS
from tensordict import TensorDictBase
from typing_extensions import override

from lit_collect.config import EvaluationConfig, RolloutConfig
from lit_collect.envs.factories import EnvSource
from lit_collect.evaluation import Evaluations
from lit_collect.learner import restore_batch_size
from lit_collect.seeding import Placement, Stage

Listener = Callable[[TensorDictBase], None]
_LOADERS = ("val_dataloader", "test_dataloader", "predict_dataloader")


class EvaluatedDataModule(L.LightningDataModule):
    """Validates, tests and predicts with rounds of episodes, and closes all it opened when a stage is over."""

    def __init__(self) -> None:
        super().__init__()
        self.rollout_listeners: list[Listener] = []
        """Called with each whole batch [N, T] that is collected, before it is trained on."""
        self.round_listeners: list[Listener] = []
        """Called with each round of evaluation episodes [B, Tmax]."""
        self._evaluations: Evaluations | None = None

    @override
    def val_dataloader(self) -> EVAL_DATALOADERS:
        """Rounds of evaluation episodes."""
        return self._rounds("validate")

    @override
    def test_dataloader(self) -> EVAL_DATALOADERS:
        """Rounds of evaluation episodes under seeds of their own."""
        return self._rounds("test")

    @override
    def predict_dataloader(self) -> EVAL_DATALOADERS:
        """Rounds of evaluation episodes under seeds of their own."""
        return self._rounds("predict")

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Give TensorDicts back the batch size that some precision plugins take from them, then ask the module."""
        if self.trainer is None:
            return batch
        batch = restore_batch_size(batch, self._sample_dims if self.trainer.training else 2)
        return self.trainer.lightning_module.on_before_batch_transfer(batch, dataloader_idx)

    @override
    def teardown(self, stage: str) -> None:
        """Close everything; a later fit opens it again and goes on counting."""
        self.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Close everything: Lightning calls no teardown after an exception."""
        try:
            self.close()
        except Exception as error:  # the first exception is the one to be seen
            rank_zero_warn(f"closing the envs failed too: {error}")

    @abstractmethod
    def close(self) -> None:
        """Close all envs; may be called again."""

    @property
    @abstractmethod
    def _sample_dims(self) -> int:
        """Batch dimensions of what is trained on."""

    @abstractmethod
    def _place(self, stage: Stage) -> Placement:
        """Whose random numbers a stage draws."""

    def _evaluate(
        self,
        source: EnvSource | None,
        config: EvaluationConfig | None,
        *,
        rollout: RolloutConfig,
        policy: Callable[[], Any],
    ) -> None:
        """Have episodes to play; where there are none, let Lightning see that there is nothing to evaluate.

        Args:
            source: makes the envs; there are none with a live one.
            config: how many episodes, None for none.
            rollout: how actions reach the env.
            policy: gives who acts, when the first round of a stage is played.
        """
        if source is not None and config is not None and not source.live:
            self._evaluations = Evaluations(
                source, config, rollout=rollout, policy=policy, listeners=self.round_listeners
            )
            return
        for name in _LOADERS:
            if getattr(type(self), name) is getattr(EvaluatedDataModule, name):  # a subclass may bring its own
                setattr(self, name, None)

    def _rounds(self, stage: Stage) -> EVAL_DATALOADERS:
        return [] if self._evaluations is None else self._evaluations.loader(self._place(stage))
