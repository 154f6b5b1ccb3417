"""Capture of work as CUDA graphs, because launching small kernels one by one takes longer than running them."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from spcl.engine.model import SharedModel
from spcl.engine.segments import side_stream
from spcl.errors import is_out_of_memory

MOST_GRAPHS = 8
"""The most graphs of one kind to keep: each takes memory, and time to capture."""


class GraphCapture:
    """Captures the graphs of one model, all in one memory pool. On a device without CUDA graphs it captures none.

    Attributes:
        unsupported: why this model's work cannot be captured; None as long as no capture has failed.
        seconds: the time spent on capturing so far.
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
        """Return the properties that a graph depends on: number, shape and type of samples, and all modules' modes."""
        return size, x.shape[1:], x.dtype, tuple([module.training for module in self._modules])

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]] | None:
        """Capture pieces of work in the order in which they run; return a function that replays each.

        All pieces must have run before. Return None if the work must run eagerly: on a device without CUDA graphs, or
        if a piece cannot be captured; then a warning gives the reason, and :attr:`unsupported` is set.
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
        """Run the work eagerly on the capturing stream, so that libraries allocate their workspaces there."""
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
        """Return the context of a capture; other threads may use the GPU meanwhile, for predictions for example."""
        return torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local", **options)

    def _leave_pool(self) -> None:
        """Release the memory pool: if a capture cannot be ended, PyTorch does not, and the memory would be lost."""
        assert self._pool is not None
        with suppress(RuntimeError):  # the capture has been ended
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            torch._C._cuda_releasePool(self.device.index, self._pool)

    def _mark_unsupported(self, reason: BaseException) -> None:
        self.unsupported = str(reason).splitlines()[0]
        # a failed capture leaves the random number generator in capture mode; an empty capture ends this mode
        with self._capturing(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=self.device)
        warnings.warn(
            f"no CUDA graph can be captured of this training, so kernels are launched one by one: {self.unsupported}",
            RuntimeWarning,
            stacklevel=2,
        )


def _first_cause(error: BaseException, handled: BaseException | None) -> BaseException:
    """Return the first error since ``handled``: after it, ending the capture raises further errors.

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
    """Raise if the work within the block replaces buffers by other tensors: a graph would keep using the old tensors.

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


class RepeatedWork:
    """Runs the same work again and again: eagerly the first time, as a warm-up, then as a CUDA graph if possible.

    Attributes:
        replay: replays the graph; None if there is none.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._capture = capture
        self._is_warm = False
        self.replay: Callable[[], None] | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Run the work, always the same, or replay its graph; the work is not kept, since its owner keeps this."""
        if self.replay is None and self._is_warm:
            (self.replay,) = self._capture.capture([work]) or (None,)
        if self.replay is None:
            self._capture.warm_up(work)
        else:
            self.replay()
        self._is_warm = True


WARM_UPS = 1
"""How often a :class:`GraphCache` runs work eagerly before it captures it."""

MOST_KEYS = 1000
"""The most keys whose runs are counted; beyond this number counting starts again."""


class GraphCache:
    """Captures small pieces of repeated work and keeps their graphs.

    Equal keys mean equal work, which runs eagerly :data:`WARM_UPS` times and is captured then. At most
    :data:`MOST_GRAPHS` graphs are kept; a new one replaces the oldest.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._capture = capture
        self._counts: Counter[object] = Counter()
        self._replays: dict[object, Callable[[], None]] = {}

    def run(self, key: object, work: Callable[[], None]) -> None:
        """Run the work, or replay its graph."""
        if key in self._replays:
            self._replays[key]()
            return
        if self._capture.unsupported is not None:
            work()
            return
        if len(self._counts) > MOST_KEYS:
            self._counts.clear()
        self._counts[key] += 1
        replays = self._capture.capture([work]) if self._counts[key] > WARM_UPS else None
        if replays is None:
            self._capture.warm_up(work)
            return
        if len(self._replays) == MOST_GRAPHS:
            del self._replays[next(iter(self._replays))]
        (self._replays[key],) = replays
        self._replays[key]()

    def clear(self) -> None:
        """Drop all graphs and counts."""
        self._counts.clear()
        self._replays.clear()
