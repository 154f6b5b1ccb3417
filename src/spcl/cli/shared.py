"""What several commands share: the console, flags, how flags become settings, and flags in error messages."""

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, TypeVar, get_type_hints

import typer
from rich.console import Console

from spcl.errors import SpclError

if TYPE_CHECKING:
    from spcl.plugins import Plugin

T = TypeVar("T")

WIDE = 400  # the width of lines where the output is no terminal


def print_next(console: Console, out: Path, model: Sequence[str] | None = None) -> None:
    """Print the commands that show the runs in a folder, or that also use the model of a single run, with its options.

    >>> print_next(Console(), Path("my runs"))
    next: spcl table 'my runs'
          spcl report 'my runs'
    """
    uses: list[tuple[str, ...]] = [("table",), ("report",)]
    if model is not None:
        uses += [("predict", "FILE", *model), ("export", *model, "--out", "model.pt2")]
    commands = [shlex.join(["spcl", command, str(out), *more]) for command, *more in uses]
    console.print("next: " + "\n      ".join(commands), soft_wrap=True)


# -- flags

Method = Annotated[str | None, typer.Option(help="See 'spcl methods'.")]
Scenario = Annotated[str | None, typer.Option(help="task, class or domain (incremental).")]
Configs = Annotated[str | None, typer.Option(help="Label sets and timelines, e.g. 0-8 or 0,3,5.")]
Seeds = Annotated[str | None, typer.Option(help="Seeds, e.g. 0-2.")]
Protocol = Annotated[Path | None, typer.Option(help="A file of label sets and timelines; see 'spcl protocol'.")]
Fit = Annotated[bool, typer.Option("--fit", help="Rescale a timeline that does not fit the data.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the publishers' files (otherwise $SPCL_DATA or the cache).")
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="A Python file or module that adds methods, backbones, …; may be repeated."),
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, e.g. method.sigma=50 or overlap=0.5; may be repeated.")
]
DEVICE = typer.Option(help="auto, cpu, cuda, ….")

SPLIT = (
    "tasks (the default), data (batches), or both, e.g. 2x4: 2 groups with different tasks, in each 4 processes with "
    "different samples."
)


@dataclass(frozen=True)
class RunFlags:
    """The flags of ``run``, ``grid`` and ``tune`` that are settings of all their runs."""

    benchmark: Annotated[
        str | None,
        typer.Option(help="ps-glyphs (the default), ps-emnist, …, or a folder of pictures or an .npz of your own."),
    ] = None
    preset: Annotated[
        str | None, typer.Option(help="default, plus (more replay), paper or released (as published code).")
    ] = None
    protocol: Protocol = None
    fit: Fit = False
    device: Annotated[str | None, DEVICE] = None
    data_dir: DataDir = None
    keep_model: Annotated[
        bool | None,
        typer.Option("--keep-model/--no-model", help="Keep the trained model; 'tune' does not unless told to."),
    ] = None
    settings: Annotated[Path | None, typer.Option(help="A YAML or JSON file of settings.")] = None
    plugin: Plugins = None
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")] = False
    wandb: Annotated[str | None, typer.Option(help="Report to this Weights & Biases project.")] = None
    assignments: Assignments = None

    def layers(self) -> list[dict[str, Any]]:
        """Return the settings of the file, of the flags and of ``--set``, in the order of precedence; load plug-ins."""
        from spcl.runs.settings import load_settings_file, merge_settings

        file = load_settings_file(self.settings) if self.settings else {}
        plugins = merge_settings(file, {"plugins": self.plugin or []})["plugins"]
        loaded = [plugin.model_dump() for plugin in load_plugin_flags(plugins)]
        file = {name: value for name, value in file.items() if name != "plugins"}
        return [file, self._given() | ({"plugins": loaded} if loaded else {}), parsed_assignments(self.assignments)]

    def planned(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the layers, and apart from them what a file of settings says of what is planned run by run."""
        from spcl.runs.settings import VARIED, merge_settings

        file, *others = self.layers()
        method = merge_settings(file).get("method", {})
        if not isinstance(method, Mapping):
            raise SpclError(f"settings: method is {method!r}; give its name, or its name and settings")
        planned: dict[str, str] = {name: str(file[name]) for name in VARIED if name in file}
        planned |= {"method": str(method["name"])} if "name" in method else {}
        options = {name: value for name, value in method.items() if name != "name"}
        kept = {name: value for name, value in file.items() if name not in ("method", *planned)}
        return [kept | ({"method": options} if options else {}), *others], planned

    def _given(self) -> dict[str, Any]:
        """Return the flags that were given, apart from files of settings, plug-ins and ``--set``, as settings."""
        from spcl.runs import RunSettings

        flags = {each.name: getattr(self, each.name) for each in fields(self) if each.name in RunSettings.model_fields}
        trackers: list[Any] = ["tensorboard"] if self.tensorboard else []
        trackers += [{"name": "wandb", "project": self.wandb}] if self.wandb else []
        return settings_from(**flags | {"fit": self.fit or None, "trackers": trackers or None})


def expand_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a dataclass by flags, one for every field of the dataclass."""
    signature = inspect.signature(command)
    groups = {name: hint for name, hint in get_type_hints(command).items() if _is_group(hint)}
    parameters = [
        expanded
        for name, parameter in signature.parameters.items()
        for expanded in (_fields_as_parameters(groups[name]) if name in groups else [parameter])
    ]

    @wraps(command)
    def expanded_command(**arguments: Any) -> None:
        made = {
            name: group(**{each.name: arguments.pop(each.name) for each in fields(group) if each.name in arguments})
            for name, group in groups.items()
        }
        command(**made, **arguments)

    expanded_command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    expanded_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded_command


def _is_group(hint: Any) -> TypeGuard[type[Any]]:
    return is_dataclass(hint)


def _fields_as_parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


# -- from flags to settings


def load_plugin_flags(plugins: Sequence[Any] | None) -> "tuple[Plugin, ...]":
    """Load the plug-ins that ``--plugin`` names."""
    from spcl.plugins import PluginError, load_plugins

    with naming_flags({PluginError: "--plugin"}):
        return load_plugins(plugins or ())


def parse_flag(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Parse the text of a flag; a user error names the flag."""
    with naming_flags({SpclError: flag}):
        return parse(text)


def settings_from(**flags: Any) -> dict[str, Any]:
    """Return the flags that were given as settings with absolute paths.

    >>> settings_from(seed=0, benchmark=None, fit=False)
    {'seed': 0, 'fit': False}
    """
    from spcl.runs.settings import absolute_paths

    return absolute_paths({name: flag for name, flag in flags.items() if flag is not None})


def parsed_assignments(assignments: list[str] | None) -> dict[str, Any]:
    """Return the settings given by ``--set``."""
    from spcl.runs.settings import parse_assignments

    with naming_flags({SpclError: "--set"}):
        return parse_assignments(assignments or [])


@contextmanager
def naming_flags(flags: Mapping[type[SpclError], str]) -> Iterator[None]:
    """Append the flag of the first matching kind to user errors, which the library words without flags.

    >>> with naming_flags({SpclError: "--out"}):
    ...     raise SpclError("the folder is in use; choose another folder")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: the folder is in use; choose another folder (--out)
    """
    try:
        yield
    except SpclError as error:
        flag = next((flag for kind, flag in flags.items() if isinstance(error, kind)), None)
        if flag is None:
            raise
        raise type(error)(f"{error} ({flag})") from error
