"""Reduction of a step's gradients: none, mean or sum."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from spcl.methods.base import CURRENT, MEMORY, Reduction

__all__ = ["ReductionPlan"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReductionPlan:
    r"""How the T gradients of a step become the K gradients that a method weighs.

    The reduced gradients are :math:`F G`. They are formed in two steps, :math:`F = R A`: the gradients are accumulated
    in the rows :math:`A G` of the gradient matrix, and the rows are reduced by :math:`R`, in T×T matrices only.

    Attributes:
        names: the gradients: tasks, then memory.
        reduced_names: names of the reduced gradients.
        accumulation: A, rows × gradients.
        reduction: R, reduced gradients × rows.
        is_separate: whether every gradient has a row of its own.
        is_weighted: whether gradients are accumulated with coefficients other than 1.

    >>> plan = ReductionPlan.make(("a", "b", "memory"), "mean", separate=False)
    >>> plan.reduced_names, plan.accumulation.tolist()
    (('current', 'memory'), [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> plan.reduction.tolist()
    [[0.5, 0.0], [0.0, 1.0]]
    """

    names: tuple[str, ...]
    reduced_names: tuple[str, ...]
    accumulation: Array
    reduction: Array
    is_separate: bool
    is_weighted: bool = False

    @classmethod
    def make(
        cls, names: Sequence[str], reduction: Reduction, *, separate: bool, weights: Sequence[float] = ()
    ) -> "ReductionPlan":
        """Return the plan of a reduction; those of recent steps are kept.

        Args:
            names: the gradients: tasks, then memory.
            reduction: ``"none"``, ``"mean"`` (over the tasks, beside memory) or ``"sum"``.
            separate: whether every gradient keeps a row of its own in any case, to measure their stability.
            weights: of the sum.
        """
        return cls._make(tuple(names), reduction, separate, tuple(weights))

    @classmethod
    @lru_cache(maxsize=16)
    def _make(
        cls, names: tuple[str, ...], reduction: Reduction, separate: bool, weights: tuple[float, ...]
    ) -> "ReductionPlan":
        reduced_names, matrix = _reduced(names, reduction, weights)
        if separate or reduction == "none":
            return cls(names, reduced_names, np.eye(len(names)), matrix, is_separate=True)
        if reduction == "sum":
            return cls(names, reduced_names, matrix, np.eye(1), is_separate=False, is_weighted=True)
        members = (matrix > 0.0).astype(np.float64)
        return cls(names, reduced_names, members, np.diag(matrix.max(axis=1)), is_separate=False)

    @property
    def rows(self) -> int:
        """The number of rows in which gradients are accumulated."""
        return len(self.accumulation)

    @cached_property
    def matrix(self) -> Array:
        """F, reduced gradients × gradients."""
        product: Array = self.reduction @ self.accumulation
        return product

    def target(self, gradient: int) -> tuple[int, float]:
        """Return the row to which a gradient is added, and its coefficient there."""
        return self._targets[gradient]

    @cached_property
    def _targets(self) -> list[tuple[int, float]]:
        rows = np.abs(self.accumulation).argmax(axis=0)
        return list(zip(rows.tolist(), self.accumulation[rows, np.arange(len(rows))].tolist(), strict=True))


def _reduced(names: tuple[str, ...], reduction: Reduction, weights: Sequence[float]) -> tuple[tuple[str, ...], Array]:
    if reduction == "none":
        return names, np.eye(len(names))
    if reduction == "sum":
        return ("sum",), np.array([weights], dtype=np.float64)
    is_memory = np.array([name == MEMORY for name in names])
    groups = [(CURRENT, ~is_memory), (MEMORY, is_memory)]
    present = [(name, members / members.sum()) for name, members in groups if members.any()]
    return tuple(name for name, _ in present), np.stack([row for _, row in present])
