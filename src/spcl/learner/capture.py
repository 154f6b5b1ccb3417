"""CUDA graphs: a column's whole work captured once and replayed, because launching it takes longer than the work."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils import get_total_norm

from spcl.learner.model import Samples, SharedModel
from spcl.learner.rows import GradientRows
from spcl.learner.tasks import Output, Task
from spcl.orthogonality import add_orthogonality_gradient

__all__ = ["CapturedBackbone", "CapturedColumns", "CapturedPenalty", "Replayed"]

FIRST_CAPACITY = 128
WARM_UPS = 2
MOST_SHAPES = 8


@dataclass(frozen=True)
class Replayed:
    """What a replay left behind, in copies that the next one does not touch."""

    head_gradients: dict[nn.Parameter, Tensor]
    outputs: list[Output]
    signs: Tensor


class JointClassifier:
    """One matrix of which the linear heads of all classifiers are slices, so that one graph serves every task.

    A head keeps its own parameters: only their storage moves into the matrix. Its capacity doubles when it is full.
    """

    def __init__(self, features: int, like: Tensor) -> None:
        self._like = like
        self.features = features
        self.capacity = 0
        self._adopted: list[Task] = []

    def adopt(self, tasks: Sequence[Task]) -> bool:
        """Take over the heads of tasks that are new; says whether the matrix has moved."""
        new = tasks[len(self._adopted) :]
        self._adopted += new
        needed = sum(task.classes or 0 for task in self._adopted)
        grows = needed > self.capacity
        if grows:
            self.capacity = max(FIRST_CAPACITY, 1 << (needed - 1).bit_length())
            self.weight = nn.Parameter(self._like.new_zeros(self.capacity, self.features))
            self.bias = nn.Parameter(self._like.new_zeros(self.capacity))
        for task in self._adopted if grows else new:
            head, own = task.head, slice(task.offset, task.offset + (task.classes or 0))
            assert isinstance(head, nn.Linear)
            for part, whole in ((head.weight, self.weight), (head.bias, self.bias)):
                whole.data[own].copy_(part.data)
                part.data = whole.data[own]
        return grows


class _Graphs:
    """How graphs are made: how many, in which memory, and what happens where it cannot be done."""

    def __init__(self, model: SharedModel) -> None:
        self.device = model.device
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.refused: str | None = None
        self._modules = list(model.backbone.modules())

    def key(self, size: int, x: Tensor) -> tuple[object, ...]:
        """What a graph holds for: so many samples like these, and the modes in which the backbone's parts are now."""
        return size, x.shape[1:], x.dtype, tuple(module.training for module in self._modules)

    def capture(self, works: Sequence[Callable[[], None]], buffers: Sequence[Tensor]) -> list[Callable[[], None]]:
        """The replay of every piece of work, given in the order in which they run; the model stays as it was."""
        if self.pool is None:
            return list(works)
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with _unchanged(buffers, self.device):
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                for work in [*works] * WARM_UPS:
                    work()
            torch.cuda.current_stream(self.device).wait_stream(side)
        replays = []
        for work in works:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                work()
            replays.append(graph.replay)
        return replays

    def refuse(self, error: RuntimeError) -> None:
        """Give graphs up, and say why."""
        self.refused = str(error).splitlines()[0]
        with torch.cuda.graph(torch.cuda.CUDAGraph()):  # a failed capture leaves the generator waiting for its end
            torch.zeros(1, device=self.device)
        warnings.warn(
            f"no CUDA graph can be captured of the backbone, so its kernels are launched singly: {self.refused}",
            RuntimeWarning,
            stacklevel=2,
        )


