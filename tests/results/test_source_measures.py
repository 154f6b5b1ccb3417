"""Measures of runs with several sources, beside A and F: in tables, the report, comparisons and trackers."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_report import Page

from browser import Reader, browser, needs_browser
from persons import PERSONS, persons_settings, write_persons
from small_benchmark import small_settings
from spcl.data import from_sources
from spcl.results.compare import compare, fitting_tables
from spcl.results.records import read_runs
from spcl.results.report import write_report
from spcl.results.tables import csv_text, latex_text, make_tables, markdown_text, terminal_table
from spcl.runs import execute, resolve_settings
from spcl.runs.records import SOURCE_MEASURES, RunResult

HEADINGS = ["at end A %", "worst A %", "unseen A %", "prequential A %", "first batch A %"]


class Notes:
    """A tracker that keeps what it is told at the end."""

    measures: Mapping[str, float]

    def step(self, step: int, values: Mapping[str, Any]) -> None: ...

    def evaluation(self, step: int, accuracies: Mapping[str, float]) -> None: ...

    def result(self, measures: Mapping[str, float]) -> None:
        self.measures = dict(measures)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two methods with two seeds each; the second method did not test batches first."""
    base = tmp_path_factory.mktemp("measures")
    path = write_persons(base / "persons.npz")
    for method, prequential in (("soro", True), ("er", False)):
        for seed in range(2):
            more = {"method": method, "prequential": prequential, "seed": seed}
            execute(persons_settings(path, scenario="domain", **more), base / "runs" / f"{method}-{seed}")
    return base / "runs"


@pytest.fixture(scope="module")
def plain(benchmark: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose sources are tasks."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    execute(small_settings(benchmark), folder)
    return folder


def results(runs: Path, method: str) -> list[RunResult]:
    return [record.result for record in read_runs(runs) if record.method == method and record.result is not None]


def test_a_table_has_the_measures_that_some_run_has(runs: Path) -> None:
    (table,) = make_tables(read_runs(runs))
    assert table.scenario == "domain"
    soro, er = table.cells["soro", "persons"], table.cells["er", "persons"]
    assert list(soro.of_sources) == list(SOURCE_MEASURES)
    assert list(er.of_sources) == ["at_end", "worst", "unseen_accuracy"]
    for name, measure in soro.of_sources.items():
        values = [getattr(result, name) for result in results(runs, "soro")]
        assert measure.mean == pytest.approx(np.mean(values))
        assert measure.std == pytest.approx(np.std(values, ddof=1))
    text = markdown_text(table)
    columns = text.splitlines()[2].strip("| ").split(" | ")
    assert [each for each in columns if each.removeprefix("persons ") in HEADINGS] == [f"persons {h}" for h in HEADINGS]
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    worst = soro.of_sources["worst"]
    assert f"{worst.mean:.2f} ± {worst.std:.2f}" in rows["| SORO"]
    assert rows["| ER"][-2:] == ["–", "– |"]
    assert "Worst A is the final accuracy of the source with the lowest." in text
    assert "unseen A \\%" in latex_text(table)
    console = Console(file=io.StringIO(), width=300)
    console.print(terminal_table(table, styled=False))
    assert "first batch A %" in console.file.getvalue()  # type: ignore[attr-defined]


def test_csv_has_every_measure_in_full(runs: Path) -> None:
    lines = {line["method"]: line for line in csv.DictReader(io.StringIO(csv_text(make_tables(read_runs(runs)))))}
    expected = np.mean([result.unseen_accuracy for result in results(runs, "soro")])
    assert float(lines["soro"]["unseen_accuracy"]) == expected
    assert lines["er"]["transfer"] == lines["er"]["transfer_std"] == ""


def test_tables_of_other_runs_are_as_before(plain: Path) -> None:
    (table,) = make_tables(read_runs(plain))
    texts = markdown_text(table), csv_text([table])
    for word in ("worst", "unseen", "prequential", "transfer", "at end", "at_end"):
        assert all(word not in text for text in texts)
    assert compare(read_runs(plain)).results.keys() == {"accuracy", "forgetting", "accuracy at any time"}


def test_a_comparison_has_the_measures_of_each_run(runs: Path) -> None:
    both = [record for record in read_runs(runs) if record.seed == 0]
    comparison = compare(both)
    found = [record.result for record in both]
    assert comparison.results["worst source"] == [result and result.worst for result in found]
    assert comparison.results["first batch"] == [result and result.transfer for result in found]
    assert comparison.results["accuracy at the end of each source"] == [result and result.at_end for result in found]
    console = Console(file=io.StringIO(), width=200)
    for table in fitting_tables(comparison, console):
        console.print(table)
    assert "unseen sources, %" in console.file.getvalue()  # type: ignore[attr-defined]


def test_trackers_get_every_measure(tmp_path: Path) -> None:
    path, notes = write_persons(tmp_path / "persons.npz"), Notes()
    settings = persons_settings(path, scenario="domain", prequential=True, trackers=["tensorboard"])
    result = execute(settings, tmp_path / "run", trackers=(notes,))
    assert notes.measures == {
        "A": result.accuracy,
        "F": result.forgetting,
        "anytime": result.anytime,
        "at end": result.at_end,
        "worst": result.worst,
        "unseen": result.unseen_accuracy,
        "prequential": result.prequential_accuracy,
        "first batch": result.transfer,
    }
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert events.Scalars("unseen")[-1].value == pytest.approx(result.unseen_accuracy, rel=1e-5)


def test_losses_are_no_accuracies(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)).astype(np.float32)
    stations = {name: (x + shift, x.sum(axis=1)) for shift, name in enumerate(("north", "south"))}
    data = from_sources(stations, tasks=dict.fromkeys(stations, "forecast"), name="air")
    small = {"scenario": "domain", "batch_size": 8, "threads": 1, "device": "cpu", "prequential": True}
    result = execute(resolve_settings({"method": "er"}, small, data=data), tmp_path / "run", data=data)
    assert sorted(result.prequential) == ["north", "south"]
    assert (result.prequential_accuracy, result.transfer) == (None, None)
    assert list(result.of_sources) == ["at_end", "worst"]
    assert result.measure == "score"


