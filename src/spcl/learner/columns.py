"""Collecting the gradients of one step: a column per task and one for memory, folded as the method wants them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from spcl.aggregation import gramian
from spcl.learner.method import CURRENT, Columns, Method, Weights
from spcl.learner.model import Samples, SharedModel
from spcl.learner.rows import GradientRows
from spcl.learner.tasks import MEMORY, Output
from spcl.memory import Memory
from spcl.orthogonality import add_orthogonality_gradient

__all__ = ["Collected", "Collector"]


@dataclass(frozen=True)
class Column:
    """One gradient: whose, at what loss, and what the heads got from it; the shared part lies in a row."""

    name: str
    loss: Tensor
    head_gradients: dict[nn.Parameter, Tensor]
    outputs: list[Output]

    def health(self) -> Tensor:
        """A number that is finite if the loss and the heads' gradients are."""
        return torch.stack(
            [self.loss.double(), *(g.sum(dtype=torch.float64) for g in self.head_gradients.values())]
        ).sum()


@dataclass
class Collected:
    """The outcome of a step's backward passes; the update lies in the ``.grad`` of backbone and heads."""

    losses: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    before: Tensor | None = None
    after: Tensor | None = None
    dropped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time this block takes to the phase's."""
        begin = perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - begin


class Collector:
    """The backward half of a step, in the order of the paper's Algorithm 2.

    With ``full`` every column keeps its row until the weights are known: T×n numbers. Without, the columns are folded
    as they come, which holds two or three rows whatever T is.
    """

    def __init__(self, model: SharedModel, method: Method, memory: Memory | None, rows: GradientRows) -> None:
        self.model = model
        self.method = method
        self.memory = memory
        self.rows = rows

    def collect(self, batches: Sequence[Samples], rehearse: int, full: bool) -> Collected:
        """Leave the update of this step in the parameters' ``.grad``; ``rehearse`` samples come from memory, if any."""
        result = Collected()
        if full or self.method.fold == "columns":
            columns = self._collect_rows(result, batches, rehearse)
        elif self.method.fold == "mean":
            columns = self._collect_means(result, batches, rehearse)
        else:
            columns = self._collect_sum(result, batches, rehearse)
        self._hand_over_heads(columns)
        return result

    # -- every column in its own row

    def _collect_rows(self, result: Collected, batches: Sequence[Samples], rehearse: int) -> list[Column]:
        rows, alpha = self.rows, self.method.settings.alpha
        count = len(batches) + bool(rehearse)
        used = count + bool(alpha)
        rows.reserve(used)
        columns = []
        with result.timed("tasks"):
            for row, samples in enumerate(batches):
                rows.receive(row)
                columns.append(self._task_column(samples))
        if rehearse:
            with result.timed("memory"):
                rows.receive(count - 1)
                columns.append(self._memory_column(rehearse, lambda: rows.buffer[: len(batches)].mean(dim=0)))
        if alpha:
            with result.timed("orthogonality"):
                self._write_orthogonality(count)
        with result.timed("weighting"):
            products = gramian(rows.buffer[:used]).cpu()
            kept = self._keep_finite(result, columns, products.diagonal()[:count].isfinite().tolist())
            if len(kept) < count:
                rows.compact([*kept, *range(count, used)])
                products = gramian(rows.buffer[: len(kept) + used - count]).cpu()
            columns = [columns[row] for row in kept]
            if columns:
                self._weigh_rows(result, [column.name for column in columns], products)
        return columns

    def _weigh_rows(self, result: Collected, names: list[str], products: Tensor) -> None:
        alpha = self.method.settings.alpha
        spread = self._spread(len(names), alpha)
        result.before = spread @ products @ spread.T
        if self.method.elementwise:
            self._combine_elementwise(len(names), alpha)
            return
        fold, folded_names = self._fold_matrix(names)
        losses = np.array([result.losses[name] for name in names])
        weights = self._weigh(Columns(folded_names, fold.numpy() @ losses, fold @ result.before @ fold.T))
        per_column = fold.T @ weights.values.double()
        per_row = spread.T @ per_column
        if alpha and self.method.settings.decoupled:
            per_row[-1] = alpha
        result.weights = dict(zip(names, per_column.tolist(), strict=True))
        adjusted = weights if self.method.fold == "columns" else Weights(per_column)
        result.after = adjusted.adjusted_gramian(result.before)
        self.rows.present(self.rows.combine(per_row))

    def _spread(self, count: int, alpha: float) -> Tensor:
        """Columns from rows: the orthogonality gradient, last row of the buffer, is added α times to each (line 5)."""
        spread = torch.eye(count, count + bool(alpha), dtype=torch.float64)
        if alpha and not self.method.settings.decoupled:
            spread[:, -1] = alpha
        return spread

    def _fold_matrix(self, names: list[str]) -> tuple[Tensor, tuple[str, ...]]:
        """What the method weighs, from the columns."""
        if self.method.fold == "columns":
            return torch.eye(len(names), dtype=torch.float64), tuple(names)
        if self.method.fold == "sum":
            prior = self._prior_weights(names)
            return torch.tensor([[prior[name] for name in names]], dtype=torch.float64), ("sum",)
        is_memory = torch.tensor([name == MEMORY for name in names])
        groups = [(CURRENT, ~is_memory), (MEMORY, is_memory)]
        present = [(name, mask.double() / mask.sum()) for name, mask in groups if mask.any()]
        return torch.stack([row for _, row in present]), tuple(name for name, _ in present)

    def _weigh(self, columns: Columns) -> Weights:
        return Weights(torch.ones(1, dtype=torch.float64)) if self.method.fold == "sum" else self.method.weigh(columns)

    def _combine_elementwise(self, count: int, alpha: float) -> None:
        rows = self.rows.buffer[:count]
        orthogonality = self.rows.buffer[count] if alpha else None
        decoupled = self.method.settings.decoupled
        if orthogonality is not None and not decoupled:
            rows.add_(orthogonality, alpha=alpha)
        update = self.method.combine(rows)
        if orthogonality is not None and decoupled:
            update = update.add(orthogonality, alpha=alpha)
        self.rows.present_vector(update)

    # -- the current tasks in one row, the memory in another

    def _collect_means(self, result: Collected, batches: Sequence[Samples], rehearse: int) -> list[Column]:
        rows, alpha = self.rows, self.method.settings.alpha
        several = len(batches) > 1
        rows.reserve(1 + bool(rehearse) + (several or bool(alpha)))
        scratch, columns = len(rows.buffer) - 1, list[Column]()
        with result.timed("tasks"):
            for samples in batches:
                row = scratch if columns else 0
                column = self._healthy(result, row, partial(self._task_column, samples))
                if column and row:
                    rows.buffer[0].add_(rows.buffer[row])
                columns += [column] if column else []
            if len(columns) > 1:
                rows.buffer[0].div_(len(columns))
        folded = [CURRENT] if columns else []
        if rehearse:
            row = len(folded)
            with result.timed("memory"):
                column = self._healthy(result, row, lambda: self._memory_column(rehearse, lambda: rows.buffer[0]))
            if column:
                columns.append(column)
                folded.append(MEMORY)
        if folded:
            self._weigh_means(result, columns, folded, scratch, alpha)
        return columns

    def _weigh_means(
        self, result: Collected, columns: list[Column], folded: list[str], scratch: int, alpha: float
    ) -> None:
        rows, decoupled = self.rows, self.method.settings.decoupled
        if alpha:
            with result.timed("orthogonality"):
                self._write_orthogonality(scratch)
                if not decoupled:
                    rows.buffer[: len(folded)].add_(rows.buffer[scratch], alpha=alpha)
        with result.timed("weighting"):
            products = gramian(rows.buffer[: len(folded)]).cpu() if self.method.uses_gramian else None
            names = [column.name for column in columns]
            fold, _ = self._fold_matrix(names)
            losses = fold.numpy() @ np.array([result.losses[name] for name in names])
            weights = self.method.weigh(Columns(tuple(folded), losses, products)).values.double()
            result.weights = dict(zip(names, (fold.T @ weights).tolist(), strict=True))
            update = rows.combine(weights)
            if alpha and decoupled:
                rows.buffer[update].add_(rows.buffer[scratch], alpha=alpha)
            rows.present(update)

    # -- one row, the weighted sum

    def _collect_sum(self, result: Collected, batches: Sequence[Samples], rehearse: int) -> list[Column]:
        rows, alpha, columns = self.rows, self.method.settings.alpha, list[Column]()
        rows.reserve(2)
        prior = self._prior_weights([samples.task.name for samples in batches] + [MEMORY] * bool(rehearse))

        def add(name: str, make: Callable[[], Column]) -> None:
            row = 1 if columns else 0
            column = self._healthy(result, row, make)
            if column is None:
                return
            columns.append(column)
            if row:
                rows.buffer[0].add_(rows.buffer[1], alpha=prior[name])
            else:
                rows.buffer[0].mul_(prior[name])

        with result.timed("tasks"):
            for samples in batches:
                add(samples.task.name, partial(self._task_column, samples))
        if rehearse:
            with result.timed("memory"):
                add(MEMORY, lambda: self._memory_column(rehearse, lambda: rows.buffer[0]))
        if columns:
            kept = sum(prior[column.name] for column in columns)
            rescale = sum(prior.values()) / kept
            rows.buffer[0].mul_(rescale)
            result.weights = {column.name: prior[column.name] * rescale for column in columns}
            if alpha:
                with result.timed("orthogonality"):
                    self._write_orthogonality(1)
                    share = 1.0 if self.method.settings.decoupled else kept * rescale
                    rows.buffer[0].add_(rows.buffer[1], alpha=alpha * share)
            rows.present(0)
        return columns

    def _prior_weights(self, names: list[str]) -> dict[str, float]:
        blank = Columns(tuple(names), np.full(len(names), np.nan), None)
        return dict(zip(names, self.method.weigh(blank).values.tolist(), strict=True))

    # -- one column

    def _task_column(self, samples: Samples) -> Column:
        outputs = self.model.outputs([samples])
        return self._backward(samples.task.name, self.method.task_loss(outputs[0]), outputs)

    def _memory_column(self, count: int, direction: Callable[[], Tensor]) -> Column:
        column = self._rehearse(count, 0, direction)
        for draw in range(1, self.method.draws):
            more = self._rehearse(count, draw, direction)
            for parameter, gradient in more.head_gradients.items():
                earlier = column.head_gradients.get(parameter)
                column.head_gradients[parameter] = gradient if earlier is None else earlier + gradient
            column = Column(MEMORY, column.loss + more.loss, column.head_gradients, [])
        return column

    def _rehearse(self, count: int, draw: int, direction: Callable[[], Tensor]) -> Column:
        assert self.memory is not None
        drawn = self.memory.draw(count)
        samples = [Samples(self.model.tasks[part.task], part.x, part.y, part.logits) for part in drawn]
        inputs = None
        if self.method.edits_memory:
            inputs = self.method.edit(drawn, _LookAhead(self, samples, direction))
            for part, x in zip(drawn, inputs, strict=True):
                self.memory.replace(part, x)
        outputs = self.model.outputs(samples, inputs)
        return self._backward(MEMORY, self.method.memory_loss(outputs, draw), outputs)

    def _backward(self, name: str, loss: Tensor, outputs: list[Output]) -> Column:
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {}
        for task in self.model.tasks.values():
            for parameter in task.head.parameters() if task.head is not None else ():
                if parameter.grad is not None:
                    gradients[parameter], parameter.grad = parameter.grad, None
        return Column(name, loss.detach(), gradients, outputs if self.method.stores_logits else [])

    def _write_orthogonality(self, row: int) -> None:
        self.rows.receive(row)
        views = dict(zip(self.rows.parameters, self.rows.views(self.rows.buffer[row]), strict=True))
        add_orthogonality_gradient(self.model.backbone, views)

    # -- what is finite

    def _healthy(self, result: Collected, row: int, make: Callable[[], Column]) -> Column | None:
        """The column, if it is finite; its gradient then lies in this row."""
        self.rows.receive(row)
        column = make()
        finite = bool(self.rows.buffer[row].sum(dtype=torch.float64).isfinite())
        return column if self._keep_finite(result, [column], [finite]) else None

    def _keep_finite(self, result: Collected, columns: Sequence[Column], finite_rows: Sequence[bool]) -> list[int]:
        """The indices of the columns that are finite; notes their losses, and why the others are left out."""
        numbers = torch.stack([torch.stack([column.loss.double(), column.health()]) for column in columns]).tolist()
        kept = []
        for index, (column, (loss, health), finite) in enumerate(zip(columns, numbers, finite_rows, strict=True)):
            if np.isfinite(health) and finite:
                result.losses[column.name] = loss
                result.logits.update({o.task.name: o.value.detach() for o in column.outputs if column.name != MEMORY})
                kept.append(index)
            else:
                what = f"its loss is {loss}" if not np.isfinite(loss) else f"its gradient is not finite (loss {loss:g})"
                result.dropped[column.name] = what
        return kept

    def _hand_over_heads(self, columns: Sequence[Column]) -> None:
        for column in columns:
            for parameter, gradient in column.head_gradients.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _LookAhead:
    """The engine's side of :class:`spcl.learner.method.LookAhead`."""

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
