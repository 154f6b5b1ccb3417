"""``spcl protocol``."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from spcl.cli.consoles import plain_console
from spcl.cli.flags import Assignments, DataDir, Plugins, load_plugin_flags, parsed_assignments, settings_from
from spcl.data import Protocol, convert_protocol
from spcl.errors import SpclError
from spcl.runs import resolve_settings
from spcl.runs.problem import load_samples, make_protocol

__all__ = ["protocol"]


def protocol(
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    benchmark: Annotated[str, typer.Option(help="A benchmark, a plug-in's data set or a path to data.")] = "ps-glyphs",
    protocol_seed: Annotated[int | None, typer.Option(help="Of the label sets and timelines that are drawn.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Convert this YAML file of the paper's authors; nothing is drawn.")
    ] = None,
    data_dir: DataDir = None,
    plugin: Plugins = None,
    assignments: Assignments = None,
) -> None:
    """Write a protocol file: label sets and timelines, drawn for a benchmark or converted from YAML."""
    load_plugin_flags(plugin)
    given = settings_from(benchmark=benchmark, protocol_seed=protocol_seed, data_dir=data_dir)
    settings = resolve_settings(given, parsed_assignments(assignments))
    if source is None:
        made = make_protocol(settings, load_samples(settings))
    elif protocol_seed is None:
        made = convert_protocol(source, Path(benchmark).stem, settings.batch_size)
    else:
        raise SpclError("--protocol-seed is for a protocol that is drawn; give either it or --from")
    made.save(out)
    console = plain_console()
    console.print(f"{_describe(made)} are in {out}", soft_wrap=True)
    plugins = [word for name in plugin or () for word in ("--plugin", name)]
    command = ["spcl", "timeline", *plugins, "--benchmark", benchmark, "--protocol", str(out)]
    console.print(f"next: {shlex.join(command)}", soft_wrap=True)


def _describe(made: Protocol) -> str:
    tasks, timelines = len(made.label_sets[0]), len(made.timelines[0])
    sets = f"{len(made.label_sets)} label sets of {tasks} tasks, {timelines} timelines each"
    return f"{len(made)} configurations ({sets}) at batch size {made.batch_size}"
