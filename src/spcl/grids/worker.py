"""A worker process: makes the runs it is told on standard input, and says how they go on standard output.

Both are lines of JSON. When the input ends, because nothing more is wanted or because the process at the other end is
gone, the worker saves the run it is making and stops.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from filelock import Timeout

from spcl.errors import OutOfMemoryError, SpclError
from spcl.learner import StepReport
from spcl.runs.folders import recorded_settings
from spcl.runs.record import RunFolder
from spcl.runs.run import InterruptedRunError, execute
from spcl.runs.settings import RunSettings
from spcl.runs.view import SilentView

if TYPE_CHECKING:
    from spcl.runs.problem import Problem

__all__ = ["main"]

REPORT_SECONDS = 0.2

Send = Callable[..., None]


def main() -> None:
    """Work until the input ends."""
    faulthandler.enable()
    send = _sender()
    orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    send("ready")
    while (order := orders.get()) is not None:
        if not _make_run(RunSettings.model_validate(order["settings"]), Path(order["out"]), send):
            gc.collect()  # the traceback of a run that failed may hold all that it took
        torch.cuda.empty_cache()  # other processes share the GPU


def _sender() -> Send:
    """Writes messages to standard output, which nothing else in this process may do any more."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(event: str, **values: Any) -> None:
        with suppress(OSError):  # nobody listens any more: the input ends too, and that is what stops the run
            channel.write(json.dumps({"event": event, **values}) + "\n")
            channel.flush()

    return send


def _listen(orders: "SimpleQueue[dict[str, Any] | None]") -> None:
    try:
        for line in sys.stdin:
            orders.put(json.loads(line))
    finally:
        orders.put(None)  # for a run that is too near its end to take notice of the signal
        signal.raise_signal(signal.SIGTERM)  # a run that is going on saves itself; without one this ends the process


def _make_run(settings: RunSettings, out: Path, send: Send) -> bool:
    """Whether the run is complete."""
    try:
        if RunFolder(out).settings.exists() and recorded_settings(out) is None:
            raise SpclError(f"{RunFolder(out).settings} is damaged; remove the folder to make the run anew")
        result = execute(settings, out, resume=True, view=_ReportingView(send))
    except InterruptedRunError as error:
        send("interrupted", reason=str(error))
        sys.exit(0)
    except SpclError as error:
        busy = isinstance(error.__cause__, Timeout)
        mendable = not isinstance(error, OutOfMemoryError)  # the others may leave more room later
        send("busy" if busy else "failed", reason=str(error), details="", mendable=mendable)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        send("failed", reason=reason, details=traceback.format_exc(), mendable=False)
    else:
        left_out = sum(result.get("left_out", {}).values())
        send("done", accuracy=result["accuracy"], forgetting=result["forgetting"], left_out=left_out)
        return True
    return False


class _ReportingView(SilentView):
    """Sends which step of how many a run is at, a few times a second."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent_at = 0.0
        self._steps = 0

    def begin(self, settings: RunSettings, problem: "Problem", done: int) -> None:
        """The first message."""
        self._steps = len(problem.stream)
        self._send("step", step=done, steps=self._steps)

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        """A message, if the last is old enough."""
        now = time.monotonic()
        if now - self._sent_at >= REPORT_SECONDS:
            self._sent_at = now
            self._send("step", step=report.step + 1, steps=self._steps)
