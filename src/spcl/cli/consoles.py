"""The console of all commands, and the standard output that it writes to."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from spcl.errors import SpclError

__all__ = ["careful_output", "plain_console"]


def plain_console(**options: Any) -> Console:
    """A console that prints text as it is: folders and settings may look like rich's markup, or its names of emoji.

    >>> plain_console().print("runs/[bold] method=choice:a:b")
    runs/[bold] method=choice:a:b
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


@contextmanager
def careful_output() -> Iterator[None]:
    """Print ``?`` for characters that the terminal's encoding lacks; raise an error if nothing can be printed."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # Python itself would do so too late for an error to be told in one line
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()
        raise SpclError(f"cannot write the output: {error.strerror}; send it somewhere else") from error


def _discard_output() -> None:
    """What could not be written is tried once more when Python ends, and must then go somewhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
