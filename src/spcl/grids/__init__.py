"""Many runs: planned as a grid or proposed by a tuner, and made by worker processes or on a Ray cluster."""

from spcl.grids.base import JobMessage, Pool
from spcl.grids.local import WorkerPool, threads_per_job
from spcl.grids.plan import (
    Job,
    Sweep,
    check_jobs,
    default_scenarios,
    parse_methods,
    parse_numbers,
    parse_sweep,
    plan_grid,
)
from spcl.grids.ray import RayPool
from spcl.grids.scheduler import run_grid, run_jobs
from spcl.grids.tuning import Dimension, Trial, Tuning, parse_search, tune
from spcl.grids.view import GridState, GridView, LiveGridView, PlainGridView, Running, SilentGridView

__all__ = [
    "Dimension",
    "GridState",
    "GridView",
    "Job",
    "JobMessage",
    "LiveGridView",
    "PlainGridView",
    "Pool",
    "RayPool",
    "Running",
    "SilentGridView",
    "Sweep",
    "Trial",
    "Tuning",
    "WorkerPool",
    "check_jobs",
    "default_scenarios",
    "parse_methods",
    "parse_numbers",
    "parse_search",
    "parse_sweep",
    "plan_grid",
    "run_grid",
    "run_jobs",
    "threads_per_job",
    "tune",
]
