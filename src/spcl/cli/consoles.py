"""The console of all commands, and errors of standard output."""

import io
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from spcl.errors import SpclError

__all__ = ["careful_output", "plain_console", "print_next"]


def plain_console(**options: Any) -> Console:
    """Make a console that prints text as it is, since folders and settings may look like rich's markup or emoji names.

    >>> plain_console().print("runs/[bold] method=choice:a:b")
    runs/[bold] method=choice:a:b
    """
    return Console(markup=False, emoji=False, highlight=False, **options)


def print_next(console: Console, out: Path, model: Sequence[str] | None = None) -> None:
    """Print the commands that show the runs in a folder, or that also use the model of a single run, with its options.

    >>> print_next(plain_console(), Path("my runs"))
    next: spcl table 'my runs'
          spcl report 'my runs'
    """
    uses: list[tuple[str, ...]] = [("table",), ("report",)]
    if model is not None:
        uses += [("predict", "FILE", *model), ("export", *model, "--out", "model.pt2")]
    commands = [shlex.join(["spcl", command, str(out), *more]) for command, *more in uses]
    console.print("next: " + "\n      ".join(commands), soft_wrap=True)


@contextmanager
def careful_output() -> Iterator[None]:
    """Print ``?`` for characters that the output cannot encode; raise a user error if it cannot be written."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # Python's own flush at exit is too late for a one-line error
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()
        raise SpclError(f"cannot write the output: {error.strerror}; send it somewhere else") from error


def _discard_output() -> None:
    """Redirect standard output to the null device, since Python flushes what is left once more at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
