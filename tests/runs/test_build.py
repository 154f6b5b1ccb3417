"""Training habits as settings of a run: they reach the learner, resume exactly and are kept with the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from small_benchmark import StopAtStep, small_settings, write_benchmark
from spcl.data import from_arrays
from spcl.errors import SpclError
from spcl.losses import CrossEntropy
from spcl.plugins import load_plugins
from spcl.results import read_runs
from spcl.runs import FolderError, InterruptedRunError, RunFolder, execute, load_run, resolve_settings, resume_settings
from spcl.runs.build import make_learner, make_problem
from spcl.transforms import Compose, Crop, Flip

HABITS: dict[str, Any] = {
    "optimizer": {"name": "adamw", "weight_decay": 0.1},
    "schedule": {"name": "cosine", "warmup": 0.2},
    "clip_norm": 0.5,
    "loss": {"name": "cross-entropy", "label_smoothing": 0.1, "class_weights": "balanced"},
    "memory_batch": 5,
    "updates": 2,
    "average": 0.9,
    "epochs": 2,
}


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmark(tmp_path_factory.mktemp("data") / "small.npz")


def test_settings_become_arguments_of_the_learner(benchmark: Path) -> None:
    settings = small_settings(benchmark, **HABITS)
    problem = make_problem(settings, torch.device("cpu"))
    learner = make_learner(settings, problem.data, torch.device("cpu"), len(problem.stream))
    assert (learner.clip_norm, learner.average, learner.updates, learner.memory_batch) == (0.5, 0.9, 2, 5)
    assert type(learner.optimizer) is torch.optim.AdamW
    assert learner.optimizer.defaults["weight_decay"] == 0.1
    assert learner.schedule is not None
    assert learner.schedule(0) < learner.schedule(len(problem.stream) // 5) > learner.schedule(len(problem.stream) - 1)
    once = make_problem(small_settings(benchmark), torch.device("cpu"))
    assert len(problem.stream) == 2 * len(once.stream)
    plain = make_learner(small_settings(benchmark), once.data, torch.device("cpu"), 1)
    assert (plain.schedule, plain.augment, plain.clip_norm, plain.average, plain.updates) == (None, None, None, None, 1)
    assert plain.memory_batch == 8


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_a_run_with_all_habits_resumes_exactly_and_keeps_its_model(
    scenario: str, benchmark: Path, tmp_path: Path
) -> None:
    settings = small_settings(benchmark, scenario=scenario, **HABITS)
    whole = execute(settings, tmp_path / "whole")
    with pytest.raises(InterruptedRunError):
        execute(settings, tmp_path / "stopped", view=StopAtStep(22))
    resumed = execute(settings, tmp_path / "stopped", resume=True)
    assert resumed.tasks == whole.tasks
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "stopped")]
    assert [json.loads(line).get("losses") for line in metrics[0].splitlines()] == [
        json.loads(line).get("losses") for line in metrics[1].splitlines()
    ]
    learner = load_run(tmp_path / "whole")
    assert learner.average == 0.9
    assert isinstance(learner.tasks["task-0"].loss, CrossEntropy)
    problem = make_problem(settings, torch.device("cpu"))
    for name, (x, y) in problem.tests.items():
        local = learner.predict(x, name) if scenario == "task" else learner.predict(x) - learner.tasks[name].offset
        assert 100 * (local == y).double().mean().item() == pytest.approx(whole.tasks[name].final)


def test_images_are_augmented(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 30)
    x = (rng.integers(0, 60, (120, 1, 8, 8)) + 40 * y[:, None, None, None]).astype(np.uint8)
    data = from_arrays(x, y, name="squares")
    layer = {"augment": [{"name": "crop", "padding": 2}, "flip"], "backbone": "mlp", "threads": 1, "device": "cpu"}
    settings = resolve_settings(layer, data=data)
    learner = make_learner(settings, data, torch.device("cpu"), 10)
    assert learner.augment == Compose((Crop(2), Flip()))
    result = execute(settings, tmp_path / "run", data=data)
    without = execute(resolve_settings({**layer, "augment": []}, data=data), tmp_path / "without", data=data)
    assert result.confusion != without.confusion
    assert load_run(tmp_path / "run").augment == learner.augment


def test_frozen_parameters_stay_and_are_trained_after_unfreezing(benchmark: Path, tmp_path: Path) -> None:
    def weights(settings: Any, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        problem = make_problem(settings, torch.device("cpu"))
        before = make_learner(settings, problem.data, torch.device("cpu"), 10).model.backbone.state_dict()
        before = {key: value.clone() for key, value in before.items()}
        execute(settings, tmp_path / name)
        return before, load_run(tmp_path / name).model.backbone.state_dict()

    before, after = weights(small_settings(benchmark, frozen=["layers.1.*"]), "part")
    assert torch.equal(before["layers.1.weight"], after["layers.1.weight"])
    assert not torch.equal(before["layers.3.weight"], after["layers.3.weight"])
    before, after = weights(small_settings(benchmark, frozen=["*"]), "probe")
    assert all(torch.equal(before[name], after[name]) for name in before)
    later = small_settings(benchmark, frozen=["*"], unfreeze_after=10, checkpoint_seconds=0)
    before, after = weights(later, "later")
    assert not torch.equal(before["layers.1.weight"], after["layers.1.weight"])
    for stop in (9, 10, 14):
        with pytest.raises(InterruptedRunError):
            execute(later, tmp_path / f"stop-{stop}", view=StopAtStep(stop - 1))
        resumed = execute(later, tmp_path / f"stop-{stop}", resume=True)
        assert resumed.tasks == RunFolder(tmp_path / "later").read_result().tasks  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unfreeze_after": 3}, "unfreeze_after = 3, but nothing is frozen"),
        ({"schedule": "cosin"}, "there is no schedule 'cosin'; did you mean 'cosine'"),
        ({"augment": ["flop"]}, "there is no transform 'flop'; did you mean 'flip'"),
        ({"loss": {"name": "cross-entropy", "smoothing": 1}}, "loss 'cross-entropy' has no option 'smoothing'"),
        ({"average": 1.0}, "average = 1.0"),
        ({"updates": 0}, "updates = 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(changes: dict[str, Any], message: str, benchmark: Path) -> None:
    with pytest.raises(SpclError, match=message):
        small_settings(benchmark, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "huber"}, "task 'task-0' is a classification task, but the loss 'huber' is for regression"),
        ({"frozen": ["stem.*"]}, r"no parameter of the backbone matches 'stem\.\*'"),
        ({"augment": ["flip"]}, "the transform 'flip' is for images"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(
    changes: dict[str, Any], message: str, benchmark: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpclError, match=message):
        execute(small_settings(benchmark, **changes), tmp_path / "run")


PLUGIN = """
import torch
from torch import nn
from spcl.plugins import backbone, data_set, loss, schedule, transform
from spcl.data import from_arrays


