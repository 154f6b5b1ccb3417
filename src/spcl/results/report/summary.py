"""What was run, and with which settings, for the report."""

from collections.abc import Sequence
from dataclasses import dataclass

from spcl.methods import METHODS
from spcl.results.formatting import format_value
from spcl.results.grouping import group_by
from spcl.results.records import RunRecord, complete_runs
from spcl.results.tables.methods import display_name, method_order
from spcl.runs.identity import shown_settings
from spcl.runs.settings import RunSettings

__all__ = ["BenchmarkSummary", "Setting", "common_settings", "differing_settings", "summarise"]


@dataclass(frozen=True)
class BenchmarkSummary:
    """The runs on one benchmark in one scenario, in numbers."""

    benchmark: str
    scenario: str
    methods: list[str]
    configs: list[int]
    seeds: list[int]
    complete: int
    unfinished: int
    seconds: float


@dataclass(frozen=True)
class Setting:
    """A setting, its values among the runs, and its description."""

    name: str
    values: list[str]
    description: str


def summarise(runs: Sequence[RunRecord]) -> list[BenchmarkSummary]:
    """Return a summary for each benchmark and scenario."""
    groups = group_by(runs, lambda run: (run.benchmark, run.scenario))
    return [_summary(benchmark, scenario, group) for (benchmark, scenario), group in groups.items()]


def common_settings(runs: Sequence[RunRecord]) -> list[Setting]:
    """Return the settings, apart from those of methods, that have one value in all runs."""
    return [setting for setting in _settings(runs) if len(setting.values) == 1 and "." not in setting.name]


def differing_settings(runs: Sequence[RunRecord]) -> list[Setting]:
    """Return the settings that have several values."""
    return [setting for setting in _settings(runs) if len(setting.values) > 1]


def _summary(benchmark: str, scenario: str, runs: Sequence[RunRecord]) -> BenchmarkSummary:
    complete = complete_runs(runs)
    return BenchmarkSummary(
        benchmark=benchmark,
        scenario=scenario,
        methods=[display_name(name) for name in sorted({run.method for run in runs}, key=method_order)],
        configs=sorted({run.config for run in runs}),
        seeds=sorted({run.seed for run in runs}),
        complete=len(complete),
        unfinished=len(runs) - len(complete),
        seconds=sum(run.result.seconds.get("training", 0.0) for run in complete),
    )


def _settings(runs: Sequence[RunRecord]) -> list[Setting]:
    values: dict[str, dict[str, None]] = {}
    descriptions: dict[str, str] = {}
    for run in runs:
        for name, value in shown_settings(run.settings).items():
            values.setdefault(name, {})["–" if value is None else format_value(value)] = None
            descriptions.setdefault(name, _description(name, run.method))
    return [Setting(name, list(found), descriptions[name]) for name, found in values.items()]


def _description(name: str, method: str) -> str:
    inner = name.removeprefix("method.")
    if inner == name:
        fields = RunSettings.model_fields
    else:
        fields = METHODS[method].Settings.model_fields if method in METHODS else {}
    return fields[inner].description or "" if inner in fields else ""
