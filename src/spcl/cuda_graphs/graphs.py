"""CUDA graphs: work captured once and replayed, because launching its kernels takes longer than running them."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from time import perf_counter

import torch
from torch import Tensor, nn

from spcl.engine.model import SharedModel
from spcl.errors import is_out_of_memory

__all__ = ["MOST_SHAPES", "Graphs", "Recurring", "side_stream"]

MOST_SHAPES = 8
"""How many batch sizes get graphs of their own: each takes time to capture, and memory."""

PATIENCE = 4
"""How often small work must return before it is captured: that takes as long as launching it a few times."""

MOST_KEYS = 1000
"""How many kinds of small work are counted before counting begins anew."""


class Graphs:
    """Makes graphs for one model, all in the same memory. On a device without graphs work stays as it is.

    Attributes:
        refused: why no graph can be made, once that is known.
        seconds: the time that capturing has taken so far.
    """

    def __init__(self, model: SharedModel) -> None:
        self.device = model.device
        self.refused: str | None = None
        self.seconds = 0.0
        self._modules = list(model.backbone.modules())
        on_cuda = self.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self._stream = side_stream(self.device) if on_cuda else None

    def key(self, size: int, x: Tensor) -> tuple[object, ...]:
        """What a graph holds for: so many samples like these, and the modes in which the backbone's parts are now."""
        return size, x.shape[1:], x.dtype, tuple([module.training for module in self._modules])

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]] | None:
        """The replay of every piece of work, given in the order in which they run; each must have run before.

        None where the work must go on being done as it is: without graphs, or if a piece cannot be captured. Then a
        warning says why, and :attr:`refused` is set.
        """
        if self._pool is None or self.refused is not None:
            return None
        begin, handled = perf_counter(), sys.exception()
        try:
            return [self._captured(work) for work in works]
        except RuntimeError as error:
            reason = _first(error, handled)
            if is_out_of_memory(reason):
                raise reason from None
            self._refuse(reason)
            return None
        finally:
            self.seconds += perf_counter() - begin

    def rehearse(self, work: Callable[[], None]) -> None:
        """Do the work where it would be captured, so that libraries take the memory they need only there."""
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
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream), _buffers_in_place(self._modules):
                work()
        except BaseException:
            torch.cuda.set_stream(before)
            self._leave_pool()
            raise
        return graph.replay

    def _leave_pool(self) -> None:
        """Do what PyTorch leaves undone if a capture cannot be ended: else the pool's memory is lost to everyone."""
        assert self._pool is not None
        with suppress(RuntimeError):  # it has been ended
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            torch._C._cuda_releasePool(self.device.index, self._pool)

    def _refuse(self, reason: BaseException) -> None:
        self.refused = str(reason).splitlines()[0]
        # a failed capture leaves the generator waiting for its end
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            torch.zeros(1, device=self.device)
        warnings.warn(
            f"no CUDA graph can be captured of this training, so its kernels are launched singly: {self.refused}",
            RuntimeWarning,
            stacklevel=2,
        )


class Recurring:
    """Small work of many kinds, each told by a key, of which those that return often enough are captured."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._met: Counter[object] = Counter()
        self._replays: dict[object, Callable[[], None]] = {}

    def __call__(self, key: object, work: Callable[[], None]) -> None:
        """Do the work, or replay it."""
        if key in self._replays:
            self._replays[key]()
            return
        if self._graphs.refused is not None:
            work()
            return
        if len(self._met) > MOST_KEYS:
            self._met.clear()
        self._met[key] += 1
        replays = self._graphs.capture([work]) if self._met[key] > PATIENCE else None
        if replays is None:
            self._graphs.rehearse(work)
            return
        if len(self._replays) == MOST_SHAPES:
            del self._replays[next(iter(self._replays))]
        (self._replays[key],) = replays
        self._replays[key]()

    def forget(self) -> None:
        """Begin anew."""
        self._met.clear()
        self._replays.clear()


def _first(error: BaseException, handled: BaseException | None) -> BaseException:
    """The error that set off the others since ``handled``: a capture that is broken off cannot be ended either.

    >>> try:
    ...     try:
    ...         float("cause")
    ...     finally:
    ...         {}["consequence"]
    ... except KeyError as error:
    ...     _first(error, None)
    ValueError("could not convert string to float: 'cause'")
    """
    while error.__context__ not in (None, handled):
        error = error.__context__
    return error


@contextmanager
def _buffers_in_place(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Refuse work that puts other tensors in the place of buffers: a graph would go on with the old ones.

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


@cache
def side_stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """A stream beside the main one. All learners share it: memory used on one stream is kept for that stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
