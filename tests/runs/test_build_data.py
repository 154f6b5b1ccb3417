"""Runs of sources of any kind: they complete, resume exactly, and are scored by the metric of their kind."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from small_benchmark import StopAtStep
from spcl.cli.app import app
from spcl.data import ImageData, SourceData, from_arrays, from_sources
from spcl.errors import DataError, SpclError
from spcl.models import BACKBONES, InputSpec, TextTransformer
from spcl.runs import (
    InterruptedRunError,
    LiveView,
    PlainView,
    RunResult,
    RunSettings,
    execute,
    make_problem,
    read_run,
    resolve_settings,
    resume_settings,
)
from spcl.runs.build import make_heads
from spcl.runs.records import FolderError
from spcl.runs.run import evaluate_run, f1_score, r_squared
from spcl.runs.trained import _restored_task, _saved_task
from spcl.tasks import TaskDescription

CPU = torch.device("cpu")
SMALL = {"method": "er", "batch_size": 8, "memory_budget": 30, "threads": 1, "device": "cpu", "learning_rate": 0.01}


def car(samples: int = 60) -> SourceData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, 5))
    return from_sources(
        {
            "speed": (x, x[:, :2].sum(axis=1)),
            "signs": (x, (x[:, :3] > 0).astype(int)),
            "light": (x, np.where(x[:, 1] > 0, "red", "green")),
        },
        name="car",
    )


def lights() -> SourceData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5))
    return from_sources({f"light-{k}": (x, (x[:, k] > 0).astype(int)) for k in range(3)}, name="lights")


def run(out: Path, data: ImageData | SourceData, **settings: Any) -> RunResult:
    return execute(resolve_settings(SMALL | settings, data=data), out, data=data)


def content(result: RunResult) -> dict[str, Any]:
    return result.model_dump(exclude={"seconds", "environment"})


def test_a_run_of_three_kinds_completes_with_their_metrics(tmp_path: Path) -> None:
    result = run(tmp_path / "run", car(), epochs=5)
    assert {name: task.metric for name, task in result.tasks.items()} == {
        "speed": "R²",
        "signs": "F1",
        "light": "accuracy",
    }
    assert all(task.final > 50 for task in result.tasks.values()), result.tasks
    assert result.accuracy == pytest.approx(np.mean([task.final for task in result.tasks.values()]))
    assert list(result.confusion) == ["light"]
    assert result.class_names == {"light": ("green", "red")}
    record = json.loads((tmp_path / "run/result.json").read_text())
    assert record["benchmark"] == record["data"]["name"] == "car"
    assert record["class_names"] == {"light": ["green", "red"]}
    assert "metric" not in record["tasks"]["light"]
    assert RunResult.parse(record) == result


@pytest.mark.parametrize("method", ["er", "der++", "soro"])
def test_a_run_of_three_kinds_resumes_exactly(tmp_path: Path, method: str) -> None:
    data = car()
    whole = run(tmp_path / "whole", data, method=method, epochs=2)
    settings = resolve_settings(SMALL | {"method": method, "epochs": 2}, data=data)
    assert whole.steps is not None
    for stop in (2, whole.steps // 2):
        with pytest.raises(InterruptedRunError):
            execute(settings, tmp_path / "run", data=data, resume=True, view=StopAtStep(stop))
    resumed = execute(resume_settings(tmp_path / "run", data), tmp_path / "run", data=data, resume=True)
    assert content(resumed) == content(whole)
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def test_data_from_python_is_asked_for_again(tmp_path: Path) -> None:
    data = car()
    settings = resolve_settings(SMALL, data=data)
    with pytest.raises(InterruptedRunError):
        execute(settings, tmp_path / "run", data=data, view=StopAtStep(2))
    with pytest.raises(DataError, match=r"'car' is no known benchmark.* pass it again as data="):
        execute(settings, tmp_path / "run", resume=True)
    refused = CliRunner().invoke(app, ["run", "--out", str(tmp_path / "run"), "--resume"])
    assert isinstance(refused.exception, FolderError)
    assert "the data 'car' of the run in" in str(refused.exception)
    assert "came from Python" in str(refused.exception)
    with pytest.raises(FolderError, match="the data of car has changed"):
        execute(settings, tmp_path / "run", resume=True, data=car(64))
    assert execute(settings, tmp_path / "run", resume=True, data=data).tasks.keys() == {"speed", "signs", "light"}


def test_a_labelled_set_from_python_is_split_into_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custom").mkdir()  # a folder of the same name is not the data
    x = np.random.default_rng(0).normal(size=(120, 4))
    data = from_arrays(x, ["a", "b", "c", "d"] * 30)
    result = run(tmp_path / "run", data, tasks=2)
    assert result.benchmark == "custom"
    assert sorted(name for names in result.class_names.values() for name in names) == ["a", "b", "c", "d"]
    configuration = make_problem(resolve_settings(SMALL | {"tasks": 2}, data=data), CPU, data).configuration
    assert list(result.class_names.values()) == [
        tuple(data.class_names[label] for label in classes) for classes in configuration.label_set
    ]


def test_texts_are_trained_by_the_text_backbone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, size=(80, 6))
    tokens[:, 0] = 10 + np.arange(80) % 4
    data = from_arrays(tokens, np.arange(80) % 4)
    settings = resolve_settings(SMALL | {"epochs": 5}, data=data)
    assert settings.backbone == "text"
    assert execute(settings, str(tmp_path / "run"), data=data).accuracy > 80


class ByKind(nn.Module):
    """A backbone for texts with a mask, images and vectors."""

    feature_dim = 16

    def __init__(self, inputs: InputSpec) -> None:
        super().__init__()
        self.text = TextTransformer(
            inputs.parts["input_ids"].vocabulary or 1, inputs.shape[0], width=16, depth=1, heads=2
        )
        self.images = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU())
        self.vectors = nn.Sequential(nn.Linear(5, 16), nn.ReLU())

    def forward(self, x: Any) -> torch.Tensor:
        if isinstance(x, dict):
            return self.text(x)  # type: ignore[no-any-return]
        return (self.images(x / 255) if x.ndim == 4 else self.vectors(x)) + 0.0  # type: ignore[no-any-return]


@pytest.fixture
def by_kind(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(BACKBONES, "_factories", dict(BACKBONES._factories))
    BACKBONES.register("by-kind")(ByKind)
    return "by-kind"


def mixed() -> SourceData:
    """Texts with a mask, images of bytes with soft labels, and a regression on vectors."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 12, size=(50, 6))
    images = rng.integers(0, 256, size=(50, 3, 8, 8), dtype=np.uint8)
    soft = rng.dirichlet(np.ones(3), size=50)
    x = rng.normal(size=(50, 5))
    text = {"input_ids": tokens, "attention_mask": (tokens > 2).astype(np.int64)}
    sources = {"text": (text, tokens[:, 0] % 2), "images": (images, soft), "speed": (x, x[:, 0])}
    return from_sources(sources, {"images": "classification"}, name="mixed")


