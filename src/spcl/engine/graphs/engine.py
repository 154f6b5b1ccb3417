"""Engine that replays CUDA graphs wherever the work of a step can be captured."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from spcl.aggregation.gramians import float32_products, packed_gramian, unpacked_gramian
from spcl.batches import Inputs, sample_kind
from spcl.engine.base import Passes
from spcl.engine.eager import EagerEngine, penalised_layers, penalty_factor
from spcl.engine.graphs.capture import MOST_GRAPHS, GraphCache, GraphCapture, RepeatedWork
from spcl.engine.graphs.classifiers import ClassifierGraphs
from spcl.engine.graphs.joint import OnePassGraphs, StaticPass, SteadyLayouts
from spcl.engine.model import BufferSnapshot, Samples, SharedModel, StepBatch
from spcl.engine.rows import GradientMatrix, ReductionPlan, write_gradients
from spcl.engine.segments import Segments, UnsupportedError
from spcl.engine.update import Update
from spcl.errors import is_out_of_memory
from spcl.methods.base import Method, Output
from spcl.orthogonality import add_orthogonality_gradient
from spcl.transforms import Transform

Array = NDArray[np.float64]


class CudaGraphEngine(EagerEngine):
    """Computes the same results as :class:`~spcl.engine.eager.EagerEngine`, by replaying CUDA graphs.

    Graphs compute the gradients of classifiers with linear heads (one graph for all batches that can share a pass), the
    backbone below other heads and losses, the orthogonality gradient, the Gramian, the update of the weights and the
    copies of buffers. Everything else runs eagerly. On a device without CUDA graphs the same code runs uncaptured.
    """

    history: SteadyLayouts

    def __init__(self, model: SharedModel, method: Method) -> None:
        super().__init__(model, method)
        capture, self.history = GraphCapture(model), SteadyLayouts()
        self._capture = capture
        self._classifiers = ClassifierGraphs(model, self.gradients, capture, method)
        self._one_pass = OnePassGraphs(
            model=model,
            gradients=self.gradients,
            capture=capture,
            classifiers=self._classifiers,
            snapshot=self._snapshot,
            layouts=self.history,
        )
        self._heads_are_plain = method.has_plain_memory_loss()
        self.one_pass = None  # an eager joint pass is slower than one graph per batch
        self._backbone = BackboneGraphs(model, self.gradients, capture)
        self._augmentation = AugmentationGraphs(model)
        self._gramian = GramianGraphs(capture)
        self._update = UpdateGraphs(capture)
        self._copies = GraphCache(capture)
        is_penalised = method.settings.alpha > 0.0 and self.gradients.length > 0
        self._penalty = PenaltyGraph(model, self.gradients, capture, method) if is_penalised else None

    @property
    def capture_seconds(self) -> float:  # type: ignore[override]
        """The time spent on capturing so far."""
        return self._capture.seconds

    @override
    def begin(self, plan: ReductionPlan) -> None:
        """Start a step; the GPU already computes the orthogonality gradient, which needs no samples."""
        super().begin(plan)
        self.gradients.keeps_factors = False  # graphs write rows
        if self._penalty is not None:
            self._penalty.graph.run(self._penalty.work)
        self._classifiers.begin()
        self._augmentation.begin()
        self._batches: list[tuple[int, int]] = []

    @override
    def backward(self, batches: Sequence[StepBatch], transform: Transform | None, *, apart: bool = False) -> Passes:
        samples = [group for batch in batches for group in batch.samples]
        weighs_heads = self.method.settings.weigh_heads and self._heads_are_plain
        if weighs_heads and not apart and not self._classifiers.supports(samples):
            self._heads_are_plain = False  # from now on every head has columns of its own
            self.begin(self.gradients.plan)
        joins = self._has_plain(self.method.has_plain_memory_loss())
        if transform is not None:
            batches = self.augmented(batches, transform, replays_too=joins)
        static = None if apart else self._joint_pass(batches, joins)
        if static is not None:
            tasks = [batch.samples[0] for batch in batches if batch.draw is None]
            return Passes(self._classifiers.logits(static.samples, tasks), is_joint=True)
        self._batches = [*self._batches, *((batch.gradient, batch.size) for batch in batches)]
        return self._backward_apart(batches, None if joins else transform)

    def _joint_pass(self, batches: Sequence[StepBatch], joins: bool) -> StaticPass | None:
        """Make one pass over all batches and return it; None if each batch needs its own."""
        samples = [group for batch in batches for group in batch.samples]
        if not (joins and self._classifiers.supports_together(samples)):
            reason = "not all sources have plain classifiers, samples of one shape and no encoder"
            self.fallback_reason = self._capture.unsupported or reason
            return None
        try:
            static = self._one_pass.find(batches)
            if static is not None:
                self._one_pass.run(static, batches)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if isinstance(error, UnsupportedError):
                self._one_pass.rule.refuse(str(error))
            raise UnsupportedError(str(error)) from error
        self.fallback_reason = self._capture.unsupported or self._one_pass.reason
        if static is not None:
            self._batches = [(batch.gradient, batch.size) for batch in batches]
        return static

    @override
    def penalty_gradient(self) -> None:
        """Copy the orthogonality gradient, which :meth:`begin` has started to compute, to its row."""
        whole = row = self.gradients.penalty_row
        if self._penalty is not None:
            gradient, row = self._penalty.gradient, row[len(self._penalty.gradient) :]
            whole[: len(gradient)].copy_(gradient)
        row.zero_()  # the columns of encoders and heads, if they have any
        if self.model.shared_encoder_parameters:
            views = dict(zip(self.gradients.parameters, self.gradients.views(whole), strict=True))
            self.add_encoder_penalty(views, penalty_factor(self.method))

    @override
    def gramian(self, needed: bool) -> Callable[[], tuple[Array | None, Array]]:
        columns = self.gradients.columns()
        if not (needed and isinstance(columns, Tensor) and columns.is_cuda):
            return super().gramian(needed)
        health = self._known_health()
        finish = self._gramian.start(columns, health.view(-1))

        def measured() -> tuple[Array, Array]:
            products, numbers = finish()
            return products, numbers.reshape(health.shape)

        return measured

    @override
    def update(self, update: Update) -> None:
        self.gradients.assign_grads(0)
        for parameter, gradient in self._classifiers.head_gradients():
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient  # always the same tensor, so that the optimiser's graph can be replayed
        self.penalise_own_encoders()
        self._update.run(update)
        plan = self.gradients.plan
        segments = Segments.of(
            tuple(size for _, size in self._batches), tuple(plan.targets[gradient].row for gradient, _ in self._batches)
        )
        self.history.count(segments, plan.is_weighted)

    @override
    def _augment(self, transform: Transform, inputs: Sequence[Inputs]) -> list[Inputs]:
        if not self._augmentation.supports(transform, inputs):
            return super()._augment(transform, inputs)
        return self._augmentation.run(transform, cast(Sequence[Tensor], inputs))

    @override
    def _backward_replay(self, batch: StepBatch) -> None:
        is_plain = self._has_plain(self.method.has_plain_memory_loss())
        if not (is_plain and self._classifiers.supports_together(batch.samples)):
            super()._backward_replay(batch)
            return
        inputs = [group.x for group in batch.samples]
        static = self._classifiers.run(batch.gradient, batch.samples, inputs, batch.draw)
        self._note_health(batch.gradient, static.health, add=bool(batch.draw))

    @override
    def _backward_task(self, index: int, samples: Samples) -> Tensor | None:
        is_plain = self._has_plain(self.method.has_plain_task_loss())
        if not (is_plain and self._classifiers.supports([samples])):
            return super()._backward_task(index, samples)
        static = self._classifiers.run(index, [samples], [samples.x])
        self._note_health(index, static.health, add=False)
        return self._classifiers.logits(static.samples, [samples]).get(samples.name)

    @override
    def _weighed_heads(self) -> list[nn.Parameter]:
        if not (self._has_plain(True) and self._heads_are_plain and self.model.classifiers and self.model.feature_dim):
            return super()._weighed_heads()
        joint = self._classifiers.joint_classifier()
        return [joint.weight, joint.bias]

    def _has_plain(self, loss: bool) -> bool:
        """Return whether a plain loss can be captured with its heads.

        Not if shared encoders, or heads that are not plain, have columns of their own in the gradient matrix.
        """
        return (
            not self.model.shared_encoder_parameters
            and loss
            and (self._heads_are_plain or not self.method.settings.weigh_heads)
        )

    @override
    def _forward(self, samples: Sequence[Samples], inputs: Sequence[Inputs]) -> list[Output]:
        # one kind of inputs only: else all forward passes would precede the backward passes, but graphs share memory;
        # no encoders: a graph of the backbone gives no gradient of its inputs
        of_one_kind = not self.model.encoders and len({sample_kind(x) for x in inputs}) == 1
        return self.model.outputs(samples, inputs, self._backbone if of_one_kind else None)

    @override
    def snapshot(self) -> BufferSnapshot:
        return self._snapshot.take(lambda: self._copies.run(self._snapshot.generation, self._snapshot.copy))


class AugmentationGraphs:
    """Augments the inputs of all tasks together, from one static tensor to another.

    Only transforms with a true attribute ``capturable`` are captured: a replay repeats every decision made on the CPU,
    such as one by Python's random numbers.
    """

    def __init__(self, model: SharedModel) -> None:
        self._device = model.device
        self._cache = GraphCache(GraphCapture(model))
        self._static: dict[object, _StaticInputs] = {}
        self._transform: Transform | None = None
        self._turn = 0

    def begin(self) -> None:
        """Start a step: the results of earlier calls may be overwritten."""
        self._turn = 0

    def supports(self, transform: Transform, inputs: Sequence[Inputs]) -> bool:
        """Return whether the transform can be captured, and the inputs are tensors of one kind on the device."""
        tensors = [x for x in inputs if isinstance(x, Tensor) and x.device == self._device]
        one_kind = len(tensors) == len(inputs) and len({sample_kind(x) for x in inputs}) == 1
        return one_kind and getattr(transform, "capturable", False) is True

    def run(self, transform: Transform, inputs: Sequence[Tensor]) -> list[Inputs]:
        """Return the augmented inputs, valid until the next step."""
        sizes = [len(x) for x in inputs]
        if transform is not self._transform:
            self._transform = transform
            self._clear()
        key = sum(sizes), inputs[0].shape[1:], inputs[0].dtype, self._turn
        self._turn += 1
        static = self._static_inputs(key, inputs[0].new_empty((sum(sizes), *inputs[0].shape[1:])))
        torch.cat(list(inputs), out=static.source)
        self._cache.run(key, partial(static.transform, transform))
        assert static.result is not None
        return list(static.result.split(sizes))  # type: ignore[no-untyped-call]

    def _static_inputs(self, key: object, source: Tensor) -> "_StaticInputs":
        """Return the static tensors of a key; when there are too many, drop all of them and their graphs."""
        if key not in self._static:
            if len(self._static) == MOST_GRAPHS:
                self._clear()
            self._static[key] = _StaticInputs(source)
        return self._static[key]

    def _clear(self) -> None:
        self._static.clear()
        self._cache.clear()


class _StaticInputs:
    """The inputs of a batch before and after a transform, which may change type and shape."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.result: Tensor | None = None  # allocated by the first run, which is eager

    def transform(self, transform: Transform) -> None:
        transformed = transform(self.source)
        if self.result is None:
            self.result = torch.empty_like(transformed)
        self.result.copy_(transformed)