@data_set("stripes")
def stripes(samples=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(samples) % 4
    return from_arrays(torch.randn(samples, 6, generator=generator) + y[:, None], y, name="stripes")


@loss("margin")
def margin(task, size=1.0):
    return nn.MultiMarginLoss(margin=size)


@schedule("halves")
def halves(steps, factor=0.5):
    return lambda step: 1.0 if step < steps / 2 else factor


@transform("noise")
def noise(scale=0.1):
    return lambda x: x + scale * torch.randn_like(x)
"""


def test_data_losses_schedules_and_transforms_of_a_plugin(tmp_path: Path) -> None:
    plugin = tmp_path / "habits_of_mine.py"
    plugin.write_text(PLUGIN)
    layer = {
        "plugins": [str(plugin)],
        "benchmark": "stripes",
        "data": {"samples": 80},
        "loss": {"name": "margin", "size": 0.5},
        "schedule": "halves",
        "augment": [{"name": "noise", "scale": 0.2}],
        "threads": 1,
        "device": "cpu",
    }
    settings = resolve_settings(layer)
    result = execute(settings, tmp_path / "run")
    assert result.data is not None
    assert result.data.train + result.data.test == 80
    with pytest.raises(InterruptedRunError):
        execute(settings, tmp_path / "stopped", view=StopAtStep(3))
    assert execute(settings, tmp_path / "stopped", resume=True).tasks == result.tasks
    learner = load_run(tmp_path / "run")
    loss = learner.tasks["task-0"].loss
    assert isinstance(loss, nn.MultiMarginLoss)
    assert loss.margin == 0.5
    with pytest.raises(SpclError, match="data set 'stripes' has no option 'sample'; did you mean 'samples'"):
        resolve_settings({**layer, "data": {"sample": 3}})
    assert load_plugins([str(plugin)])


def test_settings_that_an_earlier_version_did_not_record_have_their_defaults(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = execute(small_settings(benchmark), out)
    recorded = json.loads((out / "settings.json").read_text())
    for name in ("epochs", "average", "plugins", "augment", "data"):
        del recorded[name]
    (out / "settings.json").write_text(json.dumps(recorded))
    assert execute(small_settings(benchmark), out) == result
    with pytest.raises(FolderError, match="holds a run with epochs = 1, not 2"):
        execute(small_settings(benchmark, epochs=2), out)
    execute(small_settings(benchmark, epochs=2), tmp_path / "twice")
    assert [run.variant for run in read_runs(tmp_path)] == [{"epochs": 1}, {"epochs": 2}]


def test_a_method_has_the_settings_that_it_had_before_they_were_recorded(benchmark: Path, tmp_path: Path) -> None:
    out, now = tmp_path / "run", small_settings(benchmark, method="spcl", scenario="class")
    before = small_settings(benchmark, method={"name": "spcl", "finished_weight": 1.0}, scenario="class")
    with pytest.raises(InterruptedRunError):
        execute(before, out, view=StopAtStep(3))
    recorded = json.loads((out / "settings.json").read_text())
    del recorded["method"]["finished_weight"]
    (out / "settings.json").write_text(json.dumps(recorded))
    with pytest.raises(FolderError, match=r"holds a run with method.finished_weight = 1.0, not 0.01"):
        execute(now, out, resume=True)
    result = execute(resume_settings(out), out, resume=True)
    assert result.tasks == execute(before, tmp_path / "uninterrupted").tasks
    assert load_run(out).method.settings.finished_weight == 1.0
    execute(now, tmp_path / "now")
    weights = {run.path.name: run.variant.get("method.finished_weight") for run in read_runs(tmp_path)}
    assert weights["run"] == weights["uninterrupted"] != weights["now"]
