"""Losses of classifiers, labels as probabilities, and class names, against formulas and plain PyTorch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from _learning import assert_same, complete_state
from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.engine.graphs import CudaGraphEngine
from spcl.errors import CheckpointError, SpclError, TaskError
from spcl.learner import Learner
from spcl.losses import LOSSES, BinaryCrossEntropy, CrossEntropy, TaskDescription
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import ER, MDMTR, METHODS, make_method

SGD = partial(torch.optim.SGD, lr=1.0)
WEIGHTS = (0.5, 2.0, 4.0)
scenarios = pytest.mark.parametrize("scenario", ["task", "class"])
devices = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh())


def batch(seed: int, classes: int = 3, soft: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=generator)
    if soft:
        return x, torch.rand(8, classes, generator=generator).softmax(dim=1)
    return x, torch.randint(0, classes, (8,), generator=generator)


def learner_with(loss: Any, scenario: Any, method: Any = None, **options: Any) -> Learner:
    """Three classifiers; the second has the loss."""
    learner = Learner(network(), method or ER(), optimizer=SGD, scenario=scenario, **options)
    learner.add_task("before", classes=2)
    learner.add_task("task", classes=3, loss=loss)
    learner.add_task("after", classes=2)
    learner.model.build_heads(6)
    return learner


def scores(learner: Learner, x: Tensor) -> Tensor:
    """The logits that the scenario shows for samples of the second task, with a graph."""
    names = list(learner.tasks) if learner.scenario == "class" else ["task"]
    features = learner.model.backbone(x)
    heads = [learner.tasks[name].head for name in names]
    return torch.cat([head(features) for head in heads if head is not None], dim=1)


def weighted(log_probabilities: Tensor, targets: Tensor, smoothing: float, weights: Tensor, soft: bool) -> Tensor:
    """PyTorch's definition, written out: targets are a matrix of probabilities."""
    classes = targets.shape[1]
    smooth = targets * (1 - smoothing) + smoothing / classes
    total = -(smooth * weights * log_probabilities).sum()
    return total / (len(targets) if soft else (targets * weights).sum())


# -- the loss of a step


@scenarios
@pytest.mark.parametrize("soft", [False, True], ids=["labels", "probabilities"])
@pytest.mark.parametrize("loss", [None, CrossEntropy(0.2), CrossEntropy(0.0, WEIGHTS), CrossEntropy(0.1, WEIGHTS)])
def test_a_step_follows_the_formula(loss: CrossEntropy | None, soft: bool, scenario: str) -> None:
    learner = learner_with(loss, scenario)
    x, y = batch(1, soft=soft)
    before = [parameter.detach().clone() for parameter in learner.model.backbone.parameters()]
    logits = scores(learner, x)
    first = 2 if scenario == "class" else 0
    targets, weights = torch.zeros(8, logits.shape[1]), torch.ones(logits.shape[1])
    targets[:, first : first + 3] = y if soft else functional.one_hot(y, 3)
    weights[first : first + 3] = torch.tensor((loss and loss.class_weights) or (1.0, 1.0, 1.0))
    smoothing = 0.0 if loss is None else loss.label_smoothing
    expected = weighted(logits.log_softmax(dim=1), targets, smoothing, weights, soft)
    gradients = torch.autograd.grad(expected, list(learner.model.backbone.parameters()))
    report = learner.step({"task": (x, y)})
    assert report.losses["task"] == pytest.approx(expected.item(), rel=1e-5)
    for was, now, gradient in zip(before, learner.model.backbone.parameters(), gradients, strict=True):
        torch.testing.assert_close(was - now.detach(), gradient, rtol=1e-4, atol=1e-6)


