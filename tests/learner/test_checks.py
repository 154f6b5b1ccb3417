"""Calls that do not fit are refused before anything has changed, and calls that meet are refused."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    hinge_embedding_loss,
    huber_loss,
    l1_loss,
    mse_loss,
    poisson_nll_loss,
    smooth_l1_loss,
)

from _learning import TinyResNet, assert_same, batch, complete_state, images
from spcl.errors import SpclError, TaskError
from spcl.learner import Learner
from spcl.losses import CrossEntropy
from spcl.memory import BalancedCoreset, Memory, Reservoir
from spcl.methods import ER, SORO, Gradients, Method, Weights


def make_learner(scenario: str = "class") -> Learner:
    """A running, a finished and a new classifier, a running and a new regression; with memory."""
    learner = Learner(TinyResNet(dropout=0.2), SORO(), memory=Reservoir(6), scenario=scenario)
    learner.add_task("done", classes=2)
    learner.add_task("lidar", classes=3)
    learner.add_task("speed", head=nn.Linear(8, 2), loss=mse_loss)
    pairs = {"done": batch(4, 2, 0), "lidar": batch(5, 3, 1), "speed": (images(4, 2), torch.zeros(4, 2))}
    learner.step(pairs)
    learner.step(pairs)
    learner.finish_task("done")
    learner.add_task("new", classes=2)
    learner.add_task("newer", head=nn.Linear(8, 2), loss=mse_loss)
    return learner


def step(**batches: Any) -> Callable[[Learner], object]:
    return lambda learner: learner.step({"lidar": batch(5, 3, 7)} | batches)


def labels(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


X, HEAD, HEAD_1 = images(3, 9), nn.Linear(8, 2), nn.Linear(8, 1)
BAD_STEPS = {
    "no task": (
        lambda learner: learner.step({}),
        r"at least one source; active sources: \['lidar', 'speed', 'new', 'newer'\]",
    ),
    "no dict": (lambda learner: learner.step(batch(4, 2, 1)), r"a step takes a dict .* by source, but it is a tuple"),
    "unknown task": (step(radar=batch(4, 2, 1)), r"no source 'radar'; there are \['done', 'lidar', .*add_task"),
    "finished task": (step(done=batch(4, 2, 1)), r"task 'done' is finished"),
    "not a pair": (step(new=X), r"task 'new': a batch is a pair of tensors .*\(inputs, targets\), but it is a Tensor"),
    "not tensors": (step(new=(X, [0, 1, 0])), r"task 'new': a batch is a pair of tensors"),
    "nothing": (step(new=None), r"task 'new': a batch is a pair of tensors .* but it is a NoneType"),
    "empty batch": (step(new=(X[:0], labels())), r"task 'new': the batch is empty \(x has shape \(0, 2, 4, 4\)\)"),
    "no batch dimension": (
        step(new=(torch.tensor(1.0), labels(0))),
        r"task 'new': the batch is empty \(x has shape \(\)",
    ),
    "fewer targets": (step(new=(X, labels(0, 1))), r"task 'new': 3 inputs but targets of shape \(2,\)"),
    "one target": (step(new=(X, torch.tensor(1))), r"task 'new': 3 inputs but targets of shape \(\)"),
    "label too high": (step(new=(X, labels(0, 1, 2))), r"'new' has classes 0 to 1, but the batch has label 2; fix it"),
    "label negative": (step(new=(X, labels(0, -1, 1))), r"task 'new' has classes 0 to 1, but the batch has label -1"),
    "labels of floats": (step(new=(X, torch.zeros(3))), r"task 'new': class labels .*int64.* torch.float32 .*\(3,\)"),
    "labels of int32": (step(new=(X, labels(0, 1, 0, dtype=torch.int32))), r"'new': class labels .*torch.int32"),
    "labels one-hot": (step(new=(X, torch.eye(3, 2).long())), r"'new': class labels .* shape \(3, 2\)"),
    "other shape than before": (
        step(lidar=(images(3, 1)[..., :3], labels(0, 1, 2))),
        r"task 'lidar': its samples are float32\[2, 4, 4\] .*, but this batch has float32\[2, 4, 3\] .*; convert it",
    ),
    "other type than before": (step(lidar=(X.long(), labels(0, 1, 2))), r"task 'lidar': .* int64\[2, 4, 4\]"),
    "other targets than before": (step(speed=(X, torch.zeros(3, 3))), r"task 'speed': .* targets float32\[3\]"),
    "probabilities that are none": (
        step(new=(X, torch.tensor([[0.5, 0.5], [0.5, 0.6], [-1.0, 2.0]]))),
        r"task 'new': the probabilities of 2 of 3 samples .* \(first: sample 1, sum 1.1, minimum 0.5\); normalise",
    ),
    "probabilities of too many classes": (
        step(new=(X, torch.eye(3))),
        r"task 'new': class labels .* or probabilities of shape \(samples, 2\), but they are torch.float32 .*\(3, 3\)",
    ),
    "probabilities instead of labels": (
        step(lidar=(X, torch.eye(3))),
        r"task 'lidar': its samples are .* with targets int64\[\], but this batch has .* with targets float32\[3\]",
    ),
    "dict instead of a tensor": (
        step(lidar=({"x": X}, labels(0, 1, 2))),
        r"task 'lidar': its samples are float32\[2, 4, 4\] .*, but this batch has \{x: float32\[2, 4, 4\]\}",
    ),
    "targets that the loss refuses": (
        step(newer=(X, torch.zeros(3, 2, dtype=torch.complex64))),
        r"task 'newer': the model raised an error on 3 samples of float32\[2, 4, 4\] with targets complex64\[2\]",
    ),
    "the second new task is wrong": (
        step(new=batch(3, 2, 1), newer=(X, torch.zeros(3, 2, dtype=torch.complex64))),
        r"task 'newer': the model raised an error on",
    ),
}
OTHER_CALLS = {
    "empty name": (lambda learner: learner.add_task("", classes=2), r"non-empty text .* it is ''"),
    "reserved name": (
        lambda learner: learner.add_task("memory", classes=2),
        r"other than 'memory', but it is 'memory'",
    ),
    "no name": (lambda learner: learner.add_task(3, classes=2), r"must be a non-empty text .* it is 3"),
    "running name": (lambda learner: learner.add_task("lidar", classes=2), r"a task 'lidar' already, which is running"),
    "finished name": (lambda learner: learner.add_task("done", classes=2), r"a task 'done' already, which is finished"),
    "nothing to predict": (
        lambda learner: learner.add_task("a"),
        r"task 'a': pass either classes=, or head= and loss=",
    ),
    "both": (
        lambda learner: learner.add_task("a", classes=2, head=HEAD, loss=mse_loss),
        r"task 'a': pass either",
    ),
    "head without loss": (lambda learner: learner.add_task("a", head=HEAD), r"task 'a': pass either"),
    "loss without head": (lambda learner: learner.add_task("a", loss=mse_loss), r"task 'a': pass either"),
    "a loss that is none": (
        lambda learner: learner.add_task("a", classes=2, loss="mse"),
        r"task 'a': its loss must be",
    ),
    "two classes of one name": (
        lambda learner: learner.add_task("a", classes=("cat", "cat")),
        r"task 'a': the names of classes must be different texts",
    ),
    "class weights of other classes": (
        lambda learner: learner.add_task("a", classes=2, loss=CrossEntropy(class_weights=(1.0, 2.0, 3.0))),
        r"task 'a' has 2 classes, but its loss has 3 class weights",
    ),
    "no class": (lambda learner: learner.add_task("a", classes=0), r"task 'a': classes must be .* it is 0"),
    "half a class": (lambda learner: learner.add_task("a", classes=2.5), r"task 'a': classes must be .* it is 2.5"),
    "a head that is none": (
        lambda learner: learner.add_task("a", head=torch.relu, loss=mse_loss),
        r"task 'a': its head must be a torch.nn.Module, but it is <built-in",
    ),
    "used head": (
        lambda learner: learner.add_task("a", head=learner.tasks["speed"].head, loss=mse_loss),
        r"task 'a': its head shares parameters",
    ),
    "backbone as head": (
        lambda learner: learner.add_task("a", head=learner.model.backbone, loss=mse_loss),
        r"task 'a': its head shares parameters",
    ),
    "finish unknown": (lambda learner: learner.finish_task("radar"), r"no task 'radar'"),
    "finish twice": (lambda learner: learner.finish_task("done"), r"task 'done' is finished already"),
    "predict unknown": (lambda learner: learner.predict(X, task="radar"), r"no task 'radar'"),
    "predict nothing": (lambda learner: learner.predict(X[:0]), r"nothing to predict: x has shape \(0, 2, 4, 4\)"),
    "predict a number": (lambda learner: learner.predict(torch.tensor(1.0)), r"nothing to predict: x has shape \(\)"),
    "predict another shape": (
        lambda learner: learner.predict(images(3, 1)[:, :1], task="lidar"),
        r"x has samples of float32\[1, 4, 4\], but the learner was trained on others .*'lidar': float32\[2, 4, 4\]",
    ),
    "logits of another shape": (
        lambda learner: learner.logits(images(3, 1)[:, :1], task="lidar"),
        r"task 'lidar': the model raised an error on 3 samples of float32\[1, 4, 4\]",
    ),
    "predict another type": (
        lambda learner: learner.predict(X.long()),
        r"^the model raised an error on 3 samples of int64",
    ),
}


@pytest.mark.parametrize(("call", "words"), [pytest.param(*case, id=name) for name, case in BAD_STEPS.items()])
def test_a_wrong_step_is_refused_before_anything_has_changed(call: Callable[[Learner], object], words: str) -> None:
    check_refused(make_learner(), call, words)


@pytest.mark.parametrize(("call", "words"), [pytest.param(*case, id=name) for name, case in OTHER_CALLS.items()])
def test_a_wrong_call_is_refused_before_anything_has_changed(call: Callable[[Learner], object], words: str) -> None:
    check_refused(make_learner(), call, words)


def check_refused(learner: Learner, call: Callable[[Learner], object], words: str) -> None:
    before = complete_state(learner)
    with pytest.raises(TaskError, match=words):
        call(learner)
    assert_same(complete_state(learner), before)
    report = learner.step({"lidar": batch(5, 3, 7), "new": batch(4, 2, 8), "speed": (X, torch.zeros(3, 2))})
    assert not report.skipped  # and it goes on


def test_predictions_need_a_task_where_it_is_not_known() -> None:
    learner = make_learner("task")
    check_refused(learner, lambda learner: learner.predict(X), r"needs the task of x; pass task=, one of \['done', ")


def test_predictions_need_data_first() -> None:
    learner = Learner(TinyResNet(), SORO(), scenario="class")
    with pytest.raises(TaskError, match="no classification task yet"):
        learner.predict(X)
    learner.add_task("a", classes=2)
    for task in (None, "a"):
        with pytest.raises(TaskError, match=r"^task 'a' has seen no data yet"):
            learner.predict(X, task=task)


def test_a_memory_of_another_run_is_refused() -> None:
    memory = Reservoir(4)
    memory.start("stranger", 2)
    with pytest.raises(SpclError, match=r"the memory holds samples of \['stranger'\] already"):
        Learner(TinyResNet(), SORO(), memory=memory)


def test_a_loss_that_is_no_number_is_refused() -> None:
    learner = make_learner()
    learner.add_task("dense", head=nn.Linear(8, 2), loss=partial(mse_loss, reduction="none"))
    before = complete_state(learner)
    with pytest.raises(TaskError, match=r"task 'dense': its loss must be one number, but has shape \(3, 2\)"):
        learner.step({"dense": (X, torch.zeros(3, 2))})
    assert_same(complete_state(learner), before)


def test_a_classifier_needs_feature_vectors_of_one_length() -> None:
    learner = Learner(nn.Conv2d(2, 3, 3), SORO())
    learner.add_task("a", classes=2)
    with pytest.raises(TaskError, match=r"task 'a': a classifier needs .* gives \(4, 3, 2, 2\); pass head= and loss="):
        learner.step({"a": batch(4, 2, 1)})
    flat = Learner(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()), SORO())
    flat.add_task("a", classes=2)
    flat.add_task("b", classes=2)
    before = complete_state(flat)
    x, y = batch(4, 2, 1)
    with pytest.raises(TaskError, match=r"task 'b': the backbone gives 48 .* and 12 for the sources before"):
        flat.step({"a": (x, y), "b": (torch.randn(4, 2, 6, 6), y)})
    assert_same({**complete_state(flat), "random": None}, {**before, "random": None})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scenario": "joint"}, "scenario is 'joint'; give 'task', 'class' or 'domain'"),
        ({"autocast": torch.float16}, "autocast must be None or torch.bfloat16.*float16"),
        ({"memory_batch": 0}, "memory_batch is 0; give a positive whole number, or None"),
        ({"memory_batch": 2.5}, "memory_batch is 2.5; give a positive whole number, or None"),
        (
            {"optimizer": torch.optim.LBFGS},
            "LBFGS evaluates the loss several times in a step.*use e.g. torch.optim.Adam",
        ),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer must make an optimiser .* but it is SGD"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpclError, match=words):
        Learner(TinyResNet(), ER(), **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Learner("resnet", ER()), "the backbone must be a torch.nn.Module, but it is 'resnet'"),
        (
            lambda: Learner(TinyResNet(), "soro"),
            "the method must be .* SORO\\(\\), but it is 'soro'; see .*make_method",
        ),
        (lambda: Learner(TinyResNet(), SORO), "the method must be .* but it is <class"),
        (lambda: Learner(TinyResNet(), SORO(), memory=100), "the memory must be .* but it is 100"),
        (lambda: Reservoir(1.5), "is 1.5; give a budget of at least 1 sample"),
        (lambda: make_learner().predict([[1.0]]), r"part '\[0\]' of the inputs is a list; inputs are a tensor"),
    ],
)
def test_things_of_another_kind_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SpclError, match=words):
        make()


def test_outputs_of_another_kind_are_refused() -> None:
    class Pair(TinyResNet):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    learner = Learner(Pair(), SORO())
    learner.add_task("a", classes=2)
    with pytest.raises(TaskError, match="the backbone must give a tensor of features, but it gives a tuple; wrap it"):
        learner.step({"a": batch(4, 2, 1)})
    other = Learner(TinyResNet(), SORO())
    other.add_task("b", head=nn.Linear(8, 2), loss=lambda output, targets: 0.5)
    with pytest.raises(TaskError, match=r"task 'b': its loss must be a tensor, but it is 0.5"):
        other.step({"b": (X, torch.zeros(3, 2))})


def test_impossible_backbones_are_refused() -> None:
    with pytest.raises(SpclError, match=r"share one type and device; found torch.float32 on cpu, torch.float64 on cpu"):
        Learner(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), ER())

    with pytest.raises(SpclError, match=r"parameter '0.weight' has no shape yet; run a batch through"):
        Learner(nn.Sequential(nn.LazyLinear(8)), ER())


@pytest.mark.parametrize(("at_first", "done"), [(True, "frozen"), (False, "unfrozen")])
def test_a_backbone_that_is_frozen_or_unfrozen_later_is_refused(at_first: bool, done: str) -> None:
    backbone = TinyResNet()
    backbone.stem.requires_grad_(at_first)
    learner = Learner(backbone, SORO())
    learner.add_task("a", classes=2)
    learner.step({"a": batch(4, 2, 1)})
    before = complete_state(learner)
    backbone.stem.requires_grad_(not at_first)
    with pytest.raises(SpclError, match=rf"parameter 'stem.0.weight' was {done} after the .*; set it back, and call"):
        learner.step({"a": batch(4, 2, 2)})
    assert_same(complete_state(learner), before)
    backbone.stem.requires_grad_(at_first)
    learner.step({"a": batch(4, 2, 2)})


class Wrong(Method):
    name = "wrong"

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def weigh(self, gradients: Gradients) -> Any:
        return self.answer


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Weights(torch.ones(5)), r"\(5,\)"),
        (Weights(np.ones(2)), "ndarray"),  # type: ignore[arg-type]
        (torch.ones(2), "Tensor"),
        (None, "NoneType"),
    ],
)
def test_a_weighting_of_ones_own_must_give_a_weight_for_each_gradient(
    answer: object, found: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wrong, "reduction", reduction)
    learner = Learner(TinyResNet(), Wrong(answer))
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=2)
    with pytest.raises(SpclError, match=rf"Wrong\(\) must give Weights of a .* \(\d,\) for .*, but gives {found}"):
        learner.step({"a": batch(4, 2, 1), "b": batch(4, 2, 2)})
    assert learner.steps == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float64])
def test_weights_may_have_any_type_and_require_gradients(dtype: torch.dtype) -> None:
    learned = torch.ones(2, dtype=dtype, requires_grad=dtype.is_floating_point)
    learner = Learner(TinyResNet(), Wrong(Weights(learned)))
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=2)
    assert learner.step({"a": batch(4, 2, 1), "b": batch(4, 2, 2)}).weights == {"a": 1.0, "b": 1.0}


class WrongRule(Method):
    name = "wrong-rule"

    def __init__(self, rule: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.rule = rule

    def combine(self, gradients: Tensor) -> Any:
        return self.rule(gradients)


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (torch.sum, r"\(\)"),  # would be the update of every parameter
        (lambda gradients: gradients, r"\(2, \d+\)"),
        (lambda gradients: None, "NoneType"),
    ],
    ids=["number", "matrix", "nothing"],
)
def test_a_rule_of_ones_own_must_give_an_update(rule: Callable[[Tensor], Any], found: str) -> None:
    learner = Learner(TinyResNet(), WrongRule(rule))
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=2)
    with pytest.raises(SpclError, match=rf"combine of WrongRule\(\) must give .* \(\d+,\), but gives {found}"):
        learner.step({"a": batch(4, 2, 1), "b": batch(4, 2, 2)})
    assert learner.steps == 0


class Nameless(Method):
    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.ones(len(gradients.names)))


class WithoutSettings(Nameless):
    name = "without-settings"

    def __init__(self) -> None:
        self.calls = 0


class NamelessWithoutSettings(Nameless):
    def __init__(self) -> None:
        self.calls = 0


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_method_must_declare_a_name(name: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if name is not None:
        monkeypatch.setattr(Nameless, "name", name, raising=False)
    words = rf"the method test_checks.Nameless has the name {name!r}; declare .* name = 'nameless'"
    with pytest.raises(SpclError, match=words):
        Nameless()


def test_an_incomplete_method_can_be_printed_and_is_refused_by_the_learner() -> None:
    assert repr(NamelessWithoutSettings()) == "NamelessWithoutSettings()"
    with pytest.raises(SpclError, match=r"NamelessWithoutSettings has the name None; declare"):
        Learner(TinyResNet(), NamelessWithoutSettings())
    with pytest.raises(SpclError, match=r"WithoutSettings\(\) has no settings; call super\(\).__init__"):
        Learner(TinyResNet(), WithoutSettings())


def test_a_checkpoint_is_loaded_with_a_complete_method(tmp_path: Path) -> None:
    make_learner().save(tmp_path / "c")
    heads = {name: (nn.Linear(8, 2), mse_loss) for name in ("speed", "newer")}
    for method, words in ((NamelessWithoutSettings(), "has the name None"), ("soro", "the method must be one such as")):
        with pytest.raises(SpclError, match=words):
            Learner.load(tmp_path / "c", backbone=TinyResNet(dropout=0.2), heads=heads, method=method)


def test_batches_may_be_numpy_arrays() -> None:
    x, y = batch(5, 3, 1)
    read_only = x.numpy().copy()
    read_only.setflags(write=False)
    outcomes = []
    for pair in ((x, y), (x.numpy(), y.numpy()), (read_only, y), (x.numpy()[::-1].copy()[::-1], y.numpy())):
        learner = Learner(TinyResNet(), SORO(), memory=Reservoir(9))
        learner.add_task("a", classes=3)
        learner.step({"a": pair})
        assert torch.equal(learner.predict(pair[0], task="a"), learner.predict(x, task="a"))
        outcomes.append(complete_state(learner))
    for found in outcomes[1:]:
        assert_same(found, outcomes[0])


def test_numpy_arrays_that_are_no_numbers_are_refused() -> None:
    check_refused(
        make_learner(),
        step(new=(np.array(["a", "b"]), labels(0, 1))),
        r"task 'new': a NumPy array of type <U1 and shape \(2,\) cannot become a tensor",
    )


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


@pytest.mark.parametrize(
    "loss",
    [
        *(mse_loss, l1_loss, smooth_l1_loss, huber_loss, nn.MSELoss()),
        *(squared, poisson_nll_loss, hinge_embedding_loss),
        lambda output, y: mse_loss(target=y, input=output.exp()),
    ],
)
@pytest.mark.parametrize(("outputs", "targets"), [((), (1,)), ((1,), ()), ((1,), (1, 1))])
@pytest.mark.parametrize("samples", [1, 4])
def test_targets_that_broadcast_against_the_outputs_are_refused(
    loss: Any, outputs: tuple[int, ...], targets: tuple[int, ...], samples: int
) -> None:
    learner = make_learner()
    learner.add_task("a", head=nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)) if outputs == () else HEAD_1, loss=loss)
    before = complete_state(learner)
    with pytest.raises(TaskError, match=r"task 'a': its loss broadcasts shapes .*; give targets of the output's shape"):
        learner.step({"a": (images(samples, 1), torch.ones(samples, *targets))})
    assert_same(complete_state(learner), before)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (cross_entropy, torch.tensor([0, 1, 1])),
        (lambda output, y: mse_loss(output[:, 0], y), torch.ones(3)),
        (lambda output, y: mse_loss(output, y[:, None].expand_as(output)), torch.ones(3)),
        (lambda output, y: mse_loss(output[:, :1], y[:, None]), torch.ones(3)),
        (lambda output, y: (y @ output).square().mean(), torch.ones(3)),
        (lambda output, y: torch.maximum(0.9 * (y - output), 0.1 * (output - y)).mean(), torch.ones(3, 1)),  # quantiles
        (lambda output, y: (output[:, :1] - output[:, 0]).sub(y[:, None] - y).abs().mean(), torch.ones(3)),  # pairs
        (lambda output, y: (output.softmax(dim=1) * y).sum(), torch.ones(3, 2)),
    ],
)
def test_losses_that_match_shapes_themselves_are_accepted(loss: Any, targets: Tensor) -> None:
    learner = make_learner()
    learner.add_task("a", head=nn.Linear(8, 2), loss=loss)
    assert not learner.step({"a": (X, targets)}).skipped


def test_a_task_without_any_data_may_finish() -> None:
    for memory in (None, BalancedCoreset(4), Reservoir(4)):
        learner = Learner(TinyResNet(), SORO(), memory=memory)
        learner.add_task("idle", classes=2)
        learner.add_task("a", classes=2)
        learner.finish_task("idle")
        learner.step({"a": batch(4, 2, 0)})
        learner.finish_task("a")
        learner.add_task("b", head=nn.Linear(8, 2), loss=cross_entropy)
        report = learner.step({"b": batch(4, 2, 1)})
        assert list(report.losses) == (["b"] if memory is None else ["b", "memory"])


class Combining(Method):
    name = "combining"
    reduction = "mean"

    def combine(self, gradients: Tensor) -> Tensor:
        return gradients.sum(dim=0)


def test_an_elementwise_rule_needs_separate_gradients() -> None:
    with pytest.raises(
        SpclError, match=r"Combining\(\) overrides combine, which needs reduction 'none', but it is 'mean'"
    ):
        Learner(TinyResNet(), Combining())


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


# -- one call at a time


class Waiting(nn.Module):
    """A backbone whose pass waits until it may go on."""

    entered, may_leave = threading.Event(), threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.waits = False

    def forward(self, x: Tensor) -> Tensor:
        if self.waits and self.training:
            self.entered.set()
            assert self.may_leave.wait(20)
        return self.layer(x)


def few(seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(4) % 2


CALLS: dict[str, Callable[[Learner, Path], object]] = {
    "step": lambda learner, _: learner.step({"a": few()}),
    "find_errors": lambda learner, _: learner.find_errors({"a": few()}),
    "add_task": lambda learner, _: learner.add_task("new", classes=2),
    "finish_task": lambda learner, _: learner.finish_task("a"),
    "save": lambda learner, folder: learner.save(folder / "checkpoint"),
    "model_state": lambda learner, _: learner.model_state(),
    "freeze": lambda learner, _: learner.freeze("layer.bias"),
    "unfreeze": lambda learner, _: learner.unfreeze(),
    "a prediction": lambda learner, _: learner.predict(few()[0], "a"),
    "module": lambda learner, _: learner.module("a"),
    "snapshot": lambda learner, _: learner.snapshot(),
}


def test_calls_from_a_second_thread_are_refused_while_a_step_runs_and_change_nothing(tmp_path: Path) -> None:
    def make() -> Learner:
        torch.manual_seed(0)
        learner = Learner(Waiting(), SORO(), memory=Reservoir(6))
        learner.add_task("a", classes=2)
        learner.step({"a": few()})
        return learner

    learner, undisturbed = make(), make()
    backbone = learner.model.backbone
    assert isinstance(backbone, Waiting)
    backbone.waits = True
    reports = []
    thread = threading.Thread(target=lambda: reports.append(learner.step({"a": few(1)})))
    thread.start()
    assert backbone.entered.wait(20)
    for name, call in CALLS.items():
        with pytest.raises(SpclError, match=f"{name} was called while another thread is in a call of the same learner"):
            call(learner, tmp_path)
    backbone.may_leave.set()
    thread.join(20)
    assert len(reports) == 1
    undisturbed.step({"a": few(1)})
    assert_same(complete_state(learner), complete_state(undisturbed))
    for call in CALLS.values():  # and the learner is free again
        call(learner, tmp_path)


def test_within_a_step_the_same_thread_may_predict_but_change_nothing(tmp_path: Path) -> None:
    errors: dict[str, str] = {}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        for name, call in CALLS.items():
            try:
                call(learner, tmp_path)
            except SpclError as error:
                errors[name] = str(error)
        return mse_loss(output, target)

    learner = Learner(nn.Linear(3, 4), SORO())
    learner.add_task("a", classes=2)
    learner.step({"a": few()})
    learner.add_task("own", head=nn.Linear(4, 1), loss=loss)
    report = learner.step({"own": (few()[0], torch.ones(4, 1))})
    assert not report.skipped
    assert errors.keys() == CALLS.keys() - {"a prediction", "module", "snapshot"}
    assert errors["save"] == "save was called within a call of step; call it when step has returned"


def test_threads_that_step_one_learner_at_once_get_an_error_instead_of_a_crash() -> None:
    learner = Learner(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 8)), SORO(), memory=Reservoir(20))
    learner.add_task("a", classes=2)
    start, done, errors = threading.Barrier(3), [0] * 3, list[Exception]()

    def train(index: int) -> None:
        start.wait(20)
        for seed in range(150):
            try:
                learner.step({"a": few(seed)})
                done[index] += 1
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert learner.steps == sum(done)
    assert errors
    assert all(type(error) is SpclError and "another thread" in str(error) for error in errors)


# -- calls that raise change nothing


class Refusing(BalancedCoreset):
    """A policy of the user's that refuses a task."""

    def start(self, task: str, classes: int | None) -> None:
        if task == "refused":
            raise MemoryError
        super().start(task, classes)


