"""The model that a complete run keeps: loaded without the data, evaluated, exported; errors of what cannot be."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.data import SourceData, from_sources
from spcl.errors import CheckpointError, DataError, SpclError, TaskError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import SORO
from spcl.models import BACKBONES, InputSpec
from spcl.runs import (
    FolderError,
    TrainedRun,
    UnfinishedRunError,
    execute,
    load_run,
    read_run,
    resolve_settings,
    resume_settings,
)
from spcl.runs.export import export_run
from spcl.runs.run import evaluate_run
from spcl.runs.trained import asked_task, predict_files
from trained_runs import NAMES, Trained, train, write_model_with_code


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def runs(base: Path) -> dict[str, Trained]:
    return {scenario: train(base, scenario, scenario=scenario) for scenario in ("task", "class")}


@pytest.fixture(params=["task", "class"])
def trained(request: pytest.FixtureRequest, runs: dict[str, Trained]) -> Trained:
    return runs[request.param]


@pytest.fixture
def copied(runs: dict[str, Trained], tmp_path: Path) -> Path:
    """A copy of a complete run, to be damaged."""
    return Path(shutil.copytree(runs["class"].path, tmp_path / "run"))


def names_by_task(run: TrainedRun) -> dict[str, tuple[str, ...]]:
    return {name: task.class_names for name, task in run.tasks.items()}


def choices(learner: Learner) -> list[str | None]:
    """What a task can be predicted as: each by name, and class-incremental among all classes."""
    return [*learner.tasks, *([None] if learner.scenario == "class" else [])]


def test_a_loaded_model_predicts_what_the_trained_one_does(trained: Trained) -> None:
    loaded = load_run(trained.path, device="cpu")
    assert loaded.steps == trained.learner.steps
    for task in choices(trained.learner):
        assert torch.equal(loaded.logits(trained.x, task), trained.learner.logits(trained.x, task))


def test_loading_needs_no_data_and_no_random_numbers(trained: Trained, base: Path) -> None:
    before = torch.get_rng_state()
    moved = (base / "named.npz").rename(base / "elsewhere.npz")
    try:
        load_run(trained.path)
    finally:
        moved.rename(base / "named.npz")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_of_an_earlier_version_has_its_tasks_as_sources(runs: dict[str, Trained]) -> None:
    run = read_run(runs["task"].path)
    earlier = replace(run, state={name: value for name, value in run.state.items() if name != "task_sources"})
    for each in (run, earlier):
        assert asked_task(each, None, "task-1") == "task-1"
        with pytest.raises(TaskError, match="has no source 'anna'; its sources are task-0, task-1"):
            asked_task(each, None, "anna")


def test_the_file_holds_the_model_and_no_samples(trained: Trained) -> None:
    state = read_checkpoint(trained.path / "model.safetensors")
    assert not {"optimizer", "memory", "random", "sources"} & state.keys()
    parameters = sum(part.numel() * 4 for module in trained.learner.model.modules() for part in module.parameters())
    assert (trained.path / "model.safetensors").stat().st_size < parameters + 20_000


def test_a_loaded_model_can_be_trained_further(trained: Trained) -> None:
    learner = load_run(trained.path, device="cpu")
    assert learner.memory is not None
    assert len(learner.memory) == 0
    learner.add_task("new", classes=2)
    x, y = torch.from_numpy(trained.x), torch.arange(len(trained.x)) % 2
    losses = [learner.step({"new": (x, y)}).losses["new"] for _ in range(20)]
    assert losses[-1] < losses[0]
    learner.finish_task("new")
    assert len(learner.memory) == learner.memory.budget  # none of it is left to tasks without samples


def test_names_of_classes_are_those_of_the_data(trained: Trained) -> None:
    run, learner = read_run(trained.path), trained.learner
    names = np.array([run.tasks[task].class_names[label] for task, label in learner.classes])
    assert sorted(names) == sorted(NAMES)
    assert [name for _, name in load_run(trained.path).class_names] == names.tolist()
    accuracy = json.loads((trained.path / "result.json").read_text())["accuracy"]
    right = []
    for task, classes in names_by_task(run).items():
        members = np.isin(trained.y, classes)
        chosen = None if learner.scenario == "class" else task
        among = names if chosen is None else np.array(classes)
        right.append(np.mean(among[learner.predict(trained.x[members], chosen).numpy()] == trained.y[members]))
    assert 100 * np.mean(right) == pytest.approx(accuracy)


def test_a_model_evaluates_to_what_the_run_recorded(trained: Trained) -> None:
    outcome = evaluate_run(read_run(trained.path), "cpu")
    assert outcome.now == outcome.recorded
    assert outcome.averages[1] == json.loads((trained.path / "result.json").read_text())["accuracy"]


def test_an_evaluation_on_other_data_or_of_other_weights_is_warned_of(copied: Path, base: Path, tmp_path: Path) -> None:
    result = json.loads((copied / "result.json").read_text())
    result["tasks"]["task-0"]["final"] -= 1.5
    (copied / "result.json").write_text(json.dumps(result))
    with pytest.warns(UserWarning, match=r"differ by up to 1\.50 from the recorded ones on the same data"):
        evaluate_run(read_run(copied), "cpu")
    with np.load(base / "named.npz") as arrays:
        other = dict(arrays)
    np.savez(tmp_path / "named.npz", **other | {"test_x": other["test_x"] ^ 1})
    settings = json.loads((copied / "settings.json").read_text())
    (copied / "settings.json").write_text(json.dumps(settings | {"benchmark": str(tmp_path / "named.npz")}))
    with pytest.warns(UserWarning, match=r"the data of .*named\.npz has changed since the run was made"):
        evaluate_run(read_run(copied), "cpu")


WITH_TORCH_ALONE = """
import json, sys
import numpy as np, torch
x = torch.from_numpy(np.load("x.npy"))
for name in "task", "class":
    extra = {"spcl.json": ""}
    model = torch.export.load(f"{name}.pt2", extra_files=extra).module()
    np.savez(name, all=model(x).detach(), one=model(x[:1]).detach())
    assert json.loads(extra["spcl.json"]) == json.load(open(f"{name}.pt2.json"))
