"""Distances to stored logits."""

import math

import torch
from torch import Tensor

from spcl.methods.tasks import Output

__all__ = ["squared_distances", "stored_distances"]


def stored_distances(output: Output) -> Tensor:
    """Return the squared distance of every sample to the logits that it was stored with; 0 where it has none."""
    value, stored = output.value, output.stored
    if stored is None:
        stored = torch.full_like(value, math.nan)
    if output.task.classes is not None:
        value = value[:, : stored.shape[1]]  # classes of later tasks were added to the right
    return squared_distances(value.reshape(len(value), -1), stored.reshape(len(value), -1))


def squared_distances(value: Tensor, stored: Tensor) -> Tensor:
    """Return the mean of every row's squared differences where ``stored`` is known, i.e. not NaN; 0 if it nowhere is.

    >>> squared_distances(torch.tensor([[1.0, 5.0], [1.0, 5.0]]), torch.tensor([[3.0, math.nan], [math.nan, math.nan]]))
    tensor([4., 0.])
    """
    known = ~stored.isnan()
    return torch.where(known, value - stored, 0.0).square().sum(dim=1) / known.sum(dim=1).clamp(min=1)
