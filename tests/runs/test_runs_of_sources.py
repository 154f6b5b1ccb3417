"""Runs on data whose sources share tasks: laid out, trained, evaluated, resumed, kept, and refused."""

import csv
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_run import start_child, wait_for_steps
from typer.testing import CliRunner

from persons import ACTIVITIES, PERSONS, UNSEEN, persons_settings, read_persons, write_persons
from small_benchmark import StopAtStep, small_settings
from spcl.checkpoint import read_checkpoint
from spcl.cli.app import app
from spcl.data import from_sources
from spcl.encoders import Affine
from spcl.errors import DataError, SpclError, TaskError
from spcl.learner import Learner
from spcl.runs import (
    InterruptedRunError,
    RunFolder,
    RunResult,
    execute,
    load_run,
    make_problem,
    read_run,
    resolve_settings,
)
from spcl.runs.build import Problem, add_source, make_learner
from spcl.runs.export import export_run
from spcl.runs.run import evaluate_run
from spcl.runs.trained import predict_files

CPU = torch.device("cpu")
TRAINED = [name for name in PERSONS if name not in UNSEEN]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("persons")


@pytest.fixture(scope="module")
def one_task(base: Path) -> Path:
    """Five persons of one task."""
    return write_persons(base / "one.npz")


@pytest.fixture(scope="module")
def two_tasks(base: Path) -> Path:
    """Five persons, of whom three answer one task, two another."""
    return write_persons(base / "two.npz", tasks=2)


@pytest.fixture(scope="module")
def finished(base: Path, one_task: Path) -> Path:
    """A complete run with encoders of the sources' own."""
    settings = persons_settings(one_task, scenario="domain", encoder="affine", prequential=True, at_once=2)
    execute(settings, base / "finished")
    return base / "finished"


def problem_of(path: Path, **changes: Any) -> Problem:
    return make_problem(persons_settings(path, **changes), CPU)


# -- layouts


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_sources_of_one_task_share_its_head(one_task: Path, tmp_path: Path, scenario: str) -> None:
    result = execute(persons_settings(one_task, scenario=scenario), tmp_path / "run")
    learner = load_run(tmp_path / "run", device="cpu")
    assert list(learner.tasks) == ["activity"]
    assert sorted(learner.sources) == TRAINED
    assert sorted(result.tasks) == TRAINED
    assert result.task_of == dict.fromkeys(PERSONS, "activity")
    assert result.accuracy > 70.0
    assert result.accuracy == pytest.approx(np.mean([task.final for task in result.tasks.values()]))
    assert result.at_end == pytest.approx(np.mean([task.at_end for task in result.tasks.values()]))
    assert result.worst == min(task.final for task in result.tasks.values())
    for name, table in result.confusion.items():
        assert np.shape(table) == (3, 3)
        assert 100 * np.trace(table) / np.sum(table) == pytest.approx(result.tasks[name].final)


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_tasks_have_any_number_of_sources(two_tasks: Path, tmp_path: Path, scenario: str) -> None:
    result = execute(persons_settings(two_tasks, scenario=scenario), tmp_path / "run")
    learner = load_run(tmp_path / "run", device="cpu")
    assert {name: sorted(task.sources) for name, task in learner.tasks.items()} == {
        "activity": ["anna", "cleo"],
        "place": ["ben", "dan"],
    }
    assert result.task_of["eve"] == "activity"
    assert {len(result.confusion["anna"]), len(result.confusion["ben"])} == {3, 2}
    evaluated = evaluate_run(read_run(tmp_path / "run"), "cpu")
    assert evaluated.difference == 0.0
    if scenario == "class":
        assert len(learner.classes) == 5
        assert np.shape(result.confusion["ben"]) == (2, 5)


