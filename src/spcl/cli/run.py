"""``spcl run``."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from spcl.cli.consoles import plain_console, print_next
from spcl.cli.flags import METHOD, SCENARIO, RunFlags, expand_flags, naming_flags, settings_from
from spcl.distributed import join_world, leave_world
from spcl.errors import SpclError, TimelineError
from spcl.runs import (
    DeviceError,
    FolderError,
    InterruptedRunError,
    LiveView,
    PlainView,
    RunFolder,
    RunSettings,
    UnfinishedRunError,
    View,
    execute,
    resolve_settings,
    resume_settings,
)

__all__ = ["run"]

FLAGS = {
    UnfinishedRunError: "--resume, --out",
    FolderError: "--out",
    DeviceError: "--device cpu",
    TimelineError: "--fit",
}


@expand_flags
def run(
    out: Annotated[Path, typer.Option(help="Folder for everything the run writes.")],
    flags: RunFlags,
    method: Annotated[str | None, METHOD] = None,
    scenario: Annotated[str | None, SCENARIO] = None,
    config: Annotated[int | None, typer.Option(help="Which label set and timeline, 0 to 8.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, data order and memory.")] = None,
    paradigm: Annotated[str | None, typer.Option(help="parallel, joint (MTL) or serial (SCL).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run exactly.")] = False,
    split: Annotated[
        str | None,
        typer.Option(
            help="Under torchrun, what its processes split: tasks (the default), data (batches), or both, e.g. 2x4: 2 "
            "groups with different tasks, in each 4 processes with different samples."
        ),
    ] = None,
) -> None:
    """Train and evaluate one method on one configuration of a benchmark.

    Under torchrun, all of its processes share the work of every step: torchrun --nproc-per-node 4 -m spcl run …
    """
    world = join_world(split or "tasks")
    if split is not None and world is None:
        raise SpclError(f"--split {split} is for several processes; start them by torchrun, or leave it out")
    file, given, assigned = flags.layers()
    given |= settings_from(scenario=scenario, config=config, seed=seed, paradigm=paradigm, method=method)
    layers = [file, given, assigned]
    chosen = _resumed(out, layers) if resume else resolve_settings(*layers)
    console = plain_console() if world is None or world.is_first else Console(quiet=True)
    view: View = LiveView(console) if console.is_terminal else PlainView(console)
    was_complete = RunFolder(out).read_result() is not None
    with naming_flags(FLAGS):
        try:
            result = execute(chosen, out, resume=resume, view=view, distributed=world)
        except InterruptedRunError as stopped:
            command = shlex.join(["spcl", "run", "--out", str(out), "--resume"])
            console.print(f"{stopped}; continue with: {command}", soft_wrap=True)
            raise typer.Exit(130) from None
    leave_world()
    if was_complete:
        console.print(f"this run was complete already: {result.summary}", soft_wrap=True)
    console.print(Text.assemble(("settings, metrics and result are in", "dim"), f" {out}"), soft_wrap=True)
    options = ("--task", next(iter(result.tasks))) if result.scenario == "task" else ()
    print_next(console, out, options if RunFolder(out).model.exists() else None)


def _resumed(out: Path, layers: Sequence[Mapping[str, Any]]) -> RunSettings:
    if found := sorted({name for layer in layers for name in layer}):
        raise SpclError(
            f"--resume continues the run in {out} with its own settings; give no others (found {', '.join(found)})"
        )
    with naming_flags({FolderError: "without --resume"}):
        return resume_settings(out)
