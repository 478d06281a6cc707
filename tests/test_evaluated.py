import pytest
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_collect import CollectorDataModule
from lit_collect.evaluated import EvaluatedDataModule
from lit_collect.testing import CountingEnv

LOADERS = ("val_dataloader", "test_dataloader", "predict_dataloader")


class WithItsOwn(CollectorDataModule):
    def val_dataloader(self):
        return [1, 2, 3]


def data_of(kind=CollectorDataModule, **settings) -> EvaluatedDataModule:
    return kind(CountingEnv, frames_per_batch=8, total_frames=8, num_envs=1, **settings)


def test_loaders_when_there_is_nothing_to_evaluate_then_lightning_sees_none():
    data = data_of(evaluation=None)
    assert not any(is_overridden(name, data) for name in LOADERS)


def test_loaders_when_a_subclass_brings_its_own_then_it_stays():
    data = data_of(WithItsOwn, evaluation=None)
    assert data.val_dataloader() == [1, 2, 3]
    assert not is_overridden("test_dataloader", data)


def test_on_exception_when_closing_fails_too_then_it_only_warns():
    data = data_of()

    def close():
        raise OSError("the pipe is gone")

    data.close = close
    with pytest.warns(UserWarning, match="closing the envs failed too: the pipe is gone"):
        data.on_exception(ValueError("the first"))
