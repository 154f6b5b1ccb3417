"""The folder of a run: who may write it, its metrics, its result."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard

from filelock import FileLock, Timeout

from spcl.errors import SpclError
from spcl.learner import StepReport
from spcl.runs.trackers import Tracker
from spcl.stability import Stability, summaries

__all__ = ["MetricsFile", "Recorder", "RunFolder", "is_result"]

WRITE_SECONDS = 1.0


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
        """The result, or None while there is none (or only half of one, or something else)."""
        try:
            content = json.loads(self.result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content if is_result(content) else None


def is_result(content: Any) -> TypeGuard[dict[str, Any]]:
    """Whether this is the result of a run, and not half of one or something else.

    >>> is_result({"accuracy": 80.0, "forgetting": -5.0, "tasks": {"task-0": {"final": 80.0}}})
    True
    >>> is_result({"accuracy": 80.0}), is_result([1, 2]), is_result(None)
    (False, False, False)
    """
    if not isinstance(content, dict) or not _is_number(content.get("accuracy")):
        return False
    tasks = content.get("tasks")
    parts = [content.get(name, {}) for name in ("seconds", "filters", "confusion", "left_out")]
    return (
        _is_number(content.get("forgetting"))
        and isinstance(tasks, dict)
        and all(isinstance(task, dict) and _is_number(task.get("final")) for task in tasks.values())
        and all(isinstance(part, dict) for part in parts)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class MetricsFile:
    """One JSON object a line, appended; a resumed run cuts off what came after its checkpoint."""

    def __init__(self, path: Path, position: int = 0) -> None:
        with path.open("ab") as file:
            if file.tell() < position:
                raise SpclError(
                    f"{path} has {file.tell()} bytes, but had {position} when the run was saved; put the file back, or "
                    f"begin again in another folder"
                )
            file.truncate(position)
        self._file = path.open("a", encoding="utf-8")
        self._encode = json.JSONEncoder(ensure_ascii=False).encode

    def write(self, kind: str, **values: Any) -> None:
        """Append one line."""
        self._file.write(self._encode({"kind": kind, **values}) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """How much has been written, after making sure that it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"position": self._file.tell()}

    def close(self) -> None:
        """Write what is left."""
        self._file.close()


class Recorder:
    """Tells the metrics file and the trackers what happens in a run, in the order in which it happens.

    Steps are collected for a second, because their stability is measured much faster for many of them together.
    """

    def __init__(self, metrics: MetricsFile, trackers: tuple[Tracker, ...]) -> None:
        self._metrics = metrics
        self._trackers = trackers
        self._unwritten: list[tuple[int, StepReport]] = []
        self._written_at = time.monotonic()

    def start(self, **facts: Any) -> None:
        """What is to be learned, and when."""
        self._metrics.write("start", **facts)

    def step(self, step: int, report: StepReport) -> None:
        """Losses, weights and stability of a step."""
        self._unwritten.append((step, report))
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._write_steps()

    def evaluation(self, step: int, ended: tuple[str, ...], accuracies: Mapping[str, float]) -> None:
        """Accuracies, in per cent, and the tasks that have just ended."""
        self._write_steps()
        self._metrics.write("evaluation", step=step, ended=list(ended), accuracy=accuracies)
        for tracker in self._trackers:
            tracker.evaluation(step, accuracies)

    def position(self) -> int:
        """How long the metrics file is, after making sure that all of it is on the disk."""
        self._write_steps()
        position: int = self._metrics.state_dict()["position"]
        return position

    def close(self) -> None:
        """Write what is left."""
        try:
            self._write_steps()
        finally:
            self._metrics.close()

    def _write_steps(self) -> None:
        steps, self._unwritten = self._unwritten, []
        for (step, _), values in zip(steps, _step_values([report for _, report in steps]), strict=True):
            self._metrics.write("step", step=step, **values)
            for tracker in self._trackers:
                tracker.step(step, values)
        self._written_at = time.monotonic()


def _step_values(reports: list[StepReport]) -> list[dict[str, Any]]:
    return [
        {
            "losses": report.losses,
            "weights": report.weights,
            "before": before,
            "after": after,
            **({"dropped": report.skipped} if report.skipped else {}),
        }
        for report, before, after in zip(
            reports,
            _stability_values([report.before for report in reports]),
            _stability_values([report.after for report in reports]),
            strict=True,
        )
    ]


def _stability_values(measured: list[Stability | None]) -> list[dict[str, float | None] | None]:
    """None where there are no two gradients to compare."""
    gramians = {i: found.gramian for i, found in enumerate(measured) if found is not None and len(found.gramian) > 1}
    values = dict(zip(gramians, summaries(list(gramians.values())), strict=True))
    return [finite(values[i]._asdict()) if i in values else None for i in range(len(measured))]


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity.

    >>> finite({"condition_number": float("inf"), "cosine": 0.5})
    {'condition_number': None, 'cosine': 0.5}
    """
    return {name: value if isfinite(value) else None for name, value in values.items()}


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
