"""Preset ``plus``: more replay, for any method."""

from collections.abc import Mapping
from typing import Any

__all__ = ["plus_settings"]

PHOTOGRAPHS = frozenset({"ps-cifar100", "ps-tiny-imagenet", "toy-cifar10"})
"""Benchmarks whose images remain what they are when they are shifted and flipped, unlike characters."""

MEMORY_BATCHES = 8
"""As many batches are replayed in an update."""


def plus_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the preset sets beyond that of the benchmark, given the settings without it.

    Each of these is a setting of its own. The loss on memory is left to the method.

    >>> plus_settings({"benchmark": "ps-emnist", "batch_size": 128, "memory_budget": 310, "scenario": "class"})
    {'memory_batch': 1024, 'updates': 3, 'average': 0.995, 'augment': [], 'predict_by': 'class-means'}
    """
    return {
        "memory_batch": MEMORY_BATCHES * settings["batch_size"],
        "updates": 3,
        "average": 0.995,
        "augment": ["crop", "flip"] if settings["benchmark"] in PHOTOGRAPHS else [],
        "predict_by": "class-means" if settings.get("scenario") == "class" and settings["memory_budget"] else "head",
    }
