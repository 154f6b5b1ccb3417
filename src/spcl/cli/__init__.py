"""The ``spcl`` command: parses and calls, computes nothing."""

import os
import signal
from contextlib import AbstractContextManager

from spcl._util.signals import handling

__all__ = ["main"]

INTERRUPTED = 130
"""The exit status after Ctrl-C."""


def main() -> None:
    """Run the command; Ctrl-C ends it with the word "stopped" and status 130, also while it is still being imported."""
    with exit_on_interrupt():
        from spcl.cli.app import main
    main()


def exit_on_interrupt() -> AbstractContextManager[None]:
    """End the process at once on Ctrl-C; within imports libraries would turn a KeyboardInterrupt into other errors."""
    return handling([signal.SIGINT], _exit)


def _exit(number: int, frame: object) -> None:
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)
