"""Samples that a memory gives back."""

from dataclasses import dataclass

from torch import Tensor

from spcl.batches import Inputs

__all__ = ["ReplayBatch"]


@dataclass(frozen=True)
class ReplayBatch:
    """Samples of one task drawn from a memory.

    Attributes:
        task: the task's name.
        x: inputs, in the form in which they were observed: a tensor, or a dict or tuple of tensors.
        y: targets.
        logits: the model's logits when the samples were stored, NaN for classes added later; ``None`` where the task's
            samples have none.
        slots: indices of the samples in the task's buffer, valid until the memory changes.
        edits: how often the inputs of each sample were replaced.
    """

    task: str
    x: Inputs
    y: Tensor
    logits: Tensor | None
    slots: Tensor
    edits: Tensor
