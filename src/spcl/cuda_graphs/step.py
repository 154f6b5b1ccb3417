"""The columns of all tasks of a step as one CUDA graph, for small networks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from spcl.cuda_graphs.columns import CapturedColumns
from spcl.cuda_graphs.graphs import Graphs, side_stream
from spcl.cuda_graphs.joint_classifier import JointGradient
from spcl.cuda_graphs.static_column import StaticColumn
from spcl.engine.gradients import GradientMatrix
from spcl.engine.model import Samples, SharedModel
from spcl.models import Normalise

__all__ = ["CapturedStep"]

SMALL = 1 << 20
"""Networks with fewer parameters are worked through faster than the graphs of their columns are launched."""

STEADY = 16
"""How often the same tasks must be trained with batches of the same sizes before they get a graph together."""

BRANCHES = 4
"""How many columns run side by side; each branch takes memory for the libraries it uses."""


class CapturedStep:
    """What :class:`CapturedColumns` does for the tasks of a step one by one, in one graph: each in its own row.

    That is for small networks, once steps have been alike for a while. Columns run side by side unless they leave
    traces in the backbone's buffers, as batch-norm does, which must come in order.
    """

    def __init__(self, columns: CapturedColumns, model: SharedModel, rows: GradientMatrix, graphs: Graphs) -> None:
        self._columns = columns
        self._rows = rows
        self._graphs = graphs
        side_by_side = model.device.type == "cuda" and _leaves_no_trace(model.backbone)
        branches = range(BRANCHES if side_by_side else 0)
        self._branches = [side_stream(model.device, 1 + branch) for branch in branches]
        self._key: tuple[object, ...] = ()
        self._alike = 0
        self._work: _SeveralColumns | None = None

    def replay(self, samples: Sequence[Samples], signs: Tensor) -> bool:
        """Fill the rows and signs of these tasks; False, and nothing is done, where there is no graph for them."""
        if self._rows.length >= SMALL or self._graphs.refused is not None:
            return False
        self._columns.adopted()  # now: it may move the heads, and a graph would not notice
        assert self._columns.gradient is not None
        places = self._rows.buffer.data_ptr(), signs.data_ptr(), self._columns.gradient
        key = (*places, *[(group.task, *self._graphs.key(group.x.shape[0], group.x)) for group in samples])
        if key != self._key:
            self._key, self._alike, self._work = key, 0, None
        self._alike += 1
        if self._alike <= STEADY:
            return False
        if self._work is None:
            self._work = self._captured(samples, signs, self._columns.gradient)
        self._work.fill([group.x for group in samples], self._columns.classes_of(samples))
        (self._work.replay or self._work.work)()
        self._columns.note_trained(samples)
        return True

    def _captured(self, samples: Sequence[Samples], signs: Tensor, total: JointGradient) -> "_SeveralColumns":
        sizes = [group.x.shape[0] for group in samples]
        classes = self._columns.new_classes(sum(sizes))
        parts = torch.split_with_sizes(classes, sizes, dim=1)
        columns = [self._columns.new_column(None, g.x, part) for g, part in zip(samples, parts, strict=True)]
        work = _SeveralColumns(columns, classes, self._branches, self._rows, signs, total)
        (work.replay,) = self._graphs.capture([work.work]) or (None,)
        return work


class _SeveralColumns:
    """Columns with gradients of their own, and what becomes of these afterwards."""

    def __init__(
        self,
        columns: Sequence[StaticColumn],
        classes: Tensor,
        branches: Sequence[torch.cuda.Stream],
        rows: GradientMatrix,
        signs: Tensor,
        total: JointGradient,
    ) -> None:
        self._columns = columns
        self._inputs = [column.x for column in columns]
        self._classes = classes
        self._branches = branches
        self._lines = list(rows.buffer[: len(columns)])
        self._signs = list(signs[: len(columns)])
        self._total = total
        self.replay: Callable[[], None] | None = None

    def fill(self, inputs: list[Tensor], classes: Tensor) -> None:
        """Put in the next batches."""
        torch._foreach_copy_(self._inputs, inputs, non_blocking=True)
        self._classes.copy_(classes, non_blocking=True)

    def work(self) -> None:
        """All columns, eagerly."""
        begun = 0
        try:
            for begun, column in enumerate(self._columns, start=1):
                self._on_branch(begun - 1, column)
        finally:  # a capture ends in good order only if all branches have come back
            for branch in self._branches[:begun]:
                torch.cuda.current_stream(branch.device).wait_stream(branch)
        for column, line, signs in zip(self._columns, self._lines, self._signs, strict=True):
            line.copy_(column.gradient.shared)
            signs.copy_(column.signs)
            self._total.heads.add_(column.gradient.heads)

    def _on_branch(self, number: int, column: StaticColumn) -> None:
        branch = self._branches[number % len(self._branches)] if self._branches else None
        if branch is not None:
            branch.wait_stream(torch.cuda.current_stream(branch.device))
        with torch.cuda.stream(branch):
            column.gradient.heads.zero_()
            column.work()


def _leaves_no_trace(backbone: nn.Module) -> bool:
    """Whether a forward pass changes nothing: there are no buffers but the constants of the normalisation."""
    own = [module for module in backbone.modules() if not isinstance(module, Normalise)]
    return not any(list(module.buffers(recurse=False)) for module in own)