@pytest.mark.parametrize("memory", [None, BalancedCoreset])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adagrad], ids=["adam", "adagrad"])
def test_a_task_with_too_many_classes_for_the_memory_leaves_nothing_behind(
    make: type[torch.optim.Optimizer], memory: type[Memory] | None
) -> None:
    learner = Learner(nn.Linear(3, 4), ER(), optimizer=make, average=0.9, memory=None if memory is None else memory(5))
    learner.add_task("a", classes=2)
    learner.step({"a": few()})
    before = complete_state(learner)
    with pytest.raises(RuntimeError, match="memory"):
        learner.add_task("huge", classes=2 * 10**13)
    assert_same(complete_state(learner), before)
    assert learner.optimizer.param_groups[-1]["tasks"] == ["a"]
    learner.add_task("huge", classes=2)  # the name is free
    learner.step({"a": few(), "huge": few()})


def test_a_task_that_memory_refuses_is_not_added() -> None:
    learner = Learner(nn.Linear(3, 4), ER(), average=0.9, memory=Refusing(5))
    learner.add_task("a", classes=2)
    learner.step({"a": few()})
    attempts: list[dict[str, Any]] = [{"classes": 3}, {"head": nn.Linear(4, 1), "loss": mse_loss}]
    before = complete_state(learner)
    for options in attempts:
        with pytest.raises(MemoryError):
            learner.add_task("refused", **options)
        assert_same(complete_state(learner), before)
    learner.step({"a": few()})


