"""Requests to start and finish tasks, kept on disk until they are in a checkpoint."""

import json
from pathlib import Path
from typing import Any

from spcl.errors import DataError
from spcl.sources import FolderHub
from spcl.sources.wire import MAX_BYTES

__all__ = ["Requests"]

STREAM = "requests"
MOST = 1000


class Requests:
    """A log of requests, each carried out once: the position of the last one is in the checkpoint.

    Args:
        folder: of the service's state.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "requests"
        self._hub = FolderHub(self._path)

    def add(self, request: dict[str, Any]) -> None:
        """Keep a request."""
        self._hub.append(STREAM, json.dumps(request).encode())

    def after(self, position: str | None) -> list[tuple[str, dict[str, Any]]]:
        """Return the requests after a position, with theirs."""
        hub = FolderHub(self._path)  # a new one: that of before may take the folder for unchanged for a moment
        found = hub.read({STREAM: position}, MOST, wait=0.0, max_bytes=MAX_BYTES)[STREAM]
        return [(at, json.loads(data)) for at, data in found if not isinstance(data, DataError)]

    def forget(self, upto: str) -> None:
        """Delete requests that are in the last two checkpoints."""
        self._hub.trim(STREAM, upto)
