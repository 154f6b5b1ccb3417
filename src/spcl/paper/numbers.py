"""The numbers of the paper's Tables 1 and 2, and how runs differ from the paper's."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from spcl.data.catalogue import PRESETS
from spcl.paper.presets import PAPER, released
from spcl.results import Published, PublishedResult, published
from spcl.results.names import display_name, format_ranges, format_value, joined
from spcl.results.records import REQUIRED, CompleteRun, RunRecord, complete_runs
from spcl.runs.settings import BOOKKEEPING, RunSettings

CONFIGURATIONS = tuple(range(9))
"""The configurations of every benchmark of the paper: three label sets with three timelines each."""

TASKS_IN_TEXT = {"ps-cifar100": 20, "ps-tiny-imagenet": 20}
"""The number of tasks that the paper's text gives, where the protocols its authors published have another."""

WITHOUT_BATCH_NORM = frozenset({"mlp"})

NOT_COMPARED = REQUIRED | {"tasks", "protocol", "protocol_seed", "fit", "validation", "precision"}
"""Settings that are not compared by value, or, as the precision, not stated by the paper."""


@published("paper")
class Paper(Published):
    """The paper's Tables 1 and 2."""

    def __init__(self) -> None:
        self.methods = paper_methods()

    def result(self, run: RunRecord) -> PublishedResult | None:
        """Return the paper's result of the run's method; None if it has none or the run solves another problem."""
        return None if _other_problem(run) else paper_result(run.scenario, _benchmark(run), run.recipe)

    def note(self, runs: Sequence[RunRecord]) -> str:
        """Return why the paper has no values for runs on one benchmark, or how they differ from its runs."""
        return paper_note(runs)


def paper_result(scenario: str, benchmark: str, method: str) -> PublishedResult | None:
    """Return the published result of a method on a benchmark, both by the names of this package; None if there is none.

    >>> paper_result("task", "ps-emnist", "soro")
    PublishedResult(accuracy=91.062, accuracy_std=0.447, forgetting=-4.679, forgetting_std=0.425)
    >>> paper_result("task", "ps-glyphs", "soro") is None
    True
    """
    values = _tables().get(method, {}).get(scenario, {}).get(benchmark)
    return PublishedResult(*values) if values else None


def paper_methods() -> list[str]:
    """Return the methods of the paper's tables, in their order.

    >>> paper_methods()[:3]
    ['mgda', 'dwa', 'pcgrad']
    """
    return list(_tables())


@cache
def _benchmarks() -> set[str]:
    """Return the benchmarks of the paper's tables.

    >>> sorted(_benchmarks())
    ['ps-cifar100', 'ps-emnist', 'ps-tiny-imagenet']
    """
    return {name for scenarios in _tables().values() for row in scenarios.values() for name in row}


@cache
def _tables() -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return accuracy and forgetting, each with its deviation, by method, scenario and benchmark."""
    methods: dict[str, dict[str, dict[str, list[float]]]]
    methods = json.loads(files("spcl.paper").joinpath("results.json").read_text(encoding="utf-8"))["methods"]
    return methods


def is_papers_problem(run: RunRecord) -> bool:
    """Return whether the run solves a problem of the paper's tables, by whatever method."""
    return _benchmark(run) in _benchmarks() and not _other_problem(run)


def paper_note(runs: Sequence[RunRecord]) -> str:
    """Return why the paper has no values for runs on one benchmark, or how they differ from its runs; empty if neither.

    >>> from pathlib import Path
    >>> settings = {"benchmark": "ps-emnist", "scenario": "task", "method": {"name": "er"}, "config": 0, "seed": 0}
    >>> settings |= {"paradigm": "parallel", "validation": 0.0, "tasks": 3}
    >>> paper_note([RunRecord(Path(), settings, None)])
    'The paper has no values for ps-emnist with tasks=3 (paper: 5).'
    >>> paper_note([RunRecord(Path(), settings | {"tasks": 5, "batch_size": 8, "fit": True}, None)])
    'Unlike in the paper, ps-emnist was run with timelines rescaled to the data and batch_size=8 (paper: 128).'
    """
    name = runs[0].benchmark
    if _benchmark(runs[0]) not in _benchmarks():
        return f"The paper has no values for {name}."
    sentences = []
    if others := dict.fromkeys(text for run in runs if (text := _other_problem(run))):
        sentences.append(f"The paper has no values for {name} with {joined(list(others), 'or')}.")
    same = [run for run in runs if not _other_problem(run)]
    if any(map(Paper().result, same)):
        if differences := _differences(same):
            sentences.append(f"Unlike in the paper, {name} was run with {joined(differences, 'and')}.")
    elif same:
        methods = list(dict.fromkeys(display_name(run.recipe) for run in same))
        sentences.append(f"The paper has no values for {joined(methods, 'and')} on {name}.")
    return " ".join(sentences)


