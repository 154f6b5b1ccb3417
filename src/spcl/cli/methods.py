"""``spcl methods``."""

from typing import Annotated, Literal

import typer
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spcl.cli.consoles import plain_console
from spcl.cli.flags import Plugins, load_plugin_flags
from spcl.methods import METHODS, Method, aggregators, cost_of
from spcl.methods.reference_page import reference_page

__all__ = ["methods"]

NOTE = (
    "Gradients held: gradients of the shared parameters held at once, for T tasks and memory; with stability: the same "
    "while stability is measured, the default of runs. Extra forwards: forward passes over a batch of memory."
)


def methods(
    plugin: Plugins = None,
    form: Annotated[
        Literal["terminal", "markdown"],
        typer.Option("--format", help="terminal, or markdown: a page with formulas and settings."),
    ] = "terminal",
) -> None:
    """List the methods: what they do, where they come from, and what a step costs."""
    load_plugin_flags(plugin)
    if form == "markdown":
        typer.echo(reference_page(), nl=False)
        return
    console = plain_console()
    console.print(_costs())
    console.print()
    for method in METHODS.values():
        console.print(_description(method))
    console.print(f"\n{NOTE}")
    names = ", ".join(sorted(aggregators()))
    console.print(f"\nEvery aggregator of TorchJD is a method, too: torchjd:NAME with {names}.")


def _costs() -> Table:
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


def _description(method: type[Method]) -> Group:
    text = Text.assemble(f"{method.summary}\n", (method.reference, "dim"))
    return Group(Text(method.name), Padding(text, (0, 0, 0, 4)))
