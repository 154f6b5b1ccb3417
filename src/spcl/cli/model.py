"""``spcl predict``, ``spcl evaluate`` and ``spcl export``: the model of a complete run, or of a service."""

import csv
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from spcl._util.text import PlainConsole, csv_cell, printable
from spcl.cli.shared import DEVICE, WIDE, DataDir, Plugins, naming_flags
from spcl.errors import DataError, TaskError

if TYPE_CHECKING:
    from spcl.runs.trained import Row, TrainedRun

TEXTS = ("file", "task", "class")
"""The columns of a table of predictions that hold text."""
UNSAID = {"index": None, "rank": 1}
"""A column of the table is left out if it holds only this value, or only empty cells."""

RunPath = Annotated[Path, typer.Argument(help="The folder of a complete run.")]
ModelPath = Annotated[Path, typer.Argument(help="The folder of a complete run, or the state of a service.")]
TaskName = Annotated[
    str | None, typer.Option("--task", help="The samples' task; needed if the run is task-incremental.")
]
SourceName = Annotated[
    str | None, typer.Option("--source", help="Whose samples they are, of a run whose sources share tasks.")
]
Device = Annotated[str, DEVICE]


def predict(
    run: ModelPath,
    files: Annotated[list[Path], typer.Argument(help="Pictures, folders of pictures, .npy, or .npz with an array x.")],
    task: TaskName = None,
    source: SourceName = None,
    top: Annotated[int, typer.Option(min=1, help="How many classes to give for a sample.")] = 1,
    form: Annotated[
        Literal["table", "csv", "json"], typer.Option("--format", help="table, csv, or json (an object a line).")
    ] = "table",
    device: Device = "auto",
    plugin: Plugins = None,
) -> None:
    """Predict the classes of pictures or arrays with the model of a complete run or a service."""
    from spcl.runs.trained import asked_task, check_task, predict_files

    errors: list[DataError] = []

    def report(error: DataError) -> None:
        errors.append(error)
        PlainConsole(stderr=True).print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)

    with _naming_flags(run):
        trained = _read_model(run, plugin or ())
        check_task(trained, asked_task(trained, task, source))
        learner = trained.learner(device)
        rows = predict_files(trained, learner, files, task=task, source=source, top=top, on_error=report)
        {"table": _print_table, "csv": _print_csv, "json": _print_json}[form](rows)
    if errors:
        raise typer.Exit(1)


