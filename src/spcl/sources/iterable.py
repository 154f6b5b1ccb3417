"""Any iterable of batches as a source."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from spcl.errors import SpclError
from spcl.sources.base import Message, Source

__all__ = ["IterableSource", "as_source"]


class IterableSource:
    """A source that cannot be read again: the caller skips the batches before a position.

    >>> [message.position for message in IterableSource(["batch", "batch"]).read(after="7")]
    ['8', '9']
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def read(self, after: str | None) -> Iterator[Message]:
        """Number the batches that the iterable yields."""
        # No generator: it would turn a StopIteration that `iter` raises into another error.
        return map(Message, map(str, count(int(after or 0) + 1)), iter(self._iterable))

    def commit(self, upto: str) -> None:
        """Do nothing: what was yielded is gone."""

    def close(self) -> None:
        """Do nothing: an iterator cannot be interrupted."""


def as_source(given: Source | Iterable[Any]) -> Source:
    """Return a source as it is, and an iterable as an :class:`IterableSource`.

    >>> as_source(lambda: [])
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: a source must be an iterable of batches, but it is a function; give what it returns
    """
    if isinstance(given, Source):
        return given
    if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        advice = "give what it returns" if callable(given) else "give a DataLoader, a generator or a list"
        raise SpclError(f"a source must be an iterable of batches, but it is a {type(given).__name__}; {advice}")
    return IterableSource(given)
