"""A predictor predicts what the learner did when it was copied, whatever happens to the learner meanwhile."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spcl.errors import DataError, TaskError
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import ER, SORO
from spcl.models import InputSpec
from spcl.serve import ServeSettings
from spcl.serve.build import new_learner
from spcl.serve.predictor import Predictor
from spcl.serve.records import Records
from spcl.serve.samples import example_inputs, samples_from_lists

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def learner(**options: object) -> Learner:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU())
    made = Learner(backbone, SORO(), **options)
    made.add_task("camera", classes=["cat", "dog", "bird"])
    made.add_task("radar", classes=3)
    made.add_task("speed", head=nn.Linear(8, 1), loss=nn.functional.mse_loss)
    return made


def step(made: Learner) -> None:
    made.step({"camera": (X, Y), "radar": (-X, Y), "speed": (X, X[:, :1])})


@pytest.mark.parametrize("average", [None, 0.5])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_predictions_are_those_of_the_learner_when_copied(scenario: str, average: float | None) -> None:
    made = learner(scenario=scenario, average=average)
    for _ in range(3):
        step(made)
    predictor = Predictor.of(made)
    expected = {task: made.predict_proba(X, task) for task in ("camera", "radar")} | {"speed": made.predict(X, "speed")}
    joint = made.predict_proba(X) if scenario == "class" else None
    for _ in range(3):
        step(made)
    for task, outputs in expected.items():
        assert torch.equal(predictor.predict(X, task).outputs, outputs)
    if joint is not None:
        prediction = predictor.predict(X)
        assert torch.equal(prediction.outputs, joint)
        assert prediction.classes == [
            *(("camera", name) for name in ("cat", "dog", "bird")),
            *(("radar", label) for label in "012"),
        ]
    assert predictor.step == 3


def test_a_copy_predicts_by_the_class_means_of_its_time() -> None:
    made = learner(scenario="class", average=0.5, predict_by="class-means", memory=Reservoir(20))
    for _ in range(3):
        step(made)
    predictor, expected = Predictor.of(made), made.predict_proba(X)
    assert torch.equal(predictor.predict(X).outputs, expected)
    for _ in range(3):
        step(made)
    assert torch.equal(predictor.predict(X).outputs, expected)
    assert not torch.equal(made.predict_proba(X), expected)


def test_threads_get_whole_snapshots_while_the_learner_trains() -> None:
    made = learner()
    step(made)
    made.finish_task("speed")
    latest = Predictor.of(made)
    expected = {latest.step: latest.predict(X, "camera").outputs}
    found: list[tuple[int, Tensor]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            prediction = latest.predict(X, "camera")
            found.append((prediction.step, prediction.outputs))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        made.step({"camera": (X, Y), "radar": (-X, Y)})
        new = Predictor.of(made)
        expected[new.step] = made.predict_proba(X, "camera")
        latest = new
    is_over.set()
    for thread in threads:
        thread.join()
    assert len({number for number, _ in found}) > 1
    assert all(torch.equal(outputs, expected[number]) for number, outputs in found)


def test_a_copy_holds_no_gradients_and_nothing_of_the_learner() -> None:
    made = learner()
    step(made)
    model = Predictor.of(made)._model.model
    copied = [tensor for module in model.modules() for tensor in (*module.parameters(), *module.buffers())]
    own = {tensor.data_ptr() for module in made.model.modules() for tensor in (*module.parameters(), *module.buffers())}
    assert copied
    assert all(tensor.grad is None and tensor.data_ptr() not in own for tensor in copied)


def test_tasks_without_a_batch_are_not_predicted() -> None:
    made = Learner(nn.Linear(4, 8), ER(), scenario="class")
    made.add_task("camera", classes=3)
    assert Predictor.of(made).tasks == []
    made.step({"camera": (X, Y)})
    predictor = Predictor.of(made)
    with pytest.raises(TaskError, match=r"no trained task 'radar'; the tasks are \['camera'\]"):
        predictor.predict(X, "radar")
    with pytest.raises(DataError, match=r"samples of float32\[2\], but expected are float32\[4\]"):
        predictor.predict(X[:, :2], "camera")


def test_lists_become_the_parts_that_the_backbone_was_built_for() -> None:
    text, size = InputSpec((2,), torch.int64, 10), InputSpec((), torch.float32)
    named = InputSpec((2,), torch.int64, 10, {"text": text, "size": size})
    x = samples_from_lists({"size": [1, 2], "text": [[1, 2], [3, 4]]}, named)
    assert isinstance(x, dict)
    assert list(x) == ["text", "size"]
    assert x["size"].dtype == torch.float32
    for names in (("1", "0"), ("2", "1"), ("00", "1")):  # as messages of sources are understood
        spec = InputSpec((2,), torch.int64, 10, dict.fromkeys(names, size))
        given, example = samples_from_lists({name: [5] for name in names}, spec), example_inputs(spec)
        assert type(given) is type(example) is (tuple if names == ("1", "0") else dict)
    pair = samples_from_lists({"0": [[1, 2]], "1": [5]}, InputSpec((2,), torch.int64, 10, {"0": text, "1": size}))
    assert isinstance(pair, tuple)
    for wrong in ([[1, 2]], {"text": [[1, 2]]}):
        with pytest.raises(DataError, match=r"give an object with the parts \['text', 'size'\]"):
            samples_from_lists(wrong, named)
    for wrong in (["a"], [[1], [2, 3]], [None], [{}]):
        with pytest.raises(DataError, match=r"the inputs are no samples of float32\[\]"):
            samples_from_lists(wrong, size)


def test_a_service_predicts_by_what_its_settings_say(tmp_path: Path) -> None:
    learner_settings = {"scenario": "class", "memory": "reservoir", "memory_budget": 10, "predict_by": "class-means"}
    given = ServeSettings.of(
        {
            "state": str(tmp_path / "state"),
            "source": {"name": "folder", "path": str(tmp_path / "hub")},
            "inputs": {"shape": [4]},
            "learner": learner_settings,
        }
    )
    assert new_learner(given.run_settings(), given.inputs.spec(), Records()).predict_by == "class-means"
