"""``spcl methods``."""

from rich.table import Table
from rich.text import Text

from spcl.cli.consoles import plain_console
from spcl.methods import METHODS, aggregators, cost_of

__all__ = ["methods"]


def methods() -> None:
    """List the methods: what they do, where they come from, and what a step costs."""
    console = plain_console()
    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("family", no_wrap=True)
    table.add_column("what it does, and where it comes from", min_width=28)
    table.add_column("columns", no_wrap=True, justify="right")
    table.add_column("extra\nforwards", justify="right")
    table.add_column("memory")
    for name, method in METHODS.items():
        cost = cost_of(method())
        text = Text.assemble(f"{method.summary}\n", (method.reference, "dim"))
        table.add_row(name, method.family, text, cost.columns, str(cost.forwards), cost.memory)
    console.print(table)
    console.print(
        "\nColumns: gradients of the shared parameters held at once, for T tasks and memory. "
        "Extra forwards: over a batch of memory.\n"
        f"Every aggregator of TorchJD is a method, too: torchjd:NAME with {', '.join(sorted(aggregators()))}."
    )