class CapturedColumns:
    """Forward, loss and backward of a batch as one CUDA graph per batch size, for classifiers with linear heads.

    Every sample carries the range of classes its softmax covers (its task's, or all that were added), so the graph
    knows neither tasks nor scenario: columns of tasks and of memory replay the same one. What it computes is what the
    eager engine computes. On a device without graphs the same work is done eagerly.
    """

    def __init__(self, model: SharedModel, rows: GradientRows) -> None:
        self._model = model
        self._rows = rows
        self._graphs = _Graphs(model)
        self._columns: dict[tuple[object, ...], _StaticColumn] = {}
        self._joint: JointClassifier | None = None

    def takes(self, samples: Sequence[Samples]) -> bool:
        """Whether these samples can be replayed: only classifiers, of one of the first few batch sizes."""
        if self._graphs.refused is not None or not self._model.backbone.training:
            return False
        if not all(group.task.classes is not None and group.task.loss is cross_entropy for group in samples):
            return False
        return len(self._columns) < MOST_SHAPES or self._key(samples) in self._columns

    def replay(
        self, row: int, samples: Sequence[Samples], inputs: Sequence[Tensor], keep_logits: bool
    ) -> Replayed | None:
        """Add the column's gradient to the row; None, after a warning, if the backbone cannot be captured."""
        try:
            column = self._column(samples)
        except RuntimeError as error:
            self._graphs.refuse(error)
            return None
        column.fill(inputs, self._classes(samples))
        column.run()
        self._rows.buffer[row].add_(column.gradient[: self._rows.length])
        heads = column.gradient[self._rows.length :].clone()
        return Replayed(
            self._head_gradients(heads, samples),
            self._outputs(column.logits.clone(), samples) if keep_logits else [],
            column.signs.clone(),
        )

    def _key(self, samples: Sequence[Samples]) -> tuple[object, ...]:
        return self._graphs.key(sum(len(group.x) for group in samples), samples[0].x)

    def _column(self, samples: Sequence[Samples]) -> "_StaticColumn":
        joint = self._joint = self._joint or JointClassifier(int(self._model.feature_dim or 0), self._rows.buffer)
        if joint.adopt(self._model.classifiers):
            self._columns.clear()
        key = self._key(samples)
        if key not in self._columns:
            column = _StaticColumn(self._model, self._rows, joint, samples[0].x, sum(len(g.x) for g in samples))
            (column.run,) = self._graphs.capture([column.work], column.buffers)
            self._columns[key] = column
        return self._columns[key]

    def _classes(self, samples: Sequence[Samples]) -> Tensor:
        """Label, first class and end of the classes of every sample, as indices into the joint logits."""
        table = np.empty((3, sum(len(group.x) for group in samples), 1), dtype=np.int64)
        total = sum(task.classes or 0 for task in self._model.classifiers)
        start = 0
        for group in samples:
            part = table[:, start : start + len(group.x), 0]
            start += len(group.x)
            first, end = group.task.offset, group.task.offset + (group.task.classes or 0)
            part[0] = group.y.cpu().numpy() + first
            part[1:] = [[0], [total]] if self._model.scenario == "class" else [[first], [end]]
        return torch.from_numpy(table)

    def _head_gradients(self, heads: Tensor, samples: Sequence[Samples]) -> dict[nn.Parameter, Tensor]:
        assert self._joint is not None
        weight = heads[: self._joint.weight.numel()].view_as(self._joint.weight)
        bias = heads[self._joint.weight.numel() :]
        gradients: dict[nn.Parameter, Tensor] = {}
        for task in self._model.classifiers if self._model.scenario == "class" else [group.task for group in samples]:
            own = slice(task.offset, task.offset + (task.classes or 0))
            assert isinstance(task.head, nn.Linear)
            gradients[task.head.weight], gradients[task.head.bias] = weight[own], bias[own]  # type: ignore[index]
        return gradients

    def _outputs(self, logits: Tensor, samples: Sequence[Samples]) -> list[Output]:
        (group,) = samples
        total = sum(task.classes or 0 for task in self._model.classifiers)
        own = slice(group.task.offset, group.task.offset + (group.task.classes or 0))
        value = logits[:, :total] if self._model.scenario == "class" else logits[:, own]
        return [Output(group.task, value, group.y, slice(0, group.task.classes))]


class _StaticColumn:
    """The tensors that a graph reads and writes, for batches of one size, and the work between them."""

    def __init__(
        self,
        model: SharedModel,
        rows: GradientRows,
        joint: JointClassifier,
        x: Tensor,
        size: int,
    ) -> None:
        device = model.device
        self._model = model
        self._joint = joint
        self.buffers = list(model.backbone.buffers())
        self._x = torch.empty((size, *x.shape[1:]), dtype=x.dtype, device=device)
        self._classes = torch.zeros(3, size, 1, dtype=torch.int64, device=device)
        self._numbers = torch.arange(joint.capacity, device=device)
        self._parameters = [*rows.parameters, joint.weight, joint.bias]
        length = rows.length + joint.weight.numel() + joint.bias.numel()
        self.gradient = torch.zeros(length, dtype=rows.dtype, device=device)
        self._views = [
            *rows.views(self.gradient),
            self.gradient[rows.length : rows.length + joint.weight.numel()].view_as(joint.weight),
            self.gradient[rows.length + joint.weight.numel() :],
        ]
        self.signs = torch.zeros(3, dtype=torch.float64, device=device)
        self.logits = torch.zeros(size, joint.capacity, dtype=rows.dtype, device=device)
        self.run: Callable[[], None] = self.work

    def fill(self, inputs: Sequence[Tensor], classes: Tensor) -> None:
        """Put in the next batch."""
        start = 0
        for part in inputs:
            self._x[start : start + len(part)].copy_(part, non_blocking=True)
            start += len(part)
        self._classes.copy_(classes, non_blocking=True)

    def work(self) -> None:
        """The column, eagerly."""
        before = [parameter.grad for parameter in self._parameters]
        self.gradient.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        labels, first, end = self._classes
        with self._model.precision():
            features = self._model.backbone(self._x)
            logits = linear(features, self._joint.weight, self._joint.bias)
        logits = logits.float() if logits.dtype == self._model.autocast else logits
        self.logits.copy_(logits.detach())
        outside = (self._numbers < first) | (self._numbers >= end)
        loss = cross_entropy(logits.masked_fill(outside, float("-inf")), labels.squeeze(1))
        loss.backward()  # type: ignore[no-untyped-call]
        averages = [buffer for buffer in self.buffers if buffer.is_floating_point()]
        self.signs[0], self.signs[1] = loss.detach(), self.gradient.norm()
        self.signs[2] = get_total_norm(averages) if averages else 0.0
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient


