"""Callbacks for a fit that collects its own data."""

from lit_collect.callbacks.episode_log import EpisodeLog
from lit_collect.callbacks.episode_video import EpisodeVideo
from lit_collect.callbacks.learning_curve import LearningCurve
from lit_collect.callbacks.monitor import CollectionMonitor
from lit_collect.callbacks.progress import FrameProgress
from lit_collect.callbacks.weight_sync import WeightSync

__all__ = ["CollectionMonitor", "EpisodeLog", "EpisodeVideo", "FrameProgress", "LearningCurve", "WeightSync"]
