"""The commands printed in the documentation can be run as they are, in their order."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from spcl.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "protocols.md", DOCS / "results.md"]


def printed_commands(page: Path) -> list[list[str]]:
    """The words of every indented command of a page; a backslash at the end of a line continues it."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in re.findall(r"^    ((?:spcl|curl) .*)$", text, re.MULTILINE)]


HOW_TO = [page for page in sorted((DOCS / "how-to").glob("*.md")) if printed_commands(page)]
by_page = pytest.mark.parametrize("page", [*PAGES, *HOW_TO], ids=lambda page: page.name)


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def parse(command: Any, words: list[str]) -> None:
    """Parse words as the command does, without running it."""
    context = command.make_context("spcl", list(words))
    if words and hasattr(command, "get_command"):
        parse(command.get_command(context, words[0]), words[1:])


@by_page
def test_printed_commands_are_understood(page: Path) -> None:
    group, commands = typer.main.get_command(app), printed_commands(page)
    assert commands
    for words in commands:
        if words[0] == "spcl":
            parse(group, words[1:])


@by_page
def test_files_that_printed_commands_read_are_made_before(page: Path) -> None:
    made: set[str] = set()
    for words in printed_commands(page):
        for name in ("--protocol", "--from", "--data-dir"):
            read = option(words, name)
            assert read is None or read in made, shlex.join(words)
        if words[0] == "curl":
            made.add(Path(words[-1]).name)
        elif target := option(words, "--out"):
            made.add(target)
