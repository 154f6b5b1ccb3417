"""Methods × benchmarks in numbers: means, deviations, ranks, the paper's values and significance."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from spcl.data.catalogue import DATA_SETS
from spcl.errors import SpclError
from spcl.methods import METHODS
from spcl.results.duplicates import check_duplicates
from spcl.results.records import RunRecord
from spcl.results.tables.paper import PaperResult, paper_methods, paper_result
from spcl.results.tables.significance import holm, paired_p_value

__all__ = ["Cell", "Measure", "Over", "ResultTable", "Row", "family_of", "make_tables", "method_order"]

Over = Literal["seeds", "configs"]
"""What the standard deviation is taken over."""

Key = tuple[int, int]
SCENARIOS = ("task", "class")
FAMILIES = ("MTL", "SCL", "PCL")


@dataclass(frozen=True)
class Measure:
    """A mean with its standard deviation (None when there is only one value), and its rank if it is 1 or 2."""

    mean: float
    std: float | None
    rank: int | None = None


@dataclass(frozen=True)
class Cell:
    """One method on one benchmark.

    Attributes:
        accuracy: A, in per cent.
        forgetting: F, in per cent.
        runs: how many complete runs there are.
        missing: how many more the fullest cell of the benchmark has.
        not_finite: in how many of the runs a task was left out of a step, because its loss or gradient was not finite.
        paper: what the paper reports.
        p_value: of the accuracy's difference from the reference method's, corrected for the number of methods.
        gain: the mean of that difference.
    """

    accuracy: Measure
    forgetting: Measure
    runs: int
    missing: int
    not_finite: int = 0
    paper: PaperResult | None = None
    p_value: float | None = None
    gain: float | None = None


@dataclass(frozen=True)
class Row:
    """A method, or a variant of one."""

    label: str
    method: str
    family: str


@dataclass(frozen=True)
class ResultTable:
    """All methods on all benchmarks in one scenario; ``cells`` are found by label and benchmark.

    ``parts`` says of benchmarks whose published data was not all there how much of it was.
    """

    scenario: str
    benchmarks: tuple[str, ...]
    rows: tuple[Row, ...]
    cells: Mapping[tuple[str, str], Cell]
    over: Over
    against: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What the table shows.

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
    def parts_note(self) -> str:
        """Which benchmarks had only a part of the published data; empty if none."""
        return " ".join(f"{name} had only a part of the published data: {part}." for name, part in self.parts.items())

    @property
    def remarks(self) -> list[str]:
        """What is to be known of the numbers, in sentences."""
        incomplete = any(cell.missing for cell in self.cells.values())
        unranked = "Cells with missing runs are not ranked." if incomplete else ""
        return [sentence for sentence in (self.parts_note, unranked, self.not_finite_note) if sentence]

    @property
    def not_finite_note(self) -> str:
        """Which methods left tasks out of steps, and in how many runs; empty if none.

        >>> cell = Cell(Measure(70.0, 1.5), Measure(-2.0, 0.5), runs=3, missing=0, not_finite=2)
        >>> ResultTable("task", ("toy",), (Row("er", "er", "SCL"),), {("er", "toy"): cell}, "seeds").not_finite_note
        'Tasks were left out of steps, because a loss or gradient was not finite, in 2 of 3 runs of er on toy.'
        """
        told = [
            f"{cell.not_finite} of {cell.runs} runs of {row.label} on {benchmark}"
            for benchmark in self.benchmarks
            for row in self.rows
            if (cell := self.cells.get((row.label, benchmark))) and cell.not_finite
        ]
        reason = "because a loss or gradient was not finite"
        return f"Tasks were left out of steps, {reason}, in {', '.join(told)}." if told else ""

    def only(self, benchmark: str) -> "ResultTable":
        """The part that is about one benchmark."""
        rows = tuple(row for row in self.rows if (row.label, benchmark) in self.cells)
        return replace(self, benchmarks=(benchmark,), rows=rows)


def make_tables(
    records: Iterable[RunRecord], over: Over = "seeds", against: str | None = None, paper: bool = False
) -> list[ResultTable]:
    """A table for each scenario among the records.

    As in the paper, a cell holds the mean over seeds of the mean over configurations, and the (sample) standard
    deviation over seeds; ``over="configs"`` exchanges the two. ``against`` names a method that the others are
    compared with, see :func:`spcl.results.tables.significance.paired_p_value`. A run that several sweeps of a grid have
    made counts once, with its mean; other runs that cannot be told apart are an error.
    """
    everything = list(records)
    check_duplicates(everything)
    if against is not None and not any(against in (record.label, record.method) for record in everything):
        found = ", ".join(repr(label) for label in sorted({record.label for record in everything}))
        raise SpclError(f"there are no runs of {against!r} to compare with; there are {found}")
    by_scenario = {name: [record for record in everything if record.scenario == name] for name in SCENARIOS}
    return [_table(name, found, over, against, paper) for name, found in by_scenario.items() if found]


def family_of(method: str) -> str:
    """``MTL``, ``SCL`` or ``PCL`` as in the paper's tables; ``TorchJD`` for the aggregators of that library.

    >>> family_of("er"), family_of("torchjd:UPGrad"), family_of("mine")
    ('SCL', 'TorchJD', 'own')
    """
    if method in METHODS:
        return METHODS[method].family
    return "TorchJD" if method.startswith("torchjd:") else "own"


def method_order(method: str) -> tuple[int, int, str]:
    """Sorts methods as the paper's tables do: by family, then in their order, methods that it lacks at the end.

    >>> sorted(["soro", "torchjd:UPGrad", "er", "mgda"], key=method_order)
    ['mgda', 'er', 'soro', 'torchjd:UPGrad']
    """
    family, known = family_of(method), paper_methods()
    return (
        FAMILIES.index(family) if family in FAMILIES else len(FAMILIES),
        known.index(method) if method in known else len(known),
        method,
    )


def _table(scenario: str, records: Sequence[RunRecord], over: Over, against: str | None, paper: bool) -> ResultTable:
    by_cell: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    for record in records:
        by_cell[record.label, record.benchmark].append(record)
    methods = {record.label: record.method for record in records}
    rows = tuple(
        Row(label, methods[label], family_of(methods[label]))
        for label in sorted(methods, key=lambda label: method_order(methods[label]))
    )
    cells: dict[tuple[str, str], Cell] = {}
    benchmarks = sorted({record.benchmark for record in records})
    for benchmark in benchmarks:
        column = {label: by_cell[label, benchmark] for label in methods if (label, benchmark) in by_cell}
        made = _column(column, over)
        if against is not None:
            made = _with_significance(made, column, against)
        if paper:
            made = {label: _with_paper(cell, column[label][0]) for label, cell in made.items()}
        cells |= {(label, benchmark): cell for label, cell in made.items()}
    parts = {name: part for name in benchmarks if (part := _part(r for r in records if r.benchmark == name))}
    return ResultTable(scenario, tuple(benchmarks), rows, cells, over, against, parts)


def _part(records: Iterable[RunRecord]) -> str:
    """How much of a published data set these runs had; empty if all of it."""
    for record in records:
        data_set = DATA_SETS.get(record.benchmark)
        counts = re.search(r"(\d+) \+ (\d+) samples", str((record.result or {}).get("data")))
        if data_set is None or counts is None:
            continue
        train, test = map(int, counts.groups())
        if record.settings["validation"]:  # then the test samples are held-out training samples
            if train + test != data_set.train:
                return f"{train + test:,} training samples, not {data_set.train:,}"
        elif (train, test) != (data_set.train, data_set.test):
            return (
                f"{train:,} training samples, not {data_set.train:,}, and {test:,} test samples, not {data_set.test:,}"
            )
    return ""


def _column(column: Mapping[str, Sequence[RunRecord]], over: Over) -> dict[str, Cell]:
    """The cells of one benchmark."""
    keys = {(record.config, record.seed) for records in column.values() for record in records}
    wanted = len({config for config, _ in keys}) * len({seed for _, seed in keys})
    cells = {}
    for label, records in column.items():
        accuracy, forgetting = _values(records, "accuracy"), _values(records, "forgetting")
        runs = len(accuracy)
        not_finite = len({(record.config, record.seed) for record in records if record.not_finite})
        cells[label] = Cell(_measure(accuracy, over), _measure(forgetting, over), runs, wanted - runs, not_finite)
    return {label: cell for labels in _evaluated_alike(column) for label, cell in _ranked(cells, labels).items()}


def _evaluated_alike(column: Mapping[str, Sequence[RunRecord]]) -> Iterable[list[str]]:
    """The labels in groups that may be compared: accuracies on held-out training data are not test accuracies."""
    groups: dict[float, list[str]] = defaultdict(list)
    for label, records in column.items():
        groups[records[0].settings["validation"]].append(label)
    return groups.values()


def _values(records: Iterable[RunRecord], name: str) -> dict[Key, float]:
    """A number of every complete run, by configuration and seed."""
    values: dict[Key, list[float]] = defaultdict(list)
    for record in records:
        if record.result is not None:
            values[record.config, record.seed].append(record.result[name])
    return {key: float(np.mean(found)) for key, found in values.items()}


def _measure(values: Mapping[Key, float], over: Over) -> Measure:
    """The mean and deviation over seeds of the mean over configurations, or the other way round.

    >>> _measure({(0, 0): 1.0, (1, 0): 3.0, (0, 1): 5.0, (1, 1): 7.0}, "configs")
    Measure(mean=4.0, std=1.4142135623730951, rank=None)
    """
    groups: dict[int, list[float]] = defaultdict(list)
    for (config, seed), value in values.items():
        groups[seed if over == "seeds" else config].append(value)
    means = [float(np.mean(group)) for group in groups.values()]
    if not means:
        return Measure(float("nan"), None)
    return Measure(float(np.mean(means)), float(np.std(means, ddof=1)) if len(means) > 1 else None)


def _ranked(cells: Mapping[str, Cell], labels: Sequence[str]) -> dict[str, Cell]:
    """These cells with the best and second best marked; an incomplete cell cannot win."""
    complete = {label: cells[label] for label in labels if not cells[label].missing}
    accuracy = _ranks({label: cell.accuracy.mean for label, cell in complete.items()})
    forgetting = _ranks({label: cell.forgetting.mean for label, cell in complete.items()})
    return {
        label: replace(
            cell,
            accuracy=replace(cell.accuracy, rank=accuracy.get(label)),
            forgetting=replace(cell.forgetting, rank=forgetting.get(label)),
        )
        for label, cell in ((label, cells[label]) for label in labels)
    }


def _ranks(means: Mapping[str, float]) -> dict[str, int]:
    """Who is best and second best, if there is anything to compare.

    >>> _ranks({"a": 1.0, "b": 3.0, "c": 2.0})
    {'b': 1, 'c': 2}
    """
    order = sorted(set(means.values()), reverse=True)[:2] if len(means) > 1 else []
    return {label: rank for rank, best in enumerate(order, 1) for label, mean in means.items() if mean == best}


def _with_paper(cell: Cell, record: RunRecord) -> Cell:
    """The cell with the paper's value, which is about parallel training and test data."""
    if record.paradigm != "parallel" or record.settings["validation"]:
        return cell
    return replace(cell, paper=paper_result(record.scenario, record.benchmark, record.method))


