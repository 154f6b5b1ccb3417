"""Names of others in a terminal, in LaTeX and in spreadsheets."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from spcl._util.text import PlainConsole, printable
from spcl.cli.app import app
from spcl.results.records import read_runs
from spcl.results.tables import format_tables, make_tables
from tiny_runs import tiny_run

HOSTILE = "=cmd|' /C calc'!A0\x1b]0;title\x07\x1b[2J\x9b31m\n\\input{secret}\u202egnp"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose record names its task, its benchmark and its scenario as an attacker would."""
    folder = tmp_path_factory.mktemp("hostile")
    run = tiny_run(folder, "run", {"name": "er"})
    for name in ("result.json", "settings.json"):
        content = json.loads((run / name).read_text()) | {"benchmark": HOSTILE, "method": {"name": HOSTILE}}
        if name == "result.json":
            content |= {"method": HOSTILE, "tasks": {HOSTILE: next(iter(content["tasks"].values()))}}
        (run / name).write_text(json.dumps(content))
    return run


def has_control(text: str) -> bool:
    return any((ord(each) < 32 and each != "\n") or 127 <= ord(each) < 160 or each == "\u202e" for each in text)


@pytest.mark.parametrize("form", ["terminal", "markdown", "latex", "csv"])
def test_tables_show_no_control_characters(run: Path, form: str) -> None:
    shown = CliRunner().invoke(app, ["table", str(run), "--format", form])
    assert shown.exit_code == 0, shown.output
    assert "cmd" in shown.output
    assert not has_control(shown.output)


def test_a_name_ends_no_line_of_latex_and_gives_no_command(run: Path) -> None:
    text = format_tables(make_tables(read_runs(run)), "latex")
    assert "secret" in text
    assert not [line for line in text.splitlines() if line.startswith(r"\input")]
    assert r"\input" not in text


def test_a_spreadsheet_computes_no_name(run: Path) -> None:
    for row in csv.reader(io.StringIO(format_tables(make_tables(read_runs(run)), "csv"))):
        assert not [cell for cell in row if cell.startswith(("=", "+", "@", "\t"))], row
    assert "'=cmd" in format_tables(make_tables(read_runs(run)), "csv")


@pytest.mark.parametrize("styled", [True, False])
def test_a_console_shows_text_and_styles_alone(styled: bool) -> None:
    table = Table("name", title=HOSTILE)
    table.add_row(Text(HOSTILE, "bold"))
    for thing in (HOSTILE, Text(HOSTILE, "red"), table):
        shown = {}
        for kind in (PlainConsole, Console):
            console = kind(file=io.StringIO(), force_terminal=styled, markup=False, highlight=False, width=200)
            console.print(thing)
            shown[kind] = console.file.getvalue()
        assert "\x1b]0;" not in shown[PlainConsole]
        assert "\x1b[2J" not in shown[PlainConsole]
        assert "\x9b" not in shown[PlainConsole]
        assert "\x1b]0;" in shown[Console], "or nothing is tested"


def test_what_can_be_shown_stays() -> None:
    for text in ("camera", "Kälte 冷 ±1 – κ → ▲", "e\u0301", "👩\u200d🔧"):
        assert printable(text) == text
