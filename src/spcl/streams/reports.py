"""What is logged of sources that fail and of messages that they reject."""

import logging

from spcl.sources import Rejected
from spcl.streams.reader import Failure

__all__ = ["log_failure", "log_rejected"]

_log = logging.getLogger(__name__)


def log_failure(name: str, failure: Failure) -> None:
    """Log the failure of a source as a warning."""
    _log.warning("source %r failed (%d×): %r", name, failure.count, failure.exception)


def log_rejected(name: str, rejected: Rejected) -> None:
    """Log a message that a source rejects as a warning."""
    _log.warning("source %r: %s rejected: %s", name, rejected.position, rejected.reason)
