"""The picture of all methods beside the paper's numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_tables_paper import write_paper_runs

from spcl.results.figures import FIGURES, MissingRunsError, draw_figure
from spcl.results.records import read_runs
from spcl.results.tables import make_tables


def test_it_shows_our_means_beside_the_papers(tmp_path: Path) -> None:
    for method in ("er", "soro", "mgda", "emgd"):
        write_paper_runs(tmp_path / method, method=method)
    runs = read_runs(tmp_path)
    drawing = draw_figure(FIGURES["overview"], runs)
    (table,), (axes,) = make_tables(runs, paper=True), drawing.figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["MGDA", "ER", "SORO", "EMGD"]
    (ours,) = (line for line in axes.lines if line.get_label() == "ours, preset default")
    cells = [table.cells[method, "ps-emnist"] for method in ("mgda", "er", "soro", "emgd")]
    np.testing.assert_allclose(sorted(ours.get_xdata()), sorted(cell.accuracy.mean for cell in cells))
    published = [container.lines[0].get_xdata()[0] for container in axes.containers]
    assert sorted(published) == sorted(cell.paper.accuracy for cell in cells if cell.paper)
    assert "Rank correlation with the paper on EMNIST task-incrementally: unknown." in drawing.caption  # all ours agree


def test_runs_of_another_problem_are_left_out_and_variants_are_refused(tmp_path: Path) -> None:
    write_paper_runs(tmp_path / "held-out", validation=0.2)
    with pytest.raises(MissingRunsError, match="none of them is complete and of the paper's problem"):
        draw_figure(FIGURES["overview"], read_runs(tmp_path))
    write_paper_runs(tmp_path / "a")
    write_paper_runs(tmp_path / "b", batch_size=8)
    write_paper_runs(tmp_path / "other", method="emgd", validation=0.2)  # the paper has no value of it anyway
    drawing = draw_figure(FIGURES["overview"], read_runs(tmp_path / "a", tmp_path / "other"))
    assert [text.get_text() for text in drawing.figure.axes[0].get_yticklabels()] == ["SORO"]
    with pytest.raises(MissingRunsError, match="soro has variants on ps-emnist with preset default"):
        draw_figure(FIGURES["overview"], read_runs(tmp_path / "a", tmp_path / "b"))


@pytest.mark.parametrize(
    ("train", "test", "line"),
    [(697_932, 116_323, ""), (116_323, 15_820, "\n1/6 of the data"), (697_932, 58_000, "\n1/2 of the tests")],
)
def test_the_share_of_the_data_stands_in_the_titles(tmp_path: Path, train: int, test: int, line: str) -> None:
    write_paper_runs(tmp_path / "task")
    write_paper_runs(tmp_path / "class", scenario="class")
    for path in (tmp_path / "task").rglob("result.json"):
        data = {"name": "ps-emnist", "train": train, "test": test, "shape": (1, 28, 28), "classes": 62}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"data": data}))
    figure = draw_figure(FIGURES["overview"], read_runs(tmp_path)).figure
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == f"EMNIST\ntask-incr.{line}"
    assert titles[1].strip() == "EMNIST\nclass-incr."  # whose records do not say


def test_the_preset_plus_has_rows_of_its_own(tmp_path: Path) -> None:
    for method in ("er", "der++", "soro", "spcl"):
        write_paper_runs(tmp_path / method, method=method, preset="plus")
    write_paper_runs(tmp_path / "paper", preset="paper")
    (axes,) = draw_figure(FIGURES["overview"], read_runs(tmp_path)).figure.axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert sorted(names) == ["DER+++", "ER+", "SORO", "SORO+", "SPCL+"]
    (plus,) = (line for line in axes.lines if line.get_label() == "ours, preset plus")
    assert sorted(names[int(row)] for row in plus.get_ydata()) == ["DER+++", "ER+", "SORO+", "SPCL+"]
