"""Tuning: the best of what was tried, never by test data, exactly continued."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from _runs import results_in, start_command, wait_for
from spcl.cli.app import app
from spcl.cli.grid import run_command
from spcl.errors import SpclError
from spcl.grids import Dimension, SilentGridView, Trial, Tuning, WorkerPool, parse_search, tune
from spcl.runs import RunFolder, load_settings_file

pytest.importorskip("optuna")

SMALL = {"tasks": 3, "batch_size": 8, "memory_budget": 24, "threads": 1, "device": "cpu"}
SEARCH = ("method.sigma=log:1:1000", "learning_rate=log:1e-4:1e-1")
TRIALS = 4


def tuning(benchmark: Path, **settings: Any) -> Tuning:
    base = {"benchmark": str(benchmark), "validation": 0.25, **SMALL, **settings}
    return Tuning(base, "soro", "task", [0, 1], [0], [parse_search(text) for text in SEARCH])


@pytest.fixture(scope="module")
def undisturbed(benchmark: Path, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trial]:
    out = tmp_path_factory.mktemp("tuning")
    return out, tune(tuning(benchmark), out, TRIALS, pool=pool, view=SilentGridView())


def params_in(out: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("trial-*/trial.json"))]


def test_the_best_trial_has_the_highest_mean_validation_accuracy(undisturbed: tuple[Path, Trial]) -> None:
    out, best = undisturbed
    accuracies = [
        np.mean([result["accuracy"] for result in results_in(folder).values()])
        for folder in sorted(out.glob("trial-*"))
    ]
    assert len(accuracies) == TRIALS
    assert best.number == int(np.argmax(accuracies))
    assert best.accuracy == max(accuracies)
    assert best.params == params_in(out)[best.number]
    assert json.loads((out / "best.json").read_text())["accuracy"] == best.accuracy
    for params in params_in(out):
        assert 1 <= params["method.sigma"] <= 1000
        assert 1e-4 <= params["learning_rate"] <= 1e-1


def test_trials_are_ordinary_runs_on_a_validation_split(undisturbed: tuple[Path, Trial]) -> None:
    out, _ = undisturbed
    for number, params in enumerate(params_in(out)):
        runs = sorted((out / f"trial-{number:03d}").rglob("settings.json"))
        assert len(runs) == 2
        for run in runs:
            settings = json.loads(run.read_text())
            assert settings["validation"] == 0.25
            assert settings["method"]["sigma"] == params["method.sigma"]
            assert settings["learning_rate"] == params["learning_rate"]
            confusion = json.loads((run.parent / "result.json").read_text())["confusion"]
            assert sum(np.sum(table) for table in confusion.values()) == 6 * 40 * 0.25


def test_test_data_have_no_part_in_it(
    benchmark: Path, undisturbed: tuple[Path, Trial], pool: WorkerPool, tmp_path: Path
) -> None:
    with np.load(benchmark) as arrays:
        nonsense = np.zeros_like(arrays["test_x"])
        np.savez(tmp_path / benchmark.name, **{**arrays, "test_x": nonsense})
    best = tune(tuning(tmp_path / benchmark.name), tmp_path / "out", 2, pool=pool, view=SilentGridView())
    assert params_in(tmp_path / "out") == params_in(undisturbed[0])[:2]
    for name, result in results_in(tmp_path / "out").items():
        assert result["accuracy"] == results_in(undisturbed[0])[name]["accuracy"]
    assert best.accuracy is not None


def test_a_search_that_is_killed_continues_as_if_nothing_had_been(
    benchmark: Path, undisturbed: tuple[Path, Trial], pool: WorkerPool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    settings = [f"--set={name}={value}" for name, value in SMALL.items()]
    searches = [f"--search={text}" for text in SEARCH]
    choice = ["--configs", "0-1", "--validation", "0.25", "--trials", str(TRIALS), "--benchmark", str(benchmark)]
    process = start_command(["tune", "--out", str(out), *choice, *settings, *searches], tmp_path / "log")
    wait_for(lambda: (out / "trial-001/trial.json").exists())
    process.kill()
    process.join()
    finished = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert finished

    seen: list[Trial] = []
    best = tune(tuning(benchmark), out, TRIALS, pool=pool, view=SilentGridView(), on_progress=seen.append)
    assert best == undisturbed[1]
    assert [trial.number for trial in seen] == list(range(TRIALS))
    assert params_in(out) == params_in(undisturbed[0])
    assert results_in(out) == results_in(undisturbed[0])
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_the_command_for_the_best_settings_runs_them_on_the_test_data(
    benchmark: Path, undisturbed: tuple[Path, Trial], tmp_path: Path
) -> None:
    words = shlex.split(run_command(tuning(benchmark), undisturbed[1]))
    assert words[:2] == ["spcl", "run"]
    words[words.index("runs/best")] = str(tmp_path / "run")
    outcome = CliRunner().invoke(app, words[1:])
    assert outcome.exit_code == 0, outcome.output
    settings = json.loads((tmp_path / "run/settings.json").read_text())
    assert settings["validation"] == 0.0
    assert settings["method"]["sigma"] == undisturbed[1].params["method.sigma"]
    assert settings["learning_rate"] == undisturbed[1].params["learning_rate"]
    assert (settings["batch_size"], settings["scenario"]) == (8, "task")


def test_the_command_for_the_best_settings_repeats_everything_given(benchmark: Path, tmp_path: Path) -> None:
    """The printed command makes a run with the settings of the trial, apart from the part of the data to score on."""
    plugin = tmp_path / "my method.py"
    plugin.write_text(
        "from spcl.methods import SORO\nclass Mine(SORO):\n    name = 'mine'\n    summary = 'SORO again'\n"
    )
    file = tmp_path / "settings.yaml"
    file.write_text("batch_size: 8\noptimizer: {name: adamw, weight_decay: 0.01}\nmethod: {name: mine, sigma: 20}\n")
    given = ["--settings", file, "--plugin", plugin, "--benchmark", benchmark, "--data-dir", tmp_path, "--no-model"]
    assigned = ["tasks=3", "memory_budget=24", "threads=2", "average=null", "augment=[]"]
    words = ["tune", "--out", tmp_path / "t", "--search", "learning_rate=log:1e-4:1e-1", "--trials", "1", *given]
    words += [word for text in assigned for word in ("--set", text)]
    tuned = CliRunner().invoke(app, list(map(str, words)))
    assert tuned.exit_code == 0, tuned.exception
    command = shlex.split(tuned.output.splitlines()[-1])
    command[command.index("runs/best")] = str(tmp_path / "best")
    made = CliRunner().invoke(app, command[1:])
    assert made.exit_code == 0, made.exception
    (trial,) = (tmp_path / "t").rglob("seed-0/settings.json")
    tried, best = (load_settings_file(path) for path in (trial, tmp_path / "best/settings.json"))
    assert {name for name in tried if tried[name] != best[name]} == {"validation"}


def test_optunas_plots_are_kept(undisturbed: tuple[Path, Trial]) -> None:
    plots = {path.stem: json.loads(path.read_text()) for path in (undisturbed[0] / "plots").glob("*.json")}
    assert {"optimization_history", "slice", "parallel_coordinate", "contour"} <= plots.keys()
    assert all(plot["data"] and plot["layout"] for plot in plots.values())
    history = plots["optimization_history"]["data"][0]
    assert history["mode"] == "markers"
    assert len(history["x"]) == TRIALS


def test_a_trial_that_fails_is_passed_over(benchmark: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """Only a run that makes its backbone finds out that there is nothing to freeze."""
    search = [Dimension("frozen", "choice", ("nowhere.*", ""))]
    seen: list[Trial] = []
    given = replace(tuning(benchmark), search=search, configs=[0])
    best = tune(given, tmp_path, 6, pool=pool, view=SilentGridView(), on_progress=seen.append)
    assert {tuple(trial.params.values()) for trial in seen if trial.accuracy is None} == {("nowhere.*",)}
    assert {tuple(trial.params.values()) for trial in seen if trial.accuracy is not None} == {("",)}
    assert best.params == {"frozen": ""}
    assert list(tmp_path.rglob("failure.json"))


def test_mistakes_are_found_before_anything_runs(benchmark: Path, pool: WorkerPool, tmp_path: Path) -> None:
    whole = tuning(benchmark)
    wrong = {
        "would score settings on the test data": tuning(benchmark, validation=0.0),
        "there is no setting 'sigmo'": replace(whole, search=[Dimension("method.sigmo", "log", (1.0, 2.0))]),
        "learning_rate = -1.0": replace(whole, search=[Dimension("learning_rate", "float", (-1.0, 2.0))]),
        "Invalid weight_decay value: -1.0": replace(
            whole, search=[Dimension("optimizer.weight_decay", "choice", (-1.0, 0.25))]
        ),
        "there is no memory 'none'": replace(whole, search=[Dimension("memory", "choice", ("balanced", "none"))]),
        "there is no configuration 11": replace(whole, configs=[11]),
        "leaves nothing to validate on": replace(whole, search=[Dimension("validation", "choice", (0.001, 0.25))]),
        "nothing to search": replace(whole, search=[]),
    }
    for message, given in wrong.items():
        with pytest.raises(SpclError, match=message):
            tune(given, tmp_path / "out", 1, pool=pool, view=SilentGridView())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["x", "x=1:2", "x=log:0:1", "x=int:1:2.5", "x=float:2:1", "x=choice", "=log:1:2", "x=float:1:2:3"]
)
def test_a_search_that_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(SpclError, match="expected name=log:low:high"):
        parse_search(text)


def test_searches_are_understood() -> None:
    assert parse_search("a=int:1:5") == Dimension("a", "int", (1, 5))
    assert parse_search("a=float:0:1") == Dimension("a", "float", (0.0, 1.0))
    assert parse_search("method.scale=choice:unit:min") == Dimension("method.scale", "choice", ("unit", "min"))
    assert parse_search("a=choice:1:2.5:true").values == (1, 2.5, True)


def test_asking_for_fewer_trials_than_there_are_loses_none(
    benchmark: Path, undisturbed: tuple[Path, Trial], pool: WorkerPool
) -> None:
    out, best = undisturbed
    assert tune(tuning(benchmark), out, 1, pool=pool, view=SilentGridView()) == best
    assert json.loads((out / "best.json").read_text())["number"] == best.number


def test_a_folder_belongs_to_one_search(benchmark: Path, undisturbed: tuple[Path, Trial], pool: WorkerPool) -> None:
    out, _ = undisturbed
    with pytest.raises(SpclError, match=r"holds a search with configs = \[0, 1\], not \[0\]"):
        tune(replace(tuning(benchmark), configs=[0]), out, TRIALS, pool=pool, view=SilentGridView())
    with pytest.raises(SpclError, match="holds a search with base = "):  # also where a setting is given anew
        tune(tuning(benchmark, epochs=2), out, TRIALS, pool=pool, view=SilentGridView())
    with RunFolder(out).locked(), pytest.raises(SpclError, match="another process is running"):
        tune(tuning(benchmark), out, TRIALS, pool=pool, view=SilentGridView())


def test_without_optuna_the_error_names_the_package(
    benchmark: Path, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SpclError, match=r"pip install .*\[tune\]"):
        tune(tuning(benchmark), tmp_path / "out", 1, pool=pool, view=SilentGridView())
