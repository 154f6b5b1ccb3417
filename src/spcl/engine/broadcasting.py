"""Losses that compare the outputs of some samples with the targets of others, because different shapes broadcast."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spcl.errors import TaskError

__all__ = ["RefuseBroadcast"]

ELEMENTWISE_LOSSES = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)
"""Losses that broadcast different shapes, with a warning."""


class RefuseBroadcast(TorchFunctionMode):
    """Raises a TaskError, within the block, where a loss broadcasts an output against floating-point targets.

    Outputs of shape (N, 1) and targets of shape (N,) broadcast to (N, N): every output is compared with the targets of
    all samples. Refused are operations on the output and the targets themselves, if their numbers of dimensions differ,
    and PyTorch's elementwise losses of any two tensors, if their shapes differ.

    Args:
        task: the name of the task, for the error.
        output: of the task's head.
        targets: of the same samples.

    >>> output, targets = torch.zeros(4, 1), torch.ones(4)
    >>> with RefuseBroadcast("speed", output, targets):
    ...     functional.mse_loss(output.squeeze(1), targets)
    tensor(1.)
    >>> with RefuseBroadcast("speed", output, targets):
    ...     (output - targets).square().mean()
    Traceback (most recent call last):
    ...
    spcl.errors.TaskError: task 'speed': its loss broadcasts shapes (4, 1) and (4,) to (4, 4), so that outputs are
    compared with the targets of other samples; give targets of the output's shape (4, 1)
    """

    def __init__(self, task: str, output: Tensor, targets: Tensor) -> None:
        super().__init__()
        self._task = task
        self._output = output
        self._targets = targets

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function and look at the shapes of its first two tensors."""
        kwargs = kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        pair = tensors[:2]
        if len(pair) == 2 and self._is_suspect(func, *pair):
            broadcast = _broadcast_shape(*pair)
            if broadcast is not None and func in ELEMENTWISE_LOSSES:
                raise self._error(pair, broadcast)  # before the function warns
            result = func(*args, **kwargs)
            if broadcast is not None and isinstance(result, Tensor) and result.shape in (broadcast, torch.Size()):
                raise self._error(pair, broadcast)
            return result
        return func(*args, **kwargs)

    def _is_suspect(self, func: Callable[..., Any], first: Tensor, second: Tensor) -> bool:
        if not (first.is_floating_point() and second.is_floating_point()):
            return False
        if func in ELEMENTWISE_LOSSES:
            return first.shape != second.shape
        return {id(first), id(second)} == {id(self._output), id(self._targets)} and first.ndim != second.ndim

    def _error(self, pair: Sequence[Tensor], broadcast: torch.Size) -> TaskError:
        first, second = (tuple(tensor.shape) for tensor in pair)
        return TaskError(
            f"task {self._task!r}: its loss broadcasts shapes {first} and {second} to {tuple(broadcast)}, so that "
            f"outputs are compared with the targets of other samples; give targets of the output's shape "
            f"{tuple(self._output.shape)}"
        )


def _broadcast_shape(first: Tensor, second: Tensor) -> torch.Size | None:
    try:
        return torch.Size(np.broadcast_shapes(first.shape, second.shape))
    except ValueError:
        return None
