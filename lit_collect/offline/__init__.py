"""Offline data: what was collected, on disk, and training from it."""

from lit_collect.offline.datamodule import OfflineDataModule
from lit_collect.offline.sources import offline_buffer

__all__ = ["OfflineDataModule", "offline_buffer"]
