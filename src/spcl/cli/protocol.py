"""``spcl protocol`` and ``spcl timeline``: when each task trains."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spcl._util.text import PlainConsole
from spcl.cli.shared import (
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
from spcl.errors import SpclError, TimelineError

if TYPE_CHECKING:
    from spcl.data.protocol import Protocol as Drawn

FEWEST_STEPS = 20
"""The fewest characters of a timeline's bar; names of tasks that leave less are cut."""

Benchmark = Annotated[str, typer.Option(help="A benchmark, a plug-in's data set or a path to data.")]


def protocol(
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    benchmark: Benchmark = "ps-glyphs",
    protocol_seed: Annotated[int | None, typer.Option(help="Of the label sets and timelines that are drawn.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Convert this published file; nothing is drawn.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="Of that file: paper (the YAML of its authors), or a plug-in's.")
    ] = "paper",
    data_dir: DataDir = None,
    plugin: Plugins = None,
    assignments: Assignments = None,
) -> None:
    """Write a protocol file: label sets and timelines, drawn for a benchmark or converted from YAML."""
    from spcl.data import convert_protocol
    from spcl.runs import resolve_settings
    from spcl.runs.build import load_samples, make_protocol

    load_plugin_flags(plugin)
    given = settings_from(benchmark=benchmark, protocol_seed=protocol_seed, data_dir=data_dir)
    settings = resolve_settings(given, parsed_assignments(assignments))
    if source is None:
        made = make_protocol(settings, load_samples(settings))
    elif protocol_seed is None:
        made = convert_protocol(source, Path(benchmark).stem, settings.batch_size, form)
    else:
        raise SpclError("--protocol-seed is for a protocol that is drawn; give either it or --from")
    made.save(out)
    console = PlainConsole()
    console.print(f"{_describe(made)} are in {out}", soft_wrap=True)
    plugins = [word for name in plugin or () for word in ("--plugin", name)]
    command = ["spcl", "timeline", *plugins, "--benchmark", benchmark, "--protocol", str(out)]
    console.print(f"next: {shlex.join(command)}", soft_wrap=True)


def _describe(made: "Drawn") -> str:
    tasks, timelines = len(made.label_sets[0]), len(made.timelines[0])
    sets = f"{len(made.label_sets)} label sets of {tasks} tasks, {timelines} timelines each"
    return f"{len(made)} configurations ({sets}) at batch size {made.batch_size}"


def timeline(
    benchmark: Benchmark = "ps-glyphs",
    config: Annotated[int, typer.Option(help="Which label set and timeline.")] = 0,
    protocol: Protocol = None,
    fit: Fit = False,
    paradigm: Annotated[str, typer.Option(help="parallel, joint or serial.")] = "parallel",
    data_dir: DataDir = None,
    plugin: Plugins = None,
    assignments: Assignments = None,
) -> None:
    """Draw when each task of a configuration trains, and when memory starts."""
    import torch

    from spcl.runs import resolve_settings
    from spcl.runs.build import make_problem
    from spcl.runs.view import draw_timeline

    load_plugin_flags(plugin)
    given = settings_from(
        benchmark=benchmark, config=config, fit=fit, paradigm=paradigm, protocol=protocol, data_dir=data_dir
    )
    settings = resolve_settings(given, parsed_assignments(assignments))
    with naming_flags({TimelineError: "--fit"}):
        problem = make_problem(settings, torch.device("cpu"))
    console = PlainConsole()
    names = [
        f"{name} ({task.classes} classes)" if task.kind == "classification" else f"{name} ({task.kind})"
        for name, task in ((name, problem.asked[name]) for name in problem.stream.names)
    ]
    longest = console.width - FEWEST_STEPS - 1
    names = [name if len(name) <= longest else f"{name[: longest - 1]}…" for name in names]
    width = min(100, console.width - max(map(len, names)) - 1)
    console.print(draw_timeline(problem.configuration.timeline, width, names=names))
