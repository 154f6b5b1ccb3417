"""Predictions, their evaluation, plain modules, and snapshots that predict in other threads."""

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from _learning import TinyResNet, assert_same, batch, complete_state, images
from spcl.errors import SpclError, TaskError
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import ER, SORO, make_method

X = images(7, 3)


def trained(scenario: str = "task", **options: Any) -> Learner:
    torch.manual_seed(0)
    learner = Learner(TinyResNet(dropout=0.3), SORO(), memory=Reservoir(9), scenario=scenario, **options)
    learner.add_task("a", classes=3)
    learner.add_task("b", classes=2)
    learner.add_task("speed", head=nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1)), loss=mse_loss)
    for seed in range(3):
        train_step(learner, seed)
    return learner


def train_step(learner: Learner, seed: int) -> None:
    speed = images(5, seed), images(5, seed).mean(dim=(1, 2, 3))[:, None]
    learner.step({"a": batch(6, 3, seed), "b": batch(4, 2, seed + 9), "speed": speed})


# -- probabilities and batches


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_probabilities_are_the_softmax_of_the_logits(scenario: str) -> None:
    learner = trained(scenario)
    for task in ("a", "b") if scenario == "task" else ("a", "b", None):
        probabilities = learner.predict_proba(X, task)
        torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(7))
        assert torch.equal(probabilities.argmax(dim=1), learner.predict(X, task))
        torch.testing.assert_close(probabilities.log(), learner.logits(X, task).log_softmax(dim=1))


def test_a_task_without_classes_has_no_probabilities() -> None:
    with pytest.raises(TaskError, match=r"task 'speed' has a head of its own .*; use predict\(x, 'speed'\)"):
        trained().predict_proba(X, "speed")


@pytest.mark.parametrize("call", ["predict", "predict_proba", "logits"])
def test_the_size_of_batches_changes_nothing_but_memory(call: str) -> None:
    learner, sizes = trained("class"), []
    learner.model.backbone.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    expected = getattr(learner, call)(X)
    assert sizes == [7]
    torch.testing.assert_close(getattr(learner, call)(X, batch_size=3), expected)
    assert sizes == [7, 3, 3, 1]


@pytest.mark.parametrize("size", [0, -1, 2.5, None])
def test_impossible_batch_sizes_are_refused(size: Any) -> None:
    with pytest.raises(SpclError, match=f"batch_size is {size!r}; give a positive whole number"):
        trained().predict(X, "a", batch_size=size)


# -- inputs that were not trained on


@pytest.mark.parametrize("call", ["predict", "predict_proba"])
@pytest.mark.parametrize(
    ("x", "found"),
    [
        (images(3, 1)[..., :3], r"float32\[2, 4, 3\]"),
        (X.long(), r"int64\[2, 4, 4\]"),
        ({"x": X}, r"\{x: float32\[2, 4, 4\]\}"),
    ],
    ids=["shape", "type", "structure"],
)
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_inputs_of_another_kind_than_trained_on_are_refused(scenario: str, x: Any, found: str, call: str) -> None:
    learner = trained(scenario)
    for task in ("a", "b") if scenario == "task" else ("a", None):
        with pytest.raises(TaskError, match=rf"samples of {found}, but .* trained on others \('.': float32\[2, 4, 4\]"):
            getattr(learner, call)(x, task)
        with pytest.raises(TaskError, match=rf"samples of {found}"):
            getattr(learner.snapshot(), call)(x, task)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_floating_point_inputs_are_converted(dtype: Any) -> None:
    learner, x = trained(), X.numpy().astype(dtype)
    expected = torch.from_numpy(x).float()
    assert torch.equal(learner.logits(x, "a"), learner.logits(expected, "a"))
    assert torch.equal(learner.predict(x, "speed"), learner.predict(expected, "speed"))
    y = np.zeros(7, dtype=np.int64)
    assert learner.evaluate([(x, y)], "a") == learner.evaluate([(expected, y)], "a")


