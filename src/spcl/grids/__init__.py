"""Many runs: planned as a grid or searched by a tuner, made by a pool of worker processes."""

from spcl.grids.grid import run_jobs
from spcl.grids.plan import Job, plan_grid
from spcl.grids.pool import WorkerPool

__all__ = ["Job", "WorkerPool", "plan_grid", "run_jobs"]
