"""Offline data: what was collected, on disk, and training from it."""

from lit_collect.offline.buffers import offline_buffer
from lit_collect.offline.datamodule import OfflineDataModule

__all__ = ["OfflineDataModule", "offline_buffer"]