def test_a_step_converts_float64_inputs_and_targets() -> None:
    learners = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        learner = Learner(TinyResNet(), SORO(), memory=Reservoir(9))
        learner.add_task("a", classes=3)
        learner.add_task("speed", head=nn.Linear(8, 1), loss=mse_loss)
        x, y = batch(6, 3, 0)
        for _ in range(2):
            learner.step({"a": (x.to(dtype), y), "speed": (x.to(dtype), x[:, 0, 0, :1].to(dtype).numpy())})
        learners.append(learner)
    assert_same(*map(complete_state, learners))


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_an_input_without_a_prediction_is_named(scenario: str) -> None:
    learner, x = trained(scenario), X.clone()
    x[2, 0, 0, 0] = torch.nan
    for call in (learner.predict, learner.predict_proba, learner.snapshot().predict):
        with pytest.raises(TaskError, match=r"predictions for 1 of 7 inputs .* NaN \(first: input 2\); give inputs"):
            call(x, "a")
    with pytest.raises(TaskError, match=r"predictions for 1 of 7 inputs"):
        learner.predict(x, "speed")
    assert learner.logits(x, "a").isnan().any(dim=1).tolist() == [index == 2 for index in range(7)]


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_an_input_without_a_prediction_is_evaluated_as_wrong(scenario: str) -> None:
    learner, x = trained(scenario), torch.full_like(X, torch.nan)
    for label in range(3):
        assert learner.evaluate([(x, torch.full((7,), label))], "a") == 0.0


# -- evaluation


def loader(x: Tensor, y: Tensor, size: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(x.split(size), y.split(size), strict=True)


def test_accuracy_and_mean_loss_equal_those_of_the_whole() -> None:
    learner = trained()
    y, speeds = torch.arange(7) % 3, torch.randn(7, 1)
    before = complete_state(learner)
    assert learner.evaluate(loader(X, y), "a") == pytest.approx(float((learner.predict(X, "a") == y).double().mean()))
    expected = float(mse_loss(learner.predict(X, "speed"), speeds))
    assert learner.evaluate(loader(X, speeds), "speed") == pytest.approx(expected)
    assert learner.evaluate([(X.numpy(), speeds.numpy())], "speed") == pytest.approx(expected)
    assert_same(complete_state(learner), before)


def test_class_incremental_accuracy_counts_all_classes() -> None:
    learner = trained("class")
    y = torch.arange(7) % 2
    right = learner.predict(X) == y + 3
    assert learner.evaluate(loader(X, y), "b") == pytest.approx(float(right.double().mean()))
    assert learner.evaluate(loader(X, y + 3)) == learner.evaluate(loader(X, y), "b")


def test_a_finished_task_can_be_evaluated() -> None:
    learner = trained()
    expected = learner.evaluate([batch(6, 3, 0)], "a")
    learner.finish_task("a")
    assert learner.evaluate([batch(6, 3, 0)], "a") == expected


@pytest.mark.parametrize(
    ("batches", "task", "words"),
    [
        ([], "a", "nothing to evaluate"),
        ([(X, torch.zeros(7, 1, dtype=torch.int64))], "a", r"task 'a': class labels .* \(7, 1\)"),
        ([(X, torch.full((7,), 3))], "a", "task 'a' has classes 0 to 2, but the batch has label 3"),
        ([(X, torch.full((7,), 5))], None, "the learner has classes 0 to 4, but the batch has label 5"),
        ([(X, torch.zeros(6, dtype=torch.int64))], None, "7 inputs but 6 labels"),
        ([(X, torch.zeros(7))], "speed", "task 'speed': its samples are .* but this batch has"),
        ([X], "a", "task 'a': a batch is a pair"),
        ([batch(6, 3, 0)], "c", "no task 'c'"),
    ],
)
def test_wrong_evaluations_are_explained(batches: Any, task: str | None, words: str) -> None:
    with pytest.raises(SpclError, match=words):
        trained("class").evaluate(batches, task)


def test_a_task_incremental_evaluation_needs_the_task() -> None:
    with pytest.raises(TaskError, match="needs the task of x"):
        trained().evaluate([batch(6, 3, 0)])


# -- the plain module


@pytest.mark.parametrize(("scenario", "task"), [("task", "a"), ("class", "b"), ("class", None), ("task", "speed")])
def test_the_module_gives_the_logits_and_follows_training(scenario: str, task: str | None) -> None:
    learner = trained(scenario)
    module = learner.module(task)
    assert not module.training
    assert torch.equal(module(X), learner.logits(X, task))
    before = module(X)
    train_step(learner, 7)
    assert torch.equal(module(X), learner.logits(X, task))
    assert not torch.equal(module(X), before)


def test_the_module_shares_every_weight_but_not_the_mode() -> None:
    learner = trained()
    other = trained()
    module = learner.module("speed")
    shared = {id(tensor) for part in learner.model.modules() for tensor in (*part.parameters(), *part.buffers())}
    assert {id(tensor) for tensor in (*module.parameters(), *module.buffers())} <= shared
    module.eval()
    module(X)
    for each in (learner, other):
        torch.manual_seed(5)
        train_step(each, 5)
    assert_same(complete_state(learner), complete_state(other))  # as if there were no module: dropout is on


def test_the_module_of_a_task_is_made_of_pytorch_alone() -> None:
    learner = Learner(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), SORO())
    learner.add_task("a", classes=3)
    learner.step({"a": (torch.randn(6, 4), torch.arange(6) % 3)})
    module = learner.module("a")
    assert all(type(part).__module__.startswith("torch.") for part in module.modules())
    assert list(module.state_dict()) == ["backbone.0.weight", "backbone.0.bias", "head.weight", "head.bias"]
    exported = torch.export.export(module, (torch.randn(6, 4),)).module()
    x = torch.randn(6, 4)
    assert torch.equal(exported(x), learner.logits(x, "a"))


