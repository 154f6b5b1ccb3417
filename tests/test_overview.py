"""The picture of all methods beside the paper's numbers."""

from pathlib import Path

import numpy as np
import pytest

from spcl.results.figures import FIGURES, MissingRunsError, draw_figure
from spcl.results.records import read_runs
from spcl.results.tables import make_tables
from test_tables_paper import write_paper_runs


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
    with pytest.raises(MissingRunsError, match="soro has variants on ps-emnist with preset default"):
        draw_figure(FIGURES["overview"], read_runs(tmp_path / "a", tmp_path / "b"))