def test_unseen_sources_are_evaluated_and_never_trained(one_task: Path, tmp_path: Path) -> None:
    poisoned = write_persons(tmp_path / "one.npz", of_unseen=1e6)
    results, models = [], []
    for number, path in enumerate((one_task, poisoned)):
        results.append(execute(persons_settings(path, scenario="domain"), out := tmp_path / str(number)))
        models.append(read_checkpoint(out / "model.safetensors"))
    torch.testing.assert_close(models[0]["backbone"], models[1]["backbone"], rtol=0.0, atol=0.0)
    assert results[0].unseen == results[1].unseen
    (eve,) = [source for source in read_persons(one_task).sources if source.unseen]
    learner = load_run(tmp_path / "0", device="cpu")
    expected = 100 * learner.evaluate([(eve.test_x, eve.test_y)], "activity")
    assert results[0].unseen == {"eve": pytest.approx(expected)}
    assert results[0].unseen_accuracy == pytest.approx(expected)


def test_an_encoder_of_its_own_belongs_to_each_trained_source(finished: Path, one_task: Path) -> None:
    learner, result = load_run(finished, device="cpu"), read_run(finished).result
    assert result is not None
    encoders = [source.encoder for source in learner.sources.values()]
    assert len({id(encoder) for encoder in encoders}) == len(TRAINED)
    for encoder in encoders:
        assert isinstance(encoder, Affine)
        assert not torch.equal(encoder.scale, torch.ones(6))
    for source in read_persons(one_task).sources:
        whose: dict[str, Any] = {"task": "activity"} if source.unseen else {"source": source.name}
        expected = 100 * learner.evaluate([(source.test_x, source.test_y)], **whose)
        recorded = result.unseen[source.name] if source.unseen else result.tasks[source.name].final
        assert recorded == pytest.approx(expected)


def test_nine_configurations_are_three_orders_with_three_timelines_each(one_task: Path) -> None:
    layouts = [problem_of(one_task, at_once=2, config=config) for config in range(9)]
    orders = [layout.stream.names for layout in layouts]
    spans = [layout.configuration.timeline.spans for layout in layouts]
    assert [len(set(orders[first : first + 3])) for first in (0, 3, 6)] == [1, 1, 1]
    assert len(set(orders)) == 3
    assert len(set(spans)) == 3
    assert [spans[config] for config in (3, 4, 5)] == spans[:3]  # all persons have as many samples
    for layout in layouts:
        timeline = layout.configuration.timeline
        running = [len(timeline.active(step)) for step in range(timeline.steps)]
        assert max(running) == 2
        assert sorted(layout.stream.names) == TRAINED
    again = problem_of(one_task, at_once=2, config=4)
    assert (again.stream.names, again.configuration.timeline) == (orders[4], layouts[4].configuration.timeline)
    other = [problem_of(one_task, at_once=2, config=config, protocol_seed=1) for config in (0, 3, 6)]
    assert [each.stream.names for each in other] != [orders[config] for config in (0, 3, 6)]


def test_classes_of_pictures_may_be_domains_of_one_task(benchmark: Path, tmp_path: Path) -> None:
    settings = small_settings(benchmark, scenario="domain")
    problem = make_problem(settings, CPU)
    result = execute(settings, tmp_path / "run")
    assert set(result.task_of.values()) == {"classes"}
    learner = load_run(tmp_path / "run", device="cpu")
    assert [task.classes for task in learner.tasks.values()] == [6]
    for (name, (_, y)), classes in zip(problem.tests.items(), problem.configuration.label_set, strict=True):
        assert sorted(y.unique().tolist()) == sorted(classes)
        assert np.flatnonzero(np.sum(result.confusion[name], axis=1)).tolist() == sorted(classes)
    with np.load(benchmark) as arrays:
        x, y = torch.from_numpy(arrays["test_x"]), torch.from_numpy(arrays["test_y"])
    assert result.accuracy == pytest.approx(100 * learner.evaluate([(x, y)]))


