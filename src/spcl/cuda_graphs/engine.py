"""Engine that replays CUDA graphs wherever the work of a step can be captured."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from spcl.aggregation.gramians import Block
from spcl.batches import Inputs, sample_kind
from spcl.cuda_graphs.augmentation import AugmentationGraphs
from spcl.cuda_graphs.backbone import BackboneGraphs
from spcl.cuda_graphs.cache import GraphCache
from spcl.cuda_graphs.capture import GraphCapture
from spcl.cuda_graphs.classifiers import ClassifierGraphs
from spcl.cuda_graphs.gramian import GramianGraphs
from spcl.cuda_graphs.one_pass import OnePassGraphs
from spcl.cuda_graphs.penalty import PenaltyGraph
from spcl.cuda_graphs.steady_layouts import SteadyLayouts
from spcl.cuda_graphs.update import UpdateGraphs
from spcl.engine.base import JointPassError
from spcl.engine.eager import EagerEngine
from spcl.engine.model import Samples, SharedModel
from spcl.engine.reduction import ReductionPlan
from spcl.engine.segments import Segments, UnsupportedError
from spcl.engine.update import Update
from spcl.errors import is_out_of_memory
from spcl.methods.base import Method, Output
from spcl.transforms import Transform

__all__ = ["CudaGraphEngine"]

Array = NDArray[np.float64]


class CudaGraphEngine(EagerEngine):
    """Computes what :class:`~spcl.engine.eager.EagerEngine` computes, from captured graphs.

    It decides for every piece of work whether it can be captured: the gradients of classifiers with linear heads, of
    all batches at once where one pass can give them; the backbone alone below other heads and losses; the orthogonality
    gradient, the Gramian, the update of the weights and the copies of buffers. Everything else runs eagerly. On a
    device without graphs the same code runs without capturing.
    """

    def __init__(self, model: SharedModel, method: Method) -> None:
        super().__init__(model, method)
        capture, self._layouts = GraphCapture(model), SteadyLayouts()
        self._capture = capture
        self._classifiers = ClassifierGraphs(model, self.gradients, capture, method)
        parts = self.gradients, capture, self._classifiers, self._snapshot, self._layouts
        self._one_pass = OnePassGraphs(model, *parts)
        self._heads_are_plain = method.has_plain_memory_loss()
        self.one_pass = None  # its heads run eagerly, while the GPU waits: a graph per batch is faster
        self._backbone = BackboneGraphs(model, self.gradients, capture)
        self._augmentation = AugmentationGraphs(model)
        self._gramian = GramianGraphs(capture)
        self._update = UpdateGraphs(capture)
        self._copies = GraphCache(capture)
        is_penalised = method.settings.alpha > 0.0 and self.gradients.length > 0
        self._penalty = PenaltyGraph(model, self.gradients, capture, method) if is_penalised else None

    @property
    def capture_seconds(self) -> float:  # type: ignore[override]
        """The time spent so far on capturing work."""
        return self._capture.seconds

    @override
    def begin(self, plan: ReductionPlan) -> None:
        """Start a step; the GPU computes the orthogonality gradient, which needs no samples, meanwhile."""
        super().begin(plan)
        self.gradients.keeps_factors = False  # graphs write rows
        if self._penalty is not None:
            self._penalty.run()
        self._classifiers.begin()
        self._augmentation.begin()
        self._batches: list[tuple[int, int]] = []

    @override
    def augment(self, transform: Transform, inputs: Sequence[Inputs]) -> list[Inputs]:
        if not self._augmentation.supports(transform, inputs):
            return super().augment(transform, inputs)
        return self._augmentation.run(transform, cast(Sequence[Tensor], inputs))

    @override
    def backward(self, batches: Sequence[Samples]) -> dict[str, Tensor]:
        self._batches = [(index, len(samples.y)) for index, samples in enumerate(batches)]
        return super().backward(batches)

    @property
    @override
    def joins_batches(self) -> bool:
        return self._has_plain(self.method.has_plain_memory_loss())

    @override
    def backward_jointly(
        self, batches: Sequence[Samples], replays: Sequence[Sequence[Samples]]
    ) -> dict[str, Tensor] | None:
        samples = [*batches, *(group for replay in replays for group in replay)]
        if self.method.settings.weigh_heads and self._heads_are_plain and not self._classifiers.supports(samples):
            self._heads_are_plain = False  # from now on every head has columns of its own
            self.begin(self.gradients.plan)
        if not (self.joins_batches and self._classifiers.supports_together(samples)):
            reason = "heads or losses are not those of plain classifiers, or samples differ in shape"
            self.fallback_reason = self._capture.unsupported or reason
            return None
        joint = self._joint_batches(batches, replays)
        self._batches = [(batch.gradient, batch.size) for batch in joint]
        try:
            done = self._one_pass.run(joint)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if isinstance(error, UnsupportedError):
                self._one_pass.rule.refuse(str(error))
            raise JointPassError(str(error)) from error
        self.fallback_reason = self._capture.unsupported or self._one_pass.rule.reason
        return None if done is None else self._classifiers.logits(done, batches)

    @override
    def backward_replay(self, samples: Sequence[Samples], inputs: Sequence[Inputs], draw: int) -> None:
        index = len(self.gradients.plan.names) - 1
        self._batches.append((index, sum(len(group.y) for group in samples)))
        if not (self.joins_batches and self._classifiers.supports_together(samples)):
            super().backward_replay(samples, inputs, draw)
            return
        static = self._classifiers.run(index, samples, inputs, draw)
        self._note_health(index, static.health, add=draw > 0)

    @override
    def penalty_gradient(self) -> None:
        """Copy the orthogonality gradient, which :meth:`begin` has started, to its row."""
        row = self.gradients.penalty_row
        if self._penalty is not None:
            gradient, row = self._penalty.gradient, row[len(self._penalty.gradient) :]
            self.gradients.penalty_row[: len(gradient)].copy_(gradient)
        row.zero_()  # the heads, where they have columns

    @override
    def start_gramian(self, needed: bool) -> None:
        columns = self.gradients.columns()
        if needed and isinstance(columns, Tensor) and columns.is_cuda:
            self._gramian.start(columns, self._known_health().view(-1))

    @override
    def assign_grads(self) -> None:
        super().assign_grads()
        for parameter, gradient in self._classifiers.head_gradients():
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient  # always the same tensor, so that the optimiser's graph can be replayed

    @override
    def update(self, update: Update) -> None:
        self._update.run(update)
        plan = self.gradients.plan
        segments = Segments.of(
            tuple(size for _, size in self._batches), tuple(plan.target(gradient)[0] for gradient, _ in self._batches)
        )
        self._layouts.count(segments, plan.is_weighted)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._layouts.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._layouts.load_state_dict(state)

    @override
    def _backward_task(self, index: int, samples: Samples) -> Tensor | None:
        is_plain = self._has_plain(self.method.has_plain_task_loss())
        if not (is_plain and self._classifiers.supports([samples])):
            return super()._backward_task(index, samples)
        static = self._classifiers.run(index, [samples], [samples.x])
        self._note_health(index, static.health, add=False)
        return self._classifiers.logits(static.samples, [samples]).get(samples.task.name)

    @override
    def _weighed_heads(self) -> list[nn.Parameter]:
        if not (self._heads_are_plain and self.model.classifiers and self.model.feature_dim):
            return super()._weighed_heads()
        joint = self._classifiers.joint_classifier()
        return [joint.weight, joint.bias]

    def _has_plain(self, loss: bool) -> bool:
        """Return whether a plain loss can be captured with its heads: not where each has weighed columns of its own."""
        return loss and (self._heads_are_plain or not self.method.settings.weigh_heads)

    @override
    def _forward(self, samples: Sequence[Samples], inputs: Sequence[Inputs]) -> list[Output]:
        # of several shapes, all forward passes precede the backward passes, while graphs share the memory in between
        of_one_kind = len({sample_kind(x) for x in inputs}) == 1
        return self.model.outputs(samples, inputs, self._backbone if of_one_kind else None)

    @override
    def _measure(self, columns: Tensor | Sequence[Block], numbers: Tensor) -> tuple[Array, Array]:
        if isinstance(columns, Tensor) and columns.is_cuda:
            return self._gramian.measure(columns, numbers)
        return super()._measure(columns, numbers)

    @override
    def _copy_buffers(self) -> None:
        if not self._snapshot.is_empty:  # an empty graph cannot be captured
            self._copies.run(self._snapshot.generation, self._snapshot.copy)
