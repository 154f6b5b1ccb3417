"""Settings in which runs on the same benchmark differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from spcl.results.grouping import group_by
from spcl.runs.identity import decisive_settings

__all__ = ["IDENTITY", "find_variants"]

IDENTITY = frozenset({"benchmark", "scenario", "method.name", "config", "seed"})
"""Settings that every table and figure shows by itself."""

USUAL_VALUES = {"paradigm": "parallel", "validation": 0.0}
"""Settings that belong to the variant exactly where they have another value than this."""


def find_variants(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each run, given by its settings, those that tell it from the other runs on its benchmark.

    They are the settings of its method in which the runs of this method differ, options of its loss on memory among
    them, and the other settings in which any runs differ.

    >>> a = {"benchmark": "b", "method": {"name": "soro", "sigma": 1.0}, "seed": 0}
    >>> b = {"benchmark": "b", "method": {"name": "soro", "sigma": 9.0}, "seed": 1}
    >>> find_variants([a, b])
    [{'method.sigma': 1.0}, {'method.sigma': 9.0}]
    """
    flat = [decisive_settings(settings) for settings in runs]
    of_benchmark = {
        key: _differing(members) - USUAL_VALUES.keys() for key, members in group_by(flat, _benchmark).items()
    }
    of_method = {key: _differing(members) for key, members in group_by(flat, _benchmark_and_method).items()}
    of_recipe = {key: _differing(members) for key, members in group_by(flat, _benchmark_and_recipe).items()}
    return [
        {
            name: value
            for name, value in settings.items()
            if name in of_method[_benchmark_and_method(settings)] | of_recipe[_benchmark_and_recipe(settings)]
            or (name in of_benchmark[_benchmark(settings)] and not name.startswith("method."))
            or USUAL_VALUES.get(name, value) != value
        }
        for settings in flat
    ]


def _benchmark(settings: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the benchmark, and whether the preset is ``plus``, which the name of a method says."""
    return str(settings["benchmark"]), settings.get("preset") == "plus"


def _benchmark_and_method(settings: Mapping[str, Any]) -> tuple[str, bool, str]:
    return *_benchmark(settings), str(settings["method.name"])


def _benchmark_and_recipe(settings: Mapping[str, Any]) -> tuple[str, bool, str, str]:
    return *_benchmark_and_method(settings), str(settings.get("method.replay_loss"))


def _differing(members: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the settings that all members have, but not all with the same value."""
    first, *others = members
    shared = [name for name in first if name not in IDENTITY and all(name in other for other in others)]
    return {name for name in shared if any(other[name] != first[name] for other in others)}