class BackboneGraphs:
    """The backbone's forward and backward pass as two CUDA graphs per batch size, between which heads run eagerly.

    The backward pass adds the parameters' gradient to the open row of the gradient matrix. Inputs other than a tensor
    run eagerly.
    """

    def __init__(self, model: SharedModel, gradients: GradientMatrix, capture: GraphCapture) -> None:
        self._model = model
        self._gradients = gradients
        self._capture = capture
        self._length = gradients.length  # heads have no columns yet
        self._seen: set[tuple[object, ...]] = set()
        self._passes: dict[tuple[object, ...], _BackbonePass] = {}

    def __call__(self, x: Inputs) -> Tensor:
        """Return the features; a backward pass from them adds to the gradient matrix."""
        static = self._static_pass(x) if isinstance(x, Tensor) else None
        if static is None:
            return self._model.backbone(x)  # type: ignore[no-any-return]
        return _BackboneFunction.apply(self._gradients.buffer.new_ones((), requires_grad=True), static, x)  # type: ignore[no-any-return, no-untyped-call]

    def _static_pass(self, x: Tensor) -> "_BackbonePass | None":
        """Return the graphs for these inputs; None if no gradients are needed, and for the first batch of a size."""
        if x.requires_grad or not self._model.backbone.training or not torch.is_grad_enabled():
            return None
        key = self._capture.key(len(x), x)
        if key not in self._passes:
            is_new = key not in self._seen
            self._seen.add(key)
            if is_new or self._capture.unsupported is not None or len(self._passes) == MOST_GRAPHS:
                return None
            self._passes[key] = _BackbonePass(self._model, self._gradients, self._length, self._capture, x)
        return self._passes[key]


