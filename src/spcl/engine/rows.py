"""The gradients of a step: how they are reduced, and the matrix in whose rows backward passes accumulate them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl.aggregation.factors import FactoredGradients
from spcl.errors import SpclError
from spcl.methods.base import CURRENT, MEMORY, Reduction

Array = NDArray[np.float64]


class Target(NamedTuple):
    """The row of the gradient matrix to which a gradient is added, and its coefficient there."""

    row: int
    coefficient: float


@dataclass(frozen=True)
class ReductionPlan:
    r"""How the T gradients of a step become the K gradients that a method weighs.

    The reduced gradients are :math:`F G`. They are formed in two steps, :math:`F = R A`: the gradients are accumulated
    in the rows :math:`A G` of the gradient matrix, and the rows are reduced by :math:`R`, in T×T matrices only.

    Attributes:
        names: the gradients: sources, then memory.
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
        """Return the plan of a reduction; the plans of recent steps are kept.

        Args:
            names: the gradients: sources, then memory.
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

    @cached_property
    def targets(self) -> list[Target]:
        """Where each gradient is added."""
        rows = np.abs(self.accumulation).argmax(axis=0)
        coefficients = self.accumulation[rows, np.arange(len(rows))]
        return [Target(*each) for each in zip(rows.tolist(), coefficients.tolist(), strict=True)]


def _reduced(names: tuple[str, ...], reduction: Reduction, weights: Sequence[float]) -> tuple[tuple[str, ...], Array]:
    if reduction == "none":
        return names, np.eye(len(names))
    if reduction == "sum":
        return ("sum",), np.array([weights], dtype=np.float64)
    is_memory = np.array([name == MEMORY for name in names])
    groups = [(CURRENT, ~is_memory), (MEMORY, is_memory)]
    present = [(name, members / members.sum()) for name, members in groups if members.any()]
    return tuple(name for name, _ in present), np.stack([row for _, row in present])


ROWS_AT_ONCE = 4
HEALTH = 3


class GradientMatrix:
    r"""The gradients of a step with respect to the shared parameters, accumulated in the rows of one buffer.

    A :class:`ReductionPlan` says to which row a gradient is added and with which coefficient: with the reduction
    ``"none"`` every gradient has a row, with ``"mean"`` the tasks share one, with ``"sum"`` all do. So T×n numbers are
    held only where they are needed. The ``.grad`` of the parameters are views of a row: autograd writes a gradient
    where it belongs, and the optimiser reads the update, without a copy.

    Args:
        parameters: the parameters of the backbone.
        like: gives type and device where there are no parameters: the matrix then has no columns.

    Attributes:
        shared: the parameters of the backbone.
        shared_length: how many numbers they have.
        parameters: the backbone's, then the parameters of encoders that sources share, and of heads that are weighed.
        length: n, how many numbers they have.
        buffer: the rows, then one for the orthogonality gradient and for gradients with a coefficient.
        blocks: by parameter, a view of its columns of the buffer, of shape (rows, \\*parameter.shape).
        health: for every gradient its loss, its norm and the norm of the model's buffers, float64.
        plan: the reduction of the current step.
        has_penalty: whether there is an orthogonality gradient in it.
        factors: gradients of linear layers that are kept as factors; their columns of the buffer mean nothing.
        keeps_factors: whether gradients may be kept so.
        anchor: a tensor that autograd follows in place of parameters whose gradients it is not to compute.
        dtype, device: of the shared parameters.

    >>> weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> gradients = GradientMatrix([weight])
    >>> gradients.begin(ReductionPlan.make(("a", "b"), "none", separate=False))
    >>> for index, loss in enumerate([(3 * weight).sum(), (weight ** 2).sum()]):
    ...     with gradients.accumulate(index):
    ...         loss.backward()
    >>> gradients.rows
    tensor([[3., 3.],
            [2., 4.]])
    >>> gradients.combine(np.array([1.0, 0.5]))
    >>> gradients.assign_grads(0)
    >>> weight.grad
    tensor([4., 5.])
    """

    plan: ReductionPlan

    def __init__(self, parameters: Sequence[nn.Parameter], like: Tensor | None = None) -> None:
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if not kinds and like is not None:
            kinds = {(like.dtype, like.device)}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
            raise SpclError(f"the backbone's trainable parameters must share one type and device; found {found}")
        self.parameters = self.shared = list(parameters)
        self.length = self.shared_length = sum(parameter.numel() for parameter in parameters)
        self._others: list[nn.Parameter] = []
        ((self.dtype, self.device),) = kinds
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
        self.buffer = torch.empty(0, self.length, dtype=self.dtype, device=self.device)
        self.health = torch.empty(0, HEALTH, dtype=torch.float64, device=self.device)
        self._row_tensors: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self.blocks = self._new_blocks()
        self._filled: set[int] = set()
        self._held = self._open = 0
        self.has_penalty = False
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.keeps_factors = False
        self.factors: dict[nn.Parameter, FactoredGradients] = {}

    def set_others(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let these parameters, of shared encoders and of heads that are weighed, have columns after the backbone's."""
        if len(parameters) == len(self._others) and all(map(is_, parameters, self._others)):
            return
        others = GradientMatrix(parameters, like=self.buffer)
        if (others.dtype, others.device) != (self.dtype, self.device):
            raise SpclError(
                f"encoders or heads are {others.dtype} on {others.device}, the backbone is {self.dtype} on "
                f"{self.device}, but their gradients are weighed together; make all the same"
            )
        self._release()
        self._others = list(parameters)
        self.parameters = [*self.shared, *parameters]
        self.length = self.shared_length + others.length
        self._strides = [*self._strides[: len(self.shared)], *others._strides]
        self.buffer = torch.empty(0, self.length, dtype=self.dtype, device=self.device)

    # -- a step

    def begin(
        self, plan: ReductionPlan, penalty: bool = False, factored: bool = False, rows: int | None = None
    ) -> None:
        """Start a step: its gradients are accumulated anew, as the plan says.

        With ``factored``, gradients of linear layers may be kept as factors instead, where that is faster; only
        :meth:`columns` and :meth:`combine` then give what they stand for. With ``rows`` only the first `rows`
        rows are held, and the memory of further rows is freed.
        """
        self.plan = plan
        self.keeps_factors = factored and plan.is_separate and not penalty
        self.factors.clear()
        self.has_penalty = penalty
        self._filled.clear()
        self._held = plan.rows if rows is None else rows
        self._reserve(self._held + (penalty or plan.is_weighted), exactly=rows is not None)
        if len(self.health) < len(plan.names):
            self.health = self.health.new_empty(self._with_spare(len(plan.names)), HEALTH)

    def hold(self, rows: int) -> None:
        """Grow the buffer to at least `rows` rows; growing discards their contents."""
        if rows > self._held:
            self._held = rows
            self._reserve(rows, exactly=True)

    @property
    def holds_rows(self) -> bool:
        """Whether there is a row for each that the plan has."""
        return self._held == self.plan.rows

    @property
    def rows(self) -> Tensor:
        """The accumulated gradients, one row each."""
        return self.buffer[: self._held]

    @property
    def rows_with_penalty(self) -> Tensor:
        """The accumulated gradients and, if there is one, the orthogonality gradient as the last row."""
        return self.buffer[: self._held + self.has_penalty]

    def columns(self) -> Tensor | list[Tensor | FactoredGradients]:
        """Return the rows, with that of the orthogonality gradient; blocks of columns where some are factored."""
        if not self.factors:
            return self.rows_with_penalty
        return [*(self.rows[:, part] for part in self._dense_columns()), *self.factors.values()]

    def _dense_columns(self) -> list[slice]:
        """Return the runs of columns that are not factored."""
        parts, start = [slice(0, 0)], 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            if parameter not in self.factors:
                first = parts.pop().start if parts[-1].stop == start else start
                parts.append(slice(first, stop))
            start = stop
        return [part for part in parts if part.stop > part.start]

    @property
    def penalty_row(self) -> Tensor:
        """The row of the orthogonality gradient."""
        return self._row_tensors[self._held]

    @property
    def open_row(self) -> Tensor:
        """The row that the current backward pass accumulates in."""
        return self._row_tensors[self._open]

    @contextmanager
    def accumulate(self, gradient: int) -> Iterator[None]:
        """Let backward passes within the block add to this gradient."""
        row, coefficient = self.plan.targets[gradient]
        is_scaled = coefficient != 1.0
        self._open = self.plan.rows if is_scaled else row
        if is_scaled or row not in self._filled:
            self.open_row.zero_()
        self.assign_grads(self._open)
        yield
        if is_scaled:
            self._add_to(row, self.open_row, coefficient)
        self._filled.add(row)

    def open(self, row: int) -> None:
        """Let backward passes from now on add to this row."""
        self._open = row
        if row not in self._filled:
            self.open_row.zero_()
        self.assign_grads(row)
        self._filled.add(row)

    def clear(self, rows: Sequence[int]) -> None:
        """Set rows to zero, to which gradients are then added."""
        for row in rows:
            self._row_tensors[row].zero_()
        self.mark_filled(rows)

    def mark_filled(self, rows: Sequence[int]) -> None:
        """Note that rows hold gradients."""
        self._filled.update(rows)

    def add(self, gradient: int, values: Tensor) -> None:
        """Add values to this gradient."""
        row, coefficient = self.plan.targets[gradient]
        self._add_to(row, values, coefficient)

    def _add_to(self, row: int, values: Tensor, coefficient: float) -> None:
        accumulated = self._row_tensors[row]
        if row in self._filled:
            accumulated.add_(values, alpha=coefficient)
        else:
            torch.mul(values, coefficient, out=accumulated)
            self._filled.add(row)

    def mean_of_sources(self, tasks: int) -> Tensor:
        """Return the mean of the first ``tasks`` gradients, once they are complete; not for the reduction ``"sum"``."""
        if self.plan.is_separate:
            return self.buffer[:tasks].mean(dim=0)
        return self.buffer[0] * float(self.plan.reduction[0, 0])

    def penalty_matrix(self, coupled: bool) -> Array | None:
        """Return the matrix that adds the orthogonality gradient to every gradient of every row (Alg. 2, line 5).

        None where there is none.
        """
        if not self.has_penalty:
            return None
        matrix = np.eye(self.plan.rows, self.plan.rows + 1)
        if coupled:
            matrix[:, -1] = self.plan.accumulation.sum(axis=1)
        return matrix

    def combine(self, weights: Array) -> None:
        """Form the weighted sum of the first rows in row 0 (Alg. 2, line 10)."""
        if self.factors:
            self._combine_columns(torch.from_numpy(weights).to(self.device, self.dtype, non_blocking=True))
            return
        update, factors = self._row_tensors[0], torch.from_numpy(weights).to(self.dtype)
        first, *others = factors.tolist()  # inf where a weight exceeds the range of the type
        if others and not self.buffer.is_cuda:
            update.addmv_(self.buffer[1 : len(weights)].T, factors[1:], beta=first)
            return
        if first != 1.0:
            update.mul_(first)
        for row, weight in zip(self._row_tensors[1 : len(weights)], others, strict=True):  # nothing to transfer
            update.add_(row, alpha=weight)

    def _combine_columns(self, weights: Tensor) -> None:
        for part in self._dense_columns():
            self.buffer[0, part] = weights @ self.buffer[: len(weights), part]
        for parameter, view in zip(self.parameters, self._views[0], strict=True):
            if parameter in self.factors:
                self.factors[parameter].weighted_sum(weights, view)
        self.factors.clear()  # and the activations that they hold

    def apply(self, rule: Callable[[Tensor], Tensor], coupled: bool) -> None:
        """Form the update of an elementwise rule in row 0; the rule may overwrite the rows."""
        if self.has_penalty and coupled:
            self.rows.add_(self.penalty_row)
        self.buffer[0].copy_(rule(self.rows))

    def add_penalty(self, alpha: float | None) -> None:
        r"""Add the orthogonality gradient p to the update u in row 0, at a relative length if ``alpha`` is given.

        Then layer by layer

        .. math:: u_l \mathrel{+}= \alpha \frac{\|u_l\|}{\max(\|p_l\|, \|K_l\|)}\, p_l

        for the weights :math:`K_l` of layer l. That is α times as long as the update, and shorter where the weights
        are longer than the penalty's gradient, so nearly orthogonal.
        """
        if alpha is None:
            self.buffer[0].add_(self.penalty_row)
            return
        updates, penalties = self._views[0], self.views(self.penalty_row)
        weights = [parameter.detach() for parameter in self.parameters[: len(penalties)]]
        lengths, slopes, sizes = (torch.stack(torch._foreach_norm(each)) for each in (updates, penalties, weights))
        factors = alpha * lengths / torch.maximum(slopes, sizes).clamp(min=torch.finfo(self.dtype).tiny)
        torch._foreach_mul_(penalties, list(factors.unbind()))
        torch._foreach_add_(updates, penalties)

    # -- the parameters' views

    def assign_grads(self, row: int) -> None:
        """Assign views of this row to the parameters' ``.grad``."""
        for parameter, view in zip(self.parameters, self._views[row], strict=True):
            parameter.grad = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return one view of the vector per parameter, with its memory layout, as far as the vector has columns."""
        views, start = [], vector.storage_offset()
        end = start + len(vector)
        for parameter, strides in zip(self.parameters, self._strides, strict=True):
            if start == end and parameter.numel():
                break
            views.append(vector.as_strided(parameter.shape, strides, start))
            start += parameter.numel()
        return views

    def _new_blocks(self) -> dict[nn.Parameter, Tensor]:
        blocks, start = {}, 0
        for parameter, strides in zip(self.parameters, self._strides, strict=True):
            shape = (len(self.buffer), *parameter.shape)
            blocks[parameter] = self.buffer.as_strided(shape, (self.length, *strides), start)
            start += parameter.numel()
        return blocks

    def _with_spare(self, count: int) -> int:
        """Return a number of rows to allocate: a GPU's graphs know addresses, which should seldom change."""
        return -(-count // ROWS_AT_ONCE) * ROWS_AT_ONCE if self.device.type == "cuda" else count

    def _reserve(self, count: int, exactly: bool) -> None:
        if count == len(self.buffer) or (count < len(self.buffer) and not exactly):
            return
        self._release()
        count = count if exactly else self._with_spare(count)
        self.buffer = torch.empty(count, self.length, dtype=self.dtype, device=self.device)
        self._row_tensors = list(self.buffer)
        self._views = [self.views(row) for row in self.buffer]
        self.blocks = self._new_blocks()

    def _release(self) -> None:
        """Free the buffer, before a larger one is allocated."""
        for parameter in self.parameters:
            parameter.grad = None
        self._views, self._row_tensors, self.blocks = [], [], {}
        self.buffer = torch.empty(0, device=self.device)


@torch.no_grad()
def write_gradients(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients into views, with one kernel launch; zeros where there is no gradient.

    >>> write_gradients([a := torch.ones(2), b := torch.ones(1)], [torch.tensor([3.0, 4.0]), None])
    >>> a, b
    (tensor([3., 4.]), tensor([0.]))
    """
    used = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    if used:
        torch._foreach_copy_([view for view, _ in used], [gradient for _, gradient in used])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()
