"""Moves a learner's parts to a device, and converts them to a floating-point type."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spcl.engine.update import WeightAverage
from spcl.errors import SpclError
from spcl.learner.state import SavedParts, average_state, restore_average


def destination(
    device: torch.device | str | None, dtype: torch.dtype | None, present: tuple[torch.device, torch.dtype]
) -> tuple[torch.device, torch.dtype]:
    """Return device and type as PyTorch says them, by default the present ones; raise an error for impossible ones.

    >>> destination("cpu", torch.float64, (torch.device("cpu"), torch.float32))
    (device(type='cpu'), torch.float64)
    """
    try:
        place = torch.empty(0, device=device or present[0], dtype=dtype or present[1])
    except (RuntimeError, AssertionError, TypeError) as error:
        wanted = " as ".join(repr(each) for each in (device, dtype) if each is not None)
        raise SpclError(f"the learner cannot be moved to {wanted}: {error}") from None
    if not place.is_floating_point():
        raise SpclError(f"dtype is {dtype}; give a floating-point type, e.g. torch.float32")
    return place.device, place.dtype


def move(parts: SavedParts, device: torch.device, dtype: torch.dtype) -> WeightAverage | None:
    """Move model, prediction heads, optimiser and memory in place; return the average of the moved weights."""
    model, before = parts.model, (parts.model.device, parts.model.dtype)
    saved = None if parts.average is None else average_state(parts.average, model)
    for parameter in (*model.backbone.parameters(), *model.shared_encoder_parameters, *model.own_parameters()):
        parameter.grad = None  # a view of the gradient matrix
    model.move(device, dtype)
    parts.heads.move(device, dtype)
    _move_optimizer(parts.optimizer, device)
    for task in model.tasks.values():
        if isinstance(task.loss, nn.Module):
            task.loss.to(device, dtype)
    for source in model.sources.values():
        if source.signature is not None:
            x, y = (_converted_signature(text, before[1], dtype) for text in source.signature)
            source.signature = x, y
    if parts.memory is not None:
        parts.memory.convert(before[1], dtype)
        if before[0].type != "cpu":
            parts.memory.leave(before[0], device)
    return None if parts.average is None or saved is None else _moved_average(parts.average, parts, saved)


def _move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Give the state of every parameter the parameter's device and type."""
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        for name, value in group.items():
            group[name] = value.to(device) if isinstance(value, Tensor) else value


def _moved_average(average: WeightAverage, parts: SavedParts, saved: dict[str, Any]) -> WeightAverage:
    model, moved = parts.model, type(average)(average.decay)
    averages = {
        owner: {name: tensor.to(model.device, model.dtype) for name, tensor in tensors.items()}
        for owner, tensors in saved["average"].items()
    }
    restore_average(moved, model, averages, saved["average_updates"])
    return moved


def _converted_signature(text: str, before: torch.dtype, after: torch.dtype) -> str:
    """Return the description of samples after tensors of type `before` are converted to `after`.

    >>> _converted_signature("{tokens: int64[4], x: float32[2]}", torch.float32, torch.float64)
    '{tokens: int64[4], x: float64[2]}'
    """
    old, new = (str(each).removeprefix("torch.") for each in (before, after))
    return re.sub(rf"\b{old}\[", f"{new}[", text)
