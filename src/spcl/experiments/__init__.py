"""Experiments: one run and its record, a grid of runs, tables."""

from spcl.experiments.grid import run_jobs
from spcl.experiments.index import RunRecord, read_runs
from spcl.experiments.plan import Job, plan_grid
from spcl.experiments.run import InterruptedRunError, execute, resume_settings
from spcl.experiments.settings import RunSettings, load_settings_file, parse_assignments, resolve_settings
from spcl.experiments.tables import ResultTable, make_tables
from spcl.experiments.workers import WorkerPool

__all__ = [
    "InterruptedRunError",
    "Job",
    "ResultTable",
    "RunRecord",
    "RunSettings",
    "WorkerPool",
    "execute",
    "load_settings_file",
    "make_tables",
    "parse_assignments",
    "plan_grid",
    "read_runs",
    "resolve_settings",
    "resume_settings",
    "run_jobs",
]
