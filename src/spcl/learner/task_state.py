"""State of tasks, their heads and losses as plain data and tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from spcl.engine.model import SharedModel
from spcl.errors import CheckpointError
from spcl.learner.modules import check_fits, shares_trained
from spcl.losses import CrossEntropy, Loss
from spcl.methods.tasks import Task, classifier_task

__all__ = ["Heads", "Losses", "restore_heads", "restore_tasks", "task_state"]

Heads = Mapping[str, tuple[nn.Module, Loss]]
Losses = Mapping[str, Loss]


def task_state(task: Task) -> dict[str, Any]:
    """Return a task and the weights of its head."""
    return {
        "name": task.name,
        "classes": task.classes,
        "finished": task.finished,
        "signature": task.signature,
        "left_out": task.skipped,  # keys of existing files
        "left_out_in_a_row": task.skipped_in_a_row,
        "head": None if task.head is None else task.head.state_dict(),
        **({} if task.class_names is None else {"class_names": list(task.class_names)}),
        **({} if task.classes is None or task.loss is cross_entropy else {"loss": _loss_state(task.loss)}),
    }


def restore_tasks(model: SharedModel, saved: list[dict[str, Any]], heads: Heads, losses: Losses) -> None:
    """Add the tasks of :func:`task_state` to a model without any; the heads of classifiers are still missing."""
    _check_losses(saved, losses)
    for entry in saved:
        offset = sum(task.classes or 0 for task in model.tasks.values())
        task = _restored_task(entry, heads, losses, offset, model.device)
        if task.head is not None and shares_trained(task.head, model.modules()):
            raise CheckpointError(f"the head of task {task.name!r} shares parameters with the backbone or another head")
        model.tasks[task.name] = task


def restore_heads(tasks: Mapping[str, Task], saved: list[dict[str, Any]]) -> None:
    """Restore the weights of all heads."""
    for entry in saved:
        head = tasks[entry["name"]].head
        if head is not None:
            check_fits(f"the head of task {entry['name']!r}", head, entry["head"])
            head.load_state_dict(entry["head"])


def _loss_state(loss: Loss) -> dict[str, Any] | None:
    """Return a cross-entropy as plain data; None for other losses of classifiers, which are not saved."""
    if not isinstance(loss, CrossEntropy):
        return None
    weights = loss.class_weights
    return {
        "label_smoothing": loss.label_smoothing,
        "class_weights": None if weights is None else list(weights),
    }


def _check_losses(saved: list[dict[str, Any]], losses: Losses) -> None:
    classifiers = [entry["name"] for entry in saved if entry["classes"] is not None]
    for name in losses:
        if name not in classifiers:
            raise CheckpointError(f"losses has {name!r}, but the checkpoint's classifiers are {classifiers}")


def _restored_task(saved: Mapping[str, Any], heads: Heads, losses: Losses, offset: int, device: torch.device) -> Task:
    """Return a task of :func:`task_state`."""
    name = saved["name"]
    if saved["classes"] is not None:
        names = saved.get("class_names")
        loss = losses[name] if name in losses else _restored_loss(saved)
        task = classifier_task(name, saved["classes"], offset, loss, None if names is None else tuple(names))
    elif name in heads:
        task = _task_of_its_own(name, heads[name], device)
    else:
        raise CheckpointError(
            f"task {name!r} was added with a head and loss of its own; pass them as heads={{{name!r}: (head, loss)}}"
        )
    task.finished = saved["finished"]
    task.signature = None if saved["signature"] is None else tuple(saved["signature"])
    task.skipped, task.skipped_in_a_row = saved["left_out"], saved["left_out_in_a_row"]
    return task


def _task_of_its_own(name: str, given: object, device: torch.device) -> Task:
    match given:
        case (nn.Module() as head, loss) if callable(loss):
            return Task(name, None, loss, head.to(device), 0)
    raise CheckpointError(f"heads[{name!r}] must be the pair of the task's head and loss, but it is {given!r:.80}")


def _restored_loss(saved: Mapping[str, Any]) -> Loss | None:
    """Return the loss of a classifier; None for plain cross-entropy."""
    if "loss" not in saved:
        return None
    if saved["loss"] is None:
        name = saved["name"]
        raise CheckpointError(f"task {name!r} was added with a loss of its own; pass it as losses={{{name!r}: loss}}")
    return CrossEntropy(**saved["loss"])