class _BackbonePass:
    """The static tensors of a forward and a backward pass of the backbone, and their graphs."""

    def __init__(
        self, model: SharedModel, gradients: GradientMatrix, length: int, capture: GraphCapture, x: Tensor
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._x = x.to(model.device, copy=True)
        self._gradient = torch.zeros(length, dtype=gradients.dtype, device=model.device)
        self._views = gradients.views(self._gradient)
        self._parameters = gradients.parameters[: len(self._views)]
        self._features: Tensor | None = None
        self._feature_gradient: Tensor | None = None
        works = [self._forward_work, self._backward_work]
        self._replays = capture.capture(works if self._parameters else works[:1])
        if self._replays is not None and self._features is not None:
            self._features = self._features.detach()  # else autograd would synchronise eager passes with this stream

    def forward(self, x: Tensor) -> Tensor:
        self._x.copy_(x, non_blocking=True)
        (self._forward_work if self._replays is None else self._replays[0])()
        assert self._features is not None
        return self._features.detach()

    def backward(self, gradient: Tensor) -> None:
        if not self._parameters:
            return
        assert self._feature_gradient is not None
        self._feature_gradient.copy_(gradient)
        (self._backward_work if self._replays is None else self._replays[1])()
        self._gradients.open_row[: len(self._gradient)].add_(self._gradient)

    def _forward_work(self) -> None:
        self._features = None
        with torch.enable_grad(), self._model.precision():
            self._features = self._model.backbone(self._x)
        if self._feature_gradient is None:
            self._feature_gradient = torch.zeros_like(self._features, requires_grad=False)

    def _backward_work(self) -> None:
        assert self._features is not None
        if not self._features.requires_grad:  # the features depend on no trained parameter
            self._gradient.zero_()
            return
        gradients = torch.autograd.grad(self._features, self._parameters, self._feature_gradient, allow_unused=True)
        write_gradients(self._views, gradients)


class _BackboneFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _tracked: Tensor, static: _BackbonePass, x: Tensor) -> Tensor:
        ctx.static = static
        return static.forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.static.backward(gradient)
        return None, None, None


