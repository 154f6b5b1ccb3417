"""What is committed under results/ can be made again from the records beside it."""

import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spcl.cli.app import app

RESULTS = Path(__file__).resolve().parents[1] / "results"
OVER = {"ps-tiny-imagenet": "configs"}  # has one seed and several configurations; the others have several seeds
FOLDERS = [archive.parent.name for archive in sorted(RESULTS.glob("*/records.tar.gz"))]


@pytest.fixture(params=FOLDERS)
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(RESULTS / request.param / "records.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / str(request.param)


def test_the_table_is_that_of_the_records(records: Path) -> None:
    over = OVER.get(records.name, "seeds")
    made = CliRunner().invoke(app, ["table", str(records), "--paper", "--over", over, "--format", "markdown"])
    assert made.exit_code == 0
    assert made.output.strip() == (RESULTS / records.name / "table.md").read_text(encoding="utf-8").strip()


def test_a_report_needs_no_timelines(tmp_path: Path) -> None:
    with tarfile.open(RESULTS / "ps-cifar100-default" / "records.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    made = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "report.html")])
    assert made.exit_code == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "162 complete runs hold no timeline" in page