def _benchmark(run: RunRecord) -> str:
    """Return the benchmark as in the settings, where custom data has a path whatever its name."""
    return str(run.settings["benchmark"])


def _other_problem(run: RunRecord) -> str:
    """Return what makes the run's problem another one than the paper's altogether; empty if nothing does."""
    if run.paradigm != "parallel":
        return f"paradigm={run.paradigm}"
    if run.settings.get("validation"):
        return f"validation={format_value(run.settings['validation'])}"
    preset, tasks = PRESETS.get(_benchmark(run)), _tasks(run)
    if preset is None or tasks in (None, preset.tasks, TASKS_IN_TEXT.get(_benchmark(run))):
        return ""
    return f"tasks={tasks} (paper: {preset.tasks})"


def _tasks(run: RunRecord) -> int | None:
    """Return the number of tasks, which a protocol file decides where there is one; None if unknown."""
    if run.settings.get("protocol") is None:
        return run.settings.get("tasks")
    return len(run.result.tasks) if run.result else None


def _differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return what tells the runs from the paper's: tasks, label sets and timelines, configurations, other settings."""
    drawn = any(run.settings.get("protocol", "") is None for run in runs)
    rescaled = any(run.settings.get("fit") for run in runs)
    reference = _paper_settings(runs[0])
    return [
        *_tasks_in_text(runs),
        *(["drawn label sets and timelines"] if drawn else []),
        *(["timelines rescaled to the data"] if rescaled else []),
        *_differing_configurations(complete_runs(runs)),
        *(text for name, value in reference.items() if (text := _differing_values(runs, name, value))),
    ]


def _tasks_in_text(runs: Sequence[RunRecord]) -> list[str]:
    """Return how many tasks some runs have where that is the number of the paper's text, not of its protocols."""
    stated = TASKS_IN_TEXT.get(_benchmark(runs[0]))
    numbers = [_tasks(run) for run in runs]
    if stated is None or stated not in numbers:
        return []
    published = PRESETS[_benchmark(runs[0])].tasks
    some = " in some runs" if published in numbers else ""
    return [f"{stated} tasks{some}, as in the paper's text (its published protocols: {published})"]


def _paper_settings(run: RunRecord) -> Mapping[str, Any]:
    """Return the settings of the benchmark's preset, ``released`` or ``paper``, and the defaults of the others."""
    preset = PRESETS[_benchmark(run)].model_dump() | PAPER
    unused = {"batch_norm_momentum"} if preset["backbone"] in WITHOUT_BATCH_NORM else set()
    if run.settings.get("preset") == "released":
        preset |= released({"backbone": preset["backbone"], "method": {"name": run.method}})
    defaults = {name: field.get_default(call_default_factory=True) for name, field in RunSettings.model_fields.items()}
    return {
        name: list(value) if isinstance(value := preset.get(name, default), tuple) else value  # as JSON has it
        for name, default in defaults.items()
        if name not in BOOKKEEPING | NOT_COMPARED | unused
    }


def _differing_configurations(runs: Sequence[CompleteRun]) -> list[str]:
    found = sorted({run.config for run in runs})
    if not found or tuple(found) == CONFIGURATIONS:
        return []
    noun = "configuration" if len(found) == 1 else "configurations"
    return [f"{noun} {format_ranges(found)} (paper: {format_ranges(CONFIGURATIONS)})"]


def _differing_values(runs: Sequence[RunRecord], name: str, reference: Any) -> str:
    """Return the values of a setting other than the paper's; empty if there are none."""
    values = [run.settings[name] for run in runs if name in run.settings]
    others = dict.fromkeys(format_value(value) for value in values if value != reference)
    if not others:
        return ""
    some = " in some runs" if any(value == reference for value in values) else ""
    return f"{name}={joined(list(others), 'or')}{some} (paper: {format_value(reference)})"
