"""Which settings make two runs the same run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["BOOKKEEPING", "decisive_settings", "first_difference", "flat_settings", "nested_settings", "shown_settings"]

BOOKKEEPING = frozenset(
    {
        "capture",
        "checkpoint_seconds",
        "data_dir",
        "device",
        "evaluate",
        "evaluate_every",
        "keep_model",
        "low_memory",
        "record_every",
        "stability",
        "threads",
        "trackers",
    }
)
"""Settings of how a run is executed and recorded, which do not tell it from another run."""

FILES = frozenset({"benchmark", "protocol"})


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted name.

    >>> flat_settings({"seed": 0, "method": {"name": "er", "alpha": 0.0}})
    {'seed': 0, 'method.name': 'er', 'method.alpha': 0.0}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat_settings(value) if isinstance(value, Mapping) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": item for key, item in inner.items()}
    return flat


def nested_settings(name: str, value: Any) -> dict[str, Any]:
    """Return a setting of a dotted name as nested settings.

    >>> nested_settings("method.sigma", 50.0)
    {'method': {'sigma': 50.0}}
    """
    first, _, rest = name.partition(".")
    return {first: nested_settings(rest, value) if rest else value}


def decisive_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that identify a run: those of its method by dotted name, options of others as text.

    Files count by name alone, since they may be moved, and plug-ins by name and checksum.

    >>> decisive_settings({"seed": 0, "device": "cuda", "protocol": "/somewhere/ps-emnist.json"})
    {'seed': 0, 'protocol': 'ps-emnist.json'}
    >>> decisive_settings({"method": {"name": "er"}, "optimizer": {"name": "sgd", "momentum": 0.9}})
    {'method.name': 'er', 'optimizer': 'sgd(momentum=0.9)'}
    """
    written = {name: value if name == "method" else _written(name, value) for name, value in settings.items()}
    return {name: value for name, value in flat_settings(written).items() if name not in BOOKKEEPING}


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for readers: those of the method by dotted name, lists and options of others as text.

    What is empty is None.

    >>> augment = ["flip", {"name": "crop", "padding": 2}]
    >>> shown_settings({"method": {"name": "er"}, "augment": augment, "frozen": [], "data": {"size": 8}})
    {'method.name': 'er', 'augment': 'flip, crop(padding=2)', 'frozen': None, 'data': 'size=8'}
    """
    shown = {}
    for name, value in settings.items():
        written = _written(name, value) if isinstance(value, Mapping | list | tuple) and name != "method" else value
        shown[name] = ", ".join(map(str, written)) if isinstance(written, list) else written
    return {name: None if value == "" else value for name, value in flat_settings(shown).items()}


def _written(name: str, value: Any) -> Any:
    if name in FILES and isinstance(value, str):
        return Path(value).name
    if name == "plugins":
        return ", ".join(f"{Path(plugin['name']).name} ({plugin['sha256'][:12]})" for plugin in value)
    if isinstance(value, list | tuple):
        return [_written("", item) for item in value]
    if isinstance(value, Mapping):
        options = ", ".join(f"{key}={item}" for key, item in value.items() if key != "name")
        return f"{value['name']}({options})" if "name" in value else options
    return value


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first decisive setting that differs, with its two values, or None for the same run.

    >>> first_difference({"seed": 0, "method": {"name": "er"}}, {"seed": 0, "method": {"name": "soro"}})
    ('method.name', 'er', 'soro')
    >>> first_difference({"device": "cpu", "protocol": "/here/a.json"}, {"device": "cuda", "protocol": "/there/a.json"})
    """
    first, second = decisive_settings(one), decisive_settings(other)
    for name in second:
        if name in first and first[name] != second[name]:
            return name, first[name], second[name]
    return None
