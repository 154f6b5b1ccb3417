"""The ``spcl`` command: parses and calls, computes nothing."""

from importlib import import_module

from spcl.cli.interrupts import exit_on_interrupt

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C ends it with the word "stopped" and status 130, also while it is still being imported."""
    with exit_on_interrupt():
        app = import_module("spcl.cli.app")
    app.main()
