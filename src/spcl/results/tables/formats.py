"""Result tables for the terminal, Markdown, LaTeX and CSV."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from rich import box
from rich.markup import escape as rich_escape
from rich.table import Table
from rich.text import Text

from spcl._util.text import csv_cell, printable
from spcl.results.names import display_name
from spcl.results.tables.build import Cell, Measure, ResultTable, Row
from spcl.results.tables.significance import SIGNIFICANT

# -- entries

Style = Callable[[str, int | None], str]
"""A function that marks a number by its rank: best, second best or neither."""


def headings(table: ResultTable, benchmark: str) -> list[str]:
    """Return the headings of the columns of a benchmark."""
    cells = [cell for (_, name), cell in table.cells.items() if name == benchmark]
    paper, by_config = any(cell.paper for cell in cells), any(cell.config_p_value is not None for cell in cells)
    return [
        "A %",
        "F %",
        *(["paper A %", "paper F %"] if paper else []),
        *([f"p vs {display_name(table.against)}"] if table.against else []),
        *(["p over configs"] if by_config else []),
        *(["ms/step"] if table.time else []),
    ]


def notes(table: ResultTable, best: str, second: str, escape: Callable[[str], str]) -> str:
    """Return the sentences below a table: its marks, its remarks and its significance test."""
    measure = table.measure if table.measure == "accuracy" else f"{table.measure} (accuracy, R² or F1)"
    sentences = [f"A is the final {measure}, F the forgetting (higher is better). Best {best}, second best {second}."]
    if any(cell.paper and cell.accuracy.std is not None for cell in table.cells.values()):
        sentences.append("Deviations divide by n - 1; those of the paper by n, which makes them smaller.")
    sentences += map(escape, table.remarks)
    if table.against:
        sentences += _significance_notes(table, escape(display_name(table.against)))
    if table.time:
        sentences.append(
            "ms/step: milliseconds of a training step without evaluation, median over the runs, which may have shared "
            "a machine."
        )
    return " ".join(sentences)


def _significance_notes(table: ResultTable, reference: str) -> list[str]:
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
    entries = [accuracy + (f" ({cell.missing} missing)" if cell.missing else ""), _measure(cell.forgetting, style)]
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
        entries.append(_significance(cell))
    if "p over configs" in columns:
        entries.append("" if cell.config_p_value is None else _p_text(cell.config_p_value))
    if table.time:
        entries.append("–" if cell.step_time is None else f"{cell.step_time:.1f}")
    return entries


def _measure(measure: Measure, style: Style) -> str:
    return style(_number(measure.mean, measure.std), measure.rank)


def _number(mean: float, std: float | None) -> str:
    if math.isnan(mean):
        return "–"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _significance(cell: Cell) -> str:
    if cell.p_value is None or cell.gain is None:
        return ""
    mark = ("▲" if cell.gain > 0 else "▼") if _is_significant(cell.p_value, cell.config_p_value) else ""
    return f"{_p_text(cell.p_value)} {mark}".strip()


def _is_significant(p_value: float, config_p_value: float | None) -> bool:
    """Return whether both tests find a difference; with one seed they are the same test.

    >>> _is_significant(0.001, None), _is_significant(0.001, 0.004), _is_significant(0.001, 0.055)
    (True, True, False)
    """
    return p_value < SIGNIFICANT and (config_p_value is None or config_p_value < SIGNIFICANT)


def _p_text(p_value: float) -> str:
    return "<0.001" if p_value < 0.001 else f"{p_value:.3f}"


# -- formats

TableFormat = Literal["terminal", "markdown", "latex", "csv"]

CSV_COLUMNS = (
    *("scenario", "benchmark", "method", "type", "over"),
    *("accuracy", "accuracy_std", "accuracy_rank", "forgetting", "forgetting_std", "forgetting_rank"),
    *("runs", "missing", "not_finite"),
    *("paper_accuracy", "paper_accuracy_std", "paper_forgetting", "paper_forgetting_std"),
    *("against", "gain", "p_value"),
    "paper_note",
    "config_p_value",
    "ms_per_step",
)

LATEX_ESCAPES = {sign: f"\\{sign}" for sign in "#$%&_{}"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
}
LATEX_SIGNS = {"±": r"$\pm$", "<": "$<$", "▲": r"$\uparrow$", "▼": r"$\downarrow$", "–": "--"}


# -- terminal


def terminal_table(table: ResultTable, styled: bool = True) -> Table:
    """Return the table for the terminal; without styles, ¹ and ² mark the best and second best."""
    style = _terminal_style if styled else _plain_style
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


def _terminal_style(text: str, rank: int | None) -> str:
    return {1: f"[bold]{text}[/]", 2: f"[underline]{text}[/]"}.get(rank or 0, text)


def _plain_style(text: str, rank: int | None) -> str:
    return text + {1: "¹", 2: "²"}.get(rank or 0, "")


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
        [_markdown_escape(display_name(row.label)), row.family, *row_entries(table, row, _markdown_style)]
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


def _markdown_style(text: str, rank: int | None) -> str:
    return {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(rank or 0, text)


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
            entries = map(_latex_symbols, row_entries(table, row, _latex_style))
            lines.append(rf"{' & '.join([_latex_escape(display_name(row.label)), row.family, *entries])} \\")
    legend = _replaced(notes(table, r"\textbf{bold}", r"\underline{underlined}", _latex_escape), LATEX_SIGNS)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\par{{\footnotesize {legend}}}"]) + "\n"


def _latex_style(text: str, rank: int | None) -> str:
    return {1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}.get(rank or 0, text)


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
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        for benchmark in table.benchmarks:
            note = table.paper_notes.get(benchmark)
            for row in table.rows:
                if cell := table.cells.get((row.label, benchmark)):
                    known = (table.scenario, benchmark, row.label, row.family)
                    values = [*known, *_csv_cell(table, cell), note, cell.config_p_value, cell.step_time]
                    writer.writerow(map(csv_cell, values))
    return file.getvalue()


def _csv_cell(table: ResultTable, cell: Cell) -> list[object]:
    paper = cell.paper
    published = [paper.accuracy, paper.accuracy_std, paper.forgetting, paper.forgetting_std] if paper else [None] * 4
    return [
        table.over,
        *(value for measure in (cell.accuracy, cell.forgetting) for value in (measure.mean, measure.std, measure.rank)),
        cell.runs,
        cell.missing,
        cell.runs_with_skips,
        *published,
        table.against,
        cell.gain,
        cell.p_value,
    ]