# -- test, then train


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_prequential_scores_are_taken_before_each_step(one_task: Path, tmp_path: Path, scenario: str) -> None:
    settings = persons_settings(one_task, scenario=scenario, prequential=True, encoder="affine")
    result = execute(settings, tmp_path / "run")
    problem = make_problem(settings, CPU)
    learner = make_learner(settings, problem.data, CPU, len(problem.stream))
    first: dict[str, float] = {}
    right: dict[str, list[float]] = {}
    for moment in problem.stream:
        for name in moment.started:
            add_source(learner, name, problem, settings)
        for name, (x, y) in moment.batches.items():
            if learner.steps:
                score = 100 * learner.evaluate([(x, y)], source=name)
                if name in moment.started:
                    first[name] = score
                right.setdefault(name, []).extend([score] * len(y))
        learner.step(moment.batches)
        for name in moment.ended:
            learner.finish_source(name)
    assert result.first == pytest.approx(first)
    assert result.prequential == pytest.approx({name: np.mean(scores) for name, scores in right.items()})
    assert result.transfer == pytest.approx(np.mean(list(first.values())))
    assert len(first) == len(TRAINED) - 1  # before the first batch of its first source nothing is known of a task
    assert result.tasks == execute(settings.model_copy(update={"prequential": False}), tmp_path / "b").tasks


# -- interrupted


def without_times(result: RunResult) -> RunResult:
    return result.model_copy(update={"seconds": {}})


def test_stopped_and_resumed_equals_uninterrupted(one_task: Path, tmp_path: Path) -> None:
    changes = {"scenario": "domain", "encoder": "affine", "prequential": True, "at_once": 3}
    settings = persons_settings(one_task, **changes)
    whole = execute(settings, tmp_path / "whole")
    assert whole.steps is not None
    for step in (0, 11, whole.steps - 2):
        with pytest.raises(InterruptedRunError):
            execute(settings, tmp_path / str(step), view=StopAtStep(step))
        resumed = execute(settings, tmp_path / str(step), resume=True)
        assert without_times(resumed) == without_times(whole)
        models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", str(step))]
        assert models[0] == models[1]


def test_killed_and_resumed_equals_uninterrupted(one_task: Path, tmp_path: Path) -> None:
    changes = {"scenario": "domain", "encoder": "affine", "prequential": True, "at_once": 3, "batch_size": 2}
    reference = execute(persons_settings(one_task, **changes, checkpoint_seconds=0.0), tmp_path / "whole")
    broken, kills = tmp_path / "broken", 0
    sets = [f"{name}={value}" for name, value in changes.items() if name != "scenario"]
    sets += ["memory_budget=30", "threads=1", "checkpoint_seconds=0"]
    words = ["run", "--benchmark", one_task, "--scenario", "domain", "--method", "soro", "--device", "cpu"]
    arguments: list[object] = [*words, "--out", broken, *(word for each in sets for word in ("--set", each))]
    for lines in (4, 40, 80):
        child = start_child(*arguments)
        wait_for_steps(broken, lines, child)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        child.communicate()
        if RunFolder(broken).has_checkpoint():
            arguments = ["run", "--out", broken, "--resume"]
    child = start_child(*arguments)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert kills >= 2
    resumed = RunFolder(broken).read_result()
    assert resumed is not None
    assert without_times(resumed) == without_times(reference)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert models[0] == models[1]


# -- a complete run


def test_a_model_evaluates_to_what_the_run_recorded(finished: Path) -> None:
    outcome = evaluate_run(read_run(finished), "cpu")
    assert sorted(outcome.now) == sorted(PERSONS)
    assert outcome.now == outcome.recorded
    result = read_run(finished).result
    assert result is not None
    assert outcome.averages == pytest.approx((result.accuracy, result.accuracy))


def refuse(error: DataError) -> None:
    raise error


