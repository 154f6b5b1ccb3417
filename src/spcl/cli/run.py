"""``spcl run``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from spcl.cli.consoles import plain_console
from spcl.cli.flags import DataDir, Device, Fit, Preset, Protocol, settings_from
from spcl.errors import SpclError
from spcl.runs.record import RunFolder
from spcl.runs.run import InterruptedRunError, execute, resume_settings
from spcl.runs.settings import RunSettings, load_settings_file, parse_assignments, resolve_settings
from spcl.runs.trackers import TensorBoardTracker, Tracker, WandbTracker
from spcl.runs.view import LiveView, PlainView, View

__all__ = ["run"]


def run(
    out: Annotated[Path, typer.Option(help="Folder for everything the run writes.")],
    benchmark: Annotated[
        str | None, typer.Option(help="ps-glyphs, ps-emnist, …, or a folder of pictures or an .npz of your own.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="See 'spcl methods'.")] = None,
    scenario: Annotated[str | None, typer.Option(help="task or class (incremental).")] = None,
    config: Annotated[int | None, typer.Option(help="Which label set and timeline, 0 to 8.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, data order and memory.")] = None,
    preset: Preset = None,
    protocol: Protocol = None,
    fit: Fit = False,
    paradigm: Annotated[str | None, typer.Option(help="parallel, joint (MTL) or serial (SCL).")] = None,
    device: Device = None,
    data_dir: DataDir = None,
    settings: Annotated[Path | None, typer.Option(help="A YAML or JSON file of settings.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, e.g. method.sigma=50; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run exactly.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")] = False,
    wandb: Annotated[str | None, typer.Option(help="Report to this Weights & Biases project.")] = None,
) -> None:
    """Train and evaluate one method on one configuration of a benchmark."""
    given = settings_from(
        benchmark=benchmark,
        scenario=scenario,
        config=config,
        seed=seed,
        preset=preset,
        protocol=protocol,
        fit=fit or None,
        paradigm=paradigm,
        device=device,
        data_dir=data_dir,
        method={"name": method} if method else None,
    )
    chosen = _settings(out, given, settings, parse_assignments(assignments or []), resume)
    console = plain_console()
    view: View = LiveView(console) if console.is_terminal else PlainView(console)
    trackers: list[Tracker] = []
    if tensorboard:
        trackers.append(TensorBoardTracker(out / "tensorboard"))
    if wandb:
        trackers.append(WandbTracker(wandb, chosen.model_dump(mode="json")))
    was_complete = RunFolder(out).read_result() is not None
    try:
        result = execute(chosen, out, resume=resume, view=view, trackers=tuple(trackers))
    except InterruptedRunError as stopped:
        console.print(str(stopped), soft_wrap=True)
        raise typer.Exit(130) from None
    if was_complete:
        numbers = f"accuracy {result['accuracy']:.2f} %, forgetting {result['forgetting']:+.2f} %"
        console.print(f"this run was complete already: {numbers}", soft_wrap=True)
    console.print(Text.assemble(("settings, metrics and result are in", "dim"), f" {out}"), soft_wrap=True)


def _settings(
    out: Path, given: dict[str, Any], file: Path | None, assigned: dict[str, Any], resume: bool
) -> RunSettings:
    layers = [load_settings_file(file)] if file else []
    if not resume:
        return resolve_settings(*layers, given, assigned)
    if given or assigned or layers:
        raise SpclError(
            f"--resume continues the run in {out} with its own settings; give no others "
            f"(found {', '.join(sorted(given | assigned | (layers[0] if layers else {})))})"
        )
    return resume_settings(out)