def test_sources_of_different_shapes_are_trained_together_and_resume_exactly(tmp_path: Path, by_kind: str) -> None:
    data = mixed()
    settings = resolve_settings(SMALL | {"backbone": by_kind}, data=data)
    whole = execute(settings, tmp_path / "whole", data=data)
    assert list(whole.confusion) == ["text", "images"]
    assert whole.data is not None
    assert "several shapes" in str(whole.data)
    with pytest.raises(InterruptedRunError):
        execute(settings, tmp_path / "run", data=data, view=StopAtStep(7))
    assert content(execute(settings, tmp_path / "run", data=data, resume=True)) == content(whole)


def wide_and_narrow(path: Path) -> Path:
    rng = np.random.default_rng(0)
    wide, narrow = rng.normal(size=(60, 5)), rng.normal(size=(60, 3))
    y = {"wide_y": (wide[:, 0] > 0).astype(int), "narrow_y": (narrow[:, 0] > 0).astype(int)}
    np.savez(path, wide_x=wide, narrow_x=narrow, **y)
    return path


def test_a_backbone_that_cannot_take_every_source_is_refused_before_the_first_step(tmp_path: Path) -> None:
    settings = resolve_settings(SMALL | {"benchmark": str(wide_and_narrow(tmp_path / "two.npz"))})
    with pytest.raises(SpclError, match=r"backbone 'mlp' cannot take .* source 'narrow' of two \(float32 3\)"):
        execute(settings, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


PADDING = """
from torch import nn
from torch.nn.functional import pad
from spcl.plugins import backbone

class Padded(nn.Sequential):
    feature_dim = 8

    def __init__(self, width):
        super().__init__(nn.Linear(width, 8), nn.ReLU())
        self.width = width

    def forward(self, x):
        return super().forward(pad(x, (0, self.width - x.shape[1])))

@backbone("padded")
def padded(inputs):
    assert inputs.shape == inputs.sources[0].shape
    return Padded(max(each.shape[0] for each in inputs.sources))
"""


def test_a_plug_in_backbone_gets_the_samples_of_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKBONES, "_factories", dict(BACKBONES._factories))
    (plugin := tmp_path / "padding.py").write_text(PADDING)
    given = {"benchmark": str(wide_and_narrow(tmp_path / "two.npz")), "plugins": [str(plugin)], "backbone": "padded"}
    result = execute(resolve_settings(SMALL | given), tmp_path / "run")
    assert result.tasks.keys() == {"wide", "narrow"}
    assert evaluate_run(read_run(tmp_path / "run"), "cpu").difference == 0.0


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_sources_of_classes_work_in_both_scenarios(tmp_path: Path, scenario: str) -> None:
    result = run(tmp_path / "run", lights(), scenario=scenario)
    assert result.scenario == scenario
    columns = 2 if scenario == "task" else 6
    assert all(len(row) == columns for table in result.confusion.values() for row in table)


