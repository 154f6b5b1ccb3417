"""``spcl methods``, ``spcl settings`` and ``spcl data``: what there is to choose from."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spcl._util.text import PlainConsole
from spcl.cli.shared import DataDir, Plugins, load_plugin_flags

if TYPE_CHECKING:
    from spcl.data import DatasetStatus
    from spcl.methods import Method
    from spcl.runs.settings import Setting

COSTS = (
    "Gradients held: gradients of the shared parameters held at once, for T tasks and memory; with stability: the same "
    "while stability is measured, the default of runs. Extra forwards: forward passes over a batch of memory."
)

data = typer.Typer(no_args_is_help=True, help="List, download and check data sets.")


def methods(
    plugin: Plugins = None,
    form: Annotated[
        Literal["terminal", "markdown"],
        typer.Option("--format", help="terminal, or markdown: a page with formulas and settings."),
    ] = "terminal",
) -> None:
    """List the methods: what they do, where they come from, and what a step costs."""
    from spcl.methods import METHODS, aggregators
    from spcl.methods.reference import reference_page

    load_plugin_flags(plugin)
    if form == "markdown":
        typer.echo(reference_page(), nl=False)
        return
    console = PlainConsole()
    console.print(_costs())
    console.print()
    for method in METHODS.values():
        console.print(_description(method))
    console.print(f"\n{COSTS}")
    names = ", ".join(sorted(aggregators()))
    console.print(f"\nEvery aggregator of TorchJD is a method, too: torchjd:NAME with {names}.")


def _costs() -> Table:
    from spcl.methods import METHODS, cost_of

    table = Table(box=None, pad_edge=False)
    table.add_column("\nmethod", no_wrap=True)
    table.add_column("\nfamily", no_wrap=True)
    table.add_column("gradients\nheld", no_wrap=True, justify="right")
    table.add_column("with\nstability", no_wrap=True, justify="right")
    table.add_column("extra\nforwards", no_wrap=True, justify="right")
    table.add_column("\nmemory stores", no_wrap=True)
    for name, method in METHODS.items():
        cost = cost_of(method())
        held = cost.gradients, cost.gradients_with_stability
        table.add_row(name, method.family, *held, str(cost.forwards), cost.memory)
    return table


def _description(method: "type[Method]") -> Group:
    text = Text.assemble(f"{method.summary}\n", (method.reference, "dim"))
    return Group(Text(method.name), Padding(text, (0, 0, 0, 4)))


def settings(
    method: Annotated[str | None, typer.Argument(help="Show the settings of this method instead.")] = None,
    plugin: Plugins = None,
    form: Annotated[
        Literal["terminal", "markdown"], typer.Option("--format", help="terminal, or markdown: a page of all settings.")
    ] = "terminal",
) -> None:
    """List every setting of a run, or of a method, with its meaning, values and default."""
    from spcl.runs.settings import method_settings, named_settings, run_settings, settings_page

    load_plugin_flags(plugin)
    if form == "markdown":
        typer.echo(settings_page(), nl=False)
        return
    console = PlainConsole()
    if method is not None:
        console.print(_settings(method_settings(method)))
        return
    for title, listed in run_settings().items():
        console.print(Text(f"{title}\n", "bold"))
        console.print(_settings(listed), "")
    for setting, things in named_settings().items():
        console.print(Text(f"Names for {setting}\n", "bold"))
        console.print(_names(things), "")


def _settings(listed: "list[Setting]") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning and values", ratio=1)
    for each in listed:
        table.add_row(each.name, each.default, Text.assemble(each.meaning, (f" ({each.values})", "dim")))
    return table


def _names(things: "Sequence[tuple[str, str, list[Setting]]]") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for name, summary, options in things:
        shown = f" Options: {', '.join(map(str, options))}." if options else ""
        table.add_row(name, Text.assemble(summary.replace("``", ""), (shown, "dim")))
    return table


@data.command("list")
def list_command(data_dir: DataDir = None) -> None:
    """List the data sets: which are available, where, and whether they are complete."""
    from spcl.data import list_data

    _print_statuses(list_data(data_dir))


@data.command()
def get(
    names: Annotated[list[str], typer.Argument(help="Data sets; see 'spcl data list'.")], data_dir: DataDir = None
) -> None:
    """Download data sets from their publishers; an interrupted download continues where it stopped."""
    from spcl.data import get_data
    from spcl.data.catalogue import SOURCE_SETS, addresses

    for name in names:
        if name in SOURCE_SETS:
            typer.echo(f"{name}: {', '.join(addresses(name))}\n{SOURCE_SETS[name].terms}")
        typer.echo(f"{name}: {get_data(name, data_dir)}")


@data.command()
def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets; see 'spcl data list'. All that are there, unless named.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Compare archives with the publishers' checksums and decode everything afresh."""
    from spcl.data import DATA_NAMES, check_data

    statuses = check_data(names or DATA_NAMES, data_dir)
    _print_statuses(statuses)
    if any(status.problem for status in statuses if names or status.path):
        raise typer.Exit(1)


def _print_statuses(statuses: "Iterable[DatasetStatus]") -> None:
    """Print each data set with its path and its problem below it; paths are never broken."""
    from spcl.data import DATA_NAMES

    width = 2 + max(map(len, DATA_NAMES))
    indent = " " * width
    console = PlainConsole()
    for status in statuses:
        kind = f"samples of {status.sources} sources" if status.sources else "images"
        classes = f", {status.classes} classes" if status.classes else ""
        counts = f"{status.train:,} + {status.test:,} {kind}{classes}" if status.train else ""
        console.print(f"{status.name:{width}}{', '.join(filter(None, [_state(status), counts]))}", soft_wrap=True)
        if status.path:
            console.print(f"{indent}{status.path}", soft_wrap=True)
        if status.problem:
            wrapper = textwrap.TextWrapper(
                console.width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            console.print(wrapper.fill(status.problem), soft_wrap=True)


def _state(status: "DatasetStatus") -> str:
    if status.path is None:
        return "not here"
    if status.problem:
        return "problem"
    state = "complete" if status.complete else "part"
    return f"{state}, original" if status.original else state
