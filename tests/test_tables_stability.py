"""The table of stability against the recorded steps."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from spcl.cli.app import app
from spcl.results.records import read_runs
from tiny_runs import grid_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grid_runs(tmp_path_factory.getbasetemp())


def test_means_over_the_recorded_steps_of_all_runs(folder: Path) -> None:
    made = CliRunner().invoke(app, ["table", str(folder), "--stability"])
    assert made.exit_code == 0
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in made.output.splitlines() if "| SORO |" in line]
    runs = [run for run in read_runs(folder) if run.method == "soro" and run.scenario == "class"]
    steps = [step for run in runs for step in run.metrics() if step["kind"] == "step" and step["before"]]
    assert len(steps) > 10
    ratios = [max(step["norms"].values()) / min(step["norms"].values()) for step in steps]
    expected = [
        np.exp(np.mean(np.log([step[when]["condition_number"] for step in steps]))) for when in ("before", "after")
    ]
    found = [float(number) for number in rows[0][1:]]  # class-incremental comes first
    np.testing.assert_allclose(found[:2], expected, rtol=6e-3)
    assert found[2] == 0.0
    np.testing.assert_allclose(found[5], np.mean([s["before"]["magnitude_similarity"] for s in steps]), rtol=6e-3)
    np.testing.assert_allclose(found[7], np.exp(np.mean(np.log(ratios))), rtol=6e-3)
