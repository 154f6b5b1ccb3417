"""``spcl tune``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spcl.cli.consoles import plain_console
from spcl.cli.flags import DataDir, Device, Fit, Preset, Protocol, settings_from
from spcl.grids.plan import parse_numbers
from spcl.grids.pool import WorkerPool, threads_per_job
from spcl.grids.tune import Trial, Tuning, parse_search, run_command
from spcl.grids.tune import tune as search_settings
from spcl.grids.view import LiveGridView, PlainGridView
from spcl.runs.settings import parse_assignments

__all__ = ["tune"]


def tune(
    out: Annotated[Path, typer.Option(help="Folder for all trials; the same folder again continues.")],
    search: Annotated[
        list[str],
        typer.Option(
            help="A setting and its range: name=log:1:1000, float:0:1, int:1:9 or choice:adam:sgd; repeatable."
        ),
    ],
    benchmark: Annotated[
        str, typer.Option(help="ps-glyphs, ps-emnist, …, or a folder of pictures or an .npz of your own.")
    ] = "ps-glyphs",
    method: Annotated[str, typer.Option(help="See 'spcl methods'.")] = "soro",
    scenario: Annotated[str, typer.Option(help="task or class (incremental).")] = "task",
    configs: Annotated[str, typer.Option(help="Label sets and timelines to score over, e.g. 0-8.")] = "0",
    seeds: Annotated[str, typer.Option(help="Seeds to score over, e.g. 0-2.")] = "0",
    trials: Annotated[int, typer.Option(min=1, help="How many settings to try.")] = 20,
    jobs: Annotated[int, typer.Option(min=1, help="How many runs of a trial at once.")] = 1,
    validation: Annotated[float, typer.Option(help="The part of the training data to score on.")] = 0.2,
    preset: Preset = None,
    protocol: Protocol = None,
    fit: Fit = False,
    device: Device = None,
    data_dir: DataDir = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, for all trials; may be repeated.")
    ] = None,
) -> None:
    """Search for good settings with Optuna, scored on held-out training data and never on the test data."""
    given = settings_from(
        benchmark=benchmark,
        preset=preset,
        protocol=protocol,
        fit=fit or None,
        device=device,
        data_dir=data_dir,
        validation=validation,
        threads=threads_per_job(jobs),
    )
    tuning = Tuning(
        base=given | parse_assignments(assignments or []),
        method=method,
        scenario=scenario,
        configs=parse_numbers(configs),
        seeds=parse_numbers(seeds),
        search=[parse_search(text) for text in search],
    )
    console = plain_console()
    best = _search(tuning, out, trials, jobs, console)
    console.print(f"best: {_said(best)}; to run it on the test data:", soft_wrap=True)
    console.print(run_command(tuning, best), soft_wrap=True)


def _search(tuning: Tuning, out: Path, trials: int, jobs: int, console: Console) -> Trial:
    def told(trial: Trial) -> None:
        console.print(_said(trial), soft_wrap=True)

    view = LiveGridView(console) if console.is_terminal else PlainGridView(console)
    try:
        with WorkerPool(jobs) as pool, view:
            return search_settings(tuning, out, trials, pool=pool, view=view, told=told)
    except KeyboardInterrupt:
        console.print("stopped; the same command continues")
        raise typer.Exit(130) from None


def _said(trial: Trial) -> str:
    params = ", ".join(f"{name} = {value}" for name, value in trial.params.items())
    outcome = "failed" if trial.accuracy is None else f"validation accuracy {trial.accuracy:.2f} %"
    return f"trial {trial.number}: {outcome} with {params}"
