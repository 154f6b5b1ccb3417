"""The command ``spcl methods``: the list for a terminal, and the page for the docs."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spcl.cli.app import app
from spcl.methods import METHODS, MethodSettings, aggregators, cost_of
from spcl.methods.reference import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"


def output(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, ["methods", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("columns", [80, 200])
def test_the_list_shows_every_name_family_and_cost_in_one_line(columns: int) -> None:
    lines = output(columns=columns).splitlines()
    assert max(map(len, lines)) <= columns
    for name, method in METHODS.items():
        cost = cost_of(method())
        shown = [
            *(name, method.family, cost.gradients),
            *(cost.gradients_with_stability, str(cost.forwards), cost.memory),
        ]
        pattern = r"\s{2,}".join(re.escape(cell) for cell in shown)
        assert any(re.fullmatch(pattern, line.rstrip()) for line in lines), name


def test_the_list_holds_every_summary_reference_and_aggregator_in_80_columns() -> None:
    text = " ".join(output().split())
    for method in METHODS.values():
        assert f"{method.name} {method.summary} {method.reference}" in text
    assert all(name in text for name in aggregators())


def test_the_committed_page_is_made_from_the_docstrings() -> None:
    made = output("--format", "markdown")
    assert made == PAGE.read_text(encoding="utf-8"), "make it again: spcl methods --format markdown > docs/methods.md"


def test_the_page_has_the_formula_reference_and_settings_of_every_method() -> None:
    sections = dict(re.findall(r"^### `(.+?)`\n(.*?)(?=^##)", output("--format", "markdown"), re.DOTALL | re.MULTILINE))
    assert list(sections) == list(METHODS)
    for name, method in METHODS.items():
        assert "```math\n" in sections[name], name
        assert method.reference.split(",")[0] in sections[name], name
        for setting in method.Settings.model_fields.keys() - MethodSettings.model_fields.keys():
            assert f"| `{setting}` | `{method.Settings.model_fields[setting].default!r}` |" in sections[name], name


def test_the_page_wraps_at_120_columns_but_for_tables() -> None:
    lines = output("--format", "markdown").splitlines()
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))


def test_spans_are_not_broken_when_a_paragraph_is_wrapped() -> None:
    text = markdown("word " * 22 + "and norm :math:`\\|x - y\\|` and ``f(x, y)``, see :class:`~torch.nn.Module`.")
    assert text.splitlines()[1].startswith("$`\\|x - y\\|`$ and `f(x, y)`, see `torch.nn.Module`.")
