"""``spcl run`` and ``spcl serve``: train one learner, on a benchmark or on live sources."""

import shlex
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from spcl._util.text import PlainConsole
from spcl.cli import INTERRUPTED
from spcl.cli.shared import (
    SPLIT,
    Method,
    RunFlags,
    Scenario,
    expand_flags,
    naming_flags,
    print_next,
    settings_from,
)
from spcl.errors import SpclError, TimelineError

if TYPE_CHECKING:
    from spcl.runs import RunSettings


@expand_flags
def run(
    out: Annotated[Path, typer.Option(help="Folder for everything the run writes.")],
    flags: RunFlags,
    method: Method = None,
    scenario: Scenario = None,
    config: Annotated[int | None, typer.Option(help="Which label set and timeline, 0 to 8.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, data order and memory.")] = None,
    paradigm: Annotated[str | None, typer.Option(help="parallel, joint (MTL) or serial (SCL).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run exactly.")] = False,
    split: Annotated[str | None, typer.Option(help=f"Under torchrun, what its processes split: {SPLIT}")] = None,
) -> None:
    """Train and evaluate one method on one configuration of a benchmark.

    Under torchrun, all of its processes share the work of every step: torchrun --nproc-per-node 4 -m spcl run …
    """
    from spcl.distributed import join_world, leave_world
    from spcl.runs import (
        DeviceError,
        FolderError,
        InterruptedRunError,
        LiveView,
        PlainView,
        RunFolder,
        UnfinishedRunError,
        execute,
        resolve_settings,
    )

    world = join_world(split or "tasks")
    if split is not None and world is None:
        raise SpclError(f"--split {split} is for several processes; start them by torchrun, or leave it out")
    file, given, assigned = flags.layers()
    given |= settings_from(scenario=scenario, config=config, seed=seed, paradigm=paradigm, method=method)
    layers = [file, given, assigned]
    chosen = _resumed(out, layers) if resume else resolve_settings(*layers)
    console = PlainConsole() if world is None or world.is_first else Console(quiet=True)
    view = LiveView(console) if console.is_terminal else PlainView(console)
    kinds = {
        UnfinishedRunError: "--resume, --out",
        FolderError: "--out",
        DeviceError: "--device cpu",
        TimelineError: "--fit",
    }
    with naming_flags(kinds):
        try:
            result = execute(chosen, out, resume=resume, view=view, distributed=world)
        except InterruptedRunError as stopped:
            command = shlex.join(["spcl", "run", "--out", str(out), "--resume"])
            console.print(f"{stopped}; continue with: {command}", soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
    leave_world()
    if not view.has_begun:
        console.print(f"this run was complete already: {result.summary}", soft_wrap=True)
    console.print(Text.assemble(("settings, metrics and result are in", "dim"), f" {out}"), soft_wrap=True)
    source = next(iter(result.tasks))
    options = ("--task", result.task_of.get(source, source)) if result.scenario == "task" else ()
    print_next(console, out, options if RunFolder(out).model.exists() else None)


def _resumed(out: Path, layers: Sequence[Mapping[str, Any]]) -> "RunSettings":
    from spcl.runs import FolderError, resume_settings
    from spcl.runs.presets import MOVABLE
    from spcl.runs.settings import merge_settings

    given = merge_settings(*layers)
    if found := sorted(given.keys() - {*MOVABLE}):
        raise SpclError(
            f"--resume continues the run in {out} with its own settings; give no others (found {', '.join(found)})"
        )
    with naming_flags({FolderError: "without --resume"}):
        return resume_settings(out, moved=given)


def serve(
    config: Annotated[Path, typer.Argument(help="The settings of the service, a YAML file.")],
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another instance uses the same state, then take over from it.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Train on live sources without end, answer predictions over HTTP, and show it all on a page."""
    from spcl.serve.log import logging_to_stderr
    from spcl.serve.server import Server
    from spcl.serve.settings import load_serve_settings

    console = PlainConsole()

    def ready(address: str) -> None:
        console.print(f"the service is at {address}", soft_wrap=True)
        if show:
            webbrowser.open(address)

    with logging_to_stderr():
        Server(load_serve_settings(config), standby=standby).run(ready)
    console.print("saved and stopped")
