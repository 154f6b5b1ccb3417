"""Grids and searches on data whose sources share tasks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from persons import write_persons
from spcl.cli.app import app
from spcl.grids import default_scenarios
from spcl.results.records import read_runs

SMALL = ("--set", "batch_size=8", "--set", "at_once=2", "--device", "cpu")


def invoke(*words: object) -> Any:
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == 0, outcome.output
    return outcome


@pytest.mark.parametrize(("tasks", "expected"), [(1, ["domain"]), (2, ["task", "class"])])
def test_scenarios_are_by_default_those_of_the_data(tmp_path: Path, tasks: int, expected: list[str]) -> None:
    path = write_persons(tmp_path / "persons.npz", tasks=tasks)
    assert default_scenarios({"benchmark": str(path)}) == expected


def test_numbers_in_a_file_are_predicted_task_incrementally(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "car.npz", speed_x=x, speed_y=x[:, 0], sign_x=x, sign_y=[0, 1] * 20)
    assert default_scenarios({"benchmark": str(tmp_path / "car.npz")}) == ["task"]


def test_a_grid_varies_order_and_timeline_of_the_sources(tmp_path: Path) -> None:
    path = write_persons(tmp_path / "persons.npz")
    words = ("--benchmark", path, "--methods", "er", "--scenarios", "domain", "--configs", "0,4", "--seeds", "0")
    invoke("grid", *words, *SMALL, "--jobs", "1", "--out", tmp_path / "grid")
    runs = read_runs(tmp_path / "grid")
    assert [(run.scenario, run.config) for run in runs] == [("domain", 0), ("domain", 4)]
    starts = [next(line for line in run.metrics() if line["kind"] == "start") for run in runs]
    assert starts[0]["tasks"] != starts[1]["tasks"]
    assert all(run.result is not None and run.result.unseen_accuracy is not None for run in runs)
    shown = invoke("table", tmp_path / "grid", "--format", "csv")
    assert "unseen_accuracy" in shown.stdout.splitlines()[0]


def test_a_search_scores_on_held_out_training_samples_of_sources(tmp_path: Path) -> None:
    path = write_persons(tmp_path / "persons.npz")
    search = ("--search", "learning_rate=log:0.001:0.01", "--trials", "1", "--jobs", "1")
    words = ("--benchmark", path, "--method", "er", "--scenario", "domain")
    invoke("tune", *words, *SMALL, *search, "--out", tmp_path / "search")
    (run,) = read_runs(tmp_path / "search")
    assert run.settings["validation"] > 0.0
    assert run.result is not None
    assert run.result.accuracy == pytest.approx(json.loads((tmp_path / "search" / "best.json").read_text())["accuracy"])