def layout(data: SourceData, **settings: Any) -> Any:
    return make_problem(resolve_settings(SMALL | settings, data=data), CPU, data)


def test_configurations_are_timelines_that_epochs_stretch() -> None:
    data = car(300)
    spans = [layout(data, config=config).configuration.timeline.spans for config in range(9)]
    assert len(set(spans)) > 3
    assert all(last - first + 1 == 30 for timeline in spans for first, last in timeline)
    tripled = layout(data, config=1, epochs=3).configuration.timeline.spans
    assert tripled == tuple((3 * first, 3 * last + 2) for first, last in spans[1])
    assert layout(data, paradigm="joint").configuration.timeline.spans == ((0, 29),) * 3
    assert layout(data, paradigm="serial", epochs=2).configuration.timeline.spans == ((0, 59), (60, 119), (120, 179))
    assert layout(data, protocol_seed=1).configuration.timeline.spans not in spans


def test_epochs_stretch_drawn_protocols() -> None:
    x = np.random.default_rng(0).normal(size=(200, 4))
    data = from_arrays(x, np.arange(200) % 4)
    once, thrice = (make_problem(resolve_settings(SMALL | {"epochs": n}, data=data), CPU, data) for n in (1, 3))
    assert thrice.configuration.timeline == once.configuration.timeline.stretched(3)
    assert len(thrice.stream) == 3 * len(once.stream)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "some.json"}, "the sources of car have tasks, so that the protocol .* does not apply"),
        ({"tasks": 2}, "car has 3 sources to train, but tasks = 2"),
        ({"scenario": "class"}, "source 'speed' of car is a regression, which has no place"),
        ({"config": 9}, "there is no configuration 9"),
    ],
)
def test_settings_that_do_not_fit_sources_are_refused(settings: dict[str, Any], message: str) -> None:
    data = car()
    valid = resolve_settings(SMALL, data=data)
    with pytest.raises(SpclError, match=message):
        make_problem(RunSettings(**valid.model_dump() | settings), CPU, data)


