"""Handlers of signals that are replaced for a while."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None


@contextmanager
def handling(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle signals until the block ends; do nothing outside of the main thread, which alone receives signals.

    >>> with handling([signal.SIGTERM], lambda number, frame: print("told to stop")):
    ...     signal.raise_signal(signal.SIGTERM)
    told to stop
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)
