"""Ctrl-C while modules are imported."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["EXIT_STATUS", "exit_on_interrupt"]

EXIT_STATUS = 130


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process at once on Ctrl-C; within imports libraries would turn a KeyboardInterrupt into other errors."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(number: int, frame: object) -> None:
    os.write(2, b"stopped\n")
    os._exit(EXIT_STATUS)
