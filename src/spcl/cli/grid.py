"""``spcl grid`` and ``spcl tune``: many runs, on this machine or on a cluster."""

import json
import shlex
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from spcl._util.signals import handling
from spcl._util.text import PlainConsole
from spcl.cli import INTERRUPTED
from spcl.cli.shared import (
    SPLIT,
    Configs,
    Method,
    RunFlags,
    Scenario,
    Seeds,
    expand_flags,
    naming_flags,
    parse_flag,
    print_next,
)
from spcl.errors import MissingDataError, SpclError, TimelineError

if TYPE_CHECKING:
    from spcl.grids import GridState, Job, LiveGridView, PlainGridView, Pool, Trial, Tuning

BENCHMARK = "ps-glyphs"
"""The benchmark of a tuning that names none."""


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
    split: Annotated[str | None, typer.Option(help=f"What the processes of a run split: {SPLIT}")] = None
    gpus_per_run: Annotated[
        float,
        typer.Option(
            min=0.0, help="With Ray: GPUs of every run, or of each of its processes; 0.25 lets four runs share one."
        ),
    ] = 0.0

    def settings(self) -> dict[str, Any]:
        """Return the settings that runs have by default on this engine."""
        if self.engine == "local":
            from spcl.grids import threads_per_job

            return {"threads": threads_per_job((self.jobs or 1) * self.processes_per_run)}
        return {"threads": 1} if self.gpus_per_run else {"threads": 1, "device": "cpu"}

    def pool(self) -> "Pool":
        """Make the pool."""
        from spcl.grids import RayPool, WorkerPool

        if self.split is not None and self.processes_per_run == 1:
            raise SpclError(f"--split {self.split} is for several processes; add --processes-per-run, or leave it out")
        ranks: Any = {"processes_per_run": self.processes_per_run, "split": self.split or "tasks"}
        if self.engine == "ray":
            return RayPool(self.address, gpus_per_run=self.gpus_per_run, size=self.jobs, **ranks)
        for flag, given in {"--address": self.address, "--gpus-per-run": self.gpus_per_run}.items():
            if given:
                raise SpclError(f"{flag} {given} is of use on a cluster only; add --engine ray, or leave it out")
        return WorkerPool(self.jobs or 1, **ranks)


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
        typer.Option(help="task, class, domain, or several, such as task,class; by default those that fit the data."),
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
    from spcl.grids import default_scenarios, parse_methods, parse_numbers, parse_sweep, plan_grid
    from spcl.runs import FolderError
    from spcl.runs.settings import merge_settings

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
    console, pool = PlainConsole(), engine.pool()
    with naming_flags({FolderError: "--out", TimelineError: "--fit"}):
        if dry_run:
            _list(planned, console)
        else:
            _report(_run(planned, pool, retries, console), out, console)


def _list(planned: "Sequence[Job]", console: Console) -> None:
    """Check the jobs as a grid does, but against data only if it is here; list the runs that are missing."""
    from spcl.grids import check_jobs

    try:
        check_jobs(planned)
    except MissingDataError as error:
        console.print(f"not checked against the data: {error}", soft_wrap=True)
    missing = [job for job in planned if not job.is_done()]
    for job in missing:
        console.print(f"{job.out}{' (continues)' if job.is_begun() else ''}", soft_wrap=True)
    console.print(f"{len(missing)} of {len(planned)} runs would be made")


def _run(planned: "Sequence[Job]", pool: "Pool", retries: int, console: Console) -> "GridState":
    from spcl.grids import run_grid

    try:
        with handling([signal.SIGTERM], signal.default_int_handler):
            return run_grid(planned, pool, view=_view(console), retries=retries)
    except KeyboardInterrupt:
        done = sum(job.is_done() for job in planned)
        console.print(f"stopped; {done} of {len(planned)} runs are complete; the same command continues")
        raise typer.Exit(INTERRUPTED) from None


def _view(console: Console) -> "LiveGridView | PlainGridView":
    from spcl.grids import LiveGridView, PlainGridView

    return LiveGridView(console) if console.is_terminal else PlainGridView(console)


