"""One buffer of gradients: a row per column, into which autograd writes directly."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spcl.errors import SpclError

__all__ = ["GradientMatrix", "write_gradients"]


class GradientMatrix:
    """Rows of one buffer that can stand in for the ``.grad`` of the shared parameters.

    Autograd accumulates into the row a parameter's ``.grad`` looks at, so a task's gradient lands in its row without a
    copy, and the combined update is handed to the optimiser in the same way.

    >>> weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> rows = GradientMatrix([weight])
    >>> rows.reserve(2)
    >>> for row, loss in enumerate([(3 * weight).sum(), (weight ** 2).sum()]):
    ...     rows.start(row)
    ...     rows.receive()
    ...     loss.backward()
    >>> rows.buffer
    tensor([[3., 3.],
            [2., 4.]])
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
            raise SpclError(f"the backbone's trainable parameters must share one type and device; found {found}")
        self.parameters = list(parameters)
        self.length = sum(parameter.numel() for parameter in parameters)
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
        ((self.dtype, self.device),) = kinds
        self.buffer = torch.empty(0, self.length, dtype=self.dtype, device=self.device)
        self._lines: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self._started = 0
        self._is_empty = False

    def reserve(self, count: int) -> None:
        """Make sure that there are this many rows; what they held is lost when the buffer grows."""
        if count > len(self.buffer):
            for parameter in self.parameters:
                parameter.grad = None
            self._views, self._lines = [], []
            self.buffer = torch.empty(0, device=self.device)  # freed before the larger one is taken
            self.buffer = torch.empty(count, self.length, dtype=self.dtype, device=self.device)
            self._lines = list(self.buffer)
            self._views = [self.views(row) for row in self.buffer]

    def start(self, row: int) -> None:
        """Begin a row: it gets what comes next, and what it held is lost."""
        self._started = row
        self._is_empty = True

    def add(self, gradient: Tensor) -> None:
        """Add a gradient to the row that was started."""
        line = self._lines[self._started]
        (line.copy_ if self._is_empty else line.add_)(gradient)
        self._is_empty = False

    def receive(self) -> None:
        """Let backward passes add to the row that was started."""
        if self._is_empty:
            self._lines[self._started].zero_()
            self._is_empty = False
        self.present(self._started)

    def present(self, row: int) -> None:
        """Let the parameters' ``.grad`` be this row, as it is."""
        for parameter, view in zip(self.parameters, self._views[row], strict=True):
            parameter.grad = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """One view of the vector per parameter, laid out in memory as the parameter is."""
        views, start = [], vector.storage_offset()
        for parameter, strides in zip(self.parameters, self._strides, strict=True):
            views.append(vector.as_strided(parameter.shape, strides, start))
            start += parameter.numel()
        return views

    def combine(self, weights: Tensor) -> None:
        """Form the weighted sum of the first rows in row 0."""
        first, *others = weights.tolist()
        update = self._lines[0].mul_(first)
        if self.buffer.is_cuda:
            for line, weight in zip(self._lines[1 : len(weights)], others, strict=True):  # nothing to transfer
                update.add_(line, alpha=weight)
        elif others:
            update.addmv_(self.buffer[1 : len(weights)].T, weights[1:].to(self.dtype))


@torch.no_grad()
def write_gradients(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients to their places, all at once; zeros where there is none.

    >>> write_gradients([a := torch.ones(2), b := torch.ones(1)], [torch.tensor([3.0, 4.0]), None])
    >>> a, b
    (tensor([3., 4.]), tensor([0.]))
    """
    used = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    torch._foreach_copy_([view for view, _ in used], [gradient for _, gradient in used])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()
