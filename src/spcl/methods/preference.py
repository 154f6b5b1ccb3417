"""Preference W: how much memory counts against the current tasks."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from spcl.methods.base import MEMORY, Gradients, MethodSettings

__all__ = ["PreferenceSettings", "preference"]


class PreferenceSettings(MethodSettings):
    """Settings of methods whose update is Ĝ W, with a preference W."""

    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] | Literal["classes"] | None = Field(
        None,
        description="memory's share of the preference W, between 0 and 1, the rest of which tasks share alike; "
        "classes: that of memory's classes among all of the step; if not given, every gradient counts alike",
    )


def preference(gradients: Gradients, share: float | Literal["classes"] | None) -> Tensor | None:
    r"""Return W, one number per gradient with the sum K of ones; None for ones.

    .. math:: W_m = p K, \qquad W_i = \frac{(1 - p) K}{K - 1}

    for memory with the share p and the K − 1 tasks. With ``"classes"``, :math:`p = C_m / (C_m + \sum_i C_i)` for the
    number :math:`C_m` of classes that memory replays and :math:`C_i` of task i, so that every class counts alike; a
    task without classes counts as one. While there is no memory, all count alike.

    >>> import numpy as np
    >>> step = Gradients(("a", "b", "memory"), np.ones(3), None, classes=(2, 3, 15))
    >>> preference(step, 0.5)
    tensor([0.7500, 0.7500, 1.5000], dtype=torch.float64)
    >>> preference(step, "classes")
    tensor([0.3750, 0.3750, 2.2500], dtype=torch.float64)
    """
    count = len(gradients.names)
    if share is None or MEMORY not in gradients.names or count == 1:
        return None
    place = gradients.names.index(MEMORY)
    if share == "classes":
        share = gradients.classes[place] / sum(gradients.classes)
    weights = torch.full((count,), (1.0 - share) * count / (count - 1), dtype=torch.float64)
    weights[place] = share * count
    return weights