assert not any(name.startswith("spcl") for name in sys.modules)
"""


def test_exported_programs_need_torch_alone(runs: dict[str, Trained], tmp_path: Path) -> None:
    chosen = {"task": "task-1", "class": None}
    for scenario, trained in runs.items():
        export_run(read_run(trained.path), tmp_path / f"{scenario}.pt2", chosen[scenario])
        np.save(tmp_path / "x.npy", trained.x)
    subprocess.run([sys.executable, "-c", WITH_TORCH_ALONE], cwd=tmp_path, check=True)
    for scenario, trained in runs.items():
        task = chosen[scenario]
        expected = trained.learner.logits(trained.x, task).numpy()
        with np.load(tmp_path / f"{scenario}.npz") as found:
            np.testing.assert_allclose(found["all"], expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found["one"], expected[:1], rtol=1e-4, atol=1e-5)
        description = json.loads((tmp_path / f"{scenario}.pt2.json").read_text())
        assert (description["input"]["dtype"], description["input"]["shape"]) == ("uint8", [1, 18, 18])
        named = [(each["task"], each["class"]) for each in description["columns"]]
        names = names_by_task(read_run(trained.path))
        assert named == [(name, word) for name, words in names.items() for word in words if task in (None, name)]


def test_an_exported_onnx_model_computes_the_same(trained: Trained, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    reference = pytest.importorskip("onnx.reference", reason="onnx is not installed")
    file = tmp_path / "model.onnx"
    export_run(read_run(trained.path), file, "task-0")
    (found,) = reference.ReferenceEvaluator(str(file)).run(None, {"x": trained.x[:5]})
    expected = trained.learner.logits(trained.x[:5], "task-0").numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_a_task_incremental_export_needs_a_task(base: Path, tmp_path: Path, trained: Trained) -> None:
    run = read_run(trained.path)
    with pytest.raises(TaskError, match=r"has no task 'speed'; its tasks are task-0 \(.*, .*, .*\); task-1"):
        export_run(run, tmp_path / "model.pt2", "speed")
    if trained.learner.scenario == "task":
        with pytest.raises(TaskError, match="is task-incremental; name the task of the samples, one of task-0"):
            export_run(run, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def kinds_of_data() -> SourceData:
    """A regression, multi-label targets and a classification, all of the same features."""
    x = np.random.default_rng(0).normal(size=(60, 5))
    sources = {
        "speed": (x, x[:, :2] @ np.array([[1.0, 0.5], [1.0, -0.5]])),
        "signs": (x, (x[:, :3] > 0).astype(int)),
        "light": (x, np.where(x[:, 1] > 0, "red", "green")),
    }
    return from_sources(sources, name="car")


def test_models_of_every_kind_of_task_predict_and_are_evaluated_and_exported(tmp_path: Path) -> None:
    data, out = kinds_of_data(), tmp_path / "run"
    small = {"method": "er", "batch_size": 8, "threads": 1, "device": "cpu", "learning_rate": 0.01, "epochs": 5}
    result = execute(resolve_settings(small, data=data), out, data=data)
    run = read_run(out)
    outcome = evaluate_run(run, "cpu", data=data)
    assert outcome.now == outcome.recorded == {name: task.final for name, task in result.tasks.items()}
    assert outcome.metrics == {"speed": "R²", "signs": "F1", "light": "accuracy"}
    source = data.sources[0]
    np.save(tmp_path / "x.npy", source.test_x)
    learner = run.learner("cpu")

    def predict(task: str, top: int = 1) -> list[dict[str, Any]]:
        return list(predict_files(run, learner, [tmp_path / "x.npy"], task=task, top=top, on_error=pytest.fail))

    outputs = np.array([list(row["outputs"].values()) for row in predict("speed")])
    np.testing.assert_allclose(outputs, learner.predict(source.test_x, "speed"), rtol=1e-5)
    signs = learner.predict(source.test_x, "signs").sigmoid()
    for index, probabilities in enumerate(signs.tolist()):
        expected = {str(label): value for label, value in enumerate(probabilities) if value > 0.5}
        rows = [row for row in predict("signs") if row["index"] == index]
        assert {row["class"]: row["probability"] for row in rows} == pytest.approx(expected or {None: None})
    assert {row["class"] for row in predict("light")} == {"green", "red"}
    export_run(run, tmp_path / "speed.pt2", "speed")
    program = torch.export.load(tmp_path / "speed.pt2").module()
    torch.testing.assert_close(program(source.test_x), learner.predict(source.test_x, "speed"))
    description = json.loads((tmp_path / "speed.pt2.json").read_text())
    assert (description["kind"], len(description["columns"])) == ("regression", 2)


class Masked(torch.nn.Module):
    """Mean of embeddings of the tokens that are not masked."""

    feature_dim = 6

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, 6)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = x["mask"].unsqueeze(-1).float()
        means: torch.Tensor = (self.table(x["tokens"]) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return means


@BACKBONES.register("masked-mean")
def masked_mean(inputs: InputSpec) -> torch.nn.Module:
    assert inputs.parts is not None
    return Masked(inputs.parts["tokens"].vocabulary or 0)


def test_samples_of_several_parts_are_read_by_name_and_exported(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = {"tokens": rng.integers(0, 9, (40, 4)), "mask": rng.integers(0, 2, (40, 4))}
    data = from_sources({"first": (x, x["tokens"][:, 0] > 4), "other": (x, x["mask"][:, 0] > 0)}, name="texts")
    small = {"method": "er", "batch_size": 8, "threads": 1, "device": "cpu", "backbone": "masked-mean", "epochs": 2}
    execute(resolve_settings(small, data=data), tmp_path / "run", data=data)
    run = read_run(tmp_path / "run")
    learner = run.learner("cpu")
    np.savez(tmp_path / "x.npz", **x)
    rows = list(predict_files(run, learner, [tmp_path / "x.npz"], task="other", on_error=pytest.fail))
    expected = learner.predict_proba(x, "other").amax(1).tolist()
    assert [row["probability"] for row in rows] == pytest.approx(expected, rel=1e-5)
    np.savez(tmp_path / "part.npz", tokens=x["tokens"])
    errors: list[DataError] = []
    assert not list(predict_files(run, learner, [tmp_path / "part.npz"], task="other", on_error=errors.append))
    assert "must hold the arrays tokens, mask, but it has no mask" in str(errors[0])
    export_run(run, tmp_path / "model.pt2", "other")
    program = torch.export.load(tmp_path / "model.pt2").module()
    tensors = {name: torch.from_numpy(part) for name, part in x.items()}
    torch.testing.assert_close(program(tensors), learner.logits(x, "other"))


def test_a_folder_without_a_run_is_named(base: Path, copied: Path, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"no run in .*absent, which does not exist; give the folder of a run"):
        load_run(tmp_path / "absent")
    with pytest.raises(FolderError, match=rf"no run in {tmp_path}; give the folder of a run, such as {copied}"):
        load_run(tmp_path)


def test_an_unfinished_run_is_to_be_resumed(copied: Path) -> None:
    (copied / "result.json").unlink()
    with pytest.raises(UnfinishedRunError, match=f"the run in {copied} is not complete; resume it first"):
        load_run(copied)


def test_the_reason_for_a_missing_model_is_said(base: Path, copied: Path) -> None:
    kept_none = train(base, "without", keep_model=False)
    assert not (kept_none.path / "model.safetensors").exists()
    with pytest.raises(FolderError, match=r"has no model \(keep_model=false\); run its settings again in another"):
        load_run(kept_none.path)
    (copied / "model.safetensors").unlink()
    with pytest.raises(FolderError, match=r"has no model: model\.safetensors was removed"):
        load_run(copied)
    settings = json.loads((copied / "settings.json").read_text())
    del settings["keep_model"]
    (copied / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(FolderError, match="has no model, because an earlier version made it"):
        load_run(copied)


def damaged(copied: Path) -> Iterator[Path]:
    file = copied / "model.safetensors"
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    for broken in (bytes(flipped), content[: len(content) // 2], b""):
        file.write_bytes(broken)
        yield file


def test_a_damaged_model_is_refused(copied: Path) -> None:
    for file in damaged(copied):
        with pytest.raises(CheckpointError, match=f"{file.name} is .*damaged.*; run its settings again in another"):
            load_run(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "mlp"}, "does not fit its settings.json, which may have been changed: the backbone does not fit"),
        ({"method": {"name": "er"}}, "does not fit its settings.json, .* made with the method 'soro', not 'er'"),
        ({"batch": 3}, "the settings of the run in .*: there is no setting 'batch'"),
    ],
)
def test_changed_settings_are_refused(copied: Path, changes: dict[str, object], message: str) -> None:
    settings = json.loads((copied / "settings.json").read_text())
    (copied / "settings.json").write_text(json.dumps(settings | changes))
    with pytest.raises(SpclError, match=message):
        load_run(copied)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("predicts",), None),
        (("predicts", 0, "outputs"), "three"),
        (("predicts", 0, "name"), "another"),
        (("inputs", 0, "shape"), "wide"),
        (("inputs",), []),
        (("tasks", 0, "name"), None),
        (("tasks", 1), {}),
        (("learner",), []),
        (("backbone",), {"weight": "none"}),
    ],
)
def test_a_model_of_wrong_content_is_refused(copied: Path, place: tuple[Any, ...], wrong: object) -> None:
    state = read_checkpoint(copied / "model.safetensors")
    inner: Any = state
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = wrong
    write_checkpoint(copied / "model.safetensors", state)
    with pytest.raises(SpclError):
        load_run(copied, device="cpu").predict(torch.zeros(2, 1, 8, 8))


def test_a_run_folder_with_code_of_its_own_runs_none_of_it(copied: Path) -> None:
    pytest.importorskip("transformers")
    mark = write_model_with_code(copied / "model")
    backbone = {"name": f"transformers:{copied / 'model'}", "pretrained": True, "trust_remote_code": True}
    settings = json.loads((copied / "settings.json").read_text()) | {"backbone": backbone}
    (copied / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(SpclError, match="runs no code of others"):
        load_run(copied, device="cpu")
    (copied / "result.json").unlink()
    with pytest.raises(SpclError, match="runs no code of others"):
        execute(resume_settings(copied), copied, resume=True)
    assert not mark.exists()


def test_a_model_state_holds_heads_of_any_kind_and_averaged_weights() -> None:
    torch.manual_seed(0)
    learner = Learner(torch.nn.Linear(4, 8), SORO(), memory=BalancedCoreset(10), average=0.9)
    learner.add_task("kind", classes=3)
    learner.add_task("speed", head=torch.nn.Linear(8, 1), loss=torch.nn.functional.mse_loss)
    x = torch.randn(12, 4)
    learner.step({"kind": (x, torch.arange(12) % 3), "speed": (x, x[:, :1])})
    learner.finish_task("kind")
    heads = {"speed": (torch.nn.Linear(8, 1), torch.nn.functional.mse_loss)}
    state = learner.model_state()
    loaded = Learner.load(state, backbone=torch.nn.Linear(4, 8), heads=heads, memory=BalancedCoreset(10))
    for task in learner.tasks:
        assert torch.equal(loaded.logits(x, task), learner.logits(x, task))
    assert loaded.active_tasks == ["speed"]
    assert loaded.step({"speed": (x, x[:, :1])}).losses["speed"] > 0
    del state["tasks"]
    with pytest.raises(CheckpointError, match="is not that of a learner: it has no tasks"):
        Learner.load(state, backbone=torch.nn.Linear(4, 8))
