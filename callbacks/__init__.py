"""Keras callbacks that know of more than one rank."""

from distkeras.callbacks._learning_rate import LearningRateSchedule
from distkeras.callbacks._learning_rate import LearningRateWarmup

__all__ = [
    "LearningRateSchedule",
    "LearningRateWarmup",
]
