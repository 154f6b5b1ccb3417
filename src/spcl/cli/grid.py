"""``spcl grid``."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spcl.cli.consoles import plain_console
from spcl.cli.flags import DataDir, Device, Fit, Preset, Protocol, settings_from
from spcl.grids.grid import GridState, run_jobs
from spcl.grids.plan import (
    Job,
    check_data,
    check_folders,
    parse_methods,
    parse_numbers,
    parse_sweep,
    plan_grid,
)
from spcl.grids.pool import WorkerPool, threads_per_job
from spcl.grids.view import LiveGridView, PlainGridView
from spcl.runs.settings import parse_assignments

__all__ = ["grid"]


def grid(
    out: Annotated[Path, typer.Option(help="Folder for all runs; the same folder again continues.")],
    benchmark: Annotated[
        str, typer.Option(help="ps-glyphs, ps-emnist, …, or a folder of pictures or an .npz of your own.")
    ] = "ps-glyphs",
    methods: Annotated[str, typer.Option(help="all, or names separated by commas; see 'spcl methods'.")] = "all",
    scenarios: Annotated[str, typer.Option(help="task, class or task,class.")] = "task,class",
    configs: Annotated[str, typer.Option(help="Label sets and timelines, e.g. 0-8 or 0,3,5.")] = "0-8",
    seeds: Annotated[str, typer.Option(help="E.g. 0-2.")] = "0-2",
    jobs: Annotated[int, typer.Option(min=1, help="How many runs at once; they share the CPU's threads.")] = 1,
    preset: Preset = None,
    protocol: Protocol = None,
    fit: Fit = False,
    device: Device = None,
    data_dir: DataDir = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting, for all runs, e.g. method.sigma=50; may be repeated."),
    ] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="Runs for each value of a setting, e.g. method.sigma=1,10,100; may be repeated."),
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="How often a run that crashed is tried again.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would run.")] = False,
) -> None:
    """Make every run of a comparison that is not there yet: methods × scenarios × configurations × seeds."""
    given = settings_from(
        benchmark=benchmark,
        preset=preset,
        protocol=protocol,
        fit=fit or None,
        device=device,
        data_dir=data_dir,
        threads=threads_per_job(jobs),
    )
    planned = plan_grid(
        out,
        given | parse_assignments(assignments or []),
        methods=parse_methods(methods),
        scenarios=[scenario.strip() for scenario in scenarios.split(",")],
        configs=parse_numbers(configs),
        seeds=parse_numbers(seeds),
        sweeps=[parse_sweep(sweep) for sweep in sweeps or []],
    )
    check_folders(planned)
    console = plain_console()
    if dry_run:
        _list(planned, console)
        return
    missing = [job for job in planned if not job.is_done()]
    check_data(missing)
    _tell(_run(planned, jobs, retries, console), out, console)


def _list(planned: Sequence[Job], console: Console) -> None:
    missing = [job for job in planned if not job.is_done()]
    for job in missing:
        console.print(f"{job.out}{' (continues)' if job.is_begun() else ''}", soft_wrap=True)
    console.print(f"{len(missing)} of {len(planned)} runs would be made")


def _run(planned: Sequence[Job], jobs: int, retries: int, console: Console) -> GridState:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    view = LiveGridView(console) if console.is_terminal else PlainGridView(console)
    try:
        with WorkerPool(jobs) as pool, view:
            return run_jobs(planned, pool, view, retries)
    except KeyboardInterrupt:
        done = sum(job.is_done() for job in planned)
        console.print(f"stopped; {done} of {len(planned)} runs are complete; the same command continues")
        raise typer.Exit(130) from None


def _tell(state: GridState, out: Path, console: Console) -> None:
    console.print(f"{state.done} of {state.total} runs are complete in {out}", soft_wrap=True)
    for name, reason in state.failed.items():
        console.print(f"failed: {name}: {reason}", style="red", soft_wrap=True)
    if state.failed:
        raise typer.Exit(1)
