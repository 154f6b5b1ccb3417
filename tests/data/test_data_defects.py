"""What is given by hand is taken as it is meant or refused: class weights, kinds of targets, files and sizes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from data_files import write_pets
from spcl.cli.app import app
from spcl.data import ImageData, SourceData, from_arrays, from_npz, from_sources
from spcl.errors import DataError, SpclError
from spcl.losses import LOSSES, CrossEntropy
from spcl.runs import (
    FolderError,
    execute,
    load_benchmark,
    make_problem,
    parse_assignments,
    read_run,
    resolve_settings,
)
from spcl.runs.build import make_backbone, make_losses
from spcl.runs.run import evaluate_run
from spcl.runs.settings import named_settings

CPU = torch.device("cpu")
SMALL = {"method": "er", "batch_size": 4, "memory_budget": 30, "threads": 1, "device": "cpu", "learning_rate": 0.01}
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(80, 5)).astype(np.float32)


# -- class weights


def letters() -> ImageData:
    return from_arrays(FEATURES, list("abcd") * 20, name="letters")


def weighted(weights: Any, **settings: Any) -> dict[str, Any]:
    return SMALL | {"tasks": 2, "loss": {"name": "cross-entropy", "class_weights": weights}} | settings


@pytest.mark.parametrize("config", range(4))
def test_class_weights_are_those_of_the_classes_named_in_any_order(config: int) -> None:
    data = letters()
    settings = resolve_settings(weighted({"b": 3.0, "d": 0.5}, config=config), data=data)
    tasks = make_problem(settings, CPU, data).tasks
    losses = make_losses(tasks.values(), settings)
    found: dict[str, float] = {}
    for name, task in tasks.items():
        loss = losses[name]
        assert isinstance(loss, CrossEntropy)
        assert loss.class_weights is not None
        found |= dict(zip(task.class_names, loss.class_weights, strict=True))
    assert found == {"a": 1.0, "b": 3.0, "c": 1.0, "d": 0.5}


def test_numbers_name_classes_as_well() -> None:
    data = from_arrays(FEATURES, [7, 8] * 40)
    settings = resolve_settings(weighted({8: 2.0}, tasks=1), data=data)
    problem = make_problem(settings, CPU, data)
    (loss,) = make_losses(problem.tasks.values(), settings).values()
    names = next(iter(problem.tasks.values())).class_names
    assert isinstance(loss, CrossEntropy)
    assert loss.class_weights == tuple({"7": 1.0, "8": 2.0}[name] for name in names)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], "give 'balanced' or a mapping from class name to weight, as a task's classes may be in any order"),
        ({"b": 3.0, "e": 2.0}, "names 'e', no class of letters; choose one of a, b, c, d"),
    ],
)
def test_class_weights_that_name_no_class_are_refused_before_training(weights: Any, message: str) -> None:
    settings = resolve_settings(weighted(weights), data=letters())
    with pytest.raises(SpclError, match=message):
        make_problem(settings, CPU, letters())


def test_every_loss_says_what_it_is_for() -> None:
    meanings = {name: meaning for name, meaning, _ in named_settings()["loss, regression_loss, multilabel_loss"]}
    kinds = ("classification", "regression", "multi-label")
    for name in LOSSES:
        assert any(kind in meanings[name] for kind in kinds), name


# -- kinds of targets


def test_floating_zeros_and_ones_in_columns_need_their_kind() -> None:
    labels = (FEATURES[:, :3] > 0).astype(np.float32)
    with pytest.raises(DataError, match=r'ml: .*give kinds=\{"ml": "multilabel"\}, or "regression"'):
        from_sources({"ml": (FEATURES, torch.from_numpy(labels))})
    for kind in ("multilabel", "regression"):
        assert from_sources({"ml": (FEATURES, labels)}, kinds={"ml": kind}).sources[0].kind == kind  # type: ignore[dict-item]
    with pytest.raises(DataError, match=r"one: .*may be classes or numbers"):
        from_sources({"one": (FEATURES, labels[:, :1])})


def test_whole_numbers_to_predict_are_pointed_to_regression() -> None:
    numbers = (FEATURES[:, 1] * 1000).astype(np.int64)
    with pytest.raises(DataError, match=r'reg: class -?\d+ has one sample.* give kinds=\{"reg": "regression"\}'):
        from_sources({"reg": (FEATURES, numbers)})
    assert from_sources({"reg": (FEATURES, numbers)}, kinds={"reg": "regression"}).sources[0].outputs == 1


# -- .npz files


def spcl(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def flags(**settings: Any) -> list[str]:
    return [part for name, value in (SMALL | settings).items() for part in ("--set", f"{name}={value}")]


def test_a_file_of_several_sources_is_trained_and_evaluated(tmp_path: Path) -> None:
    file = tmp_path / "car.npz"
    np.savez(
        file,
        speed_x=FEATURES,
        speed_y=FEATURES[:, :2].sum(axis=1),
        speed_test_x=FEATURES[:9],
        speed_test_y=FEATURES[:9, :2].sum(axis=1),
        signs_x=FEATURES,
        signs_y=(FEATURES[:, :3] > 0).astype(np.float32),
        signs_kind="multilabel",
        light_x=FEATURES,
        light_y=np.where(FEATURES[:, 1] > 0, "red", "green"),
        notes=np.zeros(3),
    )
    spcl("run", "--benchmark", str(file), *flags(epochs=5), "--out", str(tmp_path / "run"))
    record = json.loads((tmp_path / "run/result.json").read_text())
    metrics = {name: task.get("metric", "accuracy") for name, task in record["tasks"].items()}
    assert metrics == {"speed": "R²", "signs": "F1", "light": "accuracy"}
    assert all(task["final"] > 30 for task in record["tasks"].values()), record["tasks"]
    assert record["data"]["test"] == 9 + 16 + 16
    assert "speed" in spcl("evaluate", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("y", "kind", "expected"),
    [
        (FEATURES[:, 0], None, ("regression", 1)),
        (FEATURES[:, :2], None, ("regression", 2)),
        ((FEATURES[:, :3] > 0).astype(int), None, ("multilabel", 3)),
        ((FEATURES[:, :3] > 0).astype(float), "multilabel", ("multilabel", 3)),
        (np.arange(80), "regression", ("regression", 1)),
    ],
)
def test_targets_that_are_no_labels_make_one_source(tmp_path: Path, y: np.ndarray, kind: Any, expected: Any) -> None:
    more = {} if kind is None else {"kind": np.array(kind)}
    np.savez(tmp_path / "own.npz", x=FEATURES, y=y, **more)
    data = from_npz(tmp_path / "own.npz")
    assert isinstance(data, SourceData)
    (source,) = data.sources
    assert (source.name, source.kind, source.outputs) == ("own", *expected)
    assert (len(source.train_y), len(source.test_y)) == (64, 16)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a_x": FEATURES, "a_y": FEATURES[:, 0], "b_x": FEATURES}, "holds b_x, but no b_y"),
        ({"x": FEATURES, "a_x": FEATURES, "a_y": FEATURES[:, 0]}, "holds x, but no y"),
        ({"a_x": FEATURES, "a_y": FEATURES[:, 0], "a_test_y": FEATURES[:, 0]}, "holds a_test_y, but no a_test_x"),
        ({"x": FEATURES, "y": FEATURES[:, 0], "test_x": FEATURES}, "holds test_x; give test_x and test_y together"),
        ({"test_x": FEATURES, "test_y": FEATURES[:, 0]}, "must hold arrays x and y .* or NAME_x and NAME_y"),
        ({"x": FEATURES, "y": FEATURES[:, 0], "kind": "ranking"}, "kind is 'ranking'; choose one of classification"),
    ],
)
def test_incomplete_files_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(DataError, match=message):
        from_npz(tmp_path / "own.npz")


# -- sizes of images


@pytest.mark.parametrize(("shape", "backbone"), [((8, 8), "mlp"), ((17, 40), "mlp"), ((18, 18), "cnn")])
def test_the_default_backbone_takes_images_of_any_size(shape: tuple[int, int], backbone: str) -> None:
    data = from_arrays(RNG.integers(0, 256, (20, 3, *shape), dtype=np.uint8), [0, 1] * 10)
    settings = resolve_settings({"method": "er", "device": "cpu"}, data=data)
    assert settings.backbone == backbone
    make_backbone(settings, data, CPU)


def test_pictures_are_resized_to_width_and_height(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    folder = write_pets(tmp_path / "pets", 2)
    given = parse_assignments(["data.size=[20,24]"])["data"]
    for _ in range(2):  # decoded, and from the cache
        assert load_benchmark(folder, **given).shape == (3, 24, 20)
    assert load_benchmark(folder, size=[24, 20]).shape == (3, 20, 24)
    for size in ("20x20", [20], [20, 0], 2.5):
        with pytest.raises(DataError, match=r"give one number .*such as 32, or both, such as \[32, 24\]"):
            load_benchmark(folder, size=size)


# -- names of data


def test_evaluation_asks_for_data_from_python(tmp_path: Path) -> None:
    data = letters()
    execute(resolve_settings(SMALL | {"tasks": 1}, data=data), tmp_path / "run", data=data)
    with pytest.raises(FolderError, match=r"the data 'letters' of the run in .* came from Python.*data=…"):
        evaluate_run(read_run(tmp_path / "run"), "cpu")
    assert evaluate_run(read_run(tmp_path / "run"), "cpu", data=data).difference < 0.01


def test_an_unknown_name_is_no_file_here_either() -> None:
    with pytest.raises(DataError, match=r"unknown data set 'pics2', and there is no such file or folder in /"):
        load_benchmark("pics2")
