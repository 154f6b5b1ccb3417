"""Progress bars on the terminal for decoding and downloads."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

__all__ = ["download_progress", "track"]

T = TypeVar("T")
DELAY_SECONDS = 2.0


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield the items and show a progress bar on the terminal once they have taken two seconds.

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
            if not progress.live.is_started and time.monotonic() - started > DELAY_SECONDS:
                progress.start()
    finally:
        progress.stop()


def download_progress() -> Progress:
    """Return a progress display with bytes and speed, which shows nothing unless on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
