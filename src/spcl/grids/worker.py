"""The program of a worker process: runs the jobs that it reads from standard input, and reports on standard output.

Both are lines of JSON. At the end of input, because there are no more jobs or because the parent process has died, the
worker saves the run it is making and exits. Where its environment says that it is one of several ranks, all of them
read the same jobs and make each run together; the first one reports, and others report only that they failed.
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
from typing import Any

import torch

from spcl.distributed import World
from spcl.errors import LostRankError, OtherRankError, OutOfMemoryError, SpclError
from spcl.grids.base import failure
from spcl.grids.ranks import join_ranks
from spcl.learner import StepReport
from spcl.runs import (
    FolderInUseError,
    InterruptedRunError,
    Problem,
    RunFolder,
    RunSettings,
    SilentView,
    execute,
)

__all__ = ["Send", "attempt", "is_report", "main"]

REPORT_SECONDS = 0.2
LOST_RANK_SECONDS = 30.0
"""How long a rank that has lost another one leaves it to those who watch that one to say why."""
STOPPED_BY_OTHER = "stopped by another rank"

Send = Callable[..., None]


def main() -> None:
    """Run jobs until the end of input."""
    faulthandler.enable()
    send = _take_over_stdout()
    orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    world = join_ranks()
    is_first = world is None or world.is_first
    send("ready")
    while (order := orders.get()) is not None:
        ended = attempt(RunSettings.model_validate(order["settings"]), Path(order["out"]), send, world)
        if is_report(ended, is_first):
            send(**ended)
        if is_first and ended["event"] == "interrupted":
            sys.exit(0)


def _take_over_stdout() -> Send:
    """Return a function that writes messages to standard output; all other output goes to standard error."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(event: str, **values: Any) -> None:
        with suppress(OSError):  # the parent has died: the end of input stops the run
            channel.write(json.dumps({"event": event, **values}) + "\n")
            channel.flush()

    return send


def _read_orders(orders: "SimpleQueue[dict[str, Any] | None]") -> None:
    try:
        for line in sys.stdin:
            orders.put(json.loads(line))
    finally:
        orders.put(None)  # for a run that has made its last step and no longer reacts to the signal
        signal.raise_signal(signal.SIGTERM)  # a run in progress saves itself; without one this ends the process


def attempt(settings: RunSettings, out: Path, send: Send, world: World | None = None) -> dict[str, Any]:
    """Make or resume a run, send its steps, and return the message of how it ended; free what memory it used."""
    ended = _attempt(settings, out, send, world)
    if ended["event"] != "done":
        gc.collect()  # the traceback of a failed run may still hold its tensors
    torch.cuda.empty_cache()  # other processes share the GPU
    return ended


def is_report(ended: Mapping[str, Any], is_first: bool) -> bool:
    """Return whether a message of one of the ranks of a run says how the run ended."""
    return ended["event"] == "failed" or (is_first and ended["event"] != STOPPED_BY_OTHER)


def _attempt(settings: RunSettings, out: Path, send: Send, world: World | None) -> dict[str, Any]:
    try:
        folder = RunFolder(out)
        if folder.settings.exists() and folder.read_settings() is None:
            raise SpclError(f"{folder.settings} is damaged; remove the folder to repeat the run")
        result = execute(settings, out, resume=True, view=_ReportingView(send), distributed=world)
    except InterruptedRunError as error:
        return {"event": "interrupted", "reason": str(error)}
    except FolderInUseError:
        return {"event": "busy"}
    except OtherRankError:
        return {"event": STOPPED_BY_OTHER}
    except LostRankError as error:
        time.sleep(LOST_RANK_SECONDS)  # that rank's end is noticed by then: it is the better reason, and ends this one
        return failure(str(error))
    except SpclError as error:
        out_of_memory = isinstance(error, OutOfMemoryError)  # not a user error: other processes may free memory later
        return failure(str(error), user_error=not out_of_memory, out_of_memory=out_of_memory)
    except Exception as error:
        return failure(f"{type(error).__name__}: {error}", traceback.format_exc())
    return {"event": "done", "summary": result.summary, "left_out": sum(result.left_out.values())}


class _ReportingView(SilentView):
    """Send the step of a run a few times a second."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sent_at = 0.0
        self._steps = 0

    def begin(self, settings: RunSettings, problem: Problem, done: int) -> None:
        """Send the first message."""
        self._steps = len(problem.stream)
        self._send("step", step=done, steps=self._steps)

    def step(self, step: int, report: StepReport, accuracies: Mapping[str, float]) -> None:
        """Send a message if the last one is old enough."""
        now = time.monotonic()
        if now - self._sent_at >= REPORT_SECONDS:
            self._sent_at = now
            self._send("step", step=report.step + 1, steps=self._steps)