def _with_significance(
    cells: Mapping[str, Cell], column: Mapping[str, Sequence[RunRecord]], against: str
) -> dict[str, Cell]:
    """The cells with their difference from the reference method, all p-values of the column corrected together."""
    named = _reference(column, against)
    alike = next((labels for labels in _evaluated_alike(column) if named in labels), [])
    accuracies = {label: _values(column[label], "accuracy") for label in alike}
    reference = accuracies.get(named, {})
    p_values = {
        label: p_value
        for label, values in accuracies.items()
        if values is not reference and (p_value := paired_p_value(values, reference)) is not None
    }
    result = dict(cells)
    for label, p_value in zip(p_values, holm(list(p_values.values())), strict=True):
        values = accuracies[label]
        gain = float(np.mean([values[key] - reference[key] for key in values.keys() & reference.keys()]))
        result[label] = replace(cells[label], p_value=p_value, gain=gain)
    return result


def _reference(column: Mapping[str, Sequence[RunRecord]], against: str) -> str:
    """The label that is meant: itself, or the only variant of a method."""
    if against in column:
        return against
    variants = [label for label, records in column.items() if records[0].method == against]
    if len(variants) > 1:
        raise SpclError(f"{against!r} has variants; compare with one of {', '.join(map(repr, variants))}")
    return variants[0] if variants else against
