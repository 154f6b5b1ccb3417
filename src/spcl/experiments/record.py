"""The folder of a run: who may write it, its metrics, its result."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spcl.errors import SpclError

__all__ = ["MetricsFile", "RunFolder"]


class RunFolder:
    """``settings.json``, ``metrics.jsonl``, ``result.json`` and ``checkpoint.safetensors`` of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.json"
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.checkpoint = path / "checkpoint.safetensors"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the system lets go of the lock when the process ends, however it ends."""
        lock = FileLock(self.path / ".lock", timeout=0)
        with plain_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout as error:
                raise SpclError(
                    f"another process is running in {self.path}; wait for it, or choose another --out"
                ) from error
            try:
                yield
            finally:
                lock.release()

    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from."""
        return self.checkpoint.exists() or self.checkpoint.with_name(f"{self.checkpoint.name}.previous").exists()

    def drop_checkpoints(self) -> None:
        """Remove what was needed only to resume."""
        for path in self.path.glob(f"{self.checkpoint.name}*"):
            path.unlink(missing_ok=True)

    def read_result(self) -> dict[str, Any] | None:
        """The result, or None while there is none (or only half of one)."""
        try:
            content: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content


class MetricsFile:
    """One JSON object a line, appended; a resumed run cuts off what came after its checkpoint."""

    def __init__(self, path: Path, position: int = 0) -> None:
        with path.open("ab") as file:
            file.truncate(position)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps({"kind": kind, **values}, ensure_ascii=False) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """How much has been written, after making sure that it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"position": self._file.tell()}

    def close(self) -> None:
        """Write what is left."""
        self._file.close()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that it is either there as a whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is either there as a whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """A full disk or a read-only folder ends in one clear line."""
    try:
        yield
    except OSError as error:
        raise SpclError(f"cannot write to {error.filename or path}: {error.strerror or error}") from error