def test_heads_that_cannot_be_made_with_the_first_batch_are_all_missing_afterwards() -> None:
    learner = Learner(nn.Linear(3, 4), ER())
    for name, classes in (("a", 2), ("huge", 2 * 10**13)):
        learner.add_task(name, classes=classes)
    with pytest.raises(RuntimeError, match="memory"):
        learner.step({"a": few()})
    assert learner.tasks["a"].head is None
    assert learner.optimizer.param_groups[-1]["params"] == []


# -- the caller's tensors


def test_gradients_of_the_callers_tensors_are_left_alone() -> None:
    class Sum(nn.Module):
        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
            return x[0] + x[1]

    def train(requires_grad: bool) -> tuple[Learner, list[Tensor]]:
        torch.manual_seed(0)
        learner = Learner(nn.Sequential(Sum(), nn.Linear(3, 4)), SORO(), memory=Reservoir(4))
        learner.add_task("a", classes=2)
        learner.add_task("own", head=nn.Linear(4, 1), loss=mse_loss)
        given = [few()[0].requires_grad_(requires_grad) for _ in range(4)]
        targets = torch.ones(4, 1, requires_grad=requires_grad)
        for _ in range(3):
            learner.step({"a": ((given[0], 2 * given[1]), few()[1]), "own": ((given[2], given[3]), targets)})
        return learner, [*given, targets]

    learner, tensors = train(requires_grad=True)
    assert all(tensor.requires_grad and tensor.grad is None for tensor in tensors)
    assert_same(complete_state(learner), complete_state(train(requires_grad=False)[0]))


