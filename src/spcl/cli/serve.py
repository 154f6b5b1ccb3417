"""``spcl serve``."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from spcl.cli.consoles import plain_console
from spcl.serve.server import Server
from spcl.serve.settings import load_serve_settings

__all__ = ["serve"]


def serve(
    config: Annotated[Path, typer.Argument(help="The settings of the service, a YAML file.")],
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another instance uses the same state, then take over from it.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Train on live sources without end, answer predictions over HTTP, and show it all on a page."""
    console = plain_console()

    def ready(address: str) -> None:
        console.print(f"the service is at {address}", soft_wrap=True)
        if show:
            webbrowser.open(address)

    Server(load_serve_settings(config), standby=standby).run(ready)
    console.print("saved and stopped")
