"""What a step computes for many tasks at once is what it would compute for each of them."""

import re
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spcl.aggregation.gramians import eigenvectors
from spcl.engine import segments
from spcl.engine.classifier_stack import ClassifierStack
from spcl.engine.gradients import GradientMatrix
from spcl.engine.head_gradients import HeadGradients
from spcl.engine.model import Samples
from spcl.engine.reduction import ReductionPlan
from spcl.errors import TaskError
from spcl.methods.tasks import Task, check_all_labels

TASKS = 9


def classifiers() -> list[Samples]:
    """Return batches of plain classifiers."""
    tasks = [Task(str(place), 4, cross_entropy, nn.Linear(5, 4), 0) for place in range(TASKS)]
    return [Samples(task, torch.randn(6, 2), torch.randint(4, (6,))) for task in tasks]


def test_stacked_classifiers_give_the_losses_and_gradients_of_each() -> None:
    samples = classifiers()
    features = torch.randn(6 * TASKS, 5, requires_grad=True)
    replayed = [deepcopy(group.task.head) for group in samples]
    for group in samples:  # gradients of replayed samples, to which those of the stack are added
        group.task.head.weight.grad = torch.ones(4, 5)
    stack = ClassifierStack(samples, features.device)
    losses = stack.forward(features)
    gradient = stack.backward([1.0] * TASKS)
    stack.assign_grads()
    for place, (group, head) in enumerate(zip(samples, replayed, strict=True)):
        own = slice(6 * place, 6 * place + 6)
        expected = cross_entropy(head(features[own]), group.y)
        expected.backward()
        torch.testing.assert_close(losses[place], expected.detach())
        torch.testing.assert_close(gradient[own], features.grad[own])
        torch.testing.assert_close(group.task.head.weight.grad, head.weight.grad + 1)
        torch.testing.assert_close(group.task.head.bias.grad, head.bias.grad)


def test_losses_in_half_precision_are_as_large_as_they_are() -> None:
    tasks = [Task(str(place), 2, cross_entropy, nn.Linear(1, 2).half(), 0) for place in range(TASKS)]
    count = 2048
    samples = [Samples(task, torch.ones(count, 1), torch.zeros(count, dtype=torch.long)) for task in tasks]
    with torch.no_grad():
        for task in tasks:
            task.head.weight.copy_(torch.tensor([[0.0], [100.0]]))
            task.head.bias.zero_()
    losses = ClassifierStack(samples, torch.device("cpu")).forward(torch.ones(count * TASKS, 1, dtype=torch.half))
    assert losses.tolist() == [100.0] * TASKS  # their sums over samples are more than the type can hold


@pytest.mark.parametrize("most_cleared", [0, segments.MOST_CLEARED])
def test_products_of_segments_replace_what_rows_held(most_cleared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_CLEARED", most_cleared)
    weight, (left, right) = nn.Parameter(torch.zeros(3, 4)), (torch.randn(10, 3), torch.randn(10, 4))
    gradients = GradientMatrix([nn.Parameter(torch.zeros(2)), weight])
    gradients.begin(ReductionPlan.make(("a", "b"), "none", separate=False))
    gradients.buffer.fill_(torch.nan)
    target = segments.SegmentGradients(gradients, segments.Segments((5, 5), (0, 1)), fresh=True)
    for times in (1, 2):  # a weight that is used twice
        target.add_products(weight, left, right)
        expected = [times * left[part].T @ right[part] for part in (slice(5), slice(5, 10))]
        torch.testing.assert_close(gradients.blocks[weight], torch.stack(expected))


@pytest.mark.parametrize(("tasks", "threads"), [(2, 1), (5, 1), (7, 2)])
def test_few_stacked_classifiers_are_the_same_to_the_last_bit(tasks: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        heads = [nn.Linear(64, 12) for _ in range(tasks)]
        made = [Task(str(place), 12, cross_entropy, deepcopy(head), 0) for place, head in enumerate(heads)]
        samples = [Samples(task, torch.randn(128, 2), torch.randint(12, (128,))) for task in made]
        features = torch.randn(128 * tasks, 64, requires_grad=True)
        stack = ClassifierStack(samples, features.device)
        losses, gradient = stack.forward(features), stack.backward([1.0] * tasks)
        stack.assign_grads()
        outputs = [head(part) for head, part in zip(heads, features.split(128), strict=True)]
        expected = torch.stack([cross_entropy(each, group.y) for each, group in zip(outputs, samples, strict=True)])
        expected.sum().backward()
        assert torch.equal(losses, expected.detach())
        assert torch.equal(gradient, features.grad)
        for head, task in zip(heads, made, strict=True):
            assert torch.equal(task.head.weight.grad, head.weight.grad)
            assert torch.equal(task.head.bias.grad, head.bias.grad)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [3, TASKS])
def test_kept_gradients_are_those_of_the_heads_in_every_step(count: int) -> None:
    everyone, kept = classifiers(), (HeadGradients(), HeadGradients())
    for samples in (everyone[:count], everyone[:count], everyone[-2:], everyone[:count]):
        features = torch.randn(6 * len(samples), 5)
        for group in samples:
            group.task.head.zero_grad()
        stack = ClassifierStack(samples, features.device, kept)
        stack.forward(features)
        stack.backward([1.0] * len(samples))
        stack.assign_grads()
        for group, part in zip(samples, features.split(6), strict=True):
            head = deepcopy(group.task.head)
            head.zero_grad()
            cross_entropy(head(part), group.y).backward()
            torch.testing.assert_close(group.task.head.weight.grad, head.weight.grad)
            torch.testing.assert_close(group.task.head.bias.grad, head.bias.grad)


def frozen(head: nn.Linear) -> None:
    head.bias.requires_grad_(False)


def hooked(head: nn.Linear) -> None:
    head.weight.register_hook(torch.zeros_like)


def watched(head: nn.Linear) -> None:
    head.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [frozen, hooked, watched, partial(nn.utils.parametrizations.weight_norm)])
def test_classifiers_that_differ_are_not_stacked(change: object) -> None:
    samples = classifiers()
    assert ClassifierStack.supports(samples)
    change(samples[-1].task.head)  # type: ignore[operator]
    assert not ClassifierStack.supports(samples)


@pytest.mark.parametrize(("place", "label"), [(0, 4), (TASKS - 1, -1)])
def test_wrong_labels_among_many_name_their_task(place: int, label: int) -> None:
    targets: list[tuple[Task, Tensor]] = [(group.task, group.y) for group in classifiers()]
    targets.insert(3, (Task("regression", None, cross_entropy, None, 0), torch.randn(6, 2)))
    check_all_labels(targets)
    wrong = [pair for pair in targets if pair[0].classes is not None][place]
    wrong[1][2] = label
    with pytest.raises(
        TaskError, match=re.escape(f"task '{place}' has classes 0 to 3, but the batch has label {label}")
    ):
        check_all_labels(targets)


@pytest.mark.parametrize("rows", [1, 25, 26, 64])
def test_eigenvectors_are_orthonormal_and_restore_the_matrix(rows: int) -> None:
    root = np.random.default_rng(rows).normal(size=(rows, rows))
    matrix = root @ root.T
    values, vectors = eigenvectors(matrix)
    assert (np.diff(values) >= 0.0).all()
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(rows), atol=1e-12)
    np.testing.assert_allclose(vectors * values @ vectors.T, matrix, atol=1e-10 * rows)