# -- a backbone that has changed since


class Stems(nn.Module):
    """A stem for every kind of input, by its name, below a shared layer."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.stems = nn.ModuleDict()
        for name in names:
            self.add(name)
        self.shared = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def add(self, name: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(len(name))
            self.stems[name] = nn.Linear(3, 4)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        ((name, part),) = x.items()
        return self.shared(self.stems[name](part).relu())


def of(name: str, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    x, y = few(seed)
    return {name: x}, y


@pytest.mark.parametrize("make", [SGD, torch.optim.Adam])
def test_parameters_that_the_backbone_gets_later_are_trained_as_if_they_had_been_unfrozen(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tmp_path: Path
) -> None:
    def train(late: bool) -> Learner:
        torch.manual_seed(0)
        backbone = Stems("old") if late else Stems("old", "new_")
        learner = Learner(backbone, SORO(), optimizer=make, average=0.5, memory=Reservoir(6))
        if not late:
            learner.freeze("stems.new_.*")
        learner.add_task("old", classes=2)
        learner.step({"old": of("old", 0)})
        if late:
            backbone.add("new_")
        else:
            learner.unfreeze()
        learner.add_task("new", classes=2)
        for seed in range(3):
            learner.step({"old": of("old", seed), "new": of("new_", seed)})
        return learner

    late, early = train(late=True), train(late=False)
    untrained = Stems("old", "new_").stems["new_"].weight
    assert not torch.equal(late.model.backbone.stems["new_"].weight, untrained)
    assert_same(
        {**complete_state(late), "modes": None, "random": None},
        {**complete_state(early), "modes": None, "random": None},
    )
    late.save(tmp_path / "checkpoint")
    resumed = Learner.load(tmp_path / "checkpoint", backbone=Stems("old", "new_"), optimizer=make)
    for learner in (late, resumed):
        learner.step({"old": of("old", 9), "new": of("new_", 9)})
    assert_same({**complete_state(resumed), "modes": None}, {**complete_state(late), "modes": None})


def test_parameters_that_the_backbone_gets_before_saving_are_saved_and_trained_when_loaded(tmp_path: Path) -> None:
    learner = Learner(Stems("old"), SORO())
    learner.add_task("old", classes=2)
    learner.step({"old": of("old", 0)})
    learner.model.backbone.add("new_")
    learner.save(tmp_path / "checkpoint")
    resumed = Learner.load(tmp_path / "checkpoint", backbone=Stems("old", "new_"))
    resumed.add_task("new", classes=2)
    before = resumed.model.backbone.stems["new_"].weight.clone()
    resumed.step({"new": of("new_", 0)})
    assert not torch.equal(resumed.model.backbone.stems["new_"].weight, before)


def test_a_layer_that_replaces_another_is_trained_and_the_other_forgotten() -> None:
    backbone = TinyResNet()
    learner = Learner(backbone, SORO(), optimizer=SGD, average=0.5)
    learner.add_task("a", classes=2)
    learner.step({"a": batch(4, 2, 0)})
    old = [*backbone.stem.parameters()]
    backbone.stem = TinyResNet(seed=3).stem
    new = [parameter.clone() for parameter in backbone.stem.parameters()]
    learner.step({"a": batch(4, 2, 1)})
    assert not any(torch.equal(*pair) for pair in zip(backbone.stem.parameters(), new, strict=True))
    held = {parameter for group in learner.optimizer.param_groups for parameter in group["params"]}
    assert held.isdisjoint(old)
    assert held.issuperset(backbone.parameters())
    assert set(learner.optimizer.state) == held


def test_new_parameters_of_another_type_are_refused_and_training_goes_on_without_them() -> None:
    learner = Learner(Stems("old"), SORO())
    learner.add_task("old", classes=2)
    learner.model.backbone.stems["wide"] = nn.Linear(3, 4).double()
    with pytest.raises(SpclError, match="trainable parameters must share one type and device; found"):
        learner.step({"old": of("old", 0)})
    del learner.model.backbone.stems["wide"]
    assert not learner.step({"old": of("old", 0)}).skipped


def test_new_parameters_that_a_head_trains_already_are_refused() -> None:
    head = nn.Linear(4, 1)
    learner = Learner(Stems("old"), SORO())
    learner.add_task("own", head=head, loss=mse_loss)
    learner.model.backbone.stems["head"] = head
    with pytest.raises(SpclError, match="shares parameters with a head or encoder by now; give the backbone a copy"):
        learner.step({"own": ({"old": few()[0]}, torch.ones(4, 1))})
