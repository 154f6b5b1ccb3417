"""Many runs: planned as a grid or proposed by a tuner, and made by worker processes or on a Ray cluster."""

from spcl.grids.base import Message, Pool
from spcl.grids.checks import check_data, check_folders, check_jobs
from spcl.grids.grid import run_grid, run_jobs
from spcl.grids.plan import Job, Sweep, default_scenarios, parse_methods, parse_numbers, parse_sweep, plan_grid
from spcl.grids.pool import WorkerPool, threads_per_job
from spcl.grids.progress import GridState, GridView, Running
from spcl.grids.ray_pool import RayPool
from spcl.grids.search import Dimension, Tuning, parse_search
from spcl.grids.tuning import Trial, tune
from spcl.grids.view import LiveGridView, PlainGridView, SilentGridView

__all__ = [
    "Dimension",
    "GridState",
    "GridView",
    "Job",
    "LiveGridView",
    "Message",
    "PlainGridView",
    "Pool",
    "RayPool",
    "Running",
    "SilentGridView",
    "Sweep",
    "Trial",
    "Tuning",
    "WorkerPool",
    "check_data",
    "check_folders",
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
