"""The paper's values in tables: beside runs of its problem, with what differs, and left out beside others."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from _runs import write_grid, write_run
from spcl.cli.app import app
from spcl.results.records import read_runs
from spcl.results.tables import csv_text, latex_text, make_tables, markdown_text

EMNIST = {
    "protocol": "/somewhere/ps-emnist.json", "fit": False, "tasks": 5, "batch_size": 128, "memory_budget": 310,
    "backbone": "mlp", "learning_rate": 3e-3, "batch_norm_momentum": 0.1, "optimizer": "adam", "memory": "balanced",
}  # fmt: skip


def write_paper_runs(folder: Path, configs: int = 9, method: str = "soro", **settings: object) -> None:
    """Runs like the paper's but for some settings; every result has five tasks."""
    write_grid(folder, {method: lambda c, s: 80.0 + c + s}, configs, seeds=1, **EMNIST | settings)
    for path in folder.rglob("result.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"tasks": {str(task): content["tasks"]["task-0"] for task in range(5)}}))


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({}, ""),
        ({"batch_size": 8}, "batch_size=8 (paper: 128)"),
        ({"plugins": [], "augment": [], "frozen": []}, ""),
        ({"augment": ["flip"]}, "augment=['flip'] (paper: [])"),
        ({"protocol": None}, "drawn label sets and timelines"),
        ({"fit": True}, "timelines rescaled to the data"),
        ({"configs": 1}, "configuration 0 (paper: 0–8)"),
        ({"configs": 4, "memory_budget": 0}, "configurations 0–3 (paper: 0–8) and memory_budget=0 (paper: 310)"),
        ({"backbone": "cnn", "optimizer": "sgd"}, "backbone=cnn (paper: mlp) and optimizer=sgd (paper: adam)"),
    ],
)
def test_what_differs_from_the_paper_is_said_beside_its_values(
    tmp_path: Path, settings: dict[str, object], difference: str
) -> None:
    write_paper_runs(tmp_path, **settings)
    (table,) = make_tables(read_runs(tmp_path), paper=True)
    note = f"Unlike in the paper, ps-emnist was run with {difference}." if difference else ""
    assert table.cells["soro", "ps-emnist"].paper is not None
    assert table.remarks == ([note] if note else [])
    assert next(csv.DictReader(io.StringIO(csv_text([table]))))["paper_note"] == note
    for form in ("terminal", "markdown", "latex"):
        outcome = CliRunner().invoke(app, ["table", str(tmp_path), "--paper", "--format", form])
        said = " ".join(outcome.output.replace("\\", "").replace("--", "–").split())
        assert "91.06" in said
        assert note in said
        assert ("Unlike in the paper" in said) == bool(note)
    (plain,) = make_tables(read_runs(tmp_path))
    assert plain.remarks == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"protocol": None, "tasks": 3}, " with tasks=3 (paper: 5)"),
        ({"paradigm": "joint"}, " with paradigm=joint"),
        ({"validation": 0.2}, " with validation=0.2"),
        ({"benchmark": "ps-glyphs"}, ""),
        ({"benchmark": "/my/own/ps-emnist"}, ""),
    ],
)
def test_another_problem_has_no_paper_columns_and_the_reason_is_said(
    tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    write_paper_runs(tmp_path, **settings)
    (table,) = make_tables(read_runs(tmp_path), paper=True)
    assert all(cell.paper is None for cell in table.cells.values())
    text = markdown_text(table)
    assert "paper A %" not in text
    assert f"The paper has no values for {table.benchmarks[0]}{reason}." in text


def test_the_number_of_tasks_is_that_of_a_protocol_file(tmp_path: Path) -> None:
    write_paper_runs(tmp_path)
    for path in tmp_path.rglob("result.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"tasks": dict(list(content["tasks"].items())[:2])}))
    (table,) = make_tables(read_runs(tmp_path), paper=True)
    assert table.remarks == ["The paper has no values for ps-emnist with tasks=2 (paper: 5)."]


def test_only_benchmarks_of_the_paper_have_its_columns(tmp_path: Path) -> None:
    write_paper_runs(tmp_path / "emnist")
    write_run(tmp_path / "glyphs", method="graddrop", benchmark="ps-glyphs")
    write_run(tmp_path / "other", method="graddrop", benchmark="ps-cifar100")
    (table,) = make_tables(read_runs(tmp_path), paper=True)
    header = markdown_text(table).splitlines()[2]
    assert header.count("paper") == 2
    assert "ps-emnist paper A %" in header
    assert "The paper has no values for GradDrop on ps-cifar100. " in markdown_text(table)
    assert table.only("ps-glyphs").remarks[0] == "The paper has no values for ps-glyphs."
    assert latex_text(table).count(r"\multicolumn{2}") == 2
    rows = [line for line in latex_text(table).splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in rows[1:]} == {9}


def test_values_in_some_runs_only_are_said_so(tmp_path: Path) -> None:
    write_paper_runs(tmp_path / "one")
    write_paper_runs(tmp_path / "other", method="er", batch_size=16)
    (table,) = make_tables(read_runs(tmp_path), paper=True)
    assert "batch_size=16 in some runs (paper: 128)" in table.paper_notes["ps-emnist"]


def test_twenty_tasks_as_in_the_text_are_the_papers_problem_too(tmp_path: Path) -> None:
    drawn = {"benchmark": "ps-cifar100", "protocol": None, "backbone": "resnet18"}
    write_paper_runs(tmp_path / "20", **drawn, tasks=20)
    (table,) = make_tables(read_runs(tmp_path), paper=True)
    assert table.cells["soro", "ps-cifar100"].paper is not None
    stated = "as in the paper's text (its published protocols: 10)"
    assert f"20 tasks, {stated}, drawn label sets and timelines" in table.remarks[0]
    write_paper_runs(tmp_path / "10", method="er", **drawn, tasks=10)
    (table,) = make_tables(read_runs(tmp_path), paper=True)
    assert f"20 tasks in some runs, {stated}" in table.remarks[0]
    (table,) = make_tables(read_runs(tmp_path / "10"), paper=True)
    assert "paper's text" not in table.remarks[0]
