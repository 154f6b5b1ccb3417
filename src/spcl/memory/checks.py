"""Checks of what is given to a memory."""

import torch
from torch import Tensor

from spcl.batches import Inputs, describe
from spcl.errors import TaskError
from spcl.memory.task_buffer import TaskBuffer

__all__ = ["check_labels", "kind_of"]


def kind_of(samples: Inputs) -> str:
    """Return shape and type in words."""
    if isinstance(samples, Tensor):
        return f"shape {tuple(samples.shape)}, {samples.dtype}"
    return describe(samples)


def check_labels(task: str, y: Tensor, buffer: TaskBuffer) -> None:
    """Refuse labels that are not the task's, or not one per sample."""
    if y.is_floating_point() and y.shape[1:] == (buffer.classes,):
        return  # probabilities
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TaskError(
            f"task {task!r}: labels ({kind_of(y)}) must be one integer per sample, or one probability per class"
        )
    labels = buffer.labels_of(y)
    outside = labels[(labels < 0) | (labels >= buffer.classes)]
    if len(outside):
        raise TaskError(
            f"task {task!r}: label {outside[0]} is outside 0 … {buffer.classes - 1}; "
            "start the task with more classes or fix the labels"
        )
