"""``spcl timeline``."""

from typing import Annotated

import torch
import typer

from spcl.cli.consoles import plain_console
from spcl.cli.flags import (
    Assignments,
    DataDir,
    Fit,
    Plugins,
    Protocol,
    load_plugin_flags,
    naming_flags,
    parsed_assignments,
    settings_from,
)
from spcl.errors import TimelineError
from spcl.runs import make_problem, resolve_settings
from spcl.runs.timeline_drawing import draw_timeline

__all__ = ["timeline"]


def timeline(
    benchmark: Annotated[str, typer.Option(help="A benchmark, a plug-in's data set or a path to data.")] = "ps-glyphs",
    config: Annotated[int, typer.Option(help="Which label set and timeline.")] = 0,
    protocol: Protocol = None,
    fit: Fit = False,
    paradigm: Annotated[str, typer.Option(help="parallel, joint or serial.")] = "parallel",
    data_dir: DataDir = None,
    plugin: Plugins = None,
    assignments: Assignments = None,
) -> None:
    """Draw when each task of a configuration trains, and when memory starts."""
    load_plugin_flags(plugin)
    given = settings_from(
        benchmark=benchmark, config=config, fit=fit, paradigm=paradigm, protocol=protocol, data_dir=data_dir
    )
    settings = resolve_settings(given, parsed_assignments(assignments))
    with naming_flags({TimelineError: "--fit"}):
        problem = make_problem(settings, torch.device("cpu"))
    console = plain_console()
    names = [
        f"{name} ({task.outputs} classes)" if task.kind == "classification" else f"{name} ({task.kind})"
        for name, task in problem.tasks.items()
    ]
    width = max(20, min(100, console.width - 24))
    console.print(draw_timeline(problem.configuration.timeline, width, names=names))