class CapturedBackbone:
    """The backbone's forward and backward as two CUDA graphs per batch size, under heads and losses of any kind.

    Between the two the heads run eagerly; the parameters' gradient goes straight to the row that is receiving.
    """

    def __init__(self, model: SharedModel, rows: GradientRows) -> None:
        self._model = model
        self._rows = rows
        self._graphs = _Graphs(model)
        self._passes: dict[tuple[object, ...], _StaticPass] = {}

    def __call__(self, x: Tensor) -> Tensor | None:
        """The features, through which a backward pass reaches the rows; None where the backbone must run eagerly."""
        key = self._graphs.key(len(x), x)
        trains = self._model.backbone.training and torch.is_grad_enabled() and not x.requires_grad
        if not trains or self._graphs.refused or (key not in self._passes and len(self._passes) == MOST_SHAPES):
            return None
        try:
            if key not in self._passes:
                self._passes[key] = _StaticPass(self._model, self._rows, self._graphs, x)
        except RuntimeError as error:
            self._graphs.refuse(error)
            return None
        features: Tensor = _Replay.apply(self._rows.buffer.new_ones((), requires_grad=True), self._passes[key], x)  # type: ignore[no-untyped-call]
        return features


class _StaticPass:
    """Static tensors around one forward and one backward pass of the backbone, and their graphs."""

    def __init__(self, model: SharedModel, rows: GradientRows, graphs: _Graphs, x: Tensor) -> None:
        self._model = model
        self._rows = rows
        self._x = x.to(model.device, copy=True)
        self._gradient = torch.zeros(rows.length, dtype=rows.dtype, device=model.device)
        self._views = rows.views(self._gradient)
        self._given: Tensor | None = None
        works = [self._forward_work, self._backward_work]
        self._forward, self._backward = graphs.capture(works, list(model.backbone.buffers()))

    def forward(self, x: Tensor) -> Tensor:
        self._x.copy_(x, non_blocking=True)
        self._forward()
        features: Tensor = self._features.detach()
        return features

    def backward(self, gradient: Tensor) -> None:
        assert self._given is not None
        self._given.copy_(gradient)
        self._backward()
        self._rows.buffer[self._rows.receiving].add_(self._gradient)

    def _forward_work(self) -> None:
        with torch.enable_grad(), self._model.precision():
            self._features = self._model.backbone(self._x)
        if self._given is None:
            self._given = torch.zeros_like(self._features, requires_grad=False)

    def _backward_work(self) -> None:
        before = [parameter.grad for parameter in self._rows.parameters]
        self._gradient.zero_()
        for parameter, view in zip(self._rows.parameters, self._views, strict=True):
            parameter.grad = view
        torch.autograd.backward(self._features, self._given)
        for parameter, gradient in zip(self._rows.parameters, before, strict=True):
            parameter.grad = gradient


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _tracked: Tensor, static: _StaticPass, x: Tensor) -> Tensor:
        ctx.static = static
        return static.forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.static.backward(gradient)
        return None, None, None


@contextmanager
def _unchanged(buffers: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    copies = [buffer.clone() for buffer in buffers]
    random = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)
        torch.cuda.set_rng_state(random, device)


class CapturedPenalty:
    """The orthogonality gradient as a CUDA graph that runs beside the tasks' columns: both only read the weights.

    In mixed precision its products are TF32, as exact as the weights' bfloat16 copies are.
    """

    def __init__(self, model: SharedModel, rows: GradientRows) -> None:
        self._model = model
        self._gradient = torch.zeros(rows.length, dtype=rows.dtype, device=rows.device)
        self._views = dict(zip(rows.parameters, rows.views(self._gradient), strict=True))
        self._side = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    def start(self) -> None:
        """Begin; what is launched from now on runs at the same time."""
        self._side.wait_stream(torch.cuda.current_stream(self._model.device))
        if self._graph is None:
            with torch.cuda.stream(self._side):
                self._work()
            self._side.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._side):
                self._work()
        with torch.cuda.stream(self._side):
            self._graph.replay()

    def add_to(self, row: Tensor) -> None:
        """Wait for it on the GPU, and add it to the row."""
        torch.cuda.current_stream(self._model.device).wait_stream(self._side)
        row.add_(self._gradient)

    def _work(self) -> None:
        self._gradient.zero_()
        precision = torch.get_float32_matmul_precision()
        if self._model.autocast is not None:
            torch.set_float32_matmul_precision("high")
        try:
            add_orthogonality_gradient(self._model.backbone, self._views)
        finally:
            torch.set_float32_matmul_precision(precision)
