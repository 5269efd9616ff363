"""Keras callbacks that know of more than one rank."""

from distkeras._consensus import on_rank_zero
from distkeras.callbacks._broadcast import BroadcastVariables
from distkeras.callbacks._broadcast import broadcast_variables
from distkeras.callbacks._checkpoint import Checkpoint
from distkeras.callbacks._learning_rate import LearningRateSchedule
from distkeras.callbacks._learning_rate import LearningRateWarmup

__all__ = [
    "BroadcastVariables",
    "Checkpoint",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "broadcast_variables",
    "on_rank_zero",
]
