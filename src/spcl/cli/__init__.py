"""The ``spcl`` command: parses and calls, computes nothing."""

from spcl.cli.app import main

__all__ = ["main"]
