"""Preset ``plus``: more replay, for any method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spcl.methods import make_method

__all__ = ["plus_settings"]

PHOTOGRAPHS = frozenset({"ps-cifar100", "ps-tiny-imagenet", "toy-cifar10"})
"""Benchmarks whose images remain what they are when they are shifted and flipped, unlike characters."""


@dataclass(frozen=True)
class Rehearsal:
    """How much is replayed, and how: settings of the run, and of those methods that have them.

    Attributes:
        batches: as many batches of memory are replayed in an update.
        updates: as many are made in a step.
        rate: times the learning rate of the benchmark.
        augment: transforms of all samples.
        class_predictor: what predicts class-incrementally.
        method: settings of the method.
    """

    batches: int
    updates: int
    rate: float
    augment: tuple[str, ...]
    class_predictor: str
    method: Mapping[str, float]


AUGMENTED = Rehearsal(
    batches=4,
    updates=8,
    rate=2.5,
    augment=("crop", "flip"),
    class_predictor="class-means",
    method={"memory_share": 0.5, "logit_weight": 0.2, "finished_weight": 1.0},
)
"""Samples of memory are new ones in every update, and stored logits, which are those of one view, count less.

It was searched before ``finished_weight`` was there.
"""

REPEATED = Rehearsal(
    batches=1,
    updates=3,
    rate=1 / 3,
    augment=(),
    class_predictor="head",
    method={"logit_weight": 2.0},
)
"""The same few samples again and again are learned by heart: shorter updates and stored logits keep from that."""


def plus_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the preset sets beyond that of the benchmark, given the settings without it.

    Each of these is a setting of its own.

    >>> given = {"benchmark": "ps-emnist", "batch_size": 128, "memory_budget": 310, "scenario": "class"}
    >>> plus_settings(given | {"learning_rate": 0.003, "method": {"name": "spcl"}})
    {'memory_batch': 128, 'updates': 3, 'learning_rate': 0.001, 'average': 0.995, 'augment': [], 'predict_by': 'head',
     'method': {'name': 'spcl', 'logit_weight': 2.0}}
    """
    rehearsal = AUGMENTED if settings["benchmark"] in PHOTOGRAPHS else REPEATED
    by_class = settings.get("scenario") == "class" and settings["memory_budget"]
    known = type(make_method(**settings["method"]).settings).model_fields
    return {
        "memory_batch": rehearsal.batches * settings["batch_size"],
        "updates": rehearsal.updates,
        "learning_rate": rehearsal.rate * settings["learning_rate"],
        "average": 0.995,
        "augment": list(rehearsal.augment),
        "predict_by": rehearsal.class_predictor if by_class else "head",
        "method": {
            "name": settings["method"]["name"],
            **{name: value for name, value in rehearsal.method.items() if name in known},
        },
    }
