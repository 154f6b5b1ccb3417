"""The report as a file: complete, self-contained, and safe whatever the runs are called."""

import base64
import json
import re
import shutil
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from _runs import write_grid, write_run
from spcl.cli.app import app
from spcl.errors import SpclError
from spcl.results.records import RunRecord, complete_runs, read_runs
from spcl.results.report import write_report
from spcl.results.report.page import run_details, run_row
from spcl.results.tables import make_tables
from spcl.runs.records import RunResult
from tiny_runs import entries, grid_runs, result, two_task_runs

MEASURES = ("condition_number", "cosine", "magnitude_similarity")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def test_the_list_of_runs_has_the_numbers_of_the_tables() -> None:
    settings = {"benchmark": "b", "scenario": "task", "method": {"name": "er"}, "config": 0, "seed": 0}
    result = RunResult(accuracy=900 / 13 + 0.155, forgetting=-0.5, tasks={})
    found = run_row(RunRecord(Path("x"), settings, result))
    assert (found["accuracy"], found["forgetting"]) == (pytest.approx(900 / 13 + 0.155, rel=1e-11), -0.5)


class Page(HTMLParser):
    """A page taken apart: its text outside scripts, its tags, and the scripts by id."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = dict(attrs).get("id") or tag if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        else:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def data(self, name: str) -> Any:
        return json.loads(self.scripts[name])

    def details(self) -> list[dict[str, Any]]:
        return [json.loads(zlib.decompress(base64.b64decode(packed))) for packed in self.data("details")]


@pytest.fixture(scope="session")
def page(base: Path) -> Page:
    return Page(write_report([two_task_runs(base), grid_runs(base)], base / "report.html"))


def test_it_needs_no_other_file_and_no_network(page: Page) -> None:
    for tag, attributes in page.tags:
        for name in ("src", "href", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "@import" not in page.scripts["style"]
    assert "url(" not in page.scripts["style"]


def test_rows_are_the_runs(page: Page, base: Path) -> None:
    rows = page.data("data")["rows"]
    runs = read_runs(two_task_runs(base), grid_runs(base))
    assert len(rows["label"]) == len(runs) == 20
    expected = sorted(
        (run.scenario, run.label, run.config, run.seed, round(run.result.accuracy, 2)) for run in complete_runs(runs)
    )
    columns = (rows[name] for name in ("scenario", "label", "config", "seed", "accuracy"))
    found = sorted((*key, round(accuracy, 2)) for *key, accuracy in zip(*columns, strict=True))
    assert found == expected


def is_near(found: float | None, expected: float | None) -> bool:
    return found is None if expected is None else bool(found == pytest.approx(expected, rel=1e-4))


def test_details_hold_the_records(page: Page) -> None:
    for details in page.details():
        run = Path(details["path"])
        (start,) = entries(run, "start")
        assert details["names"] == start["tasks"]
        assert details["timeline"] == start["timeline"]
        assert details["tasks"] == result(run)["tasks"]
        evaluations = entries(run, "evaluation")
        assert details["evaluations"]["step"] == [entry["step"] for entry in evaluations]
        for task, accuracies in zip(start["tasks"], details["evaluations"]["accuracy"], strict=True):
            for found, entry in zip(accuracies, evaluations, strict=True):
                assert is_near(found, entry["accuracy"].get(task))
        measured = [entry for entry in entries(run, "step") if entry["before"] or entry["after"]]
        assert details["stability"]["step"] == [entry["step"] for entry in measured]
        for when in ("before", "after"):
            for measure in MEASURES:
                for found, entry in zip(details["stability"][when][measure], measured, strict=True):
                    assert is_near(found, (entry[when] or {}).get(measure))


def test_long_curves_are_thinned_but_keep_ends_and_values(base: Path) -> None:
    run = read_runs(two_task_runs(base) / "soro/0")[0]
    full, thin = run_details(run, 10_000), run_details(run, 3)
    steps, few = full["stability"]["step"], thin["stability"]["step"]
    assert len(steps) > 3 == len(few)
    assert (few[0], few[-1]) == (steps[0], steps[-1])
    assert thin["stability"]["of"] == len(steps)
    places = [steps.index(step) for step in few]
    curve = full["stability"]["after"]["condition_number"]
    assert thin["stability"]["after"]["condition_number"] == [curve[place] for place in places]
    moments = zip(full["evaluations"]["step"], full["evaluations"]["ended"], strict=True)
    ends = [step for step, ended in moments if ended]
    assert set(ends) <= set(thin["evaluations"]["step"])
    assert len(thin["evaluations"]["step"]) < len(full["evaluations"]["step"])


def test_tables_figures_and_settings_are_there(page: Page) -> None:
    for text in ("Task-incremental, mean ± standard deviation over seeds", "GradDrop", "That differ between runs"):
        assert text in page.text
    assert "how many idle steps may come between tasks" in page.text
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) >= 6
    for image in images:
        assert base64.b64decode((image["src"] or "").split(",")[1]).startswith(b"<?xml")
        assert len(image["alt"] or "") > 40
    assert "Figure 3. Ablation study" in page.text
    assert "spcl grid --benchmark ps-cifar100 --methods soro+dbt" in page.text, "what the missing figures need"
    linked = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert "#/runs/task/tiny/er" in {re.sub(r"%20.*", "", href or "") for href in linked}


def test_the_papers_values_stand_beside_ours(base: Path, tmp_path: Path) -> None:
    copy_run(grid_runs(base) / "task/soro/0", tmp_path / "soro", benchmark="ps-emnist", tasks=5)
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert "91.06 ± 0.45" in page.text
    assert "−4.68" in page.text
    assert "Unlike in the paper, ps-emnist was run with drawn label sets and timelines, configuration 0" in page.text
    assert "batch_size=8 (paper: 128)" in page.text


def test_the_report_says_why_there_are_no_values_of_the_paper(base: Path, tmp_path: Path) -> None:
    copy_run(grid_runs(base) / "task/soro/0", tmp_path / "soro", benchmark="ps-emnist")
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert "91.06" not in page.text
    assert "The paper has no values for ps-emnist with tasks=3 (paper: 5)." in page.text


DRAWABLE: dict[str, Any] = {"evaluate": "ended", "evaluate_every": None, "method_iterations": 3}
"""The settings that figures look at."""


def test_significance_is_that_of_the_tables(tmp_path: Path) -> None:
    methods = {
        "er": lambda config, seed: 70.0 + config,
        "soro": lambda config, seed: 71.0 + config + 0.1 * seed,
        "mgda": lambda config, seed: 70.0 + config - 0.1 * (seed - 1),
    }
    write_grid(tmp_path / "runs", methods, configs=9, seeds=3, **DRAWABLE)
    page_file = tmp_path / "report.html"
    outcome = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(page_file), "--against", "er"])
    assert outcome.exit_code == 0, outcome.exception
    (table,) = make_tables(read_runs(tmp_path / "runs"), against="er")
    soro = table.cells["soro", "ps-emnist"]
    assert soro.p_value is not None
    assert soro.p_value < 0.001
    text = " ".join(Page(page_file).text.split())
    assert "p vs ERp over configs" in text
    assert f"<0.001 ▲{soro.config_p_value:.3f}" in text
    assert text.count("▲") == 2, "of SORO alone, and in the explanation"
    assert "Wilcoxon signed-rank test of A against ER" in text
    without = Page(write_report([tmp_path / "runs"], tmp_path / "without.html"))
    assert "p vs" not in without.text
    unknown = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--against", "dwa"])
    assert "there are no runs of 'dwa' to compare with" in str(unknown.exception)


def test_accuracy_at_any_time_is_shown_where_it_is_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "old" / "er", **DRAWABLE)
    assert "any time" not in Page(write_report([tmp_path / "old"], tmp_path / "old.html")).text
    write_run(tmp_path / "new" / "er", accuracy=80.0, anytime=61.25, **DRAWABLE)
    write_run(tmp_path / "new" / "soro", method="soro", accuracy=70.0, **DRAWABLE)
    text = " ".join(Page(write_report([tmp_path / "new"], tmp_path / "new.html")).text.split())
    assert "Apaperany time Fpaper" in text
    assert "80.00 61.25 −5.00" in re.sub(r"\d+\.\d+ ± \d+\.\d+ ", "", text)


def test_names_cannot_break_the_page(base: Path, tmp_path: Path) -> None:
    evil = '</script><img src=x onerror="alert(1)">&amp;{{ 7 * 7 }}'
    copy_run(grid_runs(base) / "task/soro/0", tmp_path / "a", benchmark=evil)
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert not any(attributes.get("src") == "x" for _, attributes in page.tags)
    assert page.data("data")["rows"]["benchmark"] == [Path(evil).name]
    assert page.details()[0]["settings"]["benchmark"] == evil
    assert "&amp;{{ 7 * 7 }}" in page.text


def test_lists_and_options_among_settings_are_readable(base: Path, tmp_path: Path) -> None:
    plugin = {"name": "/somewhere/my_things.py", "sha256": "0123456789abcdef" * 4}
    given = {
        "plugins": [plugin],
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "augment": ["flip", {"name": "crop", "padding": 2}],
        "frozen": [],
    }
    expected = {
        "plugins": "my_things.py (0123456789ab)",
        "optimizer": "sgd(momentum=0.9)",
        "augment": "flip, crop(padding=2)",
        "frozen": None,
    }
    copy_run(grid_runs(base) / "task/er/0", tmp_path / "run", **given)
    page = Page(write_report([tmp_path / "run"], tmp_path / "report.html"))
    (details,) = page.details()
    assert {name: details["settings"][name] for name in expected} == expected
    assert not [value for value in details["settings"].values() if isinstance(value, dict | list)]
    for text in filter(None, expected.values()):
        assert text in page.text


def test_unfinished_and_damaged_runs_are_shown_as_such(base: Path, tmp_path: Path) -> None:
    source = two_task_runs(base) / "soro/0"
    copy_run(source, tmp_path / "whole")
    copy_run(source, tmp_path / "unfinished", seed=1)
    (tmp_path / "unfinished/result.json").unlink()
    copy_run(source, tmp_path / "damaged", seed=2)
    (tmp_path / "damaged/metrics.jsonl").write_text('{"kind": "start"\nnonsense\n')
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert "1 unfinished" in page.text
    assert page.data("data")["rows"]["accuracy"].count(None) == 1
    by_seed = {details["settings"]["seed"]: details for details in page.details()}
    assert by_seed[1]["stability"] == by_seed[0]["stability"]
    assert "is damaged" in by_seed[2]["problem"]


def test_skipped_steps_are_reported(base: Path, tmp_path: Path) -> None:
    copy_run(two_task_runs(base) / "soro/0", tmp_path / "good")
    copy_run(two_task_runs(base) / "soro/0", tmp_path / "bad", seed=1)
    (tmp_path / "bad/result.json").write_text(json.dumps(result(tmp_path / "bad") | {"left_out": {"task-1": 4}}))
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert "because a loss or gradient was not finite, in 1 of 2 runs of SORO on tiny." in page.text
    found = {details["settings"]["seed"]: details["left_out"] for details in page.details()}
    assert found == {0: {}, 1: {"task-1": 4}}
    assert "not finite" not in Page(write_report([tmp_path / "good"], tmp_path / "good.html")).text


@pytest.mark.parametrize("content", ["[1, 2]", "3", "{}", '{"accuracy": 80.0}'])
def test_a_damaged_result_is_shown_as_unfinished(base: Path, tmp_path: Path, content: str) -> None:
    copy_run(two_task_runs(base) / "soro/0", tmp_path / "whole")
    copy_run(two_task_runs(base) / "soro/0", tmp_path / "damaged", seed=1)
    (tmp_path / "damaged/result.json").write_text(content)
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert "1 unfinished" in page.text
    assert page.data("data")["rows"]["accuracy"].count(None) == 1


def test_duplicates_are_refused(base: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        copy_run(grid_runs(base) / "task/er/0", tmp_path / name)
    with pytest.raises(SpclError, match=r"one and .*other both hold a run of er on"):
        write_report([tmp_path], tmp_path / "report.html")
    write_report([tmp_path / "one", tmp_path / "one"], tmp_path / "report.html")


def test_a_folder_is_no_file_to_write(base: Path, tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    for out, message in ((tmp_path, "is a folder; name the file"), (tmp_path / "afile/x.html", "cannot write to")):
        with pytest.raises(SpclError, match=message):
            write_report([grid_runs(base) / "task/er/0"], out)


def test_searches_are_told_from_results_in_relative_folders(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_run(grid_runs(base) / "task/er/0", tmp_path / "er")
    make_tuning(grid_runs(base) / "task/soro/0", tmp_path / "search")
    monkeypatch.chdir(tmp_path)
    page = Page(write_report([Path()], tmp_path / "report.html"))
    assert [row["label"] for table in page.data("data")["tables"] for row in table["rows"]] == ["er"]


def test_tuning_shows_the_best_trial_and_optunas_plots_apart_from_results(base: Path, tmp_path: Path) -> None:
    copy_run(grid_runs(base) / "task/er/0", tmp_path / "er")
    make_tuning(grid_runs(base) / "task/soro/0", tmp_path / "search")
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert page.data("tunings") == [{"optimization history": PLOT}]
    assert "trial 3, accuracy 61.50 %" in page.text
    assert [row["label"] for table in page.data("data")["tables"] for row in table["rows"]] == ["er"]
    assert len(page.data("data")["rows"]["label"]) == 2


PLOT = {"data": [{"type": "scatter", "x": [0, 1], "y": [50.0, 61.5]}], "layout": {"title": {"text": "History"}}}


def make_tuning(run: Path, folder: Path) -> None:
    """A folder as `spcl tune` leaves it."""
    copy_run(run, folder / "trial-003/task/soro/config-0/seed-0", validation=0.2)
    (folder / "plots").mkdir()
    (folder / "plots/optimization_history.json").write_text(json.dumps(PLOT))
    (folder / "tuning.json").write_text("{}")
    (folder / "best.json").write_text(json.dumps({"number": 3, "params": {"method.sigma": 7.5}, "accuracy": 61.5}))


def copy_run(source: Path, target: Path, **settings: Any) -> None:
    """A run's folder again, with other settings."""
    shutil.copytree(source, target)
    content = json.loads((source / "settings.json").read_text()) | settings
    (target / "settings.json").write_text(json.dumps(content))


def test_command_writes_and_opens(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    out = tmp_path / "sub/report.html"
    outcome = CliRunner().invoke(app, ["report", str(grid_runs(base)), "--out", str(out), "--open"])
    assert outcome.exit_code == 0, outcome.output
    assert str(out) in outcome.output.replace("\n", "")
    assert opened == [out.as_uri()]
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "there are no runs in"), (tmp_path / "absent", "there is no folder")):
        outcome = CliRunner().invoke(app, ["report", str(folder)])
        assert isinstance(outcome.exception, SpclError)
        assert message in str(outcome.exception)
