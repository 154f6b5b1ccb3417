"""Collecting the gradients of one step: a column per task and one for memory, folded as the method wants them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spcl.aggregation.gramians import gramian_and_numbers
from spcl.cuda_graphs.columns import CapturedColumns
from spcl.cuda_graphs.penalty import CapturedPenalty
from spcl.cuda_graphs.step import CapturedStep
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples, SharedModel
from spcl.errors import SpclError, is_out_of_memory
from spcl.learner.rollback import StepGuard, size_of
from spcl.memory import Memory, ReplayBatch
from spcl.methods.base import CURRENT, MEMORY, Gradients, Method, Output, Weights
from spcl.orthogonality import add_orthogonality_gradient

__all__ = ["Collected", "Collector", "nothing"]

Array = NDArray[np.float64]
Measure = Callable[[Tensor, Tensor], tuple[Array, Array]]


@dataclass(frozen=True)
class Column:
    """One gradient: whose, and what the heads got from it; the shared part lies in a row.

    Its *signs* lie in a table beside: three numbers that are finite while all is well, the loss, the norm of the
    gradient (a bound, where it has a row of its own; where columns are added up in one row, of all up to this one),
    and that of the running averages.
    """

    name: str
    head_gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Collected:
    """The outcome of a step's backward passes.

    Without ``faults`` the update, whose norm is at most ``bound``, lies in the ``.grad`` of backbone and heads. With
    them there is none: the step must be undone and may be repeated without the columns at fault.
    """

    losses: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    before: Tensor | None = None
    after: Tensor | None = None
    faults: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    edits: list[tuple[ReplayBatch, Tensor]] = field(default_factory=list)
    bound: float = inf

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time this block takes to the phase's."""
        begin = perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - begin


