"""``spcl evaluate``."""

from rich.table import Table

from spcl.cli.consoles import plain_console
from spcl.cli.flags import DataDir, Plugins
from spcl.cli.model_flags import DeviceName, RunPath, naming_model_flags
from spcl.runs import read_run
from spcl.runs.reevaluation import evaluate_run

__all__ = ["evaluate"]


def evaluate(run: RunPath, device: DeviceName = "auto", data_dir: DataDir = None, plugin: Plugins = None) -> None:
    """Evaluate the model of a complete run on its test data, beside what the run recorded."""
    with naming_model_flags(run):
        trained = read_run(run, plugin or ())
        outcome = evaluate_run(trained, device, None if data_dir is None else str(data_dir.resolve()))
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("metric")
    for name in ("recorded %", "now %"):
        table.add_column(name, justify="right")
    for task, recorded in outcome.recorded.items():
        table.add_row(task, outcome.metrics[task], f"{recorded:.2f}", f"{outcome.now[task]:.2f}")
    table.add_section()
    table.add_row("A", "", *(f"{average:.2f}" for average in outcome.averages))
    plain_console().print(table)
