"""Selection of runs of two overlapping tasks."""

from collections.abc import Sequence

from spcl.results.figures.spec import MissingRunsError
from spcl.results.records import CompleteRun

__all__ = ["evaluated_over_time", "two_task_runs"]


def two_task_runs(runs: Sequence[CompleteRun]) -> list[CompleteRun]:
    """Return the runs of two tasks of which the second joins while the first trains."""
    found = []
    for run in runs:
        timeline = run.result.timeline
        if len(timeline) == 2 and 0 < timeline[1][0] < timeline[0][1]:
            found.append(run)
    if not found:
        raise MissingRunsError(f"none of {len(runs)} complete runs has two tasks of which the second joins later")
    return found


def evaluated_over_time(runs: Sequence[CompleteRun]) -> list[CompleteRun]:
    """Return the runs that evaluate also between the ends of tasks."""
    return [run for run in runs if run.settings["evaluate_every"]]