@pytest.fixture
def samples(tmp_path: Path) -> tuple[Path, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    return tmp_path / "x.npy", x


@pytest.mark.parametrize("source", ["anna", None])
def test_predictions_of_files_pass_the_encoder_of_a_source(
    finished: Path, samples: tuple[Path, np.ndarray], source: str | None
) -> None:
    run, learner = read_run(finished), load_run(finished, device="cpu")
    rows = list(predict_files(run, learner, [samples[0]], source=source, on_error=refuse))
    expected = learner.predict_proba(samples[1], source=source).max(dim=1)
    assert [row["class"] for row in rows] == ACTIVITIES[expected.indices].tolist()
    assert [row["probability"] for row in rows] == pytest.approx(expected.values.tolist(), rel=1e-5)
    assert {row["task"] for row in rows} == {"activity"}
    other = learner.predict_proba(samples[1], source="ben")
    assert not torch.equal(learner.predict_proba(samples[1], source=source), other)


@pytest.mark.parametrize("source", ["anna", None])
def test_an_export_holds_encoder_network_and_head(
    finished: Path, samples: tuple[Path, np.ndarray], tmp_path: Path, source: str | None
) -> None:
    export_run(read_run(finished), tmp_path / "model.pt2", source=source)
    program = torch.export.load(tmp_path / "model.pt2").module()
    x = torch.from_numpy(samples[1])
    learner = load_run(finished, device="cpu")
    module = learner.module(source=source)
    assert [name for name, _ in module.named_children()] == ["encoder"] * (source is not None) + ["backbone", "head"]
    with torch.no_grad():
        torch.testing.assert_close(program(x), module(x))
        torch.testing.assert_close(module(x), learner.logits(x, source=source))
    description = json.loads((tmp_path / "model.pt2.json").read_text())
    assert (description["task"], description.get("source")) == ("activity", source)
    assert [column["class"] for column in description["columns"]] == ACTIVITIES.tolist()


def test_class_incremental_runs_predict_among_all_classes_through_an_encoder(
    two_tasks: Path, tmp_path: Path, samples: tuple[Path, np.ndarray]
) -> None:
    execute(persons_settings(two_tasks, scenario="class", encoder="affine"), tmp_path / "run")
    run, learner = read_run(tmp_path / "run"), load_run(tmp_path / "run", device="cpu")
    rows = list(predict_files(run, learner, [samples[0]], source="ben", on_error=refuse))
    expected = learner.predict_proba(samples[1], source="ben").amax(dim=1)
    assert [row["probability"] for row in rows] == pytest.approx(expected.tolist(), rel=1e-5)
    export_run(run, tmp_path / "model.pt2", source="ben")
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(torch.from_numpy(samples[1])), learner.logits(samples[1], source="ben"))


def test_a_loaded_run_can_be_trained_further(finished: Path, one_task: Path) -> None:
    learner = load_run(finished, device="cpu")
    eve = read_persons(one_task).sources[-1]
    learner.add_source("eve", task="activity", encoder="affine")
    learner.add_source("anna")
    before = learner.evaluate([(eve.test_x, eve.test_y)], source="eve")
    for start in range(0, len(eve.train_y), 8):
        batch = (eve.train_x[start : start + 8], eve.train_y[start : start + 8])  # type: ignore[index]
        learner.step({"eve": batch})
    assert learner.evaluate([(eve.test_x, eve.test_y)], source="eve") >= before


# -- commands


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def error_of(*words: object) -> str:
    outcome = invoke(*words)
    assert isinstance(outcome.exception, SpclError), outcome.output
    return str(outcome.exception)


