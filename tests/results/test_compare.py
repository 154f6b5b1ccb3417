"""Runs side by side."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from _runs import write_run
from small_benchmark import small_settings, write_benchmark
from spcl.cli.app import app
from spcl.errors import SpclError
from spcl.results.compare import compare, comparison_table
from spcl.results.records import read_runs
from spcl.runs import execute
from tiny_runs import grid_runs


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def step(condition: float | None, cosine: float) -> str:
    before = {"condition_number": condition, "cosine": cosine, "magnitude_similarity": 0.5}
    return json.dumps({"kind": "step", "before": before, "after": {**before, "condition_number": 1.0}}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "a", method="er", accuracy=70.125)
    write_run(tmp_path / "b", method="soro", accuracy=75.5, forgetting=1.25, method_sigma=100.0)
    write_run(tmp_path / "c", method="soro", accuracy=None, method_sigma=1.0)
    alone = json.dumps({"kind": "step", "before": None, "after": None}) + "\n"
    (tmp_path / "b/metrics.jsonl").write_text(alone + step(10.0, 0.5) + step(None, -0.5) + step(1000.0, 0.3))
    return tmp_path


def test_what_differs_and_what_was_reached(folder: Path) -> None:
    comparison = compare(read_runs(folder))
    assert [run.path.name for run in comparison.runs] == ["a", "c", "b"]
    assert comparison.settings == {"method.name": ["er", "soro", "soro"], "method.sigma": [None, 1.0, 100.0]}
    assert comparison.results == {"accuracy": [70.125, None, 75.5], "forgetting": [-5.0, None, 1.25]}
    assert comparison.tasks == {"task-0": [70.125, None, 75.5]}
    assert comparison.stability["κ before"] == [None, None, pytest.approx(100.0)]
    assert comparison.stability["κ after"] == [None, None, pytest.approx(1.0)]
    assert comparison.stability["cosine before"] == [None, None, pytest.approx(np.mean([0.5, -0.5, 0.3]))]
    with pytest.raises(SpclError, match="no runs to compare"):
        compare([])


def test_the_table_has_a_column_for_each_run(folder: Path) -> None:
    console = Console(file=io.StringIO(), width=300)
    console.print(comparison_table(compare(read_runs(folder))))
    lines = console.file.getvalue().splitlines()
    assert "task-incremental" in lines[0]
    assert next(line for line in lines if "accuracy, %" in line).split()[2:] == ["70.12", "–", "75.5"]
    assert next(line for line in lines if "κ before" in line).split()[-3:] == ["–", "–", "100"]


def test_settings_of_seven_runs_are_named_in_eighty_columns(tmp_path: Path) -> None:
    """On a terminal of 80 columns, every setting that differs is named in full, with the value of every run."""
    names = ["er", "soro", "soro+dbt", "nash-mtl", "mgda", "der++", "pcgrad"]
    for number, name in enumerate(names):
        path = tmp_path / "a-folder-of-runs" / f"{number}"
        write_run(path, method=name, method_logit_weight=number / 8, optimizer={"name": "adam", "eps": number * 1e-7})
    outcome = CliRunner(env={"COLUMNS": "80"}).invoke(
        app, ["compare", *(str(tmp_path / "a-folder-of-runs" / f"{number}") for number in range(7))]
    )
    assert outcome.exit_code == 0, outcome.output
    key, *tables = outcome.output.split("task-incremental")
    assert [line.partition(": ")[0] for line in key.splitlines() if line.strip()] == list("1234567")
    assert max(len(line) for table in tables for line in table.splitlines()) <= 80
    rows: dict[str, list[str]] = {}
    for line in (line for table in tables for line in table.splitlines()):
        name, *values = line.split() or [""]
        rows[name] = rows.get(name, []) + values
    assert rows["method.name"] == names
    assert rows["method.logit_weight"] == ["0", "0.125", "0.25", "0.375", "0.5", "0.625", "0.75"]
    assert len(rows["optimizer.eps"]) == 7


def test_the_command(folder: Path) -> None:
    outcome = CliRunner().invoke(app, ["compare", str(folder / "b"), str(folder / "a")])
    assert outcome.exit_code == 0
    assert outcome.output.index("soro") < outcome.output.index(" er")
    (folder / "a/metrics.jsonl").write_text("{not json\n")
    damaged = CliRunner().invoke(app, ["compare", str(folder / "b"), str(folder / "a")])
    assert isinstance(damaged.exception, SpclError)
    outcome = CliRunner().invoke(app, ["compare", str(folder)])
    assert isinstance(outcome.exception, SpclError)
    assert "is not the folder of one run" in str(outcome.exception)


def test_the_command_draws_the_runs(tmp_path: Path) -> None:
    benchmark = write_benchmark(tmp_path / "data.npz")
    runs = [tmp_path / "er", tmp_path / "soro"]
    for run in runs:
        execute(small_settings(benchmark, method={"name": run.name}), run)
    drawing = tmp_path / "figures" / "compare.png"
    outcome = CliRunner().invoke(app, ["compare", *map(str, runs), "--out", str(drawing)])
    assert outcome.exit_code == 0, outcome.output
    assert drawing.read_bytes().startswith(b"\x89PNG")
    for name, written, sign in (
        ("bare", "bare.png", b"\x89PNG"),
        ("figures", "figures/compare.png", b"\x89PNG"),
        ("new/x.SVG", "new/x.SVG", b"<?xml"),
        ("x.pdf", "x.pdf", b"%PDF"),
    ):
        outcome = CliRunner().invoke(app, ["compare", *map(str, runs), "--out", str(tmp_path / name)])
        assert outcome.exit_code == 0, outcome.output
        assert outcome.output.splitlines()[-1] == str(tmp_path / written)
        assert (tmp_path / written).read_bytes().startswith(sign)


def test_a_file_that_cannot_be_drawn_is_one_clear_error(base: Path, tmp_path: Path) -> None:
    run = grid_runs(base) / "task/er/0"
    (tmp_path / "afile").touch()
    for name, message in (
        ("c.xyz", "written as .png, .svg or .pdf, not as 'c.xyz'"),
        ("afile/c.png", "cannot write to"),
    ):
        outcome = CliRunner().invoke(app, ["compare", str(run), "--out", str(tmp_path / name)])
        assert isinstance(outcome.exception, SpclError)
        assert message in str(outcome.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_duplicates_may_be_compared(tmp_path: Path) -> None:
    for name, accuracy in (("one", 70.0), ("other", 71.0)):
        write_run(tmp_path / name, accuracy=accuracy)
    outcome = CliRunner().invoke(app, ["compare", str(tmp_path / "one"), str(tmp_path / "other")])
    assert outcome.exit_code == 0
    assert "70" in outcome.output
    assert "71" in outcome.output