# -- the report


@pytest.fixture(scope="module")
def page(runs: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([runs, plain], tmp_path_factory.mktemp("report") / "report.html")


def test_the_report_has_the_measures(page: Path, runs: Path) -> None:
    content = Page(page)
    titles = [attributes.get("title") for tag, attributes in content.tags if tag == "button"]
    for measure in SOURCE_MEASURES.values():
        assert titles.count(measure.meaning.format("accuracy")) == 1
    details = {Path(each["path"]).name: each for each in content.details()}
    result = RunResult.parse(json.loads((runs / "soro-0" / "result.json").read_text()))
    assert result is not None
    assert details["soro-0"]["more"]["task_of"] == dict.fromkeys(PERSONS, "activity")
    assert details["soro-0"]["more"]["unseen"] == pytest.approx(result.unseen, rel=1e-4)
    assert details["soro-0"]["more"]["measures"]["worst source"] == pytest.approx(result.worst, rel=1e-4)
    assert details["run"]["more"]["measures"] == {}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with browser(tmp_path_factory.mktemp("browser")) as reader:
        yield reader


@needs_browser
def test_the_page_of_a_run_lists_sources_with_their_task(reader: Reader, page: Path, runs: Path) -> None:
    rows = Page(page).data("data")["rows"]
    number = [*zip(rows["label"], rows["seed"], rows["benchmark"], strict=True)].index(("soro", 0, "persons"))
    reader.open(page, f"#/run/{number}")
    assert "Sources" in [heading.text for heading in reader.all("#run h2")]
    table = "#run table"
    assert sorted(reader.column(table, 1)[: len(PERSONS)]) == sorted(PERSONS)
    assert set(reader.column(table, 2)[: len(PERSONS)]) == {"activity"}
    assert "Worst source" in reader.text("#run .facts")
    assert reader.errors() == []


def test_scores_of_sources_are_also_given_by_task() -> None:
    tasks = {name: {"at_end": 80.0 + place, "final": 70.0 + 2 * place} for place, name in enumerate("abc")}
    result = RunResult(accuracy=72.0, forgetting=-9.0, tasks=tasks, task_of={"a": "p", "b": "p", "c": "q"})
    assert {task: (each.at_end, each.final) for task, each in result.by_task.items()} == {
        "p": (80.5, 71.0),
        "q": (82.0, 74.0),
    }
    assert (result.measures["A of p"], result.measures["F of q"]) == (71.0, -8.0)
    alone = result.model_copy(update={"task_of": dict.fromkeys("abc", "p")})
    assert alone.by_task == {}
