"""Every setting with its meaning, type and default, as data and as a page in Markdown."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import wrap
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spcl.data.presets import PRESETS, Preset
from spcl.methods.registry import method_class
from spcl.registry import Named, Registry
from spcl.runs.settings import LISTED, NAMED, RunSettings

__all__ = ["Setting", "method_settings", "named_settings", "run_settings", "settings_page"]

COMMENT = "<!-- Made from the settings' descriptions by: spcl settings --format markdown > docs/settings.md -->"
TYPES: Mapping[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null"}
WIDTH = 120
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Setting:
    """A setting: its name, the values it takes, its default as text, and what it means.

    >>> print(Setting("optimizer.momentum", "number", "0", ""))
    momentum=0
    """

    name: str
    values: str
    default: str
    meaning: str

    def __str__(self) -> str:
        """Return the last part of the name with the default, if there is one."""
        name = self.name.rpartition(".")[2]
        return f"{name}={self.default}" if self.default else name


def run_settings() -> dict[str, list[Setting]]:
    """Return the settings of a run by section: what is trained, how, and how it is executed."""
    sections: dict[str, list[Setting]] = {}
    for base in reversed(RunSettings.__mro__):
        own = vars(base).get("__annotations__", {})
        found = [_setting(name, RunSettings.model_fields[name]) for name in own if name in RunSettings.model_fields]
        if found:
            sections[(base.__doc__ or "").partition("\n")[0].rstrip(".")] = found
    return sections


def method_settings(name: str) -> list[Setting]:
    """Return the settings of a method, named as on the command line.

    >>> [setting.name for setting in method_settings("er")][5:8]
    ['method.head_init', 'method.finished_weight', 'method.replay_loss']
    """
    method = method_class(name)
    fields = method.Settings.model_fields
    listed = [_setting(f"method.{key}", field) for key, field in fields.items()]
    for replay_loss, kind in method.replay_losses.items():
        options = {key: field for key, field in kind.Options.model_fields.items() if key not in fields}
        for each in (_setting(f"method.{key}", field) for key, field in options.items()):
            listed.append(replace(each, meaning=f"with replay_loss={replay_loss}: {each.meaning}"))
    return listed


def named_settings() -> dict[str, list[tuple[str, str, list[Setting]]]]:
    """Return for the settings that name things of a kind: the names there are, their meanings and their options."""
    settings: dict[Registry[Any], list[str]] = {}
    for setting, registry in {**NAMED, **LISTED}.items():
        settings.setdefault(registry, []).append(setting)
    return {
        ", ".join(names): [(name, _summary(registry, name), _options(names[0], registry, name)) for name in registry]
        for registry, names in settings.items()
    }


def settings_page() -> str:
    """Return the page of all settings in Markdown."""
    parts = ["# Settings", COMMENT, INTRODUCTION]
    for title, settings in run_settings().items():
        parts += [f"## {title}", _table(settings)]
    parts += ["## Defaults of the benchmarks", _presets()]
    parts.append("## Things by name")
    for setting, things in named_settings().items():
        parts.append(f"### {setting}")
        parts.append("\n".join(_line(*thing) for thing in things))
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """\
Every setting of a run, for `--set name=value`, for a settings file and for `spcl.runs.resolve_settings`. Defaults in
the section on network and batch [depend on the benchmark](#defaults-of-the-benchmarks). The settings of a method are
shown by `spcl settings METHOD` and on the page on [methods](methods.md). A setting that names a thing takes its name
alone, or its name and options: `optimizer=adamw`, `optimizer.weight_decay=0.01`, in a file `optimizer: {name: adamw,
weight_decay: 0.01}`."""


def _setting(name: str, field: FieldInfo) -> Setting:
    values = _values(field.annotation)
    bounds = [f"{BOUNDS[key]} {getattr(rule, key)}" for rule in field.metadata for key in BOUNDS if hasattr(rule, key)]
    default = "" if field.is_required() else _written(field.default)
    return Setting(name, " ".join([values, *bounds]), default, field.description or "")


def _values(annotation: Any) -> str:
    if annotation == Named:
        return "name, or name and options"
    if get_origin(annotation) is Annotated:
        return _values(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_values(part) for part in get_args(annotation))
    if get_origin(annotation) in (tuple, list):
        return f"list of ({_values(get_args(annotation)[0])})"
    if get_origin(annotation) is dict:
        return "names with values"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "text"
    return TYPES.get(annotation, "value")


def _written(default: Any) -> str:
    if isinstance(default, bool | NoneType):
        return {True: "true", False: "false", None: "null"}[default]
    if isinstance(default, tuple | list):
        return f"[{', '.join(map(str, default))}]"
    if isinstance(default, dict):
        return str(default.get("name", default))
    return str(default)


def _summary(registry: Registry[Any], name: str) -> str:
    return (inspect.getdoc(registry[name]) or "").partition("\n\n")[0].replace("\n", " ")


def _options(setting: str, registry: Registry[Any], name: str) -> list[Setting]:
    return [
        Setting(f"{setting}.{option}", "", "" if each.default is each.empty else _written(each.default), "")
        for option, each in registry.options(name).items()
    ]


def _table(settings: list[Setting]) -> str:
    rows = [f"| `{s.name}` | {s.values} | `{s.default}` | {s.meaning} |" for s in settings]
    return "\n".join(["| setting | values | default | meaning |", "|---|---|---|---|", *rows])


def _presets() -> str:
    rows = [
        [name, *(str(value) for value in presets["default"].model_dump().values())] for name, presets in PRESETS.items()
    ]
    lines = [" | ".join(f"`{cell}`" for cell in row) for row in [["benchmark", *Preset.model_fields], *rows]]
    lines.insert(1, " | ".join(["---"] * len(rows[0])))
    return "\n".join(f"| {line} |" for line in lines)


def _line(name: str, summary: str, options: list[Setting]) -> str:
    shown = ", ".join(f"`{option}`" for option in map(str, options))
    text = f"- `{name}`: {summary.replace('``', '`')}" + (f" Options: {shown}." if shown else "")
    return "\n".join(wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
