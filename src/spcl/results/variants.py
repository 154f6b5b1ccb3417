"""Settings in which runs on the same benchmark differ."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spcl.results.grouping import group_by
from spcl.runs.identity import decisive_settings

__all__ = ["IDENTITY", "find_variants"]

IDENTITY = frozenset({"benchmark", "scenario", "method.name", "config", "seed"})
"""Settings that every table and figure shows by itself."""

USUAL_VALUES = {"paradigm": "parallel", "validation": 0.0}
"""Settings that belong to the variant exactly where they have another value than this."""

REPEATED = frozenset({"config", "seed"})
"""Settings whose values are repetitions of one variant."""

Settings = Mapping[str, Any]


def find_variants(runs: Sequence[Settings]) -> list[dict[str, Any]]:
    """Return for each run, given by its settings, those that tell it from others on its benchmark and in its scenario.

    They are the settings of its method in which the runs of this method differ, options of its loss on memory among
    them, and the other settings in which any runs differ; without those that have the value of most variants.

    >>> runs = [{"benchmark": "b", "method": {"name": "soro", "sigma": sigma}} for sigma in (1.0, 9.0)]
    >>> find_variants(runs)
    [{'method.sigma': 1.0}, {'method.sigma': 9.0}]
    >>> find_variants([each | {"tasks": tasks} for each in runs for tasks in (5, 5, 5)] + [runs[0] | {"tasks": 9}])[-2:]
    [{'method.sigma': 9.0}, {'tasks': 9}]
    """
    flat = [decisive_settings(settings) for settings in runs]
    of_benchmark = _usual_values(flat, _benchmark)
    of_method, of_recipe = _usual_values(flat, _benchmark_and_method), _usual_values(flat, _benchmark_and_recipe)
    variants = []
    for settings in flat:
        shared = {name: value for name, value in of_benchmark[_benchmark(settings)].items() if "method." not in name}
        own = of_recipe[_benchmark_and_recipe(settings)] | of_method[_benchmark_and_method(settings)]
        usual = shared | own | USUAL_VALUES
        variants.append({name: value for name, value in settings.items() if usual.get(name, value) != value})
    return variants


def _benchmark(settings: Settings) -> tuple[str, str, bool]:
    """Return benchmark and scenario, and whether the preset is ``plus``, which the name of a method says."""
    return str(settings["benchmark"]), str(settings.get("scenario")), settings.get("preset") == "plus"


def _benchmark_and_method(settings: Settings) -> tuple[object, ...]:
    return *_benchmark(settings), str(settings["method.name"])


def _benchmark_and_recipe(settings: Settings) -> tuple[object, ...]:
    return *_benchmark_and_method(settings), str(settings.get("method.replay_loss"))


def _usual_values(runs: Sequence[Settings], key: Callable[[Settings], object]) -> dict[object, dict[str, Any]]:
    """Return by group the settings in which its members differ, each with its usual value."""
    return {group: _usual(members) for group, members in group_by(runs, key).items()}


def _usual(members: Sequence[Settings]) -> dict[str, Any]:
    """Return the settings that all members have, but not all with the same value, each with that of most variants.

    A value that no run has stands for several that are equally frequent, so that every run names its own.
    """
    first, *others = members
    shared = [name for name in first if name not in IDENTITY and all(name in other for other in others)]
    differing = [name for name in shared if any(other[name] != first[name] for other in others)]
    variants = {repr([item for item in member.items() if item[0] not in REPEATED]): member for member in members}
    return {name: _most_frequent([variant[name] for variant in variants.values()]) for name in differing}


def _most_frequent(values: Sequence[Any]) -> Any:
    """Return the most frequent value, or an object that equals none if there are several.

    >>> _most_frequent([3, 1, 1]), _most_frequent([3, 1]) in (3, 1)
    (1, False)
    """
    by_text = {repr(value): value for value in values}
    (text, count), *others = Counter(map(repr, values)).most_common()
    return object() if others and others[0][1] == count else by_text[text]
