"""Moments, the items that streams yield."""

from dataclasses import dataclass

from spcl.batches import Batch


@dataclass(frozen=True, eq=False)
class Moment:
    """One step of parallel learning: a batch of every task that has data.

    A training loop adds the tasks that started, takes a step on the batches, and finishes the tasks that ended.

    Attributes:
        step: The index of the step.
        batches: `(x, y)` of each task, by name; x is a tensor, or a dict or tuple of tensors, and labels are local to
            the task.
        started: The tasks whose first batch is in this moment.
        ended: The tasks without batches after this moment.

    >>> import torch
    >>> moment = Moment(0, {"camera": (torch.zeros(8, 3), torch.zeros(8))}, started=("camera",), ended=())
    >>> for name, (x, y) in moment.batches.items():
    ...     print(name, tuple(x.shape), "new" if name in moment.started else "known")
    camera (8, 3) new
    """

    step: int
    batches: dict[str, Batch]
    started: tuple[str, ...]
    ended: tuple[str, ...]
