"""Tables of final accuracy and forgetting: built from runs, tested for significance, and written in four formats."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.markup import escape as rich_escape
from rich.table import Table
from rich.text import Text

from spcl._util.text import csv_cell, printable
from spcl.data.catalogue import DATA_SETS
from spcl.errors import SpclError
from spcl.results.names import (
    Published,
    PublishedResult,
    display_name,
    family_of,
    format_count,
    format_value,
    joined,
    method_order,
    published_for,
)
from spcl.results.records import USUAL_VALUES, CompleteRun, RunRecord, check_duplicates, complete_runs, group_by
from spcl.runs.records import SOURCE_MEASURES, common_measure
from spcl.runs.settings import decisive_settings, with_defaults

# -- the content of a table

Over = Literal["seeds", "configs"]
"""What the standard deviation is taken over."""


@dataclass(frozen=True)
class Measure:
    """A mean with its standard deviation (None for a single value), and its rank if it is 1 or 2."""

    mean: float
    std: float | None
    rank: int | None = None


@dataclass(frozen=True)
class Cell:
    """The results of one method on one benchmark.

    Attributes:
        accuracy: A, in per cent.
        forgetting: F, in per cent; never ranked, since a task that was learned badly has little to lose.
        anytime: accuracy at any time, in per cent; None where a run has not recorded it.
        of_sources: the measures of sources that all runs have, by their names in :data:`SOURCE_MEASURES`.
        runs: the number of complete runs.
        missing: the number of runs that other methods have on the benchmark, but not this one.
        runs_with_skips: the number of runs in which a task was skipped in a step, because its loss or gradient was not
            finite.
        paper: the published result.
        p_value: of the accuracy's difference from the reference method's, corrected for the number of methods.
        gain: the mean of that difference.
        config_p_value: of the test on the means of the configurations, not corrected; None with one seed, where it is
            the same test.
        pairs: the number of runs that the reference method has with the same configuration and seed.
        step_time: the median over runs of the time of a training step, in milliseconds; None where it is not recorded.
    """

    accuracy: Measure
    forgetting: Measure
    runs: int
    missing: int
    anytime: Measure | None = None
    of_sources: Mapping[str, Measure] = field(default_factory=dict)
    runs_with_skips: int = 0
    paper: PublishedResult | None = None
    p_value: float | None = None
    config_p_value: float | None = None
    gain: float | None = None
    pairs: int | None = None
    step_time: float | None = None


@dataclass(frozen=True)
class Row:
    """A method, or a variant of one."""

    label: str
    method: str
    family: str


@dataclass(frozen=True)
class ResultTable:
    """All methods on all benchmarks in one scenario.

    Attributes:
        scenario: ``task``, ``class`` or ``domain`` (incremental).
        benchmarks: the benchmarks, by name.
        rows: the methods.
        cells: the results by label and benchmark.
        over: what the standard deviation is taken over.
        against: the reference method of the significance tests.
        partial_data: the benchmarks whose published data was incomplete, and how much of it there was.
        usual_settings: the benchmarks with variants of methods, and the settings that rows do not name.
        paper_notes: the benchmarks whose runs are not like the paper's, and in what they differ.
        measure: what A is the mean of: accuracy, or score where tasks have other metrics.
        time: whether the time of a training step is shown.
    """

    scenario: str
    benchmarks: tuple[str, ...]
    rows: tuple[Row, ...]
    cells: Mapping[tuple[str, str], Cell]
    over: Over
    against: str | None = None
    partial_data: Mapping[str, str] = field(default_factory=dict)
    usual_settings: Mapping[str, str] = field(default_factory=dict)
    paper_notes: Mapping[str, str] = field(default_factory=dict)
    measure: str = "accuracy"
    time: bool = False

    @property
    def title(self) -> str:
        """The heading of the table.

        >>> cell = Cell(Measure(70.0, 1.5), Measure(-2.0, 0.5), runs=3, missing=0)
        >>> ResultTable("task", (), (), {("er", "ps-emnist"): cell}, "seeds").title
        'task-incremental, mean ± standard deviation over seeds'
        >>> ResultTable("task", (), (), {}, "seeds").title
        'task-incremental, one seed'
        """
        if all(cell.accuracy.std is None for cell in self.cells.values()):
            return f"{self.scenario}-incremental, one {'seed' if self.over == 'seeds' else 'configuration'}"
        return f"{self.scenario}-incremental, mean ± standard deviation over {self.over}"

    @property
    def remarks(self) -> list[str]:
        """Sentences about partial data, settings, differences from the paper, missing runs, skips and few pairs."""
        parts = [f"{name} had only a part of the published data: {part}." for name, part in self.partial_data.items()]
        parts += [*self.usual_settings.values(), *self.paper_notes.values()]
        if any(cell.missing for cell in self.cells.values()):
            parts.append("Cells with missing runs are not ranked.")
        return [*parts, *([self.skips_note] if self.skips_note else []), *self._pairs_notes()]

    @property
    def skips_note(self) -> str:
        """Say in how many runs of each method tasks were skipped; empty if in none.

        >>> cell = Cell(Measure(70.0, 1.5), Measure(-2.0, 0.5), runs=3, missing=0, runs_with_skips=2)
        >>> ResultTable("task", ("toy",), (Row("er", "er", "SCL"),), {("er", "toy"): cell}, "seeds").skips_note
        'Tasks were skipped in steps, because a loss or gradient was not finite, in 2 of 3 runs of ER on toy.'
        """
        counts = [
            f"{cell.runs_with_skips} of {cell.runs} runs of {display_name(row.label)} on {benchmark}"
            for benchmark in self.benchmarks
            for row in self.rows
            if (cell := self.cells.get((row.label, benchmark))) and cell.runs_with_skips
        ]
        reason = "because a loss or gradient was not finite"
        return f"Tasks were skipped in steps, {reason}, in {', '.join(counts)}." if counts else ""

    def _pairs_notes(self) -> list[str]:
        """Return a sentence for each benchmark with too few pairs of runs for any significant difference.

        >>> cell = Cell(Measure(70.0, 1.5), Measure(-2.0, 0.5), runs=3, missing=0, p_value=0.25, pairs=3)
        >>> ResultTable("task", ("toy",), (), {("er", "toy"): cell}, "seeds")._pairs_notes()
        ['Too few pairs of runs on toy for any p below 0.05: 3 pairs, but it takes 6.']
        """
        notes = []
        for benchmark in self.benchmarks:
            cells = [cell for (_, name), cell in self.cells.items() if name == benchmark]
            pairs = [cell.pairs for cell in cells if cell.pairs is not None]
            if pairs and max(pairs) < (needed := pairs_needed(max(1, sum(count > 0 for count in pairs)))):
                found = f"{format_count(pairs, 'pair')}, but it takes {needed}"
                notes.append(f"Too few pairs of runs on {benchmark} for any p below {SIGNIFICANT}: {found}.")
        return notes

    def only(self, benchmark: str) -> "ResultTable":
        """Return the part about one benchmark."""
        return replace(
            self,
            benchmarks=(benchmark,),
            rows=tuple(row for row in self.rows if (row.label, benchmark) in self.cells),
            partial_data={name: text for name, text in self.partial_data.items() if name == benchmark},
            usual_settings={name: text for name, text in self.usual_settings.items() if name == benchmark},
            paper_notes={name: text for name, text in self.paper_notes.items() if name == benchmark},
        )


# -- construction

SCENARIOS = ("task", "class", "domain")

Column = Mapping[str, Sequence[RunRecord]]
"""The runs on one benchmark, by label."""


def make_tables(
    records: Iterable[RunRecord],
    over: Over = "seeds",
    against: str | None = None,
    paper: bool = False,
    time: bool = False,
) -> list[ResultTable]:
    """Return a table for each scenario.

    As in the paper, a cell holds the mean over seeds of the mean over configurations, and the (sample) standard
    deviation over seeds; ``over="configs"`` exchanges the two. ``against`` names a method that the others are
    compared with, see :func:`spcl.results.tables.paired_p_value`. ``paper`` adds the paper's values,
    ``time`` the time of a step. A run that several sweeps of a grid have
    in common counts once, with its mean; other duplicates are an error.
    """
    everything = list(records)
    check_duplicates(everything)
    reference = None if against is None else _known_name(against, everything)
    by_scenario = group_by(everything, attrgetter("scenario"))
    tables = [_table(name, by_scenario[name], over, reference, paper) for name in SCENARIOS if name in by_scenario]
    return [replace(table, time=time) for table in tables]


def _known_name(against: str, records: Sequence[RunRecord]) -> str:
    """Return the label or method that ``against`` names in any case, since tables show display names."""
    known = {name.lower(): name for record in records for name in (record.label, record.recipe)}
    if against.lower() not in known:
        found = ", ".join(repr(label) for label in sorted({record.label for record in records}))
        raise SpclError(f"there are no runs of {against!r} to compare with; there are {found}")
    return known[against.lower()]


def _table(scenario: str, records: Sequence[RunRecord], over: Over, against: str | None, paper: bool) -> ResultTable:
    methods = {record.label: record.recipe for record in records}
    rows = tuple(
        Row(label, methods[label], family_of(methods[label]))
        for label in sorted(methods, key=lambda label: method_order(methods[label]))
    )
    by_benchmark = group_by(records, attrgetter("benchmark"))
    benchmarks = tuple(sorted(by_benchmark))
    cells: dict[tuple[str, str], Cell] = {}
    publications = {name: published_for(by_benchmark[name]) if paper else None for name in benchmarks}
    for benchmark in benchmarks:
        column = group_by(by_benchmark[benchmark], attrgetter("label"))
        for label, cell in _cells(column, over, against, publications[benchmark]).items():
            cells[label, benchmark] = cell
    partial = {name: text for name in benchmarks if (text := partial_data(complete_runs(by_benchmark[name])))}
    usual_settings = {name: text for name in benchmarks if (text := usual_settings_note(by_benchmark[name]))}
    paper_notes = {
        name: text
        for name, published in publications.items()
        if published is not None and (text := published.note(by_benchmark[name]))
    }
    measure_name = common_measure(record.result for record in records)
    notes = (partial, usual_settings, paper_notes)
    return ResultTable(scenario, benchmarks, rows, cells, over, against, *notes, measure_name)


# -- cells

Values = Mapping[tuple[int, int], float]
"""A number of every complete run, by configuration and seed."""


def _cells(column: Column, over: Over, against: str | None, published: Published | None) -> dict[str, Cell]:
    """Return the cells of one benchmark by label."""
    expected = expected_runs(record for records in column.values() for record in records)
    unranked = {label: _cell(complete_runs(records), expected, over) for label, records in column.items()}
    cells = {label: cell for labels in _comparable(column) for label, cell in _ranked(unranked, labels).items()}
    if against is not None:
        cells = _with_significance(cells, column, against)
    if published is not None:
        cells = {label: replace(cell, paper=published.result(column[label][0])) for label, cell in cells.items()}
    return cells


def _cell(runs: Sequence[CompleteRun], expected: int, over: Over) -> Cell:
    accuracy = mean_values(runs, "accuracy")
    at_any_time = bool(runs) and all(run.result.anytime is not None for run in runs)
    of_sources = [name for name in SOURCE_MEASURES if runs and all(name in run.result.of_sources for run in runs)]
    with_skips = {(run.config, run.seed) for run in runs if run.has_skipped_steps}
    return Cell(
        measure(accuracy, over),
        measure(mean_values(runs, "forgetting"), over),
        runs=len(accuracy),
        missing=expected - len(accuracy),
        anytime=measure(mean_values(runs, "anytime"), over) if at_any_time else None,
        of_sources={name: measure(mean_values(runs, name), over) for name in of_sources},
        runs_with_skips=len(with_skips),
        step_time=median_step_time(runs),
    )


def _comparable(column: Column) -> Iterable[list[str]]:
    """Return the labels in groups of comparable ones: accuracies on held-out training data are not test accuracies."""
    return group_by(column, lambda label: column[label][0].settings.get("validation")).values()


def _ranked(cells: Mapping[str, Cell], labels: Sequence[str]) -> dict[str, Cell]:
    """Return these cells with the best and second best accuracies marked; cells with missing runs are not ranked."""
    complete = {label: cells[label] for label in labels if not cells[label].missing}
    final = _ranks({label: cell.accuracy.mean for label, cell in complete.items()})
    anytime = _ranks({label: cell.anytime.mean for label, cell in complete.items() if cell.anytime})
    ranked = {}
    for label in labels:
        cell = cells[label]
        cell = replace(cell, accuracy=replace(cell.accuracy, rank=final.get(label)))
        ranked[label] = replace(cell, anytime=cell.anytime and replace(cell.anytime, rank=anytime.get(label)))
    return ranked


def _ranks(means: Mapping[str, float]) -> dict[str, int]:
    """Return ranks 1 and 2 by label; none where there is only one label.

    >>> _ranks({"a": 1.0, "b": 3.0, "c": 2.0})
    {'b': 1, 'c': 2}
    """
    order = sorted(set(means.values()), reverse=True)[:2] if len(means) > 1 else []
    return {label: rank for rank, best in enumerate(order, 1) for label, mean in means.items() if mean == best}


def _with_significance(cells: Mapping[str, Cell], column: Column, against: str) -> dict[str, Cell]:
    """Return the cells with their difference from the reference, all p-values of the column corrected together."""
    chosen = _reference(column, against)
    comparable = next((labels for labels in _comparable(column) if chosen in labels), [])
    accuracies = {label: mean_values(complete_runs(column[label]), "accuracy") for label in comparable}
    reference = accuracies.pop(chosen, {})
    pairs = {label: values.keys() & reference.keys() for label, values in accuracies.items()}
    p_values = {
        label: p_value
        for label, values in accuracies.items()
        if (p_value := paired_p_value(values, reference)) is not None
    }
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    result = dict(cells)
    for label, values in accuracies.items():
        differences = [values[key] - reference[key] for key in pairs[label]]
        gain = float(np.mean(differences)) if differences else None
        result[label] = replace(
            cells[label],
            p_value=corrected.get(label),
            config_p_value=configuration_p_value(values, reference),
            gain=gain,
            pairs=len(differences),
        )
    return result


def _reference(column: Column, against: str) -> str:
    """Return the label that ``against`` names: itself, or the only variant of a method."""
    if against in column:
        return against
    variants = [label for label, records in column.items() if records[0].recipe == against]
    if len(variants) > 1:
        raise SpclError(f"{against!r} has variants; compare with one of {', '.join(map(repr, variants))}")
    return variants[0] if variants else against


# -- averages


def expected_runs(records: Iterable[RunRecord]) -> int:
    """Return the number of runs that each method needs to have all configurations and seeds among the records."""
    keys = {(record.config, record.seed) for record in records}
    return len({config for config, _ in keys}) * len({seed for _, seed in keys})


def mean_values(runs: Iterable[CompleteRun], name: str) -> Values:
    """Return a field of the results by configuration and seed; runs that share both count with their mean."""
    groups = group_by(runs, attrgetter("config", "seed"))
    return {key: float(np.mean([getattr(run.result, name) for run in group])) for key, group in groups.items()}


def median_step_time(runs: Iterable[CompleteRun]) -> float | None:
    """Return the median over runs of the milliseconds of a training step; None if no run has recorded its time."""
    recorded = [(run.result.seconds.get("training"), run.result.steps) for run in runs]
    times = [1e3 * seconds / steps for seconds, steps in recorded if seconds is not None and steps]
    return float(np.median(times)) if times else None


def measure(values: Values, over: Over) -> Measure:
    """Return the mean and deviation over seeds of the mean over configurations, or the other way round.

    >>> measure({(0, 0): 1.0, (1, 0): 3.0, (0, 1): 5.0, (1, 1): 7.0}, "configs")
    Measure(mean=4.0, std=1.4142135623730951, rank=None)
    >>> measure({(0, 0): 1.0, (1, 0): 3.0}, "seeds")
    Measure(mean=2.0, std=None, rank=None)
    """
    groups = group_by(values, itemgetter(1 if over == "seeds" else 0))
    means = [float(np.mean([values[key] for key in group])) for group in groups.values()]
    if not means:
        return Measure(float("nan"), None)
    return Measure(float(np.mean(means)), float(np.std(means, ddof=1)) if len(means) > 1 else None)


# -- notes on the data and on settings

LARGEST_DENOMINATOR = 10


def partial_data(runs: Iterable[CompleteRun]) -> str:
    """Return how much of a published data set these runs had; empty if all of it."""
    for run in runs:
        published, data = DATA_SETS.get(run.benchmark), run.result.data
        if published is None or data is None:
            continue
        found = {"training": (data.train, published.train), "test": (data.test, published.test)}
        if run.settings.get("validation"):  # then the test samples are held-out training samples
            found = {"training": (data.train + data.test, published.train)}
        parts = [f"{own:,} {kind} samples, not {whole:,}" for kind, (own, whole) in found.items() if own != whole]
        if parts:
            return ", and ".join(parts)
    return ""


def data_share(run: CompleteRun) -> str:
    """Return the share of a published data set that a run trained on in a few words, and empty where it is unknown."""
    published, data = DATA_SETS.get(run.benchmark), run.result.data
    if published is None or data is None:
        return ""
    if data.train != published.train:
        return f"{_share(data.train / published.train)} of the data"
    if data.test != published.test:
        return f"{_share(data.test / published.test)} of the tests"
    return "all data"


def _share(share: float) -> str:
    """Return a share as the nearest simple fraction, or in per cent.

    >>> _share(116_323 / 697_932), _share(0.12), _share(0.66)
    ('1/6', '1/8', '66 %')
    """
    simple = Fraction(share).limit_denominator(LARGEST_DENOMINATOR)
    return str(simple) if simple.numerator == 1 < simple.denominator else f"{100 * share:.0f} %"


def usual_settings_note(runs: Sequence[RunRecord]) -> str:
    """Return, for runs on one benchmark, the values that rows of methods with variants do not name; empty if none.

    >>> from pathlib import Path
    >>> settings = {"benchmark": "toy", "scenario": "task", "method": {"name": "spcl", "kappa": 2.0}}
    >>> other = RunRecord(Path(), settings | {"method": {"name": "spcl", "kappa": 1.0}}, None, {"method.kappa": 1.0})
    >>> usual_settings_note([RunRecord(Path(), settings, None), other])
    'Rows of SPCL on toy have kappa=2 where they name no other value.'
    """
    by_recipe = group_by(runs, lambda run: display_name(run.recipe))
    named = {recipe: joined(texts, "and") for recipe, group in by_recipe.items() if (texts := _usual_settings(group))}
    sentences = [
        f"Rows of {joined(recipes, 'and')} on {runs[0].benchmark} have {text} where they name no other value."
        for text, recipes in group_by(named, lambda recipe: named[recipe]).items()
    ]
    return " ".join(sentences)


def _usual_settings(runs: Sequence[RunRecord]) -> list[str]:
    """Return the settings of runs of one method that only its other runs name."""
    names = {name for run in runs for name in run.variant if name not in USUAL_VALUES}
    values: dict[str, Any] = {}
    for run in runs:
        settings = decisive_settings(with_defaults(run.settings))
        values |= {name: settings[name] for name in names if name not in run.variant and name in settings}
    return sorted(f"{name.removeprefix('method.')}={format_value(value)}" for name, value in values.items())


# -- paired significance tests

SIGNIFICANT = 0.05
"""The level of significance."""

DECIMALS = 9
"""Differences that agree to this many decimals are equal but for rounding."""


def paired_p_value(ours: Mapping[Any, float], theirs: Mapping[Any, float]) -> float | None:
    """Return the two-sided p-value of Wilcoxon's signed-rank test on the values that share a key, None if none do.

    The keys are configuration and seed: two runs that share them train on the same tasks at the same times in the same
    order, so their difference is free of the variation between configurations, by far the largest. Ranks rather than a
    t-test, because differences of accuracies are neither normal nor of equal variance over configurations.

    >>> a = {seed: 80.0 + seed for seed in range(8)}
    >>> paired_p_value(a, {seed: value - 1.0 - 0.1 * seed for seed, value in a.items()})
    0.0078125
    """
    common = ours.keys() & theirs.keys()
    if not common:
        return None
    return _signed_rank_p_value(np.round([ours[key] - theirs[key] for key in common], DECIMALS))


def configuration_p_value(
    ours: Mapping[tuple[int, int], float], theirs: Mapping[tuple[int, int], float]
) -> float | None:
    """Return the p-value of the same test on the means of the configurations, None if none has several seeds.

    Runs of one configuration share tasks and timeline, so that their differences are not independent: the test on all
    pairs overstates the evidence. This one has a pair for each configuration, and may miss what there is: of the nine
    of the paper's protocols, no p-value is below 2/2⁹ = 0.004, of five none below 0.06.

    >>> a = {(config, seed): 80.0 + config + seed for config in range(5) for seed in range(3)}
    >>> configuration_p_value(a, {key: value - 1.0 - 0.1 * key[0] for key, value in a.items()})
    0.0625
    """
    common = ours.keys() & theirs.keys()
    configs = {config for config, _ in common}
    if len(common) == len(configs):
        return None
    means = [
        {config: float(np.mean([values[key] for key in common if key[0] == config])) for config in configs}
        for values in (ours, theirs)
    ]
    return paired_p_value(*means)


def pairs_needed(comparisons: int) -> int:
    """Return the number of pairs from which on a corrected p-value can be significant.

    The smallest p-value of n pairs, whose differences all have one sign, is 2 / 2ⁿ; Holm's method multiplies it by the
    number of comparisons.

    >>> pairs_needed(1), pairs_needed(14)
    (6, 10)
    """
    pairs = 1
    while comparisons * 2.0 ** (1 - pairs) >= SIGNIFICANT:
        pairs += 1
    return pairs


def _signed_rank_p_value(differences: NDArray[np.float64]) -> float:
    """Return the exact p-value where all signs are equally likely; differences of zero do not count.

    SciPy's own test is exact only where no two differences are equal.

    >>> _signed_rank_p_value(np.array([1.0, 1.0, 1.0, 2.0, 0.0]))
    0.125
    """
    from scipy.stats import rankdata  # slow to import

    differences = differences[differences != 0.0]
    ranks = np.rint(2.0 * rankdata(np.abs(differences))).astype(int)  # doubled, because equal ones share half ranks
    chances = np.ones(1)  # the probability of every sum of the ranks of positive differences
    for rank in ranks:
        without, plus = np.pad(chances, (0, rank)), np.pad(chances, (rank, 0))
        chances = (without + plus) / 2.0
    found = ranks[differences > 0.0].sum()
    return min(1.0, 2.0 * float(min(chances[: found + 1].sum(), chances[found:].sum())))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down method, in their order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    count = len(p_values)
    corrected = [0.0] * count
    highest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        highest = max(highest, min(1.0, (count - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


# -- entries

Style = Callable[[str, int | None], str]
"""A function that marks a number by its rank: best, second best or neither."""


ANYTIME = "any time A %"
"""The heading of accuracy at any time."""


def _marks(best: str, second: str) -> Style:
    """Return the style that puts the best and second best into these templates.

    >>> _marks("*{}*", "_{}_")("1.5", 1), _marks("*{}*", "_{}_")("1.5", None)
    ('*1.5*', '1.5')
    """
    return lambda text, rank: {1: best, 2: second}.get(rank or 0, "{}").format(text)


TERMINAL, PLAIN = _marks("[bold]{}[/]", "[underline]{}[/]"), _marks("{}¹", "{}²")
MARKDOWN, LATEX = _marks("**{}**", "<u>{}</u>"), _marks(r"\textbf{{{}}}", r"\underline{{{}}}")


def source_measures(table: ResultTable, benchmark: str) -> list[str]:
    """Return the measures of sources that some method has on a benchmark, by name."""
    cells = [cell for (_, name), cell in table.cells.items() if name == benchmark]
    return [name for name in SOURCE_MEASURES if any(name in cell.of_sources for cell in cells)]


def headings(table: ResultTable, benchmark: str) -> list[str]:
    """Return the headings of the columns of a benchmark."""
    cells = [cell for (_, name), cell in table.cells.items() if name == benchmark]
    paper, by_config = any(cell.paper for cell in cells), any(cell.config_p_value is not None for cell in cells)
    return [
        "A %",
        *([ANYTIME] if any(cell.anytime for cell in cells) else []),
        "F %",
        *(SOURCE_MEASURES[name].heading for name in source_measures(table, benchmark)),
        *(["paper A %", "paper F %"] if paper else []),
        *([f"p vs {display_name(table.against)}"] if table.against else []),
        *(["p over configs"] if by_config else []),
        *(["ms/step"] if table.time else []),
    ]


def notes(table: ResultTable, best: str, second: str, escape: Callable[[str], str]) -> str:
    """Return the sentences below a table: its marks, its remarks and its significance test."""
    measure = table.measure if table.measure == "accuracy" else f"{table.measure} (accuracy, R² or F1)"
    sentences = [
        f"A is the final {measure}; F, the forgetting, has no best: what was learned badly has little to lose. "
        f"Best A {best}, second best {second}."
    ]
    if any(cell.anytime for cell in table.cells.values()):
        sentences.append(f"Any time A is the mean over the run of the mean {table.measure} of the tasks seen so far.")
    shown = {name: None for benchmark in table.benchmarks for name in source_measures(table, benchmark)}
    for each in (SOURCE_MEASURES[name] for name in shown):
        sentences.append(f"{each.short.capitalize()} A is {each.meaning.format(table.measure)}.")
    if any(cell.paper and cell.accuracy.std is not None for cell in table.cells.values()):
        sentences.append("Deviations divide by n - 1; the paper divides by n, which makes its deviations smaller.")
    sentences += map(escape, table.remarks)
    if table.against:
        sentences += significance_notes(table, escape(display_name(table.against)))
    if table.time:
        sentences.append(
            "ms/step: milliseconds of a training step without evaluation, median over the runs, which may have shared "
            "a machine."
        )
    return " ".join(sentences)


def significance_notes(table: ResultTable, reference: str) -> list[str]:
    """Return what the p-values and their marks mean."""
    test = f"p: Wilcoxon signed-rank test of A against {reference}, paired by configuration and seed, Holm-corrected"
    if all(cell.config_p_value is None for cell in table.cells.values()):
        return [f"{test}; ▲ better, ▼ worse at p < {SIGNIFICANT}."]
    return [
        f"{test}.",
        "Runs of one configuration are not independent; p over configs is that of the same test on the means of the "
        "configurations, not corrected, and at least 0.004 for nine configurations, 0.06 for five.",
        f"▲ better, ▼ worse where both are below {SIGNIFICANT}.",
    ]


def row_entries(table: ResultTable, row: Row, style: Style) -> list[str]:
    """Return the entries of one method in the columns of all benchmarks."""
    return [entry for benchmark in table.benchmarks for entry in _entries(table, row, benchmark, style)]


def rows_by_family(table: ResultTable) -> Iterator[list[Row]]:
    """Yield the rows of each family of methods."""
    for _, rows in groupby(table.rows, key=lambda row: row.family):
        yield list(rows)


def _entries(table: ResultTable, row: Row, benchmark: str, style: Style) -> list[str]:
    """Return the entries of one method in the columns of one benchmark."""
    cell = table.cells.get((row.label, benchmark))
    columns = headings(table, benchmark)
    if cell is None:
        return [""] * len(columns)
    accuracy = _measure(cell.accuracy, style)
    entries = [accuracy + (f" ({cell.missing} missing)" if cell.missing else "")]
    if ANYTIME in columns:
        entries.append(_measure(cell.anytime, style) if cell.anytime else "–")
    entries.append(_measure(cell.forgetting, style))
    found = [cell.of_sources.get(name) for name in source_measures(table, benchmark)]
    entries += [_measure(each, style) if each else "–" for each in found]
    if "paper A %" in columns:
        published = cell.paper
        entries += (
            [
                _number(published.accuracy, published.accuracy_std),
                _number(published.forgetting, published.forgetting_std),
            ]
            if published
            else ["", ""]
        )
    if table.against:
        entries.append(significance_text(cell))
    if "p over configs" in columns:
        entries.append(p_text(cell.config_p_value))
    if table.time:
        entries.append("–" if cell.step_time is None else f"{cell.step_time:.1f}")
    return entries


def _measure(measure: Measure, style: Style) -> str:
    return style(_number(measure.mean, measure.std), measure.rank)


def _number(mean: float, std: float | None) -> str:
    if math.isnan(mean):
        return "–"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def significance_text(cell: Cell) -> str:
    """Return the p-value of a cell, with a mark where the difference is significant; empty if there is none."""
    if cell.p_value is None or cell.gain is None:
        return ""
    mark = ("▲" if cell.gain > 0 else "▼") if _is_significant(cell.p_value, cell.config_p_value) else ""
    return f"{p_text(cell.p_value)} {mark}".strip()


def _is_significant(p_value: float, config_p_value: float | None) -> bool:
    """Return whether both tests find a difference; with one seed they are the same test.

    >>> _is_significant(0.001, None), _is_significant(0.001, 0.004), _is_significant(0.001, 0.055)
    (True, True, False)
    """
    return p_value < SIGNIFICANT and (config_p_value is None or config_p_value < SIGNIFICANT)


def p_text(p_value: float | None) -> str:
    """Return a p-value with three decimals.

    >>> p_text(0.0123), p_text(0.0001), p_text(None)
    ('0.012', '<0.001', '')
    """
    if p_value is None:
        return ""
    return "<0.001" if p_value < 0.001 else f"{p_value:.3f}"


# -- formats

TableFormat = Literal["terminal", "markdown", "latex", "csv"]

CSV_ANYTIME = ("anytime", "anytime_std", "anytime_rank")
"""The columns that are left out where no run has recorded its accuracy at any time."""

LATEX_ESCAPES = {sign: f"\\{sign}" for sign in "#$%&_{}"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
}
LATEX_SIGNS = {"±": r"$\pm$", "<": "$<$", "▲": r"$\uparrow$", "▼": r"$\downarrow$", "–": "--"}


# -- terminal


def terminal_table(table: ResultTable, styled: bool = True) -> Table:
    """Return the table for the terminal; without styles, ¹ and ² mark the best and second best."""
    style = TERMINAL if styled else PLAIN
    best, second = style("bold" if styled else "", 1), style("underlined" if styled else "", 2)
    drawn = Table(
        title=Text(table.title),
        caption=Text.from_markup(notes(table, best, second, rich_escape), style="table.caption", emoji=False),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    drawn.add_column("method", no_wrap=True)
    drawn.add_column("type")
    for benchmark in table.benchmarks:
        for heading in headings(table, benchmark):
            drawn.add_column(Text(f"{benchmark}\n{heading}"), justify="right", no_wrap=True)
    for rows in rows_by_family(table):
        for row in rows:
            drawn.add_row(Text(display_name(row.label)), row.family, *row_entries(table, row, style))
        drawn.add_section()
    return drawn


# -- text formats


def format_tables(tables: Sequence[ResultTable], form: Literal["markdown", "latex", "csv"]) -> str:
    """Return the tables as text."""
    if form == "csv":
        return csv_text(tables)
    return "\n".join((markdown_text if form == "markdown" else latex_text)(table) for table in tables)


def markdown_text(table: ResultTable) -> str:
    """Return the table in Markdown."""
    columns = ["method", "type"]
    columns += [f"{name} {heading}" for name in table.benchmarks for heading in headings(table, name)]
    rows = [
        [_markdown_escape(display_name(row.label)), row.family, *row_entries(table, row, MARKDOWN)]
        for row in table.rows
    ]
    lines = [
        f"### {printable(table.title)}",
        "",
        f"| {' | '.join(map(_markdown_escape, columns))} |",
        f"|{'|'.join([':--', ':--', *['--:'] * (len(columns) - 2)])}|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        notes(table, "**bold**", "<u>underlined</u>", _markdown_escape),
    ]
    return "\n".join(lines) + "\n"


def _markdown_escape(text: str) -> str:
    return re.sub(r"([\\|*_<>`])", r"\\\1", printable(text))


def latex_text(table: ResultTable) -> str:
    """Return the table in LaTeX, for the package booktabs."""
    columns = {name: headings(table, name) for name in table.benchmarks}
    groups = [rf"\multicolumn{{{len(names)}}}{{c}}{{{_latex_escape(name)}}}" for name, names in columns.items()]
    names = [_latex_escape(heading) for headings_of_one in columns.values() for heading in headings_of_one]
    lines = [
        rf"% {printable(table.title)}",
        rf"\begin{{tabular}}{{ll{'r' * len(names)}}}",
        r"\toprule",
        rf" & & {' & '.join(groups)} \\",
        rf"Method & Type & {' & '.join(names)} \\",
    ]
    for rows in rows_by_family(table):
        lines.append(r"\midrule")
        for row in rows:
            entries = map(_latex_symbols, row_entries(table, row, LATEX))
            lines.append(rf"{' & '.join([_latex_escape(display_name(row.label)), row.family, *entries])} \\")
    legend = _replaced(notes(table, r"\textbf{bold}", r"\underline{underlined}", _latex_escape), LATEX_SIGNS)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\par{{\footnotesize {legend}}}"]) + "\n"


def _latex_escape(text: str) -> str:
    """Return text whose signs mean nothing to LaTeX.

    >>> print(_latex_escape("my_data~2^3"))
    my\\_data\\textasciitilde{}2\\textasciicircum{}3
    """
    return _replaced(printable(text), LATEX_ESCAPES)


def _latex_symbols(text: str) -> str:
    """Return text with its signs in math mode.

    >>> print(_latex_symbols("-1.50 ± 0.25"), _latex_symbols("<0.001 ▲"))
    $-$1.50 $\\pm$ 0.25 $<$0.001 $\\uparrow$
    """
    return _replaced(text, LATEX_SIGNS | {"-": "$-$"})


def _replaced(text: str, signs: Mapping[str, str]) -> str:
    return "".join(signs.get(character, character) for character in text)


def csv_text(tables: Sequence[ResultTable]) -> str:
    """Return one line for every cell, with all its numbers in full precision."""
    lines = [
        _csv_line(table, benchmark, row, cell)
        for table in tables
        for benchmark in table.benchmarks
        for row in table.rows
        if (cell := table.cells.get((row.label, benchmark)))
    ]
    if all(line["anytime"] is None for line in lines):
        lines = [{name: value for name, value in line.items() if name not in CSV_ANYTIME} for line in lines]
    for name in SOURCE_MEASURES:
        if all(line[name] is None for line in lines):
            lines = [{key: value for key, value in line.items() if key not in (name, f"{name}_std")} for line in lines]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(lines[0] if lines else ())
    writer.writerows(map(csv_cell, line.values()) for line in lines)
    return file.getvalue()


def _csv_of_sources(cell: Cell) -> dict[str, float | None]:
    found = {name: cell.of_sources.get(name) for name in SOURCE_MEASURES}
    values: dict[str, float | None] = {}
    for name, each in found.items():
        values |= {name: None, f"{name}_std": None} if each is None else {name: each.mean, f"{name}_std": each.std}
    return values


def _csv_line(table: ResultTable, benchmark: str, row: Row, cell: Cell) -> dict[str, object]:
    paper, anytime = cell.paper, cell.anytime
    return {
        "scenario": table.scenario,
        "benchmark": benchmark,
        "method": row.label,
        "type": row.family,
        "over": table.over,
        "accuracy": cell.accuracy.mean,
        "accuracy_std": cell.accuracy.std,
        "accuracy_rank": cell.accuracy.rank,
        "forgetting": cell.forgetting.mean,
        "forgetting_std": cell.forgetting.std,
        "runs": cell.runs,
        "missing": cell.missing,
        "not_finite": cell.runs_with_skips,
        "paper_accuracy": paper and paper.accuracy,
        "paper_accuracy_std": paper and paper.accuracy_std,
        "paper_forgetting": paper and paper.forgetting,
        "paper_forgetting_std": paper and paper.forgetting_std,
        "against": table.against,
        "gain": cell.gain,
        "p_value": cell.p_value,
        "paper_note": table.paper_notes.get(benchmark),
        "config_p_value": cell.config_p_value,
        "ms_per_step": cell.step_time,
        "anytime": anytime and anytime.mean,
        "anytime_std": anytime and anytime.std,
        "anytime_rank": anytime and anytime.rank,
        **_csv_of_sources(cell),
    }