class Collector:
    """The backward half of a step, in the order of the paper's Algorithm 2.

    With ``full`` every column keeps its row until the weights are known: T×n numbers. Without, the columns are folded
    as they come, which holds one to three rows whatever T is. The update ends up in row 0.
    """

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        memory: Memory | None,
        rows: GradientMatrix,
        guard: StepGuard,
    ) -> None:
        self.model = model
        self.method = method
        self.memory = memory
        self.rows = rows
        self.guard = guard
        self.captured: CapturedColumns | None = None
        self.captured_step: CapturedStep | None = None
        self.penalty: CapturedPenalty | None = None
        self.backbone: Callable[[Tensor], Tensor] = model.backbone
        self.measure: Measure = gramian_and_numbers
        self._has_own_row = True
        self._signs = rows.buffer.new_empty(0, 3, dtype=torch.float64)

    def collect(
        self, result: Collected, batches: Sequence[Samples], rehearse: int, full: bool, meanwhile: Callable[[], object]
    ) -> None:
        """Leave the update of this step in the parameters' ``.grad``.

        Args:
            result: where everything else is noted.
            batches: the samples of the tasks.
            rehearse: how many samples come from memory.
            full: whether every column keeps its row in any case.
            meanwhile: what is to be done while a GPU works on the columns.
        """
        if self.method.reduction == "sum":
            names = [samples.task.name for samples in batches] + [MEMORY] * bool(rehearse)
            blank = Gradients(tuple(names), np.full(len(names), np.nan), None)
            result.weights = dict(zip(names, self._weigh(blank).values.tolist(), strict=True))
        if self.penalty is not None:
            self.penalty.run()
        if self.captured is not None:
            self.captured.begin()
        if len(self._signs) <= len(batches):
            self._signs = self._signs.new_empty(len(batches) + 1, 3)
        self._has_own_row = full or self.method.reduction == "none"
        if self._has_own_row:
            columns = self._collect_rows(result, batches, rehearse, meanwhile)
        elif self.method.reduction == "mean":
            columns = self._collect_means(result, batches, rehearse, meanwhile)
        else:
            columns = self._collect_sum(result, batches, rehearse, meanwhile)
        if not result.faults:
            self._hand_over(result, columns)

    # -- every column in its own row

    def _collect_rows(
        self, result: Collected, batches: Sequence[Samples], rehearse: int, meanwhile: Callable[[], object]
    ) -> list[Column]:
        rows, has_penalty = self.rows, self.method.settings.alpha > 0.0
        count = len(batches) + bool(rehearse)
        rows.reserve(count + has_penalty)
        with result.timed("tasks"):
            columns = self._task_columns(batches)
        if rehearse:
            with result.timed("memory"):
                rows.start(count - 1)
                mean = rows.buffer[: len(batches)].mean
                columns += self._memory_column(
                    result, count - 1, rehearse, partial(mean, dim=0), self._signs[count - 1]
                )
        if has_penalty:
            with result.timed("orthogonality"):
                self._write_orthogonality(count)
        meanwhile()
        with result.timed("weighting"):
            products, numbers = self.measure(rows.buffer[: count + has_penalty], self._signs[: len(columns)].view(-1))
            self._add_norms(numbers, products.diagonal()[: len(columns)])
            if self._all_well(result, columns, numbers):  # up to here a step waits for a GPU, and then no more
                self._weigh_rows(result, [column.name for column in columns], products, has_penalty)
        return columns

    def _task_columns(self, batches: Sequence[Samples]) -> list[Column]:
        plain = self.method.has_plain_task_loss() and not self.method.stores_logits and self._is_captured(batches)
        if plain and self.captured_step is not None and self.captured_step.replay(batches, self._signs):
            return [Column(samples.task.name) for samples in batches]
        columns = []
        for row, samples in enumerate(batches):
            self.rows.start(row)
            columns.append(self._task_column(row, samples, self._signs[row]))
        return columns

    def _add_norms(self, numbers: Array, squares: Array) -> None:
        """Complete the signs by the norms of the rows; infinite where an optimiser could not square them."""
        numbers[1::3] += np.where(squares < torch.finfo(self.rows.dtype).max, np.sqrt(np.abs(squares)), np.inf)

    def _weigh_rows(self, result: Collected, names: list[str], products: Array, has_penalty: bool) -> None:
        spread = self._spread(len(names), has_penalty)
        before = spread @ products @ spread.T
        result.before = torch.from_numpy(before)
        if type(self.method).combine is not Method.combine:
            self._combine_elementwise(len(names), has_penalty)
            return
        fold, folded_names = self._fold_matrix(result, names)
        losses = np.array([result.losses[name] for name in names])
        if self.method.reduction == "sum":
            weights = Weights(torch.ones(1, dtype=torch.float64))
        else:
            weights = self._weigh(Gradients(folded_names, fold @ losses, torch.from_numpy(fold @ before @ fold.T)))
        per_column = fold.T @ weights.values.numpy().astype(np.float64)
        per_row = spread.T @ per_column
        if has_penalty and self.method.settings.decoupled:
            per_row[-1] = 1.0
        result.weights = dict(zip(names, per_column.tolist(), strict=True))
        adjusted = weights if self.method.reduction == "none" else Weights(torch.from_numpy(per_column))
        result.after = adjusted.adjusted_gramian(result.before)
        sizes = np.abs(per_row)
        result.bound = float(max(sizes.max(), sizes @ np.sqrt(products.diagonal())))
        self.rows.combine(torch.from_numpy(per_row))

    def _spread(self, count: int, has_penalty: bool) -> Array:
        """Gradients from rows: the orthogonality gradient, last row of the buffer, is added to each (line 5)."""
        spread = np.eye(count, count + has_penalty)
        if has_penalty and not self.method.settings.decoupled:
            spread[:, -1] = 1.0
        return spread

    def _fold_matrix(self, result: Collected, names: list[str]) -> tuple[Array, tuple[str, ...]]:
        """What the method weighs, from the columns."""
        if self.method.reduction == "none":
            return np.eye(len(names)), tuple(names)
        if self.method.reduction == "sum":
            return np.array([list(result.weights.values())]), ("sum",)
        is_memory = np.array([name == MEMORY for name in names])
        groups = [(CURRENT, ~is_memory), (MEMORY, is_memory)]
        present = [(name, mask / mask.sum()) for name, mask in groups if mask.any()]
        return np.stack([row for _, row in present]), tuple(name for name, _ in present)

    def _weigh(self, columns: Gradients) -> Weights:
        weights = self.method.weigh(columns)
        found = tuple(weights.values.shape) if isinstance(weights, Weights) else type(weights).__name__
        if found != (len(columns.names),):
            raise SpclError(
                f"{self.method!r} must give Weights of shape ({len(columns.names)},) for the columns "
                f"{', '.join(columns.names)}, but gives {found}"
            )
        return weights

    def _combine_elementwise(self, count: int, has_penalty: bool) -> None:
        rows = self.rows.buffer[:count]
        orthogonality = self.rows.buffer[count] if has_penalty else None
        decoupled = self.method.settings.decoupled
        if orthogonality is not None and not decoupled:
            rows.add_(orthogonality)
        update = self.rows.buffer[0].copy_(self.method.combine(rows))
        if orthogonality is not None and decoupled:
            update.add_(orthogonality)

    # -- the current tasks in one row, the memory in another

    def _collect_means(
        self, result: Collected, batches: Sequence[Samples], rehearse: int, meanwhile: Callable[[], object]
    ) -> list[Column]:
        rows, has_penalty = self.rows, self.method.settings.alpha > 0.0
        folded = [CURRENT, MEMORY] if rehearse else [CURRENT]
        rows.reserve(len(folded) + has_penalty)
        rows.start(0)
        with result.timed("tasks"):
            columns = [self._task_column(0, *pair) for pair in zip(batches, self._signs[: len(batches)], strict=True)]
            rows.buffer[0].div_(len(batches))
        if rehearse:
            with result.timed("memory"):
                rows.start(1)
                columns += self._memory_column(result, 1, rehearse, lambda: rows.buffer[0], self._signs[len(batches)])
        count, decoupled = len(folded), self.method.settings.decoupled
        if has_penalty:
            with result.timed("orthogonality"):
                self._write_orthogonality(count)
                if not decoupled:
                    rows.buffer[:count].add_(rows.buffer[count])
        meanwhile()
        with result.timed("weighting"):
            signs = self._signs[: len(columns)].view(-1)
            if self.method.uses_gramian:
                products, numbers = self.measure(rows.buffer[:count], signs)
            else:
                products, numbers = None, signs.cpu().numpy()
            if self._all_well(result, columns, numbers):
                self._weigh_means(result, [column.name for column in columns], folded, products)
                if has_penalty and decoupled:
                    rows.buffer[0].add_(rows.buffer[count])
        return columns

    def _weigh_means(self, result: Collected, names: list[str], folded: list[str], products: Array | None) -> None:
        fold, _ = self._fold_matrix(result, names)
        losses = fold @ np.array([result.losses[name] for name in names])
        gramian = None if products is None else torch.from_numpy(products)
        weights = self._weigh(Gradients(tuple(folded), losses, gramian)).values.double()
        result.weights = dict(zip(names, (fold.T @ weights.numpy()).tolist(), strict=True))
        self.rows.combine(weights)

    # -- one row, the weighted sum

    def _collect_sum(
        self, result: Collected, batches: Sequence[Samples], rehearse: int, meanwhile: Callable[[], object]
    ) -> list[Column]:
        rows, has_penalty, columns = self.rows, self.method.settings.alpha > 0.0, list[Column]()
        rows.reserve(2)

        def add(column: Column) -> None:
            if columns:
                rows.buffer[0].add_(rows.buffer[1], alpha=result.weights[column.name])
            else:
                rows.buffer[0].mul_(result.weights[column.name])
            columns.append(column)

        with result.timed("tasks"):
            for samples, signs in zip(batches, self._signs[: len(batches)], strict=True):
                row = min(len(columns), 1)
                rows.start(row)
                add(self._task_column(row, samples, signs))
        if rehearse:
            with result.timed("memory"):
                rows.start(1)
                last = self._signs[len(batches)]
                for column in self._memory_column(result, 1, rehearse, lambda: rows.buffer[0], last):
                    add(column)
        meanwhile()
        numbers = self._signs[: len(columns)].cpu().numpy()
        if self._all_well(result, columns, numbers) and has_penalty:
            with result.timed("orthogonality"):
                self._write_orthogonality(1)
                share = 1.0 if self.method.settings.decoupled else sum(result.weights.values())
                rows.buffer[0].add_(rows.buffer[1], alpha=share)
        return columns

    # -- one column

    def _task_column(self, row: int, samples: Samples, signs: Tensor) -> Column:
        with self.model.naming(samples.task, samples.x, samples.y):
            if self.method.has_plain_task_loss() and self._is_captured([samples]):
                return self._replay(samples.task.name, [samples], [samples.x], signs)
            outputs = self.model.outputs([samples], backbone=self.backbone)
            return self._backward(row, samples.task.name, self.method.task_loss(outputs[0]), outputs, signs)

    def _memory_column(
        self, result: Collected, row: int, count: int, direction: Callable[[], Tensor], signs: Tensor
    ) -> list[Column]:
        """The column of memory; none, and why, where the model cannot take what was drawn.

        A head with batch-norm, for one, cannot be trained on a single sample; the next draw will be another.
        """
        try:
            return [self._rehearsed(result, row, count, direction, signs)]
        except (RuntimeError, ValueError) as error:
            if isinstance(error, SpclError) or is_out_of_memory(error):
                raise
            result.faults[MEMORY] = f"the model cannot take the samples drawn: {error}"
            return []

    def _rehearsed(
        self, result: Collected, row: int, count: int, direction: Callable[[], Tensor], signs: Tensor
    ) -> Column:
        column = self._rehearse(result, row, count, 0, direction, signs)
        for draw in range(1, self.method.draws):
            before = signs.clone()
            more = self._rehearse(result, row, count, draw, direction, signs)
            signs += before
            for parameter, gradient in more.head_gradients.items():
                earlier = column.head_gradients.get(parameter)
                column.head_gradients[parameter] = gradient if earlier is None else earlier + gradient
        return column

    def _rehearse(
        self, result: Collected, row: int, count: int, draw: int, direction: Callable[[], Tensor], signs: Tensor
    ) -> Column:
        assert self.memory is not None
        drawn = self.memory.draw(count)
        samples = [Samples(self.model.tasks[part.task], part.x, part.y, part.logits) for part in drawn]
        inputs = None
        if self.method.edits_memory:
            inputs = self.method.edit(drawn, _LookAhead(self, samples, direction))
            result.edits += zip(drawn, inputs, strict=True)
        if self.method.has_plain_memory_loss() and self._is_captured(samples):
            return self._replay(MEMORY, samples, inputs or [group.x for group in samples], signs)
        outputs = self.model.outputs(samples, inputs, self.backbone)
        return self._backward(row, MEMORY, self.method.memory_loss(outputs, draw), outputs, signs)

    def _is_captured(self, samples: Sequence[Samples]) -> bool:
        return self.captured is not None and self.captured.takes(samples)

    def _replay(self, name: str, samples: Sequence[Samples], inputs: Sequence[Tensor], signs: Tensor) -> Column:
        assert self.captured is not None
        column = self.captured.replay(samples, inputs, signs)
        if not self.method.stores_logits or name == MEMORY:
            return Column(name)
        return Column(name, logits={name: self.captured.logits(column, samples[0].task)})

    def _backward(self, row: int, name: str, loss: Tensor, outputs: list[Output], signs: Tensor) -> Column:
        self.rows.receive()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {}
        for parameter in self.model.head_parameters():
            if parameter.grad is not None:
                gradients[parameter], parameter.grad = parameter.grad, None
        parts = [*gradients.values()] if self._has_own_row else [self.rows.buffer[row], *gradients.values()]
        signs.copy_(torch.stack([loss.detach(), size_of(parts, loss), self.guard.averages_size()]))
        keeps_logits = self.method.stores_logits and name != MEMORY
        return Column(name, gradients, {name: outputs[0].value.detach()} if keeps_logits else {})

    def _write_orthogonality(self, row: int) -> None:
        """α times the gradient of the penalty: next to the tasks' gradients it would be too long without."""
        self.rows.start(row)
        if self.penalty is not None:
            self.rows.add(self.penalty.gradient)
            return
        self.rows.receive()
        views = dict(zip(self.rows.parameters, self.rows.views(self.rows.buffer[row]), strict=True))
        add_orthogonality_gradient(self.model.backbone, views, self.method.settings.alpha)

    # -- what is finite

    def _all_well(self, result: Collected, columns: Sequence[Column], numbers: Array) -> bool:
        """Whether every column is finite, by their signs; notes the losses, or which columns are at fault and why.

        Whatever comes after a column at fault may have been spoilt by it and is judged when the step is repeated,
        unless its own loss speaks against it.
        """
        signs = numbers.reshape(-1, 3).tolist()
        for column, (loss, gradient, averages) in zip(columns, signs, strict=True):
            if result.faults and (column.name == MEMORY or isfinite(loss)):
                continue
            if not isfinite(loss):
                result.faults[column.name] = f"its loss is {loss}"
            elif not isfinite(gradient):
                result.faults[column.name] = f"its gradient is not finite, or too large to be squared (loss {loss:g})"
            elif not isfinite(averages) and self.guard.averages_were_finite():
                result.faults[column.name] = f"the model's running averages overflow on its inputs (loss {loss:g})"
        result.losses = {column.name: loss for column, (loss, _, _) in zip(columns, signs, strict=True)}
        return not result.faults

    def _hand_over(self, result: Collected, columns: Sequence[Column]) -> None:
        surely_finite = result.bound < torch.finfo(self.rows.dtype).max
        if not surely_finite and not bool(self.rows.buffer[0].norm().isfinite()):
            reason = f"the update that {self.method!r} gives for this step is not finite"
            result.faults = {column.name: reason for column in columns if column.name != MEMORY}
            return
        self.rows.present(0)
        for parameter, gradient in [] if self.captured is None else self.captured.head_gradients():
            parameter.grad = gradient
        for column in columns:
            result.logits |= column.logits
            for parameter, gradient in column.head_gradients.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def nothing() -> None:
    """What is to be done meanwhile, by default."""


class _LookAhead:
    """The engine's side of :class:`spcl.methods.base.LookAhead`."""

    def __init__(self, collector: Collector, samples: Sequence[Samples], direction: Callable[[], Tensor]) -> None:
        self.collector = collector
        self.samples = samples
        self.direction = direction

    def loss(self, inputs: Sequence[Tensor]) -> Tensor:
        with self.collector.model.evaluating():
            outputs = self.collector.model.outputs(self.samples, inputs)
        return torch.stack([self.collector.method.task_loss(o) * len(o.targets) for o in outputs]).sum()

    @contextmanager
    def ahead(self, rate: float) -> Iterator[None]:
        parameters = self.collector.rows.parameters
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, change in zip(parameters, self.collector.rows.views(self.direction()), strict=True):
                parameter.sub_(change, alpha=rate)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
