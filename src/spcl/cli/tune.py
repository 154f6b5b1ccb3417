"""``spcl tune``."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spcl.cli.consoles import plain_console
from spcl.cli.engine_flags import EngineFlags
from spcl.cli.flags import METHOD, SCENARIO, Configs, RunFlags, Seeds, expand_flags, naming_flags, parse_flag
from spcl.errors import SpclError, TimelineError
from spcl.grids import (
    LiveGridView,
    PlainGridView,
    Pool,
    Trial,
    Tuning,
    parse_numbers,
    parse_search,
)
from spcl.grids import tune as search_settings
from spcl.runs import FolderError
from spcl.runs.identity import flat_settings
from spcl.runs.settings import merge_settings

__all__ = ["run_command", "tune"]

BENCHMARK = "ps-glyphs"
HERE_ONLY = ("threads", "validation", "keep_model")


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
    method: Annotated[str | None, METHOD] = None,
    scenario: Annotated[str | None, SCENARIO] = None,
    configs: Configs = None,
    seeds: Seeds = None,
    trials: Annotated[int, typer.Option(min=1, help="How many settings to try.")] = 20,
    validation: Annotated[float, typer.Option(help="The part of the training data to score on.")] = 0.2,
) -> None:
    """Search for good settings with Optuna, scored on held-out training data and never on the test data."""
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
    console, pool = plain_console(), engine.pool()
    with naming_flags({FolderError: "--out", TimelineError: "--fit"}):
        best = _search(tuning, out, trials, pool, console)
    console.print(f"best: {_describe(best)}; to run it on the test data:", soft_wrap=True)
    console.print(run_command(tuning, best), soft_wrap=True)


def run_command(tuning: Tuning, best: Trial) -> str:
    """Return the command that runs the best settings on the test data."""
    base = {name: value for name, value in flat_settings(tuning.base).items() if name not in HERE_ONLY}
    named = {"benchmark": base.pop("benchmark", BENCHMARK), "method": tuning.method, "scenario": tuning.scenario}
    parts = ["spcl", "run", *(part for name, value in named.items() for part in (f"--{name}", value))]
    for plugin in base.pop("plugins", []):
        parts += ["--plugin", plugin["name"]]
    for name, value in {**base, **best.params}.items():
        parts += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(
        [*parts, "--config", str(tuning.configs[0]), "--seed", str(tuning.seeds[0]), "--out", "runs/best"]
    )


def _search(tuning: Tuning, out: Path, trials: int, pool: Pool, console: Console) -> Trial:
    def print_trial(trial: Trial) -> None:
        console.print(_describe(trial), soft_wrap=True)

    view = LiveGridView(console) if console.is_terminal else PlainGridView(console)
    try:
        with pool, view:
            return search_settings(tuning, out, trials, pool=pool, view=view, on_progress=print_trial)
    except KeyboardInterrupt:
        console.print("stopped; the same command continues")
        raise typer.Exit(130) from None


def _describe(trial: Trial) -> str:
    params = ", ".join(f"{name} = {value}" for name, value in trial.params.items())
    outcome = "failed" if trial.accuracy is None else f"validation accuracy {trial.accuracy:.2f} %"
    return f"trial {trial.number}: {outcome} with {params}"
