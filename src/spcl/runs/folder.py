"""The folder of a run: its files, its lock, and which run it holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spcl.checkpoint import has_checkpoint, remove_checkpoint
from spcl.errors import SpclError
from spcl.files import read_json, user_errors
from spcl.runs.identity import first_difference
from spcl.runs.result import RunResult
from spcl.runs.settings import RunSettings, with_defaults

__all__ = ["FolderError", "FolderInUseError", "RunFolder", "UnfinishedRunError"]


class FolderError(SpclError):
    """A folder that cannot take the run: it holds another one, or data or settings have changed since."""


class FolderInUseError(FolderError):
    """A folder that another process writes to."""


class UnfinishedRunError(FolderError):
    """A folder that holds an unfinished run, which only resuming may continue."""


class RunFolder:
    """The files of one run.

    They are ``settings.json``, ``metrics.jsonl``, ``checkpoint.safetensors`` until the run is complete, and then
    ``model.safetensors`` and ``result.json``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.settings = path / "settings.json"
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.checkpoint = path / "checkpoint.safetensors"
        self.model = path / "model.safetensors"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it against other processes; the lock ends with the process at the latest."""
        lock = FileLock(self.path / ".lock", timeout=0)
        with user_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout as error:
                raise FolderInUseError(
                    f"another process is running in {self.path}; wait for it, or choose another folder"
                ) from error
            try:
                yield
            finally:
                lock.release()

    def has_checkpoint(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return has_checkpoint(self.checkpoint)

    def remove_checkpoints(self) -> None:
        """Remove the checkpoint, the previous one, and what was left of others."""
        remove_checkpoint(self.checkpoint)

    def read_result(self) -> RunResult | None:
        """Return the result, or None where it is missing or damaged."""
        return RunResult.parse(read_json(self.result))

    def read_settings(self) -> dict[str, Any] | None:
        """Return the recorded settings, or None where they are missing or damaged."""
        content = read_json(self.settings)
        return content if isinstance(content, dict) else None

    def check_settings(self, settings: RunSettings) -> None:
        """Raise :class:`FolderError` if the folder holds a run with other settings."""
        recorded = self.read_settings()
        if recorded is None:
            return
        if found := first_difference(with_defaults(recorded), settings.model_dump(mode="json")):
            name, recorded, requested = found
            raise FolderError(
                f"{self.path} holds a run with {name} = {recorded}, not {requested}; "
                f"choose another folder, or remove this one"
            )
