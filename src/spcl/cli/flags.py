"""The flags that several commands share, how they become settings, and flags in error messages."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeGuard, TypeVar, get_type_hints

import typer

from spcl.errors import SpclError
from spcl.plugins import Plugin, PluginError, load_plugins
from spcl.runs.settings import absolute_paths, load_settings_file, merge_settings, parse_assignments

__all__ = [
    "METHOD",
    "SCENARIO",
    "Assignments",
    "Configs",
    "DataDir",
    "Device",
    "Fit",
    "Plugins",
    "Preset",
    "Protocol",
    "RunFlags",
    "Seeds",
    "expand_flags",
    "load_plugin_flags",
    "naming_flags",
    "parse_flag",
    "parsed_assignments",
    "settings_from",
]

T = TypeVar("T")

Preset = Annotated[str | None, typer.Option(help="default, plus (more replay), paper or released (as published code).")]
Protocol = Annotated[Path | None, typer.Option(help="A file of label sets and timelines; see 'spcl protocol'.")]
Fit = Annotated[bool, typer.Option("--fit", help="Rescale a timeline that does not fit the data.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, ….")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the publishers' files (otherwise $SPCL_DATA or the cache).")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, e.g. method.sigma=50 or overlap=0.5; may be repeated.")
]
Configs = Annotated[str | None, typer.Option(help="Label sets and timelines, e.g. 0-8 or 0,3,5.")]
Seeds = Annotated[str | None, typer.Option(help="Seeds, e.g. 0-2.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="A Python file or module that adds methods, backbones, …; may be repeated."),
]

DIRECT = ("benchmark", "preset", "protocol", "device", "data_dir", "keep_model")
"""The flags that are settings of the same name."""

PLANNED = ("scenario", "config", "seed")
"""The settings, beside the method, of which a grid has several."""

METHOD = typer.Option(help="See 'spcl methods'.")
SCENARIO = typer.Option(help="task or class (incremental).")


@dataclass(frozen=True)
class RunFlags:
    """The flags of ``run``, ``grid`` and ``tune`` that are settings of all their runs."""

    benchmark: Annotated[
        str | None,
        typer.Option(help="ps-glyphs (the default), ps-emnist, …, or a folder of pictures or an .npz of your own."),
    ] = None
    preset: Preset = None
    protocol: Protocol = None
    fit: Fit = False
    device: Device = None
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
        file = load_settings_file(self.settings) if self.settings else {}
        plugins = merge_settings(file, {"plugins": self.plugin or []})["plugins"]
        loaded = [plugin.model_dump() for plugin in load_plugin_flags(plugins)]
        file = {name: value for name, value in file.items() if name != "plugins"}
        return [file, self._given() | ({"plugins": loaded} if loaded else {}), parsed_assignments(self.assignments)]

    def planned(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the layers, and apart from them what a file of settings says of what is planned run by run."""
        file, *others = self.layers()
        method = merge_settings(file).get("method", {})
        if not isinstance(method, Mapping):
            raise SpclError(f"settings: method is {method!r}; give its name, or its name and settings")
        planned: dict[str, str] = {name: str(file[name]) for name in PLANNED if name in file}
        planned |= {"method": str(method["name"])} if "name" in method else {}
        options = {name: value for name, value in method.items() if name != "name"}
        kept = {name: value for name, value in file.items() if name not in ("method", *planned)}
        return [kept | ({"method": options} if options else {}), *others], planned

    def _given(self) -> dict[str, Any]:
        """Return the flags that were given, apart from files of settings, plug-ins and ``--set``, as settings."""
        flags = {name: getattr(self, name) for name in DIRECT}
        trackers: list[Any] = ["tensorboard"] if self.tensorboard else []
        trackers += [{"name": "wandb", "project": self.wandb}] if self.wandb else []
        return settings_from(**flags, fit=self.fit or None, trackers=trackers or None)


def load_plugin_flags(plugins: Sequence[Any] | None) -> tuple[Plugin, ...]:
    """Load the plug-ins that ``--plugin`` names."""
    with naming_flags({PluginError: "--plugin"}):
        return load_plugins(plugins or ())


def expand_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of those of its parameters that are dataclasses as flags, in place of these."""
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


def parse_flag(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Parse the text of a flag; a user error names the flag."""
    with naming_flags({SpclError: flag}):
        return parse(text)


def settings_from(**flags: Any) -> dict[str, Any]:
    """Return the flags that were given as settings with absolute paths.

    >>> settings_from(seed=0, benchmark=None, fit=False)
    {'seed': 0, 'fit': False}
    """
    return absolute_paths({name: flag for name, flag in flags.items() if flag is not None})


def parsed_assignments(assignments: list[str] | None) -> dict[str, Any]:
    """Return the settings given by ``--set``."""
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