def _report(state: "GridState", out: Path, console: Console) -> None:
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


@expand_flags
def tune(
    out: Annotated[Path, typer.Option(help="Folder for all trials; the same folder again continues.")],
    search: Annotated[
        list[str],
        typer.Option(
            help="A setting and its range: name=log:1:1000, float:0:1, int:1:9 or choice:adam:sgd; repeatable."
        ),
    ],
    flags: RunFlags,
    engine: EngineFlags,
    method: Method = None,
    scenario: Scenario = None,
    configs: Configs = None,
    seeds: Seeds = None,
    trials: Annotated[int, typer.Option(min=1, help="How many settings to try.")] = 20,
    validation: Annotated[float, typer.Option(help="The part of the training data to score on.")] = 0.2,
) -> None:
    """Search for good settings with Optuna, scored on held-out training data and never on the test data."""
    from spcl.grids import Tuning, parse_numbers, parse_search
    from spcl.runs import FolderError
    from spcl.runs.settings import merge_settings

    with naming_flags({SpclError: "--search"}):
        dimensions = [parse_search(text) for text in search]
    fixed = {"benchmark": BENCHMARK, "validation": validation, "keep_model": False, **engine.settings()}
    layers, file = flags.planned()
    if not layers[0].get("validation"):
        layers[0].pop("validation", None)  # of a run, which is evaluated on the test data
    tuning = Tuning(
        base=merge_settings(fixed, *layers),
        method=method or file.get("method", "soro"),
        scenario=scenario or file.get("scenario", "task"),
        configs=parse_flag("--configs", parse_numbers, configs or file.get("config", "0")),
        seeds=parse_flag("--seeds", parse_numbers, seeds or file.get("seed", "0")),
        search=dimensions,
    )
    console, pool = PlainConsole(), engine.pool()
    with naming_flags({FolderError: "--out", TimelineError: "--fit"}):
        best = _search(tuning, out, trials, pool, console)
    console.print(f"best: {_describe(best)}; to run it on the test data:", soft_wrap=True)
    unasked = {"keep_model", *engine.settings()} - merge_settings(*layers).keys()
    console.print(run_command(tuning, best, unasked), soft_wrap=True)


def run_command(tuning: "Tuning", best: "Trial", unasked: Collection[str] = ()) -> str:
    """Return the command that runs the best settings on the test data.

    ``unasked`` are the settings that the tuning has chosen by itself for its runs, and that the command leaves out.
    """
    from spcl.runs.settings import flat_settings, parse_value

    left_out = {"validation", *unasked}
    base = {name: value for name, value in flat_settings(tuning.base).items() if name not in left_out}
    named = {"benchmark": base.pop("benchmark", BENCHMARK), "method": tuning.method, "scenario": tuning.scenario}
    parts = ["spcl", "run", *(part for name, value in named.items() for part in (f"--{name}", value))]
    for plugin in base.pop("plugins", []):
        parts += ["--plugin", plugin["name"]]
    for name, value in {**base, **best.params}.items():
        plain = isinstance(value, str) and parse_value(value) == value
        parts += ["--set", f"{name}={value if plain else json.dumps(value)}"]
    return shlex.join(
        [*parts, "--config", str(tuning.configs[0]), "--seed", str(tuning.seeds[0]), "--out", "runs/best"]
    )


def _search(tuning: "Tuning", out: Path, trials: int, pool: "Pool", console: Console) -> "Trial":
    from spcl.grids import tune as search_settings

    def print_trial(trial: "Trial") -> None:
        console.print(_describe(trial), soft_wrap=True)

    try:
        with pool, _view(console) as view:
            return search_settings(tuning, out, trials, pool=pool, view=view, on_progress=print_trial)
    except KeyboardInterrupt:
        console.print("stopped; the same command continues")
        raise typer.Exit(INTERRUPTED) from None


def _describe(trial: "Trial") -> str:
    params = ", ".join(f"{name} = {value}" for name, value in trial.params.items())
    outcome = "failed" if trial.accuracy is None else f"validation accuracy {trial.accuracy:.2f} %"
    return f"trial {trial.number}: {outcome} with {params}"
