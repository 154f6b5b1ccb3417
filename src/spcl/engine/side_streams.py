"""Streams beside the main one of a GPU, on which independent work runs side by side."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Self

import torch

__all__ = ["SideStreams", "side_stream"]

STREAMS = 4


class SideStreams(AbstractContextManager["SideStreams"]):
    """Runs pieces of work on streams in turn; the main stream waits for all of them at the end of the block.

    On other devices the work runs as it comes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: list[torch.cuda.Stream] = []
        self._count = 0

    def run(self, work: Callable[[], object]) -> None:
        """Run a piece of work, after all that the main stream has to do so far."""
        if self._device.type != "cuda":
            work()
            return
        stream = side_stream(self._device, 1 + self._count % STREAMS)
        self._count += 1
        if stream not in self._used:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._used.append(stream)
        with torch.cuda.stream(stream):
            work()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in self._used:
            torch.cuda.current_stream(self._device).wait_stream(stream)


@cache
def side_stream(device: torch.device, number: int = 0) -> torch.cuda.Stream:
    """Return a stream beside the main one, shared by all learners: the allocator keeps memory per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
