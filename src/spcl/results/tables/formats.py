"""Result tables for the terminal, Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from rich import box
from rich.markup import escape as rich_escape
from rich.table import Table
from rich.text import Text

from spcl.results.tables.entries import headings, notes, row_entries, rows_by_family
from spcl.results.tables.methods import display_name
from spcl.results.tables.table import Cell, ResultTable

__all__ = ["TableFormat", "csv_text", "format_tables", "latex_text", "markdown_text", "terminal_table"]

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
        title=table.title,
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
        f"### {table.title}",
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
    return re.sub(r"([\\|*_<>`])", r"\\\1", text)


def latex_text(table: ResultTable) -> str:
    """Return the table in LaTeX, for the package booktabs."""
    columns = {name: headings(table, name) for name in table.benchmarks}
    groups = [rf"\multicolumn{{{len(names)}}}{{c}}{{{_latex_escape(name)}}}" for name, names in columns.items()]
    names = [_latex_escape(heading) for headings_of_one in columns.values() for heading in headings_of_one]
    lines = [
        rf"% {table.title}",
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
    return _replaced(text, LATEX_ESCAPES)


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
                    writer.writerow([*known, *_csv_cell(table, cell), note, cell.config_p_value, cell.step_time])
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
