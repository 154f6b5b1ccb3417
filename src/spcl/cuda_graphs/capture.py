"""Capture of work as CUDA graphs: launching kernels one by one takes longer than running them."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from spcl.engine.model import SharedModel
from spcl.engine.side_streams import side_stream
from spcl.errors import is_out_of_memory

__all__ = ["MOST_GRAPHS", "GraphCapture"]

MOST_GRAPHS = 8
"""How many graphs of one kind are kept: each takes time to capture, and memory."""


class GraphCapture:
    """Captures graphs of one model's work, all in one memory pool. On a device without graphs it captures none.

    Attributes:
        unsupported: why the work cannot be captured, once that is known.
        seconds: the time that capturing has taken so far.
    """

    def __init__(self, model: SharedModel) -> None:
        self.device = model.device
        self.unsupported: str | None = None
        self.seconds = 0.0
        self._modules = list(model.backbone.modules())
        on_cuda = self.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self._stream = side_stream(self.device) if on_cuda else None

    def key(self, size: int, x: Tensor) -> tuple[object, ...]:
        """Return what a graph depends on: the number of samples, their shape and type, and the modules' modes."""
        return size, x.shape[1:], x.dtype, tuple([module.training for module in self._modules])

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]] | None:
        """Capture pieces of work in the order in which they run; return what replays each. All must have run before.

        Returns None where the work must be run as it is: on a device without graphs, or if a piece cannot be captured.
        Then a warning gives the reason, and :attr:`unsupported` is set.
        """
        if self._pool is None or self.unsupported is not None:
            return None
        begin, handled = perf_counter(), sys.exception()
        try:
            return [self._captured(work) for work in works]
        except RuntimeError as error:
            reason = _first_cause(error, handled)
            if is_out_of_memory(reason):
                raise reason from None
            self._mark_unsupported(reason)
            return None
        finally:
            self.seconds += perf_counter() - begin

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run the work on the capturing stream, so that libraries allocate their workspaces there only."""
        if self._stream is None:
            work()
            return
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            work()
        outside.wait_stream(self._stream)

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with self._capturing(graph, pool=self._pool), _buffers_in_place(self._modules):
                work()
        except BaseException:
            torch.cuda.set_stream(before)
            self._leave_pool()
            raise
        return graph.replay

    def _capturing(self, graph: torch.cuda.CUDAGraph, **options: Any) -> torch.cuda.graph:
        """Return the context of a capture that other threads, which e.g. predict with a copy, do not disturb."""
        return torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local", **options)

    def _leave_pool(self) -> None:
        """Release the pool, which PyTorch does not do if a capture cannot be ended: its memory would be lost."""
        assert self._pool is not None
        with suppress(RuntimeError):  # it has been ended
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            torch._C._cuda_releasePool(self.device.index, self._pool)

    def _mark_unsupported(self, reason: BaseException) -> None:
        self.unsupported = str(reason).splitlines()[0]
        # a failed capture leaves the random number generator in capture mode; an empty one ends that
        with self._capturing(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=self.device)
        warnings.warn(
            f"no CUDA graph can be captured of this training, so its kernels are launched singly: {self.unsupported}",
            RuntimeWarning,
            stacklevel=2,
        )


def _first_cause(error: BaseException, handled: BaseException | None) -> BaseException:
    """Return the error that caused the others since ``handled``: an interrupted capture cannot be ended either.

    >>> try:
    ...     try:
    ...         float("cause")
    ...     finally:
    ...         {}["consequence"]
    ... except KeyError as error:
    ...     _first_cause(error, None)
    ValueError("could not convert string to float: 'cause'")
    """
    while error.__context__ not in (None, handled):
        error = error.__context__
    return error


@contextmanager
def _buffers_in_place(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Refuse work that replaces buffers by other tensors: a graph would keep using the old ones.

    >>> module = nn.BatchNorm1d(2)
    >>> with _buffers_in_place([module]):
    ...     module.running_mean = module.running_mean + 1.0
    Traceback (most recent call last):
    RuntimeError: the backbone replaces its buffer 'running_mean'; it must change it in place
    >>> module.running_mean
    tensor([0., 0.])
    """
    before = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    yield
    replaced = [(module, name, buffer) for module, name, buffer in before if module._buffers[name] is not buffer]
    for module, name, buffer in replaced:
        module._buffers[name] = buffer
    if replaced:
        raise RuntimeError(f"the backbone replaces its buffer {replaced[0][1]!r}; it must change it in place")
