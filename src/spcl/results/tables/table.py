"""The content of a result table: means, deviations, ranks, the paper's values and significance."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from spcl.results.formatting import format_count
from spcl.results.tables.methods import display_name
from spcl.results.tables.paper import PaperResult
from spcl.results.tables.significance import SIGNIFICANT, pairs_needed

__all__ = ["Cell", "Measure", "Over", "ResultTable", "Row"]

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
        forgetting: F, in per cent.
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
    runs_with_skips: int = 0
    paper: PaperResult | None = None
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
        scenario: ``task`` or ``class`` (incremental).
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
        """In how many runs of which methods tasks were skipped; empty if in none.

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
            needed = pairs_needed(max(1, sum(count > 0 for count in pairs)))
            if pairs and max(pairs) < needed:
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
