"""The table of stability against the recorded steps."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from _runs import write_run
from spcl.cli.app import app
from spcl.results.compare import stability_text
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
    assert found[3] == 100.0 * np.mean([step["before"]["cosine"] < 0.0 for step in steps])
    np.testing.assert_allclose(found[6], np.mean([s["before"]["magnitude_similarity"] for s in steps]), rtol=6e-3)
    np.testing.assert_allclose(found[8], np.exp(np.mean(np.log(ratios))), rtol=6e-3)


def test_the_share_of_steps_whose_gradients_conflict(tmp_path: Path) -> None:
    write_run(tmp_path, method="er")
    measures = {"condition_number": 1.0, "magnitude_similarity": 1.0}
    cosines = (-0.2, 0.1, 0.0, -0.1)
    steps = [{"kind": "step", "before": measures | {"cosine": cosine}, "after": None} for cosine in cosines]
    steps += [{"kind": "step", "before": None, "after": None}]  # one gradient alone
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    header, row = (
        line.split(" | ") for line in stability_text(read_runs(tmp_path)).splitlines() if line.startswith("| ")
    )
    assert row[header.index("conflicts before, %")] == "50"
