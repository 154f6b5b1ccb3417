"""``metrics.jsonl``: losses, weights, stability and accuracies of a run while it trains."""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from spcl.learner import StepReport
from spcl.runs.folder import FolderError
from spcl.stability import Stability, summaries
from spcl.trackers import Tracker, tracker_errors

__all__ = ["MetricsFile", "Recorder", "SilentRecorder", "finite_or_none"]

WRITE_SECONDS = 1.0


class MetricsFile:
    """One JSON object per line, appended.

    ``position`` is the length of the file when the run was saved; everything after it is removed.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        with path.open("ab") as file:
            if file.tell() < position:
                raise FolderError(
                    f"{path} has {file.tell()} bytes, but had {position} when the run was saved; put the file back, or "
                    f"start again in another folder"
                )
            file.truncate(position)
        self._file = path.open("a", encoding="utf-8")
        self._encode = json.JSONEncoder(ensure_ascii=False).encode

    def write(self, kind: str, **values: Any) -> None:
        """Append one line."""
        self._file.write(self._encode({"kind": kind, **values}) + "\n")

    def sync(self) -> int:
        """Write everything to the disk and return the length of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


class Recorder:
    """Write the steps and evaluations of a run, in order, to the metrics file and to trackers.

    Steps are collected for a second, since computing the stability of many steps in one batch is much faster.
    """

    def __init__(self, metrics: MetricsFile, trackers: Sequence[Tracker]) -> None:
        self._metrics = metrics
        self._trackers = trackers
        self._unwritten: list[tuple[int, StepReport]] = []
        self._written_at = time.monotonic()

    def start(self, **facts: Any) -> None:
        """Record the scenario, the tasks, their classes and their timeline."""
        self._metrics.write("start", **facts)

    def step(self, step: int, report: StepReport) -> None:
        """Record the losses, weights, gradient norms and stability of a step."""
        self._unwritten.append((step, report))
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._write_steps()

    def evaluation(self, step: int, ended: tuple[str, ...], accuracies: Mapping[str, float]) -> None:
        """Record accuracies in per cent, and the tasks that ended at this step."""
        self._write_steps()
        self._metrics.write("evaluation", step=step, ended=list(ended), accuracy=accuracies)
        for tracker in self._trackers:
            with tracker_errors(tracker):
                tracker.evaluation(step, accuracies)

    def sync(self) -> int:
        """Write everything to the disk and return the length of the metrics file."""
        self._write_steps()
        return self._metrics.sync()

    def close(self) -> None:
        """Write the steps that are left and close the metrics file."""
        try:
            self._write_steps()
        finally:
            self._metrics.close()

    def _write_steps(self) -> None:
        steps, self._unwritten = self._unwritten, []
        for (step, _), values in zip(steps, _step_values([report for _, report in steps]), strict=True):
            self._metrics.write("step", step=step, **values)
            for tracker in self._trackers:
                with tracker_errors(tracker):
                    tracker.step(step, values)
        self._written_at = time.monotonic()


class SilentRecorder:
    """A recorder that writes nothing."""

    def start(self, **facts: Any) -> None:
        """Do nothing."""

    def step(self, step: int, report: StepReport) -> None:
        """Do nothing."""

    def evaluation(self, step: int, ended: tuple[str, ...], accuracies: Mapping[str, float]) -> None:
        """Do nothing."""

    def sync(self) -> int:
        """Return the length of a file without lines."""
        return 0

    def close(self) -> None:
        """Do nothing."""


def finite_or_none(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace infinite and NaN values by None, since JSON has neither.

    >>> finite_or_none({"condition_number": float("inf"), "cosine": 0.5})
    {'condition_number': None, 'cosine': 0.5}
    """
    return {name: value if isfinite(value) else None for name, value in values.items()}


def _step_values(reports: list[StepReport]) -> list[dict[str, Any]]:
    return [
        {
            "losses": report.losses,
            "weights": report.weights,
            **({} if report.before is None else {"norms": _norms(report.losses, report.before)}),
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


def _norms(names: Iterable[str], measured: Stability) -> dict[str, float | None]:
    """Return the norm of every gradient, before the weighting."""
    norms = measured.gramian.diagonal().clamp(min=0.0).sqrt().tolist()
    return finite_or_none(dict(zip(names, norms, strict=True)))


def _stability_values(measured: list[Stability | None]) -> list[dict[str, float | None] | None]:
    """Return κ, conflicts and similarities of every step; None where there are fewer than two gradients."""
    gramians = {i: found.gramian for i, found in enumerate(measured) if found is not None and len(found.gramian) > 1}
    values = dict(zip(gramians, summaries(list(gramians.values())), strict=True))
    return [finite_or_none(values[i]._asdict()) if i in values else None for i in range(len(measured))]
