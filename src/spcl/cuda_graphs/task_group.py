"""The gradients of all tasks of a step as one CUDA graph, for small networks."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from spcl.cuda_graphs.capture import GraphCapture
from spcl.cuda_graphs.classifiers import ClassifierGraphs
from spcl.cuda_graphs.joint_classifier import JointGradient
from spcl.cuda_graphs.static_gradient import StaticGradient
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples
from spcl.engine.side_streams import side_stream
from spcl.engine.snapshot import BufferSnapshot

__all__ = ["TaskGroupGraph"]

SMALL_NETWORK = 1 << 20
"""Below this number of parameters, launching one graph per task takes longer than computing its gradient."""

STEADY_STEPS = 16
"""How often the same tasks must be trained with batches of the same sizes before they share a graph."""

BRANCHES = 4
"""How many gradients are computed side by side; each branch takes memory for the libraries' workspaces."""


class TaskGroupGraph:
    """The gradients of the same tasks, each in a row of its own, in one graph once steps have become steady.

    They are computed side by side, unless forward passes change the backbone's buffers, as batch-norm does: then the
    order of the tasks matters. Which of the two holds is found by a first, eager run; buffers that change only in some
    steps, by a condition evaluated on the device, are not recognised.
    """

    def __init__(
        self,
        classifiers: ClassifierGraphs,
        gradients: GradientMatrix,
        capture: GraphCapture,
        snapshot: BufferSnapshot,
    ) -> None:
        self._classifiers = classifiers
        self._gradients = gradients
        self._capture = capture
        self._snapshot = snapshot
        self._key: tuple[object, ...] = ()
        self._steady_steps = 0
        self._work: _GroupedGradients | None = None

    def run(self, samples: Sequence[Samples]) -> bool:
        """Compute the gradients of these tasks; return False, having done nothing, where there is no graph for them."""
        if self._gradients.length >= SMALL_NETWORK or self._capture.unsupported is not None:
            return False
        self._classifiers.joint_classifier()  # first: it may reallocate the heads, which changes the key
        assert self._classifiers.gradient is not None
        key = self._graph_key(samples)
        if key != self._key:
            self._key, self._steady_steps, self._work = key, 0, None
        self._steady_steps += 1
        if self._steady_steps <= STEADY_STEPS:
            return False
        if self._work is None:
            self._work = self._grouped(samples, self._classifiers.gradient)
            self._fill(self._work, samples)
            self._capture.warm_up(self._work.work)
            if self._gradients.buffer.is_cuda and self._snapshot.is_unchanged():
                self._work.use_branches([side_stream(self._gradients.device, 1 + n) for n in range(BRANCHES)])
        else:
            self._fill(self._work, samples)
            self._work.run(self._capture)
        self._classifiers.note_trained(samples)
        return True

    def _graph_key(self, samples: Sequence[Samples]) -> tuple[object, ...]:
        addresses = self._gradients.buffer.data_ptr(), self._gradients.health.data_ptr(), self._classifiers.gradient
        return (*addresses, *[(g.task, *self._capture.key(len(g.y), _x(g))) for g in samples])

    def _grouped(self, samples: Sequence[Samples], total: JointGradient) -> "_GroupedGradients":
        sizes = [len(group.y) for group in samples]
        classes = self._classifiers.new_classes(sum(sizes))
        parts = torch.split_with_sizes(classes, sizes, dim=1)
        statics = [self._classifiers.new_gradient(None, _x(g), part) for g, part in zip(samples, parts, strict=True)]
        return _GroupedGradients(statics, classes, self._gradients, total)

    def _fill(self, work: "_GroupedGradients", samples: Sequence[Samples]) -> None:
        work.fill([_x(group) for group in samples], self._classifiers.classes_of(samples))


def _x(samples: Samples) -> Tensor:
    """Return the inputs, of which :meth:`ClassifierGraphs.supports` has found that they are a tensor."""
    return cast(Tensor, samples.x)


class _GroupedGradients:
    """Static gradients of several tasks, and their copies into the gradient matrix."""

    def __init__(
        self, statics: Sequence[StaticGradient], classes: Tensor, gradients: GradientMatrix, total: JointGradient
    ) -> None:
        self._statics = statics
        self._inputs = [static.x for static in statics]
        self._classes = classes
        self._rows = list(gradients.buffer[: len(statics)])
        self._health = list(gradients.health[: len(statics)])
        self._total = total
        self._branches: Sequence[torch.cuda.Stream] = ()
        self._replay: Callable[[], None] | None = None

    def use_branches(self, branches: Sequence[torch.cuda.Stream]) -> None:
        """Compute the gradients side by side on these streams."""
        self._branches = branches

    def fill(self, inputs: list[Tensor], classes: Tensor) -> None:
        """Copy the next batches into the static tensors."""
        torch._foreach_copy_(self._inputs, inputs, non_blocking=True)
        self._classes.copy_(classes, non_blocking=True)

    def run(self, capture: GraphCapture) -> None:
        """Replay the graph, which is captured first; or run eagerly where there is none."""
        if self._replay is None:
            (self._replay,) = capture.capture([self.work]) or (None,)
        (self._replay or self.work)()

    def work(self) -> None:
        """Compute all gradients eagerly."""
        begun = 0
        try:
            for begun, static in enumerate(self._statics, start=1):
                self._on_branch(begun - 1, static)
        finally:  # a capture can be ended only if all branches have joined
            for branch in self._branches[:begun]:
                torch.cuda.current_stream(branch.device).wait_stream(branch)
        for static, row, health in zip(self._statics, self._rows, self._health, strict=True):
            row.copy_(static.gradient.shared)
            health.copy_(static.health)
            self._total.heads.add_(static.gradient.heads)

    def _on_branch(self, number: int, static: StaticGradient) -> None:
        branch = self._branches[number % len(self._branches)] if self._branches else None
        if branch is not None:
            branch.wait_stream(torch.cuda.current_stream(branch.device))
        with torch.cuda.stream(branch):
            static.gradient.heads.zero_()
            static.work()
