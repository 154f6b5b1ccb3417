"""Checks of a live stream's arguments."""

import threading
from collections.abc import Mapping

from spcl.errors import SpclError
from spcl.sources.iterable import as_source

__all__ = ["check_arguments"]


def check_arguments(sources: object, capacity: object, patience: object, on_failure: object) -> None:
    """Refuse arguments that a live stream cannot use."""
    if not isinstance(sources, Mapping | None):
        raise SpclError(f"sources is a {type(sources).__name__}; give a dict of iterables by name")
    for source in (sources or {}).values():
        as_source(source)  # before the thread of any other starts
    if not isinstance(capacity, int) or capacity < 1:
        raise SpclError(f"capacity is {capacity!r}; give an integer number of batches, at least 1")
    if patience is not None and not _is_timeout(patience):
        raise SpclError(f"patience is {patience!r}; give a number of seconds, or None to wait without limit")
    if not callable(on_failure):
        raise SpclError(f"on_failure is {on_failure!r}; give a function of the source's name and its Failure")


def _is_timeout(seconds: object) -> bool:
    return isinstance(seconds, int | float) and 0 <= seconds <= threading.TIMEOUT_MAX
