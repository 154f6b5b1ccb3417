"""The log of a service: a line for everything that an operator has to know, with time and level."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from spcl._util.text import printable
from spcl.serve.events import TaskEvent

FORMAT = "%(asctime)s %(levelname)s %(message)s"
USUAL = ("started", "ended", "recovered", "changed")
"""The kinds of events of a task that are no reason to worry."""

_log = logging.getLogger(__name__)


class _Formatter(logging.Formatter):
    """Formats records without control characters: names and reasons come from strangers, who could forge a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record).replace("\n", " "))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Write the log, and warnings, to stderr within the block."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(FORMAT))
    root, package, show = logging.getLogger(), logging.getLogger("spcl"), warnings.showwarning
    level = package.level
    root.addHandler(handler)
    package.setLevel(logging.INFO)
    warnings.showwarning = lambda message, *_, **__: _log.warning("%s", message)
    try:
        yield
    finally:
        warnings.showwarning = show
        package.setLevel(level)
        root.removeHandler(handler)


def log_task(event: TaskEvent) -> None:
    """Log what happened to a task."""
    level = logging.INFO if event.kind in USUAL else logging.WARNING
    _log.log(level, "%s %s: %s", f"task {event.task}" if event.task else "the service", event.kind, event.text)
