"""Which settings make two runs the same run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["BOOKKEEPING", "decisive_settings", "flat_settings"]

BOOKKEEPING = frozenset(
    {
        "capture",
        "checkpoint_seconds",
        "data_dir",
        "device",
        "evaluate",
        "evaluate_every",
        "record_every",
        "stability",
        "threads",
    }
)
"""Settings that say how a run is made and recorded, not what it is."""

FILES = frozenset({"benchmark", "protocol"})


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with dotted names.

    >>> flat_settings({"seed": 0, "method": {"name": "er", "alpha": 0.0}})
    {'seed': 0, 'method.name': 'er', 'method.alpha': 0.0}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat_settings(value) if isinstance(value, Mapping) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": item for key, item in inner.items()}
    return flat


def decisive_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run, by dotted name; of files, which may be moved, only the name counts.

    >>> decisive_settings({"seed": 0, "device": "cuda", "protocol": "/somewhere/ps-emnist.json"})
    {'seed': 0, 'protocol': 'ps-emnist.json'}
    """
    return {
        name: Path(value).name if name in FILES and isinstance(value, str) else value
        for name, value in flat_settings(settings).items()
        if name not in BOOKKEEPING
    }
