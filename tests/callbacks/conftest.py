"""A data module that plays the collector: known episodes through a plain sized loader."""

from collections.abc import Callable, Iterator

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from torch import nn

COPIES, STEPS = 2, 4  # of each batch
EPISODE = 6  # frames of each episode: the first ends in the second batch
FRAMES = COPIES * STEPS
SECONDS = ("env_s", "policy_s", "collect_s", "weight_sync_s", "transfer_s", "busy_s")  # each batch takes 1/8, 2/8, ...


class Loader:
    """Collects a batch when its first minibatch is asked for, as `CollectorLoader` does."""

    def __init__(self, length: int, batches: Callable[[], Iterator[TensorDict]]) -> None:
        self._length, self._batches = length, batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TensorDict]:
        return self._batches()


class KnownData(L.LightningDataModule):
    """Copy g is paid (g + 1) a step, so that its episodes return 6 (g + 1): 6 and 12."""

    def __init__(self, batches: int = 5, minibatches: int = 2, budget: bool = True) -> None:
        super().__init__()
        self.rollout_listeners, self.round_listeners = [], []
        self.total_frames = batches * FRAMES if budget else -1
        self.frames_total = 0
        self.copies_total = None  # rows are those of the same env copies in every batch
        self.policy_version = 0
        self.seconds = dict.fromkeys(SECONDS, 0.0)
        self.counts = {"stale_dropped": 0, "workers_alive": 3, "restarts": 1, "queue_fill": 0.25}
        self.collected = 0
        self.fail_at: int | None = None
        self._batches, self._minibatches = batches, minibatches

    def statistics(self) -> dict[str, float]:
        return dict(self.counts)

    def take_replay_use(self) -> None:
        return None

    def train_dataloader(self) -> Loader:
        return Loader(self._batches * self._minibatches, self._train)

    def _train(self) -> Iterator[TensorDict]:
        for _ in range(self._batches):
            if self.collected == self.fail_at:
                raise RuntimeError("the env broke")
            batch = self._collect()
            for _ in range(self._minibatches):
                yield batch.reshape(-1)

    def _collect(self) -> TensorDict:
        steps = torch.arange(self.collected * STEPS, (self.collected + 1) * STEPS)
        done = ((steps + 1) % EPISODE == 0).expand(COPIES, STEPS).unsqueeze(-1)
        first = (steps % EPISODE == 0).expand(COPIES, STEPS).unsqueeze(-1)
        pay = torch.arange(1.0, COPIES + 1).repeat_interleave(STEPS).view(COPIES, STEPS, 1)
        versions = torch.full((COPIES, STEPS), self.policy_version - (self.collected > 0))  # one behind
        batch = TensorDict(
            {"is_init": first, "next": {"reward": pay, "done": done}, "collector": {"policy_version": versions}},
            batch_size=[COPIES, STEPS],
        )
        self.collected += 1
        self.frames_total += FRAMES
        self.counts["stale_dropped"] += 5
        for number, name in enumerate(self.seconds, 1):
            self.seconds[name] += number / 8
        for listener in list(self.rollout_listeners):
            listener(batch)
        self.policy_version += 1
        return batch


class EvaluatedData(KnownData):
    """With two rounds of two episodes each, of 2 and 3 frames."""

    def val_dataloader(self) -> Loader:
        return Loader(2, self._evaluate)

    def test_dataloader(self) -> Loader:
        return Loader(2, self._evaluate)

    def _evaluate(self) -> Iterator[TensorDict]:
        for number in range(2):  # returns 2 and 3, then 4 and 6
            mask = torch.tensor([[True, True, False], [True, True, True]])
            reward = torch.full((2, 3, 1), number + 1.0)
            batch = TensorDict({"next": {"reward": reward}, "collector": {"mask": mask}}, batch_size=[2, 3])
            for listener in list(self.round_listeners):
                listener(batch)
            yield batch


class Learner(L.LightningModule):
    """Has one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: TensorDict, batch_idx: int) -> torch.Tensor:
        return self.weight * batch["next", "reward"].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EvaluatedLearner(Learner):
    """Goes with `EvaluatedData`."""

    def validation_step(self, batch: TensorDict, batch_idx: int) -> None:
        pass

    def test_step(self, batch: TensorDict, batch_idx: int) -> None:
        pass


def make_trainer(folder, *callbacks: Callback, **options) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        **{
            "logger": CSVLogger(folder),
            "max_epochs": 1,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            **options,
        },
    )


@pytest.fixture
def known_data() -> type[KnownData]:
    return KnownData


@pytest.fixture
def evaluated_data() -> type[EvaluatedData]:
    return EvaluatedData


@pytest.fixture
def learner() -> Learner:
    return Learner()


@pytest.fixture
def evaluated_learner() -> EvaluatedLearner:
    return EvaluatedLearner()


@pytest.fixture
def trainer_with(tmp_path) -> Callable[..., L.Trainer]:
    """Make a trainer of some callbacks and options, logging to a CSV file below `tmp_path`."""
    return lambda *callbacks, **options: make_trainer(tmp_path, *callbacks, **options)
