"""The flags of commands that make many runs: where these are made, and how many at once."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from spcl.errors import SpclError
from spcl.grids import Pool, RayPool, WorkerPool, threads_per_job

__all__ = ["EngineFlags"]


@dataclass(frozen=True)
class EngineFlags:
    """The flags of ``grid`` and ``tune`` that choose the pool of their runs."""

    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many runs at once: 1 if not given, and they share the CPU's threads; with Ray, as many as the "
            "cluster has room for.",
        ),
    ] = None
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="local: processes of this machine; ray: tasks of a Ray cluster.")
    ] = "local"
    address: Annotated[
        str | None, typer.Option(help="With Ray: host:port of the cluster; found, or started here, if not given.")
    ] = None
    processes_per_run: Annotated[
        int,
        typer.Option(min=1, help="Processes that make every run together, each with the run's threads and a GPU."),
    ] = 1
    split: Annotated[
        str | None,
        typer.Option(
            help="What the processes of a run split: tasks (the default), data (batches), or both, e.g. 2x4: 2 groups "
            "with different tasks, in each 4 processes with different samples."
        ),
    ] = None
    gpus_per_run: Annotated[
        float,
        typer.Option(
            min=0.0, help="With Ray: GPUs of every run, or of each of its processes; 0.25 lets four runs share one."
        ),
    ] = 0.0

    def settings(self) -> dict[str, Any]:
        """Return the settings that runs have by default on this engine."""
        if self.engine == "local":
            return {"threads": threads_per_job((self.jobs or 1) * self.processes_per_run)}
        return {"threads": 1} if self.gpus_per_run else {"threads": 1, "device": "cpu"}

    def pool(self) -> Pool:
        """Make the pool."""
        if self.split is not None and self.processes_per_run == 1:
            raise SpclError(f"--split {self.split} is for several processes; add --processes-per-run, or leave it out")
        ranks: Any = {"processes_per_run": self.processes_per_run, "split": self.split or "tasks"}
        if self.engine == "ray":
            return RayPool(self.address, gpus_per_run=self.gpus_per_run, size=self.jobs, **ranks)
        for flag, given in {"--address": self.address, "--gpus-per-run": self.gpus_per_run}.items():
            if given:
                raise SpclError(f"{flag} {given} is of use on a cluster only; add --engine ray, or leave it out")
        return WorkerPool(self.jobs or 1, **ranks)
