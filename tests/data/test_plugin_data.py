"""Data of a plug-in whose tasks are of several kinds, in every command that takes a benchmark."""

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import spcl.plugins
from small_benchmark import small_settings, write_benchmark
from spcl.cli.app import app
from spcl.models import BACKBONES
from spcl.results.compare import compare, comparison_table
from spcl.results.records import read_runs
from spcl.results.report import write_report
from spcl.runs import execute

DATA = '''
"""A regression, a multi-label source and a classification; and six classes to split."""

import numpy as np

from spcl.data import from_arrays, from_sources
from spcl.plugins import data_set

x = np.random.default_rng(0).normal(size=(60, 5))


@data_set("three-kinds")
def three_kinds():
    """Three sources."""
    light = np.where(x[:, 1] > 0, "red", "green")
    return from_sources({"speed": (x, x[:, 0]), "signs": (x, (x[:, :3] > 0).astype(int)), "light": (x, light)})


@data_set("six-classes")
def six_classes():
    """One set."""
    return from_arrays(x, np.arange(60) % 6)
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "data_of_mine.py"
    path.write_text(DATA)
    return path


def output(*words: object) -> str:
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == 0, outcome.output + str(outcome.exception)
    return outcome.output


def rendered(table: Any) -> str:
    return " ".join(str(cell) for column in table.columns for cell in column.cells)


def test_grids_of_other_kinds_are_task_incremental_and_report_scores(plugin: Path, tmp_path: Path) -> None:
    words = ["--plugin", plugin, "--benchmark", "three-kinds", "--methods", "er", "--configs", "0", "--seeds", "0"]
    words += ["--set", "batch_size=8", "--device", "cpu", "--out", tmp_path / "grid"]
    assert "1 of 1 runs would be made" in output("grid", *words, "--dry-run")
    assert "task/er/config-0/seed-0: score " in output("grid", *words)
    run = tmp_path / "grid/task/er/config-0/seed-0"
    accuracy = json.loads((run / "result.json").read_text())["accuracy"]
    assert f"this run was complete already: score {accuracy:.2f} %" in output("run", "--resume", "--out", run)
    assert "A is the final score (accuracy, R² or F1)" in output("table", tmp_path / "grid", "--format", "markdown")
    compared = compare(read_runs(run))
    assert compared.results["score"] == [accuracy]
    assert "speed, final score, %" in rendered(comparison_table(compared))
    page = write_report([tmp_path / "grid"], tmp_path / "report.html").read_text()
    assert "over sources that share tasks, of the score (accuracy, R² or F1) at the very end" in page
    assert "task-incremental: score at the end" in page


def test_grids_of_classes_have_both_scenarios(plugin: Path, tmp_path: Path) -> None:
    words = ["--plugin", plugin, "--benchmark", "six-classes", "--methods", "er", "--configs", "0", "--seeds", "0"]
    listed = output("grid", *words, "--set", "batch_size=2", "--set", "tasks=3", "--out", "g", "--dry-run")
    assert listed.split()[:2] == ["g/task/er/config-0/seed-0", "g/class/er/config-0/seed-0"]


def test_timelines_and_protocols_know_plugins(plugin: Path, tmp_path: Path) -> None:
    drawn = output("timeline", "--plugin", plugin, "--benchmark", "three-kinds", "--set", "batch_size=8")
    assert "speed (regression)" in drawn
    words = ["--plugin", plugin, "--benchmark", "six-classes"]
    sets = ["--set", "tasks=3", "--set", "batch_size=2"]
    written = output("protocol", *words, *sets, "--out", tmp_path / "protocol.json")
    next_command = written.partition("next: spcl ")[2].split()
    assert next_command[:3] == ["timeline", "--plugin", str(plugin)]
    assert "task-0 (2 classes)" in output(*next_command, "--set", "tasks=3")


def test_the_example_of_the_documentation_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: factory for name, factory in BACKBONES._factories.items() if name != "thin-mlp"}
    monkeypatch.setattr(BACKBONES, "_factories", others)  # where the doctest itself has run before
    examples = doctest.DocTestParser().get_examples(spcl.plugins.__doc__ or "")
    (tmp_path / "documented.py").write_text("".join(example.source for example in examples))
    things = {"plugins": [str(tmp_path / "documented.py")], "backbone": "thin-mlp"}
    settings = small_settings(write_benchmark(tmp_path / "data.npz"), **things, epochs=3, learning_rate=0.01)
    assert execute(settings, tmp_path / "run").accuracy > 75
