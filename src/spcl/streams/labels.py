"""Label sets: the classes of each task."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from spcl.errors import DataError, SpclError

__all__ = ["LabelSet", "check_label_set", "draw_label_set", "split_by_task", "task_durations"]

LabelSet = tuple[tuple[int, ...], ...]
"""The classes of each task; the position of a class in its task is its local label."""


def draw_label_set(classes: int, tasks: int | Sequence[int], seed: int) -> LabelSet:
    """Split the classes 0 … `classes`-1 at random into tasks, every class in exactly one.

    Args:
        classes: The number of classes.
        tasks: The number of tasks, of sizes as equal as possible (later tasks get the remainder); or the number of
            classes of each task.
        seed: The same seed gives the same split.

    >>> label_set = draw_label_set(62, 5, seed=0)
    >>> [len(task) for task in label_set]
    [12, 12, 12, 13, 13]
    >>> [len(task) for task in draw_label_set(10, (2, 8), seed=0)]
    [2, 8]
    """
    sizes = _equal_sizes(classes, tasks) if isinstance(tasks, int) else list(tasks)
    if min(sizes, default=0) < 1 or sum(sizes) != classes:
        raise SpclError(
            f"tasks of {sizes} classes do not split {classes} classes; give sizes of at least 1 that add up to it"
        )
    order = np.random.default_rng(seed).permutation(classes).tolist()
    return tuple(tuple(order[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True))


def check_label_set(label_set: LabelSet, classes: int) -> None:
    """Raise a `DataError` unless every class 0 … `classes`-1 is in exactly one task and no task is empty.

    >>> check_label_set(((0, 2), (1, 2)), classes=3)
    Traceback (most recent call last):
    spcl.errors.DataError: class 2 is in the label set 2 times; assign every class to exactly one task
    """
    for task, members in enumerate(label_set):
        if not members:
            raise DataError(f"task {task} of the label set has no class; give it one, or remove the task")
        for label in members:
            if not 0 <= label < classes:
                raise DataError(
                    f"task {task} of the label set has class {label}; choose from the classes 0 to {classes - 1}"
                )
    times = Counter(chain.from_iterable(label_set))
    for label in range(classes):
        if times[label] != 1:
            raise DataError(
                f"class {label} is in the label set {times[label]} times; assign every class to exactly one task"
            )


def split_by_task(labels: Tensor, label_set: LabelSet) -> list[tuple[Tensor, Tensor]]:
    """Return for each task the indices of its samples, in the data's order, and their labels local to the task.

    >>> import torch
    >>> split_by_task(torch.tensor([2, 0, 1, 2]), ((2, 0), (1,)))
    [(tensor([0, 1, 3]), tensor([0, 1, 0])), (tensor([2]), tensor([0]))]
    """
    classes = sum(map(len, label_set))
    check_label_set(label_set, classes)
    labels = _checked_labels(labels, classes)
    task_of, local_of = torch.empty(classes, dtype=torch.int64), torch.empty(classes, dtype=torch.int64)
    for task, members in enumerate(label_set):
        task_of[list(members)] = task
        local_of[list(members)] = torch.arange(len(members))
    owner = task_of[labels]
    indices = [torch.nonzero(owner == task).flatten() for task in range(len(label_set))]
    return [(index, local_of[labels[index]]) for index in indices]


def task_durations(labels: Tensor, label_set: LabelSet, batch_size: int) -> tuple[int, ...]:
    """Return the steps of each task in one pass over its nᵢ samples, `⌈nᵢ / batch_size⌉`.

    >>> import torch
    >>> task_durations(torch.tensor([0, 0, 0, 1, 1]), ((0,), (1,)), batch_size=2)
    (2, 1)
    """
    if batch_size < 1:
        raise SpclError(f"the batch size is {batch_size}; give at least 1")
    return tuple(-(-len(index) // batch_size) for index, _ in split_by_task(labels, label_set))


def _equal_sizes(classes: int, tasks: int) -> list[int]:
    if not 1 <= tasks <= classes:
        raise SpclError(f"cannot split {classes} classes into {tasks} tasks; choose 1 to {classes} tasks")
    return [classes // tasks + (task >= tasks - classes % tasks) for task in range(tasks)]


def _checked_labels(labels: Tensor, classes: int) -> Tensor:
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels are {labels.dtype} of shape {tuple(labels.shape)}; give one integer per sample")
    labels = labels.detach().to("cpu", torch.int64)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        found = int(labels.min()) if labels.min() < 0 else int(labels.max())
        raise DataError(f"label {found} belongs to no task; the label set has the classes 0 to {classes - 1}")
    return labels
