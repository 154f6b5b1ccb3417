"""Figures of sweeps: error bars of several seeds only, and captions that count the runs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer

from _runs import write_run
from spcl.results.figures import FIGURES, Drawing, draw_figure
from spcl.results.records import read_runs

SEEDS, CONFIGS = 3, 2


def write_memory(folder: Path, seeds: int) -> None:
    for method in ("er", "soro"):
        for budget in (5, 10):
            write_point(folder / f"{method}-{budget}", seeds, method=method, memory_budget=budget)


def write_hyperparameters(folder: Path, seeds: int) -> None:
    for sigma in (1.0, 10.0):
        write_point(folder / f"{sigma}", seeds, method="soro", method_sigma=sigma, method_iterations=100)
    write_point(folder / "strict", seeds, method="soro", method_sigma=10.0, method_iterations=0)


def write_paradigms(folder: Path, seeds: int) -> None:
    for paradigm in ("parallel", "joint", "serial"):
        write_point(folder / paradigm, seeds, paradigm=paradigm)


def write_point(folder: Path, seeds: int, **settings: object) -> None:
    for config in range(CONFIGS):
        for seed in range(seeds):
            write_run(folder / f"{config}/{seed}", config=config, seed=seed, accuracy=70.0 + seed, **settings)


SWEEPS: dict[str, Callable[[Path, int], None]] = {
    "rehearsal": write_memory,
    "hyperparameters": write_hyperparameters,
    "paradigms": write_paradigms,
}


def drawn(name: str, folder: Path) -> Drawing:
    return draw_figure(FIGURES[name], read_runs(folder))


def bars(drawing: Drawing) -> list[ErrorbarContainer]:
    figure = drawing.figure
    panels = [*figure.axes, *(axes for part in figure.subfigs for axes in part.axes)]
    return [item for axes in dict.fromkeys(panels) for item in axes.containers if isinstance(item, ErrorbarContainer)]


def lengths(container: ErrorbarContainer) -> list[float]:
    """The length of every drawn error bar."""
    segments = [segment for lines in container[2] for segment in lines.get_segments()]
    return [float(np.ptp(np.asarray(segment)[:, 1])) for segment in segments if len(segment)]


@pytest.mark.parametrize("name", SWEEPS)
def test_several_seeds_have_a_deviation(name: str, tmp_path: Path) -> None:
    SWEEPS[name](tmp_path, SEEDS)
    drawing = drawn(name, tmp_path)
    assert "mean and standard deviation over 3 seeds." in drawing.caption
    assert "missing" not in drawing.caption
    assert bars(drawing)
    for container in bars(drawing):
        found = lengths(container)
        assert found == pytest.approx([2.0] * len(container[0].get_xdata()))


@pytest.mark.parametrize("name", SWEEPS)
def test_one_seed_has_no_deviation(name: str, tmp_path: Path) -> None:
    SWEEPS[name](tmp_path, 1)
    drawing = drawn(name, tmp_path)
    assert "one seed." in drawing.caption
    assert "deviation" not in drawing.caption
    assert bars(drawing)
    assert not any(container.has_yerr for container in bars(drawing))


@pytest.mark.parametrize("name", SWEEPS)
def test_missing_runs_are_counted(name: str, tmp_path: Path) -> None:
    SWEEPS[name](tmp_path, SEEDS)
    first = next(path for path in sorted(tmp_path.iterdir()) if path.is_dir() and path.name != "strict")
    (first / "0/0/result.json").unlink()
    assert drawn(name, tmp_path).caption.count(" 1 run is missing.") == 1
    for path in sorted(first.rglob("result.json")):
        if path.parent.name != "2":
            path.unlink()
    drawing = drawn(name, tmp_path)
    assert " 4 runs are missing." in drawing.caption
    assert "mean over 1 to 3 seeds, with the standard deviation where there are several." in drawing.caption
    containers = bars(drawing)
    points = sum(len(container[0].get_xdata()) for container in containers)
    assert sum(len(lengths(container)) for container in containers) == points - 1


def test_a_value_without_any_complete_run_counts_as_missing(tmp_path: Path) -> None:
    write_memory(tmp_path, 1)
    for config in range(CONFIGS):
        write_run(tmp_path / f"er-20/{config}", method="er", config=config, accuracy=None, memory_budget=20)
    drawing = drawn("rehearsal", tmp_path)
    assert " 2 runs are missing." in drawing.caption
    assert [list(container[0].get_xdata()) for container in bars(drawing)] == [[5.0, 10.0], [5.0, 10.0]]


def test_a_run_that_two_sweeps_share_is_missing_once(tmp_path: Path) -> None:
    default = {"method": "soro", "method_iterations": 100, "method_sigma": 10.0, "method_lambda_": 1.0}
    for name, value in (("sigma", 10.0), ("sigma", 20.0), ("lambda_", 1.0), ("lambda_", 2.0)):
        write_point(tmp_path / f"{name}={value:g}", 2, **default | {f"method_{name}": value})
    for folder in ("sigma=10", "lambda_=1"):
        (tmp_path / folder / "0/0/result.json").unlink()
    assert " 1 run is missing." in drawn("hyperparameters", tmp_path).caption


def test_gradients_name_the_seeds_of_every_line(tmp_path: Path) -> None:
    step = '{"kind": "step", "step": 1, "after": {"condition_number": 1, "cosine": 0, "magnitude_similarity": 1}}\n'
    for method, seeds in (("er", 2), ("soro", 1)):
        for seed in range(seeds):
            write_run(tmp_path / f"{method}/{seed}", method=method, seed=seed)
            (tmp_path / f"{method}/{seed}/metrics.jsonl").write_text(step)
    assert "mean over 1 to 2 seeds" in drawn("gradients", tmp_path).caption