@scenarios
def test_a_loss_of_ones_own_gets_logits_and_labels_of_the_classes_shown(scenario: str) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def focal(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append((logits.detach(), targets))
        log_p = -functional.cross_entropy(logits, targets, reduction="none")
        return -((1 - log_p.exp()).square() * log_p).mean()

    learner = learner_with(focal, scenario)
    x, y = batch(1)
    with torch.no_grad():
        expected = scores(learner, x)
    report = learner.step({"task": (x, y), "after": batch(2, 2)})
    logits, targets = seen[-1]
    torch.testing.assert_close(logits, expected)
    assert torch.equal(targets, y + 2 if scenario == "class" else y)
    assert set(report.losses) == {"task", "after"}
    assert learner.evaluate([(x, y)], "task") == pytest.approx(
        float((learner.predict(x, None if scenario == "class" else "task") == targets).double().mean())
    )


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (partial(functional.cross_entropy, reduction="none"), "task 'task': its loss must be one number"),
        (lambda logits, targets: 1.0, "task 'task': its loss must be a tensor"),
        (
            functional.binary_cross_entropy_with_logits,
            "task 'task': the model raised an error on 8 samples .* targets int64",
        ),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_before_anything_changes(loss: Any, words: str) -> None:
    learner = learner_with(loss, "class")
    before = complete_state(learner)
    with pytest.raises(TaskError, match=words):
        learner.step({"task": batch(1)})
    assert_same(complete_state(learner), before)


# -- methods, memory, evaluation


@scenarios
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains_and_replays_probabilities(method: str, scenario: str) -> None:
    loss = None if method == "mdmtr" else CrossEntropy(0.1, WEIGHTS)
    learner = learner_with(loss, scenario, make_method(method), memory=Reservoir(12))
    for step in range(4):
        report = learner.step({"task": batch(step, soft=True), "after": batch(step, 2)})
    assert not report.skipped
    assert "memory" in report.losses


@scenarios
def test_replayed_probabilities_are_compared_as_new_ones_are(scenario: str) -> None:
    learner = learner_with(CrossEntropy(0.1, WEIGHTS), scenario, memory=Reservoir(8))
    x, y = batch(0, soft=True)
    learner.step({"task": (x, y)})  # memory holds exactly this batch
    report = learner.step({"task": (x, y)})
    assert report.losses["memory"] == pytest.approx(report.losses["task"], rel=1e-5)


def test_memory_balances_probabilities_by_the_most_likely_class() -> None:
    memory = BalancedCoreset(6, seed=0)
    memory.start("a", 3)
    y = functional.one_hot(torch.arange(30) % 10 % 3, 3) * 0.4 + 0.2
    memory.observe("a", torch.arange(30), y)
    memory.finish("a")
    restored = BalancedCoreset(6, seed=0)
    restored.load_state_dict(memory.state_dict())
    for each in (memory, restored):
        assert each.counts() == {"a": [2, 2, 2]}
        (drawn,) = each.draw(6)
        assert torch.equal(drawn.y, y[drawn.x])


@scenarios
def test_evaluation_compares_the_most_likely_class(scenario: str) -> None:
    learner = learner_with(None, scenario)
    learner.step({"task": batch(0, soft=True)})
    x, y = batch(1, soft=True)
    assert learner.evaluate([(x, y)], "task") == learner.evaluate([(x, y.argmax(dim=1))], "task")
    if scenario == "class":
        everywhere = functional.pad(y, (2, 2))
        assert learner.evaluate([(x, everywhere)]) == learner.evaluate([(x, y)], "task")


def test_mdmtr_refuses_a_loss_of_its_own_kind() -> None:
    learner = learner_with(CrossEntropy(0.1), "task", MDMTR())
    with pytest.raises(TaskError, match=r"task 'task' has a loss of its own, but method 'mdmtr' is itself a loss"):
        learner.step({"task": batch(0)})


@devices
@scenarios
@pytest.mark.parametrize("method", ["er", "soro", "der++"])
def test_the_captured_path_computes_the_same_losses(method: str, scenario: str, device: str) -> None:
    losses = []
    for captured in (False, True):
        learner = Learner(
            network().to(device),
            make_method(method),
            optimizer=SGD,
            memory=Reservoir(12),
            scenario=scenario,
            capture=False,
        )
        if captured:
            learner._use_engine(CudaGraphEngine(learner.model, learner.method))
        learner.add_task("plain", classes=3)
        learner.add_task("weighted", classes=3, loss=CrossEntropy(0.1, WEIGHTS))
        learner.add_task("soft", classes=3)
        for step in range(20):
            batches = {"plain": batch(step), "weighted": batch(step + 1), "soft": batch(step + 2, soft=True)}
            report = learner.step({name: batches[name] for name in batches if step < 3 or step % 4 or name == "plain"})
            losses.append(report.losses)
    for mine, theirs in zip(losses[:20], losses[20:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


# -- losses by name


def test_balanced_weights_are_inverse_to_the_counts_and_1_on_average() -> None:
    counts = (10, 30, 60)
    loss = LOSSES.make(
        {"name": "cross-entropy", "class_weights": "balanced", "label_smoothing": 0.1},
        TaskDescription("a", classes=3, class_counts=counts),
    )
    assert isinstance(loss, CrossEntropy)
    assert loss.label_smoothing == 0.1
    assert loss.class_weights is not None
    products = [weight * count for weight, count in zip(loss.class_weights, counts, strict=True)]
    assert products == pytest.approx([sum(counts) / 3] * 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mse", lambda error: (error**2).mean()),
        ("l1", lambda error: error.abs().mean()),
        (
            {"name": "huber", "delta": 0.5},
            lambda error: (
                0.5 * torch.minimum(error.abs(), torch.tensor(0.5)).pow(2).mean()
                + 0.5 * (error.abs() - 0.5).clamp(min=0).mean()
            ),
        ),
    ],
)
def test_losses_of_regressions_follow_their_formulas(name: Any, expected: Any) -> None:
    output, targets = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(9, 2)
    loss = LOSSES.make(name, TaskDescription("a", "regression"))
    torch.testing.assert_close(loss(output, targets), expected(output))


@pytest.mark.parametrize("pos_weight", [1.0, 3.0, [1.0, 2.0, 3.0]])
def test_binary_cross_entropy_follows_its_formula(pos_weight: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    output, targets = torch.randn(9, 3, generator=generator), torch.randint(0, 2, (9, 3), generator=generator)
    loss = LOSSES.make(
        {"name": "binary-cross-entropy", "pos_weight": pos_weight}, TaskDescription("a", "multilabel", classes=3)
    )
    p = output.sigmoid()
    expected = -(torch.tensor(pos_weight) * targets * p.log() + (1 - targets) * (1 - p).log()).mean()
    torch.testing.assert_close(loss(output, targets), expected)
    learner = Learner(network(), ER(), memory=Reservoir(4))
    learner.add_task("labels", head=nn.Linear(6, 3), loss=loss)
    assert not learner.step({"labels": (torch.randn(9, 4, generator=generator), targets)}).skipped


@pytest.mark.parametrize(
    ("setting", "task", "words"),
    [
        ("cross-entropy", TaskDescription("a", "regression"), "task 'a' is a regression task, but the loss 'cross-en"),
        ("mse", TaskDescription("a"), "task 'a' is a classification task, but the loss 'mse' is for regression"),
        (
            {"name": "cross-entropy", "class_weights": "balanced"},
            TaskDescription("a", classes=2),
            "counts of task 'a' are",
        ),
        (
            {"name": "cross-entropy", "class_weights": "balanced"},
            TaskDescription("a", classes=2, class_counts=(3, 0)),
            "class 1 of task 'a' has no samples",
        ),
        ({"name": "cross-entropy", "class_weights": "even"}, TaskDescription("a"), "class_weights is 'even'; give"),
        (
            {"name": "cross-entropy", "class_weights": [1.0, 2.0]},
            TaskDescription("a", classes=2, class_names=("cat", "dog")),
            r"class_weights is \[1.0, 2.0\]; give 'balanced' or a mapping from class name to weight, as .* any order",
        ),
        (
            {"name": "cross-entropy", "class_weights": {"cat": -1.0}},
            TaskDescription("a", class_names=("cat", "dog")),
            "class_weights is .* not negative",
        ),
        (
            {"name": "cross-entropy", "class_weights": {"cat": 2.0}},
            TaskDescription("a", classes=2),
            "the class names of task 'a' are not known",
        ),
        ({"name": "cross-entropy", "label_smoothing": 2.0}, TaskDescription("a"), "label_smoothing is 2.0; give"),
        ({"name": "huber", "delta": 0.0}, TaskDescription("a", "regression"), "delta of the loss 'huber' is 0.0"),
        (
            {"name": "binary-cross-entropy", "pos_weight": [1.0]},
            TaskDescription("a", "multilabel", classes=2),
            "2 labels, but 1 numbers in pos_weight",
        ),
        ("cross-entrpy", TaskDescription("a"), "no loss 'cross-entrpy'; did you mean 'cross-entropy'"),
    ],
)
def test_losses_that_do_not_fit_their_task_are_refused(setting: Any, task: TaskDescription, words: str) -> None:
    with pytest.raises(SpclError, match=words):
        LOSSES.make(setting, task)


def test_weights_kept_from_an_evaluation_can_be_trained_with() -> None:
    loss = CrossEntropy(class_weights=(0.123, 4.56))
    logits = torch.zeros(1, 2, requires_grad=True)
    with torch.inference_mode():
        loss(logits, torch.tensor([1]))
    loss(logits, torch.tensor([1])).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None


# -- checkpoints and class names


def test_checkpoints_hold_cross_entropies_and_class_names(tmp_path: Path) -> None:
    learner = Learner(network(), ER(), memory=Reservoir(4))
    loss = CrossEntropy(0.1, WEIGHTS)
    learner.add_task("pets", classes=("cat", "dog", "fish"), loss=loss)
    learner.add_task("plain", classes=2, loss=CrossEntropy())
    learner.step({"pets": batch(0)})
    learner.save(tmp_path / "a.ckpt")
    loaded = Learner.load(tmp_path / "a.ckpt", backbone=network())
    assert loaded.tasks["pets"].loss == loss
    assert loaded.tasks["pets"].class_names == ("cat", "dog", "fish")
    assert loaded.tasks["plain"].loss is functional.cross_entropy
    assert loaded.class_names == [("pets", "cat"), ("pets", "dog"), ("pets", "fish"), ("plain", "0"), ("plain", "1")]
    for each in (learner, loaded):
        each.step({"pets": batch(1), "plain": batch(2, 2)})
    assert_same(complete_state(loaded), complete_state(learner))


def test_other_losses_of_classifiers_are_passed_again(tmp_path: Path) -> None:
    learner = learner_with(nn.CrossEntropyLoss(label_smoothing=0.3), "task")
    learner.step({"task": batch(0)})
    learner.save(tmp_path / "a.ckpt")
    with pytest.raises(
        CheckpointError, match=r"task 'task' was added with a loss of its own; pass it as losses=\{'task'"
    ):
        Learner.load(tmp_path / "a.ckpt", backbone=network())
    loss = nn.CrossEntropyLoss(label_smoothing=0.3)
    with pytest.raises(CheckpointError, match=r"losses has 'tusk', but the checkpoint's classifiers are \['before'"):
        Learner.load(tmp_path / "a.ckpt", backbone=network(), losses={"task": loss, "tusk": loss})
    loaded = Learner.load(tmp_path / "a.ckpt", backbone=network(), losses={"task": loss})
    for each in (learner, loaded):
        each.step({"task": batch(1)})
    assert_same(complete_state(loaded), complete_state(learner))


def test_tasks_without_losses_and_names_are_saved_as_before(tmp_path: Path) -> None:
    learner = learner_with(None, "class")
    learner.save(tmp_path / "a.ckpt")
    state = read_checkpoint(tmp_path / "a.ckpt")
    keys = ["name", "classes", "finished", "signature", "left_out", "left_out_in_a_row", "head"]
    assert [list(task) for task in state["tasks"]] == [keys] * 3
    write_checkpoint(tmp_path / "b.ckpt", state)
    assert Learner.load(tmp_path / "b.ckpt", backbone=network()).tasks["task"].class_names is None


def test_a_single_pos_weight_is_that_of_every_label() -> None:
    output, targets = torch.zeros(1, 2), torch.ones(1, 2)
    assert BinaryCrossEntropy(2.0)(output, targets) == BinaryCrossEntropy([2.0, 2.0])(output, targets)
