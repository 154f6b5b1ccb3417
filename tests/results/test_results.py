"""What is committed under results/ can be made again from the records beside it."""

import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from spcl.cli.app import app
from spcl.results.compare import stability_text
from spcl.results.figures import FIGURES, draw_figure, save_drawing
from spcl.results.records import RunRecord, read_runs

RESULTS = Path(__file__).resolve().parents[2] / "results"
VARIANTS = (
    "ablation",
    "betas",
    "finished",
    "finished-weight",
    "held-out",
    "hyperparameters",
    "narrow-search",
    "one-change",
    "penalty",
    "plus",
    "plus-ablation",
    "plus-finished",
    "ps-air",
    "ps-intents",
    "ps-wisdm",
    "heads",
    "recipes",
    "rehearsal",
    "rounding",
    "search",
    "search-nine",
    "sensitivity",
    "timelines",
    "toy-cifar10",
    "twenty",
)
ONE_SEED = (
    "ps-tiny-imagenet",
    "ps-emnist-released",
    "ps-emnist-rounding",
    "ps-emnist-one-change",
    "ps-cifar100-released",
    "ps-cifar100-held-out",
    "ps-cifar100-one-change",
    "ps-cifar100-penalty",
    "ps-cifar100-twenty",
    "ps-tiny-imagenet-twenty",
    "ps-emnist-finished-weight",
    "ps-cifar100-finished-weight",
    "ps-cifar100-narrow-search",
    "ps-emnist-search",
    "ps-cifar100-search",
    "ps-cifar100-search-nine",
    "ps-emnist-recipes",
    "ps-emnist-plus-ablation",
    "ps-emnist-plus-search",
    "ps-cifar100-plus",
    "ps-cifar100-plus-search",
    "ps-emnist-sensitivity",
    "toy-cifar10-timelines",
    "ps-wisdm-search",
    "ps-air",
    "ps-intents",
    "ps-intents-finished",
)
OVER = dict.fromkeys(ONE_SEED, "configs")  # the others have several seeds
FOLDERS = [archive.parent.name for archive in sorted(RESULTS.glob("*/records.tar.gz"))]
IDENTIFIER = re.compile(r'(#|id=")[a-z][0-9a-f]{10}\b')  # of clips and markers, by their order in the process
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the records of all grids."""
    base = tmp_path_factory.mktemp("results")
    for name in FOLDERS:
        with tarfile.open(RESULTS / name / "records.tar.gz") as archive:
            archive.extractall(base, filter="data")
    return base


@pytest.mark.parametrize("name", FOLDERS)
def test_the_table_is_that_of_the_records(unpacked: Path, name: str) -> None:
    over = OVER.get(name, "seeds")
    made = CliRunner().invoke(app, ["table", str(unpacked / name), "--paper", "--over", over, "--format", "markdown"])
    assert made.exit_code == 0
    assert made.output.strip() == (RESULTS / name / "table.md").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/stability.md")))
def test_the_stability_is_that_of_the_records(unpacked: Path, name: str) -> None:
    assert stability_text(read_runs(unpacked / name)) == (RESULTS / name / "stability.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_figures_are_those_of_the_records(unpacked: Path, tmp_path: Path, name: str) -> None:
    runs = read_runs(unpacked / name)
    for committed in sorted((RESULTS / name).glob("*.svg")):
        assert_same_drawing(drawn(committed.stem, runs, tmp_path), committed)


def test_the_overview_is_drawn_from_the_records(unpacked: Path, tmp_path: Path) -> None:
    """``spcl figure overview --runs …`` for every folder except held-out data and variants."""
    runs = read_runs(*(unpacked / name for name in FOLDERS if not name.endswith(VARIANTS)))
    assert_same_drawing(drawn("overview", runs, tmp_path), RESULTS / "overview.svg")


def test_the_comparison_is_that_of_the_records(unpacked: Path) -> None:
    folders = [str(unpacked / name) for name in ("ps-emnist", "ps-emnist-rounding")]
    made = subprocess.run(
        [sys.executable, RESULTS / "compare.py", *folders], capture_output=True, text=True, check=True
    )
    _, committed = (RESULTS / "ps-emnist-rounding" / "compared.txt").read_text(encoding="utf-8").split("\n", 1)
    assert made.stdout == committed


def drawn(name: str, runs: Sequence[RunRecord], folder: Path) -> Path:
    """Draw a figure as the command does, and return the SVG file."""
    return next(path for path in save_drawing(draw_figure(FIGURES[name], runs), folder) if path.suffix == ".svg")


def assert_same_drawing(made: Path, committed: Path) -> None:
    """Compare pictures but for rounding."""
    one, other = (IDENTIFIER.sub("", path.read_text(encoding="utf-8")) for path in (made, committed))
    assert NUMBER.sub("0", one) == NUMBER.sub("0", other), committed
    numbers = ([float(number) for number in NUMBER.findall(text)] for text in (one, other))
    np.testing.assert_allclose(*numbers, rtol=1e-4, atol=2e-2, err_msg=str(committed))


def test_a_report_needs_no_timelines(unpacked: Path, tmp_path: Path) -> None:
    runs = len(read_runs(unpacked / "ps-cifar100-default"))
    made = CliRunner().invoke(
        app, ["report", str(unpacked / "ps-cifar100-default"), "--out", str(tmp_path / "report.html")]
    )
    assert made.exit_code == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"{runs} complete runs hold no timeline" in page
