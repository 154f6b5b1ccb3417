"""The console of all commands."""

from typing import Any

from rich.console import Console

__all__ = ["plain_console"]


def plain_console(**options: Any) -> Console:
    """A console that prints text as it is: folders and settings may look like rich's markup, or its names of emoji.

    >>> plain_console().print("runs/[bold] method=choice:a:b")
    runs/[bold] method=choice:a:b
    """
    return Console(markup=False, emoji=False, highlight=False, **options)