def test_a_compiled_backbone_comes_out_plain() -> None:
    plain = TinyResNet()
    learner = Learner(torch.compile(plain, backend="eager"), SORO())
    learner.add_task("a", classes=3)
    learner.step({"a": batch(6, 3, 0)})
    module = learner.module("a")
    assert type(module.backbone) is TinyResNet
    torch.testing.assert_close(module(X), learner.logits(X, "a"))


def test_a_head_of_a_method_is_part_of_the_module() -> None:
    learner = Learner(TinyResNet(), make_method("mdmtr"), memory=Reservoir(9))
    learner.add_task("a", classes=3)
    learner.step({"a": batch(6, 3, 0)})
    assert torch.equal(learner.module("a")(X), learner.logits(X, "a"))


def test_a_module_needs_a_head() -> None:
    learner = Learner(TinyResNet(), SORO(), scenario="class")
    with pytest.raises(TaskError, match="no classification task yet"):
        learner.module()
    learner.add_task("a", classes=2)
    for task in ("a", None):
        with pytest.raises(TaskError, match="task 'a' has seen no data yet"):
            learner.module(task)
    with pytest.raises(TaskError, match="needs the task of x"):
        trained().module()


def test_a_copy_of_the_module_is_independent() -> None:
    learner = trained()
    kept = copy.deepcopy(learner.module("a"))
    expected = learner.logits(X, "a")
    train_step(learner, 7)
    assert torch.equal(kept(X), expected)


def test_numpy_inputs_are_predicted() -> None:
    learner = trained()
    assert torch.equal(learner.predict(X.numpy(), "a"), learner.predict(X, "a"))
    with pytest.raises(SpclError, match="cannot become a tensor"):
        learner.predict(np.array(["x"]), "a")


def test_autocast_is_left_to_the_user_of_the_module() -> None:
    learner = trained(autocast=torch.bfloat16, optimizer=partial(torch.optim.SGD, lr=0.01))
    module = learner.module("a")
    assert module(X).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(X).float(), learner.logits(X, "a"))