def test_data_and_settings_must_belong_together(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="settings are for the data 'car', but the data given is 'lights'"):
        execute(resolve_settings(SMALL, data=car()), tmp_path / "run", data=lights())
    with pytest.raises(DataError, match="settings are for the data 'ps-glyphs', but the data given is 'car'"):
        resolve_settings({"benchmark": "ps-glyphs"}, data=car())
    with pytest.raises(DataError, match=r"options of its loader \(size\)"):
        resolve_settings({"data": {"size": 3}}, data=car())


def test_equal_test_targets_of_a_regression_are_refused() -> None:
    x = np.zeros((4, 2))
    data = from_sources({"speed": (x, np.arange(4.0), x[:2], np.ones(2))}, name="flat")
    with pytest.raises(DataError, match="all test targets are equal"):
        make_problem(resolve_settings(SMALL, data=data), CPU, data)


def test_scores_are_those_computed_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    output, targets = torch.randn(20, 3, generator=generator), torch.randn(20, 3, generator=generator)
    errors = sum((targets[i, j] - output[i, j]).item() ** 2 for i in range(20) for j in range(3))
    means = [sum(targets[:, j].tolist()) / 20 for j in range(3)]
    spread = sum((targets[i, j].item() - means[j]) ** 2 for i in range(20) for j in range(3))
    assert r_squared(output, targets) == pytest.approx(1 - errors / spread)

    present = (targets > 0.5).float()
    pairs = [(output[i, j].item() > 0, present[i, j].item() == 1) for i in range(20) for j in range(3)]
    precision = pairs.count((True, True)) / sum(predicted for predicted, _ in pairs)
    recall = pairs.count((True, True)) / sum(wanted for _, wanted in pairs)
    assert f1_score(output, present) == pytest.approx(2 * precision * recall / (precision + recall))
    assert f1_score(-torch.ones(2, 2), torch.zeros(2, 2)) == 1.0
    assert f1_score(-torch.ones(2, 2), torch.ones(2, 2)) == 0.0


def test_heads_can_be_made_again_from_plain_data() -> None:
    backbone = torch.nn.Linear(4, 6)
    backbone.feature_dim = 6  # type: ignore[assignment]
    tasks = [
        TaskDescription("speed", "regression", 2),
        TaskDescription("light", classes=3, class_names=("r", "g", "b")),
    ]
    again = [_restored_task(json.loads(json.dumps(_saved_task(task)))) for task in tasks]
    assert again == tasks
    (one, _), (other, _) = (make_heads(each, backbone, RunSettings(seed=1))["speed"] for each in (tasks, again))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(SpclError, match="give the backbone Linear the attribute feature_dim"):
        make_heads(tasks, torch.nn.Linear(4, 6), RunSettings(seed=1))


def test_a_backbone_of_unknown_width_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKBONES, "_factories", dict(BACKBONES._factories))
    BACKBONES.register("bare")(lambda inputs: nn.Linear(inputs.shape[0], 6))
    data = car()
    with pytest.raises(SpclError, match="give the backbone Linear the attribute feature_dim"):
        execute(resolve_settings(SMALL | {"backbone": "bare"}, data=data), tmp_path / "run", data=data)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_views_name_the_metric(tmp_path: Path) -> None:
    data = car()
    settings = resolve_settings(SMALL, data=data)
    for number, make in enumerate((PlainView, LiveView)):
        text = StringIO()
        execute(settings, tmp_path / str(number), data=data, view=make(Console(file=text, width=120)))
        assert ("% R²" in text.getvalue()) or ("speed (R²)" in text.getvalue())
        assert "score" in text.getvalue()