def evaluate(
    run: RunPath,
    benchmark: Annotated[
        str | None, typer.Option(help="The data, by name or path, if it is not where the run found it.")
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    plugin: Plugins = None,
) -> None:
    """Evaluate the model of a complete run on its test data, beside what the run recorded."""
    from spcl.cli.shared import settings_from
    from spcl.runs import evaluate_run, read_run

    with _naming_flags(run):
        trained = read_run(run, plugin or ())
        outcome = evaluate_run(trained, device, **settings_from(data_dir=data_dir, benchmark=benchmark))
    table = Table(box=None, pad_edge=False)
    table.add_column("source" if trained.result is not None and trained.result.task_of else "task")
    table.add_column("metric")
    for name in ("recorded %", "now %"):
        table.add_column(name, justify="right")
    for task, recorded in outcome.recorded.items():
        shown = f"{task} (unseen)" if task in outcome.unseen else task
        table.add_row(shown, outcome.metrics[task], f"{recorded:.2f}", f"{outcome.now[task]:.2f}")
    table.add_section()
    table.add_row("A", "", *(f"{average:.2f}" for average in outcome.averages))
    PlainConsole().print(table)


def bundle(run: RunPath, out: Annotated[Path, typer.Option(help="The archive to write, FILE.zip.")]) -> None:
    """Write a complete run to one .zip archive to send: settings, plug-ins, result and model."""
    from spcl.runs import FolderError, bundle_run

    with _naming_flags(run), naming_flags({FolderError: "--out"} if out.exists() else {}):
        names = bundle_run(run, out)
    console = PlainConsole()
    console.print(f"wrote {out}: {', '.join(names)}", soft_wrap=True)
    console.print(f"unpack it with: {shlex.join(['spcl', 'unbundle', str(out), '--out', 'FOLDER'])}", soft_wrap=True)


def unbundle(
    archive: Annotated[Path, typer.Argument(help="An archive of 'spcl bundle'.")],
    out: Annotated[Path, typer.Option(help="The folder to unpack to, which must not exist.")],
) -> None:
    """Unpack an archive of 'spcl bundle' to a new folder; nothing in it is run."""
    from spcl.runs import FolderError, unpack_bundle

    with naming_flags({FolderError: "--out"}):
        folder = unpack_bundle(archive, out)
    plugins = [str(path) for path in sorted(folder.path.glob("plugins/*.py"))]
    options = [option for path in plugins for option in ("--plugin", path)]
    console = PlainConsole()
    console.print(f"unpacked to {out}", soft_wrap=True)
    if plugins:
        console.print(f"read its plug-ins before you name them: {', '.join(plugins)}", soft_wrap=True)
    console.print(f"next: {shlex.join(['spcl', 'evaluate', str(out), *options])}", soft_wrap=True)


def export(
    run: ModelPath,
    out: Annotated[
        Path, typer.Option(help="FILE.pt2 (PyTorch) or FILE.onnx; FILE….json beside it describes inputs and classes.")
    ],
    task: TaskName = None,
    source: SourceName = None,
    plugin: Plugins = None,
) -> None:
    """Export the model of a complete run or a service as a program for PyTorch alone (.pt2), or as ONNX."""
    from spcl.runs.export import export_run

    with _naming_flags(run):
        export_run(_read_model(run, plugin or ()), out, task, source)
    console = PlainConsole()
    console.print(f"wrote {out} and {out}.json", soft_wrap=True)
    if out.suffix == ".pt2":
        console.print(f"load it with: torch.export.load({str(out)!r}).module()", soft_wrap=True)


def _read_model(path: Path, plugins: Sequence[str]) -> "TrainedRun":
    """Read the model of a run or of a service."""
    from spcl.runs import read_run
    from spcl.serve.state import holds_model, read_model

    return read_model(path, plugins) if holds_model(path) else read_run(path, plugins)


@contextmanager
def _naming_flags(run: Path) -> Iterator[None]:
    """Append the flag, or the command, that helps to errors of loading a run and choosing a task."""
    from spcl.plugins import PluginError
    from spcl.runs import DeviceError, UnfinishedRunError

    resume = shlex.join(["spcl", "run", "--out", str(run), "--resume"])
    flags = {UnfinishedRunError: resume, DeviceError: "--device cpu", TaskError: "--task", PluginError: "--plugin"}
    with naming_flags(flags):
        yield


def _print_table(rows: "Iterable[Row]") -> None:
    from spcl.runs.settings import flat_settings

    shown = list(map(flat_settings, rows))
    if not shown:
        return
    columns = [name for name in shown[0] if not all(row[name] == UNSAID.get(name, "") for row in shown)]
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in TEXTS else "right", overflow="fold")
    for row in shown:
        table.add_row(*(_cell(row[name]) for name in columns))
    console = PlainConsole()
    (console if console.is_terminal else PlainConsole(width=WIDE)).print(table)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def _print_csv(rows: "Iterable[Row]") -> None:
    from spcl.runs.settings import flat_settings

    writer = csv.writer(sys.stdout, lineterminator="\n")
    for number, row in enumerate(map(flat_settings, rows)):
        if number == 0:
            writer.writerow(map(csv_cell, row))
        writer.writerow(map(csv_cell, row.values()))


def _print_json(rows: "Iterable[Row]") -> None:
    for row in rows:
        typer.echo(printable(json.dumps(row, ensure_ascii=False)))