WIDE = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
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
    made.step({"camera": (WIDE, Y), "radar": (-WIDE, Y), "speed": (WIDE, WIDE[:, :1])})


@pytest.mark.parametrize("average", [None, 0.5])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_predictions_are_those_of_the_learner_when_copied(scenario: str, average: float | None) -> None:
    made = learner(scenario=scenario, average=average)
    for _ in range(3):
        step(made)
    snapshot = made.snapshot()
    expected = {task: made.predict_proba(WIDE, task) for task in ("camera", "radar")} | {
        "speed": made.predict(WIDE, "speed")
    }
    joint = made.predict_proba(WIDE) if scenario == "class" else None
    for _ in range(3):
        step(made)
    for task, outputs in expected.items():
        assert torch.equal((snapshot.predict if task == "speed" else snapshot.predict_proba)(WIDE, task), outputs)
    if joint is not None:
        assert torch.equal(snapshot.predict_proba(WIDE), joint)
        assert snapshot.class_names == [
            *(("camera", name) for name in ("cat", "dog", "bird")),
            *(("radar", label) for label in "012"),
        ]


def calls_in(action: Callable[[], object]) -> int:
    """The number of Python's functions that an action calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_a_copy_predicts_a_task_without_looking_at_the_others() -> None:
    calls = []
    for others in (1, 50):
        made = Learner(nn.Sequential(nn.Linear(3, 4)), SORO())
        names = [f"task-{number}" for number in range(1 + others)]
        for name in names:
            made.add_task(name, classes=2)
        made.step({name: (torch.randn(4, 3), torch.arange(4) % 2) for name in names})
        predict = partial(made.snapshot().predict_proba, torch.randn(4, 3), "task-0")
        predict()
        calls.append(calls_in(predict))
    assert calls[0] == calls[1]


def test_a_copy_predicts_by_the_class_means_of_its_time() -> None:
    made = learner(scenario="class", average=0.5, predict_by="class-means", memory=Reservoir(20))
    for _ in range(3):
        step(made)
    snapshot, expected = made.snapshot(), made.predict_proba(WIDE)
    assert torch.equal(snapshot.predict_proba(WIDE), expected)
    for _ in range(3):
        step(made)
    assert torch.equal(snapshot.predict_proba(WIDE), expected)
    assert not torch.equal(made.predict_proba(WIDE), expected)


def test_threads_get_whole_snapshots_while_the_learner_trains() -> None:
    made = learner()
    step(made)
    made.finish_task("speed")
    latest = (made.steps, made.snapshot())
    expected = {made.steps: made.predict_proba(WIDE, "camera")}
    found: list[tuple[int, Tensor]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            number, snapshot = latest
            found.append((number, snapshot.predict_proba(WIDE, "camera")))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        made.step({"camera": (WIDE, Y), "radar": (-WIDE, Y)})
        expected[made.steps] = made.predict_proba(WIDE, "camera")
        latest = (made.steps, made.snapshot())
    is_over.set()
    for thread in threads:
        thread.join()
    assert len({number for number, _ in found}) > 1
    assert all(torch.equal(outputs, expected[number]) for number, outputs in found)


def test_a_copy_holds_no_gradients_and_nothing_of_the_learner() -> None:
    made = learner()
    step(made)
    model = made.snapshot().model
    copied = [tensor for module in model.modules() for tensor in (*module.parameters(), *module.buffers())]
    own = {tensor.data_ptr() for module in made.model.modules() for tensor in (*module.parameters(), *module.buffers())}
    assert copied
    assert all(tensor.grad is None and tensor.data_ptr() not in own for tensor in copied)


def test_tasks_without_a_batch_are_not_in_a_snapshot() -> None:
    made = Learner(nn.Linear(4, 8), ER(), scenario="class")
    made.add_task("camera", classes=3)
    assert list(made.snapshot().tasks) == []
    made.step({"camera": (WIDE, Y)})
    assert list(made.snapshot().tasks) == ["camera"]
