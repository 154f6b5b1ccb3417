"""Samples drawn from a memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import Inputs
from spcl.memory.task_buffer import TaskBuffer

__all__ = ["DrawAhead", "ReplayBatch", "replay_batches"]


@dataclass(frozen=True)
class ReplayBatch:
    """Samples of one task drawn from a memory.

    Attributes:
        task: the task's name.
        x: inputs, in the form in which they were observed: a tensor, or a dict or tuple of tensors.
        y: targets.
        logits: the model's logits when the samples were stored, NaN for classes added later; ``None`` where the task's
            samples have none.
        slots: indices of the samples in the task's buffer, valid until samples are added or evicted.
        edits: how often the inputs of each sample were replaced.
    """

    task: str
    x: Inputs
    y: Tensor
    logits: Tensor | None
    slots: Tensor
    edits: Tensor


@dataclass(frozen=True)
class DrawAhead:
    """A draw that was made before it was asked for, and the state of the draws before it."""

    count: int
    before: Any
    batches: list[ReplayBatch]


def replay_batches(buffers: Mapping[str, TaskBuffer], chosen: Mapping[str, NDArray[np.int64]]) -> list[ReplayBatch]:
    """Return copies of the samples at the chosen positions, whose rows a GPU gets in one transfer."""
    if not chosen:
        return []
    rows = [buffers[task].rows[positions] for task, positions in chosen.items()]
    all_rows, sizes = torch.from_numpy(np.concatenate(rows)), [*map(len, rows)]
    on_devices, batches = {all_rows.device: all_rows.split_with_sizes(sizes)}, []
    for place, (task, positions) in enumerate(chosen.items()):
        buffer, fields = buffers[task], {}
        for name, field in buffer.fields.items():
            if field.device not in on_devices:
                on_devices[field.device] = all_rows.to(field.device, non_blocking=True).split_with_sizes(sizes)
            fields[name] = field.index_select(0, on_devices[field.device][place])
        inputs, edits = buffer.inputs_of(fields), torch.from_numpy(buffer.edits[positions])
        slots = torch.from_numpy(positions)
        batches.append(ReplayBatch(task, inputs, fields["y"], fields.get("logits"), slots, edits))
    return batches
