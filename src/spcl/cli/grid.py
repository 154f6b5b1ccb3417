"""``spcl grid``."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spcl.cli.consoles import plain_console, print_next
from spcl.cli.engine_flags import EngineFlags
from spcl.cli.flags import Configs, RunFlags, Seeds, expand_flags, naming_flags, parse_flag
from spcl.errors import MissingDataError, SpclError, TimelineError
from spcl.grids import (
    GridState,
    Job,
    LiveGridView,
    PlainGridView,
    Pool,
    check_jobs,
    default_scenarios,
    parse_methods,
    parse_numbers,
    parse_sweep,
    plan_grid,
    run_grid,
)
from spcl.runs import FolderError
from spcl.runs.settings import merge_settings

__all__ = ["grid"]


@expand_flags
def grid(
    out: Annotated[Path, typer.Option(help="Folder for all runs; the same folder again continues.")],
    flags: RunFlags,
    engine: EngineFlags,
    methods: Annotated[
        str | None, typer.Option(help="all (the default), or names separated by commas; see 'spcl methods'.")
    ] = None,
    scenarios: Annotated[
        str | None,
        typer.Option(help="task, class or task,class (the default; task for data with regression or multi-label)."),
    ] = None,
    configs: Configs = None,
    seeds: Seeds = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="Runs for each value of a setting, e.g. method.sigma=1,10,100; may be repeated."),
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="How often a run that crashed is retried.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would run.")] = False,
) -> None:
    """Make every run of a comparison that is missing: methods × scenarios × configurations × seeds."""
    with naming_flags({SpclError: "--sweep"}):
        swept = [parse_sweep(sweep) for sweep in sweeps or []]
    layers, file = flags.planned()
    base = merge_settings(engine.settings(), *layers)
    scenarios = scenarios or file.get("scenario")
    planned = plan_grid(
        out,
        base,
        methods=parse_flag("--methods", parse_methods, methods or file.get("method", "all")),
        scenarios=default_scenarios(base) if scenarios is None else [part.strip() for part in scenarios.split(",")],
        configs=parse_flag("--configs", parse_numbers, configs or file.get("config", "0-8")),
        seeds=parse_flag("--seeds", parse_numbers, seeds or file.get("seed", "0-2")),
        sweeps=swept,
    )
    console, pool = plain_console(), engine.pool()
    with naming_flags({FolderError: "--out", TimelineError: "--fit"}):
        if dry_run:
            _check(planned, console)
            _list(planned, console)
        else:
            _report(_run(planned, pool, retries, console), out, console)


def _check(planned: Sequence[Job], console: Console) -> None:
    """Check the jobs as a grid does, but against data only if it is here."""
    try:
        check_jobs(planned)
    except MissingDataError as missing:
        console.print(f"not checked against the data: {missing}", soft_wrap=True)


def _list(planned: Sequence[Job], console: Console) -> None:
    missing = [job for job in planned if not job.is_done()]
    for job in missing:
        console.print(f"{job.out}{' (continues)' if job.is_begun() else ''}", soft_wrap=True)
    console.print(f"{len(missing)} of {len(planned)} runs would be made")


def _run(planned: Sequence[Job], pool: Pool, retries: int, console: Console) -> GridState:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    view = LiveGridView(console) if console.is_terminal else PlainGridView(console)
    try:
        return run_grid(planned, pool, view=view, retries=retries)
    except KeyboardInterrupt:
        done = sum(job.is_done() for job in planned)
        console.print(f"stopped; {done} of {len(planned)} runs are complete; the same command continues")
        raise typer.Exit(130) from None


def _report(state: GridState, out: Path, console: Console) -> None:
    console.print(f"{state.done} of {state.total} runs are complete in {out}", soft_wrap=True)
    for name, reason in state.failed.items():
        console.print(f"failed: {name}: {reason}", style="red", soft_wrap=True)
    if state.out_of_memory:
        hint = "out of memory: make fewer runs at once (--jobs), or choose a smaller batch (--set batch_size=…)"
        console.print(hint, soft_wrap=True)
    if state.done:
        print_next(console, out)
    if state.failed:
        raise typer.Exit(1)
