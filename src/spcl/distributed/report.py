"""What a rank says of its part of a step, as numbers that the ranks sum up."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RankReport"]


class RankReport(NamedTuple):
    """What a rank says of its part of a step; the sum of the reports of all ranks says it of the step.

    Attributes:
        health: of every gradient, see :class:`~spcl.engine.gradients.GradientMatrix`; zeros for those of other ranks.
        failed: whether the rank has an error.
        drew: whether its passes have drawn random numbers.
        passes: how often every rank, a row each, has updated the averages of every batch-norm layer; zeros for others.
        heads: for every parameter of a head whether it has a gradient.

    >>> flag, none = torch.ones((), dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    >>> report = RankReport(flag.new_zeros(1, 3), failed=flag, drew=0 * flag, passes=none.view(2, 0), heads=none)
    >>> report.packed()
    tensor([0., 0., 0., 1., 0.], dtype=torch.float64)
    >>> report.unpacked(2 * report.packed()).failed
    tensor(2., dtype=torch.float64)
    """

    health: Tensor
    failed: Tensor
    drew: Tensor
    passes: Tensor
    heads: Tensor

    def packed(self) -> Tensor:
        """Return the report as a vector on the device of the health."""
        on_host = torch.cat([part.reshape(-1) for part in self[1:]])
        return torch.cat([self.health.reshape(-1), on_host.to(self.health.device)])

    def unpacked(self, numbers: Tensor) -> "RankReport":
        """Return the report that a vector holds as :meth:`packed` lays it out."""
        parts = torch.split_with_sizes(numbers, [part.numel() for part in self])
        return RankReport(*(part.view(each.shape) for part, each in zip(parts, self, strict=True)))