def test_the_commands_train_evaluate_predict_and_export(
    one_task: Path, tmp_path: Path, samples: tuple[Path, np.ndarray]
) -> None:
    run, assigned = tmp_path / "run", ("at_once=2", "encoder=affine", "prequential=true", "batch_size=8")
    flags = [word for each in assigned for word in ("--set", each)]
    words = ("--benchmark", one_task, "--scenario", "domain", "--device", "cpu")
    trained = invoke("run", *words, *flags, "--out", run)
    assert trained.exit_code == 0, trained.output
    assert "unseen sources" in trained.output

    drawn = invoke("timeline", "--benchmark", one_task, *flags)
    assert drawn.exit_code == 0, drawn.output
    assert all(f"{name} (3 classes)" in drawn.output for name in TRAINED)

    evaluated = invoke("evaluate", run, "--device", "cpu")
    assert evaluated.exit_code == 0, evaluated.output
    assert evaluated.output.split()[0] == "source"
    assert all(name in evaluated.output for name in TRAINED)
    assert "eve (unseen)" in evaluated.output

    predicted = invoke("predict", run, samples[0], "--source", "anna", "--format", "csv", "--device", "cpu")
    assert predicted.exit_code == 0, predicted.output
    rows = list(csv.DictReader(io.StringIO(predicted.stdout)))
    expected = load_run(run, device="cpu").predict(samples[1], source="anna")
    assert [row["class"] for row in rows] == ACTIVITIES[expected].tolist()

    exported = invoke("export", run, "--out", tmp_path / "anna.pt2", "--source", "anna")
    assert exported.exit_code == 0, exported.output
    assert json.loads((tmp_path / "anna.pt2.json").read_text())["source"] == "anna"

    assert "has no source 'eve'; its sources are" in error_of("predict", run, samples[0], "--source", "eve")
    assert "has no task 'place'; its tasks are activity" in error_of("predict", run, samples[0], "--task", "place")


# -- refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_once": 2, "config": 9}, "9"),
        ({"at_once": 0}, "at_once"),
        ({"tasks": 2}, "has 4 sources to train, but tasks = 2; leave tasks out"),
        ({"encoder": "afine"}, "there is no encoder 'afine'; did you mean 'affine'"),
        ({"encoder": {"name": "affine", "size": 3}}, "size"),
        ({"protocol": "x.json"}, "the protocol .*x.json does not apply"),
    ],
)
def test_settings_that_do_not_fit_sources_are_refused(
    one_task: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpclError, match=message):
        execute(persons_settings(one_task, scenario="domain", **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_tasks_are_no_domains_of_one(two_tasks: Path) -> None:
    with pytest.raises(DataError, match="answer 2 tasks, but domain-incrementally there is one"):
        problem_of(two_tasks, scenario="domain")


def test_sources_at_once_need_data_of_sources(benchmark: Path) -> None:
    with pytest.raises(SpclError, match="at_once is for data of several sources, but clusters has none"):
        make_problem(small_settings(benchmark, at_once=2), CPU)


def test_a_source_and_a_task_of_others_need_two_names() -> None:
    x = torch.randn(40, 3)
    pair = (x, [0, 1] * 20)
    data = from_sources({"anna": pair, "ben": pair, "activity": pair}, tasks={"anna": "activity", "ben": "activity"})
    with pytest.raises(DataError, match="a source and a task of others named 'activity'; rename one"):
        make_problem(resolve_settings({"method": "er"}, data=data), CPU, data)


def test_pictures_have_no_affine_encoder_in_bytes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (40, 1, 8, 8), dtype=np.uint8)
    persons = {name: (x, [0, 1] * 20) for name in ("anna", "ben")}
    data = from_sources(persons, tasks=dict.fromkeys(persons, "kind"))
    settings = resolve_settings({"method": "er", "encoder": "affine", "batch_size": 4, "device": "cpu"}, data=data)
    with pytest.raises(TaskError, match=r"'affine' needs one tensor of numbers .* uint8"):
        execute(settings, tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def test_wrong_sources_of_predictions_are_refused(two_tasks: Path, base: Path) -> None:
    execute(persons_settings(two_tasks), base / "two")
    run, learner = read_run(base / "two"), load_run(base / "two", device="cpu")

    def rows(**asked: Any) -> Iterator[Any]:
        return predict_files(run, learner, [], on_error=refuse, **asked)

    for asked, message in (
        ({"source": "adam"}, "has no source 'adam'; its sources are anna"),
        ({"source": "anna", "task": "place"}, "source 'anna' of the run in .* answers task 'activity', not 'place'"),
        ({}, "is task-incremental; name the task of the samples, one of activity"),
    ):
        with pytest.raises(TaskError, match=message):
            list(rows(**asked))
    assert isinstance(learner, Learner)
