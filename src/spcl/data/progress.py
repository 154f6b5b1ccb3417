"""A progress bar for work that turns out to take a while."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

__all__ = ["track"]

T = TypeVar("T")
PATIENCE_SECONDS = 2.0


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield the items; a bar appears on the terminal once they have taken two seconds.

    >>> list(track("abc", "reading", 3))
    ['a', 'b', 'c']
    """
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    bar = progress.add_task(description, total=total)
    started = time.monotonic()
    try:
        for item in items:
            yield item
            progress.advance(bar)
            if not progress.live.is_started and time.monotonic() - started > PATIENCE_SECONDS:
                progress.start()
    finally:
        progress.stop()