class GramianGraphs:
    """:func:`~spcl.aggregation.gramians.gramian_and_numbers`, replayed for rows and numbers at the same addresses."""

    def __init__(self, capture: GraphCapture) -> None:
        self._cache = GraphCache(capture)
        self._hosts: dict[int, Tensor] = {}

    def start(self, rows: Tensor, numbers: Tensor) -> Callable[[], tuple[Array, Array]]:
        """Queue the rows' Gramian and its transfer to the CPU with the numbers; return a function that waits for it."""
        length = len(rows) ** 2 + 1 + len(numbers)
        if length not in self._hosts:
            self._hosts[length] = torch.empty(length, dtype=torch.float64, pin_memory=True)
        host = self._hosts[length]

        def work() -> None:
            host.copy_(packed_gramian(rows, numbers), non_blocking=True)

        self._cache.run((rows.data_ptr(), *rows.shape, numbers.data_ptr(), len(numbers)), work)
        is_done = torch.cuda.current_stream(rows.device).record_event()

        def finish() -> tuple[Array, Array]:
            is_done.synchronize()
            return unpacked_gramian(host, rows)

        return finish


class PenaltyGraph:
    """The orthogonality gradient as a CUDA graph, computed while the CPU prepares batches.

    In mixed precision its products are TF32, which has more digits than the bfloat16 copies of the weights.

    Attributes:
        graph: runs :meth:`work`.
        gradient: the orthogonality gradient, times α unless α is relative.
    """

    def __init__(self, model: SharedModel, gradients: GradientMatrix, capture: GraphCapture, method: Method) -> None:
        self._model = model
        self._alpha = penalty_factor(method)
        self._layers = penalised_layers(method)
        self.gradient: Tensor = gradients.buffer.new_zeros(gradients.length)
        self._views = dict(zip(gradients.parameters, gradients.views(self.gradient), strict=True))
        self.graph = RepeatedWork(capture)

    def work(self) -> None:
        """Compute the orthogonality gradient at the present weights."""
        self.gradient.zero_()
        with nullcontext() if self._model.autocast is None else float32_products("tf32"):
            add_orthogonality_gradient(self._model.backbone, self._views, self._alpha, self._layers)


class UpdateGraphs:
    """The update with a ``capturable`` optimiser as a CUDA graph; other optimisers run eagerly.

    A graph depends on the parameters that have a gradient, on the addresses of gradients, state and averages, and on
    all options of the optimiser, but not on learning rates: the learner's schedule writes them into tensors.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._cache = GraphCache(capture)
        self._state: tuple[object, object] = (None, None)

    def run(self, update: Update) -> None:
        """Update the weights."""
        update.set_learning_rates()
        optimizer = update.optimizer
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if hooked or not all(group.get("capturable") for group in optimizer.param_groups):
            update.apply()
            return
        state = optimizer.state, next(iter(optimizer.state.values()), None)
        if state[0] is not self._state[0] or state[1] is not self._state[1]:
            self._state = state
            self._cache.clear()
        average = update.average
        averaged = () if average is None else (average.decay, *average.addresses())
        self._cache.run((*_key(optimizer), update.clip_norm, averaged), update.apply)


def _key(optimizer: Optimizer) -> tuple[object, ...]:
    addresses: list[int] = []
    settings: list[object] = []
    for group in optimizer.param_groups:
        values = [value for name, value in group.items() if name not in ("params", "tasks")]
        settings += [id(value) if isinstance(value, Tensor) else value for value in values]
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        addresses += [tensor.data_ptr() for parameter in trained for tensor in (parameter, parameter.grad)]
    return tuple(addresses), tuple(settings)
