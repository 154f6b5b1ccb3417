"""Stopping a run by signals."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["stop_requested"]


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; the second raises KeyboardInterrupt.

    Outside of the main thread, which alone receives signals, the event is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
