"""Losses on replayed samples, by name: the first of the choices that make a method."""

from typing import Literal

from spcl.methods.replay.base import LookAhead, ReplayLoss, ReplayOptions, TaskLoss
from spcl.methods.replay.distances import squared_distances
from spcl.methods.replay.edited import EditedSamples, EditOptions
from spcl.methods.replay.labels import Labels
from spcl.methods.replay.logits import LogitOptions, StoredLogits

__all__ = [
    "REPLAY_LOSSES",
    "EditOptions",
    "EditedSamples",
    "Labels",
    "LogitOptions",
    "LookAhead",
    "ReplayLoss",
    "ReplayLossName",
    "ReplayOptions",
    "StoredLogits",
    "TaskLoss",
    "squared_distances",
]

ReplayLossName = Literal["labels", "logits", "edited"]

REPLAY_LOSSES: dict[str, type[ReplayLoss]] = {
    "labels": Labels,
    "logits": StoredLogits,
    "edited": EditedSamples,
}
"""The values of the setting ``replay_loss``."""
